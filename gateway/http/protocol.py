"""The HTTP/1.1 protocol of the listeners: httptools within limits that no application could set.

uvicorn's protocol reads headers without limit and waits for ever for the rest of a request line.
It also reads whatever a client sends after a request was refused, and creates a task for every
request in a packet. So this one shares with it what runs an ASGI application, and nothing else
(tests/http/test_protocol.py).

Received bytes are split at request boundaries: httptools gets one head, then its body, and the
next head only when the response is complete. Bytes received meanwhile wait in a backlog
(`connections.PipelineQueue`). So no request depends on how the bytes of another were sent.

Framing is strict: only what no other parser could read differently is accepted. httptools decodes
chunks too, but everything received at once, with a call into Python for each chunk, and it buffers
whole trailers: one packet can hold 40,000 chunks, one trailer 40 MB. `ChunkedDecoder` does bounded
work in each call, limits extensions and trailers, and drops the trailers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote, unquote_to_bytes

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway import errors
from gateway.api.base import RELAYED
from gateway.callers.callers import IPNetwork
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.http.connections import (
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
from gateway.http.exchange import (
    STATUS_LINES,
    ClientConnection,
    ConnectionOrigin,
    HttpExchange,
    Serve,
)
from gateway.http.heads import encode_headers, rejection
from gateway.request.routes import ROUTES, Route
from gateway.terms import Headers
from gateway.transport.connection import KnownHead, TurnBoundProtocol, TurnLimit

# Seconds for which a refused client is still read from, so that it sees the response.
LINGER_SECONDS = 2.0
LINGER_BYTES = 8 * 1024 * 1024  # most bytes that are read from a refused client
# Seconds until the first check whether a client that sends no more has left; each later one waits
# twice as long, up to `LONGEST_DEPARTURE_CHECK_SECONDS`.
DEPARTURE_CHECK_SECONDS = 0.05
LONGEST_DEPARTURE_CHECK_SECONDS = 1.0
# Most header fields of a request: each costs a call into Python, and time in each search.
MOST_HEADER_FIELDS = 256
MOST_LEADING_CRLF_BYTES = 16  # most bytes of line ends before a request (RFC 9112, section 2.2)
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})
_HEAD_END = b"\r\n\r\n"
# Where `RequestResponseCycle` reports that an application has failed.
_ASGI_LOGGER = logging.getLogger("uvicorn.error")


class BoundedProtocol(TurnBoundProtocol):
    """A client's connection. `protocol_class` sets the class attributes."""

    limits: LimitSettings
    routes: Mapping[bytes, Route]
    """Paths whose POSTs `serve` gets; the ASGI application gets all else."""
    serve: Serve
    pipeline_queue: PipelineQueue  # shared by all connections of the listener
    connection_limiter: ConnectionLimiter
    linger_seconds: float
    turn: TurnLimit
    transport: asyncio.Transport
    draining = False
    """Another process accepts new connections: each connection here has one more response."""

    def __init__(
        self,
        app: ASGIApp,
        keep_alive: float,
        connections: set[BoundedProtocol],
        tasks: set[asyncio.Task[None]],
        loop: asyncio.AbstractEventLoop | None = None,
        origin: ConnectionOrigin | None = None,
    ) -> None:
        """`connections` and `tasks`: those of the listener. It is idle for `keep_alive` seconds.

        `origin`: of the client's own connection, where another process passes its requests on.
        """
        super().__init__(self.turn)
        self.app: Any = app  # Starlette's types of ASGI messages are not uvicorn's.
        self.loop = loop or asyncio.get_running_loop()
        self.tasks = tasks
        self._origin = origin  # None: `connection_made` tells it
        self._connections = connections
        self._keep_alive = keep_alive
        self._idle_check: asyncio.TimerHandle | None = None
        self.parser = _new_parser(self)
        self.cycle: HttpExchange | RequestResponseCycle | None = None
        """The last request: a routed one, or one for the ASGI application."""
        # Of the head that is being parsed.
        self.url = b""
        self.headers: Headers = []
        self._expects_continue = False
        self._in_head = True  # whether the next byte belongs to a head; else to a body
        self._partial_head = b""  # the received part of a head
        self._body_left = 0
        """Bytes of the body that are still to come, if it has a `Content-Length`."""
        self._chunked_body: ChunkedDecoder | None = None  # decodes the body, if it is chunked
        self.backlog = bytearray()
        """Received bytes that wait until the response to the request before them is complete."""
        self._counted_backlog = 0  # how many of them `pipeline_queue` has counted
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
        self._lingered_bytes = -1  # bytes read since a request was refused; negative if none was
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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        self.flow = PipelineFlowControl(self.transport)
        self._connections.add(self)
        if self._origin is None:
            tls = transport.get_extra_info("sslcontext") is not None
            self._origin = ConnectionOrigin(
                self._address("peername"), self._address("sockname"), tls
            )
        self._handshake = None
        address = self._origin.client[0] if self._origin.client else None
        self.idle_since = self.loop.time()
        admission = self._admission or self.connection_limiter.admit(self, address)
        if admission is not ConnectionAdmission.ADMITTED:
            self._serve_health_only(admission)
            return
        if self.routes:
            serve = self.connection_limiter.count_forwarded(self.serve, address)
            self._connection = ClientConnection(
                self.transport, self.flow, self._origin, serve, self.on_response_complete,
                self.tasks,
            )  # fmt: skip
        self._timer = self.loop.call_later(self.limits.header_timeout, self._on_head_timeout)

    def _address(self, name: str) -> tuple[str, int] | None:
        found = self.transport.get_extra_info(name)
        return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None

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
            self._must_wait
            or self.backlog
            or self._unreceived
            or self.transport.get_write_buffer_size()
        )

    @property
    def reading_body(self) -> bool:
        """Whether the body of a request is still being received."""
        cycle = self.cycle
        return isinstance(cycle, HttpExchange) and cycle.more_body and not cycle.response_started

    def evict(self) -> None:
        """Close, as there are too many connections; a client without a response gets 429."""
        if self._handshake is not None:
            self._handshake.cancel()
            return
        cycle = self.cycle
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
        cycle = self.cycle
        if cycle is not None and not cycle.response_started:
            cycle.keep_alive = False

    def shutdown(self) -> None:
        """End when the current request has its response."""
        self._receive_late()
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.transport.is_closing():
            self._close()
        else:
            cycle.keep_alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self._departure_check is not None:
            self._departure_check.cancel()
        if self._idle_check is not None:
            self._idle_check.cancel()
        self.connection_limiter.remove(self)
        self._connections.discard(self)
        cycle = self.cycle
        if cycle is not None:
            if not cycle.response_complete:
                cycle.disconnected = True
            _tell(cycle)
        self.flow.resume_writing()
        # They refer to this object, and the garbage collector rarely runs.
        del self.parser
        self._connection = self.cycle = None
        self.backlog.clear()
        self._unreceived = b""
        self._count_backlog()

    def eof_received(self) -> bool:
        """Keep the connection for the responses to complete requests, if the client may read them.

        A client that has shut down its side alone (`nc -N`) and one that has closed its socket send
        the same FIN. The machine of the latter answers the next byte with a reset, so one is sent.
        TLS has no half-closed connections here.
        """
        self._receive_late()
        tls = self._origin is not None and self._origin.tls
        if tls or self._discarding or not (self.backlog or self._owes_response):
            return False
        if not self.backlog:
            self.drain()
        return self._check_departure(0)

    @property
    def _owes_response(self) -> bool:
        """Whether a request has come completely and its response is not complete."""
        cycle = self.cycle
        return cycle is not None and not (cycle.response_complete or cycle.more_body)

    def _check_departure(self, count: int) -> bool:
        """Abort if the client has left; else check again later. Returns whether it is there."""
        if self.transport.is_closing():
            return False
        exchange = self.cycle
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
        if self._unreceived or self.turn.look(self.loop):
            self._hold(data)
        else:
            self._receive(data)

    @property
    def read_paused(self) -> bool:
        """Whether the request, or the backlog, takes no more bytes."""
        return self.flow.read_paused

    def _receive(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        between = self._in_head and not self._partial_head
        known, exchange = self._known_head, self.cycle
        if (
            known is not None
            and exchange is not None
            and exchange.response_complete
            and between
            and not (self.backlog or self.flow.write_paused or self._discarding)
            and (body := known.match_body(data)) is not None
        ):
            # One complete request whose head is known.
            assert self._connection is not None
            route, headers = self._known_request
            exchange = self.cycle = HttpExchange(
                self._connection, route, headers, len(body), body, keep_alive=not self.draining
            )
            exchange.start()
            return
        if self._lingered_bytes >= 0:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > LINGER_BYTES:
                self.transport.close()
                return
            if self._discarding:
                return
        if self.backlog:
            self._defer(data)
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
        cycle = self.cycle
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
            if self._in_head or len(self._current.body) <= CONNECTION_PIPELINE_BYTES:
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
        usual = exchange.keep_alive and self._content_length and not self._expects_continue
        self._known_head = KnownHead.from_message(data) if usual else None
        self._known_request = exchange.route, exchange.headers

    # Called by the parser.

    def on_message_begin(self) -> None:
        self.url = b""
        self._expects_continue = False
        self.headers = []
        self._content_length = b""
        self._transfer_encoding = None

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            # Kept apart, so that the heads of a connection are equal.
            self._content_length = value
            return
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
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
        self._start_application()
        self._in_head = False

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
        self.cycle = self._new_exchange = HttpExchange(
            self._connection,
            route,
            self.headers,
            self._body_left,
            http_10=self._http_10,
            keep_alive=self._may_keep_alive(),
            expects_continue=self._expects_continue,
        )

    def _may_keep_alive(self) -> bool:
        return not (self._http_10 or self.draining) and self.parser.should_keep_alive()

    def _start_application(self) -> None:
        """Serve a request that is not routed by the ASGI application."""
        url = httptools.parse_url(self.url)
        if url.path is None:
            raise errors.invalid_http()
        headers, origin = self.headers, self._origin
        assert origin is not None
        if self._content_length:
            headers = [*headers, (b"content-length", self._content_length)]
        cycle = self.cycle = RequestResponseCycle(
            scope={
                "type": "http",
                "asgi": {"version": "3.0", "spec_version": "2.3"},
                "http_version": "1.0" if self._http_10 else "1.1",
                "method": self.parser.get_method().decode("ascii"),
                "scheme": "https" if origin.tls else "http",
                "path": unquote(url.path.decode("ascii")),
                "raw_path": url.path,
                "query_string": url.query or b"",
                "root_path": "",
                "headers": headers,
                "client": origin.client,
                "server": origin.server,
                "state": {"abort": self.transport.abort, "member": origin.member},
            },
            transport=self.transport,
            flow=self.flow,
            logger=_ASGI_LOGGER,
            access_logger=_ASGI_LOGGER,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=self._expects_continue,
            keep_alive=self._may_keep_alive(),
            on_response=self.on_response_complete,
        )
        task = self.loop.create_task(cycle.run_asgi(self.app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    @property
    def _current(self) -> HttpExchange | RequestResponseCycle:
        """The request whose body is being received, or was received last."""
        assert self.cycle is not None
        return self.cycle

    def on_body(self, body: bytes) -> None:
        cycle = self._current
        if cycle.response_complete or self.transport.is_closing():
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        _tell(cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = True
        cycle = self._current
        if self._lingered_bytes >= 0:
            self._lingered_bytes = -1
            self._cancel_timer()
            if not cycle.keep_alive:
                self._close()
        if not (cycle.response_complete or self.transport.is_closing()):
            cycle.more_body = False
            _tell(cycle)

    def on_response_complete(self) -> None:
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
        if self._idle_check is None:
            # One timer for the connection, not for each response.
            self._idle_check = self.loop.call_later(self._keep_alive, self._close_if_idle)
        if not self._in_head:
            self._linger()

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        self._abort_if_crowded()

    def resume_writing(self) -> None:
        self.flow.resume_writing()
        self._schedule_backlog()

    def _close_if_idle(self) -> None:
        self._idle_check = None
        if (
            not self._current.response_complete
            or self._partial_head
            or self.backlog
            or self._unreceived
            or self.transport.is_closing()
        ):
            return  # The next response schedules another check.
        left = self.idle_since + self._keep_alive - self.loop.time()
        if left > 0:
            self._idle_check = self.loop.call_later(left, self._close_if_idle)
        else:
            self._close()

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
        self.parser = _new_parser(self)
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
            cycle = self._current
            if not cycle.response_complete and isinstance(cycle, HttpExchange):
                cycle.fail_body(error)
                return
            if cycle.response_complete or cycle.response_started:
                self.transport.close()
                return
            cycle.disconnected = True
            _tell(cycle)
        route = self.routes.get(self.url)
        headers, body = rejection(error, route.api if route is not None else RELAYED)
        lines = encode_headers([*headers, (b"connection", b"close")])
        self.transport.write(STATUS_LINES[error.status] + lines + b"\r\n" + body)
        self._linger()

    def _linger(self) -> None:
        """Read and discard for a while: closed at once, the client might miss the response."""
        self._lingered_bytes = 0
        self._cancel_timer()
        if self._discarding and self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # The client has just disconnected.
                self.transport.write_eof()
        self._timer = self.loop.call_later(self.linger_seconds, self._close)


def _new_parser(protocol: BoundedProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    # The protocol itself ends what follows the last request.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _tell(cycle: HttpExchange | RequestResponseCycle) -> None:
    """Tell the request that part of its body has come, or that its client has disconnected."""
    if isinstance(cycle, HttpExchange):
        cycle.notify()
    else:
        cycle.message_event.set()


def protocol_class(
    limits: LimitSettings,
    serve: Serve | None = None,
    proxies: Sequence[IPNetwork] = (),
    *,
    routes: Mapping[bytes, Route] | None = None,
    linger_seconds: float = LINGER_SECONDS,
    pipeline_bytes: int = LISTENER_PIPELINE_BYTES,
    turn: TurnLimit | None = None,
) -> type[BoundedProtocol]:
    """The protocol class of one listener.

    With `serve`, POSTs to `routes` (default: `ROUTES`) go there and not to the ASGI application.
    Connections of `proxies` count for the addresses that they forward. `turn`: shared with others.
    """
    attributes: dict[str, Any] = {
        "limits": limits,
        "routes": {},
        "pipeline_queue": PipelineQueue(pipeline_bytes),
        "connection_limiter": ConnectionLimiter(limits.connections, proxies),
        "linger_seconds": linger_seconds,
        "turn": turn or TurnLimit(),
    }
    if serve is not None:
        every = {path.encode(): route for path, route in ROUTES.items()}
        attributes["routes"] = every if routes is None else routes
        attributes["serve"] = staticmethod(serve)
    return type("ListenerProtocol", (BoundedProtocol,), attributes)


# Most chunks that one call of `feed` decodes; usual chunks have some ten kilobytes.
MOST_CHUNKS_PER_FEED = 256
# Most bytes of extensions in one chunk; those in use, signatures of AWS, have 85.
MOST_EXTENSION_BYTES = 256
_TEXT = rb"[^\x00-\x08\x0a-\x1f\x7f]"
_SIZE = rb"([0-9a-fA-F]{1,16})(;%b{0,%d})?\r\n" % (_TEXT, MOST_EXTENSION_BYTES)
_FIRST_SIZE = re.compile(_SIZE)
_NEXT_SIZE = re.compile(rb"\r\n" + _SIZE)
_PARTIAL = rb"(?:[0-9a-fA-F]{1,16}(?:;%b{0,%d})?\r?)?" % (_TEXT, MOST_EXTENSION_BYTES)
_PARTIAL_FIRST_SIZE = re.compile(_PARTIAL)
_PARTIAL_NEXT_SIZE = re.compile(rb"\r?|\r\n" + _PARTIAL)
_LONGEST_SIZE = MOST_EXTENSION_BYTES + 32
_TRAILERS = re.compile(rb"(?:[!#$%%&'*+.^_`|~0-9A-Za-z-]+:%b*\r\n)*\r\n" % _TEXT)
_END = b"\r\n\r\n"


@dataclass(slots=True, eq=False, repr=False)
class ChunkedDecoder:
    """Decodes one body. Its extensions and trailers may have `_limit` bytes in all."""

    _limit: int
    _extra_bytes: int = 0  # bytes of extensions so far
    _started: bool = False
    _chunk_left: int = 0  # bytes of the current chunk that are still to come
    _in_trailers: bool = False
    _partial: bytes = b""  # the received part of a size line, or of the trailers
    done: bool = False

    def feed(self, data: bytes, offset: int = 0) -> tuple[int, bytes]:
        """Decode `data` from `offset`; returns the next offset and the decoded bytes.

        Stops after the body, or after `MOST_CHUNKS_PER_FEED`. Raises: GatewayError 400, 431.
        """
        parts: list[bytes] = []
        if not self._in_trailers:
            offset = self._read_chunks(data, offset, parts)
        if self._in_trailers:
            offset = self._skip_trailers(data, offset)
        return offset, b"".join(parts)

    def _read_chunks(self, data: bytes, offset: int, parts: list[bytes]) -> int:
        before = len(self._partial)
        if before:
            data, offset, shift = self._partial + data[offset:], 0, offset - before
            self._partial = b""
        else:
            shift = 0
        for _ in range(MOST_CHUNKS_PER_FEED):
            if self._chunk_left:
                part = data[offset : offset + self._chunk_left]
                self._chunk_left -= len(part)
                offset += len(part)
                parts.append(part)
            if offset >= len(data):
                break
            offset = self._read_size(data, offset)
            if not self._chunk_left:
                break  # The size line is incomplete, or the last chunk was read.
        return offset + shift

    def _read_size(self, data: bytes, offset: int) -> int:
        """Read the size line of the next chunk, after the line end of the chunk before."""
        found = (_NEXT_SIZE if self._started else _FIRST_SIZE).match(data, offset)
        if found is None:
            rest = data[offset : offset + _LONGEST_SIZE]
            partial = _PARTIAL_NEXT_SIZE if self._started else _PARTIAL_FIRST_SIZE
            if not partial.fullmatch(rest):
                raise errors.invalid_request("The chunks of the body are not valid HTTP.")
            self._partial = rest
            return offset + len(rest)
        self._started = True
        self._chunk_left = int(found[1], 16)
        self._in_trailers = not self._chunk_left
        if found[2] is not None:
            self._extra_bytes += len(found[2])
            if self._extra_bytes > self._limit:
                raise self._too_large()
        return found.end()

    def _skip_trailers(self, data: bytes, offset: int) -> int:
        """Check the trailers and drop them."""
        before = len(self._partial)
        room = self._limit - self._extra_bytes + len(_END) - before
        trailers = self._partial = self._partial + data[offset : offset + room]
        if trailers.startswith(b"\r\n"):
            end = 2
        elif (found := trailers.find(_END, max(0, before - 3))) >= 0:
            end = found + len(_END)
        elif offset + room < len(data):
            raise self._too_large()
        else:
            return len(data)
        if not _TRAILERS.fullmatch(trailers, 0, end):
            raise errors.invalid_request("The trailers of the body are not valid HTTP.")
        self._partial = b""
        self.done = True
        return offset + end - before

    def _too_large(self) -> GatewayError:
        return errors.headers_too_large(self._limit)


REQUEST_LINE = re.compile(rb"(?:\r\n)*[A-Z-]+ +[^ #\r\n]+ HTTP/1\.([01])\r\n")
"""Stricter than httptools, which accepts HTTP/0.9 and 2.0, RTSP, bare LF and URL fragments."""

_ABSOLUTE = re.compile(rb"https?://([^/?]*)", re.IGNORECASE)
_HOST = re.compile(rb"(?:[A-Za-z0-9._~%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")


def with_single_host(headers: Headers, url: bytes, *, http_10: bool) -> Headers:
    """The headers, with exactly one valid `Host`; in HTTP/1.0 it may be missing.

    A host in the request line takes precedence over the header. Raises: GatewayError 400.
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise errors.invalid_request("The request has more than one 'Host' header.")
    if not hosts and not http_10:
        raise errors.invalid_request("The request has no 'Host' header.")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise errors.invalid_request("The 'Host' header is not a host name.")
    if url.startswith(b"/") or url == b"*":
        return headers
    target = _ABSOLUTE.match(url)
    if target is None or not _HOST.fullmatch(target[1]):
        raise errors.invalid_request("The request line has no valid host name.")
    return [*(field for field in headers if field[0] != b"host"), (b"host", target[1])]
