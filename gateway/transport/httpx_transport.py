"""The same connections for everything that is not hot, as plain httpx."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from gateway.errors import drop_traceback
from gateway.transport.connection import NodeConnection
from gateway.transport.errors import (
    ConnectFailed,
    ConnectTimedOut,
    InvalidResponse,
    LocalResourcesExhausted,
    StaleConnection,
    UpstreamError,
)
from gateway.transport.pool import ConnectionPool
from gateway.transport.timeout import LoopTimeout

_SKIPPED = frozenset({b"host", b"connection", b"transfer-encoding"})


class PoolTransport(httpx.AsyncBaseTransport):
    """An httpx transport over the pool of one node; `timeout` as httpx has it, in seconds."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request.

        Raises: httpx.TransportError.
        """
        limits = request.extensions.get("timeout", {})
        body = await request.aread()
        origin = self._pool.address
        target = request.url.raw_path
        lines = [
            request.method.encode() + b" " + target + b" HTTP/1.1\r\n",
            origin.header_lines,
            *(
                name + b": " + value + b"\r\n"
                for name, value in request.headers.raw
                if name.lower() not in _SKIPPED
            ),
            # A body that was made on the way has no length yet.
            b"content-length: %d\r\n\r\n" % len(body)
            if "transfer-encoding" in request.headers
            else b"\r\n",
        ]
        data = b"".join(lines)
        connection = None
        try:
            connection = await self._exchange(request, data, body, limits)
            return httpx.Response(
                connection.status,
                headers=connection.headers,
                stream=_ResponseBody(self._pool, connection, limits.get("read")),
                request=request,
            )
        except UpstreamError as error:
            raise _translated(error, request) from error

    async def _exchange(
        self, request: httpx.Request, data: bytes, body: bytes, limits: dict[str, float | None]
    ) -> NodeConnection:
        connection = self._pool.take_idle()
        while True:
            if connection is None:
                connection = await self._pool.connect(limits.get("connect") or 60.0)
            try:
                connection.send(data, body, bodyless=request.method == "HEAD")
                async with LoopTimeout(limits.get("read")):
                    await connection.read_status()
            except StaleConnection as error:
                drop_traceback(error)
                connection.close()
                connection = None
            except TimeoutError:
                connection.close()
                raise httpx.ReadTimeout("The node did not answer", request=request) from None
            except BaseException:
                connection.close()
                raise
            else:
                return connection


class _ResponseBody(httpx.AsyncByteStream):
    def __init__(
        self, pool: ConnectionPool, connection: NodeConnection, timeout: float | None
    ) -> None:
        self._pool = pool
        self._connection = connection
        self._timeout = timeout

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async with LoopTimeout(self._timeout):
                    data = await self._connection.read()
            except TimeoutError:
                raise httpx.ReadTimeout("The node fell silent") from None
            except UpstreamError as error:
                raise _translated(error, None) from error
            if not data:
                return
            yield data

    async def aclose(self) -> None:
        if self._connection.complete:
            self._pool.release(self._connection)
        else:
            self._connection.close()


def _translated(error: UpstreamError, request: httpx.Request | None) -> httpx.TransportError:
    kind: type[httpx.TransportError] = httpx.ReadError
    if isinstance(error, ConnectTimedOut):
        kind = httpx.ConnectTimeout
    elif isinstance(error, ConnectFailed):
        kind = httpx.ConnectError
    elif isinstance(error, LocalResourcesExhausted):
        kind = httpx.PoolTimeout
    elif isinstance(error, InvalidResponse):
        kind = httpx.RemoteProtocolError
    return kind(str(error), request=request)
