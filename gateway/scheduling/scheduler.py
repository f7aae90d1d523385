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
from gateway.fleet.memory import Memory
from gateway.fleet.node import Node
from gateway.request import Priority, Request
from gateway.scheduling.admission import Admission, predicted_wait
from gateway.scheduling.ask import Ask
from gateway.scheduling.board import Board
from gateway.scheduling.dispatch import Dispatcher
from gateway.scheduling.eligible import Eligible, Plan
from gateway.scheduling.expectations import Expectations, is_long
from gateway.scheduling.forecast import Placement
from gateway.scheduling.hybrid import Hybrid
from gateway.scheduling.mirror import ALIVE, Mirror
from gateway.scheduling.overdue import overdue
from gateway.scheduling.places import place_for
from gateway.scheduling.rate import CompletionRate
from gateway.scheduling.rules import rules_of
from gateway.scheduling.taking import Granted, Taking
from gateway.scheduling.ticket import Ticket, Waiting
from gateway.scheduling.tickets import Tickets
from gateway.scheduling.tiers import Tiers

TICK = 0.5
"""Seconds between two looks at all that waits, and at the board against the fleet."""

SOONEST = 0.001
"""Seconds; no timer is set to less."""

MOST_MISSES = 4
"""Times that the board may be wrong about the nodes while one request is placed: it is brought up
to date each time, so that once is a lot."""


@dataclass(slots=True, eq=False)
class Scheduler:
    """Gives out leases on the slots of a fleet."""

    fleet: Fleet
    settings: Settings
    clock: Callable[[], float]
    rng: random.Random
    rate: CompletionRate = field(default_factory=CompletionRate)
    memory: Memory = field(default_factory=Memory)
    closing: bool = False
    catch_up: Callable[[], None] = field(default=lambda: None)
    """Learns at once from all answers that have ended."""
    dispatcher: Dispatcher = field(init=False)
    mirror: Mirror = field(init=False)
    admission: Admission = field(init=False)
    expectations: Expectations = field(init=False)
    hybrid: Hybrid = field(init=False)
    tiers: Tiers = field(init=False)
    _taking: Taking = field(init=False)
    _tickets: Tickets = field(default_factory=Tickets)
    _look_by: float = 0.0
    """When all that waits is looked at; until then, only what has fallen due."""
    _places: dict[str, Waiting] | None = None
    """Where everything stands in line, since somebody has asked after the last look at it."""
    _version: int = 0
    """Of the mirror, when what waits was last planned for."""
    _matching: asyncio.Handle | None = None
    _ticking: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        board = Board()
        self.dispatcher = Dispatcher(board, rules_of(self.settings), self.rng)
        self.mirror = Mirror(self.fleet, board, self.memory, self.clock)
        self.admission = Admission(self.settings)
        self.expectations = Expectations(self.dispatcher, self.memory)
        self.hybrid = Hybrid(self.settings.hybrid)
        self.tiers = Tiers(self.hybrid, self.mirror, self.dispatcher, self.settings)
        self._taking = Taking(
            self.dispatcher,
            self.mirror,
            Eligible(self.fleet.catalogue, self.mirror),
            self.expectations,
            self.tiers,
            self.clock,
        )
        self.mirror.renew()
        self.fleet.on_change = self.mirror.changed
        self.fleet.on_capacity = self._match_soon

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force."""
        self.settings = settings
        self.admission.configure(settings)
        self.dispatcher.set_rules(rules_of(settings))
        self.tiers.configure(settings)
        self.capacity_changed()

    async def lease(self, request: Request) -> Granted:
        """A lease for `request`, and the public model name that it was given for.

        Waits while all nodes that could serve it are busy or out. Raises: GatewayError, when it
        can't be served, there is no place to wait, or it has waited too long.
        """
        return self.lease_now(request) or await self.wait(request)

    def lease_now(self, request: Request) -> Granted | None:
        """The same without waiting: None where it would have to."""
        if self.closing:
            raise errors.shutting_down()
        if self.expectations.behind and is_long(request):
            self.catch_up()
        now = self.clock()
        if self.mirror.hybrid and request.slots and not request.failed:
            self.hybrid.arrived(request.priority, now)
        plan = self._taking.planned(request, now)
        ask = self.expectations.ask(request, plan)
        if request.deadline is not None:
            self._taking.check_deadline(request, ask, plan, now)
        granted = self._placed(ask, request, plan, now)
        if granted is None:
            self.tiers.dropped(plan)
        return granted

    def elsewhere(self, request: Request, node: Node) -> bool:
        """Whether another node than `node` is in that could take `request`."""
        return any(
            other is not node and other.name not in request.failed and other.state in ALIVE
            for _, nodes in self._taking.eligible.able(request)
            for other in nodes
        )

    def unsupported(self, request: Request) -> errors.GatewayError | None:
        """The error of a request that no node supports (501); None: some node may."""
        return self._taking.eligible.unsupported(request)

    def larger(self, request: Request) -> bool:
        """Whether a node has the context that `request` is now known to need."""
        return any(
            node.context is not None and node.context >= request.smallest_context
            for _, nodes in self._taking.eligible.able(request)
            for node in nodes
        )

    # What is to be seen of it.

    def waiting(self, most: int | None = None) -> list[Waiting]:
        """The first `most` of what waits, in its order, with what is expected of it."""
        now = self.clock()
        return [
            Waiting(
                ticket.request,
                position,
                now - ticket.entered,
                wait if math.isfinite(wait) else None,
            )
            for position, (ask, wait) in enumerate(islice(self.dispatcher.places(now), most), 1)
            if (ticket := self._tickets.get(ask)) is not None
        ]

    def place(self, request: Request) -> Waiting | None:
        """Where a request stands in line, as of the last look; None: it does not wait."""
        if self._places is None:
            self._places = {one.request.id: one for one in self.waiting()}
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
        return len(tickets) < self.settings.queue.max or tickets.holdings.fits("", 1, len(tickets))

    # What it is told.

    def capacity_changed(self) -> None:
        """Look at all nodes again, and soon at who can go."""
        self.mirror.renew()
        self._match_soon()

    def completed(self, now: float) -> None:
        """A request has been answered: the queue moves at this rate."""
        self.rate.completed(now)

    def refuse(self, request_id: str, error: errors.GatewayError) -> bool:
        """End the wait of one request, by its own id; whether it was waiting."""
        ticket = self._tickets.of_request(request_id)
        if ticket is None:
            return False
        self._refuse(ticket, error)
        self._match_soon()  # for those it may have held up
        return True

    def turn_away(self, request_id: str, error: errors.GatewayError) -> bool:
        """End the wait of a request if it may be turned away; whether there was one."""
        ticket = self._tickets.of_request(request_id)
        if ticket is None or not ticket.may_go:
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

    def _placed(self, ask: Ask, request: Request, plan: Plan, now: float) -> Granted | None:
        """A lease for it now; None: it would have to wait."""
        dispatcher = self.dispatcher
        for _ in range(MOST_MISSES):
            if self._tickets and dispatcher.board.freed:
                # Who came before goes first, if there is anything for them.
                self._match()
            placement = dispatcher.place(ask, now)
            if placement is None:
                return None
            granted = self._taking.granted(placement, request, plan, now)
            if granted is not None:
                return granted
        return None

    # Waiting.

    async def wait(self, request: Request) -> Granted:
        """A lease in its turn, where `lease_now` had none. Raises: GatewayError, as `lease`."""
        if self.closing:
            raise errors.shutting_down()
        now = self.clock()
        plan = self._taking.planned(request, now)
        ask = self.expectations.ask(request, plan)
        place = place_for(request, self._tickets, self.admission)
        try:
            until = self._admitted(request, ask, plan, place.waiting, now)
        except errors.GatewayError:
            self.tiers.dropped(plan)
            raise
        if place.yields is not None and not request.failed:
            self._refuse(place.yields, self._crowded(now))
        ticket = Ticket(request, plan, ask, now, until, asyncio.get_running_loop().create_future())
        if not plan.any_alive():
            ticket.out_since = now
        self._enter(ticket)
        self._match_soon()
        try:
            return await ticket.granted
        except asyncio.CancelledError:
            future = ticket.granted
            if future.done() and not future.cancelled() and future.exception() is None:
                self._taking.forgo(future.result()[0], request)
            raise
        finally:
            if ticket.ask in self._tickets:
                self._remove(ticket)
                self._match_soon()

    def _remove(self, ticket: Ticket) -> None:
        """Take it out of the line, with what it has reserved."""
        self._tickets.pop(ticket.ask)
        self.dispatcher.withdraw(ticket.ask)
        self.tiers.dropped(ticket.plan)

    def _admitted(self, request: Request, ask: Ask, plan: Plan, waiting: int, now: float) -> float:
        """Until when it may wait beside so many. Raises: GatewayError."""
        predicted = None
        if request.slots and plan.any_alive():
            measured = self.mirror.measured(ask)
            by_work = self.dispatcher.predicted_wait(ask, now) if measured else None
            ahead, slots = self.dispatcher.ahead(ask), self.mirror.slots(ask)
            predicted = predicted_wait(self.rate, slots, ahead, by_work, now)
        return self.admission.admitted(
            request, waiting, predicted, self.rate.retry_after(1, now), now
        )

    def _crowded(self, now: float) -> errors.GatewayError:
        """For one that goes for another's request: it is its party that waits most."""
        return errors.queue_full(
            "Others need a place in the queue, and this client has most of them. Try again later.",
            self.rate.retry_after(len(self._tickets), now),
        )

    def _refuse(self, ticket: Ticket, error: errors.GatewayError) -> None:
        self._remove(ticket)
        if not ticket.granted.done():
            ticket.granted.set_exception(error)

    def _arm(self) -> None:
        """Look at what waits within a tick, or sooner where something falls due."""
        if not self._tickets:
            return
        now = self.clock()
        wake = self.dispatcher.wake_at(now) or math.inf
        due = min(self._look_by, self._tickets.soonest(), wake)
        loop = asyncio.get_running_loop()
        when = loop.time() + max(SOONEST, due - now)
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
        looked = self._tickets.due(now)
        if now >= self._look_by:
            self._look_by = now + TICK
            self._places = None
            self.mirror.renew()
            looked = list(self._tickets)
        for ticket in looked:
            if not ticket.granted.done():
                self._look_at(ticket, now)
        self._match()

    def _plan_anew(self, ticket: Ticket, now: float, *, renew: bool = False) -> None:
        """See where it may go by now; `renew`: what stands in line for it is of no use any more."""
        try:
            plan = self._taking.planned(ticket.request, now, ticket.ask)
        except errors.GatewayError as error:
            self._refuse(ticket, error)
            return
        if plan.same(ticket.plan) and not renew:
            self.tiers.dropped(ticket.plan)
            self._tickets.planned(ticket, plan)
        else:
            self._renew(ticket, plan)

    def _look_at(self, ticket: Ticket, now: float) -> None:
        """End a wait that has lasted long enough, or that has become hopeless."""
        self._plan_anew(ticket, now)
        if ticket.granted.done():
            return
        retry_after = self.rate.retry_after(len(self._tickets), now)
        error = overdue(ticket, self.settings, retry_after, now)
        if error is not None:
            self._refuse(ticket, error)

    def _enter(self, ticket: Ticket) -> None:
        """Put it in line, or let it go at once."""
        now = self.clock()
        for _ in range(MOST_MISSES):
            placement = self.dispatcher.arrive(ticket.ask, now)
            if placement is None:
                if not self._tickets:
                    self._look_by = now + TICK
                self._tickets.add(ticket)
                return
            granted = self._taking.granted(placement, ticket.request, ticket.plan, now)
            if granted is not None:
                ticket.granted.set_result(granted)
                return
            ticket.ask = self.expectations.ask(ticket.request, ticket.plan)
        self.tiers.dropped(ticket.plan)
        ticket.granted.set_exception(errors.no_node("No node takes this request.", 1.0))

    def _renew(self, ticket: Ticket, plan: Plan) -> None:
        """Put it in line anew: other nodes can serve it than before."""
        self._remove(ticket)
        ticket.plan, ticket.ask = plan, self.expectations.ask(ticket.request, plan)
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
        if self.expectations.behind and self._tickets:
            self.catch_up()  # What has just ended is what the free slot has in its cache.
        now = self.clock()
        if self._version != self.mirror.version:
            self._version = self.mirror.version
            for ticket in list(self._tickets):
                self._plan_anew(ticket, now, renew=True)
        for _ in range(MOST_MISSES):
            misses = 0
            for placement in self.dispatcher.match(now):
                misses += not self._grant(placement, now)
            if not misses:
                break
        self._arm()

    def _grant(self, placement: Placement, now: float) -> bool:
        """Give a placement to who waits for it; False: it was of no use, and others may go."""
        ticket = self._tickets.pop(placement.ask)
        if ticket is None or ticket.granted.done():
            self.dispatcher.cancelled(placement, now)
            return False
        granted = self._taking.granted(placement, ticket.request, ticket.plan, now)
        if granted is None:
            ticket.ask = self.expectations.ask(ticket.request, ticket.plan)
            self._enter(ticket)
            return False
        ticket.granted.set_result(granted)
        return True
