"""Plays traces against fronts: every load and seed, all fronts at once, turn after turn.

Each front has a fleet of its own. The fleets sleep rather than compute, so that all fronts can be
compared under the very same disturbances of the machine, with both cores mostly idle (the report
tells how busy they were).

Before each measured trace a warm-up is played against every front alike: shorter, with other
words, other tenants and the same lengths. So learnt speeds and lengths are there, as in a gateway
that has run for a while; nothing of the measured prompts is in any cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from rich.console import Console

from tests.bench.load import Address
from tests.bench.machine import cpu_seconds, waited_seconds
from tests.bench.scheduling.fronts import FLEET, MODEL, Front, nodes
from tests.bench.scheduling.trace import Shape, Trace, Turn, make, session_rate
from tests.bench.targets import Running, running
from tests.emulator import expected_chat_text
from tests.gateways import NO_TLS


@dataclass(slots=True)
class Answer:
    """The response. Times are monotonic seconds; `first` is 0 if no text came."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    sent: float = 0.0
    first: float = 0.0
    done: float = 0.0
    problem: str = ""


async def ask(
    address: Address,
    body: dict[str, Any],
    limit: float,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Send a chat request and read its answer to the end, for `limit` seconds at most."""
    answer = Answer(sent=clock())
    url = "http://{}:{}/v1/chat/completions".format(*address)
    try:
        async with (
            asyncio.timeout(limit),
            httpx.AsyncClient(verify=NO_TLS, trust_env=False, timeout=None) as client,
            client.stream("POST", url, json=body) as reply,
        ):
            if reply.status_code == 200:
                answer.problem = await _read(reply, answer, clock)
            else:
                answer.problem = f"status {reply.status_code}: {(await reply.aread())[:300]!r}"
    except TimeoutError:
        answer.problem = f"no end after {limit:.0f} s"
    except httpx.TransportError as error:
        answer.problem = repr(error)
    answer.done = clock()
    return answer


async def _read(reply: httpx.Response, answer: Answer, clock: Callable[[], float]) -> str:
    """Fill in `answer` from the events; returns what is wrong with them, or an empty text."""
    last = ""
    try:
        async for line in reply.aiter_lines():
            last = line.removeprefix("data: ") or last
            if not line.startswith("data: {"):
                continue
            event = json.loads(last)
            for choice in event.get("choices", ()):
                answer.text += choice["delta"].get("content") or ""
            if answer.text and not answer.first:
                answer.first = clock()
            if usage := event.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.completion_tokens = usage["completion_tokens"]
                answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return f"not a chat stream: {error!r}"
    if last != "[DONE]":
        return "a stream without [DONE]"
    if not answer.prompt_tokens:
        return "a stream without usage"
    return "" if answer.first else "a stream without text"


CAPACITY = "capacity"
LOADS = {"light": 0.5, CAPACITY: 1.0, "above": 1.5}
"""Loads as shares of the fleet's capacity (`trace.py`)."""
UNKNOWN = 4096  # `max_tokens` of a client that doesn't know how long its answer will be


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Seconds of the fleet's time; `sent` counts from the beginning of the trace."""

    session: int
    turn: int
    sent: float
    ttft: float
    took: float
    prompt: int
    cached: int
    completion: int
    problem: str


@dataclass(frozen=True, slots=True)
class Played:
    """One trace played against one front."""

    front: str
    load: str
    seed: int
    records: list[Record] = field(repr=False)
    front_busy: float = 0.0
    """Share of its core that was in use, by the front and what ran beside it."""
    load_busy: float = 0.0  # share of the other core that nodes and clients used
    disturbed: float = 0.0
    """Share of the time that a process, on average, was ready to run but had no core."""


def mean(records: Sequence[Record]) -> float:
    """The mean seconds from a request to the end of its answer."""
    return fmean(record.took for record in records)


@dataclass(frozen=True, slots=True)
class Player:
    """How a trace is played: `scale` seconds of the fleet's time pass in one of the clock's.

    `limit` is the longest a request may take, in seconds of the fleet's time.
    """

    addresses: Sequence[Address]  # each request goes to the one with the fewest
    scale: float
    known: bool  # whether `max_tokens` is the answer's real length
    limit: float = 600.0
    clock: Callable[[], float] = time.monotonic
    busy: Counter[Address] = field(default_factory=Counter)

    async def play(self, trace: Trace) -> list[Record]:
        """Play the whole trace. A session ends with the first request that fails."""
        begin, count = self.clock(), len(trace.sessions)
        played = await asyncio.gather(*(self._session(trace, n, begin) for n in range(count)))
        return [record for session in played for record in session]

    async def _session(self, trace: Trace, which: int, begin: float) -> list[Record]:
        session = trace.sessions[which]
        messages = [{"role": "system", "content": trace.systems[session.tenant]}]
        records: list[Record] = []
        await asyncio.sleep(begin + session.at / self.scale - self.clock())
        for number, turn in enumerate(session.turns):
            await asyncio.sleep(turn.think / self.scale)
            messages.append({"role": "user", "content": turn.question})
            body = chat_body(messages, turn.answer_tokens if self.known else UNKNOWN)
            limit = self.limit / self.scale
            address = min(self.addresses, key=self.busy.__getitem__)
            self.busy[address] += 1
            answer = await ask(address, body, limit, self.clock)
            self.busy[address] -= 1
            problem = answer.problem or as_emulated(messages, turn, answer)
            ttft = answer.first - answer.sent if answer.first else 0.0
            times = ((answer.sent - begin) * self.scale, ttft * self.scale)
            took = (answer.done - answer.sent) * self.scale
            tokens = (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
            records.append(Record(which, number, *times, took, *tokens, problem))
            if problem:
                break
            messages.append({"role": "assistant", "content": answer.text})
        return records


def chat_body(messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    """The body of a request of a trace."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, **options}


def as_emulated(messages: list[dict[str, Any]], turn: Turn, answer: Answer) -> str:
    """Check the emulated model's answer, which is known to the last word."""
    if answer.completion_tokens != turn.answer_tokens:
        return f"{answer.completion_tokens} tokens, not {turn.answer_tokens}"
    if answer.text != expected_chat_text(messages, turn.answer_tokens):
        return "another text"
    return ""


WARM_UP = Shape(sessions=18, turns=2)
PAUSE = 5.0  # seconds of the fleet's time between the warm-up's last answer and the trace


@dataclass(frozen=True, slots=True)
class Rounds:
    """Plays traces against fronts that are processes."""

    fronts: Sequence[Front]
    loads: Sequence[str]
    seeds: int
    scale: float
    shape: Shape
    warm_up: Shape
    folder: Path
    core: int
    progress: Console

    async def play(self) -> list[Played]:
        """Play everything; one result for each load, seed and front."""
        played = []
        for seed in range(1, self.seeds + 1):
            for load in self.loads:
                turn = seed % len(self.fronts)
                order = [*self.fronts[turn:], *self.fronts[:turn]]
                played += await self._group(order, load, seed)
        order_of = [front.name for front in self.fronts]
        return sorted(played, key=lambda p: (order_of.index(p.front), p.seed))

    async def _group(self, fronts: Sequence[Front], load: str, seed: int) -> list[Played]:
        began = time.monotonic()
        full = session_rate(make(f"{seed}", 1.0, self.shape), FLEET)
        warm_up = make(f"warm-up {seed}", full, self.warm_up)
        trace = make(f"{seed}", full * LOADS[load], self.shape)
        async with AsyncExitStack() as stack:
            runs = [await self._started(stack, front, load, seed) for front in fronts]
            pairs = zip(runs, fronts, strict=True)
            players = [Player([run.address], self.scale, front.known) for run, front in pairs]
            await asyncio.gather(*(player.play(warm_up) for player in players))
            await asyncio.sleep(PAUSE / self.scale)
            wall, load_cpu = time.perf_counter(), time.process_time()
            waited = waited_seconds(os.getpid())
            cpu = [cpu_seconds(run.pid) if run.pid else 0.0 for run in runs]
            records = await asyncio.gather(*(player.play(trace) for player in players))
            wall = time.perf_counter() - wall
            played = [
                Played(
                    front=front.name,
                    load=load,
                    seed=seed,
                    records=found,
                    front_busy=(cpu_seconds(run.pid) - before) / wall if run.pid else 0.0,
                    load_busy=(time.process_time() - load_cpu) / wall,
                    disturbed=(waited_seconds(os.getpid()) - waited) / wall / (len(runs) + 1),
                )
                for front, run, before, found in zip(fronts, runs, cpu, records, strict=True)
            ]
        means = ", ".join(f"{one.front} {mean(one.records):.2f}" for one in played)
        failed = sum(bool(record.problem) for one in played for record in one.records)
        problems = f", {failed} requests FAILED" if failed else ""
        took = f"{time.monotonic() - began:.0f} s"
        self.progress.print(f"seed {seed}, {load}: mean completion {means}{problems}  [{took}]")
        return played

    async def _started(self, stack: AsyncExitStack, front: Front, load: str, seed: int) -> Running:
        fleet = await stack.enter_async_context(nodes(scale=self.scale))
        folder = self.folder / f"{front.name}-{load}-{seed}"
        folder.mkdir()
        ports = tuple(node.port for node in fleet)
        return await stack.enter_async_context(running(front.target, folder, ports, self.core))
