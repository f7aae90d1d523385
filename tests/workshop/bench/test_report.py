"""Slots, prefill and decode are found in whole runs: `test_session.py`."""

from __future__ import annotations

import functools
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from gateway.workshop.bench.exchange import Baseline, RequestResult, ServerDescription
from gateway.workshop.bench.load import ClientFigures, Load, LoadRun, Loop, RequestGoal
from gateway.workshop.bench.report import (
    FORMAT,
    BenchReport,
    ComparisonError,
    Difference,
    Limit,
    LoadFigures,
    compare,
    figures_of,
    judge,
    render_page,
)
from gateway.workshop.simulate.report import Percentiles
from tests.each_case import each_case
from tests.known import known

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


@each_case(
    ("goal", "is_met"),
    [
        (RequestGoal(ttft=1.0, completion=4.0, inter_token=0.34), True),
        (RequestGoal(ttft=0.9), False),
        (RequestGoal(completion=3.9), False),
        (RequestGoal(inter_token=0.33), False),
        (RequestGoal(ttft=1.0, completion=3.9), False),
    ],
)
def test_a_goal_is_kept_whole(goal: RequestGoal, is_met: bool) -> None:
    assert goal.is_met(request(100, 1, 104)) is is_met


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


def test_the_page_has_the_figures_needs_nothing_else_and_a_servers_words_stay_text() -> None:
    evil = '<script>alert(1)</script>"\x1b[31m'
    server, baseline = ServerDescription(model=evil, slots=4, notes=[evil]), Baseline(0.1, 0.1, 1)

    def page(*loads: LoadFigures) -> str:
        judged = [replace(one, verdict=judge(one, server, baseline)) for one in loads]
        about = (evil, "chat", "2026-01-02T03:04:05+00:00", server, {"seed": 1}, {"python": "3"})
        return render_page(BenchReport(*about, RequestGoal(), baseline, judged, [evil]))

    shown = page(
        *(figures(request(100, 1, 104), request(101, 2, 110), at_a_time=n) for n in (1, 4))
    )
    for text in ("4 at a time", "TTFT P50", "decode", "<table", "<svg", "<polyline", "alert(1)"):
        assert text in shown
    assert not re.search(r"<(script|link|img|iframe)|(?:src|href|url)\s*[=(]|\x1b", shown)
    failed = RequestResult(1, 0.0, error="http_500", detail="full", ended=1.0)
    assert "http_500" in page(figures(failed))


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
        None,
        {"ttft": ["a"], "inter_token": [], "completion": [], "tokens": []},
        {"ttft": [float("nan")], "inter_token": [], "completion": [], "tokens": []},
        {"ttft": [-1], "inter_token": [], "completion": [], "tokens": []},
        {"ttft": [], "inter_token": [], "completion": [1], "tokens": []},
    ],
)
def test_broken_reports_are_refused(samples: object) -> None:
    broken = report()
    broken["loads"][0]["samples"] = samples
    with pytest.raises(ComparisonError, match="a report is broken"):
        compare(broken, report())
