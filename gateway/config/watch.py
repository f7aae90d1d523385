"""Watches configuration files for changes, however they are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path

import anyio._backends._asyncio  # noqa: F401 - watchfiles would on the event loop: 13 ms
from watchfiles import awatch

# Writes that follow each other faster than this are one change (seconds).
SETTLE_TIME = 0.1

# A file that changes all the time is reported after this many settle times.
MOST_SETTLE_TIMES = 20

# Device, inode, size and times of a file; None where there is no file.
FileStamp = tuple[int, ...] | None


def watch_files(
    paths: Iterable[Path], *, poll_interval: float = 2.0
) -> AsyncGenerator[set[Path], None]:
    """Yield the paths whose files changed since this call, once a change has settled.

    Call it before reading the files and iterate afterwards, so that no change is missed.

    Folders are watched, not files: so a file replaced by a rename (editors, Ansible) or a switched
    link (Kubernetes) is seen. A file that vanishes is a change, and so is one that appears. Every
    `poll_interval` seconds the files are looked at anyway, because a network file system, or a
    folder that was replaced, sends no events. It ends when the task that iterates is cancelled.
    """
    files = tuple(paths)
    return _changes(files, file_stamps(files), poll_interval)


async def _changes(
    files: Iterable[Path], known: Mapping[Path, FileStamp], poll_interval: float
) -> AsyncGenerator[set[Path], None]:
    while True:
        folders = await asyncio.to_thread(_folders, files)
        async with aclosing(_folder_events(folders, poll_interval)) as events:
            async for _ in events:
                seen = await _settled(files, known)
                changed = {path for path in files if seen[path] != known[path]}
                known = seen
                if changed:
                    yield changed
                if await asyncio.to_thread(_folders, files) != folders:
                    break


async def _folder_events(
    folders: Iterable[Path], poll_interval: float
) -> AsyncGenerator[None, None]:
    """Yield whenever something happens in the folders, and every `poll_interval` seconds."""
    try:
        watched = awatch(
            *folders,
            watch_filter=None,
            debounce=200,
            step=100,
            rust_timeout=int(poll_interval * 1000),
            yield_on_timeout=True,
            recursive=False,
            ignore_permission_denied=True,
        )
        async with aclosing(watched) as events:
            async for _ in events:
                yield
    except OSError:
        # A folder has just vanished, or the system has no inotify watches left: poll.
        await asyncio.sleep(poll_interval)
        yield


async def _settled(files: Iterable[Path], known: Mapping[Path, FileStamp]) -> dict[Path, FileStamp]:
    """Look at the files until they stop changing; once where nothing has changed."""
    seen = await asyncio.to_thread(file_stamps, files)
    for _ in range(MOST_SETTLE_TIMES):
        if seen == known:
            break
        await asyncio.sleep(SETTLE_TIME)
        before, seen = seen, await asyncio.to_thread(file_stamps, files)
        if seen == before:
            break
    return seen


def file_stamps(files: Iterable[Path]) -> dict[Path, FileStamp]:
    """What tells one state of each file from another; None for a file that is not there."""
    return {path: _stamp(path) for path in files}


def _stamp(path: Path) -> FileStamp:
    """Device, inode, size and times of the file that a link leads to."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _folders(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Find the folders to watch: those of the files, and of the targets of links."""
    found: dict[Path, tuple[int, int]] = {}
    for path in files:
        for folder in (path.absolute().parent, _target(path).parent):
            try:
                stat = folder.stat()
            except OSError:
                continue
            found[folder] = stat.st_dev, stat.st_ino
    return found


def _target(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a link to itself
        return path.absolute()
