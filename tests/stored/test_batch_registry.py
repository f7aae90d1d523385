"""Batches from the intake of their lines to their removal, over real stores and a real folder."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from structlog.testing import capture_logs

from gateway.errors import GatewayError
from gateway.store.failures import StoreLocked, StoreUnavailable
from gateway.store.schema import batches, files, stored_requests
from gateway.stored.batch_registry import CLEAN_SECONDS, UNAVAILABLE_SECONDS
from gateway.stored.batch_rows import Batch
from gateway.stored.claims import BatchState, RequestState
from gateway.stored.folder import FolderFull
from tests.stored.batch_place import (
    DAY,
    HOUR,
    BatchPlace,
    answer,
    batch_place,
    count,
    killed,
    line,
)


async def test_a_deleted_batch_leaves_nothing(here: BatchPlace) -> None:
    batch = await here.create([line("a"), "x"])
    await here.settle()
    with pytest.raises(GatewayError) as refused:
        await here.batches.delete("alice", batch.id, "openai")
    assert (refused.value.status, refused.value.code) == (400, "batch_in_progress")
    await here.answer()
    await here.settle()
    await here.batches.delete("alice", batch.id, "openai")
    assert await here.store.run(count(batches)) == 0
    assert await here.store.run(count(stored_requests)) == 0
    assert (here.kept("results"), here.kept("file")) == ([], [batch.input_file])
    assert await here.store.run(count(files, files.c.deleted_at.is_(None))) == 1


LINES = 4000
READS = """
import asyncio, sys
from pathlib import Path
from tests.stored.batch_place import batch_place

async def main(url, path):
    async with batch_place(url, Path(path)) as here:
        print("reads", flush=True)
        await here.settle()
        print("done", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def broken(number: int) -> bool:
    return number % 10 == 3


def lines() -> list[object]:
    return ["{" if broken(n) else line(f"c{n}") for n in range(LINES)]


async def check_whole(here: BatchPlace, batch: Batch) -> None:
    """Check that each line has one row, and each broken one its error line."""
    found = await here.find(batch)
    assert (found.state, found.total) == (BatchState.IN_PROGRESS, LINES)
    assert found.failed == LINES // 10
    assert await here.store.run(count(stored_requests)) == LINES
    waiting = stored_requests.c.state == RequestState.WAITING.value
    assert await here.store.run(count(stored_requests, waiting)) == LINES - LINES // 10
    errors = await here.output(batch, errors=True)
    assert [one["error"]["line"] for one in errors] == [n + 1 for n in range(LINES) if broken(n)]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 1500, 3000])
async def test_a_killed_intake_begins_again_and_doubles_nothing(
    store_url: str, tmp_path: Path, rows: int
) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        batch = await here.create(lines())
        await killed(here, READS, [store_url, str(tmp_path / "kept")], stored_requests, rows)
        await here.settle()
        await check_whole(here, batch)


async def test_two_processes_may_read_the_same_input(store_url: str, tmp_path: Path) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        batch = await here.create(lines())
        async with batch_place(store_url, tmp_path / "kept") as other:
            await asyncio.gather(here.settle(), other.settle())
        await check_whole(here, batch)


async def test_an_input_that_is_gone_fails_the_batch(here: BatchPlace) -> None:
    batch = await here.create([line("a")])
    assert batch.input_file is not None
    here.folder.delete(batch.input_file)
    await here.settle()
    ended = await here.find(batch)
    assert ended.state is BatchState.FAILED
    assert ended.errors is not None
    assert ended.errors[0]["code"] == "file_not_found"


async def test_a_store_that_is_away_delays_the_intake(
    place: BatchPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await place.create(lines())
    run, failures = place.store.run, iter([False, False, False, True, False, True])

    async def fails_now_and_then(*arguments: object, **options: object) -> object:
        if next(failures, False):
            raise StoreUnavailable("it is away", "wait")
        return await run(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(place.store, "run", fails_now_and_then)
    monkeypatch.setattr("gateway.stored.batch_registry.RETRY_SECONDS", 0.0)
    for _ in range(4):
        try:
            await place.settle()
        except StoreUnavailable:
            continue
    await check_whole(place, batch)


async def ran(here: BatchPlace, lines: int, **more: Any) -> Batch:
    """A batch whose lines have ended, every third with an error of a node."""
    batch = await here.create([line(f"c{n}") for n in range(lines)], **more)
    await here.settle()
    await here.answer(status=lambda row: 502 if (row.number or 0) % 3 == 0 else 200)
    return await here.find(batch)


async def test_output_files_are_files_of_their_owner(store_url: str, tmp_path: Path) -> None:
    async with batch_place(store_url, tmp_path / "kept", keep=10 * DAY) as here:
        batch = await ran(here, 3, output_seconds=2 * HOUR)
        here.pass_(HOUR)
        await here.settle()
        ended = await here.find(batch)
        assert ended.output_file is not None
        file = await here.files.find("alice", ended.output_file)
        content = here.folder.read(file.id, 0, file.bytes)
        assert (file.purpose, file.name) == ("batch_output", f"{batch.id}_output.jsonl")
        assert file.sha256 == hashlib.sha256(content).hexdigest()
        # Counted from the file's own creation.
        assert (file.created_at, file.expires_at) == (here.time[0], here.time[0] + 2 * HOUR)
        here.pass_(2 * HOUR)
        with pytest.raises(Exception, match="deleted, or have expired"):
            await here.output(batch)


async def test_of_two_processes_that_end_a_batch_one_has_its_files(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        batch = await ran(here, 30)
        async with batch_place(store_url, tmp_path / "kept") as other:
            ends = [one.batches.upkeep.end(batch.id) for one in (here, other)]
            found = await asyncio.gather(*ends)
        assert sum(one is not None for one in found) == 1
        ended = await here.find(batch)
        assert (ended.completed, ended.failed) == (20, 10)
        output, errors = await here.output(batch), await here.output(batch, errors=True)
        assert {one["response"]["status_code"] for one in output} == {200}
        assert {one["response"]["status_code"] for one in errors} == {502}
        ids = [one["custom_id"] for one in output + errors]
        assert sorted(ids) == sorted(f"c{n}" for n in range(30))
        assert here.kept("file") == sorted(
            str(name) for name in (ended.input_file, ended.output_file, ended.error_file)
        )
        assert await here.store.run(count(files)) == 3


async def test_a_store_that_refuses_the_end_leaves_no_file(store_url: str, tmp_path: Path) -> None:
    refuses = [True]

    def on_end(_: Connection, __: Batch) -> None:
        if refuses:
            refuses.pop()
            raise StoreLocked("it is locked", "wait")

    async with batch_place(store_url, tmp_path / "kept", on_end=on_end) as here:
        batch = await ran(here, 3)
        with pytest.raises(StoreLocked):
            await here.batches.upkeep.end(batch.id)
        assert here.kept("file") == [batch.input_file]
        assert (await here.find(batch)).state is BatchState.FINALIZING
        await here.settle()
        assert len(await here.output(batch)) == 2


async def test_what_is_old_is_removed(store_url: str, tmp_path: Path) -> None:
    async with batch_place(store_url, tmp_path / "kept", keep=10 * DAY) as here:
        batch = await here.create([line("a"), "x"])
        await here.settle()
        await here.answer()
        await here.results.close(1.0)
        await here.settle()
        here.pass_(10 * DAY + 1)
        assert await here.batches.upkeep.remove_due() == 0  # kept since its deadline
        here.pass_(DAY)
        assert await here.batches.upkeep.remove_due() == 1
        assert await here.store.run(count(batches)) == 0
        assert await here.store.run(count(stored_requests)) == 0
        assert here.kept("results") == []
        assert await here.files.clean(orphans=False) == 3
        assert here.kept("file") == []
        with pytest.raises(Exception, match="No batch found"):
            await here.find(batch)


def make_old(here: BatchPlace, name: str) -> None:
    old = here.time[0] - CLEAN_SECONDS - 1
    os.utime(here.folder.path(name), (old, old))


async def test_old_files_that_no_unfinished_batch_needs_are_removed(here: BatchPlace) -> None:
    ended, runs = await here.create([line("a")]), await here.create([line("a"), line("b")])
    await here.settle()
    task = asyncio.create_task(here.results.run())
    rows = await here.claim()
    for row in rows:
        if (row.batch, row.custom_id) != (runs.id, "b"):
            await here.results.add(row, answer(row, here.process.id))
    task.cancel()
    await here.settle()
    assert (await here.find(ended)).state is BatchState.COMPLETED
    orphan = await asyncio.to_thread(here.folder.open_appended, "results")
    requests = await here.batches.new_requests()
    await here.batches.storage.on_disk(requests.finish)
    for name in here.kept("results") + here.kept("requests"):
        make_old(here, name)
    young = await asyncio.to_thread(here.folder.open_appended, "results")
    young.close()
    os.utime(here.folder.path(young.name), (here.time[0], here.time[0]))
    # Nobody writes it any more but this one, and those of `LineResults`.
    assert await here.batches.upkeep.clean() == 1
    assert (len(here.kept("results")), here.kept("requests")) == (4, [])
    await here.results.close(1.0)
    orphan.close()
    assert await here.batches.upkeep.clean() == 2
    assert len(here.kept("results")) == 2
    assert young.name in here.kept("results")
    assert len(await here.output(runs)) == 1
    assert len(await here.output(ended)) == 1


async def test_a_full_folder_pauses_the_batch_until_there_is_room(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [1 << 30]
    options: dict[str, Any] = {"most_bytes": lambda: room[0]}
    async with batch_place(store_url, tmp_path / "kept", folder_options=options) as here:
        batch = await here.create([line("a"), "broken"])
        room[0] = 1
        await here.settle()
        paused = await here.find(batch)
        assert (paused.state, paused.pause_reason) == (BatchState.VALIDATING, "storage_full")
        with pytest.raises(FolderFull):
            here.folder.check_room(1)
        monkeypatch.setattr("gateway.stored.batch_registry.RETRY_SECONDS", 0.0)
        with capture_logs() as told:
            for _ in range(3):
                await here.round()
        assert told == []  # once is enough
        room[0] = 1 << 30
        await here.settle()
        begun = await here.find(batch)
        assert (begun.state, begun.paused_at, begun.total) == (BatchState.IN_PROGRESS, None, 2)


async def test_a_folder_that_fails_is_tried_again_now_and_then(
    place: BatchPlace, tmp_path: Path
) -> None:
    batch = await place.create([line("a")])
    path = place.folder.path(str(batch.input_file))
    path.rename(away := tmp_path / "away")
    path.mkdir()
    await place.settle()
    paused = await place.find(batch)
    assert (paused.state, paused.pause_reason) == (
        BatchState.VALIDATING, "storage_unavailable",
    )  # fmt: skip
    path.rmdir()
    away.rename(path)
    await place.settle()
    assert (await place.find(batch)).paused_at is not None
    place.pass_(UNAVAILABLE_SECONDS)
    await place.settle()
    begun = await place.find(batch)
    assert (begun.state, begun.paused_at) == (BatchState.IN_PROGRESS, None)
