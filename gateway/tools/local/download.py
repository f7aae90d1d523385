"""Downloads one file: resumed after breaks, within limits, and only whole under its own name.

The bytes arrive in `NAME.part`, and what they are is in `NAME.source.json`. A part is resumed where
the server tells that it still has the same content (`If-Range`), or a digest proves it at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import httpx
import msgspec

from gateway.tools.local import LocalFleetError, ModelFileError
from gateway.tools.local.memory import format_gib
from gateway.tools.local.model_url import printable
from gateway.tools.local.remote_file import (
    FileVersion,
    RangeRefusedError,
    RemoteBody,
    RemoteError,
    describe_failure,
    open_remote,
)

MIB = 1 << 20

DISK_RESERVE = 256 * MIB  # stays free

FREE_CHECK_BYTES = 64 * MIB  # between two looks at the disk, where the length is unknown

FIRST_LOOK = 32  # bytes after which it shows whether it is a model at all

LAST_LOOK = 256 * MIB
"""A head that is longer is judged at the end only; the largest vocabularies take some 20 MiB."""

MOST_FAILURES = 6  # in a row, none of which brought LEAST_PROGRESS

LEAST_PROGRESS = MIB

MOST_TRIES = 200

MOST_RESTARTS = 3  # from the first byte

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a further try

STALL_SECONDS, STALL_BYTES = 60.0, 64 << 10
"""A server that sends less in that time is left, and asked again."""

HASH_BLOCK = 4 * MIB


class DownloadError(LocalFleetError):
    """The file can't be downloaded. What has arrived is kept, unless the text says otherwise."""


class DigestError(DownloadError):
    """The file is not the one whose digest was given; it is removed."""


class _TooLargeError(DownloadError):
    pass


class _BrokenOffError(Exception):
    """The body ended early, or came too slowly. The text says which."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Where a file comes from, beside it on the disk. It holds no secret of the address."""

    url: str  # printable
    etag: str | None = None
    last_modified: str | None = None
    total: int | None = None
    sha256: str | None = None  # of the whole file, once it is there

    @property
    def version(self) -> FileVersion:
        """The content that a part is of."""
        return FileVersion(self.etag, self.last_modified)


@dataclass(frozen=True, slots=True)
class DownloadWish:
    """What to download, and within which limits."""

    url: httpx.URL
    target: Path
    sha256: str | None = None  # lower-case hexadecimal
    token: str | None = field(default=None, repr=False)
    most_bytes: int | None = None
    space_beside: int = 0  # bytes on the disk that other files will need


@dataclass(frozen=True, slots=True)
class DownloadHooks:
    """What a download asks and tells. Times and pauses are passed in by tests."""

    check_size: Callable[[int], None] = lambda _: None  # raises where so large a file is no use
    # Returns the least size that a part asks for, None while it can't tell; raises ModelFileError.
    least_size: Callable[[Path], int | None] = lambda _: 0
    progress: Callable[[int, int | None], None] = lambda _done, _total: None
    note: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    free_space: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free


def part_path(target: Path) -> Path:
    """The file in which a download arrives."""
    return target.with_name(f"{target.name}.part")


def record_path(target: Path) -> Path:
    """The file with the source of `target`, or of its part."""
    return target.with_name(f"{target.name}.source.json")


def read_record(target: Path) -> SourceRecord | None:
    """Return the source of a file; None where it has none that can be read."""
    try:
        return msgspec.json.decode(record_path(target).read_bytes(), type=SourceRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def write_record(target: Path, record: SourceRecord) -> None:
    """Replace the record of a file. Raises OSError."""
    path = record_path(target)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(asdict(record), indent=2) + "\n")
    draft.replace(path)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(client: httpx.Client, wish: DownloadWish, hooks: DownloadHooks) -> str:
    """Download to `wish.target`; return the file's SHA-256. Raises LocalFleetError and OSError."""
    transfer = _Transfer(client, wish, hooks)
    transfer.part.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(transfer.part, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            transfer.fetch(file)
            os.fsync(file.fileno())
        return transfer.finish()
    except OSError as error:
        raise DownloadError(
            f"{transfer.part}: {(error.strerror or str(error)).lower()}; what has arrived is kept"
        ) from error
    except (DigestError, ModelFileError, _TooLargeError):
        transfer.remove()
        raise
    finally:
        transfer.remove_empty()


class _Transfer:
    """One download, over as many connections as it takes."""

    def __init__(self, client: httpx.Client, wish: DownloadWish, hooks: DownloadHooks) -> None:
        self.part = part_path(wish.target)
        self._client = client
        self._wish = wish
        self._hooks = hooks
        self._record = read_record(wish.target) or SourceRecord(printable(wish.url))
        self._digest = hashlib.sha256()
        self._have = 0
        self._least: int | None = None  # bytes that the head asks for
        self._next_look = FIRST_LOOK
        self._next_space_check = FREE_CHECK_BYTES
        self._restarts = 0

    def fetch(self, file: BinaryIO) -> None:
        """Go on until the whole file is there. Raises LocalFleetError and OSError."""
        self._take_up(file)
        failures, best = 0, self._have
        for number in range(1, MOST_TRIES + 1):
            try:
                self._try_once(file)
            except (_BrokenOffError, RemoteError) as error:
                if isinstance(error, RemoteError) and not error.retryable:
                    raise
                gained = self._have - best
                best = max(best, self._have)
                failures = 1 if gained >= LEAST_PROGRESS else failures + 1
                if failures >= MOST_FAILURES or number == MOST_TRIES:
                    raise self._given_up(str(error)) from error
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1))
                if isinstance(error, RemoteError) and error.retry_after is not None:
                    pause = max(pause, error.retry_after)
                self._hooks.note(f"{error}; next try in {pause:.0f} s")
                self._hooks.sleep(pause)
            else:
                return

    def finish(self) -> str:
        """Give the whole file its own name; return its digest. Raises DigestError and OSError."""
        wish, found = self._wish, self._digest.hexdigest()
        if wish.sha256 is not None and found != wish.sha256:
            raise DigestError(
                f"{printable(wish.url)}: the file has the SHA-256 {found}, not {wish.sha256}: it "
                "is another file or was damaged, and has been removed. Remedy: compare the digest "
                "with its publisher's; the same command downloads it again"
            )
        self.part.chmod(0o644)
        self.part.replace(wish.target)
        write_record(wish.target, replace(self._record, total=self._have, sha256=found))
        return found

    def remove(self) -> None:
        """Remove the part, and its record unless a whole file has one."""
        self.part.unlink(missing_ok=True)
        if not self._wish.target.exists():
            record_path(self._wish.target).unlink(missing_ok=True)

    def remove_empty(self) -> None:
        """Remove a part without a byte."""
        if self._have == 0:
            self.remove()

    def _take_up(self, file: BinaryIO) -> None:
        """Go on with the part of an earlier run where that is safe."""
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return
        if self._record.version.if_range is None and self._wish.sha256 is None:
            self._hooks.note(
                "The server does not tell whether its file has changed: downloading it again from "
                "the start (with --sha256 it could be resumed)"
            )
            self._empty(file)
            return
        file.seek(0)
        while block := file.read(HASH_BLOCK):
            self._digest.update(block)
            self._have += len(block)
        self._hooks.note(f"Resuming after {format_gib(self._have)}")
        self._look(self._record.total)

    def _try_once(self, file: BinaryIO) -> None:
        """Read one response into the part. Raises _BrokenOffError and RemoteError."""
        wish = self._wish
        expected = self._record.total
        if self._have and self._have == expected:
            return
        if_range = self._record.version.if_range
        try:
            with open_remote(
                self._client, wish.url, start=self._have, if_range=if_range, token=wish.token
            ) as body:
                self._accept(file, body)
                self._receive(file, body)
        except RangeRefusedError as error:
            # All was there, as the server says; else it has another file, or can't resume.
            if error.total is not None and error.total == self._have:
                self._record = replace(self._record, total=self._have)
            else:
                self._start_over(file, str(error))
                raise _BrokenOffError(str(error)) from error
        except httpx.HTTPError as error:
            raise _BrokenOffError(str(describe_failure(error))) from error
        self._check_end()

    def _check_end(self) -> None:
        """Judge the end of a body. Raises _BrokenOffError where more should have come."""
        where, total = printable(self._wish.url), self._record.total
        if total is not None and self._have < total:
            raise _BrokenOffError(f"{where}: ended after {self._have:,} of {total:,} bytes")
        if self._least is None:
            self._least = self._hooks.least_size(self.part)
        if self._least is not None and self._have >= self._least:
            return
        if total is None:  # the end of the connection was the only sign of the end
            of = "" if self._least is None else f" of at least {self._least:,}"
            raise _BrokenOffError(f"{where}: ended after {self._have:,}{of} bytes")
        raise ModelFileError(
            f"{where}: the file on the server is cut short, after {self._have:,} bytes; it is "
            "removed. Remedy: another address, or tell its publisher"
        )

    def _accept(self, file: BinaryIO, body: RemoteBody) -> None:
        """Compare a response with what is known, and check that it fits, before it is read."""
        known, version = self._record, body.version
        if body.start == 0:
            if self._have:
                self._start_over(file, "the server sends the file from its start")
            # Else the first response, whose version counts.
        elif (known.total is not None and body.total is not None and body.total != known.total) or (
            known.etag is not None and version.etag is not None and version.etag != known.etag
        ):
            self._start_over(file, "the file has changed on the server")
            raise _BrokenOffError(f"{printable(self._wish.url)}: has changed meanwhile")
        total = body.total if body.total is not None else (known.total if body.start else None)
        if body.start == 0:
            known = SourceRecord(known.url, version.etag, version.last_modified)
        self._record = replace(known, total=total)
        write_record(self._wish.target, self._record)
        if total is not None:
            self._check_size(total)
        self._check_space(0 if total is None else total - self._have)

    def _receive(self, file: BinaryIO, body: RemoteBody) -> None:
        hooks, total = self._hooks, self._record.total
        file.seek(self._have)
        hooks.progress(self._have, total)
        window_began, window_bytes = hooks.clock(), 0
        for chunk in body.chunks:
            if total is not None and self._have + len(chunk) > total:
                raise _TooLargeError(
                    f"{printable(self._wish.url)}: sends more than the {total:,} bytes that it "
                    "announced; what has arrived is removed"
                )
            self._check_most(self._have + len(chunk))
            _write_whole(file, chunk)
            self._digest.update(chunk)
            self._have += len(chunk)
            self._look(total)
            if total is None and self._have >= self._next_space_check:
                self._next_space_check = self._have + FREE_CHECK_BYTES
                self._check_space(0)
            hooks.progress(self._have, total)
            window_bytes += len(chunk)
            if (now := hooks.clock()) - window_began >= STALL_SECONDS:
                if window_bytes < STALL_BYTES:
                    raise _BrokenOffError(
                        f"{printable(self._wish.url)}: sent only {window_bytes:,} bytes in "
                        f"{now - window_began:.0f} s"
                    )
                window_began, window_bytes = now, 0

    def _look(self, total: int | None) -> None:
        """Judge the head as soon as enough of it is there."""
        while self._least is None and self._next_look <= self._have:
            self._next_look *= 2
            if self._next_look <= self._have:
                continue  # only the latest counts
            if self._have > LAST_LOOK:
                return
            self._least = self._hooks.least_size(self.part)
            if self._least is None:
                return
            if total is not None and self._least > total:
                raise ModelFileError(
                    f"{printable(self._wish.url)}: announces {total:,} bytes, but its head asks "
                    f"for at least {self._least:,}: the file on the server is cut short. Remedy: "
                    "another address, or tell its publisher"
                )
            if total is None:
                self._check_size(self._least)
                self._check_space(self._least - self._have)

    def _check_size(self, size: int) -> None:
        self._check_most(size)
        self._hooks.check_size(size)

    def _check_most(self, size: int) -> None:
        most = self._wish.most_bytes
        if most is not None and size > most:
            raise _TooLargeError(
                f"{printable(self._wish.url)}: larger than --max-bytes allows ({most:,} bytes); "
                "what has arrived is removed"
            )

    def _check_space(self, more: int) -> None:
        needed = max(0, more) + self._wish.space_beside
        folder = self.part.parent
        free = self._hooks.free_space(folder)
        if free - needed < DISK_RESERVE:
            raise DownloadError(
                f"{printable(self._wish.url)}: not enough space on the disk: {format_gib(needed)} "
                f"more are needed and {format_gib(DISK_RESERVE)} must stay free, but {folder} has "
                f"{format_gib(free)}. Remedy: llama-gateway cache list shows what it holds; or "
                "another folder, in LLAMA_GATEWAY_CACHE"
            )

    def _start_over(self, file: BinaryIO, why: str) -> None:
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            raise self._given_up(why)
        self._hooks.note(f"Starting over: {why}")
        self._empty(file)

    def _empty(self, file: BinaryIO) -> None:
        file.truncate(0)
        self._digest = hashlib.sha256()
        self._have, self._least = 0, None
        self._next_look, self._next_space_check = FIRST_LOOK, FREE_CHECK_BYTES
        self._record = SourceRecord(self._record.url)

    def _given_up(self, why: str) -> DownloadError:
        return DownloadError(
            f"{why}; given up after several tries. {format_gib(self._have)} are kept: the same "
            "command goes on from there"
        )


def _write_whole(file: BinaryIO, data: bytes) -> None:
    """Write all of `data`: an unbuffered file may take a part of it, as where a disk fills."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]
