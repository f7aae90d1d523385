"""Results of batches' lines: written as lines to files of the folder, recorded, and read again.

`LineResults.add` returns when its result is on the disk and recorded in the store, together with
the row of the ledger. A group of results is one append and one fsync for each batch, and one
transaction. A store that is away, or a disk that is full, delays results and loses none: they wait
within a bound, their batches are paused, and beyond the bound their runners wait too.

A line ends with a newline and holds no other, nor any character at which Python's `str.splitlines`
would divide it: readers of such files use that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from sqlalchemy import Connection

from gateway.api.json_values import JSON_ERRORS, VALUE_DECODER, JsonObject
from gateway.api.messages import error_type
from gateway.callers.ledger import Ledger, UsageRow
from gateway.callers.processes import ProcessIdentity
from gateway.store.failures import StoreError
from gateway.store.store import woken
from gateway.stored.batch_rows import PREFIXES, pause_batch
from gateway.stored.claims import RecordedResult, RequestState, StoredRow, record
from gateway.stored.folder import (
    FileTooShort,
    Folder,
    FolderError,
    FolderFull,
    NewFile,
    Storage,
)
from gateway.stored.line_reader import LineError
from gateway.stored.runner import Outcome

ANTHROPIC = "anthropic"  # the API of `/v1/messages/batches`; that of `/v1/batches` is `openai`
# What else `str.splitlines` takes for the end of a line and JSON allows, within strings alone.
_LINE_ENDS = tuple((one.encode(), f"\\u{ord(one):04x}".encode()) for one in "\x85\u2028\u2029")
_ANY_JSON = msgspec.json.Decoder(msgspec.Raw)


def response_line(
    id_: str, custom_id: str | None, api: str, *, status: int, request_id: str, content: bytes
) -> bytes:
    """The line of a response, which an error's response is too. `content` is its body."""
    if api != ANTHROPIC:
        response = {"status_code": status, "request_id": request_id, "body": _as_json(content)}
        return _line({"id": id_, "custom_id": custom_id, "response": response, "error": None})
    if status < 400:
        result: JsonObject = {"type": "succeeded", "message": _as_json(content)}
    else:
        result = {"type": "errored", "error": _anthropic_error(status, request_id, content)}
    return _line({"custom_id": custom_id, "result": result})


def broken_line(id_: str, api: str, error: LineError) -> bytes:
    """The line of a line of the input that can't be run."""
    told = {name: getattr(error, name) for name in ("code", "message", "param")}
    told["line"] = error.number
    return _error_line(id_, error.custom_id, api, told, "errored", "invalid_request_error")


def unanswered_line(
    id_: str, custom_id: str | None, api: str, number: int | None, state: RequestState
) -> bytes:
    """The line of a request that has no result, and never will."""
    code, type_ = "result_lost", "errored"
    message = "The result of this request can't be read any more."
    if state is RequestState.EXPIRED:
        code, type_ = "batch_expired", "expired"
        message = "This request could not be executed before the completion window expired."
    elif state is RequestState.CANCELLED:
        code, type_ = "batch_cancelled", "canceled"
        message = "This request was not executed because the batch was cancelled."
    told: JsonObject = {"code": code, "message": message}
    if custom_id is None:
        told["line"] = number
    return _error_line(id_, custom_id, api, told, type_, "api_error")


def _error_line(
    id_: str, custom_id: str | None, api: str, told: JsonObject, kind: str, type_: str
) -> bytes:
    """A line without a response; `kind` of result and `type_` of error are Anthropic's."""
    if api != ANTHROPIC:
        return _line({"id": id_, "custom_id": custom_id, "response": None, "error": told})
    result: JsonObject = {"type": kind}
    if kind == "errored":
        result["error"] = _anthropic_object(type_, told["message"])
    return _line({"custom_id": custom_id, "result": result})


def _anthropic_error(status: int, request_id: str, content: bytes) -> JsonObject:
    """The error of a response, in Anthropic's form whatever its own is."""
    message = ""
    found: Any = None
    with contextlib.suppress(*JSON_ERRORS):
        found = VALUE_DECODER.decode(content)
    inner = found.get("error") if isinstance(found, dict) else None
    if isinstance(inner, dict):
        message = inner["message"] if isinstance(inner.get("message"), str) else ""
        if found.get("type") == "error" and isinstance(inner.get("type"), str):
            return {"request_id": request_id, **found}
    elif isinstance(inner, str):
        message = inner
    message = message or f"The request failed with status {status}."
    return _anthropic_object(error_type(status), message, request_id)


def _anthropic_object(type_: str, message: str, request_id: str | None = None) -> JsonObject:
    error = {"type": type_, "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def _as_json(content: bytes) -> msgspec.Raw:
    """A body as JSON on one line, its numbers as they are; what is no JSON becomes a string."""
    try:
        content.decode()
        _ANY_JSON.decode(content)
        return msgspec.Raw(msgspec.json.format(content, indent=-1))
    except JSON_ERRORS:
        return msgspec.Raw(msgspec.json.encode(content.decode("utf-8", "replace")))


def _line(value: JsonObject) -> bytes:
    line = msgspec.json.encode(value)
    for end, escaped in _LINE_ENDS:
        line = line.replace(end, escaped)
    return line + b"\n"


RESULTS = "results"  # kind of the folder's files that hold results
GROUP_SECONDS = 0.05  # seconds that the first result of a group waits for others
# Results, and bytes of them, that are written at one time at most.
GROUP_RESULTS, GROUP_BYTES = 500, 4 << 20
MOST_BYTES = 64 << 20  # bytes of results that wait; beyond them `add` waits to begin
ROW_BYTES = 1000  # what a result takes in memory besides its response
READ_BYTES = 256 << 10  # bytes of lines that are read at a time, if no line is longer
MOST_FILES = 64  # files of results that are open
IDLE_SECONDS = 30.0  # seconds after which a file of results is closed: its batch may have ended
RETRY_SECONDS = 2.0  # seconds after which it is tried again to write or to record results
# Why batches are paused while the folder takes no results.
STORAGE_FULL, STORAGE_UNAVAILABLE = "storage_full", "storage_unavailable"
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Result:
    """A result that is not recorded yet."""

    row: StoredRow
    outcome: Outcome
    done: asyncio.Future[bool]
    place: str | None = None  # the file that has its line; None: it is not on the disk
    offset: int = 0
    length: int = 0

    @property
    def size(self) -> int:
        return len(self.outcome.content) + ROW_BYTES

    def recorded(self) -> RecordedResult:
        outcome = self.outcome
        state = RequestState.DONE if outcome.status < 400 else RequestState.FAILED
        return RecordedResult(
            self.row.id, state, outcome.status, outcome.error_code, self.place, self.offset,
            self.length, outcome.usage,
        )  # fmt: skip

    def line(self) -> bytes:
        row, outcome = self.row, self.outcome
        is_message = str(row.batch).startswith(PREFIXES[ANTHROPIC])
        return response_line(
            row.id, row.custom_id, ANTHROPIC if is_message else "openai", status=outcome.status,
            request_id=outcome.record.x_request_id, content=outcome.content,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class LineResults:
    """Keeps the results of batches' lines. `run` must run in a task while there are any."""

    storage: Storage
    ledger: Ledger
    process: ProcessIdentity
    most_bytes: int = MOST_BYTES
    problem: str | None = None  # why results are not written or recorded now
    disk_error: FolderError | None = None
    """Why they are not written now, if that is the disk's fault."""
    _waiting: deque[_Result] = field(default_factory=deque)
    _group: list[_Result] = field(default_factory=list)
    """What is being written and recorded, until that is known to have happened."""
    _bytes: int = 0  # of all results that wait
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when results have been recorded."""
    _files: OrderedDict[str, tuple[NewFile, float]] = field(default_factory=OrderedDict)
    """By batch, and when it was used (monotonic seconds); the one used last at the end."""

    @property
    def pending(self) -> int:
        """Results that wait."""
        return len(self._waiting) + len(self._group)

    async def add(self, row: StoredRow, outcome: Outcome) -> bool:
        """Keep the result of a row that this process runs; returns when that is certain.

        False: the row was cancelled or taken by another process meanwhile. A caller that is
        cancelled leaves the result to be recorded.
        """
        while self._bytes >= self.most_bytes:
            self._room.clear()
            await self._room.wait()
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # Nobody may be left to ask for its error.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        result = _Result(row, outcome, done)
        self._waiting.append(result)
        self._bytes += result.size
        self._arrived.set()
        return await asyncio.shield(result.done)

    async def run(self) -> None:
        """Write and record results until cancelled."""
        while True:
            if not self.pending:
                await woken(self._arrived, IDLE_SECONDS if self._files else None)
                self._close_files()
                continue
            if self.pending < GROUP_RESULTS:
                await asyncio.sleep(GROUP_SECONDS)
            if not await self._step():
                await asyncio.sleep(RETRY_SECONDS)

    async def close(self, limit: float) -> None:
        """Write and record what waits, within `limit` seconds; call it when `run` has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while self.pending and await self._step():
                    pass
        if self.pending:
            # Their rows are run again by whoever claims them next.
            log.warning("results are dropped", results=self.pending, why=self.problem)
        for result in (*self._group, *self._waiting):
            result.done.cancel()
        for file, _ in self._files.values():
            file.close()
        self._files.clear()

    # Steps.

    async def _step(self) -> bool:
        """Write and record a group; returns whether all of it is recorded."""
        size = sum(one.size for one in self._group)
        while self._waiting and len(self._group) < GROUP_RESULTS and size < GROUP_BYTES:
            result = self._waiting.popleft()
            size += result.size
            self._group.append(result)
        await self._write()
        written = [one for one in self._group if one.place is not None]
        if written and not await self._record(written):
            return False
        if not self._group and self.problem is not None:
            log.info("results are kept again")
            self.problem = None
        return not self._group

    async def _write(self) -> None:
        """Bring the group to the disk, as far as that is possible."""
        storage, by_batch = self.storage, dict[str, list[_Result]]()
        for result in self._group:
            if result.place is None:
                by_batch.setdefault(result.row.batch or "", []).append(result)
        for batch, results in by_batch.items():
            try:
                file = await self._file(batch)
                lengths, offset = await storage.threads.run(_append, file, results)
            except FolderError as error:
                full = isinstance(error, FolderFull)
                if not full and (broken := self._files.pop(batch, None)) is not None:
                    broken[0].close()
                self.disk_error = error
                self._failed("results wait for the disk", str(error))
                if batch:  # Its other lines wait; `BatchUpkeep` resumes it when there is room.
                    reason = STORAGE_FULL if full else STORAGE_UNAVAILABLE
                    owner = results[0].row.owner
                    with contextlib.suppress(StoreError):
                        await storage.write(pause_batch, owner, batch, storage.now(), reason)
                continue
            self.disk_error = None
            for result, length in zip(results, lengths, strict=True):
                result.place, result.offset, result.length = file.name, offset, length
                offset += length

    async def _file(self, batch: str) -> NewFile:
        """The file of this batch's results. Raises: FolderError."""
        file, _ = self._files.pop(batch, (None, 0.0))
        if file is None:
            self._close_files()
            if len(self._files) >= MOST_FILES:
                self._files.popitem(last=False)[1][0].close()
            storage = self.storage
            file = await storage.threads.run(storage.folder.open_appended, RESULTS)
        self._files[batch] = file, self.storage.clock()
        return file

    def _close_files(self) -> None:
        """Close the files that were not written of late."""
        before = self.storage.clock() - IDLE_SECONDS
        for batch, (file, used_at) in list(self._files.items()):
            if used_at <= before:
                del self._files[batch]
                file.close()

    async def _record(self, results: Sequence[_Result]) -> bool:
        """Record results that are on the disk; returns whether the store took them."""
        recorded = [one.recorded() for one in results]
        ids: set[str] = set()

        def recording(connection: Connection) -> list[UsageRow]:
            ids.clear()
            ids.update(record(connection, self.process.id, recorded, self.storage.now()))
            return [one.usage for one in recorded if one.id in ids and one.usage is not None]

        try:
            await self.ledger.write_with(recording)
        except StoreError as error:
            self._failed("results wait for the store", str(error))
            return False
        except Exception as error:
            # One of them can't be recorded: it must not keep the others from it.
            if len(results) > 1:
                return all([await self._record([one]) for one in results])
            log.exception("a result can't be recorded", request=results[0].row.id)
            self._end(results[0], error)
            return True
        for result in results:
            self._end(result, result.row.id in ids)
        return True

    def _end(self, result: _Result, end: bool | Exception) -> None:  # noqa: FBT001 - a result
        self._group.remove(result)
        self._bytes -= result.size
        self._room.set()
        if not result.done.done():
            if isinstance(end, bool):
                result.done.set_result(end)
            else:
                result.done.set_exception(end)

    def _failed(self, event: str, why: str) -> None:
        """Tell it once, until all results are kept again."""
        if self.problem is None:
            log.warning(event, results=self.pending, why=why)
        self.problem = why


def _append(file: NewFile, results: Sequence[_Result]) -> tuple[list[int], int]:
    """Write the lines of results of one batch: their lengths, and where they begin.

    Raises: FolderError.
    """
    lines = [one.line() for one in results]
    return [len(line) for line in lines], file.append(b"".join(lines))


@dataclass(frozen=True, slots=True)
class ResultReader:
    """Reads the lines of rows that have ended. Blocks: call it on a thread.

    `keeps_all`: a result that is missing is an error, since the batch may end while it is read.
    """

    folder: Folder
    api: str
    keeps_all: bool = False

    def pieces(self, rows: Sequence[StoredRow]) -> Iterator[tuple[bytes, bool]]:
        """Lines of these rows in pieces, each with whether it belongs into the output file.

        Raises: FolderError.
        """
        lines: dict[bool, list[bytes]] = {True: [], False: []}
        sizes = Counter[bool]()
        for row in rows:
            line, status = self._recorded(row), row.status
            if line is None:
                line = unanswered_line(row.id, row.custom_id, self.api, row.number, row.state)
                status = None
            is_output = self.api == ANTHROPIC or (status is not None and status < 400)
            lines[is_output].append(line)
            sizes[is_output] += len(line)
            if sizes[is_output] >= READ_BYTES:
                yield b"".join(lines[is_output]), is_output
                lines[is_output].clear()
                sizes[is_output] = 0
        yield from ((b"".join(some), is_output) for is_output, some in lines.items() if some)

    def _recorded(self, row: StoredRow) -> bytes | None:
        """The recorded line; None: there is none. Raises: FolderError."""
        place, offset, length = row.result_place, row.result_offset, row.result_length
        if place is None or offset is None or length is None:
            return None
        with contextlib.suppress(FileNotFoundError, FileTooShort):
            line = self.folder.read(place, offset, length)
            if line.endswith(b"\n"):
                return line
        if self.keeps_all:
            raise FolderError(f"{place} lacks a result", "read the batch's output again")
        log.warning("a result is lost", request=row.id, file=place)
        return None
