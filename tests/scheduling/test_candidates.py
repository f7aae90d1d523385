"""Which nodes can serve a request, however busy they are."""

from __future__ import annotations

import pytest

from gateway.errors import GatewayError
from gateway.fleet.node import Node, NodeState
from gateway.lease import NOTHING_TRIED, LeaseRequest, Tried
from gateway.scheduling.candidates import CandidateFinder, NodeCandidates, with_context
from tests.each_case import each_case
from tests.scheduling.build import a_request, a_scheduler, failed_on, node, refused_by


def find_candidates(
    request: LeaseRequest, *nodes: Node, tried: Tried = NOTHING_TRIED
) -> NodeCandidates:
    scheduler = a_scheduler(*nodes)
    return CandidateFinder(scheduler.fleet.model_index, scheduler.fleet_sync).find(request, tried)


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


def test_a_node_that_refused_the_request_is_excluded() -> None:
    found = find_candidates(a_request(), node("a"), node("b"), tried=refused_by("b"))
    assert found.excluded == {1}


def test_tiers_are_candidate_sets_of_their_own_the_gpu_first() -> None:
    (group,) = find_candidates(a_request(), node("a"), node("b", tier="gpu")).groups
    assert [[row.name for row in pool.rows] for pool in group] == [["b"], ["a"]]


def test_each_model_name_is_a_group() -> None:
    found = find_candidates(
        a_request("helper", "x", "y"), node("a", models=("y",)), node("b", models=("x",))
    )
    assert [name for name, _ in found.by_model] == ["x", "y"]
    assert [[row.name for row in pool.rows] for (pool,) in found.groups] == [["b"], ["a"]]


@each_case(
    ("state", "alive"),
    [
        (NodeState.READY, True),
        (NodeState.MUTE, True),
        (NodeState.DOWN, False),
        (NodeState.DRAINING, False),
    ],
)
def test_a_node_that_is_down_is_not_alive(state: NodeState, alive: bool) -> None:
    assert find_candidates(a_request(), node(state=state)).any_alive() is alive


def test_images_need_a_node_that_reads_them() -> None:
    blind = node()
    blind.properties.vision = False
    with pytest.raises(GatewayError) as raised:
        find_candidates(a_request(needs_vision=True), blind)
    assert raised.value.status == 400


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
    finder = CandidateFinder(scheduler.fleet.model_index, scheduler.fleet_sync)
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


def test_a_pool_without_the_model_is_as_if_no_node_had_it() -> None:
    nodes = node("a", labels={"side": "left"}), node("b")
    request = a_request(node_labels=(("side", "right"),))
    with pytest.raises(GatewayError) as caught:
        find_candidates(request, *nodes)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
