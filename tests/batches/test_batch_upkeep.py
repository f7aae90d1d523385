"""What batches need without being asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from structlog.testing import capture_logs

from gateway.batches.batch_upkeep import CLEAN_SECONDS, UNAVAILABLE_SECONDS
from gateway.batches.folder import FolderFull
from gateway.batches.request_rows import BatchState
from gateway.store.failures import StoreError, StoreUnavailable
from gateway.store.schema import batches, stored_requests
from tests.batches.batch_place import DAY, BatchPlace, answer, batch_place, count, line
from tests.gateways import until


async def run_all(here: BatchPlace) -> None:
    task = asyncio.create_task(here.results.run())
    while rows := await here.claim():
        added = [here.results.add(r, "openai", answer(r, here.process.id)) for r in rows]
        assert all(await asyncio.gather(*added))
    task.cancel()
    await here.results.close(1.0)


async def test_it_runs_until_it_is_cancelled(store_url: str, tmp_path: Path) -> None:
    told = asyncio.Event()
    async with batch_place(store_url, tmp_path / "kept", on_rows=told.set) as here:
        running = asyncio.create_task(here.batches.run())
        batch = await here.create([line("a")])
        await asyncio.wait_for(told.wait(), 30)
        await run_all(here)
        here.batches.upkeep.wake()
        async with asyncio.timeout(30):
            while (await here.find(batch)).state is not BatchState.COMPLETED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_very_many_cancelled_lines_end_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.batch_rows.STEP_ROWS", 100)
    monkeypatch.setattr("gateway.batches.request_rows.STEP_ROWS", 100)
    async with batch_place(f"sqlite:///{tmp_path / 'db'}", tmp_path / "kept") as here:
        batch = await here.create([line(f"c{n}") for n in range(6000)])
        await here.settle()
        await here.batches.cancel(batch.owner, batch.id, batch.api)
        await here.settle()
        ended = await here.find(batch)
        assert (ended.state, ended.cancelled) == (BatchState.CANCELLED, 6000)


async def test_what_is_old_is_removed(store_url: str, tmp_path: Path) -> None:
    async with batch_place(store_url, tmp_path / "kept", keep=10 * DAY) as here:
        batch = await here.create([line("a"), "x"])
        await here.settle()
        await run_all(here)
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


async def test_files_that_no_unfinished_batch_needs_are_removed(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        ended, runs = await here.create([line("a")]), await here.create([line("a"), line("b")])
        await here.settle()
        task = asyncio.create_task(here.results.run())
        rows = await here.claim()
        for row in rows:
            if (row.batch, row.custom_id) != (runs.id, "b"):
                await here.results.add(row, "openai", answer(row, here.process.id))
        task.cancel()
        await here.settle()
        assert (await here.find(ended)).state is BatchState.COMPLETED
        orphan = await asyncio.to_thread(here.folder.open_appended, "results")
        requests = await here.batches.new_requests()
        await here.batches.on_disk(requests.finish)
        for name in here.kept("results") + here.kept("requests"):
            make_old(here, name)
        # Nobody writes it any more but this one, and those of `LineResults`.
        assert await here.batches.upkeep.clean() == 1
        assert (len(here.kept("results")), here.kept("requests")) == (3, [])
        await here.results.close(1.0)
        orphan.close()
        assert await here.batches.upkeep.clean() == 2
        (left,) = here.kept("results")
        assert len(await here.output(runs)) == 1
        assert len(await here.output(ended)) == 1
        assert left


async def test_a_young_file_stays(tmp_path: Path) -> None:
    async with batch_place(f"sqlite:///{tmp_path / 'db'}", tmp_path / "kept") as here:
        young = await asyncio.to_thread(here.folder.open_appended, "results")
        young.close()
        now = here.time[0]
        os.utime(here.folder.path(young.name), (now, now))
        assert await here.batches.upkeep.clean() == 0


async def test_a_file_that_is_closed_while_the_rows_are_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batch_place(f"sqlite:///{tmp_path / 'db'}", tmp_path / "kept") as here:
        written, old = [
            await asyncio.to_thread(here.folder.open_appended, "results") for _ in range(2)
        ]
        old.close()
        for name in here.kept("results"):
            make_old(here, name)
        run = here.store.run

        async def run_and_close(job: Callable[[Connection], Any], **options: Any) -> Any:
            found = await run(job, **options)
            written.close()  # Its rows came behind those that were read.
            return found

        monkeypatch.setattr(here.store, "run", run_and_close)
        assert await here.batches.upkeep.clean() == 1
        assert here.kept("results") == [written.name]


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
        monkeypatch.setattr("gateway.batches.batch_upkeep.RETRY_SECONDS", 0.0)
        with capture_logs() as told:
            for _ in range(3):
                await here.batches.upkeep.round()
                await here.batches.upkeep.wait_for_work()
        assert told == []  # once is enough
        room[0] = 1 << 30
        await here.settle()
        begun = await here.find(batch)
        assert (begun.state, begun.paused_at, begun.total) == (BatchState.IN_PROGRESS, None, 2)


async def test_a_folder_that_fails_is_tried_again_now_and_then(tmp_path: Path) -> None:
    async with batch_place(f"sqlite:///{tmp_path / 'db'}", tmp_path / "kept") as here:
        batch = await here.create([line("a")])
        path = here.folder.path(str(batch.input_file))
        path.rename(away := tmp_path / "away")
        path.mkdir()
        await here.settle()
        paused = await here.find(batch)
        assert (paused.state, paused.pause_reason) == (
            BatchState.VALIDATING, "storage_unavailable",
        )  # fmt: skip
        path.rmdir()
        away.rename(path)
        await here.settle()
        assert (await here.find(batch)).paused_at is not None
        here.pass_(UNAVAILABLE_SECONDS)
        await here.settle()
        begun = await here.find(batch)
        assert (begun.state, begun.paused_at) == (BatchState.IN_PROGRESS, None)


async def test_a_caller_s_pause_outlives_one_for_want_of_room(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        batch = await here.create([line("a")])
        await here.settle()
        await here.batches.pause(batch.owner, batch.id, batch.api)
        await here.settle()
        assert (await here.find(batch)).pause_reason == "paused"


async def test_work_that_fails_for_no_known_reason_is_given_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.batch_upkeep.RETRY_SECONDS", 0.0)
    async with batch_place(f"sqlite:///{tmp_path / 'db'}", tmp_path / "kept") as here:
        monkeypatch.setattr("gateway.batches.batch_upkeep.check_line_count", None)
        batch = await here.create([line("a")])
        await here.settle()
        failed = await here.find(batch)
        assert failed.state is BatchState.FAILED
        assert failed.errors is not None
        assert failed.errors[0]["code"] == "internal_error"


async def test_a_store_that_is_away_ends_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batch_place(f"sqlite:///{tmp_path / 'db'}", tmp_path / "kept") as here:
        run, asked = here.store.run, 0

        async def away(*arguments: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked < 3:
                raise StoreUnavailable("it is away", "wait")
            return await run(*arguments, **options)

        monkeypatch.setattr(here.store, "run", away)
        with pytest.raises(StoreError):
            await here.batches.upkeep.round()
        running = asyncio.create_task(here.batches.run())
        await until(lambda: asked >= 2)
        here.batches.upkeep.wake()
        await until(lambda: asked > 3)
        assert not running.done()
        running.cancel()
