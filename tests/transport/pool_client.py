"""The connections of a node's pool as an httpx client, for tests that ask the node themselves."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator

import httpx

from gateway.transport.connection import NodeConnection
from gateway.transport.errors import ConnectFailed, UpstreamError
from gateway.transport.pool import ConnectionPool

CONNECT_TIMEOUT = 30.0
"""Seconds."""

_NOT_COPIED = frozenset({b"host", b"connection", b"transfer-encoding", b"content-length"})
"""Headers of httpx that the pool sets itself or does without."""


def pool_client(pool: ConnectionPool) -> httpx.AsyncClient:
    """A client whose requests take the pool's connections; it has nothing of its own to close."""
    return httpx.AsyncClient(
        transport=_PoolTransport(pool), base_url=f"http://{pool.address.host}", timeout=None
    )


class _PoolTransport(httpx.AsyncBaseTransport):
    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        lines = [
            b"%s: %s\r\n" % (name, value)
            for name, value in request.headers.raw
            if name.lower() not in _NOT_COPIED
        ]
        length = len(body) if "content-length" in request.headers else None
        head = self._pool.address.request_head(
            request.method.encode(), request.url.raw_path, b"".join(lines), length
        )
        dial = functools.partial(self._pool.connect, CONNECT_TIMEOUT)
        try:
            connection = await self._pool.exchange(head, body, dial=dial)
        except ConnectFailed as error:
            raise httpx.ConnectError(str(error), request=request) from error

        return httpx.Response(
            connection.status,
            headers=connection.headers,
            stream=_Body(self._pool, connection),
            request=request,
        )


class _Body(httpx.AsyncByteStream):
    def __init__(self, pool: ConnectionPool, connection: NodeConnection) -> None:
        self._pool, self._connection = pool, connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while data := await self._connection.read():
                yield data
        except UpstreamError as error:
            raise httpx.ReadError(str(error)) from error

    async def aclose(self) -> None:
        self._pool.release(self._connection)
