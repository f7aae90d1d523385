from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gateway.store.failures import StoreUnavailable
from gateway.store.store import LONGEST_PAUSE, StoreWorker
from tests.virtual import in_virtual_time, now


class Passes:
    """Passes of a worker, and when each began."""

    def __init__(self, period: float, first: float | None = None) -> None:
        self.began: list[float] = []
        self.lasts = 0.0
        self.is_away = False
        self.told: list[str] = []
        self.worker = StoreWorker(self, period, first=first, on_away=self.told.append, clock=now)

    async def __call__(self) -> None:
        self.began.append(round(now() - self.start, 3))
        await asyncio.sleep(self.lasts)
        if self.is_away:
            raise StoreUnavailable("gone", "wait")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.start = now()
        task = asyncio.create_task(self.worker.run())
        yield
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


@in_virtual_time
async def test_passes_begin_by_the_clock_however_long_they_take() -> None:
    passes = Passes(1.0, first=0.5)
    passes.lasts = 0.4
    async with passes.running():
        await asyncio.sleep(3.0)
        passes.lasts = 1.75
        await asyncio.sleep(3.0)
    assert passes.began == [0.5, 1.5, 2.5, 3.5, 5.25]


@in_virtual_time
async def test_a_store_that_is_away_is_told_of_once_and_tried_at_growing_distances() -> None:
    passes = Passes(1.0)
    async with passes.running():
        passes.is_away = True
        await asyncio.sleep(20.5)
        assert passes.began == [1.0, 2.0, 4.0, 8.0, 8.0 + LONGEST_PAUSE, 8.0 + 2 * LONGEST_PAUSE]
        assert (passes.worker.problem, passes.worker.failures) == ("gone; wait", 6)
        passes.worker.wake()
        passes.is_away = False
        await asyncio.sleep(5.0)
        assert passes.began[6:] == [23.0, 24.0, 25.0]
        assert passes.worker.problem is None
        passes.is_away = True
        await asyncio.sleep(1.0)
    assert passes.told == ["gone; wait"] * 2


@in_virtual_time
async def test_work_of_long_periods_keeps_them_while_the_store_is_away() -> None:
    passes = Passes(60.0)
    passes.is_away = True
    async with passes.running():
        await asyncio.sleep(200.0)
    assert passes.began == [60.0, 120.0, 180.0]


@in_virtual_time
async def test_a_worker_that_is_woken_begins_its_pass_at_once() -> None:
    passes = Passes(10.0)
    async with passes.running():
        await asyncio.sleep(3.0)
        passes.worker.wake()
        await asyncio.sleep(11.0)
    assert passes.began == [3.0, 13.0]


@in_virtual_time
async def test_a_store_that_takes_too_long_before_the_first_pass_is_away() -> None:
    passes = Passes(1.0)
    passes.start, passes.lasts = now(), 3.0
    await passes.worker.attempt_within(2.0, passes)
    assert now() - passes.start == 2.0
    passes.lasts, passes.is_away = 0.0, True
    await passes.worker.attempt_within(2.0, passes)
    assert passes.told == ["the store has not answered yet"]
    assert (passes.worker.problem, passes.worker.failures) == ("gone; wait", 2)
