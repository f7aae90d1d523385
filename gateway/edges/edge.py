"""An edge's side: what it forwards requests with, though the brain decides.

`RemoteScheduler` stands for the brain's: it asks for leases and reports how attempts go. Requests
are admitted within their callers' limits together with the first lease that they ask for
(`EdgeMeter`), so that both take one round trip. What an edge must know at once it was told before:
settings, keys, models (`EdgeServices`).

If the link is lost, the edge can do nothing but end: the brain takes its leases for lost. Not so
in a cluster, where it is given another link, to another brain perhaps. Until then it is in limbo:
what runs goes on, and what waits goes on waiting (`edges.carried`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec
import structlog
from msgspec.structs import replace

from gateway import errors
from gateway.callers.limits import Accounts, LimitBook, RateLimit, Reservation
from gateway.callers.meter import Meter
from gateway.config.inventory import NodeTls
from gateway.config.settings import Settings, TracesSettings
from gateway.edges import messages
from gateway.edges.carried import AdmittedRequest, EdgeRequests, HeldLease, Uplink
from gateway.edges.messages import KeyCopies, ModelCopies
from gateway.errors import GatewayError
from gateway.events import (
    FEW_DEFERRED,
    AttemptEnded,
    EventBus,
    RequestRecord,
    StreamResumed,
    call_later,
)
from gateway.forward.context import ForwardContext
from gateway.forward.in_flight import InFlightRegistry, TimeoutMonitor
from gateway.lease import (
    NOTHING_CHARGED,
    AttemptCharge,
    AttemptReport,
    GrantedLease,
    KeyedHash,
    LeaseRequest,
    NodeInfo,
    NodeQuestion,
    QueuePosition,
    Tried,
    UsageReport,
)
from gateway.nodes.server_properties import ServerProperties
from gateway.schedule.admission import class_limits
from gateway.schedule.core.demand_model import has_long_prompt
from gateway.schedule.decision_log import DecisionLog
from gateway.terms import Caller, Headers, Priority
from gateway.transport.connection import TurnLimit
from gateway.transport.link import SILENCE_SECONDS, EdgeLink
from gateway.transport.pool import ConnectionPool, NodeAddress, tls_context
from gateway.transport.resolver import Resolver
from gateway.watch.request_tracing import RequestTracing

log = structlog.get_logger()
LONGEST_TRACEPARENT = 512  # bytes of the header; a longer one says nothing
# Age of a lease, in seconds, from which on it is given back and asked for anew. The brain gives the
# edge up when it has heard nothing for `SILENCE_SECONDS`: so a younger lease is still the edge's.
GRANT_SECONDS = SILENCE_SECONDS / 2
EXCUSE_SECONDS = 1.0  # seconds for which the answer holds that a node may be silent
ANSWER_SECONDS = 10.0  # most seconds to wait for an answer that the brain gives at once
LIMBO_BEAT_SECONDS = 0.25  # seconds between two looks at what waits while there is no link
GREETED_SECONDS = 5.0  # seconds for a brain of a cluster to answer; then its link is given up


class Nodes:
    """The nodes that leases have named, and the edge's own connections to them."""

    def __init__(self, resolver: Resolver, turn: TurnLimit) -> None:
        self._resolver, self._turn = resolver, turn
        self._pools: dict[str, tuple[messages.NodeRoute, ConnectionPool]] = {}
        self.by_name: dict[str, NodeInfo] = {}

    def meet(self, met: messages.NodeMet) -> None:
        """A node is new, or has changed."""
        name, known = met.info.name, self._pools.get(met.info.name)
        if known is None or known[0] != met.route:
            self.forget(name)
            known = self._pools[name] = met.route, self._open(name, met.route)
        self.by_name[name] = replace(met.info, connections=known[1])

    def forget(self, name: str) -> None:
        """A node has left, or its route changed. Leases that name it may still use its pool."""
        known = self._pools.pop(name, None)
        if known is not None:
            del self.by_name[name]
            known[1].close()

    def forget_all(self) -> None:
        """Another brain tells of nodes from now on, or none."""
        for name in list(self.by_name):
            self.forget(name)

    def _open(self, name: str, route: messages.NodeRoute) -> ConnectionPool:
        try:
            tls = None if route.tls is None else tls_context(NodeTls.model_validate(route.tls))
        except (OSError, ValueError) as error:  # Those of TLS are both.
            log.error("files of a node's TLS can't be used", node=name, why=str(error))  # noqa: TRY400
            tls = ssl.create_default_context()
        address = NodeAddress(
            route.host, route.port, route.path_prefix, route.header_lines, tls, route.server_name
        )
        return ConnectionPool(address, self._resolver, turn=self._turn)


@dataclass(slots=True, eq=False)
class WaitingAsk:
    """A request that waits for a lease."""

    asked: messages.AskLease
    asked_at: float
    granted: asyncio.Future[GrantedLease]
    whole: AdmittedRequest | None


class RemoteScheduler:
    """The brain's scheduler, as an edge sees it: a `LeaseService` and a `RequestQueue`."""

    def __init__(
        self,
        link: Uplink,
        nodes: Nodes,
        bus: EventBus,
        clock: Callable[[], float],
        requests: EdgeRequests,
    ) -> None:
        self._link, self._nodes, self._bus, self._clock = link, nodes, bus, clock
        self._requests = requests
        self._clustered = requests.clustered
        self.edges = 1  # how many edges share what is counted here
        self.closing = False  # whether there are no more leases
        self.most_slots = 0  # of a host, as the brain said last
        self.grant_seconds = GRANT_SECONDS
        self._asks: Iterator[int] = itertools.count(1)
        self._waiting: dict[int, WaitingAsk] = {}
        self._asked_by: dict[str, int] = {}
        """Under which number each waiting request has asked."""
        self._held: dict[int, HeldLease] = {}
        self._questions: dict[int, tuple[messages.AskNodes, asyncio.Future[messages.NodeAnswer]]]
        self._questions = {}
        self._excuses: dict[int, int] = {}
        """Leases that are asked about, by the number of the question."""
        self._positions: dict[str, QueuePosition | None] = {}
        self._positions_asked: set[str] = set()
        """Requests whose place is being asked for."""
        self._unsettled = 0  # responses that have ended and are not accounted for

    # Asked for a lease.

    def lease_now(self, _: LeaseRequest, __: Tried, ___: float, /) -> GrantedLease | None:
        """None: what it takes to know is elsewhere."""
        return None

    async def wait_for_lease(
        self, request: LeaseRequest, tried: Tried, age: float, *, response_started: bool = False
    ) -> GrantedLease:
        """Wait until a slot is granted. Raises: GatewayError."""
        if self.closing:
            raise errors.shutting_down()
        whole = self._requests.whole(request.id)
        opening = None if whole is None else whole.opening_with(request, age, self._clock())
        if self._unsettled and (
            has_long_prompt(request)
            or (whole is not None and opening is not None and whole.accounts.tracked)
        ):
            self._bus.flush()  # So that the brain knows what those took, and what nodes cached.
        asked = messages.AskLease(next(self._asks), request, tried, age, response_started, opening)
        waiting = WaitingAsk(
            asked, self._clock(), asyncio.get_running_loop().create_future(), whole
        )
        self._waiting[asked.ask] = waiting
        self._asked_by[request.id] = asked.ask
        self._link.tell(asked)
        try:
            return await waiting.granted
        except asyncio.CancelledError:
            granted = waiting.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._give_back(granted.result().id, late=False)
            raise
        finally:
            self._withdraw(request.id)

    def _withdraw(self, request_id: str) -> None:
        """Nobody waits any more for the lease that this request has asked for."""
        ask = self._asked_by.pop(request_id, None)
        self._positions.pop(request_id, None)
        if ask is not None and self._waiting.pop(ask, None) is not None:
            self._link.tell(messages.Withdraw(ask))

    def granted(self, told: messages.Granted) -> None:
        """A lease was granted."""
        waiting = self._waiting.pop(told.ask, None)
        if waiting is not None and waiting.whole is not None:
            waiting.whole.tell_rates(told.rates)
        if waiting is None or waiting.granted.done():
            self._link.tell(messages.GiveBack(told.id, late=False))
            return
        age = self._link.link.age
        if age > self.grant_seconds:
            # The brain may have given this edge up meanwhile, and what it had.
            self._link.tell(messages.GiveBack(told.id, late=True))
            self._link.tell(self._asks_again(waiting))
            return
        lease = GrantedLease(
            told.id,
            self._nodes.by_name[told.node],
            told.model,
            told.served_name,
            told.stream,
            told.reading,
            slots=told.slots,
            fallback=told.fallback,
        )
        now = self._clock()
        self._held[told.id] = HeldLease(
            lease, waiting.asked.request, now, now - age, told.shares_pool
        )
        waiting.granted.set_result(lease)

    def _asks_again(self, waiting: WaitingAsk) -> messages.AskLease:
        """Have it wait under another number; returns what it asks."""
        asked, whole, now = waiting.asked, waiting.whole, self._clock()
        age = asked.age + now - waiting.asked_at
        opening = None if whole is None else whole.opening_with(asked.request, age, now)
        asked = replace(asked, ask=next(self._asks), age=age, opening=opening)
        waiting.asked, waiting.asked_at = asked, now
        self._asked_by[asked.request.id] = asked.ask
        self._waiting[asked.ask] = waiting
        return asked

    def refused(self, told: messages.Refused) -> None:
        """There is no lease for a request."""
        waiting = self._waiting.pop(told.ask, None)
        if waiting is None:
            return
        if waiting.whole is not None:
            waiting.whole.tell_rates(told.rates)
            if waiting.asked.opening is not None:
                waiting.whole.admission = "refused"
        if not waiting.granted.done():
            waiting.granted.set_exception(told.error.error())

    def may_start(self, lease_id: int) -> bool:
        """Whether the request may be written now, at once; else its lease is given back.

        In a cluster not if the brain may take the edge for gone, and its slots for free.
        """
        if not self._clustered:
            return True
        held = self._held.get(lease_id)
        if held is None:
            return False
        if self._clock() - held.rests_on > self.grant_seconds:
            self._give_back(lease_id, late=True)
            return False
        if not held.started:
            held.started = True
            self._requests.leases_of(held.request.id)[lease_id] = held
        return True

    def _give_back(self, lease_id: int, *, late: bool) -> None:
        held = self._held.pop(lease_id, None)
        if held is not None:
            self._requests.leases_of(held.request.id).pop(lease_id, None)
            self._link.tell(messages.GiveBack(lease_id, late=late))

    # Asked where else a request could go.

    async def ask_nodes(
        self, what: NodeQuestion, request: LeaseRequest, tried: Tried, *, but_paused: bool = False
    ) -> bool:
        """Ask the brain about nodes. Raises: GatewayError."""
        if self.closing:
            raise errors.shutting_down()
        asked = messages.AskNodes(next(self._asks), what, request, tried, but_paused)
        answer: asyncio.Future[messages.NodeAnswer] = asyncio.get_running_loop().create_future()
        self._questions[asked.ask] = asked, answer
        self._link.tell(asked)
        try:
            told = await self._answer(answer)
        finally:
            del self._questions[asked.ask]
        if told is None:
            return False
        if told.error is not None:
            raise told.error.error()
        return told.yes

    async def _answer(
        self, answer: asyncio.Future[messages.NodeAnswer]
    ) -> messages.NodeAnswer | None:
        """What the brain answers; None: nothing, though it could. Raises: GatewayError."""
        while True:
            await asyncio.wait([answer], timeout=ANSWER_SECONDS)
            if answer.done():
                return answer.result()
            if self._link.is_open:
                return None

    def answered_question(self, told: messages.NodeAnswer) -> None:
        """The brain has answered."""
        question, lease_id = self._questions.get(told.ask), self._excuses.pop(told.ask, None)
        if question is not None and not question[1].done():
            question[1].set_result(told)
        held = None if lease_id is None else self._held.get(lease_id)
        if held is not None:
            held.excused, held.excused_at, held.asks = told.yes, self._clock(), False

    def resume_key_of(self, props: object) -> tuple[object, ...]:
        """The `resume_key` of a server that answers `/props` like this."""
        properties = ServerProperties()
        properties.read_props(props)
        return properties.resume_key()

    def most_slots_of_a_host(self) -> int:
        """The slots of the largest host: all its requests may have to move at once."""
        return math.ceil(self.most_slots / self.edges)

    # Told how the attempt goes.

    def reading_began(self, lease_id: int) -> None:
        """The head of a streamed response has come: a slot reads the prompt."""
        self._held[lease_id].phase = "reading"
        self._link.tell(messages.LeaseNews(lease_id, "reading_began"))

    def content_began(self, lease_id: int) -> None:
        """The first content has come: the prompt has been read."""
        self._held[lease_id].phase = "content"
        self._link.tell(messages.LeaseNews(lease_id, "content_began"))

    def content_went_on(self, lease_id: int, tokens: int) -> None:
        """More content has come since the last report; `tokens`: 0: it is not known how fast."""
        held = self._held[lease_id]
        held.tokens = max(held.tokens, tokens)
        self._link.tell(messages.ContentWentOn(lease_id, tokens))

    def response_received(self, lease_id: int) -> None:
        """The whole response has come: the slots are free, though the client still reads it."""
        self._held[lease_id].phase = "received"
        self._link.tell(messages.LeaseNews(lease_id, "response_received"))

    def answered(self, lease_id: int) -> None:
        """The node answers a request that other nodes have failed: those were to blame."""
        self._link.tell(messages.LeaseNews(lease_id, "answered"))

    def is_silence_excused(self, lease_id: int) -> bool | None:
        """Whether the node reads another prompt, as the brain said last; None: it is asked."""
        held, now = self._held[lease_id], self._clock()
        fresh = held.excused is not None and now - held.excused_at < EXCUSE_SECONDS
        if not (fresh or held.asks) and self._link.is_open:
            ask = next(self._asks)
            self._excuses[ask], held.asks = lease_id, True
            self._link.tell(messages.AskExcused(ask, lease_id))
        return held.excused if fresh else None

    def pool_overflowed(self, lease_id: int) -> bool:
        """The node says that its context is full: whether its slots share that, as is known now.

        That its slots are seen to share it is the brain's to learn; here it is believed of a
        server of llama.cpp that has more of this edge's work.
        """
        self._link.tell(messages.LeaseNews(lease_id, "pool_overflowed"))
        held = self._held[lease_id]
        node = held.lease.node
        if held.shares_pool or node.kind != "llama.cpp":
            return held.shares_pool
        return sum(one.lease.node.name == node.name for one in self._held.values()) > 1

    # Told how it ended.

    def ended(self, report: AttemptReport) -> AttemptCharge:
        """The attempt is over. What it took is counted by the brain."""
        held = self._held.pop(report.lease_id, None)
        if held is None:
            return NOTHING_CHARGED  # It was given back, or its brain is gone.
        self._unsettled += report.response_began
        if self._clustered:
            held.phase, held.ended_at = "ended", self._clock()
            if not report.response_began:
                self._requests.leases_of(held.request.id).pop(report.lease_id, None)
        self._link.tell(report)
        if report.response_began and has_long_prompt(held.request):
            # By when the brain gives the slot away, it must know what that has cached.
            asyncio.get_running_loop().call_soon(self._bus.flush)
            self._link.link.postpone()
        return NOTHING_CHARGED

    def settle(self, report: UsageReport, request: LeaseRequest, /) -> AttemptCharge:
        """Count what an ended response took: by the brain."""
        self._unsettled -= 1
        if self._clustered:
            held = self._requests.leases_of(request.id).get(report.lease_id)
            if held is not None:
                held.usage = report
        self._link.tell(report)
        return NOTHING_CHARGED

    def discard(self, request_id: str) -> None:
        """What the attempts of this request took so far has brought its client nothing."""
        used = self._requests.leases_of(request_id)
        for lease_id in [
            id_ for id_, held in used.items() if held.usage and held.request.id == request_id
        ]:
            del used[lease_id]
        self._link.tell(messages.Discarded(request_id))

    # From one link to the next.

    def suspend(self) -> None:
        """The link is lost, or replaced: what has not started yet is asked for anew."""
        self._held = {id_: held for id_, held in self._held.items() if held.started}
        for held in self._held.values():
            held.asks = False
        self._excuses.clear()
        self._positions_asked.clear()

    def resume(self, dealt_with_at: float) -> None:
        """There is a brain again: tell it what is carried, and ask it what was asked before.

        `dealt_with_at`: what was told before that is known to the last brain.
        """
        for waiting in self._waiting.values():
            was_heard = waiting.asked.opening is None or waiting.asked_at < dealt_with_at
            if waiting.whole is not None and not was_heard:
                waiting.whole.admission = "due"
        self._link.open(
            itertools.chain(
                self._requests.carried(self._clock),
                [messages.Carried()],
                self._asked_again(list(self._waiting.values())),
                [asked for asked, _ in self._questions.values()],
                self._requests.unbooked(),
            )
        )

    def _asked_again(self, waiting_before: Iterable[WaitingAsk]) -> Iterator[messages.AskLease]:
        """What those of these ask the next brain that still wait when it is told."""
        for waiting in waiting_before:
            if self._waiting.pop(waiting.asked.ask, None) is not None:
                yield self._asks_again(waiting)

    def refuse_overdue(self, settings: Settings) -> None:
        """End the wait of requests that wait for longer than they may, as there is no brain."""
        now = self._clock()
        most_of = {priority: class_limits(settings, priority).max_wait for priority in Priority}
        for waiting in list(self._waiting.values()):
            caller = waiting.asked.request.caller
            most = math.inf if caller.time_limit is None else caller.time_limit
            if most == math.inf or not caller.patient:
                most = min(most, most_of[caller.priority])
            waited = waiting.asked.age + now - waiting.asked_at
            if waited >= most and not waiting.granted.done():
                waiting.granted.set_exception(
                    errors.queue_timeout(
                        f"No slot came free in {waited:.0f} s.", errors.UNREPORTED_RETRY_AFTER
                    )
                )

    # The queue.

    def has_room(self) -> bool:
        """Whether one more request could be taken; the brain says so for each."""
        return not self.closing

    def retry_after(self) -> float:
        """Seconds until another try is worth while."""
        return errors.UNREPORTED_RETRY_AFTER

    def queue_position(self, request_id: str) -> QueuePosition | None:
        """Where a request stands, as the brain said when it was asked last."""
        if request_id not in self._asked_by:
            return None
        if request_id not in self._positions_asked and self._link.is_open:
            self._positions_asked.add(request_id)
            self._link.tell(messages.AskPosition(request_id))
        return self._positions.get(request_id)

    def take_position(self, told: messages.Position) -> None:
        """The brain says where a request stands."""
        self._positions_asked.discard(told.request_id)
        if told.request_id in self._asked_by:
            self._positions[told.request_id] = told.position

    def refuse(self, request_id: str, error: GatewayError) -> bool:
        """End the wait of a request with this error; returns whether it was waiting."""
        waiting = self._waiting.get(self._asked_by.get(request_id, 0))
        if waiting is None or waiting.granted.done():
            return False
        waiting.granted.set_exception(error)
        return True

    def shed(self, request_id: str, error: GatewayError) -> bool:
        """The same, to free its memory: not once it has been at a node."""
        waiting = self._waiting.get(self._asked_by.get(request_id, 0))
        if waiting is None:
            return False
        asked = waiting.asked
        is_kept = asked.tried.was_sent or asked.request.caller.admitted
        return not is_kept and self.refuse(request_id, error)

    def keep_in_queue(self, request_id: str) -> None:
        """The request's client has the head of a response: it is displaced last."""
        waiting = self._waiting.get(self._asked_by.get(request_id, 0))
        if waiting is not None:
            waiting.asked = replace(waiting.asked, response_started=True)
            self._link.tell(messages.KeepInQueue(request_id))

    def close(self) -> None:
        """The link is lost: nobody gets a lease any more."""
        self.closing = True
        for waiting in list(self._waiting.values()):
            if not waiting.granted.done():
                waiting.granted.set_exception(errors.shutting_down())
        self._waiting.clear()
        for _, answer in self._questions.values():
            if not answer.done():
                answer.set_exception(errors.shutting_down())


class EdgeAccounts(Accounts):
    """Accounts that the brain counts on; here they say what a caller may, and what is left."""

    __slots__ = ("rates",)

    def __init__(self, of: Accounts) -> None:
        self.caller, self.user = of.caller, of.user
        self.replace_accounts(of.tracked, of.version)
        self.rates: messages.Rates = (None, None)

    def tell_rates(self, rates: messages.Rates | None) -> None:
        """What was left of the limits when a request was admitted or refused."""
        if rates is not None:
            now = time.time()
            requests, tokens = (_from_now(rate, now) for rate in rates)
            self.rates = requests, tokens


def _from_now(rate: RateLimit | None, now: float) -> RateLimit | None:
    return None if rate is None else replace(rate, resets_at=now + rate.reset)


class EdgeBook(LimitBook):
    """The limits of callers, without counters: what they have used, the brain knows."""

    def accounts(self, caller: Caller, user: str | None = None) -> Accounts:
        """The accounts on which the requests of this caller and end user count."""
        return EdgeAccounts(LimitBook.accounts(self, caller, user))

    def rate_limits(self, accounts: Accounts) -> messages.Rates:
        """The tightest limits, as the brain told last."""
        return accounts.rates if isinstance(accounts, EdgeAccounts) else (None, None)


class EdgeMeter(Meter):
    """Has requests admitted by the brain with their first lease, and their records sent there."""

    def __init__(
        self,
        book: LimitBook,
        bus: EventBus,
        requests: EdgeRequests,
        tracing: EdgeTracing,
        link: Uplink,
    ) -> None:
        Meter.__init__(self, book, bus)
        self._events, self._requests, self._tracing, self._link = bus, requests, tracing, link
        bus.subscribe(RequestRecord, self.turned)

    def admit(
        self, accounts: Accounts, request: LeaseRequest, record: RequestRecord, prompts: int = 1
    ) -> Reservation:
        """Have a request admitted with its first lease, which is refused if this is.

        It must be reported to `ended`.
        """
        assert isinstance(accounts, EdgeAccounts)
        self.book.bring_up_to_date(accounts)
        caller = accounts.caller
        opening = messages.Opening(
            request.id,
            record.x_request_id,
            record.path,
            caller.id,
            accounts.user,
            caller.max_priority if caller.anonymous else None,
            caller.anonymous and caller.trust_user_headers,
            request,
            prompts,
            record.model,
            record.stream,
            0.0,
            trace_of(record),
        )
        self._requests.open[request.id] = AdmittedRequest(
            opening, accounts, accounts.tell_rates, record
        )
        tracked, version = accounts.tracked, accounts.version
        return Reservation(self.book, accounts, tracked, version, request, 0.0, 0, 0.0)

    def ended(self, reservation: Reservation, record: RequestRecord) -> None:
        """The response has ended. The brain gets its record when what it used is known, soon."""
        one = self._requests.open[reservation.request.id]
        one.released = True
        if one.admission != "due":
            self._link.tell(messages.Released(reservation.request.id))
        self._events.defer(record.when_complete, self._finish, record, one)

    def _finish(self, record: RequestRecord, one: AdmittedRequest) -> None:
        # One that has asked for no lease was not admitted yet.
        opening = one.opening if one.admission == "due" else None
        self._requests.ended(
            messages.Finished(messages.EndedRecord.of(record), opening, self._trace_of(record))
        )

    def turned(self, record: RequestRecord) -> None:
        """A request has ended that was never to be admitted."""
        self._requests.ended(
            messages.Turned(messages.EndedRecord.of(record), self._trace_of(record))
        )

    def _trace_of(self, record: RequestRecord) -> messages.TraceOnWire | None:
        return trace_of(record) or self._tracing.take_parent(record.request_id)


def trace_of(record: RequestRecord) -> messages.TraceOnWire | None:
    """The trace that a request is part of; None: it is not traced."""
    trace = record.trace
    return None if trace is None else messages.TraceOnWire(trace.trace_id, trace.parent_id)


class EdgeTracing(RequestTracing):
    """Decides which requests are traced; the brain has their decisions, and exports them."""

    def __init__(
        self, settings: TracesSettings, clock: Callable[[], float], rng: random.Random
    ) -> None:
        self._parents: dict[str, bytes] = {}
        """What clients said of their traces whose requests failed: the brain may trace those."""
        RequestTracing.__init__(self, settings, DecisionLog(clock), clock=clock, rng=rng)

    def finished(self, request_id: str, record: RequestRecord, headers: Headers, _: float) -> None:
        """A request has ended; its record is sent soon."""
        if record.trace is None and record.status >= 500:
            found = [value for name, value in headers if name == b"traceparent"]
            if len(found) == 1 and len(found[0]) <= LONGEST_TRACEPARENT:
                self._parents[request_id] = found[0]

    def take_parent(self, request_id: str) -> messages.TraceOnWire | None:
        """What its client said of a trace, if the request has failed and is not traced."""
        found = self._parents.pop(request_id, None)
        return None if found is None else messages.TraceOnWire(None, None, found)

    def _export(self, _: TracesSettings) -> None:
        """Send nothing."""


class NotReady(Exception):  # noqa: N818 - the edge ends then
    """The brain has not told in time what an edge must know."""


class EdgeServices:
    """All that an edge forwards requests with. `relink` starts it, and `aclose` ends it."""

    settings: Settings  # in force; set once it is ready
    loopback: bool  # whether only this machine can reach the public listener; set with a link
    edges = 1  # how many edges share the limits of the settings

    def __init__(
        self,
        name: str,
        *,
        clustered: bool = False,
        on_configured: Callable[[], None] = lambda: None,
        on_lost: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        resolver: Resolver | None = None,
    ) -> None:
        """`on_configured` is called after each change of the attributes above but the first.

        `on_lost`: when the link is lost, with the reason; the edge must end then, or if it is
        `clustered`, be given another one (`relink`).
        """
        self.name, self._on_configured, self._on_lost = name, on_configured, on_lost
        self.clustered = clustered
        self.epoch = 0  # the highest of a brain that it has seen
        self._given_up: str | None = None  # why it never gets to know what it must
        self._told_carried = False  # whether the brain was told what is carried
        self._linked_at = 0.0
        self._dealt_with_at = 0.0  # what was told before that, the last brain has heard
        self._limbo: asyncio.TimerHandle | None = None
        self._linking: asyncio.Task[EdgeLink] | None = None
        self._clock = clock
        self._resolver = resolver or Resolver()
        self.turn_limit = TurnLimit()
        self._nodes = Nodes(self._resolver, self.turn_limit)
        self._keys = KeyCopies(wall_clock)
        self._ready: asyncio.Event = asyncio.Event()
        self._missing: set[type] = {messages.Configuration, messages.Keys, messages.Models}
        self.key_ring, self.keyed_hash = self._keys.ring, KeyedHash()
        self.catalog = ModelCopies()
        self.bus, self.registry = EventBus(call_later, FEW_DEFERRED), InFlightRegistry()
        self.timeout_monitor = TimeoutMonitor(clock)
        self.link = self._new_link()
        self.uplink = Uplink(self.link)
        self.requests = EdgeRequests(self.uplink, clustered=clustered)
        self.scheduler = RemoteScheduler(self.uplink, self._nodes, self.bus, clock, self.requests)
        """Both the `LeaseService` and the `RequestQueue`."""
        defaults = Settings()
        self.tracing = EdgeTracing(defaults.telemetry.traces, clock, rng or random.Random())
        self.meter = EdgeMeter(
            EdgeBook(defaults, clock=clock, wall_clock=wall_clock),
            self.bus,
            self.requests,
            self.tracing,
            self.uplink,
        )
        self.context = ForwardContext(
            self.scheduler,
            defaults,
            self.bus,
            self.timeout_monitor,
            clock,
            keyed_hash=self.keyed_hash,
        )
        self.bus.subscribe(AttemptEnded, self._tell)
        self.bus.subscribe(StreamResumed, self._tell)
        scheduler = self.scheduler
        self._takers: dict[type, Callable[..., None]] = {
            messages.Configuration: self._configure,
            messages.Keys: self._keys.take,
            messages.Models: self._take_models,
            messages.NodeMet: self._nodes.meet,
            messages.NodeGone: lambda told: self._nodes.forget(told.name),
            messages.Granted: scheduler.granted,
            messages.Refused: scheduler.refused,
            messages.NodeAnswer: scheduler.answered_question,
            messages.Position: scheduler.take_position,
            messages.EndRequest: self._end_request,
            messages.Quarantined: self._quarantined,
            messages.Adopted: lambda _: log.info("an edge is linked", edge=self.name),
            messages.Booked: self.requests.booked,
        }
        self.context.quarantine.subscribe(
            lambda digest, losses: self._tell(messages.Quarantined.of(digest, losses))
        )

    async def wait_ready(self, seconds: float | None = None) -> None:
        """Wait until everything is known that the edge must know.

        Raises: NotReady, after so many seconds or when no link comes any more.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._ready.wait()
        except TimeoutError:
            raise NotReady(f"nothing was heard within {seconds:g} s") from None
        if self._given_up is not None:
            raise NotReady(self._given_up)

    def give_up(self, why: str) -> None:
        """No link comes any more."""
        self._given_up = why
        self._ready.set()

    def relink(self, sock: socket.socket, *, loopback: bool = False, edges: int = 1) -> None:
        """Use a link over this Unix socket in place of the last one, if any, which is closed.

        `loopback`, `edges`: those of this machine; the brain may be elsewhere.
        """
        self.loopback, self.edges = loopback, edges
        if self.scheduler.closing:
            sock.close()
            return
        if self.uplink.is_open:
            self._suspend()
        self.link.close()
        self._told_carried, self._linked_at = False, self._clock()
        self._nodes.forget_all()
        self._keys.begin_anew()
        self.link = self._new_link()
        self.uplink.use(self.link)
        self.link.tell(messages.Hello(messages.VERSION, self.name, os.getpid(), self.epoch))
        self._linking = asyncio.create_task(EdgeLink.over(sock, self.link))

    async def wait_booked(self, seconds: float) -> None:
        """Wait until the ledger has the records of all that has ended, or for so many seconds."""
        for _ in range(round(seconds / LIMBO_BEAT_SECONDS)):
            self.bus.flush()  # what has ended just now is to be told, too
            if self.requests.are_booked or self._given_up is not None:
                return
            await asyncio.sleep(LIMBO_BEAT_SECONDS)

    async def aclose(self) -> None:
        """Tell the brain what it has not heard yet, and end the link."""
        self.bus.flush()
        self.scheduler.close()
        if self._limbo is not None:
            self._limbo.cancel()
        if self._linking is not None:
            await asyncio.wait([self._linking])
        if self.clustered:
            self.uplink.tell(messages.Leaving())
        self.link.close()
        await self.link.wait_closed()
        self.timeout_monitor.close()
        self._nodes.forget_all()
        self._resolver.close()

    def _tell(self, message: object) -> None:
        self.uplink.tell(message)

    def _new_link(self) -> EdgeLink:
        return EdgeLink(
            messages.ToEdge, self._receive, self._lost, self._clock, on_beat=self._on_beat
        )

    def _suspend(self) -> None:
        """There is no brain until there is another link."""
        self._dealt_with_at = self._clock() - self.link.age
        self.uplink.shut()
        self.scheduler.suspend()
        if self._limbo is not None:
            self._limbo.cancel()
        self._beat_in_limbo()

    def _beat_in_limbo(self) -> None:
        """Do what is done with each sign of life, though there is no link to give any."""
        if not (self.uplink.is_open or self.scheduler.closing):
            if self.link.lost:
                self._on_beat()
            self.scheduler.refuse_overdue(self.settings)
            loop = asyncio.get_running_loop()
            self._limbo = loop.call_later(LIMBO_BEAT_SECONDS, self._beat_in_limbo)

    def _on_beat(self) -> None:
        self.key_ring.expire()
        if self.clustered and not (self._told_carried or self.link.lost):
            waited = self._clock() - self._linked_at
            if waited > GREETED_SECONDS:
                self.link.fail(f"the brain has not answered for {waited:.0f} s")

    def _receive(self, message: object) -> None:
        kind = type(message)
        self._takers[kind](message)
        if self._missing and not (isinstance(message, messages.Keys) and not message.last):
            self._missing.discard(kind)
            if not self._missing:
                self._ready.set()

    def _configure(self, told: messages.Configuration) -> None:
        if told.version != messages.VERSION:
            self.link.fail(f"version {told.version} in place of {messages.VERSION}")
            return
        if told.epoch < self.epoch:
            self.link.fail(f"its epoch is {told.epoch}, and {self.epoch} was seen")
            return
        self.epoch, self.scheduler.grant_seconds = told.epoch, told.grant_seconds
        self._put_in_force(told)
        if not self._told_carried:
            self._told_carried = True
            self.scheduler.resume(self._dealt_with_at)

    def _put_in_force(self, told: messages.Configuration) -> None:
        is_first = not hasattr(self, "settings")
        try:
            settings = Settings.model_validate(msgspec.json.decode(told.settings))
        except ValueError:
            if is_first:
                raise
            # A file that they name is gone since the brain has read them.
            log.exception("settings can't be used, nothing changed")
            return
        self.settings = settings
        if told.hash_key != self.keyed_hash.key:
            self.keyed_hash.set_key(told.hash_key)
        self.scheduler.edges = told.edges
        # Each edge has its share of the least number of retries.
        least = math.ceil(settings.retries.budget_min / max(1, told.edges))
        retries = settings.retries.model_copy(update={"budget_min": least})
        self.context.configure(settings.model_copy(update={"retries": retries}))
        self.context.usage_options.forget()
        self.meter.book.configure(settings)
        self.tracing.configure(settings.telemetry.traces)
        if not is_first:
            self._on_configured()

    def _take_models(self, told: messages.Models) -> None:
        self.catalog.take(told)
        self.scheduler.most_slots = told.most_slots_of_a_host

    def _quarantined(self, told: messages.Quarantined) -> None:
        self.context.quarantine.take(told.digest, told.losses(self._clock()))

    def _end_request(self, told: messages.EndRequest) -> None:
        """Somebody ends a request, or has it leave its node."""
        found, error = self.registry.find(told.request_id), told.error.error()
        if found is None:
            return
        if told.evict:
            found.evict(error)
        elif not self.scheduler.refuse(told.request_id, error):
            found.cancel(error)

    def _lost(self, reason: str) -> None:
        if not self.clustered:
            self.scheduler.close()
            self.give_up("the link was lost")
        else:
            tell = log.warning if self.uplink.is_open else log.info
            tell("an edge has lost its link, and waits for another", edge=self.name, why=reason)
            if self.uplink.is_open:
                self._suspend()
        self._on_lost(reason)
