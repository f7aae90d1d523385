"""Nodes watched by a fleet: servers that come, go and freeze, and idle ones that are calibrated."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from gateway.config.inventory import NodeSpec
from gateway.config.scheduling import HealthSettings
from gateway.config.settings import Settings
from gateway.events import EventBus, NodeCalibrated
from gateway.nodes.calibration import MOST_AT_ONCE, WORDS, Calibrator, due
from gateway.nodes.circuit import Circuit
from gateway.nodes.health import (
    LARGEST_RESPONSE,
    another_prefills,
    check_alive,
    discover,
    sign_of_life,
)
from gateway.nodes.lifecycle import ProbeAnswer
from gateway.nodes.node import MOST_CALIBRATIONS, Node, NodeState
from gateway.transport.errors import LocalResourcesExhausted
from gateway.transport.pool import open_node_pool
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.known import known
from tests.nodes.build import Clock, Running, a_fleet, a_node, a_spec, learn_timings, take
from tests.servers import running_demo_servers
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import CHAT as CHAT_PATH

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 500}


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


@pytest.mark.slow
@in_virtual_time
async def test_a_node_that_reads_a_prompt_is_mute_and_not_down() -> None:
    async with EmulatedNode() as server, a_fleet(a_spec(url=server.url)) as fleet:
        lease = take(fleet["a"])
        server.faults.set("mute")
        await fleet.until_state("a", NodeState.MUTE)
        assert fleet["a"].free_slots(now()) == 0
        assert await state_after(fleet, 2) is NodeState.MUTE  # after more than `fall` probes
        server.faults.clear()
        await fleet.until_state("a", NodeState.READY)
        assert fleet.states("a") == ["starting", "ready", "mute", "ready"]
        lease.release()


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
async def test_drift_is_published_once_and_again_when_it_changes() -> None:
    async with EmulatedNode(slots=2) as server, a_fleet(a_spec(url=server.url, slots=4)) as fleet:
        await asyncio.sleep(0.4)
        said = ("slots: the inventory says 4, the server has 2",)
        assert [drift.differences for drift in fleet.drifts] == [said]
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
            assert (trial.trial, node.free_slots(now())) == (True, 0)
            fleet.fleet.request_succeeded(node, now(), began=trial.taken_at)
            trial.release()
            assert fleet.states("a") == ["starting", "ready", "ejected", "ready"]


@in_virtual_time
async def test_an_operators_probe_closes_a_circuit_whose_slow_start_wakes_no_drained_node() -> None:
    asked = 0

    def clock() -> float:
        nonlocal asked
        asked += 1
        return now()

    quick: dict[str, Any] = {"failures": 1, "open": 60, "open_max": 60, "interval": 60}
    server = EmulatedNode()
    async with a_fleet(server, slow_start=5, clock=clock, **quick) as fleet:
        fleet.fleet.request_failed(fleet["a"], now())
        assert fleet.state("a") is NodeState.EJECTED
        assert (await fleet.fleet.probe("a")).up
        assert fleet.state("a") is NodeState.READY
        fleet.fleet.drain("a")
        before = asked
        await asyncio.sleep(20)
        assert asked - before < 100
        await server.kill()
        assert not (await fleet.fleet.probe("a")).up


# Nodes whose `/health` answers while `/slots` does not: a request froze their server's loop.


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


@each_case(
    ("slots", "event", "states"),
    [
        # A prompt that is read excuses a node for its grace; a stream without a head excuses none.
        (True, "head_received", [(55, NodeState.READY), (25, NodeState.MUTE)]),
        (True, "", [(15, NodeState.MUTE)]),
        # A node without `/slots` is never mute for it.
        (False, None, [(60, NodeState.READY)]),
    ],
)
@in_virtual_time
async def test_a_frozen_node_is_mute_unless_it_is_excused(
    slots: bool, event: str | None, states: list[tuple[float, NodeState]]
) -> None:
    server = EmulatedNode(endpoint_slots=slots)
    async with a_fleet(server, **USUAL) as fleet:
        freeze(server)
        lease = None if event is None else take(fleet["a"])
        if lease is not None and event:
            lease.head_received(now())
        for seconds, state in states:
            assert await state_after(fleet, seconds) is state
        if lease is not None:
            lease.release()


@pytest.mark.parametrize("hangs", [False, True], ids=["in time", "never"])
@in_virtual_time
async def test_a_server_that_others_wake_is_sleeping_until_it_has_loaded_or_its_time_is_over(
    hangs: bool,
) -> None:
    async with (
        EmulatedNode(sleep_idle_seconds=12, load_seconds=900 if hangs else 50) as server,
        a_fleet(a_spec(url=server.url), **USUAL) as fleet,
        httpx.AsyncClient(base_url=server.url, timeout=2000) as other,
    ):
        await fleet.until_state("a", NodeState.SLEEPING)
        work = asyncio.create_task(other.post(CHAT_PATH, json={"messages": [], "max_tokens": 1}))
        limit = fleet["a"].sleep.wake_limit(fleet["a"].properties.size)
        assert await state_after(fleet, limit if hangs else 45) is NodeState.SLEEPING
        if hangs:
            assert await state_after(fleet, 30) is NodeState.MUTE
            assert fleet["a"].free_slots(now()) == 0
        await work
        assert await state_after(fleet, 5) is NodeState.READY


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


@each_case(
    ("keys", "expected_prefill", "events", "seconds", "sign"),
    [
        # A prompt is read for the grace time, or four times its prediction, from the head on.
        ({}, None, {}, 60, "it reads a prompt"),
        ({}, 100.0, {}, 400, "it reads a prompt"),
        ({}, None, {50: "head_received"}, 110, "it reads a prompt"),
        # It goes on after the client has left.
        ({}, None, {0: "abandon"}, 60, "it reads a prompt"),
        # A stream may be silent for the settings' time, or the node's own.
        ({}, None, {500: "content_received"}, 560, "one of its streams moves"),
        ({"timeouts": {"silence": 5}}, None, {7: "content_received"}, 12,
         "one of its streams moves"),
        ({}, None, {0: "content_received", 1: "release"}, 2, None),
    ],
)  # fmt: skip
def test_work_is_a_sign_of_life_for_as_long_as_it_may_take(
    keys: Any,
    expected_prefill: float | None,
    events: dict[int, str],
    seconds: int,
    sign: str | None,
) -> None:
    node = a_node(Clock(0.0), **keys)
    assert sign_of_life(node, 0.0) is None
    lease = take(node, expected_prefill=expected_prefill)
    for at, event in events.items():
        node.clock.now = float(at)  # type: ignore[attr-defined]
        getattr(lease, event)(*([float(at)] if event.endswith("received") else []))
    assert sign_of_life(node, seconds - 1.0) == sign
    assert sign_of_life(node, seconds + 1.0) is None


def test_a_neighbour_is_delayed_while_another_prompt_is_read() -> None:
    clock = Clock()
    node = a_node(clock)
    stream, reader = take(node), take(node)
    stream.content_received(clock())
    assert another_prefills(stream, clock.passes(30))
    assert not another_prefills(reader, clock())
    reader.content_received(clock())
    assert not another_prefills(stream, clock())


# Probes of an emulated node over real connections.


@asynccontextmanager
async def node_at(url: str, *, timeout: float = 5.0, **keys: Any) -> AsyncIterator[Node]:
    spec = a_spec(url=url, **keys)
    rules = Settings(health=HealthSettings(timeout=timeout))
    upstream = open_node_pool(spec)
    try:
        yield Node(spec, upstream, rules, now, Circuit(rules.health, random.Random(7)))
    finally:
        upstream.close()


async def test_a_machine_without_descriptors_is_not_the_nodes_fault() -> None:
    async with node_at("http://127.0.0.1:9") as node:
        error = LocalResourcesExhausted("No connection could be opened: Too many open files")
        node.upstream.connect = AsyncMock(side_effect=error)  # type: ignore[method-assign]
        outcome = await check_alive(node)
    assert outcome.answer is ProbeAnswer.TIMED_OUT
    assert "Too many open files" in outcome.detail


@each_case(
    ("fault", "answer", "detail"),
    [
        ({"kind": "loading"}, ProbeAnswer.LOADING, "loading"),
        ({"kind": "mute"}, ProbeAnswer.TIMED_OUT, "no answer to /health within 0.2 s"),
        ({"kind": "trickle", "seconds": 0.05}, ProbeAnswer.TIMED_OUT, "within 0.2 s"),
        (
            {"kind": "status", "status": 200, "body": "x" * (LARGEST_RESPONSE + 1)},
            ProbeAnswer.FAILED,
            "without end",
        ),
        *(
            (
                {"kind": "status", "status": status, "body": "x"},
                ProbeAnswer.FAILED,
                f"/health answers {status}",
            )
            for status in (404, 500, 503)
        ),
        *(
            ({"kind": kind}, ProbeAnswer.FAILED, "/health")
            for kind in ("reset", "close", "garbage", "wrong_length", "head_bomb")
        ),
    ],
)
@in_virtual_time
async def test_only_a_prompt_answer_of_the_right_kind_shows_that_a_server_lives(
    fault: dict[str, Any], answer: ProbeAnswer, detail: str
) -> None:
    async with EmulatedNode() as server, node_at(server.url, timeout=0.2) as node:
        server.loading = fault["kind"] == "loading"
        server.faults.set(**{"path": "control", **fault})
        outcome = await check_alive(node)
        server.faults.clear()
    assert outcome.answer is answer
    assert detail in outcome.detail


@in_virtual_time
async def test_a_compressed_answer_is_not_decompressed() -> None:
    bomb = gzip.compress(bytes(64 << 20)).decode(errors="surrogateescape")
    headers = {"content-encoding": "gzip"}
    async with EmulatedNode() as server, node_at(server.url) as node:
        server.faults.next("status", path="/health", status=200, body=bomb, headers=headers)
        tracemalloc.start()
        try:
            outcome = await check_alive(node)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert outcome.answer is ProbeAnswer.FAILED
    assert outcome.detail == "/health is compressed, though asked not to be"
    assert peak < LARGEST_RESPONSE


@pytest.mark.parametrize(
    ("kinds", "purpose"),
    [
        ({}, "chat"),
        ({"embeddings": True}, "embeddings"),
        ({"embeddings": True, "rerank": True}, "rerank"),
    ],
)
@in_virtual_time
async def test_a_server_is_asked_once_what_it_was_started_for(
    kinds: dict[str, Any], purpose: str
) -> None:
    async with EmulatedNode(slots=1, **kinds) as server, node_at(server.url) as node:
        await discover(node)
        assert node.properties.purpose == purpose
        asked = server.control_requests
        await discover(node)
        assert server.control_requests == asked + 2
        assert server.requests == 0
        if purpose != "rerank":
            assert node.refusal_hints["rerank"].endswith("Start it with `--reranking`")
        server.marker = "another process"
        server.embeddings, server.rerank = False, False
        await discover(node)
        assert node.properties.purpose == "chat"


@in_virtual_time
async def test_a_server_that_does_not_answer_is_asked_again_later_and_what_is_known_is_kept() -> (
    None
):
    async with EmulatedNode(embeddings=True) as server, node_at(server.url) as node:
        server.faults.next("hang", path="/v1/embeddings")
        await discover(node)
        assert (node.properties.purpose, node.is_purpose_unknown) == ("unknown", False)
        await discover(node)
        assert node.properties.purpose == "embeddings"
        server.marker = "another process"
        server.faults.next("hang", path="/v1/embeddings")
        await discover(node)
        assert node.properties.purpose == "embeddings"
        server.embeddings = False
        await discover(node)
        assert node.properties.all_refused == {"embeddings", "rerank"}


@each_case(
    ("status", "keys", "answer"),
    [
        (200, {}, ProbeAnswer.UP),
        (404, {"model": "x"}, ProbeAnswer.UP),
        (404, {}, ProbeAnswer.FAILED),
        (401, {"model": "x", "api_key": "k"}, ProbeAnswer.UP),
        (403, {"model": "x", "api_key": "k"}, ProbeAnswer.UP),
        (401, {"model": "x"}, ProbeAnswer.KEY_REJECTED),
        (401, {"api_key": "k"}, ProbeAnswer.KEY_REJECTED),
        (500, {"model": "x", "api_key": "k"}, ProbeAnswer.FAILED),
    ],
)
@in_virtual_time
async def test_another_kind_of_server_is_judged_by_its_list_of_models(
    status: int, keys: dict[str, Any], answer: ProbeAnswer
) -> None:
    async with EmulatedNode() as server, node_at(server.url, kind="openai", **keys) as node:
        server.faults.set("status", path="/health", status=404)
        body = '{"data": [{"id": "gpt"}]}'
        server.faults.set("status", path="/v1/models", status=status, body=body)
        outcome = await check_alive(node)
        server.faults.clear()
    assert outcome.answer is answer
    assert node.properties.models == (("gpt",) if status == 200 else ())


# When idle nodes are calibrated, what it shows, and that no request waits for it.


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
