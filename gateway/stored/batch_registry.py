"""Batches for their callers: created, shown, listed, cancelled, paused, deleted, and read."""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
from sqlalchemy import Connection

from gateway import errors
from gateway.config.fields import format_duration, parse_duration
from gateway.config.stored import BatchSettings
from gateway.errors import GatewayError
from gateway.request.routes import ROUTES
from gateway.store.failures import StoreError
from gateway.store.store import Store
from gateway.stored.batch_rows import (
    Batch,
    BatchPage,
    BatchProgress,
    EndListener,
    SpeedMeter,
    add_batch,
    cancel_batch,
    delete_batch,
    find_batch,
    pause_batch,
    progress_of,
    read_batches,
    resume_batch,
)
from gateway.stored.batch_upkeep import REQUESTS, BatchUpkeep
from gateway.stored.claims import UnfinishedWork, job, new_id, result_rows, work_left
from gateway.stored.files import Content, delete_file, find_file, kept_by, kept_too_much
from gateway.stored.folder import (
    DiskThreads,
    Folder,
    FolderError,
    NewFile,
    add_surely,
    ask_store,
    folder_errors_told,
)
from gateway.stored.results import ANTHROPIC, ResultReader

__all__ = ["ENDPOINTS", "BatchProgress", "BatchRegistry", "NewBatch"]

# The paths of which a batch can be.
ENDPOINTS = tuple(
    path
    for path, route in ROUTES.items()
    if path.startswith("/v1/") and route.takes_slot and not route.multipart
)

PAUSED_BY_CALLER = "paused"  # why a batch is paused whose caller wants it so
PAGE_ROWS = 200  # rows that are read at a time for lines that are recorded so far
_PREFIXES = {ANTHROPIC: "msgbatch_"}
log = structlog.get_logger()
T = TypeVar("T")
# The mean cost of a token of this model; None: unknown.
TokenPrice = Callable[[str | None], float | None]


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a caller asks for. `owner` is the id of a key."""

    owner: str
    api: str  # `openai` or `anthropic`
    endpoint: str  # the path of all its lines: one of `ENDPOINTS`
    input_file: str | None = None
    """Id of a file with the purpose `batch`; None: `requests` has the lines."""
    requests: str | None = None
    """Name of a complete file of the folder, of `BatchRegistry.new_requests`, in the form of an
    input file. It belongs to the batch from now on; if `create` raises, it is removed."""
    requests_bytes: int = 0  # of that file
    window: str | None = None  # its `completion_window`, such as `24h`; None: the settings' default
    metadata: dict[str, str] | None = None
    output_seconds: float | None = None
    """For how long its output files are kept (`output_expires_after`)."""
    idempotency_key: str | None = None
    request_digest: str | None = None
    webhook_url: str | None = None
    group_name: str | None = None
    user: str | None = None
    class_: str = "batch"  # label of the highest class that its lines may be raised to


class BatchRegistry:
    """The batches of all callers, in one folder and one store.

    `settings` gives those in force, `now` Unix time, `clock` monotonic seconds, `price` the mean
    cost of a token. `owner` is always the id of a key.
    """

    def __init__(
        self,
        store: Store,
        folder: Folder,
        settings: Callable[[], BatchSettings],
        now: Callable[[], float],
        clock: Callable[[], float],
        threads: DiskThreads | None = None,
        work: UnfinishedWork | None = None,
        *,
        price: TokenPrice = lambda _: None,
        on_end: EndListener | None = None,
        on_rows: Callable[[], None] = lambda: None,
        token: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        """`on_rows` is called when rows may run, or may not any more: `Feeder.wake`."""
        self.folder = folder
        self._store = store
        self._settings = settings
        self._now = now
        self._threads = threads or DiskThreads()
        self.on_disk = self._threads.on_disk
        self._price = price
        self._on_rows = on_rows
        self._token = token
        self._speeds = SpeedMeter()
        self._work = work or UnfinishedWork(store, folder, self._threads, clock)
        self.upkeep = BatchUpkeep(
            store, folder, self._threads, settings, self._speeds, now, clock, self._work,
            on_rows, on_end,
        )  # fmt: skip

    # For callers. All raise GatewayError 503 while the store or the folder can't be used.

    async def create(self, new: NewBatch) -> Batch:
        """A new batch, or the earlier one with the same idempotency key.

        Raises: GatewayError 400, 422 (that key with another request), 429.
        """
        try:
            batch = await self._new(new)
        except GatewayError:
            await self._discard(new)
            raise
        try:
            settings = self._settings()
            adding = job(add_batch, batch, settings.batches_per_key, settings.bytes_per_key)
            done = await add_surely(self._store, adding, partial(self._discard, new))
        finally:
            self._work.added()  # It may be there, though the store has not said so.
        if done.outcome == "added":
            assert done.batch is not None
            self.upkeep.wake()
            return done.batch
        await self._discard(new)
        if done.outcome == "again":
            assert done.batch is not None
            return done.batch
        if done.kept is not None:
            raise kept_too_much(done.kept, self._settings())
        raise _refusal(done.outcome, new, self._settings())

    async def check_room(self, owner: str, size: int) -> None:
        """Refuse requests that there is no room for. Raises: GatewayError 429, 503."""
        settings = self._settings()
        kept = await self._ask(job(kept_by, owner, self._now()))
        if kept.bytes + max(1, size) > settings.bytes_per_key:
            raise kept_too_much(kept, settings)

    async def new_requests(self, size: int | None = None) -> NewFile:
        """A file of the folder for the lines of a batch without an input file.

        The caller ends it by `on_disk(new.finish)` or `new.discard`. Raises: GatewayError 507.
        """
        with folder_errors_told():
            await self._threads.opened(self.folder)
            return await self._threads.open(
                self.folder.open_new, REQUESTS, size or 0, close=NewFile.discard
            )

    async def find(self, owner: str, id_: str, api: str) -> Batch:
        """The owner's batch. Raises: GatewayError 404."""
        return _found(await self._ask(job(find_batch, owner, id_, api)), id_, api)

    async def page(
        self,
        owner: str,
        api: str,
        limit: int,
        *,
        after: str | None = None,
        before: str | None = None,
    ) -> BatchPage:
        """Some of the owner's batches, newest first."""
        return await self._ask(job(read_batches, owner, api, limit, after, before))

    async def cancel(self, owner: str, id_: str, api: str) -> Batch:
        """Cancel it; again, nothing. Raises: GatewayError 404, 409 (OpenAI's, if it has ended)."""
        before = await self.find(owner, id_, api)
        cancelling = job(cancel_batch, owner, id_, api, self._now())
        batch = _found(await ask_store(self._store, cancelling), id_, api)
        self.upkeep.wake()
        if api != ANTHROPIC and batch.cancelling_at is None and before.state.ended:
            raise _has_ended("cancel", batch)
        return batch

    async def pause(self, owner: str, id_: str, api: str) -> Batch:
        """Start no more of its lines. Raises: GatewayError 404, 409 if it has ended."""
        pausing = job(pause_batch, owner, id_, self._now(), PAUSED_BY_CALLER, api)
        batch = _found(await ask_store(self._store, pausing), id_, api)
        if batch.state.ended:
            raise _has_ended("pause", batch)
        self._on_rows()  # Those that were claimed are put back.
        return batch

    async def resume(self, owner: str, id_: str, api: str) -> Batch:
        """Go on with it. Raises: GatewayError 404, 409 if it has ended."""
        resuming = job(resume_batch, owner, id_, api)
        batch = _found(await ask_store(self._store, resuming), id_, api)
        if batch.state.ended:
            raise _has_ended("resume", batch)
        self._on_rows()
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
        places = await ask_store(self._store, job(delete_batch, owner, id_, api))
        if places is None:
            raise _not_found(id_, api)
        # The owner has lost it; whatever fails now, `BatchUpkeep` and `FileRegistry` do again.
        with contextlib.suppress(FolderError, StoreError):
            for file in (batch.output_file, batch.error_file):
                if file is not None:
                    await self._store.run(job(delete_file, owner, file, self._now()))
                    if batch.folder == self.folder.id:
                        await self._threads.run(self.folder.delete, file)
            if batch.folder == await self._threads.opened(self.folder):
                await self.upkeep.remove(id_, places)

    async def progress(self, batch: Batch) -> BatchProgress:
        """How far it is."""
        left = await self._ask(job(work_left, batch.id))
        price = self._price(batch.model)
        return progress_of(batch, left, self._speeds.speed(batch.id), price, self._now())

    async def open_output(self, owner: str, id_: str, api: str, *, errors: bool = False) -> Content:
        """Its output or error lines: the final file, or what is recorded so far.

        Those of `anthropic` are all output. Raises: GatewayError 404.
        """
        batch = await self.find(owner, id_, api)
        with folder_errors_told():
            if batch.folder != await self._threads.opened(self.folder):
                raise _elsewhere("This batch")
        kind = "results" if api == ANTHROPIC else "error" if errors else "output"
        name = f"{id_}_{kind}.jsonl"
        if not batch.state.ended:
            reader = ResultReader(self.folder, api, keeps_all=True)
            pieces = self._recorded_pieces(batch, reader, output=not errors)
            return Content(name, None, pieces, partial(self._threads.run, reader.close))
        file = batch.error_file if errors else batch.output_file
        if file is None:
            return Content.of_file(name, 0, io.BytesIO(), self._threads)
        found = await self._ask(job(find_file, owner, file, self._now()))
        if found is None:
            raise _results_gone(id_)
        try:
            with folder_errors_told():
                opened = await self._threads.open(
                    self.folder.open_to_read, file, close=lambda file: file.close()
                )
        except FileNotFoundError:
            log.warning("the results of a batch are missing in the folder", batch=id_, file=file)
            raise _results_gone(id_) from None
        return Content.of_file(name, found.bytes, opened, self._threads)

    # The gateway's own work.

    async def run(self) -> None:
        """Read the input of new batches, end those whose lines have ended, until cancelled."""
        await self.upkeep.run()

    async def _new(self, new: NewBatch) -> Batch:
        """The row of a new batch. Raises: GatewayError 400, 503."""
        settings, now = self._settings(), self._now()
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
            folder = await self._threads.opened(self.folder)
        if new.requests is not None:
            # So its requests are found by its id.
            id_ = _PREFIXES.get(new.api, "batch_") + new.requests.rpartition("-")[2]
        else:
            id_ = new_id(_PREFIXES.get(new.api, "batch_"), now, self._token)
        return Batch(
            id=id_,
            owner=new.owner,
            api=new.api,
            endpoint=new.endpoint,
            input_file=new.input_file,
            created_at=now,
            expires_at=now + window,
            keep_until=now + window + settings.keep,
            folder=folder,
            class_=new.class_,
            group_name=new.group_name,
            user=new.user,
            output_seconds=new.output_seconds,
            webhook_url=new.webhook_url,
            metadata=new.metadata,
            idempotency_key=new.idempotency_key,
            request_digest=new.request_digest,
            requests_bytes=new.requests_bytes,
        )

    async def _discard(self, new: NewBatch) -> None:
        """Remove the requests of a batch that was not added."""
        if new.requests is not None:
            with contextlib.suppress(FolderError):
                await self._threads.run(self.folder.delete, new.requests)

    async def _ask(self, reading: Callable[[Connection], T]) -> T:
        """Do a job that only reads. Raises: GatewayError 503."""
        return await ask_store(self._store, reading, write=False)

    async def _recorded_pieces(
        self, batch: Batch, reader: ResultReader, *, output: bool
    ) -> AsyncIterator[bytes]:
        after = 0
        while True:
            rows = await self._ask(job(result_rows, batch.id, after, PAGE_ROWS))
            if not rows:
                return
            pieces = reader.pieces(rows, output=output)
            with folder_errors_told():
                while piece := await self._threads.run(next, pieces, b""):
                    yield piece
            after = rows[-1].number or 0


# Errors.


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


def _refusal(outcome: str, new: NewBatch, settings: BatchSettings) -> GatewayError:
    shown = errors.truncate_echo(new.input_file or "")
    if outcome == "no_file":
        return GatewayError(
            400, "file_not_found", f"No such File object: {shown}", param="input_file_id"
        )
    if outcome == "wrong_purpose":
        return GatewayError(
            400,
            "invalid_value",
            f"The file '{shown}' was not uploaded for a batch: upload it with the purpose 'batch'.",
            param="input_file_id",
        )
    if outcome == "elsewhere":
        return _elsewhere("The input file")
    if outcome == "conflict":
        return GatewayError(
            422,
            "idempotency_key_reused",
            "This Idempotency-Key was sent before with another request: send a new key with a new "
            "request.",
            retryable=False,
        )
    return GatewayError(
        429,
        "too_many_batches",
        f"This key has {settings.batches_per_key} batches that have not ended, and may have no "
        "more: wait for the end of one, or cancel it.",
        retryable=False,
    )


def _found(batch: Batch | None, id_: str, api: str) -> Batch:
    """Raises: GatewayError 404."""
    if batch is None:
        raise _not_found(id_, api)
    return batch


def _not_found(id_: str, api: str) -> GatewayError:
    shown = errors.truncate_echo(id_)
    message = f"No batch found with id '{shown}'."
    if api == ANTHROPIC:
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


def _elsewhere(what: str) -> GatewayError:
    return GatewayError(
        503,
        "file_elsewhere",
        f"{what} is in the folder of another gateway of the same store: ask there.",
        retryable=False,
    )
