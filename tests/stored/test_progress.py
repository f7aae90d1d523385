"""How far a batch is, when it ends and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.stored.batch_rows import WINDOW_SECONDS, Batch, BatchSpeed, SpeedMeter, progress_of
from gateway.stored.claims import BatchState, WorkLeft

BATCH = Batch(
    id="batch_1", owner="alice", api="openai", endpoint="/v1/embeddings", input_file="file-1",
    created_at=0.0, expires_at=9.0, keep_until=99.0, folder="f",
    state=BatchState.IN_PROGRESS, in_progress_at=1.0, total=10,
)  # fmt: skip


def test_the_cost_is_known_before_the_first_line() -> None:
    left = WorkLeft(10, 0, 1000, 5000)
    found = progress_of(BATCH, left, None, 0.001, 100.0)
    assert found.expected_cost == pytest.approx(6.0)
    assert (found.waiting, found.running, found.cost) == (10, 0, 0.0)
    assert (found.expected_end, found.tokens_per_second) == (None, None)
    assert progress_of(BATCH, left, None, None, 100.0).expected_cost is None
    validating = replace(BATCH, state=BatchState.VALIDATING, in_progress_at=None)
    assert progress_of(validating, left, None, 0.001, 100.0).expected_cost is None


def test_recorded_results_tell_the_price_and_the_length_of_answers() -> None:
    batch = replace(
        BATCH, completed=5, prompt_tokens=500, completion_tokens=500, cost=1.0, failed=1
    )
    left = WorkLeft(3, 1, 400, 0)
    found = progress_of(batch, left, BatchSpeed(50.0, 0.5), None, 100.0)
    assert found.expected_cost == pytest.approx(1.0 + 0.001 * 800)
    assert found.expected_end == pytest.approx(100.0 + 400 / 50)
    shorter = progress_of(batch, WorkLeft(3, 1, 400, 40), BatchSpeed(50.0, 0.5), None, 100.0)
    assert shorter.expected_end == pytest.approx(100.0 + 40 / 50)


def test_embeddings_end_by_lines() -> None:
    batch = replace(BATCH, completed=5, prompt_tokens=500)
    found = progress_of(batch, WorkLeft(5, 0, 500, 0), BatchSpeed(0.0, 0.5), None, 100.0)
    assert found.expected_end == pytest.approx(110.0)


def test_an_ended_batch_has_its_cost() -> None:
    batch = replace(BATCH, state=BatchState.COMPLETED, cost=2.0)
    found = progress_of(batch, WorkLeft(0, 0, 0, 0), BatchSpeed(1.0, 1.0), 0.1, 100.0)
    assert (found.cost, found.expected_cost, found.tokens_per_second) == (2.0, 2.0, None)


def test_speed_is_that_of_the_last_minutes() -> None:
    meter = SpeedMeter()
    assert meter.speed(BATCH.id) is None
    for second in range(0, 1000, 10):
        tokens = 0 if second < 500 else 20 * (second - 500)
        meter.look([replace(BATCH, completion_tokens=tokens, completed=second)], float(second))
    speed = meter.speed(BATCH.id)
    assert speed is not None
    assert speed.tokens == pytest.approx(20.0)
    assert speed.lines == pytest.approx(1.0)
    paused = replace(BATCH, paused_at=1.0)
    meter.look([paused], 1001.0)
    assert meter.speed(BATCH.id) is None
    meter.look([], 1002.0)
    assert meter.speed(BATCH.id) is None
    assert WINDOW_SECONDS < 500
