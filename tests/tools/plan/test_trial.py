from __future__ import annotations

import math
import random

import pytest

from gateway.tools.plan.trial import (
    DIRECT,
    FleetPart,
    OutOfTimeError,
    TimeLimit,
    alone,
    error_of_mean,
    fleet_name,
    try_fleet,
)
from gateway.tools.plan.workload import Workload, make_trace
from gateway.tools.simulate.trace import Job, TracePrompt, build_trace
from tests.tools.plan.build import a_type

WORKLOAD = Workload(300, 100, 100)


def test_the_first_tenth_of_the_requests_is_not_counted() -> None:
    trace = make_trace(WORKLOAD, 500, seed=1)
    trial = try_fleet((FleetPart(a_type(), 2),), trace, TimeLimit(60.0))
    assert trial.requests == 450


def test_each_part_says_what_it_served() -> None:
    parts = (FleetPart(a_type("slow"), 1), FleetPart(a_type("fast", decode_tps=80.0), 1))
    trial = try_fleet(parts, make_trace(WORKLOAD, 500, seed=1), TimeLimit(60.0))
    slow, fast = trial.shares
    assert slow.requests + fast.requests == pytest.approx(1.0)
    assert fast.completion_tokens > slow.completion_tokens
    assert fleet_name(parts) == "1 x slow + 1 x fast"


def test_without_the_gateway_requests_wait_inside_the_node() -> None:
    trace = make_trace(WORKLOAD, 500, seed=1)
    trial = try_fleet((FleetPart(a_type(), 1),), trace, TimeLimit(60.0), policy=DIRECT)
    assert trial.waiting_share > 0.5
    assert trial.wait.mean > 0


def test_a_backlog_grows_from_its_sample() -> None:
    workload = Workload(1000, 100, 100, backlog_hours=5.0)
    parts = (FleetPart(a_type(slots=2), 2),)
    whole = try_fleet(parts, make_trace(workload, 1000, 1), TimeLimit(60.0), backlog=1000)
    sample = try_fleet(parts, make_trace(workload, 250, 1), TimeLimit(60.0), backlog=1000)
    assert sample.seconds == pytest.approx(whole.seconds, rel=0.1)
    assert sample.completion.mean == pytest.approx(whole.completion.mean, rel=0.1)


def test_the_error_of_a_mean_holds_the_true_mean() -> None:
    rng = random.Random(5)
    held = 0
    for _ in range(200):
        values = [rng.expovariate(1.0) for _ in range(400)]
        held += abs(sum(values) / 400 - 1.0) <= error_of_mean(values)
    assert 180 <= held <= 199
    assert error_of_mean([1.0] * 39) == math.inf


def test_trials_end_when_the_time_is_used_up() -> None:
    now = [0.0]
    told: list[tuple[str, float]] = []
    limit = TimeLimit(
        10.0, clock=lambda: now[0], on_trial=lambda name, share: told.append((name, share))
    )
    trace = make_trace(WORKLOAD, 100, seed=1)
    try_fleet((FleetPart(a_type(), 2),), trace, limit)
    now[0] = 10.0
    with pytest.raises(OutOfTimeError, match="10 s for simulations are used up"):
        try_fleet((FleetPart(a_type(), 3),), trace, limit)
    assert told == [("2 x node", 0.0), ("3 x node", 1.0)]
    assert limit.trials == 1


def test_no_fleet_is_faster_than_a_node_alone() -> None:
    trace = make_trace(WORKLOAD, 800, seed=1)
    ttft, completion = alone(trace.jobs, a_type())
    trial = try_fleet((FleetPart(a_type(), 50),), trace, TimeLimit(60.0))
    assert trial.ttft.p95 == pytest.approx(ttft, rel=0.05)
    assert trial.completion.p95 == pytest.approx(completion, rel=0.05)


def test_what_an_earlier_turn_has_read_needs_no_reading() -> None:
    turns = [Job(0, n * 100.0, TracePrompt(7, 1000 + n * 20), 10) for n in range(40)]
    ttft, _ = alone(build_trace(turns).jobs, a_type())
    assert ttft < 1.0
