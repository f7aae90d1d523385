"""A routed request and its response on a client's connection, without ASGI in between.

That saves an event, two messages and two writes for each response (`docs/performance.md`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import structlog
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.errors import ClientClosed, GatewayError
from gateway.http.heads import ContextCache
from gateway.request.routes import Route
from gateway.terms import Headers
from gateway.transport.eager_task import EagerTask

log = structlog.get_logger()

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}

_HEAD_END = b"\r\n"
_HEAD_END_CLOSE = b"connection: close\r\n\r\n"
_STATUS_LINE_START = b"HTTP/1.1 "  # with which each response begins
# Bodies up to this size are copied behind their head, which saves a second write.
MOST_COALESCED_BYTES = 64 * 1024

_INTERNAL_ERROR = (
    b'{"error":{"message":"The gateway failed.","type":"server_error","param":null,"code":null}}'
)


@dataclass(frozen=True, slots=True)
class ConnectionOrigin:
    """The ends of a client's own connection; requests on it may be passed on by another one."""

    client: tuple[str, int] | None  # address and port; None: they have none, or are not known
    server: tuple[str, int] | None
    tls: bool = False
    member: str = ""  # of a cluster, which has the connection; empty: this process's gateway


class HttpExchange(EagerTask):
    """Reads one request's body and writes its response."""

    __slots__ = (
        "_body_error", "_body_waiter", "_chunked", "_connection", "_drain_task",
        "_expects_continue", "_flow", "_heartbeat", "_http_10", "_probed", "_transport", "body",
        "context_cache", "disconnected", "headers", "keep_alive", "length", "more_body",
        "response_complete", "response_started", "route",
    )  # fmt: skip

    def __init__(
        self,
        connection: ClientConnection,
        route: Route,
        headers: Headers,
        length: int,
        body: bytes | None = None,
        *,
        http_10: bool = False,
        keep_alive: bool = True,
        expects_continue: bool = False,
    ) -> None:
        """`body`: the complete body, if it was received with the head."""
        EagerTask.__init__(self, connection.tasks)  # `super()` would create an object.
        self.headers = headers  # without `Content-Length`
        self.length = length  # `Content-Length`; 0 if there is none
        self._connection = connection
        self.context_cache = connection.context_cache  # the context of the connection's last head
        self.route = route
        self._transport = connection.transport
        self._flow = connection.flow
        self._http_10 = http_10
        self._expects_continue = expects_continue
        self._chunked = False
        self._probed = 0  # bytes of the status line that `probe` has sent
        self._drain_task: asyncio.Future[None] | None = None
        self._heartbeat: Callable[[], None] | None = None
        self._body_waiter: asyncio.Future[None] | None = None
        self._body_error: GatewayError | None = None
        # Also set by the protocol, as of uvicorn's `RequestResponseCycle`.
        self.keep_alive = keep_alive
        self.more_body = body is None
        self.body: bytes | bytearray = bytearray() if body is None else body
        self.response_started = False
        self.response_complete = False
        self.disconnected = False

    @property
    def peer_address(self) -> str | None:
        """The client's address, if it has one."""
        client = self.origin.client
        return None if client is None else client[0]

    @property
    def local_address(self) -> object:
        """The address that the client has connected to."""
        name = self.origin.server
        return None if name is None else name[0]

    @property
    def origin(self) -> ConnectionOrigin:
        """The ends of the client's own connection."""
        return self._connection.origin

    # Called by the protocol.

    def notify(self) -> None:
        """Part of the body was received, or the client has disconnected: then cancel."""
        if self.disconnected:
            if not self.response_complete:
                self.cancel()
        elif self._body_waiter is not None and not self._body_waiter.done():
            self._body_waiter.set_result(None)

    def fail_body(self, error: GatewayError) -> None:
        """The rest of the body can't be read: `receive_body` raises `error`."""
        self._body_error = error
        self.notify()

    def set_heartbeat(self, heartbeat: Callable[[], None] | None) -> None:
        """`heartbeat` sends a sign of life on a response that has begun."""
        self._heartbeat = heartbeat

    def probe(self) -> None:
        """Send something that any client accepts now, to find out whether it is still there.

        Before the response that is the next byte of its status line, which commits to nothing.
        """
        if self.response_complete or self._flow.write_paused:
            return
        if self.response_started:
            if self._heartbeat is not None:
                self._heartbeat()
            return
        if byte := _STATUS_LINE_START[self._probed : self._probed + 1]:
            self._transport.write(byte)
            self._probed += 1

    def start(self) -> None:
        """Serve the request; without a task if its body is complete."""
        if self.more_body:
            # Not earlier: a client that leaves by then has asked for nothing.
            self.run_in_task(self._serve())
            return
        try:
            serving = self._connection.serve(self.route, self)
        except Exception as error:  # noqa: BLE001 - `failed` logs it
            self.failed(error)
        else:
            self.run(serving)

    async def _serve(self) -> None:
        await self._connection.serve(self.route, self)

    def failed(self, error: BaseException) -> None:
        """The handler has raised `error`, or was cancelled."""
        if isinstance(error, (ClientClosed, asyncio.CancelledError)):
            if not self.disconnected:
                self.abort()
            return
        log.exception("a request failed", exc_info=error)  # noqa: LOG004 - of another call
        if self.response_started:
            self.abort()
        else:
            self.close_after_response()
            self.respond(500, b"content-type: application/json\r\n", _INTERNAL_ERROR)

    # Called by the handler.

    async def receive_body(self) -> bytes:
        """Wait for body bytes; they are the last if `more_body` is False afterwards.

        Raises: ClientClosed; GatewayError, if the body can't be read.
        """
        if self._expects_continue and not self.body:
            self._expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while self.more_body and not self.body:
            if self._body_error is not None:
                raise self._body_error
            self._flow.resume_reading()
            self._body_waiter = asyncio.get_running_loop().create_future()
            try:
                await self._body_waiter
            finally:
                self._body_waiter = None
        return self.take_body()

    def take_body(self) -> bytes:
        """The body bytes received so far. Raises: ClientClosed."""
        if self.disconnected:
            raise ClientClosed
        data, self.body = bytes(self.body), bytearray() if self.more_body else b""
        if self._flow.read_paused:
            # While reads are paused a disconnect cannot be seen.
            self._flow.resume_reading()
        return data

    def close_after_response(self) -> None:
        """Close the connection once the response is complete."""
        self.keep_alive = False

    def respond(self, status: int, header_lines: bytes, content: bytes) -> None:
        """Send a complete response; its head and a small body in one write."""
        if self.disconnected:
            return
        self.response_started = True
        size = len(content)
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        if self._probed:
            line = line[self._probed :]
        parts = (
            line,
            header_lines,
            b"content-length: %d\r\n" % size,
            _HEAD_END if self.keep_alive else _HEAD_END_CLOSE,
        )
        if size < MOST_COALESCED_BYTES:
            self._transport.write(b"".join((*parts, content)))
        else:
            self._transport.write(b"".join(parts))
            self._transport.write(content)
        self._complete()

    def start_response(self, status: int, header_lines: bytes, first: bytes = b"") -> None:
        """Send the head of a response of unknown length, and its first bytes."""
        self.response_started = True
        if self._http_10:
            self.keep_alive = False
        else:
            self._chunked = True
            header_lines += b"transfer-encoding: chunked\r\n"
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        if self._probed:
            line = line[self._probed :]
        self._transport.write(
            b"".join(
                (
                    line,
                    header_lines,
                    _HEAD_END if self.keep_alive else _HEAD_END_CLOSE,
                    *(self._frame(first) if first else ()),
                )
            )
        )

    def write(self, data: bytes, chunk: bytes | None = None, /) -> bool:
        """Send more of the body; True if the client lags: then await `wait_writable`.

        `chunk`: the chunk that `data` has come in.
        """
        if self.disconnected:
            return True
        if not self._chunked:
            self._transport.write(data)
        elif chunk is not None:
            self._transport.write(chunk)
        else:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return self._flow.write_paused

    @property
    def write_paused(self) -> bool:
        """Whether the client lags: much of what was written is still buffered."""
        return self._flow.write_paused

    async def wait_writable(self) -> None:
        """Wait until the client has taken most of its data, or `wake_writer` is called."""
        if self._flow.write_paused:
            self._drain_task = asyncio.ensure_future(self._flow.drain())
            try:
                await asyncio.wait((self._drain_task,))
            finally:
                self._drain_task.cancel()
                self._drain_task = None

    def wake_writer(self) -> None:
        """End `wait_writable` at once."""
        if self._drain_task is not None:
            self._drain_task.cancel()

    def end_response(self, last: bytes = b"") -> None:
        """Send the last bytes of the body, and its end."""
        if self.disconnected:
            return
        parts = self._frame(last) if last else []
        if self._chunked:
            parts.append(b"0\r\n\r\n")
        if parts:
            self._transport.write(b"".join(parts))
        self._complete()

    def abort(self) -> None:
        """Abort the connection, so that a partial response does not look complete."""
        if not self.response_complete:
            self._transport.abort()

    def _frame(self, data: bytes) -> list[bytes]:
        return [b"%x\r\n" % len(data), data, b"\r\n"] if self._chunked else [data]

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive and not self.more_body:
            self._transport.close()
        self._connection.on_response_complete()


Serve = Callable[[Route, HttpExchange], Coroutine[Any, Any, None]]  # serves one request


@dataclass(slots=True, eq=False)
class ClientConnection:
    """A client's connection, as far as its exchanges need it."""

    transport: asyncio.Transport
    flow: FlowControl
    origin: ConnectionOrigin
    serve: Serve
    on_response_complete: Callable[[], None]  # called when a response is complete
    tasks: set[asyncio.Task[None]]  # owns the running tasks
    context_cache: ContextCache = field(default_factory=ContextCache)
