"""A listening address, and what serves the clients that connect to it.

With edges (`edges/`) other processes serve them: this one accepts and hands their sockets over.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import ssl
import sys
import termios
from collections.abc import Callable, Collection
from typing import Any, Protocol

import structlog
from starlette.types import ASGIApp

from gateway.http.exchange import ConnectionOrigin
from gateway.http.protocol import BoundedProtocol

LISTEN_BACKLOG = 4096
DRAIN_POLL_SECONDS = 0.05  # seconds between checks whether all clients have disconnected
END_POLL_SECONDS = 0.01  # seconds between checks whether all requests have ended
MOST_ACCEPTED = 32  # connections that an `Acceptor` accepts in one turn of the event loop
# Seconds after which an `Acceptor` goes on when a connection could not be accepted.
ACCEPT_RETRY_SECONDS = 1.0
log = structlog.get_logger()


class Acceptor:
    """Accepts the connections of one socket, as `asyncio.Server` does.

    `accept` gets the socket of each. While `may_accept` says no they wait in the kernel's backlog,
    until `go_on` is called.
    """

    def __init__(
        self,
        sock: socket.socket,
        accept: Callable[[socket.socket], None],
        may_accept: Callable[[], bool] = lambda: True,
    ) -> None:
        self._sock = sock
        self._accept = accept
        self._may_accept = may_accept
        self._loop = asyncio.get_running_loop()
        self._reads = self._closed = False
        self._pause: asyncio.TimerHandle | None = None
        self.go_on()

    def close(self) -> None:
        """Accept no more."""
        self._closed = True
        self._stop()
        self._sock.close()

    def go_on(self) -> None:
        """Accept connections while there are some and `may_accept` allows it."""
        if not self._reads and not self._closed and self._may_accept():
            self._stop()
            self._reads = True
            self._loop.add_reader(self._sock, self._accept_some)

    def _stop(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._reads and self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
        self._reads = False

    def _accept_some(self) -> None:
        for _ in range(MOST_ACCEPTED):
            if not self._may_accept():
                self._stop()
                return
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                # As asyncio does: without a file left, the socket would be ready all the time.
                log.error("can't accept connections", why=str(error))  # noqa: TRY400
                self._stop()
                self._pause = self._loop.call_later(ACCEPT_RETRY_SECONDS, self.go_on)
                return
            sock.setblocking(False)
            self._accept(sock)


async def _shake_hands(
    protocol: Callable[[], asyncio.Protocol],
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    limit: float,
) -> None:
    """Have `protocol` serve the connection after its handshake, if that ends within `limit`."""
    loop = asyncio.get_running_loop()
    limit_of_tls = None if tls is None else limit
    with contextlib.suppress(OSError):  # The client's: no TLS, no trust, no answer, no connection.
        await loop.connect_accepted_socket(
            protocol, sock, ssl=tls, ssl_handshake_timeout=limit_of_tls
        )


class ClientServer:
    """Serves `app` to the clients at the other end of connections that were accepted."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        protocol: type[BoundedProtocol],
        keep_alive: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.protocol = protocol
        self.connections: set[BoundedProtocol] = set()  # the open connections
        self._app = app
        self._keep_alive = max(1, round(keep_alive))
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()  # those of running requests
        self._handshakes: set[asyncio.Task[None]] = set()  # those of TLS that have not ended
        self._stalls: StallMonitor | None = None

    def open(self) -> None:
        """Serve what is accepted. Raises: OSError."""
        self._stalls = StallMonitor(self.connections, self.protocol.limits.send_timeout)

    def adopt(self, sock: socket.socket, origin: ConnectionOrigin | None = None) -> None:
        """Serve the client of this connection.

        `origin`: where the connection of its requests is from; then TLS ends there.
        """
        tls = self._tls if origin is None else None
        protocol = self._new_connection(origin)
        work = _shake_hands(lambda: protocol, sock, tls, protocol.limits.header_timeout)
        handshake = asyncio.get_running_loop().create_task(work, name="handshake")
        self._handshakes.add(handshake)

        def ended(handshake: asyncio.Task[None]) -> None:
            self._handshakes.discard(handshake)
            protocol.end_handshake()
            if handshake.cancelled():
                sock.close()

        handshake.add_done_callback(ended)
        if origin is None:
            try:
                peer = sock.getpeername()
            except OSError:  # It has left already.
                peer = None
            protocol.begin_handshake(peer[0] if isinstance(peer, tuple) else None, handshake)

    def abort_busy(self) -> None:
        """Break the connections on which a request runs: nobody serves it to its end."""
        for connection in [one for one in self.connections if not one.idle]:
            connection.transport.abort()

    async def drain(self) -> None:
        """Accept no more connections, and wait until every client has disconnected.

        Another process accepts on the same socket. An idle connection gets one more response,
        with `Connection: close`: closed at once, it might just be about to be used.
        """
        self.protocol.begin_drain()
        self.stop_accepting()
        for connection in self.connections:
            connection.drain()
        while self._handshakes or self.connections:  # noqa: ASYNC110 - a poll is enough
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def close(self) -> None:
        """Accept no more connections, and wait for running requests. Cancel it to end at once."""
        self.stop_accepting()
        for handshake in self._handshakes:
            handshake.cancel()
        for connection in list(self.connections):
            connection.shutdown()
        try:
            await asyncio.sleep(0)  # Connections without a request are gone then.
            while self._handshakes or self.connections or self._tasks:  # noqa: ASYNC110
                await asyncio.sleep(END_POLL_SECONDS)
        except asyncio.CancelledError:
            for connection in list(self.connections):
                connection.transport.abort()
            await asyncio.sleep(END_POLL_SECONDS)  # They are gone then, and their requests end.
            raise
        finally:
            if self._stalls is not None:
                self._stalls.close()

    def stop_accepting(self) -> None:
        """Accept no more."""

    def _new_connection(self, origin: ConnectionOrigin | None = None) -> BoundedProtocol:
        return self.protocol(
            self._app, self._keep_alive, self.connections, self._tasks, origin=origin
        )


class Listener(ClientServer):
    """Serves `app` on an address until `close`.

    With `edges` they get the connections, and this process serves only what is adopted.
    """

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        protocol: type[BoundedProtocol],
        keep_alive: float,
        tls: ssl.SSLContext | None = None,
        edges: ConnectionTakers | None = None,
    ) -> None:
        self.host, self.port = sock.getsockname()[:2]
        self.scheme = "http" if tls is None else "https"
        self.sock = sock
        super().__init__(app, protocol=protocol, keep_alive=keep_alive, tls=tls)
        self._edges = edges
        self._accepting: asyncio.Task[None] | None = None
        self._server: asyncio.Server | Acceptor | None = None

    @property
    def url(self) -> str:
        """Its base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def open(self) -> None:
        """Accept connections. Raises: OSError, if another socket of this address does already."""
        self.sock.listen(LISTEN_BACKLOG)
        super().open()
        self._accepting = asyncio.create_task(self._accept(), name=self.url)

    async def close(self) -> None:
        if self._accepting is not None:
            await self._accepting
        await super().close()

    async def _accept(self) -> None:
        edges = self._edges
        if edges is not None:
            acceptor = Acceptor(self.sock, edges.take, edges.has_room)
            edges.call_with_room(acceptor.go_on)
            self._server = acceptor
        elif self._tls is not None:
            # asyncio's server would count no connection before the end of its handshake.
            self._server = Acceptor(self.sock, self.adopt)
        else:
            self._server = await asyncio.get_running_loop().create_server(
                self._new_connection, sock=self.sock, backlog=LISTEN_BACKLOG
            )

    def stop_accepting(self) -> None:
        if self._server is not None:
            self._server.close()
        self.sock.close()


class ConnectionTakers(Protocol):
    """Other processes, which serve the clients of a listener."""

    def call_with_room(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` whenever one of them has room again."""

    def has_room(self) -> bool:
        """Whether one of them could take a connection now."""

    def take(self, sock: socket.socket) -> None:
        """Hand a connection to one of them."""


def resolve_addresses(host: str, port: int) -> list[tuple[str, int]]:
    """The addresses that `host` resolves to. Raises: OSError."""
    return [(str(address[0]), int(address[1])) for *_, address in _address_infos(host, port)]


def _address_infos(host: str, port: int) -> list[Any]:
    return list(
        socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    )


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; `port` 0 takes a free one. Raises: OSError."""
    family, kind, protocol, _, address = _address_infos(host, port)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" means every address, IPv4 too, as people expect.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        sock.bind(address)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


# Polls in a row that must find no progress before a connection is aborted. Polls are counted, not
# seconds, since a gateway that was itself suspended has sent nothing in that time.
STALLED_POLLS = 10


class StallMonitor:
    """Aborts connections whose client has read nothing for `limit` seconds; one timer for all."""

    def __init__(self, connections: Collection[BoundedProtocol], limit: float) -> None:
        self._connections = connections
        self._limit = limit
        self._lagging: dict[BoundedProtocol, tuple[int, int]] = {}
        """Of connections with unsent bytes: how many, and how many polls found no progress."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limit / STALLED_POLLS, self._poll)

    def close(self) -> None:
        """Stop polling."""
        self._timer.cancel()

    def _poll(self) -> None:
        self._timer = self._loop.call_later(self._limit / STALLED_POLLS, self._poll)
        lagging = {}
        for connection in list(self._connections):
            unsent = _unsent_bytes(connection)
            if not unsent:
                continue
            before, polls = self._lagging.get(connection, (unsent + 1, 0))
            polls = 0 if unsent < before else polls + 1
            if polls < STALLED_POLLS:
                lagging[connection] = unsent, polls
                continue
            log.info("a client took nothing for too long", seconds=self._limit, unsent=unsent)
            connection.transport.abort()
        self._lagging = lagging


def _unsent_bytes(connection: BoundedProtocol) -> int:
    """Bytes that the client has not read; 0 also while more are written, which hides progress."""
    transport, cycle = connection.transport, connection.cycle
    if cycle is None or not (connection.flow.write_paused or cycle.response_complete):
        return 0
    own = transport.get_write_buffer_size()
    return own and own + _kernel_bytes(transport)


def _kernel_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the client's machine has not acknowledged.

    They tell of progress sooner than our own buffer: the kernel takes more from that only when a
    third of its buffer, perhaps a megabyte, is free.
    """
    sock = transport.get_extra_info("socket")
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0
