"""The folder of files, requests and results: private, bounded, and clean after a crash.

A file appears under its name when it is complete; until then it has a temporary one. Its writer
holds a lock on it (flock), which the kernel releases when the process ends, however it ends. So
another process can tell what a crash has left over from what is still being written, during a
hand-over for example.

`Folder` blocks, so the event loop calls it by `DiskThreads`. `folder_errors_told` turns its errors
into responses. `Storage` is the folder and the store together: the rows of the store tell what the
files are.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import structlog
from sqlalchemy import Connection

from gateway.config.stored import BatchSettings
from gateway.errors import GatewayError
from gateway.store.failures import Remedied, StoreError, StoreUnavailable
from gateway.store.store import Store

# Names the folder: several gateways may share a store, and each works on its own folder only.
ID_FILE = "folder-id"
# Bytes of the file system that are never filled: the store, logs and state files need room.
SPARE_BYTES = 64 << 20
FULL_SECONDS = 300.0  # seconds after which a file that there was no room for is forgotten
# After so many bytes of a file it is brought to the disk, and the room is checked again.
STEP_BYTES = 16 << 20
LONGEST_ID = 64
_NAME = re.compile(r"[a-z]{1,16}-[0-9a-f]{32}")
_TEMPORARY = ".new-"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Names that are tried for a new file: a process that starts may remove one that is not locked.
_TRIES = 8


class FolderError(Remedied):
    """The folder can't be used."""


class FolderFull(FolderError):  # noqa: N818 - named for what it says of the folder
    """There is no room for more, on the disk or within the limit of the settings."""


class FileTooShort(FolderError):  # noqa: N818 - named for what it says of the file
    """A file lacks what it should have."""


def is_file_name(text: str) -> bool:
    """Whether a file of the folder may have this name."""
    return _NAME.fullmatch(text) is not None


@dataclass(eq=False)
class Folder:
    """The folder at `location`, after `open`.

    `most_bytes` gives the limit on all files together; `now` gives Unix time, `token` random hex
    digits for so many bytes.
    """

    location: Path
    _: KW_ONLY
    most_bytes: Callable[[], int]
    now: Callable[[], float] = time.time
    token: Callable[[int], str] = secrets.token_hex
    spare_bytes: int = SPARE_BYTES
    id: str | None = None  # the folder's own id; None: it was not opened
    refusals: int = 0  # how often there was no room, since the start
    full: FolderFull | None = None
    """Why there was no room of late; None: there is, as `look_for_room` has seen."""
    _refused: tuple[int, float] = 0, 0.0  # the bytes that there was no room for, and when
    _inode: tuple[int, int] | None = None
    """Of the opened folder: its file system may be taken away later."""
    _beginning: threading.Lock = field(default_factory=threading.Lock)
    """Held from the check of the room for a new file until the file counts."""

    def open(self) -> str:
        """Make the folder if there is none, remove what a crash left over, and return its id.

        Raises: FolderError.
        """
        with self.translated_errors():
            self.location.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.location.mkdir(mode=0o700)
            mode = self.location.stat().st_mode
            if not stat.S_ISDIR(mode):
                raise FolderError(f"{self.location} is no folder", "name another in batches.folder")
            if mode & 0o077:
                raise FolderError(
                    f"{self.location} is open to other users of this machine",
                    "chmod 700 it, or name another folder in batches.folder",
                )
            with opened(self.location, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                # No other process opens the folder at the same time.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                found = self._read_id() or self._make_id()
                for path in self.location.glob(f"{_TEMPORARY}*"):
                    # A file that nobody holds locked is that of a process which has ended.
                    with contextlib.suppress(OSError), opened(path, _LEFT_OVER) as left_over:
                        if _lock(left_over):
                            path.unlink(missing_ok=True)
            self._inode = _inode(self.location)
        self.id = found
        return found

    def open_new(self, kind: str, size: int = 0) -> NewFile:
        """Begin a file whose name begins with `kind`; `size`: its expected bytes, as far as known.

        Names grow with time. Raises: FolderError.
        """
        with self._beginning, self.translated_errors():
            self.check_in_place()
            self.check_room(size)
            for _ in range(_TRIES):
                name = f"{kind}-{int(self.now() * 1000):012x}{self.token(10)}"
                assert is_file_name(name), name
                path = self.location / f"{_TEMPORARY}{name}"
                descriptor = os.open(path, _CREATE, 0o600)
                if _lock(descriptor) and os.fstat(descriptor).st_nlink:
                    new = NewFile(self, name, descriptor)
                    try:
                        os.ftruncate(descriptor, size)  # From now on it counts as that large.
                    except OSError:
                        new.discard()
                        raise
                    return new
                os.close(descriptor)
        raise FolderError(f"{self.location}: new files vanish", "let nothing else remove its files")

    @contextlib.contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Turn the system's errors into those of the folder, but for a file that is missing."""
        try:
            yield
        except FileNotFoundError:
            if self.location.is_dir():
                raise
            why = f"{self.location} is gone"
            raise FolderError(why, "put it back, or restart the gateway") from None
        except OSError as error:
            message = f"{error.filename or self.location}: {error.strerror or error}"
            if error.errno in _FULL:
                raise FolderFull(message, "free space on the disk, or raise the quota") from None
            remedy = "let the gateway's user write into the folder"
            if error.errno == errno.EIO:
                remedy = "look for errors of the disk in the system's log"
            raise FolderError(message, remedy) from None

    @contextlib.contextmanager
    def descriptor(self, name: str, flags: int) -> Iterator[int]:
        """A file's descriptor, closed at the end. Raises: FileNotFoundError, FolderError."""
        with self.translated_errors(), opened(self.path(name), flags | os.O_NOFOLLOW) as descriptor:
            yield descriptor

    def write_new(self, kind: str, data: bytes) -> str:
        """Write a file of this kind, and return its name. Raises: FolderError."""
        new = self.open_new(kind, len(data))
        try:
            new.write(data)
            return new.finish()
        finally:
            new.discard()

    def open_appended(self, kind: str) -> NewFile:
        """Begin a file that has its name from the start, and grows. Raises: FolderError."""
        new = self.open_new(kind)
        try:
            new.show()
        except BaseException:
            new.discard()
            raise
        return new

    def is_written(self, name: str) -> bool:
        """Whether a process still writes this file. Raises: FileNotFoundError, FolderError."""
        with self.open_to_read(name) as file:
            return not _lock(file.fileno())

    def path(self, name: str) -> Path:
        """Where the complete file of this name is. Raises: ValueError, if it is no such name."""
        if not is_file_name(name):
            raise ValueError(f"not a file's name: {name!r}")
        return self.location / name

    def open_to_read(self, name: str) -> FileIO:
        """The file, which stays readable if it is deleted. Raises: FileNotFoundError, FolderError.

        The caller closes it.
        """
        with self.translated_errors():
            try:
                descriptor = os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                # In the empty folder below a file system that isn't mounted nothing is missing.
                self.check_in_place()
                raise
            return os.fdopen(descriptor, "rb", buffering=0)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """A part of the file. Raises: FileNotFoundError, FolderError, FileTooShort."""
        with self.open_to_read(name) as file, self.translated_errors():
            part = b""
            while len(part) < length:
                more = os.pread(file.fileno(), length - len(part), offset + len(part))
                if not more:
                    raise FileTooShort(
                        f"{self.location / name} is too short", "put back a copy of the folder"
                    )
                part += more
        return part

    def delete(self, name: str) -> bool:
        """Remove the file; returns whether there was one. Raises: FolderError."""
        try:
            with self.translated_errors():
                self.path(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def old_files(self, kind: str, before: float) -> list[str]:
        """Names of complete files of this kind that were changed before that time (Unix seconds).

        Nobody writes them any more. Raises: FolderError.
        """
        found = []
        with self.translated_errors(), os.scandir(self.location) as entries:
            for entry in entries:
                if entry.name.startswith(f"{kind}-") and is_file_name(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        is_old = entry.stat(follow_symlinks=False).st_mtime < before
                        if is_old and not self.is_written(entry.name):
                            found.append(entry.name)
        return found

    def used_bytes(self) -> int:
        """Bytes of all files, those that are being written included. Raises: FolderError."""
        total = 0
        with self.translated_errors(), os.scandir(self.location) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_size
        return total

    def check_room(self, size: int) -> None:
        """Raises: FolderFull, if there is no room for so many bytes more; FolderError."""
        error = self._lack_of_room(size)
        if error is not None:
            self.refusals += 1
            self.full, self._refused = error, (size, self.now())
            raise error

    def look_for_room(self) -> None:
        """Let `full` be None once there is room for what was refused, or that is long ago.

        Raises: FolderError.
        """
        size, at = self._refused
        if self.now() - at >= FULL_SECONDS or self._lack_of_room(size) is None:
            self.full = None

    def _lack_of_room(self, size: int) -> FolderFull | None:
        """Why there is no room for so many bytes more; None: there is. Raises: FolderError."""
        most = self.most_bytes()
        if self.used_bytes() + size > most:
            return FolderFull(
                f"the files of this gateway may take {most} bytes together",
                "delete files, or raise batches.folder_bytes",
            )
        with self.translated_errors():
            disk = os.statvfs(self.location)
        if disk.f_bavail * disk.f_frsize < size + self.spare_bytes:
            return FolderFull("the disk of the files is full", "free space on it, or delete files")
        return None

    def check_in_place(self) -> None:
        """Check that the folder is the one that was opened. Raises: FolderError."""
        with self.translated_errors():
            found = self._inode if self._inode is None else _inode(self.location)
        if found != self._inode:
            raise FolderError(
                f"{self.location} is another folder than it was",
                "mount its file system again, or restart the gateway",
            )

    def _read_id(self) -> str | None:
        path = self.location / ID_FILE
        try:
            with path.open("rb") as file:
                found = file.read(LONGEST_ID + 1).decode("ascii", "replace").strip()
        except FileNotFoundError:
            return None
        if not re.fullmatch(r"[0-9a-f]{32}", found):
            raise FolderError(
                f"{path} is damaged", "put it back; without it the files' rows match no folder"
            )
        return found

    def _make_id(self) -> str:
        made = self.token(16)
        fresh = self.location / f"{_TEMPORARY}{ID_FILE}"
        fresh.unlink(missing_ok=True)
        with opened(fresh, _CREATE) as descriptor:
            os.write(descriptor, f"{made}\n".encode())
            os.fsync(descriptor)
        fresh.replace(self.location / ID_FILE)
        self.sync()
        return made

    def sync(self) -> None:
        """Bring the folder's own entries to the disk. Raises: OSError."""
        with opened(self.location, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            os.fsync(descriptor)


@dataclass(eq=False)
class NewFile:
    """A file that is being written, under a temporary name until `show`.

    `finish`, `close` or `discard` ends it. After a crash its end may be torn: nobody reads behind
    what `append` has returned. Its methods may be called on any thread: they wait for each other.
    """

    folder: Folder
    name: str  # the name that it gets
    _descriptor: int | None
    size: int = 0  # bytes that were written
    _digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    _next_step: int = STEP_BYTES
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def sha256(self) -> str:
        """Of what was written, in hex digits."""
        return self._digest.hexdigest()

    @property
    def _temporary(self) -> Path:
        return self.folder.location / f"{_TEMPORARY}{self.name}"

    def _opened(self) -> int:
        if self._descriptor is None:
            raise ValueError("the file is closed")
        return self._descriptor

    def write(self, data: bytes | memoryview, *, sync: bool = False) -> int:
        """Add bytes, all of them or none, and return their offset; `sync`: they are on the disk.

        Raises: FolderError; ValueError, if the file is closed.
        """
        with self._lock:
            descriptor, offset = self._opened(), self.size
            end = offset + len(data)
            self.folder.check_in_place()
            # Without a sync at each step the last one would take long, and all wait in memory.
            if is_step := end >= self._next_step:
                self.folder.check_room(max(0, end - os.fstat(descriptor).st_size))
                self._next_step = end + STEP_BYTES
            with self.folder.translated_errors():
                write_whole(descriptor, data, offset, sync=sync or is_step)
            self._digest.update(data)
            self.size = end
            return offset

    def append(self, data: bytes) -> int:
        """Write what counts from now on. Raises: as `write`."""
        return self.write(data, sync=True)

    def show(self) -> None:
        """Bring it to the disk under its name. Raises: FolderError."""
        with self._lock, self.folder.translated_errors():
            os.ftruncate(self._opened(), self.size)
            os.fsync(self._opened())
            self._temporary.replace(self.folder.path(self.name))
            self.folder.sync()

    def finish(self) -> str:
        """Bring it to the disk under its name, which is returned. Raises: FolderError."""
        self.show()
        self.close()
        return self.name

    def discard(self) -> None:
        """Remove it, unless it is finished. Raises: FolderError."""
        with self._lock:
            if self._descriptor is None:
                return
            try:
                with self.folder.translated_errors():
                    self._temporary.unlink(missing_ok=True)
            finally:
                self.close()

    def close(self) -> None:
        """End writing; called again, nothing."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)


_LEFT_OVER = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file's descriptor, which is closed at the end. Raises: OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_whole(descriptor: int, data: bytes | memoryview, offset: int, *, sync: bool) -> None:
    """Write all of the bytes at the end of a file, or none. Raises: OSError.

    `sync`: bring them to the disk, so that a loss of power does not lose them.
    """
    try:
        rest, at = memoryview(data), offset
        while rest:
            written = os.pwrite(descriptor, rest, at)
            rest, at = rest[written:], at + written
        if sync:
            os.fdatasync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, offset)
        raise


def _inode(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _lock(descriptor: int) -> bool:
    """Lock the file until it is closed; returns False if somebody else has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


THREADS = 4  # threads: more would not make a disk faster
DISK_SECONDS = 120.0  # seconds that a caller waits for one piece of work
P = ParamSpec("P")
T = TypeVar("T")


class DiskThreads:
    """A few threads of their own: one that hangs in the disk takes nobody else's."""

    def __init__(self, threads: int = THREADS, seconds: float = DISK_SECONDS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")
        self._seconds = seconds

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do the work on a thread. Raises: FolderError, if it takes too long; the work's own error.

        A caller that is cancelled leaves the work to its end.
        """
        return await self._result(self._pool.submit(work, *arguments))

    async def open(
        self, work: Callable[..., T], *arguments: Any, close: Callable[[T], object]
    ) -> T:
        """As `run`, for work that opens something: `close` ends it if the caller has left by then.

        `close` is called on a thread.
        """

        def close_opened(job: Future[T]) -> None:
            if not job.cancelled() and job.exception() is None:
                close(job.result())

        job = self._pool.submit(work, *arguments)
        try:
            return await self._result(job)
        except BaseException:
            job.add_done_callback(close_opened)
            raise

    async def _result(self, job: Future[T]) -> T:
        done = asyncio.wrap_future(job)
        # Nobody may be left to ask for its error.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.shield(done)
        except TimeoutError:
            raise FolderError(
                f"the disk of the files has not answered for {self._seconds:.0f} s",
                "see whether it is overloaded, or its server is gone",
            ) from None

    def close(self) -> None:
        """Take no more work; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


STEP_FILES = 500  # files that one job of the store looks at
ADD_PAUSES = (0.2, 0.5, 1.0)  # seconds before a row is added to a silent store once more
RETRY_AFTER = 5.0  # `Retry-After` in seconds while the store or the folder can't be used
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class StorageTrouble:
    """Why work waits for the store or the folder, told in the log once, and again when it goes on.

    Such work is done again later. Several works may be told apart, of which `of` names one.
    """

    warn: Callable[[str], None]  # tells the log why work waits
    resumed: Callable[[], None] = lambda: None  # and that it goes on
    errors: dict[str, Exception] = field(default_factory=dict)  # of works that wait

    @contextlib.contextmanager
    def told(self, of: str = "") -> Iterator[None]:
        """Do work that waits if the store or the folder can't be used now."""
        try:
            yield
        except (FolderError, StoreError) as error:
            self.tell(error, of)
        else:
            self.over(of)

    def tell(self, error: Exception, of: str = "") -> None:
        """This work waits."""
        known = {str(one) for one in self.errors.values()}
        self.errors[of] = error.with_traceback(None)  # what its frames hold may be large
        if str(error) not in known:
            self.warn(str(error))

    def over(self, of: str = "") -> None:
        """This work was done."""
        if self.errors.pop(of, None) is not None:
            self.resumed()


Job = Callable[Concatenate[Connection, P], T]  # what the store does, with its arguments


def job(do: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> Callable[[Connection], T]:
    """A job of the store: `store.run(job(find_batch, owner, id_, api))`."""
    return lambda connection: do(connection, *args, **kwargs)


@dataclass(slots=True, eq=False)
class Storage:
    """The store and the folder of what callers keep and what waits.

    `settings` gives those in force, `now` Unix time, `clock` monotonic seconds.
    """

    store: Store
    folder: Folder
    threads: DiskThreads
    settings: Callable[[], BatchSettings]
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic

    # The store.

    async def write(self, do: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a job. Raises: StoreError."""
        return await self.store.run(job(do, *args, **kwargs))

    async def read(self, do: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a job that only reads. Raises: StoreError."""
        return await self.store.run(job(do, *args, **kwargs), write=False)

    async def write_for_caller(self, do: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a job for a caller. Raises: GatewayError 503."""
        with store_errors_told():
            return await self.write(do, *args, **kwargs)

    async def read_for_caller(self, do: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a job that only reads, for a caller. Raises: GatewayError 503."""
        with store_errors_told():
            return await self.read(do, *args, **kwargs)

    async def add_surely(
        self,
        undo: Callable[[], Awaitable[None]],
        add: Job[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Add a row, again while the store does not answer; `undo` removes its files if it refuses.

        Raises: GatewayError 503; the job's own error.
        """
        with store_errors_told():
            for pause in (*ADD_PAUSES, None):
                try:
                    return await self.write(add, *args, **kwargs)
                except StoreUnavailable:
                    # It may have its row, and a client that is told otherwise would send it again.
                    # Files without a row are removed later.
                    if pause is None:
                        raise
                    await asyncio.sleep(pause)
                except Exception:
                    await undo()
                    raise
        raise AssertionError

    # The folder.

    async def opened(self) -> str:
        """The id of the folder, which is opened if it was not yet. Raises: FolderError."""
        known = self.folder.id
        return known if known is not None else await self.threads.run(self.folder.open)

    async def on_disk(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do work on a thread for a caller. Raises: GatewayError 503, 507; the work's own error."""
        with folder_errors_told():
            return await self.threads.run(work, *arguments)

    async def open_new(self, kind: str, size: int | None) -> NewFile:
        """Begin a file for a caller; `size`: its bytes, as far as known. Raises: GatewayError."""
        with folder_errors_told():
            await self.opened()
            return await self.threads.open(
                self.folder.open_new, kind, size or 0, close=NewFile.discard
            )

    async def open_to_read(self, name: str) -> FileIO:
        """As `Folder.open_to_read`. Raises: FileNotFoundError, FolderError."""
        return await self.threads.open(
            self.folder.open_to_read, name, close=lambda file: file.close()
        )

    async def delete(self, name: str) -> bool:
        """Remove a file; returns whether there was one. Raises: FolderError."""
        return await self.threads.run(self.folder.delete, name)

    async def remove_left_over(
        self, kind: str, seconds: float, needed: Job[[Iterable[str]], set[str]]
    ) -> int:
        """Remove complete files of this kind that are so old and not needed; returns how many.

        `needed`: those that rows name, of some files. Raises: FolderError, StoreError; what is done
        by then stays done.
        """
        before, gone = self.now() - seconds, 0
        old = await self.threads.run(self.folder.old_files, kind, before)
        for start in range(0, len(old), STEP_FILES):
            # The rows after the files: who writes one closes it when its rows are in the store.
            some = set(old[start : start + STEP_FILES])
            for name in some - await self.read(needed, some):
                gone += await self.delete(name)
        return gone


@contextlib.contextmanager
def store_errors_told() -> Iterator[None]:
    """Turn the store's errors into responses."""
    try:
        yield
    except StoreError as error:
        raise GatewayError(
            503,
            "store_unavailable",
            f"The gateway's store can't be used now ({error.state}).",
            retry_after=RETRY_AFTER,
        ) from None


@contextlib.contextmanager
def folder_errors_told(thing: str = "file") -> Iterator[None]:
    """Turn the folder's errors into responses; paths and remedies are for the log alone.

    `thing`: a word for what there was no room for.
    """
    try:
        yield
    except FolderFull as error:
        log.warning("no room for a file", of=thing, why=str(error))
        raise GatewayError(
            507,
            "storage_full",
            f"The gateway has no room for this {thing}. Delete files, or ask its operator.",
            retryable=False,
        ) from None
    except FolderError as error:
        log.warning("the folder of files can't be used", of=thing, why=str(error))
        raise GatewayError(
            503,
            "storage_unavailable",
            f"The gateway's folder of {thing}s can't be used now.",
            retry_after=RETRY_AFTER,
        ) from None
