"""Keys and their groups in the store: made, changed, rotated and revoked.

The functions that take a connection are jobs of the store's thread, or parts of such jobs. They can
be done twice: who does not know whether a change was made asks for it again. Each change raises the
revision of the keys, so that every gateway of the store sees it at its next poll. A group of the
settings comes before one of the store that has its name.

`KeySync` keeps keys and groups in force equal to the store: changes, expiries, revocations in a
second. The hashes of the keys, and the groups, are also kept in a file of the state folder
(`LastKnownKeys`). A gateway that starts while its store can't be reached knows its callers by that
file until the store answers. Without it nobody can be told from a stranger: then keys of the
settings work, and everybody else gets 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog
from sqlalchemy import Connection, Row, case, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from gateway.callers.keys import HeldKey, KeyRing, held_key, without_secret
from gateway.config.keys import GroupSpec, KeySpec
from gateway.config.settings import Settings
from gateway.errors import GatewayError, truncate_echo
from gateway.store.database import StoreLocation, insert_for, never_had_keys
from gateway.store.failures import StoreError, StoreUnavailable
from gateway.store.schema import groups as groups_table
from gateway.store.schema import keys as keys_table
from gateway.store.schema import learnt, revisions, usage
from gateway.store.store import Store, StoreWorker
from gateway.system import read_state, write_state

# Keys that a store may hold, revoked ones included: a gateway has all of them in memory.
MOST_STORED_KEYS = 100_000
MOST_STORED_GROUPS = 1000
MOST_PROBLEMS = 50  # problems of an import that are told; it counts the others
MOST_REVOKED_NAMES = 10_000  # revoked keys whose names a gateway remembers, the latest
KEYS_REVISION = "keys"  # the name under which the store counts changes of keys and groups

# The columns of fields of keys and groups that have other names, and the fields kept as JSON.
_COLUMNS = {"group": "group_name", "cache": "privacy", "expires": "expires_at"}
_AS_JSON = frozenset({"models", "limits", "user_limits", "cache"})
_OF_KEY = ("created_at", "revoked_at", "previous_sha256", "previous_until")
S = TypeVar("S", KeySpec, GroupSpec)
Wanted = Sequence[Any]  # what SQL asks of a key's row
IN_FORCE = keys_table.c.revoked_at.is_(None)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key of the store. Times are Unix seconds."""

    spec: KeySpec
    created_at: float
    revoked_at: float | None = None
    previous_sha256: str | None = field(default=None, repr=False)
    previous_until: float | None = None  # the secret before the last rotation works until then

    def held(self) -> HeldKey:
        """The key as the ring looks it up."""
        return held_key(self.spec, self.previous_sha256, self.previous_until)


@dataclass(frozen=True, slots=True)
class KeyProblem:
    """What is wrong with one of the keys that somebody wants to store."""

    index: int  # its place in the list, from 0
    key: str  # the field to blame
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        name = f"{self.key}: " if self.key else ""
        return f"{name}{self.message}" + (f" ({self.remedy})" if self.remedy else "")


class KeysRefused(GatewayError):  # noqa: N818 - says what happened to the keys
    """None of these keys was stored; `problems` says what is wrong with which."""

    def __init__(self, problems: Sequence[KeyProblem], status: int = 400) -> None:
        first = str(problems[0])
        more = f"; and {len(problems) - 1} more problems" if len(problems) > 1 else ""
        code = "key_exists" if status == 409 else "invalid_request"
        super().__init__(status, code, first + more, param=problems[0].key or None)
        self.problems = tuple(problems)


def is_over(spec: KeySpec, now: float) -> bool:
    """Whether the key has expired."""
    return spec.expires is not None and spec.expires.timestamp() <= now


def key_not_found(name: str) -> GatewayError:
    """404: no key has this name or id."""
    return GatewayError(
        404,
        "key_not_found",
        f"There is no key of the name or id '{truncate_echo(without_secret(name))}'; "
        "'llama-gateway keys list' shows all.",
    )


def group_not_found(name: str) -> GatewayError:
    """404: no group of the store has this name."""
    message = f"There is no group '{truncate_echo(name)}'; 'llama-gateway groups list' shows all."
    return GatewayError(404, "group_not_found", message)


# Jobs of the store's thread.


def revision_of(connection: Connection, name: str = KEYS_REVISION) -> int:
    """The number of the last change of keys or groups, or of this name; 0: there was none."""
    asked = select(revisions.c.number).where(revisions.c.name == name)
    return int(connection.scalar(asked) or 0)


def read_keys(
    connection: Connection, wanted: Wanted = (IN_FORCE,), most: int | None = None
) -> list[StoredKey]:
    """The first keys in the order of their names, of those that all of this is true of."""
    rows = key_rows(connection, wanted, most)
    return [key for row in rows if (key := stored_key(row)) is not None]


def key_rows(
    connection: Connection, wanted: Wanted = (IN_FORCE,), most: int | None = None
) -> Sequence[Row[Any]]:
    """The rows of `read_keys`."""
    in_order = select(keys_table).order_by(keys_table.c.name, keys_table.c.created_at)
    return connection.execute(in_order.where(*wanted).limit(most or MOST_STORED_KEYS)).all()


def revoked_names(connection: Connection) -> dict[str, str]:
    """The names of revoked keys by their ids: what they did is still told of."""
    wanted = select(keys_table.c.id, keys_table.c.name).where(keys_table.c.revoked_at.is_not(None))
    latest = wanted.order_by(keys_table.c.revoked_at.desc()).limit(MOST_REVOKED_NAMES)
    return {row[0]: row[1] for row in connection.execute(latest)}


def key_names(connection: Connection, ids: Iterable[str]) -> dict[str, str]:
    """The names of some thousand stored keys by their ids; revoked keys keep theirs."""
    wanted = select(keys_table.c.id, keys_table.c.name).where(keys_table.c.id.in_(list(ids)))
    return {row[0]: row[1] for row in connection.execute(wanted)}


def last_uses(connection: Connection, ids: Sequence[str]) -> dict[str, float]:
    """When the last request of each key ended, as far as the ledger has a row of it."""
    ended = select(usage.c.ended_at).order_by(usage.c.ended_at.desc()).limit(1)
    of_stored = ended.where(usage.c.key == keys_table.c.id).scalar_subquery()
    wanted = select(keys_table.c.id, of_stored).where(keys_table.c.id.in_(ids))
    found = {row[0]: row[1] for row in connection.execute(wanted)}
    for key in set(ids) - found.keys():  # those of the settings
        found[key] = connection.scalar(ended.where(usage.c.key == key))
    return {key: float(at) for key, at in found.items() if at is not None}


def group_members(connection: Connection) -> dict[str, int]:
    """How many stored keys, without revoked ones, are of each group that some are of."""
    group = keys_table.c.group_name
    counted = select(group, func.count()).where(IN_FORCE, group.is_not(None)).group_by(group)
    return {row[0]: row[1] for row in connection.execute(counted)}


def stored_key(row: Row[Any]) -> StoredKey | None:
    """The key of a row; None if a later version has written what this one can't read."""
    spec = _spec_of(row, KeySpec, "key", row.id)
    return None if spec is None else StoredKey(spec, *(getattr(row, name) for name in _OF_KEY))


def _spec_of(row: Row[Any], model: type[S], what: str, name: str) -> S | None:
    values = row._mapping  # noqa: SLF001 - SQLAlchemy's public name for it
    fields = {one: values[_COLUMNS.get(one, one)] for one in model.model_fields}
    try:
        for one in _AS_JSON & fields.keys():
            fields[one] = None if fields[one] is None else json.loads(fields[one])
        if fields.get("expires") is not None:
            fields["expires"] = datetime.fromtimestamp(fields["expires"], UTC)
        return model.model_validate(fields)
    except (ValueError, OverflowError, OSError) as error:
        # Its rights are unknown, so it has none.
        event, why = f"a stored {what} can't be used", str(error).splitlines()[0]
        log.warning(event, **{what: name, "why": why})
        return None


def _columns_of(spec: KeySpec | GroupSpec) -> dict[str, Any]:
    fields = spec.model_dump(mode="json", exclude_none=True)
    fields |= {name: json.dumps(fields[name]) for name in _AS_JSON & fields.keys()}
    return {_COLUMNS.get(name, name): fields.get(name) for name in type(spec).model_fields}


def find_key(connection: Connection, name: str) -> StoredKey:
    """The key of this name or id; a revoked one only if no other has it.

    Raises: GatewayError (404).
    """
    wanted = (
        select(keys_table)
        .where(or_(keys_table.c.id == name, keys_table.c.name == name))
        .order_by(keys_table.c.revoked_at.is_(None).desc(), keys_table.c.revoked_at.desc())
        .limit(1)
    )
    row = connection.execute(wanted).first()
    key = None if row is None else stored_key(row)
    if key is None:
        raise key_not_found(name)
    return key


def add_keys(connection: Connection, specs: Sequence[KeySpec], now: float) -> list[StoredKey]:
    """Store these keys: all of them or none. Raises: KeysRefused (409)."""
    problems: list[KeyProblem] = []
    words = list({word for spec in specs for word in (spec.id, spec.name)})
    present: dict[str, StoredKey] = {}
    for start in range(0, len(words), _MOST_PARAMETERS):
        some = words[start : start + _MOST_PARAMETERS]
        present |= {key.spec.id: key for key in _named(connection, some)}
    active = [key for key in present.values() if key.revoked_at is None]
    called = {word: key for key in active for word in (key.spec.id, key.spec.name)}
    count = connection.scalar(select(func.count()).select_from(keys_table)) or 0
    if len(specs) > MOST_STORED_KEYS - count:
        message = f"a store holds at most {MOST_STORED_KEYS} keys, revoked ones included"
        problems.append(KeyProblem(0, "", message))
    fresh = []
    for index, spec in enumerate(specs):
        same, other = present.get(spec.id), called.get(spec.name) or called.get(spec.id)
        if same is not None and same.revoked_at is None and same.spec == spec:
            continue  # It was stored before.
        if same is not None:
            state = "a revoked key has" if same.revoked_at is not None else "another key has"
            message = f"{state} the id '{spec.id}' already"
            problems.append(KeyProblem(index, "id", message, "choose another"))
        elif other is not None:
            message = f"the key {other.spec.id} is called '{other.spec.name}' already"
            remedy = "choose another, or revoke that one"
            problems.append(KeyProblem(index, "name", message, remedy))
        else:
            fresh.append(StoredKey(spec, now))
    if problems:
        raise KeysRefused(problems[:MOST_PROBLEMS], 409)
    if fresh:
        try:
            connection.execute(insert(keys_table), [_row(key) for key in fresh])
        except IntegrityError:
            # Another process has stored it since the look.
            problem = KeyProblem(0, "name", "another key of this name or id is being stored")
            raise KeysRefused([problem], 409) from None
        raise_revision(connection, now)
    return [present.get(spec.id) or StoredKey(spec, now) for spec in specs]


def change_key(connection: Connection, name: str, spec: KeySpec, now: float) -> StoredKey:
    """Give the key of this name or id the rights and the name of `spec`.

    Its id and its secrets stay. Raises: GatewayError (404, 409).
    """
    key = _usable(connection, name)
    for other in _named(connection, [spec.name]):
        if other.spec.id != key.spec.id and other.revoked_at is None:
            message = f"the key {other.spec.id} is called '{spec.name}' already"
            raise KeysRefused([KeyProblem(0, "name", message, "choose another")], 409)
    changed = replace(
        key, spec=spec.model_copy(update={"id": key.spec.id, "sha256": key.spec.sha256})
    )
    if changed != key:
        _write(connection, changed, now)
    return changed


def rotate_key(
    connection: Connection, name: str, sha256: str, grace: float, now: float
) -> StoredKey:
    """Give the key a new secret; the old one works for `grace` seconds more.

    Raises: GatewayError (404, 409).
    """
    key = _usable(connection, name)
    if key.spec.sha256 == sha256:
        return key  # It was done before.
    if is_over(key.spec, now):
        raise GatewayError(
            409, "key_expired", f"The key '{key.spec.name}' has expired: make a new one."
        )
    rotated = replace(
        key,
        spec=key.spec.model_copy(update={"sha256": sha256}),
        previous_sha256=key.spec.sha256 if grace > 0 else None,
        previous_until=now + grace if grace > 0 else None,
    )
    _write(connection, rotated, now)
    return rotated


def revoke_key(connection: Connection, name: str, now: float) -> StoredKey:
    """End the key of this name or id for good, and forget what was learnt of its requests.

    Raises: GatewayError (404).
    """
    key = find_key(connection, name)
    if key.revoked_at is not None:
        return key
    revoked = replace(key, revoked_at=now, previous_sha256=None, previous_until=None)
    _write(connection, revoked, now)
    connection.execute(delete(learnt).where(learnt.c.caller == key.spec.id))
    return revoked


def raise_revision(connection: Connection, now: float) -> None:
    """Count a change of keys or groups.

    Not by one but to the time in milliseconds, so that a store that was put back from a backup
    never has the number of the one before.
    """
    least = int(now * 1000)
    first = insert_for(connection)(revisions).values(name=KEYS_REVISION, number=least)
    raised = revisions.c.number + 1
    connection.execute(
        first.on_conflict_do_update(
            index_elements=[revisions.c.name],
            set_={"number": case((raised > least, raised), else_=least)},
        )
    )


def _usable(connection: Connection, name: str) -> StoredKey:
    key = find_key(connection, name)
    if key.revoked_at is not None:
        raise GatewayError(
            409, "key_revoked", f"The key '{key.spec.name}' is revoked for good: make a new one."
        )
    return key


_MOST_PARAMETERS = 10_000  # values that one statement names; SQLite takes 32,766


def _named(connection: Connection, words: Sequence[str]) -> list[StoredKey]:
    wanted = or_(keys_table.c.id.in_(words), keys_table.c.name.in_(words))
    return read_keys(connection, [wanted])


def _write(connection: Connection, key: StoredKey, now: float) -> None:
    values = _row(key)
    connection.execute(
        update(keys_table).where(keys_table.c.id == values.pop("id")).values(**values)
    )
    raise_revision(connection, now)


def _row(key: StoredKey) -> dict[str, Any]:
    values = _columns_of(key.spec) | {name: getattr(key, name) for name in _OF_KEY}
    if key.spec.expires is not None:
        values["expires_at"] = key.spec.expires.timestamp()
    return values


# Groups.


def read_groups(connection: Connection) -> dict[str, GroupSpec]:
    """The stored groups by their names."""
    rows = connection.execute(
        select(groups_table).order_by(groups_table.c.name).limit(MOST_STORED_GROUPS)
    )
    found = ((row.name, _spec_of(row, GroupSpec, "group", row.name)) for row in rows)
    return {name: spec for name, spec in found if spec is not None}


def put_group(connection: Connection, name: str, spec: GroupSpec, now: float) -> None:
    """Store a group in place of the one of its name. Raises: GatewayError (409)."""
    count = connection.scalar(select(func.count()).where(groups_table.c.name != name)) or 0
    if count >= MOST_STORED_GROUPS:
        message = f"A store holds at most {MOST_STORED_GROUPS} groups."
        raise GatewayError(409, "too_many_groups", message)
    values = _columns_of(spec) | {"changed_at": now}
    made = insert_for(connection)(groups_table).values(name=name, created_at=now, **values)
    connection.execute(
        made.on_conflict_do_update(index_elements=[groups_table.c.name], set_=values)
    )
    raise_revision(connection, now)


def remove_group(connection: Connection, name: str, now: float) -> None:
    """Remove a stored group. Raises: GatewayError (404)."""
    if not connection.execute(delete(groups_table).where(groups_table.c.name == name)).rowcount:
        raise group_not_found(name)
    raise_revision(connection, now)


def with_groups(settings: Settings, stored: Mapping[str, GroupSpec]) -> Settings:
    """The settings with the store's groups beside their own, which come before those."""
    if not stored:
        return settings
    return settings.model_copy(update={"groups": {**stored, **settings.groups}})


def members_of(settings_keys: Iterable[KeySpec], stored: Mapping[str, int]) -> dict[str, int]:
    """How many keys of settings and store are of each group that some are of."""
    counts = Counter(key.group for key in settings_keys if key.group is not None)
    return counts + Counter(stored)


# What the keys were when the store was read last.

FILE_VERSION = 1  # version of the file's format; a file of another version is not read
LARGEST_FILE = 128 << 20  # bytes; 100,000 keys of 1 KiB each fit
# Seconds until a file that could not be written is tried again; then twice as long each time.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0


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
    """What the store has, or had when it was read last."""

    held: list[HeldKey]
    groups: Mapping[str, GroupSpec] = {}
    members: Mapping[str, int] = {}
    names: Mapping[str, str] = {}  # of revoked keys
    keys: Sequence[StoredKey] = ()
    revision: int | None = None
    saved_at: float | None = None  # Unix seconds; None: they are the store's, or there are none


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
                held, groups = list(_held_keys(found.keys)), dict(_known_groups(found.groups))
                named = (key.caller.group for key in held if key.caller.group is not None)
                return KnownKeys(held, groups, Counter(named), saved_at=found.saved_at)
            if found is None and _was_there(self.path):
                return None
        # A person without keys is served from a read-only folder and from a full disk, too.
        return KnownKeys([]) if never_had_keys(self.location) else None

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
            write_state(path, whole, mode=0o600)
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


@dataclass(eq=False)
class KeySync:
    """Keeps the stored keys of `key_ring` equal to those of `store`; None: there is no store.

    `path` is the file of the last known keys. `on_change` is called when keys or groups of the
    store have changed, and the ring has the keys.
    """

    store: Store | None
    key_ring: KeyRing
    path: InitVar[Path | None]
    _: KW_ONLY
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

    def __post_init__(self, path: Path | None) -> None:
        store = self.store
        self._last_known = None if store is None else LastKnownKeys(store.location, path)
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
            if saved.saved_at is not None:
                at = datetime.fromtimestamp(saved.saved_at).astimezone()
                of = at.isoformat(timespec="seconds")
                log.warning("stored keys as last known", of=of, why=str(error))
            else:
                log.warning("no key was ever stored", why=error.message, remedy=error.remedy)
            self._take(saved)

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
            self._take(read)
            await asyncio.to_thread(last_known.save, read.keys, read.groups)

    def _take(self, known: KnownKeys) -> None:
        self._revision, self.groups, self.members = known.revision, known.groups, known.members
        self.key_ring.replace_stored(known.held, known.names)
        self._tell()
        self.on_change()

    def _tell(self) -> None:
        """Log it once that the last key is lost."""
        lost = self.key_ring.lost
        if lost is not None and not self._told_lost:
            log.warning("locked", why=lost)
        self._told_lost = lost is not None

    def _read_changes(self, connection: Connection) -> KnownKeys | None:
        """What the store has; None: it is what it was. On the store's thread."""
        revision = revision_of(connection)
        if revision == self._revision:
            return None
        known: dict[tuple[Any, ...], tuple[StoredKey, HeldKey] | None] = {}
        for row in key_rows(connection):
            values = tuple(row)
            seen = values in self._known
            known[values] = self._known[values] if seen else _held_key_of(row)
        self._known = known
        both = [pair for pair in known.values() if pair is not None]
        return KnownKeys(
            [held for _, held in both],
            read_groups(connection),
            group_members(connection),
            revoked_names(connection),
            [key for key, _ in both],
            revision,
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
    return None if saved is None else len(saved.held)
