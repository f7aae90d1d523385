"""The brain's side of its edges: grants them leases, admits their requests, and ends what is lost.

An `EdgeSession` is one edge as the brain knows it: the requests that run there, which stand in the
registry like the brain's own, and the leases that it holds. When the link is lost, its leases are
given to the reclaimer, which frees each slot when the node shows it idle, and its requests end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
from msgspec.structs import replace

from gateway import errors
from gateway.callers.keys import KeyRing
from gateway.callers.limits import Accounts, Reservation
from gateway.callers.meter import Meter
from gateway.config.settings import Settings
from gateway.edges import messages
from gateway.edges.snapshots import KeySnapshots, ModelSnapshots
from gateway.errors import GatewayError, drop_traceback
from gateway.events import AttemptEnded, EdgeLost, EventBus, RequestRecord, StreamResumed
from gateway.forward.attempt_ends import CALLERS_OUTCOMES, Losses
from gateway.forward.context import ForwardContext
from gateway.forward.in_flight import Attempt, InFlightRegistry, InFlightRequest
from gateway.lease import (
    NOTHING_CHARGED,
    AttemptCharge,
    AttemptReport,
    GrantedLease,
    LeaseRequest,
    NodeInfo,
    Usage,
    UsageReport,
)
from gateway.nodes.node import Node
from gateway.request.preparation import Request
from gateway.schedule.scheduler import Scheduler
from gateway.terms import Caller, RequestTrace
from gateway.transport.link import EdgeLink
from gateway.watch.request_tracing import RequestTracing

log = structlog.get_logger()
# Settings that edges have no use for; keys are told apart from the others.
BRAINS_OWN = {"admin", "batches", "keys", "store", "webhooks"}
ENDED_AT_ONCE = 32  # requests of a lost edge that are ended in one turn of the event loop
MOST_LOSSES = 16  # lost edges that are remembered
MOST_ACCOUNTS = 4096  # callers whose accounts are remembered for one edge
EDGE_DIED = "edge_died"  # the reason of a request, and the outcome of an attempt


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


class EdgePart(InFlightRequest, eq=False, kw_only=True):
    """A request at an edge, or one prompt of it."""

    session: EdgeSession

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
    sessions: dict[str, EdgeSession] = field(default_factory=dict)
    """By the names of their edges."""
    _endings: set[asyncio.Task[None]] = field(default_factory=set)
    _losses: deque[tuple[float, EdgeLost]] = field(
        default_factory=lambda: deque(maxlen=MOST_LOSSES)
    )
    late_leases: int = 0  # leases that edges gave back since they were too old
    models: ModelSnapshots = field(init=False)

    def __post_init__(self) -> None:
        index, context = self.scheduler.fleet.model_index, self.context
        self.models = ModelSnapshots(index, context.leases.most_slots_of_a_host, context.clock)
        self.context.quarantine.on_change = self._own_quarantine_changed

    async def connect(
        self,
        sock: socket.socket,
        name: str,
        on_lost: Callable[[str, tuple[str, ...]], None] = lambda *_: None,
    ) -> EdgeSession:
        """Serve the edge at the other end of this Unix socket, under a name of its own.

        `on_lost` is called when its link is lost, with the reason and the requests that broke off;
        by then it is out of `sessions`, and what it held is being reclaimed.
        """
        assert name not in self.sessions
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
            session.configured = None
            session.tell_news()

    def quarantined(self, told: messages.Quarantined, *, but: EdgeSession | None = None) -> None:
        """Tell all edges, or all but one, which request nodes have died on."""
        for session in self.sessions.values():
            if session is not but:
                session.link.tell(told)

    def _own_quarantine_changed(self, digest: bytes, losses: Losses | None) -> None:
        self.quarantined(messages.Quarantined.of(digest, losses))

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
        for session in list(self.sessions.values()):
            session.close()
        await asyncio.gather(*self._endings, return_exceptions=True)

    def start_ending(self, ending: Coroutine[Any, Any, None]) -> None:
        """Run what ends all that ran at a lost edge."""
        task = asyncio.create_task(ending, name="end what ran at an edge")
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)


class EdgeSession:
    """One edge, from its start to the end of its link."""

    def __init__(
        self, brain: Brain, name: str, on_lost: Callable[[str, tuple[str, ...]], None]
    ) -> None:
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
        self._accounts: OrderedDict[tuple[object, ...], Accounts] = OrderedDict()
        self._accounts_version = -1
        # What the edge was told.
        self.configured: tuple[Settings, bytes] | None = None
        """The settings and the key of hashes by which it serves; None: they are to be told."""
        self._keys = KeySnapshots(brain.key_ring)
        self._models: messages.Models | None = None
        self._nodes: dict[str, tuple[Node, NodeInfo, int]] = {}
        self._routes_told = 0
        self._answers: dict[type, Callable[..., None]] = {
            messages.Hello: self._hello,
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
            messages.Finished: self._finished,
            messages.Turned: lambda told: brain.bus.publish_deferred(self._record(told)),
            messages.Quarantined: self._quarantined,
            AttemptEnded: brain.bus.tell,
            StreamResumed: brain.bus.publish,
            messages.AskNodes: self._ask_nodes,
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
        self._answers[type(message)](message)

    def _hello(self, hello: messages.Hello) -> None:
        if hello.version != messages.VERSION:
            raise BrokenRules(f"version {hello.version} in place of {messages.VERSION}")
        self.pid = hello.pid
        self.tell_news()
        context = self._brain.context
        for digest, losses in context.quarantine.entries.items():
            age = context.clock() - losses.last_at
            self.link.tell(messages.Quarantined.of(digest, losses, age))

    # What the edge must know.

    def tell_news(self) -> None:
        """Tell what has changed of settings, keys, models and nodes; a few times a second."""
        if self.pid is None or self.link.lost:
            return
        brain, tell = self._brain, self.link.tell
        settings, hash_key = brain.context.settings, brain.context.keyed_hash.key
        told = self.configured
        if told is None or told[0] is not settings or told[1] != hash_key:
            self.configured = settings, hash_key
            # What is not set may not be written: some defaults are no valid values.
            in_json = settings.model_dump_json(exclude_unset=True, exclude=BRAINS_OWN).encode()
            of_all = in_json, hash_key, brain.loopback, brain.edges
            tell(messages.Configuration(messages.VERSION, *of_all))
        for keys in self._keys.changes():
            tell(keys)
        models = brain.models.current()
        if models is not self._models:
            self._models = models
            tell(models)
        for name in [name for name, (node, *_) in self._nodes.items() if node.removed]:
            del self._nodes[name]
            tell(messages.NodeGone(name))

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

    def _content_went_on(self, told: messages.ContentWentOn) -> None:
        held, context = self._held(told.lease_id), self._brain.context
        held.attempt.content_came(context.clock(), told.tokens)
        context.leases.content_went_on(told.lease_id, told.tokens)

    def _end(self, held: EdgeLease, report: AttemptReport) -> None:
        charge = self._brain.context.leases.ended(report)
        if held.part.attempt is held.attempt:
            held.part.end_attempt()
        if report.response_began:
            held.has_ended = True
            if report.outcome == "ok":
                self._part_answered(held.part.request.id)
            return
        del self._leases[report.lease_id]
        if report.outcome in CALLERS_OUTCOMES and charge is not NOTHING_CHARGED:
            self._charge(held.part, charge, counts_tokens=not report.resumes)

    def _settled(self, report: UsageReport) -> None:
        held = self._leases.get(report.lease_id)
        if held is None or not held.has_ended:
            raise BrokenRules(f"lease {report.lease_id} has not ended")
        del self._leases[report.lease_id]
        charge = self._brain.context.leases.settle(report, held.part.request.lease_request)
        self._charge(held.part, charge, counts_tokens=False)

    # Requests.

    def _admit(self, opening: messages.Opening, accounts: Accounts, asking: LeaseRequest) -> None:
        """Admit a request within its caller's limits. Raises: GatewayError."""
        brain, request = self._brain, opening.request or asking
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
        received_at = brain.context.clock() - opening.age
        if (trace := opening.trace) is not None and trace.id is not None:
            record.traced(RequestTrace(trace.id, trace.parent, opening.id, received_at))
            brain.scheduler.decision_log.follow(opening.id)
        reservation = brain.meter.admit(accounts, request, record, opening.prompts)
        opened = Request(
            opening.id, opening.x_request_id, opening.path, accounts.caller, received_at, request,
            stream=opening.stream,
        )  # fmt: skip
        one = EdgeRequest(opened, record, session=self, reservation=reservation, charges={})
        self.requests[opening.id] = one
        brain.registry.add(one)

    def _rates(self, accounts: Accounts | None) -> messages.Rates | None:
        if accounts is None or not accounts.has_rates:
            return None
        return self._brain.meter.book.rate_limits(accounts)

    def _accounts_of(self, opening: messages.Opening) -> Accounts:
        """The accounts on which a request counts. Raises: GatewayError 401."""
        ring, known = self._brain.key_ring, self._accounts
        if ring.version != self._accounts_version:
            known.clear()
            self._accounts_version = ring.version
        key = opening.caller, opening.user, opening.anonymous, opening.trusted
        found = known.get(key)
        if found is not None:
            known.move_to_end(key)
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
        if caller is None:
            raise errors.invalid_api_key()
        found = known[key] = self._brain.meter.book.accounts(caller, opening.user)
        if len(known) > MOST_ACCOUNTS:
            known.popitem(last=False)
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
            opened = Request(
                request.id, request.id, of.path, of.caller, now, request, stream=of.stream
            )
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
                if counts_tokens:
                    record.count_tokens(
                        charge.prompt_tokens, charge.cached_tokens, charge.completion_tokens
                    )
                record.charge(charge.cost, charge.slot_seconds)
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

    def _ask_nodes(self, asked: messages.AskNodes) -> None:
        self._answer_later(asked.ask, self._answer(asked))

    async def _answer(self, asked: messages.AskNodes) -> None:
        leases, found = self._brain.context.leases, False
        error: GatewayError | None = None
        try:
            match asked.what:
                case "has_other_node":
                    found = await leases.has_other_node(
                        asked.request, asked.tried, but_paused=asked.but_paused
                    )
                case "has_larger_context":
                    found = await leases.has_larger_context(asked.request, asked.tried)
                case "has_cpu_node":
                    found = await leases.has_cpu_node(asked.request, asked.tried)
                case "unsupported_error":
                    error = await leases.unsupported_error(asked.request, asked.tried)
        except GatewayError as raised:
            drop_traceback(raised)
            error = raised
        wire = None if error is None else messages.WireError.of(error)
        self.link.tell(messages.NodeAnswer(asked.ask, found, wire))

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
        broken = self._reclaim(reason)
        self._on_lost(reason, broken)

    def _reclaim(self, reason: str) -> tuple[str, ...]:
        """End all that runs at the edge; returns the `X-Request-ID` of what broke off."""
        brain = self._brain
        if brain.sessions.pop(self.name, None) is None:
            return ()
        broken = tuple(
            [one.request.x_request_id for one in self.requests.values() if one.ended_at is None]
        )
        if broken or not self.is_to_end:
            brain.edge_lost(EdgeLost(self.name, reason, broken))
        brain.start_ending(self._end_all())
        return broken

    async def _end_all(self) -> None:
        """End all that ran at the edge, in short steps: there may be thousands."""
        asks = list(self._asks.values())
        for task in asks:
            task.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        ends = [partial(self._break_off, *one) for one in self._leases.items()]
        ends += [partial(self._end_request, one) for one in self.requests.values()]
        for number, end in enumerate(ends, 1):
            try:
                end()
            except Exception:
                log.exception("what ran at an edge can't be ended", edge=self.name)
            if number % ENDED_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._leases.clear()
        self.requests.clear()

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
            spent = AttemptCharge(
                charge.cost, charge.slot_seconds, usage.prompt_tokens, 0, usage.completion_tokens
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
