"""The model compared with the pinned llama.cpp server, in what does not depend on speed.

Slots, cached tokens, and steps: which tokens of a prompt are read in one, who writes in it, and
how many a request takes.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
import pytest

from gateway.workshop.simulate.simulation import (
    Job,
    SimulatedMachine,
    SimulatedPromptCache,
    TracePrompt,
)
from tests.servers import start_demo_servers
from tests.workshop.simulate.build import job, play

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

BATCH = 512  # what `gateway/local/embedded.py` starts servers with
KV_BYTES = 2062  # of the small demo model's tokens in host memory, as the server's log shows
ENDLESS = 15_000  # tokens of an answer that is cancelled once the others have theirs


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    # The server closes a connection after a stream.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=300, limits=limits, trust_env=False) as made:
        yield made


@dataclass
class Answer:
    """The result of one request."""

    slot: int = 0
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    read: int = 0
    progress: list[int] = field(default_factory=list)
    """Prompt tokens that the slot had, at first and after each prefill step."""

    @property
    def pieces(self) -> list[int]:
        """Tokens of the prompt that each step read."""
        return [after - before for before, after in pairwise(self.progress)]

    @property
    def steps(self) -> int:
        """Steps of the server: the last one of the prefill gives the first token."""
        return len(self.pieces) + len(self.ids) - 1


async def ask(client: httpx.AsyncClient, url: str, prompt: list[int], output: int) -> Answer:
    """Send one request and read it to its end."""
    body = {"prompt": prompt, "n_predict": output, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "return_tokens": True, "return_progress": True}
    answer = Answer()
    async with client.stream("POST", f"{url}/completion", json=body) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if progress := event.get("prompt_progress"):
                answer.progress.append(progress["processed"])
                continue
            answer.ids += event["tokens"]
            if event["stop"]:
                answer.slot, timings = event["id_slot"], event["timings"]
                answer.cached, answer.read = timings["cache_n"], timings["prompt_n"]
                return answer
    raise AssertionError("the stream has no end")


def words(rng: random.Random, count: int) -> list[int]:
    """Tokens of the demo model's vocabulary, without control tokens."""
    return [rng.randrange(300, 900) for _ in range(count)]


async def computed(client: httpx.AsyncClient, url: str) -> tuple[int, int]:
    """Steps that the server has computed so far, and the sum of the slots busy in each."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    reported = dict(line.split() for line in lines if not line.startswith("#"))
    steps = int(float(reported["llamacpp:n_decode_total"]))
    return steps, round(steps * float(reported["llamacpp:n_busy_slots_per_decode"]))


def by_first_use(rows: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    """The rows with slots numbered by their first use.

    Of slots that nobody has used yet build 11549 takes the last one, and 11669 the first.
    """
    numbers: dict[int, int] = {}
    return [(numbers.setdefault(slot, len(numbers)), *rest) for slot, *rest in rows]


def in_steps(*jobs: Job) -> list[int]:
    """The steps that each takes in the model, from when it gets one of two slots."""
    # Where every step lasts a second, whatever it holds, seconds are steps.
    play(jobs, [SimulatedMachine("demo", 2, 1e9, 1.0, 0.0, BATCH)])
    return [round(one.ended - one.began) for one in jobs]


@pytest.mark.parametrize(("slots", "cache_mib", "seed"), [(3, 1024, 2), (2, 16, 8), (3, 4, 9)])
async def test_slots_cached_tokens_and_steps_are_those_of_a_real_server(
    client: httpx.AsyncClient, slots: int, cache_mib: int, seed: int
) -> None:
    rng = random.Random(seed)
    heads = {0: [], 1: words(rng, 300), 2: words(rng, 150)}
    cache = SimulatedPromptCache(slots, cache_mib * 1024 * 1024 // KV_BYTES)
    conversations: dict[int, tuple[int, int, list[int]]] = {}
    expected: list[tuple[int, int, int]] = []
    seen: list[tuple[int, int, int]] = []
    extra = ("--cache-ram", str(cache_mib))
    async with start_demo_servers(1, slots=slots, extra=extra) as (url,):
        for number in range(40):
            talker = rng.randrange(10)
            if talker not in conversations or len(conversations[talker][2]) > 2500:
                head = rng.randrange(3)
                conversations[talker] = (number + 1, head, list(heads[head]))
            stream, head, tokens = conversations[talker]
            tokens += words(rng, rng.randrange(20, 400))
            output = rng.randrange(1, 40)
            prompt = TracePrompt(stream, len(tokens), head, len(heads[head]))
            slot, cached = cache.choose_slot(prompt, list(range(slots)))
            (steps,) = in_steps(job(prompt=len(tokens) - cached, output=output))
            expected.append((slot, cached, steps))
            answer = await ask(client, url, tokens, output)
            seen.append((answer.slot, answer.cached, answer.steps))
            cache.store(slot, prompt._replace(tokens=len(tokens) + output - 1), float(number))
            tokens += answer.ids
        total, busy = await computed(client, url)
    assert by_first_use(seen) == by_first_use(expected)
    assert any(cached for _, cached, _ in seen)
    assert total == busy == sum(steps for _, _, steps in expected)


async def test_a_neighbour_decodes_one_token_for_each_prefill_batch(
    client: httpx.AsyncClient,
) -> None:
    rng = random.Random(1)
    async with start_demo_servers(1, slots=2, context=ENDLESS + 1000) as (url,):
        writer = asyncio.create_task(ask(client, url, words(rng, 20), ENDLESS))
        while (before := await computed(client, url))[0] < 50:
            assert not writer.done()
            await asyncio.sleep(0.01)
        reader = await ask(client, url, words(rng, 1200), 100)
        after = await computed(client, url)
        assert not writer.done()
        writer.cancel()
        with suppress(asyncio.CancelledError):
            await writer
    # A step has room for a batch; the neighbour's token takes one place of it.
    assert reader.pieces == [BATCH - 1, BATCH - 1, 1200 - 2 * (BATCH - 1)]
    # The neighbour was in every step. So those with two in them were the reader's, and no other.
    steps, slots = (now - then for now, then in zip(after, before, strict=True))
    modelled = in_steps(job(output=ENDLESS), job(time=99.5, prompt=1200, output=100))
    assert slots - steps == reader.steps == modelled[1] == 3 + 99


async def test_only_the_uncached_rest_is_read_as_on_a_real_server(
    client: httpx.AsyncClient,
) -> None:
    rng = random.Random(4)
    prompt = words(rng, 2000)
    async with start_demo_servers(1, slots=2) as (url,):
        cold = await ask(client, url, prompt, 2)
        warm = await ask(client, url, [*prompt, *cold.ids, *words(rng, 20)], 2)
    jobs = [
        Job(0, 0.0, TracePrompt(1, 2000), 2, 2),
        Job(0, 0.0, TracePrompt(1, 2022), 2, 2, is_later_turn=True, pause=1.0),
    ]
    # A second for each token of the prompt, and next to nothing for those that are written.
    play(jobs, [SimulatedMachine("demo", 2, 1.0, 1e9, 0.0, BATCH)])
    read = [round(one.first - one.arrived) for one in jobs]
    assert read == [2000, 21]
    assert [one.cached for one in jobs] == [cold.cached, warm.cached] == [0, 2001]
    assert [one.read for one in (cold, warm)] == read
    assert [sum(one.pieces) for one in (cold, warm)] == read
