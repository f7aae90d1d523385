"""The end of a batch: its output and error files, made of the results that are recorded.

Lines come in the order of the input. A line that was not answered has an error of its own, so every
line of the input is in one of the files exactly once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO

import structlog
from sqlalchemy import Connection

from gateway.batches.batch_rows import Batch, EndListener, begin_finalizing, end_batch, resume_batch
from gateway.batches.disk_threads import DiskThreads
from gateway.batches.file_rows import StoredFile
from gateway.batches.files import FILE
from gateway.batches.folder import Folder, FolderError, NewFile
from gateway.batches.request_rows import StoredRow, result_rows
from gateway.batches.result_lines import is_output, unanswered_line
from gateway.config.batches import BatchSettings
from gateway.store.failures import StoreError, StoreUnavailable
from gateway.store.store import Store

OUTPUT_PURPOSE = "batch_output"

PAGE_ROWS = 500
"""Rows that are read from the store at a time."""

PIECE_BYTES = 256 << 10
"""Bytes of lines that are written or sent at a time, if no line is longer."""

MOST_FILES = 16
"""Files of results that are open at a time."""

log = structlog.get_logger()


class ResultReader:
    """Reads the lines of rows that have ended. Blocks: call it on a thread. `close` ends it."""

    def __init__(self, folder: Folder, api: str, *, keeps_all: bool = False) -> None:
        self._folder = folder
        self._api = api
        self._keeps_all = keeps_all
        """Whether a result that is missing is an error: the batch may end while it is read."""
        self._files: OrderedDict[str, BinaryIO] = OrderedDict()

    def line(self, row: StoredRow) -> tuple[bytes, bool]:
        """The row's line, and whether it belongs into the output file. Raises: FolderError."""
        line = self._recorded(row)
        if line is not None:
            return line, is_output(self._api, row.status)
        custom_id = row.custom_id
        line = unanswered_line(row.id, custom_id, self._api, row.number, row.state)
        return line, is_output(self._api, None)

    def pieces(self, rows: Sequence[StoredRow], *, output: bool) -> Iterator[bytes]:
        """The lines of these rows that belong into that file, in pieces. Raises: FolderError."""
        lines: list[bytes] = []
        size = 0
        for row in rows:
            line, is_of_output = self.line(row)
            if is_of_output != output:
                continue
            lines.append(line)
            size += len(line)
            if size >= PIECE_BYTES:
                yield b"".join(lines)
                lines.clear()
                size = 0
        if lines:
            yield b"".join(lines)

    def close(self) -> None:
        """Close the files; called again, nothing."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _recorded(self, row: StoredRow) -> bytes | None:
        """The recorded line; None: there is none. Raises: FolderError."""
        place, length = row.result_place, row.result_length
        if place is None or row.result_offset is None or length is None:
            return None
        line = b""
        with contextlib.suppress(FileNotFoundError):
            file = self._file(place)
            try:
                while more := os.pread(
                    file.fileno(), length - len(line), row.result_offset + len(line)
                ):
                    line += more
            except OSError as error:
                raise FolderError(
                    f"{place}: {error.strerror or error}",
                    "look for errors of the disk in the system's log",
                ) from None
        if len(line) == length and line.endswith(b"\n"):
            return line
        if self._keeps_all:
            raise FolderError(f"{place} lacks a result", "read the batch's output again")
        log.warning("a result is lost", request=row.id, file=place)
        return None

    def _file(self, place: str) -> BinaryIO:
        found = self._files.get(place)
        if found is None:
            if len(self._files) >= MOST_FILES:
                self._files.popitem(last=False)[1].close()
            found = self._files[place] = self._folder.open_to_read(place)
        self._files.move_to_end(place)
        return found


@dataclass(slots=True)
class _FinalFile:
    """A file of lines, which begins with the first one. Blocks."""

    folder: Folder
    new: NewFile | None = None
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def write(self, piece: bytes) -> None:
        """Add lines. Raises: FolderError."""
        if self.new is None:
            self.new = self.folder.open_new(FILE)
        self.new.write(piece)
        self.digest.update(piece)


class _FinalFiles:
    """The output and the error file of a batch. Blocks: call it on a thread."""

    def __init__(self, folder: Folder, batch: Batch) -> None:
        self._folder = folder
        self._batch = batch
        self._reader = ResultReader(folder, batch.api)
        self._output, self._errors = _FinalFile(folder), _FinalFile(folder)

    def add(self, rows: Sequence[StoredRow]) -> None:
        """Write the lines of these rows. Raises: FolderError."""
        pending: dict[bool, list[bytes]] = {True: [], False: []}
        sizes = {True: 0, False: 0}
        for row in rows:
            line, output = self._reader.line(row)
            pending[output].append(line)
            sizes[output] += len(line)
            if sizes[output] >= PIECE_BYTES:
                self._write(pending, output)
                sizes[output] = 0
        for output in (True, False):
            self._write(pending, output)

    def finish(self, now: float, kept: float) -> tuple[StoredFile | None, StoredFile | None]:
        """Complete the files, to be kept for so many seconds. Raises: FolderError."""
        batch = self._batch
        name = "results" if batch.api == "anthropic" else "output"
        return (
            self._finished(self._output, f"{batch.id}_{name}.jsonl", now, kept),
            self._finished(self._errors, f"{batch.id}_error.jsonl", now, kept),
        )

    def close(self) -> None:
        """Remove what is not finished, and close the rest. Raises: FolderError."""
        self._reader.close()
        for one in (self._output, self._errors):
            if one.new is not None:
                one.new.discard()

    def remove(self) -> None:
        """Remove the finished files: others have ended the batch. Raises: FolderError."""
        for one in (self._output, self._errors):
            if one.new is not None:
                self._folder.delete(one.new.name)

    def _write(self, pending: dict[bool, list[bytes]], output: bool) -> None:  # noqa: FBT001
        lines = pending[output]
        if lines:
            (self._output if output else self._errors).write(b"".join(lines))
            lines.clear()

    def _finished(self, file: _FinalFile, name: str, now: float, kept: float) -> StoredFile | None:
        if file.new is None:
            return None
        id_ = file.new.finish()
        batch = self._batch
        return StoredFile(
            id_, batch.owner, name, OUTPUT_PURPOSE, file.new.size, file.digest.hexdigest(),
            now, now + kept, batch.folder,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """Ends batches whose lines have all ended. `settings` gives those in force, `now` Unix time."""

    store: Store
    folder: Folder
    threads: DiskThreads
    settings: Callable[[], BatchSettings]
    now: Callable[[], float]
    on_end: EndListener | None = None

    async def end(self, id_: str) -> Batch | None:
        """End the batch; None: it has lines that have not ended, or somebody else has ended it.

        Raises: FolderError, StoreError; then it is to be done again.
        """
        batch = await self.store.run(partial(begin_finalizing, id_=id_, now=self.now()))
        if batch is None:
            return None
        files = _FinalFiles(self.folder, batch)
        try:
            after = 0
            while rows := await self.store.run(
                partial(result_rows, batch=id_, after_number=after, limit=PAGE_ROWS), write=False
            ):
                await self.threads.run(files.add, rows)
                after = rows[-1].number or 0
            now, keep = self.now(), self.settings().keep
            kept = keep if batch.output_seconds is None else min(keep, batch.output_seconds)
            output, errors = await self.threads.run(files.finish, now, kept)
        finally:
            with contextlib.suppress(FolderError):
                await self.threads.run(files.close)
        job = partial(_end, batch, output, errors, now, self.on_end)
        try:
            ended = await self.store.run(job)
        except StoreUnavailable:
            # It may have ended; files without a row are removed later (`FileRegistry`).
            raise
        except StoreError:
            await self.threads.run(files.remove)
            raise
        if ended is None:
            await self.threads.run(files.remove)
            return None
        log.info(
            "batch ended", batch=id_, state=ended.state.value, lines=ended.total,
            completed=ended.completed, failed=ended.failed, cancelled=ended.cancelled,
            expired=ended.expired,
        )  # fmt: skip
        return ended


def _end(
    batch: Batch,
    output: StoredFile | None,
    errors: StoredFile | None,
    now: float,
    also: EndListener | None,
    connection: Connection,
) -> Batch | None:
    # It may be paused for want of room, which there was after all.
    resume_batch(connection, batch.owner, batch.id)
    return end_batch(connection, batch.id, output, errors, now, also)
