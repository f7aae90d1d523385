""""""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlalchemy import Connection, update

from gateway.config.stored import BatchSettings
from gateway.store.schema import batches, stored_requests
from gateway.store.store import Store
from gateway.stored.background_requests import add_background
from gateway.stored.batch_rows import add_batch
from gateway.stored.claims import (
    BUSY_SECONDS,
    UNTOLD_SECONDS,
    RequestKind,
    UnfinishedWork,
    WaitingLines,
    add_rows,
    waiting_by_kind,
    waiting_lines,
)
from gateway.stored.folder import ID_FILE, DiskThreads, Folder, Storage, job
from tests.polling import eventually
from tests.store.stores import CountingStore, opened, wait_until
from tests.stored.stored_rows import (
    DAY,
    FOLDER,
    NOW,
    PATH,
    a_batch,
    a_line,
    alone,
    begin,
    claim,
    do,
    limits,
)


def token(count: int) -> str:
    return "ab" * count


def groups(store: Store, now: float = NOW) -> list[WaitingLines]:
    return store.run_now(lambda c: list(waiting_lines(c, FOLDER, now)), write=False)


def kinds(store: Store) -> dict[str, int]:
    return do(store, waiting_by_kind, FOLDER, NOW)


def test_groups_are_sums_of_what_may_run_now(store: Store) -> None:
    first, second = a_batch(1), a_batch(2, owner="bob", class_="normal", expires_at=NOW + 60)
    begin(store, first, [a_line(n, first, max_tokens=10 * n) for n in range(1, 5)])
    several = [a_line(n, second, model=f"m{n % 2}" if n > 1 else None) for n in range(1, 6)]
    begin(store, second, several, model=None)
    store.run_now(lambda c: add_rows(c, [alone(1), alone(2, deadline=NOW + 5, max_tokens=7)]))
    found = sorted(groups(store), key=lambda one: (one.owner, one.model or ""))
    assert found == [
        WaitingLines(first.id, "alice", PATH, "demo", "batch", 4, NOW + DAY),
        WaitingLines(second.id, "bob", PATH, None, "normal", 1, NOW + 60),
        WaitingLines(second.id, "bob", PATH, "m0", "normal", 2, NOW + 60),
        WaitingLines(second.id, "bob", PATH, "m1", "normal", 2, NOW + 60),
    ]
    assert kinds(store) == {"response": 2}


def test_sqlite_reads_waiting_lines_by_their_index(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path / 'gateway.db'}") as store:

        def plan(connection: Connection, sql: str) -> str:
            return " ".join(r[3] for r in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}"))

        for state, index in (("waiting", "waiting_lines"), ("running", "running_lines")):
            sql = f"SELECT id FROM stored_requests WHERE batch = 'b' AND state = '{state}' LIMIT 9"
            assert index in do(store, plan, sql)
        order = "ORDER BY prefix, max_tokens DESC, number LIMIT 9"
        sql = f"SELECT id FROM stored_requests WHERE batch = 'b' AND state = 'waiting' {order}"
        found = do(store, plan, sql)
        assert "waiting_lines" in found
        assert "TEMP B-TREE" not in found


@dataclass(slots=True)
class Place:
    """A folder whose work is looked for, by a clock that stands still."""

    store: CountingStore
    folder: Folder
    seconds: list[float] = field(default_factory=lambda: [time.monotonic()])

    def work(self) -> UnfinishedWork:
        storage = Storage(
            self.store, self.folder, DiskThreads(), BatchSettings, clock=lambda: self.seconds[0]
        )
        return UnfinishedWork(storage)


def a_folder(path: Path, id_: str) -> Folder:
    path.mkdir(0o700)
    (path / ID_FILE).write_text(id_)
    folder = Folder(path, most_bytes=lambda: 1 << 30)
    assert folder.open() == id_
    return folder


@pytest.fixture
def place(store_url: str, tmp_path: Path) -> Iterator[Place]:
    with opened(store_url) as plain:
        made = CountingStore(plain.location, look_seconds=0.01)
        made.start()
        try:
            # It is open, and has looked at its version for the first time.
            wait_until(lambda: made.status().up and made.changes >= 2, made)
            yield Place(made, a_folder(tmp_path / "batches", FOLDER))
        finally:
            made.close(30.0)


def add_request(store: Store, number: int = 1) -> None:
    store.run_now(job(add_background, alone(number), limits()))


async def test_the_store_is_not_asked_again_until_this_process_has_added_something(
    place: Place,
) -> None:
    work = place.work()
    assert not await work.exists()
    asked = place.store.jobs
    for _ in range(100):
        assert not await work.exists()
    # PostgreSQL does not tell what it has, but then the clock decides.
    assert place.store.jobs == asked
    add_request(place.store)
    work.added()
    assert await work.exists()
    assert await work.exists()
    assert place.store.jobs == asked + 1
    do(place.store, set_state, "done")
    assert await work.exists()
    place.seconds[0] += BUSY_SECONDS
    assert not await work.exists()


async def test_what_another_process_adds_is_seen(place: Place, store_url: str) -> None:
    work = place.work()
    assert not await work.exists()
    with opened(store_url) as other:
        add_request(other)
    if place.store.location.path is None:
        assert not await work.exists()
        place.seconds[0] += UNTOLD_SECONDS

    async def seen() -> bool | None:
        return await work.exists() or None

    assert await eventually(seen)


async def test_what_waits_runs_or_has_not_ended_is_work(place: Place) -> None:
    store, work = place.store, place.work()

    async def exists() -> bool:
        work.added()
        return await work.exists()

    store.run_now(job(add_batch, a_batch(), limits()))
    assert await exists()
    do(store, end_batches)
    assert not await exists()
    # Left over by a process that was killed, or by one that still runs it.
    assert do(store, add_rows, [a_line(1)])
    do(store, set_state, "running")
    assert await exists()
    do(store, set_state, "done")
    assert not await exists()
    add_request(store)
    assert await exists()
    assert len(claim(store, kind=RequestKind.RESPONSE)) == 1
    assert await exists()


def end_batches(connection: Connection) -> None:
    connection.execute(update(batches).values(ended_at=NOW))


def set_state(connection: Connection, state: str) -> None:
    connection.execute(update(stored_requests).values(state=state))
