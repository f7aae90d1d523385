"""The scenarios: the requests of each, and the figures that one measurement yields."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from zlib import crc32

from tests.bench import node_replies
from tests.bench.load import Address, ChatConnection, Load, Outcome, StampedConnection
from tests.bench.machine import cpu_seconds, resident_bytes, waited_seconds
from tests.bench.upstream import Script, Upstream
from tests.loop_watch.plugin import MOST_SECONDS, Children, table

SETTLE = 0.1
"""Seconds after the last answer in which the proxy's CPU still counts: it may log or clean up."""


@dataclass(frozen=True, slots=True)
class RunningTarget:
    """A running target and its upstream; `pid` is None for direct."""

    address: Address
    pid: int | None
    upstream: Upstream
    turns: Children | None = None  # what the watch of its event loop reports


@dataclass(slots=True)
class Measurement:
    """CPU and wall seconds; filled when the measurement ends.

    `waited` is the time for which proxy and load were runnable while other work had their cores.
    """

    proxy: float = 0.0
    load: float = 0.0
    waited: float = 0.0
    wall: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    def figures(self, units: int) -> dict[str, float]:
        """The figures; the CPU time is divided by `units`, the number of requests or chunks."""
        units = max(units, 1)
        return {
            "cpu_us": self.proxy / units * 1e6,
            "load_us": self.load / units * 1e6,
            "rate": units / self.wall,
            "proxy_busy": self.proxy / self.wall,
            "load_busy": self.load / self.wall,
            "disturbed": self.waited / self.wall,
            **self.extra,
        }


@asynccontextmanager
async def measuring(subject: RunningTarget) -> AsyncIterator[Measurement]:
    measured = Measurement()
    if subject.turns is not None:
        subject.turns.take()  # those of its start
    opened = subject.upstream.opened
    proxy = cpu_seconds(subject.pid) if subject.pid else 0.0
    waited = waited_seconds(os.getpid())  # the proxy is a child of this process
    load, wall = time.process_time(), time.perf_counter()
    yield measured
    measured.load = time.process_time() - load
    measured.wall = time.perf_counter() - wall
    measured.waited = waited_seconds(os.getpid()) - waited
    await asyncio.sleep(SETTLE)
    measured.proxy = cpu_seconds(subject.pid) - proxy if subject.pid else 0.0
    measured.extra["upstream_connections"] = subject.upstream.opened - opened
    if subject.turns is not None:
        turns = [one for one in subject.turns.take() if one.kind == "turn"]
        long = [one for one in turns if one.cpu > MOST_SECONDS]
        measured.extra["longest_turn_ms"] = 1e3 * max([one.cpu for one in turns], default=0.0)
        measured.extra["long_turns"] = len(long)
        if long:
            sys.stderr.write(table(long))


LIMIT = 120.0  # seconds after which an unfinished load is an error
BURST = 10
"""Tokens in one write at full speed; with one token each the upstream would be the bottleneck."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many requests, streams and tokens are measured."""

    requests: int = 40000
    streams: int = 100
    tokens: int = 200
    interval: float = 0.02
    repeats: int = 10  # streams that each connection receives one after the other at full speed
    rate: float = 100.0
    rate_seconds: float = 8.0
    many: tuple[int, ...] = (2000,)
    many_seconds: float = 10.0
    idle: int = 500


QUICK = Sizes(*(2000, 20, 50), repeats=4, rate_seconds=1.0, many=(100,), many_seconds=4.0, idle=50)

Result = tuple[dict[str, float], Outcome]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named measurement; `figure` names the figure that is compared."""

    name: str
    title: str
    figure: str
    run: Callable[[RunningTarget, Sizes], Awaitable[Result]]
    fits: Callable[[str], bool] = lambda _: True
    """Whether it is measured for a target, by the target's name."""
    watches_turns: bool = False  # whether the turns of the gateway's event loop are measured, too


def post(path: str, body: bytes) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: bench\r\nAccept: */*\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
EMBEDDED = {"model": node_replies.MODEL, "input": "a short text"}


def chat_body(*, stream: bool) -> dict[str, Any]:
    """A chat request of ordinary size."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant. Answer briefly."},
        {"role": "user", "content": "Name the instruments of a string quartet, one by one."},
    ]
    options = {"temperature": 0.2, "stream": stream}
    return {"model": node_replies.MODEL, "messages": messages, **options}


def chat(*, stream: bool) -> bytes:
    return post(CHAT, node_replies.compact(chat_body(stream=stream)))


def plain_load(address: Address) -> Load:
    """Embeddings: plain answers that no gateway assembles from a stream."""
    answer, body = node_replies.EMBEDDING, node_replies.compact(EMBEDDED)
    return Load(address, post(EMBEDDINGS, body), len(answer), crc32(answer))


def stream_load(address: Address, tokens: int) -> Load:
    body = node_replies.stream_body(tokens)
    return Load(address, chat(stream=True), len(body), crc32(body))


def chat_load(address: Address, tokens: int) -> Load:
    answers = type("Answers", (ChatConnection,), {"tokens": tokens})
    return Load(address, chat(stream=False), connection=answers)


async def plain(subject: RunningTarget, sizes: Sizes, *, connections: int) -> Result:
    """Small requests; each connection sends its next one after the answer."""
    async with plain_load(subject.address).connected(connections) as load:
        await load.run(sizes.requests // 10, LIMIT)
        async with measuring(subject) as measured:
            outcome = await load.run(sizes.requests, LIMIT)
    return measured.figures(outcome.completed) | _delays(outcome), outcome


async def latency(subject: RunningTarget, sizes: Sizes) -> Result:
    """Small requests at a low, constant rate: the latency of one answer."""
    async with plain_load(subject.address).connected(4) as load:
        await load.run(200, LIMIT)
        async with measuring(subject) as measured:
            outcome = await load.steady(sizes.rate, sizes.rate_seconds, LIMIT)
    return measured.figures(outcome.completed) | _delays(outcome), outcome


async def chunks(
    subject: RunningTarget, sizes: Sizes, *, full: bool, stream: bool = True
) -> Result:
    """Answers at the speed of a node or at full speed: streams, or what is assembled from them."""
    script = Script(sizes.tokens, 0.0, BURST) if full else Script(sizes.tokens, sizes.interval)
    load = (stream_load if stream else chat_load)(subject.address, sizes.tokens)
    async with load.connected(sizes.streams):
        subject.upstream.script = Script(sizes.tokens, 0.0, BURST)
        await load.run(sizes.streams, LIMIT)
        subject.upstream.script = script
        total = sizes.streams * (sizes.repeats if full else 1)
        async with measuring(subject) as measured:
            outcome = await load.run(total, LIMIT, spread=10 * script.interval)
    return measured.figures(outcome.completed * sizes.tokens), outcome


async def many_streams(subject: RunningTarget, sizes: Sizes, *, streams: int) -> Result:
    """Streams of 10 tokens/s: the age of events on arrival while all streams run."""
    interval, ramp = 0.1, max(1.0, streams / 1000)
    tokens = int((ramp + 1 + sizes.many_seconds) / interval)
    length = node_replies.stamped_length(tokens)
    load = Load(subject.address, chat(stream=True), length, True, StampedConnection)
    async with load.connected(streams):
        subject.upstream.script = Script(tokens, interval, stamped=True)
        begin = time.monotonic() + ramp + 1
        async with measuring(subject) as measured:
            outcome = await load.run(streams, LIMIT, spread=ramp)
        until = begin + sizes.many_seconds - 2 * interval
        events = [
            event
            for connection in load.connections
            if isinstance(connection, StampedConnection)
            for event in connection.ages
        ]
    if not events:
        outcome.fail("no event came")
    # After a stall of the machine all events may lie outside the measured time.
    inside = [event for event in events if begin * 1e6 <= event[0] <= until * 1e6] or events
    figures = measured.figures(outcome.completed * tokens) | {"streams": streams}
    return figures | spread_ms([age / 1e3 for _, age in inside]), outcome


async def idle_memory(subject: RunningTarget, sizes: Sizes) -> Result:
    """Memory while streams are open that send nothing after their first token."""
    count = sizes.idle
    async with stream_load(subject.address, 2).connected(count) as load:
        subject.upstream.script = Script(2, 0.0, held=True)
        running = asyncio.ensure_future(load.run(count, LIMIT, spread=1.0))
        try:
            until = time.monotonic() + LIMIT
            while (begun := sum(c.length > 0 for c in load.connections)) < count:
                if time.monotonic() > until or load.outcome.errors:
                    load.outcome.fail(f"only {begun} of {count} streams began")
                    break
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.5)
            memory = resident_bytes(subject.pid) if subject.pid else 0
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    return {"rss_mb": memory / 1e6, "streams": count}, load.outcome


def catalogue(sizes: Sizes) -> dict[str, Scenario]:
    """All scenarios by name, in the order in which they run."""
    paced = f"{sizes.streams} streams x {sizes.tokens} events, {sizes.interval * 1e3:.0f} ms apart"
    c32, c256 = partial(plain, connections=32), partial(plain, connections=256)
    at_pace, assembled = partial(chunks, full=False), partial(chunks, full=False, stream=False)
    full = partial(chunks, full=True)
    rss = f"RSS with {sizes.idle} idle streams, MB"
    scenarios = [
        Scenario("plain-c32", "plain c32, us/request", "cpu_us", c32),
        Scenario("plain-c256", "plain c256, us/request", "cpu_us", c256),
        Scenario("chunk", f"chunk ({paced}), us/chunk", "cpu_us", at_pace),
        Scenario("chunk-full", "chunk full speed, us/chunk", "cpu_us", full),
        # Peers pass plain answers on without reading tokens, so they can't be compared.
        Scenario(
            *("assembled", "assembled plain chat, us/token", "cpu_us", assembled),
            fits=lambda target: target == "gateway",
        ),
        Scenario("latency", f"median at {sizes.rate:.0f} requests/s, ms", "p50_ms", latency),
        Scenario("rss", rss, "rss_mb", idle_memory, fits=lambda target: target != "direct"),
    ]
    for count in sizes.many:
        title = f"{count} streams of 10 tokens/s: p99 delay, ms"
        run = partial(many_streams, streams=count)
        one = Scenario(f"streams-{count}", title, "p99_ms", run, watches_turns=True)
        scenarios.insert(-1, one)
    return {scenario.name: scenario for scenario in scenarios}


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of the values don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def spread_ms(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum of values in ms; empty without values."""
    if not values:
        return {}
    p99 = quantile(values, 0.99)
    return {"p50_ms": statistics.median(values), "p99_ms": p99, "max_ms": max(values)}


def _delays(outcome: Outcome) -> dict[str, float]:
    return spread_ms([seconds * 1e3 for seconds in outcome.took])
