"""Grants leases: where a request may go, and the slots of the node that the dispatcher chose."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from gateway import errors
from gateway.fleet.health import PREFILL_GRACE_FACTOR
from gateway.fleet.node import Lease, NodeState
from gateway.lease import GrantedLease, LeaseRequest, Tried
from gateway.scheduling.budget import SpillReservation
from gateway.scheduling.candidates import CandidateFinder
from gateway.scheduling.decision_log import DecisionLog, Grant
from gateway.scheduling.demand_model import DemandModel
from gateway.scheduling.dispatcher import Dispatcher
from gateway.scheduling.fleet_sync import FleetSync, NodeCandidates
from gateway.scheduling.node_slots import Placement, QueuedRequest
from gateway.scheduling.tier_router import TierRouter

PESSIMISTIC_PREFILL_TPS = 25.0
"""Prompt tokens/s assumed of a node that has not shown its speed: slow on purpose, since it bounds
a wait (one busy thread read 140 tokens/s of a 768 wide model when measured)."""

NOTHING_OUT: Mapping[str, int] = {}
"""No node had no room; never written to."""


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """The scheduler's record of a lease, until its attempt has been accounted for.

    It is the lease's holder: the placement state follows the lease.
    """

    request: LeaseRequest
    placement: Placement | None
    """None: its row is no longer its node's, which counts the slots by itself."""
    reservation: SpillReservation | None
    """The share of the budget that it holds."""
    dispatcher: Dispatcher
    clock: Callable[[], float]
    grant: Grant
    """What is kept of it to explain it."""
    lease: Lease = field(init=False)

    def prefill_done(self) -> None:
        """The first content came: replace the predicted prefill by the real one."""
        assert self.placement is not None
        now = self.clock()
        self.grant.content_began(now)
        self.dispatcher.prefill_done(self.placement, now)

    def slots_freed(self) -> bool:
        """The slots are free. Returns whether the row is still the node's."""
        placement = self.placement
        assert placement is not None
        self.dispatcher.released(placement, self.clock())
        row = placement.row
        if self.dispatcher.placement_state.by_name.get(row.name) is row:
            return True
        self.placement = None
        return False


@dataclass(slots=True, eq=False)
class LeaseGranter:
    """Finds requests' candidates, turns the dispatcher's placements into leases, and keeps them."""

    dispatcher: Dispatcher
    fleet_sync: FleetSync
    candidate_finder: CandidateFinder
    demand_model: DemandModel
    tier_router: TierRouter
    decision_log: DecisionLog
    clock: Callable[[], float]
    records: dict[int, LeaseRecord] = field(default_factory=dict)
    """Those of leases whose attempts have not been accounted for, by lease id."""
    yielding: dict[int, LeaseRecord] = field(default_factory=dict)
    """Those of them that run and may be asked to yield, the oldest first."""
    _lease_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def keep_slots(self, request_ids: Collection[str]) -> None:
        """Running requests with these ids are not asked to yield any more."""
        for lease_id, record in list(self.yielding.items()):
            if record.request.id in request_ids:
                del self.yielding[lease_id]

    # Where a request may go.

    def begin(
        self, request: LeaseRequest, tried: Tried, received_at: float, now: float
    ) -> tuple[NodeCandidates, QueuedRequest]:
        """Where a request may go now, and the request in numbers. Raises: GatewayError.

        Candidates that are not used must be given to `TierRouter.cancel_reservation`.
        """
        candidates = self.candidate_finder.find(request, tried)
        queued = self.demand_model.build(
            request, candidates, received_at, overflows=tried.pool_overflows
        )
        if self.fleet_sync.has_gpu_tier:
            candidates = self.tier_router.narrow(request, tried, candidates, queued, now)
            queued.set_groups(candidates.groups)
        return candidates, queued

    def find_candidates(
        self, request: LeaseRequest, tried: Tried, waiting: QueuedRequest, now: float
    ) -> NodeCandidates:
        """Where a request that waits may go now; `waiting`: its entry in the queue.

        Raises and reserves as `begin`.
        """
        candidates = self.candidate_finder.find(request, tried)
        if self.fleet_sync.has_gpu_tier:
            candidates = self.tier_router.narrow(
                request, tried, candidates, waiting, now, waiting=waiting
            )
        return candidates

    def check_deadline(self, queued: QueuedRequest, candidates: NodeCandidates, now: float) -> None:
        """Raises: GatewayError, if the prompt can't be read before the client stops waiting.

        The prompt's size is an estimate: half of the predicted prefill counts. Candidates that are
        refused hold no reservation any more.
        """
        assert queued.deadline is not None
        if not self.fleet_sync.is_measured(queued):
            return
        prefill = min(
            (
                (queued.prompt_tokens - queued.cached.get(row.index, 0.0)) / row.prefill_tps
                for tiers in candidates.groups
                for candidate_set in tiers
                for row in candidate_set.rows
                if row.alive and row.index not in candidates.excluded
            ),
            default=0.0,
        )
        left = queued.deadline - now
        if prefill / 2 > left:
            self.tier_router.cancel_reservation(candidates)
            raise errors.queue_timeout(
                f"Reading this prompt takes about {prefill:.0f} s, and this client waits for "
                f"{max(0.0, left):.1f} s more.",
                max(1.0, prefill / 2 - left),
            )

    # Granting.

    def grant(
        self,
        placement: Placement,
        request: LeaseRequest,
        tried: Tried,
        candidates: NodeCandidates,
        now: float,
    ) -> GrantedLease | None:
        """The lease for a placement; None: the node does not take it after all.

        Then the placement is cancelled and the placement state up to date.
        """
        node, queued = self.fleet_sync.nodes[placement.row.index], placement.queued
        slots = queued.slots
        if node.free_slots(now) < slots if slots else not node.capacity(now):
            self.dispatcher.cancelled(placement, now)
            self.fleet_sync.sync()
            return None
        fallback: str | None = None
        reservation: SpillReservation | None = None
        if candidates.tier_route is not None:
            fallback, reservation = self.tier_router.placed(candidates, placement.row)
        stream = now >= node.plain_until and (
            request.wanted.stream
            or (
                request.wanted.may_assemble and tried.may_assemble and node.spec.kind == "llama.cpp"
            )
        )
        # The predicted prefill and total bound how long the node may be silent.
        speed, prefill_tps = node.speed, node.speed.prefill_tps
        tokens = max(request.size.prompt_tokens, queued.prompt_tokens)
        grace = prefill = tokens / (prefill_tps or PESSIMISTIC_PREFILL_TPS)
        wake = wake_limit = 0.0
        if node.sleep.seen:
            # It may have fallen asleep since the last probe, too.
            wake_limit = node.sleep.wake_limit(node.properties.size)
            if node.state is NodeState.SLEEPING:
                wake = node.sleep.seconds_left(node.properties.size, now)
                prefill += wake
        total: float | None = None
        if request.size.max_tokens is not None and (decode_tps := speed.decode_tps) is not None:
            total = prefill + request.size.max_tokens / decode_tps
        model = candidates.by_model[placement.group][0]
        lease_id = next(self._lease_ids)
        grant = self.decision_log.granted(
            placement,
            request,
            tried,
            model,
            node.spec.tier,
            fallback,
            self.dispatcher.placement_state.node_count,
            self._nodes_without_room(placement, now),
            lease_id,
        )
        record = LeaseRecord(request, placement, reservation, self.dispatcher, self.clock, grant)
        lease = node.take_lease(
            slots,
            now,
            stream=stream,
            expected_prefill=prefill,
            expected_total=total,
            wake=wake,
            holder=record,
        )
        record.lease = lease
        self.records[lease_id] = record
        if request.caller.yields:
            self.yielding[lease_id] = record
        if lease.wakes:
            # As if the prompt took longer to read: later requests wait for that too.
            self.dispatcher.prefill_done(placement, placement.prefill_ends + wake)
        if lease.trial or lease.wakes:
            self.fleet_sync.node_changed(node)
        if node.probe_history.load_unread:
            self.fleet_sync.fleet.read_load(node)
        if request.size.prompt_key is not None or request.caller.session is not None:
            self.demand_model.placed(placement, request)
        return GrantedLease(
            lease_id,
            node.info,
            model,
            node.served_name(model) or model,
            slots,
            stream,
            PREFILL_GRACE_FACTOR * grace,
            None if prefill_tps is None else placement.prefill_ends - placement.placed_at,
            fallback,
            wake_limit,
            round(tokens),
        )

    def _nodes_without_room(self, placement: Placement, now: float) -> Mapping[str, int]:
        """Other nodes that serve the model of a placement and had no room for it, by the reason."""
        comparison, queued = placement.comparison, placement.queued
        tiers = queued.groups[placement.group]
        if comparison is None or (
            comparison.with_room == comparison.candidates and len(tiers) == 1
        ):
            return NOTHING_OUT  # Nearly always.
        found: Counter[str] = Counter()
        for candidates in tiers:
            if queued.excluded or queued.failed:
                rows = [row for row in candidates.rows if row.index not in queued.excluded]
                found["excluded"] += len(candidates.rows) - len(rows)
                count = len([row for row in rows if row.index not in queued.failed])
                found["failed"] += len(rows) - count
            else:
                count = len(candidates.rows)
            out = self.fleet_sync.out_of_service(candidates, now)
            found.update(out)
            if placement.row.index in candidates.row_indexes:
                found["full"] += max(0, count - comparison.with_room - sum(out.values()))
                break
            found["full"] += max(0, count - sum(out.values()))
        return {reason: number for reason, number in found.items() if number}

    def release_unused(self, lease_id: int) -> None:
        """Release a lease whose request was cancelled before it could be sent."""
        record = self.records.pop(lease_id)
        record.grant.ended("cancelled", 0, self.clock())
        self.yielding.pop(lease_id, None)
        self.demand_model.abandoned(record.placement, refund=True)
        if record.reservation is not None:
            record.reservation.settle(0.0, happened=False, now=self.clock())
        record.lease.release()
