from __future__ import annotations

import random
import statistics
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.events import EventBus, RequestRecord
from gateway.nodes.speed import Speed
from gateway.watch import history as history_module
from gateway.watch.history import (
    DAY_STEP_SECONDS,
    DAY_STEPS,
    MOST_CALLERS,
    MOST_FAILURES,
    MOST_MODELS,
    MOST_UNSERVED,
    STEP_SECONDS,
    FleetHistory,
    Gauges,
    HistoryPoint,
    NodeHistory,
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


def test_an_ended_request_is_found_before_its_event_is_due() -> None:
    bus = EventBus(lambda _seconds, _work: None)
    history = FleetHistory(bus)
    bus.publish_deferred(RequestRecord("it", "/v1/chat/completions"))
    assert [one.x_request_id for one in history.find("it")] == ["it"]


def test_a_flood_of_refusals_pushes_no_served_request_out_of_those_kept() -> None:
    counted = Counted()
    counted.step(ended(request_id="served", attempts=1))
    counted.step(*(ended(request_id=f"refused-{n}") for n in range(6 * MOST_UNSERVED)))
    found = [[*counted.history.find(name)] for name in ("served", "refused-0", "refused-6143")]
    assert [len(one) for one in found] == [1, 0, 1]


DAY = DAY_STEP_SECONDS * DAY_STEPS
NOON = 1_796_040_000.0
"""The beginning of a step."""


def speed_of(prefill: float | None, decode: float | None) -> Speed:
    return cast("Speed", SimpleNamespace(prefill_tps=prefill, decode_tps=decode))


SPEED = speed_of(120.0, 8.5)


def worked(history: NodeHistory, since: float, seconds: float, busy: int = 1) -> None:
    for second in range(0, int(seconds), 60):
        history.read("a", since + second, busy, 2, SPEED)


def points(history: NodeHistory, at: float) -> list[tuple[float | None, ...]]:
    told = history.as_json("a", at, SPEED)
    assert told["columns"] == ("at", "busy", "slots", "prefill_tps", "decode_tps")
    rows: list[tuple[float | None, ...]] = told["points"]
    return rows


def test_a_step_has_the_mean_of_its_readings_and_the_speed_at_its_end() -> None:
    history = NodeHistory()
    for second, busy in ((0, 0), (100, 1), (200, 2), (299, 1)):
        history.read("a", NOON + second, busy, 4, SPEED)
    history.read("a", NOON + 300, 3, 4, speed_of(None, 10.0))
    assert points(history, NOON + 310) == [
        (NOON + 300, 1.0, 4.0, None, 10.0),
        (NOON + 310, 3.0, 4.0, 120.0, 8.5),
    ]


def test_a_time_without_the_node_is_a_gap() -> None:
    history = NodeHistory()
    worked(history, NOON, 600)
    worked(history, NOON + 3600, 600)
    times = [row[0] for row in points(history, NOON + 4200)]
    assert times == [NOON + 300, NOON + 600, NOON + 3900, NOON + 4200]
    # After two days away the old ones are gone.
    worked(history, NOON + 2 * DAY, 600)
    assert [row[0] for row in points(history, NOON + 2 * DAY + 600)] == [
        NOON + 2 * DAY + 300,
        NOON + 2 * DAY + 600,
    ]


def test_what_an_earlier_process_has_seen_fills_the_gaps() -> None:
    before, after = NodeHistory(), NodeHistory()
    worked(before, NOON, 1800, busy=2)
    [(name, kept)] = before.export()
    # The running step is not over; the one after it begins in the new process.
    worked(after, NOON + 1800, 900, busy=1)
    assert after.restore(name, kept, NOON + 2700)
    busy = {row[0]: row[1] for row in points(after, NOON + 2700)}
    assert busy == {
        **{NOON + 300 * step: 2.0 for step in range(1, 6)},
        **{NOON + 300 * step: 1.0 for step in (7, 8, 9)},
    }


def test_a_day_that_is_over_or_of_the_future_or_damaged_is_not_taken() -> None:
    history, after = NodeHistory(), NodeHistory()
    worked(history, NOON, 900)
    [(_, kept)] = history.export()
    for at in (NOON + 2 * DAY, NOON - DAY):
        after.restore("a", kept, at)
        assert points(after, at) == []
    assert not after.restore("b", kept[:-1], NOON)


def test_the_node_that_is_gone_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MOST_NODES", 2)
    history = NodeHistory()
    for name, at in (("a", NOON), ("b", NOON + 3600), ("c", NOON + 3600), ("d", NOON + 3600)):
        history.read(name, at, 1, 1, SPEED)
    known = [name for name in "abcd" if history.as_json(name, NOON + 3600, SPEED)["points"]]
    assert known == ["b", "c"]
