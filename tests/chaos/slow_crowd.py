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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection

import uvloop

from gateway.system import raise_open_file_limit
from tests.bench.load import Address
from tests.bench.scenarios import chat, post

KINDS = ("head", "body", "read")
BODY_BYTES, BODY_STEP = 1_000_000, 100
RECEIVE_BUFFER = 2048  # bytes of a slow reader's socket buffer, which the kernel doubles
BACK_AFTER = 1.0  # seconds until a client that was disconnected or refused connects again
_BIND_ADDRESS_NO_PORT = 24
"""Linux's IP_BIND_ADDRESS_NO_PORT: the port is chosen when connecting, among those of that pair."""


@dataclass(slots=True)
class CrowdTotals:
    open: int = 0  # connections
    connected: int = 0
    not_connected: int = 0  # attempts to connect that failed
    statuses: dict[str, int] = field(default_factory=dict)
    """Responses by kind and status, as `head 408`."""
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class CrowdOptions:
    """How many clients, from how many addresses, and how slow they are."""

    address: Address
    clients: int
    addresses: int
    ramp: float  # seconds over which they arrive
    pause: float  # seconds between two bytes of a head, and so on


def _source(number: int) -> str:
    """A loopback address for a client: 127.0.0.2, 127.0.0.3 and so on."""
    number += 2
    return f"127.0.{number // 250}.{number % 250 + (number >= 250)}"


class Crowd:
    def __init__(self, options: CrowdOptions) -> None:
        self._options = options
        self._rng = random.Random(7)
        self.totals = CrowdTotals()

    async def client(self, number: int) -> None:
        """One client, which always comes back."""
        options, kind = self._options, KINDS[number % len(KINDS)]
        source = _source(number // len(KINDS) % options.addresses)
        await asyncio.sleep(options.ramp * number / options.clients)
        while True:
            try:
                reader, writer = await self._connect(source, kind)
            except OSError:
                self.totals.not_connected += 1
            else:
                self.totals.connected += 1
                self.totals.open += 1
                try:
                    with suppress(OSError):
                        await self._be_slow(reader, writer, kind)
                finally:
                    self.totals.open -= 1
                    writer.transport.abort()
            await asyncio.sleep(BACK_AFTER * self._rng.uniform(0.5, 1.5))

    async def _connect(
        self, source: str, kind: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if kind == "read":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
            sock.bind((source, 0))
            async with asyncio.timeout(30):
                await asyncio.get_running_loop().sock_connect(sock, self._options.address)
                return await asyncio.open_connection(sock=sock, limit=RECEIVE_BUFFER)
        except BaseException:
            sock.close()
            raise

    async def _be_slow(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str
    ) -> None:
        """Send or read a little at a time, until the connection ends."""
        begun = False
        for piece in _pieces(kind):
            writer.write(piece)
            pause = self._options.pause * self._rng.uniform(0.5, 1.5)
            data = b""
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    if not (data := await reader.read(2 * RECEIVE_BUFFER)):
                        return
                    if kind == "read":
                        await asyncio.sleep(pause)
            self.totals.bytes_read += len(data)
            if data and not begun:
                begun = True
                name = f"{kind} {data[9:12].decode('latin-1')}"
                self.totals.statuses[name] = self.totals.statuses.get(name, 0) + 1


def _pieces(kind: str) -> Iterator[bytes]:
    request = chat(stream=True)
    if kind == "head":
        yield request[:20]
        yield from (request[at : at + 1] for at in range(20, len(request)))
    elif kind == "body":
        length = b"Content-Length: %d" % BODY_BYTES
        head = post("/v1/chat/completions", b"").replace(b"Content-Length: 0", length)
        yield head + b'{"messages":[{"role":"user","content":"'
        yield from itertools.repeat(b"x" * BODY_STEP, BODY_BYTES // BODY_STEP)
    else:
        yield request
        yield from itertools.repeat(b"")


async def _run(options: CrowdOptions, pipe: Connection) -> None:
    crowd = Crowd(options)
    clients = [asyncio.create_task(crowd.client(number)) for number in range(options.clients)]
    while not pipe.poll():
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
        """The newest totals. Raises: EOFError, if the process has ended."""
        while self._pipe.poll():
            self.totals = CrowdTotals(**self._pipe.recv())
        return self.totals

    def stop(self) -> None:
        with suppress(OSError):
            self._pipe.send("stop")
        self._process.join(30)
        self._process.kill()
        self._process.join()
