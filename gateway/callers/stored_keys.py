"""Keys in the store: made, changed, rotated and revoked, each in one transaction of the store.

The functions that take a connection are jobs of the store's thread, or parts of such jobs. They can
be done twice: who does not know whether a change was made asks for it again. Each of them raises
the revision of the keys, so that every gateway of the store sees the change at its next poll.

`KeyDesk` is what the admin API, and a command on a store alone, do with them. Each operation checks
what is asked for, does it in one transaction of the store, and returns what its asker is shown:
JSON values without the hash. A new secret is in one answer and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError
from sqlalchemy import Connection, Row, case, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from gateway import errors
from gateway.callers.keys import ApiKey, HeldKey, held_key, new_key, without_secret
from gateway.config.fields import ConfigModel, parse_duration, parse_timestamp
from gateway.config.keys import KeySpec
from gateway.config.settings import Settings
from gateway.config.yaml_file import error_words, model_at_path
from gateway.errors import GatewayError, truncate_echo
from gateway.store.database import insert_for
from gateway.store.schema import groups as groups_table
from gateway.store.schema import keys as keys_table
from gateway.store.schema import learnt, revisions, usage
from gateway.store.store import JOB_SECONDS, Store

# Keys that a store may hold, revoked ones included: a gateway has all of them in memory.
MOST_STORED_KEYS = 100_000
MOST_PROBLEMS = 50  # problems of an import that are told; it counts the others
MOST_REVOKED_NAMES = 10_000  # revoked keys whose names a gateway remembers, the latest
KEYS_REVISION = "keys"  # the name under which the store counts changes of keys and groups

# The column of each field that is stored as JSON: of keys and groups, and of keys alone.
SPEC_COLUMNS = {"limits": "limits", "user_limits": "user_limits", "cache": "privacy"}
_JSON_COLUMNS = {"models": "models", **SPEC_COLUMNS}

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
    """The number of the last change of keys or groups; 0: there was none."""
    asked = select(revisions.c.number).where(revisions.c.name == KEYS_REVISION)
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
    """The names of these stored keys by their ids; revoked keys keep theirs."""
    listed, found = list(ids), dict[str, str]()
    for start in range(0, len(listed), _MOST_PARAMETERS):
        some = keys_table.c.id.in_(listed[start : start + _MOST_PARAMETERS])
        rows = connection.execute(select(keys_table.c.id, keys_table.c.name).where(some))
        found |= {row[0]: row[1] for row in rows}
    return found


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


USES_OF_A_STEP = 500  # keys whose last uses one job of the store reads


@dataclass(frozen=True, slots=True)
class KeyDesk:
    """The keys of `settings` and `store`. Every method raises GatewayError and StoreError.

    A change may have been made although StoreError was raised: ask again.
    """

    settings: Settings
    store: Store | None
    check_models: Callable[[Sequence[KeySpec]], Sequence[str]]
    """Returns warnings of models that keys name and nobody serves. Raises: KeysRefused."""
    on_change: Callable[[], Awaitable[None]] | None = None
    """Puts a change in force in this process. Raises: StoreError."""
    now: Callable[[], float] = time.time  # Unix seconds
    seconds: float = JOB_SECONDS  # how long the store may take
    use_of: Callable[..., Awaitable[Mapping[str, dict[str, Any]]]] | None = None
    """What to show of the use of these keys, by id; `with_users`: of their end users as well."""

    async def list(
        self, *, revoked: bool, name: str | None = None, find: str = "", most: int | None = None
    ) -> dict[str, Any]:
        """The first keys by name, and how many are `found`; with `revoked`, those as well.

        `name`: of this name or id, with what end users have used. `find`: with these letters.
        """
        now, own, stored, count = self.now(), self.settings.keys, list[StoredKey](), 0
        texts = (keys_table.c.name, keys_table.c.id, keys_table.c.group_name)
        wanted: list[Any] = [] if revoked else [IN_FORCE]
        if name is not None:
            wanted.append(or_(*(one == name for one in texts[:2])))
        if find:
            wanted.append(or_(*(one.icontains(find, autoescape=True) for one in texts)))
        if self.store is not None:
            stored = await self.run(lambda c: read_keys(c, wanted, most))
            counted = select(func.count(keys_table.c.id)).where(*wanted)
            count = await self.run(lambda c: c.scalar(counted) or 0)

        def is_wanted(spec: KeySpec) -> bool:
            texts = [spec.name or spec.id, spec.id, spec.group or ""]
            return name in {None, *texts[:2]} and any(find.lower() in one.lower() for one in texts)

        def listing() -> dict[str, Any]:
            ids = {spec.id for spec in own}
            keys = [shown_settings_key(spec, now) for spec in own if is_wanted(spec)]
            found = len(keys) + count
            keys += [shown_key(key, now, is_hidden=key.spec.id in ids) for key in stored]
            return {
                "keys": sorted(keys, key=lambda key: (key["name"], key["id"]))[:most],
                "found": found,
                "warnings": key_warnings(own, stored),
            }

        # A hundred thousand of them take a second.
        answer = await asyncio.to_thread(listing)
        await self._add_use(answer["keys"], with_users=name is not None)
        return answer

    async def show(self, name: str) -> dict[str, Any]:
        """The key of this name or id."""
        spec = self._settings_key(name)
        if spec is not None:
            shown = shown_settings_key(spec, self.now())
        elif self.store is None:
            raise key_not_found(name)
        else:
            shown = shown_key(await self.run(lambda c: find_key(c, name)), self.now())
        await self._add_use([shown], with_users=True)
        return shown

    async def _add_use(self, shown: Sequence[dict[str, Any]], *, with_users: bool) -> None:
        """Add what keys have used of their limits, and when last."""
        active = [key["id"] for key in shown if key["state"] == "active"]
        use_of = await self.use_of(active, with_users=with_users) if self.use_of else {}
        for start in range(0, len(shown), USES_OF_A_STEP):
            some = shown[start : start + USES_OF_A_STEP]
            ids, used = [key["id"] for key in some], dict[str, float]()
            if self.store is not None:
                used = await self.run(lambda c, ids=ids: last_uses(c, ids))  # type: ignore[misc]
            for key in some:
                last = iso_time(used.get(key["id"]))
                own = use_of.get(key["id"], {}) if key["state"] == "active" else {}
                key.update({"last_used_at": last, "standing": None, **own})

    async def create(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Store a key. One without `sha256` is made here, and is in the answer as `key`."""
        entry, made = _with_secret(entry)
        [spec], warnings = await self._checked([entry])
        now = self.now()
        [stored] = await self.store_change(lambda connection: add_keys(connection, [spec], now))
        return _answer(stored, now, made, warnings)

    async def import_keys(self, entries: Sequence[object]) -> dict[str, Any]:
        """Store keys by their hashes: all of them or none. Raises KeysRefused, too."""
        now = self.now()
        specs, warnings = await self._checked(entries)
        stored = await self.store_change(lambda connection: add_keys(connection, specs, now))
        keys = await asyncio.to_thread(lambda: [shown_key(key, now) for key in stored])
        return {"imported": len(keys), "keys": keys, "warnings": warnings}

    async def change(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change a key's name or rights by a JSON merge patch (RFC 7396); its secret stays."""
        self._refuse_settings_key(name)
        settings, now = self.settings, self.now()
        key = await self.run(lambda connection: find_key(connection, name))
        defined = await self._defined_groups()
        spec = checked_change(key, patch, settings.keys, self._allowed(defined), now)
        warnings = group_warnings([spec.group], defined) if "group" in patch else []
        if "models" in patch or "limits" in patch:
            warnings += self.check_models([spec])

        def change(connection: Connection) -> StoredKey:
            # Anew: somebody else may have changed it meanwhile.
            latest = find_key(connection, key.spec.id)
            wanted = checked_change(latest, patch, settings.keys, self._allowed(defined), now)
            return change_key(connection, key.spec.id, wanted, now)

        return _answer(await self.store_change(change), now, None, warnings)

    async def rotate(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Give a key a new secret: of the `sha256` in the fields, or made here.

        The old one works for `grace` more (24 h if unset).
        """
        self._refuse_settings_key(name)
        grace = checked_grace(fields.get("grace", DEFAULT_GRACE))
        if unknown := fields.keys() - {"sha256", "grace"}:
            raise errors.invalid_request(f"There is no '{truncate_echo(min(unknown))}' here.")
        key = await self.run(lambda connection: find_key(connection, name))
        entry, made = _with_secret({"id": key.spec.id, "sha256": fields.get("sha256")})
        now = self.now()
        [spec] = checked_specs([entry], (), (), now)
        rotated = await self.store_change(
            lambda connection: rotate_key(connection, key.spec.id, spec.sha256, grace, now)
        )
        return _answer(rotated, now, made, ())

    async def revoke(self, name: str) -> dict[str, Any]:
        """End a key for good."""
        self._refuse_settings_key(name)
        now = self.now()
        return shown_key(await self.store_change(lambda c: revoke_key(c, name, now)), now)

    def _refuse_settings_key(self, name: str) -> None:
        if self._settings_key(name) is not None:
            raise GatewayError(
                409,
                "key_of_settings",
                f"'{truncate_echo(name)}' is a key of the settings: change or remove it there.",
            )

    def _settings_key(self, name: str) -> KeySpec | None:
        return next((one for one in self.settings.keys if name in {one.id, one.name}), None)

    async def _checked(self, entries: Sequence[object]) -> tuple[Sequence[KeySpec], Sequence[str]]:
        """The keys that these entries describe, and warnings. Raises KeysRefused, too."""
        defined = await self._defined_groups()
        # Thousands of them take a second.
        specs = await asyncio.to_thread(
            checked_specs, entries, self.settings.keys, self._allowed(defined), self.now()
        )
        return specs, [
            *self.check_models(specs),
            *group_warnings((one.group for one in specs), defined),
        ]

    async def _defined_groups(self) -> set[str]:
        """The groups that settings or store define."""
        stored = await self.run(lambda c: c.scalars(select(groups_table.c.name)).all())
        return {*self.settings.groups, *stored}

    def _allowed(self, defined: set[str]) -> Collection[str]:
        """The groups that keys may name; none: any, since the settings declare none."""
        return defined if self.settings.groups else ()

    async def run(self, job: Callable[[Connection], T], *, write: bool = False) -> T:
        """Do a job of the store."""
        if self.store is None:
            raise GatewayError(
                501,
                "not_supported",
                "The gateway has no store (store.url: off), so it can't keep keys or groups: write "
                "them into the settings ('llama-gateway keys create' shows the lines of a key).",
            )
        return await self.store.run(job, write=write, seconds=self.seconds)

    async def store_change(self, job: Callable[[Connection], T]) -> T:
        """Change the store, and put the change in force."""
        result = await self.run(job, write=True)
        if self.on_change is not None:
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

    `expires` may be a duration from `now` on (Unix seconds), such as `90d`. `settings_keys` are
    those of the settings: names and ids of keys are unique over both. `groups`: those that a key
    may name; none: any.

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
            problems += invalid_fields(index, error)
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
        message = f"there is no group '{spec.group}'"
        remedy = f"there are {known}; 'llama-gateway groups set' makes one"
        found.append(KeyProblem(index, "group", message, remedy))
    return found


def group_warnings(groups: Iterable[str | None], defined: Collection[str] = ()) -> list[str]:
    """Warnings of those of these groups, of keys, that nobody has defined: they have no limit."""
    named = {name for name in groups if name is not None} - {*defined}
    return [
        f"neither settings nor store define the group '{name}', so its keys have no limit "
        "together; the release after this one refuses such keys: 'llama-gateway groups set "
        f"{name}' defines it"
        for name in sorted(named)[:MOST_PROBLEMS]
    ]


def invalid_fields(
    index: int, error: ValidationError, model: type[ConfigModel] = KeySpec
) -> list[KeyProblem]:
    """What is wrong with the fields of one of several keys, or of what `model` describes."""
    problems = []
    for one in error.errors(include_url=False):
        loc = one["loc"]
        message, remedy = error_words(one, model_at_path(model, loc[:-1]) or model, loc)
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
