"""Intake of inputs, also of a process that is killed in the middle of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.batches.batch_rows import Batch
from gateway.batches.batch_upkeep import input_place
from gateway.batches.folder import FolderError
from gateway.batches.request_rows import BatchState, RequestState, StoredRow, result_rows
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import stored_requests
from tests.batches.batch_place import BatchPlace, batch_place, count, jsonl, killed, line

LINES = 4000

READS = """
import asyncio, sys
from pathlib import Path
from tests.batches.batch_place import batch_place

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


async def test_a_line_s_row_has_what_the_feeder_asks_for(store_url: str, tmp_path: Path) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        body = {
            "model": "big", "max_tokens": 9,
            "messages": [{"role": "user", "content": "word " * 500}],
        }  # fmt: skip
        batch = await here.create([line("a", body=body)], class_="normal", user="eve")
        await here.settle()
        (row,) = await here.claim()
        assert row.id == f"batch_req_{batch.id.removeprefix('batch_')}_1"
        assert (row.model, row.max_tokens, row.custom_id) == ("big", 9, "a")
        assert 600 < row.prompt_tokens < 650
        assert row.prefix > 0
        assert (row.class_, row.user, row.deadline) == ("normal", "eve", batch.expires_at)
        assert row.place == batch.input_file == input_place(batch)


async def test_a_batch_cancelled_in_the_middle_gets_no_more_lines(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        batch = await here.create(lines())
        reading = asyncio.create_task(here.settle())
        while not (rows := await here.store.run(count(stored_requests), write=False)):  # noqa: ASYNC110
            await asyncio.sleep(0)  # The store tells of no event.
        await here.batches.cancel(batch.owner, batch.id, batch.api)
        await reading
        await here.settle()
        ended = await here.find(batch)
        assert ended.state is BatchState.CANCELLED
        assert ended.ended_lines == ended.total >= rows
        assert len(await here.output(batch, errors=True)) == ended.total
        assert await here.store.run(count(stored_requests)) == ended.total


async def test_an_input_that_is_gone_fails_the_batch(store_url: str, tmp_path: Path) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        batch = await here.create([line("a")])
        assert batch.input_file is not None
        here.folder.delete(batch.input_file)
        await here.settle()
        ended = await here.find(batch)
        assert ended.state is BatchState.FAILED
        assert ended.errors is not None
        assert ended.errors[0]["code"] == "file_not_found"


async def test_a_store_that_is_away_delays_the_intake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batch_place(f"sqlite:///{tmp_path / 'db'}", tmp_path / "kept") as here:
        batch = await here.create(lines())
        run, failures = here.store.run, iter([False, False, False, True, False, True])

        async def fails_now_and_then(*arguments: object, **options: object) -> object:
            if next(failures, False):
                raise StoreUnavailable("it is away", "wait")
            return await run(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(here.store, "run", fails_now_and_then)
        monkeypatch.setattr("gateway.batches.batch_upkeep.RETRY_SECONDS", 0.0)
        for _ in range(4):
            try:
                await here.settle()
            except StoreUnavailable:
                continue
        await check_whole(here, batch)


async def test_rows_are_told_apart_from_those_of_other_batches(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        first, second = await here.create([line("a")]), await here.create([line("a"), "x"])
        await here.settle()
        rows = await here.claim()
        assert {(row.batch, row.custom_id) for row in rows} == {
            (first.id, "a"), (second.id, "a"),
        }  # fmt: skip

        def ended(connection: object) -> list[StoredRow]:
            return result_rows(connection, second.id, 0, 9)  # type: ignore[arg-type]

        (row,) = await here.store.run(ended)
        assert (row.number, row.error_code) == (2, "invalid_json_line")


async def test_a_folder_that_can_not_be_read_is_told(tmp_path: Path) -> None:
    async with batch_place(f"sqlite:///{tmp_path / 'db'}", tmp_path / "kept") as here:
        batch = await here.create(jsonl([line("a")]))
        assert batch.input_file is not None
        here.folder.delete(batch.input_file)
        (here.folder.location / batch.input_file).mkdir()
        intake = here.batches.upkeep.intake
        with pytest.raises(FolderError):
            await intake.take_in(batch)
        assert (await here.find(batch)).state is BatchState.VALIDATING
