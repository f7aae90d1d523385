"""Batches for their callers, over real stores of both kinds and a real folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.store.schema import batches, files, stored_requests
from gateway.stored.batch_registry import ENDPOINTS, NewBatch
from gateway.stored.batch_rows import read_batches
from gateway.stored.claims import BatchState
from tests.stored.batch_place import (
    CHAT,
    DAY,
    HOUR,
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


async def run_all(here: BatchPlace, **options: Any) -> int:
    """Answer all lines that may run."""
    task = asyncio.create_task(here.results.run())
    try:
        rows = await here.claim()
        kept = await asyncio.gather(
            *(here.results.add(r, "openai", answer(r, here.process.id, **options)) for r in rows)
        )
        assert all(kept)
    finally:
        task.cancel()
    return len(rows)


async def test_every_line_is_answered_exactly_once(here: BatchPlace) -> None:
    batch = await here.create([line(f"c{n}") for n in range(50)])
    assert batch.state is BatchState.VALIDATING
    await here.settle()
    begun = await here.find(batch)
    assert (begun.state, begun.total, begun.model) == (BatchState.IN_PROGRESS, 50, "m")
    assert await here.output(batch) == []
    assert await run_all(here) == 50
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


async def test_broken_lines_have_errors_of_their_own_and_the_rest_runs(here: BatchPlace) -> None:
    batch = await here.create(
        [line("a"), "not json", line("a"), line("b", url="/v1/embeddings"), "", line("c")]
    )
    await here.settle()
    assert await run_all(here) == 2
    await here.settle()
    ended = await here.find(batch)
    assert (ended.state, ended.total) == (BatchState.COMPLETED, 5)
    assert (ended.completed, ended.failed) == (2, 3)
    assert [one["custom_id"] for one in await here.output(batch)] == ["a", "c"]
    errors = await here.output(batch, errors=True)
    assert [(one["custom_id"], one["error"]["code"]) for one in errors] == [
        (None, "invalid_json_line"),
        ("a", "duplicate_custom_id"),
        ("b", "invalid_url"),
    ]
    assert [one["error"]["line"] for one in errors] == [2, 3, 4]


async def test_a_file_of_broken_lines_alone_ends_completed(here: BatchPlace) -> None:
    batch = await here.create(["{", "["])
    await here.settle()
    ended = await here.find(batch)
    assert (ended.state, ended.failed, ended.output_file) == (BatchState.COMPLETED, 2, None)
    assert len(await here.output(batch, errors=True)) == 2


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"\n \r\n\n", "empty_file"), (jsonl(line(f"{n}") for n in range(4)), "too_many_lines")],
)
async def test_an_input_that_is_no_use_fails_the_batch(
    store_url: str, tmp_path: Path, content: bytes, code: str
) -> None:
    async with batch_place(store_url, tmp_path / "kept", lines=3) as here:
        batch = await here.create(content)
        await here.settle()
        ended = await here.find(batch)
        assert ended.state is BatchState.FAILED
        assert ended.errors is not None
        assert [one["code"] for one in ended.errors] == [code]
        assert await here.store.run(count(stored_requests)) == 0


async def test_as_many_lines_as_allowed_are_taken_beside_empty_ones(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept", lines=3) as here:
        batch = await here.create([line("1"), "", line("2"), "  ", line("3"), ""])
        await here.settle()
        assert (await here.find(batch)).total == 3


async def test_what_can_not_be_a_batch_is_refused_at_once(store_url: str, tmp_path: Path) -> None:
    windows = {"shortest": HOUR, "longest": DAY, "default": DAY}
    async with batch_place(store_url, tmp_path / "kept", windows=windows) as here:
        text = await here.upload(b"x", purpose="user_data")
        foreign = await here.upload(b"x", owner="bob")
        create = here.batches.create
        given: dict[str, Any] = {"owner": "alice", "api": "openai", "endpoint": CHAT}
        bad = (400, "invalid_value", "completion_window")
        for window in ("", "tomorrow", "59m", "25h", "-1h", "1e400", "24h" * 1000):
            new = NewBatch(**given, input_file=foreign, window=window)
            assert await refused(create(new)) == bad
        assert await refused(create(NewBatch(**given, input_file=foreign))) == (
            400, "file_not_found", "input_file_id",
        )  # fmt: skip
        assert await refused(create(NewBatch(**given, input_file=text))) == (
            400, "invalid_value", "input_file_id",
        )  # fmt: skip
        for endpoint in ("/v1/images", "/completion", "/v1/audio/transcriptions", "/tokenize"):
            new = NewBatch("alice", "openai", endpoint, foreign)
            assert await refused(create(new)) == (400, "invalid_value", "endpoint")
        assert set(ENDPOINTS) >= {
            CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
        }  # fmt: skip
        assert await here.store.run(count(batches)) == 0


async def test_a_window_is_a_deadline(here: BatchPlace) -> None:
    batch = await here.create([line("a"), line("b")], window="1h")
    assert batch.expires_at == batch.created_at + HOUR
    await here.settle()
    task = asyncio.create_task(here.results.run())
    (row,) = await here.claim(1)
    assert await here.results.add(row, "openai", answer(row, here.process.id))
    task.cancel()
    here.pass_(HOUR + 1)
    await here.settle()
    ended = await here.find(batch)
    assert (ended.state, ended.completed, ended.expired) == (BatchState.EXPIRED, 1, 1)
    (error,) = await here.output(batch, errors=True)
    assert error["error"]["code"] == "batch_expired"
    assert {error["custom_id"], (await here.output(batch))[0]["custom_id"]} == {"a", "b"}


async def test_the_same_idempotency_key_makes_no_second_batch(here: BatchPlace) -> None:
    file = await here.upload(jsonl([line("a")]))
    new = NewBatch("alice", "openai", CHAT, file, idempotency_key="k", request_digest="1")
    first = await here.batches.create(new)
    assert await here.batches.create(new) == first
    other = NewBatch("alice", "openai", CHAT, file, idempotency_key="k", request_digest="2")
    assert await refused(here.batches.create(other)) == (422, "idempotency_key_reused", None)


async def test_a_key_has_so_many_unfinished_batches_and_no_more(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept", batches_per_key=2) as here:
        first = await here.create([line("a")])
        await here.create([line("a")])
        status, code, _ = await refused(here.create([line("a")]))
        assert (status, code) == (429, "too_many_batches")
        await here.create([line("a")], owner="bob")
        await here.batches.cancel("alice", first.id, "openai")
        await here.settle()
        await here.create([line("a")])


async def test_batches_of_others_are_not_there(here: BatchPlace) -> None:
    batch = await here.create([line("a")])
    await here.settle()
    for owner, api in (("bob", "openai"), ("alice", "anthropic")):
        for asked in (
            here.batches.find(owner, batch.id, api),
            here.batches.cancel(owner, batch.id, api),
            here.batches.pause(owner, batch.id, api),
            here.batches.resume(owner, batch.id, api),
            here.batches.delete(owner, batch.id, api),
            here.batches.open_output(owner, batch.id, api),
        ):
            assert await refused(asked) == (404, "batch_not_found", None)
        page = await here.batches.storage.read(read_batches, owner, api, 10)
        assert page.batches == []
    assert (await here.find(batch)).state is BatchState.IN_PROGRESS


async def test_a_batch_is_cancelled_in_every_state(here: BatchPlace) -> None:
    validating, waits, runs = [await here.create([line("a"), line("b")]) for _ in range(3)]
    assert (await here.batches.cancel("alice", validating.id, "openai")).cancelling_at
    await here.settle()
    ended = await here.find(validating)
    assert (ended.state, ended.total) == (BatchState.CANCELLED, 0)
    cancelled = await here.batches.cancel("alice", waits.id, "openai")
    assert cancelled.state is BatchState.CANCELLING
    await here.settle()
    ended = await here.find(waits)
    assert (ended.state, ended.cancelled) == (BatchState.CANCELLED, 2)
    codes = [one["error"]["code"] for one in await here.output(waits, errors=True)]
    assert codes == ["batch_cancelled"] * 2
    # Again, nothing.
    assert await here.batches.cancel("alice", waits.id, "openai") == ended
    assert await run_all(here) == 2
    await here.settle()
    for verb in (here.batches.cancel, here.batches.pause, here.batches.resume):
        assert await refused(verb("alice", runs.id, "openai")) == (409, "batch_ended", None)
    assert (await here.find(runs)).state is BatchState.COMPLETED


async def test_a_paused_batch_starts_no_line(here: BatchPlace) -> None:
    batch = await here.create([line("a")])
    await here.settle()
    paused = await here.batches.pause("alice", batch.id, "openai")
    assert (paused.paused_at, paused.pause_reason) == (here.time[0], "paused")
    await here.settle()
    assert await here.claim() == []
    assert (await here.batches.resume("alice", batch.id, "openai")).paused_at is None
    assert len(await here.claim()) == 1


async def test_a_deleted_batch_leaves_nothing(here: BatchPlace) -> None:
    batch = await here.create([line("a"), "x"])
    await here.settle()
    delete = here.batches.delete("alice", batch.id, "openai")
    assert await refused(delete) == (400, "batch_in_progress", None)
    await run_all(here)
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
        await here.results.add(row, "anthropic", answer(row, here.process.id))
        task.cancel()
        await here.settle()
        assert await here.output(batch) == [
            {"custom_id": "a", "result": {"type": "succeeded", "message": {"answer to": "a"}}}
        ]
        await here.batches.delete("alice", batch.id, "anthropic")
        assert [here.kept(kind) for kind in ("requests", "results", "file")] == [[], [], []]


async def test_an_expired_input_of_a_new_batch_is_still_read(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept", keep=HOUR) as here:
        batch = await here.create([line("a")])
        here.pass_(2 * HOUR)
        await here.files.clean()
        await here.settle()
        assert (await here.find(batch)).state is BatchState.IN_PROGRESS
        new = NewBatch("alice", "openai", CHAT, batch.input_file)
        assert (await refused(here.batches.create(new)))[1] == "file_not_found"
