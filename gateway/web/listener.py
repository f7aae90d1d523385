"""One listening address and the uvicorn server behind it, whose life is the gateway's to end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from gateway.web.public.protocol import BoundedProtocol
from gateway.web.stalls import Stalls

BACKLOG = 4096

LOOK = 0.05
"""Seconds between two looks whether all clients have left."""


class _Server(uvicorn.Server):
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
        self._stalls: Stalls | None = None
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
            backlog=BACKLOG,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self._server = _Server(config)
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
        self.sock.listen(BACKLOG)
        self._task = asyncio.create_task(self._server.serve([self.sock]), name=self.url)
        self._stalls = Stalls(self._connections, self._protocol.limits.send_timeout)

    def _connections(self) -> list[BoundedProtocol]:
        found = self._server.server_state.connections
        return [connection for connection in found if isinstance(connection, BoundedProtocol)]

    async def retire(self) -> None:
        """Accept nothing more, and wait until every client has left.

        Another process accepts on the same socket. A connection that is kept alive gets one more
        reply, which says that it closes: closed at once, it might be just about to be used.
        """
        self._protocol.retiring = True
        for server in self._server.servers:
            server.close()
        for connection in self._connections():
            connection.retire()
        # uvicorn tells nobody when a connection ends.
        while self._server.server_state.connections:  # noqa: ASYNC110
            await asyncio.sleep(LOOK)

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


def resolved(host: str, port: int) -> list[tuple[str, int]]:
    """The addresses that `host` stands for. Raises: OSError."""
    return [(str(address[0]), int(address[1])) for *_, address in _found(host, port)]


def _found(host: str, port: int) -> list[Any]:
    return list(
        socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    )


def bind(host: str, port: int) -> socket.socket:
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
