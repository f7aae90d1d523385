"""One routed request and its reply on a client's connection, without ASGI in between.

uvicorn still parses, keeps alive and shuts down: a `Turn` stands where its
`RequestResponseCycle` would, with the attributes that its protocol uses of one. What goes is the
price of an event, two messages and two writes for each reply (`docs/performance.md`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

import structlog
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.errors import ClientClosed, GatewayError
from gateway.proxy.inbound.routes import Route
from gateway.request import Headers
from gateway.transport.eager_task import EagerTask
from gateway.web.request_context import ContextCache

log = structlog.get_logger()

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}

_LAST_LINE = b"\r\n"

_CLOSING = b"connection: close\r\n\r\n"

MOST_COALESCED_BYTES = 64 * 1024
"""Up to so many bytes of a body are copied to spare a second write."""

_FAILED = (
    b'{"error":{"message":"The gateway failed.","type":"server_error","param":null,"code":null}}'
)


class HttpExchange(EagerTask):
    """What the edge reads a request from and writes its reply to."""

    __slots__ = (
        "_chunked",
        "_draining",
        "_expects_continue",
        "_flow",
        "_http_10",
        "_line",
        "_spoilt",
        "_transport",
        "_waiter",
        "body",
        "disconnected",
        "headers",
        "keep_alive",
        "length",
        "more_body",
        "response_complete",
        "response_started",
        "route",
    )

    def __init__(
        self,
        connection: ClientConnection,
        route: Route,
        headers: Headers,
        length: int,
        *,
        body: bytes | None = None,
        http_10: bool = False,
        keep_alive: bool = True,
        expects_continue: bool = False,
    ) -> None:
        """`body`: all of it, if it is here already."""
        EagerTask.__init__(self, connection.tasks)  # `super()` makes an object for it
        self.headers = headers
        """All but the body's length."""
        self.length = length
        """Bytes of the body as its head tells; 0 where it does not."""
        self._line = connection
        self.route = route
        self._transport = connection.transport
        self._flow = connection.flow
        self._http_10 = http_10
        self._expects_continue = expects_continue
        self._chunked = False
        self._draining: asyncio.Future[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._spoilt: GatewayError | None = None
        # What uvicorn's protocol reads and sets.
        self.keep_alive = keep_alive
        self.more_body = body is None
        self.body: bytes | bytearray = bytearray() if body is None else body
        self.response_started = False
        self.response_complete = False
        self.disconnected = False

    @property
    def context_cache(self) -> ContextCache:
        """Of the connection: what its last head said."""
        return self._line.context_cache

    @property
    def peer_address(self) -> str | None:
        """The client's, if it has one."""
        return self._line.peer_address

    @property
    def local_address(self) -> object:
        """The one that the client has connected to."""
        name = self._transport.get_extra_info("sockname")
        return name[0] if isinstance(name, tuple) else None

    # What uvicorn's protocol calls.

    @property
    def message_event(self) -> HttpExchange:
        """Itself, by `set`; as an attribute it would be a cycle for the collector to find."""
        return self

    def set(self) -> None:
        """Body bytes have come, or the client has left: then its request is cancelled."""
        if self.disconnected:
            if not self.response_complete:
                self.cancel()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail_body(self, error: GatewayError) -> None:
        """The rest of the body can't be understood: who reads it gets `error`."""
        self._spoilt = error
        self.set()

    def start(self) -> None:
        """Serve the request: at once, if it is all here."""
        if self.more_body:
            self.run_in_task(self._served())
        else:
            self.run(self._served())

    async def _served(self) -> None:
        try:
            if not self.disconnected:
                await self._line.serve(self.route, self)
        except (ClientClosed, asyncio.CancelledError):
            if not self.disconnected:
                self.abort()
                raise
        except Exception:
            log.exception("a request failed")
            if self.response_started:
                self.abort()
            else:
                self.keep_alive = False
                self.respond(500, b"content-type: application/json\r\n", _FAILED)

    # What the edge does.

    async def receive_body(self) -> bytes:
        """The body bytes that have come; the last ones when `more_body` is False.

        Raises: ClientClosed; GatewayError, when the body is broken.
        """
        if self._expects_continue and not self.body:
            self._expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while self.more_body and not self.body:
            if self._spoilt is not None:
                raise self._spoilt
            self._flow.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_body()

    def take_body(self) -> bytes:
        """The body bytes that have come. Raises: ClientClosed."""
        if self.disconnected:
            raise ClientClosed
        data, self.body = bytes(self.body), bytearray() if self.more_body else b""
        if self._flow.read_paused:
            # Who has stopped reading does not see the client leave.
            self._flow.resume_reading()
        return data

    def respond(self, status: int, header_lines: bytes, content: bytes) -> None:
        """The whole reply, its head and its body in one write; `fields` are header lines."""
        if self.disconnected:
            return
        self.response_started = True
        head = b"%b%bcontent-length: %d\r\n%b" % (
            STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status,
            header_lines,
            len(content),
            _LAST_LINE if self.keep_alive else _CLOSING,
        )
        if len(content) < MOST_COALESCED_BYTES:
            self._transport.write(head + content)
        else:
            self._transport.write(head)
            self._transport.write(content)
        self._complete()

    def start_response(self, status: int, header_lines: bytes, first: bytes = b"") -> None:
        """The head of a reply of unknown length, with its first bytes."""
        self.response_started = True
        if self._http_10:
            self.keep_alive = False
        else:
            self._chunked = True
            header_lines += b"transfer-encoding: chunked\r\n"
        self._transport.write(
            b"".join(
                (
                    STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status,
                    header_lines,
                    _LAST_LINE if self.keep_alive else _CLOSING,
                    *(self._framed(first) if first else ()),
                )
            )
        )

    def write(self, data: bytes) -> bool:
        """More of it; whether the client lags, so that `drained` should be awaited."""
        if self.disconnected:
            return True
        if self._chunked:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._transport.write(data)
        return self._flow.write_paused

    @property
    def write_paused(self) -> bool:
        """Whether much of what was written has not been taken by the client."""
        return self._flow.write_paused

    async def wait_writable(self) -> None:
        """Wait until the client has taken most of what was written, or `hurry` is called."""
        if self._flow.write_paused:
            self._draining = asyncio.ensure_future(self._flow.drain())
            try:
                await asyncio.wait((self._draining,))
            finally:
                self._draining.cancel()
                self._draining = None

    def wake_writer(self) -> None:
        """What waits for the client to take more goes on at once."""
        if self._draining is not None:
            self._draining.cancel()

    def end_response(self, last: bytes = b"") -> None:
        """The rest of it, and its end."""
        if self.disconnected:
            return
        parts = self._framed(last) if last else []
        if self._chunked:
            parts.append(b"0\r\n\r\n")
        if parts:
            self._transport.write(b"".join(parts))
        self._complete()

    def abort(self) -> None:
        """Break the connection off, so that nobody takes half an answer for a whole one."""
        if not self.response_complete:
            self._transport.abort()

    def _framed(self, data: bytes) -> list[bytes]:
        return [b"%x\r\n" % len(data), data, b"\r\n"] if self._chunked else [data]

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive and not self.more_body:
            self._transport.close()
        self._line.on_response_complete()


@dataclass(slots=True, eq=False)
class ClientConnection:
    """A client's connection, as far as its turns need it."""

    transport: asyncio.Transport
    flow: FlowControl
    peer_address: str | None
    serve: Callable[[Route, HttpExchange], Awaitable[None]]
    on_response_complete: Callable[[], None]
    """Called when a reply is complete."""
    tasks: set[asyncio.Task[None]]
    """Owns what runs."""
    context_cache: ContextCache = field(default_factory=ContextCache)
