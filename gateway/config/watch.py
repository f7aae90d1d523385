"""Tells when configuration files change, however they are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path

from watchfiles import awatch

# Parts of a change that follow each other faster than this are one change (seconds).
_SETTLE = 0.1

# A file that never rests is reported after this many settling times all the same.
_ROUNDS = 20

# What tells one content of a file from another; None where there is no file.
_Print = tuple[int, ...] | None


def watch_files(
    paths: Iterable[Path], *, stop: asyncio.Event | None = None, poll_interval: float = 2.0
) -> AsyncGenerator[set[Path], None]:
    """Yield the paths whose content changed since this call, once a change has settled.

    So call it before the files are read, and iterate afterwards: no change falls in between.

    Folders are watched, not files, so that a file replaced by rename (editors, Ansible) or by a
    switched link (Kubernetes) is seen; a file that vanishes is a change too, and so is one that
    comes back. Every `poll` seconds the files are looked at anyway: that finds what the system
    didn't tell, as on a network file system or after a folder was replaced. Ends when `stop` is
    set; cancelling the task that iterates ends it as well.
    """
    files = tuple(paths)
    return _changes(files, _prints(files), _Either(stop or asyncio.Event()), poll_interval)


async def _changes(
    files: Iterable[Path], known: Mapping[Path, _Print], ended: asyncio.Event, poll: float
) -> AsyncGenerator[set[Path], None]:
    while not ended.is_set():
        folders = await asyncio.to_thread(_folders, files)
        async with aclosing(_wakes(folders, ended, poll)) as wakes:
            async for _ in wakes:
                seen = await _settled(files, known)
                changed = {path for path in files if seen[path] != known[path]}
                known = seen
                if changed:
                    yield changed
                if await asyncio.to_thread(_folders, files) != folders:
                    break


class _Either(asyncio.Event):
    """An event that also counts as set when another is; setting it leaves the other alone."""

    def __init__(self, other: asyncio.Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or self._other.is_set()


async def _wakes(
    folders: Iterable[Path], ended: asyncio.Event, poll: float
) -> AsyncGenerator[None, None]:
    """Yield whenever something happens in the folders, and every `poll` seconds."""
    try:
        watched = awatch(
            *folders,
            watch_filter=None,
            debounce=200,
            step=100,
            rust_timeout=int(poll * 1000),
            yield_on_timeout=True,
            stop_event=ended,
            recursive=False,
            ignore_permission_denied=True,
        )
        async with aclosing(watched) as events:
            async for _ in events:
                yield
    except OSError:
        # A folder vanished in between, or the system has no watches left: looking must do.
        await asyncio.sleep(poll)
        yield


async def _settled(files: Iterable[Path], known: Mapping[Path, _Print]) -> dict[Path, _Print]:
    """Look at the files until they rest; at once where nothing has changed."""
    seen = await asyncio.to_thread(_prints, files)
    for _ in range(_ROUNDS):
        if seen == known:
            break
        await asyncio.sleep(_SETTLE)
        before, seen = seen, await asyncio.to_thread(_prints, files)
        if seen == before:
            break
    return seen


def _prints(files: Iterable[Path]) -> dict[Path, _Print]:
    return {path: _print(path) for path in files}


def _print(path: Path) -> _Print:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _folders(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Find the folders to watch: of each file, and of what it is a link to."""
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
    except (OSError, RuntimeError):  # a link that leads to itself
        return path.absolute()
