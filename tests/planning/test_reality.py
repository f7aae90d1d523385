"""The model against the pinned llama.cpp server.

What does not hang on the clock is compared exactly: slots, cached tokens, tokens that a neighbour
writes while a prompt is read. Times are compared in CPU seconds of the server, with speeds that
were measured just before and after, within `TOLERANCE`; a noisy machine gets several attempts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from gateway.planning.job import Job, Prompt, Trace
from gateway.planning.machine import Machine
from gateway.planning.peers import LeastConn
from gateway.planning.prompt_cache import PromptCache
from gateway.planning.simulation import simulate
from tests.planning.build import trace
from tests.servers import DemoServer, spawn_demo_server, start_demo_servers, stop_demo_server
from tests.servers import wait_for_demo_server as wait_for

pytestmark = [pytest.mark.real, pytest.mark.slow]

TOLERANCE = 0.3
"""Share by which the mean completion of the trace, and the whole work, may differ."""
ATTEMPTS = 4
USUAL = 800
"""Tokens of a prompt of the trace, about."""
BATCH = 512  # what `gateway/local/embedded.py` starts servers with
KV_BYTES = 2062  # of the small demo model's tokens in host memory, as the server's log tells


@dataclass
class Answer:
    """What one request came to; seconds from its sending."""

    first: float
    ended: float
    slot: int
    cached: int
    ids: list[int]
    timings: dict[str, float]
    at: list[float] = field(default_factory=list)
    """When each token was made, by the server's clock; seconds from the first one."""


async def ask(client: httpx.AsyncClient, url: str, prompt: list[int], output: int) -> Answer:
    body = {
        "prompt": prompt,
        "n_predict": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_tokens": True,
        "timings_per_token": True,
    }
    sent = time.monotonic()
    at: list[float] = []
    ids: list[int] = []
    first = 0.0
    async with client.stream("POST", f"{url}/completion", json=body) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["tokens"]:
                at += [event["timings"]["predicted_ms"] / 1000] * len(event["tokens"])
                first = first or time.monotonic() - sent
            ids += event["tokens"]
            if event["stop"]:
                timings = event["timings"]
                ended = time.monotonic() - sent
                slot = event["id_slot"]
                return Answer(first, ended, slot, timings["cache_n"], ids, timings, at)
    raise AssertionError("the stream has no end")


def words(rng: random.Random, count: int) -> list[int]:
    """Tokens of the demo model's vocabulary, without those that control."""
    return [rng.randrange(300, 900) for _ in range(count)]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    # The server closes a connection after a stream.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=60, limits=limits) as made:
        yield made


@pytest.mark.parametrize(
    ("slots", "cache_mib", "seed"), [(2, 1024, 1), (3, 1024, 2), (2, 16, 8), (3, 4, 9), (2, 1, 7)]
)
async def test_slots_and_cached_tokens_are_those_of_a_real_server(
    client: httpx.AsyncClient, slots: int, cache_mib: int, seed: int
) -> None:
    rng = random.Random(seed)
    heads = {0: [], 1: words(rng, 300), 2: words(rng, 150)}
    cache = PromptCache(slots, cache_mib * 1024 * 1024 // KV_BYTES)
    talks: dict[int, tuple[int, int, list[int]]] = {}
    expected: list[tuple[int, int]] = []
    seen: list[tuple[int, int]] = []
    server = spawn_demo_server(slots=slots, extra=("--cache-ram", str(cache_mib)))
    try:
        url = await asyncio.to_thread(wait_for, server)
        for number in range(60):
            talker = rng.randrange(10)
            if talker not in talks or len(talks[talker][2]) > 2500:
                head = rng.randrange(3)
                talks[talker] = (number + 1, head, list(heads[head]))
            stream, head, said = talks[talker]
            said += words(rng, rng.randrange(20, 400))
            output = rng.randrange(1, 40)
            prompt = Prompt(stream, len(said), head, len(heads[head]))
            slot, cached = cache.choose(prompt, list(range(slots)))
            cache.save_idle([place == slot for place in range(slots)])
            expected.append((slot, cached))
            answer = await ask(client, url, said, output)
            seen.append((answer.slot, answer.cached))
            cache.keep(slot, prompt._replace(tokens=len(said) + output - 1), float(number))
            said += answer.ids
    finally:
        stop_demo_server(server)
    assert seen == expected
    assert any(cached for _, cached in seen)


async def test_a_neighbour_writes_one_token_for_each_batch_that_is_read(
    client: httpx.AsyncClient,
) -> None:
    rng = random.Random(1)
    async with start_demo_servers(1, 2, size="medium") as (url,):
        writer = asyncio.create_task(ask(client, url, words(rng, 20), 500))
        while True:
            slots = (await client.get(f"{url}/slots")).json()
            if any(slot.get("next_token", [{}])[0].get("n_decoded", 0) > 50 for slot in slots):
                break
            assert not writer.done()
        reader = await ask(client, url, words(rng, 2500), 2)
        wrote = await writer
    assert reader.timings["prompt_n"] == 2500
    # In batches of 511 beside the writer's one: five steps, many times as long as its others. A
    # busy machine may hold up two more.
    model = -(-2500 // (BATCH - 1))
    took = [after - before for before, after in itertools.pairwise(wrote.at)]
    longest = sorted(took, reverse=True)
    assert longest[model - 1] > 3 * longest[model + 2], longest[: model + 5]
    assert took[-1] < longest[model - 1], "it had ended before the prompt was read"


@dataclass
class Turn:
    question: int
    output: int


class Scale:
    """The demo model of 512 wide in a server of two slots, timed in its own CPU seconds.

    Its one thread computes all the time while it has work. So other work on the machine stretches
    what the clock says, and not this.
    """

    def __init__(self, client: httpx.AsyncClient, server: DemoServer, rng: random.Random) -> None:
        self.client, self.url, self.rng = client, server.url, rng
        self._process = psutil.Process(server.pid)

    def spent(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    async def cost(self, prompt: int, output: int, together: int = 1) -> float:
        """CPU seconds of so many requests at once."""
        begun = self.spent()
        asked = (
            ask(self.client, self.url, words(self.rng, prompt), output) for _ in range(together)
        )
        await asyncio.gather(*asked)
        return self.spent() - begun

    async def measure(self) -> tuple[float, float, float]:
        """Seconds of a prompt token, of a token alone, and of a step of two.

        At about the lengths of the trace: attention makes later tokens dearer, which the model
        leaves out.
        """
        once = await self.cost(USUAL, 1)
        alone = (await self.cost(USUAL, 101) - once) / 100
        both = (await self.cost(USUAL, 101, together=2) - 2 * once) / 100
        return once / USUAL, alone, both

    async def play(self, talks: list[list[Turn]]) -> tuple[float, float]:
        """Mean completion and the whole, in CPU seconds."""
        head = words(self.rng, 300)

        async def talk(turns: list[Turn]) -> list[float]:
            said = list(head)
            took = []
            for turn in turns:
                said += words(self.rng, turn.question)
                answer = await ask(self.client, self.url, said, turn.output)
                took.append(answer.ended)
                said += answer.ids
            return took

        begun, before = time.monotonic(), self.spent()
        told = await asyncio.gather(*map(talk, talks))
        span, whole = time.monotonic() - begun, self.spent() - before
        mean = statistics.mean(one for took in told for one in took)
        return mean * whole / span, whole


def as_trace(talks: list[list[Turn]]) -> Trace:
    jobs = []
    for number, turns in enumerate(talks):
        tokens = 300
        for turn in turns:
            tokens += turn.question
            prompt = Prompt(number + 1, tokens, 1, 300)
            jobs.append(Job(0, 0.0, prompt, turn.output))
            tokens += turn.output
    return trace(jobs)


@pytest.mark.timeout(480)
async def test_a_small_trace_takes_as_long_as_on_a_real_server(client: httpx.AsyncClient) -> None:
    off: list[str] = []
    for attempt in range(ATTEMPTS):
        rng = random.Random(attempt)
        talks = [
            [Turn(rng.randrange(150, 500), rng.randrange(60, 200)) for _ in range(2)]
            for _ in range(4)
        ]
        server = spawn_demo_server(size="medium")
        try:
            await asyncio.to_thread(wait_for, server)
            scale = Scale(client, server, rng)
            await scale.cost(600, 20)
            before = await scale.measure()
            mean, whole = await scale.play(talks)
            after = await scale.measure()
        finally:
            stop_demo_server(server)
        read, alone, both = map(statistics.mean, zip(before, after, strict=True))
        cost = max(0.0, both / alone - 1)
        node = Machine("demo", 2, 1 / read, 1 / alone, cost, BATCH)
        outcome = simulate(as_trace(talks), [node], LeastConn(1))
        told = (
            statistics.mean(job.ended - job.arrived for job in outcome.jobs) / mean,
            outcome.servers[0].busy_seconds / whole,
        )
        if all(1 - TOLERANCE <= share <= 1 + TOLERANCE for share in told):
            return
        off.append(f"{told[0]:.2f} and {told[1]:.2f}")
    pytest.fail(f"mean completion and work, of the model against the server: {', '.join(off)}")


async def test_what_is_cached_is_as_much_faster_as_on_a_real_server(
    client: httpx.AsyncClient,
) -> None:
    rng = random.Random(4)
    prompt = words(rng, 2000)
    async with start_demo_servers(1, 2, size="medium") as (url,):
        cold = await ask(client, url, prompt, 2)
        warm = await ask(client, url, [*prompt, *cold.ids, *words(rng, 20)], 2)
    node = Machine("demo", 2, 2000 / cold.first, 200.0, 0.5, BATCH)
    jobs = [
        Job(0, 0.0, Prompt(1, 2000), 2, 2),
        Job(0, 0.0, Prompt(1, 2022), 2, 2, follows=True, pause=1.0),
    ]
    simulate(trace(jobs), [node], LeastConn(1))
    assert warm.cached == jobs[1].cached == 2001
    assert cold.first > 10 * warm.first
    assert jobs[0].first > 10 * (jobs[1].first - jobs[1].arrived)
