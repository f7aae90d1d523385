"""The model placer over emulated routers: commands that are refused, lost or overtaken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.nodes.node import NodeState
from gateway.nodes.router import LoadPhase
from tests.emulator.recorded_router import RecordedRouter
from tests.gateways import Running, running_gateway, until
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
LOAD, UNLOAD = "POST /models/load", "POST /models/unload"
QUICK: dict[str, Any] = {"model_placement": {"hysteresis": 1}}


@asynccontextmanager
async def placed(
    folder: Path,
    *routers: RecordedRouter,
    settings: Mapping[str, Any] = QUICK,
    **node: Any,
) -> AsyncIterator[Running]:
    """A gateway over these routers, `r1` and so on."""
    async with AsyncExitStack() as stack:
        for router in routers:
            await stack.enter_async_context(router)
        nodes = [
            {"name": f"r{number}", "url": router.url, "host": f"r{number}", **node}
            for number, router in enumerate(routers, 1)
        ]
        running = await stack.enter_async_context(running_gateway(folder, nodes, settings))
        await asyncio.sleep(1.0)
        yield running
        await until(lambda: not running.held(), 60.0, running.held)


def router(*models: str, **options: Any) -> RecordedRouter:
    chosen = {"models_max": 1, "load_seconds": 2.0, "slots": 2, "decode_tps": 100, **options}
    return RecordedRouter(models or ("a", "b"), **chosen)


async def ask(running: Running, model: str, tokens: int = 20, **more: Any) -> httpx.Response:
    body = {"model": model, "max_tokens": tokens, "ignore_eos": True, **more}
    words = [{"role": "user", "content": "hi"}]
    return await running.client.post(CHAT, json={**body, "messages": words})


def phase(running: Running, name: str) -> LoadPhase:
    load = running.gateway.fleet.nodes[name].load
    assert load is not None
    return load.phase


@in_virtual_time
async def test_a_model_is_loaded_once_for_all_that_wait_for_it(tmp_path: Path) -> None:
    one, other = router(), router()
    async with placed(tmp_path, one, other) as running:
        answers = await asyncio.gather(*(ask(running, "a") for _ in range(2)))
        assert [answer.status_code for answer in answers] == [200, 200]
        assert one.asked[LOAD] + other.asked[LOAD] == 1
        assert one.asked[UNLOAD] + other.asked[UNLOAD] == 0


@in_virtual_time
async def test_a_refused_load_is_the_pair_s_failure_and_the_request_goes_elsewhere(
    tmp_path: Path,
) -> None:
    one, other = router(), router()
    body = b'{"error": {"code": 500, "message": "no such\\nluck", "type": "server_error"}}'
    for each in (one, other):
        each.told[LOAD] = (500, body)
    async with placed(tmp_path, one, other) as running:
        asked = asyncio.create_task(ask(running, "a"))
        await asyncio.sleep(1.0)
        loads = [running.gateway.fleet.nodes[name].load for name in ("r1/a", "r2/a")]
        assert [load.failures for load in loads if load] == [1, 1]
        assert all("the router refused: no such luck" in load.reason for load in loads if load)
        other.told.clear()
        assert (await asked).headers["x-gateway-node"] == "r2/a"
        assert other.asked[LOAD] == 2


@in_virtual_time
async def test_a_model_that_no_node_loads_is_answered_with_the_reason(tmp_path: Path) -> None:
    one = router("b", unreadable=["a"], models_max=0)
    settings = {**QUICK, "retries": {"wait_for_node": 5}}
    async with placed(tmp_path, one, settings=settings) as running:
        began = running.gateway.clock()
        broken = await ask(running, "a")
        assert running.gateway.clock() - began < 5.0
        assert (broken.status_code, broken.json()["error"]["code"]) == (503, "no_node")
        assert "No node could load 'a': 'r1/a': the router" in broken.json()["error"]["message"]
        assert 5 <= int(broken.headers["retry-after"]) <= 10
        again = await ask(running, "a")
        assert again.status_code == 503
        assert (await ask(running, "b")).status_code == 200
        assert one.models["a"].loads == 1


@in_virtual_time
async def test_a_load_that_failed_once_is_waited_for(tmp_path: Path) -> None:
    one = router()
    async with placed(tmp_path, one) as running:
        one.models["a"].failing_loads = 1
        began = running.gateway.clock()
        assert (await ask(running, "a")).status_code == 200
        assert 10.0 < running.gateway.clock() - began < 16.0


@pytest.mark.parametrize("answer", [None, (500, b'{"error":{"message":"model limit reached"}}')])
@in_virtual_time
async def test_a_lost_command_and_a_full_router_are_no_failures_of_the_model(
    tmp_path: Path, answer: tuple[int, bytes] | None
) -> None:
    one = router()
    one.told[LOAD] = answer
    async with placed(tmp_path, one) as running:
        asked = asyncio.create_task(ask(running, "a"))
        await asyncio.sleep(7.0)
        assert 2 <= one.asked[LOAD] <= 10  # One whose connection breaks is sent twice.
        load = running.gateway.fleet.nodes["r1/a"].load
        assert load is not None
        assert (load.phase, load.failures) == (LoadPhase.UNLOADED, 0)
        one.told.clear()
        assert (await asked).status_code == 200


@in_virtual_time
async def test_a_router_that_ends_under_a_command_has_failed_nothing(tmp_path: Path) -> None:
    one = router(load_seconds=20.0)
    async with placed(tmp_path, one) as running:
        asked = asyncio.create_task(ask(running, "a"))
        await until(lambda: phase(running, "r1/a") is LoadPhase.LOADING)
        await asyncio.sleep(3.0)
        await one.kill()
        await asyncio.sleep(8.0)
        async with router(port=one.port) as back:
            assert (await asked).status_code == 200
            assert back.models["a"].loads == 1
        load = running.gateway.fleet.nodes["r1/a"].load
        assert load is not None
        assert load.failures == 0


@in_virtual_time
async def test_a_model_whose_server_hangs_gets_no_new_requests_and_is_loaded_elsewhere(
    tmp_path: Path,
) -> None:
    one, other = router(), router()
    async with placed(tmp_path, one, other) as running:
        node = (await ask(running, "a")).headers["x-gateway-node"]
        hung = one if node == "r1/a" else other
        hung.models["a"].node.faults.set("hang", path="*")
        caught = asyncio.create_task(ask(running, "a"))
        nodes = running.gateway.fleet.nodes
        await until(lambda: nodes[node].state is NodeState.MUTE, 10.0)
        assert "no answer to /props" in nodes[node].reason
        async with asyncio.timeout(10.0):
            answer = await ask(running, "a")
        assert answer.status_code == 200
        assert answer.headers["x-gateway-node"] != node
        caught.cancel()
        await until(lambda: nodes[node].state is NodeState.DOWN, 90.0)
        assert nodes[node.partition("/")[0]].state is NodeState.READY
        await until(lambda: nodes[node].state is NodeState.UNLOADED, 30.0)
        assert hung.asked[UNLOAD] == 1


@in_virtual_time
async def test_others_requests_are_waited_for_before_an_unload(tmp_path: Path) -> None:
    one = router()
    async with placed(tmp_path, one) as running:
        assert (await ask(running, "a")).status_code == 200
        await asyncio.sleep(2.0)
        async with httpx.AsyncClient(base_url=one.url, trust_env=False, timeout=60) as client:
            body = {"model": "a", "max_tokens": 1000, "ignore_eos": True, "messages": []}
            theirs = asyncio.create_task(client.post(CHAT, json=body))
            await asyncio.sleep(0.5)
            ours = asyncio.create_task(ask(running, "b"))
            await asyncio.sleep(5.0)
            assert one.asked[UNLOAD] == 0
            assert (await theirs).json()["usage"]["completion_tokens"] == 1000
        assert (await ours).status_code == 200
        assert one.asked[UNLOAD] == 1


@in_virtual_time
async def test_after_a_hand_over_only_what_waits_here_is_loaded(tmp_path: Path) -> None:
    one = router(models_max=2)
    rules = {**QUICK, "models": {"a": {"replicas": {"min": 1}}}}
    async with placed(tmp_path, one, settings=rules) as running:
        await until(lambda: phase(running, "r1/a") is LoadPhase.READY)
        await asyncio.sleep(2.0)
        running.gateway.model_placer.hand_over()
        await one.kill_model("a")
        await asyncio.sleep(30.0)
        assert phase(running, "r1/a") is LoadPhase.UNLOADED
        running.gateway.model_placer.configure(running.gateway.settings)
        assert (await ask(running, "b")).status_code == 200
        await asyncio.sleep(5.0)
        assert phase(running, "r1/a") is LoadPhase.UNLOADED
