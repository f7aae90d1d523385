# ruff: noqa: ASYNC240 - small files on a local disk

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.config.watch import watch_files

LIMIT = 60.0  # seconds
NEVER = 600.0  # a test that passes with this poll interval was woken by the system's events
POLL = 0.5

pytestmark = pytest.mark.slow


class Watch:
    """Collects the reports of `watch_files`, but for those of its marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker
        self.established = asyncio.Event()
        """Set when a change of the marker was reported: from then on every event is."""
        self.seen: asyncio.Queue[set[Path]] = asyncio.Queue()

    async def run(self, reports: AsyncIterator[set[Path]]) -> None:
        async for changed in reports:
            if self.marker in changed:
                self.established.set()
            if others := changed - {self.marker}:
                self.seen.put_nowait(others)

    async def until_established(self) -> None:
        """Touch the marker until its change is reported."""
        async with asyncio.timeout(LIMIT):
            while not self.established.is_set():
                self.marker.touch()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.established.wait(), 0.5)

    async def next(self) -> set[Path]:
        return await asyncio.wait_for(self.seen.get(), LIMIT)


@asynccontextmanager
async def watching(*paths: Path, poll: float = POLL) -> AsyncIterator[Watch]:
    watch = Watch(paths[0].with_name("marker"))
    files = (*paths, watch.marker)
    task = asyncio.create_task(watch.run(watch_files(files, poll_interval=poll)))
    try:
        await watch.until_established()
        yield watch
        assert not task.done()
    finally:
        task.cancel()
        async with asyncio.timeout(LIMIT):
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.yaml"
    path.write_text("nodes: []\n")
    return path


@pytest.mark.smoke
async def test_a_rename_over_the_file_is_seen(file: Path) -> None:
    async with watching(file, poll=NEVER) as watch:
        for round_ in range(2):
            new = file.with_suffix(".tmp")
            new.write_text(f"nodes: [{round_}]\n")
            new.replace(file)
            assert await watch.next() == {file}


async def test_a_deleted_file_is_a_change_and_so_is_its_return(file: Path) -> None:
    async with watching(file, poll=NEVER) as watch:
        file.unlink()
        assert await watch.next() == {file}
        file.write_text("nodes: []\n")
        assert await watch.next() == {file}


async def test_a_switched_link_is_seen(tmp_path: Path) -> None:
    # As Kubernetes mounts a ConfigMap: nodes.yaml -> ..data/nodes.yaml, ..data -> ..one
    for version in ("..one", "..two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "nodes.yaml").write_text(version)
    (tmp_path / "..data").symlink_to("..one")
    file = tmp_path / "nodes.yaml"
    file.symlink_to("..data/nodes.yaml")
    async with watching(file) as watch:
        (tmp_path / "..tmp").symlink_to("..two")
        (tmp_path / "..tmp").replace(tmp_path / "..data")
        assert await watch.next() == {file}
        shutil.rmtree(tmp_path / "..one")
        (tmp_path / "..two" / "nodes.yaml").write_text("again")
        assert await watch.next() == {file}


async def test_a_folder_that_vanishes_and_comes_back_is_watched_again(tmp_path: Path) -> None:
    folder = tmp_path / "config"
    folder.mkdir()
    file = folder / "nodes.yaml"
    file.write_text("nodes: []\n")
    async with watching(file) as watch:
        shutil.rmtree(folder)
        assert await watch.next() == {file}
        folder.mkdir()
        file.write_text("nodes: [1]\n")
        assert await watch.next() == {file}
        file.write_text("nodes: [1, 2]\n")
        assert await watch.next() == {file}


async def test_only_the_files_that_changed_are_named(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "gateway.yaml"
    other.write_text("queue:\n")
    async with watching(file, other) as watch:
        (tmp_path / "neighbour").write_text("x")
        other.write_text("queue: {max: 3}\n")
        assert await watch.next() == {other}


async def test_many_writes_in_a_row_are_few_changes(file: Path) -> None:
    async with watching(file) as watch:
        pauses, wrote = 0, time.monotonic()
        for part in range(120):
            with file.open("a") as growing:
                growing.write(f"# {part}\n")
            await asyncio.sleep(0.01)
            # A busy machine may make several changes of them.
            pauses += time.monotonic() - wrote > 0.05
            wrote = time.monotonic()
        assert await watch.next() == {file}
        assert watch.seen.qsize() <= 3 + pauses


async def test_a_file_that_is_created_later_is_seen(file: Path) -> None:
    later = file.parent / "later" / "gateway.yaml"
    async with watching(file, later) as watch:
        later.parent.mkdir()
        later.write_text("queue:\n")
        assert await watch.next() == {later}


async def test_a_change_before_the_iteration_is_not_missed(file: Path) -> None:
    reports = watch_files([file], poll_interval=0.5)
    file.write_text("nodes: [1]\n")
    async with asyncio.timeout(LIMIT), contextlib.aclosing(reports):
        assert await anext(reports) == {file}


async def test_a_link_to_itself_is_survived(file: Path) -> None:
    loop = file.parent / "loop.yaml"
    loop.symlink_to("loop.yaml")
    async with watching(file, loop) as watch:
        loop.unlink()
        loop.write_text("x")
        assert await watch.next() == {loop}
