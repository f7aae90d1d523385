"""`python -m tests.chaos.slow_clients`: 10,000 slow clients cost the others nothing.

One gateway process, 10,000 clients of 200 loopback addresses that send their head, send their body
or read their stream as slowly as they can and come back as soon as they are disconnected, and
beside them healthy clients of other addresses, whose every request must succeed. The healthy ones
are measured alone first. The memory of the gateway must stop growing, and when the slow clients
have left, its descriptors too.

Each process needs as many open files as there are clients and 2,000 more (`ulimit -Hn`); the
gateway eight for every five of `--connections`, else it lowers that limit and says so in its log.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop

from gateway.system import raise_open_file_limit
from tests.bench import node_replies
from tests.bench.load import Address
from tests.bench.scenarios import CHAT, EMBEDDED, EMBEDDINGS, chat, chat_body, post, quantile
from tests.bench.targets import TARGETS, gateway, running
from tests.bench.upstream import Script, Upstream
from tests.chaos.client import Client, ReceivedResponse
from tests.chaos.trend import trend
from tests.known import known

NODES, SLOTS = 20, 256  # slow readers keep their slots for minutes
TOKENS = 1500  # tokens of a stream: 280 kB, more than the kernel's buffers take
REQUEST_LIMIT = 30.0  # seconds after which a healthy client's request is lost
PERIOD = 0.2  # seconds from one request of a healthy client to its next
FILES_BESIDE = 2000
CORE = 0  # that the gateway runs on
KINDS = ("head", "body", "read")  # what a slow client is slow in
BODY_BYTES, BODY_STEP = 1_000_000, 100
READ_STEP = 4096  # bytes
BACK_AFTER = 1.0  # seconds until a client that was disconnected or refused connects again


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many clients, how slow they are, and for how long. Times in seconds."""

    minutes: float = 5.0  # after all have connected
    clients: int = 10_000  # slow ones
    connections: int = 12_000  # `limits.connections`
    addresses: int = 200  # that the slow ones have
    healthy: int = 20  # clients, an address each
    ramp: float = 40.0  # in which the slow ones connect
    pause: float = 4.0  # between two bytes
    alone: float = 30.0  # without slow clients
    settle: float = 10.0  # after they have left
    every: float = 5.0  # between samples


def _source(number: int) -> str:
    """A loopback address for a slow client: 127.0.0.2, 127.0.0.3 and so on."""
    number += 2
    return f"127.0.{number // 250}.{number % 250 + (number >= 250)}"


class Crowd:
    """The slow clients, in a process of their own, so that their work delays no other client."""

    def __init__(self, url: str, plan: Plan) -> None:
        self._url, self._plan = url, plan
        self._rng = random.Random(7)
        self.totals: Counter[str] = Counter()
        """Connections that are `open`, were `connected` and were `not connected`, the `bytes`
        that were read, and responses by kind and status, as `head 408`."""

    async def client(self, number: int) -> None:
        """One client, which always comes back."""
        kind = KINDS[number % len(KINDS)]
        source = _source(number // len(KINDS) % self._plan.addresses)
        await asyncio.sleep(self._plan.ramp * number / self._plan.clients)
        while True:
            async with Client(self._url, slow=kind == "read", source=source) as connecting:
                try:
                    async with asyncio.timeout(30):
                        reader, writer = await connecting.connected()
                    self.totals.update(("connected", "open"))
                except OSError:
                    self.totals["not connected"] += 1
                else:
                    with suppress(OSError):
                        await self._be_slow(reader, writer, kind)
                    self.totals["open"] -= 1
            await asyncio.sleep(BACK_AFTER * self._rng.uniform(0.5, 1.5))

    async def _be_slow(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str
    ) -> None:
        """Send or read a little at a time, until the connection ends."""
        begun = False
        for piece in _pieces(kind):
            writer.write(piece)
            pause = self._plan.pause * self._rng.uniform(0.5, 1.5)
            data = b""
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    if not (data := await reader.read(READ_STEP)):
                        return
                    if kind == "read":
                        await asyncio.sleep(pause)
            self.totals["bytes"] += len(data)
            if data and not begun:
                begun = True
                self.totals[f"{kind} {data[9:12].decode('latin-1')}"] += 1

    async def run(self, pipe: Connection) -> None:
        """Tell the totals each second, until the other end sends something."""
        _clients = [asyncio.create_task(self.client(n)) for n in range(self._plan.clients)]
        while not pipe.poll():
            pipe.send(self.totals)
            await asyncio.sleep(1.0)


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


def _run_crowd(url: str, plan: Plan, pipe: Connection) -> None:
    raise_open_file_limit()
    uvloop.run(Crowd(url, plan).run(pipe))


@asynccontextmanager
async def _crowd(url: str, plan: Plan) -> AsyncIterator[Connection]:
    """Slow clients at work, and what tells their totals."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_run_crowd, args=(url, plan, other), daemon=True)
    process.start()
    other.close()
    try:
        yield pipe
    finally:
        with suppress(OSError):
            pipe.send("stop")
        await asyncio.to_thread(process.join, 30)
        process.kill()
        process.join()


@dataclass(slots=True)
class HealthyTotals:
    delays: list[float] = field(default_factory=list)
    """Milliseconds of each request, from the connection's beginning if it is new."""
    streams: int = 0  # how many of them were streams, read to their end
    lost: Counter[str] = field(default_factory=Counter)
    """Requests without the right response, by what came instead."""

    def figures(self) -> dict[str, object]:
        lost, delays = self.lost.total(), self.delays or [0.0]
        shares = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99, "max_ms": 1.0}
        counts = {"requests": len(self.delays) + lost, "streams": self.streams, "lost": lost}
        return counts | {name: round(quantile(delays, share), 1) for name, share in shares.items()}


class HealthyClient(Client):
    """Sends requests at a steady rate: most on a kept connection, every tenth on a new one."""

    async def run(self, totals: list[HealthyTotals]) -> None:
        """Send requests until it is cancelled; `totals[-1]` counts them."""
        for number in itertools.count(1):
            began, counting, stream = time.monotonic(), totals[-1], number % 20 == 0
            if number % 10 == 5:
                self.close()
            try:
                path, body = (CHAT, chat_body(stream=True)) if stream else (EMBEDDINGS, EMBEDDED)
                response = await self.send(path, body, limit=REQUEST_LIMIT)
                problem = _problem(response, stream=stream)
            except TimeoutError:
                problem = "no end"
            if problem:
                counting.lost[problem] += 1
                self.close()
            else:
                counting.delays.append(1000 * (time.monotonic() - began))
                counting.streams += stream
            await asyncio.sleep(max(0.0, began + PERIOD - time.monotonic()))


def _problem(response: ReceivedResponse, *, stream: bool) -> str:
    """What is wrong with a response, or nothing."""
    body = bytes(response.body)
    if response.status != 200 or response.broke:
        return f"{response.status} {response.broke}"
    if stream:
        return "" if body.count(b'"content":') >= TOKENS and b"[DONE]" in body else "cut stream"
    return "" if body == node_replies.EMBEDDING else "wrong body"


class Sample(NamedTuple):
    """The gateway's process at one moment; `slow`: slow clients that are connected."""

    seconds: float
    rss_mb: float
    descriptors: int
    slow: int


@dataclass(slots=True)
class SlowClients:
    plan: Plan
    alone: HealthyTotals = field(default_factory=HealthyTotals)
    beside: HealthyTotals = field(default_factory=HealthyTotals)
    samples: list[Sample] = field(default_factory=list)
    """Of the gateway before, with and after the slow clients."""
    crowd: Counter[str] = field(default_factory=Counter)
    """The totals of the crowd."""

    async def run(self) -> int:
        """Measure, and report. Exit status 1 if a healthy request was lost, or memory grows."""
        settings = {
            "queue": {"max": 10000},
            "limits": {"connections": self.plan.connections},
            "logging": {"access": False, "level": "warning"},
        }
        target = replace(
            TARGETS["gateway"], command=lambda binary, plan: gateway(binary, plan, settings)
        )
        async with Upstream(NODES, SLOTS, Script(TOKENS, 0.0, burst=50)) as upstream:
            with tempfile.TemporaryDirectory(prefix="slow-clients-") as name:
                async with running(target, Path(name), upstream.ports, CORE) as begun:
                    await self._measure(begun.address, psutil.Process(known(begun.pid)))
                log = (Path(name) / "gateway.log").read_text(errors="replace")
        assert "Traceback" not in log, log[-4000:]
        print(*(line for line in log.splitlines() if "fewer connections" in line), sep="\n")
        return self._report()

    async def _measure(self, address: Address, process: psutil.Process) -> None:
        plan, totals = self.plan, [HealthyTotals()]
        url = "http://{}:{}".format(*address)
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            clients = [HealthyClient(url, source=f"127.1.0.{n + 1}") for n in range(plan.healthy)]
            for client in clients:
                await stack.enter_async_context(client)
            healthy = [group.create_task(client.run(totals)) for client in clients]
            await asyncio.sleep(5.0)
            totals.append(self.alone)
            await asyncio.sleep(plan.alone)
            self._sample(process, 0.0)
            totals.append(self.beside)
            async with _crowd(url, plan) as pipe:
                began, seconds = time.monotonic(), 0.0
                while seconds < plan.ramp + plan.minutes * 60:
                    await asyncio.sleep(plan.every)
                    seconds = time.monotonic() - began
                    while pipe.poll():
                        self.crowd = pipe.recv()
                    self._sample(process, seconds)
            await asyncio.sleep(plan.settle)
            self._sample(process, seconds)
            for task in healthy:
                task.cancel()

    def _sample(self, process: psutil.Process, seconds: float) -> None:
        rss, files, slow = process.memory_info().rss / 1e6, process.num_fds(), self.crowd["open"]
        self.samples.append(Sample(round(seconds, 1), round(rss, 1), files, slow))
        served, lost = len(self.beside.delays), self.beside.lost.total()
        print(
            f"{seconds:>6.0f} s {slow:>6} slow {rss:>7.1f} MB {files:>6} files "
            f"{served:>7} served {lost} lost",
            flush=True,
        )

    def _report(self) -> int:
        before, *during, after = self.samples
        settled = [sample for sample in during if sample.seconds > self.plan.ramp]
        rss = trend([(sample.seconds, sample.rss_mb) for sample in settled])
        most = max(sample.rss_mb for sample in settled)
        slow = statistics.median(sample.slow for sample in settled)
        files = {"before": before.descriptors, "after": after.descriptors}
        figures = {
            "healthy_alone": self.alone.figures(),
            "healthy_beside_slow": self.beside.figures(),
            "lost": dict(self.beside.lost),
            "slow_connected_median": slow,
            "rss_mb": {"before": before.rss_mb, "most": most, "after": after.rss_mb},
            "kb_per_slow_client": round(1000 * (most - before.rss_mb) / max(1.0, slow), 1),
            "descriptors": files | {"most": max(sample.descriptors for sample in settled)},
            "slow_clients": self.crowd,
        }
        print(json.dumps(figures, indent=2))
        print(f"memory: {rss}")
        checks = {
            "healthy requests were lost": self.alone.lost or self.beside.lost,
            "memory grows": not rss.is_flat(share=0.05, least=10.0),
            "descriptors stay open": after.descriptors > before.descriptors + 50,
        }
        problems = [text for text, wrong in checks.items() if wrong]
        print("\n".join(f"FAILED: {problem}" for problem in problems) or "ok")
        return int(bool(problems))


def main() -> int:
    """Run it. Exit status 2 if this machine allows too few open files."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.slow_clients", description=__doc__)
    add, usual = parser.add_argument, Plan()
    add("--minutes", type=float, default=usual.minutes, help="after all have connected")
    add("--clients", type=int, default=usual.clients, help="slow clients")
    add("--connections", type=int, default=usual.connections, help="`limits.connections`")
    plan = Plan(**vars(parser.parse_args()))
    files, wanted = raise_open_file_limit(), plan.clients + FILES_BESIDE
    if files < wanted:
        print(
            f"{files} open files are too few: raise the hard limit to {wanted}, or --clients less"
        )
        return 2
    return uvloop.run(SlowClients(plan).run())


if __name__ == "__main__":
    sys.exit(main())
