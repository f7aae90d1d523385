"""The pooled connections to a node as plain httpx, for all requests that are not hot."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator

import httpx

from gateway.transport.connection import LoopTimeout, NodeConnection
from gateway.transport.errors import (
    ConnectFailed,
    ConnectTimedOut,
    InvalidResponse,
    LocalResourcesExhausted,
    UpstreamError,
)
from gateway.transport.pool import ConnectionPool

_NOT_COPIED = frozenset({b"host", b"connection", b"transfer-encoding", b"content-length"})
"""Headers of httpx that the pool sets itself or does without."""

CONNECT_TIMEOUT = 60.0
"""Seconds for a connection where httpx sets no limit."""


class PoolTransport(httpx.AsyncBaseTransport):
    """An httpx transport over the pool of one node; the node's address adds the path prefix.

    `timeout` as httpx has it, in seconds.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request. Raises: httpx.TransportError."""
        limits = request.extensions.get("timeout", {})
        body = await request.aread()
        headers = request.headers
        has_body = "content-length" in headers or "transfer-encoding" in headers
        head = self._pool.address.request_head(
            request.method.encode(),
            request.url.raw_path,
            b"".join(
                b"%s: %s\r\n" % (name, value)
                for name, value in headers.raw
                if name.lower() not in _NOT_COPIED
            ),
            len(body) if has_body else None,
        )
        try:
            connection = await self._pool.exchange(
                head,
                body,
                dial=functools.partial(
                    self._pool.connect, limits.get("connect") or CONNECT_TIMEOUT
                ),
                head_timeout=limits.get("read"),
                bodyless=request.method == "HEAD",
            )
        except TimeoutError:
            raise httpx.ReadTimeout("The node did not answer", request=request) from None
        except UpstreamError as error:
            raise _translated(error, request) from error
        return httpx.Response(
            connection.status,
            headers=connection.headers,
            stream=_ResponseBody(self._pool, connection, limits.get("read")),
            request=request,
        )


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
    """The httpx error for it."""
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
