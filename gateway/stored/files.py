"""Callers' files: uploaded, listed, read, deleted and expired; and what a key keeps altogether.

The bytes are in the folder under the file's id, the rest is a row of the store. A file is complete
in the folder before it has a row, and its row loses its owner before the bytes are removed: so a
crash leaves at most a file without a row, or a row that nobody sees. `FileRegistry.run` removes
both.

What a key keeps is one sum of the rows of its files, batches and requests. Nothing is counted
beside the rows, so a crash leaves no wrong count. Jobs that add to it take the turn of all
processes first (`raise_revision`), so that a limit holds for all of them together. A job that lets
a batch read a file takes the turn before it looks for the file, which then can't be deleted in
between. Each job may be done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Final, Literal, NamedTuple

import structlog
from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    delete,
    func,
    literal_column,
    or_,
    select,
    update,
)

from gateway import errors
from gateway.config.stored import BatchSettings
from gateway.errors import GatewayError
from gateway.store.database import Rows, insert_for
from gateway.store.failures import StoreError
from gateway.store.schema import batches, files, revisions, stored_requests
from gateway.stored.claims import IS_RUNNING, RequestKind, those_with
from gateway.stored.folder import (
    STEP_FILES,
    DiskThreads,
    FolderError,
    NewFile,
    Storage,
    StorageTrouble,
    folder_errors_told,
)

KEY_STORAGE_FULL = "key_storage_full"  # why batches are paused whose key keeps as much as it may
_BATCH: Final = batches.c
_ROW: Final = stored_requests.c
# The condition of batches that have a file of requests; as in the index.
HAS_REQUESTS: Final = _BATCH.requests_bytes > literal_column("0")


class Kept(NamedTuple):
    """What one owner has in the folder."""

    files: int  # uploads, and output files of batches
    bytes: int  # of all that it keeps


def kept_by(connection: Connection, owner: str, now: float) -> Kept:
    """What the owner keeps.

    Files that are still there, and expired ones that an unfinished batch reads; bodies of message
    batches; results of unfinished batches, which are in files after the end; bodies of background
    requests, logs of responses and results of deferred requests.
    """
    of_owner = _BATCH.owner == owner
    read = select(_BATCH.input_file).where(
        of_owner, _BATCH.ended_at.is_(None), _BATCH.input_file.is_not(None)
    )
    there = or_(files.c.expires_at.is_(None), files.c.expires_at > now, files.c.id.in_(read))
    uploads = select(func.count(), _sum(files.c.bytes)).where(
        files.c.owner == owner, files.c.deleted_at.is_(None), there
    )
    number, size = connection.execute(uploads).one()
    others = (
        select(_sum(_BATCH.result_bytes)).where(of_owner, _BATCH.ended_at.is_(None)),
        select(_sum(_BATCH.requests_bytes)).where(of_owner, HAS_REQUESTS),
        select(_sum(_ROW.length) + _sum(_ROW.result_length)).where(
            _ROW.owner == owner, _ROW.batch.is_(None)
        ),
    )
    return Kept(number, int(size) + sum(int(connection.scalar(asked) or 0) for asked in others))


def full_owners(
    connection: Connection, owners: Iterable[str], most_bytes: int, now: float
) -> set[str]:
    """Those of the owners that keep as much as they may, or more."""
    return {owner for owner in set(owners) if kept_by(connection, owner, now).bytes >= most_bytes}


def note_log_sizes(
    connection: Connection, sizes: Mapping[str, int], *, running: bool = False
) -> None:
    """Responses, by their ids, have logs of these sizes now; `running`: only those that run."""
    if sizes:
        rows = [{"of_id": id_, "size": size} for id_, size in sorted(sizes.items())]
        connection.execute(_SIZE_NOTED.where(IS_RUNNING) if running else _SIZE_NOTED, rows)


def kept_too_much(kept: Kept, settings: BatchSettings, *, for_file: bool = False) -> GatewayError:
    """429: the key keeps as much as it may, or has no room `for_file`, one file more.

    Clients do not repeat the request.
    """
    if for_file and kept.files >= settings.files_per_key:
        message = (
            f"This key has {kept.files} files and may have {settings.files_per_key} "
            "('batches.files_per_key'): delete some first."
        )
    else:
        message = (
            f"This key keeps {kept.bytes} bytes of files, batches and responses, and may keep "
            f"{settings.bytes_per_key} bytes ('batches.bytes_per_key'): delete some first."
        )
    return GatewayError(429, "insufficient_quota", message, retryable=False)


_SIZE_NOTED: Final = (
    update(stored_requests)
    .where(
        _ROW.id == bindparam("of_id"),
        _ROW.batch.is_(None),
        _ROW.kind == RequestKind.RESPONSE.value,
        _ROW.result_place.is_not(None),
    )
    .values(result_offset=0, result_length=bindparam("size"))
)


def _sum(column: Any) -> Any:
    return func.coalesce(func.sum(column), 0)


FILES = "files"  # name of the revision that every change of a file raises
SortOrder = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a caller, complete in the folder under its id."""

    id: str
    owner: str
    name: str  # as the caller named it
    purpose: str
    bytes: int
    sha256: str
    created_at: float  # Unix time, as all times here
    expires_at: float | None
    folder: str  # the id of the folder that holds it
    state: str = "processed"  # which a complete file is


class FilePage(NamedTuple):
    """Some files of a list, in its order."""

    files: list[StoredFile]
    has_more: bool


_FILES: Final = Rows(StoredFile, files, {})


def visible(now: float) -> ColumnElement[bool]:
    """The condition of a file that its owner still has."""
    return and_(
        files.c.deleted_at.is_(None), or_(files.c.expires_at.is_(None), files.c.expires_at > now)
    )


def find_file(connection: Connection, owner: str, id_: str, now: float) -> StoredFile | None:
    """The owner's file."""
    return _FILES.one(connection, files.c.id == id_, files.c.owner == owner, visible(now))


def read_files(
    connection: Connection,
    owner: str,
    now: float,
    limit: int,
    after: str | None = None,
    order: SortOrder = "desc",
    purpose: str | None = None,
) -> FilePage:
    """A page of an owner's files, behind the file of the id `after`."""
    asked = _FILES.where(files.c.owner == owner, visible(now))
    if purpose is not None:
        asked = asked.where(files.c.purpose == purpose)
    # Ids grow with time.
    if after is not None:
        asked = asked.where(files.c.id > after if order == "asc" else files.c.id < after)
    by = files.c.id.asc() if order == "asc" else files.c.id.desc()
    found = _FILES.all(connection, asked.order_by(by).limit(limit + 1))
    return FilePage(found[:limit], len(found) > limit)


def add_upload(connection: Connection, file: StoredFile, settings: BatchSettings) -> None:
    """Add a file. Raises: GatewayError 429, if its owner would have more than it may."""
    raise_revision(connection)
    if connection.scalar(select(files.c.id).where(files.c.id == file.id)) is not None:
        return  # Done again.
    check_upload(kept_by(connection, file.owner, file.created_at), file.bytes, settings)
    add_file(connection, file)


def check_upload(kept: Kept, size: int, settings: BatchSettings) -> None:
    """Raises: GatewayError 429, if who keeps that may not have one file of this size more."""
    if kept.files + 1 > settings.files_per_key or kept.bytes + size > settings.bytes_per_key:
        raise kept_too_much(kept, settings, for_file=True)


def add_file(connection: Connection, file: StoredFile) -> None:
    """Add a file whatever its owner has, such as the result of a batch; done again, nothing."""
    added = insert_for(connection)(files).values(**_FILES.values(file))
    connection.execute(added.on_conflict_do_nothing(index_elements=[files.c.id]))


def delete_file(connection: Connection, owner: str, id_: str, now: float) -> StoredFile:
    """Take a file from its owner; its bytes are removed afterwards.

    Raises: GatewayError 404; 409, if a batch still reads it.
    """
    raise_revision(connection)
    found = find_file(connection, owner, id_, now)
    if found is None:
        raise file_not_found(id_)
    asked = select(batches.c.id).where(batches.c.input_file == id_, batches.c.ended_at.is_(None))
    batch = connection.scalar(asked.limit(1))
    if batch is not None:
        raise GatewayError(
            409,
            "file_in_use",
            f"The batch '{batch}' still reads this file: cancel it first, or wait for its end.",
            retryable=False,
        )
    connection.execute(update(files).where(files.c.id == id_).values(deleted_at=now))
    return found


def take_due_files(connection: Connection, folder: str, now: float, limit: int) -> list[str]:
    """Ids of files of the folder whose bytes are to be removed: deleted or expired ones.

    An expired file stays while an unfinished batch reads it. From now on none can begin to.
    """
    raise_revision(connection)
    used = select(batches.c.input_file).where(
        batches.c.ended_at.is_(None), batches.c.input_file.is_not(None)
    )
    expired = and_(files.c.expires_at <= now, files.c.id.not_in(used))
    asked = select(files.c.id).where(
        files.c.folder == folder, or_(files.c.deleted_at.is_not(None), expired)
    )
    ids = list(connection.scalars(asked.limit(limit)))
    taken = update(files).where(files.c.id.in_(ids), files.c.deleted_at.is_(None))
    connection.execute(taken.values(deleted_at=now))
    return ids


def remove_files(connection: Connection, ids: Sequence[str]) -> None:
    """Remove the rows of files whose bytes are gone."""
    connection.execute(delete(files).where(files.c.id.in_(ids)))


def raise_revision(connection: Connection) -> None:
    """Take the turn of the processes that add to what owners keep, until the transaction ends."""
    raised = insert_for(connection)(revisions).values(name=FILES, number=1)
    connection.execute(
        raised.on_conflict_do_update(
            index_elements=[revisions.c.name], set_={"number": revisions.c.number + 1}
        )
    )


FILE = "file"  # kind of the folder's files that have a row: their ids begin with it
MOST_UPLOADS = 64  # uploads at one time in a process; each holds less than a megabyte of memory
MOST_UPLOADS_OF_OWNER = 8  # of these, those of one owner
UPLOAD_RETRY_AFTER = 2.0  # `Retry-After` in seconds when there are too many uploads
CLEAN_SECONDS = 60.0  # seconds between two rounds of removing what has expired
# Age of a complete file without a row from which on it counts as left over from a crash.
ORPHAN_SECONDS = 3600.0
PIECE_BYTES = 256 << 10  # bytes that are read from the disk, and sent, at a time
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Upload:
    """A file that a caller is sending. Blocks: call it on a thread."""

    owner: str
    new: NewFile
    kept: Kept  # what the owner had at the beginning
    settings: BatchSettings

    def write(self, data: bytes) -> None:
        """Add bytes. Raises: GatewayError 413, 429, FolderError."""
        size, settings = self.new.size + len(data), self.settings
        if size > settings.file_bytes:
            raise file_too_large(settings.file_bytes)
        if self.kept.bytes + size > settings.bytes_per_key:
            raise kept_too_much(self.kept, settings)
        self.new.write(data)


async def _nothing() -> None:
    """There is nothing to be closed."""


@dataclass(frozen=True, slots=True)
class Content:
    """Something that is read to its end, under a file's name. Its reader closes it."""

    name: str  # for `Content-Disposition`
    size: int | None  # bytes; None: not known yet
    pieces: AsyncIterator[bytes]
    """Its bytes; reading them raises GatewayError 503."""
    close: Callable[[], Awaitable[None]] = _nothing  # called again, nothing

    @classmethod
    def of_file(cls, name: str, size: int, opened: BinaryIO, threads: DiskThreads) -> Content:
        """What an open file has."""

        async def pieces() -> AsyncIterator[bytes]:
            with folder_errors_told():
                while piece := await threads.run(opened.read, PIECE_BYTES):
                    yield piece

        return cls(name, size, pieces(), partial(threads.run, opened.close))


@dataclass(slots=True, eq=False)
class UploadCounts:
    """How many uploads each owner has under way."""

    _counts: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def one_more(self, owner: str) -> Iterator[None]:
        """Count an upload while it lasts. Raises: GatewayError 429, if there are too many."""
        counts = self._counts
        if counts.total() >= MOST_UPLOADS or counts[owner] >= MOST_UPLOADS_OF_OWNER:
            raise errors.queue_full("Too many uploads at one time.", UPLOAD_RETRY_AFTER)
        counts[owner] += 1
        try:
            yield
        finally:
            counts[owner] -= 1
            if not counts[owner]:
                del counts[owner]


@dataclass(slots=True, eq=False)
class FileRegistry:
    """The files of all callers, in one folder and one store. `owner` is always the id of a key."""

    storage: Storage
    _uploads: UploadCounts = field(default_factory=UploadCounts)

    # For callers.

    @contextlib.asynccontextmanager
    async def uploading(self, owner: str, size: int | None) -> AsyncIterator[Upload]:
        """A new file, which is removed at the end of this context unless `keep` was called.

        `size`: its bytes, as far as known. Raises: GatewayError 413, 429, 503, 507.
        """
        storage, settings = self.storage, self.storage.settings()
        if size is not None and size > settings.file_bytes:
            raise file_too_large(settings.file_bytes)
        with self._uploads.one_more(owner):
            # What could not be kept is refused before it is sent.
            kept = await storage.read_for_caller(kept_by, owner, storage.now())
            check_upload(kept, size or 0, settings)
            new = await storage.open_new(FILE, size)
            try:
                yield Upload(owner, new, kept, settings)
            finally:
                with contextlib.suppress(FolderError):
                    await storage.threads.run(new.discard)

    async def keep(
        self, upload: Upload, *, name: str, purpose: str, seconds: float | None
    ) -> StoredFile:
        """Make the upload a file of its owner. Raises: GatewayError 429, 503, 507.

        `seconds`: for how long, at most `batches.keep`, which is also meant by None.
        """
        storage, created_at = self.storage, self.storage.now()
        settings, folder = storage.settings(), storage.folder.id
        kept = settings.keep if seconds is None else min(seconds, settings.keep)
        assert folder is not None
        id_ = await storage.on_disk(upload.new.finish)
        file = StoredFile(
            id_, upload.owner, name, purpose, upload.new.size, upload.new.sha256,
            created_at, created_at + kept, folder,
        )  # fmt: skip

        async def remove() -> None:
            await storage.on_disk(storage.folder.delete, id_)

        await storage.add_surely(remove, add_upload, file, settings)
        return file

    async def find(self, owner: str, id_: str) -> StoredFile:
        """The owner's file. Raises: GatewayError 404, 503."""
        storage = self.storage
        found = await storage.read_for_caller(find_file, owner, id_, storage.now())
        if found is None:
            raise file_not_found(id_)
        return found

    async def open_content(self, owner: str, id_: str) -> Content:
        """The owner's file, to be read. Raises: GatewayError 404, 503."""
        found, storage = await self.find(owner, id_), self.storage
        with folder_errors_told():
            if found.folder != await storage.opened():
                raise file_elsewhere("This file")
            try:
                opened = await storage.open_to_read(id_)
            except FileNotFoundError:
                log.warning("a file is missing in the folder", file=id_)
                raise file_not_found(id_) from None
        return Content.of_file(found.name, found.bytes, opened, storage.threads)

    async def delete(self, owner: str, id_: str) -> None:
        """Delete the owner's file. Raises: GatewayError 404, 409, 503."""
        storage = self.storage
        found = await storage.write_for_caller(delete_file, owner, id_, storage.now())
        # The owner has lost it; whatever fails now, `run` does again.
        with contextlib.suppress(FolderError, StoreError):
            if found.folder == await storage.opened():
                await storage.delete(id_)
                await storage.write(remove_files, [id_])

    # The gateway's own work.

    async def run(self) -> None:
        """Remove what has expired, was deleted or is left over, until cancelled."""
        look_for_orphans_at, now = 0.0, self.storage.now
        trouble = StorageTrouble(lambda why: log.warning("old files stay", why=why))
        while True:
            orphans = now() >= look_for_orphans_at
            with trouble.told():
                await self.clean(orphans=orphans)
                if orphans:
                    look_for_orphans_at = now() + ORPHAN_SECONDS
            await asyncio.sleep(CLEAN_SECONDS)

    async def clean(self, *, orphans: bool = True) -> int:
        """Remove what is due, and with `orphans` what is left over from crashes; returns how many.

        Raises: FolderError, StoreError; what is done by then stays done.
        """
        storage, gone = self.storage, 0
        folder = await storage.opened()
        while True:
            ids = await storage.write(take_due_files, folder, storage.now(), STEP_FILES)
            for id_ in ids:
                await storage.delete(id_)
            if ids:
                await storage.write(remove_files, ids)
            gone += len(ids)
            if len(ids) < STEP_FILES:
                break
        if orphans:
            gone += await storage.remove_left_over(
                FILE,
                ORPHAN_SECONDS,
                lambda connection, old: those_with(connection, files.c.id, old),
            )
        if gone:
            log.info("files removed", files=gone)
        return gone

    def close(self) -> None:
        """Begin no more work."""
        self.storage.threads.close()


def file_elsewhere(what: str) -> GatewayError:
    """503: another gateway of the store has it."""
    return GatewayError(
        503,
        "file_elsewhere",
        f"{what} is in the folder of another gateway of the same store: ask there.",
        retryable=False,
    )


def file_not_found(id_: str) -> GatewayError:
    """404: the caller has no such file."""
    shown = errors.truncate_echo(id_)
    return GatewayError(404, "file_not_found", f"There is no file '{shown}', or it has expired.")


def file_too_large(most_bytes: int) -> GatewayError:
    """413: above `batches.file_bytes`."""
    return GatewayError(
        413,
        "request_too_large",
        f"The file is larger than {most_bytes} bytes ('batches.file_bytes').",
        param="file",
    )
