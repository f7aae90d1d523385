from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from gateway.store.database import locate_store
from gateway.store.failures import StoreUnavailable
from gateway.store.store import LONGEST_PAUSE, Store, StoreWorker
from tests.store.stores import LIMIT, add, count, names, opened, wait_until
from tests.virtual import in_virtual_time, now


class Blocker:
    """A job that has begun at some time, and ends when it is let go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, _: Connection) -> None:
        self.begun.set()
        self.go_on.wait(LIMIT)


@contextlib.asynccontextmanager
async def blocked(store: Store) -> AsyncIterator[None]:
    """A job of the store goes on inside this context."""
    block = Blocker()
    job = asyncio.create_task(store.run(block))
    await asyncio.to_thread(block.begun.wait, LIMIT)
    try:
        yield
    finally:
        block.go_on.set()
        await job


def add_and_fail(connection: Connection) -> None:
    add("half")(connection)
    raise LookupError("the job's own")


async def test_a_job_is_done_wholly_or_not_at_all_and_its_error_is_its_own(store_url: str) -> None:
    with opened(store_url) as store:
        with pytest.raises(LookupError, match="the job's own"):
            await store.run(add_and_fail)
        await store.run(add("whole"))
        with pytest.raises(IntegrityError):
            await store.run(add("whole"))
        assert await store.run(names) == ["whole"]
        assert store.status().up
        assert "secret-of-tests" not in str(store.status())


async def test_a_store_notices_what_others_commit_and_not_its_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.db'}"
    with opened(url, look_seconds=0.01) as store, opened(url) as other:
        before = await changes_after_a_look(store)
        await store.run(add("own"))
        assert await changes_after_a_look(store) == before
        await other.run(add("another's"))
        wait_until(lambda: store.changes == before + 1, store)


async def changes_after_a_look(store: Store) -> int:
    """The number of changes when the store has looked once more."""
    await store.run(lambda _: time.sleep(0.02))  # longer than the time between two looks
    return await store.run(lambda _: store.changes)


async def test_a_job_that_only_reads_sees_one_state_of_the_store(store_url: str) -> None:
    with opened(store_url) as store, opened(store_url) as other:
        await store.run(add("before"))

        def read_twice(connection: Connection) -> tuple[list[str], list[str]]:
            first = names(connection)
            other.run_now(add("meanwhile"))
            return first, names(connection)

        assert await store.run(read_twice, write=False) == (["before"], ["before"])
        assert await store.run(names, write=False) == ["before", "meanwhile"]


async def test_a_cancellation_that_comes_with_the_result_is_obeyed(store_url: str) -> None:
    job = Blocker()
    with opened(store_url) as store:
        waiting = asyncio.create_task(store.run(job, write=False))
        await asyncio.to_thread(job.begun.wait, LIMIT)
        job.go_on.set()
        # The loop stands still until the job is done, and then takes its result in one step.
        store.run_now(names, write=False)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_the_queue_is_bounded_and_says_so(store_url: str) -> None:
    with opened(store_url, most_jobs=3) as store:
        async with blocked(store):
            waiting = [asyncio.create_task(store.run(add(str(number)))) for number in range(3)]
            await asyncio.sleep(0)
            assert store.status().waiting == 3
            with pytest.raises(StoreUnavailable, match="3 jobs wait"):
                await store.run(add("too much"))
        await asyncio.gather(*waiting)
        assert await store.run(names) == ["0", "1", "2"]


async def test_a_job_whose_caller_has_given_up_before_it_began_is_never_done(
    store_url: str,
) -> None:
    with opened(store_url) as store:
        async with blocked(store):
            with pytest.raises(StoreUnavailable, match="does not answer"):
                await store.run(add("late"), seconds=0.05)
            cancelled = asyncio.create_task(store.run(add("cancelled")))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
        assert await store.run(names) == []


async def test_a_statement_that_takes_too_long_is_cut_and_the_store_is_opened_again(
    store_url: str,
) -> None:
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000000)"
        " SELECT count(*) FROM n"
    )
    # It is away for a tenth of a second, which nobody need see who looks now and then.
    states: list[str] = []
    with opened(store_url, on_change=lambda status: states.append(status.state)) as store:
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await store.run(lambda c: c.execute(text(endless)).scalar(), seconds=0.3)
        await asyncio.to_thread(wait_until, lambda: len(states) >= 3, store)
        assert states == ["up", "unavailable", "up"]
        await store.run(add("after"))
        assert await store.run(names) == ["after"]


async def test_closing_does_what_waits(store_url: str) -> None:
    with opened(store_url) as store:
        jobs = [asyncio.create_task(store.run(add(str(number)))) for number in range(50)]
        await asyncio.sleep(0)
        assert await store.aclose(LIMIT)
        await asyncio.gather(*jobs)
        assert store.status().state == "closed"
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.run(names)
    with opened(store_url) as store:
        assert store.run_now(count) == 50


def test_closing_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    block = Blocker()
    store = Store(locate_store(None, tmp_path))
    store.start()
    thread = threading.Thread(target=store.run_now, args=(block,))
    thread.start()
    try:
        assert block.begun.wait(LIMIT)
        began = time.monotonic()
        assert not store.close(0.2)
        assert time.monotonic() - began < LIMIT / 2
    finally:
        block.go_on.set()
        thread.join(LIMIT)
    assert store.close(LIMIT)


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
async def test_a_store_that_takes_too_long_before_the_first_pass_is_away() -> None:
    passes = Passes(1.0)
    passes.start, passes.lasts = now(), 3.0
    await passes.worker.attempt_within(2.0, passes)
    assert now() - passes.start == 2.0
    passes.lasts, passes.is_away = 0.0, True
    await passes.worker.attempt_within(2.0, passes)
    assert passes.told == ["the store has not answered yet"]
    assert (passes.worker.problem, passes.worker.failures) == ("gone; wait", 2)
