"""The brain's side of its edges: grants them leases, admits their requests, and ends what is lost.

An `EdgeSession` is one edge as the brain knows it: the requests that run there, which stand in the
registry like the brain's own, and the leases that it holds. When the link is lost, its leases are
given to the reclaimer, which frees each slot when the node shows it idle, and its requests end.

In a cluster edges outlive their links. A brain takes them during a `Reign` alone, and each tells
first what it carries from its last link. A link that is lost meanwhile is waited for a little. At
the end of the reign what runs is left to the next brain, which records it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import structlog
from msgspec.structs import replace

from gateway import errors
from gateway.callers.keys import KeyRing
from gateway.callers.ledger import Ledger
from gateway.callers.limits import Accounts, Reservation
from gateway.callers.meter import Meter
from gateway.callers.processes import EDGE_DIED
from gateway.cluster.fencing import GRANT_SECONDS
from gateway.config.settings import Settings
from gateway.edges import messages
from gateway.edges.messages import KeySnapshots, ModelSnapshots
from gateway.edges.reign import Reign
from gateway.errors import GatewayError, drop_traceback
from gateway.events import AttemptEnded, EdgeLost, EventBus, RequestRecord, StreamResumed
from gateway.forward.attempt_ends import CALLERS_OUTCOMES
from gateway.forward.context import ForwardContext
from gateway.forward.in_flight import Attempt, InFlightRegistry, InFlightRequest
from gateway.lease import (
    NOTHING_CHARGED,
    AttemptCharge,
    AttemptReport,
    GrantedLease,
    LeaseRequest,
    LeaseService,
    NodeInfo,
    Usage,
    UsageReport,
)
from gateway.nodes.node import Node
from gateway.request.preparation import Request
from gateway.schedule.scheduler import LeaseRecord, Scheduler
from gateway.terms import Caller, Priority, RequestTrace
from gateway.transport.link import EdgeLink
from gateway.watch.request_tracing import RequestTracing
from gateway.web.asgi import in_steps

log = structlog.get_logger()
# Settings that edges have no use for; keys are told apart from the others.
BRAINS_OWN = {"admin", "batches", "keys", "store", "webhooks"}
ENDED_AT_ONCE = 32  # requests of a lost edge that are ended in one turn of the event loop
MOST_LOSSES = 16  # lost edges that are remembered
MOST_ACCOUNTS = 4096  # callers whose accounts are remembered for one edge
# Seconds for which an edge whose link is lost is waited for. By then it has started all that it was
# granted, or never does (`GRANT_SECONDS`).
GRACE_SECONDS = 5.0


class BrokenRules(Exception):  # noqa: N818 - ends the link
    """An edge has told what can't be."""


class EdgeAttempt(Attempt):
    """An attempt at an edge, as far as that has told of it."""

    __slots__ = ("complete", "content_events", "last_content_at")

    last_content_at: float | None
    content_events: int
    complete: bool

    def __init__(self, in_flight: InFlightRequest, lease: GrantedLease, of: ForwardContext) -> None:
        self.last_content_at, self.content_events, self.complete = None, 0, False
        Attempt.__init__(
            self, in_flight, lease, of.settings, of.leases, of.timeout_monitor, of.clock
        )

    def content_came(self, now: float, events: int) -> None:
        """Content has come; `events`: in all, as far as is known."""
        self.last_content_at, self.content_events = now, max(events, self.content_events)

    def began_before(self, seconds: float) -> None:
        """It began so many seconds ago, under another brain."""
        self.started_at -= seconds


class EdgePart(InFlightRequest, eq=False, kw_only=True):
    """A request at an edge, or one prompt of it."""

    session: EdgeSession

    def move_to(self, session: EdgeSession) -> None:
        """The edge has another link."""
        self.session = session

    def cancel(self, error: GatewayError) -> None:
        """End the request; its client gets `error`, as an event if the response has begun."""
        self._tell_end(error, evict=False)

    def evict(self, error: GatewayError) -> None:
        """Make it leave its node; its client gets `error` if no other node takes it."""
        self._tell_end(error, evict=True)

    def _tell_end(self, error: GatewayError, *, evict: bool) -> None:
        wire = messages.WireError.of(error)
        self.session.link.tell(messages.EndRequest(self.request.id, wire, evict))


class EdgeRequest(EdgePart, eq=False, kw_only=True):
    """A request at an edge that was admitted, until all of its use is known."""

    reservation: Reservation
    charges: dict[str, list[tuple[AttemptCharge, bool]]]
    """What its attempts took, by the id of the request or of one prompt of it; and whether the
    tokens are to be counted, which the edge does not know."""
    ended_at: float | None = None  # when its response has ended; monotonic
    accounted: set[int] = msgspec.field(default_factory=set)
    """Leases that `charges` has, or that took nothing; in a cluster, where they may be told again.
    """


@dataclass(slots=True, eq=False)
class EdgeLease:
    """A lease that an edge holds, or has ended and not accounted for."""

    part: EdgePart
    attempt: EdgeAttempt
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class Brain:
    """What all sessions share: the gateway's own objects."""

    scheduler: Scheduler
    context: ForwardContext  # the brain's own; its leases are those of the scheduler
    registry: InFlightRegistry
    meter: Meter
    key_ring: KeyRing
    bus: EventBus
    tracing: RequestTracing | None
    loopback: bool  # whether only this machine can reach the public listener
    edges: int = 1  # how many edges share the limits
    clustered: bool = False  # whether it is one of several, which reign in turns
    ledger: Ledger | None = None  # where its rows go; None: nowhere
    reign: Reign | None = None  # in a cluster; None: no edge is taken, and no lease granted
    sessions: dict[str, EdgeSession] = field(default_factory=dict)
    """By the names of their edges."""
    _adrift: dict[str, EdgeSession] = field(default_factory=dict)
    """Edges whose links are lost, which are waited for."""
    _endings: set[asyncio.Task[None]] = field(default_factory=set)
    _losses: deque[tuple[float, EdgeLost]] = field(
        default_factory=lambda: deque(maxlen=MOST_LOSSES)
    )
    late_leases: int = 0  # leases that edges gave back since they were too old
    models: ModelSnapshots = field(init=False)

    def __post_init__(self) -> None:
        index, context = self.scheduler.fleet.model_index, self.context
        self.models = ModelSnapshots(index, context.leases.most_slots_of_a_host, context.clock)
        self.context.quarantine.subscribe(
            lambda digest, losses: self.quarantined(messages.Quarantined.of(digest, losses))
        )
        if self.clustered:
            self.scheduler.grant_while(lambda: False)

    # Reigns.

    def begin(self, reign: Reign) -> None:
        """Take edges and grant leases, by the rules of this reign, until `end`."""
        assert self.clustered
        assert self.reign is None
        self.reign = reign
        reign.begin()
        # No other reign has leases of these numbers.
        first = (self.scheduler.rng.getrandbits(30) << 33) + 1
        self.scheduler.grant_while(reign.grants, first)

    async def end(self) -> None:
        """Grant nothing from the call on, and leave all that runs at edges to the next brain."""
        self.scheduler.grant_while(lambda: False)
        reign, self.reign = self.reign, None
        sessions = [*self.sessions.values(), *self._adrift.values()]
        self.sessions.clear()
        self._adrift.clear()
        for session in sessions:
            self.start_ending(session.leave())
        await self._all_ended()
        if reign is not None:
            await reign.end()

    async def _all_ended(self) -> None:
        if self._endings:
            await asyncio.wait(self._endings)

    def expect_end(self, name: str) -> None:
        """The edge was told to end, so that its end is no failure."""
        if (session := self.sessions.get(name)) is not None:
            session.expect_end()

    def edge_ended(self, name: str, pid: int | None = None) -> None:
        """This process of the edge has ended, or whichever it is: it is waited for no longer."""
        session = self.sessions.get(name)
        if pid is not None and session is not None and session.pid == pid:
            session.link.fail("its process has ended")
        session = self._adrift.get(name)
        if session is not None and pid in {None, session.pid}:
            del self._adrift[name]
            session.give_up()

    def wait_for_edge(self, session: EdgeSession) -> None:
        """Its link is lost, and it may come again."""
        if session.pid is None:
            return  # It has not spoken over this link: it is the one before, if any, that waits.
        self.edge_ended(session.name)
        self._adrift[session.name] = session
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._waited_for, session)

    def _waited_for(self, session: EdgeSession) -> None:
        if self._adrift.get(session.name) is session:
            self.edge_ended(session.name)

    def earlier_session(self, name: str, pid: int) -> EdgeSession | None:
        """The session of the same process over a link that is lost, which another one goes on."""
        earlier = self._adrift.get(name)
        if earlier is None or earlier.pid != pid:
            self.edge_ended(name)
            return None
        return self._adrift.pop(name)

    async def connect(
        self,
        sock: socket.socket,
        name: str,
        on_lost: Callable[[], None] = lambda: None,
    ) -> EdgeSession:
        """Serve the edge at the other end of this Unix socket, under a name of its own.

        `on_lost` is called when its link is lost; by then it is out of `sessions`, and what it held
        is being reclaimed. An edge has one link, its last, and in a cluster none outside a reign.
        Raises: ConnectionRefusedError.
        """
        if (earlier := self.sessions.get(name)) is not None:
            earlier.link.fail("it has another one")
        # What waited there must do so no more when it is asked for anew.
        await self._all_ended()
        if (self.clustered and self.reign is None) or name in self.sessions:
            sock.close()
            raise ConnectionRefusedError("this member does not lead, or has a later link")
        session = self.sessions[name] = EdgeSession(self, name, on_lost)
        try:
            await EdgeLink.over(sock, session.link)
        except BaseException:
            self.sessions.pop(name, None)
            raise
        return session

    def configure(self) -> None:
        """The settings in force have changed, or files that they name."""
        for session in self.sessions.values():
            session.tell_settings()

    def quarantined(self, told: messages.Quarantined, *, but: EdgeSession | None = None) -> None:
        """Tell all edges, or all but one, which request nodes have died on."""
        for session in self.sessions.values():
            if session is not but:
                session.link.tell(told)

    def edge_lost(self, loss: EdgeLost) -> None:
        """An edge has ended though it was not told to, or with requests under way."""
        self._losses.append((self.context.clock(), loss))
        self.bus.publish(loss)

    def lost_edges(self, seconds: float) -> list[EdgeLost]:
        """The edges that were lost in so many last seconds, the latest last."""
        since = self.context.clock() - seconds
        return [loss for when, loss in self._losses if when >= since]

    async def aclose(self) -> None:
        """End all links; each edge ends with its own."""
        for name in list(self._adrift):
            self.edge_ended(name)
        for session in list(self.sessions.values()):
            session.close()
        await self._all_ended()

    def start_ending(self, ending: Coroutine[Any, Any, None]) -> None:
        """Run what ends all that ran at a lost edge."""
        task = asyncio.create_task(ending, name="end what ran at an edge")
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)


class EdgeSession:
    """One edge, from its start to the end of its link."""

    def __init__(self, brain: Brain, name: str, on_lost: Callable[[], None]) -> None:
        self.name, self._brain, self._on_lost = name, brain, on_lost
        self.link = EdgeLink(
            messages.ToBrain, self._receive, self._lost, brain.context.clock, on_beat=self.tell_news
        )
        self.pid: int | None = None  # None: the edge has not said hello
        self.is_to_end = False  # see `expect_end`
        self.requests: dict[str, EdgeRequest] = {}
        self._leases: dict[int, EdgeLease] = {}
        self._asks: dict[int, asyncio.Task[None]] = {}
        """Those that wait for a lease, by the number under which it was asked for."""
        self._accounts: dict[tuple[object, ...], Accounts] = {}
        self._accounts_version = -1
        # In a cluster.
        self._reign = brain.reign
        self._earlier: EdgeSession | None = None
        """The one before, as long as the edge tells what it carries from it."""
        self._ignored: set[int] = set()  # leases on nodes that are not known here
        self._unbooked: deque[tuple[str, int]] = deque()
        """Requests that have ended, and how many rows the ledger has with theirs."""
        self._recorded: set[str] = set()
        """The very last ones, and those of the session before, which the edge tells again."""
        self._lost_for = ""  # the reason
        # What the edge was told.
        self._configured: tuple[Settings, bytes] | None = None
        """The settings and the key of hashes by which it serves; None: they are to be told."""
        self._keys = KeySnapshots(brain.key_ring)
        self._models: messages.Models | None = None
        self._nodes: dict[str, tuple[Node, NodeInfo, int]] = {}
        self._routes_told = 0
        self._answers: dict[type, Callable[..., None]] = {
            messages.Hello: self._hello,
            messages.CarriedRequest: self._carried_request,
            messages.CarriedLease: self._carried_lease,
            messages.Carried: self._carried,
            messages.AskLease: self._ask_lease,
            messages.Withdraw: self._withdraw,
            messages.GiveBack: self._give_back,
            messages.KeepInQueue: lambda told: brain.scheduler.keep_in_queue(told.request_id),
            messages.LeaseNews: self._lease_news,
            messages.ContentWentOn: self._content_went_on,
            AttemptReport: lambda told: self._end(self._held(told.lease_id), told),
            UsageReport: self._settled,
            messages.Discarded: self._discarded,
            messages.Released: self._released,
            messages.Leaving: lambda _: self.expect_end(),
            messages.Finished: self._request_over,
            messages.Turned: self._request_over,
            messages.Quarantined: self._quarantined,
            AttemptEnded: brain.bus.tell,
            StreamResumed: brain.bus.publish,
            messages.AskNodes: lambda asked: self._answer_later(asked.ask, self._answer(asked)),
            messages.AskExcused: self._ask_excused,
            messages.AskPosition: self._ask_position,
        }

    def expect_end(self) -> None:
        """The edge was told to end, so that its end is no failure."""
        self.is_to_end = True

    def close(self) -> None:
        """End the link on purpose; what the edge still holds is reclaimed."""
        self.is_to_end = True
        self.link.close()
        self._reclaim("it was told to end")

    def _receive(self, message: object) -> None:
        if self.pid is None and not isinstance(message, messages.Hello):
            raise BrokenRules("no hello")
        if self._ignored and (lease_id := getattr(message, "lease_id", None)) in self._ignored:
            if isinstance(message, messages.AskExcused):
                self._ask_excused(message)
            elif not (isinstance(message, AttemptReport) and message.response_began):
                is_over = isinstance(message, AttemptReport | UsageReport | messages.GiveBack)
                self._ignored -= {lease_id} if is_over else set()
            return
        self._answers[type(message)](message)

    def _hello(self, hello: messages.Hello) -> None:
        if hello.version != messages.VERSION:
            raise BrokenRules(f"version {hello.version} in place of {messages.VERSION}")
        reign = self._reign
        if reign is not None and hello.epoch > reign.epoch:
            reign.heard(hello.epoch)
            raise BrokenRules(f"the edge knows a leader of epoch {hello.epoch}")
        self.pid = hello.pid
        if reign is not None:
            earlier = self._earlier = self._brain.earlier_session(self.name, hello.pid)
            if earlier is not None:
                self._recorded = earlier.recorded
        self.tell_news()
        context = self._brain.context
        for digest, losses in context.quarantine.entries.items():
            age = context.clock() - losses.last_at
            self.link.tell(messages.Quarantined.of(digest, losses, age))

    # What the edge must know.

    def tell_settings(self) -> None:
        """Tell the settings, though they may be the same: files that they name have changed."""
        self._configured = None
        self.tell_news()

    def tell_news(self) -> None:
        """Tell what has changed of settings, keys, models and nodes; a few times a second."""
        if self.pid is None or self.link.lost:
            return
        brain, tell = self._brain, self.link.tell
        settings, hash_key = brain.context.settings, brain.context.keyed_hash.key
        told = self._configured
        if told is None or told[0] is not settings or told[1] != hash_key:
            self._configured = settings, hash_key
            # What is not set may not be written: some defaults are no valid values.
            in_json = settings.model_dump_json(exclude_unset=True, exclude=BRAINS_OWN).encode()
            of_all = in_json, hash_key, brain.loopback, brain.edges
            of_reign = () if self._reign is None else (self._reign.epoch, GRANT_SECONDS)
            tell(messages.Configuration(messages.VERSION, *of_all, *of_reign))
        for keys in self._keys.changes():
            tell(keys)
        models = brain.models.current()
        if models is not self._models:
            self._models = models
            tell(models)
        for name in [name for name, (node, *_) in self._nodes.items() if node.removed]:
            del self._nodes[name]
            tell(messages.NodeGone(name))
        self._tell_booked()

    def _tell_booked(self) -> None:
        """Tell how many of the requests that have ended are in the ledger for good."""
        ledger, unbooked, before = self._brain.ledger, self._unbooked, len(self._unbooked)
        while unbooked and (ledger is None or unbooked[0][1] <= ledger.booked):
            unbooked.popleft()
        if len(unbooked) < before:
            self.link.tell(messages.Booked(before - len(unbooked)))

    def _note_recorded(self, request_id: str) -> None:
        """The row of a request that has ended is added, if it has one."""
        ledger = self._brain.ledger
        self._recorded.discard(request_id)
        self._unbooked.append((request_id, 0 if ledger is None else ledger.added))

    @property
    def recorded(self) -> set[str]:
        """Requests whose end the edge has told, and not been told that it is booked."""
        return self._recorded.union(request_id for request_id, _ in self._unbooked)

    def _introduce(self, node: Node) -> None:
        """Tell of a node that a lease will name."""
        known = self._nodes.get(node.name)
        if known is None or known[1] is not node.info:
            if known is None or known[1].connections is not node.info.connections:
                self._routes_told += 1
                version = self._routes_told
            else:
                version = known[2]
            self._nodes[node.name] = node, node.info, version
            self.link.tell(node_met(node, version))

    # What the edge carries from another link.

    def _carried_request(self, told: messages.CarriedRequest) -> None:
        """Take over a request that was admitted over another link."""
        opening, earlier = told.opening, self._earlier
        if opening.id in self._recorded:
            return
        one = None if earlier is None else earlier.requests.pop(opening.id, None)
        if one is None:
            if opening.request is None or opening.id in self.requests:
                raise BrokenRules("a request that can't be carried")
            accounts = self._accounts_of(opening, must_exist=False)
            record = told.record.record()
            one = self._open(opening, accounts, opening.request, record, is_carried=True)
        else:
            one.move_to(self)
            for part in (one.sub_requests or {}).values():
                assert isinstance(part, EdgePart)
                part.move_to(self)
            self.requests[opening.id] = one
        if told.released and one.ended_at is None:
            self._response_ended(one)

    def _carried_lease(self, told: messages.CarriedLease) -> None:
        """Take over a lease that was granted over another link."""
        brain, earlier, id_ = self._brain, self._earlier, told.lease_id
        leases, scheduler = brain.context.leases, brain.scheduler
        held = None if earlier is None else earlier.take_lease(id_)
        if held is None:
            whole = self._whole(told.request.id)
            if whole is None or id_ in whole.accounted:
                self._ignored.add(id_)
                return
            node = scheduler.fleet.nodes.get(told.node)
            if node is None or id_ in scheduler.records:
                self._ignored.add(id_)
                return
            lease = GrantedLease(
                id_, node.info, told.model, told.served_name, told.stream, told.reading,
                slots=told.slots, fallback=told.fallback,
            )  # fmt: skip
            if scheduler.adopt(lease, node, told.request, told.age) is None:
                self._ignored.add(id_)
                return
            part = self._part(told.request)
            held = EdgeLease(part, EdgeAttempt(part, lease, brain.context))
            held.attempt.began_before(told.age)
            assert self._reign is not None
            self._reign.adopted(self.name, id_, node)
        self._leases[id_] = held
        self._catch_up(held, told, leases, scheduler.records[id_])

    def _catch_up(
        self,
        held: EdgeLease,
        told: messages.CarriedLease,
        leases: LeaseService,
        record: LeaseRecord,
    ) -> None:
        """Bring a lease to the phase that the edge tells."""
        id_, phase = told.lease_id, told.phase
        if held.has_ended:
            return
        if phase != "sent":
            leases.reading_began(id_)
        if told.tokens or phase == "content":
            if held.attempt.last_content_at is None:
                leases.content_began(id_)
            held.attempt.content_came(self._brain.context.clock(), told.tokens)
        if phase == "received":
            held.attempt.complete = True
            leases.response_received(id_)
        elif phase == "ended":
            held.has_ended = True
            record.abandon()
        if phase in {"received", "ended"}:
            self._ended_of(id_)
        if phase == "ended" and held.part.attempt is held.attempt:
            held.part.end_attempt()

    def take_lease(self, lease_id: int) -> EdgeLease | None:
        """A lease goes on over another link; None: it is not known here."""
        return self._leases.pop(lease_id, None)

    def _carried(self, _: messages.Carried) -> None:
        """The edge has told all: what it did not tell of has ended."""
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier.drop_rest()
        if self._reign is not None:
            self.link.tell(messages.Adopted())
            self._reign.carried(self.name)

    def drop_rest(self) -> None:
        """What is left here has ended while the link was lost, or never began."""
        leases = self._brain.context.leases
        for lease_id, held in self._leases.items():
            request = held.part.request.lease_request
            if held.has_ended:
                leases.settle(UsageReport(lease_id, Usage(), None, 0, complete=False), request)
            else:
                leases.ended(AttemptReport(lease_id, "cancelled", 0, True, False, False))
                self._ended_of(lease_id)
        self._leases.clear()
        self._leave_requests(list(self.requests.values()))

    def _leave_requests(self, requests: Iterable[EdgeRequest]) -> None:
        """They go on elsewhere, or are asked for anew."""
        brain, ids = self._brain, []
        for one in requests:
            del self.requests[one.request.id]
            ids.append(one.request.id)
            if one.ended_at is None:
                self._response_ended(one)
            brain.meter.leave(one.reservation)
        if brain.ledger is not None:
            brain.ledger.leave(ids)

    async def leave(self) -> None:
        """End the link, and leave what runs at the edge to the next brain: in short steps."""
        self.link.close()
        await self._cancel_asks()
        if self._earlier is not None:
            self._take_all(self._earlier)
        while self._leases or self.requests:
            for lease_id in list(islice(self._leases, ENDED_AT_ONCE)):
                self._leases.pop(lease_id).part.end_attempt()
                self._brain.scheduler.release_unused(lease_id)
            self._leave_requests(list(islice(self.requests.values(), ENDED_AT_ONCE)))
            await asyncio.sleep(0)

    def _take_all(self, earlier: EdgeSession) -> None:
        """The edge has not told what has become of what this session had."""
        self.requests.update(earlier.requests)
        self._leases.update(earlier._leases)
        self._earlier = None

    def _ended_of(self, lease_id: int) -> None:
        """The edge runs nothing under this lease any more."""
        if self._reign is not None:
            self._reign.ended(lease_id)

    # Leases.

    def _ask_lease(self, asked: messages.AskLease) -> None:
        leases, opening, accounts = self._brain.context.leases, asked.opening, None
        try:
            if opening is not None:
                accounts = self._accounts_of(opening)
                self._admit(opening, accounts, asked.request)
            part = self._part(asked.request)
            lease = leases.lease_now(asked.request, asked.tried, asked.age)
        except GatewayError as error:
            self._refuse(asked.ask, error, self._rates(accounts))
            return
        rates = self._rates(accounts)
        if lease is not None:
            self._grant(asked.ask, lease, part, rates)
        else:
            self._answer_later(asked.ask, self._wait(asked, part, rates))

    def _answer_later(self, ask: int, answering: Coroutine[Any, Any, None]) -> None:
        task = self._asks[ask] = asyncio.create_task(answering)
        # A task that is cancelled before it began does nothing more.
        task.add_done_callback(lambda _: self._answered(ask, task))

    def _answered(self, ask: int, task: asyncio.Task[None]) -> None:
        self._asks.pop(ask, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Else the edge would wait for an answer that never comes.
            log.error("a question of an edge failed", edge=self.name, exc_info=error)
            self.link.fail("a question could not be answered")

    async def _wait(
        self, asked: messages.AskLease, part: EdgePart, rates: messages.Rates | None
    ) -> None:
        context = self._brain.context
        queued_at = context.clock()
        try:
            lease = await context.leases.wait_for_lease(
                asked.request, asked.tried, asked.age, response_started=asked.response_started
            )
        except GatewayError as error:
            self._refuse(asked.ask, error, rates)
        else:
            part.record.waited(context.clock() - queued_at)
            self._grant(asked.ask, lease, part, rates)

    def _grant(
        self, ask: int, lease: GrantedLease, part: EdgePart, rates: messages.Rates | None
    ) -> None:
        if self.link.lost:
            self._brain.scheduler.release_unused(lease.id)
            return
        node = self._brain.scheduler.records[lease.id].node
        self._introduce(node)
        self._leases[lease.id] = EdgeLease(part, EdgeAttempt(part, lease, self._brain.context))
        part.record.attempt_began(node.name, lease.node.tier, lease.fallback)
        self.link.tell(
            messages.Granted(
                ask, lease.id, node.name, lease.model, lease.served_name, lease.stream,
                lease.reading, lease.slots, lease.fallback,
                bool(node.pool or node.properties.shared_pool), rates,
            )
        )  # fmt: skip

    def _refuse(self, ask: int, error: GatewayError, rates: messages.Rates | None) -> None:
        drop_traceback(error)
        self.link.tell(messages.Refused(ask, messages.WireError.of(error), rates))

    def _withdraw(self, told: messages.Withdraw) -> None:
        # One that has been granted meanwhile comes back by `GiveBack`.
        task = self._asks.get(told.ask)
        if task is not None:
            task.cancel()

    def _give_back(self, told: messages.GiveBack) -> None:
        held = self._held(told.lease_id)
        del self._leases[told.lease_id]
        self._ended_of(told.lease_id)
        self._brain.late_leases += told.late
        held.part.end_attempt()
        self._brain.scheduler.release_unused(told.lease_id)

    def _held(self, lease_id: int) -> EdgeLease:
        """A lease that has not ended. Raises: BrokenRules."""
        held = self._leases.get(lease_id)
        if held is None or held.has_ended:
            raise BrokenRules(f"lease {lease_id} is not held")
        return held

    def _lease_news(self, told: messages.LeaseNews) -> None:
        held, context = self._held(told.lease_id), self._brain.context
        getattr(context.leases, told.what)(told.lease_id)
        if told.what == "content_began":
            now, part = context.clock(), held.part
            held.attempt.content_came(now, 0)
            if part.record.ttft is None:
                part.record.first_content_sent(now - part.request.received_at)
        elif told.what == "response_received":
            held.attempt.complete = True
            self._ended_of(told.lease_id)

    def _content_went_on(self, told: messages.ContentWentOn) -> None:
        held, context = self._held(told.lease_id), self._brain.context
        held.attempt.content_came(context.clock(), told.tokens)
        context.leases.content_went_on(told.lease_id, told.tokens)

    def _end(self, held: EdgeLease, report: AttemptReport) -> None:
        charge = self._brain.context.leases.ended(report)
        self._ended_of(report.lease_id)
        if held.part.attempt is held.attempt:
            held.part.end_attempt()
        if report.response_began:
            held.has_ended = True
            if report.outcome == "ok":
                self._part_answered(held.part.request.id)
            return
        self._forget_lease(report.lease_id)
        if report.outcome in CALLERS_OUTCOMES and charge is not NOTHING_CHARGED:
            self._charge(held.part, charge, counts_tokens=not report.resumes)

    def _forget_lease(self, lease_id: int) -> None:
        """All is known of a lease that has ended."""
        part = self._leases.pop(lease_id).part
        if self._reign is not None and (whole := self._whole(part.request.id)) is not None:
            whole.accounted.add(lease_id)

    def _settled(self, report: UsageReport) -> None:
        held = self._leases.get(report.lease_id)
        if held is None or not held.has_ended:
            raise BrokenRules(f"lease {report.lease_id} has not ended")
        self._forget_lease(report.lease_id)
        charge = self._brain.context.leases.settle(report, held.part.request.lease_request)
        self._charge(held.part, charge, counts_tokens=False)

    # Requests.

    def _admit(self, opening: messages.Opening, accounts: Accounts, asking: LeaseRequest) -> None:
        """Admit a request within its caller's limits. Raises: GatewayError."""
        request = opening.request or asking
        if opening.id != request.id or opening.id in self.requests:
            raise BrokenRules("a request that is open already, or another one's")
        record = RequestRecord(
            opening.x_request_id,
            opening.path,
            opening.model,
            request.caller.priority,
            opening.caller,
            stream=opening.stream,
            request_id=opening.id,
        )
        self._open(opening, accounts, request, record)

    def _open(
        self,
        opening: messages.Opening,
        accounts: Accounts,
        request: LeaseRequest,
        record: RequestRecord,
        *,
        is_carried: bool = False,
    ) -> EdgeRequest:
        """Admit a request, or take over one that was admitted before. Raises: GatewayError."""
        brain = self._brain
        received_at = brain.context.clock() - opening.age
        if (trace := opening.trace) is not None and trace.id is not None:
            record.traced(RequestTrace(trace.id, trace.parent, opening.id, received_at))
            brain.scheduler.decision_log.follow(opening.id)
        meter, prompts = brain.meter, opening.prompts
        if is_carried:
            reservation = meter.adopt(accounts, request, record, prompts, opening.age)
            if brain.ledger is not None:
                brain.ledger.adopt(opening.id)
        else:
            reservation = meter.admit(accounts, request, record, prompts)
        opened = Request(
            opening.id, opening.x_request_id, opening.path, received_at, request,
            stream=opening.stream,
        )  # fmt: skip
        one = EdgeRequest(opened, record, session=self, reservation=reservation, charges={})
        self.requests[opening.id] = one
        brain.registry.add(one)
        return one

    def _rates(self, accounts: Accounts | None) -> messages.Rates | None:
        if accounts is None or not accounts.has_rates:
            return None
        return self._brain.meter.book.rate_limits(accounts)

    def _accounts_of(self, opening: messages.Opening, *, must_exist: bool = True) -> Accounts:
        """The accounts on which a request counts; not `must_exist`: its key may be gone by now.

        Raises: GatewayError 401.
        """
        ring, known = self._brain.key_ring, self._accounts
        if ring.version != self._accounts_version or len(known) >= MOST_ACCOUNTS:
            known.clear()
            self._accounts_version = ring.version
        key = opening.caller, opening.user, opening.anonymous, opening.trusted
        found = known.get(key)
        if found is not None:
            return found
        caller = ring.caller(opening.caller)
        if opening.anonymous is not None:
            caller = Caller(
                opening.caller,
                "anonymous",
                opening.anonymous,
                anonymous=True,
                trust_user_headers=opening.trusted,
            )
        if caller is None and must_exist:
            raise errors.invalid_api_key()
        if caller is None:
            caller = Caller(opening.caller, opening.caller, Priority.NORMAL)
        found = known[key] = self._brain.meter.book.accounts(caller, opening.user)
        return found

    def _part(self, request: LeaseRequest) -> EdgePart:
        """The request, or the prompt of it, that asks for a lease. Raises: GatewayError 500."""
        whole = self._whole(request.id)
        if whole is None:
            log.error("a request was not admitted that asks for a lease", edge=self.name)
            raise GatewayError(500, "internal_error", "The gateway does not know this request.")
        if whole.request.id == request.id:
            return whole
        parts = whole.sub_requests
        if parts is None:
            parts = whole.sub_requests = {}
        part = parts.get(request.id)
        if not isinstance(part, EdgePart):
            of, now = whole.request, self._brain.context.clock()
            record = RequestRecord(
                request.id, of.path, whole.record.model, request.caller.priority,
                whole.record.caller, stream=of.stream,
            )  # fmt: skip
            opened = Request(request.id, request.id, of.path, now, request, stream=of.stream)
            part = parts[request.id] = EdgePart(opened, record, session=self)
        return part

    def _whole(self, id_: str) -> EdgeRequest | None:
        """The request of this id, or of which one prompt has it; None: it is not known."""
        return self.requests.get(id_) or self.requests.get(id_.rpartition(".")[0])

    def _part_answered(self, id_: str) -> None:
        """If this is one prompt of a request, it is over."""
        whole = self._whole(id_)
        if whole is not None and whole.sub_requests is not None:
            whole.sub_requests.pop(id_, None)

    def _charge(self, part: EdgePart, charge: AttemptCharge, *, counts_tokens: bool) -> None:
        id_ = part.request.id
        whole = self._whole(id_)
        if whole is not None:
            whole.charges.setdefault(id_, []).append((charge, counts_tokens))

    def _discarded(self, told: messages.Discarded) -> None:
        id_ = told.request_id
        whole = self._whole(id_)
        if whole is not None:
            whole.charges.pop(id_, None)

    def _released(self, told: messages.Released) -> None:
        # A request that was refused is not known here, nor is this wrong.
        whole = self.requests.get(told.request_id)
        if whole is not None and whole.ended_at is None:
            self._response_ended(whole)

    def _response_ended(self, whole: EdgeRequest) -> None:
        whole.ended_at = self._brain.context.clock()
        self._brain.registry.remove(whole)
        self._brain.meter.released(whole.reservation)

    def _request_over(self, told: messages.Finished | messages.Turned) -> None:
        bus, request_id = self._brain.bus, told.record.request_id
        if request_id not in self._recorded:
            if isinstance(told, messages.Finished):
                self._finished(told)
            else:
                bus.publish_deferred(self._record(told))
        if self._reign is not None:
            self._recorded.add(request_id)
            bus.defer(self._note_recorded, request_id)  # Behind what adds its row.

    def _finished(self, told: messages.Finished) -> None:
        opening = told.opening
        if opening is not None and opening.request is not None:
            # It never got so far as to ask for a lease; it counts like any other.
            with contextlib.suppress(GatewayError):
                self._admit(opening, self._accounts_of(opening), opening.request)
        record = self._record(told)
        whole = self.requests.pop(record.request_id, None)
        if whole is None:
            self._brain.bus.publish_deferred(record)
        else:
            self._account(whole, record)

    def _account(self, whole: EdgeRequest, record: RequestRecord) -> None:
        """All is known of what a request has used, by its record and what was charged."""
        if whole.ended_at is None:
            self._response_ended(whole)
        assert whole.ended_at is not None
        for charges in whole.charges.values():
            for charge, counts_tokens in charges:
                record.charge(charge, counts_tokens)

        record.finish(whole.ended_at - record.duration_seconds, whole.ended_at)
        self._brain.meter.ended(whole.reservation, record)

    def _record(self, told: messages.Finished | messages.Turned) -> RequestRecord:
        """The record of a request that has ended, which is traced if it is to be."""
        record, trace, tracing = told.record.record(), told.trace, self._brain.tracing
        now = self._brain.context.clock()
        received_at = now - record.duration_seconds
        record.finish(received_at, now)
        if tracing is not None and tracing.active:
            headers = []
            if trace is not None and trace.id is not None:
                record.traced(RequestTrace(trace.id, trace.parent, record.request_id, received_at))
            elif trace is not None and trace.traceparent is not None:
                headers.append((b"traceparent", trace.traceparent))
            tracing.finished(record.request_id, record, headers, received_at)
        return record

    def _quarantined(self, told: messages.Quarantined) -> None:
        """Nodes were lost over a request, or one has completed it: all others must know."""
        context = self._brain.context
        context.quarantine.take(told.digest, told.losses(context.clock()))
        self._brain.quarantined(told, but=self)

    # Questions.

    async def _answer(self, asked: messages.AskNodes) -> None:
        yes, error = False, None
        try:
            yes = await self._brain.context.leases.ask_nodes(
                asked.what, asked.request, asked.tried, but_paused=asked.but_paused
            )
        except GatewayError as raised:
            drop_traceback(raised)
            error = messages.WireError.of(raised)
        self.link.tell(messages.NodeAnswer(asked.ask, yes, error))

    def _ask_excused(self, asked: messages.AskExcused) -> None:
        held = self._leases.get(asked.lease_id)
        excused = held is not None and not held.has_ended
        if excused:
            excused = bool(self._brain.context.leases.is_silence_excused(asked.lease_id))
        self.link.tell(messages.NodeAnswer(asked.ask, excused))

    def _ask_position(self, asked: messages.AskPosition) -> None:
        id_ = asked.request_id
        self.link.tell(messages.Position(id_, self._brain.scheduler.queue_position(id_)))

    # The end.

    def _lost(self, reason: str) -> None:
        brain = self._brain
        if self._reign is None or self._reign is not brain.reign or self.is_to_end:
            self._reclaim(reason)
        elif brain.sessions.get(self.name) is self:
            del brain.sessions[self.name]
            self._reign.lost(self.name)
            if self._earlier is not None:
                self._take_all(self._earlier)
            brain.start_ending(self._cancel_asks())
            self._lost_for = reason
            brain.wait_for_edge(self)
        self._on_lost()

    def give_up(self) -> None:
        """The edge does not come again over another link."""
        self._end_with(self._lost_for)

    def _reclaim(self, reason: str) -> None:
        """End all that runs at the edge."""
        if self._brain.sessions.pop(self.name, None) is not None:
            if self._reign is not None:
                self._reign.lost(self.name)
            self._end_with(reason)

    def _end_with(self, reason: str) -> None:
        brain = self._brain
        broken = tuple(
            [one.request.x_request_id for one in self.requests.values() if one.ended_at is None]
        )
        if broken or not self.is_to_end:
            brain.edge_lost(EdgeLost(self.name, reason, broken))
        brain.start_ending(self._end_all())

    async def _end_all(self) -> None:
        """End all that ran at the edge, in short steps: there may be thousands."""
        await self._cancel_asks()
        ends = [partial(self._break_off, *one) for one in self._leases.items()]
        ends += [partial(self._end_request, one) for one in self.requests.values()]
        async for end in in_steps(ends):
            try:
                end()
            except Exception:
                log.exception("what ran at an edge can't be ended", edge=self.name)
        self._leases.clear()
        self.requests.clear()

    async def _cancel_asks(self) -> None:
        while self._asks:
            some = list(islice(self._asks.values(), ENDED_AT_ONCE))
            for task in some:
                task.cancel()
            await asyncio.wait(some)

    def _end_request(self, whole: EdgeRequest) -> None:
        record, tracing = whole.record, self._brain.tracing
        received_at = whole.request.received_at
        if whole.ended_at is None:
            record.fail(502, EDGE_DIED)
        record.finish(received_at, self._brain.context.clock())
        if tracing is not None and tracing.active:
            tracing.finished(record.request_id, record, [], received_at)
        self._account(whole, record)

    def _break_off(self, lease_id: int, held: EdgeLease) -> None:
        """The edge is gone; what the node has sent so far counts as that of a broken response."""
        attempt, leases = held.attempt, self._brain.context.leases
        tag, node = held.part.request.x_request_id, attempt.lease.node.name
        self._brain.bus.publish_deferred(AttemptEnded(tag, node, EDGE_DIED, attempt.elapsed))
        began = held.has_ended or attempt.last_content_at is not None
        if not held.has_ended:
            report = AttemptReport(lease_id, EDGE_DIED, 0, True, False, began)
            self._end(held, report)
        if began:
            usage = Usage(attempt.lease.reading.prompt_tokens, 0, attempt.content_events)
            used = UsageReport(lease_id, usage, None, attempt.content_events, complete=False)
            charge = leases.settle(used, held.part.request.lease_request)
            spent = replace(
                charge,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
            )
            self._charge(held.part, spent, counts_tokens=True)


def node_met(node: Node, version: int) -> messages.NodeMet:
    """What an edge must know of a node to send requests there; `version`: of its route."""
    address, tls = node.upstream.address, node.spec.tls
    route = messages.NodeRoute(
        address.host,
        address.port,
        address.path_prefix,
        address.header_lines,
        address.server_name,
        None
        if address.tls is None
        else {}
        if tls is None
        else tls.model_dump(mode="json", exclude_none=True),
        version,
    )
    return messages.NodeMet(replace(node.info, connections=None), route)
