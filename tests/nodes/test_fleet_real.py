"""A fleet of real llama.cpp servers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from typing import Any

import httpx
import pytest

from gateway.nodes.node import LeasePhase, Node, NodeState
from gateway.nodes.speed import sample_from_timings
from tests.nodes.build import (
    Running,
    a_fleet,
    a_spec,
    is_held,
    learn_timings,
    seconds_per_token,
    take,
)
from tests.servers import running_demo_servers
from tests.transport.pool_client import pool_client

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
            client = pool_client(lease.upstream)
            async with client.stream("POST", "/v1/chat/completions", json=CHAT) as response:
                parts = response.aiter_bytes()
                await anext(parts)
                lease.content_received(time.monotonic())
            lease.abandon()
            assert lease.phase is LeasePhase.RECLAIM
            await fleet.until(lambda: not is_held(lease))
            [slot] = (await client.get("/slots")).json()
            assert not slot["is_processing"]
            assert slot["next_token"][0]["has_next_token"], "it was let go, not waited for"


@pytest.mark.smoke
async def test_the_timings_of_a_real_server_are_learnt() -> None:
    with running_demo_servers(1) as [server]:
        async with a_fleet(a_spec(url=server.url), **REAL) as fleet:
            node = fleet["a"]
            body = CHAT | {"stream": False, "max_tokens": 30}
            answer = await pool_client(node.upstream).post(
                "/v1/chat/completions", json=body, timeout=LIMIT
            )
            learn_timings(node.speed, answer.json()["timings"])
            assert node.speed.prefill_tps
            assert node.speed.decode_tps
            assert 0 < node.speed.decode_tps < math.inf


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


async def test_a_killed_real_server_goes_down_within_seconds() -> None:
    with running_demo_servers(2) as [one, two]:
        specs = [a_spec("a", one.url), a_spec("b", two.url)]
        async with a_fleet(*specs, **REAL) as fleet:
            await asyncio.to_thread(one.kill)
            await fleet.until_state("a", NodeState.DOWN, limit=LIMIT)
            assert "no connection" in fleet["a"].reason
            assert fleet.state("b") is NodeState.READY


async def test_decode_speed_is_learnt_by_busy_slots_of_a_real_server() -> None:
    """The learnt speeds lie within the server's own timings, alone and with a neighbour."""
    with running_demo_servers(1, slots=2, context=4096) as [server]:
        async with a_fleet(a_spec(url=server.url), **REAL) as fleet:
            node, seen = fleet["a"], dict[int, list[float]]({1: [], 2: []})
            for busy in (1, 2, 1, 2):
                seen[busy] += await asyncio.gather(*(_decode(fleet, node) for _ in range(busy)))
            # A busy machine delays single answers, with a neighbour or without.
            reported = [seconds for measured in seen.values() for seconds in measured]
            for busy in seen:
                learnt = seconds_per_token(node.speed, busy)
                assert 0.5 * min(reported) < learnt < 2 * max(reported), (busy, learnt, seen)
            assert node.speed.prefill_tps is not None


async def _decode(fleet: Running, node: Node) -> float:
    """Seconds a token of one stream, from the node's timings, which the fleet learns too."""
    lease, last = take(node), b""
    moved = False
    body = CHAT | {"max_tokens": 400, "timings_per_token": False}
    async with pool_client(lease.upstream).stream(
        "POST", "/v1/chat/completions", json=body
    ) as response:
        async for line in response.aiter_lines():
            if '"content":"' in line and not moved:
                moved = True
                lease.content_received(time.monotonic())
            if '"timings"' in line:
                last = line.removeprefix("data: ").encode()
    lease.release()
    timings = json.loads(last)["timings"]
    fleet.fleet.learn_speed(node, sample_from_timings(timings, lease.observed_timing()))
    return float(timings["predicted_ms"]) / 1000 / int(timings["predicted_n"])
