"""The end of batches: output and error files that have each line once."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from gateway.batches.batch_rows import Batch
from gateway.batches.batch_upkeep import ResultReader
from gateway.batches.folder import FolderError
from gateway.batches.request_rows import BatchState
from gateway.store.failures import StoreLocked
from gateway.store.schema import files
from tests.batches.batch_place import (
    DAY,
    HOUR,
    BatchPlace,
    answer,
    batch_place,
    count,
    line,
)


async def ran(here: BatchPlace, lines: int, **more: Any) -> Batch:
    """A batch whose lines have ended, every third with an error of a node."""
    batch = await here.create([line(f"c{n}") for n in range(lines)], **more)
    await here.settle()
    task = asyncio.create_task(here.results.run())
    rows = await here.claim()
    added = [
        here.results.add(
            row, batch.api,
            answer(row, here.process.id, status=502 if (row.number or 0) % 3 == 0 else 200),
        )
        for row in rows
    ]  # fmt: skip
    assert all(await asyncio.gather(*added))
    task.cancel()
    return await here.find(batch)


async def test_each_line_is_in_one_of_the_files(store_url: str, tmp_path: Path) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        batch = await ran(here, 30)
        await here.settle()
        ended = await here.find(batch)
        assert (ended.completed, ended.failed) == (20, 10)
        output, errors = await here.output(batch), await here.output(batch, errors=True)
        assert {one["response"]["status_code"] for one in output} == {200}
        assert {one["response"]["status_code"] for one in errors} == {502}
        assert all(one["error"] is None for one in output + errors)
        ids = [one["custom_id"] for one in output + errors]
        assert sorted(ids) == sorted(f"c{n}" for n in range(30))


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


async def test_results_of_message_batches_are_one_file(store_url: str, tmp_path: Path) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        batch = await ran(here, 3, api="anthropic")
        await here.settle()
        ended = await here.find(batch)
        assert ended.error_file is None
        kinds = [one["result"]["type"] for one in await here.output(batch)]
        assert kinds == ["succeeded", "succeeded", "errored"]


async def test_of_two_processes_that_end_a_batch_one_has_its_files(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        batch = await ran(here, 30)
        async with batch_place(store_url, tmp_path / "kept") as other:
            ends = [one.batches.upkeep.end.end(batch.id) for one in (here, other)]
            found = await asyncio.gather(*ends)
        assert sum(one is not None for one in found) == 1
        ended = await here.find(batch)
        assert here.kept("file") == sorted(
            str(name) for name in (ended.input_file, ended.output_file, ended.error_file)
        )
        assert await here.store.run(count(files)) == 3


async def test_whoever_wants_to_know_of_the_end_is_told_in_its_transaction(
    store_url: str, tmp_path: Path
) -> None:
    told: list[tuple[str, BatchState]] = []

    def on_end(connection: Connection, batch: Batch) -> None:
        assert connection.in_transaction()
        told.append((batch.id, batch.state))

    async with batch_place(store_url, tmp_path / "kept", on_end=on_end) as here:
        batch = await ran(here, 2)
        failed = await here.create(b"\n")
        await here.settle()
        assert sorted(told) == sorted(
            [(batch.id, BatchState.COMPLETED), (failed.id, BatchState.FAILED)]
        )


async def test_a_store_that_refuses_the_end_leaves_no_file(store_url: str, tmp_path: Path) -> None:
    refuses = [True]

    def on_end(_: Connection, __: Batch) -> None:
        if refuses:
            refuses.pop()
            raise StoreLocked("it is locked", "wait")

    async with batch_place(store_url, tmp_path / "kept", on_end=on_end) as here:
        batch = await ran(here, 3)
        with pytest.raises(StoreLocked):
            await here.batches.upkeep.end.end(batch.id)
        assert here.kept("file") == [batch.input_file]
        assert (await here.find(batch)).state is BatchState.FINALIZING
        await here.settle()
        assert len(await here.output(batch)) == 2


async def test_a_lost_result_is_told_as_such(store_url: str, tmp_path: Path) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        batch = await ran(here, 2)
        (results,) = here.kept("results")
        here.folder.delete(results)
        # Whoever reads what is recorded so far is better off to try again.
        with pytest.raises(Exception, match="can't be used now"):
            await here.output(batch)
        await here.settle()
        assert await here.output(batch) == []
        errors = await here.output(batch, errors=True)
        assert [one["error"]["code"] for one in errors] == ["result_lost"] * 2
        assert [one["custom_id"] for one in errors] == ["c0", "c1"]


async def test_a_torn_file_gives_no_torn_line(tmp_path: Path) -> None:
    async with batch_place(f"sqlite:///{tmp_path / 'db'}", tmp_path / "kept") as here:
        batch = await ran(here, 2)
        (results,) = here.kept("results")
        path = here.folder.path(results)
        path.write_bytes(path.read_bytes()[:-5])
        await here.settle()
        (first,), (second,) = await here.output(batch), await here.output(batch, errors=True)
        assert (first["custom_id"], second["error"]["code"]) == ("c0", "result_lost")


async def test_pieces_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.batches.batch_upkeep.PIECE_BYTES", 500)
    async with batch_place(f"sqlite:///{tmp_path / 'db'}", tmp_path / "kept") as here:
        batch = await ran(here, 60)
        found = await here.batches.open_output("alice", batch.id, "openai")
        pieces = [piece async for piece in found.pieces()]
        await found.close()
        assert max(map(len, pieces)) < 800
        assert len([json.loads(one) for one in b"".join(pieces).splitlines()]) == 40


async def test_a_disk_that_can_not_be_read_ends_nothing(tmp_path: Path) -> None:
    async with batch_place(f"sqlite:///{tmp_path / 'db'}", tmp_path / "kept") as here:
        batch = await ran(here, 2)
        (results,) = here.kept("results")
        here.folder.delete(results)
        here.folder.path(results).mkdir()
        with pytest.raises(FolderError):
            await here.batches.upkeep.end.end(batch.id)
        assert (await here.find(batch)).state is BatchState.FINALIZING
        reader = ResultReader(here.folder, "openai")
        reader.close()
        reader.close()
