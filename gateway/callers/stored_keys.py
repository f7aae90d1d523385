"""Keys in the store: made, changed, rotated and revoked, each in one transaction of the store.

The functions that take a connection are jobs of the store's thread, or parts of such jobs. They can
be done twice: who does not know whether a change was made asks for it again. Each of them raises
the revision of the keys, so that every gateway of the store sees the change at its next poll.

`KeyDesk` is what the admin API, and a command on a store alone, do with them. Each operation checks
what is asked for, does it in one transaction of the store, and returns what its asker is shown:
JSON values without the hash. A new secret is in one answer and nowhere else.

`KeySync` keeps the key ring equal to the store: changes, expiries and revocations within a second.
The hashes of the keys are also kept in a file of the state folder (`LastKnownKeys`). A gateway that
starts while its store can't be reached knows its callers by that file until the store answers.
Without it nobody can be told from a stranger: then keys of the settings work, and everybody else
gets 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog
from pydantic import ValidationError
from sqlalchemy import Connection, Row, case, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from gateway import errors
from gateway.callers.keys import ApiKey, HeldKey, KeyRing, held_key, new_key, without_secret
from gateway.config.fields import parse_duration, parse_timestamp
from gateway.config.keys import KeySpec
from gateway.config.settings import Settings
from gateway.config.yaml_file import error_words, model_at_path
from gateway.errors import GatewayError, truncate_echo
from gateway.store.database import StoreLocation, insert_for, never_had_keys
from gateway.store.failures import StoreError, StoreUnavailable
from gateway.store.schema import keys as keys_table
from gateway.store.schema import learnt, revisions
from gateway.store.store import JOB_SECONDS, Store
from gateway.store.worker import StoreWorker
from gateway.system import read_state, write_state

# Keys that a store may hold, revoked ones included: a gateway has all of them in memory.
MOST_STORED_KEYS = 100_000
MOST_PROBLEMS = 50  # problems of an import that are told; it counts the others
KEYS_REVISION = "keys"  # the name under which the store counts changes of keys

# The column of each field that is stored as JSON.
_JSON_COLUMNS = {
    "models": "models",
    "limits": "limits",
    "user_limits": "user_limits",
    "cache": "privacy",
}

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
    remedy: str

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


def key_not_found(name: str) -> GatewayError:
    """404: no key has this name or id."""
    return GatewayError(
        404,
        "key_not_found",
        f"There is no key of the name or id '{truncate_echo(without_secret(name))}'; "
        "'llama-gateway keys list' shows all.",
    )


# Jobs of the store's thread.


def keys_revision(connection: Connection) -> int:
    """The number of the last change of keys; 0: there was none."""
    asked = select(revisions.c.number).where(revisions.c.name == KEYS_REVISION)
    return int(connection.scalar(asked) or 0)


def read_keys(connection: Connection, *, revoked: bool = False) -> list[StoredKey]:
    """All keys in the order of their names; with `revoked`, those as well."""
    rows = key_rows(connection, revoked=revoked)
    return [key for row in rows if (key := stored_key(row)) is not None]


def key_rows(connection: Connection, *, revoked: bool = False) -> Sequence[Row[Any]]:
    """The rows of `read_keys`."""
    wanted = select(keys_table).order_by(keys_table.c.name, keys_table.c.created_at)
    if not revoked:
        wanted = wanted.where(keys_table.c.revoked_at.is_(None))
    return connection.execute(wanted.limit(MOST_STORED_KEYS)).all()


def stored_key(row: Row[Any]) -> StoredKey | None:
    """The key of a row; None if a later version has written what this one can't read."""
    values = row._mapping  # noqa: SLF001 - SQLAlchemy's public name for it
    fields: dict[str, Any] = {
        "id": values["id"],
        "sha256": values["sha256"],
        "name": values["name"],
        "class": values["class_"],
        "max_class": values["max_class"],
        "group": values["group_name"],
        "trust_user_headers": bool(values["trust_user_headers"]),
    }
    try:
        for name, column in _JSON_COLUMNS.items():
            fields[name] = None if values[column] is None else json.loads(values[column])
        if values["expires_at"] is not None:
            fields["expires"] = datetime.fromtimestamp(values["expires_at"], UTC)
        spec = KeySpec.model_validate(fields, by_alias=True, by_name=False)
    except (ValueError, OverflowError, OSError) as error:
        # Its rights are unknown, so it has none.
        why = str(error).splitlines()[0]
        log.warning("a stored key can't be used", key=values["id"], why=why)
        return None
    names = ("created_at", "revoked_at", "previous_sha256", "previous_until")
    return StoredKey(spec, *(values[name] for name in names))


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
    present = _present(connection, specs)
    active = [key for key in present.values() if key.revoked_at is None]
    called = {word: key for key in active for word in (key.spec.id, key.spec.name)}
    count = connection.scalar(select(func.count()).select_from(keys_table)) or 0
    if len(specs) > MOST_STORED_KEYS - count:
        message = f"a store holds at most {MOST_STORED_KEYS} keys, revoked ones included"
        problems.append(KeyProblem(0, "", message, ""))
    fresh = []
    for index, spec in enumerate(specs):
        problem, is_there = _taken(index, spec, present, called)
        if problem is not None:
            problems.append(problem)
        elif not is_there:
            fresh.append(StoredKey(spec, now))
    if problems:
        raise KeysRefused(problems[:MOST_PROBLEMS], 409)
    if fresh:
        try:
            connection.execute(insert(keys_table), [_row(key) for key in fresh])
        except IntegrityError:
            # Another process has stored it since the look.
            problem = KeyProblem(0, "name", "another key of this name or id is being stored", "")
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
    if key.spec.expires is not None and key.spec.expires.timestamp() <= now:
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
    """Count a change of keys.

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


def _taken(
    index: int, spec: KeySpec, present: Mapping[str, StoredKey], called: Mapping[str, StoredKey]
) -> tuple[KeyProblem | None, bool]:
    """Why the key can't be stored; and whether it is stored already, just like this.

    `present` are keys by id, `called` those that are not revoked by id and name.
    """
    same = present.get(spec.id)
    if same is not None and same.revoked_at is None and same.spec == spec:
        return None, True
    if same is not None:
        state = "a revoked key has" if same.revoked_at is not None else "another key has"
        message = f"{state} the id '{spec.id}' already"
        return KeyProblem(index, "id", message, "choose another"), False
    other = called.get(spec.name) or called.get(spec.id)
    if other is None:
        return None, False
    message = f"the key {other.spec.id} is called '{other.spec.name}' already"
    return KeyProblem(index, "name", message, "choose another, or revoke that one"), False


_MOST_PARAMETERS = 10_000  # values that one statement names; SQLite takes 32,766


def _present(connection: Connection, specs: Sequence[KeySpec]) -> dict[str, StoredKey]:
    """The stored keys that have an id or a name of one of these, by id."""
    words = list({word for spec in specs for word in (spec.id, spec.name)})
    found: dict[str, StoredKey] = {}
    for start in range(0, len(words), _MOST_PARAMETERS):
        for key in _named(connection, words[start : start + _MOST_PARAMETERS]):
            found[key.spec.id] = key
    return found


def _named(connection: Connection, words: Sequence[str]) -> list[StoredKey]:
    wanted = select(keys_table).where(or_(keys_table.c.id.in_(words), keys_table.c.name.in_(words)))
    return [key for row in connection.execute(wanted) if (key := stored_key(row)) is not None]


def _write(connection: Connection, key: StoredKey, now: float) -> None:
    values = _row(key)
    connection.execute(
        update(keys_table).where(keys_table.c.id == values.pop("id")).values(**values)
    )
    raise_revision(connection, now)


def _row(key: StoredKey) -> dict[str, Any]:
    """The values of a key's row."""
    spec = key.spec
    fields = spec.model_dump(mode="json", exclude_none=True)
    return {
        "id": spec.id,
        "name": spec.name,
        "sha256": spec.sha256,
        "previous_sha256": key.previous_sha256,
        "previous_until": key.previous_until,
        "created_at": key.created_at,
        "expires_at": None if spec.expires is None else spec.expires.timestamp(),
        "revoked_at": key.revoked_at,
        "class_": spec.class_,
        "max_class": spec.max_class,
        "group_name": spec.group,
        "trust_user_headers": spec.trust_user_headers,
        **{
            column: json.dumps(fields[name]) if name in fields else None
            for name, column in _JSON_COLUMNS.items()
        },
    }


T = TypeVar("T")
DEFAULT_GRACE = 24 * 3600.0  # seconds for which the old secret works after a rotation
LONGEST_GRACE = 366 * 86400.0


async def _nothing() -> None:
    """Nobody but the store needs to know of a change."""


@dataclass(frozen=True, slots=True)
class KeyDesk:
    """The keys of `settings` and `store`. Every method raises GatewayError and StoreError.

    A change may have been made although StoreError was raised: ask again.
    """

    settings: Settings
    store: Store | None
    check_models: Callable[[Sequence[KeySpec]], Sequence[str]]
    """Returns warnings of models that keys name and nobody serves. Raises: KeysRefused."""
    on_change: Callable[[], Awaitable[None]] = _nothing
    """Puts a change in force in this process. Raises: StoreError."""
    now: Callable[[], float] = time.time  # Unix seconds
    seconds: float = JOB_SECONDS  # how long the store may take

    async def list(self, *, revoked: bool, name: str | None = None) -> dict[str, Any]:
        """All keys, by name; with `revoked`, those as well. `name`: keys of this name or id."""
        now, own, stored = self.now(), self.settings.keys, list[StoredKey]()
        if self.store is not None:
            stored = await self._run(lambda connection: read_keys(connection, revoked=revoked))

        def listing() -> dict[str, Any]:
            ids = {spec.id for spec in own}
            keys = [shown_settings_key(spec, now) for spec in own]
            keys += [shown_key(key, now, is_hidden=key.spec.id in ids) for key in stored]
            if name is not None:
                keys = [key for key in keys if name in {key["id"], key["name"]}]
            return {
                "keys": sorted(keys, key=lambda key: (key["name"], key["id"])),
                "warnings": key_warnings(own, stored),
            }

        # A hundred thousand of them take a second.
        return await asyncio.to_thread(listing)

    async def show(self, name: str) -> dict[str, Any]:
        """The key of this name or id."""
        spec = self._settings_key(name)
        if spec is not None:
            return shown_settings_key(spec, self.now())
        if self.store is None:
            raise key_not_found(name)
        return shown_key(await self._run(lambda c: find_key(c, name)), self.now())

    async def create(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Store a key. One without `sha256` is made here, and is in the answer as `key`."""
        entry, made = _with_secret(entry)
        [spec] = await self._checked([entry])
        warnings, now = self.check_models([spec]), self.now()
        [stored] = await self._change(lambda connection: add_keys(connection, [spec], now))
        return _answer(stored, now, made, warnings)

    async def import_keys(self, entries: Sequence[object]) -> dict[str, Any]:
        """Store keys by their hashes: all of them or none. Raises KeysRefused, too."""
        now, specs = self.now(), await self._checked(entries)
        warnings = self.check_models(specs)
        stored = await self._change(lambda connection: add_keys(connection, specs, now))
        keys = await asyncio.to_thread(lambda: [shown_key(key, now) for key in stored])
        return {"imported": len(keys), "keys": keys, "warnings": warnings}

    async def change(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change a key's name or rights by a JSON merge patch (RFC 7396); its secret stays."""
        self._refuse_settings_key(name)
        settings, now = self.settings, self.now()
        key = await self._run(lambda connection: find_key(connection, name))
        spec = checked_change(key, patch, settings.keys, settings.groups, now)
        warnings: Sequence[str] = ()
        if "models" in patch or "limits" in patch:
            warnings = self.check_models([spec])

        def change(connection: Connection) -> StoredKey:
            # Anew: somebody else may have changed it meanwhile.
            latest = find_key(connection, key.spec.id)
            wanted = checked_change(latest, patch, settings.keys, settings.groups, now)
            return change_key(connection, key.spec.id, wanted, now)

        return _answer(await self._change(change), now, None, warnings)

    async def rotate(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Give a key a new secret: of the `sha256` in the fields, or made here.

        The old one works for `grace` more (24 h if unset).
        """
        self._refuse_settings_key(name)
        grace = checked_grace(fields.get("grace", DEFAULT_GRACE))
        if unknown := fields.keys() - {"sha256", "grace"}:
            raise errors.invalid_request(f"There is no '{truncate_echo(min(unknown))}' here.")
        key = await self._run(lambda connection: find_key(connection, name))
        entry, made = _with_secret({"id": key.spec.id, "sha256": fields.get("sha256")})
        now = self.now()
        [spec] = checked_specs([entry], (), (), now)
        rotated = await self._change(
            lambda connection: rotate_key(connection, key.spec.id, spec.sha256, grace, now)
        )
        return _answer(rotated, now, made, ())

    async def revoke(self, name: str) -> dict[str, Any]:
        """End a key for good."""
        self._refuse_settings_key(name)
        now = self.now()
        return shown_key(await self._change(lambda c: revoke_key(c, name, now)), now)

    def _refuse_settings_key(self, name: str) -> None:
        if self._settings_key(name) is not None:
            raise GatewayError(
                409,
                "key_of_settings",
                f"'{truncate_echo(name)}' is a key of the settings: change or remove it there.",
            )

    def _settings_key(self, name: str) -> KeySpec | None:
        return next((one for one in self.settings.keys if name in {one.id, one.name}), None)

    async def _checked(self, entries: Sequence[object]) -> Sequence[KeySpec]:
        settings = self.settings
        # Thousands of them take a second.
        return await asyncio.to_thread(
            checked_specs, entries, settings.keys, settings.groups, self.now()
        )

    async def _run(self, job: Callable[[Connection], T], *, write: bool = False) -> T:
        if self.store is None:
            raise GatewayError(
                501,
                "not_supported",
                "The gateway has no store (store.url: off), so it can't keep keys: write them into "
                "the settings ('llama-gateway keys create' shows the lines).",
            )
        return await self.store.run(job, write=write, seconds=self.seconds)

    async def _change(self, job: Callable[[Connection], T]) -> T:
        result = await self._run(job, write=True)
        await self.on_change()
        return result


def _with_secret(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], ApiKey | None]:
    """The fields with a SHA-256, and the new key if they had none."""
    if fields.get("sha256") is not None:
        return fields, None
    given = fields.get("id")
    # An id that can't be one is refused later, with its reason.
    made = new_key(given if isinstance(given, str) and given and "_" not in given else None)
    return {"id": made.id, **fields, "sha256": made.sha256}, made


def _answer(
    stored: StoredKey, now: float, made: ApiKey | None, warnings: Sequence[str]
) -> dict[str, Any]:
    secret = {} if made is None else {"key": made.text}
    return {**secret, **shown_key(stored, now), "warnings": warnings}


# What somebody wants, checked before the store is asked.


def checked_specs(
    entries: Sequence[object], settings_keys: Iterable[KeySpec], groups: Iterable[str], now: float
) -> list[KeySpec]:
    """The keys that these mappings describe, in the form of the settings' `keys`.

    `expires` may be a duration from `now` on (Unix seconds), such as `90d`. `settings_keys` and
    `groups` are those of the settings: names and ids of keys are unique over both.

    Raises: KeysRefused, with every problem.
    """
    problems: list[KeyProblem] = []
    specs: list[KeySpec] = []
    taken = {one for spec in settings_keys for one in (spec.id, spec.name) if one}
    known_groups, seen = set(groups), dict[str, int]()
    for index, entry in enumerate(entries):
        try:
            spec = _spec(entry, now)
        except ValidationError as error:
            problems += _invalid(index, error)
            continue
        except ValueError as error:
            problems.append(KeyProblem(index, "expires", str(error), ""))
            continue
        specs.append(spec)
        problems += _conflicts(index, spec, taken, known_groups, seen)
        seen |= {spec.id: index, spec.name: index}
        if len(problems) > MOST_PROBLEMS:
            break
    if problems:
        raise KeysRefused(problems[:MOST_PROBLEMS])
    return specs


def checked_change(
    key: StoredKey,
    patch: Mapping[str, Any],
    settings_keys: Iterable[KeySpec],
    groups: Iterable[str],
    now: float,
) -> KeySpec:
    """The key's rights after a JSON merge patch (RFC 7396). Raises: KeysRefused."""
    for fixed in ("id", "sha256"):
        if fixed in patch:
            raise KeysRefused([KeyProblem(0, fixed, "can't be changed", "rotate it, or make one")])
    fields = key.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    if "expires" not in patch:
        # It may be over: that is no fault of this change.
        fields.pop("expires", None)
    [changed] = checked_specs([_merged(fields, patch)], settings_keys, groups, now)
    if "expires" not in patch:
        changed = changed.model_copy(update={"expires": key.spec.expires})
    return changed


def _merged(fields: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in patch.items():
        if isinstance(value, Mapping):
            before = merged.get(name)
            merged[name] = _merged(before if isinstance(before, Mapping) else {}, value)
        elif value is None and name in merged:
            del merged[name]
        else:
            merged[name] = value  # A null of an unknown name stays, and is refused.
    return merged


def checked_grace(value: object) -> float:
    """The seconds that `24h`, or a number, means. Raises: GatewayError (400)."""
    try:
        seconds = parse_duration(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_GRACE:
        days = LONGEST_GRACE / 86400
        raise GatewayError(
            400,
            "invalid_request",
            f"The grace must be a duration of at most {days:.0f} days, such as 24h, or 0.",
            param="grace",
        )
    return seconds


def _spec(entry: object, now: float) -> KeySpec:
    """The key of this mapping. Raises: ValidationError, ValueError."""
    if not isinstance(entry, Mapping):
        return KeySpec.model_validate(entry, by_alias=True, by_name=False)
    fields = dict(entry)
    if isinstance(fields.get("expires"), str):
        fields["expires"] = expiry(fields["expires"], now)
    spec = KeySpec.model_validate(fields, by_alias=True, by_name=False)
    if spec.expires is not None and spec.expires.timestamp() <= now:
        raise ValueError(f"{spec.expires:%Y-%m-%d %H:%M} is over; give a later time")
    # A key without a name is called by its id.
    return spec if spec.name else spec.model_copy(update={"name": spec.id})


def expiry(text: str, now: float) -> datetime:
    """The time that `90d`, or `2027-01-31`, means. Raises: ValueError."""
    with_unit = any(char.isalpha() for char in text) and "T" not in text
    try:
        if not with_unit:
            return parse_timestamp(text)
        return datetime.fromtimestamp(now + parse_duration(text), UTC)
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            "must be a duration such as 90d or 12h, or a time such as 2027-01-31"
        ) from None


def _conflicts(
    index: int, spec: KeySpec, taken: set[str], groups: set[str], seen: Mapping[str, int]
) -> list[KeyProblem]:
    found = []
    if spec.name != spec.name.strip() or not spec.name.isprintable():
        found.append(
            KeyProblem(index, "name", "must be printable, without white space around it", "")
        )
    for name, value in (("id", spec.id), ("name", spec.name)):
        if value in taken:
            remedy = "choose another, or remove that key from the settings first"
            message = f"a key of the settings is called '{value}' already"
            found.append(KeyProblem(index, name, message, remedy))
            break
        if value in seen:
            message = f"key {seen[value] + 1} of the list is called '{value}' already"
            found.append(KeyProblem(index, name, message, "names and ids must be unique"))
            break
    # The settings take any group while they declare none.
    if groups and spec.group is not None and spec.group not in groups:
        known = ", ".join(sorted(groups))
        message = f"the settings have no group '{spec.group}'"
        found.append(KeyProblem(index, "group", message, f"they have {known}"))
    return found


def _invalid(index: int, error: ValidationError) -> list[KeyProblem]:
    problems = []
    for one in error.errors(include_url=False):
        loc = one["loc"]
        message, remedy = error_words(one, model_at_path(KeySpec, loc[:-1]) or KeySpec, loc)
        problems.append(KeyProblem(index, ".".join(map(str, loc)), message, remedy))
    return problems


# How keys are shown.


def shown_key(key: StoredKey, now: float, *, is_hidden: bool = False) -> dict[str, Any]:
    """A stored key as JSON values, without its hash; `is_hidden`: one of the settings counts."""
    state = _state(key.spec, now)
    if key.revoked_at is not None:
        state = "revoked"
    elif is_hidden:
        state = "hidden"
    in_grace = key.previous_until is not None and key.previous_until > now
    return {
        **_shown(key.spec, "store", state),
        "created_at": iso_time(key.created_at),
        "revoked_at": iso_time(key.revoked_at),
        "previous_until": iso_time(key.previous_until) if in_grace else None,
    }


def shown_settings_key(spec: KeySpec, now: float) -> dict[str, Any]:
    """A key of the settings as JSON values, without its hash."""
    unknown = {"created_at": None, "revoked_at": None, "previous_until": None}
    return {**_shown(spec, "settings", _state(spec, now)), **unknown}


def key_warnings(settings_keys: Iterable[KeySpec], stored: Iterable[StoredKey]) -> list[str]:
    """Keys of settings and store that have an id or a name in common."""
    own = {word: spec for spec in settings_keys for word in (spec.id, spec.name) if word}
    warnings = []
    for key in stored:
        if key.revoked_at is not None:
            continue
        for word in (key.spec.id, key.spec.name):
            if (other := own.get(word)) is None:
                continue
            if other.id == key.spec.id:
                effect = "that of the settings counts; remove one of them"
            else:
                effect = f"they are {other.id} and {key.spec.id}; rename one of them"
            warnings.append(f"settings and store both have a key '{word}': {effect}")
            break
    return warnings


def iso_time(at: float | None) -> str | None:
    """Unix seconds as people and programs read them."""
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _state(spec: KeySpec, now: float) -> str:
    over = spec.expires is not None and spec.expires.timestamp() <= now
    return "expired" if over else "active"


def _shown(spec: KeySpec, source: str, state: str) -> dict[str, Any]:
    fields = spec.model_dump(mode="json", by_alias=True, exclude={"sha256", "expires"})
    return {
        **fields,
        "name": spec.name or spec.id,
        "max_class": spec.max_class or spec.class_ or "normal",
        "expires": iso_time(None if spec.expires is None else spec.expires.timestamp()),
        "source": source,
        "state": state,
    }


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


class KnownKeys(NamedTuple):
    """Keys as they were when the store was read last."""

    keys: list[HeldKey]
    at: float | None  # when they were saved, in Unix seconds; None: there never were any


class LastKnownKeys:
    """The keys of the store at `location`, in the file `path`; None: they are kept nowhere.

    The file holds hashes alone. If it can't be written, that is tried again until it can. If keys
    of the old file were revoked or changed meanwhile, it is set aside: a start without the store
    then refuses all stored keys, rather than let in one that is known to be revoked.

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
        self.error: str | None = None  # why the file does not have the last keys; None: it has
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


# Seconds between two looks whether the stored keys may have changed, and at expired ones.
POLL_SECONDS = 0.5
MOST_UNCHANGED = 60  # looks in a row that trust the store that nothing has changed
# Most seconds for the first look; then the gateway starts with the keys of the file.
START_SECONDS = 5.0
SILENT_SECONDS = 0.1  # to close a store that has just failed


class KeySync:
    """Keeps the stored keys of `key_ring` equal to those of `store`; None: there is no store.

    `path` is the file of the last known keys. `now` gives Unix seconds.
    """

    def __init__(
        self,
        store: Store | None,
        key_ring: KeyRing,
        path: Path | None,
        *,
        now: Callable[[], float] = time.time,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._store = store
        self.key_ring = key_ring
        self._last_known = None if store is None else LastKnownKeys(store.location, path, now=now)
        self._poll_seconds = poll_seconds
        self._revision: int | None = None
        """The revision of the keys in the ring; None: they are not the store's, or there are none.
        """
        # No longer pauses while the store is away: a key may be revoked meanwhile.
        self._worker = StoreWorker(self._look, poll_seconds, longest_pause=poll_seconds)
        self._unchanged = 0
        self._refreshing = asyncio.Lock()
        self._seen_changes = -1  # the store's number of changes before the keys were read last
        self._told_lost = False
        self._known: dict[tuple[Any, ...], tuple[StoredKey, HeldKey] | None] = {}
        """What was made of the last rows: most of them are the same at the next change."""
        self.problem: str | None = None
        """Why the ring may have other keys than the store; None: it has the same."""

    def configure(self, specs: Iterable[KeySpec], *, allow_anonymous: bool) -> None:
        """Take the keys of these settings."""
        self.key_ring.configure(specs, allow_anonymous=allow_anonymous)
        self._tell()

    async def start(self, seconds: float = START_SECONDS) -> None:
        """Read the store's keys; those of the file, if the store does not open in `seconds`."""
        store, last_known = self._store, self._last_known
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
            self.key_ring.replace_stored(saved.keys)
            self._tell()

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
        changed = self._store is not None and self._store.changes != self._seen_changes
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
            await asyncio.sleep(self._poll_seconds)
            self.key_ring.expire()

    async def refresh(self, seconds: float | None = None) -> None:
        """Take over the store's keys if they have changed. Raises: StoreError.

        Call it after a change by this process: its callers should not wait for the next poll.
        """
        store, last_known = self._store, self._last_known
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
            self._revision, keys, held = read
            self.key_ring.replace_stored(held)
            self._tell()
            await asyncio.to_thread(last_known.save, keys)

    def _tell(self) -> None:
        """Log it once that the last key is lost."""
        lost = self.key_ring.lost
        if lost is not None and not self._told_lost:
            log.warning("locked", why=lost)
        self._told_lost = lost is not None

    def _read_changes(
        self, connection: Connection
    ) -> tuple[int, list[StoredKey], list[HeldKey]] | None:
        """The revision and the keys; None: they are what they were. On the store's thread."""
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
        return revision, [key for key, _ in both], [held for _, held in both]


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
