from __future__ import annotations

import json

import pytest

from gateway.tools.simulate.fronts import LeastConn
from gateway.tools.simulate.report import Percentiles, summarise
from gateway.tools.simulate.simulation import SimulationResult, simulate
from tests.tools.simulate.build import job, machine, trace


def test_percentiles_are_values_of_the_sample() -> None:
    spread = Percentiles.of([float(value) for value in range(100, -1, -1)])
    assert (spread.mean, spread.p50, spread.p95, spread.p99) == (50.0, 50.0, 95.0, 99.0)
    assert Percentiles.of([]) == Percentiles(0.0, 0.0, 0.0, 0.0)


def test_a_run_is_summed_up() -> None:
    jobs = [
        job(time=1.0, prompt=100, output=11),
        job(time=11.0, prompt=300, output=11, label="urgent"),
    ]
    result = simulate(trace(jobs), [machine(2), machine(2)], LeastConn(2))
    made = summarise("nginx", result, bound=0.5, cpu_seconds=2.0)
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


def test_a_burst_counts_over_its_whole_time() -> None:
    result = simulate(trace([job(prompt=100, output=11)]), [machine(2)], LeastConn(1))
    assert summarise("nginx", result).utilisation == pytest.approx(0.5)


def test_an_empty_run_can_be_summed_up() -> None:
    assert summarise("nginx", SimulationResult([], [], 0.0, 0.0)).requests == 0
