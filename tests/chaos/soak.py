"""`python -m tests.chaos.soak --minutes 60`: memory and descriptors over time must be flat.

One gateway process carries streams of 10 tokens/s and a trickle of short requests, some of whose
clients leave.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop

from tests.bench import node_replies
from tests.bench.load import Address, Load, StampedConnection
from tests.bench.scenarios import EMBEDDED, EMBEDDINGS, chat
from tests.bench.targets import TARGETS, running
from tests.bench.upstream import Script, Upstream
from tests.chaos.client import READS_TO_END, Client, ClientBehaviour
from tests.known import known

NODES, SLOTS = 20, 128  # more slots than it gets streams
RATE = 10.0  # tokens/s of each stream
SHORT_RATE = 5.0  # short requests a second
EVERY = 5.0  # seconds between samples
CORE = 0  # that the gateway runs on
TOKEN_BYTES = 18  # bytes of text in one stamped token
FOREVER = 10**9


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through samples of (seconds, value); `is_flat` judges its growth."""

    slope: float
    """Growth of the value in a second: the Theil-Sen estimator, which ignores single spikes."""
    median: float
    seconds: float  # time that the line spans

    def is_flat(self, *, share: float, least: float) -> bool:
        """Whether it grows by at most `share` of its median, or by at most `least`."""
        return self.slope * self.seconds <= max(share * self.median, least)

    def __str__(self) -> str:
        growth = self.slope * self.seconds
        return f"{self.median:.1f}, grown by {growth:+.2f} in the last {self.seconds:.0f} s"


def trend(samples: Sequence[tuple[float, float]]) -> Trend:
    """The trend of the second half of the samples. ValueError for fewer than three."""
    settled = samples[len(samples) // 2 :]
    if len(settled) < 2:
        raise ValueError(f"{len(samples)} samples are too few for a trend")
    thin = settled[:: max(1, len(settled) // 300)]
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(thin, 2) if t > s]
    median = statistics.median(value for _, value in settled)
    return Trend(statistics.median(slopes), median, settled[-1][0] - settled[0][0])


def running_tokens(load: Load) -> int:
    """The tokens that the running streams have sent."""
    tokens = 0
    for one in load.connections:
        assert isinstance(one, StampedConnection)
        one.ages.clear()
        tokens += one.length // len(node_replies.stamped_token(0))
    return tokens


@asynccontextmanager
async def streams(address: Address, number: int, tokens: int) -> AsyncIterator[Load]:
    """Run `number` streams at once, each followed by another one; all of them have begun."""
    ramp, length = max(1.0, number / 300), node_replies.stamped_length(tokens)
    load = Load(address, chat(stream=True), length, crc=True, connection=StampedConnection)
    async with load.connected(number):
        task = asyncio.create_task(load.run(FOREVER, FOREVER, spread=ramp))
        try:
            await asyncio.sleep(ramp)
            yield load
        finally:
            task.cancel()


@dataclass(slots=True)
class ShortRequests:
    """Embeddings, each on a connection of its own; every tenth client leaves."""

    url: str
    sent: int = 0
    clients_left: int = 0
    failures: list[str] = field(default_factory=list)

    async def run(self) -> None:
        rng = random.Random(5)
        while True:
            await asyncio.sleep(rng.expovariate(SHORT_RATE))
            after = rng.uniform(0, 0.002) if rng.random() < 0.1 else None
            leaves = READS_TO_END if after is None else ClientBehaviour("waiting", after)
            async with Client(self.url) as client:
                response = await client.send(EMBEDDINGS, EMBEDDED, behaviour=leaves)
            self.sent += 1
            self.clients_left += response.left
            if response.status != 200 and not response.left:
                self.failures.append(f"{response.status} {response.broke}")


class Sample(NamedTuple):
    seconds: float
    rss_mb: float
    text_mb: float  # text in the transcripts, which the gateway keeps to resume streams elsewhere
    descriptors: int

    @property
    def beyond_text(self) -> float:
        return self.rss_mb - self.text_mb


@dataclass(slots=True)
class Soak:
    minutes: float
    streams: int
    stream_seconds: float
    samples: list[Sample] = field(default_factory=list)
    rss_before_mb: float = 0.0

    async def run(self) -> int:
        tokens = int(self.stream_seconds * RATE)
        script = Script(tokens, 1 / RATE, stamped=True)
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            async with (
                Upstream(NODES, SLOTS, script) as upstream,
                running(TARGETS["gateway"], Path(folder), upstream.ports, CORE) as gateway,
            ):
                short = ShortRequests("http://{}:{}".format(*gateway.address))
                async with asyncio.TaskGroup() as group:
                    asking = group.create_task(short.run())
                    process = psutil.Process(known(gateway.pid))
                    load = await self._measure(gateway.address, process, tokens)
                    asking.cancel()
        return self._report(load, short)

    async def _measure(self, address: Address, process: psutil.Process, tokens: int) -> Load:
        await asyncio.sleep(5.0)
        self.rss_before_mb = process.memory_info().rss / 1e6
        async with streams(address, self.streams, tokens) as load:
            began, seconds = time.monotonic(), 0.0
            while seconds < self.minutes * 60:
                await asyncio.sleep(EVERY)
                seconds = time.monotonic() - began
                rss, text = (
                    process.memory_info().rss / 1e6,
                    TOKEN_BYTES * running_tokens(load) / 1e6,
                )
                self.samples.append(Sample(seconds, rss, text, process.num_fds()))
        return load

    def _report(self, load: Load, short: ShortRequests) -> int:
        samples, outcome = self.samples, load.outcome
        rss = trend([(s.seconds, s.beyond_text) for s in samples])
        descriptors = trend([(s.seconds, s.descriptors) for s in samples])

        def kb_a_stream(mb: float) -> float:
            return round(1000 * mb / self.streams, 1)

        longest = max(samples, key=lambda s: s.text_mb)
        beyond = max(s.beyond_text for s in samples)
        figures = {
            "minutes": self.minutes,
            "streams": self.streams,
            "streams_ended": outcome.completed,
            "short_requests": short.sent,
            "clients_that_left": short.clients_left,
            "failures": outcome.errors + len(short.failures),
            "rss_before_mb": round(self.rss_before_mb, 1),
            "rss_after_mb": round(samples[-1].rss_mb, 1),
            "most_kb_of_text_per_stream": kb_a_stream(longest.text_mb),
            "kb_per_stream_then": kb_a_stream(longest.rss_mb - self.rss_before_mb),
            "most_kb_per_stream_beyond_text": kb_a_stream(beyond - self.rss_before_mb),
        }
        print(json.dumps(figures, indent=2))
        print(f"memory beyond the text: {rss}\ndescriptors: {descriptors}")
        for failure in filter(None, (outcome.first_error, *short.failures[:5])):
            print(f"FAILED: {failure}")
        flat = rss.is_flat(share=0.02, least=2.0) and descriptors.is_flat(share=0.02, least=8.0)
        print("flat" if flat else "NOT FLAT")
        return 0 if flat and not figures["failures"] else 1


def main() -> int:
    """Run the soak. Exit status 1 when a figure was not flat or a request failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="length of the soak")
    add("--streams", type=int, default=200, help="concurrent streams")
    add("--stream-seconds", type=float, default=60.0, help="seconds of each stream")
    return uvloop.run(Soak(**vars(parser.parse_args())).run())


if __name__ == "__main__":
    sys.exit(main())
