"""A fleet of real llama.cpp servers."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import httpx
import pytest

from gateway.nodes.node import LeasePhase, NodeState
from tests.nodes.build import (
    a_fleet,
    a_spec,
    is_held,
    learn_timings,
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
