"""A server below HTTP: it answers each connection with exactly the bytes that a test gives."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from gateway.transport.pool import NodeAddress

HOWEVER_SLOW = 60.0
"""Seconds for `stale_seconds`: a reused connection that breaks is stale, even on a slow machine."""


@dataclass(slots=True)
class Peer:
    """The server's side of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self) -> bytes:
        """One request: its head and as much body as its Content-Length says."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return head + await self.reader.readexactly(int(line.partition(b":")[2]))
        return head

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


@dataclass(slots=True)
class RawServer:
    """Its port, and what has happened there."""

    port: int
    opened: int = 0
    """Connections ever accepted."""
    open: int = 0
    """Connections that are open now."""
    failures: list[BaseException] = field(default_factory=list)

    def address(self) -> NodeAddress:
        return NodeAddress("127.0.0.1", self.port, b"", b"host: n\r\n")


@asynccontextmanager
async def raw_server(
    script: Script, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[RawServer]:
    """A server that runs `script` on every connection and closes it afterwards."""
    raw = RawServer(0)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        raw.opened += 1
        raw.open += 1
        try:
            await script(Peer(reader, writer))
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass
        except BaseException as error:  # noqa: BLE001 - raised at the end
            raw.failures.append(error)
        finally:
            raw.open -= 1
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    raw.port = server.sockets[0].getsockname()[1]
    try:
        yield raw
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not raw.failures, raw.failures


@contextmanager
def nobody_listens() -> Iterator[int]:
    """A port that refuses connections, and that no other socket is given meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@contextmanager
def full_backlog(port: int = 0) -> Iterator[int]:
    """A port where connections are neither accepted nor refused: the queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=0))
        for _ in range(8):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def once(reply: bytes) -> Script:
    """Answers one request with these bytes, then closes."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(reply)

    return script


def always(reply: bytes) -> Script:
    """Answers every request of a connection with these bytes."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(reply)

    return script
