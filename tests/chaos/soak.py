"""`python -m tests.chaos.soak --minutes 60`: memory, descriptors and delay over time must be flat.

One gateway process carries streams of 10 tokens/s and a trickle of short requests, some of whose
clients leave. Each event carries the time at which it was sent, so its delay is known on arrival:
that of the gateway plus that of this process, which is node and client at once. The delay of this
process alone is measured first, without the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop

from tests.bench import node_replies
from tests.bench.load import Address, Load, StampedConnection
from tests.bench.machine import waited_seconds
from tests.bench.scenarios import EMBEDDED, EMBEDDINGS, chat
from tests.bench.targets import TARGETS, running
from tests.bench.upstream import Script, Upstream
from tests.chaos.client import READS_TO_END, Client, ClientBehaviour
from tests.chaos.trend import trend
from tests.known import known

NODES, SLOTS = 20, 128  # more slots than it gets streams
BUCKET_MS = 0.25  # milliseconds to which delays are rounded up
CORE = 0  # that the gateway runs on
TOKEN_BYTES = 18  # bytes of text in one stamped token
FOREVER = 10**9
PANELS = (
    ("resident memory, MB", ("rss_mb", "text_mb")),
    ("descriptors", ("descriptors",)),
    ("delay of an event, ms", ("p50_ms", "p99_ms")),
)


class Delays(Counter[int]):
    """How many events had which age on arrival, in buckets."""

    def quantile(self, share: float) -> float:
        left = share * self.total()
        for bucket in sorted(self):
            left -= self[bucket]
            if left <= 0:
                return (bucket + 1) * BUCKET_MS
        return 0.0


@dataclass(slots=True)
class Streams:
    """Streams that run, each followed by another one."""

    load: Load

    def take(self) -> tuple[Delays, int]:
        """The delays since the last call, and the tokens that the running streams have sent."""
        delays, tokens = Delays(), 0
        for one in self.load.connections:
            assert isinstance(one, StampedConnection)
            delays.update(int(age / 1000 / BUCKET_MS) for _, age in one.ages)
            one.ages.clear()
            tokens += one.length // len(node_replies.stamped_token(0))
        return delays, tokens


@asynccontextmanager
async def streams(
    address: Address, number: int, tokens: int, ramp: float
) -> AsyncIterator[Streams]:
    """Run `number` streams at once, started over `ramp` seconds."""
    length = node_replies.stamped_length(tokens)
    load = Load(address, chat(stream=True), length, crc=True, connection=StampedConnection)
    async with load.connected(number):
        task = asyncio.create_task(load.run(FOREVER, FOREVER, spread=ramp))
        try:
            await asyncio.sleep(ramp)
            yield Streams(load)
        finally:
            task.cancel()


@dataclass(slots=True)
class ShortRequests:
    """Embeddings, each on a connection of its own; every tenth client leaves."""

    url: str
    sent: int = 0
    clients_left: int = 0
    failures: list[str] = field(default_factory=list)

    async def run(self, rate: float) -> None:
        rng = random.Random(5)
        while True:
            await asyncio.sleep(rng.expovariate(rate))
            after = rng.uniform(0, 0.002) if rng.random() < 0.1 else None
            leaves = READS_TO_END if after is None else ClientBehaviour("waiting", after)
            async with Client(self.url) as client:
                response = await client.send(EMBEDDINGS, EMBEDDED, behaviour=leaves)
            self.sent += 1
            self.clients_left += response.left
            if response.status != 200 and not response.left:
                self.failures.append(f"{response.status} {response.broke}")


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float
    rss_mb: float
    text_mb: float  # text in the transcripts, which the gateway keeps to resume streams elsewhere
    descriptors: int
    p50_ms: float
    p99_ms: float  # delays of the events since the last sample
    waited: float
    """Seconds since then in which the gateway was runnable and other work had its core."""

    @property
    def beyond_text(self) -> float:
        return self.rss_mb - self.text_mb


@dataclass(slots=True)
class Soak:
    options: argparse.Namespace
    samples: list[Sample] = field(default_factory=list)
    delays: Delays = field(default_factory=Delays)
    alone: Delays = field(default_factory=Delays)  # delays without the gateway
    rss_before_mb: float = 0.0

    async def run(self) -> int:
        options = self.options
        tokens = int(options.stream_seconds * options.rate)
        script = Script(tokens, 1 / options.rate, stamped=True)
        async with Upstream(NODES, SLOTS, script) as upstream:
            direct = "127.0.0.1", upstream.ports[0]
            ramp = max(1.0, options.streams / 500)
            async with streams(direct, options.streams, tokens, ramp) as running_ones:
                running_ones.take()
                await asyncio.sleep(options.alone)
                self.alone, _ = running_ones.take()
            with tempfile.TemporaryDirectory(prefix="soak-") as folder:
                target = TARGETS["gateway"]
                async with running(target, Path(folder), upstream.ports, CORE) as gateway:
                    process = psutil.Process(known(gateway.pid))
                    short = ShortRequests("http://{}:{}".format(*gateway.address))
                    load = await self._measure(gateway.address, process, tokens, short)
        return self._report(load, short)

    async def _measure(
        self, address: Address, process: psutil.Process, tokens: int, short: ShortRequests
    ) -> Load:
        options = self.options
        await asyncio.sleep(1.0)
        asking = asyncio.create_task(short.run(options.short))
        await asyncio.sleep(5.0)
        self.rss_before_mb = process.memory_info().rss / 1e6
        ramp = max(1.0, options.streams / 300)
        async with streams(address, options.streams, tokens, ramp) as running_ones:
            running_ones.take()
            began, waited, seconds = time.monotonic(), waited_seconds(process.pid), 0.0
            while seconds < options.minutes * 60:
                await asyncio.sleep(options.every)
                seconds = time.monotonic() - began
                delays, written = running_ones.take()
                self.delays.update(delays)
                before, waited = waited, waited_seconds(process.pid)
                rss, text = process.memory_info().rss / 1e6, TOKEN_BYTES * written / 1e6
                p50, p99 = delays.quantile(0.5), delays.quantile(0.99)
                self.samples.append(
                    Sample(seconds, rss, text, process.num_fds(), p50, p99, waited - before)
                )
                if asking.done():
                    asking.result()
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        return running_ones.load

    def _report(self, load: Load, short: ShortRequests) -> int:
        options, samples, outcome = self.options, self.samples, load.outcome
        rss = trend([(s.seconds, s.beyond_text) for s in samples])
        descriptors = trend([(s.seconds, s.descriptors) for s in samples])
        delay = trend([(s.seconds, s.p99_ms) for s in samples])

        def kb_a_stream(mb: float) -> float:
            return round(1000 * mb / int(options.streams), 1)

        longest = max(samples, key=lambda s: s.text_mb)
        beyond = max(s.beyond_text for s in samples)
        figures = {
            "minutes": options.minutes,
            "streams": options.streams,
            "tokens": self.delays.total(),
            "streams_ended": outcome.completed,
            "short_requests": short.sent,
            "clients_that_left": short.clients_left,
            "failures": outcome.errors + len(short.failures),
            "rss_before_mb": round(self.rss_before_mb, 1),
            "rss_after_mb": round(samples[-1].rss_mb, 1),
            "most_kb_of_text_per_stream": kb_a_stream(longest.text_mb),
            "kb_per_stream_then": kb_a_stream(longest.rss_mb - self.rss_before_mb),
            "most_kb_per_stream_beyond_text": kb_a_stream(beyond - self.rss_before_mb),
            "rss_mb_per_hour_beyond_it": round(rss.slope * 3600, 2),
            "descriptors_per_hour": round(descriptors.slope * 3600, 2),
            "p99_ms_per_hour": round(delay.slope * 3600, 2),
            "delay_p50_ms": self.delays.quantile(0.5),
            "delay_p99_ms": self.delays.quantile(0.99),
            "delay_p99_ms_without_gateway": self.alone.quantile(0.99),
            "others_had_its_core": round(sum(s.waited for s in samples) / options.minutes / 60, 3),
        }
        print(json.dumps(figures, indent=2))
        print(f"memory beyond the text: {rss}\ndescriptors: {descriptors}\ndelay: {delay}")
        if options.plot is not None:
            self._draw(options.plot)
        for failure in filter(None, (outcome.first_error, *short.failures[:5])):
            print(f"FAILED: {failure}")
        # The delay depends on other work on the machine.
        flat = rss.is_flat(share=0.02, least=2.0) and descriptors.is_flat(share=0.02, least=8.0)
        print("flat" if flat else "NOT FLAT")
        return 0 if flat and not figures["failures"] else 1

    def _draw(self, path: Path) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 6), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        minutes = [sample.seconds / 60 for sample in self.samples]
        panels = figure.subplots(len(PANELS), 1, sharex=True)
        for axes, (label, names) in zip(panels, PANELS, strict=True):
            for name in names:
                values = [getattr(sample, name) for sample in self.samples]
                axes.plot(minutes, values, label=name, linewidth=1.2)
            axes.set_ylabel(label, fontsize=8)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
        panels[-1].set_xlabel("minutes")
        figure.suptitle(f"{self.options.streams} streams", fontsize=9)
        figure.savefig(path)


def main() -> int:
    """Run the soak. Exit status 1 when a figure was not flat or a request failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="length of the soak")
    add("--streams", type=int, default=200, help="concurrent streams")
    add("--rate", type=float, default=10.0, help="tokens/s of each stream")
    add("--stream-seconds", type=float, default=60.0, help="seconds of each stream")
    add("--short", type=float, default=5.0, help="short requests per second")
    add("--every", type=float, default=5.0, help="seconds between samples")
    add("--alone", type=float, default=15.0, help="seconds of measurement without the gateway")
    add("--plot", type=Path, help="write a plot to this file (extra: plots)")
    return uvloop.run(Soak(parser.parse_args()).run())


if __name__ == "__main__":
    sys.exit(main())
