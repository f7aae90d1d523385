from __future__ import annotations

import json

import pytest

from gateway.tools.bench.exchange import RequestResult
from gateway.tools.bench.figures import MOST_SAMPLES, Goal, LoadFigures, figures_of
from gateway.tools.bench.load import Load, Loop
from gateway.tools.bench.runner import LoadRun

LOAD = Load(Loop.CLOSED, 2, 10)


def request(start: float, ttft: float, end: float, tokens: int = 10) -> RequestResult:
    result = RequestResult(
        1, start, first=start + ttft, last=end, ended=end, events=tokens, longest_gap=0.3
    )
    result.server.completion_tokens = tokens
    result.server.prompt_tokens = 100
    return result


def figures(*results: RequestResult, goal: Goal | None = None) -> LoadFigures:
    run = LoadRun(LOAD, list(results), joules=200.0, is_whole=True)
    return figures_of(run, goal or Goal(), 0.01, None)


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
    found = figures(request(100, 1, 104), failed, goal=Goal(ttft=5))
    assert (found.requests, found.succeeded, found.failed) == (2, 1, 1)
    assert found.errors == {"http_500": 1}
    assert found.details == {"http_500": "full"}
    assert found.completion is not None
    assert found.completion.p99 == 4
    # Its time passed all the same.
    assert found.seconds == 20
    assert found.goodput is not None
    assert found.goodput.share == 0.5


@pytest.mark.parametrize(
    ("goal", "is_met"),
    [
        (Goal(ttft=1.0), True),
        (Goal(ttft=0.9), False),
        (Goal(completion=4.0), True),
        (Goal(completion=3.9), False),
        (Goal(inter_token=0.34), True),
        (Goal(inter_token=0.33), False),
        (Goal(ttft=1.0, completion=3.9), False),
    ],
)
def test_a_goal_is_kept_whole(goal: Goal, is_met: bool) -> None:
    assert goal.is_met(request(100, 1, 104)) is is_met
    assert bool(goal)
    assert not Goal()


def test_a_load_without_any_result_has_figures() -> None:
    found = figures()
    assert (found.requests, found.seconds, found.total_tokens_per_second) == (0, 0.0, 0.0)
    assert found.ttft is None
    assert json.dumps(found.as_dict())


def test_a_report_holds_a_bounded_number_of_requests() -> None:
    found = figures(*(request(at, 1, at + 2) for at in range(2 * MOST_SAMPLES + 1)))
    assert MOST_SAMPLES / 2 < len(found.samples.ttft) <= MOST_SAMPLES


def test_waiting_is_told_apart_by_the_server_else_the_gateway_else_a_request_alone() -> None:
    run = LoadRun(LOAD, [request(100, 5, 110)])
    assert figures_of(run, Goal(), 0.0, None).parts.waiting is None
    assert figures_of(run, Goal(), 0.0, 1.0).parts.waiting == 4.0
    run.results[0].queue_seconds = 3.0
    found = figures_of(run, Goal(), 0.0, 1.0).parts
    assert (found.waiting, found.prefill) == (3.0, 2.0)
    run.results[0].server.prefill_seconds = 0.5
    found = figures_of(run, Goal(), 0.0, 1.0).parts
    assert (found.waiting, found.prefill, found.decode) == (4.5, 0.5, 5.0)
