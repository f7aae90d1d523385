"""The file of an event log: whole server-sent events, numbered from 0 without gaps.

It has its name from the start and only grows. What a crash left of an event that was being written
is found by `scan`, and dropped by the next `write`. Everything here blocks: call it on a thread.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec

from gateway.batches.folder import Folder, FolderError
from gateway.proxy.json_values import JsonObject

KIND = "events"
"""What the names of these files begin with."""

INDEX_BYTES = 64 * 1024
"""Bytes between two entries of an index."""

PIECE_BYTES = 256 * 1024
"""Bytes that are read at once."""

TERMINAL_TYPES = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Types of the events that end a log; each has one of them at most, its last."""

_HEAD = re.compile(
    rb'(?::[^\n]*\n)*event: ([a-z_.]+)\ndata: \{"type":"[a-z_.]+","sequence_number":(\d+)[,}]'
)
"""The beginning of each event."""

_NUMBERS = re.compile(
    rb"(?:\A|(?<=\n\n))(?::[^\n]*\n)*event: [a-z_.]+\n"
    rb'data: \{"type":"[a-z_.]+","sequence_number":(\d+)[,}]'
)
"""The numbers of all events that begin as they should."""


class LogFull(Exception):  # noqa: N818 - said of the log
    """The log may not hold so much."""

    def __init__(self, most: int) -> None:
        super().__init__(f"The response takes more than {most} bytes (limits.response_bytes).")
        self.most = most


class LogEnded(Exception):  # noqa: N818 - said of the log
    """The log has its terminal event already."""


class LogBroken(FolderError):  # noqa: N818 - said of the log
    """The log has no terminal event, and nobody here will write one."""

    def __init__(self) -> None:
        super().__init__("the log is closed without an end", "follow it again from where it broke")


class LogTaken(FolderError):  # noqa: N818 - said of the log
    """Another process has written to the log."""


@dataclass(slots=True)
class Extent:
    """The whole events that a file holds."""

    events: int = 0
    size: int = 0
    """Bytes of them."""
    last_offset: int = 0
    """Where the last one begins."""
    ended: bool = False
    """Whether the last one is terminal."""
    index: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """Numbers of some events, and where these begin."""

    def add(self, data: bytes) -> None:
        """Whole events follow."""
        count = data.count(b"\n\n")
        if not count:
            return
        if self.size - self.index[-1][1] >= INDEX_BYTES:
            self.index.append((self.events, self.size))
        last = data.rfind(b"\n\n", 0, -2) + 2
        self.last_offset = self.size + (last if last > 1 else 0)
        head = _HEAD.match(data, self.last_offset - self.size)
        self.ended = head is not None and head[1].decode() in TERMINAL_TYPES
        self.events += count
        self.size += len(data)


def create(folder: Folder) -> str:
    """Make an empty file, and return its name. Raises: FolderError."""
    folder.check_room(0)
    with folder.translated_errors():
        for name in folder.new_names(KIND):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(folder.path(name), _CREATE, 0o600))
                folder.sync()
                return name
    raise AssertionError("unreachable")


def scan(folder: Folder, name: str) -> Extent:
    """What the file holds, up to the first byte that is no whole event with the next number.

    Raises: FileNotFoundError, FolderError.
    """
    extent, rest = Extent(), b""
    with folder.open_to_read(name) as file, folder.translated_errors():
        while piece := _read(file, extent.size + len(rest), PIECE_BYTES):
            data = rest + piece
            end = data.rfind(b"\n\n") + 2
            if end < 2:
                rest = data
                continue
            whole = data[: _valid_bytes(data[:end], extent.events)]
            extent.add(whole)
            if len(whole) < end:
                break
            rest = data[end:]
    return extent


def grow(folder: Folder, name: str, extent: Extent) -> None:
    """Add what another process has written meanwhile. Raises: FileNotFoundError, FolderError."""
    with folder.open_to_read(name) as file, folder.translated_errors():
        rest = b""
        while piece := _read(file, extent.size + len(rest), PIECE_BYTES):
            data = rest + piece
            end = data.rfind(b"\n\n") + 2
            whole = data[: _valid_bytes(data[:end], extent.events)] if end > 1 else b""
            extent.add(whole)
            if not whole and end > 1:
                break
            rest = data[len(whole) :]


def grow_all(folder: Folder, extents: Mapping[str, Extent]) -> set[str]:
    """Do that for all of these that have grown; returns the names of those that can't be read."""
    lost = set()
    for name, extent in extents.items():
        try:
            if folder.path(name).stat().st_size > extent.size:
                grow(folder, name, extent)
        except (OSError, FolderError):
            lost.add(name)
    return lost


def find(folder: Folder, name: str, extent_offset: int, skipped: int) -> int:
    """Where the event begins that comes `skipped` events behind the one at `extent_offset`.

    Raises: FileNotFoundError, FolderError.
    """
    offset, tail = extent_offset, b""
    with folder.open_to_read(name) as file, folder.translated_errors():
        while skipped:
            piece = _read(file, offset + len(tail), PIECE_BYTES)
            if not piece:
                raise FolderError(f"{folder.path(name)} is too short", "put back a copy of it")
            data = tail + piece
            count = data.count(b"\n\n")
            if count < skipped:
                end = data.rfind(b"\n\n") + 2
                if end < 2:
                    # One event larger than a piece: its end may be cut in two.
                    offset, tail = offset + len(data) - 1, data[-1:]
                else:
                    offset, tail, skipped = offset + end, data[end:], skipped - count
                continue
            at = 0
            for _ in range(skipped):
                at = data.index(b"\n\n", at) + 2
            return offset + at
    return offset


def read(folder: Folder, name: str, offset: int, length: int) -> bytes:
    """A part of the file. Raises: FileNotFoundError, FolderError."""
    return folder.read(name, offset, length)


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes that a file gets behind its first `offset` ones."""

    name: str
    offset: int
    data: bytes
    sync: bool = False
    """Whether they are to be on the disk, so that a loss of power does not lose them."""


def write(folder: Folder, wanted: Write) -> None:
    """Write at the end of the file. Raises: FileNotFoundError, FolderError, LogTaken.

    After an error the file holds what it held before, or a part of an event behind it.
    """
    with folder.translated_errors():
        descriptor = os.open(folder.path(wanted.name), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != wanted.offset:
                raise LogTaken(
                    f"{folder.path(wanted.name)} has another size than this process has written",
                    "let one gateway at a time work on a folder's requests",
                )
            rest, at = memoryview(wanted.data), wanted.offset
            try:
                while rest:
                    written = os.pwrite(descriptor, rest, at)
                    rest, at = rest[written:], at + written
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, wanted.offset)
                raise
            if wanted.sync:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def write_all(folder: Folder, writes: list[Write]) -> list[Exception | None]:
    """Do each of them; returns what went wrong with each."""
    results: list[Exception | None] = []
    for one in writes:
        try:
            write(folder, one)
            results.append(None)
        except (FolderError, FileNotFoundError) as error:
            results.append(error)
    return results


def sync_all(folder: Folder, names: list[str]) -> None:
    """Bring these files to the disk, as far as they exist. Raises: FolderError."""
    for name in names:
        with contextlib.suppress(FileNotFoundError), folder.translated_errors():
            descriptor = os.open(folder.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)


def truncate(folder: Folder, name: str, size: int) -> None:
    """Cut the file off behind so many bytes. Raises: FileNotFoundError, FolderError."""
    with folder.translated_errors():
        descriptor = os.open(folder.path(name), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def split_events(data: bytes) -> Iterator[bytes]:
    """The events of whole ones, one by one."""
    start = 0
    while (end := data.find(b"\n\n", start) + 2) > 1:
        yield data[start:end]
        start = end


def event_data(event: bytes) -> JsonObject:
    """The data of an event of a log."""
    value: JsonObject = msgspec.json.decode(event[event.index(b"\ndata: ") + 7 :])
    return value


def _read(file: BinaryIO, offset: int, length: int) -> bytes:
    return os.pread(file.fileno(), length, offset)


def _valid_bytes(data: bytes, first_number: int) -> int:
    """Bytes of these whole events up to the first that has not the next number."""
    count = data.count(b"\n\n")
    numbers = [int(number) for number in _NUMBERS.findall(data)]
    if numbers == list(range(first_number, first_number + count)):
        return len(data)
    end = 0
    for number, event in enumerate(split_events(data), first_number):
        head = _HEAD.match(event)
        if head is None or int(head[2]) != number:
            break
        end += len(event)
    return end


_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
