"""What an edge passes on to the brain: all but plain requests to nodes.

Files, batches, models, usage and stored responses have one home, the brain. A request for them goes
there on a connection of its own, whose other end the brain is handed together with the client's
addresses; so nothing in the request itself has to be trusted. In a cluster the process that gets it
may have to pass it on once more, to the member that leads.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from gateway import errors
from gateway.edges.sockets import PassedOn, SocketChannel
from gateway.errors import GatewayError
from gateway.http.exchange import ConnectionOrigin
from gateway.http.heads import RequestContext, encode_headers, x_request_id_of
from gateway.terms import Headers
from gateway.transport.connection import NodeConnection
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import UpstreamError
from gateway.web.asgi import X_REQUEST_ID_KEY, error_response
from gateway.web.background import StorableRequest, asks_to_store

# Fields of one connection (RFC 9110, section 7.6.1), and of what is sent anew on the next one.
_OF_CONNECTION = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
        *(b"transfer-encoding", b"content-length", b"expect"),
    }
)


# Opens a connection on which a request of a client is served that is connected so. Raises:
# GatewayError, if nobody can serve it.
OpenConnection = Callable[[ConnectionOrigin], Awaitable[socket.socket]]


def over_channel(channel: SocketChannel[Any]) -> OpenConnection:
    """Connections that the channel hands to the brain."""

    async def open_connection(origin: ConnectionOrigin) -> socket.socket:
        ours, its_end = socket.socketpair()
        ours.setblocking(False)
        channel.send(PassedOn(origin), its_end, then_close=True)
        return ours

    return open_connection


class Passing:
    """Passes requests on over connections of their own.

    It is the edge's ASGI application, and the `storing` of its handler.
    """

    def __init__(self, open_connection: OpenConnection) -> None:
        self._open = open_connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve what no route takes."""
        started = False
        origin = ConnectionOrigin(scope["client"], scope["server"], scope["scheme"] == "https")
        try:
            connection = await self._connect(origin)
        except GatewayError as error:
            await _refuse(error, scope, receive, send)
            return
        body = asyncio.ensure_future(_send_body(connection, scope, receive))
        try:
            status = await connection.read_status()
            headers = [field for field in connection.headers if field[0] not in _DROPPED]
            start: Message = {"type": "http.response.start", "status": status, "headers": headers}
            await send(start)
            started = True
            while data := await connection.read():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except UpstreamError as error:
            errors.drop_traceback(error)
            if started or body.done():
                # The client has left, or must see that its response is not complete.
                scope["state"]["abort"]()
            else:
                await _refuse(_not_served(), scope, receive, send)
        finally:
            body.cancel()
            await asyncio.gather(body, return_exceptions=True)
            connection.close()

    async def serve(
        self, served: StorableRequest, context: RequestContext, body: bytes
    ) -> bytes | None:
        """The body to go on with; None: the brain has responded. Raises: GatewayError.

        As `web.background.Storing.serve`, for what is to be kept or made later.
        """
        if not asks_to_store(served.route, context, body):
            return body
        await ensure_task()
        exchange = served.exchange
        connection = await self._connect(exchange.origin)
        served.pass_on()
        try:
            head = b"POST %b HTTP/1.1\r\n" % served.route.path.encode()
            connection.send(
                head + _fields(exchange.headers) + b"content-length: %d\r\n\r\n" % len(body), body
            )
            status = await connection.read_status()
            header_lines = encode_headers(
                [field for field in connection.headers if field[0] not in _OF_CONNECTION]
            )
            if _has_length(connection.headers):
                content = await connection.read_all(served.config.settings.limits.body_bytes)
                exchange.respond(status, header_lines, content)
                return None
            exchange.start_response(status, header_lines)
            while data := await connection.read():
                if exchange.write(data):
                    await exchange.wait_writable()
            exchange.end_response()
        except UpstreamError as error:
            errors.drop_traceback(error)
            if not exchange.response_started:
                served.pass_on(served=False)
                raise _not_served() from None
            exchange.abort()
        finally:
            connection.close()
        return None

    async def _connect(self, origin: ConnectionOrigin) -> _BrainConnection:
        """A connection on which the brain will serve one request of this client."""
        loop = asyncio.get_running_loop()
        sock = await self._open(origin)
        _, connection = await loop.create_unix_connection(lambda: _BrainConnection(loop), sock=sock)
        return connection


class _BrainConnection(NodeConnection):
    """A connection that says when more of a request's body may be written."""

    __slots__ = ("_writable",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._writable = asyncio.Event()
        self._writable.set()

    def pause_writing(self) -> None:
        """Called by the event loop: too much is buffered."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Called by the event loop: most of it was sent."""
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        super().connection_lost(exc)

    async def write(self, data: bytes) -> None:
        """Send more of a request's body, and wait while too much of it is buffered."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)
            await self._writable.wait()


async def _send_body(connection: _BrainConnection, scope: Scope, receive: Receive) -> None:
    """Send the request; then wait until its client has left, and end the connection."""
    headers: Headers = scope["headers"]
    length = next((value for name, value in headers if name == b"content-length"), None)
    chunked = length is None and any(name == b"transfer-encoding" for name, _ in headers)
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    line = b"%b %b HTTP/%b\r\n" % (
        scope["method"].encode(), target, scope["http_version"].encode()
    )  # fmt: skip
    framing = b"transfer-encoding: chunked\r\n" if chunked else b""
    if length is not None:
        framing = b"content-length: %b\r\n" % length
    connection.send(line + _fields(headers) + framing + b"\r\n", bodyless=scope["method"] == "HEAD")
    while (message := await receive())["type"] == "http.request":
        data = message.get("body", b"")
        if data:
            await connection.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        if not message.get("more_body") and chunked:
            await connection.write(b"0\r\n\r\n")
            chunked = False
    connection.close()


async def _refuse(error: GatewayError, scope: Scope, receive: Receive, send: Send) -> None:
    request_id = x_request_id_of(scope["headers"]) or f"req_{secrets.token_hex(8)}"
    scope[X_REQUEST_ID_KEY] = request_id
    response = error_response(error, scope)
    response.raw_headers.append((b"x-request-id", request_id.encode()))
    await response(scope, receive, send)


def _fields(headers: Headers) -> bytes:
    return encode_headers([field for field in headers if field[0] not in _OF_CONNECTION])


def _has_length(headers: Headers) -> bool:
    return any(name == b"content-length" for name, _ in headers)


# All but the length: with it the client sees a response that breaks off.
_DROPPED = _OF_CONNECTION - {b"content-length"}


def _not_served() -> GatewayError:
    return GatewayError(
        503, "shutting_down", "The gateway ended before it had a response.", retry_after=1.0
    )
