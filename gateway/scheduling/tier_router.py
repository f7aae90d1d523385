"""Which pools of a plan are open to a request: the rules of `hybrid.py`, asked about the board."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from gateway.config.settings import Settings
from gateway.fleet.node import Lease
from gateway.request import Request
from gateway.scheduling.budget import most_cost
from gateway.scheduling.candidates import NodeCandidates
from gateway.scheduling.dispatcher import Dispatcher
from gateway.scheduling.fleet_sync import FleetSync, ModelGroups
from gateway.scheduling.placement_state import CandidateSet, NodeSlots, QueuedRequest
from gateway.scheduling.selection import available_rows
from gateway.scheduling.tier_policy import Tier, TierPolicy, TierStatus

MOST_CACHED_GROUPS = 1000


@dataclass(slots=True, eq=False)
class TierRouter:
    """Narrows plans to the tiers that are open; for fleets with nodes of tier `gpu`."""

    tier_policy: TierPolicy
    fleet_sync: FleetSync
    dispatcher: Dispatcher
    settings: Settings
    _open: dict[tuple[ModelGroups, tuple[Tier, ...]], ModelGroups] = field(default_factory=dict)
    """Pools that are open, made once: the dispatcher knows them by identity."""

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force; the budget stays."""
        self.settings = settings
        self.tier_policy.configure(settings.hybrid)

    def narrow(
        self,
        request: Request,
        candidates: NodeCandidates,
        queued: QueuedRequest,
        now: float,
        *,
        waiting: QueuedRequest | None = None,
    ) -> NodeCandidates:
        """The plan with the tiers that are open now; one that spills over holds a reservation.

        `waiting` is what stands in line for the request, if anything does. A plan that comes to
        nothing is to be given to `dropped`.
        """
        pools = next((pools for pools in candidates.groups if len(pools) > 1), None)
        if pools is None or not queued.slots:
            return candidates
        gpu, cpu = (self._outlook(pool, queued, now, waiting) for pool in pools)
        if gpu is None and any(row.name in request.excluded_nodes for row in pools[0].rows):
            gpu = TierStatus(alive=False, has_room=False, failed=True)
        bound = (
            self._most(request, pools[0], queued, now) if gpu is not None and gpu.has_room else 0.0
        )
        route = self.tier_policy.route(request.priority, gpu, cpu, now, bound)
        # What it waits for counts from its arrival: a retry does not wait again.
        tiers, open_at = route.tiers, request.received_at + route.fallback_delay
        if now < open_at:
            tiers = tiers[:1]
        else:
            open_at = math.inf
        return replace(
            candidates,
            groups=self._groups(candidates.groups, tiers),
            tier_route=route,
            fallback_at=open_at,
        )

    def cancel_reservation(self, candidates: NodeCandidates) -> None:
        """Nothing came of this plan."""
        if candidates.tier_route is not None and candidates.tier_route.reservation is not None:
            candidates.tier_route.reservation.cancel()

    def lease_granted(self, candidates: NodeCandidates, row: NodeSlots, lease: Lease) -> None:
        """The request got this lease by its plan: what it reserved, and where it should be."""
        route = candidates.tier_route
        if route is None:
            return
        lease.fallback = route.fallback("gpu" if row.gpu else "cpu")
        if row.gpu:
            lease.reservation = route.reservation
        else:
            self.cancel_reservation(candidates)

    def _groups(self, groups: ModelGroups, tiers: tuple[Tier, ...]) -> ModelGroups:
        """The open pools of each name; a name that one tier alone serves is served there."""
        key = groups, tiers
        found = self._open.get(key)
        if found is None:
            if len(self._open) >= MOST_CACHED_GROUPS:
                self._open.clear()
            order = ["gpu", "cpu"]
            found = self._open[key] = tuple(
                tuple(pools[order.index(tier)] for tier in tiers) if len(pools) > 1 else pools
                for pools in groups
            )
        return found

    def _outlook(
        self, pool: CandidateSet, ask: QueuedRequest, now: float, waiting: QueuedRequest | None
    ) -> TierStatus | None:
        """One tier as this request sees it; None: it has nothing that could ever serve it."""
        rows = [row for row in pool.rows if row.index not in ask.excluded]
        if not rows:
            return None
        alive = [row for row in rows if row.alive and row.index not in ask.failed]
        failed = any(row.index in ask.failed for row in rows)
        if not alive:
            return TierStatus(alive=False, has_room=False, failed=failed)
        alone = replace(ask, groups=((pool,),))
        room = available_rows(self.dispatcher.placement_state, alone)
        free = room is not None and any(row.index not in ask.failed for row in room.rows)
        in_line = waiting is not None and waiting.groups[0][0] is pool
        wait = 0.0
        if not free:
            wait = self.dispatcher.predicted_wait(waiting if in_line and waiting else alone, now)
        return TierStatus(
            alive=True,
            has_room=free,
            wait_seconds=wait,
            service_seconds=min(_seconds(row, ask) for row in alive),
            paused=all(self.fleet_sync.node(row).paused(now) for row in alive),
            failed=failed,
        )

    def _most(self, request: Request, pool: CandidateSet, ask: QueuedRequest, now: float) -> float:
        """What it can cost at most on any of these nodes that has room."""
        size = max(map(len, request.bodies.values()), default=0)
        costs = [0.0]
        for row in pool.rows:
            if row.free < 1 or row.index in ask.excluded or row.index in ask.failed:
                continue
            node = self.fleet_sync.node(row)
            seconds = node.spec.timeouts.total or self.settings.timeouts.total
            if request.deadline is not None:
                seconds = min(seconds, max(0.0, request.deadline - now))
            costs.append(
                most_cost(
                    node.spec,
                    node.slots_total,
                    prompt_bytes=size,
                    max_tokens=request.max_tokens if request.generates else 0,
                    context=node.context,
                    slots=max(request.slots, ask.slots),
                    seconds=seconds,
                )
            )
        return max(costs)


def _seconds(row: NodeSlots, ask: QueuedRequest) -> float:
    """What the answer takes there, beside what runs."""
    token = row.token_base + row.token_step * min(row.busy, max(0, row.total - 1))
    return ask.prompt_tokens / row.prefill_tps + ask.completion_tokens * token
