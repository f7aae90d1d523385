"""Nodes whose `/health` answers while `/slots` does not: a request froze their server's loop."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.fleet.node import NodeState
from tests.emulator import EmulatedNode
from tests.fleet.build import Running, a_fleet, a_spec, take
from tests.gateways import running_gateway, until
from tests.servers import running_demo_servers
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import CHAT

USUAL: dict[str, Any] = {"interval": 5.0, "timeout": 2.0}
"""The settings' defaults."""

GRAMMAR = "root ::= " + '"a"? ' * 500 + '"b"'
"""It holds a server's loop for seconds at a time."""


def freeze(server: EmulatedNode) -> None:
    """Hold the server's loop: only what its HTTP threads know by themselves is answered."""
    for path in ("/slots", "/metrics"):
        server.faults.set("hang", path=path)
    server.faults.set("hang")


async def state_after(fleet: Running, seconds: float) -> NodeState:
    await asyncio.sleep(seconds)
    return fleet.state("a")


@in_virtual_time
async def test_a_frozen_node_is_mute_and_comes_back_when_its_slots_can_be_read() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url), **USUAL) as fleet:
        freeze(server)
        began = now()
        await fleet.until_state("a", NodeState.MUTE)
        assert now() - began < 15
        assert "though nothing is being read: a request may have frozen its loop" in (
            fleet["a"].reason
        )
        assert fleet["a"].free_slots(now()) == 0
        assert await state_after(fleet, 60) is NodeState.MUTE
        assert "/slots has not for 6" in fleet["a"].reason
        server.faults.clear()
        began = now()
        await fleet.until_state("a", NodeState.READY)
        assert now() - began < 3


@in_virtual_time
async def test_a_prompt_that_is_read_excuses_a_node_for_its_grace() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url), **USUAL) as fleet:
        freeze(server)
        lease = take(fleet["a"])
        lease.head_received(now())
        assert await state_after(fleet, 55) is NodeState.READY
        assert await state_after(fleet, 25) is NodeState.MUTE
        lease.release()


@in_virtual_time
async def test_a_stream_without_a_head_excuses_no_node() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url), **USUAL) as fleet:
        freeze(server)
        lease = take(fleet["a"])
        assert await state_after(fleet, 15) is NodeState.MUTE
        lease.release()


@in_virtual_time
async def test_a_node_whose_streams_move_is_not_mute() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url), **USUAL) as fleet:
        freeze(server)
        lease = take(fleet["a"])
        for _ in range(60):
            lease.content_received(now())
            assert await state_after(fleet, 0.5) is NodeState.READY
        assert await state_after(fleet, 20) is NodeState.MUTE
        lease.release()


@in_virtual_time
async def test_a_node_without_slots_endpoint_is_never_mute_for_it() -> None:
    async with (
        EmulatedNode(endpoint_slots=False) as server,
        a_fleet(a_spec(url=server.url), **USUAL) as fleet,
    ):
        freeze(server)
        assert await state_after(fleet, 60) is NodeState.READY


@in_virtual_time
async def test_a_server_that_others_wake_is_sleeping_until_it_has_loaded_its_model() -> None:
    async with (
        EmulatedNode(sleep_idle_seconds=12, load_seconds=50) as server,
        a_fleet(a_spec(url=server.url), **USUAL) as fleet,
        httpx.AsyncClient(base_url=server.url, timeout=100) as other,
    ):
        await fleet.until_state("a", NodeState.SLEEPING)
        work = asyncio.create_task(other.post(CHAT, json={"messages": [], "max_tokens": 1}))
        assert await state_after(fleet, 45) is NodeState.SLEEPING
        assert "it wakes up" in fleet["a"].reason
        await work
        assert await state_after(fleet, 5) is NodeState.READY
        assert fleet.states("a") == ["starting", "ready", "sleeping", "ready"]


@pytest.mark.slow
@in_virtual_time
async def test_a_server_that_hangs_while_it_wakes_is_mute_in_the_end() -> None:
    async with (
        EmulatedNode(sleep_idle_seconds=12, load_seconds=900) as server,
        a_fleet(a_spec(url=server.url), **USUAL) as fleet,
        httpx.AsyncClient(base_url=server.url, timeout=2000) as other,
    ):
        await fleet.until_state("a", NodeState.SLEEPING)
        work = asyncio.create_task(other.post(CHAT, json={"messages": [], "max_tokens": 1}))
        limit = fleet["a"].sleep.wake_limit(fleet["a"].properties.size)
        assert await state_after(fleet, limit) is NodeState.SLEEPING
        assert await state_after(fleet, 30) is NodeState.MUTE
        assert fleet["a"].free_slots(now()) == 0
        await work
        assert await state_after(fleet, 5) is NodeState.READY


@in_virtual_time
async def test_a_server_that_slept_at_the_start_is_asked_for_its_work_once_it_is_awake() -> None:
    async with (
        EmulatedNode(embeddings=True, sleep_idle_seconds=12, load_seconds=5) as server,
        httpx.AsyncClient(base_url=server.url, timeout=100) as other,
    ):
        await asyncio.sleep(13)
        async with a_fleet(a_spec(url=server.url), **USUAL, discover_interval=900.0) as fleet:
            properties = fleet["a"].properties
            assert await state_after(fleet, 60) is NodeState.SLEEPING
            assert properties.purpose is None
            await other.post("/v1/embeddings", json={"input": "hi"})
            await fleet.until(lambda: properties.purpose == "embeddings", 7.0)
            asked = server.control_requests
            await asyncio.sleep(5)
            assert server.control_requests - asked < 5
            await fleet.until_state("a", NodeState.SLEEPING)


@in_virtual_time
async def test_a_stream_on_a_frozen_node_is_resumed_elsewhere_after_its_silence(
    tmp_path: Path,
) -> None:
    async with (
        EmulatedNode(decode_tps=10, answer_tokens=100) as first,
        EmulatedNode(decode_tps=10, answer_tokens=100) as second,
        running_gateway(
            tmp_path,
            [first.url, second.url],
            {"timeouts": {"silence": 20}, "health": {"timeout": 2.0}},
        ) as running,
    ):
        nodes = running.gateway.fleet.nodes
        first.faults.share_next(second.faults)
        first.faults.next("hang", after_events=20)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
        began = now()
        stream = asyncio.create_task(running.client.post(CHAT, json=body | {"stream": True}))
        await until(lambda: first.busy or second.busy, 10.0)
        frozen = first if first.busy else second
        node = next(one for one in nodes.values() if one.spec.url == frozen.url)
        freeze(frozen)
        await until(lambda: node.state is NodeState.MUTE, 20.0)
        answer = await running.client.post(CHAT, json=body)
        assert answer.headers["x-gateway-node"] != node.name
        assert (await stream).text.endswith("data: [DONE]\n\n")
        assert node.requests == 1
        assert now() - began == pytest.approx(2 + 20 + 8, abs=2)


@pytest.mark.real
@pytest.mark.slow
async def test_a_grammar_that_freezes_a_real_server_makes_its_node_mute() -> None:
    quick: dict[str, Any] = {"interval": 0.5, "timeout": 0.5}
    with running_demo_servers(1, slots=2) as [server]:
        async with (
            a_fleet(a_spec(url=server.url), **quick) as fleet,
            httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=200) as other,
        ):
            body = {"prompt": "a", "grammar": GRAMMAR, "max_tokens": 1}
            work = asyncio.create_task(other.post("/v1/completions", json=body))
            began = time.monotonic()
            await fleet.until_state("a", NodeState.MUTE, 60.0)
            assert time.monotonic() - began < 30
            assert not work.done()
            assert fleet["a"].free_slots(now()) == 0
            await fleet.until_state("a", NodeState.READY, 200.0)
            await work
