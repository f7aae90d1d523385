"""What batches need without being asked: their input is read, they end, and what is old goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Iterable
from functools import partial
from typing import Any

import structlog
from sqlalchemy import Connection, select

from gateway.batches.batch_end import BatchEnd
from gateway.batches.batch_rows import (
    Batch,
    EndListener,
    expire_lines,
    fail_batch,
    find_batch,
    pause_batch,
    remove_batches,
    requests_removed,
    resume_batch,
    take_due_batches,
    unfinished,
    with_requests,
)
from gateway.batches.disk_threads import DiskThreads
from gateway.batches.folder import STEP_BYTES, Folder, FolderError, FolderFull, FoundFile
from gateway.batches.intake import REQUESTS, Intake, input_place
from gateway.batches.kept_bytes import KEY_STORAGE_FULL, full_owners
from gateway.batches.progress import SpeedMeter
from gateway.batches.request_rows import STEP_ROWS
from gateway.batches.results import RESULTS, STORAGE_FULL, STORAGE_UNAVAILABLE
from gateway.batches.states import BatchState
from gateway.batches.unfinished_work import UnfinishedWork
from gateway.store.failures import StoreError
from gateway.store.schema import batches, stored_requests
from gateway.store.store import Store

ROUND_SECONDS = 1.0
"""Seconds between two looks at the unfinished batches."""

IDLE_SECONDS = 5.0
"""The same while there are none: another process of the folder may have added one."""

EXPIRE_SECONDS = 10.0
"""Seconds between two looks for requests without a batch that are late."""

RETRY_SECONDS = 5.0
"""Seconds after which it is tried again to read the input of a batch, or to end it."""

UNAVAILABLE_SECONDS = 30.0
"""Seconds after which a batch goes on that was paused since the folder failed for another reason
than want of room: nothing tells that it works again but work."""

MOST_TRIES = 3
"""Tries to read an input, if each fails for a reason that nobody has thought of."""

MOST_AT_ONCE = 2
"""Batches whose input is read, or which are being ended, at one time."""

REMOVE_SECONDS = 60.0
"""Seconds between two rounds of removing batches whose time is over."""

STEP_BATCHES = 100
"""Batches that are removed in one step."""

CLEAN_SECONDS = 600.0
"""Seconds between two rounds of removing files that no batch needs any more, and the age from which
on they are: somebody may read the results of a batch that has just ended."""

_ENDING = frozenset({BatchState.FINALIZING, BatchState.CANCELLING})

_STORAGE = frozenset({STORAGE_FULL, STORAGE_UNAVAILABLE})

log = structlog.get_logger()


class BatchUpkeep:
    """The work on all batches of one folder. `now` gives Unix time, `clock` monotonic seconds."""

    def __init__(
        self,
        store: Store,
        folder: Folder,
        threads: DiskThreads,
        intake: Intake,
        end: BatchEnd,
        speeds: SpeedMeter,
        now: Callable[[], float],
        clock: Callable[[], float],
        work: UnfinishedWork,
        on_rows: Callable[[], None],
        on_end: EndListener | None = None,
        *,
        round_seconds: float = ROUND_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._store = store
        self._folder = folder
        self._threads = threads
        self.intake = intake
        self.end = end
        self._on_rows = on_rows
        self._speeds = speeds
        self._now = now
        self._clock = clock
        self._work = work
        self._on_end = on_end
        self._round_seconds, self._idle_seconds = round_seconds, idle_seconds
        self._wakes = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By batch."""
        self._begun = 0
        """How many, since `wait_for_work` was called last."""
        self._retry_at: dict[str, float] = {}
        """When a batch is tried again, of those that could not be."""
        self._tries: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        """Why a batch waits, or under no name why all do, as told in the log."""
        self.folder_error: FolderError | None = None
        """Why the folder can't be used, as the last round found."""
        self.full_owners: frozenset[str] = frozenset()
        """Whose batches wait, since they keep as much as they may."""
        self._remove_at = self._clean_at = self._expire_at = 0.0
        self._is_idle = False

    def wake(self) -> None:
        """There may be something to do."""
        self._wakes.set()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            while True:
                try:
                    if self._folder.full is not None:
                        await self._threads.run(self._folder.look_for_room)
                    if await self._is_due():
                        await self.round()
                except (FolderError, StoreError) as error:
                    self.folder_error = error if isinstance(error, FolderError) else None
                    self._failed("", str(error))
                else:
                    self.folder_error = None
                    self._problems.pop("", None)
                pause = self._idle_seconds if self._is_idle else self._round_seconds
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wakes.wait()
                self._wakes.clear()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _is_due(self) -> bool:
        """Whether a round may have something to do. Raises: FolderError, StoreError."""
        if await self._work.exists() or self._tasks:
            return True
        was_idle, self._is_idle = self._is_idle, True
        return not was_idle or self._clock() >= min(self._remove_at, self._clean_at)

    async def round(self) -> None:
        """Begin what is due. Raises: FolderError, StoreError."""
        folder, now = self._folder.id, self._now()
        if folder is None:
            folder = await self._threads.run(self._folder.open)
        found = await self._store.run(partial(unfinished, folder=folder), write=False)
        self._is_idle = not found
        if self._clock() >= self._expire_at or any(_is_late(one, now) for one in found):
            self._expire_at = self._clock() + EXPIRE_SECONDS
            late = await self._store.run(partial(expire_lines, folder=folder, now=now))
            if late:
                found = await self._store.run(partial(unfinished, folder=folder), write=False)
            if late == STEP_ROWS:
                self._expire_at = 0.0  # There are more of them.
        self._speeds.look(
            (one for one in found if one.state is BatchState.IN_PROGRESS), self._clock()
        )
        known = {one.id for one in found}
        for noted in (self._retry_at, self._tries, self._problems):
            for id_ in noted.keys() - known - {""}:
                del noted[id_]
        await self._resume(found)
        await self._hold(found)
        for batch in found:
            self._begin(batch)
        await self._remove_requests(folder)
        if self._clock() >= self._remove_at:
            await self.remove_due()
            self._remove_at = self._clock() + REMOVE_SECONDS
        if self._clock() >= self._clean_at:
            await self.clean()
            self._clean_at = self._clock() + CLEAN_SECONDS

    async def wait_for_work(self) -> bool:
        """Wait for the end of what has begun; returns whether there was anything since the last."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
        begun, self._begun = self._begun, 0
        return begun > 0

    # Batches.

    def _begin(self, batch: Batch) -> None:
        """Begin to read the batch's input or to end it, if that is due."""
        work: Coroutine[Any, Any, None]
        if len(self._tasks) >= MOST_AT_ONCE or batch.id in self._tasks:
            return
        if self._clock() < self._retry_at.get(batch.id, 0.0):
            return
        if batch.state is BatchState.VALIDATING:
            work = self._take_in(batch)
        elif batch.state in _ENDING or batch.ended_lines >= batch.total:
            work = self._finish(batch)
        else:
            return
        task = asyncio.create_task(self._guarded(batch, work))
        self._tasks[batch.id] = task
        self._begun += 1
        task.add_done_callback(partial(self._done, batch.id))

    def _done(self, id_: str, _: asyncio.Task[None]) -> None:
        del self._tasks[id_]
        self._wakes.set()

    async def _take_in(self, batch: Batch) -> None:
        await self.intake.take_in(batch)
        self._on_rows()

    async def _finish(self, batch: Batch) -> None:
        while await self.end.end(batch.id) is None:
            ended_lines = batch.ended_lines
            job = partial(find_batch, owner=batch.owner, id_=batch.id, api=batch.api)
            found = await self._store.run(job, write=False)
            if found is None or found.ended_lines == ended_lines:
                # Others of its lines run yet, or another process ends it.
                self._retry_at[batch.id] = self._clock() + self._round_seconds
                break
            batch = found  # Of very many lines that are cancelled some are left.

    async def _guarded(self, batch: Batch, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, or see to it that it is done again."""
        try:
            await work
            self._problems.pop(batch.id, None)
        except FolderError as error:
            self._retry_at[batch.id] = self._clock() + RETRY_SECONDS
            self._failed(batch.id, str(error))
            reason = STORAGE_FULL if isinstance(error, FolderFull) else STORAGE_UNAVAILABLE
            job = partial(pause_batch, owner=batch.owner, id_=batch.id, now=self._now())
            with contextlib.suppress(StoreError):
                await self._store.run(partial(job, reason=reason))
        except StoreError as error:
            self._retry_at[batch.id] = self._clock() + RETRY_SECONDS
            self._failed(batch.id, str(error))
        except Exception:
            log.exception("work on a batch has failed", batch=batch.id, state=batch.state.value)
            await self._give_up(batch)

    async def _give_up(self, batch: Batch) -> None:
        """Fail a batch whose input can't be read, after some tries."""
        tries = self._tries[batch.id] = self._tries.get(batch.id, 0) + 1
        self._retry_at[batch.id] = self._clock() + RETRY_SECONDS * 2.0**tries
        if tries >= MOST_TRIES and batch.state is BatchState.VALIDATING:
            message = "The gateway could not read the input; its log tells why."
            errors = [{"code": "internal_error", "message": message, "param": None, "line": None}]
            with contextlib.suppress(StoreError):
                await self._store.run(
                    partial(
                        fail_batch, id_=batch.id, errors=errors, now=self._now(), also=self._on_end
                    )
                )

    async def _resume(self, found: Iterable[Batch]) -> None:
        """Let batches go on that were paused for want of room. Raises: StoreError."""
        broken = self._now() - UNAVAILABLE_SECONDS
        waiting = [
            one
            for one in found
            if one.pause_reason == STORAGE_FULL
            or (one.pause_reason == STORAGE_UNAVAILABLE and (one.paused_at or 0.0) <= broken)
        ]
        if not waiting:
            return
        try:
            await self._threads.run(self._folder.check_room, STEP_BYTES)
        except FolderError:
            return
        for batch in waiting:
            await self._store.run(partial(_resume_batch, batch, _STORAGE))
            self._retry_at.pop(batch.id, None)
        log.info("batches go on: there is room again", batches=len(waiting))
        self._on_rows()

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
        owners, most = {one.owner for one in running}, self.intake.settings().bytes_per_key
        job = partial(full_owners, owners=owners, most_bytes=most, now=self._now())
        full = await self._store.run(job, write=False)
        self.full_owners = frozenset(full)
        for batch in running:
            if batch.owner in full and batch.paused_at is None:
                job_of = partial(pause_batch, owner=batch.owner, id_=batch.id, now=self._now())
                await self._store.run(partial(job_of, reason=KEY_STORAGE_FULL))
                log.info("a batch waits: its key keeps as much as it may", batch=batch.id)
            elif batch.owner not in full and batch.paused_at is not None:
                await self._store.run(partial(_resume_batch, batch, {KEY_STORAGE_FULL}))
                log.info("a batch goes on: its key has room again", batch=batch.id)
                self._on_rows()

    def _failed(self, id_: str, why: str) -> None:
        """Tell it once, and not for each batch."""
        if why not in self._problems.values():
            log.warning("batches wait", why=why)
        self._problems[id_] = why

    # What is old.

    async def remove_due(self) -> int:
        """Remove batches whose time is over; returns how many. Raises: FolderError, StoreError."""
        folder, gone = self._folder.id, 0
        assert folder is not None
        while True:
            job = partial(take_due_batches, folder=folder, now=self._now(), limit=STEP_BATCHES)
            due = await self._store.run(job)
            for one in due:
                await self.remove(one.id, one.places)
            gone += len(due)
            if len(due) < STEP_BATCHES:
                break
        if gone:
            log.info("batches removed", batches=gone)
        return gone

    async def _remove_requests(self, folder: str) -> None:
        """Remove the requests of batches that have ended. Raises: FolderError, StoreError."""
        job = partial(with_requests, folder=folder, limit=STEP_BATCHES)
        if not (ended := await self._store.run(job, write=False)):
            return
        for batch in ended:
            if batch.input_file is None:
                await self._threads.run(self._folder.delete, input_place(batch))
        await self._store.run(partial(requests_removed, ids=[one.id for one in ended]))

    async def remove(self, id_: str, places: Iterable[str]) -> None:
        """Remove a batch that is nobody's any more. Raises: FolderError, StoreError."""
        for name in places:
            await self._threads.run(self._folder.delete, name)
        while not await self._store.run(partial(remove_batches, ids=[id_])):
            pass

    async def clean(self) -> int:
        """Remove files that no unfinished batch needs; returns how many.

        Raises: FolderError, StoreError.
        """
        before, gone = self._now() - CLEAN_SECONDS, 0
        old = [
            one.name
            for kind in (RESULTS, REQUESTS)
            for one in await self._threads.run(_listed, self._folder, kind)
            if one.changed_at < before
        ]
        # The rows after the files: who writes one closes it when its rows are in the store.
        complete = [one for one in old if await self._threads.run(_is_complete, self._folder, one)]
        if not complete:
            return 0
        assert self._folder.id is not None
        needed = await self._store.run(partial(_needed, self._folder.id), write=False)
        for name in complete:
            if name not in needed:
                gone += await self._threads.run(self._folder.delete, name)
        if gone:
            log.info("files of ended batches removed", files=gone)
        return gone


def _is_late(batch: Batch, now: float) -> bool:
    return (
        batch.state is BatchState.IN_PROGRESS
        and batch.expires_at <= now
        and batch.ended_lines < batch.total
    )


def _listed(folder: Folder, kind: str) -> list[FoundFile]:
    return list(folder.files(kind))


def _is_complete(folder: Folder, name: str) -> bool:
    """Whether the file is there and no process writes it any more."""
    try:
        return not folder.is_written(name)
    except FileNotFoundError:
        return False


def _needed(folder: str, connection: Connection) -> set[str]:
    """The files of the folder that hold requests or results of unfinished batches, or of none."""
    rows = stored_requests.c
    alone = select(rows.place, rows.result_place).where(rows.folder == folder, rows.batch.is_(None))
    names = {name for pair in connection.execute(alone.distinct()) for name in pair}
    for batch in unfinished(connection, folder):
        of_batch = select(rows.result_place).where(rows.batch == batch.id).distinct()
        names.update(connection.scalars(of_batch))
        names.add(input_place(batch))
    return names - {None}


def _resume_batch(batch: Batch, reasons: Collection[str], connection: Connection) -> None:
    """Resume the batch, unless it was paused for another reason than these meanwhile."""
    reason = connection.scalar(select(batches.c.pause_reason).where(batches.c.id == batch.id))
    if reason in reasons:
        resume_batch(connection, batch.owner, batch.id)
