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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop

from tests.bench import node_replies
from tests.bench.load import Address, LoadConnection
from tests.bench.machine import waited_seconds
from tests.bench.scenarios import chat, post
from tests.bench.targets import TARGETS, running
from tests.bench.upstream import Script, Upstream
from tests.chaos.trend import Trend, trend
from tests.known import known

NODES = 20
SLOTS = 128
"""Slots of each node: more than it gets streams."""
BUCKET_MS = 0.25
"""Milliseconds that one bucket of the histogram spans."""
BUCKETS = 20_000
"""Buckets of the histogram; a longer delay counts in the last one."""
CORE = 0  # that the gateway runs on
TOKEN_BYTES = 18
"""Bytes of text in one stamped token."""


@dataclass(slots=True)
class Delays:
    """A histogram of the events' age on arrival."""

    counts: list[int] = field(default_factory=lambda: [0] * (BUCKETS + 1))
    count: int = 0

    def add_delay(self, microseconds: int) -> None:
        self.counts[min(BUCKETS, int(microseconds / (BUCKET_MS * 1000)))] += 1
        self.count += 1

    def quantile(self, share: float) -> float:
        """The quantile in milliseconds, rounded up to a bucket."""
        left = share * self.count
        for step, count in enumerate(self.counts):
            left -= count
            if left <= 0:
                return (step + 1) * BUCKET_MS
        return BUCKETS * BUCKET_MS

    def add(self, other: Delays) -> None:
        for step, count in enumerate(other.counts):
            self.counts[step] += count
        self.count += other.count


@dataclass(slots=True)
class ClientTotals:
    """Totals over all clients."""

    delays: Delays = field(default_factory=Delays)
    streams: int = 0
    tokens: int = 0
    """Tokens of the streams that have ended."""
    ended: int = 0
    short: int = 0
    clients_left: int = 0
    failures: list[str] = field(default_factory=list)


class StreamClient(LoadConnection):
    """One connection that requests one stream after the other."""

    def __init__(self, tally: ClientTotals, request: bytes) -> None:
        super().__init__(self._finish, 0, 0)
        self._tally = tally
        self._request = request
        self._rest = b""
        self._done = False
        """Whether `[DONE]` has come."""
        self.tokens = 0
        """Tokens of the stream that runs."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(self._request)

    def on_headers_complete(self) -> None:
        self._tally.streams += 1

    def on_body(self, body: bytes) -> None:
        now = time.monotonic_ns() // 1000
        self.length += len(body)
        events, _, self._rest = (self._rest + body).rpartition(b"\n\n")
        for sent in node_replies.stamps(events):
            self._tally.delays.add_delay(now - sent)
            self.tokens += 1
        self._done = events.endswith(b"data: [DONE]") and not self._rest
        if b'"error"' in events:
            self._end(events[-300:].decode(errors="replace"))

    def problem(self) -> str:
        status = self.parser.get_status_code()
        if status == 200 and self._done:
            return ""
        return f"status {status}, without its end: {self._rest[-200:]!r}"

    def close(self) -> None:
        self.busy = False
        self.abort()

    def _finish(self, _: LoadConnection, problem: str) -> None:
        tally = self._tally
        if problem:
            tally.failures.append(problem)
            self.close()
            return
        tally.ended += 1
        tally.streams -= 1
        tally.tokens += self.tokens
        self.tokens, self._done = 0, False
        self.send(self._request)


async def short_requests(address: Address, tally: ClientTotals, rate: float) -> None:
    """Embeddings, `rate` a second, each on a connection of its own; every tenth client leaves."""
    rng = random.Random(5)
    request = post(
        "/v1/embeddings", node_replies.compact({"model": node_replies.MODEL, "input": "a text"})
    )
    while True:
        await asyncio.sleep(rng.expovariate(rate))
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request)
        if rng.random() < 0.1:
            await asyncio.sleep(rng.uniform(0, 0.002))
            tally.clients_left += 1
        else:
            line = await reader.readline()
            tally.short += 1
            if b" 200 " not in line:
                tally.failures.append(line.decode(errors="replace"))
        writer.transport.abort()


@asynccontextmanager
async def streams(
    address: Address, tally: ClientTotals, number: int, ramp: float
) -> AsyncIterator[list[StreamClient]]:
    """Run `number` streams at once, started over `ramp` seconds."""
    loop = asyncio.get_running_loop()
    request = chat(stream=True)
    clients: list[StreamClient] = []

    async def one(delay: float) -> None:
        await asyncio.sleep(delay)
        _, client = await loop.create_connection(lambda: StreamClient(tally, request), *address)
        clients.append(client)

    await asyncio.gather(*(one(ramp * i / number) for i in range(number)))
    try:
        yield clients
    finally:
        for client in clients:
            client.close()
        await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the gateway's process."""

    seconds: float
    rss: int
    descriptors: int
    streams: int
    text: int
    """Bytes of text in the transcripts, which the gateway keeps to resume streams elsewhere."""
    p50: float
    p99: float
    """Delays of the events since the last sample, in milliseconds."""
    waited: float
    """Seconds since then in which the gateway was runnable and other work had its core."""

    @property
    def rss_beyond_text(self) -> int:
        """Resident bytes without those of the text."""
        return self.rss - self.text


@dataclass(slots=True)
class Soak:
    """One soak: its options and its measurements."""

    options: argparse.Namespace
    tally: ClientTotals = field(default_factory=ClientTotals)
    samples: list[Sample] = field(default_factory=list)
    all_delays: Delays = field(default_factory=Delays)
    delays_without_gateway: Delays = field(default_factory=Delays)
    rss_before: int = 0
    """Resident bytes before the first stream."""
    tokens: int = 0

    async def run(self) -> int:
        options = self.options
        tokens = int(options.stream_seconds * options.rate)
        script = Script(tokens, 1 / options.rate, stamped=True)
        async with Upstream(NODES, SLOTS, script) as upstream:
            await self._measure_without_gateway(("127.0.0.1", upstream.ports[0]))
            with tempfile.TemporaryDirectory(prefix="soak-") as folder:
                async with running(
                    TARGETS["gateway"], Path(folder), upstream.ports, CORE
                ) as gateway:
                    process = psutil.Process(known(gateway.pid))
                    await self._measure_through_gateway(gateway.address, process)
        return self._report()

    async def _measure_without_gateway(self, address: Address) -> None:
        """Measure the same streams without the gateway for `--alone` seconds."""
        tally = ClientTotals(delays=self.delays_without_gateway)
        number = self.options.streams
        async with streams(address, tally, number, max(1.0, number / 500)):
            self.delays_without_gateway = tally.delays = Delays()
            await asyncio.sleep(self.options.alone)

    async def _measure_through_gateway(self, address: Address, process: psutil.Process) -> None:
        options, tally = self.options, self.tally
        await asyncio.sleep(1.0)
        short = asyncio.create_task(short_requests(address, tally, options.short))
        await asyncio.sleep(5.0)
        self.rss_before = process.memory_info().rss
        ramp = max(1.0, options.streams / 300)
        async with streams(address, tally, options.streams, ramp) as clients:
            tally.delays = Delays()
            began = time.monotonic()
            waited = waited_seconds(process.pid)
            seconds = 0.0
            while seconds < options.minutes * 60:
                await asyncio.sleep(options.every)
                seconds = time.monotonic() - began
                delays, tally.delays = tally.delays, Delays()
                self.all_delays.add(delays)
                waited_now = waited_seconds(process.pid)
                self.samples.append(
                    Sample(
                        seconds,
                        process.memory_info().rss,
                        process.num_fds(),
                        tally.streams,
                        TOKEN_BYTES * sum(client.tokens for client in clients),
                        delays.quantile(0.5),
                        delays.quantile(0.99),
                        waited_now - waited,
                    )
                )
                waited = waited_now
                self.tokens = tally.tokens + sum(client.tokens for client in clients)
                if short.done():
                    short.result()
        short.cancel()
        await asyncio.gather(short, return_exceptions=True)

    def _report(self) -> int:
        options, tally, samples = self.options, self.tally, self.samples
        rss = trend([(s.seconds, s.rss_beyond_text / 1e6) for s in samples])
        descriptors = trend([(s.seconds, s.descriptors) for s in samples])
        delay = trend([(s.seconds, s.p99) for s in samples])
        seconds, last = options.minutes * 60, samples[-1]
        longest = max(samples, key=lambda s: s.text)
        most_beyond_text = max(s.rss_beyond_text for s in samples) - self.rss_before
        figures = {
            "minutes": options.minutes,
            "streams": options.streams,
            "tokens": self.tokens,
            "streams_ended": tally.ended,
            "short_requests": tally.short,
            "clients_that_left": tally.clients_left,
            "failures": len(tally.failures),
            "rss_before_mb": round(self.rss_before / 1e6, 1),
            "rss_after_mb": round(last.rss / 1e6, 1),
            "most_kb_of_text_per_stream": round(longest.text / options.streams / 1e3, 1),
            "kb_per_stream_then": round((longest.rss - self.rss_before) / options.streams / 1e3, 1),
            "most_kb_per_stream_beyond_text": round(most_beyond_text / options.streams / 1e3, 1),
            "rss_mb_per_hour_beyond_it": round(rss.slope * 3600, 2),
            "descriptors_per_hour": round(descriptors.slope * 3600, 2),
            "p99_ms_per_hour": round(delay.slope * 3600, 2),
            "delay_p50_ms": self.all_delays.quantile(0.5),
            "delay_p99_ms": self.all_delays.quantile(0.99),
            "delay_p99_ms_without_gateway": self.delays_without_gateway.quantile(0.99),
            "others_had_its_core": round(sum(s.waited for s in samples) / seconds, 3),
        }
        print(json.dumps(figures, indent=2))
        verdicts = {"memory beyond the text": rss, "descriptors": descriptors, "delay": delay}
        for label, measured in verdicts.items():
            print(f"{label}: {measured}")
        if options.plot is not None:
            from tests.chaos.soak_plot import draw_soak

            draw_soak(options.plot, [_row(s) for s in samples], f"{options.streams} streams")
        for failure in tally.failures[:5]:
            print(f"FAILED: {failure}")
        flat = _is_flat(rss, descriptors)
        print("flat" if flat else "NOT FLAT")
        return 0 if flat and not tally.failures else 1


def _is_flat(rss: Trend, descriptors: Trend) -> bool:
    """Whether memory and descriptors are flat; the delay depends on other work on the machine."""
    return rss.is_flat(share=0.02, least=2.0) and descriptors.is_flat(share=0.02, least=8.0)


def _row(sample: Sample) -> dict[str, float]:
    return {
        "seconds": sample.seconds,
        "rss_mb": sample.rss / 1e6,
        "text_mb": sample.text / 1e6,
        "descriptors": sample.descriptors,
        "streams": sample.streams,
        "p50_ms": sample.p50,
        "p99_ms": sample.p99,
        "waited": sample.waited,
    }


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the soak")
    parser.add_argument("--streams", type=int, default=200, help="concurrent streams")
    parser.add_argument("--rate", type=float, default=10.0, help="tokens/s of each stream")
    parser.add_argument("--stream-seconds", type=float, default=60.0, help="seconds of each stream")
    parser.add_argument("--short", type=float, default=5.0, help="short requests per second")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument(
        "--alone", type=float, default=15.0, help="seconds of measurement without the gateway"
    )
    parser.add_argument("--plot", type=Path, help="write a plot to this file (extra: plots)")
    return parser


def main() -> int:
    """Run the soak. Exit status 1 when a figure was not flat or a request failed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Soak(_options().parse_args()).run())


if __name__ == "__main__":
    sys.exit(main())
