"""`python -m tests.chaos.slow_clients`: 10,000 slow clients cost the others nothing.

One gateway process, 10,000 clients of 200 loopback addresses that send their head, send their body
or read their stream as slowly as they can (`slow_crowd.py`), and beside them healthy clients of
other addresses, whose every request must succeed. The healthy ones are measured alone first. The
memory of the gateway must stop growing, and when the slow clients have left, its descriptors too.

Each process needs as many open files as there are clients and 2,000 more (`ulimit -Hn`); the
gateway eight for every five of `--connections`, else it lowers that limit and says so in its log.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil
import uvloop

from gateway.system import raise_open_file_limit
from tests.bench import node_replies
from tests.bench.load import Address
from tests.bench.scenarios import CHAT, EMBEDDED, EMBEDDINGS, chat_body, quantile
from tests.bench.targets import TARGETS, gateway, running
from tests.bench.upstream import Script, Upstream
from tests.chaos.client import Client, ReceivedResponse
from tests.chaos.slow_crowd import CrowdOptions, CrowdProcess, CrowdTotals
from tests.chaos.trend import trend
from tests.known import known

NODES, SLOTS = 20, 256  # slow readers keep their slots for minutes
TOKENS = 1500  # tokens of a stream: 280 kB, more than the kernel's buffers take
REQUEST_LIMIT = 30.0  # seconds after which a healthy client's request is lost
PERIOD = 0.2  # seconds from one request of a healthy client to its next
FILES_BESIDE = 2000
CORE = 0  # that the gateway runs on


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


@dataclass(frozen=True, slots=True)
class Sample:
    """The gateway's process at one moment; `slow`: slow clients that are connected."""

    seconds: float
    rss_mb: float
    descriptors: int
    slow: int


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


@dataclass(slots=True)
class SlowClients:
    options: argparse.Namespace
    alone: HealthyTotals = field(default_factory=HealthyTotals)
    beside: HealthyTotals = field(default_factory=HealthyTotals)
    samples: list[Sample] = field(default_factory=list)
    """Of the gateway before, with and after the slow clients."""
    crowd: CrowdTotals = field(default_factory=CrowdTotals)

    async def run(self) -> int:
        """Measure, and report. Exit status 1 if a healthy request was lost, or memory grows."""
        settings = {
            "queue": {"max": 10000},
            "limits": {"connections": self.options.connections},
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
        options = self.options
        totals = [HealthyTotals()]
        url = "http://{}:{}".format(*address)
        sources = [f"127.1.0.{number + 1}" for number in range(options.healthy)]
        clients = [HealthyClient(url, source=source) for source in sources]
        healthy = [asyncio.create_task(client.run(totals)) for client in clients]
        try:
            await asyncio.sleep(5.0)
            totals.append(self.alone)
            await asyncio.sleep(options.alone)
            self._sample(process, 0.0)
            totals.append(self.beside)
            crowd = CrowdProcess(
                CrowdOptions(
                    *(address, options.clients, options.addresses, options.ramp, options.pause)
                )
            )
            try:
                began, seconds = time.monotonic(), 0.0
                while seconds < options.ramp + options.minutes * 60:
                    await asyncio.sleep(options.every)
                    seconds = time.monotonic() - began
                    self.crowd = crowd.poll()
                    self._sample(process, seconds)
                    for task in healthy:
                        if task.done():
                            task.result()
            finally:
                await asyncio.to_thread(crowd.stop)
            await asyncio.sleep(options.settle)
            self._sample(process, seconds)
        finally:
            for task in healthy:
                task.cancel()
            await asyncio.gather(*healthy, return_exceptions=True)
            for client in clients:
                client.close()
            await asyncio.sleep(0)

    def _sample(self, process: psutil.Process, seconds: float) -> None:
        rss, files, slow = process.memory_info().rss / 1e6, process.num_fds(), self.crowd.open
        self.samples.append(Sample(round(seconds, 1), round(rss, 1), files, slow))
        served, lost = len(self.beside.delays), self.beside.lost.total()
        print(
            f"{seconds:>6.0f} s {slow:>6} slow {rss:>7.1f} MB {files:>6} files "
            f"{served:>7} served {lost} lost",
            flush=True,
        )

    def _report(self) -> int:
        before, *during, after = self.samples
        settled = [sample for sample in during if sample.seconds > self.options.ramp]
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
            "slow_clients": asdict(self.crowd),
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


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.slow_clients", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="after all have connected")
    add("--clients", type=int, default=10_000, help="slow clients")
    add("--addresses", type=int, default=200, help="addresses that they have")
    add("--connections", type=int, default=12_000, help="`limits.connections`")
    add("--healthy", type=int, default=20, help="healthy clients, an address each")
    add("--ramp", type=float, default=40.0, help="seconds in which they connect")
    add("--pause", type=float, default=4.0, help="seconds between two bytes")
    add("--alone", type=float, default=30.0, help="seconds without slow clients")
    add("--settle", type=float, default=10.0, help="seconds after they have left")
    add("--every", type=float, default=5.0, help="seconds between samples")
    return parser.parse_args(words)


def main() -> int:
    """Run it. Exit status 2 if this machine allows too few open files."""
    options = options_of()
    files, wanted = raise_open_file_limit(), options.clients + FILES_BESIDE
    if files < wanted:
        print(
            f"{files} open files are too few: raise the hard limit to {wanted}, or --clients less"
        )
        return 2
    return uvloop.run(SlowClients(options).run())


if __name__ == "__main__":
    sys.exit(main())
