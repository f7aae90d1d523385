"""Nodes watched by a fleet: emulated servers that come, go, load and fall silent."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from gateway.fleet.node import NodeState
from gateway.transport.errors import ConnectFailed
from tests.emulator import EmulatedNode
from tests.fleet.build import a_fleet, a_spec, inventory, take
from tests.transport.pool_client import pool_client
from tests.virtual import in_virtual_time, now

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 500}


@in_virtual_time
async def test_a_node_is_ready_once_its_properties_are_known() -> None:
    async with EmulatedNode(slots=3) as server, a_fleet(a_spec(url=server.url)) as fleet:
        node = fleet["a"]
        assert node.state is NodeState.READY
        assert node.free_slots(now()) == 3
        assert fleet.states("a") == ["starting", "ready"]
        assert fleet.capacity > 0


@in_virtual_time
async def test_all_nodes_are_probed_at_once_at_the_start() -> None:
    async with EmulatedNode() as server:
        specs = [a_spec(f"n{i}", server.url) for i in range(50)]
        async with a_fleet(*specs, interval=60, timeout=5) as fleet:
            assert all(node.state is NodeState.READY for node in fleet.fleet.nodes.values())


@in_virtual_time
async def test_a_node_that_is_not_there_at_the_start_does_not_delay_the_others() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec("a", server.url), a_spec("b")) as fleet:
        assert fleet.state("b") is NodeState.DOWN
        assert "http://127.0.0.1:9" in fleet["b"].reason
        assert fleet.state("a") is NodeState.READY


@in_virtual_time
async def test_a_killed_server_goes_down_and_is_ready_again_when_it_is_back() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url)) as fleet:
        await server.kill()
        await fleet.until_state("a", NodeState.DOWN)
        assert fleet["a"].free_slots(now()) == 0
        before = fleet.capacity
        server.slots.slots.pop()  # it comes back with fewer slots
        await server.revive(loading=True)
        await fleet.until_state("a", NodeState.LOADING)
        server.loading = False
        await fleet.until_state("a", NodeState.READY)
        assert fleet.capacity > before
        assert fleet["a"].slots_total == 1
        assert fleet.states("a") == ["starting", "ready", "down", "loading", "ready"]


@in_virtual_time
async def test_a_node_that_names_no_model_is_down_until_the_inventory_names_one() -> None:
    async with EmulatedNode() as server:
        server.faults.set("status", path="/v1/models", status=404)
        server.faults.set("status", path="/props", status=404)
        async with a_fleet(a_spec(url=server.url)) as fleet:
            assert fleet.state("a") is NodeState.DOWN
            assert "(model: ...)" in fleet["a"].reason
            fleet.fleet.apply(inventory(a_spec(url=server.url, model="m")))
            await fleet.until_state("a", NodeState.READY)
        server.faults.clear()


async def server_is_asked_again(server: EmulatedNode) -> None:
    asked = server.control_requests
    await server.until(lambda: server.control_requests > asked + 4)


@in_virtual_time
async def test_one_failed_probe_changes_nothing() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url)) as fleet:
        for _ in range(3):
            server.faults.next("status", path="/health", status=500)
            await fleet.until(lambda: not server.faults)
            await server_is_asked_again(server)
        assert fleet.states("a") == ["starting", "ready"]


@pytest.mark.slow
@in_virtual_time
async def test_a_node_that_reads_a_prompt_is_mute_and_not_down() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url)) as fleet:
        lease = take(fleet["a"])
        server.faults.set("mute")
        await fleet.until_state("a", NodeState.MUTE)
        assert fleet["a"].free_slots(now()) == 0
        assert "it reads a prompt" in fleet["a"].reason
        await asyncio.sleep(2)  # more than `fall` probes
        assert fleet.state("a") is NodeState.MUTE
        before = fleet.capacity
        server.faults.clear()
        await fleet.until_state("a", NodeState.READY)
        assert fleet.capacity > before
        assert fleet.states("a") == ["starting", "ready", "mute", "ready"]
        lease.release()


@pytest.mark.slow
@in_virtual_time
async def test_a_node_whose_streams_move_is_mute_until_they_stop() -> None:
    async with EmulatedNode() as server:
        spec = a_spec(url=server.url)
        async with a_fleet(spec, prefill_grace=0.01, timeouts={"silence": 0.6}) as fleet:
            lease = take(fleet["a"])
            server.faults.set("mute")
            until = now() + 2.5
            while now() < until:
                lease.content_received(now())
                await asyncio.sleep(0.02)
            assert fleet.state("a") is NodeState.MUTE
            await fleet.until_state("a", NodeState.DOWN)
            assert fleet.states("a") == ["starting", "ready", "mute", "down"]
            lease.release()
            server.faults.clear()


@in_virtual_time
async def test_a_silent_node_without_work_goes_down() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url)) as fleet:
        server.faults.set("mute")
        await fleet.until_state("a", NodeState.DOWN)
        assert fleet.states("a") == ["starting", "ready", "down"]
        server.faults.clear()


@in_virtual_time
async def test_a_refused_connection_takes_a_node_down_though_a_stream_moved() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url)) as fleet:
        lease = take(fleet["a"])
        lease.content_received(now())
        await server.kill()
        await fleet.until_state("a", NodeState.DOWN)
        lease.release()


@in_virtual_time
async def test_a_wrong_key_takes_a_node_down_with_the_remedy() -> None:
    async with EmulatedNode(api_key="right") as server:
        async with a_fleet(a_spec(url=server.url, api_key="wrong")) as fleet:
            assert fleet.state("a") is NodeState.DOWN
            assert "api_key_env" in fleet["a"].reason
        async with a_fleet(a_spec(url=server.url, api_key="right")) as fleet:
            assert fleet.state("a") is NodeState.READY


@in_virtual_time
async def test_a_disabled_node_is_listed_and_not_probed() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url, enabled=False)) as fleet:
        await asyncio.sleep(0.3)
        assert fleet.state("a") is NodeState.STANDBY
        assert fleet["a"].reason == "enabled: false in the inventory"
        assert server.connections_opened == 0


@in_virtual_time
async def test_the_work_of_other_clients_counts() -> None:
    async with (
        EmulatedNode(slots=2, decode_tps=20) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as client,
        AsyncExitStack() as others,
    ):
        await others.enter_async_context(client.stream("POST", "/v1/chat/completions", json=CHAT))
        async with a_fleet(a_spec(url=server.url)) as fleet:
            node = fleet["a"]
            # Known before the node got any work.
            assert (node.foreign, node.free_slots(now()), node.slots_busy) == (1, 1, 1)
            before = fleet.capacity
            await others.aclose()
            await fleet.until(lambda: node.foreign == 0)
            assert node.free_slots(now()) == 2
            assert fleet.capacity > before


@in_virtual_time
async def test_a_refused_reading_of_the_slots_ends_the_work_of_other_clients() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url)) as fleet:
        node = fleet["a"]
        response = node.upstream.response

        def refuse_readings(head: bytes, *args: Any, **keys: Any) -> Any:
            if b" /slots " in head or b" /metrics " in head:
                raise ConnectFailed("refused")
            return response(head, *args, **keys)

        node.upstream.response = refuse_readings  # type: ignore[method-assign]
        node.occupancy.foreign = 1
        await fleet.until(lambda: node.foreign == 0)
        assert node.state is NodeState.READY


@in_virtual_time
async def test_our_own_work_is_not_taken_for_that_of_others() -> None:
    async with (
        EmulatedNode(slots=2, decode_tps=20) as server,
        a_fleet(a_spec(url=server.url), interval=0.02) as fleet,
    ):
        node = fleet["a"]
        for _ in range(5):
            lease = take(node)
            request = pool_client(lease.upstream).stream(
                "POST", "/v1/chat/completions", json=CHAT | {"max_tokens": 4}
            )
            async with request as response:
                await response.aread()
            lease.release()
            assert node.foreign == 0
        await server_is_asked_again(server)
        assert node.foreign == 0


@in_virtual_time
async def test_drift_is_published_once_and_again_when_it_changes() -> None:
    async with EmulatedNode(slots=2) as server, a_fleet(a_spec(url=server.url, slots=4)) as fleet:
        await asyncio.sleep(0.4)
        said = ("slots: the inventory says 4, the server has 2",)
        assert [drift.differences for drift in fleet.drifts] == [said]
        assert fleet["a"].drift == said
        server.slots.slots.extend(type(server.slots.slots[0])(i) for i in (2, 3))
        await fleet.until(lambda: not fleet["a"].drift)
        assert [drift.differences for drift in fleet.drifts] == [said, ()]


@in_virtual_time
async def test_failures_open_the_circuit_and_time_alone_lets_a_trial_in() -> None:
    async with EmulatedNode() as server:
        spec = a_spec(url=server.url)
        async with a_fleet(spec, failures=3, interval=60, open=0.3) as fleet:
            node = fleet["a"]
            for _ in range(3):
                fleet.fleet.request_failed(node, now())
            assert node.state is NodeState.EJECTED
            assert node.failures == 3
            assert node.free_slots(now()) == 0
            before = fleet.capacity
            await fleet.until(lambda: fleet.capacity > before)
            assert node.free_slots(now()) == 1
            trial = take(node)
            assert trial.trial
            fleet.fleet.request_succeeded(node, now(), began=trial.taken_at)
            trial.release()
            assert fleet.states("a") == ["starting", "ready", "ejected", "ready"]


@pytest.mark.slow
@in_virtual_time
async def test_a_failed_request_makes_the_next_probe_come_soon() -> None:
    async with (
        EmulatedNode() as server,
        a_fleet(a_spec(url=server.url), interval=60, fall=2) as fleet,
    ):
        await asyncio.sleep(0.1)
        await server.kill()
        fleet.fleet.request_failed(fleet["a"], now())
        await fleet.until_state("a", NodeState.DOWN)


@in_virtual_time
async def test_an_operators_probe_closes_the_circuit_of_a_node_that_answers() -> None:
    async with (
        EmulatedNode() as server,
        a_fleet(a_spec(url=server.url), failures=1, open=60, open_max=60) as fleet,
    ):
        fleet.fleet.request_failed(fleet["a"], now())
        assert fleet.state("a") is NodeState.EJECTED
        assert (await fleet.fleet.probe("a")).up
        assert fleet.state("a") is NodeState.READY
        await server.kill()
        assert not (await fleet.fleet.probe("a")).up


@in_virtual_time
async def test_a_node_drained_in_its_slow_start_causes_no_wake_ups_after_it() -> None:
    asked = 0

    def clock() -> float:
        nonlocal asked
        asked += 1
        return now()

    async with (
        EmulatedNode() as server,
        a_fleet(
            a_spec(url=server.url), failures=1, interval=60, slow_start=5, clock=clock
        ) as fleet,
    ):
        fleet.fleet.request_failed(fleet["a"], now())
        await fleet.fleet.probe("a")
        fleet.fleet.drain("a")
        before = asked
        await asyncio.sleep(20)
        assert asked - before < 100


@pytest.mark.slow
@in_virtual_time
async def test_the_findings_of_a_request_change_the_state_at_once() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url), interval=60) as fleet:
        await server.kill()
        fleet.fleet.connect_failed(fleet["a"], "connection refused")
        assert fleet.state("a") is NodeState.DOWN
        assert fleet["a"].reason == "connection refused"
        await server.revive(loading=True)
        await fleet.until_state("a", NodeState.LOADING)
        server.loading = False
        await fleet.until_state("a", NodeState.READY)
        fleet.fleet.model_loading(fleet["a"])
        assert fleet.state("a") is NodeState.LOADING
        await fleet.until_state("a", NodeState.READY)
        fleet.fleet.endpoint_refused(fleet["a"], "rerank")
        assert not fleet["a"].supports("rerank")
        fleet.fleet.learn_timings(fleet["a"], {"predicted_n": 10, "predicted_ms": 1000})
        assert fleet["a"].speed.decode_tps == 10


@in_virtual_time
async def test_events_of_a_removed_node_do_no_harm() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url)) as fleet:
        node = fleet["a"]
        lease = take(node)
        fleet.fleet.apply(inventory())
        said = list(fleet.changes)
        for _ in range(9):
            fleet.fleet.request_failed(node, now())
        fleet.fleet.connect_failed(node, "connection refused")
        fleet.fleet.request_succeeded(node, now())
        lease.release()
        assert fleet.changes == said
