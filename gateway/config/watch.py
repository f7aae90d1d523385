"""Watches files for changes, however they are replaced: by a write, a rename or a switched link.

Files are polled, since certbot and Kubernetes replace links, and network file systems send no
events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from pathlib import Path

# Seconds between two looks at the files. A change is reported when two looks agree on it.
POLL_SECONDS = 0.5

# Device, inode, size and times of a file; None where there is no file.
FileStamp = tuple[int, ...] | None


async def changed_files(
    paths: Callable[[], Collection[Path]],
    *,
    since: Mapping[Path, FileStamp] | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> AsyncIterator[set[Path]]:
    """Yield files that have been changed or replaced, once a change has settled.

    A file that vanishes is a change, and so is one that appears. `paths` may name other files at
    each look; one that was not named before is not a change. `since`: what changes are counted
    from; by default the look at the first step of the iteration.
    """
    before = await asyncio.to_thread(file_stamps, paths())
    reported: Mapping[Path, FileStamp] = before if since is None else since
    while True:
        await asyncio.sleep(poll_seconds)
        seen = await asyncio.to_thread(file_stamps, paths())
        settled = {path for path, stamp in seen.items() if before.get(path, stamp) == stamp}
        changed = {path for path in settled if reported.get(path, seen[path]) != seen[path]}
        reported = {
            path: stamp if path in settled else reported.get(path, stamp)
            for path, stamp in seen.items()
        }
        before = seen
        if changed:
            yield changed


def file_stamps(files: Iterable[Path]) -> dict[Path, FileStamp]:
    """What tells one state of each file from another; None for a file that is not there."""
    return {path: _stamp(path) for path in files}


def _stamp(path: Path) -> FileStamp:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
