from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tools.simulate.bound import lower_bound
from gateway.tools.simulate.comparison import build_front, known_policies
from gateway.tools.simulate.fronts import LeastConn, LeastConnQueued
from gateway.tools.simulate.server import SimulatedMachine
from gateway.tools.simulate.simulation import SimulationResult, simulate
from gateway.tools.simulate.traffic import Traffic, generate
from tests.tools.simulate.build import job, machine, trace


def mean(result: SimulationResult) -> float:
    return sum(one.ended - one.arrived for one in result.jobs) / len(result.jobs)


def test_a_single_request_takes_the_time_of_the_bound() -> None:
    result = simulate(trace([job(prompt=300, output=20)]), [machine()], LeastConn(1))
    assert lower_bound(result) == pytest.approx(mean(result))


def test_fast_nodes_that_are_too_few_for_all_do_not_serve_all() -> None:
    """Ten fast nodes could serve a tenth of this; the bound must not assume that they serve all."""
    jobs = [job(time=i * 0.05, prompt=100, output=101) for i in range(4000)]
    machines = [machine(1, f"fast{i}") for i in range(10)]
    machines += [machine(1, f"slow{i}", prefill=100.0, decode=1.0) for i in range(2000)]
    result = simulate(trace(jobs), machines, LeastConnQueued([1] * 2010))
    alone_on_the_fastest = 0.1 + 100 * 0.1
    assert alone_on_the_fastest * 4 < lower_bound(result) < mean(result)


def test_above_capacity_the_bound_by_queueing_counts() -> None:
    jobs = [job(prompt=100, output=101) for _ in range(100)]
    result = simulate(trace(jobs), [machine(1)], LeastConnQueued([1]))
    # One after the other, each of 10.1 s: the best there is, but for the first step.
    assert mean(result) == pytest.approx(10.1 * 101 / 2)
    assert 0.9 * mean(result) < lower_bound(result) <= mean(result)


def test_an_empty_trace_has_a_bound_of_zero() -> None:
    assert lower_bound(SimulationResult([], [], 0.0, 0.0)) == 0.0


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rate=st.floats(0.05, 5.0),
    turns=st.floats(1.0, 6.0),
    cost=st.floats(0.0, 2.0),
    slots=st.integers(1, 4),
    policy=st.sampled_from(known_policies()),
)
def test_no_policy_is_better_than_the_bound(
    seed: int, rate: float, turns: float, cost: float, slots: int, policy: str
) -> None:
    machines = [
        SimulatedMachine("a", slots, 600.0, 40.0, cost),
        SimulatedMachine("b", slots, 250.0, 16.0, cost),
        SimulatedMachine("c", 1, 900.0, 10.0, cost),
    ]
    played = generate(Traffic(requests=120, rate=rate, turns=turns, question=60.0), seed)
    result = simulate(played, machines, build_front(policy, machines, exact=True))
    assert lower_bound(result) <= mean(result) * (1 + 1e-9)
