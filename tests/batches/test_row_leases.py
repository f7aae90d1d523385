"""A process claims rows with their bodies, renews them, and puts back what it does not run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.claims import CALM_SECONDS, ClockJumps, Pick, RowLeases
from gateway.batches.folder import DiskThreads, Folder, FolderError
from gateway.batches.request_rows import RequestKind, RequestState, find_row
from gateway.store.failures import StoreError, StoreUnavailable
from gateway.store.store import Store
from gateway.usage.processes import ProcessIdentity, register
from tests.batches.stored_rows import NOW, a_batch, a_line, begin, do
from tests.store.stores import opened

ANY = [Pick(10, RequestKind.LINE)]
BODIES = [b"one", b"two and more", b"three"]


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as made:
        yield made


def leases_of(store: Store, path: Path) -> RowLeases:
    """Leases of this process in a new folder; a batch of three lines waits there."""
    folder = Folder(path / "batches", most_bytes=lambda: 1 << 30)
    opened_as = folder.open()
    new = folder.open_new("file")
    new.write(b"".join(BODIES))
    place, offset, lines = new.finish(), 0, []
    batch = replace(a_batch(), folder=opened_as)
    for number, body in enumerate(BODIES, 1):
        line = a_line(number, batch, place=place, offset=offset, length=len(body))
        lines.append(line)
        offset += len(body)
    begin(store, batch, lines)
    own = ProcessIdentity.of_this_process(time.time())
    do(store, register, own, NOW)
    return RowLeases(store, folder, DiskThreads(), own, lambda: NOW)


def states(store: Store) -> list[RequestState]:
    rows = [do(store, find_row, "alice", a_line(n).id, RequestKind.LINE) for n in (1, 2, 3)]
    return [row.state for row in rows if row is not None]


async def test_rows_come_with_their_bodies(store: Store, tmp_path: Path) -> None:
    leases = leases_of(store, tmp_path)
    claimed = await leases.claim(ANY, 1000)
    assert [body for _, body in claimed] == BODIES
    ids = {row.id for row, _ in claimed}
    assert await leases.renew([*ids, "other"]) == ids
    assert await leases.claim(ANY, 1000) == []


async def test_no_more_bodies_are_read_than_there_is_room_for(store: Store, tmp_path: Path) -> None:
    leases = leases_of(store, tmp_path)
    assert [body for _, body in await leases.claim(ANY, 15)] == BODIES[:2]
    assert leases.has_put_back
    assert await leases.write()
    assert states(store) == [RequestState.RUNNING, RequestState.RUNNING, RequestState.WAITING]
    assert [body for _, body in await leases.claim(ANY, 1)] == BODIES[2:]
    assert not leases.has_put_back


async def test_a_row_whose_file_is_gone_has_no_body(store: Store, tmp_path: Path) -> None:
    leases = leases_of(store, tmp_path)
    for file in leases.folder.files("file"):
        leases.folder.delete(file.name)
    assert [body for _, body in await leases.claim(ANY, 1000)] == [None] * 3


async def test_rows_are_put_back_when_the_store_takes_them_again(
    store: Store, tmp_path: Path
) -> None:
    leases = leases_of(store, tmp_path)
    ids = [row.id for row, _ in await leases.claim(ANY, 1000)]
    leases.put_back(ids[:1], NOW + 5, failed=True)
    leases.put_back(ids[1:], NOW)
    leases.store = Store(store.location)
    assert leases.store.close(1.0)
    with pytest.raises(StoreError):
        await leases.write()
    leases.store = store
    assert await leases.renew(ids) == set(ids)
    assert await leases.write()
    assert not await leases.write()
    assert states(store) == [RequestState.WAITING] * 3
    row = do(store, find_row, "alice", ids[0], RequestKind.LINE)
    assert row is not None
    assert (row.attempts, row.not_before) == (1, NOW + 5)


async def test_rows_of_lost_processes_wait_again(store: Store, tmp_path: Path) -> None:
    leases = leases_of(store, tmp_path)
    other = replace(leases.process, id="gone.1")
    lost = RowLeases(store, leases.folder, leases.threads, other, lambda: NOW)
    assert len(await lost.claim(ANY, 1000)) == 3
    assert await leases.release_lost() == 3
    assert len(await leases.claim(ANY, 1000)) == 3
    assert await lost.renew([a_line(1).id]) == set()


async def test_rows_of_a_claim_that_nobody_was_told_of_wait_again_at_once(
    store: Store, tmp_path: Path
) -> None:
    leases = leases_of(store, tmp_path)

    class Deaf(Store):
        """Its answers to claims are lost."""

        async def run(self, job: Any, **options: Any) -> Any:
            await store.run(job, **options)
            raise StoreUnavailable("the store does not answer", "wait")

    leases.store = Deaf(store.location)
    with pytest.raises(StoreError):
        await leases.claim(ANY, 1000)
    assert states(store) == [RequestState.RUNNING] * 3
    leases.store = store
    assert await leases.write()
    assert states(store) == [RequestState.WAITING] * 3
    assert not await leases.write()
    assert len(await leases.claim(ANY, 1000)) == 3


async def test_a_clock_that_is_set_forward_ends_no_lease(store: Store, tmp_path: Path) -> None:
    leases = leases_of(store, tmp_path)
    other = replace(leases.process, id="other.1", host="elsewhere")
    do(store, register, other, NOW)
    neighbour = RowLeases(store, leases.folder, leases.threads, other, lambda: NOW)
    assert len(await neighbour.claim(ANY, 1000)) == 3
    assert await leases.release_lost() == 0
    leases.now = lambda: NOW + 3600
    assert await leases.release_lost() == 0
    assert states(store) == [RequestState.RUNNING] * 3


def test_a_jump_of_the_clock_matters_until_all_have_renewed_their_leases() -> None:
    clock = 0.0
    jumps = ClockJumps(lambda: clock)
    assert not jumps.jumped(NOW)
    clock = 5.0
    assert not jumps.jumped(NOW + 5)
    clock = 10.0
    assert jumps.jumped(NOW + 3610)
    clock = 10.0 + CALM_SECONDS
    assert not jumps.jumped(NOW + 3610 + CALM_SECONDS)
    clock += 5.0
    assert not jumps.jumped(NOW)  # Set back: leases hold for longer than they should.


async def test_lines_whose_folder_is_not_mounted_are_not_missing(
    store: Store, tmp_path: Path
) -> None:
    leases = leases_of(store, tmp_path)
    location = leases.folder.location
    location.rename(tmp_path / "elsewhere")
    location.mkdir(mode=0o700)
    with pytest.raises(FolderError):
        await leases.claim(ANY, 1000)
    assert await leases.write()
    assert states(store) == [RequestState.WAITING] * 3
