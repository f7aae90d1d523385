"""A server's log file: bounded, and read from its end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

LOG_BYTES = 8 << 20  # of one file; one older file of this size is kept beside it
TAIL_BYTES = 64 << 10


def open_log(path: Path) -> BinaryIO:
    """Begin a new log; the one of the run before stays as `<name>.1`.

    It is opened for appending, so that it can be cut short while a server writes to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(_older(path))
    return path.open("ab", buffering=0)


def bound_log(path: Path, limit: int = LOG_BYTES) -> bool:
    """Move what a log holds to `<name>.1` once it has grown past `limit` bytes.

    Lines written during the copy are lost. True when it was done.
    """
    if not path.exists() or path.stat().st_size <= limit:
        return False
    shutil.copyfile(path, _older(path))
    os.truncate(path, 0)
    return True


def last_lines(path: Path, count: int = 20) -> list[str]:
    """The last lines of a log, decoded as well as can be; none where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
