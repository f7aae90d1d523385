"""Slots, prefill and decode are found in whole runs: `test_session.py`."""

from __future__ import annotations

from dataclasses import replace

from gateway.tools.bench.client_lag import ClientFigures
from gateway.tools.bench.exchange import RequestResult
from gateway.tools.bench.figures import Goal, LoadFigures, figures_of
from gateway.tools.bench.limiting import Limit, judge
from gateway.tools.bench.load import Load, Loop
from gateway.tools.bench.runner import LoadRun
from gateway.tools.bench.target import Baseline, ServerDescription
from gateway.tools.simulate.report import Percentiles

IDLE = ClientFigures(Percentiles.of([0.001]), Percentiles.of([]), 0.1)


def request(
    ttft: float = 1.0, decode: float = 1.0, connect: float = 0.0, events: int = 11
) -> RequestResult:
    end = ttft + decode
    return RequestResult(
        1, 0.0, connect_seconds=connect, first=ttft, last=end, ended=end, events=events
    )


def figures(
    *requests: RequestResult, client: ClientFigures = IDLE, at_a_time: int = 4, alone: float = 0.1
) -> LoadFigures:
    run = LoadRun(Load(Loop.CLOSED, at_a_time, 10), list(requests), client)
    return figures_of(run, Goal(), 0.0, alone)


def limit(found: LoadFigures, slots: int | None = None) -> tuple[Limit, str]:
    verdict = judge(found, ServerDescription(slots=slots), Baseline(0.1, 0.05))
    return verdict.limit, verdict.reason


def test_the_longest_part_of_a_request_limits() -> None:
    assert limit(figures(request(decode=9.0)))[0] is Limit.DECODE
    assert limit(figures(request(decode=0.2), alone=0.9))[0] is Limit.PREFILL
    assert limit(figures(*[request(ttft=9.0)] * 10, at_a_time=10), slots=1)[0] is Limit.SLOTS
    assert limit(figures(request(ttft=2.0, connect=1.9, decode=0.1), alone=2.0))[0] is Limit.NETWORK


def test_the_reason_of_decode_has_the_speed_beside_that_of_a_request_alone() -> None:
    _, reason = limit(figures(request(ttft=0.1, decode=1.0)))
    assert reason == (
        "writing is 91% of a request's 1.1 s: a stream gets 10 tokens/s, one that is alone 20"
    )


def test_late_first_tokens_with_enough_slots_are_the_prompts_of_others() -> None:
    found, reason = limit(figures(request(ttft=9.0), at_a_time=4), slots=4)
    assert found is Limit.PREFILL
    assert "4 slots are enough for" in reason


def test_a_busy_or_late_client_limits_before_anything_else() -> None:
    busy = replace(IDLE, cpu_share=0.97)
    assert limit(figures(request(), client=busy))[0] is Limit.CLIENT
    late = replace(IDLE, lag=Percentiles.of([0.2]))
    found, reason = limit(figures(request(), client=late))
    assert found is Limit.CLIENT
    assert "200 ms at the 95th percentile" in reason
    held = replace(IDLE, held_back=3)
    assert "3 requests started late" in limit(figures(request(), client=held))[1]
    # 5 ms are nothing beside tokens that come every 100 ms.
    slight = replace(IDLE, lag=Percentiles.of([0.005]))
    assert limit(figures(request(), client=slight))[0] is not Limit.CLIENT


def test_a_machine_without_descriptors_left_is_a_client_that_limits() -> None:
    failed = RequestResult(1, 0.0, error="exhausted", ended=1.0)
    found, reason = limit(figures(request(), failed))
    assert found is Limit.CLIENT
    assert reason.startswith("1 connections could not be opened")


def test_where_nothing_succeeds_the_errors_limit() -> None:
    failed = RequestResult(1, 0.0, error="http_500", detail="full", ended=1.0)
    found, reason = limit(figures(failed))
    assert found is Limit.ERRORS
    assert reason == "every request failed, most of them with http_500 (full)"
    assert limit(figures())[1] == "no request ended"
