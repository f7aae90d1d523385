"""Which nodes can serve a request, and rows that show the nodes as they are."""

from __future__ import annotations

import itertools

import pytest

from gateway.errors import GatewayError
from gateway.lease import NOTHING_TRIED, LeaseRequest, PromptKey, Tried
from gateway.nodes.node import Node, NodeState
from gateway.nodes.speed import sample_from_timings
from gateway.schedule.candidates import NodeCandidates, with_context
from gateway.schedule.core.requests import NodeSlots
from gateway.schedule.scheduler import Scheduler
from tests.schedule.build import (
    a_request,
    a_scheduler,
    failed_on,
    node,
    refused_by,
    take_lease,
)


def find_candidates(
    request: LeaseRequest, *nodes: Node, tried: Tried = NOTHING_TRIED
) -> NodeCandidates:
    scheduler = a_scheduler(*nodes)
    return scheduler.fleet_sync.find(request, tried)


def test_a_node_with_too_small_a_context_is_excluded_while_another_fits() -> None:
    small, large, silent = node("a", context=512), node("b", context=4096), node("c")
    request = a_request(prompt_tokens=1000)
    assert with_context([small, large, silent], 1000) == [large, silent]
    assert with_context([small, node("d", context=700)], 1000)[0].name == "d"
    assert with_context([small, large], 4096) == [large]
    (group,) = find_candidates(request, small, large, silent).groups
    assert [row.name for row in group[0].rows] == ["a", "b", "c"]
    assert find_candidates(request, small, large, silent).excluded == {0}


def test_after_a_failure_the_node_is_avoided_and_its_hosts_others_penalised() -> None:
    one, same, other = node("a", host="x"), node("b", host="x"), node("c", host="y")
    found = find_candidates(a_request(), one, same, other, tried=failed_on("a"))
    assert found.failed == {0}
    assert set(found.penalties) == {1}
    assert found.excluded == frozenset()


def test_only_a_node_of_the_same_kind_resumes_a_stream() -> None:
    same, updated, other = node("a"), node("b"), node("c")
    for one, build, file in ((same, "b1", "x"), (updated, "b2", "x"), (other, "b1", "y")):
        one.properties.build, one.properties.file = build, file
    request = a_request(resume_key=same.properties.resume_key())
    assert find_candidates(request, same, updated, other).excluded == {1, 2}
    with pytest.raises(GatewayError) as refused:
        find_candidates(request, same, updated, other, tried=refused_by("a"))
    assert refused.value.code == "node_failed"
    assert find_candidates(a_request(), same, updated, other).excluded == ()


def test_a_pool_has_candidate_sets_of_its_own() -> None:
    one, two = node("a", labels={"side": "left"}), node("b", labels={"side": "right"})
    scheduler = a_scheduler(one, two)
    finder = scheduler.fleet_sync
    for labels, rows in (
        ((("side", "left"),), ["a"]),
        ((("side", "right"),), ["b"]),
        ((), ["a", "b"]),
    ):
        for tried in (NOTHING_TRIED, failed_on("a")):
            found = finder.find(a_request(node_labels=labels), tried)
            (group,) = found.groups
            assert [row.name for candidates in group for row in candidates.rows] == rows
            assert not found.excluded


# The rows show the nodes as they are, whatever happens to them.


def row_of(scheduler: Scheduler, name: str = "a") -> NodeSlots:
    return scheduler.dispatcher.placement_state.by_name[name]


def check_rows(scheduler: Scheduler) -> None:
    """Each row has the free slots of its node."""
    now = scheduler.clock()
    for one in scheduler.fleet.nodes.values():
        row = row_of(scheduler, one.name)
        assert (row.free, row.total) == (one.free_slots(now), one.slots_total)


async def test_an_ejected_node_gets_one_request_on_trial_beside_what_runs() -> None:
    one = node(slots=3)
    scheduler = a_scheduler(one)
    running, _ = await take_lease(scheduler, a_request())
    one.state, one.circuit.open_until = NodeState.EJECTED, one.clock() - 1.0
    scheduler.fleet_sync.node_changed(one)
    check_rows(scheduler)
    trial, _ = await take_lease(scheduler, a_request())
    assert trial.trial
    check_rows(scheduler)
    assert (row_of(scheduler).free, row_of(scheduler).alive) == (0, True)
    trial.release()
    running.release()
    check_rows(scheduler)


def half_open(one: Node) -> Node:
    """Let the time of its ejection pass."""
    for _ in range(one.settings.health.failures):
        one.circuit.record_failure(one.clock())
    one.state, one.circuit.open_until = NodeState.EJECTED, one.clock() - 1.0
    return one


@pytest.mark.parametrize("nodes", [3, 100])
async def test_the_first_request_after_an_ejection_is_the_trial_though_others_are_idle(
    nodes: int,
) -> None:
    one = half_open(node(slots=3))
    scheduler = a_scheduler(one, *(node(f"b{n}") for n in range(nodes)))
    trial, _ = await take_lease(scheduler, a_request())
    assert (trial.node, trial.trial) == (one, True)
    assert row_of(scheduler).penalty > 0
    other, _ = await take_lease(scheduler, a_request())
    assert other.node is not one
    scheduler.fleet.request_succeeded(one, one.clock(), trial.taken_at)
    trial.release()
    assert (one.state, row_of(scheduler).penalty) == (NodeState.READY, 0)


async def test_a_request_is_no_trial_where_it_would_end_much_later() -> None:
    slow, fast = half_open(node()), node("b")
    scheduler = a_scheduler(slow, fast)
    for one, ms in ((slow, 1000.0), (fast, 10.0)):
        timings = {"prompt_n": 100, "prompt_ms": 100, "predicted_n": 100, "predicted_ms": 100 * ms}
        for _ in range(20):
            scheduler.fleet.learn_speed(one, sample_from_timings(timings))
        scheduler.fleet_sync.node_changed(one)
    lease, _ = await take_lease(scheduler, a_request(max_tokens=20))
    assert lease.node is fast
    short, _ = await take_lease(scheduler, a_request(max_tokens=2))
    assert (short.node, short.trial) == (slow, True)


# Nodes that are added and removed.


@pytest.fixture
def three() -> tuple[Scheduler, list[Node]]:
    nodes = [node(name, slots=1) for name in "abc"]
    return a_scheduler(*nodes), nodes


def put(scheduler: Scheduler, *nodes: Node) -> None:
    """Put these nodes, and no others, in the inventory."""
    fleet = scheduler.fleet
    for name, one in list(fleet.nodes.items()):
        if one not in nodes:
            one.removed = True
            del fleet.nodes[name]
    for one in nodes:
        one.on_lease_released = fleet.lease_released
        fleet.nodes[one.name] = one
    fleet.model_index.set_nodes(nodes)
    scheduler.capacity_changed()


async def test_leases_of_a_removed_node_end_there_though_its_index_is_reused(
    three: tuple[Scheduler, list[Node]],
) -> None:
    scheduler, nodes = three
    leases = {
        lease.node.name: lease
        for lease in [(await take_lease(scheduler, a_request()))[0] for _ in nodes]
    }
    prompt = PromptKey((1, 2), 100.0)
    scheduler.prompt_cache.request_placed(row_of(scheduler, "a").index, prompt)
    put(scheduler, *nodes[1:], node("d", slots=1))
    assert "a" not in scheduler.dispatcher.placement_state.by_name
    fresh, _ = await take_lease(scheduler, a_request())
    assert fresh.node.name == "d"
    leases["a"].release()
    check_rows(scheduler)
    assert scheduler.lease_now(a_request()) is None
    for lease in leases.values():
        lease.release()
    fresh.release()
    check_rows(scheduler)


def test_the_cached_prompts_go_with_the_server() -> None:
    one = node()
    one.indexed_models = one.public_models
    scheduler = a_scheduler(one)
    index, memory = row_of(scheduler).index, scheduler.prompt_cache
    numbers = itertools.count()

    def remembers() -> bool:
        prompt = PromptKey((next(numbers), next(numbers)), 100.0)
        memory.request_placed(index, prompt)
        memory.request_finished(index, prompt, 100, 0, 5)
        return index in memory.lookup(PromptKey(prompt.blocks, 100.0)).cached

    assert remembers()
    kept = PromptKey((100, 101), 50.0)
    memory.request_placed(index, kept)
    memory.request_finished(index, kept, 50, 0, 5)
    scheduler.fleet_sync.node_changed(one)
    assert memory.lookup(PromptKey(kept.blocks, 50.0)).cached
    one.probe_history.up = False
    scheduler.fleet_sync.node_changed(one)
    assert not memory.lookup(PromptKey(kept.blocks, 50.0)).cached
    assert not remembers()
    one.probe_history.up = True
    scheduler.fleet_sync.node_changed(one)
    assert remembers()
