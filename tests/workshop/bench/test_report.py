"""Slots, prefill and decode are found in whole runs: `test_session.py`."""

from __future__ import annotations

import csv
import functools
import io
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gateway.workshop.bench.exchange import Baseline, RequestResult, ServerDescription
from gateway.workshop.bench.load import ClientFigures, Load, LoadRun, Loop, RequestGoal
from gateway.workshop.bench.report import (
    CSV_COLUMNS,
    FORMAT,
    MOST_SAMPLES,
    ComparisonError,
    Difference,
    Limit,
    LoadFigures,
    compare,
    draw_report,
    figures_of,
    judge,
    milliseconds,
    read_report,
    remarks,
    render_page,
    table_rows,
    write_requests,
)
from gateway.workshop.simulate.report import Percentiles
from tests.known import known
from tests.workshop.bench.reports import sample_report, sample_runs


def test_each_load_is_a_row_and_each_column_has_a_cell() -> None:
    report = sample_report(goal=RequestGoal(ttft=1.0))
    rows = table_rows(report)
    assert [row[0][1] for row in rows] == ["1 at a time", "4 at a time"]
    titles = [title for title, _ in rows[0]]
    assert titles[:7] == ["LOAD", "REQUESTS", "FAILED", "TTFT P50", "P95", "P99", "INTER-TOKEN P50"]
    assert [[title for title, _ in row] for row in rows] == [titles, titles]
    assert dict(rows[0])["GOOD"] == "100%"


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
    report.loads[0] = replace(first, tokens_per_event=3.9, is_whole=False)
    lines = remarks(report)
    assert any("3.9 tokens an event" in line for line in lines)
    assert any("interrupted" in line for line in lines)
    assert second.tokens_per_event == 1.0


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
    assert list(rows[0])[:4] == ["load", "request", "intended_start", "start_lag"]
    assert list(rows[0])[3:] == list(CSV_COLUMNS)
    assert len(rows) == 10
    assert rows[6]["load"] == "4 at a time"
    assert float(rows[6]["intended_start"]) == 1.0
    assert float(rows[6]["ttft"]) > 0.4
    assert rows[6]["error"] == ""


def test_times_have_a_unit_that_suits_them() -> None:
    assert [milliseconds(x) for x in (0.00012, 0.0123, 0.5, 1.0, 93.0)] == [
        "0.12 ms", "12.3 ms", "500 ms", "1 s", "93 s",
    ]  # fmt: skip


IDLE = ClientFigures(Percentiles.of([0.001]), Percentiles.of([]), 0.1)


def request(
    start: float, ttft: float, end: float, tokens: int = 10, connect: float = 0.0
) -> RequestResult:
    result = RequestResult(1, start, first=start + ttft, last=end, ended=end, events=tokens)
    result.connect_seconds, result.longest_gap = connect, 0.3
    result.completion_tokens = tokens
    result.prompt_tokens = 100
    return result


def figures(
    *results: RequestResult,
    goal: RequestGoal | None = None,
    client: ClientFigures = IDLE,
    at_a_time: int = 2,
    alone: float | None = None,
) -> LoadFigures:
    load = Load(Loop.CLOSED, at_a_time, 10)
    run = LoadRun(load, list(results), client, joules=200.0, is_whole=True)
    return figures_of(run, goal or RequestGoal(), 0.0, alone)


def test_rates_are_over_the_time_from_the_first_start_to_the_last_end() -> None:
    found = figures(request(100, 1, 104), request(100, 2, 110, tokens=30))
    assert found.seconds == 10
    assert found.total_tokens_per_second == 4.0
    assert found.total_prompt_tokens_per_second == 20.0
    assert found.requests_per_second == 0.2
    assert found.completion_tokens == 20
    assert found.joules_per_token == 5.0


def test_failed_requests_count_as_failed_and_in_nothing_else() -> None:
    failed = RequestResult(3, 100.0, error="http_500", detail="full", ended=120.0)
    found = figures(request(100, 1, 104), failed, goal=RequestGoal(ttft=5))
    assert (found.requests, found.succeeded, found.failed) == (2, 1, 1)
    assert found.errors == {"http_500": 1}
    assert found.details == {"http_500": "full"}
    assert known(found.completion).p99 == 4
    # Its time passed all the same.
    assert found.seconds == 20
    assert known(found.goodput)["share"] == 0.5


@pytest.mark.parametrize(
    ("goal", "is_met"),
    [
        (RequestGoal(ttft=1.0), True),
        (RequestGoal(ttft=0.9), False),
        (RequestGoal(completion=4.0), True),
        (RequestGoal(completion=3.9), False),
        (RequestGoal(inter_token=0.34), True),
        (RequestGoal(inter_token=0.33), False),
        (RequestGoal(ttft=1.0, completion=3.9), False),
    ],
)
def test_a_goal_is_kept_whole(goal: RequestGoal, is_met: bool) -> None:
    assert goal.is_met(request(100, 1, 104)) is is_met
    assert bool(goal)
    assert not RequestGoal()


def test_a_report_holds_a_bounded_number_of_requests() -> None:
    found = figures(*(request(at, 1, at + 2) for at in range(2 * MOST_SAMPLES + 1)))
    assert MOST_SAMPLES / 2 < len(found.samples["ttft"]) <= MOST_SAMPLES


def test_waiting_is_told_apart_by_the_server_else_the_gateway_else_a_request_alone() -> None:
    one = request(100, 5, 110)
    assert figures(one).parts.waiting is None
    assert figures(one, alone=1.0).parts.waiting == 4.0
    one.queue_seconds = 3.0
    found = figures(one, alone=1.0).parts
    assert (found.waiting, found.prefill) == (3.0, 2.0)
    one.prefill_seconds = 0.5
    found = figures(one, alone=1.0).parts
    assert (found.waiting, found.prefill, found.decode) == (4.5, 0.5, 5.0)


def exchange(ttft: float = 1.0, decode: float = 1.0, connect: float = 0.0) -> RequestResult:
    return request(0.0, ttft, ttft + decode, 11, connect)


limited = functools.partial(figures, at_a_time=4, alone=0.1)


def limit(found: LoadFigures, slots: int | None = None) -> tuple[Limit, str]:
    verdict = judge(found, ServerDescription(slots=slots), Baseline(0.1, 0.05))
    return verdict.limit, verdict.reason


def test_the_longest_part_of_a_request_limits() -> None:
    assert limit(limited(exchange(ttft=0.1, decode=1.0))) == (
        Limit.DECODE,
        "writing is 91% of a request's 1.1 s: a stream gets 10 tokens/s, one that is alone 20",
    )
    # With enough slots late first tokens are the prompts of others.
    found, reason = limit(limited(exchange(ttft=9.0), at_a_time=4), slots=4)
    assert found is Limit.PREFILL
    assert "4 slots are enough for" in reason
    assert limit(limited(exchange(decode=0.2), alone=0.9))[0] is Limit.PREFILL
    assert limit(limited(*[exchange(ttft=9.0)] * 10, at_a_time=10), slots=1)[0] is Limit.SLOTS
    assert (
        limit(limited(exchange(ttft=2.0, connect=1.9, decode=0.1), alone=2.0))[0] is Limit.NETWORK
    )


def test_a_busy_or_late_client_limits_before_anything_else() -> None:
    busy = replace(IDLE, cpu_share=0.97)
    assert limit(limited(exchange(), client=busy))[0] is Limit.CLIENT
    late = replace(IDLE, lag=Percentiles.of([0.2]))
    found, reason = limit(limited(exchange(), client=late))
    assert found is Limit.CLIENT
    assert "200 ms at the 95th percentile" in reason
    held = replace(IDLE, held_back=3)
    assert "3 requests started late" in limit(limited(exchange(), client=held))[1]
    # 5 ms are nothing beside tokens that come every 100 ms.
    slight = replace(IDLE, lag=Percentiles.of([0.005]))
    assert limit(limited(exchange(), client=slight))[0] is not Limit.CLIENT
    # A machine without descriptors left.
    found, reason = limit(limited(exchange(), RequestResult(1, 0.0, error="exhausted", ended=1.0)))
    assert found is Limit.CLIENT
    assert reason.startswith("1 connections could not be opened")


def test_where_nothing_succeeds_the_errors_limit() -> None:
    failed = RequestResult(1, 0.0, error="http_500", detail="full", ended=1.0)
    found, reason = limit(limited(failed))
    assert found is Limit.ERRORS
    assert reason == "every request failed, most of them with http_500 (full)"
    empty = limited()
    assert limit(empty)[1] == "no request ended"
    assert (empty.requests, empty.seconds, empty.total_tokens_per_second) == (0, 0.0, 0.0)
    assert empty.ttft is None
    assert json.dumps(empty.as_dict())


class _Tags(HTMLParser):
    """Checks that tags close in order, and keeps their names and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    page = render_page(sample_report())
    tags = _Tags(page)
    assert tags.open == []
    assert not tags.seen & {"script", "link", "img", "iframe"}
    assert re.search(r"(?:src|href|url)\s*[=(]", page) is None
    assert {"table", "svg", "polyline", "rect"} <= tags.seen
    for text in ("4 at a time", "TTFT P50", "decode", "http://127.0.0.1:8000"):
        assert text in tags.text
    assert "http_500" in render_page(sample_report(fails=True))


def test_a_servers_words_stay_text() -> None:
    report = sample_report()
    evil = '<script>alert(1)</script>"\x1b[31m'
    report = replace(
        report, url=evil, server=replace(report.server, model=evil, notes=[evil]), notes=[evil]
    )
    page = render_page(report)
    assert "<script" not in page
    assert "\x1b" not in page
    assert "alert(1)" in _Tags(page).text


@pytest.mark.parametrize("fails", [False, True])
def test_a_plot_is_drawn(tmp_path: Path, fails: bool) -> None:
    path = tmp_path / "a.png"
    draw_report(path, sample_report(fails=fails))
    assert path.read_bytes().startswith(b"\x89PNG")


def report(slower: float = 1.0, *, requests: int = 60, seed: int = 1, **given: Any) -> Any:
    """A report of one load, whose times are drawn at random."""
    rng = random.Random(seed)
    ttft = [slower * rng.lognormvariate(0, 0.2) for _ in range(requests)]
    samples = {
        "ttft": ttft,
        "inter_token": [0.05 * one for one in ttft],
        "completion": [5 * one for one in ttft],
        "tokens": [100] * requests,
    }
    load = {"label": "4 at a time", "load": {"loop": "closed", "level": 4}, "samples": samples}
    return {"format": FORMAT, "endpoint": "chat", "request": {"seed": 1}, "loads": [load], **given}


def by_figure(differences: list[Difference]) -> dict[str, Difference]:
    return {one.figure: one for one in differences}


def test_a_run_that_is_slower_by_a_third_is_worse_in_every_figure() -> None:
    differences, notes = compare(report(), report(1.33, seed=2))
    assert notes == []
    found = by_figure(differences)
    assert set(found) == {
        *(f"{name} {p}" for name in ("TTFT", "inter-token", "completion") for p in ("p50", "p95")),
        "tokens/s of all",
    }
    for name in ("TTFT p50", "completion p50", "tokens/s of all"):
        assert found[name].verdict == "worse"
    assert found["TTFT p50"].low < 0.33 < found["TTFT p50"].high
    assert found["tokens/s of all"].change == pytest.approx(1 / 1.33 - 1, abs=0.08)
    assert by_figure(compare(report(1.33), report(seed=2))[0])["TTFT p50"].verdict == "better"


def test_two_runs_of_one_server_rarely_differ() -> None:
    """Of 95 % intervals about one in twenty leaves out what is true."""
    wrong = sum(
        by_figure(compare(report(seed=seed), report(seed=seed + 1000))[0])["TTFT p50"].verdict
        in {"better", "worse"}
        for seed in range(20)
    )
    assert wrong <= 3


def test_the_same_figures_are_the_same() -> None:
    samples = {"ttft": [1.0] * 20, "inter_token": [], "completion": [2.0] * 20, "tokens": [3] * 20}
    one = report()
    one["loads"][0]["samples"] = samples
    differences, _ = compare(one, one)
    assert {one.verdict for one in differences} == {"same"}
    assert "inter-token p50" not in by_figure(differences)


def test_differing_requests_and_few_of_them_are_told() -> None:
    _, notes = compare(report(), report(request={"seed": 2}))
    assert notes == ["The runs differ in `request`: seed 1 and 2."]
    differences, notes = compare(report(requests=4), report())
    assert differences == []
    assert "only 4 requests succeeded" in notes[0]
    with pytest.raises(ComparisonError, match="no load in common: none; 4 at a time"):
        compare(report(loads=[]), report())


@pytest.mark.parametrize(
    "samples",
    [
        {},
        [],
        None,
        {"ttft": ["a"], "inter_token": [], "completion": [], "tokens": []},
        {"ttft": [float("nan")], "inter_token": [], "completion": [], "tokens": []},
        {"ttft": [-1], "inter_token": [], "completion": [], "tokens": []},
        {"ttft": [[1]], "inter_token": [], "completion": [], "tokens": []},
        {"ttft": [], "inter_token": [], "completion": [1], "tokens": []},
    ],
)
def test_broken_reports_are_refused(samples: object) -> None:
    broken = report()
    broken["loads"][0]["samples"] = samples
    with pytest.raises(ComparisonError, match="a report is broken"):
        compare(broken, report())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "no report"),
        ('{"loads": 1}', "no report"),
        ('{"loads": [], "format": 99}', "has format 99"),
    ],
)
def test_files_that_are_no_reports_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ComparisonError, match=message):
        read_report(path)


def test_an_enormous_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.workshop.bench.report.LARGEST_FILE", 100)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(report()))
    with pytest.raises(ComparisonError, match="larger than"):
        read_report(path)
