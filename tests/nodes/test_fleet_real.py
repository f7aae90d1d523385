"""A fleet of real llama.cpp servers: what is read, learnt, calibrated and predicted of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from gateway.api.tokens import read_usage
from gateway.lease import KeyedHash
from gateway.nodes import calibration
from gateway.nodes.node import LeasePhase, NodeState
from gateway.nodes.prompt_cache import FleetPromptCache
from gateway.request.prompt_key import BLOCK_BYTES, VolatileLines, build_prompt_key
from gateway.request.routes import ROUTES
from tests.each_case import each_case
from tests.nodes.build import a_fleet, a_spec, is_held, learn_timings, streamed, take
from tests.nodes.test_calibration import calibrated
from tests.servers import (
    running_demo_servers,
    spawn_demo_server,
    stop_demo_server,
    wait_for_demo_server,
)

pytestmark = [pytest.mark.real, pytest.mark.slow]

CHAT = {"messages": [{"role": "user", "content": "tell me"}], "stream": True, "max_tokens": 15_000}
CONTEXT = 16_384
REAL: dict[str, Any] = {"interval": 0.2, "timeout": 30.0}
LIMIT = 120.0  # seconds


@pytest.mark.smoke
async def test_the_properties_and_busy_slots_of_a_real_server_are_read() -> None:
    with running_demo_servers(1, slots=2, context=CONTEXT) as [server]:
        async with a_fleet(a_spec(url=server.url), **REAL) as fleet:
            node = fleet["a"]
            assert node.state is NodeState.READY
            facts = node.properties
            assert (facts.slots, facts.context, facts.models) == (2, CONTEXT, ("demo",))
            assert facts.slots_endpoint is True
            assert facts.template
            assert facts.vision is False
            assert facts.n_params
            async with (
                httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=LIMIT) as other,
                other.stream("POST", "/v1/chat/completions", json=CHAT) as response,
            ):
                parts = response.aiter_bytes()
                await anext(parts)
                await fleet.until(lambda: node.foreign == 1)
            await fleet.until(lambda: node.foreign == 0)


async def test_a_cut_stream_of_a_real_server_frees_its_slot() -> None:
    with running_demo_servers(1, slots=1, context=CONTEXT) as [server]:
        async with a_fleet(a_spec(url=server.url), **REAL | {"interval": 60}) as fleet:
            node = fleet["a"]
            lease = take(node)
            async with streamed(lease, max_tokens=15_000):
                pass
            lease.abandon()
            assert lease.phase is LeasePhase.RECLAIM
            await fleet.until(lambda: not is_held(lease))
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
                [slot] = (await client.get("/slots")).json()
            assert not slot["is_processing"]
            assert slot["next_token"][0]["has_next_token"], "it was let go, not waited for"


async def test_a_real_server_that_hangs_is_mute_with_work_and_down_without() -> None:
    with running_demo_servers(1) as [server]:
        async with a_fleet(a_spec(url=server.url), **REAL | {"timeout": 0.5}) as fleet:
            await fleet.until_state("a", NodeState.READY, limit=LIMIT)
            lease = take(fleet["a"])
            os.kill(server.pid, signal.SIGSTOP)
            try:
                await fleet.until_state("a", NodeState.MUTE, limit=LIMIT)
                lease.release()
                await fleet.until_state("a", NodeState.DOWN, limit=LIMIT)
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await fleet.until_state("a", NodeState.READY, limit=LIMIT)


WORDS = calibration.WORDS[:18]
KINDS: list[dict[str, Any]] = [
    {},
    {"embedding": True},
    {"embedding": True, "extra": ("--pooling", "rank")},
]


async def chat(client: httpx.AsyncClient, system: str, **keys: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    answer = await client.post("/v1/chat/completions", json={"messages": messages, **keys})
    timings: dict[str, Any] = answer.json()["timings"]
    return timings


def direct(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=60, limits=limits)


@each_case("options", KINDS)
def test_a_cold_server_of_each_kind_shows_its_speed(options: dict[str, Any]) -> None:
    server = spawn_demo_server(slots=2, size="medium", **options)

    async def run() -> None:
        url = wait_for_demo_server(server)
        async with calibrated(a_spec(url=url)) as (running, ended):
            await running.until(lambda: bool(ended))
            assert ended[0].outcome == "done", ended
            assert (ended[0].decode_tps is None) is bool(options)
            speed = running["a"].speed
            guess = speed.expected_prefill_tps, 1 / speed.token_base
            async with direct(url) as client:
                shown = await chat(client, " ".join(WORDS * 10), max_tokens=64)
            learn_timings(speed, shown)
            assert speed.prefill_tps is not None
            assert 0.2 < guess[0] / speed.prefill_tps < 5
            if not options:
                assert speed.decode_tps is not None
                assert 0.2 < guess[1] / speed.decode_tps < 5

    try:
        asyncio.run(run())
    finally:
        stop_demo_server(server)


async def test_warm_slots_stay_warm_and_a_request_gets_its_slot_soon() -> None:
    server = spawn_demo_server(slots=2, size="medium")
    try:
        url = wait_for_demo_server(server)
        systems = [" ".join(WORDS[i:] * 20) for i in range(2)]
        async with direct(url) as client:
            for system in systems:
                await chat(client, system, max_tokens=4)
            async with calibrated(a_spec(url=url)) as (running, ended):
                await running.until(lambda: bool(ended))
                assert ended[0].outcome == "done", ended
                for system in systems:
                    timings = await chat(client, system, max_tokens=4)
                    assert timings["cache_n"] > 4 * timings["prompt_n"], timings
                # Another one is given up while it reads or writes.
                node = running["a"]
                await running.until(lambda: not node.leases)
                node.speed.forget()
                node.calibration.postpone(0.0)
                await running.until(lambda: bool(node.leases))
                take(node).release()
                await running.until(lambda: len(ended) == 2)
                assert ended[1].outcome == "given_up"
                await running.until(lambda: not node.leases, limit=5)
    finally:
        stop_demo_server(server)


PATH = "/v1/chat/completions"
NODE = 3


@dataclass(slots=True)
class Turn:
    believed: float
    cached: int
    prompt: int
    block: float
    """Tokens of one block."""


KEYED_HASH = KeyedHash()


@dataclass
class Talk:
    """One conversation with one server, recorded in a prompt cache as the gateway does it."""

    url: str
    memory: FleetPromptCache
    name: str
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.name)
        self.messages.append({"role": "system", "content": f"{self.name}: {some_words(rng, 150)}"})
        self.rng = rng

    def say(self, words: int = 60) -> Turn:
        self.messages.append({"role": "user", "content": some_words(self.rng, words)})
        body = json.dumps(
            {"model": "demo", "messages": self.messages, "max_tokens": 80, "temperature": 0}
        ).encode()
        prompt = build_prompt_key(body, ROUTES[PATH], "demo", VolatileLines(), KEYED_HASH)
        assert prompt is not None
        believed = self.memory.lookup(prompt).cached.get(NODE, 0.0)
        self.memory.request_placed(NODE, prompt)
        with httpx.Client(base_url=self.url, trust_env=False, timeout=60) as client:
            reply = client.post(PATH, content=body)
        assert reply.status_code == 200, reply.text
        usage = read_usage(reply.content)
        assert usage is not None
        self.memory.request_finished(
            NODE, prompt, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        )
        answer = reply.json()["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": answer})
        block = usage.prompt_tokens * BLOCK_BYTES / prompt.size
        return Turn(believed, usage.cached_tokens, usage.prompt_tokens, block)


def some_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


@pytest.mark.smoke
def test_a_growing_conversation_is_found_after_other_requests() -> None:
    memory = FleetPromptCache()
    memory.resize(NODE, 2)
    with running_demo_servers(1, slots=2, context=4096) as [server]:
        home = Talk(server.url, memory, "home")
        turns = [home.say()]
        for i in range(3):
            # Enough other prompts to push it out of both slots, and then out of one only.
            for j in range(3 - i % 3):
                stranger = Talk(server.url, memory, f"stranger {i} {j}").say()
                assert stranger.believed < stranger.block
            turns.append(home.say())
    for turn in turns[1:]:
        assert turn.believed > 0.6 * turn.prompt
        assert abs(turn.believed - turn.cached) <= turn.block
    assert turns[0].believed == 0


def test_a_conversation_is_lost_when_a_similar_one_takes_its_slot() -> None:
    memory = FleetPromptCache()
    memory.resize(NODE, 1)
    with running_demo_servers(1, slots=1, context=4096) as [server]:
        first = Talk(server.url, memory, "shared")
        second = Talk(server.url, memory, "shared")
        second.rng.seed("another")
        first.say(20)
        taken = second.say(20)
        back = first.say(20)
    assert 0 < taken.cached < taken.prompt
    assert abs(taken.believed - taken.cached) <= taken.block
    assert abs(back.believed - back.cached) <= back.block
