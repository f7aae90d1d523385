"""One listening address and the uvicorn server behind it, whose life is the gateway's to end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.web.protocol import BoundedProtocol

LISTEN_BACKLOG = 4096

DRAIN_POLL_SECONDS = 0.05
"""Seconds between two looks whether all clients have left."""


class _UvicornServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    async def main_loop(self) -> None:
        """Instead of looking ten times a second whether it should end."""
        await self.ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the gateway's business."""
        yield


class Listener:
    """Serves `app` on an address until `close`."""

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        *,
        protocol: type[BoundedProtocol],
        keep_alive: float,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        self.host, self.port = sock.getsockname()[:2]
        self.scheme = "http" if certificate is None else "https"
        self.sock = sock
        self._protocol = protocol
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
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self._server = _UvicornServer(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def open(self) -> None:
        """Accept connections from now on. Raises: OSError, where somebody else does so there.

        Of two sockets that were bound at the same time only one can listen.
        """
        self.sock.listen(LISTEN_BACKLOG)
        self._task = asyncio.create_task(self._server.serve([self.sock]), name=self.url)
        self._stalls = StallMonitor(self._connections, self._protocol.limits.send_timeout)

    def _connections(self) -> list[BoundedProtocol]:
        found = self._server.server_state.connections
        return [connection for connection in found if isinstance(connection, BoundedProtocol)]

    async def drain(self) -> None:
        """Accept nothing more, and wait until every client has left.

        Another process accepts on the same socket. A connection that is kept alive gets one more
        reply, which says that it closes: closed at once, it might be just about to be used.
        """
        self._protocol.draining = True
        for server in self._server.servers:
            server.close()
        for connection in self._connections():
            connection.drain()
        # uvicorn tells nobody when a connection ends.
        while self._server.server_state.connections:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def close(self) -> None:
        """Accept nothing more, and wait until what runs is over. Cancel it to end at once."""
        self._server.should_exit = True
        self._server.ending.set()
        if self._task is None:
            self.sock.close()
            return
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await asyncio.wait([self._task], timeout=2.0)
            raise
        finally:
            if self._stalls is not None:
                self._stalls.close()


def resolve_addresses(host: str, port: int) -> list[tuple[str, int]]:
    """The addresses that `host` stands for. Raises: OSError."""
    return [(str(address[0]), int(address[1])) for *_, address in _found(host, port)]


def _found(host: str, port: int) -> list[Any]:
    return list(
        socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    )


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound and not listening yet; `port` 0 takes a free one. Raises: OSError."""
    family, kind, protocol, _, address = _found(host, port)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" means every address, as people expect of it.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        sock.bind(address)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


log = structlog.get_logger()

STALLED_POLLS = 10
"""So many in a row have to find that a client took nothing. They are counted, and not the seconds,
since a gateway that stood still itself has sent nothing meanwhile."""


class StallMonitor:
    """Cuts connections that have taken nothing for `limit` seconds; one timer for all of them."""

    def __init__(self, connections: Callable[[], Iterable[BoundedProtocol]], limit: float) -> None:
        self._connections = connections
        self._limit = limit
        self._waiting: dict[BoundedProtocol, tuple[int, int]] = {}
        """Those that have not taken all: how much is left, and how many looks found it no less."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limit / STALLED_POLLS, self._look)

    def close(self) -> None:
        """Stop looking."""
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._limit / STALLED_POLLS, self._look)
        waiting = {}
        for connection in list(self._connections()):
            unsent = _unsent(connection)
            if not unsent:
                continue
            before, looks = self._waiting.get(connection, (unsent + 1, 0))
            looks = 0 if unsent < before else looks + 1
            if looks < STALLED_POLLS:
                waiting[connection] = unsent, looks
                continue
            log.info("a client took nothing for too long", seconds=self._limit, unsent=unsent)
            connection.transport.abort()
        self._waiting = waiting


def _unsent(connection: BoundedProtocol) -> int:
    """Bytes that its client has yet to take; 0 as well while more are written, which hides it."""
    transport: asyncio.Transport = connection.transport
    cycle: RequestResponseCycle | None = connection.cycle
    if cycle is None or not (connection.flow.write_paused or cycle.response_complete):
        return 0
    own = transport.get_write_buffer_size()
    return own and own + _in_kernel(transport)


def _in_kernel(transport: asyncio.Transport) -> int:
    """Bytes that the client's machine has not acknowledged.

    The kernel takes more of ours only when a third of its own buffer, perhaps a megabyte, is free.
    """
    sock = transport.get_extra_info("socket")
    told = bytearray(_INT.size)
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, told)
    except OSError:
        return 0
    return int(_INT.unpack(told)[0])


_INT = struct.Struct("i")
