from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.tools.tune.machine_benchmark import BenchmarkResult
from gateway.tools.tune.report import (
    build_report,
)
from gateway.tools.tune.setting import Setting
from tests.tools.tune.fake_machine import EACH, Bench, reported


async def test_a_search_ends_with_the_best_and_says_by_how_much(bench: Bench) -> None:
    session = bench.session()
    await bench.run(session)
    found = reported(session)
    assert session.end_reason == "complete"
    assert found.best.setting == Setting(4, 128, 128, 4, "free")
    assert found.best.gain > 0.1
    assert found.best.significant
    assert "less than that of the rule of thumb" in found.verdict()[0]
    assert "smaller differences than" in found.verdict()[1]
    assert found.results[0].score == min(row.score for row in found.results)


async def test_no_measurement_begins_that_would_end_too_late(bench: Bench) -> None:
    session = bench.session()
    steps = await bench.run(session, minutes=5)
    assert session.end_reason == "time"
    assert bench.time <= 5 * 60
    assert [step.number for step in steps] == list(range(1, 10))
    assert steps[0].seconds_each is None
    assert steps[1].seconds_each == EACH
    found = reported(session)
    assert "the time was over" in " ".join(found.verdict())
    assert found.as_dict()["not_searched"]


async def test_the_time_may_end_within_the_first(bench: Bench) -> None:
    async def slow(setting: Setting, seconds: float) -> BenchmarkResult:
        raise TimeoutError

    session = bench.session()
    await session.run(slow, seconds=60, record=bench.records.append)
    assert session.end_reason == "time"
    assert build_report(session) is None


async def test_a_later_run_goes_on_where_the_first_one_stopped(
    bench: Bench, tmp_path: Path
) -> None:
    whole = Bench(tmp_path / "whole")
    at_once = whole.session()
    await whole.run(at_once)
    await bench.run(bench.session(), minutes=4)
    second = bench.session()
    await bench.run(second)
    assert bench.measured == whole.measured
    assert len(second.measurements) == len(at_once.measurements)
    assert reported(second).best == reported(at_once).best
    third = bench.session()
    assert await bench.run(third) == []
    assert third.end_reason == "complete"


async def test_another_goal_uses_the_same_measurements(bench: Bench) -> None:
    await bench.run(bench.session())
    before = len(bench.measured)
    session = bench.session()
    session.goal = "throughput"
    await bench.run(session)
    assert len(session.measurements) > session.new_measurements
    assert session.new_measurements == len(bench.measured) - before


async def test_cancelling_keeps_the_measurements(bench: Bench) -> None:
    session = bench.session()

    async def until_cancelled(setting: Setting, seconds: float) -> BenchmarkResult:
        if len(bench.measured) == 5:
            raise asyncio.CancelledError
        return await bench.measure(setting, seconds)

    with pytest.raises(asyncio.CancelledError):
        await session.run(until_cancelled, seconds=600, record=bench.records.append)
    assert session.end_reason == "interrupted"
    assert len(bench.records.read()[0]) == 5
    assert reported(session).best.repeats >= 3


async def test_a_setting_that_fails_is_reported_and_tried_again_by_a_later_run(
    bench: Bench,
) -> None:
    bench.fails = lambda setting: setting.slots > 2
    session = bench.session()
    await bench.run(session)
    failed = reported(session).as_dict()["failed"]
    assert {one["error"] for one in failed} == {"not enough memory"}
    assert {one["setting"]["slots"] for one in failed} == {3}
    assert reported(session).best.setting.slots <= 2
    bench.fails = lambda _: False
    again = bench.session()
    await bench.run(again)
    assert reported(again).best.setting.slots == 4
