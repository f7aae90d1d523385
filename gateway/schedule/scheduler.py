"""The scheduler: gives requests leases on nodes' slots, at once or after a wait.

No node gets more requests than it has slots; the rest wait here. The dispatcher decides which goes
where and in which order; the scheduler adds the clock and the timers, the limits on waiting, and
the leases.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice

import structlog

from gateway import errors
from gateway.config.keys import NodeLabels
from gateway.config.settings import Settings
from gateway.lease import (
    NOTHING_TRIED,
    BatchRoom,
    ExpectedReading,
    GrantedLease,
    LeaseRequest,
    QueuePosition,
    Tried,
)
from gateway.nodes.fleet import Fleet
from gateway.nodes.health import PREFILL_GRACE_FACTOR
from gateway.nodes.node import Lease, LeasePhase, Node
from gateway.nodes.prices import dearest_token
from gateway.nodes.prompt_cache import FleetPromptCache
from gateway.schedule.admission import (
    Admission,
    CompletionRate,
    Waiter,
    Waiters,
    combine_waits,
    queue_room,
)
from gateway.schedule.candidates import (
    FleetSync,
    NodeCandidates,
    TierRouter,
    nodes_of,
)
from gateway.schedule.core import batch_slots
from gateway.schedule.core.demand_model import DemandModel, has_long_prompt
from gateway.schedule.core.dispatcher import Dispatcher, dispatch_rules
from gateway.schedule.core.requests import PlacementState, QueuedRequest, TierSets, alive_rows
from gateway.schedule.core.tiers import SpillReservation, TierPolicy
from gateway.schedule.decision_log import DecisionLog, Grant, PredictionAccuracy, Queueing
from gateway.terms import Endpoint, Priority

TICK = 0.5  # seconds between two looks at every waiting request, and at the whole fleet
# Placements of one turn of the event loop where slots share pools: each is some milliseconds' work
# with thousands of nodes and waiting requests.
MOST_PLACED_BY_TOKENS = 8
LEAST_TIMER_SECONDS = 0.001
# Placements that a request may lose because its node does not take it after all. Each time the
# placement state is brought up to date, so one is a lot.
MOST_STALE_PLACEMENTS = 4
# Prompt tokens/s assumed of a node that has not shown its speed: slow on purpose, since it bounds a
# wait (one busy thread read 140 tokens/s of a 768 wide model when measured).
PESSIMISTIC_PREFILL_TPS = 25.0


class LeaseRecord(Lease):
    """A lease and what the scheduler keeps of it, until its attempt has been accounted for.

    The row of its node follows the lease.
    """

    __slots__ = ("adopted", "grant", "placement", "request", "reservation")

    def __init__(
        self,
        node: Node,
        stream: bool,  # noqa: FBT001 - each call costs
        request: LeaseRequest,
        placement: QueuedRequest,
        grant: Grant,
        reservation: SpillReservation | None = None,
        adopted: bool = False,  # noqa: FBT001, FBT002 - as above
    ) -> None:
        """`grant`: what is kept of the lease to explain it."""
        Lease.__init__(self, node, placement.slots, placement.placed_at, stream)
        self.request, self.placement, self.grant = request, placement, grant
        self.reservation = reservation
        """The share of the budget for the GPU tier that it holds."""
        self.adopted = adopted
        """Whether another scheduler has granted it, so that its beginning was not seen here."""

    def prefill_ended(self, now: float) -> None:
        """Replace the predicted prefill by the real one."""
        self.grant.content_began(now)
        self.placement.row.prefill_done(self.placement, now)

    def slots_freed(self, now: float) -> bool:
        """The slots are free. Returns whether the row is still the node's."""
        row = self.placement.row
        row.end(self.placement, now)
        return row.is_current


def yield_candidate(lease_id: int, record: LeaseRecord, now: float) -> batch_slots.YieldCandidate:
    """A running request in numbers."""
    placement, request, row = record.placement, record.request, record.placement.row
    decode_seconds, decoded = None, 0.0
    if record.phase is LeasePhase.DECODE:
        decode_seconds = now - placement.prefill_ends
        decoded = decode_seconds / row.per_output_token if row.per_output_token else 0.0
    return batch_slots.YieldCandidate(
        lease_id,
        row.index,
        record.slots,
        request.caller.priority,
        decode_seconds=decode_seconds,
        seconds_left=placement.seconds_left(now),
        repetition_seconds=(placement.prompt_tokens + decoded) / row.prefill_tps,
        times_yielded=request.caller.times_yielded,
    )


class Scheduler:
    """Gives out leases on the slots of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        settings: Settings,
        clock: Callable[[], float],
        rng: random.Random,
        *,
        learn_pending: Callable[[], None] = lambda: None,
        yield_slot: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`learn_pending`: learns at once from all answers that have ended.

        `yield_slot` asks the request with this id to give up its slot and wait again; whether it
        does.
        """
        _warn_of_policy(settings)
        self.fleet, self.settings, self.clock, self.rng = fleet, settings, clock, rng
        self.learn_pending, self.yield_slot = learn_pending, yield_slot
        state = PlacementState()
        self.dispatcher = Dispatcher(state, dispatch_rules(settings), rng, keeps_comparisons=True)
        self.prompt_cache = FleetPromptCache()
        self.demand_model = DemandModel(self.dispatcher, self.prompt_cache)
        self.fleet_sync = FleetSync(fleet, state, self.prompt_cache, clock)
        self.tier_policy = TierPolicy(settings.hybrid)
        self.tier_router = TierRouter(self.tier_policy, self.fleet_sync, self.dispatcher, settings)
        self.admission, self.waiters = Admission(settings), Waiters()
        self.completion_rate = CompletionRate()
        self.decision_log, self.accuracy = DecisionLog(clock), PredictionAccuracy()
        self.closing = False
        self.records: dict[int, LeaseRecord] = {}
        """Leases whose attempts have not been accounted for, by lease id."""
        self.yielding: dict[int, LeaseRecord] = {}
        """Those of them that run and may be asked to yield, the oldest first; each at most once."""
        self._yields_in_vain: dict[tuple[tuple[TierSets, ...], Priority, int], float] = {}
        """When none was found for a request of such candidates, class and slots."""
        self._lease_ids: Iterator[int] = itertools.count(1)
        self._check_all_at = 0.0
        """When every waiting request is checked; until then each that falls due."""
        self._positions: dict[str, QueuePosition] | None = None
        """Queue positions by request id, if somebody has asked for one since that check."""
        self._rows_version = 0
        """That of `fleet_sync` for which the waiting requests' candidates were found."""
        self._unplaced: Waiter | None = None
        """The last request for which `lease_now` found no room, and that `rows_version`."""
        self._unplaced_version = 0
        self._on_model_asked_for: Callable[..., None] = lambda _, **__: None
        self._match_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.fleet_sync.sync()
        fleet.subscribe(on_capacity=self._match_soon, on_change=self._node_changed)

    def watch_models(self, asked_for: Callable[..., None]) -> None:
        """Call this with the public model of each request, and with that of each that `waits`."""
        self._on_model_asked_for = asked_for

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force."""
        self.settings = settings
        _warn_of_policy(settings)
        self.admission.configure(settings)
        self.dispatcher.set_rules(dispatch_rules(settings))
        self.tier_router.configure(settings)
        self.capacity_changed()

    # Leases.

    def lease_now(
        self, request: LeaseRequest, tried: Tried = NOTHING_TRIED, age: float = 0.0
    ) -> GrantedLease | None:
        """As `LeaseService.lease_now`. Raises: GatewayError."""
        if self.closing:
            raise errors.shutting_down()
        if self.demand_model.learning_pending and has_long_prompt(request):
            self.learn_pending()
        now = self.clock()
        if self.fleet.routers and request.caller.priority is not Priority.BATCH:
            self._on_model_asked_for(request.wanted.model_names[0], waits=False)
        if self.fleet_sync.has_gpu_tier and request.size.slots and not tried.failed_nodes:
            self.tier_policy.arrived(request.caller.priority, now)
        try:
            asker = self._find(request, tried, age, now)
            if asker.queued.deadline is not None:
                self._check_deadline(asker, now)
        except errors.GatewayError as error:
            self.decision_log.refused(request, error, now - age, now)
            raise
        dispatcher = self.dispatcher
        for earlier in range(MOST_STALE_PLACEMENTS):
            if dispatcher.waiting and dispatcher.placement_state.slots_freed:
                self.match()  # Waiting requests go first.
            if dispatcher.place(asker.queued, now) is None:
                if not earlier and asker.candidates.tier_route is None:
                    self._unplaced, self._unplaced_version = asker, self.fleet_sync.rows_version
                break
            if (granted := self._grant(asker, now)) is not None:
                return granted
        self.tier_router.cancel_reservation(asker.candidates)
        return None

    async def wait_for_lease(
        self,
        request: LeaseRequest,
        tried: Tried = NOTHING_TRIED,
        age: float = 0.0,
        *,
        response_started: bool = False,
    ) -> GrantedLease:
        """As `LeaseService.wait_for_lease`: while all nodes that could serve it are busy or down.

        `response_started`: no other request should displace it in the queue. Raises: GatewayError,
        when it can't be served, the queue has no room, or it has waited too long.
        """
        if self.closing:
            raise errors.shutting_down()
        now = self.clock()
        waiter, self._unplaced = self._unplaced, None
        if (
            waiter is None
            or waiter.request is not request
            or waiter.tried is not tried
            or self._unplaced_version != self.fleet_sync.rows_version
        ):
            waiter = self._find(request, tried, age, now)
        displaced = self._admit(waiter, now)
        if displaced is not None and not tried.was_sent:
            why = "Others need a place in the queue, and this client has most of them. "
            wait = self.completion_rate.retry_after(len(self.waiters), now)
            self._refuse(displaced, errors.queue_full(f"{why}Try again later.", wait))
        if response_started:
            waiter.note_response_started()
        granted = waiter.granted
        self._enqueue(waiter)
        self._match_soon()
        self._ask_to_yield(waiter, now)
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.release_unused(granted.result().id)
            raise
        finally:
            if waiter.queued in self.waiters:
                self._remove(waiter)
                self._match_soon()

    def dearest_token(self, request: LeaseRequest) -> float:
        """The most that a token of the request is likely to cost on any node that serves it."""
        names, nodes_for = request.wanted.model_names, self.fleet.model_index.nodes_for
        return max((dearest_token(node) for name in names for node in nodes_for(name)), default=0.0)

    def keep_in_queue(self, request_id: str) -> None:
        """The request's client has the head of a response: displace others before it."""
        if (waiter := self.waiters.by_request_id(request_id)) is not None:
            waiter.note_response_started()

    # In a cluster.

    def grant_while(self, may_grant: Callable[[], bool], first_lease: int | None = None) -> None:
        """Grant leases only while `may_grant` says so, numbered from `first_lease` on.

        Else all requests wait, as if no node had a free slot.
        """
        self.dispatcher.place_while(may_grant)
        if first_lease is not None:
            self._lease_ids = itertools.count(first_lease)
        self._match_soon()

    def adopt(
        self, granted: GrantedLease, node: Node, request: LeaseRequest, age: float
    ) -> LeaseRecord | None:
        """Hold a lease that another scheduler has granted `age` seconds ago, and that runs.

        None: the node has no slots by itself. What it does from now on teaches little about its
        node, since the beginning was not seen.
        """
        row, now = self.fleet_sync.row(node), self.clock()
        if row is None:
            return None
        placement = self.demand_model.adopted(request, granted, now - age)
        row.start(placement, now)
        placement.placed_earlier(now - age)
        grant = self.decision_log.granted(
            placement, request, NOTHING_TRIED, granted.id, granted.model, node.info.tier, node.name
        )
        lease = LeaseRecord(node, granted.stream, request, placement, grant, None, True)
        lease.expect(granted.reading.grace / PREFILL_GRACE_FACTOR, None)
        node.occupancy.take_over(granted.slots, now)
        node.take(lease, now)
        self.records[granted.id] = lease
        if request.caller.yields:
            self.yielding[granted.id] = lease
        self.demand_model.placed(placement, request)
        self.fleet_sync.node_changed(node)
        return lease

    # The queue, as others see it.

    def queue_positions(self) -> list[QueuePosition]:
        """The waiting requests, in the order in which they are likely to go."""
        now = self.clock()
        positions = []
        for position, (waiter, wait) in enumerate(self.predicted_waits(), 1):
            id_, known = waiter.request.id, wait if math.isfinite(wait) else None
            positions.append(QueuePosition(id_, position, now - waiter.queued_at, known))
        return positions

    def predicted_waits(self, most: int | None = None) -> Iterator[tuple[Waiter, float]]:
        """The first `most` waiting requests, each with the seconds until it is expected to start.

        Infinity: unknown.
        """
        for queued, wait in islice(self.dispatcher.predicted_waits(self.clock()), most):
            if (waiter := self.waiters.get(queued)) is not None:
                loads = self.fleet.routers and math.isinf(wait)
                yield waiter, load_wait(waiter.candidates, self.clock()) if loads else wait

    def queue_position(self, request_id: str) -> QueuePosition | None:
        """Where a request stands in the queue, up to `TICK` ago; None: it does not wait."""
        if self._positions is None:
            self._positions = {one.request_id: one for one in self.queue_positions()}
        return self._positions.get(request_id)

    def depths(self) -> dict[Priority, int]:
        """How many requests of each class wait."""
        return self.dispatcher.depths()

    def batch_room(
        self,
        model_names: Sequence[str],
        seconds: float,
        *,
        endpoint: Endpoint = "chat",
        node_labels: NodeLabels = (),
    ) -> BatchRoom:
        """The room for class `batch`, as in `BatchRoomService`."""
        self.dispatcher.placement_state.spread_batch_reserve()
        rows = batch_slots.rows_for_batch(self.fleet_sync, model_names, endpoint, node_labels)
        waiting, ahead = batch_slots.slots_waited_for(self.waiters, model_names, node_labels)
        return batch_slots.room_for_batch(rows, seconds, self.clock(), waiting=waiting, ahead=ahead)

    def raise_class(self, request_ids: Collection[str], priority: Priority) -> set[str]:
        """Let requests wait in a higher class, as in `BatchRoomService`."""
        found = [self.waiters.by_request_id(id_) for id_ in request_ids]
        waiting = [one for one in found if one is not None and not one.granted.done()]
        for waiter in waiting:
            if waiter.request.caller.priority > priority:
                self._remove(waiter)
                waiter.raise_to(priority)
                self._update_candidates(waiter, self.clock(), requeue=True)
                self._match_soon()
        for lease_id, record in list(self.yielding.items()):
            if record.request.id in request_ids:
                del self.yielding[lease_id]  # It is not asked to yield any more.
        return {waiter.request.id for waiter in waiting if not waiter.granted.done()}

    def has_room(self) -> bool:
        """Whether one more request could be taken: at once, or into the queue."""
        count, fair_share = len(self.waiters), self.waiters.fair_share
        # In a full queue a new caller gets a place of one that has several.
        has_place = count < self.settings.queue.max or fair_share.fits("", 1, count)
        return has_place and not self.closing

    def retry_after(self) -> float:
        """Seconds until the next request is expected to end."""
        return self.completion_rate.retry_after(1, self.clock())

    # Events.

    def _node_changed(self, node: Node | None) -> None:
        """Something about this node has changed, or which nodes there are: slots may be free."""
        self.fleet_sync.node_changed(node)
        if self.dispatcher.placement_state.slots_freed:
            self._match_soon()

    def capacity_changed(self) -> None:
        """Bring all nodes up to date, and give out free slots soon."""
        self.fleet_sync.sync()
        self._match_soon()

    def refuse(self, request_id: str, error: errors.GatewayError) -> bool:
        """End the wait of one request with this error. Returns whether it was waiting."""
        if (waiter := self.waiters.by_request_id(request_id)) is None:
            return False
        self._refuse(waiter, error)
        self._match_soon()  # For those that it may have held up.
        return True

    def shed(self, request_id: str, error: errors.GatewayError) -> bool:
        """Refuse the request if it may be shed (`Waiter.can_shed`). Returns whether it was."""
        waiter = self.waiters.by_request_id(request_id)
        return waiter is not None and waiter.can_shed and self.refuse(request_id, error)

    def refuse_all(self, error: Callable[[], errors.GatewayError]) -> None:
        """End every wait, each with an error of its own."""
        for waiter in list(self.waiters):
            self._refuse(waiter, error())

    def close(self) -> None:
        """End every wait and stop the timers."""
        self.refuse_all(errors.shutting_down)
        for handle in (self._match_handle, self._timer):
            if handle is not None:
                handle.cancel()
        self._match_handle = self._timer = None

    # Where a request may go.

    def _find(self, request: LeaseRequest, tried: Tried, age: float, now: float) -> Waiter:
        """Where a request may go now, and the request in numbers. Raises: GatewayError.

        Candidates that are not used must be given to `TierRouter.cancel_reservation`.
        """
        candidates = self.fleet_sync.find(request, tried)
        queued = self.demand_model.build(
            request, candidates, now - age, overflows=tried.pool_overflows
        )
        if self.fleet_sync.has_gpu_tier:
            candidates = self.tier_router.narrow(request, tried, candidates, queued, now)
            queued.set_groups(candidates.groups)
        return Waiter(request, tried, candidates, queued, now)

    def _check_deadline(self, asker: Waiter, now: float) -> None:
        """Raises: GatewayError, if the prompt can't be read before the client stops waiting.

        The prompt's size is an estimate: half of the predicted prefill counts. Candidates that are
        refused hold no reservation any more.
        """
        queued, candidates = asker.queued, asker.candidates
        assert queued.deadline is not None
        if not self.fleet_sync.is_measured(queued):
            return
        prefill = min(
            (
                (queued.prompt_tokens - queued.cached.get(row.index, 0.0)) / row.prefill_tps
                for row in alive_rows(candidates.groups, candidates.excluded)
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

    # Admission to the queue.

    def _admit(self, waiter: Waiter, now: float) -> Waiter | None:
        """Let it wait; returns who gives up its place to it. Raises: GatewayError."""
        request, queued, candidates = waiter.request, waiter.queued, waiter.candidates
        waiting, displaced = queue_room(request, self.waiters, self.admission)
        ahead = predicted = None
        if request.size.slots and candidates.any_alive():
            measured = self.fleet_sync.is_measured(queued)
            by_work = self.dispatcher.predicted_wait(queued, now) if measured else None
            ahead, slots = self.dispatcher.count_ahead(queued), self.fleet_sync.slots(queued)
            if not slots and self.fleet.routers:
                by_work = load_wait(candidates, now)
            predicted = combine_waits(self.completion_rate, slots, ahead, by_work, now)
        retry_after = self.completion_rate.retry_after(1, now)
        try:
            expires_at = self.admission.admit(waiter, waiting, predicted, retry_after, now)
        except errors.GatewayError:
            self.tier_router.cancel_reservation(candidates)
            raise
        waiter.wait(expires_at, asyncio.get_running_loop().create_future(), now)
        self.decision_log.queued(
            Queueing(
                queued.id, now, queued.received_at, queued.priority, ahead, predicted,
                len(self.waiters), expires_at,
            )
        )  # fmt: skip
        return displaced

    def _refuse(self, waiter: Waiter, error: errors.GatewayError) -> None:
        self._remove(waiter)
        if not waiter.granted.done():
            waiter.granted.set_exception(error)

    def _remove(self, waiter: Waiter) -> None:
        """Take it out of the queue and cancel what it has reserved."""
        self.waiters.pop(waiter.queued)
        self.dispatcher.withdraw(waiter.queued)
        self.tier_router.cancel_reservation(waiter.candidates)

    # Granting.

    def _enqueue(self, waiter: Waiter) -> None:
        """Queue it, or grant its lease at once."""
        now = self.clock()
        for _ in range(MOST_STALE_PLACEMENTS):
            if self.dispatcher.place_or_queue(waiter.queued, now) is None:
                if not self.waiters:
                    self._check_all_at = now + TICK
                self.waiters.add(waiter)
                self._set_due(waiter, now)
                if self.fleet.routers:
                    self._on_model_asked_for(waiter.request.wanted.model_names[0], waits=True)
                return
            if (granted := self._grant(waiter, now)) is not None:
                waiter.granted.set_result(granted)
                return
            self._rebuild(waiter, waiter.candidates)
        self.tier_router.cancel_reservation(waiter.candidates)
        waiter.granted.set_exception(errors.no_node("No node takes this request.", 1.0))

    def _rebuild(self, waiter: Waiter, candidates: NodeCandidates) -> None:
        """Give a waiter that is not in the queue these candidates."""
        earlier = waiter.queued
        queued = self.demand_model.build(
            waiter.request, candidates, earlier.received_at, earlier, waiter.tried.pool_overflows
        )
        waiter.set_candidates(candidates, queued)

    def _match_soon(self) -> None:
        if self.dispatcher.waiting and self._match_handle is None:
            self._match_handle = asyncio.get_running_loop().call_soon(self.match)

    def match(self) -> None:
        """Give free slots to waiting requests."""
        if self._match_handle is not None:
            self._match_handle.cancel()
            self._match_handle = None
        if self.demand_model.learning_pending and self.waiters:
            self.learn_pending()  # What has just ended is what the free slot has cached.
        now = self.clock()
        if self._rows_version != self.fleet_sync.rows_version:
            self._rows_version = self.fleet_sync.rows_version
            for waiter in list(self.waiters):
                if waiter.granted.done():
                    self._remove(waiter)  # Its client has just left.
                else:
                    self._update_candidates(waiter, now, requeue=True)
        most = MOST_PLACED_BY_TOKENS if self.dispatcher.placement_state.pools else math.inf
        for _ in range(MOST_STALE_PLACEMENTS):
            misses = 0
            placements = self.dispatcher.match(now, most)
            for placement in placements:
                misses += not self._grant_waiting(placement, now)
            if len(placements) >= most:
                self._match_soon()  # The rest, when the event loop has had its turn.
                break
            if not misses:
                break
        self._set_timer()

    def _grant(self, asker: Waiter, now: float) -> GrantedLease | None:
        """The lease for a request that was placed; None: the node does not take it after all.

        Then the placement is cancelled and the placement state up to date.
        """
        placement, request, candidates = asker.queued, asker.request, asker.candidates
        node, slots = self.fleet_sync.nodes[placement.row.index], placement.slots
        if node.free_slots(now) < slots if slots else not node.capacity(now):
            self.dispatcher.cancelled(placement, now)
            self.fleet_sync.sync()
            return None
        fallback: str | None = None
        reservation: SpillReservation | None = None
        if candidates.tier_route is not None:
            fallback, reservation = self.tier_router.placed(candidates, placement.row)
        info, wanted, size = node.info, request.wanted, request.size
        assembles = wanted.may_assemble and asker.tried.may_assemble and info.kind == "llama.cpp"
        stream = now >= node.plain_until and (wanted.stream or assembles)
        # The predicted prefill and total bound how long the node may be silent.
        speed, prefill_tps = node.speed, node.speed.prefill_tps
        tokens = placement.prompt_tokens
        if size.prompt_tokens > tokens:  # noqa: PLR1730 - a call costs four times as much
            tokens = size.prompt_tokens
        grace = prefill = tokens / (prefill_tps or PESSIMISTIC_PREFILL_TPS)
        wake = wake_limit = 0.0
        if node.sleep.seen:
            # It may have fallen asleep since the last probe, too.
            wake_limit = node.sleep.wake_limit(node.properties.size)
            wake = node.seconds_asleep(now)
            prefill += wake
        total: float | None = None
        if size.max_tokens is not None and (decode_tps := speed.decode_tps) is not None:
            total = prefill + size.max_tokens / decode_tps
        model, lease_id = candidates.by_model[placement.group][0], next(self._lease_ids)
        comparison = placement.comparison
        out: Mapping[str, int] | None = None
        if comparison is not None and (
            comparison.nodes.with_room < comparison.nodes.candidates
            or len(placement.groups[placement.group]) > 1
        ):
            out = self._nodes_without_room(placement, comparison.nodes.with_room, now)
        grant = self.decision_log.granted(
            placement, request, asker.tried, lease_id, model, info.tier, None, fallback, out
        )
        lease = LeaseRecord(node, stream, request, placement, grant, reservation)
        lease.expect(prefill, total)
        node.take(lease, now, wake)
        self.records[lease_id] = lease
        if request.caller.yields:
            self.yielding[lease_id] = lease
        if lease.wakes:
            # As if the prompt took longer to read: later requests wait for that too.
            placement.row.prefill_done(placement, placement.prefill_ends + wake)
        if lease.trial or lease.wakes:
            self.fleet_sync.node_changed(node)
            self.fleet_sync.fleet.wake_began(node)
        if node.probe_history.load_unread:
            self.fleet_sync.fleet.read_load(node)
        if size.prompt_key is not None or request.caller.session is not None:
            self.demand_model.placed(placement, request)
        reading = ExpectedReading(
            round(tokens),
            None if prefill_tps is None else placement.prefill_ends - now,
            PREFILL_GRACE_FACTOR * grace,
            wake_limit,
        )
        served_name = node.served_name(model) or model
        return GrantedLease(lease_id, info, model, served_name, stream, reading, slots, fallback)

    def _nodes_without_room(
        self, placement: QueuedRequest, with_room: int, now: float
    ) -> Mapping[str, int]:
        """Other nodes that serve the model of a placement and had no room for it, by the reason.

        `with_room`: how many nodes of its tier had.
        """
        found: Counter[str] = Counter()
        excluded, failed = set(placement.excluded), set(placement.failed)
        for candidates in placement.groups[placement.group]:
            members, out = candidates.row_indexes, self.fleet_sync.out_of_service(candidates, now)
            found["excluded"] += len(excluded & members)
            found["failed"] += len((failed - excluded) & members)
            found.update(out)
            left = len(members - excluded - failed) if excluded or failed else len(members)
            is_here = placement.row.index in members
            found["full"] += max(0, left - sum(out.values()) - (with_room if is_here else 0))
            if is_here:
                break
        return {reason: number for reason, number in found.items() if number}

    def _grant_waiting(self, placement: QueuedRequest, now: float) -> bool:
        """Give a placement to its waiter; False: it was not used, and others may go."""
        waiter = self.waiters.pop(placement)
        if waiter is None or waiter.granted.done():
            self.dispatcher.cancelled(placement, now)
            if waiter is not None:
                self.tier_router.cancel_reservation(waiter.candidates)
            return False
        granted = self._grant(waiter, now)
        if granted is None:
            self._rebuild(waiter, waiter.candidates)
            self._enqueue(waiter)
            return False
        waiter.granted.set_result(granted)
        return True

    def release_unused(self, lease_id: int) -> None:
        """Release a lease whose request was cancelled before it could be sent."""
        record = self.records.pop(lease_id)
        record.grant.ended("cancelled", 0, self.clock())
        self.yielding.pop(lease_id, None)
        self.demand_model.abandoned(record.placement, refund=True)
        if record.reservation is not None:
            record.reservation.cancel()
        record.release()

    # Checking what waits.

    def _set_timer(self) -> None:
        """Look again within a tick, or sooner if a deferral ends."""
        if not self.waiters:
            return
        now, loop = self.clock(), asyncio.get_running_loop()
        due = min(self._check_all_at, self.dispatcher.wake_at)
        when = loop.time() + max(LEAST_TIMER_SECONDS, due - now)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self.check_due)

    def check_due(self) -> None:
        """Check every waiting request if `TICK` has passed; then match."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.clock() >= self._check_all_at:
            self.check_all()
        else:
            self.match()

    def check_all(self) -> None:
        """Look at the whole fleet, check every waiting request, then match."""
        now = self.clock()
        self._check_all_at = now + TICK
        self._positions = None
        self.fleet_sync.refresh()
        for waiter in list(self.waiters):
            self._check(waiter, now)
        self.match()
        # None could yield to them before, or did in vain.
        for waiter in list(self.waiters) if self.yielding else ():
            self._ask_to_yield(waiter, now)

    def _set_due(self, waiter: Waiter, now: float) -> None:
        """Check a waiting request when its time has come, too."""
        timer, loop = None, asyncio.get_running_loop()
        if waiter.due_at < math.inf:
            when = loop.time() + max(LEAST_TIMER_SECONDS, waiter.due_at - now)
            timer = loop.call_at(when, self._check_one, waiter)
        waiter.set_timer(timer)

    def _check_one(self, waiter: Waiter) -> None:
        now = self.clock()
        if now < waiter.due_at:
            self._set_due(waiter, now)  # Not by the scheduler's own clock.
        else:
            self._check(waiter, now)
            self._match_soon()

    def _ask_to_yield(self, waiter: Waiter, now: float) -> None:
        """Have running requests of a lower class yield to this one, unless some were asked lately.

        For requests of one kind it is tried in vain once in `IN_VAIN_SECONDS`, however many wait.
        """
        queued, in_vain = waiter.queued, self._yields_in_vain
        kind = queued.groups, queued.priority, queued.slots
        if (
            not self.yielding
            or waiter.granted.done()
            or waiter.request.caller.priority >= Priority.BATCH
            or now - waiter.yield_asked_at < batch_slots.ASK_AGAIN_SECONDS
            or now - in_vain.get(kind, -math.inf) < batch_slots.IN_VAIN_SECONDS
        ):
            return
        if queued.slots and self._make_room(queued, now):
            waiter.note_yield_asked(now)
            return
        if len(in_vain) >= batch_slots.MOST_KINDS:
            in_vain.clear()
        in_vain[kind] = now

    def _make_room(self, queued: QueuedRequest, now: float) -> bool:
        """Have running requests yield to one that waits; whether it is to get its slots so."""
        for missing in batch_slots.missing_slots(queued):
            for _ in range(batch_slots.MOST_CHOICES):
                running = [
                    yield_candidate(lease_id, record, now)
                    for lease_id, record in islice(self.yielding.items(), batch_slots.MOST_COMPARED)
                ]
                if not (chosen := batch_slots.choose_yields(queued.priority, missing, running)):
                    break
                for lease_id in chosen:
                    record = self.yielding.pop(lease_id)
                    # Those that can't be resumed refuse; then others are chosen.
                    if self.yield_slot(record.request.id):
                        missing[record.placement.row.index] -= record.slots
                if min(missing.values()) <= 0:
                    return True
        return False

    def _check(self, waiter: Waiter, now: float) -> None:
        """Update its candidates, and end a wait that is too long or has become hopeless."""
        if not waiter.granted.done():
            self._update_candidates(waiter, now)
        if waiter.granted.done():
            return
        if self.dispatcher.placement_state.pools:
            self.demand_model.estimate_pool(
                waiter.queued, waiter.request, waiter.tried.pool_overflows
            )
            self.dispatcher.pool_tokens_changed(waiter.queued)
        retry_after = self.completion_rate.retry_after(len(self.waiters), now)
        if (error := waiter.expiry_error(self.settings, retry_after, now)) is not None:
            self._refuse(waiter, error)

    def _update_candidates(self, waiter: Waiter, now: float, *, requeue: bool = False) -> None:
        """Find its candidates anew; `requeue`: in any case, since row indexes have changed."""
        try:
            candidates = self.fleet_sync.find(waiter.request, waiter.tried)
            if self.fleet_sync.has_gpu_tier:
                candidates = self.tier_router.narrow(
                    waiter.request, waiter.tried, candidates, waiter.queued, now, waits=True
                )
        except errors.GatewayError as error:
            self._refuse(waiter, error)
            return
        if candidates.same_targets(waiter.candidates) and not requeue:
            self.tier_router.cancel_reservation(waiter.candidates)
            due_at = waiter.due_at
            waiter.set_candidates(candidates)
            if waiter.due_at != due_at:
                self._set_due(waiter, now)
        else:
            self._remove(waiter)
            self._rebuild(waiter, candidates)
            self._enqueue(waiter)


def load_wait(candidates: NodeCandidates, now: float) -> float:
    """Seconds until one of the nodes can have loaded its model; infinity: none loads on demand."""
    return min(
        (
            node.load_price(now)
            for node in nodes_of(candidates.by_model)
            if node.load is not None and node.is_alive
        ),
        default=math.inf,
    )


def _warn_of_policy(settings: Settings) -> None:
    if settings.policy != "least_finish":
        structlog.get_logger().warning(
            "setting", setting="policy", value=settings.policy, means="least_finish"
        )
