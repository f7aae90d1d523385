"""A node's state, its leases and its slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.nodes.circuit import START_LIMIT
from gateway.nodes.health import judge_state
from gateway.nodes.lifecycle import ProbeHistory
from gateway.nodes.node import SLOT_LINGER, NodeState, SlotOccupancy
from gateway.nodes.router import LoadPhase, ModelLoad
from gateway.nodes.server_properties import ServerProperties
from gateway.nodes.speed import SpeedSample, TokenTime
from tests.each_case import each_case
from tests.nodes.build import Clock, a_node, a_spec, take


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
