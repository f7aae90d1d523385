from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.bench import report
from tests.bench.machine import cpu_model
from tests.bench.report import GOALS, Goal, Results, Sample
from tests.bench.scenarios import Sizes, catalogue, quantile, spread_ms


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


def test_a_round_that_lacks_one_side_counts_for_neither() -> None:
    results = Results(
        [
            sample("chunk", "gateway", 1, 30),
            sample("chunk", "gateway", 2, 99),
            sample("chunk", "nginx", 1, 10),
        ]
    )
    assert results.ratio(("chunk", "gateway"), ("chunk", "nginx")) == 3


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


@pytest.mark.parametrize(("value", "verdict"), [(3000, "aim"), (2000, "must"), (1999, "MISS")])
def test_more_streams_are_better(value: float, verdict: str) -> None:
    assert goal("streams").verdict(value) == verdict


def test_sustained_streams_are_the_largest_number_with_a_delay_below_the_limit() -> None:
    def streams(count: int, p99: float) -> Sample:
        return Sample(f"streams-{count}", "gateway", 1, {"streams": count, "p99_ms": p99})

    measure = goal("streams").measure
    assert measure(Results([])) is None
    assert measure(Results([streams(2000, 50.0)])) == 0
    assert measure(Results([streams(2000, 12.0), streams(3000, 49.0), streams(4000, 90.0)])) == 3000


def test_added_latency_is_what_exceeds_direct() -> None:
    results = Results([sample("latency", "gateway", 1, 0.7), sample("latency", "direct", 1, 0.2)])
    assert goal("added median").measure(results) == pytest.approx(0.5)


def test_assembling_is_compared_with_chunks_through_nginx() -> None:
    results = Results([sample("assembled", "gateway", 1, 30), sample("chunk", "nginx", 1, 20)])
    assert goal("assembled").measure(results) == 1.5


def test_growth_with_connections_is_compared_with_the_own_cost() -> None:
    results = Results(
        [sample("plain-c256", "gateway", 1, 120), sample("plain-c32", "gateway", 1, 100)]
    )
    assert goal("plain c256").measure(results) == 1.2


def test_tables_have_a_row_for_each_scenario_and_a_verdict_for_each_goal() -> None:
    scenarios = list(catalogue(Sizes()).values())
    results = Results([sample("plain-c32", "gateway", 1, 60), sample("plain-c32", "nginx", 1, 10)])
    tables = report.tables(results, scenarios, ["gateway", "nginx"])
    assert "| plain c32, us/request | 60 (6.00 x) | 10 (1.00 x) |" in tables
    assert "| plain c32 / nginx | 6 | <= 6 | <= 5 | must |" in tables
    assert all(scenario.title in tables for scenario in scenarios)
    assert all(goal.name in tables for goal in GOALS)
    assert len({line.count("|") for line in tables.split("\n\n")[0].splitlines()}) == 1


def test_direct_has_no_cpu_of_a_proxy() -> None:
    results = Results([sample("chunk", "direct", 1, 0.0), sample("chunk", "nginx", 1, 10)])
    tables = report.tables(results, [catalogue(Sizes())["chunk"]], ["direct", "nginx"])
    assert re.search(r"us/chunk \| - \| 10 \(1.00 x\) \|", tables)


def test_json_has_the_setting_the_samples_and_the_verdicts() -> None:
    results = Results([sample("chunk", "gateway", 1, 30), sample("chunk", "nginx", 1, 10)])
    setting = report.Setting("python -m x", {"cpu": "A"}, Sizes(), 1)
    report_json = json.loads(report.as_json(results, setting))
    assert report_json["machine"] == {"cpu": "A"}
    assert report_json["sizes"]["streams"] == 100
    assert {
        "name": "chunk / nginx",
        "value": 3,
        "must": 2,
        "aim": 1.5,
        "kept": "MISS",
    } in report_json["goals"]
    assert report_json["samples"][0]["figures"]["cpu_us"] == 30


def test_the_tables_replace_what_stood_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"# Head\n\n{report.BEGIN}\nold\n{report.END}\n\nTail\n")
    report.write_between_markers(page, "new\n")
    report.write_between_markers(page, "newer\n")
    assert page.read_text() == f"# Head\n\n{report.BEGIN}\n\nnewer\n\n{report.END}\n\nTail\n"


@pytest.mark.parametrize("before", [None, "", "# Head\n"])
def test_a_page_without_markers_gets_them_at_its_end(tmp_path: Path, before: str | None) -> None:
    page = tmp_path / "performance.md"
    if before is not None:
        page.write_text(before)
    report.write_between_markers(page, "new\n")
    text = page.read_text()
    assert text.startswith(before or report.BEGIN)
    assert text.endswith(f"{report.BEGIN}\n\nnew\n\n{report.END}\n")


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(i) for i in range(1, 101)]
    assert quantile(values, 0.99) == 99
    assert quantile([5.0], 0.99) == 5
    assert spread_ms([3.0, 1.0, 2.0]) == {"p50_ms": 2.0, "p99_ms": 3.0, "max_ms": 3.0}
    assert spread_ms([]) == {}


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.123"), (22.34, "22.3"), (3000.4, "3000"), (7, "7")]
)
def test_numbers_keep_three_digits(value: float, text: str) -> None:
    assert report.number(value) == text


def test_the_model_of_the_cpu_is_read_from_its_first_core() -> None:
    text = "processor\t: 0\nmodel name\t: AMD EPYC 9754\n\nprocessor\t: 1\nmodel name\t: Other\n"
    assert cpu_model(text) == "AMD EPYC 9754"
    assert cpu_model("processor : 0\n")
