"""What the admin API, and a command on a store alone, do with API keys and their groups.

Each operation checks what is asked for, does it in one transaction of the store, and returns what
its asker is shown: JSON values without the hash. A new secret is in one answer and nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from pydantic import ValidationError
from sqlalchemy import Connection, func, or_, select

from gateway import errors
from gateway.callers.keys import ApiKey, new_key
from gateway.callers.standings import Standings
from gateway.callers.stored_keys import (
    IN_FORCE,
    MOST_PROBLEMS,
    KeyProblem,
    KeysRefused,
    StoredKey,
    add_keys,
    change_key,
    find_key,
    group_members,
    group_not_found,
    is_over,
    key_not_found,
    last_uses,
    members_of,
    put_group,
    read_groups,
    read_keys,
    remove_group,
    revoke_key,
    rotate_key,
)
from gateway.callers.windows import time_text
from gateway.config.fields import ConfigModel, parse_duration, parse_timestamp
from gateway.config.keys import GROUP_NAME, GroupSpec, KeySpec
from gateway.config.settings import Settings
from gateway.config.yaml_file import error_words, model_at_path
from gateway.errors import GatewayError, truncate_echo
from gateway.store.schema import groups as groups_table
from gateway.store.schema import keys as keys_table
from gateway.store.store import JOB_SECONDS, Store

T = TypeVar("T")
DEFAULT_GRACE = 24 * 3600.0  # seconds for which the old secret works after a rotation
LONGEST_GRACE = 366 * 86400.0
USES_OF_A_STEP = 500  # keys whose last uses one job of the store reads


@dataclass(frozen=True, slots=True)
class KeyDesk:
    """The keys and groups of `settings` and the store.

    Every method raises GatewayError and StoreError. A change may have been made although StoreError
    was raised: ask again.
    """

    settings: Settings
    standings: Standings  # whose store and keys are meant
    check_models: Callable[[Sequence[KeySpec]], Sequence[str]]
    """Returns warnings of models that keys name and nobody serves. Raises: KeysRefused."""
    now: Callable[[], float] = time.time  # Unix seconds
    seconds: float = JOB_SECONDS  # how long the store may take

    @property
    def store(self) -> Store | None:
        """Where keys and groups are kept; None: nowhere but in the settings."""
        return self.standings.key_sync.store

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
            total = select(func.count(keys_table.c.id)).where(*wanted)
            stored, count = await self._run(
                lambda c: (read_keys(c, wanted, most), c.scalar(total) or 0)
            )

        def is_wanted(spec: KeySpec) -> bool:
            texts = [spec.name or spec.id, spec.id, spec.group or ""]
            return name in {None, *texts[:2]} and any(find.lower() in one.lower() for one in texts)

        def listing() -> dict[str, Any]:
            ids = {spec.id for spec in own}
            keys = [shown_key(spec, now) for spec in own if is_wanted(spec)]
            found = len(keys) + count
            keys += [shown_key(key.spec, now, key, is_hidden=key.spec.id in ids) for key in stored]
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
            shown = shown_key(spec, self.now())
        elif self.store is None:
            raise key_not_found(name)
        else:
            key = await self._run(lambda c: find_key(c, name))
            shown = shown_key(key.spec, self.now(), key)
        await self._add_use([shown], with_users=True)
        return shown

    async def _add_use(self, shown: Sequence[dict[str, Any]], *, with_users: bool) -> None:
        """Add what keys have used of their limits, and when last."""
        active = [key["id"] for key in shown if key["state"] == "active"]
        use_of = await self.standings.of_keys(active, with_users=with_users)
        for start in range(0, len(shown), USES_OF_A_STEP):
            some = shown[start : start + USES_OF_A_STEP]
            ids, used = [key["id"] for key in some], dict[str, float]()
            if self.store is not None:
                used = await self._run(lambda c, ids=ids: last_uses(c, ids))  # type: ignore[misc]
            for key in some:
                last = iso_time(used.get(key["id"]))
                own = use_of.get(key["id"], {}) if key["state"] == "active" else {}
                key.update({"last_used_at": last, "standing": None, **own})

    async def create(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Store a key. One without `sha256` is made here, and is in the answer as `key`."""
        entry, made = _with_secret(entry)
        [spec], warnings = await self._checked([entry])
        now = self.now()
        [stored] = await self._change(lambda connection: add_keys(connection, [spec], now))
        return _answer(stored, now, made, warnings)

    async def import_keys(self, entries: Sequence[object]) -> dict[str, Any]:
        """Store keys by their hashes: all of them or none. Raises KeysRefused, too."""
        now = self.now()
        specs, warnings = await self._checked(entries)
        stored = await self._change(lambda connection: add_keys(connection, specs, now))
        keys = await asyncio.to_thread(lambda: [shown_key(key.spec, now, key) for key in stored])
        return {"imported": len(keys), "keys": keys, "warnings": warnings}

    async def change(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change a key's name or rights by a JSON merge patch (RFC 7396); its secret stays."""
        self._refuse_settings("key", name)
        settings, now = self.settings, self.now()
        key = await self._run(lambda connection: find_key(connection, name))
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

        return _answer(await self._change(change), now, None, warnings)

    async def rotate(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Give a key a new secret: of the `sha256` in the fields, or made here.

        The old one works for `grace` more (24 h if unset).
        """
        self._refuse_settings("key", name)
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
        self._refuse_settings("key", name)
        now = self.now()
        key = await self._change(lambda c: revoke_key(c, name, now))
        return shown_key(key.spec, now, key)

    # Groups.

    async def list_groups(self) -> dict[str, Any]:
        """All groups, by name, those too that keys name and nobody has defined."""
        shown, stored = await self._shown_groups()
        warnings = [
            f"settings and store both define the group '{name}': that of the settings counts"
            for name in sorted(self.settings.groups.keys() & stored)
        ]
        return {"groups": shown, "warnings": warnings}

    async def put_group(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Define a group by all of its fields. Raises KeysRefused, too."""
        self._refuse_settings("group", name)
        if not GROUP_NAME.fullmatch(name):
            message = "must be 1 to 64 letters, digits, '.', '_' or '-'"
            raise KeysRefused([KeyProblem(0, "name", message)])
        try:
            spec = GroupSpec.model_validate(fields)
        except ValidationError as error:
            raise KeysRefused(_invalid_fields(0, error, GroupSpec)) from None
        now = self.now()
        await self._change(lambda connection: put_group(connection, name, spec, now))
        return await self._show_group(name)

    async def remove_group(self, name: str) -> dict[str, Any]:
        """Remove a group of the store; its keys, if it has some, then share no limit."""
        self._refuse_settings("group", name)
        removed, now = await self._show_group(name), self.now()
        await self._change(lambda connection: remove_group(connection, name, now))
        left = removed["keys"]
        warning = f"{left} keys are still of this group, and have no limit together now"
        return removed | {"warnings": [warning] if left else []}

    async def _show_group(self, name: str) -> dict[str, Any]:
        shown, _ = await self._shown_groups(name)
        if not shown:
            raise group_not_found(name)
        return {**shown[0], "warnings": []}

    async def _shown_groups(
        self, name: str | None = None
    ) -> tuple[Sequence[dict[str, Any]], Collection[str]]:
        """All groups by name, or this one alone; and the names of those of the store."""
        own, stored, members = self.settings.groups, dict[str, GroupSpec](), dict[str, int]()
        if self.store is not None:
            stored, members = await self._run(lambda c: (read_groups(c), group_members(c)))
        counts, use_of = members_of(self.settings.keys, members), await self.standings.of_groups()
        shown = []
        known = {*own, *stored, *counts}
        for one in sorted(known if name is None else known & {name}):
            spec = own.get(one) or stored.get(one) or GroupSpec()
            origin = "settings" if one in own else "store" if one in stored else "undefined"
            fields = spec.model_dump(mode="json", exclude_none=True)
            shown.append(
                {
                    "name": one,
                    "origin": origin,
                    **{field: fields.get(field) for field in GroupSpec.model_fields},
                    "keys": counts.get(one, 0),
                    "standing": use_of.get(one, []),
                }
            )
        return shown, stored.keys()

    # Both.

    def _refuse_settings(self, what: Literal["key", "group"], name: str) -> None:
        own = self._settings_key(name) if what == "key" else self.settings.groups.get(name)
        if own is not None:
            raise GatewayError(
                409,
                f"{what}_of_settings",
                f"'{truncate_echo(name)}' is a {what} of the settings: change or remove it there.",
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
        stored = await self._run(lambda c: c.scalars(select(groups_table.c.name)).all())
        return {*self.settings.groups, *stored}

    def _allowed(self, defined: set[str]) -> Collection[str]:
        """The groups that keys may name; none: any, since the settings declare none."""
        return defined if self.settings.groups else ()

    async def _run(self, job: Callable[[Connection], T], *, write: bool = False) -> T:
        if self.store is None:
            raise GatewayError(
                501,
                "not_supported",
                "The gateway has no store (store.url: off), so it can't keep keys or groups: write "
                "them into the settings ('llama-gateway keys create' shows the lines of a key).",
            )
        return await self.store.run(job, write=write, seconds=self.seconds)

    async def _change(self, job: Callable[[Connection], T]) -> T:
        """Change the store, and put the change in force in this process."""
        result = await self._run(job, write=True)
        await self.standings.key_sync.refresh()
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
    return {**secret, **shown_key(stored.spec, now, stored), "warnings": warnings}


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
            problems += _invalid_fields(index, error)
            continue
        except ValueError as error:
            problems.append(KeyProblem(index, "expires", str(error)))
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
    if spec.expires is not None and is_over(spec, now):
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
        found.append(KeyProblem(index, "name", "must be printable, without white space around it"))
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


def _invalid_fields(
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


def shown_key(
    spec: KeySpec, now: float, stored: StoredKey | None = None, *, is_hidden: bool = False
) -> dict[str, Any]:
    """A key as JSON values, without its hash.

    `stored`: as the store has it; None: it is one of the settings. `is_hidden`: such a one counts.
    """
    state = "expired" if is_over(spec, now) else "active"
    created_at = revoked_at = previous_until = None
    if stored is not None:
        created_at, revoked_at = stored.created_at, stored.revoked_at
        state = "revoked" if revoked_at is not None else "hidden" if is_hidden else state
        if stored.previous_until is not None and stored.previous_until > now:
            previous_until = stored.previous_until
    fields = spec.model_dump(mode="json", by_alias=True, exclude={"sha256", "expires"})
    return {
        **fields,
        "name": spec.name or spec.id,
        "max_class": spec.max_class or spec.class_ or "normal",
        "expires": iso_time(None if spec.expires is None else spec.expires.timestamp()),
        "source": "settings" if stored is None else "store",
        "state": state,
        "created_at": iso_time(created_at),
        "revoked_at": iso_time(revoked_at),
        "previous_until": iso_time(previous_until),
    }


def key_warnings(settings_keys: Iterable[KeySpec], stored: Iterable[StoredKey]) -> list[str]:
    """Keys of settings and store that have an id or a name in common."""
    own = {word: spec for spec in settings_keys for word in (spec.id, spec.name) if word}
    warnings = []
    for key in stored:
        word = next((one for one in (key.spec.id, key.spec.name) if one in own), None)
        if key.revoked_at is not None or word is None:
            continue
        effect = "that of the settings counts; remove one of them"
        if (other := own[word].id) != key.spec.id:
            effect = f"they are {other} and {key.spec.id}; rename one of them"
        warnings.append(f"settings and store both have a key '{word}': {effect}")
    return warnings


def iso_time(at: float | None) -> str | None:
    """Unix seconds as people and programs read them."""
    return None if at is None else time_text(at)
