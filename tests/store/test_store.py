from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from gateway.store.database import locate_store
from gateway.store.failures import StoreUnavailable
from gateway.store.store import Store
from tests.postgres import PostgresServer
from tests.store.stores import LIMIT, add, count, names, opened, wait_until


class Blocker:
    """A job that has begun at some time, and ends when it is let go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, _: Connection) -> None:
        self.begun.set()
        self.go_on.wait(LIMIT)


def add_and_fail(connection: Connection) -> None:
    add("half")(connection)
    raise LookupError("the job's own")


async def test_a_job_runs_off_the_event_loop_and_its_result_comes_back(store_url: str) -> None:
    with opened(store_url) as store:
        thread = await store.run(lambda _: threading.current_thread().name)
        assert thread == "store"
        assert await store.run(names, write=False) == []


async def test_a_job_is_done_wholly_or_not_at_all(store_url: str) -> None:
    with opened(store_url) as store:
        with pytest.raises(LookupError, match="the job's own"):
            await store.run(add_and_fail)
        await store.run(add("whole"))
        assert await store.run(names) == ["whole"]
        assert store.status().up


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


async def test_a_store_that_does_not_tell_may_always_have_changed(postgres: PostgresServer) -> None:
    with opened(postgres.new_database(), look_seconds=0.01) as store:
        before = store.changes
        wait_until(lambda: store.changes > before + 2, store)


async def test_a_jobs_own_error_leaves_the_store_open(store_url: str) -> None:
    with opened(store_url) as store:
        await store.run(add("twice"))
        with pytest.raises(IntegrityError):
            await store.run(add("twice"))
        status = store.status()
    assert (status.state, status.error) == ("up", None)


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
    block = Blocker()
    with opened(store_url, most_jobs=3) as store:
        try:
            blocked = asyncio.create_task(store.run(block))
            await asyncio.to_thread(block.begun.wait, LIMIT)
            waiting = [asyncio.create_task(store.run(add(str(number)))) for number in range(3)]
            await asyncio.sleep(0)
            assert store.status().waiting == 3
            with pytest.raises(StoreUnavailable, match="3 jobs wait"):
                await store.run(add("too much"))
        finally:
            block.go_on.set()
        await asyncio.gather(blocked, *waiting)
        assert await store.run(names) == ["0", "1", "2"]


async def test_a_job_whose_caller_has_given_up_before_it_began_is_never_done(
    store_url: str,
) -> None:
    block = Blocker()
    with opened(store_url) as store:
        try:
            blocked = asyncio.create_task(store.run(block))
            await asyncio.to_thread(block.begun.wait, LIMIT)
            with pytest.raises(StoreUnavailable, match="does not answer"):
                await store.run(add("late"), seconds=0.05)
            cancelled = asyncio.create_task(store.run(add("cancelled")))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
        finally:
            block.go_on.set()
        await blocked
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


async def test_a_job_may_take_longer_if_its_caller_says_so(store_url: str) -> None:
    with opened(store_url) as store:
        timeout = await store.run(statement_timeout, seconds=60.0)
        assert timeout in {None, "1min"}
        assert await store.run(statement_timeout) in {None, "10s"}


def statement_timeout(connection: Connection) -> str | None:
    if connection.dialect.name == "sqlite":
        return None
    return str(connection.execute(text("SHOW statement_timeout")).scalar())


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


def test_the_status_tells_since_when_and_nothing_secret(store_url: str) -> None:
    began = time.time()
    with opened(store_url) as store:
        status = store.status()
    assert began <= status.since <= time.time()
    assert "secret-of-tests" not in str(status)
    assert (status.state, status.error, status.remedy, status.waiting) == ("up", None, None, 0)
