"""A second gateway over the same nodes is told of; what only looks like one is not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, Running, running_gateway
from tests.virtual import in_virtual_time

MINUTES = 7
BODY = {"messages": [{"role": "user", "content": "tell me more"}], "max_tokens": 40}


@contextlib.asynccontextmanager
async def gateway_over(folder: Path, nodes: list[EmulatedNode]) -> AsyncIterator[Running]:
    """A gateway beside others, over nodes that run."""
    folder.mkdir()  # noqa: ASYNC240 - a test's
    async with running_gateway(folder, [node.url for node in nodes]) as running:
        yield running


@contextlib.asynccontextmanager
async def two_gateways(folder: Path) -> AsyncIterator[tuple[Running, Running, list[EmulatedNode]]]:
    """Two gateways over the same two nodes."""
    nodes = [EmulatedNode(slots=1, decode_tps=2.0) for _ in range(2)]
    async with (
        nodes[0],
        nodes[1],
        gateway_over(folder / "first", nodes) as first,
        gateway_over(folder / "second", nodes) as second,
    ):
        yield first, second, nodes


async def ask_now_and_then(*urls: str) -> None:
    """Two chats of 20 seconds at once, once a minute."""
    async with httpx.AsyncClient(timeout=600.0, trust_env=False, verify=NO_TLS) as client:
        for _ in range(MINUTES):
            sent = [client.post(f"{url}/v1/chat/completions", json=BODY) for url in urls]
            for answer in await asyncio.gather(*sent):
                assert answer.status_code == 200
            await asyncio.sleep(40.0)


async def told(running: Running) -> list[str]:
    return [problem.id for problem in await running.gateway.live.view.read_problems()]


@in_virtual_time
async def test_a_second_gateway_on_the_same_nodes_is_told(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (first, second, nodes):
        assert await told(first) == []
        # One who uses a node directly is none.
        await ask_now_and_then(nodes[0].url)
        assert await told(first) == []
        assert first.gateway.fleet.others_take_slots(first.gateway.fleet.nodes["node-0"])
        await ask_now_and_then(second.url, second.url)
        assert await told(first) == ["second_gateway"]
        assert "nodes_used_by_others 2" in (await first.admin.get("/metrics")).text
        # The one that all requests came through has seen no other.
        await asyncio.sleep(600.0)
        assert await told(first) == await told(second) == []


@in_virtual_time
async def test_after_a_hand_over_the_other_process_is_no_second_gateway(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (first, second, _):
        fleet = first.gateway.fleet
        fleet._alone_from = first.gateway.clock() + first.gateway.settings.timeouts.total
        await ask_now_and_then(second.url, second.url)
        assert await told(first) == []
        fleet.take_over()
        assert await told(first) == ["second_gateway"]
        fleet.hand_over()
        assert await told(first) == []
