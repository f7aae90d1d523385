"""The scheduler: gives requests leases on nodes' slots, at once or after a wait.

No node gets more requests than it has slots; the rest wait here. The dispatcher decides which goes
where and in which order; the scheduler adds the clock and the timers, the limits on waiting, and
the leases.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from gateway import errors
from gateway.config.cache_privacy import NodeLabels
from gateway.config.settings import Settings
from gateway.fleet.fleet import Fleet
from gateway.fleet.health import ALIVE_STATES
from gateway.fleet.prompt_cache import FleetPromptCache
from gateway.lease import (
    NOTHING_TRIED,
    BatchRoom,
    GrantedLease,
    LeaseRequest,
    QueuePosition,
    Tried,
)
from gateway.request import Endpoint, Priority
from gateway.scheduling.admission import Admission, CompletionRate, combine_waits, queue_room
from gateway.scheduling.batch_room import room_for_batch, rows_for_batch, slots_waited_for
from gateway.scheduling.budget import dearest_token
from gateway.scheduling.candidates import CandidateFinder
from gateway.scheduling.decision_log import DecisionLog
from gateway.scheduling.demand_model import DemandModel, has_long_prompt
from gateway.scheduling.dispatcher import Dispatcher, dispatch_rules
from gateway.scheduling.fleet_sync import FleetSync, NodeCandidates
from gateway.scheduling.lease_granter import LeaseGranter
from gateway.scheduling.node_slots import Placement, QueuedRequest
from gateway.scheduling.placement_state import PlacementState
from gateway.scheduling.prediction_accuracy import PredictionAccuracy
from gateway.scheduling.tier_policy import TierPolicy
from gateway.scheduling.tier_router import TierRouter
from gateway.scheduling.waiters import Waiter, Waiters
from gateway.scheduling.yielding import ASK_AGAIN_SECONDS, YieldRequests

TICK = 0.5
"""Seconds between two looks at every waiting request, and at the whole fleet."""

MOST_PLACED_BY_TOKENS = 8
"""Placements of one turn of the event loop where slots share pools: each is some milliseconds' work
with thousands of nodes and waiting requests."""

LEAST_TIMER_SECONDS = 0.001
"""No timer is set to less."""

MOST_STALE_PLACEMENTS = 4
"""Placements that a request may lose because its node does not take it after all. Each time the
placement state is brought up to date, so one is a lot."""


@dataclass(slots=True, eq=False)
class Scheduler:
    """Gives out leases on the slots of a fleet."""

    fleet: Fleet
    settings: Settings
    clock: Callable[[], float]
    rng: random.Random
    completion_rate: CompletionRate = field(default_factory=CompletionRate)
    prompt_cache: FleetPromptCache = field(default_factory=FleetPromptCache)
    waiters: Waiters = field(default_factory=Waiters)
    closing: bool = False
    learn_pending: Callable[[], None] = field(default=lambda: None)
    """Learns at once from all answers that have ended."""
    yield_slot: Callable[[str], bool] = field(default=lambda _: False)
    """Asks the request with this id to give up its slot and wait again; whether it does."""
    dispatcher: Dispatcher = field(init=False)
    fleet_sync: FleetSync = field(init=False)
    admission: Admission = field(init=False)
    demand_model: DemandModel = field(init=False)
    tier_policy: TierPolicy = field(init=False)
    tier_router: TierRouter = field(init=False)
    granter: LeaseGranter = field(init=False)
    yield_requests: YieldRequests = field(init=False)
    decision_log: DecisionLog = field(init=False)
    accuracy: PredictionAccuracy = field(default_factory=PredictionAccuracy)
    _check_all_at: float = 0.0
    """When every waiting request is checked; until then only those that fall due."""
    _positions: dict[str, QueuePosition] | None = None
    """Queue positions by request id, if somebody has asked for one since that check."""
    _rows_version: int = 0
    """That of `fleet_sync` for which the waiting requests' candidates were found."""
    _match_handle: asyncio.Handle | None = None
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        state = PlacementState()
        self.dispatcher = Dispatcher(
            state, dispatch_rules(self.settings), self.rng, keeps_comparisons=True
        )
        self.decision_log = DecisionLog(self.clock)
        self.fleet_sync = FleetSync(self.fleet, state, self.prompt_cache, self.clock)
        self.admission = Admission(self.settings)
        self.demand_model = DemandModel(self.dispatcher, self.prompt_cache)
        self.tier_policy = TierPolicy(self.settings.hybrid)
        self.tier_router = TierRouter(
            self.tier_policy, self.fleet_sync, self.dispatcher, self.settings
        )
        self.granter = LeaseGranter(
            self.dispatcher,
            self.fleet_sync,
            CandidateFinder(self.fleet.model_index, self.fleet_sync),
            self.demand_model,
            self.tier_router,
            self.decision_log,
            self.clock,
        )
        self.yield_requests = YieldRequests(self.granter.yielding, self.yield_slot)
        self.fleet_sync.sync()
        self.fleet.subscribe(on_capacity=self._match_soon, on_change=self.fleet_sync.node_changed)

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force."""
        self.settings = settings
        self.admission.configure(settings)
        self.dispatcher.set_rules(dispatch_rules(settings))
        self.tier_router.configure(settings)
        self.capacity_changed()

    # Leases.

    def lease_now(
        self, request: LeaseRequest, tried: Tried = NOTHING_TRIED, age: float = 0.0
    ) -> GrantedLease | None:
        """A lease for a request that was received `age` seconds ago; None: it must wait.

        Raises: GatewayError, if no node can serve it, or not in time.
        """
        if self.closing:
            raise errors.shutting_down()
        if self.demand_model.learning_pending and has_long_prompt(request):
            self.learn_pending()
        now = self.clock()
        if self.fleet_sync.has_gpu_tier and request.size.slots and not tried.failed_nodes:
            self.tier_policy.arrived(request.caller.priority, now)
        try:
            candidates, queued = self.granter.begin(request, tried, now - age, now)
            if queued.deadline is not None:
                self.granter.check_deadline(queued, candidates, now)
        except errors.GatewayError as error:
            self.decision_log.refused(request, error, now - age, now)
            raise
        granted = self._place(queued, request, tried, candidates, now)
        if granted is None:
            self.tier_router.cancel_reservation(candidates)
        return granted

    async def wait_for_lease(
        self,
        request: LeaseRequest,
        tried: Tried = NOTHING_TRIED,
        age: float = 0.0,
        *,
        response_started: bool = False,
    ) -> GrantedLease:
        """Queue until a slot is granted; call after `lease_now` returned None.

        Waits while all nodes that could serve it are busy or down. `response_started`: whether its
        client has the head of a response, so that no other request should displace it in the queue.

        Raises: GatewayError, when it can't be served, the queue has no room, or it has waited too
        long.
        """
        if self.closing:
            raise errors.shutting_down()
        now = self.clock()
        candidates, queued = self.granter.begin(request, tried, now - age, now)
        room = queue_room(request, self.waiters, self.admission)
        try:
            expires_at = self._admit(
                request,
                queued,
                candidates,
                room.counted_waiting,
                now,
                retried=tried.was_sent,
            )
        except errors.GatewayError:
            self.tier_router.cancel_reservation(candidates)
            raise
        if room.displaced is not None and not tried.was_sent:
            self._refuse(room.displaced, self._displaced_error(now))
        granted: asyncio.Future[GrantedLease] = asyncio.get_running_loop().create_future()
        down_since = None if candidates.any_alive() else now
        waiter = Waiter(
            request,
            tried,
            candidates,
            queued,
            now,
            expires_at,
            granted,
            down_since,
            response_started,
        )
        self._enqueue(waiter)
        self._match_soon()
        if (
            self.granter.yielding
            and request.caller.priority < Priority.BATCH
            and not granted.done()
        ):
            self._ask_to_yield(waiter, now)
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.granter.release_unused(granted.result().id)
            raise
        finally:
            if waiter.queued in self.waiters:
                self._remove(waiter)
                self._match_soon()

    def dearest_token(self, request: LeaseRequest) -> float:
        """The most that a token of the request is likely to cost on any node that serves it."""
        index = self.fleet.model_index
        return max(
            (
                dearest_token(node.spec, node.slots_total, node.speed.decode_tps)
                for name in request.wanted.model_names
                for node in index.nodes_for(name)
            ),
            default=0.0,
        )

    def has_other_node(
        self, request: LeaseRequest, tried: Tried, *, but_paused: bool = False
    ) -> bool:
        """Whether a node is alive that could take `request` and has not failed it.

        `but_paused`: nodes that want no request at this time don't count.
        """
        now = self.clock()
        return any(
            node.name not in tried.failed_nodes
            and node.state in ALIVE_STATES
            and not (but_paused and node.paused(now))
            for _, nodes in self.granter.candidate_finder.nodes_by_model(request, tried)
            for node in nodes
        )

    def has_larger_context(self, request: LeaseRequest, tried: Tried) -> bool:
        """Whether a node has the context that `request` is now known to need."""
        return any(
            node.context is not None and node.context >= tried.min_context
            for _, nodes in self.granter.candidate_finder.nodes_by_model(request, tried)
            for node in nodes
        )

    def unsupported_error(self, request: LeaseRequest, tried: Tried) -> errors.GatewayError | None:
        """The error of a request that no node supports (501); None: some node may."""
        return self.granter.candidate_finder.unsupported_error(request, tried)

    def keep_in_queue(self, request_id: str) -> None:
        """The request's client has the head of a response: displace others before it."""
        waiter = self.waiters.by_request_id(request_id)
        if waiter is not None:
            waiter.note_response_started()

    # The queue, as others see it.

    def queue_positions(self, most: int | None = None) -> list[QueuePosition]:
        """The first `most` waiting requests, in the order in which they are likely to go."""
        now = self.clock()
        return [
            QueuePosition(
                waiter.request.id,
                position,
                now - waiter.queued_at,
                wait if math.isfinite(wait) else None,
            )
            for position, (waiter, wait) in enumerate(self.predicted_waits(most), 1)
        ]

    def predicted_waits(self, most: int | None = None) -> Iterator[tuple[Waiter, float]]:
        """The same with the seconds until each is expected to start; infinity: unknown."""
        for queued, wait in islice(self.dispatcher.predicted_waits(self.clock()), most):
            waiter = self.waiters.get(queued)
            if waiter is not None:
                yield waiter, wait

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
        rows = rows_for_batch(self.fleet_sync, model_names, endpoint, node_labels)
        waiting, ahead = slots_waited_for(self.waiters, model_names, node_labels)
        return room_for_batch(rows, seconds, self.clock(), waiting=waiting, ahead=ahead)

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
        self.granter.keep_slots(request_ids)
        return {waiter.request.id for waiter in waiting if not waiter.granted.done()}

    def has_room(self) -> bool:
        """Whether one more request could be taken: at once, or into the queue."""
        waiters = self.waiters
        if self.closing:
            return False
        # In a full queue a new caller gets a place of one that has several.
        return len(waiters) < self.settings.queue.max or waiters.fair_share.fits(
            "", 1, len(waiters)
        )

    def retry_after(self) -> float:
        """Seconds until the next request is expected to end."""
        return self.completion_rate.retry_after(1, self.clock())

    # Events.

    def capacity_changed(self) -> None:
        """Bring all nodes up to date, and give out free slots soon."""
        self.fleet_sync.sync()
        self._match_soon()

    def completed(self, now: float) -> None:
        """A request has been answered: the queue moves at this rate."""
        self.completion_rate.completed(now)

    def refuse(self, request_id: str, error: errors.GatewayError) -> bool:
        """End the wait of one request with this error; whether it was waiting."""
        waiter = self.waiters.by_request_id(request_id)
        if waiter is None:
            return False
        self._refuse(waiter, error)
        self._match_soon()  # For those that it may have held up.
        return True

    def shed(self, request_id: str, error: errors.GatewayError) -> bool:
        """The same, if the request may be shed (`Waiter.can_shed`); whether it was."""
        waiter = self.waiters.by_request_id(request_id)
        if waiter is None or not waiter.can_shed:
            return False
        self._refuse(waiter, error)
        self._match_soon()
        return True

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

    # Admission to the queue.

    def _admit(
        self,
        request: LeaseRequest,
        queued: QueuedRequest,
        candidates: NodeCandidates,
        waiting: int,
        now: float,
        *,
        retried: bool,
    ) -> float:
        """Until when the request may wait beside `waiting` others. Raises: GatewayError."""
        ahead = predicted = None
        if request.size.slots and candidates.any_alive():
            measured = self.fleet_sync.is_measured(queued)
            by_work = self.dispatcher.predicted_wait(queued, now) if measured else None
            ahead, slots = self.dispatcher.count_ahead(queued), self.fleet_sync.slots(queued)
            predicted = combine_waits(self.completion_rate, slots, ahead, by_work, now)
        expires_at = self.admission.admit(
            request,
            waiting,
            predicted,
            self.completion_rate.retry_after(1, now),
            now,
            queued.deadline,
            retried=retried,
        )
        self.decision_log.queued(queued, now, ahead, predicted, len(self.waiters), expires_at)
        return expires_at

    def _displaced_error(self, now: float) -> errors.GatewayError:
        """For a request that makes room for another's: its caller has most places."""
        return errors.queue_full(
            "Others need a place in the queue, and this client has most of them. Try again later.",
            self.completion_rate.retry_after(len(self.waiters), now),
        )

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

    def _place(
        self,
        queued: QueuedRequest,
        request: LeaseRequest,
        tried: Tried,
        candidates: NodeCandidates,
        now: float,
    ) -> GrantedLease | None:
        """A lease now; None: the request would have to wait."""
        dispatcher = self.dispatcher
        for _ in range(MOST_STALE_PLACEMENTS):
            if dispatcher.waiting and dispatcher.placement_state.slots_freed:
                self.match()  # Waiting requests go first.
            placement = dispatcher.place(queued, now)
            if placement is None:
                return None
            granted = self.granter.grant(placement, request, tried, candidates, now)
            if granted is not None:
                return granted
        return None

    def _enqueue(self, waiter: Waiter) -> None:
        """Queue it, or grant its lease at once."""
        now = self.clock()
        for _ in range(MOST_STALE_PLACEMENTS):
            placement = self.dispatcher.place_or_queue(waiter.queued, now)
            if placement is None:
                if not self.waiters:
                    self._check_all_at = now + TICK
                self.waiters.add(waiter)
                return
            granted = self.granter.grant(
                placement, waiter.request, waiter.tried, waiter.candidates, now
            )
            if granted is not None:
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
        waiter.requeue_as(candidates, queued)

    def _match_soon(self) -> None:
        """Called for each slot that comes free."""
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
                misses += not self._grant(placement, now)
            if len(placements) >= most:
                self._match_soon()  # The rest, when the event loop has had its turn.
                break
            if not misses:
                break
        self._set_timer()

    def _grant(self, placement: Placement, now: float) -> bool:
        """Give a placement to its waiter; False: it was not used, and others may go."""
        waiter = self.waiters.pop(placement.queued)
        if waiter is None or waiter.granted.done():
            self.dispatcher.cancelled(placement, now)
            if waiter is not None:
                self.tier_router.cancel_reservation(waiter.candidates)
            return False
        granted = self.granter.grant(
            placement, waiter.request, waiter.tried, waiter.candidates, now
        )
        if granted is None:
            self._rebuild(waiter, waiter.candidates)
            self._enqueue(waiter)
            return False
        waiter.granted.set_result(granted)
        return True

    # Checking what waits.

    def _set_timer(self) -> None:
        """Check waiting requests within a tick, or sooner if something falls due."""
        if not self.waiters:
            return
        now = self.clock()
        wake = self.dispatcher.wake_at() or math.inf
        due = min(self._check_all_at, self.waiters.next_due(), wake)
        loop = asyncio.get_running_loop()
        when = loop.time() + max(LEAST_TIMER_SECONDS, due - now)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self.check_due)

    def check_due(self) -> None:
        """Check those whose time has come, or all when `TICK` has passed; then match."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self.clock()
        due = self.waiters.pop_due(now)
        if now >= self._check_all_at:
            self.check_all()
        else:
            self._check_each(due, now)

    def check_all(self) -> None:
        """Look at the whole fleet, check every waiting request, then match."""
        now = self.clock()
        self._check_all_at = now + TICK
        self._positions = None
        self.fleet_sync.sync()
        self._check_each(list(self.waiters), now)
        if self.granter.yielding:
            self._ask_all_to_yield(now)

    def _ask_all_to_yield(self, now: float) -> None:
        """For waiting requests to which none could yield before, or did in vain."""
        for waiter in list(self.waiters):
            due = now - waiter.yield_asked_at >= ASK_AGAIN_SECONDS
            if (
                due
                and not waiter.granted.done()
                and waiter.request.caller.priority < Priority.BATCH
            ):
                self._ask_to_yield(waiter, now)

    def _ask_to_yield(self, waiter: Waiter, now: float) -> None:
        """Have running requests of a lower class yield to this one."""
        if self.yield_requests.make_room(waiter.queued, now):
            waiter.note_yield_asked(now)

    def _check_each(self, waiters: list[Waiter], now: float) -> None:
        for waiter in waiters:
            if not waiter.granted.done():
                self._check(waiter, now)
        self.match()

    def _check(self, waiter: Waiter, now: float) -> None:
        """Update its candidates, and end a wait that is too long or has become hopeless."""
        self._update_candidates(waiter, now)
        if waiter.granted.done():
            return
        if self.dispatcher.placement_state.pools:
            self.demand_model.estimate_pool(
                waiter.queued, waiter.request, waiter.tried.pool_overflows
            )
            self.dispatcher.pool_tokens_changed(waiter.queued)
        retry_after = self.completion_rate.retry_after(len(self.waiters), now)
        error = waiter.expiry_error(self.settings, retry_after, now)
        if error is not None:
            self._refuse(waiter, error)

    def _update_candidates(self, waiter: Waiter, now: float, *, requeue: bool = False) -> None:
        """Find its candidates anew; `requeue`: in any case, since row indexes have changed."""
        try:
            candidates = self.granter.find_candidates(
                waiter.request, waiter.tried, waiter.queued, now
            )
        except errors.GatewayError as error:
            self._refuse(waiter, error)
            return
        if candidates.same_targets(waiter.candidates) and not requeue:
            self.tier_router.cancel_reservation(waiter.candidates)
            self.waiters.set_candidates(waiter, candidates)
        else:
            self._remove(waiter)
            self._rebuild(waiter, candidates)
            self._enqueue(waiter)
