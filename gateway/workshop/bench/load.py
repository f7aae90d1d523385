"""Loads, and what puts them on a server, one after the other.

In the closed loop a fixed number of requests is under way: a slow answer delays the next request of
its worker, so the load falls as the server slows, and latencies are those of so many patient
clients. In the open loop requests start at times that do not depend on the server, and latencies
count from those times, even where this program itself sends late (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from gateway.workshop.bench.exchange import Endpoint, PromptWriter, RequestResult, RequestSender
from gateway.workshop.simulate.report import Percentiles
from gateway.workshop.simulate.simulation import Job, Trace, TracePrompt

if TYPE_CHECKING:
    from gateway.local.energy import EnergyMeter

MOST_LOADS = 32  # loads of one run
MOST_CONCURRENCY = 4096
MOST_RATE = 10_000.0  # requests per second
# Requests of one load: each one's times stay in memory until the report is written.
MOST_REQUESTS = 200_000
# Requests of a closed loop where neither number nor duration is given; at least.
LEAST_REQUESTS = 10
REQUESTS_PER_WORKER = 4  # likewise, for each of the requests that are under way at a time
OPEN_SECONDS = 60.0  # duration of an open loop where neither number nor duration is given


class Loop(StrEnum):
    """When the next request starts."""

    CLOSED = "closed"  # when an earlier one has ended: a fixed number is under way
    POISSON = "poisson"  # at random times of a mean rate, whether earlier ones have ended or not
    TRACE = "trace"  # at the times of a trace


class LoadError(Exception):
    """A load that can't be put on a server. The text says why."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a run."""

    loop: Loop
    level: float
    """Closed: requests under way. Poisson: requests per second. Trace: how much faster it plays."""
    requests: int  # most requests
    seconds: float | None = None  # no request starts later than this; None: no limit

    @property
    def label(self) -> str:
        """Short name, such as `4 at a time`."""
        match self.loop:
            case Loop.CLOSED:
                return f"{self.level:g} at a time"
            case Loop.POISSON:
                return f"{self.level:g}/s"
            case Loop.TRACE:
                return "trace" if self.level == 1 else f"trace x{self.level:g}"


def parse_loads(loop: Loop, text: str, requests: int | None, seconds: float | None) -> list[Load]:
    """Loads of text: `1,4,8` are requests at a time (closed), `0.5,2` per second (Poisson).

    `requests` and `seconds` bound each of them. Raises LoadError.
    """
    is_closed = loop is Loop.CLOSED
    most, wanted = MOST_RATE, "requests per second, such as 0.5,2"
    if is_closed:
        most, wanted = MOST_CONCURRENCY, "whole numbers, such as 1,4,8"
    try:
        levels = [float(part) for part in text.split(",", MOST_LOADS)]
    except ValueError:
        levels = []
    if not 1 <= len(levels) <= MOST_LOADS or not all(
        0 < one <= most and (not is_closed or one.is_integer()) for one in levels
    ):
        raise LoadError(
            f"{text!r:.60}: write {wanted}; each above 0 and at most {most:g}, not more than "
            f"{MOST_LOADS}"
        )
    if not is_closed and requests is None and seconds is None:
        seconds = OPEN_SECONDS
    loads = []
    for level in levels:
        usual = MOST_REQUESTS
        if is_closed and seconds is None:
            usual = max(LEAST_REQUESTS, REQUESTS_PER_WORKER * int(level))
        loads.append(Load(loop, level, requests or usual, seconds))
    return loads


TICK_SECONDS = 0.01  # between two looks at the clock
MOST_SAMPLES = 20_000  # kept of the looks at the clock; of more, a random choice


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """What the load generator itself did. Seconds."""

    lag: Percentiles
    """How late a timer of its event loop fired: an event's time is late by no more than that. Up to
    a millisecond is the timers' own step."""
    start_lag: Percentiles  # how late requests of an open loop started
    cpu_share: float  # CPU time per second; 1 is a whole CPU, and more this program can't use
    held_back: int = 0  # requests of an open loop that waited, since too many were under way


@dataclass(slots=True)
class LagMonitor:
    """Watches the event loop within its context."""

    clock: Callable[[], float] = time.monotonic
    cpu_clock: Callable[[], float] = time.process_time
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    _samples: list[float] = field(default_factory=list)
    _seen: int = 0
    _cpu_share: float = 0.0

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None, None]:
        """Watch until the context ends."""
        began, cpu_began = self.clock(), self.cpu_clock()
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            seconds = self.clock() - began
            self._cpu_share = (self.cpu_clock() - cpu_began) / seconds if seconds > 0 else 0.0

    async def _watch(self) -> None:
        while True:
            due = self.clock() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            lag = max(0.0, self.clock() - due)
            self._seen += 1
            if len(self._samples) < MOST_SAMPLES:
                self._samples.append(lag)
            elif (place := self.rng.randrange(self._seen)) < MOST_SAMPLES:
                self._samples[place] = lag

    def figures(self, start_lags: list[float], held_back: int) -> ClientFigures:
        """The figures of the context."""
        lag, start_lag = Percentiles.of(self._samples), Percentiles.of(start_lags)
        return ClientFigures(lag, start_lag, self._cpu_share, held_back)


# Seconds for which a worker of the closed loop pauses after a failure; they double.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
LONGEST_RETRY_AFTER = 60.0  # seconds for which it pauses at most where the server names a time


@dataclass(frozen=True, slots=True)
class RequestPattern:
    """The requests of closed and Poisson loops, which are all alike."""

    prompt_tokens: int
    max_tokens: int
    prefix_tokens: int = 0
    prefixes: int = 1

    def job(self, number: int, time: float) -> Job:
        """The request of this number; no other has its prompt."""
        prefix = 1 + number % self.prefixes if self.prefix_tokens else 0
        prompt = TracePrompt(number, self.prompt_tokens, prefix, self.prefix_tokens)
        return Job(number, time, prompt, self.max_tokens)


@dataclass(frozen=True, slots=True)
class RequestGoal:
    """What a request must keep; seconds. None: does not matter."""

    ttft: float | None = None
    inter_token: float | None = None
    completion: float | None = None

    def __bool__(self) -> bool:
        return any(one is not None for one in astuple(self))

    def is_met(self, result: RequestResult) -> bool:
        """Whether a request succeeded and kept all of it. A figure that it lacks is kept."""
        figures = (result.ttft, result.inter_token, result.completion)
        return result.error is None and all(
            wanted is None or found is None or found <= wanted
            for wanted, found in zip(astuple(self), figures, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to measure, and how."""

    url: str  # without `/v1`
    endpoint: Endpoint
    loads: list[Load]
    pattern: RequestPattern
    key: str | None = None
    tls: ssl.SSLContext | None = None
    model: str | None = None  # None: the server's first one
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields that every body gets; None leaves one out."""
    ignore_eos: bool | None = None
    """Whether answers go on to their last token; None: where the server is known to do so."""
    trace: Trace | None = None
    goal: RequestGoal = field(default_factory=RequestGoal)
    seed: int = 1
    warm_up: int = 2  # requests sent one after the other before the first load
    timeout: float = 600.0  # seconds for a request
    most_in_flight: int = 512  # requests of an open loop that are under way at a time
    meter: EnergyMeter | None = None


@dataclass(slots=True)
class LoadRun:
    """A load that was put on the server, and what came of it."""

    load: Load
    results: list[RequestResult] = field(default_factory=list)
    client: ClientFigures = ClientFigures(Percentiles.of([]), Percentiles.of([]), 0.0)
    joules: float | None = None  # energy of the machine while the load ran. None: not measured.
    is_whole: bool = False  # False: it was interrupted

    @property
    def began(self) -> float:
        """When its first request should have started."""
        return min((one.intended for one in self.results), default=0.0)


@dataclass(slots=True)
class LoadRunner:
    """Puts the loads of a plan on one server."""

    plan: BenchPlan
    sender: RequestSender
    writer: PromptWriter
    model: str | None
    extra: dict[str, Any]  # fields that every body gets
    clock: Callable[[], float] = time.monotonic
    on_end: Callable[[RequestResult], None] = lambda _: None
    _number: int = 0  # requests planned so far: each has a text of its own
    _room: asyncio.Semaphore = field(init=False)  # for requests of an open loop
    _held_back: int = 0  # requests of this load that have waited for it

    async def warm_up(self) -> list[RequestResult]:
        """Send the first requests, one after the other."""
        jobs = [self._next_job() for _ in range(self.plan.warm_up)]
        return [await self._send(job, self._body(job), self.clock()) for job in jobs]

    async def run(self, run: LoadRun) -> None:
        """Put the load on the server, and fill in what comes of it, however it ends."""
        monitor, meter = LagMonitor(self.clock), self.plan.meter
        self._room, self._held_back = asyncio.Semaphore(self.plan.most_in_flight), 0
        # A collection of the objects that are there already would only stall the event loop.
        gc.collect()
        gc.freeze()
        joules = None if meter is None else meter.joules()
        is_open = run.load.loop is not Loop.CLOSED
        try:
            sampling = nullcontext() if meter is None else meter.sampling()
            async with sampling, monitor.watching():
                await (self._open(run) if is_open else self._closed(run))
            run.is_whole = True
        finally:
            gc.unfreeze()
            lags = [max(0.0, one.started - one.intended) for one in run.results if is_open]
            run.client = monitor.figures(lags, self._held_back)
            after = None if meter is None else meter.joules()
            if joules is not None and after is not None:
                run.joules = after - joules

    def _next_job(self, time: float = 0.0) -> Job:
        self._number += 1
        return self.plan.pattern.job(self._number, time)

    def _body(self, job: Job) -> bytes:
        """Write a request's body before it is due: that counts as nobody's latency."""
        prompt, endpoint = self.writer.write(job.prompt), self.sender.endpoint
        fields = endpoint.body(self.model, prompt, job.output, self.extra)
        return json.dumps(fields).encode()

    async def _closed(self, run: LoadRun) -> None:
        load = run.load
        until = None if load.seconds is None else self.clock() + load.seconds
        left = load.requests

        async def work() -> None:
            nonlocal left
            pause = FIRST_PAUSE
            while left > 0 and (until is None or self.clock() < until):
                left -= 1
                job = self._next_job()
                body = self._body(job)
                result = await self._send(job, body, self.clock())
                run.results.append(result)
                if result.error is None:
                    pause = FIRST_PAUSE
                    continue
                wait = max(pause, min(result.retry_after or 0.0, LONGEST_RETRY_AFTER))
                if left <= 0 or (until is not None and self.clock() + wait >= until):
                    return
                await asyncio.sleep(wait)
                pause = min(2 * pause, LONGEST_PAUSE)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(int(load.level), load.requests)):
                group.create_task(work())

    async def _open(self, run: LoadRun) -> None:
        """Send requests at their times. A later turn of a conversation waits for the one before."""
        load, trace, began = run.load, self.plan.trace or Trace([]), self.clock()
        jobs, speed = iter(trace.jobs), load.level
        if load.loop is Loop.POISSON:
            rng = random.Random(f"{self.plan.seed} arrivals {load.level}")
            times = accumulate(rng.expovariate(load.level) for _ in range(load.requests))
            jobs, speed = map(self._next_job, times), 1.0

        async def converse(job: Job, body: bytes) -> None:
            """Send a request, for which there is room, and the turns that follow it."""
            intended = began + job.time / speed
            while True:
                try:
                    result = await self._send(job, body, intended)
                finally:
                    self._room.release()
                run.results.append(result)
                later = trace.next_turns.get(job.id)
                if later is None:
                    return
                job = trace.jobs[later]
                intended = max(began + job.time / speed, result.ended + job.pause / speed)
                if load.seconds is not None and intended > began + load.seconds:
                    return
                body = self._body(job)
                await self._enter(intended)

        async with asyncio.TaskGroup() as group:
            for job in jobs:
                at = job.time / speed
                if load.seconds is not None and at > load.seconds:
                    break
                if job.is_later_turn:
                    continue
                body = self._body(job)
                await self._enter(began + at)
                group.create_task(converse(job, body))

    async def _enter(self, due: float) -> None:
        """Wait until a request is due, and for room."""
        left = due - self.clock()
        if left > 0:
            await asyncio.sleep(left)
        self._held_back += self._room.locked()
        await self._room.acquire()

    async def _send(self, job: Job, body: bytes, intended: float) -> RequestResult:
        """Send a request that should have started then."""
        result = RequestResult(job.id, intended)
        await self.sender.send(result, body, job.output)
        self.on_end(result)
        return result
