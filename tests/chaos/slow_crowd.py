"""Thousands of slow clients of many loopback addresses, in a process of their own.

A third sends its head a byte at a time, a third its body, a third reads its stream a few kilobytes
at a time. Each comes back as soon as it is disconnected.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import cast

import uvloop

from gateway.system import raise_open_file_limit
from tests.bench.load import Address
from tests.bench.scenarios import chat, post

KINDS = ("head", "body", "read")
BODY_BYTES = 1_000_000
BODY_STEP = 100
"""Bytes of one piece of a slow body."""
RECEIVE_BUFFER = 2048
"""Bytes of a slow reader's socket buffer, which the kernel doubles."""
BACK_AFTER = 1.0
"""Seconds until a client that was disconnected or refused connects again."""
_BIND_ADDRESS_NO_PORT = 24
"""Linux's IP_BIND_ADDRESS_NO_PORT: the port is chosen when connecting, among those of that pair."""


@dataclass(slots=True)
class CrowdTotals:
    """What the crowd has seen so far."""

    open: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """Connections of each kind."""
    connected: int = 0
    not_connected: int = 0
    """Attempts to connect that failed."""
    statuses: dict[str, int] = field(default_factory=dict)
    """Responses by kind and status, as `head 408`."""
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class CrowdOptions:
    """How many clients, from how many addresses, and how slow they are."""

    address: Address
    clients: int
    addresses: int
    ramp: float
    """Seconds over which they arrive."""
    pause: float
    """Seconds between two bytes of a head, and so on."""
    seed: int = 7


def source_address(number: int) -> str:
    """A loopback address for a client: 127.0.0.2, 127.0.0.3 and so on."""
    number += 2
    return f"127.0.{number // 250}.{number % 250 + (number >= 250)}"


class SlowClient(asyncio.Protocol):
    """One connection of a slow client; it pauses reading after each read."""

    def __init__(self, totals: CrowdTotals, kind: str) -> None:
        self._totals = totals
        self._kind = kind
        self._begun = False
        self.transport: asyncio.Transport
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._totals.connected += 1
        self._totals.open[self._kind] += 1

    def data_received(self, data: bytes) -> None:
        self._totals.bytes_read += len(data)
        if not self._begun:
            self._begun = True
            name = f"{self._kind} {data[9:12].decode('latin-1')}"
            self._totals.statuses[name] = self._totals.statuses.get(name, 0) + 1
        if self._kind == "read":
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._totals.open[self._kind] -= 1
        if not self.closed.done():
            self.closed.set_result(None)


class Crowd:
    """All slow clients."""

    def __init__(self, options: CrowdOptions) -> None:
        self._options = options
        self._rng = random.Random(options.seed)
        self.totals = CrowdTotals()

    async def client(self, number: int) -> None:
        """One client, which always comes back."""
        kind = KINDS[number % len(KINDS)]
        source = source_address(number // len(KINDS) % self._options.addresses)
        await asyncio.sleep(self._options.ramp * number / self._options.clients)
        while True:
            try:
                client = await self._connect(source, kind)
            except OSError:
                self.totals.not_connected += 1
            else:
                try:
                    await self._be_slow(client, kind)
                finally:
                    client.transport.abort()
            await asyncio.sleep(BACK_AFTER * self._rng.uniform(0.5, 1.5))

    async def _connect(self, source: str, kind: str) -> SlowClient:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if kind == "read":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
            sock.bind((source, 0))
            async with asyncio.timeout(30):
                await loop.sock_connect(sock, self._options.address)
                _, client = await loop.create_connection(
                    lambda: SlowClient(self.totals, kind), sock=sock
                )
        except BaseException:
            sock.close()
            raise
        return client

    async def _be_slow(self, client: SlowClient, kind: str) -> None:
        """Send or read a little at a time, until the connection ends."""
        steps = {"head": self._head, "body": self._body, "read": self._read}[kind]
        for step in steps():
            if client.transport.is_closing():
                return
            if step:
                client.transport.write(step)
            if kind == "read":
                client.transport.resume_reading()
            pause = self._options.pause * self._rng.uniform(0.5, 1.5)
            await asyncio.wait([client.closed], timeout=pause)

    def _head(self) -> itertools.chain[bytes]:
        head = chat(stream=True)
        return itertools.chain((head[:20],), (head[at : at + 1] for at in range(20, len(head))))

    def _body(self) -> itertools.chain[bytes]:
        head = post("/v1/chat/completions", b"").replace(
            b"Content-Length: 0", b"Content-Length: %d" % BODY_BYTES
        )
        begin = head + b'{"messages":[{"role":"user","content":"'
        piece = b"x" * BODY_STEP
        return itertools.chain((begin,), itertools.repeat(piece, BODY_BYTES // BODY_STEP))

    def _read(self) -> itertools.chain[bytes]:
        return itertools.chain((chat(stream=True),), itertools.repeat(b""))


async def _run(options: CrowdOptions, pipe: Connection) -> None:
    crowd = Crowd(options)
    clients = [asyncio.create_task(crowd.client(number)) for number in range(options.clients)]
    while not pipe.poll():  # noqa: ASYNC110 - a pipe of another process
        pipe.send(asdict(crowd.totals))
        await asyncio.sleep(1.0)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await asyncio.sleep(0.5)


def _main(options: CrowdOptions, pipe: Connection) -> None:
    raise_open_file_limit()
    uvloop.run(_run(options, pipe))


class CrowdProcess:
    """The crowd in a process of its own, so that its work delays no other client."""

    def __init__(self, options: CrowdOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_main, args=(options, other), daemon=True)
        self._process.start()
        other.close()
        self.totals = CrowdTotals()

    def poll(self) -> CrowdTotals:
        """The newest totals. Raises: RuntimeError, if the process has ended."""
        try:
            while self._pipe.poll():
                self.totals = CrowdTotals(**self._pipe.recv())
        except EOFError:
            raise RuntimeError("the slow clients' process has ended") from None
        return self.totals

    def stop(self) -> None:
        """Disconnect all of them."""
        with suppress(OSError):
            self._pipe.send("stop")
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
