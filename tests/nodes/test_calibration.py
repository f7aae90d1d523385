"""The calibration of idle nodes: when, what it shows, and that no request waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config.inventory import NodeSpec
from gateway.events import EventBus, NodeCalibrated
from gateway.nodes.calibration import MOST_AT_ONCE, WORDS, Calibrator, due
from gateway.nodes.node import MOST_CALIBRATIONS, Node, NodeState
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.known import known
from tests.nodes.build import Clock, Running, a_fleet, a_node, a_spec, learn_timings, take
from tests.servers import running_demo_servers
from tests.virtual import in_virtual_time, now

HALF: dict[str, Any] = {"prefill_tps": 200.0, "decode_tps": 20.0, "prefill_stalls": True}


@asynccontextmanager
async def calibrated(
    *nodes: NodeSpec | EmulatedNode,
) -> AsyncIterator[tuple[Running, list[NodeCalibrated]]]:
    """A fleet whose idle nodes are calibrated, and the events of it."""
    bus, ended = EventBus(), list[NodeCalibrated]()
    bus.subscribe(NodeCalibrated, ended.append)
    async with a_fleet(*nodes, interval=1.0) as running:
        calibrator = Calibrator(running.fleet, bus, now, random.Random(7))
        task = asyncio.create_task(calibrator.run())
        try:
            yield running, ended
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def paths(server: EmulatedNode) -> list[str]:
    return [request.path for request in server.seen]


@in_virtual_time
async def test_a_cold_node_shows_its_speed_before_anyone_asks() -> None:
    server = EmulatedNode(slots=1, **HALF)
    async with calibrated(server) as (running, ended):
        began, node = now(), running["a"]
        await running.until(lambda: bool(ended))
        # The first request is thrown away: 16 tokens and 2; the second reads 100 and writes 8.
        assert [event.outcome for event in ended] == ["done"]
        assert paths(server) == ["/completion", "/completion"]
        assert now() - began < 3
        assert node.speed.expected_prefill_tps == pytest.approx(200, rel=0.1)
        assert 1 / node.speed.token_base == pytest.approx(20, rel=0.1)
        # It is a guess, which is nobody's use and makes nobody degraded.
        assert (node.speed.samples, node.requests, node.failures) == (0, 0, 0)
        assert (node.speed.prefill_tps, node.state) == (None, NodeState.READY)
        await asyncio.sleep(60)
        assert len(ended) == 1
        assert (len(node.leases), node.foreign, node.calibration.penalty) == (0, 0, 0)
        # Another model has another speed.
        server.engine.model = "other"
        node.properties.n_params = 10**9
        node.forget_replaced_model()
        node.properties.n_params = 2 * 10**9
        node.forget_replaced_model()
        await running.until(lambda: len(ended) == 2)


@in_virtual_time
async def test_the_lease_of_a_request_ends_a_calibration_and_never_waits_for_it() -> None:
    slow: dict[str, Any] = {"prefill_tps": 20.0, "decode_tps": 2.0, "prefill_stalls": True}
    server = EmulatedNode(slots=1, batch=32, **slow)
    async with calibrated(server) as (running, ended):
        node = running["a"]
        await running.until(lambda: len(server.seen) == 2)
        await running.until(lambda: server.slots.busy == 1)
        # Its slot is free to requests, also after `/slots` has shown it busy.
        await asyncio.sleep(3)
        assert (node.free_slots(now()), node.slots_busy, node.foreign) == (1, 0, 0)
        assert node.calibration.penalty > 0
        lease = take(node)
        await running.until(lambda: bool(ended), limit=0.1)
        assert ended[0].outcome == "given_up"
        await running.until(lambda: server.slots.busy == 0, limit=2)  # A batch of 32 tokens.
        await asyncio.sleep(1)
        lease.release()
        assert node.free_slots(now()) == 1
        # It is tried again, and ends undisturbed.
        await running.until(lambda: len(ended) == 2)
        assert ended[1].outcome == "done"


@each_case(
    "keys",
    [{"embeddings": True}, {"embeddings": True, "rerank": True}, {"rerank": True}],
)
@in_virtual_time
async def test_nodes_that_write_nothing_are_calibrated_by_what_they_read(keys: Any) -> None:
    declared: dict[str, Any] = {} if "embeddings" in keys else {"endpoints": ["rerank"]}
    async with (
        EmulatedNode(slots=1, **HALF, **keys) as server,
        calibrated(a_spec(url=server.url, **declared)) as (running, ended),
    ):
        await running.until(lambda: bool(ended))
        assert (ended[0].outcome, ended[0].decode_tps) == ("done", None)
        assert len(set(paths(server))) == 1
        assert paths(server)[0] != "/completion"
        assert running["a"].speed.expected_prefill_tps == pytest.approx(200, rel=0.2)


@in_virtual_time
async def test_a_measured_node_is_only_warmed_up_after_its_server_has_loaded() -> None:
    server = EmulatedNode(slots=1, **HALF)
    async with calibrated(server) as (running, ended):
        await running.until(lambda: bool(ended))
        learn_timings(running["a"].speed, {"predicted_n": 100, "predicted_ms": 5000.0})
        await server.kill()
        await running.until_state("a", NodeState.DOWN)
        server.faults.next("status", status=500)
        await server.revive()
        await running.until(lambda: len(ended) == 2)
        assert ended.pop().outcome == "failed"
        await running.until(lambda: len(ended) == 2)
        assert ended[1].outcome == "warmed"
        await asyncio.sleep(60)
        assert len(ended) == 2
        assert running["a"].speed.samples == 1


def test_only_idle_llama_cpp_nodes_of_unknown_speed_are_due() -> None:
    clock = Clock()

    def fresh(**keys: Any) -> Node:
        return a_node(clock, **keys)

    def is_due(node: Node) -> bool:
        return due([node], (), clock()) == [node]

    assert is_due(fresh())
    assert not is_due(fresh(kind="openai"))
    assert not is_due(fresh(calibrate=False))
    for state in NodeState:
        node = fresh(state=state)
        assert is_due(node) is (state in {NodeState.READY, NodeState.DEGRADED}), state
    busy, measured, blind = fresh(), fresh(), fresh()
    take(busy)
    learn_timings(measured.speed, {"prompt_n": 100, "prompt_ms": 100.0})
    blind.properties.path_refused("/slots")
    assert not any(map(is_due, (busy, measured, blind)))


def test_nodes_of_one_host_take_turns_and_eight_run_at_once() -> None:
    clock = Clock()
    nodes = [a_node(clock, name=f"n{i}", host=f"h{i // 2}") for i in range(40)]
    nodes[0].calibration.end("failed", clock(), warm=False, again=True)
    clock.passes(60)
    chosen = due(nodes, (), clock())
    assert [node.name for node in chosen] == ["n1", *(f"n{i}" for i in range(2, 16, 2))]
    more = due(nodes, chosen[2:], clock())
    assert [node.name for node in more] == ["n1", "n2"]
    assert due(nodes, chosen, clock()) == []
    assert len(chosen) == MOST_AT_ONCE


def test_a_node_is_tried_later_and_later_and_not_for_ever() -> None:
    clock = Clock()
    node, pauses = a_node(clock), list[float]()
    for _ in range(MOST_CALIBRATIONS):
        assert due([node], (), clock())
        began = clock()
        node.calibration.end("failed", began, warm=False, again=True)
        clock.passes(node.calibration.due_at - began)
        pauses.append(clock() - began)
    assert pauses == [5, 20, 80, 320, 1280]
    assert not due([node], (), clock())
    node.calibration.server_started(node.requests)
    assert not due([node], (), clock())  # It may have died of it.
    node.calibration.server_started(node.requests, replaced=True)
    assert due([node], (), clock())


@in_virtual_time
async def test_requests_prefer_nodes_that_are_not_calibrated_and_take_the_others_at_once(
    tmp_path: Path,
) -> None:
    slow: dict[str, Any] = {"prefill_tps": 20.0, "decode_tps": 20.0, "prefill_stalls": True}
    async with contextlib.AsyncExitStack() as stack:
        servers = [EmulatedNode(slots=1, batch=32, **slow) for _ in range(MOST_AT_ONCE + 2)]
        specs = [
            {"name": f"n{i}", "url": (await stack.enter_async_context(server)).url,
             "host": f"h{i}", "calibrate": True}
            for i, server in enumerate(servers)
        ]  # fmt: skip
        running = await stack.enter_async_context(running_gateway(tmp_path, specs))
        ended: list[NodeCalibrated] = []
        running.gateway.bus.subscribe(NodeCalibrated, ended.append)

        async def ask() -> str:
            body = {"model": "demo", "prompt": "a", "max_tokens": 40}
            answer = await running.client.post("/v1/completions", json=body)
            assert answer.status_code == 200
            return answer.headers["x-gateway-node"]

        await asyncio.sleep(2)
        assert sum(server.slots.busy for server in servers) == MOST_AT_ONCE
        idle = {f"n{i}" for i, server in enumerate(servers) if not server.slots.busy}
        assert set(await asyncio.gather(ask(), ask())) == idle
        assert not ended
        nodes = await asyncio.gather(*(ask() for _ in servers))
        assert len(set(nodes)) == len(servers)
        assert [event.outcome for event in ended[:MOST_AT_ONCE]] == ["given_up"] * MOST_AT_ONCE
        page = (await running.admin.get("/metrics")).text
        assert "llama_gateway_queue_seconds_sum 0\n" in page or "queue_seconds_sum 0.0" in page


# Real servers.


async def chat(client: httpx.AsyncClient, system: str, **keys: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    answer = await client.post("/v1/chat/completions", json={"messages": messages, **keys})
    timings: dict[str, Any] = answer.json()["timings"]
    return timings


@asynccontextmanager
async def real_server(**options: Any) -> AsyncIterator[tuple[NodeSpec, httpx.AsyncClient]]:
    """A real server's entry in the inventory, and a client of its own."""
    with running_demo_servers(1, slots=2, size="medium", **options) as [server]:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=server.url, trust_env=False, timeout=60, limits=limits
        ) as client:
            yield a_spec(url=server.url), client


@pytest.mark.real
@pytest.mark.slow
@each_case(
    "options", [{}, {"embedding": True}, {"embedding": True, "extra": ("--pooling", "rank")}]
)
async def test_a_cold_server_of_each_kind_shows_its_speed(options: dict[str, Any]) -> None:
    async with (
        real_server(**options) as (spec, client),
        calibrated(spec) as (running, ended),
    ):
        await running.until(lambda: bool(ended))
        assert ended[0].outcome == "done", ended
        assert (ended[0].decode_tps is None) is bool(options)
        speed = running["a"].speed
        guess = speed.expected_prefill_tps, 1 / speed.token_base
        learn_timings(speed, await chat(client, " ".join(WORDS[:18] * 10), max_tokens=64))
        assert 0.2 < guess[0] / known(speed.prefill_tps) < 5
        if not options:
            assert 0.2 < guess[1] / known(speed.decode_tps) < 5


@pytest.mark.real
@pytest.mark.slow
async def test_warm_slots_stay_warm_and_a_request_gets_its_slot_soon() -> None:
    async with real_server() as (spec, client):
        systems = [" ".join(WORDS[i:18] * 20) for i in range(2)]
        for system in systems:
            await chat(client, system, max_tokens=4)
        async with calibrated(spec) as (running, ended):
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
