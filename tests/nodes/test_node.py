"""A node's state, slots and leases; standby nodes and servers that sleep; what probes add up to."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.nodes.circuit import START_LIMIT
from gateway.nodes.health import judge_state
from gateway.nodes.lifecycle import (
    ASSUMED_STARTUP,
    MOST_REST,
    QUICK_PROBE_DELAY,
    Lifecycle,
    LifecyclePhase,
    ProbeAnswer,
    ProbeHistory,
    ProbeResult,
    Sleep,
    probe_delay,
    read_is_sleeping,
)
from gateway.nodes.node import SLOT_LINGER, Node, NodeState, SlotOccupancy
from gateway.nodes.router import LoadPhase, ModelLoad
from gateway.nodes.server_properties import ServerProperties
from gateway.nodes.speed import SpeedSample, TokenTime
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.nodes.build import Clock, a_node, a_spec, take
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import CHAT


@each_case(
    ("keys", "reported", "slots", "context"),
    [
        ({}, {}, 1, None),
        ({}, {"slots": 5, "context": 4096}, 5, 4096),
        ({"slots": 3, "context": 2048}, {"slots": 5, "context": 4096}, 3, 2048),
        ({"kind": "openai"}, {}, START_LIMIT, None),
    ],
)
def test_slots_and_context_are_declared_or_reported_or_assumed(
    keys: dict[str, Any], reported: dict[str, int], slots: int, context: int | None
) -> None:
    node = a_node(**keys)
    node.properties = ServerProperties(**reported)  # type: ignore[arg-type]
    assert (node.slots_total, node.context) == (slots, context)


@each_case(
    ("declared", "refused", "vision", "supports"),
    [
        (None, set(), None, ["chat", "embeddings", "rerank", "vision"]),
        (None, {"rerank"}, None, ["chat", "embeddings", "vision"]),
        (None, set(), False, ["chat", "embeddings", "rerank"]),
        (["chat"], set(), None, ["chat"]),
        (["chat", "vision"], set(), None, ["chat", "vision"]),
    ],
)
def test_endpoints_are_those_declared_or_all_but_refused_ones(
    declared: Any, refused: set[str], vision: bool | None, supports: list[str]
) -> None:
    node = a_node(endpoints=declared)
    node.properties = ServerProperties(refused=refused, vision=vision)
    endpoints: list[Any] = ["chat", "embeddings", "rerank"]
    found = [one for one in endpoints if node.supports(one)]
    assert found + ["vision"] * node.supports("chat", vision=True) == supports


def test_an_endpoint_that_asked_for_a_pause_has_no_free_slots() -> None:
    clock = Clock()
    node = a_node(clock, kind="openai", slots=4)
    assert node.concurrency_limit is not None
    node.concurrency_limit.record_refusal(clock(), clock(), retry_after=20.0)
    assert (node.paused(clock()), node.free_slots(clock())) == (True, 0)
    assert node.next_change(clock()) == clock() + 20.0
    clock.passes(20.0)
    assert (node.paused(clock()), node.free_slots(clock())) == (False, 4)


def test_free_and_busy_slots_count_ours_and_those_of_others() -> None:
    node = a_node(slots=4)
    take(node, 1)
    node.occupancy.foreign = 2
    assert node.free_slots(node.clock()) == 1
    assert node.slots_busy == 3
    node.occupancy.foreign = 9
    assert node.free_slots(node.clock()) == 0
    assert node.slots_busy == 4
    take(node, 5)
    assert (node.slots_busy, node.free_slots(node.clock())) == (6, 0), "never fewer than ours"


def test_a_key_that_has_just_worked_must_be_rejected_twice() -> None:
    node = a_node()
    node.key_rejection.record_success()
    node.key_rejection.record("wrong key", node.clock())
    assert judge_state(node, node.clock())[0] is NodeState.READY
    node.key_rejection.record("wrong key", node.clock())
    assert judge_state(node, node.clock())[0] is NodeState.DOWN


def test_the_first_state_that_holds_wins() -> None:
    # A node for which every state but `starting` would hold.
    node = a_node(enabled=False)
    node.draining = True
    node.sleep.props_read(True, 900.0, asked=False)
    node.probe_history = history = ProbeHistory(probed=True, up=False, detail="none", mute=True)
    for _ in range(5):
        node.circuit.record_failure(1000.0)
    for second in range(40):
        each = 0.1 if second < 20 else 1.0
        node.degradation.learn(SpeedSample(None, TokenTime(40, each, each), 1, 500), 10.0 * second)
    load = ModelLoad()

    def probed(*, up: bool) -> None:
        history.probed = history.up = up
        history.loading = False

    def loading() -> None:
        history.loading, node.load = True, load

    changes: list[tuple[str, Callable[[], object]]] = [
        ("standby", lambda: None),
        ("draining", lambda: setattr(node, "spec", a_spec())),
        ("down", lambda: setattr(node, "draining", False)),
        ("unloaded", loading),
        ("unloading", lambda: load.enter(LoadPhase.RETIRING, "another model waits", 1000.0)),
        ("failed", lambda: load.failed("exit code 1", 1000.0)),
        ("sleeping", lambda: setattr(node, "load", None)),
        ("loading", node.sleep.woke),
        ("starting", lambda: probed(up=False)),
        ("ejected", lambda: probed(up=True)),
        ("mute", lambda: node.circuit.close(1000.0)),
        ("degraded", lambda: setattr(history, "mute", False)),
        ("ready", node.degradation.server_restarted),
    ]
    assert [state for state, _ in changes] == [state.value for state in NodeState]
    for state, change in changes:
        change()
        assert judge_state(node, 1000.0)[0].value == state


def test_only_nodes_that_may_work_have_capacity() -> None:
    for state in NodeState:
        node = a_node(slots=3, state=state)
        may = state in {NodeState.READY, NodeState.DEGRADED, NodeState.SLEEPING}
        assert node.capacity(1000.0) == (3 if may else 0)
    node = a_node(slots=3)
    node.removed = True
    assert node.capacity(1000.0) == 0


# The counts of a node's slots and their integrals over time.


def foreign_after(occupancy: SlotOccupancy, busy: int, now: float) -> int:
    with occupancy.slots_query(now) as query:
        pass
    occupancy.record_busy((0,) * busy, query, now)
    return occupancy.foreign


def test_slots_that_are_fenced_are_others_whether_they_are_seen_busy_or_not() -> None:
    occupancy = SlotOccupancy()
    assert occupancy.fence(2, 10.0)
    assert not occupancy.fence(2, 10.5)
    assert [foreign_after(occupancy, busy, 11.0) for busy in (0, 1, 3)] == [2, 2, 3]
    assert occupancy.minutes_of_others(11.0) == 1
    assert occupancy.fence(0, 12.0)
    assert (occupancy.foreign, occupancy.slot_seconds) == (3, 2 + 3)
    occupancy.clear_foreign()
    assert occupancy.foreign == 0


def test_a_lease_that_came_or_went_during_the_query_is_ours() -> None:
    occupancy = SlotOccupancy()
    occupancy.take(1, 10.0)
    with occupancy.slots_query(20.0) as query:
        occupancy.take(1, 20.1)
        occupancy.release(1, 20.2)
        occupancy.release(1, 20.3)
    occupancy.record_busy((0, 0), query, 20.3)
    assert occupancy.foreign == 0


def test_a_slot_just_released_may_still_be_reported_busy() -> None:
    occupancy = SlotOccupancy()
    occupancy.take(2, 10.0)
    occupancy.release(2, 20.0)
    assert foreign_after(occupancy, 2, 20.0 + SLOT_LINGER / 2) == 0
    assert foreign_after(occupancy, 2, 20.0 + 3 * SLOT_LINGER) == 2


def test_a_lease_measures_the_busy_slots_during_its_decode() -> None:
    clock = Clock()
    node = a_node(clock, slots=4)
    lease = take(node)
    lease.content_received(clock.passes(2))
    other = take(node, stream=False)
    clock.passes(3)
    other.release()
    clock.passes(1)
    assert lease.observed_timing() is None
    lease.release()
    seen = lease.observed_timing()
    assert seen is not None
    assert (seen.ttft, seen.duration) == (2, 6)
    assert seen.busy_slots == pytest.approx((2 * 3 + 1 * 1) / 4)
    assert (seen.stalled_seconds, seen.mean_prefills) == (0, 1)


NOW = 1000.0


def test_the_last_start_and_a_cooldown_decide_when_a_standby_node_can_work() -> None:
    lifecycle = Lifecycle(LifecyclePhase.OFF)
    assert lifecycle.ready_in(NOW, cooldown=30.0) == ASSUMED_STARTUP
    lifecycle = Lifecycle(
        LifecyclePhase.OFF, startup_seconds=8.0, stopped_at=NOW - 10.0, down_since=NOW
    )
    assert lifecycle.ready_in(NOW, cooldown=30.0) == pytest.approx(8.0 + 20.0)
    lifecycle.enter(LifecyclePhase.STARTING, "a request waits", NOW)
    assert lifecycle.since == NOW
    assert lifecycle.down_since is None
    assert lifecycle.ready_in(NOW + 3.0, cooldown=30.0) == pytest.approx(5.0)
    # A start that takes longer than the last one takes some more.
    assert lifecycle.ready_in(NOW + 20.0, cooldown=30.0) == pytest.approx(5.0)
    lifecycle, waits = Lifecycle(LifecyclePhase.OFF, startup_seconds=8.0), []
    for _ in range(5):
        lifecycle.record_failure(NOW, initial=5.0, longest=30.0)
        waits.append(lifecycle.ready_in(NOW, cooldown=0.0) - 8.0)
    assert waits == [5.0, 10.0, 20.0, 30.0, 30.0]


# Servers that sleep: what the gateway knows of one, and how it treats it.


IDLE = 12.0
"""Seconds without work after which the servers of these tests sleep."""


@each_case(
    ("props", "expected"),
    [
        (b'{"a":1,"is_sleeping":true,"b":2}', True),
        (b'{"is_sleeping": false}', False),
        (b'{"a":1}', None),
        (b'{"is_sleeping":"true"}', None),
        (b'{"chat_template":"\\"is_sleeping\\":true"}', None),
        (b'"is_sleeping"', None),
    ],
)
def test_props_say_whether_the_server_sleeps(props: bytes, expected: bool | None) -> None:
    asleep, rest = read_is_sleeping(props)
    assert asleep is expected
    assert rest == read_is_sleeping(props.replace(b"true", b"false"))[1] or expected is None


def test_the_price_of_waking_up_falls_while_it_wakes_up() -> None:
    sleep = Sleep()
    sleep.learn_wake(20.0)
    assert sleep.seconds_left(None, 100.0) == 0.0
    sleep.props_read(True, 100.0, asked=False)
    assert sleep.seconds_left(None, 200.0) == 20.0
    assert [sleep.begin_wake(200.0), sleep.begin_wake(205.0)] == [True, False]
    sleep.props_read(True, 200.1, asked=True)
    assert sleep.seconds_left(None, 205.0) == 15.0
    sleep.props_read(False, 206.0, asked=True)
    assert sleep.sleeping
    sleep.woke()
    assert sleep.seconds_left(None, 207.0) == 0.0


def test_without_metrics_it_is_left_alone_until_it_is_taken_for_one_that_does_not_sleep() -> None:
    node = a_node()
    node.properties.metrics_endpoint = False
    node.sleep.props_read(False, 1000.0, asked=False)
    assert node.load_endpoint(1000.0, comes_up=True) == "/slots"
    asked = [at for at in range(1000, 9000, 5) if node.load_endpoint(float(at))]
    assert (asked[0], asked[-1]) == (1000 + MOST_REST, 8995)
    node.sleep.props_read(True, 9000.0, asked=False)
    node.sleep.props_read(False, 9000.0, asked=False)
    node.sleep.woke()
    assert not [at for at in range(9000, 18000, 5) if node.load_endpoint(float(at))]


def test_without_metrics_it_is_asked_while_it_is_in_use_anyway() -> None:
    clock = Clock()
    node = a_node(clock)
    node.properties.metrics_endpoint = False
    node.sleep.props_read(False, 1000.0, asked=False)
    lease = take(node)
    assert node.load_endpoint(clock.passes(100)) == "/slots"
    lease.release()
    assert node.load_endpoint(clock.passes(2)) == "/slots"
    assert node.load_endpoint(clock.passes(2)) is None
    assert node.load_endpoint(clock.passes(40), fleet_works=True) == "/slots"
    assert node.load_endpoint(clock.passes(40), fleet_works=True) is None
    node.occupancy.foreign = 1
    assert node.load_endpoint(clock.passes(40)) == "/slots"


# Behind a gateway.


async def ask(running: Running, **keys: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "demo", "messages": messages, "max_tokens": 8, **keys}
    answer = await running.client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def sleeper(running: Running) -> Node:
    """The gateway's only node, as soon as it sleeps."""
    [node] = running.gateway.fleet.nodes.values()
    await until(lambda: node.state is NodeState.SLEEPING, 60.0, lambda: node.reason)
    return node


@pytest.mark.slow
@pytest.mark.smoke
@in_virtual_time
@pytest.mark.parametrize("metrics", [True, False])
async def test_behind_an_idle_gateway_a_server_sleeps_at_its_time_and_stays_asleep(
    metrics: bool, tmp_path: Path
) -> None:
    server = EmulatedNode(sleep_idle_seconds=IDLE, load_seconds=7)
    if not metrics:
        server.faults.set("status", status=501, path="/metrics")
    async with running_gateway(tmp_path, [server]) as running:
        await ask(running)
        began = now()
        await until(lambda: server.sleeping, 60.0)
        assert IDLE <= now() - began < IDLE + 5
        node = await sleeper(running)
        active_at = server.active_at
        await asyncio.sleep(600)
        assert (server.sleeping, server.active_at) == (True, active_at)
        assert (await running.client.get("/ready")).status_code == 200
        assert (await running.client.get("/v1/models")).json()["data"][0]["id"] == "demo"
        began = now()
        await ask(running)
        assert now() - began == pytest.approx(7, abs=0.5)
        assert node.state is NodeState.READY
        assert node.sleep.measured == pytest.approx(7, abs=0.5)


@in_virtual_time
async def test_loading_its_model_again_is_nobodys_fault_and_teaches_no_speed(
    tmp_path: Path,
) -> None:
    limits = {"timeouts": {"connect": 3, "first_byte": 5, "silence": 5}, "health": {"timeout": 2}}
    server = EmulatedNode(sleep_idle_seconds=IDLE, load_seconds=45, prefill_tps=1000)
    async with running_gateway(tmp_path, [server], limits) as running:
        await ask(running)
        node = await sleeper(running)
        samples, requests = node.speed.samples, node.requests
        asked = [asyncio.create_task(ask(running, stream=stream)) for stream in (False, True)]
        while not all(one.done() for one in asked):
            assert node.state in {NodeState.SLEEPING, NodeState.READY}
            await asyncio.sleep(0.2)
        assert asked[1].result().text.endswith("data: [DONE]\n\n")
        assert node.requests == requests + 2
        assert (node.circuit.failures, node.speed.samples) == (0, samples)
        assert node.sleep.measured == pytest.approx(45, abs=1)
        await ask(running)
        await until(lambda: node.speed.samples > samples, 10.0)


def after(
    history: ProbeHistory,
    *answers: ProbeAnswer,
    rise: int = 1,
    fall: int = 3,
    sign: str | None = None,
) -> ProbeHistory:
    for answer in answers:
        history.record(ProbeResult(answer, answer.value), rise=rise, fall=fall, sign_of_life=sign)
    return history


UP, LOADING, REFUSED = ProbeAnswer.UP, ProbeAnswer.LOADING, ProbeAnswer.CONNECTION_REFUSED
TIMED_OUT, FAILED = ProbeAnswer.TIMED_OUT, ProbeAnswer.FAILED
FAILURES = (TIMED_OUT, FAILED, ProbeAnswer.KEY_REJECTED, ProbeAnswer.NO_MODEL)


@each_case(
    ("answers", "rise", "sign", "verdict"),
    [
        ([UP], 3, None, "up"),
        ([REFUSED], 1, None, "down"),
        ([UP, REFUSED], 1, None, "down"),
        ([UP, REFUSED, REFUSED, REFUSED], 1, "one of its streams moves", "down"),
        ([REFUSED, TIMED_OUT], 1, "one of its streams moves", "down"),
        ([LOADING, REFUSED], 1, None, "down"),
        ([UP, FAILED, FAILED, UP, FAILED, FAILED], 1, None, "up"),
        # A node that works goes down at the third failure in a row.
        *(([UP, failure, failure], 1, None, "up") for failure in FAILURES),
        *(([UP, *[failure] * 3], 1, None, "down") for failure in FAILURES),
        # One that was down must answer as often as `rise` says.
        ([FAILED, UP], 2, None, "down"),
        ([FAILED, UP, FAILED, UP], 2, None, "down"),
        ([FAILED, UP, FAILED, UP, UP], 2, None, "up"),
        # Loading is believed at once, and is not down.
        ([UP, LOADING], 1, None, "loading"),
        ([UP, LOADING, UP], 3, None, "up"),
    ],
)
def test_the_last_answers_decide_whether_a_node_is_up_or_down(
    answers: list[ProbeAnswer], rise: int, sign: str | None, verdict: str
) -> None:
    history = after(ProbeHistory(), *answers, rise=rise, sign=sign)
    found = {"up": history.up, "down": history.down, "loading": history.loading}
    assert [name for name, holds in found.items() if holds] == [verdict]
    assert history.up or history.detail == [one.value for one in answers if one is not UP][-1]


def test_time_outs_do_not_count_until_the_sign_of_life_ends() -> None:
    history = after(ProbeHistory(), UP, *[TIMED_OUT] * 50, sign="it reads a prompt")
    assert (history.up, history.mute) == (True, True)
    assert "it reads a prompt" in history.detail
    after(history, TIMED_OUT, TIMED_OUT)
    assert history.mute
    assert not history.down
    assert "2 of 3" in history.detail
    assert not after(ProbeHistory(), UP, TIMED_OUT, UP, sign="it reads a prompt").mute
    assert after(history, TIMED_OUT).down
    assert not history.mute


def test_a_thousand_nodes_are_not_probed_in_one_tick() -> None:
    rng = random.Random(3)
    nodes, interval, minutes = 1000, 5.0, 10
    ticks: Counter[int] = Counter()
    for _ in range(nodes):
        # All are probed at once at the start; a node's probe takes some milliseconds.
        now = probe_delay(interval, rng, first=True, unstable=False)
        while now < minutes * 60:
            ticks[int(now / 0.1)] += 1
            now += 0.005 + probe_delay(interval, rng, first=False, unstable=False)
    fair = nodes * 0.1 / interval
    assert max(ticks.values()) < 2.5 * fair
    assert min(ticks[tick] for tick in range(minutes * 600)) > 0
    for first in (True, False):
        soon = probe_delay(5.0, rng, first=first, unstable=True)
        assert soon <= QUICK_PROBE_DELAY * 1.1, "a node that is about to change"
