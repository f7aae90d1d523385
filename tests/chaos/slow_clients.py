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
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil
import uvloop

from gateway.system import raise_open_file_limit
from tests.bench import node_replies
from tests.bench.load import Address
from tests.bench.scenarios import chat, post
from tests.bench.targets import TARGETS, Plan, running
from tests.bench.upstream import Script, Upstream
from tests.chaos.slow_crowd import CrowdOptions, CrowdProcess
from tests.chaos.trend import trend

NODES = 20
SLOTS = 256
"""Slots of each node: slow readers keep theirs for minutes."""
TOKENS = 1500
"""Tokens of a stream: 280 kB, more than the kernel's buffers take."""
REQUEST_LIMIT = 30.0
"""Seconds after which a healthy client's request is lost."""
FILES_BESIDE = 2000
CORE = 0  # that the gateway runs on


@dataclass(slots=True)
class HealthyTotals:
    """What the healthy clients have seen in one phase."""

    delays: list[float] = field(default_factory=list)
    """Seconds of each request, from the connection's beginning if it is new."""
    streams: int = 0
    """How many of them were streams, read to their end."""
    lost: Counter[str] = field(default_factory=Counter)
    """Requests without the right response, by what came instead."""

    def figures(self) -> dict[str, object]:
        """The totals, in milliseconds."""
        delays = sorted(self.delays) or [0.0]
        cuts = statistics.quantiles(delays, n=1000) if len(delays) > 1 else delays * 999
        return {
            "requests": len(self.delays) + self.lost.total(),
            "streams": self.streams,
            "lost": self.lost.total(),
            "p50_ms": round(1000 * cuts[499], 1),
            "p95_ms": round(1000 * cuts[949], 1),
            "p99_ms": round(1000 * cuts[989], 1),
            "max_ms": round(1000 * delays[-1], 1),
        }


@dataclass(frozen=True, slots=True)
class Sample:
    """The gateway's process at one moment."""

    seconds: float
    rss_mb: float
    descriptors: int
    slow: int
    """Slow clients that are connected."""


class HealthyClient:
    """Sends requests at a steady rate: most on a kept connection, every tenth on a new one."""

    def __init__(self, source: str, address: Address) -> None:
        self._source = source
        self._address = address
        self._kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, totals: list[HealthyTotals], pause: float) -> None:
        """Send requests until it is cancelled; `totals[-1]` counts them."""
        number = 0
        while True:
            number += 1
            began = time.monotonic()
            counting = totals[-1]
            is_stream = number % 20 == 0
            try:
                async with asyncio.timeout(REQUEST_LIMIT):
                    problem = await self._request(stream=is_stream, new=number % 10 == 5)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
                problem = type(error).__name__
            if problem:
                counting.lost[problem] += 1
                self.close()
            else:
                counting.delays.append(time.monotonic() - began)
                counting.streams += is_stream
            await asyncio.sleep(max(0.0, began + pause - time.monotonic()))

    async def _request(self, *, stream: bool, new: bool) -> str:
        """Send one request; what is wrong with its response, or nothing."""
        if new:
            self.close()
        if self._kept is None:
            self._kept = await asyncio.open_connection(
                *self._address, local_addr=(self._source, 0), limit=1 << 20
            )
        reader, writer = self._kept
        writer.write(chat(stream=True) if stream else _EMBEDDING)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        if not head.startswith("HTTP/1.1 200 "):
            return head.partition("\r\n")[0]
        if stream:
            body = await reader.readuntil(b"\r\n0\r\n\r\n")
            return "" if body.count(b'"content":') >= TOKENS and b"[DONE]" in body else "cut stream"
        length = head.lower().partition("content-length:")[2].partition("\r\n")[0]
        body = await reader.readexactly(int(length))
        return "" if body == node_replies.EMBEDDING else "wrong body"

    def close(self) -> None:
        """Close the kept connection."""
        if self._kept is not None:
            self._kept[1].transport.abort()
            self._kept = None


_EMBEDDING = post(
    "/v1/embeddings", node_replies.compact({"model": node_replies.MODEL, "input": "a short text"})
)


@dataclass(slots=True)
class SlowClients:
    """One run: its options and its measurements."""

    options: argparse.Namespace
    alone: HealthyTotals = field(default_factory=HealthyTotals)
    beside: HealthyTotals = field(default_factory=HealthyTotals)
    samples: list[Sample] = field(default_factory=list)
    before: Sample | None = None
    after: Sample | None = None
    crowd: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    async def run(self) -> int:
        """Measure, and report. Exit status 1 if a healthy request was lost, or memory grows."""
        script = Script(TOKENS, 0.0, burst=50)
        async with Upstream(NODES, SLOTS, script) as upstream:
            with tempfile.TemporaryDirectory(prefix="slow-clients-") as name:
                folder = Path(name)
                target = replace(TARGETS["gateway"], command=self._command)
                async with running(target, folder, upstream.ports, CORE) as gateway:
                    assert gateway.pid is not None
                    await self._measure(gateway.address, psutil.Process(gateway.pid))
                log = (folder / "gateway.log").read_text(errors="replace")
                self.warnings = [line for line in log.splitlines() if "fewer connections" in line]
                assert "Traceback" not in log, log[-4000:]
        return self._report()

    def _command(self, binary: str, plan: Plan) -> list[str]:
        command = TARGETS["gateway"].command(binary, plan)
        settings = {
            "queue": {"max": 10000},
            "limits": {"connections": self.options.connections},
            "logging": {"access": False, "level": "warning"},
        }
        (plan.folder / "gateway.yaml").write_text(json.dumps(settings))
        return command

    async def _measure(self, address: Address, process: psutil.Process) -> None:
        options = self.options
        totals = [HealthyTotals()]
        clients = [HealthyClient(f"127.1.0.{n + 1}", address) for n in range(options.healthy)]
        healthy = [asyncio.create_task(client.run(totals, 0.2)) for client in clients]
        try:
            await asyncio.sleep(5.0)
            totals.append(self.alone)
            await asyncio.sleep(options.alone)
            self.before = self._sample(process, 0.0, 0)
            totals.append(self.beside)
            crowd = CrowdProcess(
                CrowdOptions(
                    address, options.clients, options.addresses, options.ramp, options.pause
                )
            )
            try:
                began = time.monotonic()
                seconds = 0.0
                while seconds < options.ramp + options.minutes * 60:
                    await asyncio.sleep(options.every)
                    seconds = time.monotonic() - began
                    slow = crowd.poll()
                    sample = self._sample(process, seconds, sum(slow.open.values()))
                    if seconds > options.ramp:
                        self.samples.append(sample)
                    print(_line(sample, self.beside), flush=True)
                    _raise_failure(healthy)
                self.crowd = asdict(crowd.totals)
            finally:
                await asyncio.to_thread(crowd.stop)
            await asyncio.sleep(options.settle)
            self.after = self._sample(process, seconds, 0)
        finally:
            for task in healthy:
                task.cancel()
            await asyncio.gather(*healthy, return_exceptions=True)
            for client in clients:
                client.close()
            await asyncio.sleep(0)

    def _sample(self, process: psutil.Process, seconds: float, slow: int) -> Sample:
        rss = process.memory_info().rss / 1e6
        return Sample(round(seconds, 1), round(rss, 1), process.num_fds(), slow)

    def _report(self) -> int:
        assert self.before is not None
        assert self.after is not None
        rss = trend([(sample.seconds, sample.rss_mb) for sample in self.samples])
        most = max(sample.rss_mb for sample in self.samples)
        slow = statistics.median(sample.slow for sample in self.samples)
        figures = {
            "healthy_alone": self.alone.figures(),
            "healthy_beside_slow": self.beside.figures(),
            "lost": dict(self.beside.lost),
            "slow_connected_median": slow,
            "rss_mb": {"before": self.before.rss_mb, "most": most, "after": self.after.rss_mb},
            "kb_per_slow_client": round(1000 * (most - self.before.rss_mb) / max(1.0, slow), 1),
            "descriptors": {
                "before": self.before.descriptors,
                "most": max(sample.descriptors for sample in self.samples),
                "after": self.after.descriptors,
            },
            "slow_clients": self.crowd,
        }
        print(json.dumps(figures, indent=2))
        print(f"memory: {rss}", *self.warnings, sep="\n")
        problems = [
            text
            for text, wrong in (
                ("healthy requests were lost", self.alone.lost or self.beside.lost),
                ("memory grows", not rss.is_flat(share=0.05, least=10.0)),
                ("descriptors stay open", self.after.descriptors > self.before.descriptors + 50),
            )
            if wrong
        ]
        print("\n".join(f"FAILED: {problem}" for problem in problems) or "ok")
        return int(bool(problems))


def _line(sample: Sample, healthy: HealthyTotals) -> str:
    return (
        f"{sample.seconds:>6.0f} s {sample.slow:>6} slow {sample.rss_mb:>7.1f} MB "
        f"{sample.descriptors:>6} files {len(healthy.delays):>7} served {healthy.lost.total()} lost"
    )


def _raise_failure(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def options_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.slow_clients", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="after all have connected")
    parser.add_argument("--clients", type=int, default=10_000, help="slow clients")
    parser.add_argument("--addresses", type=int, default=200, help="addresses that they have")
    parser.add_argument("--connections", type=int, default=12_000, help="`limits.connections`")
    parser.add_argument("--healthy", type=int, default=20, help="healthy clients, an address each")
    parser.add_argument("--ramp", type=float, default=40.0, help="seconds in which they connect")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between two bytes")
    parser.add_argument("--alone", type=float, default=30.0, help="seconds without slow clients")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds after they have left")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    return parser


def main() -> int:
    """Run it. Exit status 2 if this machine allows too few open files."""
    options = options_parser().parse_args()
    files = raise_open_file_limit()
    if files < options.clients + FILES_BESIDE:
        wanted = options.clients + FILES_BESIDE
        print(
            f"{files} open files are too few: raise the hard limit to {wanted}, or --clients less"
        )
        return 2
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(SlowClients(options).run())


if __name__ == "__main__":
    sys.exit(main())
