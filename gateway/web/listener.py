"""A listening address and the uvicorn server behind it, which the gateway starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import ssl
import struct
import termios
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.web.protocol import BoundedProtocol

LISTEN_BACKLOG = 4096

DRAIN_POLL_SECONDS = 0.05
"""Seconds between checks whether all clients have disconnected."""

END_POLL_SECONDS = 0.01
"""Seconds between checks whether all requests have ended."""

MOST_ACCEPTED = 32
"""Connections that an `Acceptor` accepts in one turn of the event loop."""

ACCEPT_RETRY_SECONDS = 1.0
"""Seconds after which an `Acceptor` goes on when a connection could not be accepted."""

log = structlog.get_logger()


class UvicornServer(uvicorn.Server):
    """uvicorn's server, which ends when it is told to; tests/web/test_uvicorn.py guards it."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._end = asyncio.Event()
        self._tls = tls
        self.handshakes: set[asyncio.Task[None]] = set()
        """Those of TLS that have not ended."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections; with TLS not as uvicorn does, which counts none before its end."""
        if self._tls is None:
            await super().startup(sockets)
            return
        assert sockets
        accept = partial(self._accept_tls, self._tls)
        self.servers = [cast("asyncio.Server", Acceptor(sock, accept)) for sock in sockets]
        self.started = True

    def _accept_tls(self, tls: ssl.SSLContext, sock: socket.socket, address: str) -> None:
        protocol: BoundedProtocol = cast("type[BoundedProtocol]", self.config.http_protocol_class)(
            self.config, self.server_state, {}
        )
        limit = protocol.limits.header_timeout
        work = _shake_hands(lambda: protocol, sock, tls, limit)
        handshake = asyncio.get_running_loop().create_task(work, name="TLS handshake")
        self.handshakes.add(handshake)

        def ended(handshake: asyncio.Task[None]) -> None:
            self.handshakes.discard(handshake)
            protocol.end_handshake()
            if handshake.cancelled():
                sock.close()

        handshake.add_done_callback(ended)
        protocol.begin_handshake(address, handshake)

    def end(self) -> None:
        """Accept no more connections, and end when all requests have."""
        self.should_exit = True
        self._end.set()

    def end_at_once(self) -> None:
        """Wait for no request."""
        self.force_exit = True

    async def main_loop(self) -> None:
        """Wait for `end`; uvicorn would poll ten times a second."""
        await self._end.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End at once if no request runs; uvicorn would wait a tenth of a second, and poll so."""
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for handshake in self.handshakes:
            handshake.cancel()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # Connections without a request are gone then.
        state = self.server_state
        while (  # noqa: ASYNC110
            self.handshakes or state.connections or state.tasks
        ) and not self.force_exit:
            await asyncio.sleep(END_POLL_SECONDS)
        for server in self.servers:
            await server.wait_closed()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the gateway."""
        yield


class Acceptor:
    """Accepts the connections of one socket, as `asyncio.Server` does, and tells whose they are.

    `accept` gets the socket of each, and the address of its client.
    """

    def __init__(self, sock: socket.socket, accept: Callable[[socket.socket, str], None]) -> None:
        self._sock = sock
        self._accept = accept
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """Accept no more."""
        if self._pause is not None:
            self._pause.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    async def wait_closed(self) -> None:
        """Return at once: `close` leaves nothing to wait for."""

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._accept_some)

    def _accept_some(self) -> None:
        for _ in range(MOST_ACCEPTED):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                # As asyncio does: without a file left, the socket would be ready all the time.
                log.error("can't accept connections", why=str(error))  # noqa: TRY400
                self._loop.remove_reader(self._sock)
                self._pause = self._loop.call_later(ACCEPT_RETRY_SECONDS, self._resume)
                return
            sock.setblocking(False)
            self._accept(sock, address[0])


async def _shake_hands(
    protocol: Callable[[], asyncio.Protocol],
    sock: socket.socket,
    tls: ssl.SSLContext,
    limit: float,
) -> None:
    """Have `protocol` serve the connection after its handshake, if that ends within `limit`."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):  # The client's: no TLS, no trust, no answer, no connection.
        await loop.connect_accepted_socket(protocol, sock, ssl=tls, ssl_handshake_timeout=limit)


class Listener:
    """Serves `app` on an address until `close`."""

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        *,
        protocol: type[BoundedProtocol],
        keep_alive: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.host, self.port = sock.getsockname()[:2]
        self.scheme = "http" if tls is None else "https"
        self.sock = sock
        self.protocol = protocol
        self._stalls: StallMonitor | None = None
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(keep_alive)),
            backlog=LISTEN_BACKLOG,
        )
        config.load()
        self._server = UvicornServer(config, tls)
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Its base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def open(self) -> None:
        """Accept connections. Raises: OSError, if another socket of this address does already."""
        self.sock.listen(LISTEN_BACKLOG)
        self._task = asyncio.create_task(self._server.serve([self.sock]), name=self.url)
        self._stalls = StallMonitor(lambda: self.connections, self.protocol.limits.send_timeout)

    @property
    def connections(self) -> list[BoundedProtocol]:
        """The open connections."""
        connections = self._server.server_state.connections
        return [connection for connection in connections if isinstance(connection, BoundedProtocol)]

    async def drain(self) -> None:
        """Accept no more connections, and wait until every client has disconnected.

        Another process accepts on the same socket. An idle connection gets one more response,
        with `Connection: close`: closed at once, it might just be about to be used.
        """
        self.protocol.begin_drain()
        for server in self._server.servers:
            server.close()
        for connection in self.connections:
            connection.drain()
        # uvicorn does not report when a connection ends.
        while self._server.handshakes or self.connections:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def close(self) -> None:
        """Accept no more connections, and wait for running requests. Cancel it to end at once."""
        self._server.end()
        if self._task is None:
            self.sock.close()
            return
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            self._server.end_at_once()
            for connection in self.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await asyncio.wait([self._task], timeout=2.0)
            raise
        finally:
            if self._stalls is not None:
                self._stalls.close()


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


STALLED_POLLS = 10
"""Polls in a row that must find no progress before a connection is aborted. Polls are counted, not
seconds, since a gateway that was itself suspended has sent nothing in that time."""


class StallMonitor:
    """Aborts connections whose client has read nothing for `limit` seconds; one timer for all."""

    def __init__(self, connections: Callable[[], Iterable[BoundedProtocol]], limit: float) -> None:
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
        for connection in list(self._connections()):
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
    transport: asyncio.Transport = connection.transport
    cycle: RequestResponseCycle | None = connection.cycle
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
    result = bytearray(_INT.size)
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, result)
    except OSError:
        return 0
    return int(_INT.unpack(result)[0])


_INT = struct.Struct("i")
