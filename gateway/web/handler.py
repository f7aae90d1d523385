"""The way of a routed request through the edge: read it, relay it, send what comes back."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from gateway import errors
from gateway.access.callers import IdentityHeaders, client_address, effective_priority
from gateway.access.exposure import INITIAL_ACCESS, AnonymousAccess
from gateway.access.keys import KeyRing
from gateway.config.settings import Settings
from gateway.errors import ClientClosed, GatewayError
from gateway.events import EventBus, RequestFinished
from gateway.fleet.fleet import Fleet
from gateway.proxy.forwarder import Forwarder
from gateway.proxy.in_flight import InFlightRegistry, InFlightRequest
from gateway.proxy.inbound import multipart
from gateway.proxy.inbound.large_body import LARGE_BODY_BYTES, Body
from gateway.proxy.inbound.model_names import ModelAliases
from gateway.proxy.inbound.parsed_body import parse_body
from gateway.proxy.inbound.prepare import (
    IncomingRequest,
    RequestRules,
    prepare,
    prepare_large,
    prepare_multipart,
)
from gateway.proxy.inbound.prompt_key import VolatileLines
from gateway.proxy.inbound.routes import Route, is_infill
from gateway.proxy.prefill_progress import PrefillProgress
from gateway.proxy.response_stream import BodyStream, ProxyResponse
from gateway.request import Request
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import UpstreamError
from gateway.web import response_heads
from gateway.web.body import (
    BYTE_ORDER_MARK,
    PARSE_WORKING_BYTES,
    SMALL_BODY_BYTES,
    BodyAllocation,
    BodyMemory,
    is_slow_to_parse,
    read_body,
    take_small_body,
)
from gateway.web.http_exchange import HttpExchange
from gateway.web.origins import OriginPolicy, cors_headers
from gateway.web.request_context import RequestContext, parse_context
from gateway.web.response_heads import (
    EVENT_STREAM_HEADER_LINES,
    early_gateway_header_lines,
    encode_headers,
    error_headers,
    gateway_header_lines,
    progress_comment,
    x_request_id_of,
)


@dataclass(frozen=True, slots=True)
class HandlerConfig:
    """All that one version of the settings says to the edge."""

    settings: Settings
    key_ring: KeyRing
    identity_headers: IdentityHeaders
    rules: RequestRules
    loopback: bool
    """Whether the listener can be reached from this machine alone."""
    anonymous_access: AnonymousAccess
    origin_policy: OriginPolicy | None
    """What callers without a key are held to."""

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        loopback: bool,
        previous_access: AnonymousAccess = INITIAL_ACCESS,
    ) -> HandlerConfig:
        """The snapshot of these settings for a listener that is `loopback` or not.

        `before`: the door under the settings before these.
        """
        keys, anonymous = len(settings.keys), settings.allow_anonymous
        identity = settings.identity
        return cls(
            settings=settings,
            key_ring=KeyRing(settings.keys),
            identity_headers=IdentityHeaders.of(identity.user_headers, identity.session_headers),
            rules=RequestRules(
                settings.limits,
                ModelAliases(settings.models),
                settings.default_model,
                VolatileLines(settings.prompts.volatile, settings.prompts.strip),
            ),
            loopback=loopback,
            anonymous_access=previous_access.with_settings(keys=keys, allow_anonymous=anonymous),
            origin_policy=OriginPolicy.of(settings, loopback=loopback),
        )


class _HandledRequest:
    """One request and its reply."""

    __slots__ = (
        "_body_size", "_edge", "_editing", "_exposes", "_heartbeat", "_live", "_reply", "_route",
        "_share",
        "_shown", "_snapshot", "_turn", "received", "record", "request_id",
    )  # fmt: skip

    def __init__(self, edge: ProxyHandler, route: Route, turn: HttpExchange) -> None:
        self._edge = edge
        self._route = route
        self._turn = turn
        self._snapshot = edge.config
        self._live: InFlightRequest | None = None
        self._editing: str | None = None
        """The editor session that waits for this, and for nothing before it."""
        self._reply: ProxyResponse | None = None
        self._heartbeat: Heartbeat | None = None
        self._exposes = False
        """Whether the reply may name nodes."""
        self._shown = 0.0
        """When it is known to have shown its client a sign of life."""
        self._body_size = 0
        """Of a small body; else ..."""
        self._share: BodyAllocation | None = None
        """... what it holds of the memory for them."""
        self.received = edge.clock()
        self.request_id = edge.next_id()
        memory, headers = turn.context_cache, turn.headers
        tag = memory.x_request_id if headers is memory.headers else x_request_id_of(headers)
        self.record = RequestFinished(tag or self.request_id, route.path)

    async def serve(self) -> None:
        """Read, relay, send."""
        record = self.record
        try:
            edge, settings = self._edge, self._snapshot.settings
            preamble = self._admitted()
            body = take_small_body(self._turn, settings.limits, edge.body_memory)
            if body is not None:
                self._body_size = len(body)
            else:
                share = self._share = BodyAllocation(preamble.caller.id, preamble.fairness_key)
                body = await read_body(self._turn, settings.limits, edge.body_memory, share)
                share.evict = self._turned_away
            if len(body) < SMALL_BODY_BYTES or self._route.multipart or not is_slow_to_parse(body):
                request = self._prepared(preamble, body)
            else:
                request = await self._prepared_in_turn(preamble, body)
            live = self._live = InFlightRequest(request, record)
            edge.registry.add(live)
            if self._editing is not None:
                self._replace(self._editing, live)
            self._heartbeat = self._begun_heartbeat(live, preamble)
            self._reply = await edge.forwarder.forward(live)
            if self._reply.body_stream is None:
                self._pass_on_whole(self._reply)
            else:
                await self._pass_on(self._reply, self._reply.body_stream)
        except GatewayError as error:
            self.record.status, self.record.reason = error.status, error.code
            if self._live is not None and self._live.request.client_has_timer:
                await self._let_it_time_out(self._live.request)
            self.refuse(error)
            errors.drop_traceback(error)
        except (ClientClosed, asyncio.CancelledError):
            record.status, record.reason = 499, "client_closed"
            raise
        except Exception:
            record.status, record.reason = 500, "internal_error"
            raise
        finally:
            self.close()

    def _admitted(self) -> RequestContext:
        """Who asks, and how; before anything of the body is read. Raises: GatewayError."""
        turn, snapshot = self._turn, self._snapshot
        memory = turn.context_cache
        preamble = memory.context
        if preamble is None or memory.config is not snapshot or memory.headers != turn.headers:
            preamble = parse_context(
                turn.headers,
                turn.peer_address,
                snapshot.settings,
                snapshot.key_ring,
                snapshot.identity_headers,
                loopback=snapshot.loopback,
                locked=snapshot.anonymous_access.locked,
            )
            if snapshot.origin_policy is not None and preamble.caller.anonymous:
                snapshot.origin_policy.check(turn.headers, turn.local_address, is_post=True)
            memory.headers, memory.config, memory.context = turn.headers, snapshot, preamble
            memory.x_request_id = x_request_id_of(turn.headers)
        self.record.caller = preamble.caller.id
        self._exposes = preamble.may_name_nodes
        if self._edge.rejecting:
            raise errors.shutting_down()
        return preamble

    async def _prepared_in_turn(self, preamble: RequestContext, body: bytes) -> Request:
        """The same of a body that takes more than a moment: others have their turn in between.

        Raises: GatewayError.
        """
        await ensure_task()
        if len(body) < LARGE_BODY_BYTES:
            return await self._edge.forwarder.context.time_slicer.run_once(
                partial(self._prepared, preamble, body)
            )
        edge, rules = self._edge, self._snapshot.rules
        # What is made of it on the way counts while it is there.
        made = min(len(body), PARSE_WORKING_BYTES)
        share = self._share or BodyAllocation(preamble.caller.id, preamble.fairness_key)
        edge.body_memory.allocate(share, made, rules.limits.buffered_bytes)
        try:
            return await edge.forwarder.context.time_slicer.run(
                prepare_large(
                    body.removeprefix(BYTE_ORDER_MARK),
                    self._route,
                    rules,
                    partial(self._prepared, preamble),
                )
            )
        finally:
            edge.body_memory.release(share, made)

    def _prepared(self, preamble: RequestContext, body: Body) -> Request:
        """The request that the body makes. Raises: GatewayError."""
        edge, record, route = self._edge, self.record, self._route
        made = prepare
        if not isinstance(body, bytes):
            peeked = body.parse()
        elif route.multipart:
            peeked = multipart.parse_multipart(body, self._turn.headers)
            made = prepare_multipart
        else:
            try:
                peeked = parse_body(body)
            except GatewayError:
                if not body.startswith(BYTE_ORDER_MARK):
                    raise
                body = body[len(BYTE_ORDER_MARK) :]
                peeked = parse_body(body)
        tier = peeked.service_tier
        wanted = peeked.priority
        record.priority = effective_priority(
            preamble.priority_header,
            wanted if isinstance(wanted, str) else None,
            tier if isinstance(tier, str) else None,
            preamble.caller,
        )
        patience, own_timer = preamble.plain_client_timeout, preamble.client_has_timer
        if peeked.stream or self._snapshot.settings.heartbeat_plain:
            patience, own_timer = preamble.client_timeout, False
        incoming = IncomingRequest(
            self.request_id,
            record.x_request_id,
            route,
            preamble.header_lines,
            patience,
            body,
            preamble.caller,
            self.received,
            preamble.fairness_key,
            preamble.session,
            own_timer,
        )
        catalogue = edge.fleet.model_index
        request = made(incoming, peeked, record.priority, self._snapshot.rules, catalogue)
        record.stream = request.stream
        for name in request.model_names:
            if catalogue.serves(name):
                record.model = request.model
                break
        if is_infill(route, peeked) and self._snapshot.settings.queue.latest_wins:
            self._editing = request.session or self._whereabouts(
                request.fairness_key, request.model
            )
        return request

    def _whereabouts(self, party: str, model: str) -> str:
        """What stands for an editor's session that no header names."""
        proxies = self._snapshot.settings.listen.trusted_proxies
        address = client_address(self._turn.headers, self._turn.peer_address, proxies)
        return f"{party} {address} {model}"

    def _turned_away(self, error: GatewayError) -> bool:
        """End it with `error` if it waits for a slot; whether it did."""
        live, scheduler = self._live, self._edge.forwarder.context.scheduler
        waiting = (
            [self.request_id] if live is None or live.sub_requests is None else live.sub_requests
        )
        return any(scheduler.shed(one, error) for one in waiting)

    def _replace(self, session: str, live: InFlightRequest) -> None:
        """Nobody reads the earlier completion of this session any more."""
        earlier = self._edge.latest_edits.replace(session, live)
        if earlier is not None:
            error = errors.superseded()
            if not self._edge.forwarder.context.scheduler.refuse(earlier.request.id, error):
                earlier.cancel(error)

    def _pass_on_whole(self, reply: ProxyResponse) -> None:
        record, turn, dialect = self.record, self._turn, self._route.api
        fields, content = reply.header_lines, reply.content
        if reply.status >= 400:
            record.status = reply.status
            record.reason = record.reason or "node_error"
            content = response_heads.node_error_body(reply, dialect, record.x_request_id)
            fields = response_heads.node_error_header_lines(reply, content)
        if not turn.response_started:
            turn.respond(reply.status, fields + self._own_fields(), content)
        elif not record.stream:
            turn.end_response(content)
        elif reply.status >= 400:
            turn.end_response(
                dialect.error_event(response_heads.node_error(reply), record.x_request_id)
            )
        else:
            raise errors.node_failed("The node did not stream its answer.")

    async def _pass_on(self, reply: ProxyResponse, rest: BodyStream) -> None:
        record, turn = self.record, self._turn
        streams = rest.source.is_sse
        if turn.response_started and record.stream and not streams:
            raise errors.node_failed("The node did not stream its answer.")
        if self._heartbeat is not None and not (streams and self._snapshot.settings.heartbeat):
            self._heartbeat.stop()
        if turn.response_started:
            turn.write(reply.content)
        else:
            fields = reply.header_lines + self._own_fields()
            if streams:
                fields += b"x-accel-buffering: no\r\n"
            turn.start_response(reply.status, fields, reply.content)
        try:
            await self._taken(rest)
            while (chunk := await rest.next_chunk(turn.write)) != b"":
                if chunk is None or turn.write(chunk):
                    await self._taken(rest)
        except UpstreamError as failure:
            errors.drop_traceback(failure)
            # Half of a plain answer is out: it must not look like a whole one.
            record.status, record.reason = 502, "node_failed"
            turn.abort()
            return
        turn.end_response()

    async def _taken(self, rest: BodyStream) -> None:
        """Wait until the client has taken most of what it has, unless the request is to end."""
        turn, attempt = self._turn, rest.source
        if turn.write_paused and attempt.failure is None:
            attempt.notify_failure(turn.wake_writer)
            await turn.wait_writable()

    async def _let_it_time_out(self, request: Request) -> None:
        """Past the deadline of an official client, its own timer is to end the request.

        An error in that very moment it would take for the gateway's, and ask again.
        """
        assert request.deadline is not None
        now = self._edge.clock()
        if now >= request.deadline - TIMER_TOLERANCE:
            await ensure_task()
            await asyncio.sleep(request.deadline + CLIENT_TIMEOUT_GRACE + TIMER_TOLERANCE - now)

    def refuse(self, error: GatewayError) -> None:
        """End with an error: a reply of its own, or an event if the stream has begun."""
        record, dialect, turn = self.record, self._route.api, self._turn
        record.status, record.reason = error.status, error.code
        if self._exposes:
            error.reveal_nodes()
        if turn.response_started:
            told = dialect.error_event if record.stream else dialect.error_body
            turn.end_response(told(error, record.x_request_id))
            return
        if turn.more_body:
            # What is left of it must not be taken for the next request.
            turn.keep_alive = False
        body = dialect.error_body(error, record.x_request_id)
        turn.respond(error.status, encode_headers(error_headers(error)) + self._own_fields(), body)

    def close(self) -> None:
        """Tell what became of it and let go of everything."""
        edge, record = self._edge, self.record
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None  # which holds on to this
        if self._share is None:
            edge.body_memory.total_bytes -= self._body_size
        else:
            edge.body_memory.release(self._share)
            self._share.evict = None  # which holds on to this
        if self._reply is not None and self._reply.body_stream is not None:
            self._reply.body_stream.close()
        if self._live is not None:
            edge.registry.remove(self._live)
            if self._editing is not None:
                edge.latest_edits.discard(self._editing, self._live)
        record.duration_seconds = edge.clock() - self.received
        edge.bus.publish_deferred(record)

    def _own_fields(self, *, known: bool = True) -> bytes:
        """The gateway's lines of a head; not `known`: how the request will fare."""
        anthropic = self._route.api.sends_request_id
        if known:
            fields = gateway_header_lines(self.record, anthropic=anthropic, name_node=self._exposes)
        else:
            fields = early_gateway_header_lines(self.record, anthropic=anthropic)
        cors = self._snapshot.settings.cors
        return (
            fields
            if cors is None
            else fields + encode_headers(cors_headers(cors, self._turn.headers))
        )

    def _begun_heartbeat(self, live: InFlightRequest, preamble: RequestContext) -> Heartbeat | None:
        """What shows its client that the request is not forgotten."""
        settings = self._snapshot.settings
        if not live.request.stream:
            if settings.heartbeat and settings.heartbeat_plain:
                return Heartbeat(settings.heartbeat, self._pad)
        elif preamble.wants_progress:
            live.prefill_progress = PrefillProgress()
            return Heartbeat(PROGRESS_SECONDS, self._tell_progress)
        elif settings.heartbeat:
            return Heartbeat(settings.heartbeat, self._beat)
        return None

    def _pad(self) -> float:
        """White space, which JSON may begin with."""
        self._show(b" ", b"content-type: application/json; charset=utf-8\r\n")
        return self._snapshot.settings.heartbeat

    def _tell_progress(self) -> float:
        """A heartbeat that says how far the request has come."""
        live, edge, dialect = self._live, self._edge, self._route.api
        if self._reply is not None:
            return self._beat()
        assert live is not None
        assert live.prefill_progress is not None
        place = edge.forwarder.context.scheduler.queue_position(live.request)
        reading = live.prefill_progress.status(edge.clock()) if place is None else None
        line = progress_comment(place, reading)
        beat = dialect.heartbeat() if dialect.heartbeat_is_event or not line else b""
        self._show(line + beat, EVENT_STREAM_HEADER_LINES)
        return PROGRESS_SECONDS

    def _beat(self) -> float:
        """A sign of life, if there was none for so long; seconds until it is time again."""
        rest = None if self._reply is None else self._reply.body_stream
        interval, now = self._snapshot.settings.heartbeat, self._edge.clock()
        if rest is not None:
            left = max(self._shown, rest.last_content_at) + interval - now
            if left > interval * HEARTBEAT_TOLERANCE:
                return left
        if rest is None or rest.is_open:
            self._show(self._route.api.heartbeat(), EVENT_STREAM_HEADER_LINES)
        return interval

    def _show(self, beat: bytes, lines: bytes) -> None:
        """Send a sign of life, and before the first of a reply its head with these lines."""
        turn = self._turn
        self._shown = self._edge.clock()
        if turn.disconnected or turn.write_paused:
            return  # it has enough that it has not taken
        if turn.response_started:
            turn.write(beat)
        else:
            turn.start_response(200, lines + self._own_fields(known=False), beat)
            if self._live is not None:
                self._live.request.response_started = True


TIMER_TOLERANCE = 0.01
"""Seconds by which a timer may be early."""

CLIENT_TIMEOUT_GRACE = 2.0
"""Seconds past its deadline before an official client is told that its time is over."""

HEARTBEAT_TOLERANCE = 0.01
"""Part of its interval by which a sign of life may come before its time."""

PROGRESS_SECONDS = 1.0
"""Seconds between two comments to a client that wants to know how long it will wait."""


class Heartbeat:
    """Calls `beat` after `first` seconds, then after as many as it says, until `stop`."""

    __slots__ = ("_beat", "_handle", "_loop")

    def __init__(self, first: float, beat: Callable[[], float]) -> None:
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(first, self._go_on)

    def stop(self) -> None:
        """Nothing more is to be said."""
        self._handle.cancel()

    def _go_on(self) -> None:
        self._handle = self._loop.call_later(self._beat(), self._go_on)


T = TypeVar("T")


@dataclass(slots=True)
class SupersedingMap(Generic[T]):
    """The newest of each session, as long as it waits or runs."""

    _newest: dict[str, T] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._newest)

    def replace(self, session: str, one: T) -> T | None:
        """`one` is the newest now; what it replaces, if that is not over yet."""
        earlier = self._newest.get(session)
        self._newest[session] = one
        return earlier

    def discard(self, session: str, one: T) -> None:
        """`one` is over; nothing happens if it was replaced."""
        if self._newest.get(session) is one:
            del self._newest[session]


@dataclass(slots=True, eq=False)
class ProxyHandler:
    """Serves the routed paths; `snapshot` is replaced as a whole at a reload."""

    config: HandlerConfig
    forwarder: Forwarder
    fleet: Fleet
    registry: InFlightRegistry
    bus: EventBus
    clock: Callable[[], float]
    closing: bool = False
    """The gateway is on its way out, as `/ready` tells."""
    rejecting: bool = False
    """... and takes nothing more."""
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    """What takes the turns of large bodies."""
    latest_edits: SupersedingMap[InFlightRequest] = field(default_factory=SupersedingMap)
    """What editors wait for: a newer one of the same session ends it."""
    _prefix: str = field(default_factory=lambda: f"req_{secrets.token_hex(4)}")
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def serve(self, route: Route, exchange: HttpExchange) -> Awaitable[None]:
        """Serve one request to a routed path; cancelled when its client leaves."""
        return _HandledRequest(self, route, exchange).serve()

    def next_id(self) -> str:
        """An id that no other request of this process has or will have."""
        return f"{self._prefix}{next(self._numbers):x}"
