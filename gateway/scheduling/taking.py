"""From a request to slots on a node: where it may go, what is expected of it, and its lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway import errors
from gateway.fleet.lease import Lease
from gateway.fleet.node import Node
from gateway.request import Request
from gateway.scheduling.ask import Ask
from gateway.scheduling.dispatch import Dispatcher
from gateway.scheduling.eligible import Eligible, Plan
from gateway.scheduling.expectations import Expectations
from gateway.scheduling.forecast import Placement
from gateway.scheduling.mirror import Mirror
from gateway.scheduling.tiers import Tiers

UNMEASURED_PREFILL = 25.0
"""Prompt tokens/s to expect of a node that has not shown its speed: slow on purpose, since it
bounds a wait (one busy thread read 140 tokens/s of a 768 wide model when measured)."""

Granted = tuple[Lease, str]
"""A lease, and the public model name that it was given for."""


@dataclass(slots=True, eq=False)
class Taking:
    """Makes plans for requests, and leases of what the dispatcher has placed."""

    dispatcher: Dispatcher
    mirror: Mirror
    eligible: Eligible
    expectations: Expectations
    tiers: Tiers
    clock: Callable[[], float]

    def planned(self, request: Request, now: float, waiting: Ask | None = None) -> Plan:
        """Where it may go now; `waiting` is what stands in line for it. Raises: GatewayError.

        A plan that comes to nothing is to be given to `Tiers.dropped`.
        """
        plan = self.eligible.plan(request)
        if self.mirror.hybrid:
            ask = waiting or self.expectations.ask(request, plan)
            plan = self.tiers.routed(request, plan, ask, now, waiting=waiting)
        return plan

    def check_deadline(self, request: Request, ask: Ask, plan: Plan, now: float) -> None:
        """Whether its client may live to see an answer. Raises: GatewayError, if it can't.

        What is known of the prompt is an estimate: half of the reading that it predicts counts.
        """
        assert request.deadline is not None
        if not self.mirror.measured(ask):
            return
        least = min(
            (
                (ask.prompt - ask.cached.get(row.index, 0.0)) / row.prefill
                for pools in plan.groups
                for pool in pools
                for row in pool.rows
                if row.alive and row.index not in plan.closed
            ),
            default=0.0,
        )
        left = request.deadline - now
        if least / 2 > left:
            raise errors.queue_timeout(
                f"Reading this prompt takes about {least:.0f} s, and this client waits for "
                f"{max(0.0, left):.1f} s more.",
                max(1.0, least / 2 - left),
            )

    def granted(
        self, placement: Placement, request: Request, plan: Plan, now: float
    ) -> Granted | None:
        """The lease that a placement stands for.

        None: the node does not take it after all, and the board has been told.
        """
        node = self.mirror.node(placement.row)
        slots = placement.ask.slots
        if node.free(now) < slots if slots else not node.capacity(now):
            self.dispatcher.cancelled(placement, now)
            self.mirror.renew()
            return None
        lease = _taken(node, request, placement, now)
        lease.placement = placement
        lease.on_read = self._read
        lease.on_end = self._ended
        if lease.trial:
            self.mirror.changed(node)
        if request.prompt is not None or request.session is not None:
            self.expectations.placed(lease, request)
        if plan.route is not None:
            self.tiers.granted(plan, placement.row, lease)
        return lease, plan.able[placement.group][0]

    def forgo(self, lease: Lease, request: Request) -> None:
        """Nobody is there any more to use this lease."""
        self.expectations.dropped(lease, request, cost_nothing=True)
        if lease.charge is not None:
            lease.charge.settle(0.0, happened=False, now=self.clock())
        lease.give_back()

    def _read(self, lease: Lease) -> None:
        """What was predicted from its prompt's length is known now."""
        self.dispatcher.began(lease.placement, self.clock())

    def _ended(self, lease: Lease) -> None:
        """Its slots are free; where its row is no longer the node's, the fleet has to tell."""
        placement: Placement = lease.placement
        self.dispatcher.released(placement, self.clock())
        if self.dispatcher.board.by_name.get(placement.row.name) is not placement.row:
            lease.placement = None


def _taken(node: Node, request: Request, placement: Placement, now: float) -> Lease:
    """The lease, with what it should take: it bounds how long the node may be silent."""
    speed = node.speed
    tokens = max(request.prompt_tokens, placement.ask.prompt)
    prefill = tokens / (speed.prefill_tps or UNMEASURED_PREFILL)
    total = None
    if request.max_tokens is not None and (decode_tps := speed.decode_tps) is not None:
        total = prefill + request.max_tokens / decode_tps
    return node.take(
        placement.ask.slots,
        request.id,
        request.priority,
        now,
        stream=request.stream,
        expected_prefill=prefill,
        expected_total=total,
    )
