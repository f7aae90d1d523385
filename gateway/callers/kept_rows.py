"""Rows of the ledger on this machine's disk, while the store is away.

Each process appends to a file of its own, which it locks until it ends, however it ends. When the
store has all rows that it has in memory as well, it removes the file. What nobody locks was left,
mostly by a process that has ended: another one books its rows, of which the ledger skips those that
it has. A line that was not written whole is skipped.

A row is two lines: the first `COLUMNS_BEFORE` columns, which is all that the version before reads
and writes, and those that came with the store's sixth level.

All methods but the properties block: not for event loops.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import structlog

MOST_BYTES = 256 << 20  # of one file: about 650,000 rows
LARGEST_ROW = 64 << 10  # bytes of one line; a longer one is none of ours
COLUMNS_BEFORE = 22  # of a row, until the store's level 5
_SUFFIX = ".rows"
log = structlog.get_logger()


class KeptRows:
    """The files of rows in `folder`, of which one is that of the process `own`."""

    def __init__(self, folder: Path, own: str, *, most_bytes: int = MOST_BYTES) -> None:
        self._path = folder / f"{own}{_SUFFIX}"
        self._most_bytes = most_bytes
        self._file: BinaryIO | None = None
        self._size = 0

    @property
    def is_empty(self) -> bool:
        """Whether this process keeps no rows here."""
        return self._file is None

    def keep(self, rows: Sequence[Sequence[Any]]) -> None:
        """Append rows, and bring them to the disk. Raises: OSError; then none of them is kept."""
        if self._file is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self._path, flags, 0o600), "ab", buffering=0)
            self._size = 0
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        parts = [part for row in rows for part in (row[:COLUMNS_BEFORE], row[COLUMNS_BEFORE:])]
        lines = msgspec.json.Encoder().encode_lines(parts)
        if self._size + len(lines) > self._most_bytes:
            raise OSError(f"{self._path} has {self._most_bytes >> 20} MiB of rows already")
        left = memoryview(lines)
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size += len(lines)

    def clear(self) -> None:
        """The store has all rows that this process keeps. Raises: OSError."""
        self._path.unlink(missing_ok=True)
        self.close()

    def set_aside(self) -> None:
        """Let the rows of this process be among those that are `left`. Raises: OSError."""
        self._path.rename(self._path.with_name(f"{time.monotonic_ns()}-{self._path.name}"))
        self.close()

    def close(self) -> None:
        """Leave the rows of this process, if it keeps any, to the next one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def left(self) -> list[Path]:
        """The files of processes that have ended. Raises: OSError."""
        try:
            found = sorted(self._path.parent.glob(f"*{_SUFFIX}"))
        except FileNotFoundError:
            return []
        return [path for path in found if path != self._path and _is_left(path)]


def read_rows(path: Path, columns: int, most: int) -> Iterator[list[tuple[Any, ...]]]:
    """The rows of a file, with so many columns, so many at a time. Raises: OSError."""
    rows, damaged = list[tuple[Any, ...]](), 0
    unknown = (None,) * (columns - COLUMNS_BEFORE)
    goes_on = False  # whether the last line was the first one of a row
    with path.open("rb") as file:
        while line := file.readline(LARGEST_ROW):
            try:
                row = _ROW.decode(line)
            except (msgspec.DecodeError, ValueError):
                row = ()
            if goes_on and len(row) == len(unknown):
                rows[-1] = (*rows[-1][:COLUMNS_BEFORE], *row)
                goes_on = False
                continue
            goes_on = len(row) == COLUMNS_BEFORE
            if not goes_on:
                damaged += 1
                continue
            if len(rows) == most:
                yield rows
                rows = []
            rows.append((*row, *unknown))
    if rows:
        yield rows
    if damaged:
        log.warning("ledger: lines of a file can't be read", path=str(path), lines=damaged)


def _is_left(path: Path) -> bool:
    """Whether the process that wrote the file has ended."""
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


_ROW = msgspec.json.Decoder(tuple[Any, ...])
