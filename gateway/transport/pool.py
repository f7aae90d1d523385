"""The connections to one node: idle ones are used again, the last one first.

llama.cpp's server closes a connection that was idle for 5 s and any after 100 requests, so an
idle one is forgotten before that, and one that proves to be closed in the instant of its reuse
(`Stale`) was no attempt at all: the caller sends again on a fresh one.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from dataclasses import dataclass

from gateway.transport.connection import NodeConnection
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import ConnectFailed, ConnectTimedOut, LocalResourcesExhausted
from gateway.transport.resolver import Resolver
from gateway.transport.timeout import LoopTimeout

IDLE_SECONDS = 4.0
"""Below the 5 s after which llama.cpp's server closes (cpp-httplib's keep-alive timeout)."""

RESOLVE_SHARE = 0.75
"""Part of the time for a connection in which its host's name must be resolved: a probe that has no
more time than that can still tell why it failed."""

IDLE_CONNECTIONS = 1024
"""Idle connections kept for one node; what comes back beyond is closed."""


_LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL})
"""What this machine lacks, not the node."""


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node is, and what every request to it carries."""

    host: str
    port: int
    path_prefix: bytes
    """Path prefix, without a slash at its end."""
    header_lines: bytes
    """Header lines that every request to this node has: Host, the node's key."""
    tls: ssl.SSLContext | None = None
    server_name: str | None = None

    def request_head(self, method: bytes, path: str, header_lines: bytes, length: int) -> bytes:
        """The head of a request to this node whose body has `length` bytes."""
        return b"%s %s%s HTTP/1.1\r\n%s%scontent-length: %d\r\n\r\n" % (
            method, self.path_prefix, path.encode(), self.header_lines, header_lines, length
        )  # fmt: skip


class ConnectionPool:
    """Connections to one origin."""

    def __init__(self, origin: NodeAddress, resolver: Resolver | None = None) -> None:
        self.address = origin
        self._names = resolver or Resolver()
        self.connections_opened = 0
        self._loop = asyncio.get_running_loop()
        self._idle: list[NodeConnection] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    def take_idle(self) -> NodeConnection | None:
        """An open connection that was used lately, or None."""
        oldest = self._loop.time() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.alive and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def connect(self, timeout: float) -> NodeConnection:
        """A new connection within `timeout` seconds, to the first address that takes it.

        Raises: ConnectFailed, ConnectTimedOut, Exhausted.
        """
        await ensure_task()
        host, until = self.address.host, self._loop.time() + timeout
        addresses = await self._names.addresses(host, timeout * RESOLVE_SHARE)
        failure: ConnectFailed | ConnectTimedOut | None = None
        for number, address in enumerate(addresses):
            left = max(0.0, until - self._loop.time())
            try:
                connection = await self._connect(address, left / (len(addresses) - number))
            except TimeoutError:
                failure = ConnectTimedOut(f"No connection within {timeout:g} s")
            except ConnectFailed as error:
                failure = error
            else:
                if number:
                    self._names.connected(host, address)
                return connection
        self._names.connect_failed(host)
        assert failure is not None
        raise failure

    async def _connect(self, address: str, timeout: float) -> NodeConnection:
        origin = self.address
        try:
            async with LoopTimeout(timeout):
                _, connection = await self._loop.create_connection(
                    lambda: NodeConnection(self._loop),
                    address,
                    origin.port,
                    ssl=origin.tls,
                    server_hostname=origin.server_name if origin.tls else None,
                )
        except TimeoutError:
            raise
        except (OSError, ssl.SSLError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            if getattr(error, "errno", None) in _LOCAL_ERRNOS:
                raise LocalResourcesExhausted(f"No connection could be opened: {reason}") from None
            raise ConnectFailed(f"The connection failed: {reason}") from None
        self.connections_opened += 1
        return connection

    def release(self, connection: NodeConnection) -> None:
        """Take back a connection whose exchange is over, for another one if it allows that."""
        if (
            self._closed
            or not connection.reusable
            or not connection.alive
            or len(self._idle) >= IDLE_CONNECTIONS
        ):
            connection.close()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(IDLE_SECONDS, self._sweep)

    def close(self) -> None:
        """Close all idle connections; those in use end with their exchange."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _sweep(self) -> None:
        self._sweeper = None
        oldest = self._loop.time() - IDLE_SECONDS
        kept = []
        for connection in self._idle:
            if connection.alive and connection.idle_since > oldest:
                kept.append(connection)
            else:
                connection.close()
        self._idle = kept
        if kept:
            wait = kept[0].idle_since - oldest
            self._sweeper = self._loop.call_later(max(0.1, wait), self._sweep)
