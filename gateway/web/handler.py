"""Serves a routed request: reads it, forwards it, and sends the response.

While its client waits, it gets signs of life: white space, comments, or its place in the queue.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from gateway import errors
from gateway.api.base import Api, NumberedHeartbeats, ResponseRewriter
from gateway.api.json_values import run_at_once
from gateway.callers.callers import client_address
from gateway.callers.limits import Reservation
from gateway.callers.meter import Meter
from gateway.catalog import RequestQueue
from gateway.errors import CLIENT_CLOSED_STATUS, ClientClosed, GatewayError
from gateway.events import EventBus, RequestRecord
from gateway.forward.client_response import (
    JSON_HEADER_LINE,
    BodyStream,
    ClientResponse,
    EventsForClient,
    for_client,
    node_error,
    node_error_body,
    rewrite_in_steps,
)
from gateway.forward.forwarder import Forwarder
from gateway.forward.header_fields import with_content_type
from gateway.forward.in_flight import (
    InFlightRegistry,
    InFlightRequest,
    PrefillProgress,
)
from gateway.http.body_memory import (
    PARSE_WORKING_BYTES,
    BodyAllocation,
    BodyMemory,
    read_body,
    take_small_body,
    translate_body,
)
from gateway.http.exchange import HttpExchange
from gateway.http.heads import (
    HandlerConfig,
    RequestContext,
    cors_headers,
    early_gateway_header_lines,
    encode_headers,
    error_headers,
    gateway_header_lines,
    node_error_header_lines,
    parse_context,
    progress_comment,
    rate_limit_lines,
    stream_header_lines,
)
from gateway.request.body import LARGE_BODY_BYTES, SMALL_BODY_BYTES, TimeSlicer, is_slow_to_parse
from gateway.request.preparation import IncomingRequest, Request, read_in_turn, read_request
from gateway.request.routes import ROUTES, Route, routes_of
from gateway.terms import Headers
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import UpstreamError
from gateway.watch.request_tracing import RequestTracing
from gateway.web.background import TakesStorable

PROGRESS_SECONDS = 1.0  # seconds between progress comments, for a client that asks for them
TIMER_TOLERANCE = 0.01  # seconds by which a timer may fire early
# Seconds past its deadline that an official client has to time out by itself.
CLIENT_TIMEOUT_GRACE = 2.0
HEARTBEAT_TOLERANCE = 0.01  # a heartbeat may come early by this part of its interval


@dataclass(slots=True, eq=False)
class RequestHandler:
    """Serves the routed paths. A reload replaces `config` as a whole."""

    config: HandlerConfig
    forwarder: Forwarder
    queue: RequestQueue
    registry: InFlightRegistry
    bus: EventBus
    clock: Callable[[], float]
    time_slicer: TimeSlicer  # prepares large bodies in short steps
    meter: Meter
    progress_seconds: float = PROGRESS_SECONDS
    closing: bool = False  # the gateway is shutting down; `/ready` says so
    rejecting: bool = False  # new requests are refused
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    latest_edits: dict[str, InFlightRequest] = field(default_factory=dict)
    """Completions that editors wait for; a newer one of the same session ends the older."""
    storing: TakesStorable | None = None  # takes what is to be kept or made later
    tracing: RequestTracing | None = None
    _id_prefix: str = field(default_factory=lambda: f"req_{secrets.token_hex(8)}")
    _id_numbers: itertools.count[int] = field(default_factory=itertools.count)

    def serve(self, route: Route, exchange: HttpExchange) -> Coroutine[Any, Any, None]:
        """Serve one request to a routed path; cancelled when its client disconnects."""
        return _HandledRequest(self, route, exchange).serve()

    def next_id(self) -> str:
        """An id that no other request has, in any process: the ledger knows it by that."""
        return f"{self._id_prefix}{next(self._id_numbers):x}"

    def ended(
        self,
        record: RequestRecord,
        headers: Headers,
        received_at: float,
        reservation: Reservation | None,
    ) -> None:
        """A request has ended: settle what it has reserved, and publish its record, soon."""
        record.finish(received_at, self.clock())
        try:
            if self.tracing is not None and self.tracing.active:
                # First: it may trace a failed request, whose log event then names its trace.
                self.tracing.finished(record.request_id, record, headers, received_at)
        finally:
            if reservation is not None:
                self.meter.ended(reservation, record)
            else:
                self.bus.publish_deferred(record)

    def configure(self, config: HandlerConfig) -> None:
        """Serve new requests by `config`."""
        self.config = config

    def begin_shutdown(self) -> None:
        """Report the gateway as not ready, and serve on."""
        self.closing = True

    def reject_requests(self) -> None:
        self.rejecting = True


class _HandledRequest:
    __slots__ = (
        "_allocation", "_body_size", "_context", "_edit_session", "_handler",
        "_heartbeat", "_in_flight", "_node_route", "_passed_on", "_reservation", "_rewriter",
        "config", "exchange", "numbered_heartbeats", "received_at", "record", "request_id",
        "response", "route", "writer",
    )  # fmt: skip

    def __init__(self, handler: RequestHandler, route: Route, exchange: HttpExchange) -> None:
        self._handler = handler
        self.route = route  # what the client asked for; its API is the client's
        self._node_route = route  # what nodes are asked for
        self._rewriter: ResponseRewriter | None = None
        self.exchange = exchange
        self.config = handler.config
        self._context: RequestContext | None = None  # None: the caller is not known yet
        self._reservation: Reservation | None = None  # None: it was not admitted
        self._in_flight: InFlightRequest | None = None
        self._edit_session: str | None = None
        """The editor's session, if a newer request of it supersedes this one."""
        self.response: ClientResponse | None = None
        self._heartbeat: Heartbeat | None = None
        self.writer: RewritingWriter | None = None  # of a stream whose events are rewritten
        self.numbered_heartbeats: NumberedHeartbeats | None = None
        """Those of its stream, if its client needs them."""
        self._passed_on = False  # whether another process serves it, and tells of its end
        self._body_size = 0  # bytes of a small body; larger ones are counted by `_allocation`
        self._allocation: BodyAllocation | None = None
        self.received_at = handler.clock()
        self.request_id = handler.next_id()
        x_request_id = exchange.context_cache.x_request_id_for(exchange.headers)
        self.record = RequestRecord(
            x_request_id or self.request_id, route.path, request_id=self.request_id
        )
        tracing = handler.tracing
        if tracing is not None and tracing.active:
            tracing.begin(self.request_id, self.record, exchange.headers, self.received_at)

    async def serve(self) -> None:  # noqa: PLR0912, PLR0915 - each call costs
        record = self.record
        try:
            handler, settings = self._handler, self.config.settings
            context = self._admit()
            body = take_small_body(self.exchange, settings.limits, handler.body_memory)
            if body is not None:
                self._body_size = len(body)
            else:
                allocation = self._allocation = allocation_for(context)
                body = await read_body(
                    self.exchange, settings.limits, handler.body_memory, allocation
                )
                allocation.set_evict(self._evict)
            api = self.route.api
            if (context.prefers_async or api.may_keep_responses) and handler.storing is not None:
                body = await handler.storing.serve(self, context, body)
                if body is None:
                    return
            if api.translates and api.needs_translation(
                self.route.path, body, settings, prompt_cache=context.cache.prompt_cache
            ):
                body = await self._translate(context, body)
                if body is None:
                    return
            if len(body) < SMALL_BODY_BYTES or self.route.multipart or not is_slow_to_parse(body):
                request = self._read(context, body)
            else:
                request = await self.read_in_turn(context, body)
            self._reservation = handler.meter.admit(
                context.accounts, request.lease_request, record, request.prompts
            )
            shows_progress = context.wants_progress and request.stream and api.has_comments
            progress = PrefillProgress(hidden=context.cache.hide) if shows_progress else None
            in_flight = InFlightRequest(request, record, None, None, progress)
            self._in_flight = in_flight
            handler.registry.add(in_flight)
            if request.is_infill and settings.queue.latest_wins:
                self._supersede(in_flight)
            if context.counts_no_comments and request.stream:
                self.numbered_heartbeats = api.numbered_heartbeats()
            self._heartbeat = self._start_heartbeat(in_flight)
            self.response = await handler.forwarder.forward(in_flight)
            if api.rewrites_responses or context.cache.hide:
                hides_cache = context.cache.hide and self._node_route.takes_slot
                self.response, self._rewriter = for_client(
                    request, self.response, api, settings, self._rewriter, hides_cache=hides_cache
                )
            if self.numbered_heartbeats is not None:
                self.numbered_heartbeats.wrap(self._rewriter)
                self._rewriter = self.numbered_heartbeats
            if self.response.body_stream is None:
                content = self.response.content
                if self._rewriter is not None and self.response.status < 300:
                    content = await self._rewritten(self._rewriter, content)
                self._send_whole(self.response, content)
            else:
                await self._send_stream(self.response, self.response.body_stream)
        except GatewayError as error:
            record.fail(error.status, error.code)
            if self._in_flight is not None and self._in_flight.request.client_has_timer:
                await self._let_client_time_out(self._in_flight.request)
            self._send_error(error)
            errors.drop_traceback(error)
        except (ClientClosed, asyncio.CancelledError):
            record.fail(CLIENT_CLOSED_STATUS, "client_closed")
            raise
        except Exception:
            record.fail(500, "internal_error")
            raise
        finally:
            self._close()

    # Read the request.

    def _admit(self) -> RequestContext:
        """Identify the caller from the head, before any of the body is read.

        Raises: GatewayError.
        """
        exchange, config = self.exchange, self.config
        context = exchange.context_cache.get(exchange.headers, config)
        if context is None:
            context = parse_context(
                exchange.headers, exchange.peer_address, config, self._handler.meter.book
            )
            if config.origin_policy is not None and context.accounts.caller.anonymous:
                config.origin_policy.check(exchange.headers, exchange.local_address, is_post=True)
            exchange.context_cache.store(exchange.headers, config, context)
        self.record.identify(context.accounts.caller.id)
        self._context = context
        if self._handler.rejecting:
            raise errors.shutting_down()
        return context

    async def _translate(self, context: RequestContext, body: bytes) -> bytes | None:
        """The body as nodes get it; None: the response was sent. Raises: GatewayError."""
        handler, route, rules = self._handler, self.route, self.config.rules
        if route.path not in routes_of(self.config.settings):
            raise errors.not_found(route.path, None)  # It was, when the connection began.
        aliases, memory, api = rules.model_aliases, handler.body_memory, route.api
        work = api.translate(body, aliases.knows, prompt_cache=context.cache.prompt_cache)
        # The new body may have ten times the bytes, which must count.
        if len(body) >= SMALL_BODY_BYTES or is_slow_to_parse(body):
            await ensure_task()
            if self._allocation is None:
                memory.release_small(self._body_size)
                self._allocation = allocation_for(context)
                self._allocation.set_evict(self._evict)
            translation = await handler.time_slicer.run(
                translate_body(work, len(body), rules.limits, memory, self._allocation)
            )
        else:
            translation = run_at_once(work)
        if translation.path == self.route.path:
            return translation.body
        self._node_route, self._rewriter = ROUTES[translation.path], translation.rewriter
        if translation.reply is None:
            return translation.body
        request = self._read(context, translation.body)
        wanted, labels = request.lease_request.wanted, context.cache.node_labels
        index = aliases.catalog
        if not any(index.serves(name, labels) for name in wanted.model_names):
            raise index.not_found_error(wanted.model, labels, wanted.model_names)
        self.exchange.respond(200, JSON_HEADER_LINE + self.header_lines(), translation.reply)
        return None

    async def read_in_turn(self, context: RequestContext, body: bytes) -> Request:
        """`_read` for any body: other requests run in between if it takes milliseconds.

        Raises: GatewayError.
        """
        await ensure_task()
        handler, rules = self._handler, self.config.rules
        # Working memory counts while it is in use.
        working_bytes = min(len(body), PARSE_WORKING_BYTES) if len(body) >= LARGE_BODY_BYTES else 0
        allocation = self._allocation or allocation_for(context)
        if working_bytes:
            handler.body_memory.allocate(allocation, working_bytes, rules.limits.buffered_bytes)
        try:
            return await read_in_turn(
                self._incoming(context, body),
                self.record,
                rules,
                context.class_of,
                handler.time_slicer,
            )
        finally:
            handler.body_memory.release(allocation, working_bytes)

    def _read(self, context: RequestContext, body: bytes) -> Request:
        """The request that the body describes. Raises: GatewayError."""
        incoming, rules = self._incoming(context, body), self.config.rules
        return read_request(incoming, self.record, rules, context.class_of)

    def _incoming(self, context: RequestContext, body: bytes) -> IncomingRequest:
        id_, x_request_id = self.request_id, self.record.x_request_id
        return IncomingRequest(id_, x_request_id, self._node_route, body, context, self.received_at)

    def _evict(self, error: GatewayError) -> bool:
        """End the request with `error` if it is queued; returns whether it was."""
        parts = None if self._in_flight is None else self._in_flight.sub_requests
        ids = [self.request_id] if parts is None else parts
        return any(self._handler.queue.shed(request_id, error) for request_id in ids)

    def _supersede(self, in_flight: InFlightRequest) -> None:
        """End the earlier request of the same editor, whose response nobody reads any more."""
        asked, latest = in_flight.request.lease_request, self._handler.latest_edits
        session = asked.caller.session
        if not session:  # No header names one: an editor is known by its place.
            exchange, proxies = self.exchange, self.config.settings.listen.trusted_proxies
            address = client_address(exchange.headers, exchange.peer_address, proxies)
            session = f"{asked.caller.fairness_key} {address} {asked.wanted.model}"
        self._edit_session = session
        earlier, latest[session] = latest.get(session), in_flight
        if earlier is not None:
            error = errors.superseded()
            if not self._handler.queue.refuse(earlier.request.id, error):
                earlier.cancel(error)

    # Send the response.

    async def _rewritten(self, rewriter: ResponseRewriter, content: bytes) -> bytes:
        """A plain response as its client gets it. Raises: GatewayError 502."""
        work = rewrite_in_steps(rewriter, content)
        if len(content) < LARGE_BODY_BYTES:
            return run_at_once(work)
        await ensure_task()
        return await self._handler.time_slicer.run(work)

    def _send_whole(self, response: ClientResponse, content: bytes) -> None:
        """Send a response with this content, which it has or that is made of it."""
        record, exchange, api = self.record, self.exchange, self.route.api
        header_lines = response.header_lines
        if response.status >= 400:
            record.fail(response.status, record.reason or "node_error")
            content = node_error_body(response, api, record.x_request_id)
            header_lines = node_error_header_lines(response, content)
        if not exchange.response_started:
            exchange.respond(response.status, header_lines + self.header_lines(), content)
        elif record.stream:  # an error: an answer would have a body stream
            exchange.end_response(self._error_event(node_error(response)))
        else:
            exchange.end_response(content)

    async def _send_stream(self, response: ClientResponse, stream: BodyStream) -> None:
        exchange, is_sse, rewriter = self.exchange, stream.is_sse, self._rewriter
        if rewriter is not None and not is_sse:
            raise errors.node_failed("The node's answer is too long.")
        if self._heartbeat is not None and not (is_sse and self.config.settings.heartbeat):
            self._heartbeat.stop()
        content, header_lines, write = response.content, response.header_lines, exchange.write
        if rewriter is not None:
            api, clock = self.route.api, self._handler.clock
            writer = self.writer = RewritingWriter(exchange, rewriter, api, self.record, clock)
            content, write = writer.rewrite(content), writer.write
            kind = b"content-type: %b\r\n" % api.stream_content_type
            header_lines = with_content_type(header_lines, kind)
        if not exchange.response_started:
            header_lines += self.header_lines()
            if is_sse:
                header_lines += b"x-accel-buffering: no\r\n"
            exchange.start_response(response.status, header_lines, content)
        elif content:
            exchange.write(content)
        try:
            await self._wait_writable(stream)
            while (chunk := await stream.next_chunk(write)) != b"":
                if chunk is None or write(chunk):
                    await self._wait_writable(stream)
        except UpstreamError as failure:
            errors.drop_traceback(failure)
            # Part of a plain response was sent; it must not look complete.
            self.record.fail(502, "node_failed")
            exchange.abort()
            return
        exchange.end_response()

    async def _wait_writable(self, stream: BodyStream) -> None:
        """Wait until the client has taken most of its data, or the attempt fails."""
        exchange = self.exchange
        if exchange.write_paused and stream.failure is None:
            stream.notify_failure(exchange.wake_writer)
            await exchange.wait_writable()

    async def _let_client_time_out(self, request: Request) -> None:
        """At its deadline, leave it to an official client's own timer to end the request.

        The client would take an error at that moment for the gateway's, and retry.
        """
        assert request.deadline is not None
        now = self._handler.clock()
        if now >= request.deadline - TIMER_TOLERANCE:
            await ensure_task()
            await asyncio.sleep(request.deadline + CLIENT_TIMEOUT_GRACE + TIMER_TOLERANCE - now)

    def _send_error(self, error: GatewayError) -> None:
        """End with an error: as the response, or as an event once a stream has begun."""
        record, api, exchange = self.record, self.route.api, self.exchange
        if self._context is not None and self._context.may_name_nodes:
            error.reveal_nodes()
        body = api.error_body(error, record.x_request_id)
        if exchange.response_started:
            exchange.end_response(self._error_event(error) if record.stream else body)
            return
        if exchange.more_body:
            # The rest of the body must not be taken for the next request.
            exchange.close_after_response()
        header_lines = encode_headers(error_headers(error)) + self.header_lines()
        exchange.respond(error.status, header_lines, body)

    def _error_event(self, error: GatewayError) -> bytes:
        event = self.route.api.error_event(error, self.record.x_request_id)
        return event if self.numbered_heartbeats is None else self.numbered_heartbeats.number(event)

    def _close(self) -> None:
        """Publish the outcome and release everything."""
        handler = self._handler
        try:
            if self._heartbeat is not None:
                self._heartbeat.stop()
                self._heartbeat = None  # It refers to this object.
            if self._allocation is None:
                handler.body_memory.release_small(self._body_size)
            else:
                handler.body_memory.release(self._allocation)
                self._allocation.set_evict(None)  # It refers to this object.
            if self.response is not None and self.response.body_stream is not None:
                self.response.body_stream.close()
            if self._in_flight is not None:
                handler.registry.remove(self._in_flight)
                session, latest = self._edit_session, handler.latest_edits
                if session is not None and latest.get(session) is self._in_flight:
                    del latest[session]
        finally:
            # Whatever fails: else its slot of the limits would be lost.
            if not self._passed_on:
                handler.ended(
                    self.record, self.exchange.headers, self.received_at, self._reservation
                )

    def pass_on(self, *, served: bool = True) -> None:
        """Another process serves the request and tells of its end; not `served`: it does not."""
        self._passed_on = served

    def header_lines(self, *, early: bool = False) -> bytes:
        """The gateway's own header lines; `early`: before the outcome is known."""
        anthropic, context = self.route.api.sends_request_id, self._context
        if early:
            lines = early_gateway_header_lines(self.record, anthropic=anthropic)
        else:
            may_name_nodes = context is not None and context.may_name_nodes
            lines = gateway_header_lines(self.record, anthropic=anthropic, name_node=may_name_nodes)
        if context is not None and context.accounts.has_rates:
            limits = self._handler.meter.book.rate_limits(context.accounts)
            lines += rate_limit_lines(*limits, anthropic=anthropic)
        cors = self.config.settings.cors
        if cors is None:
            return lines
        return lines + encode_headers(cors_headers(cors, self.exchange.headers))

    def heartbeat(self) -> bytes:
        """What its client takes for a sign of life."""
        if not self.record.stream:
            return b" "  # JSON may begin with it
        numbered = self.numbered_heartbeats
        return self.route.api.heartbeat if numbered is None else numbered.heartbeat()

    @property
    def body_stream(self) -> BodyStream | None:
        """The body of the response, if it has begun and is a stream."""
        return None if self.response is None else self.response.body_stream

    # Heartbeats.

    def _start_heartbeat(self, in_flight: InFlightRequest) -> Heartbeat | None:
        settings, handler = self.config.settings, self._handler
        interval, first = settings.heartbeat, handler.progress_seconds
        if in_flight.prefill_progress is not None:  # of a stream
            return ProgressHeartbeat(self, in_flight, handler, interval, first)
        if interval and (in_flight.request.stream or settings.heartbeat_plain):
            return Heartbeat(self, in_flight, handler, interval, interval)
        return None


def allocation_for(context: RequestContext) -> BodyAllocation:
    """What a body and the work on it take of the memory for bodies."""
    return BodyAllocation(context.accounts.caller.id, context.fairness_key)


class Heartbeat:
    """Sends a sign of life if nothing was sent for the interval, again and again, until `stop`.

    To a client that waits for a stream that is what its API's clients skip; else white space.
    """

    __slots__ = ("_handle", "_handler", "_in_flight", "_interval", "_last_sent_at", "_loop",
                 "_served")  # fmt: skip

    def __init__(
        self,
        served: _HandledRequest,
        in_flight: InFlightRequest,
        handler: RequestHandler,
        interval: float,
        first: float,
    ) -> None:
        """`first`: seconds until the first one."""
        self._served = served
        self._in_flight = in_flight
        self._handler = handler
        self._interval = interval
        self._last_sent_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(first, self._run)
        served.exchange.set_heartbeat(self.send_now)

    def stop(self) -> None:
        self._handle.cancel()
        self._served.exchange.set_heartbeat(None)  # It refers to this object.

    def send_now(self) -> None:
        """Send a sign of life, whenever the last one was."""
        stream, writer = self._served.body_stream, self._served.writer
        if (stream is None or stream.is_open) and not (writer is not None and writer.failed):
            self._send(self._served.heartbeat)

    def _run(self) -> None:
        self._handle = self._loop.call_later(self._beat(), self._run)

    def _beat(self) -> float:
        """Send something, if it is time; seconds until the next."""
        interval, now = self._interval, self._handler.clock()
        stream, writer = self._served.body_stream, self._served.writer
        if stream is not None:
            written_at = stream.last_content_at if writer is None else writer.written_at
            left = max(self._last_sent_at, written_at) + interval - now
            if left > interval * HEARTBEAT_TOLERANCE:
                return left
        self.send_now()
        return interval

    def _send(self, make: Callable[[], bytes]) -> None:
        """Send what `make` returns; the first time, with a head.

        A client that lags is spared it, so that nothing is made, which might be numbered.
        """
        served, handler = self._served, self._handler
        exchange = served.exchange
        self._last_sent_at = handler.clock()
        if exchange.disconnected or exchange.write_paused:
            return
        if exchange.response_started:
            exchange.write(make())
        else:
            kind = (
                stream_header_lines(served.route.api) if served.record.stream else JSON_HEADER_LINE
            )
            exchange.start_response(200, kind + served.header_lines(early=True), make())
            self._in_flight.note_response_started()
            handler.queue.keep_in_queue(self._in_flight.request.id)


class ProgressHeartbeat(Heartbeat):
    """The place in the queue or the progress of the prefill, for a client that asks for them."""

    __slots__ = ()

    def _beat(self) -> float:
        in_flight, handler, served = self._in_flight, self._handler, self._served
        if served.response is not None:
            return super()._beat()
        position = handler.queue.queue_position(in_flight.request.id)
        prefill = in_flight.prefill_status(handler.clock()) if position is None else None
        comment = progress_comment(position, prefill)
        is_event = served.route.api.heartbeat_is_event or served.numbered_heartbeats is not None

        def make() -> bytes:
            return comment + (served.heartbeat() if is_event or not comment else b"")

        self._send(make)
        return handler.progress_seconds


class RewritingWriter(EventsForClient):
    """Writes a stream's events to the client as `rewriter` makes them."""

    __slots__ = ("_clock", "_exchange", "written_at")

    def __init__(
        self,
        exchange: HttpExchange,
        rewriter: ResponseRewriter,
        api: Api,
        record: RequestRecord,
        clock: Callable[[], float],
    ) -> None:
        EventsForClient.__init__(self, rewriter, api, record)
        self._exchange = exchange
        self._clock = clock
        self.written_at = clock()  # when it last made something of what came

    def write(self, data: bytes, _: bytes | None = None, /) -> bool:
        """Send events; True if the client lags, as `HttpExchange.write`."""
        data = self.rewrite(data)
        if not data:
            return self._exchange.write_paused
        self.written_at = self._clock()
        return self._exchange.write(data)
