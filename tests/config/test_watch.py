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

from gateway.config.watch import POLL_SECONDS, changed_files, file_stamps
from tests.virtual import in_virtual_time


@asynccontextmanager
async def watching(*paths: Path) -> AsyncIterator[asyncio.Queue[set[Path]]]:
    """The changes of these files from here on, as they are reported."""
    seen: asyncio.Queue[set[Path]] = asyncio.Queue()
    before = file_stamps(paths)

    async def watch() -> None:
        async for changed in changed_files(lambda: paths, since=before):
            seen.put_nowait(changed)

    task = asyncio.create_task(watch())
    try:
        yield seen
        assert not task.done()
        assert seen.empty()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.yaml"
    path.write_text("nodes: []\n")
    return path


@pytest.mark.smoke
@in_virtual_time
async def test_a_rename_over_the_file_is_seen_and_only_files_that_changed_are_named(
    file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "gateway.yaml"
    other.write_text("queue:\n")
    async with watching(file, other) as seen:
        (tmp_path / "neighbour").write_text("x")
        for round_ in range(2):
            new = file.with_suffix(".tmp")
            new.write_text(f"nodes: [{round_}]\n")
            new.replace(file)
            assert await seen.get() == {file}


@in_virtual_time
async def test_a_switched_link_is_seen(tmp_path: Path) -> None:
    # As Kubernetes mounts a ConfigMap: nodes.yaml -> ..data/nodes.yaml, ..data -> ..one
    for version in ("..one", "..two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "nodes.yaml").write_text(version)
    (tmp_path / "..data").symlink_to("..one")
    file = tmp_path / "nodes.yaml"
    file.symlink_to("..data/nodes.yaml")
    async with watching(file) as seen:
        (tmp_path / "..tmp").symlink_to("..two")
        (tmp_path / "..tmp").replace(tmp_path / "..data")
        assert await seen.get() == {file}
        shutil.rmtree(tmp_path / "..one")
        (tmp_path / "..two" / "nodes.yaml").write_text("again")
        assert await seen.get() == {file}


@in_virtual_time
async def test_a_folder_that_comes_later_or_vanishes_and_comes_back_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "config" / "nodes.yaml"
    async with watching(file) as seen:
        for text in ("nodes: []\n", "nodes: [1]\n"):
            file.parent.mkdir()
            file.write_text(text)
            assert await seen.get() == {file}
            shutil.rmtree(file.parent)
            assert await seen.get() == {file}


@in_virtual_time
async def test_a_file_that_keeps_changing_is_reported_once_it_rests(file: Path) -> None:
    async with watching(file) as seen:
        for number in range(20):
            await asyncio.sleep(0.6 * POLL_SECONDS)
            file.write_text("x" * number)
            time.sleep(0.002)  # noqa: ASYNC251 - the file system's clock, which is not virtual
        assert await seen.get() == {file}


@in_virtual_time
async def test_a_change_between_the_stamps_and_the_iteration_is_not_missed(file: Path) -> None:
    before = file_stamps([file])
    file.write_text("nodes: [1]\n")
    async for changed in changed_files(lambda: [file], since=before):
        assert changed == {file}
        break
