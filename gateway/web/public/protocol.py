"""uvicorn's HTTP protocol with the limits that it lacks, which no ASGI app could set.

By itself uvicorn reads headers without end and waits for ever for the rest of a request line. It
also reads on for ever what a client sends after its request was refused half-way.
"""

from __future__ import annotations

import asyncio
import sys
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
from gateway.relay.dialects import CHAT
from gateway.relay.routes import ROUTES, Route
from gateway.transport.known_head import KnownHead
from gateway.web.public.connections import (
    EXTRA_SECONDS,
    Connections,
    Seat,
    only_health,
    too_many,
)
from gateway.web.public.heads import refusal
from gateway.web.public.turn import STATUS_LINES, Line, Turn

Serve = Callable[[Route, Turn], Awaitable[None]]

LINGER_SECONDS = 2.0
"""How long the rest of a refused body is read, so that the client sees why it was refused."""

LINGER_BYTES = 8 * 1024 * 1024

_UPGRADE = frozenset({b"upgrade", b"http2-settings"})


class BoundedProtocol(HttpToolsProtocol):
    """One client's connection. What it goes by is set by `bounded`."""

    limits: LimitSettings
    routes: Mapping[bytes, Route]
    """Served by `serve`, when posted to; all else by the ASGI application."""
    serve: Serve
    seats: Connections
    retiring = False
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
        self._in_body = False
        self._head_bytes = 0
        self._arrived = 0
        """No head that is being read can have more bytes than this."""
        self.idle_since = 0.0
        self._length = b""
        self._line: Line | None = None
        self._known: KnownHead | None = None
        """The head of the last routed request that came whole."""
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        """The request that is served; more may be pipelined behind it."""
        self._lingered = -1
        """Bytes read since the request was refused; negative while none was."""
        self._deaf = False
        """Nothing that comes is a request any more."""
        self._rest_at: int | None = None
        """Where in what has come the rest of a request stands that wished for an upgrade."""
        self._begun: Turn | None = None
        """To be started when what has come is read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else None
        self.idle_since = self.loop.time()
        seat = self.seats.enter(self, address)
        if seat is not Seat.OWN:
            self._take_briefly(seat)
            return
        if self.routes:
            serve = (
                self.seats.attributed(self.serve) if self.seats.is_proxy(address) else self.serve
            )
            self._line = Line(
                transport, self.flow, address, serve, self.on_response_complete, self.tasks
            )
        self._timer = self.loop.call_later(self.limits.header_timeout, self._head_is_late)

    def _take_briefly(self, seat: Seat) -> None:
        """There are too many: ask for nothing but the gateway's health, and soon, or not at all."""
        if seat is Seat.NONE:
            self.give_way()
            return
        self.routes, self.app = {}, only_health(self.app)
        self._timer = self.loop.call_later(EXTRA_SECONDS, self.give_way)

    @property
    def idle(self) -> bool:
        """Whether no request is under way, and its client has taken every reply."""
        running = self._running
        return (
            running is None or running.response_complete
        ) and not self.transport.get_write_buffer_size()

    @property
    def reading(self) -> bool:
        """Whether the body of its request is still coming."""
        running: object = self._running
        return isinstance(running, Turn) and running.more_body and not running.response_started

    def give_way(self) -> None:
        """Close, since there are too many; one that has had no reply yet is told."""
        running: object = self._running
        if isinstance(running, Turn) and self.reading:
            running.spoil(too_many())
            return
        if self._running is None or self._head_bytes:
            self._refuse(too_many())
        # Not a moment longer than it takes to say so.
        self._disarm()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.seats.leave(self)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        running = self._running
        super().connection_lost(exc)
        if running is not None and running is not self.cycle:
            # uvicorn tells only the last of several pipelined requests.
            running.disconnected = not running.response_complete
            running.message_event.set()
        # They hold this object as it holds them, and the collector rarely looks.
        self._line = self._running = self.cycle = None  # type: ignore[assignment]
        self.pipeline.clear()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        turn: object = cycle
        if isinstance(turn, Turn):
            turn.start_soon()
        else:
            super()._start_asgi_task(cycle, app)

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
        if self._known is not None and self._in_head and not self._head_bytes:
            body = self._known.body(data)
            if body is not None and self.cycle.response_complete:
                self._repeats(body)
                return
        self._arrived = self._head_bytes + len(data)
        super().data_received(data)
        if self._rest_at is not None:
            rest, self._rest_at = data[self._rest_at :], None
            self._go_on_plainly(rest)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.header_bytes:
                self._refuse(errors.headers_too_large(self.limits.header_bytes))
            elif self._timer is None and self._head_bytes:
                self._timer = self.loop.call_later(self.limits.header_timeout, self._head_is_late)
        if self._begun is not None:
            turn, self._begun = self._begun, None
            if not turn.more_body:
                self._learn(turn, data)
            turn.start()

    def _learn(self, turn: Turn, data: bytes) -> None:
        """Know the head of this request, which has just come, when it comes again."""
        current: object = self.cycle
        usual = turn.keep_alive and self._length and not self.expect_100_continue
        self._known = KnownHead.of(data) if usual and current is turn else None
        self._known_as = turn.route, turn.headers

    def _repeats(self, body: bytes) -> None:
        """Serve a whole request whose head is known."""
        assert self._line is not None
        keep_alive = not self.retiring
        turn: Any = Turn(self._line, *self._known_as, len(body), body=body, keep_alive=keep_alive)
        self.cycle = self._running = turn
        self._in_head = False
        turn.start()

    def on_message_begin(self) -> None:
        # uvicorn would build the ASGI scope here, which most requests don't need.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._length = b""
        self._in_head = True
        self._head_bytes = 0

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
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._in_body = True
        self._head_bytes = 0
        self._disarm()
        most = self.limits.header_bytes
        if self._arrived > most:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > most:
                raise errors.headers_too_large(most)
        if self.parser.should_upgrade():
            return
        if self.parser.get_method() == b"POST":
            route = self.routes.get(self.url, None) or self._route_of(self.url)
            if route is not None:
                self._take_turn(route)
                return
        self._make_scope()
        super().on_headers_complete()
        if self.retiring:
            self.cycle.keep_alive = False

    def retire(self) -> None:
        """Let the request that is served be the last; an idle connection has one more."""
        if self._running is not None and not self._running.response_started:
            self._running.keep_alive = False

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
        http_10 = self.parser.get_http_version() == "1.0"
        turn = Turn(
            self._line,
            route,
            self.headers,
            int(self._length or 0),
            http_10=http_10,
            keep_alive=not (http_10 or self.retiring) and self.parser.should_keep_alive(),
            expects_continue=self.expect_100_continue,
        )
        cycle = cast("RequestResponseCycle", turn)
        before: RequestResponseCycle | None = self.cycle
        self.cycle = cycle
        if before is None or before.response_complete:
            self._running = cycle
            self._begun = turn
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body = False
        if self._lingered >= 0:
            self._lingered = -1
            self._disarm()
            if not self.cycle.keep_alive:
                self.transport.close()
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            # Line ends between requests are no request: they must not keep a connection either.
            self._in_head = not self._in_body
        # From here as uvicorn's own, but for one timer a connection instead of one a reply.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self.idle_since = self.loop.time()
            if self.timeout_keep_alive_task is None:
                self._watch_idleness(self.timeout_keep_alive)
        if self._in_body:
            self._linger()

    def _watch_idleness(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if not self.cycle.response_complete or self._head_bytes or self.transport.is_closing():
            return  # it is looked at again when the reply is complete
        left = self.idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._watch_idleness(left)
        else:
            self.transport.close()

    def _unset_keepalive_if_required(self) -> None:
        """Nothing: uvicorn would end the timer with each request; this one looks for itself."""

    def send_400_response(self, msg: str) -> None:
        """What httptools could not parse, or we would not, in the contract's form."""
        raised = sys.exception()
        ours = raised.__context__ if raised is not None else None
        self._refuse(
            ours
            if isinstance(ours, GatewayError)
            else GatewayError(400, "invalid_request", "This is not a valid HTTP request.")
        )

    def _unsupported_upgrade_warning(self) -> None:
        upgrade = sys.exception()
        assert upgrade is not None
        self._rest_at = upgrade.args[0]

    def _go_on_plainly(self, rest: bytes) -> None:
        """Read a request that wished for another protocol as the plain one that it is as well.

        Java's HTTP client wishes for HTTP/2 with every first request (RFC 9110, section 7.8).
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(errors.method_not_allowed("CONNECT", "GET, POST"))
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
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
        super().data_received(b"".join(lines) + b"\r\n" + rest)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self._in_head and not self.transport.is_closing():
            if self._head_bytes:
                self._refuse(errors.request_timeout("The head of the request took too long."))
            else:
                self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        """Answer without any app, and close. A request before this one is answered first."""
        if self._deaf or self.transport.is_closing():
            return
        self._disarm()
        self._deaf = True
        self._lingered = 0
        running = self._running
        if running is not None and not running.response_complete:
            if running is not self.cycle or not running.more_body:
                running.keep_alive = False
                return
            # The rest of its own body is what was wrong.
            turn: object = running
            if isinstance(turn, Turn):
                turn.spoil(error)
                return
            running.disconnected = True
            running.message_event.set()
            if running.response_started:
                self.transport.close()
                return
        route = self.routes.get(self.url)
        fields, body = refusal(error, route.dialect if route is not None else CHAT)
        head = STATUS_LINES[error.status] + fields + b"connection: close\r\n\r\n"
        self.transport.write(head + body)
        self._linger()

    def _linger(self) -> None:
        """Read on for a moment what is not wanted: closed now, the client might miss the reply."""
        self._lingered = 0
        self._disarm()
        if self._deaf and self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)


def bounded(
    limits: LimitSettings, serve: Serve | None = None, proxies: Sequence[IPNetwork] = ()
) -> type[BoundedProtocol]:
    """The protocol class with these limits, for a uvicorn `Config` of one listener.

    With `serve`, POSTs to the routed paths go there and not to the ASGI application. Connections
    of `proxies` are those of the addresses that they forward.
    """
    seats = Connections(limits.connections, proxies)
    own: dict[str, Any] = {"limits": limits, "routes": {}, "seats": seats}
    if serve is not None:
        own["routes"] = {path.encode(): route for path, route in ROUTES.items()}
        own["serve"] = staticmethod(serve)
    return type("Bounded", (BoundedProtocol,), own)
