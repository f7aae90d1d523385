"""Nobody asks the store for work while there is none, and new work is seen all the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, update

from gateway.batches.background_requests import AddBackground
from gateway.batches.batch_rows import AddBatch
from gateway.batches.folder import ID_FILE, DiskThreads, Folder
from gateway.batches.request_rows import (
    BUSY_SECONDS,
    LONGEST_UNREAD,
    UNTOLD_SECONDS,
    RequestKind,
    UnfinishedWork,
    add_rows,
)
from gateway.store.schema import batches, stored_requests
from gateway.store.store import Store
from tests.batches.stored_rows import FOLDER, NOW, a_batch, a_line, alone, begin, claim, do
from tests.polling import eventually
from tests.store.stores import opened, wait_until


class CountingStore(Store):
    """Counts the jobs that it is asked for."""

    jobs = 0

    async def run(self, *values: Any, **named: Any) -> Any:
        self.jobs += 1
        return await super().run(*values, **named)


@dataclass(slots=True)
class Place:
    """A folder whose work is looked for, by a clock that stands still."""

    store: CountingStore
    folder: Folder
    seconds: list[float] = field(default_factory=lambda: [time.monotonic()])

    def work(self) -> UnfinishedWork:
        return UnfinishedWork(self.store, self.folder, DiskThreads(), lambda: self.seconds[0])


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


def add_background(store: Store, number: int = 1) -> None:
    assert store.run_now(AddBackground(alone(number), 100, 1 << 20, 1 << 30)) is None


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
    add_background(place.store)
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
        add_background(other)
    if place.store.location.path is None:
        assert not await work.exists()
        place.seconds[0] += UNTOLD_SECONDS

    async def seen() -> bool | None:
        return await work.exists() or None

    assert await eventually(seen)


async def test_the_store_is_read_now_and_then_though_nothing_is_new(place: Place) -> None:
    work = place.work()
    assert not await work.exists()
    add_background(place.store)
    assert not await work.exists()
    place.seconds[0] += LONGEST_UNREAD
    assert await work.exists()


async def test_what_waits_runs_or_has_not_ended_is_work(place: Place) -> None:
    store, work = place.store, place.work()

    async def exists() -> bool:
        work.added()
        return await work.exists()

    assert store.run_now(AddBatch(a_batch(), 10, 1 << 30)).outcome == "added"
    assert await exists()
    do(store, end_batches)
    assert not await exists()
    # Left over by a process that was killed, or by one that still runs it.
    assert do(store, add_rows, [a_line(1)])
    do(store, set_state, "running")
    assert await exists()
    do(store, set_state, "done")
    assert not await exists()
    add_background(store)
    assert await exists()
    assert len(claim(store, kind=RequestKind.RESPONSE)) == 1
    assert await exists()


async def test_work_of_another_folder_is_none(place: Place, tmp_path: Path) -> None:
    place.folder = a_folder(tmp_path / "another", "e" * 32)
    begin(place.store, a_batch(), [a_line(1)])
    add_background(place.store)
    assert not await place.work().exists()


def end_batches(connection: Connection) -> None:
    connection.execute(update(batches).values(ended_at=NOW))


def set_state(connection: Connection, state: str) -> None:
    connection.execute(update(stored_requests).values(state=state))
