from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

from gateway.tools.bench.figures import Goal
from gateway.tools.bench.report import (
    CSV_COLUMNS,
    FORMAT,
    milliseconds,
    remarks,
    table_columns,
    table_rows,
    write_requests,
)
from tests.tools.bench.reports import sample_report, sample_runs


def test_each_load_is_a_row_and_each_column_has_a_cell() -> None:
    report = sample_report(goal=Goal(ttft=1.0))
    rows = list(table_rows(report))
    assert [row[0] for row in rows] == ["1 at a time", "4 at a time"]
    assert {len(row) for row in rows} == {len(table_columns(report))}
    assert rows[0][table_columns(report).index("GOOD")] == "100%"


def test_failures_and_what_limits_are_told_beside_the_table() -> None:
    report = sample_report(fails=True)
    assert not report.has_success
    lines = remarks(report)
    assert "1 at a time: 5 failed with http_500 (full)" in lines
    assert lines[0].startswith("1 at a time: errors: every request failed")
    assert any(line.startswith("The load generator itself: lag at most 1 ms") for line in lines)


def test_several_tokens_in_an_event_and_an_interruption_are_told() -> None:
    report = sample_report()
    (first, second) = report.loads
    figures = replace(first.figures, tokens_per_event=3.9, is_whole=False)
    report.loads[0] = replace(first, figures=figures)
    lines = remarks(report)
    assert any("3.9 tokens an event" in line for line in lines)
    assert any("interrupted" in line for line in lines)
    assert second.figures.tokens_per_event == 1.0


def test_the_json_report_has_all_figures_and_the_requests_of_a_comparison() -> None:
    value = json.loads(json.dumps(sample_report().as_dict()))
    assert value["format"] == FORMAT
    load = value["loads"][1]
    assert load["label"] == "4 at a time"
    assert load["limit"]["limit"] == "decode"
    assert set(load["ttft"]) == {"mean", "p50", "p95", "p99"}
    assert len(load["samples"]["completion"]) == 5


def test_the_table_of_requests_has_a_line_for_each() -> None:
    file = io.StringIO()
    write_requests(file, sample_runs())
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert len(rows) == 10
    assert rows[6]["load"] == "4 at a time"
    assert float(rows[6]["intended_start"]) == 1.0
    assert float(rows[6]["ttft"]) > 0.4
    assert rows[6]["error"] == ""


def test_times_have_a_unit_that_suits_them() -> None:
    assert [milliseconds(x) for x in (0.00012, 0.0123, 0.5, 1.0, 93.0)] == [
        "0.12 ms", "12.3 ms", "500 ms", "1 s", "93 s",
    ]  # fmt: skip
