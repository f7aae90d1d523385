"""User instructions for each request, counted by callgrind, for the budgets (`tests/house`).

How they are counted: docs/performance.md. Of three counts of as many requests the least is taken:
what other work adds, a checkpoint of SQLite for one, comes in bursts.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gateway.local.server import claim_port, claimed_port
from tests.bench.load import Address, Load, LoadConnection
from tests.bench.scenarios import chat_load, plain_load, stream_load
from tests.bench.targets import HOST, Plan, gateway, status_of
from tests.bench.upstream import Script, Upstream

WARM_UP = 300
"""Requests before the counted ones: they fill caches, and CPython specialises its code."""
START_LIMIT = 900.0
LIMIT = 600.0  # seconds; valgrind slows the gateway down some fifty times
TOKENS = 20
LONG_TOKENS = 120
"""Tokens of a longer stream: what it takes more than the short one is the cost of its chunks."""
STREAMS = 25
"""Streams of either length that are counted, whose chunks come one by one. The ledger writes their
rows at once."""
WINDOWS = 3  # counts of as many requests, of which the least counts
WINDOW_SECONDS = 1.0
"""Between the last request and the count: log and store have done their part by then."""

FLUSH_ROWS = 25  # rows that the ledger writes at once at 100 requests a second
DEFERRED = 10  # deferred work done at once then: two pieces of each request, 20 times a second
SETTLE_SECONDS = 5.0
"""Seconds after clocks have been stopped: most waits are over by then."""
STOPPED = 1e6
SHORTEST_STOPPED = 0.1  # seconds from which on sleeps and time limits never end
STOP_CLOCKS = f"""
import asyncio, signal, sys
from gateway import events
from gateway.callers import ledger
from gateway.schedule import lease_service
from gateway.store import store
from gateway.transport.connection import TurnLimit
sleep, timeout, woken = asyncio.sleep, asyncio.timeout, store.woken
def stop(*_):
    asyncio.sleep = lambda delay, *result: sleep(
        delay if delay < {SHORTEST_STOPPED} else {STOPPED}, *result)
    asyncio.timeout = lambda delay: timeout(
        delay if delay is not None and delay < {SHORTEST_STOPPED} else None)
    store.woken = lambda event, seconds: woken(
        event, seconds if seconds < {SHORTEST_STOPPED} else {STOPPED})
signal.signal(signal.SIGUSR1, stop)  # by then the gateway is ready, for which it must wait
# What is done so many times a second is done by number alone.
events.DEFER_SECONDS, events.MOST_DEFERRED = {STOPPED}, {DEFERRED}
ledger.FLUSH_SECONDS = ledger.RECOVERY_SECONDS = ledger.HEARTBEAT_SECONDS = {STOPPED}
ledger.JOURNALED_WITHIN = {10 * STOPPED}  # the time until the next flush is subtracted
lease_service.SPEED_SAMPLE_INTERVAL = 0.0  # each request is a sample
store.Store.__init__.__kwdefaults__.update(check_seconds={STOPPED}, look_seconds={STOPPED})
TurnLimit.__init__.__kwdefaults__["seconds"] = {STOPPED}
make = ledger.Ledger.__init__
ledger.Ledger.__init__ = lambda self, *values, **named: make(
    self, *values, flush_rows={FLUSH_ROWS}, **named)
"""
LAUNCH = """
from gateway.cli import main
sys.argv[0] = "llama-gateway"
main()
"""


class ChunkCountingConnection(LoadConnection):
    """Counts the HTTP chunks that have arrived: the gateway writes one for each that it reads.

    With each one it asks the node for the next, so that each is read alone.
    """

    node: Upstream
    chunks = 0

    def on_chunk_header(self) -> None:
        type(self).chunks += 1
        for connection in self.node.connections:
            if connection.stream:
                connection.stream.resume()


SCENARIOS: dict[str, Callable[[Address], Load]] = {
    "embedding": plain_load,
    "stream": partial(stream_load, tokens=TOKENS),
    "plain": partial(chat_load, tokens=TOKENS),
}
"""Loads over one connection."""


async def count(python: str, requests: int = 100) -> dict[str, Instructions]:
    """Instructions for each request of the scenarios, and for one more chunk of a stream.

    Raises: RuntimeError.
    """
    async with _served(python) as served:
        served.process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(SETTLE_SECONDS)
        found = {
            name: await _count_request(load(served.address), served, requests)
            for name, load in SCENARIOS.items()
        }
        return found | {"chunk": await _count_chunk(served)}


@dataclass(frozen=True, slots=True)
class Served:
    address: Address
    node: Upstream
    process: subprocess.Popen[bytes]
    folder: Path


@asynccontextmanager
async def _served(python: str) -> AsyncIterator[Served]:
    folder = Path(tempfile.mkdtemp(prefix="llama-gateway-instructions-"))
    async with Upstream(1, 64, Script(tokens=TOKENS, interval=0.0, burst=TOKENS)) as node:
        # Held all the time: the gateway may need minutes until it listens.
        with claim_port(HOST) as claim:
            address = (HOST, claimed_port(claim))
            process = _start_gateway(python, folder, address, node.ports[0])
            try:
                async with asyncio.timeout(START_LIMIT):
                    while await status_of(address, "/v1/models") != 200:
                        if process.poll() is not None:
                            raise RuntimeError(f"the gateway ended; see {folder}/log")
                        await asyncio.sleep(0.2)
                yield Served(address, node, process, folder)
            finally:
                process.kill()  # it would wait by clocks that stand still
                process.wait()


def _start_gateway(
    python: str, folder: Path, address: Address, node: int
) -> subprocess.Popen[bytes]:
    # In a folder of their own: the gateway watches theirs, and would see each line of the log.
    watched = folder / "config"
    watched.mkdir()
    # Probes and the watching of files must not count.
    served = gateway("", Plan(watched, address[1], (node,)), {"health": {"interval": 3600}})
    command = [
        *("setpriv", "--pdeathsig", "TERM", "valgrind", "--tool=callgrind"),
        *(f"--callgrind-out-file={folder}/counted", "--separate-threads=yes"),
        *(python, "-c", STOP_CLOCKS + LAUNCH, *served[1:]),
    ]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Equal dictionary layouts in all runs.
            env=os.environ | {"PYTHONHASHSEED": "0", "XDG_STATE_HOME": str(folder / "state")},
        )


class Instructions(NamedTuple):
    """Instructions of the event loop's thread, and of all threads."""

    loop: int
    threads: int

    def each(self, fewer: Instructions, number: float) -> Instructions:
        """What these are more than fewer ones, by the number of requests that they had more."""
        return Instructions(*(round((a - b) / number) for a, b in zip(self, fewer, strict=True)))


async def _count_request(load: Load, served: Served, requests: int) -> Instructions:
    async with load.connected(1):
        await load.run(WARM_UP, LIMIT)
        await asyncio.sleep(WINDOW_SECONDS)
        few = await _least(load, served, requests)
        many = await _least(load, served, 2 * requests)
    return many.each(few, requests)


async def _count_chunk(served: Served) -> Instructions:
    found = []
    for tokens in (TOKENS, LONG_TOKENS):
        served.node.script = Script(tokens, interval=0.0, held=True)
        load = stream_load(served.address, tokens)
        load.connection = ChunkCountingConnection
        ChunkCountingConnection.node = served.node
        async with load.connected(1):
            await load.run(STREAMS, LIMIT)
            await asyncio.sleep(WINDOW_SECONDS)
            ChunkCountingConnection.chunks = 0
            counted = await _least(load, served, STREAMS)
        found.append((counted, ChunkCountingConnection.chunks / WINDOWS))
    (few, few_chunks), (many, many_chunks) = found
    return many.each(few, many_chunks - few_chunks)


async def _least(load: Load, served: Served, requests: int) -> Instructions:
    """The least instructions of as many requests, of either kind by itself."""
    found = []
    for _ in range(WINDOWS):
        await _control("--zero", served.process.pid)
        outcome = await load.run(requests, LIMIT)
        await asyncio.sleep(WINDOW_SECONDS)
        found.append(await _dumped(served))
        if outcome.errors:
            raise RuntimeError(f"{outcome.errors} wrong answers, the first: {outcome.first_error}")
    return Instructions(*(min(values) for values in zip(*found, strict=True)))


async def _dumped(served: Served) -> Instructions:
    before = set(served.folder.glob("counted*"))
    await _control("--dump", served.process.pid)
    return instructions_of(set(served.folder.glob("counted*")) - before)


def instructions_of(dumps: Collection[Path]) -> Instructions:
    """The sums of callgrind's dumps, one for each thread. Raises: RuntimeError."""
    loop = threads = 0
    for dump in dumps:
        text = dump.read_text(errors="replace")
        found = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"{dump} has no sum")
        threads += int(found[1])
        if dump.name.endswith("-01"):  # the first thread: a gateway's loop runs in the main one
            loop += int(found[1])
    if not loop:
        raise RuntimeError("callgrind counted nothing of the event loop's thread")
    return Instructions(loop, threads)


async def _control(what: str, pid: int) -> None:
    control = await asyncio.create_subprocess_exec(
        *("callgrind_control", what, str(pid)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if await asyncio.wait_for(control.wait(), 60):
        raise RuntimeError("callgrind_control failed")
