"""The desk for keys: what the admin API, and a command on a store alone, do with them.

Each operation checks what is asked for, does it in one transaction of the store, and returns what
its asker is shown: JSON values without the hash. A new secret is in one answer and nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import Connection

from gateway import errors
from gateway.callers.keys import ApiKey, new_key
from gateway.callers.stored_keys import (
    MOST_PROBLEMS,
    KeyProblem,
    KeysRefused,
    StoredKey,
    add_keys,
    change_key,
    find_key,
    key_not_found,
    read_keys,
    revoke_key,
    rotate_key,
)
from gateway.config.fields import parse_duration, parse_timestamp
from gateway.config.keys import KeySpec
from gateway.config.settings import Settings
from gateway.config.yaml_file import error_words, model_at_path
from gateway.errors import GatewayError, truncate_echo
from gateway.store.store import JOB_SECONDS, Store

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
