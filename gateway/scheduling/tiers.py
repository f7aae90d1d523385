"""Which pools of a plan are open to a request: the rules of `hybrid.py`, asked about the board."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gateway.scheduling.budget import most
from gateway.scheduling.hybrid import Outlook, Tier
from gateway.scheduling.room import room_for

if TYPE_CHECKING:
    from gateway.config.settings import Settings
    from gateway.fleet.lease import Lease
    from gateway.request import Request
    from gateway.scheduling.ask import Ask
    from gateway.scheduling.board import Pool, Row
    from gateway.scheduling.dispatch import Dispatcher
    from gateway.scheduling.eligible import Plan
    from gateway.scheduling.hybrid import Hybrid
    from gateway.scheduling.mirror import Groups, Mirror

MOST_KEPT = 1000


@dataclass(slots=True, eq=False)
class Tiers:
    """Narrows plans to the tiers that are open; for fleets with nodes of tier `gpu`."""

    hybrid: Hybrid
    mirror: Mirror
    dispatcher: Dispatcher
    settings: Settings
    _open: dict[tuple[Groups, tuple[Tier, ...]], Groups] = field(default_factory=dict)
    """Pools that are open, made once: the dispatcher knows them by identity."""

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force; the budget stays."""
        self.settings = settings
        self.hybrid.configure(settings.hybrid)

    def routed(
        self, request: Request, plan: Plan, ask: Ask, now: float, *, waiting: Ask | None = None
    ) -> Plan:
        """The plan with the tiers that are open now; one that spills over holds a reservation.

        `waiting` is what stands in line for the request, if anything does. A plan that comes to
        nothing is to be given to `dropped`.
        """
        pools = next((pools for pools in plan.groups if len(pools) > 1), None)
        if pools is None or not ask.slots:
            return plan
        gpu, cpu = (self._outlook(pool, ask, now, waiting) for pool in pools)
        if gpu is None and any(row.name in request.refused for row in pools[0].rows):
            gpu = Outlook(up=False, free=False, failed=True)
        bound = self._most(request, pools[0], ask, now) if gpu is not None and gpu.free else 0.0
        route = self.hybrid.route(request.priority, gpu, cpu, now, bound)
        # What it waits for counts from its arrival: a retry does not wait again.
        tiers, open_at = route.tiers, request.received + route.hold
        if now < open_at:
            tiers = tiers[:1]
        else:
            open_at = math.inf
        return replace(plan, groups=self._groups(plan.groups, tiers), route=route, open_at=open_at)

    def dropped(self, plan: Plan) -> None:
        """Nothing came of this plan."""
        if plan.route is not None and plan.route.reservation is not None:
            plan.route.reservation.cancel()

    def granted(self, plan: Plan, row: Row, lease: Lease) -> None:
        """The request got this lease by its plan: what it reserved, and where it should be."""
        route = plan.route
        if route is None:
            return
        lease.fallback = route.fallback("gpu" if row.gpu else "cpu")
        if row.gpu:
            lease.charge = route.reservation
        else:
            self.dropped(plan)

    def _groups(self, groups: Groups, tiers: tuple[Tier, ...]) -> Groups:
        """The open pools of each name; a name that one tier alone serves is served there."""
        key = groups, tiers
        found = self._open.get(key)
        if found is None:
            if len(self._open) >= MOST_KEPT:
                self._open.clear()
            order = ["gpu", "cpu"]
            found = self._open[key] = tuple(
                tuple(pools[order.index(tier)] for tier in tiers) if len(pools) > 1 else pools
                for pools in groups
            )
        return found

    def _outlook(self, pool: Pool, ask: Ask, now: float, waiting: Ask | None) -> Outlook | None:
        """One tier as this request sees it; None: it has nothing that could ever serve it."""
        rows = [row for row in pool.rows if row.index not in ask.closed]
        if not rows:
            return None
        alive = [row for row in rows if row.alive and row.index not in ask.failed]
        failed = any(row.index in ask.failed for row in rows)
        if not alive:
            return Outlook(up=False, free=False, failed=failed)
        alone = replace(ask, groups=((pool,),))
        room = room_for(self.dispatcher.board, alone)
        free = room is not None and any(row.index not in ask.failed for row in room.rows)
        in_line = waiting is not None and waiting.groups[0][0] is pool
        wait = 0.0
        if not free:
            wait = self.dispatcher.predicted_wait(waiting if in_line and waiting else alone, now)
        return Outlook(
            up=True,
            free=free,
            wait=wait,
            seconds=min(_seconds(row, ask) for row in alive),
            paused=all(self.mirror.node(row).paused(now) for row in alive),
            failed=failed,
        )

    def _most(self, request: Request, pool: Pool, ask: Ask, now: float) -> float:
        """What it can cost at most on any of these nodes that has room."""
        size = max(map(len, request.bodies.values()), default=0)
        costs = [0.0]
        for row in pool.rows:
            if row.free < 1 or row.index in ask.closed or row.index in ask.failed:
                continue
            node = self.mirror.node(row)
            seconds = node.spec.timeouts.total or self.settings.timeouts.total
            if request.deadline is not None:
                seconds = min(seconds, max(0.0, request.deadline - now))
            costs.append(
                most(
                    node.spec,
                    node.slots_total,
                    prompt_bytes=size,
                    max_tokens=request.max_tokens if request.writes else 0,
                    context=node.context,
                    slots=max(request.slots, ask.slots),
                    seconds=seconds,
                )
            )
        return max(costs)


def _seconds(row: Row, ask: Ask) -> float:
    """What the answer takes there, beside what runs."""
    token = row.token_base + row.token_step * min(row.busy, max(0, row.total - 1))
    return ask.prompt / row.prefill + ask.completion * token
