"""The file of the last known keys, by which a gateway starts without its store.

It holds hashes alone. A file that can't be written is tried again until it can. If keys of the old
file were revoked or changed meanwhile, it is set aside: a start without the store then refuses all
stored keys, rather than let in one that is known to be revoked.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from gateway.access.keys import HeldKey, held_key
from gateway.access.stored_keys import StoredKey
from gateway.config.listeners import KeySpec
from gateway.store.database import StoreLocation, never_had_keys
from gateway.system import read_state, write_state

FILE_VERSION = 1
"""Version of the file's format; a file of another version is not read."""

LARGEST_FILE = 128 << 20
"""Bytes; 100,000 keys of 1 KiB each fit."""

FIRST_PAUSE = 1.0
"""Seconds until a file that could not be written is tried again; then twice as long each time."""

LONGEST_PAUSE = 60.0

_PRIVATE = 0o600

log = structlog.get_logger()


class _FileKey(msgspec.Struct):
    spec: dict[str, Any]
    previous_sha256: str | None = None
    previous_until: float | None = None


class _KeysFile(msgspec.Struct):
    version: int
    store: str
    """Which store they are of: a hash of its URL."""
    saved_at: float
    keys: list[_FileKey]


class KnownKeys(NamedTuple):
    """Keys as they were when the store was read last."""

    keys: list[HeldKey]
    at: float | None
    """When they were saved, in Unix seconds; None: there never were any."""


class LastKnownKeys:
    """The keys of the store at `location`, in the file `path`; None: they are kept nowhere.

    The methods block: not for event loops. `now` gives Unix seconds, `clock` is monotonic.
    """

    def __init__(
        self,
        location: StoreLocation,
        path: Path | None,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self.error: str | None = None
        """Why the file does not have the last keys; None: it has."""
        self._location = location
        self._path = path
        self._now = now
        self._clock = clock
        self._first_pause = self._pause = first_pause
        self._unsaved: Sequence[StoredKey] | None = None
        self._retry_at = 0.0
        self._is_set_aside = False

    def load(self) -> KnownKeys | None:
        """The keys that the store had when it was read last; None: nobody knows."""
        if self._path is not None:
            consequence = "stored keys stay unknown until the store answers"
            found = read_state(self._path, _KeysFile, LARGEST_FILE, consequence)
            if found is not None and self._is_ours(found):
                return KnownKeys(list(_held_keys(found.keys)), found.saved_at)
            if found is None and _was_there(self._path):
                return None
        # A person without keys is served from a read-only folder and from a full disk, too.
        return KnownKeys([], None) if never_had_keys(self._location) else None

    def save(self, keys: Sequence[StoredKey]) -> None:
        """Write the keys of the store. If that fails, `is_due` says when to `save_again`."""
        path = self._path
        if path is None:
            return
        current = [
            _FileKey(
                key.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
                key.previous_sha256,
                key.previous_until,
            )
            for key in keys
        ]
        whole = _KeysFile(FILE_VERSION, _store_id(self._location), self._now(), current)
        try:
            write_state(path, whole, mode=_PRIVATE)
        except OSError as error:
            self._failed(path, keys, current, str(error))
            return
        if self._is_set_aside:
            with contextlib.suppress(OSError):
                _aside(path).unlink()
        if self.error is not None:
            log.info("stored keys are saved again for a start without the store")
        self.error = self._unsaved = None
        self._pause, self._is_set_aside = self._first_pause, False

    def is_due(self) -> bool:
        """Whether a write that failed is to be tried again now."""
        return self._unsaved is not None and self._clock() >= self._retry_at

    def save_again(self) -> None:
        """Try again to write what could not be written."""
        if self._unsaved is not None:
            self.save(self._unsaved)

    def _failed(
        self, path: Path, keys: Sequence[StoredKey], current: Sequence[_FileKey], why: str
    ) -> None:
        self._unsaved = keys
        self._retry_at = self._clock() + self._pause
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        error = f"the keys could not be saved for a start without the store: {why}"
        if self._is_outdated(path, current):
            try:
                # That needs no room on the disk.
                path.replace(_aside(path))
            except OSError:
                error += f"; {path} still has keys that were revoked or changed: remove it"
            else:
                self._is_set_aside = True
        if self._is_set_aside:
            error += "; such a start refuses all stored keys until the store answers"
        if error != self.error:
            log.warning(
                "stored keys could not be saved for a start without the store",
                why=error,
                remedy=f"let the gateway's user write {path}, and see that its disk has room",
            )
        self.error = error

    def _is_outdated(self, path: Path, current: Sequence[_FileKey]) -> bool:
        """Whether the file has a key that is not, or not like this, among the current ones."""
        consequence = "it is written anew as soon as possible"
        found = read_state(path, _KeysFile, LARGEST_FILE, consequence)
        if found is None or not self._is_ours(found):
            return False
        known = {key.spec.get("id"): key for key in current}
        return any(known.get(key.spec.get("id")) != key for key in found.keys)

    def _is_ours(self, found: _KeysFile) -> bool:
        return (found.version, found.store) == (FILE_VERSION, _store_id(self._location))


def _held_keys(saved: Iterable[_FileKey]) -> Iterator[HeldKey]:
    for key in saved:
        # What another version wrote, only the store can tell.
        with contextlib.suppress(ValueError):
            spec = KeySpec.model_validate(key.spec, by_alias=True, by_name=False)
            yield held_key(spec, key.previous_sha256, key.previous_until)


def _aside(path: Path) -> Path:
    """Where `read_state` puts damaged files, too."""
    return path.with_name(f"{path.name}.bad")


def _was_there(path: Path) -> bool:
    """Whether there is a file of keys that can't be used, perhaps one that was set aside."""
    try:
        return path.exists() or _aside(path).exists()
    except OSError:
        return True


def _store_id(location: StoreLocation) -> str:
    """A hash, since the URL names hosts and users."""
    return hashlib.sha256(location.shown.encode()).hexdigest()[:32]
