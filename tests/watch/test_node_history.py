"""A day of each node, in steps of five minutes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from gateway.nodes.speed import Speed
from gateway.watch import history as history_module
from gateway.watch.history import DAY_STEP_SECONDS, DAY_STEPS, NodeHistory

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
