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

# Seconds; a poll of ten minutes in a test proves that the system told.
LIMIT = 60.0
NEVER = 600.0
POLL = 0.5

pytestmark = pytest.mark.slow


class Watch:
    """Collects what a watch reports of all files but its marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker
        self.stop = asyncio.Event()
        self.stands = asyncio.Event()
        """Set when the marker was told of: from then on the system tells of everything."""
        self.seen: asyncio.Queue[set[Path]] = asyncio.Queue()

    async def run(self, reports: AsyncIterator[set[Path]]) -> None:
        async for changed in reports:
            if self.marker in changed:
                self.stands.set()
            if others := changed - {self.marker}:
                self.seen.put_nowait(others)

    async def until_it_stands(self) -> None:
        """Touch the marker until the system tells of it."""
        async with asyncio.timeout(LIMIT):
            while not self.stands.is_set():
                self.marker.touch()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stands.wait(), 0.5)

    async def next(self) -> set[Path]:
        return await asyncio.wait_for(self.seen.get(), LIMIT)


@asynccontextmanager
async def watching(*paths: Path, poll: float = POLL) -> AsyncIterator[Watch]:
    watch = Watch(paths[0].with_name("marker"))
    files = (*paths, watch.marker)
    task = asyncio.create_task(watch.run(watch_files(files, stop=watch.stop, poll_interval=poll)))
    try:
        await watch.until_it_stands()
        yield watch
        assert watch.stop.is_set() or not task.done()
    finally:
        watch.stop.set()
        await asyncio.wait_for(task, LIMIT)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.yaml"
    path.write_text("nodes: []\n")
    return path


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


async def test_a_file_that_is_not_there_yet_is_seen_when_it_comes(file: Path) -> None:
    later = file.parent / "later" / "gateway.yaml"
    async with watching(file, later) as watch:
        later.parent.mkdir()
        later.write_text("queue:\n")
        assert await watch.next() == {later}


async def test_a_change_before_the_first_look_is_not_lost(file: Path) -> None:
    reports = watch_files([file], poll_interval=0.5)
    file.write_text("nodes: [1]\n")
    async with asyncio.timeout(LIMIT), contextlib.aclosing(reports):
        assert await anext(reports) == {file}


async def test_cancelling_ends_it_and_leaves_the_stop_event_alone(file: Path) -> None:
    watch = Watch(file)
    task = asyncio.create_task(watch.run(watch_files([file], stop=watch.stop, poll_interval=NEVER)))
    await watch.until_it_stands()
    task.cancel()
    async with asyncio.timeout(LIMIT):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not watch.stop.is_set()


async def test_a_link_to_itself_is_survived(file: Path) -> None:
    loop = file.parent / "loop.yaml"
    loop.symlink_to("loop.yaml")
    async with watching(file, loop) as watch:
        loop.unlink()
        loop.write_text("x")
        assert await watch.next() == {loop}
