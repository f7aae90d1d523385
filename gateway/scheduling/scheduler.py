"""Leases for requests: at once while a slot is free, else in turn, within limits.

No node gets more requests than it has slots: the rest wait here. Who goes where, and in which
order, is for the dispatcher to say; this gives its answers their time, their limits and their
leases.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from gateway import errors
from gateway.config.settings import Settings
from gateway.fleet.fleet import Fleet
from gateway.fleet.node import Lease, Node
from gateway.fleet.prompt_cache import FleetPromptCache
from gateway.request import Priority, Request
from gateway.scheduling.admission import Admission, CompletionRate, combine_waits, queue_room
from gateway.scheduling.candidates import CandidateFinder, NodeCandidates
from gateway.scheduling.demand_model import DemandModel, has_long_prompt
from gateway.scheduling.dispatcher import Dispatcher, dispatch_rules
from gateway.scheduling.fleet_sync import ALIVE_STATES, FleetSync
from gateway.scheduling.placement_state import Placement, PlacementState, QueuedRequest
from gateway.scheduling.tier_policy import TierPolicy
from gateway.scheduling.tier_router import TierRouter
from gateway.scheduling.waiters import QueuePosition, Waiter, Waiters, expiry_error

TICK = 0.5
"""Seconds between two looks at all that waits, and at the board against the fleet."""

LEAST_TIMER_SECONDS = 0.001
"""Seconds; no timer is set to less."""

MOST_STALE_PLACEMENTS = 4
"""Times that the board may be wrong about the nodes while one request is placed: it is brought up
to date each time, so that once is a lot."""

PESSIMISTIC_PREFILL_TPS = 25.0
"""Prompt tokens/s to expect of a node that has not shown its speed: slow on purpose, since it
bounds a wait (one busy thread read 140 tokens/s of a 768 wide model when measured)."""

GrantedLease = tuple[Lease, str]
"""A lease, and the public model name that it was given for."""


@dataclass(slots=True, eq=False)
class LeaseGranter:
    """Makes plans for requests, and leases of what the dispatcher has placed."""

    dispatcher: Dispatcher
    fleet_sync: FleetSync
    candidate_finder: CandidateFinder
    demand_model: DemandModel
    tier_router: TierRouter
    clock: Callable[[], float]

    def find_candidates(
        self, request: Request, now: float, waiting: QueuedRequest | None = None
    ) -> NodeCandidates:
        """Where it may go now; `waiting` is what stands in line for it. Raises: GatewayError.

        A plan that comes to nothing is to be given to `Tiers.dropped`.
        """
        plan = self.candidate_finder.find(request)
        if self.fleet_sync.has_gpu_tier:
            ask = waiting or self.demand_model.build(request, plan)
            plan = self.tier_router.narrow(request, plan, ask, now, waiting=waiting)
        return plan

    def check_deadline(
        self, request: Request, queued: QueuedRequest, candidates: NodeCandidates, now: float
    ) -> None:
        """Whether its client may live to see an answer. Raises: GatewayError, if it can't.

        What is known of the prompt is an estimate: half of the reading that it predicts counts.
        """
        assert request.deadline is not None
        if not self.fleet_sync.is_measured(queued):
            return
        least = min(
            (
                (queued.prompt_tokens - queued.cached.get(row.index, 0.0)) / row.prefill_tps
                for pools in candidates.groups
                for pool in pools
                for row in pool.rows
                if row.alive and row.index not in candidates.excluded
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

    def grant(
        self, placement: Placement, request: Request, candidates: NodeCandidates, now: float
    ) -> GrantedLease | None:
        """The lease that a placement stands for.

        None: the node does not take it after all, and the board has been told.
        """
        node = self.fleet_sync.node(placement.row)
        slots = placement.queued.slots
        if node.free_slots(now) < slots if slots else not node.capacity(now):
            self.dispatcher.cancelled(placement, now)
            self.fleet_sync.sync()
            return None
        lease = _taken(node, request, placement, now)
        lease.placement = placement
        lease.on_first_content = self._read
        lease.on_release = self._ended
        if lease.trial:
            self.fleet_sync.node_changed(node)
        if request.prompt_key is not None or request.session is not None:
            self.demand_model.placed(lease, request)
        if candidates.tier_route is not None:
            self.tier_router.lease_granted(candidates, placement.row, lease)
        return lease, candidates.by_model[placement.group][0]

    def release_unused(self, lease: Lease, request: Request) -> None:
        """Nobody is there any more to use this lease."""
        self.demand_model.abandoned(lease, request, refund=True)
        if lease.reservation is not None:
            lease.reservation.settle(0.0, happened=False, now=self.clock())
        lease.release()

    def _read(self, lease: Lease) -> None:
        """What was predicted from its prompt's length is known now."""
        self.dispatcher.prefill_done(lease.placement, self.clock())

    def _ended(self, lease: Lease) -> None:
        """Its slots are free; where its row is no longer the node's, the fleet has to tell."""
        placement: Placement = lease.placement
        self.dispatcher.released(placement, self.clock())
        if self.dispatcher.placement_state.by_name.get(placement.row.name) is not placement.row:
            lease.placement = None


@dataclass(slots=True, eq=False)
class Scheduler:
    """Gives out leases on the slots of a fleet."""

    fleet: Fleet
    settings: Settings
    clock: Callable[[], float]
    rng: random.Random
    completion_rate: CompletionRate = field(default_factory=CompletionRate)
    prompt_cache: FleetPromptCache = field(default_factory=FleetPromptCache)
    closing: bool = False
    learn_pending: Callable[[], None] = field(default=lambda: None)
    """Learns at once from all answers that have ended."""
    dispatcher: Dispatcher = field(init=False)
    fleet_sync: FleetSync = field(init=False)
    admission: Admission = field(init=False)
    demand_model: DemandModel = field(init=False)
    tier_policy: TierPolicy = field(init=False)
    tier_router: TierRouter = field(init=False)
    _taking: LeaseGranter = field(init=False)
    _tickets: Waiters = field(default_factory=Waiters)
    _look_by: float = 0.0
    """When all that waits is looked at; until then, only what has fallen due."""
    _places: dict[str, QueuePosition] | None = None
    """Where everything stands in line, since somebody has asked after the last look at it."""
    _version: int = 0
    """Of the mirror, when what waits was last planned for."""
    _matching: asyncio.Handle | None = None
    _ticking: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        board = PlacementState()
        self.dispatcher = Dispatcher(board, dispatch_rules(self.settings), self.rng)
        self.fleet_sync = FleetSync(self.fleet, board, self.prompt_cache, self.clock)
        self.admission = Admission(self.settings)
        self.demand_model = DemandModel(self.dispatcher, self.prompt_cache)
        self.tier_policy = TierPolicy(self.settings.hybrid)
        self.tier_router = TierRouter(
            self.tier_policy, self.fleet_sync, self.dispatcher, self.settings
        )
        self._taking = LeaseGranter(
            self.dispatcher,
            self.fleet_sync,
            CandidateFinder(self.fleet.model_index, self.fleet_sync),
            self.demand_model,
            self.tier_router,
            self.clock,
        )
        self.fleet_sync.sync()
        self.fleet.on_change = self.fleet_sync.node_changed
        self.fleet.on_capacity = self._match_soon

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force."""
        self.settings = settings
        self.admission.configure(settings)
        self.dispatcher.set_rules(dispatch_rules(settings))
        self.tier_router.configure(settings)
        self.capacity_changed()

    async def lease(self, request: Request) -> GrantedLease:
        """A lease for `request`, and the public model name that it was given for.

        Waits while all nodes that could serve it are busy or out. Raises: GatewayError, when it
        can't be served, there is no place to wait, or it has waited too long.
        """
        return self.lease_now(request) or await self.wait_for_lease(request)

    def lease_now(self, request: Request) -> GrantedLease | None:
        """The same without waiting: None where it would have to."""
        if self.closing:
            raise errors.shutting_down()
        if self.demand_model.learning_pending and has_long_prompt(request):
            self.learn_pending()
        now = self.clock()
        if self.fleet_sync.has_gpu_tier and request.slots and not request.failed_nodes:
            self.tier_policy.arrived(request.priority, now)
        plan = self._taking.find_candidates(request, now)
        ask = self.demand_model.build(request, plan)
        if request.deadline is not None:
            self._taking.check_deadline(request, ask, plan, now)
        granted = self._placed(ask, request, plan, now)
        if granted is None:
            self.tier_router.cancel_reservation(plan)
        return granted

    def has_other_node(self, request: Request, node: Node) -> bool:
        """Whether another node than `node` is in that could take `request`."""
        return any(
            other is not node
            and other.name not in request.failed_nodes
            and other.state in ALIVE_STATES
            for _, nodes in self._taking.candidate_finder.nodes_by_model(request)
            for other in nodes
        )

    def unsupported_error(self, request: Request) -> errors.GatewayError | None:
        """The error of a request that no node supports (501); None: some node may."""
        return self._taking.candidate_finder.unsupported_error(request)

    def has_larger_context(self, request: Request) -> bool:
        """Whether a node has the context that `request` is now known to need."""
        return any(
            node.context is not None and node.context >= request.min_context
            for _, nodes in self._taking.candidate_finder.nodes_by_model(request)
            for node in nodes
        )

    # What is to be seen of it.

    def queue_positions(self, most: int | None = None) -> list[QueuePosition]:
        """The first `most` of what waits, in its order, with what is expected of it."""
        now = self.clock()
        return [
            QueuePosition(
                ticket.request,
                position,
                now - ticket.queued_at,
                wait if math.isfinite(wait) else None,
            )
            for position, (ask, wait) in enumerate(
                islice(self.dispatcher.predicted_waits(now), most), 1
            )
            if (ticket := self._tickets.get(ask)) is not None
        ]

    def queue_position(self, request: Request) -> QueuePosition | None:
        """Where a request stands in line, as of the last look; None: it does not wait."""
        if self._places is None:
            self._places = {one.request.id: one for one in self.queue_positions()}
        return self._places.get(request.id)

    def depths(self) -> dict[Priority, int]:
        """How many requests of each class wait."""
        return self.dispatcher.depths()

    def has_room(self) -> bool:
        """Whether one more request could be taken: at once, or into the queue."""
        tickets = self._tickets
        if self.closing:
            return False
        # Where one caller has several places, a newcomer gets one of them.
        return len(tickets) < self.settings.queue.max or tickets.fair_share.fits(
            "", 1, len(tickets)
        )

    # What it is told.

    def capacity_changed(self) -> None:
        """Look at all nodes again, and soon at who can go."""
        self.fleet_sync.sync()
        self._match_soon()

    def completed(self, now: float) -> None:
        """A request has been answered: the queue moves at this rate."""
        self.completion_rate.completed(now)

    def refuse(self, request_id: str, error: errors.GatewayError) -> bool:
        """End the wait of one request, by its own id; whether it was waiting."""
        ticket = self._tickets.by_request_id(request_id)
        if ticket is None:
            return False
        self._refuse(ticket, error)
        self._match_soon()  # for those it may have held up
        return True

    def shed(self, request_id: str, error: errors.GatewayError) -> bool:
        """End the wait of a request if it may be turned away; whether there was one."""
        ticket = self._tickets.by_request_id(request_id)
        if ticket is None or not ticket.can_shed:
            return False
        self._refuse(ticket, error)
        self._match_soon()
        return True

    def refuse_all(self, error: Callable[[], errors.GatewayError]) -> None:
        """End everything that waits with an error of its own."""
        for ticket in list(self._tickets):
            self._refuse(ticket, error())

    def close(self) -> None:
        """Stop the timers; nothing may wait any more."""
        self.refuse_all(errors.shutting_down)
        for handle in (self._matching, self._ticking):
            if handle is not None:
                handle.cancel()
        self._matching = self._ticking = None

    # Taking slots.

    def _placed(
        self, ask: QueuedRequest, request: Request, plan: NodeCandidates, now: float
    ) -> GrantedLease | None:
        """A lease for it now; None: it would have to wait."""
        dispatcher = self.dispatcher
        for _ in range(MOST_STALE_PLACEMENTS):
            if self._tickets and dispatcher.placement_state.slots_freed:
                # Who came before goes first, if there is anything for them.
                self._match()
            placement = dispatcher.place(ask, now)
            if placement is None:
                return None
            granted = self._taking.grant(placement, request, plan, now)
            if granted is not None:
                return granted
        return None

    # Waiting.

    async def wait_for_lease(self, request: Request) -> GrantedLease:
        """A lease in its turn, where `lease_now` had none. Raises: GatewayError, as `lease`."""
        if self.closing:
            raise errors.shutting_down()
        now = self.clock()
        plan = self._taking.find_candidates(request, now)
        ask = self.demand_model.build(request, plan)
        place = queue_room(request, self._tickets, self.admission)
        try:
            until = self._admitted(request, ask, plan, place.counted_waiting, now)
        except errors.GatewayError:
            self.tier_router.cancel_reservation(plan)
            raise
        if place.displaced is not None and not request.failed_nodes:
            self._refuse(place.displaced, self._crowded(now))
        ticket = Waiter(request, plan, ask, now, until, asyncio.get_running_loop().create_future())
        if not plan.any_alive():
            ticket.nodes_down_since = now
        self._enter(ticket)
        self._match_soon()
        try:
            return await ticket.granted
        except asyncio.CancelledError:
            future = ticket.granted
            if future.done() and not future.cancelled() and future.exception() is None:
                self._taking.release_unused(future.result()[0], request)
            raise
        finally:
            if ticket.queued in self._tickets:
                self._remove(ticket)
                self._match_soon()

    def _remove(self, ticket: Waiter) -> None:
        """Take it out of the line, with what it has reserved."""
        self._tickets.pop(ticket.queued)
        self.dispatcher.withdraw(ticket.queued)
        self.tier_router.cancel_reservation(ticket.candidates)

    def _admitted(
        self, request: Request, ask: QueuedRequest, plan: NodeCandidates, waiting: int, now: float
    ) -> float:
        """Until when it may wait beside so many. Raises: GatewayError."""
        predicted = None
        if request.slots and plan.any_alive():
            measured = self.fleet_sync.is_measured(ask)
            by_work = self.dispatcher.predicted_wait(ask, now) if measured else None
            ahead, slots = self.dispatcher.count_ahead(ask), self.fleet_sync.slots(ask)
            predicted = combine_waits(self.completion_rate, slots, ahead, by_work, now)
        return self.admission.admit(
            request, waiting, predicted, self.completion_rate.retry_after(1, now), now
        )

    def _crowded(self, now: float) -> errors.GatewayError:
        """For one that goes for another's request: it is its party that waits most."""
        return errors.queue_full(
            "Others need a place in the queue, and this client has most of them. Try again later.",
            self.completion_rate.retry_after(len(self._tickets), now),
        )

    def _refuse(self, ticket: Waiter, error: errors.GatewayError) -> None:
        self._remove(ticket)
        if not ticket.granted.done():
            ticket.granted.set_exception(error)

    def _arm(self) -> None:
        """Look at what waits within a tick, or sooner where something falls due."""
        if not self._tickets:
            return
        now = self.clock()
        wake = self.dispatcher.wake_at(now) or math.inf
        due = min(self._look_by, self._tickets.next_due(), wake)
        loop = asyncio.get_running_loop()
        when = loop.time() + max(LEAST_TIMER_SECONDS, due - now)
        if self._ticking is not None:
            if self._ticking.when() <= when:
                return
            self._ticking.cancel()
        self._ticking = loop.call_at(when, self._tick)

    def _tick(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        now = self.clock()
        looked = self._tickets.pop_due(now)
        if now >= self._look_by:
            self._look_by = now + TICK
            self._places = None
            self.fleet_sync.sync()
            looked = list(self._tickets)
        for ticket in looked:
            if not ticket.granted.done():
                self._look_at(ticket, now)
        self._match()

    def _plan_anew(self, ticket: Waiter, now: float, *, renew: bool = False) -> None:
        """See where it may go by now; `renew`: what stands in line for it is of no use any more."""
        try:
            plan = self._taking.find_candidates(ticket.request, now, ticket.queued)
        except errors.GatewayError as error:
            self._refuse(ticket, error)
            return
        if plan.same_targets(ticket.candidates) and not renew:
            self.tier_router.cancel_reservation(ticket.candidates)
            self._tickets.set_candidates(ticket, plan)
        else:
            self._renew(ticket, plan)

    def _look_at(self, ticket: Waiter, now: float) -> None:
        """End a wait that has lasted long enough, or that has become hopeless."""
        self._plan_anew(ticket, now)
        if ticket.granted.done():
            return
        retry_after = self.completion_rate.retry_after(len(self._tickets), now)
        error = expiry_error(ticket, self.settings, retry_after, now)
        if error is not None:
            self._refuse(ticket, error)

    def _enter(self, ticket: Waiter) -> None:
        """Put it in line, or let it go at once."""
        now = self.clock()
        for _ in range(MOST_STALE_PLACEMENTS):
            placement = self.dispatcher.place_or_queue(ticket.queued, now)
            if placement is None:
                if not self._tickets:
                    self._look_by = now + TICK
                self._tickets.add(ticket)
                return
            granted = self._taking.grant(placement, ticket.request, ticket.candidates, now)
            if granted is not None:
                ticket.granted.set_result(granted)
                return
            ticket.queued = self.demand_model.build(ticket.request, ticket.candidates)
        self.tier_router.cancel_reservation(ticket.candidates)
        ticket.granted.set_exception(errors.no_node("No node takes this request.", 1.0))

    def _renew(self, ticket: Waiter, plan: NodeCandidates) -> None:
        """Put it in line anew: other nodes can serve it than before."""
        self._remove(ticket)
        ticket.candidates, ticket.queued = plan, self.demand_model.build(ticket.request, plan)
        self._enter(ticket)

    def _match_soon(self) -> None:
        """Called for each slot that comes free."""
        if self._tickets and self._matching is None:
            self._matching = asyncio.get_running_loop().call_soon(self._match)

    def _match(self) -> None:
        """Give free slots to those who wait."""
        if self._matching is not None:
            self._matching.cancel()
            self._matching = None
        if self.demand_model.learning_pending and self._tickets:
            self.learn_pending()  # What has just ended is what the free slot has in its cache.
        now = self.clock()
        if self._version != self.fleet_sync.rows_version:
            self._version = self.fleet_sync.rows_version
            for ticket in list(self._tickets):
                self._plan_anew(ticket, now, renew=True)
        for _ in range(MOST_STALE_PLACEMENTS):
            misses = 0
            for placement in self.dispatcher.match(now):
                misses += not self._grant(placement, now)
            if not misses:
                break
        self._arm()

    def _grant(self, placement: Placement, now: float) -> bool:
        """Give a placement to who waits for it; False: it was of no use, and others may go."""
        ticket = self._tickets.pop(placement.queued)
        if ticket is None or ticket.granted.done():
            self.dispatcher.cancelled(placement, now)
            return False
        granted = self._taking.grant(placement, ticket.request, ticket.candidates, now)
        if granted is None:
            ticket.queued = self.demand_model.build(ticket.request, ticket.candidates)
            self._enter(ticket)
            return False
        ticket.granted.set_result(granted)
        return True


def _taken(node: Node, request: Request, placement: Placement, now: float) -> Lease:
    """The lease, with what it should take: it bounds how long the node may be silent."""
    speed = node.speed
    tokens = max(request.prompt_tokens, placement.queued.prompt_tokens)
    prefill = tokens / (speed.prefill_tps or PESSIMISTIC_PREFILL_TPS)
    total = None
    if request.max_tokens is not None and (decode_tps := speed.decode_tps) is not None:
        total = prefill + request.max_tokens / decode_tps
    return node.take_lease(
        placement.queued.slots,
        request.id,
        request.priority,
        now,
        stream=request.stream or (request.may_assemble and node.spec.kind == "llama.cpp"),
        expected_prefill=prefill,
        expected_total=total,
    )
