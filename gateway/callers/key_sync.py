"""Keeps keys and groups in force equal to the store: changes, expiries, revocations in a second.

The hashes of the keys, and the groups, are also kept in a file of the state folder
(`LastKnownKeys`). A gateway that starts while its store can't be reached knows its callers by that
file until the store answers. Without it nobody can be told from a stranger: then keys of the
settings work, and everybody else gets 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog
from sqlalchemy import Connection, Row

from gateway.callers.keys import HeldKey, KeyRing, held_key
from gateway.callers.stored_keys import (
    StoredKey,
    group_members,
    key_rows,
    keys_revision,
    read_groups,
    read_keys,
    revoked_names,
    stored_key,
)
from gateway.config.keys import GroupSpec, KeySpec
from gateway.store.database import StoreLocation, never_had_keys
from gateway.store.failures import StoreError, StoreUnavailable
from gateway.store.store import Store
from gateway.store.worker import StoreWorker
from gateway.system import read_state, write_state

log = structlog.get_logger()

FILE_VERSION = 1  # version of the file's format; a file of another version is not read
LARGEST_FILE = 128 << 20  # bytes; 100,000 keys of 1 KiB each fit
# Seconds until a file that could not be written is tried again; then twice as long each time.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
_PRIVATE = 0o600


class _FileKey(msgspec.Struct):
    spec: dict[str, Any]
    previous_sha256: str | None = None
    previous_until: float | None = None


class _KeysFile(msgspec.Struct):
    version: int
    store: str  # which store they are of: a hash of its URL
    saved_at: float
    keys: list[_FileKey]
    groups: dict[str, dict[str, Any]] = {}


class KnownKeys(NamedTuple):
    """Keys as they were when the store was read last."""

    keys: list[HeldKey]
    at: float | None  # when they were saved, in Unix seconds; None: there never were any
    groups: Mapping[str, GroupSpec]


@dataclass(eq=False)
class LastKnownKeys:
    """The keys and groups of the store at `location`, in the file `path`; None: nowhere.

    The file holds hashes alone. If it can't be written, that is tried again until it can. If keys
    of the old file were revoked or changed meanwhile, it is set aside: a start without the store
    then refuses all stored keys, rather than let in one that is known to be revoked.

    The methods block: not for event loops. `now` gives Unix seconds, `clock` is monotonic.
    """

    location: StoreLocation
    path: Path | None
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    error: str | None = None  # why the file does not have the last keys; None: it has
    _pause: float = FIRST_PAUSE
    _unsaved: tuple[Sequence[StoredKey], Mapping[str, GroupSpec]] | None = None
    _retry_at: float = 0.0
    _is_set_aside: bool = False

    def load(self) -> KnownKeys | None:
        """The keys that the store had when it was read last; None: nobody knows."""
        if self.path is not None:
            consequence = "stored keys stay unknown until the store answers"
            found = read_state(self.path, _KeysFile, LARGEST_FILE, consequence)
            if found is not None and self._is_ours(found):
                groups = dict(_known_groups(found.groups))
                return KnownKeys(list(_held_keys(found.keys)), found.saved_at, groups)
            if found is None and _was_there(self.path):
                return None
        # A person without keys is served from a read-only folder and from a full disk, too.
        return KnownKeys([], None, {}) if never_had_keys(self.location) else None

    def save(self, keys: Sequence[StoredKey], groups: Mapping[str, GroupSpec]) -> None:
        """Write what the store has. If that fails, `is_due` says when to `save_again`."""
        path = self.path
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
        in_json = {
            name: spec.model_dump(mode="json", exclude_none=True) for name, spec in groups.items()
        }
        whole = _KeysFile(FILE_VERSION, _store_id(self.location), self.now(), current, in_json)
        try:
            write_state(path, whole, mode=_PRIVATE)
        except OSError as error:
            self._unsaved = keys, groups
            self._failed(path, current, str(error))
            return
        if self._is_set_aside:
            with contextlib.suppress(OSError):
                _aside(path).unlink()
        if self.error is not None:
            log.info("stored keys are saved again for a start without the store")
        self.error = self._unsaved = None
        self._pause, self._is_set_aside = FIRST_PAUSE, False

    def is_due(self) -> bool:
        """Whether a write that failed is to be tried again now."""
        return self._unsaved is not None and self.clock() >= self._retry_at

    def save_again(self) -> None:
        """Try again to write what could not be written."""
        if self._unsaved is not None:
            self.save(*self._unsaved)

    def _failed(self, path: Path, current: Sequence[_FileKey], why: str) -> None:
        self._retry_at = self.clock() + self._pause
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
        return (found.version, found.store) == (FILE_VERSION, _store_id(self.location))


def _held_keys(saved: Iterable[_FileKey]) -> Iterator[HeldKey]:
    for key in saved:
        # What another version wrote, only the store can tell.
        with contextlib.suppress(ValueError):
            spec = KeySpec.model_validate(key.spec, by_alias=True, by_name=False)
            yield held_key(spec, key.previous_sha256, key.previous_until)


def _known_groups(saved: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, GroupSpec]]:
    for name, fields in saved.items():
        with contextlib.suppress(ValueError):
            yield name, GroupSpec.model_validate(fields)


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


# Seconds between two looks whether the stored keys may have changed, and at expired ones.
POLL_SECONDS = 0.5
MOST_UNCHANGED = 60  # looks in a row that trust the store that nothing has changed
# Most seconds for the first look; then the gateway starts with the keys of the file.
START_SECONDS = 5.0
SILENT_SECONDS = 0.1  # to close a store that has just failed


class _Read(NamedTuple):
    """What the store has, of one moment."""

    revision: int
    keys: list[StoredKey]
    held: list[HeldKey]
    names: dict[str, str]  # of revoked keys
    groups: dict[str, GroupSpec]
    members: dict[str, int]


@dataclass(eq=False)
class KeySync:
    """Keeps the stored keys of `key_ring` equal to those of `store`; None: there is no store.

    `path` is the file of the last known keys. `now` gives Unix seconds. `on_change` is called when
    keys or groups of the store have changed, and the ring has the keys.
    """

    store: Store | None
    key_ring: KeyRing
    path: InitVar[Path | None]
    _: KW_ONLY
    now: InitVar[Callable[[], float]] = time.time
    poll_seconds: float = POLL_SECONDS
    on_change: Callable[[], None] = lambda: None
    groups: Mapping[str, GroupSpec] = field(default_factory=dict, init=False)
    """Those of the store, by their names."""
    members: Mapping[str, int] = field(default_factory=dict, init=False)
    """How many keys of the store are of each group that some are of."""
    problem: str | None = None
    """Why the ring may have other keys than the store; None: it has the same."""
    _revision: int | None = None
    """The revision of the keys in the ring; None: they are not the store's, or there are none."""
    _known: dict[tuple[Any, ...], tuple[StoredKey, HeldKey] | None] = field(default_factory=dict)
    """What was made of the last rows: most of them are the same at the next change."""
    _unchanged: int = 0
    _seen_changes: int = -1  # the store's number of changes before the keys were read last
    _told_lost: bool = False

    def __post_init__(self, path: Path | None, now: Callable[[], float]) -> None:
        store = self.store
        self._last_known = None if store is None else LastKnownKeys(store.location, path, now=now)
        # No longer pauses while the store is away: a key may be revoked meanwhile.
        period = self.poll_seconds
        self._worker = StoreWorker(self._look, period, longest_pause=period)
        self._refreshing = asyncio.Lock()

    def configure(self, specs: Iterable[KeySpec], *, allow_anonymous: bool) -> None:
        """Take the keys of these settings."""
        self.key_ring.configure(specs, allow_anonymous=allow_anonymous)
        self._tell()

    async def start(self, seconds: float = START_SECONDS) -> None:
        """Read the store's keys; those of the file, if the store does not open in `seconds`."""
        store, last_known = self.store, self._last_known
        if store is None or last_known is None:
            return
        await store.wait_opened(seconds)
        try:
            await self.refresh(seconds)
        except StoreError as error:
            saved = await asyncio.to_thread(last_known.load)
            if saved is None:
                log.warning("stored keys are unknown", why=error.message, remedy=error.remedy)
                return
            if saved.at is not None:
                at = datetime.fromtimestamp(saved.at).astimezone().isoformat(timespec="seconds")
                log.warning("stored keys as last known", of=at, why=str(error))
            else:
                log.warning("no key was ever stored", why=error.message, remedy=error.remedy)
            self.groups = saved.groups
            self.members = Counter(
                key.caller.group for key in saved.keys if key.caller.group is not None
            )
            self.key_ring.replace_stored(saved.keys)
            self._changed()

    async def run(self) -> None:
        """Take over changes of other processes, and end keys in time, until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._worker.run())
            loops.create_task(self._expire())

    async def _look(self) -> None:
        """Read the keys again if they may have changed. Raises: StoreError."""
        if self._last_known is not None and self._last_known.is_due():
            async with self._refreshing:
                await asyncio.to_thread(self._last_known.save_again)
        changed = self.store is not None and self.store.changes != self._seen_changes
        if not changed and self.problem is None and self._unchanged < MOST_UNCHANGED:
            self._unchanged += 1
            return
        self._unchanged = 0
        await self.refresh()

    @property
    def unsaved(self) -> str | None:
        """Why a start without the store would know other keys; None: it would know these."""
        return None if self._last_known is None else self._last_known.error

    async def _expire(self) -> None:
        """Keys end whatever the store does."""
        while True:
            await asyncio.sleep(self.poll_seconds)
            self.key_ring.expire()

    async def refresh(self, seconds: float | None = None) -> None:
        """Take over the store's keys if they have changed. Raises: StoreError.

        Call it after a change by this process: its callers should not wait for the next poll.
        """
        store, last_known = self.store, self._last_known
        if store is None or last_known is None:
            return
        async with self._refreshing:
            limit = {} if seconds is None else {"seconds": seconds}
            self._seen_changes = store.changes
            try:
                read = await store.run(self._read_changes, write=False, **limit)
            except StoreError as error:
                self.problem = error.message
                raise
            except Exception as error:  # noqa: BLE001 - the poll must go on, and keys must expire
                # Its text may hold values of rows.
                why = f"the stored keys can't be read: {type(error).__name__}"
                if why != self.problem:
                    log.error("stored keys", why=why)  # noqa: TRY400 - as above
                self.problem = why
                raise StoreUnavailable(why, "report this as a fault of the program") from None
            self.problem = None
            if read is None:
                return
            self._revision, self.groups, self.members = read.revision, read.groups, read.members
            self.key_ring.replace_stored(read.held, read.names)
            self._changed()
            await asyncio.to_thread(last_known.save, read.keys, read.groups)

    def _changed(self) -> None:
        self._tell()
        self.on_change()

    def _tell(self) -> None:
        """Log it once that the last key is lost."""
        lost = self.key_ring.lost
        if lost is not None and not self._told_lost:
            log.warning("locked", why=lost)
        self._told_lost = lost is not None

    def _read_changes(self, connection: Connection) -> _Read | None:
        """What the store has; None: it is what it was. On the store's thread."""
        revision = keys_revision(connection)
        if revision == self._revision:
            return None
        known: dict[tuple[Any, ...], tuple[StoredKey, HeldKey] | None] = {}
        for row in key_rows(connection):
            values = tuple(row)
            if values in self._known:
                known[values] = self._known[values]
            else:
                known[values] = _held_key_of(row)
        self._known = known
        both = [pair for pair in known.values() if pair is not None]
        return _Read(
            revision,
            [key for key, _ in both],
            [held for _, held in both],
            revoked_names(connection),
            read_groups(connection),
            group_members(connection),
        )


def _held_key_of(row: Row[Any]) -> tuple[StoredKey, HeldKey] | None:
    key = stored_key(row)
    try:
        return None if key is None else (key, key.held())
    except ValueError:
        log.warning("a stored key can't be used", key=row.id, why="its hashes are none")
        return None


def count_stored_keys(location: StoreLocation, path: Path) -> int | None:
    """How many keys the store has that are not revoked, before a gateway runs.

    If the store can't be read, those of the file; None: nobody knows. Blocks: not for event loops.
    """
    if not never_had_keys(location):
        store, closing = Store(location), START_SECONDS
        store.start()
        try:
            return store.run_now(
                lambda connection: len(read_keys(connection)), write=False, seconds=START_SECONDS
            )
        except StoreError:
            closing = SILENT_SECONDS
        finally:
            store.close(closing)
    saved = LastKnownKeys(location, path).load()
    return None if saved is None else len(saved.keys)
