"""How a node is reached: its address, its TLS, and the connections on which requests are sent.

Idle connections are used again, the last one first. llama.cpp's server closes a connection that
was idle for 5 s and any after 100 requests. So the pool drops an idle one before that. A request
whose connection proves to be closed in the instant of its reuse (`StaleConnection`) is sent again
on another one.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - the first handshake reads it, on the event loop
import errno
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gateway.config.inventory import NodeSpec, NodeTls
from gateway.errors import drop_traceback
from gateway.terms import SegmentedBody
from gateway.transport.connection import STALE_SECONDS, LoopTimeout, NodeConnection, TurnLimit
from gateway.transport.eager_task import ensure_task
from gateway.transport.errors import (
    ConnectFailed,
    ConnectTimedOut,
    LocalResourcesExhausted,
    StaleConnection,
)
from gateway.transport.resolver import Resolver

# Below the 5 s after which llama.cpp's server closes (cpp-httplib's keep-alive timeout).
IDLE_SECONDS = 4.0
IDLE_CONNECTIONS = 1024  # idle connections kept for one node; further ones are closed
# Share of the time for a connection in which its host's name must be resolved: what is left lets a
# probe with no more time than that still report why it failed.
RESOLVE_SHARE = 0.75
# Errors of this machine, not of the node.
_LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL})


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node is, and what every request to it carries."""

    host: str
    port: int
    path_prefix: bytes  # path prefix, without a slash at its end
    header_lines: bytes  # header lines that every request to this node has: Host, the node's key
    tls: ssl.SSLContext | None = None
    server_name: str | None = None

    def request_head(
        self, method: bytes, path: bytes, header_lines: bytes = b"", length: int | None = None
    ) -> bytes:
        """The head of a request for this path below the node's prefix.

        `header_lines` end in CRLF each, and hold neither Host nor Content-Length. `length`: bytes
        of the body; None: the request has no body.
        """
        if length is None:
            return b"%s %s%s HTTP/1.1\r\n%s%s\r\n" % (
                method, self.path_prefix, path, self.header_lines, header_lines
            )  # fmt: skip
        return b"%s %s%s HTTP/1.1\r\n%s%scontent-length: %d\r\n\r\n" % (
            method, self.path_prefix, path, self.header_lines, header_lines, length
        )  # fmt: skip


class ConnectionPool:
    """Connections to one node."""

    def __init__(
        self,
        address: NodeAddress,
        resolver: Resolver | None = None,
        *,
        idle_seconds: float = IDLE_SECONDS,
        most_idle: int = IDLE_CONNECTIONS,
        stale_seconds: float = STALE_SECONDS,
        loop: asyncio.AbstractEventLoop | None = None,
        turn: TurnLimit | None = None,
    ) -> None:
        self.address = address
        self._turn = turn or TurnLimit()
        self.connections_opened = 0
        self.stale_seconds = stale_seconds
        """For connections opened from now on: see `NodeConnection`."""
        self._resolver = resolver or Resolver()
        self._idle_seconds = idle_seconds
        self._most_idle = most_idle
        self._loop = loop or asyncio.get_running_loop()
        self._idle: list[tuple[float, NodeConnection]] = []
        """Idle connections and since when each is idle, the oldest first."""
        self._sweeper: asyncio.TimerHandle | None = None
        self.closed = False

    async def exchange(
        self,
        head: bytes,
        body: bytes | SegmentedBody = b"",
        *,
        dial: Callable[[], Awaitable[NodeConnection]],
        on_connected: Callable[[NodeConnection], None] | None = None,
    ) -> NodeConnection:
        """Send a request and wait for the response's head; returns the connection to read from.

        An idle connection is used if there is one, else `dial` opens one (`connect` in most
        cases). If an idle one proves to be stale, the request is sent again. `on_connected` is
        called before each sending; an exception in it ends the exchange.

        Raises: UpstreamError; what `dial` and `on_connected` raise. The connection is closed then,
        unless it may serve another exchange.
        """
        while True:
            connection = self.take_idle() or await dial()
            try:
                if on_connected is not None:
                    on_connected(connection)
                connection.send(head, body)
                while not connection.status:
                    await connection.wait_for_data()
            except StaleConnection as error:
                drop_traceback(error)
                connection.close()
            except BaseException:
                if connection.complete:
                    self.release(connection)
                else:
                    connection.close()
                raise
            else:
                return connection

    @asynccontextmanager
    async def response(
        self,
        head: bytes,
        body: bytes = b"",
        *,
        connect_timeout: float,
        on_connected: Callable[[NodeConnection], None] | None = None,
    ) -> AsyncIterator[NodeConnection]:
        """Send a request; yields the connection with the response's head, to read the body from.

        At the end the connection is taken back, or closed if the response was not read to its end.
        Raises: as `exchange` and `connect`.
        """
        connection = await self.exchange(
            head, body, dial=lambda: self.connect(connect_timeout), on_connected=on_connected
        )
        try:
            yield connection
        finally:
            self.release(connection)

    def take_idle(self) -> NodeConnection | None:
        """An open connection that was used lately, or None."""
        oldest = self._loop.time() - self._idle_seconds
        while self._idle:
            idle_since, connection = self._idle.pop()
            if connection.alive and idle_since > oldest:
                return connection
            connection.close()
        return None

    async def connect(self, timeout: float) -> NodeConnection:
        """A new connection within `timeout` seconds, to the first address that accepts one.

        Raises: ConnectFailed, ConnectTimedOut, LocalResourcesExhausted.
        """
        await ensure_task()
        host, until = self.address.host, self._loop.time() + timeout
        addresses = await self._resolver.addresses(host, timeout * RESOLVE_SHARE)
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
                    self._resolver.connected(host, address)
                return connection
        self._resolver.connect_failed(host)
        assert failure is not None
        raise failure

    async def _connect(self, address: str, timeout: float) -> NodeConnection:
        node = self.address
        try:
            async with LoopTimeout(timeout):
                _, connection = await self._loop.create_connection(
                    lambda: NodeConnection(
                        self._loop, stale_seconds=self.stale_seconds, turn=self._turn
                    ),
                    address,
                    node.port,
                    ssl=node.tls,
                    server_hostname=node.server_name if node.tls else None,
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
            self.closed
            or not connection.reusable
            or not connection.alive
            or len(self._idle) >= self._most_idle
        ):
            connection.close()
            return
        self._idle.append((self._loop.time(), connection))
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._idle_seconds, self._sweep)

    def close(self) -> None:
        """Close all idle connections; those in use end with their exchange."""
        self.closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()

    def _sweep(self) -> None:
        """Close connections that have been idle for too long."""
        self._sweeper = None
        oldest = self._loop.time() - self._idle_seconds
        kept = []
        for idle_since, connection in self._idle:
            if connection.alive and idle_since > oldest:
                kept.append((idle_since, connection))
            else:
                connection.close()
        self._idle = kept
        if kept:
            wait = kept[0][0] - oldest
            self._sweeper = self._loop.call_later(max(0.1, wait), self._sweep)


# How the fleet opens the pool of a node's connections.
OpenNodePool = Callable[[NodeSpec], ConnectionPool]


def open_node_pool(
    spec: NodeSpec, resolver: Resolver | None = None, turn: TurnLimit | None = None
) -> ConnectionPool:
    """The pool of the node's connections; it opens none yet. Needs a running event loop.

    `resolver` resolves its host; nodes share one, so that each name is looked up once. `turn`
    bounds the work on what all of them send at once.

    Raises: ssl.SSLError, OSError when a TLS file can't be used.
    """
    return ConnectionPool(node_address(spec), resolver, turn=turn)


def connection_key(spec: NodeSpec) -> tuple[object, ...]:
    """Changes when a node's entry in the inventory needs a new pool."""
    return (spec.url, spec.kind, spec.tls, spec.api_key)


def tls_files(spec: NodeSpec) -> set[Path]:
    """The files of certificates and keys with which the node is reached."""
    tls = spec.tls
    return set() if tls is None else {path for path in (tls.ca, tls.cert, tls.key) if path}


def node_address(spec: NodeSpec) -> NodeAddress:
    """Where the node of `spec` is, with the header lines that all requests to it carry."""
    key = None if spec.api_key is None else spec.api_key.get_secret_value()
    tls = tls_context(spec.tls) if spec.url.startswith("https:") else None
    return url_address(spec.url, key, tls, spec.tls.server_name if spec.tls else None)


def url_address(
    url: str, key: str | None, tls: ssl.SSLContext | None, server_name: str | None = None
) -> NodeAddress:
    """Where the server of a URL is; `tls`: for https."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    name = f"[{host}]" if ":" in host else host
    authority = name if parts.port is None else f"{name}:{port}"
    lines = f"host: {authority}\r\n" + (f"authorization: Bearer {key}\r\n" if key else "")
    return NodeAddress(
        host=host,
        port=port,
        path_prefix=parts.path.rstrip("/").encode(),
        header_lines=lines.encode(),
        tls=tls,
        server_name=server_name or host,
    )


def tls_context(spec: NodeTls | None) -> ssl.SSLContext:
    """How TLS is spoken with a node; None: by the defaults. Raises: ssl.SSLError, OSError."""
    context = ssl.create_default_context(cafile=str(spec.ca) if spec and spec.ca else None)
    if spec is not None and not spec.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if spec is not None and spec.cert:
        # With a password, even an empty one, OpenSSL does not ask for it on the terminal.
        context.load_cert_chain(spec.cert, spec.key, password="")
    return context
