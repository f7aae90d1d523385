"""Standby nodes behind a whole gateway, started and stopped by HTTP hooks, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from gateway.access.keys import new_key
from gateway.fleet.lifecycle import LifecyclePhase
from gateway.fleet.node import NodeState
from tests.elastic.cloud import Cloud
from tests.elastic.site import MODEL, ask, metrics, order, settings, shown, until_state
from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, Running, running_gateway, until
from tests.virtual import in_virtual_time, now

LEFT, RIGHT = new_key("left"), new_key("right")


@in_virtual_time
async def test_a_burst_starts_standby_nodes_and_afterwards_they_are_stopped(tmp_path: Path) -> None:
    fast: dict[str, Any] = {"decode_tps": 20.0, "prefill_tps": 500.0}
    async with Cloud() as cloud, EmulatedNode(slots=1, model=MODEL, **fast) as base:
        first, second = cloud.machine("spare-1", **fast), cloud.machine("spare-2", **fast)
        nodes = [
            {"name": "base", "url": base.url},
            cloud.node("spare-1"),
            cloud.node("spare-2", cost_per_hour=1.0),
        ]
        async with running_gateway(tmp_path, nodes, settings()) as running:
            await until_state(running, "spare-1", NodeState.STANDBY)
            await until_state(running, "spare-2", NodeState.STANDBY)
            assert first.orders == second.orders == []
            answers = await asyncio.gather(
                *(ask(running, f"question {number}", 20) for number in range(16))
            )
            assert [answer.status_code for answer in answers] == [200] * 16
            served = {answer.headers["x-gateway-node"] for answer in answers}
            assert served >= {"base", "spare-1"}
            await until_state(running, "spare-1", NodeState.STANDBY)
            await until_state(running, "spare-2", NodeState.STANDBY)
            assert first.orders == ["start", "stop"]
            assert second.orders in ([], ["start", "stop"])
            told = await shown(running, "spare-1")
            assert "it has idled" in told["reason"] or "the others could do" in told["reason"]
            assert told["elastic"]["phase"] == "off"
            assert told["elastic"]["startup_seconds"] > 0
            page = await metrics(running)
            assert 'llama_gateway_hooks_total{node="spare-1",hook="start",outcome="ok"} 1' in page


@asynccontextmanager
async def one_standby(folder: Path, cloud: Cloud, chosen: dict[str, Any]) -> AsyncIterator[Running]:
    """A gateway whose only node, `spare`, is on standby."""
    async with running_gateway(folder, [cloud.node("spare")], chosen, wait_ready=False) as running:
        await until_state(running, "spare", NodeState.STANDBY)
        yield running


@in_virtual_time
async def test_a_client_with_a_deadline_before_the_start_gets_retry_after(tmp_path: Path) -> None:
    async with Cloud() as cloud:
        cloud.machine("spare").answers["start"] = (20.0, 200, "")
        chosen = settings() | {"queue": {"max_wait": 1.0}}
        async with one_standby(tmp_path, cloud, chosen) as running:
            answer = await ask(running)
            assert answer.status_code == 503
            assert answer.headers["x-gateway-reason"] == "starting"
            assert 40 <= int(answer.headers["retry-after"]) <= 60
            told = await shown(running, "spare")
            assert told["state"] == "starting"
            assert "nothing else serves" in told["reason"]


@in_virtual_time
async def test_a_failed_start_hook_is_reported_and_not_tried_again_at_once(tmp_path: Path) -> None:
    async with Cloud() as cloud:
        spare = cloud.machine("spare")
        spare.answers["start"] = (0.1, 503, "no capacity in this zone")
        chosen = settings(backoff=60.0) | {"retries": {"wait_for_node": 2.0}}
        async with one_standby(tmp_path, cloud, chosen) as running:
            answer = await ask(running)
            assert answer.status_code == 503
            assert answer.headers["x-gateway-reason"] == "no_node"
            told = await shown(running, "spare")
            assert told["state"] == "standby"
            assert "its start hook failed" in told["reason"]
            assert "not started again for" in told["reason"]
            assert told["elastic"]["failures"] == 1
            page = await metrics(running)
            assert 'hooks_total{node="spare",hook="start",outcome="failed"} 1' in page
        # It may be running even so.
        assert spare.orders == ["start", "stop"]
    assert "no capacity in this zone" in (tmp_path / "gateway.log").read_text()


@in_virtual_time
async def test_a_stop_hook_that_fails_is_tried_again_and_the_node_counts_as_running(
    tmp_path: Path,
) -> None:
    async with Cloud() as cloud:
        spare = cloud.machine("spare")
        spare.answers["stop"] = (0.1, 503, "not now")
        async with one_standby(tmp_path, cloud, settings()) as running:
            assert (await ask(running)).status_code == 200
            node = running.gateway.fleet.nodes["spare"]
            await until(lambda: "its stop hook failed" in node.reason)
            assert node.state is NodeState.DRAINING
            del spare.answers["stop"]
            await until_state(running, "spare", NodeState.STANDBY)
        assert spare.orders[0] == "start"
        assert set(spare.orders[1:]) == {"stop"}


@in_virtual_time
async def test_limits_are_reloaded(tmp_path: Path) -> None:
    async with Cloud() as cloud:
        spare = cloud.machine("spare")
        async with one_standby(tmp_path, cloud, settings()) as running:
            running.write_settings(settings(min=1))
            await order(running, "reload")  # virtual time does not wait for the file watcher
            await until_state(running, "spare", NodeState.READY)
            running.write_settings(settings())
            await order(running, "reload")
            await until_state(running, "spare", NodeState.STANDBY)
        assert spare.orders == ["start", "stop"]


@in_virtual_time
async def test_a_restarted_gateway_finds_the_running_nodes(tmp_path: Path) -> None:
    async with Cloud() as cloud:
        first, second = cloud.machine("spare-1"), cloud.machine("spare-2")
        nodes = [cloud.node("spare-1"), cloud.node("spare-2")]
        chosen = settings(min=1)
        async with running_gateway(tmp_path, nodes, chosen, wait_ready=False) as running:
            await until(lambda: running.gateway.fleet.nodes["spare-1"].state is NodeState.READY)
        async with running_gateway(tmp_path, nodes, chosen, wait_ready=False) as running:
            await until_state(running, "spare-1", NodeState.READY)
            await until_state(running, "spare-2", NodeState.STANDBY)
            assert (await ask(running)).status_code == 200
            power = running.gateway.fleet.nodes["spare-1"].lifecycle
            await until(lambda: power.phase is LifecyclePhase.ON)
        assert (first.orders, second.orders) == (["start"], [])


@in_virtual_time
async def test_a_drained_standby_node_is_left_alone_until_it_is_resumed(tmp_path: Path) -> None:
    async with Cloud() as cloud:
        spare = cloud.machine("spare")
        async with running_gateway(
            tmp_path, [cloud.node("spare")], settings(), wait_ready=False
        ) as running:
            await until_state(running, "spare", NodeState.STANDBY)
            assert (await ask(running)).status_code == 200
            await order(running, "nodes/spare/drain")
            assert (await shown(running, "spare"))["state"] == "draining"
            await asyncio.sleep(10.0)  # far more than `stop_after`
            assert spare.orders == ["start"]
            await order(running, "nodes/spare/resume")
            await until_state(running, "spare", NodeState.STANDBY)
            assert spare.orders == ["start", "stop"]


@in_virtual_time
async def test_a_node_finishes_its_requests_before_it_is_stopped(tmp_path: Path) -> None:
    async with Cloud() as cloud, EmulatedNode(slots=2, model=MODEL) as base:
        spare = cloud.machine("spare", decode_tps=20.0, answer_tokens=100)
        nodes = [{"name": "base", "url": base.url}, cloud.node("spare")]
        chosen = settings(min=1, stop_after=0.5)
        async with running_gateway(tmp_path, nodes, chosen) as running:
            await until_state(running, "spare", NodeState.READY)
            await order(running, "nodes/base/drain")
            node = running.gateway.fleet.nodes["spare"]
            long = asyncio.create_task(ask(running, "a long story", 80))
            await until(lambda: node.leases)
            await order(running, "nodes/base/resume")
            running.write_settings(settings(min=0, stop_after=0.5))
            await order(running, "reload")
            await until_state(running, "spare", NodeState.DRAINING)
            assert node.leases
            assert "the others could do its work" in node.reason
            assert (await ask(running)).headers["x-gateway-node"] == "base"
            answer = await long
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 80
            await until_state(running, "spare", NodeState.STANDBY)
        assert spare.orders == ["start", "stop"]


@in_virtual_time
async def test_a_node_with_work_of_other_clients_is_not_stopped(tmp_path: Path) -> None:
    async with Cloud() as cloud:
        spare = cloud.machine("spare", decode_tps=20.0, answer_tokens=100)
        async with running_gateway(
            tmp_path, [cloud.node("spare")], settings(), wait_ready=False
        ) as running:
            await until_state(running, "spare", NodeState.STANDBY)
            assert (await ask(running, tokens=2)).status_code == 200
            # Another client, past the gateway.
            began = now()
            async with httpx.AsyncClient(
                base_url=spare.url, trust_env=False, verify=NO_TLS
            ) as other:
                body = {"messages": [{"role": "user", "content": "story"}], "max_tokens": 80}
                answer = await other.post("/v1/chat/completions", json=body, timeout=30)
            assert answer.json()["usage"]["completion_tokens"] == 80
            assert now() - began > 3.0  # more than `stop_after`
            assert spare.orders == ["start"]
            await until_state(running, "spare", NodeState.STANDBY)


@in_virtual_time
async def test_a_pool_that_is_short_of_slots_starts_its_own_standby_nodes(tmp_path: Path) -> None:
    pools = [
        {"cache": {"nodes": {"side": key.id}}, "id": key.id, "sha256": key.sha256}
        for key in (LEFT, RIGHT)
    ]
    fast: dict[str, Any] = {"decode_tps": 20.0, "prefill_tps": 500.0}
    async with Cloud() as cloud, EmulatedNode(slots=1, model=MODEL, **fast) as base:
        left, right = cloud.machine("left", **fast), cloud.machine("right", **fast)
        nodes = [
            {"name": "base", "url": base.url, "labels": {"side": "right"}},
            cloud.node("left", labels={"side": "left"}),
            cloud.node("right", labels={"side": "right"}),
        ]
        async with running_gateway(tmp_path, nodes, {**settings(), "keys": pools}) as running:
            await until_state(running, "left", NodeState.STANDBY)
            await until_state(running, "right", NodeState.STANDBY)
            header = {"authorization": f"Bearer {RIGHT.text}"}
            answers = await asyncio.gather(
                *(ask(running, f"question {number}", 20, **header) for number in range(12))
            )
            assert {answer.status_code for answer in answers} == {200}
            assert left.orders == []
            assert right.orders[:1] == ["start"]
