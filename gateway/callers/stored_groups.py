"""Groups of keys in the store: what the keys of each may use together.

A group of the settings comes before one of the store that has its name. `GroupDesk` is what the
admin API, and a command on a store alone, do with groups, as `KeyDesk` is for keys. A change raises
the revision of the keys, so every gateway of the store follows within a second.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import ValidationError
from sqlalchemy import Connection, delete, func, select

from gateway.callers.stored_keys import (
    SPEC_COLUMNS,
    KeyDesk,
    KeyProblem,
    KeysRefused,
    group_members,
    invalid_fields,
    raise_revision,
)
from gateway.config.keys import GROUP_NAME, GroupSpec, KeySpec
from gateway.config.settings import Settings
from gateway.errors import GatewayError, truncate_echo
from gateway.store.database import insert_for
from gateway.store.schema import groups

MOST_STORED_GROUPS = 1000

log = structlog.get_logger()


def with_groups(settings: Settings, stored: Mapping[str, GroupSpec]) -> Settings:
    """The settings with the store's groups beside their own, which come before those."""
    if not stored:
        return settings
    return settings.model_copy(update={"groups": {**stored, **settings.groups}})


def members_of(settings_keys: Iterable[KeySpec], stored: Mapping[str, int]) -> dict[str, int]:
    """How many keys of settings and store are of each group that some are of."""
    counts = dict(stored)
    for key in settings_keys:
        if key.group is not None:
            counts[key.group] = counts.get(key.group, 0) + 1
    return counts


# Jobs of the store's thread.


def read_groups(connection: Connection) -> dict[str, GroupSpec]:
    """The stored groups by their names."""
    found = {}
    for row in connection.execute(select(groups).order_by(groups.c.name).limit(MOST_STORED_GROUPS)):
        values = row._mapping  # noqa: SLF001 - SQLAlchemy's public name for it
        try:
            found[row.name] = GroupSpec.model_validate(
                {
                    name: json.loads(values[column])
                    for name, column in SPEC_COLUMNS.items()
                    if values[column] is not None
                }
            )
        except ValueError as error:
            # A later version has written what this one can't read.
            why = str(error).splitlines()[0]
            log.warning("a stored group can't be used", group=row.name, why=why)
    return found


def put_group(connection: Connection, name: str, spec: GroupSpec, now: float) -> None:
    """Store a group in place of the one of its name. Raises: GatewayError (409)."""
    count = connection.scalar(select(func.count()).where(groups.c.name != name)) or 0
    if count >= MOST_STORED_GROUPS:
        message = f"A store holds at most {MOST_STORED_GROUPS} groups."
        raise GatewayError(409, "too_many_groups", message)
    fields = spec.model_dump(mode="json", exclude_none=True)
    values: dict[str, Any] = {
        column: json.dumps(fields[field]) if field in fields else None
        for field, column in SPEC_COLUMNS.items()
    } | {"changed_at": now}
    made = insert_for(connection)(groups).values(name=name, created_at=now, **values)
    connection.execute(made.on_conflict_do_update(index_elements=[groups.c.name], set_=values))
    raise_revision(connection, now)


def remove_group(connection: Connection, name: str, now: float) -> None:
    """Remove a stored group. Raises: GatewayError (404)."""
    if not connection.execute(delete(groups).where(groups.c.name == name)).rowcount:
        raise _not_found(name)
    raise_revision(connection, now)


def _not_found(name: str) -> GatewayError:
    message = f"There is no group '{truncate_echo(name)}'; 'llama-gateway groups list' shows all."
    return GatewayError(404, "group_not_found", message)


@dataclass(frozen=True, slots=True)
class GroupDesk:
    """The groups of the settings and the store of `keys`. Its methods raise as those of `KeyDesk`.

    `use_of`: what is used of the limits of each group that has some, by its name.
    """

    keys: KeyDesk
    use_of: Callable[[], Awaitable[Mapping[str, list[dict[str, Any]]]]]

    async def list(self) -> dict[str, Any]:
        """All groups, by name, those too that keys name and nobody has defined."""
        settings, stored, members = self.keys.settings, dict[str, GroupSpec](), dict[str, int]()
        if self.keys.store is not None:
            stored, members = await self.keys.run(lambda c: (read_groups(c), group_members(c)))
        counts, use_of = members_of(settings.keys, members), await self.use_of()
        shown, own = [], settings.groups
        for name in sorted({*own, *stored, *counts}):
            spec = own.get(name) or stored.get(name) or GroupSpec()
            fields = spec.model_dump(mode="json", exclude_none=True)
            shown.append(
                {
                    "name": name,
                    "origin": "settings"
                    if name in own
                    else "store"
                    if name in stored
                    else "undefined",
                    **{field: fields.get(field) for field in SPEC_COLUMNS},
                    "keys": counts.get(name, 0),
                    "standing": use_of.get(name, []),
                }
            )
        warnings = [
            f"settings and store both define the group '{name}': that of the settings counts"
            for name in sorted(own.keys() & stored.keys())
        ]
        return {"groups": shown, "warnings": warnings}

    async def put(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Define a group by all of its fields. Raises KeysRefused, too."""
        self._refuse_settings_group(name)
        if not GROUP_NAME.fullmatch(name):
            message = "must be 1 to 64 letters, digits, '.', '_' or '-'"
            raise KeysRefused([KeyProblem(0, "name", message, "")])
        try:
            spec = GroupSpec.model_validate(fields)
        except ValidationError as error:
            raise KeysRefused(invalid_fields(0, error, GroupSpec)) from None
        now = self.keys.now()
        await self.keys.store_change(lambda connection: put_group(connection, name, spec, now))
        return await self._show(name)

    async def remove(self, name: str) -> dict[str, Any]:
        """Remove a group of the store; its keys, if it has some, then share no limit."""
        self._refuse_settings_group(name)
        removed, now = await self._show(name), self.keys.now()
        await self.keys.store_change(lambda connection: remove_group(connection, name, now))
        left = removed["keys"]
        warning = f"{left} keys are still of this group, and have no limit together now"
        return removed | {"warnings": [warning] if left else []}

    async def _show(self, name: str) -> dict[str, Any]:
        found = (await self.list())["groups"]
        shown = next((one for one in found if one["name"] == name), None)
        if shown is None:
            raise _not_found(name)
        return {**shown, "warnings": []}

    def _refuse_settings_group(self, name: str) -> None:
        if name in self.keys.settings.groups:
            raise GatewayError(
                409,
                "group_of_settings",
                f"'{truncate_echo(name)}' is a group of the settings: change or remove it there.",
            )
