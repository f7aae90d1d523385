"""The registry of files over real stores of both kinds and a real folder."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.store.schema import files
from gateway.stored.background_requests import add_background, delete_background
from gateway.stored.batch_registry import NewBatch
from gateway.stored.batch_rows import Batch
from gateway.stored.claims import BatchState, RequestKind, StoredRow
from gateway.stored.files import (
    full_owners,
    kept_by,
    note_log_sizes,
    read_files,
)
from gateway.stored.folder import ID_FILE, job
from tests.store.stores import LIMIT, opened
from tests.stored.batch_place import HOUR, BatchPlace, answer, batch_place, count, jsonl, line
from tests.stored.stored_rows import limits

DAY = 86400.0


async def ids(here: BatchPlace, owner: str = "alice") -> list[str]:
    page = await here.files.storage.read(read_files, owner, here.time[0], 100)
    return [file.id for file in page.files]


async def refused(asked: Any) -> tuple[int, str]:
    with pytest.raises(GatewayError) as error:
        await asked
    return error.value.status, error.value.code


async def test_an_expired_file_is_gone_at_once_and_its_bytes_soon(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept", keep=10 * DAY) as here:
        long, short = await here.upload(), await here.upload(seconds=3600)
        here.pass_(3600)
        assert await ids(here) == [long]
        assert await refused(here.files.find("alice", short)) == (404, "file_not_found")
        assert await refused(here.files.open_content("alice", short)) == (404, "file_not_found")
        assert len(here.kept()) == 2
        assert await here.files.clean() == 1
        assert (here.kept(), await here.store.run(count(files))) == ([long], 1)
        here.pass_(10 * DAY)
        assert await here.files.clean() == 1
        assert (here.kept(), await here.store.run(count(files))) == ([], 0)


async def test_a_deletion_that_was_cut_short_is_finished_later(
    here: BatchPlace, tmp_path: Path
) -> None:
    id_ = await here.upload()
    here.folder.location.rename(tmp_path / "away")
    await here.files.delete("alice", id_)
    assert await ids(here) == []
    assert await refused(here.files.delete("alice", id_)) == (404, "file_not_found")
    (tmp_path / "away").rename(here.folder.location)
    assert (here.kept(), await here.store.run(count(files))) == ([id_], 1)
    assert await here.files.clean() == 1
    assert (here.kept(), await here.store.run(count(files))) == ([], 0)


async def test_a_file_of_another_host_is_listed_and_not_read(
    store_url: str, tmp_path: Path
) -> None:
    async with (
        batch_place(store_url, tmp_path / "one") as one,
        batch_place(store_url, tmp_path / "two") as two,
    ):
        id_ = await one.upload()
        assert await ids(two) == [id_]
        assert await refused(two.files.open_content("alice", id_)) == (503, "file_elsewhere")
        # Deleted here, removed there.
        await two.files.delete("alice", id_)
        assert await two.files.clean() == 0
        assert one.kept() == [id_]
        assert await one.files.clean() == 1
        assert one.kept() == []


async def test_a_store_that_is_away_is_told_and_nothing_is_lost(here: BatchPlace) -> None:
    id_ = await here.upload()
    async with here.files.uploading("alice", None) as upload:
        await here.files.storage.on_disk(upload.write, b"text")
        await here.store.aclose(LIMIT)
        keeping = here.files.keep(upload, name="a", purpose="batch", seconds=None)
        assert await refused(keeping) == (503, "store_unavailable")
        # Whether it has a row can't be told, so the file stays until that is known.
        assert len(here.kept()) == 2
    assert await refused(here.files.find("alice", id_)) == (503, "store_unavailable")
    assert await refused(here.upload()) == (503, "store_unavailable")


KB = 1000


async def kept(here: BatchPlace, owner: str = "alice") -> int:
    job = partial(kept_by, owner=owner, now=here.time[0])
    return (await here.store.run(job, write=False)).bytes


def on_disk(here: BatchPlace) -> int:
    return sum(path.stat().st_size for path in here.folder.location.iterdir()
               if not path.name.endswith(ID_FILE))  # fmt: skip


async def refusal_of(asked: Any) -> GatewayError:
    with pytest.raises(GatewayError) as error:
        await asked
    return error.value


async def messages(here: BatchPlace, lines: int, *, owner: str = "alice", **more: Any) -> Batch:
    """A message batch with a body of its own."""
    new = await here.batches.new_requests()
    await here.batches.storage.on_disk(
        new.write, jsonl([line(f"c{n}", url="/v1/messages") for n in range(lines)])
    )
    size = new.size
    name = await here.batches.storage.on_disk(new.finish)
    given = {"owner": owner, "api": "anthropic", "endpoint": "/v1/messages", **more}
    return await here.batches.create(NewBatch(**given, requests=name, requests_bytes=size))


async def test_the_rows_say_what_the_folder_holds_at_every_step(here: BatchPlace) -> None:
    seen = [(await kept(here), on_disk(here))]
    await here.upload(b"x" * 700, purpose="user_data")
    seen.append((await kept(here), on_disk(here)))
    of_messages = await messages(here, 3)
    seen.append((await kept(here), on_disk(here)))
    of_lines = await here.create([line("a"), line("b"), "broken"])
    seen.append((await kept(here), on_disk(here)))
    await here.settle()
    seen.append((await kept(here), on_disk(here)))
    assert await here.answer(2, content=b'"%b"' % (b"x" * 300)) == 2
    seen.append((await kept(here), on_disk(here)))
    assert all(counted == held for counted, held in seen), seen
    assert sorted(seen) == seen
    assert len({counted for counted, _ in seen}) == len(seen)
    assert await kept(here, "bob") == 0
    # After the end results are in files with rows, and of the rest nothing is left.
    while await here.answer(10):
        await here.settle()
    assert {(await here.find(one)).state for one in (of_messages, of_lines)} == {
        BatchState.COMPLETED
    }
    assert here.kept("requests") == []
    await here.results.close(HOUR)
    await here.batches.upkeep.clean()
    assert here.kept("results") == []
    assert await kept(here) == on_disk(here) > 0
    await here.batches.delete("alice", of_messages.id, "anthropic")
    assert await kept(here) == on_disk(here)
    page = await here.files.storage.read(read_files, "alice", here.time[0], 100)
    for file in page.files:
        await here.files.delete("alice", file.id)
    assert (await kept(here), on_disk(here)) == (0, 0)


async def test_a_key_at_its_bound_gets_429_for_everything_and_others_do_not(
    store_url: str, tmp_path: Path
) -> None:
    bounds: dict[str, Any] = {"file_bytes": 2 * KB, "bytes_per_key": 2 * KB}
    async with batch_place(store_url, tmp_path / "kept", **bounds) as here:
        input_file = await here.upload(jsonl([line("a")]))
        await here.upload(b"x" * (2 * KB - await kept(here)), purpose="user_data")
        given: dict[str, Any] = {
            "owner": "alice", "api": "openai", "endpoint": "/v1/chat/completions",
        }  # fmt: skip
        for asked in (
            here.upload(b"x"),
            messages(here, 1),
            here.batches.create(NewBatch(**given, input_file=input_file)),
            here.batches.check_room("alice", 0),
        ):
            error = await refusal_of(asked)
            assert (error.status, error.code, error.retryable) == (429, "insufficient_quota", False)
            assert "2000 bytes ('batches.bytes_per_key'): delete" in error.message
        assert here.kept("requests") == []
        await here.batches.check_room("bob", 2 * KB)
        await messages(here, 1, owner="bob")


async def test_batches_of_a_full_key_pause_and_lose_nothing_until_there_is_room(
    store_url: str, tmp_path: Path
) -> None:
    bounds: dict[str, Any] = {"file_bytes": 9 * KB, "bytes_per_key": 10 * KB}
    async with batch_place(store_url, tmp_path / "kept", **bounds) as here:
        batch = await here.create([line(f"c{n}") for n in range(4)])
        room = await here.upload(b"x" * 6 * KB, purpose="user_data")
        await here.settle()
        # Its results bring the key to its bound; those that ran meanwhile are recorded.
        task = asyncio.create_task(here.results.run())
        for row in await here.claim(3):
            content = b'"%b"' % (b"x" * 2 * KB)
            done = answer(row, here.process.id, content=content)
            assert await here.results.add(row, done)
            await here.batches.upkeep.round()
        task.cancel()
        paused = await here.find(batch)
        assert (paused.pause_reason, paused.completed) == ("key_storage_full", 3)
        assert here.batches.upkeep.full_owners == {"alice"}
        assert await kept(here) > 10 * KB
        other = await here.create([line("a")], owner="bob")
        await here.settle()
        assert (await here.find(other)).paused_at is None
        assert await here.answer(9) == 1  # bob's
        # By hand it goes on for a moment only.
        await here.batches.resume("alice", batch.id, "openai")
        await here.batches.upkeep.round()
        assert (await here.find(batch)).pause_reason == "key_storage_full"
        await here.files.delete("alice", room)
        await here.batches.upkeep.round()
        assert (await here.find(batch)).paused_at is None
        assert here.batches.upkeep.full_owners == frozenset()
        assert await here.answer(9) == 1
        await here.settle()
        assert [one["custom_id"] for one in await here.output(batch)] == ["c0", "c1", "c2", "c3"]


def a_request(number: int, length: int = 10) -> StoredRow:
    return StoredRow(
        RequestKind.RESPONSE, "alice", "/v1/responses", "normal", id=f"resp_{number:032x}",
        place=f"request-{number:032x}", offset=0, length=length, created_at=float(number),
        keep_until=10**10, folder="folder", deadline=10**9,
        result_place=f"events-{number:032x}", result_offset=0, result_length=90,
    )  # fmt: skip


def test_requests_in_the_background_count_with_their_logs(store_url: str) -> None:
    with opened(store_url) as store:

        def bytes_of(owner: str = "alice") -> int:
            return store.run_now(partial(kept_by, owner=owner, now=1.0)).bytes

        most = limits(bytes_per_key=200)
        for _ in range(2):  # Done again it counts once.
            store.run_now(job(add_background, a_request(1), most))
        with pytest.raises(GatewayError, match="keeps 100 bytes"):
            store.run_now(job(add_background, a_request(2, 11), most))
        store.run_now(job(add_background, a_request(2), most))
        assert (bytes_of(), bytes_of("bob")) == (200, 0)
        sizes = {a_request(1).id: 500, "resp_unknown": 9}
        store.run_now(partial(note_log_sizes, sizes=sizes, running=True))
        assert bytes_of() == 200  # It does not run.
        store.run_now(partial(note_log_sizes, sizes=sizes))
        assert bytes_of() == 610
        full = partial(full_owners, owners=["alice", "bob"], now=1.0)
        assert store.run_now(partial(full, most_bytes=610)) == {"alice"}
        assert store.run_now(partial(full, most_bytes=611)) == set()
        delete = partial(delete_background, owner="alice", kind=RequestKind.RESPONSE, now=1.0)
        store.run_now(partial(delete, id_=a_request(1).id))
        assert bytes_of() == 100


async def test_two_processes_together_keep_no_more_than_one_may(
    store_url: str, tmp_path: Path
) -> None:
    bounds: dict[str, Any] = {"file_bytes": KB, "bytes_per_key": KB}
    async with (
        batch_place(store_url, tmp_path / "one", **bounds) as one,
        batch_place(store_url, tmp_path / "two", **bounds) as two,
    ):
        places = (one, two)
        uploads = [here.upload(b"x" * 100) for _ in range(8) for here in places]
        requests = [
            places[n % 2].store.run(job(add_background, a_request(n), limits(bytes_per_key=KB)))
            for n in range(8)
        ]  # fmt: skip
        ended = await asyncio.gather(*uploads, *requests, return_exceptions=True)
        made = sum(isinstance(one, str) or one is None for one in ended)
        assert made == 10
        assert await kept(one) == await kept(two) == KB
        kept_files = await one.store.run(count(files))
        assert kept_files == len(one.kept("file")) + len(two.kept("file"))
