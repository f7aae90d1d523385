"""The registry of files over real stores of both kinds and a real folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, insert, select

from gateway.batches.files import ORPHAN_SECONDS, FileRegistry
from gateway.batches.folder import ID_FILE, Folder
from gateway.config.batches import BatchSettings
from gateway.errors import GatewayError
from gateway.store.database import locate_store
from gateway.store.schema import batches, files
from gateway.store.store import Store
from tests.store.stores import LIMIT

DAY = 86400.0


@dataclass
class Place:
    """A registry, its folder and its store, with a clock of its own."""

    registry: FileRegistry
    folder: Folder
    store: Store
    settings: BatchSettings
    time: list[float] = field(default_factory=lambda: [1_800_000_000.0])

    def pass_(self, seconds: float) -> None:
        self.time[0] += seconds

    async def add(self, owner: str = "alice", content: bytes = b"x", **more: Any) -> str:
        async with self.registry.uploading(owner, None) as upload:
            await self.registry.on_disk(upload.write, content)
            given = {"name": "a", "purpose": "batch", "seconds": None, **more}
            return (await self.registry.keep(upload, **given)).id

    async def rows(self) -> int:
        return await self.store.run(
            lambda c: c.scalar(select(func.count()).select_from(files)) or 0
        )

    def kept(self) -> list[str]:
        return sorted(p.name for p in self.folder.location.iterdir() if p.name != ID_FILE)

    async def ids(self, owner: str = "alice") -> list[str]:
        return [file.id for file in (await self.registry.page(owner, 100)).files]


@asynccontextmanager
async def place(url: str, path: Path, **settings: Any) -> AsyncIterator[Place]:
    chosen, time = BatchSettings(**settings), [1_800_000_000.0]
    store = Store(locate_store(url, path))
    store.start()
    try:
        assert await store.wait_opened(LIMIT)
        folder = Folder(path, most_bytes=lambda: chosen.folder_bytes, now=lambda: time[0])
        registry = FileRegistry(store, folder, lambda: chosen, lambda: time[0])
        yield Place(registry, folder, store, chosen, time)
        registry.close()
    finally:
        await store.aclose(LIMIT)


async def refused(asked: Any) -> tuple[int, str]:
    with pytest.raises(GatewayError) as error:
        await asked
    return error.value.status, error.value.code


async def test_an_expired_file_is_gone_at_once_and_its_bytes_soon(
    store_url: str, tmp_path: Path
) -> None:
    async with place(store_url, tmp_path / "kept", keep=10 * DAY) as here:
        long, short = await here.add(), await here.add(seconds=3600)
        here.pass_(3600)
        assert await here.ids() == [long]
        assert await refused(here.registry.find("alice", short)) == (404, "file_not_found")
        assert await refused(here.registry.open_content("alice", short)) == (404, "file_not_found")
        assert len(here.kept()) == 2
        assert await here.registry.clean() == 1
        assert (here.kept(), await here.rows()) == ([long], 1)
        here.pass_(10 * DAY)
        assert await here.registry.clean() == 1
        assert (here.kept(), await here.rows()) == ([], 0)


def a_batch(file: str, *, ended_at: float | None) -> Any:
    def job(connection: Connection) -> None:
        connection.execute(
            insert(batches).values(
                id=f"batch-of-{file}", owner="alice", api="openai", endpoint="/v1/embeddings",
                input_file=file, created_at=1.0, expires_at=2.0, ended_at=ended_at, state="s",
                keep_until=3.0, class_="batch", folder="f",
            )
        )  # fmt: skip

    return job


async def test_a_file_that_a_batch_reads_stays(store_url: str, tmp_path: Path) -> None:
    async with place(store_url, tmp_path / "kept") as here:
        read, done = await here.add(), await here.add()
        await here.store.run(a_batch(read, ended_at=None))
        await here.store.run(a_batch(done, ended_at=5.0))
        assert await refused(here.registry.delete("alice", read)) == (409, "file_in_use")
        await here.registry.delete("alice", done)
        here.pass_(100 * DAY)
        assert await here.registry.clean() == 0
        assert here.kept() == [read]


async def test_a_deletion_that_was_cut_short_is_finished_later(
    store_url: str, tmp_path: Path
) -> None:
    async with place(store_url, tmp_path / "kept") as here:
        id_ = await here.add()
        here.folder.location.rename(tmp_path / "away")
        await here.registry.delete("alice", id_)
        assert await here.ids() == []
        assert await refused(here.registry.delete("alice", id_)) == (404, "file_not_found")
        (tmp_path / "away").rename(here.folder.location)
        assert (here.kept(), await here.rows()) == ([id_], 1)
        assert await here.registry.clean() == 1
        assert (here.kept(), await here.rows()) == ([], 0)


async def test_a_complete_file_without_a_row_is_removed_when_it_is_old(
    store_url: str, tmp_path: Path
) -> None:
    async with place(store_url, tmp_path / "kept") as here:
        id_ = await here.add()
        new = here.folder.open_new("file")
        spool = here.folder.open_new("spool")
        new.finish()
        spool.finish()
        for path in here.folder.location.iterdir():
            os.utime(path, (here.time[0], here.time[0]))
        here.pass_(ORPHAN_SECONDS)
        assert await here.registry.clean() == 0
        here.pass_(1)
        assert await here.registry.clean(orphans=False) == 0
        assert await here.registry.clean() == 1
        assert here.kept() == sorted([id_, spool.name])


async def test_a_file_of_another_host_is_listed_and_not_read(
    store_url: str, tmp_path: Path
) -> None:
    async with (
        place(store_url, tmp_path / "one") as one,
        place(store_url, tmp_path / "two") as two,
    ):
        id_ = await one.add()
        assert await two.ids() == [id_]
        assert await refused(two.registry.open_content("alice", id_)) == (503, "file_elsewhere")
        # Deleted here, removed there.
        await two.registry.delete("alice", id_)
        assert await two.registry.clean() == 0
        assert one.kept() == [id_]
        assert await one.registry.clean() == 1
        assert one.kept() == []


async def test_the_limit_of_files_holds_for_uploads_that_end_together(
    store_url: str, tmp_path: Path
) -> None:
    async with place(store_url, tmp_path / "kept", files_per_key=3) as here:
        ended = await asyncio.gather(*(here.add() for _ in range(8)), return_exceptions=True)
        made = sorted(one for one in ended if isinstance(one, str))
        wrong = [one for one in ended if not isinstance(one, str)]
        assert len(made) == 3
        assert {(e.status, e.code) for e in wrong if isinstance(e, GatewayError)} == {
            (429, "insufficient_quota")
        }
        assert (here.kept(), await here.rows()) == (made, 3)


async def test_the_limit_holds_for_two_gateways_of_one_store(
    store_url: str, tmp_path: Path
) -> None:
    async with (
        place(store_url, tmp_path / "one", files_per_key=4) as one,
        place(store_url, tmp_path / "two", files_per_key=4) as two,
    ):
        adding = [here.add() for _ in range(6) for here in (one, two)]
        ended = await asyncio.gather(*adding, return_exceptions=True)
        assert len([made for made in ended if isinstance(made, str)]) == 4
        assert len(one.kept()) + len(two.kept()) == await one.rows() == 4


async def test_an_upload_that_fails_leaves_nothing(store_url: str, tmp_path: Path) -> None:
    async with place(store_url, tmp_path / "kept", file_bytes=10) as here:

        async def fail() -> None:
            async with here.registry.uploading("alice", 5) as upload:
                await here.registry.on_disk(upload.write, b"12345")
                raise RuntimeError

        with pytest.raises(RuntimeError):
            await fail()
        assert await refused(here.add(content=b"12345678901")) == (413, "request_too_large")
        assert (here.kept(), await here.rows()) == ([], 0)


async def test_an_upload_that_is_cancelled_leaves_nothing(store_url: str, tmp_path: Path) -> None:
    async with place(store_url, tmp_path / "kept") as here:
        begun = asyncio.Event()

        async def send() -> None:
            async with here.registry.uploading("alice", None) as upload:
                begun.set()
                while True:
                    await here.registry.on_disk(upload.write, bytes(1 << 16))

        sending = asyncio.create_task(send())
        await begun.wait()
        assert len(here.kept()) == 1
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled()
        assert here.kept() == []


async def test_a_store_that_is_away_is_told_and_nothing_is_lost(
    store_url: str, tmp_path: Path
) -> None:
    async with place(store_url, tmp_path / "kept") as here:
        id_ = await here.add()
        async with here.registry.uploading("alice", None) as upload:
            await here.registry.on_disk(upload.write, b"text")
            await here.store.aclose(LIMIT)
            keeping = here.registry.keep(upload, name="a", purpose="batch", seconds=None)
            assert await refused(keeping) == (503, "store_unavailable")
            # Whether it has a row can't be told, so the file stays until that is known.
            assert len(here.kept()) == 2
        assert await refused(here.registry.find("alice", id_)) == (503, "store_unavailable")
        assert await refused(here.add()) == (503, "store_unavailable")


async def test_the_row_says_what_came(store_url: str, tmp_path: Path) -> None:
    async with place(store_url, tmp_path / "kept") as here:
        id_ = await here.add(content=b"abc", name="ä.jsonl", purpose="user_data")
        found = await here.registry.find("alice", id_)
        assert (found.name, found.purpose, found.bytes) == ("ä.jsonl", "user_data", 3)
        assert found.sha256.startswith("ba7816bf")
        assert found.folder == here.folder.id
        content = await here.registry.open_content("alice", id_)
        assert b"".join([piece async for piece in content.pieces()]) == b"abc"
        await content.close()
        plan = await here.store.run(partial(_plan_of_a_page, url=store_url))
        assert "ix_files_owner_id" in plan or "postgresql" in store_url


def _plan_of_a_page(connection: Connection, url: str) -> str:
    if "postgresql" in url:
        return ""
    asked = "EXPLAIN QUERY PLAN SELECT * FROM files WHERE owner = 'a' AND id < 'b' ORDER BY id DESC"
    return str(connection.exec_driver_sql(asked).all())
