from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from gateway.events import EventBus, RequestRecord
from gateway.watch.history import (
    MOST_CALLERS,
    MOST_FAILURES,
    MOST_MODELS,
    MOST_UNSERVED,
    STEP_SECONDS,
    FleetHistory,
    Gauges,
    HistoryPoint,
)

IDLE = Gauges(0, 0, 0)


def ended(**values: Any) -> RequestRecord:
    event = RequestRecord("an-id", "/v1/chat/completions")
    given = {"model": "m", "tier": "cpu", "node": "a", "caller": "alice", **values}
    for name, value in given.items():
        setattr(event, name, value)
    return event


class Counted:
    """A history with its bus, and the time of its steps."""

    def __init__(self, **options: Any) -> None:
        self.bus = EventBus()
        self.history = FleetHistory(self.bus, **options)
        self.now = 0.0

    def step(self, *events: RequestRecord, gauges: Gauges = IDLE) -> HistoryPoint:
        for event in events:
            self.bus.publish(event)
        self.now += STEP_SECONDS
        return self.history.close_step(1e9 + self.now, self.now, gauges)


def test_a_step_counts_what_ended_in_it_and_whether_it_failed() -> None:
    counted = Counted()
    point = counted.step(
        ended(),
        ended(status=502, reason="node_failed"),
        ended(status=429, reason="queue_full", tier=None),
        ended(status=499),
    )
    assert (point.requests, point.failed, point.refused) == (3, 1, 1)
    assert counted.step().requests == 0
    assert counted.history.recent().refused == {"queue_full": 1}


def test_failures_are_counted_by_reason_and_node_up_to_a_bound() -> None:
    counted = Counted()
    failed = {"status": 502, "reason": "node_failed"}
    counted.step(ended(**failed), ended(**failed), ended(status=500, reason=None, node=None))
    assert counted.history.recent().failures == {("node_failed", "a"): 2, ("status 500", ""): 1}
    counted.step(*(ended(**failed, node=f"n{number}") for number in range(2 * MOST_FAILURES)))
    recent = counted.history.recent()
    assert recent.failed == 3 + 2 * MOST_FAILURES
    assert len(recent.failures) == 2 + MOST_FAILURES


def test_percentiles_are_of_the_last_minute_and_within_five_percent() -> None:
    counted, rng = Counted(), random.Random(7)
    times = [rng.lognormvariate(1.0, 0.8) for _ in range(2000)]
    points = [
        counted.step(*(ended(ttft=one) for one in times[chunk : chunk + 200]))
        for chunk in range(0, 2000, 200)
    ]
    point = points[-1]
    cuts = statistics.quantiles(times, n=20)
    assert point.ttft_p50 == pytest.approx(statistics.median(times), rel=0.06)
    assert point.ttft_p95 == pytest.approx(cuts[18], rel=0.06)
    for _ in range(12):
        point = counted.step()
    assert point.ttft_p50 is None


def test_tokens_are_counted_while_they_are_written_not_when_the_request_ends() -> None:
    counted = Counted()
    assert counted.step(gauges=Gauges(0, 1, 50)).tokens_per_second == 10
    assert counted.step(gauges=Gauges(0, 1, 150)).tokens_per_second == 20
    # It ends with 160 tokens: only the ten that were not counted yet are new.
    assert counted.step(ended(completion_tokens=160)).tokens_per_second == 2
    assert counted.step().tokens_per_second == 0


def test_models_and_callers_of_strangers_take_bounded_memory() -> None:
    counted = Counted(gpu_cost=lambda *_: 1.0)
    for number in range(2000):
        counted.bus.publish(ended(model=f"m{number}", caller=f"c{number}", prompt_tokens=1))
    counted.bus.catch_up()
    step = counted.history._step
    assert len(step.models) == MOST_MODELS
    assert len(step.callers) == MOST_CALLERS + 1
    assert counted.step().gpu_cost is None


def test_who_is_refused_by_limits_is_told_from_who_sends_most() -> None:
    counted = Counted()
    refused = {"status": 429, "reason": "rate_limit_exceeded", "tier": None}
    counted.step(*[ended(caller="alice") for _ in range(5)], ended(caller="bob", **refused))
    counted.bus.publish(ended(caller="bob", status=429, reason="queue_full"))
    recent = counted.history.recent()
    assert (recent.limited, recent.callers) == ({"bob": 1}, {"alice": 5, "bob": 2})


def test_a_flood_of_refusals_pushes_no_served_request_out_of_those_kept() -> None:
    counted = Counted()
    counted.step(ended(request_id="served", attempts=1))
    counted.step(*(ended(request_id=f"refused-{n}") for n in range(6 * MOST_UNSERVED)))
    found = [[*counted.history.find(name)] for name in ("served", "refused-0", "refused-6143")]
    assert [len(one) for one in found] == [1, 0, 1]
