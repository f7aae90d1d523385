"""uvicorn's HTTP protocol with the limits that it lacks, which no ASGI app could set.

By itself uvicorn reads headers without end and waits for ever for the rest of a request line. It
also reads on for ever what a client sends after its request was refused half-way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.relay.dialects import CHAT
from gateway.relay.routes import ROUTES, Route
from gateway.web.public.turn import Turn

Serve = Callable[[Route, Turn], Awaitable[None]]

LINGER_SECONDS = 2.0
"""How long the rest of a refused body is read, so that the client sees why it was refused."""

LINGER_BYTES = 8 * 1024 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """One client's connection. What it goes by is set by `bounded`."""

    limits: LimitSettings
    routes: Mapping[bytes, Route]
    """Served by `serve`, when posted to; all else by the ASGI application."""
    serve: Serve

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._in_head = True
        self._in_body = False
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        """The request that is served; more may be pipelined behind it."""
        self._lingered = -1
        """Bytes read since the request was refused; negative while none was."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(errors.queue_full("Too many connections.", 1.0))
            return
        self._timer = self.loop.call_later(self.limits.header_timeout, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        running = self._running
        super().connection_lost(exc)
        if running is not None and running is not self.cycle:
            # uvicorn tells only the last of several pipelined requests.
            running.disconnected = not running.response_complete
            running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._lingered >= 0:
            self._lingered += len(data)
            if self._lingered > LINGER_BYTES:
                self.transport.close()
                return
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.header_bytes:
                self._refuse(errors.headers_too_large(self.limits.header_bytes))
            elif self._timer is None and self._head_bytes:
                self._timer = self.loop.call_later(self.limits.header_timeout, self._head_is_late)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._in_body = True
        self._head_bytes = 0
        self._disarm()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.limits.header_bytes:
            self._refuse(errors.headers_too_large(self.limits.header_bytes))
            return
        if self.parser.get_method() == b"POST":
            route = self.routes.get(self.url, None) or self._route_of(self.url)
            if route is not None:
                self._take_turn(route)
                return
        super().on_headers_complete()

    def _route_of(self, url: bytes) -> Route | None:
        """The route of a URL that is not the bare path: with a query, escapes, or a host."""
        try:
            path = httptools.parse_url(url).path
        except httptools.HttpParserInvalidURLError:
            return None
        return self.routes.get(unquote_to_bytes(path or b""))

    def _take_turn(self, route: Route) -> None:
        """Serve a routed request: as uvicorn would, but for the ASGI messages."""
        serve = self.serve
        version = self.parser.get_http_version()
        turn = Turn(
            lambda turn: serve(route, turn),
            self.transport,
            self.flow,
            self.headers,
            self.client[0] if self.client else None,
            http_10=version == "1.0",
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            expects_continue=self.expect_100_continue,
            on_response=self.on_response_complete,
        )
        cycle = cast("RequestResponseCycle", turn)
        before: RequestResponseCycle | None = self.cycle
        self.cycle = cycle
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._lingered >= 0:
            self._lingered = -1
            self._disarm()
            if not self.cycle.keep_alive:
                self.transport.close()
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._lingered = 0
            self._disarm()
            self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """What httptools could not parse, in the contract's form."""
        self._refuse(GatewayError(400, "invalid_request", "This is not a valid HTTP request."))

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
        """Answer without any app, and close. Between pipelined replies it can only close."""
        self._disarm()
        busy = bool(self.cycle) and not self.cycle.response_complete
        if not busy and not self.transport.is_closing():
            body = CHAT.error_body(error, "")
            lines = [
                f"HTTP/1.1 {error.status} {error.code}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                f"x-gateway-reason: {error.code}",
                "connection: close",
            ]
            if error.retry_after is not None:
                lines.append(f"retry-after: {error.retry_after:.0f}")
            self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self.transport.close()


def bounded(limits: LimitSettings, serve: Serve | None = None) -> type[BoundedProtocol]:
    """The protocol class with these limits, for a uvicorn `Config`.

    With `serve`, POSTs to the routed paths go there and not to the ASGI application.
    """
    own: dict[str, Any] = {"limits": limits, "routes": {}}
    if serve is not None:
        own["routes"] = {path.encode(): route for path, route in ROUTES.items()}
        own["serve"] = staticmethod(serve)
    return type("Bounded", (BoundedProtocol,), own)
