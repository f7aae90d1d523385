"""Callers' files: uploaded, listed, read, deleted and expired.

The bytes are in the folder under the file's id, the rest is a row of the store. A file is complete
in the folder before it has a row, and its row loses its owner before the bytes are removed: so a
crash leaves at most a file without a row, or a row that nobody sees. `FileRegistry.run` removes
both.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, TypeVar

import structlog
from sqlalchemy import Connection

from gateway import errors
from gateway.batches import file_rows
from gateway.batches.disk_threads import DiskThreads
from gateway.batches.file_rows import (
    AddFile,
    DeleteFile,
    FilePage,
    ReadPage,
    StoredFile,
)
from gateway.batches.folder import Folder, FolderError, FoundFile, NewFile
from gateway.batches.kept_bytes import Kept, kept_by, kept_too_much
from gateway.batches.storage_errors import folder_errors_told, store_unavailable
from gateway.config.batches import BatchSettings
from gateway.errors import GatewayError
from gateway.store.failures import StoreError, StoreUnavailable
from gateway.store.store import Store

FILE = "file"
"""Kind of the folder's files that have a row: their ids begin with it."""

MOST_UPLOADS = 64
"""Uploads at one time in a process; each holds less than a megabyte of memory."""

MOST_UPLOADS_OF_OWNER = 8
"""Of these, those of one owner."""

UPLOAD_RETRY_AFTER = 2.0
"""`Retry-After` in seconds when there are too many uploads."""

CLEAN_SECONDS = 60.0
"""Seconds between two rounds of removing what has expired."""

ORPHAN_SECONDS = 3600.0
"""Age of a complete file without a row from which on it counts as left over from a crash."""

STEP_FILES = 500
"""Files that one job of the store takes."""

PIECE_BYTES = 256 << 10
"""Bytes that are read from the disk, and sent, at a time."""

log = structlog.get_logger()

T = TypeVar("T")


class Upload:
    """A file that a caller is sending. Blocks: call it on a thread."""

    def __init__(self, owner: str, new: NewFile, kept: Kept, settings: BatchSettings) -> None:
        self.owner = owner
        self.new = new
        self._kept = kept
        """What the owner had at the beginning."""
        self._settings = settings
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of what has come, in hex digits."""
        return self._digest.hexdigest()

    def write(self, data: bytes) -> None:
        """Add bytes. Raises: GatewayError 413, 429, FolderError."""
        size, settings = self.new.size + len(data), self._settings
        if size > settings.file_bytes:
            raise file_too_large(settings.file_bytes)
        if self._kept.bytes + size > settings.bytes_per_key:
            raise kept_too_much(self._kept, settings)
        self.new.write(data)
        self._digest.update(data)


class FileContent:
    """An open file; its reader closes it."""

    def __init__(self, file: StoredFile, opened: BinaryIO, threads: DiskThreads) -> None:
        self.file = file
        self._opened = opened
        self._threads = threads

    async def pieces(self) -> AsyncIterator[bytes]:
        """Its bytes. Raises: GatewayError 503."""
        with folder_errors_told():
            while piece := await self._threads.run(self._opened.read, PIECE_BYTES):
                yield piece

    async def close(self) -> None:
        """Close it; called again, nothing."""
        await self._threads.run(self._opened.close)


class FileRegistry:
    """The files of all callers, in one folder and one store.

    `settings` gives those in force, `now` Unix time. `owner` is always the id of a key.
    """

    def __init__(
        self,
        store: Store,
        folder: Folder,
        settings: Callable[[], BatchSettings],
        now: Callable[[], float],
        threads: DiskThreads | None = None,
    ) -> None:
        self.folder = folder
        self._store = store
        self._settings = settings
        self._now = now
        self._threads = threads or DiskThreads()
        self._opening = asyncio.Lock()
        self._uploads: Counter[str] = Counter()
        """How many each owner has under way."""
        self._problem: str | None = None
        """Why the last round of cleaning failed."""

    # For callers.

    @contextlib.asynccontextmanager
    async def uploading(self, owner: str, size: int | None) -> AsyncIterator[Upload]:
        """A new file, which is removed at the end of this context unless `keep` was called.

        `size`: its bytes, as far as known. Raises: GatewayError 413, 429, 503, 507.
        """
        settings = self._settings()
        if size is not None and size > settings.file_bytes:
            raise file_too_large(settings.file_bytes)
        if self._uploads.total() >= MOST_UPLOADS or self._uploads[owner] >= MOST_UPLOADS_OF_OWNER:
            raise errors.queue_full("Too many uploads at one time.", UPLOAD_RETRY_AFTER)
        self._uploads[owner] += 1
        try:
            kept = await self._check_quota(owner, size or 0)
            with folder_errors_told():
                await self._open_folder()
                new = await self._threads.open(
                    self.folder.open_new, FILE, size or 0, close=NewFile.discard
                )
            try:
                yield Upload(owner, new, kept, settings)
            finally:
                with contextlib.suppress(FolderError):
                    await self._threads.run(new.discard)
        finally:
            self._uploads[owner] -= 1
            if not self._uploads[owner]:
                del self._uploads[owner]

    async def on_disk(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do work on a file, on a thread. Raises: GatewayError 503, 507; the work's own error."""
        with folder_errors_told():
            return await self._threads.run(work, *arguments)

    async def keep(
        self, upload: Upload, *, name: str, purpose: str, seconds: float | None
    ) -> StoredFile:
        """Make the upload a file of its owner. Raises: GatewayError 429, 503, 507.

        `seconds`: for how long, at most `batches.keep`, which is also meant by None.
        """
        settings, created_at = self._settings(), self._now()
        kept = settings.keep if seconds is None else min(seconds, settings.keep)
        folder = self.folder.id
        assert folder is not None
        id_ = await self.on_disk(upload.new.finish)
        file = StoredFile(
            id_, upload.owner, name, purpose, upload.new.size, upload.sha256,
            created_at, created_at + kept, folder,
        )  # fmt: skip
        try:
            job = AddFile(file, settings.files_per_key, settings.bytes_per_key)
            kept_before = await self._store.run(job)
        except StoreUnavailable as error:
            # It may have its row; if it has none, `run` removes it.
            raise store_unavailable(error) from None
        except StoreError as error:
            await self.on_disk(self.folder.delete, id_)
            raise store_unavailable(error) from None
        if kept_before is not None:
            await self.on_disk(self.folder.delete, id_)
            raise kept_too_much(kept_before, settings, for_file=True)
        return file

    async def find(self, owner: str, id_: str) -> StoredFile:
        """The owner's file. Raises: GatewayError 404, 503."""
        found = await self._read(partial(file_rows.find, owner=owner, id_=id_, now=self._now()))
        if found is None:
            raise file_not_found(id_)
        return found

    async def page(
        self,
        owner: str,
        limit: int,
        *,
        after: str | None = None,
        order: file_rows.SortOrder = "desc",
        purpose: str | None = None,
    ) -> FilePage:
        """Some of the owner's files, by age. Raises: GatewayError 503."""
        return await self._read(ReadPage(owner, self._now(), limit, after, order, purpose))

    async def open_content(self, owner: str, id_: str) -> FileContent:
        """The owner's file, to be read. Raises: GatewayError 404, 503."""
        found = await self.find(owner, id_)
        with folder_errors_told():
            await self._open_folder()
            if found.folder != self.folder.id:
                raise GatewayError(
                    503,
                    "file_elsewhere",
                    "This file is in the folder of another gateway of the same store: ask there.",
                    retryable=False,
                )
            try:
                opened = await self._threads.open(
                    self.folder.open_to_read, id_, close=lambda file: file.close()
                )
            except FileNotFoundError:
                log.warning("a file is missing in the folder", file=id_)
                raise file_not_found(id_) from None
        return FileContent(found, opened, self._threads)

    async def delete(self, owner: str, id_: str) -> None:
        """Delete the owner's file. Raises: GatewayError 404, 409, 503."""
        try:
            done = await self._store.run(DeleteFile(owner, id_, self._now()))
        except StoreError as error:
            raise store_unavailable(error) from None
        if done.file is None:
            raise file_not_found(id_)
        if done.used_by_batch is not None:
            raise GatewayError(
                409,
                "file_in_use",
                f"The batch '{done.used_by_batch}' still reads this file: cancel it first, or "
                "wait for its end.",
                retryable=False,
            )
        # The owner has lost it; whatever fails now, `run` does again.
        with contextlib.suppress(FolderError, StoreError):
            await self._open_folder()
            if done.file.folder == self.folder.id:
                await self._threads.run(self.folder.delete, id_)
                await self._store.run(partial(file_rows.remove, ids=[id_]))

    # The gateway's own work.

    async def run(self) -> None:
        """Remove what has expired, was deleted or is left over, until cancelled."""
        look_for_orphans_at = 0.0
        while True:
            orphans = self._now() >= look_for_orphans_at
            try:
                await self.clean(orphans=orphans)
            except (FolderError, StoreError) as error:
                if self._problem != str(error):
                    self._problem = str(error)
                    log.warning("old files stay", why=self._problem)
            else:
                self._problem = None
                if orphans:
                    look_for_orphans_at = self._now() + ORPHAN_SECONDS
            await asyncio.sleep(CLEAN_SECONDS)

    async def clean(self, *, orphans: bool = True) -> int:
        """Remove what is due, and with `orphans` what is left over from crashes; returns how many.

        Raises: FolderError, StoreError; what is done by then stays done.
        """
        folder = await self._open_folder()
        gone = 0
        while True:
            job = partial(file_rows.take_due, folder=folder, now=self._now(), limit=STEP_FILES)
            ids = await self._store.run(job)
            for id_ in ids:
                await self._threads.run(self.folder.delete, id_)
            if ids:
                await self._store.run(partial(file_rows.remove, ids=ids))
            gone += len(ids)
            if len(ids) < STEP_FILES:
                break
        if orphans:
            gone += await self._remove_orphans()
        if gone:
            log.info("files removed", files=gone)
        return gone

    def close(self) -> None:
        """Begin no more work."""
        self._threads.close()

    async def _remove_orphans(self) -> int:
        before = self._now() - ORPHAN_SECONDS
        old = iter(
            [
                found.name
                for found in await self._threads.run(_listed, self.folder)
                if found.changed_at < before
            ]
        )
        gone = 0
        while names := list(islice(old, STEP_FILES)):
            known = await self._store.run(partial(file_rows.known, ids=names), write=False)
            for name in set(names) - known:
                gone += await self._threads.run(self.folder.delete, name)
        return gone

    async def _open_folder(self) -> str:
        """The folder's id. Raises: FolderError."""
        async with self._opening:
            opened = self.folder.id
            return opened if opened is not None else await self._threads.run(self.folder.open)

    async def _read(self, job: Callable[[Connection], T]) -> T:
        try:
            return await self._store.run(job, write=False)
        except StoreError as error:
            raise store_unavailable(error) from None

    async def _check_quota(self, owner: str, size: int) -> Kept:
        """Refuse what could not be kept, before it is sent. Raises: GatewayError 429, 503."""
        settings = self._settings()
        kept = await self._read(partial(kept_by, owner=owner, now=self._now()))
        if kept.files + 1 > settings.files_per_key or kept.bytes + size > settings.bytes_per_key:
            raise kept_too_much(kept, settings, for_file=True)
        return kept


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


def _listed(folder: Folder) -> list[FoundFile]:
    return list(folder.files(FILE))
