from __future__ import annotations

import pytest

from tests.bench import report
from tests.bench.report import GOALS, Goal, Results, Sample
from tests.bench.scenarios import Sizes, catalogue


def sample(scenario: str, target: str, round_: int, value: float, errors: int = 0) -> Sample:
    figures = {"cpu_us": value, "p50_ms": value, "rss_mb": value}
    return Sample(scenario, target, round_, figures, errors, "boom" if errors else "")


def goal(name: str) -> Goal:
    return next(goal for goal in GOALS if goal.name.startswith(name))


def test_a_ratio_is_the_median_of_the_ratios_within_each_round() -> None:
    results = Results(
        [
            *(sample("chunk", "gateway", i, value) for i, value in enumerate((10, 60, 36))),
            *(sample("chunk", "nginx", i, value) for i, value in enumerate((10, 30, 12))),
        ]
    )
    assert results.median("chunk", "gateway", "cpu_us") == 36
    assert results.ratio(("chunk", "gateway"), ("chunk", "nginx")) == 2
    assert goal("chunk / nginx").measure(results) == 2


def test_an_invalid_sample_counts_in_no_figure_and_is_reported() -> None:
    results = Results(
        [
            sample("chunk", "gateway", 1, 1, errors=4),
            sample("chunk", "gateway", 2, 30),
            sample("chunk", "nginx", 1, 10),
        ]
    )
    assert results.median("chunk", "gateway", "cpu_us") == 30
    assert results.ratio(("chunk", "gateway"), ("chunk", "nginx")) is None
    tables = report.tables(results, [catalogue(Sizes())["chunk"]], ["gateway", "nginx"])
    assert "- chunk, gateway, round 1: 4 errors, the first: boom" in tables


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(1.5, "aim"), (1.51, "must"), (2.0, "must"), (2.01, "MISS"), (None, "not measured")],
)
def test_a_goal_is_kept_up_to_its_bound(value: float | None, verdict: str) -> None:
    assert goal("chunk / nginx").verdict(value) == verdict


def test_sustained_streams_are_the_largest_number_with_a_delay_below_the_limit() -> None:
    def streams(count: int, p99: float) -> Sample:
        return Sample(f"streams-{count}", "gateway", 1, {"streams": count, "p99_ms": p99})

    measure = goal("streams").measure
    assert measure(Results([])) is None
    assert measure(Results([streams(2000, 50.0)])) == 0
    assert measure(Results([streams(2000, 12.0), streams(3000, 49.0), streams(4000, 90.0)])) == 3000
