from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.workshop.simulate.comparison import build_front, known_policies, lower_bound
from gateway.workshop.simulate.fronts import LeastConn
from gateway.workshop.simulate.report import Percentiles, summarise
from gateway.workshop.simulate.simulation import (
    NO_REQUESTS,
    SimulatedFleet,
    SimulatedMachine,
    Traffic,
    generate,
)
from tests.workshop.simulate.build import job, machine, play


def test_percentiles_are_values_of_the_sample() -> None:
    spread = Percentiles.of([float(value) for value in range(100, -1, -1)])
    assert (spread.mean, spread.p50, spread.p95, spread.p99) == (50.0, 50.0, 95.0, 99.0)
    assert Percentiles.of([]) == Percentiles(0.0, 0.0, 0.0, 0.0)


def test_a_run_is_summed_up() -> None:
    jobs = [
        job(time=1.0, prompt=100, output=11),
        job(time=11.0, prompt=300, output=11, label="urgent"),
    ]
    made = summarise("nginx", play(jobs, [machine(2)] * 2), bound=0.5, cpu_seconds=2.0)
    assert made.requests == 2
    assert made.seconds == pytest.approx(10.0 + 1.3)
    assert made.ttft.mean == pytest.approx((0.1 + 0.3) / 2)
    assert made.completion.mean == pytest.approx(1.2)
    assert made.ratio == pytest.approx(2.4)
    assert made.service == pytest.approx(1.2)
    # Only the first request ran while requests arrived, up to the eleventh second.
    assert made.utilisation == pytest.approx(1.1 / (4 * 10.0))
    assert made.tokens_per_second == pytest.approx(22 / 11.3)
    assert made.classes["urgent"].mean == pytest.approx(0.3)
    reported = json.loads(json.dumps(made.as_dict()))
    assert reported["ttft"]["p95"] == pytest.approx(0.3)
    assert "curve" not in reported
    # A burst counts over its whole time.
    burst = play([job(prompt=100, output=11)], [machine(2)])
    assert summarise("nginx", burst).utilisation == pytest.approx(0.5)
    assert summarise("nginx", SimulatedFleet([], NO_REQUESTS)).requests == 0


CAPPED = partial(LeastConn, capped=True)


def mean(fleet: SimulatedFleet) -> float:
    return sum(one.ended - one.arrived for one in fleet.jobs) / len(fleet.jobs)


def test_fast_nodes_that_are_too_few_for_all_do_not_serve_all() -> None:
    """Ten fast nodes could serve a tenth of this; the bound must not assume that they serve all."""
    jobs = [job(time=i * 0.05, prompt=100, output=101) for i in range(4000)]
    machines = [machine(1, f"fast{i}") for i in range(10)]
    machines += [machine(1, f"slow{i}", prefill=100.0, decode=1.0) for i in range(2000)]
    fleet = play(jobs, machines, CAPPED)
    alone_on_the_fastest = 0.1 + 100 * 0.1
    assert alone_on_the_fastest * 4 < lower_bound(fleet) < mean(fleet)


def test_the_bound_of_a_single_request_is_its_time_and_above_capacity_queueing_counts() -> None:
    alone = play([job(prompt=300, output=20)], [machine()])
    assert lower_bound(alone) == pytest.approx(mean(alone))
    assert lower_bound(SimulatedFleet([], NO_REQUESTS)) == 0.0
    jobs = [job(prompt=100, output=101) for _ in range(100)]
    fleet = play(jobs, [machine(1)], CAPPED)
    # One after the other, each of 10.1 s: the best there is, but for the first step.
    assert mean(fleet) == pytest.approx(10.1 * 101 / 2)
    assert 0.9 * mean(fleet) < lower_bound(fleet) <= mean(fleet)


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
    fleet = play(played.jobs, machines, partial(build_front, policy, exact=True))
    assert lower_bound(fleet) <= mean(fleet) * (1 + 1e-9)
