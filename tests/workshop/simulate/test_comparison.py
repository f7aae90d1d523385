from __future__ import annotations

import json
from functools import partial
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.workshop.simulate.comparison import (
    ElasticFigures,
    build_front,
    compare,
    compare_elastic,
    compare_model_placements,
    known_policies,
    lower_bound,
)
from gateway.workshop.simulate.fleets import from_text, models_from_text
from gateway.workshop.simulate.report import summarise
from gateway.workshop.simulate.simulation import (
    NO_REQUESTS,
    SimulatedFleet,
    SimulatedMachine,
    Traffic,
    generate,
    parse_figures,
)
from tests.workshop.simulate.build import job, machine, play, trace

FLEET = [SimulatedMachine(f"fast{i}", 2, 600.0, 40.0) for i in range(4)] + [
    SimulatedMachine(f"slow{i}", 2, 250.0, 16.0) for i in range(2)
]


@pytest.mark.parametrize("exact", [False, True])
def test_least_finish_is_well_ahead_of_counting_connections(exact: bool) -> None:
    trace = generate(Traffic(requests=1500, rate=1.0), 1)
    ours, nginx = compare(trace, FLEET, ["least_finish", "nginx"], exact=exact)
    assert ours.completion.mean < 0.85 * nginx.completion.mean
    assert ours.ttft.p95 < 0.85 * nginx.ttft.p95
    assert ours.cached_share > nginx.cached_share


RULES = ElasticFigures(start_above=2, start_after=1, stop_after=60, cooldown=10, startup=20)


def test_a_machine_is_paid_from_its_start_to_its_stop_and_starts_without_its_caches() -> None:
    turns = [job(time=0.0, prompt=1000, stream=1), job(time=600.0, prompt=1200, stream=1)]
    always, elastic = compare_elastic(trace(turns), [], [machine()], RULES)
    assert always.machine_hours == pytest.approx(always.seconds / 3600)
    assert elastic.starts == 2
    # Twice: 20 s to start, two seconds of work, 60 s until it is stopped.
    assert elastic.machine_hours * 3600 == pytest.approx(2 * 82, abs=4)
    assert elastic.wait.mean == pytest.approx(20, abs=3)
    # What was stopped has lost its caches.
    assert always.cached_share > 0.4
    assert elastic.cached_share == 0


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


def mean(fleet: SimulatedFleet) -> float:
    return sum(one.ended - one.arrived for one in fleet.jobs) / len(fleet.jobs)


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


ROUTERS = from_text(",".join(f"1x2@40:600/{memory}GiB" for memory in (16, 24, 32, 48, 64)))
MODELS = models_from_text("12x2GiB:30GiB")
TRAFFIC = "rate=0.8,requests=2500,system=400,answer=100,burst=2,every=600,lasting=120,moves={}"
# Mean completion of seeds 1 to 5 with the best of 1,000 placements by hand, seconds, as in
# docs/simulation.md. A greedy placement is played too, in case that is better by now.
BY_HAND = {0: (4.73, 5.23, 10.26, 6.08, 6.00), 900: (5.52, 6.64, 17.81, 9.96, 5.80)}


@pytest.mark.slow
@pytest.mark.parametrize(("moves", "most"), [(0, 1.1), (900, 1.0)])
def test_the_gateway_halves_each_routers_own_and_comes_near_or_beats_the_best_by_hand(
    moves: int, most: float
) -> None:
    ours, own, by_hand = [], [], []
    for seed, best in enumerate(BY_HAND[moves], 1):
        traffic = parse_figures(TRAFFIC.format(moves), Traffic)
        trace = generate(traffic, seed, [model.name for model in MODELS])
        found = compare_model_placements(trace, ROUTERS, MODELS, 0, seed=seed)
        means = {one.policy: one.completion.mean for one in found}
        ours.append(means["gateway"])
        own.append(means["each router's own"])
        by_hand.append(min(best, means["by hand"]))
    assert fmean(ours) <= 0.5 * fmean(own)
    assert fmean(ours) <= most * fmean(by_hand)
