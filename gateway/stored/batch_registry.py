"""Batches: what their callers do with them, and what they need without being asked.

`BatchRegistry` creates, shows, lists, cancels, pauses, deletes and reads them for callers.
`BatchUpkeep` reads their input, ends them, and removes what is old.

`take_in` makes a row of each line of the input. It may begin anew at any time, after a crash for
example: a line's row always has the same id, and a row that is there already stays. No line runs
before all are in.

`end` makes the output and error files of the recorded results, in the order of the input. A line
without an answer gets an error of its own, so every line of the input is in one of the files
exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial
from typing import Any

import structlog
from sqlalchemy import Connection, select

from gateway import errors
from gateway.config.fields import format_duration, parse_duration
from gateway.config.stored import BatchSettings
from gateway.errors import GatewayError
from gateway.request.routes import ROUTES
from gateway.store.failures import StoreError, StoreUnavailable
from gateway.store.schema import stored_requests
from gateway.store.store import woken
from gateway.stored import batch_rows, claims, results
from gateway.stored.batch_rows import (
    NOTHING_AHEAD,
    PREFIXES,
    AskedBatch,
    Batch,
    BatchProgress,
    EndListener,
    ErrorKind,
    SpeedMeter,
)
from gateway.stored.claims import BatchState, RequestKind, RequestState, StoredRow, UnfinishedWork
from gateway.stored.files import (
    FILE,
    KEY_STORAGE_FULL,
    Content,
    StoredFile,
    delete_file,
    file_elsewhere,
    find_file,
    full_owners,
    kept_by,
    kept_too_much,
)
from gateway.stored.folder import (
    STEP_BYTES,
    Folder,
    FolderError,
    FolderFull,
    NewFile,
    Storage,
    StorageTrouble,
    folder_errors_told,
)
from gateway.stored.line_reader import (
    PIECE_BYTES,
    Line,
    LineError,
    LineReader,
    LineSpec,
    TooManyLines,
)
from gateway.stored.results import ResultReader
from gateway.stored.waits import BatchWait, BatchWaits

# Kind of the folder's files that hold the lines of a batch without an input file.
REQUESTS = "requests"
log = structlog.get_logger()


def input_place(batch: Batch) -> str:
    """The folder's file that has the batch's lines."""
    if batch.input_file is not None:
        return batch.input_file
    return f"{REQUESTS}-{batch.id.rpartition('_')[2]}"


OUTPUT_PURPOSE = "batch_output"
PAGE_ROWS = 500  # rows that are read from the store at a time


@dataclass(slots=True, eq=False)
class _FinalFiles:
    """The output and the error file of a batch, which begin with their first line. Blocks."""

    _folder: Folder
    _batch: Batch
    _new: dict[bool, NewFile] = field(default_factory=dict)  # by whether it is the output

    def add(self, rows: Sequence[StoredRow]) -> None:
        """Write the lines of these rows. Raises: FolderError."""
        for piece, is_output in ResultReader(self._folder, self._batch.api).pieces(rows):
            if is_output not in self._new:
                self._new[is_output] = self._folder.open_new(FILE)
            self._new[is_output].write(piece)

    def finish(self, now: float, kept: float) -> tuple[StoredFile | None, StoredFile | None]:
        """Complete the files, to be kept for so many seconds. Raises: FolderError."""
        batch, files = self._batch, dict[bool, StoredFile]()
        output = "results" if batch.api == "anthropic" else "output"
        for is_output, new in self._new.items():
            name = f"{batch.id}_{output if is_output else 'error'}.jsonl"
            files[is_output] = StoredFile(
                new.finish(), batch.owner, name, OUTPUT_PURPOSE, new.size, new.sha256, now,
                now + kept, batch.folder,
            )  # fmt: skip
        return files.get(True), files.get(False)

    def close(self) -> None:
        """Remove what is not finished. Raises: FolderError."""
        for new in self._new.values():
            new.discard()

    def remove(self) -> None:
        """Remove the finished files: others have ended the batch. Raises: FolderError."""
        for new in self._new.values():
            self._folder.delete(new.name)


ROUND_SECONDS = 1.0  # seconds between two looks at the unfinished batches
# The same while there are none: another process of the folder may have added one.
IDLE_SECONDS = 5.0
# Seconds after which it is tried again to read the input of a batch, or to end it.
RETRY_SECONDS = 5.0
# Seconds after which a batch goes on that was paused since the folder failed for another reason
# than want of room: nothing tells that it works again but work.
UNAVAILABLE_SECONDS = 30.0
MOST_TRIES = 3  # tries to read an input, if each fails for a reason that nobody has thought of
MOST_AT_ONCE = 2  # batches whose input is read, or which are being ended, at one time
REMOVE_SECONDS = 60.0  # seconds between two rounds of removing batches whose time is over
STEP_BATCHES = 100  # batches that are removed in one step
# Seconds between two rounds of removing files that no batch needs any more, and the age from which
# on they are: somebody may read the results of a batch that has just ended.
CLEAN_SECONDS = 600.0
_OF_LINES = tuple(one.name for one in fields(LineSpec))
_ENDING = frozenset({BatchState.FINALIZING, BatchState.CANCELLING})
_STORAGE = frozenset({results.STORAGE_FULL, results.STORAGE_UNAVAILABLE})


@dataclass(eq=False)
class BatchUpkeep:
    """The work on all batches of one folder.

    `on_rows`: rows may run; `on_end` is told of batches that end.
    """

    storage: Storage
    work: UnfinishedWork
    on_rows: Callable[[], None]
    on_end: EndListener | None = None
    waits: BatchWaits | None = None
    speeds: SpeedMeter = field(default_factory=SpeedMeter)
    _: KW_ONLY
    round_seconds: float = ROUND_SECONDS
    idle_seconds: float = IDLE_SECONDS
    _wakes: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by batch
    _retry_at: dict[str, float] = field(default_factory=dict)
    """When a batch is tried again, of those that could not be."""
    _tries: dict[str, int] = field(default_factory=dict)
    _trouble: StorageTrouble = field(
        default_factory=lambda: StorageTrouble(lambda why: log.warning("batches wait", why=why))
    )
    """By batch, and under no name of all."""
    full_owners: frozenset[str] = frozenset()
    """Whose batches wait, since they keep as much as they may."""
    _remove_at: float = 0.0
    _clean_at: float = 0.0

    @property
    def folder_error(self) -> FolderError | None:
        """Why the folder can't be used, as the last round found."""
        error = self._trouble.errors.get("")
        return error if isinstance(error, FolderError) else None

    def wake(self) -> None:
        """There may be something to do."""
        self._wakes.set()

    async def run(self) -> None:
        """Work until cancelled."""
        clock, is_work = self.storage.clock, True
        try:
            while True:
                with self._trouble.told():
                    if self.storage.folder.full is not None:
                        await self.storage.threads.run(self.storage.folder.look_for_room)
                    is_work = await self.work.exists() or bool(self._tasks)
                    if is_work or clock() >= min(self._remove_at, self._clean_at):
                        await self.round()
                await woken(self._wakes, self.round_seconds if is_work else self.idle_seconds)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def round(self) -> None:
        """Begin what is due. Raises: FolderError, StoreError."""
        storage, clock = self.storage, self.storage.clock
        folder, now = await storage.opened(), storage.now()
        found = await storage.read(batch_rows.unfinished, folder)
        running = [one for one in found if one.state is BatchState.IN_PROGRESS]
        if any(one.expires_at <= now and one.ended_lines < one.total for one in running):
            await storage.write(batch_rows.expire_lines, folder, now)
            found = await storage.read(batch_rows.unfinished, folder)
        self.speeds.look((one for one in found if one.state is BatchState.IN_PROGRESS), clock())
        if self.waits is not None:
            self.waits.look(found)
        known = {one.id for one in found}
        for noted in (self._retry_at, self._tries, self._trouble.errors):
            for id_ in noted.keys() - known - {""}:
                del noted[id_]
        await self._resume(found)
        await self._hold(found)
        for batch in found:
            self._begin(batch)
        await self._remove_requests(folder)
        if clock() >= self._remove_at:
            await self.remove_due()
            self._remove_at = clock() + REMOVE_SECONDS
        if clock() >= self._clean_at:
            await self.clean()
            self._clean_at = clock() + CLEAN_SECONDS

    # Batches.

    def _begin(self, batch: Batch) -> None:
        """Begin to read the batch's input or to end it, if that is due."""
        work: Coroutine[Any, Any, None]
        if len(self._tasks) >= MOST_AT_ONCE or batch.id in self._tasks:
            return
        if self.storage.clock() < self._retry_at.get(batch.id, 0.0):
            return
        if batch.state is BatchState.VALIDATING:
            work = self.take_in(batch)
        elif batch.state in _ENDING or batch.ended_lines >= batch.total:
            work = self._finish(batch)
        else:
            return
        task = asyncio.create_task(self._guarded(batch, work))
        self._tasks[batch.id] = task
        task.add_done_callback(partial(self._done, batch.id))

    def _done(self, id_: str, _: asyncio.Task[None]) -> None:
        del self._tasks[id_]
        self._wakes.set()

    async def _finish(self, batch: Batch) -> None:
        while await self.end(batch.id) is None:
            ended_lines = batch.ended_lines
            found = await self.storage.read(batch_rows.find_batch, batch.owner, batch.id)
            if found is None or found.ended_lines == ended_lines:
                # Others of its lines run yet, or another process ends it.
                self._retry_at[batch.id] = self.storage.clock() + self.round_seconds
                break
            batch = found  # Of very many lines that are cancelled some are left.

    async def _guarded(self, batch: Batch, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, or see to it that it is done again."""
        try:
            await work
            self._trouble.over(batch.id)
        except (FolderError, StoreError) as error:
            self._retry_at[batch.id] = self.storage.clock() + RETRY_SECONDS
            self._trouble.tell(error, batch.id)
            if isinstance(error, FolderError):
                is_full = isinstance(error, FolderFull)
                reason = results.STORAGE_FULL if is_full else results.STORAGE_UNAVAILABLE
                with contextlib.suppress(StoreError):
                    await self._pause(batch, reason)
        except Exception:
            log.exception("work on a batch has failed", batch=batch.id, state=batch.state.value)
            tries = self._tries[batch.id] = self._tries.get(batch.id, 0) + 1
            self._retry_at[batch.id] = self.storage.clock() + RETRY_SECONDS * 2.0**tries
            if tries >= MOST_TRIES and batch.state is BatchState.VALIDATING:
                message = "The gateway could not read the input; its log tells why."
                with contextlib.suppress(StoreError):
                    await self._fail(batch, "internal_error", message, None)

    async def _pause(self, batch: Batch, reason: str) -> None:
        """Let its lines wait. Raises: StoreError."""
        now = self.storage.now()
        await self.storage.write(batch_rows.pause_batch, batch.owner, batch.id, now, reason)

    async def _resume(self, found: Iterable[Batch]) -> None:
        """Let batches go on that were paused for want of room. Raises: StoreError."""
        storage = self.storage
        broken = storage.now() - UNAVAILABLE_SECONDS
        waiting = [
            one
            for one in found
            if one.pause_reason == results.STORAGE_FULL
            or (
                one.pause_reason == results.STORAGE_UNAVAILABLE and (one.paused_at or 0.0) <= broken
            )
        ]
        if not waiting:
            return
        try:
            await storage.threads.run(storage.folder.check_room, STEP_BYTES)
        except FolderError:
            return
        for batch in waiting:
            await storage.write(batch_rows.resume_batch, batch.owner, batch.id, reasons=_STORAGE)
            self._retry_at.pop(batch.id, None)
        log.info("batches go on: there is room again", batches=len(waiting))
        self.on_rows()

    async def _hold(self, found: Iterable[Batch]) -> None:
        """Pause the batches of keys that keep as much as they may, until there is room again.

        Lines that run go on to their end, and their results are kept. Raises: StoreError.
        """
        running = [
            one
            for one in found
            if one.state is BatchState.IN_PROGRESS
            and (one.paused_at is None or one.pause_reason == KEY_STORAGE_FULL)
        ]
        if not running:
            self.full_owners = frozenset()
            return
        storage, owners = self.storage, {one.owner for one in running}
        most = storage.settings().bytes_per_key
        full = await storage.read(full_owners, owners, most, storage.now())
        self.full_owners = frozenset(full)
        for batch in running:
            if batch.owner in full and batch.paused_at is None:
                await self._pause(batch, KEY_STORAGE_FULL)
                log.info("a batch waits: its key keeps as much as it may", batch=batch.id)
            elif batch.owner not in full and batch.paused_at is not None:
                reasons = {KEY_STORAGE_FULL}
                await storage.write(batch_rows.resume_batch, batch.owner, batch.id, reasons=reasons)
                log.info("a batch goes on: its key has room again", batch=batch.id)
                self.on_rows()

    # The input.

    async def take_in(self, batch: Batch) -> None:
        """Read the input of a batch that is validating, and begin or fail it.

        Raises: FolderError, StoreError; then it is to be done again.
        """
        threads, settings = self.storage.threads, self.storage.settings()
        try:
            opened = await self.storage.open_to_read(input_place(batch))
        except FileNotFoundError:
            log.warning("the input of a batch is missing", batch=batch.id)
            await self._fail(batch, "file_not_found", "The input file is gone.")
            return
        file = io.BufferedReader(opened, PIECE_BYTES)
        try:
            reader = LineReader(
                file, batch.endpoint, most_lines=settings.lines, line_bytes=settings.line_bytes
            )
            taken = await self._take_lines(batch, reader)
        except TooManyLines:
            message = f"The input has more than {settings.lines} lines ('batches.lines')."
            await self._fail(batch, "too_many_lines", message)
            return
        finally:
            await threads.run(file.close)
        if not taken:
            return  # It is cancelled.
        if not reader.total:
            message = (
                "The input file is empty. Please ensure that your batch contains at least one "
                "request."
            )
            await self._fail(batch, "empty_file", message)
            return
        now = self.storage.now()
        await self.storage.write(batch_rows.begin_batch, batch.id, reader.model, now)
        log.info("batch begun", batch=batch.id, lines=reader.total, broken=reader.failed)
        self.on_rows()

    async def _take_lines(self, batch: Batch, reader: LineReader) -> bool:
        """Add the rows of all lines; returns False if the batch takes none any more."""
        errors: list[NewFile] = []  # the file of the error lines, once there is one
        threads = self.storage.threads
        try:
            while lines := await threads.run(self._read_some, reader):
                rows = await threads.run(self._rows_of, batch, lines, errors)
                if not await self.storage.write(claims.add_rows, rows):
                    return False
        finally:
            for file in errors:
                await threads.run(file.close)
        return True

    def _read_some(self, reader: LineReader) -> list[Line]:
        with self.storage.folder.translated_errors():
            return reader.read_some()

    def _rows_of(
        self, batch: Batch, lines: Sequence[Line], errors: list[NewFile]
    ) -> list[StoredRow]:
        """The rows of these lines; errors are on the disk. Blocks. Raises: FolderError."""
        broken = [
            results.broken_line(claims.line_id(batch.id, one.number), batch.api, one)
            for one in lines
            if isinstance(one, LineError)
        ]
        if broken and not errors:
            errors.append(self.storage.folder.open_appended(results.RESULTS))
        offset = errors[0].append(b"".join(broken)) if broken else 0
        lengths, rows = map(len, broken), list[StoredRow]()
        of_batch: dict[str, Any] = {
            "kind": RequestKind.LINE, "owner": batch.owner, "path": batch.endpoint,
            "place": input_place(batch), "created_at": batch.created_at,
            "keep_until": batch.keep_until, "folder": batch.folder, "class_": batch.class_,
            "batch": batch.id, "group_name": batch.group_name, "user": batch.user,
            "deadline": batch.expires_at,
        }  # fmt: skip
        for line in lines:
            told: dict[str, Any]
            if isinstance(line, LineSpec):
                told = {name: getattr(line, name) for name in _OF_LINES}
            else:
                told = {
                    "number": line.number, "offset": line.offset, "length": line.length,
                    "custom_id": line.custom_id if line.is_first else None,
                    "state": RequestState.FAILED, "ended_at": self.storage.now(),
                    "error_code": line.code, "result_place": errors[0].name,
                    "result_offset": offset, "result_length": next(lengths),
                }  # fmt: skip
                offset += told["result_length"]
            rows.append(StoredRow(id=claims.line_id(batch.id, line.number), **of_batch, **told))
        return rows

    async def _fail(
        self, batch: Batch, code: str, message: str, param: str | None = "input_file_id"
    ) -> None:
        errors = [{"code": code, "message": message, "param": param, "line": None}]
        await self.storage.write(
            batch_rows.fail_batch, batch.id, errors, self.storage.now(), self.on_end
        )
        log.info("batch failed", batch=batch.id, why=code)

    # The end.

    async def end(self, id_: str) -> Batch | None:
        """End the batch; None: it has lines that have not ended, or somebody else has ended it.

        Raises: FolderError, StoreError; then it is to be done again.
        """
        storage, threads = self.storage, self.storage.threads
        batch = await storage.write(batch_rows.begin_finalizing, id_, storage.now())
        if batch is None:
            return None
        files = _FinalFiles(storage.folder, batch)
        try:
            after = 0
            while rows := await storage.read(claims.result_rows, id_, after, PAGE_ROWS):
                await threads.run(files.add, rows)
                after = rows[-1].number or 0
            now, keep = storage.now(), storage.settings().keep
            kept = keep if batch.output_seconds is None else min(keep, batch.output_seconds)
            output, errors = await threads.run(files.finish, now, kept)
        finally:
            with contextlib.suppress(FolderError):
                await threads.run(files.close)
        try:
            ended = await storage.write(batch_rows.end_batch, id_, output, errors, now, self.on_end)
        except StoreUnavailable:
            # It may have ended; files without a row are removed later (`FileRegistry`).
            raise
        except StoreError:
            await threads.run(files.remove)
            raise
        if ended is None:
            await threads.run(files.remove)
            return None
        log.info(
            "batch ended", batch=id_, state=ended.state.value, lines=ended.total,
            completed=ended.completed, failed=ended.failed, cancelled=ended.cancelled,
            expired=ended.expired,
        )  # fmt: skip
        return ended

    # What is old.

    async def remove_due(self) -> int:
        """Remove batches whose time is over; returns how many. Raises: FolderError, StoreError."""
        storage, gone = self.storage, 0
        folder = await storage.opened()
        while True:
            due = await storage.write(
                batch_rows.take_due_batches, folder, storage.now(), STEP_BATCHES
            )
            for id_, places in due.items():
                await self.remove(id_, places)
            gone += len(due)
            if len(due) < STEP_BATCHES:
                break
        if gone:
            log.info("batches removed", batches=gone)
        return gone

    async def _remove_requests(self, folder: str) -> None:
        """Remove the requests of batches that have ended. Raises: FolderError, StoreError."""
        ended = await self.storage.read(batch_rows.with_requests, folder, STEP_BATCHES)
        for batch in ended:
            if batch.input_file is None:
                await self.storage.delete(input_place(batch))
        if ended:
            await self.storage.write(batch_rows.requests_removed, [one.id for one in ended])

    async def remove(self, id_: str, places: Iterable[str]) -> None:
        """Remove a batch that is nobody's any more. Raises: FolderError, StoreError."""
        for name in places:
            await self.storage.delete(name)
        while not await self.storage.write(batch_rows.remove_batches, [id_]):
            pass

    async def clean(self) -> int:
        """Remove files that no unfinished batch needs; returns how many.

        Raises: FolderError, StoreError.
        """
        folder, gone = await self.storage.opened(), 0
        for kind in (results.RESULTS, REQUESTS):
            gone += await self.storage.remove_left_over(
                kind, CLEAN_SECONDS, lambda connection, _: _needed(connection, folder)
            )
        if gone:
            log.info("files of ended batches removed", files=gone)
        return gone


def _needed(connection: Connection, folder: str) -> set[str]:
    """The files of the folder that hold requests or results of unfinished batches, or of none."""
    rows = stored_requests.c
    alone = select(rows.place, rows.result_place).where(rows.folder == folder, rows.batch.is_(None))
    names = {name for pair in connection.execute(alone.distinct()) for name in pair}
    for batch in batch_rows.unfinished(connection, folder):
        of_batch = select(rows.result_place).where(rows.batch == batch.id).distinct()
        names.update(connection.scalars(of_batch))
        names.add(input_place(batch))
    return names - {None}


# The paths of which a batch can be.
ENDPOINTS = tuple(
    path
    for path, route in ROUTES.items()
    if path.startswith("/v1/") and route.takes_slot and not route.multipart
)

PAUSED_BY_CALLER = "paused"  # why a batch is paused whose caller wants it so
SHOWN_ROWS = 200  # rows that are read at a time for lines that are recorded so far
# The mean cost of a token of this model; None: unknown.
TokenPrice = Callable[[str | None], float | None]


@dataclass(frozen=True, slots=True)
class NewBatch(AskedBatch):
    """A batch that is to be made."""

    requests: str | None = None
    """Name of a complete file of the folder, of `BatchRegistry.new_requests`, in the form of an
    input file, if there is no input file. It belongs to the batch from now on; if `create` raises,
    it is removed."""
    window: str | None = None  # its `completion_window`, such as `24h`; None: the settings' default


@dataclass(slots=True, eq=False)
class BatchRegistry:
    """The batches of all callers, in one folder and one store.

    `price` gives the mean cost of a token; `owner` is always the id of a key.
    """

    storage: Storage
    upkeep: BatchUpkeep
    price: TokenPrice = lambda _: None

    # For callers. All raise GatewayError 503 while the store or the folder can't be used.

    async def create(self, new: NewBatch) -> Batch:
        """A new batch, or the earlier one with the same idempotency key.

        Raises: GatewayError 400, 422 (that key with another request), 429.
        """
        undo = partial(self._discard, new)
        try:
            batch = await self._new(new)
        except GatewayError:
            await undo()
            raise
        try:
            added = await self.storage.add_surely(
                undo, batch_rows.add_batch, batch, self.storage.settings()
            )
        finally:
            self.upkeep.work.added()  # It may be there, though the store has not said so.
        if added.id == batch.id:
            self.upkeep.wake()
        else:
            await undo()
        return added

    async def check_room(self, owner: str, size: int) -> None:
        """Refuse requests that there is no room for. Raises: GatewayError 429, 503."""
        settings = self.storage.settings()
        kept = await self.storage.read_for_caller(kept_by, owner, self.storage.now())
        if kept.bytes + max(1, size) > settings.bytes_per_key:
            raise kept_too_much(kept, settings)

    async def new_requests(self, size: int | None = None) -> NewFile:
        """A file of the folder for the lines of a batch without an input file.

        The caller ends it by `finish` or `discard`, on a thread. Raises: GatewayError 507.
        """
        return await self.storage.open_new(REQUESTS, size)

    async def find(self, owner: str | None, id_: str, api: str | None) -> Batch:
        """The batch; None: whoever owns it, of either API. Raises: GatewayError 404."""
        found = await self.storage.read_for_caller(batch_rows.find_batch, owner, id_, api)
        return _found(found, id_, api)

    async def cancel(self, owner: str, id_: str, api: str) -> Batch:
        """Cancel it; again, nothing. Raises: GatewayError 404, 409 (OpenAI's, if it has ended)."""
        before, storage = await self.find(owner, id_, api), self.storage
        found = await storage.write_for_caller(
            batch_rows.cancel_batch, owner, id_, api, storage.now()
        )
        batch = _found(found, id_, api)
        self.upkeep.wake()
        if api != results.ANTHROPIC and batch.cancelling_at is None and before.state.ended:
            raise _has_ended("cancel", batch)
        return batch

    async def pause(self, owner: str, id_: str, api: str) -> Batch:
        """Start no more of its lines. Raises: GatewayError 404, 409 if it has ended."""
        storage = self.storage
        found = await storage.write_for_caller(
            batch_rows.pause_batch, owner, id_, storage.now(), PAUSED_BY_CALLER, api
        )
        return self._unended("pause", _found(found, id_, api))

    async def resume(self, owner: str, id_: str, api: str) -> Batch:
        """Go on with it. Raises: GatewayError 404, 409 if it has ended."""
        found = await self.storage.write_for_caller(batch_rows.resume_batch, owner, id_, api)
        return self._unended("resume", _found(found, id_, api))

    def _unended(self, verb: str, batch: Batch) -> Batch:
        """The batch, to which that was done. Raises: GatewayError 409, if it had ended."""
        if batch.state.ended:
            raise _has_ended(verb, batch)
        self.upkeep.on_rows()  # They may run, or those that were claimed are put back.
        return batch

    async def delete(self, owner: str, id_: str, api: str) -> None:
        """Remove an ended batch and its results. Raises: GatewayError 400 (unended), 404."""
        batch = await self.find(owner, id_, api)
        if not batch.state.ended:
            raise GatewayError(
                400,
                "batch_in_progress",
                "In progress batches cannot be deleted. Consider canceling the batch instead.",
            )
        storage = self.storage
        places = await storage.write_for_caller(batch_rows.delete_batch, owner, id_, api)
        if places is None:
            raise _not_found(id_, api)
        # The owner has lost it; whatever fails now, `BatchUpkeep` and `FileRegistry` do again.
        with contextlib.suppress(FolderError, StoreError):
            is_here = batch.folder == await storage.opened()
            for file in (batch.output_file, batch.error_file):
                if file is not None:
                    with contextlib.suppress(GatewayError):  # It is deleted already.
                        await storage.write(delete_file, owner, file, storage.now())
                    if is_here:
                        await storage.delete(file)
            if is_here:
                await self.upkeep.remove(id_, places)

    async def progress(self, batch: Batch) -> tuple[BatchProgress, BatchWait | None]:
        """How far it is, and what it waits for."""
        left = await self.storage.read_for_caller(claims.work_left, batch.id)
        wait, ahead = None, NOTHING_AHEAD
        if self.upkeep.waits is not None:
            wait, ahead = await self.upkeep.waits.outlook(batch, left.running)
        speed, price = self.upkeep.speeds.speed(batch.id), self.price(batch.model)
        now = self.storage.now()
        return batch_rows.progress_of(batch, left, speed, price, now, ahead), wait

    async def waits_of(self, found: Sequence[Batch]) -> list[BatchWait | None]:
        """What each of these batches waits for."""
        waits = self.upkeep.waits
        return [None] * len(found) if waits is None else await waits.of(found)

    async def open_output(self, owner: str, id_: str, api: str, *, errors: bool = False) -> Content:
        """Its output or error lines: the final file, or what is recorded so far.

        Those of `anthropic` are all output. Raises: GatewayError 404.
        """
        batch, storage = await self.find(owner, id_, api), self.storage
        with folder_errors_told():
            if batch.folder != await storage.opened():
                raise file_elsewhere("This batch")
        kind = "results" if api == results.ANTHROPIC else "error" if errors else "output"
        name = f"{id_}_{kind}.jsonl"
        if not batch.state.ended:
            reader = ResultReader(storage.folder, api, keeps_all=True)
            return Content(name, None, self._recorded_pieces(batch, reader, output=not errors))
        file = batch.error_file if errors else batch.output_file
        if file is None:
            return Content.of_file(name, 0, io.BytesIO(), storage.threads)
        found = await storage.read_for_caller(find_file, owner, file, storage.now())
        if found is None:
            raise _results_gone(id_)
        try:
            with folder_errors_told():
                opened = await storage.open_to_read(file)
        except FileNotFoundError:
            log.warning("the results of a batch are missing in the folder", batch=id_, file=file)
            raise _results_gone(id_) from None
        return Content.of_file(name, found.bytes, opened, storage.threads)

    async def errors_of(self, batch: Batch) -> list[ErrorKind]:
        """How its lines have failed so far, the most frequent error first."""
        return await self.storage.read_for_caller(batch_rows.count_errors, batch.id)

    async def _new(self, new: NewBatch) -> Batch:
        """The row of a new batch. Raises: GatewayError 400, 503."""
        settings, now = self.storage.settings(), self.storage.now()
        if new.endpoint not in ENDPOINTS:
            known = ", ".join(f"'{path}'" for path in ENDPOINTS[:-1])
            shown = errors.truncate_echo(new.endpoint)
            raise GatewayError(
                400,
                "invalid_value",
                f"Invalid value: '{shown}'. Supported values are: {known} and '{ENDPOINTS[-1]}'.",
                param="endpoint",
            )
        window = _seconds_of(new.window, settings)
        with folder_errors_told():
            folder = await self.storage.opened()
        id_ = claims.new_id(PREFIXES[new.api], now, secrets.token_hex)
        if new.requests is not None:
            # So its requests are found by its id.
            id_ = PREFIXES[new.api] + new.requests.rpartition("-")[2]
        return Batch(
            **{one.name: getattr(new, one.name) for one in fields(AskedBatch)},
            id=id_, created_at=now, expires_at=now + window,
            keep_until=now + window + settings.keep, folder=folder,
        )  # fmt: skip

    async def _discard(self, new: NewBatch) -> None:
        """Remove the requests of a batch that was not added."""
        if new.requests is not None:
            with contextlib.suppress(FolderError):
                await self.storage.delete(new.requests)

    async def _recorded_pieces(
        self, batch: Batch, reader: ResultReader, *, output: bool
    ) -> AsyncIterator[bytes]:
        after, read = 0, self.storage.read_for_caller
        while rows := await read(claims.result_rows, batch.id, after, SHOWN_ROWS):
            pieces = reader.pieces(rows)
            with folder_errors_told():
                while found := await self.storage.threads.run(next, pieces, None):
                    if found[1] is output:
                        yield found[0]
            after = rows[-1].number or 0


def _seconds_of(window: str | None, settings: BatchSettings) -> float:
    """Raises: GatewayError 400."""
    windows = settings.windows
    if window is None:
        return windows.default
    try:
        seconds = parse_duration(window)
    except ValueError:
        seconds = -1.0
    if not windows.shortest <= seconds <= windows.longest:
        shown = errors.truncate_echo(window)
        raise GatewayError(
            400,
            "invalid_value",
            f"Invalid value: '{shown}'. 'completion_window' must be a time from "
            f"{format_duration(windows.shortest)} to {format_duration(windows.longest)}, such as "
            f"'{format_duration(windows.default)}'.",
            param="completion_window",
        )
    return seconds


def _found(batch: Batch | None, id_: str, api: str | None) -> Batch:
    """Raises: GatewayError 404."""
    if batch is None:
        raise _not_found(id_, api)
    return batch


def _not_found(id_: str, api: str | None) -> GatewayError:
    shown = errors.truncate_echo(id_)
    message = f"No batch found with id '{shown}'."
    if api == results.ANTHROPIC:
        message = f"Message Batch {shown} not found."
    return GatewayError(404, "batch_not_found", message)


def _has_ended(verb: str, batch: Batch) -> GatewayError:
    return GatewayError(
        409,
        "batch_ended",
        f"Cannot {verb} a batch with status '{batch.state.value}'.",
        retryable=False,
    )


def _results_gone(id_: str) -> GatewayError:
    shown = errors.truncate_echo(id_)
    return GatewayError(
        404, "results_gone", f"The results of '{shown}' were deleted, or have expired."
    )
