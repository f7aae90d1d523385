"""Takes the input of a new batch in: each of its lines becomes a row, a broken one with its error.

It may begin anew at any time, after a crash for example: a line's row always has the same id, and a
row that is there already stays. No line runs before all are in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, func, select

from gateway.batches.batch_rows import Batch, EndListener, begin_batch, fail_batch
from gateway.batches.disk_threads import DiskThreads
from gateway.batches.folder import AppendedFile, Folder, FolderError
from gateway.batches.line_reader import Line, LineError, LineReader, TooManyLines, check_line_count
from gateway.batches.request_rows import StoredRow, add_rows
from gateway.batches.result_lines import broken_line
from gateway.batches.results import RESULTS
from gateway.batches.states import RequestKind, RequestState, line_id
from gateway.config.batches import BatchSettings
from gateway.store.schema import stored_requests
from gateway.store.store import Store

REQUESTS = "requests"
"""Kind of the folder's files that hold the lines of a batch without an input file."""

T = TypeVar("T")

log = structlog.get_logger()


def input_place(batch: Batch) -> str:
    """The folder's file that has the batch's lines."""
    if batch.input_file is not None:
        return batch.input_file
    return f"{REQUESTS}-{batch.id.rpartition('_')[2]}"


@dataclass(frozen=True, slots=True)
class Intake:
    """Reads the input of batches. `settings` gives those in force, `now` Unix time."""

    store: Store
    folder: Folder
    threads: DiskThreads
    settings: Callable[[], BatchSettings]
    now: Callable[[], float]
    on_end: EndListener | None = None
    """Is told of batches that fail."""

    async def take_in(self, batch: Batch) -> None:
        """Read the input of a batch that is validating, and begin or fail it.

        Raises: FolderError, StoreError; then it is to be done again.
        """
        settings = self.settings()
        try:
            file = await self.threads.open(
                self.folder.open_to_read, input_place(batch), close=lambda file: file.close()
            )
        except FileNotFoundError:
            log.warning("the input of a batch is missing", batch=batch.id)
            await self._fail(batch, "file_not_found", "The input file is gone.")
            return
        try:
            await self.threads.run(
                _on_disk, check_line_count, file, settings.lines, settings.line_bytes
            )
            reader = LineReader(
                file,
                batch.endpoint,
                most_lines=settings.lines,
                line_bytes=settings.line_bytes,
            )
            taken = await self._take_lines(batch, reader)
        except TooManyLines as error:
            message = f"The input has more than {error.most} lines ('batches.lines')."
            await self._fail(batch, "too_many_lines", message)
            return
        finally:
            await self.threads.run(file.close)
        if not taken:
            return  # It is cancelled.
        if not reader.total:
            message = (
                "The input file is empty. Please ensure that your batch contains at least one "
                "request."
            )
            await self._fail(batch, "empty_file", message)
            return
        await self.store.run(partial(_begin, batch.id, reader.total, reader.model, self.now()))
        log.info("batch begun", batch=batch.id, lines=reader.total, broken=reader.failed)

    async def _take_lines(self, batch: Batch, reader: LineReader) -> bool:
        """Add the rows of all lines; returns False if the batch takes none any more."""
        errors = _Errors(self.folder, batch)
        try:
            while lines := await self.threads.run(_on_disk, reader.read_some):
                rows = await self.threads.run(self._rows_of, batch, lines, errors)
                if not await self.store.run(partial(_add, rows)):
                    return False
        finally:
            await self.threads.run(errors.close)
        return True

    def _rows_of(self, batch: Batch, lines: Sequence[Line], errors: _Errors) -> list[StoredRow]:
        """The rows of these lines; errors are on the disk. Blocks. Raises: FolderError."""
        places = iter(errors.write([one for one in lines if isinstance(one, LineError)]))
        return [
            self._row_of(batch, one, next(places) if isinstance(one, LineError) else None)
            for one in lines
        ]

    def _row_of(self, batch: Batch, line: Line, error: _ErrorPlace | None) -> StoredRow:
        spec = None if isinstance(line, LineError) else line
        is_known = spec is not None or (isinstance(line, LineError) and line.is_first)
        return StoredRow(
            id=line_id(batch.id, line.number),
            kind=RequestKind.LINE,
            owner=batch.owner,
            path=batch.endpoint,
            place=input_place(batch),
            offset=line.offset,
            length=line.length,
            created_at=batch.created_at,
            keep_until=batch.keep_until,
            folder=batch.folder,
            class_=batch.class_,
            batch=batch.id,
            number=line.number,
            custom_id=line.custom_id if is_known else None,
            group_name=batch.group_name,
            user=batch.user,
            model=None if spec is None else spec.model,
            prompt_tokens=0 if spec is None else spec.prompt_tokens,
            max_tokens=0 if spec is None else spec.max_tokens,
            prefix=0 if spec is None else spec.prefix,
            deadline=batch.expires_at,
            state=RequestState.WAITING if error is None else RequestState.FAILED,
            ended_at=None if error is None else self.now(),
            error_code=None if error is None else error.code,
            result_place=None if error is None else error.place,
            result_offset=None if error is None else error.offset,
            result_length=None if error is None else error.length,
        )

    async def _fail(self, batch: Batch, code: str, message: str) -> None:
        errors: list[dict[str, Any]] = [
            {"code": code, "message": message, "param": "input_file_id", "line": None}
        ]
        await self.store.run(partial(_fail, batch.id, errors, self.now(), self.on_end))
        log.info("batch failed", batch=batch.id, why=code)


@dataclass(frozen=True, slots=True)
class _ErrorPlace:
    code: str
    place: str
    offset: int
    length: int


class _Errors:
    """The file of the error lines of one reading; there is none without a broken line. Blocks."""

    def __init__(self, folder: Folder, batch: Batch) -> None:
        self._folder = folder
        self._batch = batch
        self._file: AppendedFile | None = None

    def write(self, errors: Sequence[LineError]) -> list[_ErrorPlace]:
        """Bring the errors to the disk. Raises: FolderError."""
        if not errors:
            return []
        if self._file is None:
            self._file = self._folder.open_appended(RESULTS)
        batch = self._batch
        lines = [broken_line(line_id(batch.id, one.number), batch.api, one) for one in errors]
        offset = self._file.append(b"".join(lines))
        places = []
        for error, line in zip(errors, lines, strict=True):
            places.append(_ErrorPlace(error.code, self._file.name, offset, len(line)))
            offset += len(line)
        return places

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _on_disk(work: Callable[..., T], *arguments: Any) -> T:
    """Do the work. Raises: FolderError, if the file can't be read; the work's own error."""
    try:
        return work(*arguments)
    except OSError as error:
        raise FolderError(
            f"the input of a batch can't be read: {error.strerror or error}",
            "look for errors of the disk in the system's log",
        ) from None


# Jobs of the store.


def _add(rows: Sequence[StoredRow], connection: Connection) -> bool:
    return add_rows(connection, rows)


def _begin(id_: str, total: int, model: str | None, now: float, connection: Connection) -> None:
    # Of an earlier reading under other settings there may be other errors than of this one.
    columns = stored_requests.c
    broken = select(func.count()).where(
        columns.batch == id_, columns.state == RequestState.FAILED.value
    )
    begin_batch(connection, id_, total, connection.scalar(broken) or 0, model, now)


def _fail(
    id_: str,
    errors: list[dict[str, Any]],
    now: float,
    also: EndListener | None,
    connection: Connection,
) -> None:
    fail_batch(connection, id_, errors, now, also)
