"""Batches for their callers, over real stores of both kinds and a real folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.store.schema import batches, files, stored_requests
from gateway.stored.batch_registry import NewBatch
from gateway.stored.claims import BatchState
from tests.stored.batch_place import (
    BatchPlace,
    answer,
    batch_place,
    count,
    jsonl,
    line,
)


async def refused(asked: Any) -> tuple[int, str, str | None]:
    with pytest.raises(GatewayError) as error:
        await asked
    return error.value.status, error.value.code, error.value.param


async def test_every_line_is_answered_exactly_once(here: BatchPlace) -> None:
    batch = await here.create([line(f"c{n}") for n in range(50)])
    assert batch.state is BatchState.VALIDATING
    await here.settle()
    begun = await here.find(batch)
    assert (begun.state, begun.total, begun.model) == (BatchState.IN_PROGRESS, 50, "m")
    assert await here.output(batch) == []
    assert await here.answer() == 50
    assert len(await here.output(batch)) == 50  # before its end
    await here.settle()
    ended = await here.find(batch)
    assert (ended.state, ended.completed, ended.failed) == (BatchState.COMPLETED, 50, 0)
    assert (ended.completion_tokens, ended.cost) == (150, 25.0)
    assert ended.error_file is None
    found = await here.output(batch)
    assert [one["custom_id"] for one in found] == [f"c{n}" for n in range(50)]
    assert found[7]["response"]["body"] == {"answer to": "c7"}
    assert await here.output(batch, errors=True) == []


async def test_a_deleted_batch_leaves_nothing(here: BatchPlace) -> None:
    batch = await here.create([line("a"), "x"])
    await here.settle()
    delete = here.batches.delete("alice", batch.id, "openai")
    assert await refused(delete) == (400, "batch_in_progress", None)
    await here.answer()
    await here.settle()
    await here.batches.delete("alice", batch.id, "openai")
    assert await here.store.run(count(batches)) == 0
    assert await here.store.run(count(stored_requests)) == 0
    assert (here.kept("results"), here.kept("file")) == ([], [batch.input_file])
    assert await here.store.run(count(files, files.c.deleted_at.is_(None))) == 1


async def test_requests_that_came_without_a_file_are_the_batch_s_own(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept", batches_per_key=1) as here:
        given: dict[str, Any] = {
            "owner": "alice", "api": "anthropic", "endpoint": "/v1/messages",
        }  # fmt: skip

        async def requests() -> str:
            new = await here.batches.new_requests()
            await here.batches.storage.on_disk(new.write, jsonl([line("a", url="/v1/messages")]))
            return await here.batches.storage.on_disk(new.finish)

        batch = await here.batches.create(NewBatch(**given, requests=await requests()))
        assert batch.id.startswith("msgbatch_")
        again = NewBatch(**given, requests=await requests())
        assert (await refused(here.batches.create(again)))[0] == 429
        assert len(here.kept("requests")) == 1
        await here.settle()
        task = asyncio.create_task(here.results.run())
        (row,) = await here.claim()
        content = await here.files.storage.on_disk(
            here.folder.read, row.place, row.offset, row.length
        )
        assert content == jsonl([line("a")["body"]]).strip()
        await here.results.add(row, answer(row, here.process.id))
        task.cancel()
        await here.settle()
        assert await here.output(batch) == [
            {"custom_id": "a", "result": {"type": "succeeded", "message": {"answer to": "a"}}}
        ]
        await here.batches.delete("alice", batch.id, "anthropic")
        assert [here.kept(kind) for kind in ("requests", "results", "file")] == [[], [], []]
