"""uvicorn's HTTP protocol, with limits that it lacks and that no ASGI application could set.

On its own, uvicorn reads headers without limit and waits for ever for the rest of a request line.
It also reads whatever a client sends after a request was refused, and creates a task for every
request in a packet.

Here received bytes are split at request boundaries: httptools gets one head, then its body, and the
next head only when the response is complete. Bytes received meanwhile wait in a backlog
(`connections.PipelineQueue`). So no request depends on how the bytes of another were sent.

What is used of uvicorn beyond its documented interface is guarded by tests/web/test_uvicorn.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
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
    CONNECTION_PIPELINE_BYTES,
    HEALTH_ONLY_SECONDS,
    LISTENER_PIPELINE_BYTES,
    PIPELINE_READ_BYTES,
    ConnectionAdmission,
    ConnectionLimiter,
    PipelineFlowControl,
    PipelineQueue,
    health_only_app,
    too_many_connections,
)
from gateway.web.framing import REQUEST_LINE, ChunkedDecoder, with_single_host
from gateway.web.http_exchange import STATUS_LINES, ClientConnection, HttpExchange
from gateway.web.response_heads import encode_rejection

Serve = Callable[[Route, HttpExchange], Awaitable[None]]

LINGER_SECONDS = 2.0
"""Seconds for which a refused client is still read from, so that it sees the response."""

LINGER_BYTES = 8 * 1024 * 1024
"""Most bytes that are read from a refused client."""

DEPARTURE_CHECK_SECONDS = 0.05
"""Seconds until the first check whether a client that sends no more has left; each later one waits
twice as long, up to `LONGEST_DEPARTURE_CHECK_SECONDS`."""

LONGEST_DEPARTURE_CHECK_SECONDS = 1.0

MOST_HEADER_FIELDS = 256
"""Most header fields of a request: each costs a call into Python, and time in each search."""

MOST_LEADING_CRLF_BYTES = 16
"""Most bytes of line ends before a request (RFC 9112, section 2.2)."""

_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})

_HEAD_END = b"\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """A client's connection. `protocol_class` sets the class attributes."""

    limits: LimitSettings
    routes: Mapping[bytes, Route]
    """Paths whose POSTs `serve` gets; the ASGI application gets all else."""
    serve: Serve
    pipeline_queue: PipelineQueue
    """Shared by all connections of the listener."""
    connection_limiter: ConnectionLimiter
    linger_seconds: float
    draining = False
    """Another process accepts new connections: each connection here has one more response."""

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
        """Whether the next byte belongs to a head; else to a body."""
        self._partial_head = b""
        """The received part of a head."""
        self._body_left = 0
        """Bytes of the body that are still to come, if it has a `Content-Length`."""
        self._chunked_body: ChunkedDecoder | None = None
        """Decodes the body, if it is chunked."""
        self.backlog = bytearray()
        """Received bytes that wait until the response to the request before them is complete."""
        self._counted_backlog = 0
        """How many of them `pipeline_queue` has counted."""
        self._in_pipeline_queue = False
        self.idle_since = 0.0
        self._content_length = b""
        self._transfer_encoding: bytes | None = None
        self._http_10 = False
        self._connection: ClientConnection | None = None
        self._known_head: KnownHead | None = None
        """The head of the last routed request that was received in one piece."""
        self._timer: asyncio.TimerHandle | None = None
        self._handshake: asyncio.Task[None] | None = None
        """Its TLS handshake, until `connection_made`."""
        self._admission: ConnectionAdmission | None = None
        self._lingered_bytes = -1
        """Bytes read since a request was refused; negative if none was."""
        self._discarding = False
        self._new_exchange: HttpExchange | None = None
        """Started when the received bytes have been read."""
        self._departure_check: asyncio.TimerHandle | None = None
        """Of a client that sends no more, and waits for its responses."""

    def begin_handshake(self, address: str | None, handshake: asyncio.Task[None]) -> None:
        """Count the connection before its TLS handshake, or cancel `handshake`: no room."""
        self._handshake = handshake
        self.idle_since = self.loop.time()
        self._admission = self.connection_limiter.admit(self, address)
        if self._admission is ConnectionAdmission.REJECTED:
            handshake.cancel()
        elif self._admission is ConnectionAdmission.HEALTH_ONLY:
            self._timer = self.loop.call_later(HEALTH_ONLY_SECONDS, handshake.cancel)

    def end_handshake(self) -> None:
        """The TLS handshake is over; if it failed, nothing is left of the connection."""
        if self._handshake is not None:
            self._handshake = None
            self._cancel_timer()
            self.connection_limiter.remove(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: PipelineFlowControl = PipelineFlowControl(transport)
        self._handshake = None
        address = self.client[0] if self.client else None
        self.idle_since = self.loop.time()
        admission = self._admission or self.connection_limiter.admit(self, address)
        if admission is not ConnectionAdmission.ADMITTED:
            self._serve_health_only(admission)
            return
        if self.routes:
            serve = self.connection_limiter.count_forwarded(self.serve, address)
            self._connection = ClientConnection(
                transport, self.flow, address, serve, self.on_response_complete, self.tasks
            )
        self._timer = self.loop.call_later(self.limits.header_timeout, self._on_head_timeout)

    def _serve_health_only(self, admission: ConnectionAdmission) -> None:
        """There are too many connections: serve only a prompt health check, or nothing."""
        if admission is ConnectionAdmission.REJECTED:
            self.evict()
            return
        self.routes, self.app = {}, health_only_app(self.app)
        self._cancel_timer()
        self._timer = self.loop.call_later(HEALTH_ONLY_SECONDS, self.evict)

    @property
    def idle(self) -> bool:
        """Whether no request is in flight, and the client has read every response."""
        return self._handshake is not None or not (
            self._must_wait or self.backlog or self.transport.get_write_buffer_size()
        )

    @property
    def reading_body(self) -> bool:
        """Whether the body of a request is still being received."""
        cycle: object = self.cycle
        return isinstance(cycle, HttpExchange) and cycle.more_body and not cycle.response_started

    def evict(self) -> None:
        """Close, as there are too many connections; a client without a response gets 429."""
        if self._handshake is not None:
            self._handshake.cancel()
            return
        cycle: object = self.cycle
        if isinstance(cycle, HttpExchange) and self.reading_body:
            cycle.fail_body(too_many_connections())
            return
        if cycle is None or self._partial_head:
            self._refuse(too_many_connections())
        self._close()  # Without lingering.

    @classmethod
    def begin_drain(cls) -> None:
        """Let each connection have one more response; for all connections of the listener."""
        cls.draining = True

    def drain(self) -> None:
        """Let the current request be the connection's last; an idle one may have one more."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_started:
            cycle.keep_alive = False

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self._departure_check is not None:
            self._departure_check.cancel()
        self.connection_limiter.remove(self)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        super().connection_lost(exc)
        # They refer to this object, and the garbage collector rarely runs.
        self._connection = self.cycle = None  # type: ignore[assignment]
        self.backlog.clear()
        self._count_backlog()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the responses to complete requests, if the client may read them.

        A client that has shut down its side alone (`nc -N`) and one that has closed its socket send
        the same FIN. The machine of the latter answers the next byte with a reset, so one is sent.
        TLS has no half-closed connections here.
        """
        if self.scheme == "https" or self._discarding or not (self.backlog or self._owes_response):
            return False
        if not self.backlog:
            self.drain()
        return self._check_departure(0)

    @property
    def _owes_response(self) -> bool:
        """Whether a request has come completely and its response is not complete."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not (cycle.response_complete or cycle.more_body)

    def _check_departure(self, count: int) -> bool:
        """Abort if the client has left; else check again later. Returns whether it is there."""
        if self.transport.is_closing():
            return False
        exchange: object = self.cycle
        # Seldom, as the bytes of a status line are few.
        if count & (count - 1) == 0 and isinstance(exchange, HttpExchange):
            exchange.probe()
        sock = self.transport.get_extra_info("socket")
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return False
        self._departure_check = self.loop.call_later(
            min(LONGEST_DEPARTURE_CHECK_SECONDS, DEPARTURE_CHECK_SECONDS * 2 ** min(count, 9)),
            self._check_departure,
            count + 1,
        )
        return True

    # Received bytes, split into requests.

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._lingered_bytes >= 0:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > LINGER_BYTES:
                self.transport.close()
                return
            if self._discarding:
                return
        between = self._in_head and not self._partial_head
        if self.backlog:
            self._defer(data)
            return
        if self._known_head is not None and between:
            body = self._known_head.match_body(data)
            if body is not None and self.cycle.response_complete and not self.flow.write_paused:
                self._serve_known(body)
                return
        read = self._read(data)
        if read < len(data):
            self._defer(data[read:])
            self._schedule_backlog()
            between = False
        if self._new_exchange is not None:
            exchange, self._new_exchange = self._new_exchange, None
            if between and not exchange.more_body:
                # `data` is one complete request.
                self._remember_head(exchange, data)
            exchange.start()

    @property
    def _must_wait(self) -> bool:
        """Whether the next request must wait for a response, or for the client to read one."""
        cycle: RequestResponseCycle | None = self.cycle
        return self.flow.write_paused or (cycle is not None and not cycle.response_complete)

    def _defer(self, data: bytes) -> None:
        """Put bytes into the backlog, and stop reading if it has become long."""
        self.backlog += data
        self._count_backlog()
        self._abort_if_crowded()
        if len(self.backlog) > CONNECTION_PIPELINE_BYTES:
            self.flow.hold_reads()

    def _count_backlog(self) -> None:
        size = len(self.backlog)
        self.pipeline_queue.count(size - self._counted_backlog)
        self._counted_backlog = size

    def _abort_if_crowded(self) -> None:
        """Abort if the client reads no responses and too many bytes wait on all connections."""
        if self.backlog and self.flow.write_paused and self.pipeline_queue.is_full:
            self.transport.abort()

    def _schedule_backlog(self) -> None:
        """Read the backlog when it is this connection's turn."""
        if self.backlog and not self._in_pipeline_queue and not (self._in_head and self._must_wait):
            self._in_pipeline_queue = True
            self.pipeline_queue.add(self._read_backlog)

    def _read_backlog(self) -> None:
        self._in_pipeline_queue = False
        backlog = self.backlog
        if not backlog or self.transport.is_closing():
            return
        if self._in_head and not self._partial_head and backlog.startswith(b"\r\n"):
            # Some clients end a body with a line end that its length does not include.
            del backlog[:2]
        del backlog[: self._read(bytes(backlog[:PIPELINE_READ_BYTES]))]
        self._count_backlog()
        if self.flow.reads_held and len(backlog) <= CONNECTION_PIPELINE_BYTES:
            self.flow.release_reads()
            if self._in_head or len(self.cycle.body) <= CONNECTION_PIPELINE_BYTES:
                self.flow.resume_reading()
        self._schedule_backlog()
        if self._new_exchange is not None:
            exchange, self._new_exchange = self._new_exchange, None
            exchange.start()
        if self._departure_check is not None and not (self.backlog or self._owes_response):
            self.transport.close()

    def _read(self, data: bytes) -> int:
        """Read a bounded amount of `data`; returns how many bytes were read."""
        offset, size = 0, len(data)
        while offset < size and not self._discarding:
            if self._in_head:
                if self._must_wait:
                    return offset
                offset = self._read_head(data, offset)
            elif self._chunked_body is not None:
                return self._read_chunks(self._chunked_body, data, offset)
            else:
                part = data[offset : offset + self._body_left]
                self._body_left -= len(part)
                offset += len(part)
                self._parse(part)
        return size if self._discarding else offset

    def _read_head(self, data: bytes, offset: int) -> int:
        """Read a head, or the received part of one; returns the next offset."""
        partial, most = self._partial_head, self.limits.header_bytes
        if not partial:
            self.url = b""
        part, tail = data[offset:], partial[-3:]
        end = (tail + part).find(_HEAD_END)
        if end >= 0:
            part = part[: end + len(_HEAD_END) - len(tail)]
        if len(partial) + len(part) > most:
            self._parse(part[: most - len(partial)])  # This may set `url`.
            self._refuse(errors.headers_too_large(most))
            return len(data)
        head = partial + part
        line = REQUEST_LINE.match(head) if end >= 0 else None
        if line is not None:
            self._http_10 = line[1] == b"0"
            self._partial_head = b""
        elif end >= 0 and (len(head) > MOST_LEADING_CRLF_BYTES or head.strip(b"\r\n")):
            self._refuse(errors.invalid_http())
            return len(data)
        else:
            self._partial_head = head
            if self._timer is None:
                self._timer = self.loop.call_later(
                    self.limits.header_timeout, self._on_head_timeout
                )
        self._parse(part)
        return offset + len(part)

    def _read_chunks(self, decoder: ChunkedDecoder, data: bytes, offset: int) -> int:
        try:
            offset, body = decoder.feed(data, offset)
        except GatewayError as error:
            self._refuse(error)
            return len(data)
        if body:
            self.on_body(body)
        if decoder.done:
            self._chunked_body = None
            self._parse(b"0\r\n\r\n")  # The parser has seen nothing of the body.
        return offset

    def _parse(self, part: bytes) -> None:
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            self._ignore_upgrade()
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, GatewayError) else errors.invalid_http())

    def _remember_head(self, exchange: HttpExchange, data: bytes) -> None:
        """Recognise the head of this request if the client sends it again."""
        usual = exchange.keep_alive and self._content_length and not self.expect_100_continue
        self._known_head = KnownHead.from_message(data) if usual else None
        self._known_request = exchange.route, exchange.headers

    def _serve_known(self, body: bytes) -> None:
        """Serve a complete request whose head is known."""
        assert self._connection is not None
        keep_alive = not self.draining
        exchange: Any = HttpExchange(
            self._connection, *self._known_request, len(body), body=body, keep_alive=keep_alive
        )
        self.cycle = exchange
        exchange.start()

    # Called by the parser.

    def on_message_begin(self) -> None:
        # uvicorn would build an ASGI scope here, which routed requests do not need.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._content_length = b""
        self._transfer_encoding = None

    def _make_scope(self) -> None:
        """Do what uvicorn does at the beginning of a message."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        length = [(b"content-length", self._content_length)] if self._content_length else []
        self.headers += [*headers, *length]
        self.scope["state"]["abort"] = self.transport.abort

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            # Kept apart, so that the heads of a connection are equal.
            self._content_length = value
            return
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"transfer-encoding":
            # Two of them are refused, as an unknown coding is.
            self._transfer_encoding = value if self._transfer_encoding is None else b""
        self.headers.append((name, value))
        if len(self.headers) > MOST_HEADER_FIELDS:
            raise errors.too_many_headers(MOST_HEADER_FIELDS)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._cancel_timer()
        self.headers = with_single_host(self.headers, self.url, http_10=self._http_10)
        if self._transfer_encoding is not None:
            if (
                self._http_10
                or self._content_length
                or self._transfer_encoding.strip(b" \t").lower() != b"chunked"
            ):
                raise errors.invalid_request("The length of this request's body is unclear.")
            self._chunked_body = ChunkedDecoder(self.limits.header_bytes)
        self._body_left = int(self._content_length or 0)
        if self.parser.get_method() == b"POST":
            route = self.routes.get(self.url, None) or self._route_of(self.url)
            if route is not None:
                self._in_head = False
                self._create_exchange(route)
                return
        self._make_scope()
        super().on_headers_complete()
        self._in_head = False
        if self.draining:
            self.cycle.keep_alive = False

    def _route_of(self, url: bytes) -> Route | None:
        """The route of a URL with a query, escapes, or a host."""
        try:
            path = httptools.parse_url(url).path or b""
        except httptools.HttpParserInvalidURLError:
            return None
        # An encoded slash is part of a name; no routed path has one.
        return None if b"%2f" in path.lower() else self.routes.get(unquote_to_bytes(path))

    def _create_exchange(self, route: Route) -> None:
        """Prepare a routed request, without the ASGI messages that uvicorn would send."""
        assert self._connection is not None
        self._new_exchange = HttpExchange(
            self._connection,
            route,
            self.headers,
            self._body_left,
            http_10=self._http_10,
            keep_alive=not (self._http_10 or self.draining) and self.parser.should_keep_alive(),
            expects_continue=self.expect_100_continue,
        )
        self.cycle = cast("RequestResponseCycle", self._new_exchange)

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = True
        if self._lingered_bytes >= 0:
            self._lingered_bytes = -1
            self._cancel_timer()
            if not self.cycle.keep_alive:
                self._close()
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        # As uvicorn does, but with one timer per connection, not per response.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            if self.cycle is not None:
                self._close()  # It was the last response.
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.backlog:
            self._schedule_backlog()
        elif self._departure_check is not None:
            self.transport.close()
            return
        self.idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._schedule_idle_check(self.timeout_keep_alive)
        if not self._in_head:
            self._linger()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_if_crowded()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._schedule_backlog()

    def _schedule_idle_check(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if (
            not self.cycle.response_complete
            or self._partial_head
            or self.backlog
            or self.transport.is_closing()
        ):
            return  # The next response schedules another check.
        left = self.idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._schedule_idle_check(left)
        else:
            self._close()

    def _unset_keepalive_if_required(self) -> None:
        """Do nothing: uvicorn would cancel its timer; this one checks when it fires."""

    def _ignore_upgrade(self) -> None:
        """Parse a request that asks for another protocol as plain HTTP/1.1 (RFC 9110, section 7.8).

        Java's HTTP client asks for HTTP/2 with every first request.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(errors.method_not_allowed("CONNECT", "GET, POST"))
            return
        lines = [b"%b %b HTTP/1.1\r\n" % (method, self.url)]
        if self._content_length:
            lines.append(b"content-length: %b\r\n" % self._content_length)
        for name, value in self.headers:
            if name == b"connection":
                options = [
                    part
                    for part in value.split(b",")
                    if part.strip().lower() not in _UPGRADE_HEADERS
                ]
                lines.append(b"connection: %b\r\n" % b",".join(options))
            elif name not in _UPGRADE_HEADERS:
                lines.append(b"%b: %b\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._parse(b"".join(lines) + b"\r\n")

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_head_timeout(self) -> None:
        self._timer = None
        if self._in_head and not self.transport.is_closing():
            if self._partial_head:
                self._refuse(errors.request_timeout("The head of the request took too long."))
            else:
                self._close()

    def _close(self) -> None:
        """Close once the client has read everything.

        One that leaves the end of TLS unanswered would hold the connection for half a minute more.
        """
        self._cancel_timer()
        if not self.transport.get_write_buffer_size():
            self._timer = self.loop.call_later(self.linger_seconds, self.transport.abort)
        self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        """Respond without the application, and close."""
        if self._discarding or self.transport.is_closing():
            return
        self._cancel_timer()
        self._discarding = True
        self._lingered_bytes = 0
        self.backlog.clear()
        self._count_backlog()
        if not self._in_head:
            # The body of the current request is invalid.
            cycle = self.cycle
            exchange: object = cycle
            if not cycle.response_complete and isinstance(exchange, HttpExchange):
                exchange.fail_body(error)
                return
            if cycle.response_complete or cycle.response_started:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        route = self.routes.get(self.url)
        header_lines, body = encode_rejection(error, route.api if route is not None else RELAYED)
        head = STATUS_LINES[error.status] + header_lines + b"connection: close\r\n\r\n"
        self.transport.write(head + body)
        self._linger()

    def _linger(self) -> None:
        """Read and discard for a while: closed at once, the client might miss the response."""
        self._lingered_bytes = 0
        self._cancel_timer()
        if self._discarding and self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # The client has just disconnected.
                self.transport.write_eof()
        self._timer = self.loop.call_later(self.linger_seconds, self._close)


def protocol_class(
    limits: LimitSettings,
    serve: Serve | None = None,
    proxies: Sequence[IPNetwork] = (),
    *,
    routes: Mapping[bytes, Route] | None = None,
    linger_seconds: float = LINGER_SECONDS,
    pipeline_bytes: int = LISTENER_PIPELINE_BYTES,
) -> type[BoundedProtocol]:
    """The protocol class of one listener, for a uvicorn `Config`.

    With `serve`, POSTs to `routes` (default: `ROUTES`) go there and not to the ASGI application.
    Connections of `proxies` count for the addresses that they forward.
    """
    attributes: dict[str, Any] = {
        "limits": limits,
        "routes": {},
        "pipeline_queue": PipelineQueue(pipeline_bytes),
        "connection_limiter": ConnectionLimiter(limits.connections, proxies),
        "linger_seconds": linger_seconds,
    }
    if serve is not None:
        every = {path.encode(): route for path, route in ROUTES.items()}
        attributes["routes"] = every if routes is None else routes
        attributes["serve"] = staticmethod(serve)
    return type("ListenerProtocol", (BoundedProtocol,), attributes)
