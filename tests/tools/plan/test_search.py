from __future__ import annotations

import math

import pytest

from gateway.tools.plan.search import (
    FoundFleet,
    Goal,
    find_fleet,
    least_count,
    least_that,
    why_impossible,
)
from gateway.tools.plan.trial import TimeLimit
from gateway.tools.plan.workload import Workload, make_trace
from gateway.tools.simulate.trace import Trace
from tests.each_case import each_case
from tests.tools.plan.build import a_type

WORKLOAD = Workload(600, 100, 100)


@each_case("answer", [1, 2, 7, 31, 100])
def test_the_least_number_is_found_in_few_steps(answer: int) -> None:
    asked: list[int] = []

    def holds(count: int) -> bool:
        asked.append(count)
        return count >= answer

    assert least_that(holds, 1, 100) == answer
    assert len(asked) <= 15
    assert len(asked) == len(set(asked))


def test_a_number_that_never_holds_is_none() -> None:
    assert least_that(lambda count: False, 1, 100) is None


def test_without_a_goal_the_use_decides() -> None:
    node_type = a_type()
    assert least_count(node_type, WORKLOAD, Goal()) == math.ceil(600 / 3600 * 10.9 / 0.8)
    assert least_count(node_type, WORKLOAD, Goal(most_use=1.0)) == 2
    two_sockets = a_type(servers=2)
    assert least_count(two_sockets, WORKLOAD, Goal()) == 2


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(WORKLOAD, 1500, seed=1)


@pytest.fixture(scope="module")
def tight(trace: Trace) -> FoundFleet:
    """The fleet for five seconds to the first token."""
    return find_fleet(a_type(), WORKLOAD, Goal(ttft_p95=5.0), trace, TimeLimit(120.0), 1)


def test_a_goal_takes_more_nodes_than_the_work(trace: Trace, tight: FoundFleet) -> None:
    goal = Goal(completion_p95=120.0)
    loose = find_fleet(a_type(), WORKLOAD, goal, trace, TimeLimit(120.0), 1)
    assert loose.trial is not None
    assert tight.trial is not None
    assert loose.trial.completion.p95 <= 120.0
    assert tight.trial.ttft.p95 <= 5.0
    assert loose.count < tight.count


def test_the_number_that_is_found_is_the_least(trace: Trace, tight: FoundFleet) -> None:
    node_type, goal = a_type(), Goal(ttft_p95=5.0)
    assert tight.count > least_count(node_type, WORKLOAD, goal)
    from gateway.tools.plan.trial import FleetPart, try_fleet

    trial = try_fleet((FleetPart(node_type, tight.count - 1),), trace, TimeLimit(120.0), seed=1)
    assert goal.misses(trial.ttft.p95, trial.completion.p95) != []


def test_an_impossible_goal_names_the_figure_and_by_how_much() -> None:
    trace = make_trace(WORKLOAD, 1500, seed=1)
    found = why_impossible(a_type(), trace, Goal(ttft_p95=1.0))
    assert found.startswith("prefill_tps 100 makes a TTFT p95 of 2.")
    assert "s above the goal of 1 s: it would take 2" in found
    found = why_impossible(a_type(), trace, Goal(completion_p95=10.0))
    assert found.startswith("decode_tps 10 and prefill_tps 100 make a completion p95 of ")
    assert "times as fast" in found
    assert why_impossible(a_type(), trace, Goal(ttft_p95=60.0)) == ""


def test_a_backlog_is_done_in_time() -> None:
    workload = Workload(2000, 100, 100, backlog_hours=2.0)
    trace = make_trace(workload, 500, seed=1)
    found = find_fleet(a_type(slots=2), workload, Goal(), trace, TimeLimit(120.0), 1)
    assert found.trial is not None
    assert found.trial.seconds <= 7200
    assert found.count >= workload.arrivals / found.times.capacity


def test_out_of_time_the_estimate_is_left() -> None:
    trace = make_trace(WORKLOAD, 1500, seed=1)
    clock = iter(float(second) for second in range(1000))
    limit = TimeLimit(0.5, clock=lambda: next(clock))
    found = find_fleet(a_type(), WORKLOAD, Goal(ttft_p95=5.0), trace, limit, 1)
    assert found.trial is None
    assert found.why_estimated == "0.5 s for simulations are used up"


def test_a_fleet_of_millions_is_not_simulated() -> None:
    workload = Workload(1e9, 100, 1000)
    trace = make_trace(workload, 100, seed=1)
    found = find_fleet(a_type(), workload, Goal(), trace, TimeLimit(60.0), 1)
    assert found.trial is None
    assert "it would take 35" in found.impossible
    assert find_fleet(a_type(slots=200), workload, Goal(), trace, TimeLimit(60.0), 1).impossible
    large = Workload(1e6, 100, 1000)
    found = find_fleet(a_type(), large, Goal(), trace, TimeLimit(60.0), 1)
    assert found.why_estimated == "more than 2000 nodes are not simulated"


@each_case("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_goal_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="positive number of seconds"):
        Goal(ttft_p95=seconds)
