"""uvicorn's HTTP protocol with the limits that it lacks, which no ASGI app could set.

By itself uvicorn reads headers without end and waits for ever for the rest of a request line. It
also reads on for ever what a client sends after its request was refused half-way, and makes a task
of every request that a packet holds.

Here what has come is cut where a request ends: httptools gets one head, then its body, and the
next head only when the reply before it is complete. What comes meanwhile waits as bytes
(`backlog.py`). So nothing of one request depends on how the bytes of another were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway import errors
from gateway.access.callers import IPNetwork
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.proxy.api.relayed import RELAYED
from gateway.proxy.inbound.routes import ROUTES, Route
from gateway.transport.known_head import KnownHead
from gateway.web.connections import (
    HEALTH_ONLY_SECONDS,
    ConnectionAdmission,
    ConnectionLimiter,
    health_only_app,
    too_many_connections,
)
from gateway.web.framing import REQUEST_LINE, ChunkedDecoder, with_single_host
from gateway.web.http_exchange import STATUS_LINES, ClientConnection, HttpExchange
from gateway.web.pipelining import (
    CONNECTION_PIPELINE_BYTES,
    LISTENER_PIPELINE_BYTES,
    PIPELINE_READ_BYTES,
    PipelineFlowControl,
    PipelineQueue,
)
from gateway.web.response_heads import encode_rejection

Serve = Callable[[Route, HttpExchange], Awaitable[None]]

LINGER_SECONDS = 2.0
"""How long the rest of a refused body is read, so that the client sees why it was refused."""

LINGER_BYTES = 8 * 1024 * 1024

MOST_HEADER_FIELDS = 256
"""Most fields of a head: each costs a call into Python, and a look by whoever seeks one."""

MOST_LEADING_CRLF_BYTES = 16
"""Line ends that may stand before a request (RFC 9112, section 2.2)."""

_UPGRADE = frozenset({b"upgrade", b"http2-settings"})

_END = b"\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """One client's connection. What it goes by is set by `bounded`."""

    limits: LimitSettings
    routes: Mapping[bytes, Route]
    """Served by `serve`, when posted to; all else by the ASGI application."""
    serve: Serve
    pipeline_queue: PipelineQueue
    """Of all connections of the listener."""
    connection_limiter: ConnectionLimiter
    draining = False
    """Another process takes new connections: each reply here is its connection's last."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.url = b""
        self._in_head = True
        """What is read next belongs to a head, and not to a body."""
        self._partial = b""
        """The part of a head that has come."""
        self._left = 0
        """Bytes of the body that are to come, where its length was told."""
        self._chunks: ChunkedDecoder | None = None
        """The body that is being read, where it is chunked."""
        self._held = bytearray()
        """What has come and is not read before the reply to what came before it is complete."""
        self._counted = 0
        """How much of it the listener's backlog counts."""
        self._in_backlog = False
        self.idle_since = 0.0
        self._length = b""
        self._coding: bytes | None = None
        self._http_10 = False
        self._line: ClientConnection | None = None
        self._known: KnownHead | None = None
        """The head of the last routed request that came whole."""
        self._timer: asyncio.TimerHandle | None = None
        self._lingered = -1
        """Bytes read since the request was refused; negative while none was."""
        self._deaf = False
        """Nothing that comes is a request any more."""
        self._begun: HttpExchange | None = None
        """To be started when what has come is read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: PipelineFlowControl = PipelineFlowControl(transport)
        address = self.client[0] if self.client else None
        self.idle_since = self.loop.time()
        seat = self.connection_limiter.admit(self, address)
        if seat is not ConnectionAdmission.ADMITTED:
            self._take_briefly(seat)
            return
        if self.routes:
            serve = (
                self.connection_limiter.count_forwarded(self.serve)
                if self.connection_limiter.is_trusted_proxy(address)
                else self.serve
            )
            self._line = ClientConnection(
                transport, self.flow, address, serve, self.on_response_complete, self.tasks
            )
        self._timer = self.loop.call_later(self.limits.header_timeout, self._head_is_late)

    def _take_briefly(self, seat: ConnectionAdmission) -> None:
        """There are too many: ask for nothing but the gateway's health, and soon, or not at all."""
        if seat is ConnectionAdmission.REJECTED:
            self.evict()
            return
        self.routes, self.app = {}, health_only_app(self.app)
        self._timer = self.loop.call_later(HEALTH_ONLY_SECONDS, self.evict)

    @property
    def idle(self) -> bool:
        """Whether no request is under way, and its client has taken every reply."""
        return not (self._waits or self._held or self.transport.get_write_buffer_size())

    @property
    def reading_body(self) -> bool:
        """Whether the body of its request is still coming."""
        turn: object = self.cycle
        return isinstance(turn, HttpExchange) and turn.more_body and not turn.response_started

    def evict(self) -> None:
        """Close, since there are too many; one that has had no reply yet is told."""
        turn: object = self.cycle
        if isinstance(turn, HttpExchange) and self.reading_body:
            turn.fail_body(too_many_connections())
            return
        if turn is None or self._partial:
            self._refuse(too_many_connections())
        # Not a moment longer than it takes to say so.
        self._disarm()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.connection_limiter.remove(self)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        super().connection_lost(exc)
        # They hold this object as it holds them, and the collector rarely looks.
        self._line = self.cycle = None  # type: ignore[assignment]
        self._held.clear()
        self._count_held()

    # What has come, cut into requests.

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._lingered >= 0:
            self._lingered += len(data)
            if self._lingered > LINGER_BYTES:
                self.transport.close()
                return
            if self._deaf:
                return
        between = self._in_head and not self._partial
        if self._held:
            self._hold(data)
            return
        if self._known is not None and between:
            body = self._known.match_body(data)
            if body is not None and self.cycle.response_complete and not self.flow.write_paused:
                self._repeats(body)
                return
        read = self._read(data)
        if read < len(data):
            self._hold(data[read:])
            self._go_on_soon()
            between = False
        if self._begun is not None:
            turn, self._begun = self._begun, None
            if between and not turn.more_body:
                # One whole request, from the first byte of its head on.
                self._learn(turn, data)
            turn.start()

    @property
    def _waits(self) -> bool:
        """Whether the next request has to wait: for a reply, or for a client that takes none."""
        cycle: RequestResponseCycle | None = self.cycle
        return self.flow.write_paused or (cycle is not None and not cycle.response_complete)

    def _hold(self, data: bytes) -> None:
        """Keep what is not read now, and read no more from the client when that is much."""
        self._held += data
        self._count_held()
        self._cut_if_crowded()
        if len(self._held) > CONNECTION_PIPELINE_BYTES:
            self.flow.reads_held = True
            self.flow.pause_reading()

    def _count_held(self) -> None:
        held = len(self._held)
        self.pipeline_queue.held_bytes += held - self._counted
        self._counted = held

    def _cut_if_crowded(self) -> None:
        """Break off where a client takes no replies, if too much waits on all connections."""
        if (
            self._held
            and self.flow.write_paused
            and self.pipeline_queue.held_bytes > LISTENER_PIPELINE_BYTES
        ):
            self.transport.abort()

    def _go_on_soon(self) -> None:
        """Go on with what is held, when it is this connection's turn."""
        if self._held and not self._in_backlog and not (self._in_head and self._waits):
            self._in_backlog = True
            self.pipeline_queue.add(self._go_on)

    def _go_on(self) -> None:
        self._in_backlog = False
        held = self._held
        if not held or self.transport.is_closing():
            return
        if self._in_head and not self._partial and held.startswith(b"\r\n"):
            # Some clients end a body with a line end that its length does not count.
            del held[:2]
        del held[: self._read(bytes(held[:PIPELINE_READ_BYTES]))]
        self._count_held()
        if self.flow.reads_held and len(held) <= CONNECTION_PIPELINE_BYTES:
            self.flow.reads_held = False
            if self._in_head or len(self.cycle.body) <= CONNECTION_PIPELINE_BYTES:
                self.flow.resume_reading()
        self._go_on_soon()
        if self._begun is not None:
            turn, self._begun = self._begun, None
            turn.start()

    def _read(self, data: bytes) -> int:
        """Read what is its turn, a bounded amount of work; how many bytes that was."""
        at, size = 0, len(data)
        while at < size and not self._deaf:
            if self._in_head:
                if self._waits:
                    return at
                at = self._read_head(data, at)
            elif self._chunks is not None:
                return self._read_chunks(self._chunks, data, at)
            else:
                part = data[at : at + self._left]
                self._left -= len(part)
                at += len(part)
                self._parse(part)
        return size if self._deaf else at

    def _read_head(self, data: bytes, at: int) -> int:
        """Read a head, or what has come of it; up to where."""
        partial, most = self._partial, self.limits.header_bytes
        if not partial:
            self.url = b""
        part, tail = data[at:], partial[-3:]
        end = (tail + part).find(_END)
        if end >= 0:
            part = part[: end + len(_END) - len(tail)]
        if len(partial) + len(part) > most:
            self._parse(part[: most - len(partial)])  # which may tell its path
            self._refuse(errors.headers_too_large(most))
            return len(data)
        head = partial + part
        line = REQUEST_LINE.match(head) if end >= 0 else None
        if line is not None:
            self._http_10 = line[1] == b"0"
            self._partial = b""
        elif end >= 0 and (len(head) > MOST_LEADING_CRLF_BYTES or head.strip(b"\r\n")):
            self._refuse(_no_http())
            return len(data)
        else:
            self._partial = head
            if self._timer is None:
                self._timer = self.loop.call_later(self.limits.header_timeout, self._head_is_late)
        self._parse(part)
        return at + len(part)

    def _read_chunks(self, chunks: ChunkedDecoder, data: bytes, at: int) -> int:
        try:
            at, body = chunks.feed(data, at)
        except GatewayError as error:
            self._refuse(error)
            return len(data)
        if body:
            self.on_body(body)
        if chunks.done:
            self._chunks = None
            self._parse(b"0\r\n\r\n")  # it has seen nothing of the body
        return at

    def _parse(self, part: bytes) -> None:
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            self._go_on_plainly()
        except httptools.HttpParserError as error:
            ours = error.__context__
            self._refuse(ours if isinstance(ours, GatewayError) else _no_http())

    def _learn(self, turn: HttpExchange, data: bytes) -> None:
        """Know the head of this request, which has just come, when it comes again."""
        usual = turn.keep_alive and self._length and not self.expect_100_continue
        self._known = KnownHead.from_message(data) if usual else None
        self._known_as = turn.route, turn.headers

    def _repeats(self, body: bytes) -> None:
        """Serve a whole request whose head is known."""
        assert self._line is not None
        keep_alive = not self.draining
        turn: Any = HttpExchange(
            self._line, *self._known_as, len(body), body=body, keep_alive=keep_alive
        )
        self.cycle = turn
        turn.start()

    # What the parser calls.

    def on_message_begin(self) -> None:
        # uvicorn would build the ASGI scope here, which most requests don't need.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._length = b""
        self._coding = None

    def _make_scope(self) -> None:
        """What uvicorn does at the beginning of a message."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        if self._length:
            self.headers.append((b"content-length", self._length))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            # Apart, so that one head of a connection is like the next.
            self._length = value
            return
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"transfer-encoding":
            # Twice is none of those that are understood.
            self._coding = value if self._coding is None else b""
        self.headers.append((name, value))
        if len(self.headers) > MOST_HEADER_FIELDS:
            raise errors.too_many_headers(MOST_HEADER_FIELDS)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._disarm()
        self.headers = with_single_host(self.headers, self.url, http_10=self._http_10)
        if self._coding is not None:
            if self._http_10 or self._length or self._coding.strip(b" \t").lower() != b"chunked":
                raise errors.invalid_request("The length of this request's body is unclear.")
            self._chunks = ChunkedDecoder(self.limits.header_bytes)
        self._left = int(self._length or 0)
        if self.parser.get_method() == b"POST":
            route = self.routes.get(self.url, None) or self._route_of(self.url)
            if route is not None:
                self._in_head = False
                self._take_turn(route)
                return
        self._make_scope()
        super().on_headers_complete()
        self._in_head = False
        if self.draining:
            self.cycle.keep_alive = False

    def drain(self) -> None:
        """Let the request that is served be the last; an idle connection has one more."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_started:
            cycle.keep_alive = False

    def _route_of(self, url: bytes) -> Route | None:
        """The route of a URL that is not the bare path: with a query, escapes, or a host."""
        try:
            path = httptools.parse_url(url).path
        except httptools.HttpParserInvalidURLError:
            return None
        return self.routes.get(unquote_to_bytes(path or b""))

    def _take_turn(self, route: Route) -> None:
        """Serve a routed request: as uvicorn would, but for the ASGI messages."""
        assert self._line is not None
        turn = self._begun = HttpExchange(
            self._line,
            route,
            self.headers,
            self._left,
            http_10=self._http_10,
            keep_alive=not (self._http_10 or self.draining) and self.parser.should_keep_alive(),
            expects_continue=self.expect_100_continue,
        )
        self.cycle = cast("RequestResponseCycle", turn)

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = True
        if self._lingered >= 0:
            self._lingered = -1
            self._disarm()
            if not self.cycle.keep_alive:
                self.transport.close()
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        # As uvicorn's own, but for one timer a connection instead of one a reply.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self._held:
            self._go_on_soon()
        self.idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._watch_idleness(self.timeout_keep_alive)
        if not self._in_head:
            self._linger()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cut_if_crowded()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on_soon()

    def _watch_idleness(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if (
            not self.cycle.response_complete
            or self._partial
            or self._held
            or self.transport.is_closing()
        ):
            return  # it is looked at again when the reply is complete
        left = self.idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._watch_idleness(left)
        else:
            self.transport.close()

    def _unset_keepalive_if_required(self) -> None:
        """Nothing: uvicorn would end the timer with each request; this one looks for itself."""

    def _go_on_plainly(self) -> None:
        """Read a request that wished for another protocol as the plain one that it is as well.

        Java's HTTP client wishes for HTTP/2 with every first request (RFC 9110, section 7.8).
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(errors.method_not_allowed("CONNECT", "GET, POST"))
            return
        lines = [b"%b %b HTTP/1.1\r\n" % (method, self.url)]
        if self._length:
            lines.append(b"content-length: %b\r\n" % self._length)
        for name, value in self.headers:
            if name == b"connection":
                kept = [part for part in value.split(b",") if part.strip().lower() not in _UPGRADE]
                lines.append(b"connection: %b\r\n" % b",".join(kept))
            elif name not in _UPGRADE:
                lines.append(b"%b: %b\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._parse(b"".join(lines) + b"\r\n")

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self._in_head and not self.transport.is_closing():
            if self._partial:
                self._refuse(errors.request_timeout("The head of the request took too long."))
            else:
                self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        """Answer without any app, and close."""
        if self._deaf or self.transport.is_closing():
            return
        self._disarm()
        self._deaf = True
        self._lingered = 0
        self._held.clear()
        self._count_held()
        if not self._in_head:
            # The rest of its own body is what was wrong.
            running = self.cycle
            turn: object = running
            if not running.response_complete and isinstance(turn, HttpExchange):
                turn.fail_body(error)
                return
            if running.response_complete or running.response_started:
                self.transport.close()
                return
            running.disconnected = True
            running.message_event.set()
        route = self.routes.get(self.url)
        fields, body = encode_rejection(error, route.api if route is not None else RELAYED)
        head = STATUS_LINES[error.status] + fields + b"connection: close\r\n\r\n"
        self.transport.write(head + body)
        self._linger()

    def _linger(self) -> None:
        """Read on for a moment what is not wanted: closed now, the client might miss the reply."""
        self._lingered = 0
        self._disarm()
        if self._deaf and self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has just left
                self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)


def _no_http() -> GatewayError:
    return GatewayError(400, "invalid_request", "This is not a valid HTTP request.")


def protocol_class(
    limits: LimitSettings, serve: Serve | None = None, proxies: Sequence[IPNetwork] = ()
) -> type[BoundedProtocol]:
    """The protocol class with these limits, for a uvicorn `Config` of one listener.

    With `serve`, POSTs to the routed paths go there and not to the ASGI application. Connections
    of `proxies` are those of the addresses that they forward.
    """
    seats = ConnectionLimiter(limits.connections, proxies)
    own: dict[str, Any] = {
        "limits": limits,
        "routes": {},
        "pipeline_queue": PipelineQueue(),
        "connection_limiter": seats,
    }
    if serve is not None:
        own["routes"] = {path.encode(): route for path, route in ROUTES.items()}
        own["serve"] = staticmethod(serve)
    return type("Bounded", (BoundedProtocol,), own)
