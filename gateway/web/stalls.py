"""Clients that take nothing of their reply any more, such as one whose machine sleeps.

What is under way for them keeps memory, and a slot where their answer is not all here yet. A
connection over which nothing could be sent for too long is cut.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable, Iterable

import structlog
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.web.public.protocol import BoundedProtocol

log = structlog.get_logger()

LOOKS = 10
"""So many in a row have to find that a client took nothing. They are counted, and not the seconds,
since a gateway that stood still itself has sent nothing meanwhile."""


class Stalls:
    """Cuts connections that have taken nothing for `limit` seconds; one timer for all of them."""

    def __init__(self, connections: Callable[[], Iterable[BoundedProtocol]], limit: float) -> None:
        self._connections = connections
        self._limit = limit
        self._waiting: dict[BoundedProtocol, tuple[int, int]] = {}
        """Those that have not taken all: how much is left, and how many looks found it no less."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limit / LOOKS, self._look)

    def close(self) -> None:
        """Stop looking."""
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._limit / LOOKS, self._look)
        waiting = {}
        for connection in list(self._connections()):
            unsent = _unsent(connection)
            if not unsent:
                continue
            before, looks = self._waiting.get(connection, (unsent + 1, 0))
            looks = 0 if unsent < before else looks + 1
            if looks < LOOKS:
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
