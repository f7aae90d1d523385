"""`/admin/keys`: list, make, import, change, rotate and revoke API keys.

A key's secret is in one response, that of the request that made it, and nowhere else. A change by
this API is in force when its response is sent; other gateways of the store follow within a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.access.key_sync import KeySync
from gateway.access.keys import ApiKey, new_key
from gateway.access.stored_keys import (
    DEFAULT_GRACE,
    MOST_PROBLEMS,
    KeyProblem,
    KeysRefused,
    StoredKey,
    add_keys,
    change_key,
    checked_change,
    checked_grace,
    checked_specs,
    find_key,
    key_not_found,
    key_warnings,
    read_keys,
    revoke_key,
    rotate_key,
    shown_key,
    shown_settings_key,
)
from gateway.catalog import ServedModels
from gateway.config.errors import single_line
from gateway.config.listeners import KeySpec
from gateway.config.routing import CATCH_ALL
from gateway.config.settings import Settings
from gateway.errors import GatewayError, truncate_echo
from gateway.proxy.api.base import openai_error
from gateway.proxy.inbound.request import ModelAliases
from gateway.store.failures import StoreError
from gateway.store.store import Store
from gateway.web.admin.audit import AUDIT_TARGET_KEY
from gateway.web.admin.configuration import GatewayControl
from gateway.web.asgi import JsonResponse, read_fields, store_unavailable

T = TypeVar("T")

LARGEST_KEY_BODY = 64 << 10
"""Bytes of a request about one key."""

LARGEST_IMPORT = 16 << 20
"""Bytes of an import."""

MOST_IMPORTED = 10_000
"""Keys of one import."""


@dataclass(frozen=True, slots=True)
class KeyEndpoints:
    """The endpoints of API keys."""

    gateway: GatewayControl
    catalog: ServedModels
    now: Callable[[], float]
    """Unix seconds."""

    async def list(self, request: Request) -> Response:
        """All keys of settings and store, by name; `?revoked=1`: revoked ones as well.

        `?name=` shows only the keys of that name or id.
        """
        query = request.query_params
        revoked = query.get("revoked", "") in {"1", "true"}
        name = query.get("name")
        settings, now = self._settings, self.now()
        stored: Sequence[StoredKey] = ()
        if self.gateway.store is not None:
            stored = await self._run(lambda connection: read_keys(connection, revoked=revoked))
        hidden = self._sync.key_ring.hidden_ids()

        def listing() -> dict[str, Any]:
            keys = [shown_settings_key(spec, now) for spec in settings.keys]
            keys += [shown_key(key, now, is_hidden=key.spec.id in hidden) for key in stored]
            if name is not None:
                keys = [key for key in keys if name in {key["id"], key["name"]}]
            return {
                "keys": sorted(keys, key=lambda key: (key["name"], key["id"])),
                "warnings": key_warnings(settings.keys, stored),
            }

        # A hundred thousand of them take a second.
        return JsonResponse({**await asyncio.to_thread(listing), "problem": self._sync.problem})

    async def show(self, request: Request) -> Response:
        """One key."""
        name, now = _name(request), self.now()
        for spec in self._settings.keys:
            if name in {spec.id, spec.name}:
                return JsonResponse(shown_settings_key(spec, now))
        if self.gateway.store is None:
            raise key_not_found(name)
        key = await self._run(lambda connection: find_key(connection, name))
        return JsonResponse(shown_key(key, now, is_hidden=False))

    async def create(self, request: Request) -> Response:
        """Store a key. Without `sha256` in the body it is made here, and shown only now."""
        fields = await read_fields(request, LARGEST_KEY_BODY, self._body_timeout)
        _set_target(request, fields.get("name") or fields.get("id"))
        store_it, made = _with_secret(fields)
        [spec] = await self._checked([store_it])
        warnings = self._check_models([spec])
        now = self.now()
        [stored] = await self._change(lambda connection: add_keys(connection, [spec], now))
        return JsonResponse(_answer(stored, now, made, warnings))

    async def import_(self, request: Request) -> Response:
        """Store the keys of a list, by their hashes: all of them or none."""
        fields = await read_fields(request, LARGEST_IMPORT, self._body_timeout)
        entries = fields.get("keys")
        if not isinstance(entries, list) or not 0 < len(entries) <= MOST_IMPORTED:
            raise errors.invalid_request(
                f"'keys' must be a list of 1 to {MOST_IMPORTED} keys.", "keys"
            )
        _set_target(request, f"{len(entries)} keys")
        now = self.now()
        try:
            specs = await self._checked(entries)
            warnings = self._check_models(specs)
            stored = await self._change(lambda connection: add_keys(connection, specs, now))
        except KeysRefused as error:
            return _refused(error)
        keys = await asyncio.to_thread(
            lambda: [shown_key(key, now, is_hidden=False) for key in stored]
        )
        return JsonResponse({"imported": len(keys), "keys": keys, "warnings": warnings})

    async def change(self, request: Request) -> Response:
        """Change a key's name or rights by a JSON merge patch (RFC 7396); its secret stays."""
        name = self._stored_name(request)
        patch = await read_fields(request, LARGEST_KEY_BODY, self._body_timeout)
        settings, now = self._settings, self.now()
        key = await self._run(lambda connection: find_key(connection, name))
        spec = checked_change(key, patch, settings.keys, settings.groups, now)
        warnings: Sequence[str] = ()
        if "models" in patch or "limits" in patch:
            warnings = self._check_models([spec])

        def change(connection: Connection) -> StoredKey:
            # Anew: somebody else may have changed it meanwhile.
            latest = find_key(connection, key.spec.id)
            wanted = checked_change(latest, patch, settings.keys, settings.groups, now)
            return change_key(connection, key.spec.id, wanted, now)

        changed = await self._change(change)
        return JsonResponse(_answer(changed, now, None, warnings))

    async def rotate(self, request: Request) -> Response:
        """Give a key a new secret; the old one works for `grace` more (24 h if unset)."""
        name = self._stored_name(request)
        fields = await read_fields(request, LARGEST_KEY_BODY, self._body_timeout, may_be_empty=True)
        grace = checked_grace(fields.pop("grace", DEFAULT_GRACE))
        if unknown := set(fields) - {"sha256"}:
            raise errors.invalid_request(f"There is no '{truncate_echo(min(unknown))}' here.")
        key = await self._run(lambda connection: find_key(connection, name))
        entry, made = _with_secret({**fields, "id": key.spec.id})
        [spec] = checked_specs([entry], (), (), self.now())
        now = self.now()
        rotated = await self._change(
            lambda connection: rotate_key(connection, key.spec.id, spec.sha256, grace, now)
        )
        return JsonResponse(_answer(rotated, now, made, []))

    async def revoke(self, request: Request) -> Response:
        """End a key for good."""
        name = self._stored_name(request)
        now = self.now()
        revoked = await self._change(lambda connection: revoke_key(connection, name, now))
        return JsonResponse(shown_key(revoked, now, is_hidden=False))

    @property
    def _settings(self) -> Settings:
        return self.gateway.settings

    @property
    def _sync(self) -> KeySync:
        return self.gateway.key_sync

    @property
    def _body_timeout(self) -> float:
        return self._settings.limits.body_timeout

    def _store(self) -> Store:
        store = self.gateway.store
        if store is None:
            raise GatewayError(
                501,
                "not_supported",
                "The gateway has no store (store.url: off), so it can't keep keys: write them into "
                "the settings ('llama-gateway keys create --print').",
            )
        return store

    async def _run(self, job: Callable[[Connection], T], *, write: bool = False) -> T:
        """The job's result. Raises: GatewayError (503 while the store fails)."""
        try:
            return await self._store().run(job, write=write)
        except StoreError as error:
            raise store_failed(error) from None

    async def _change(self, job: Callable[[Connection], T]) -> T:
        """Change the store, and put the change in force here at once. Raises: GatewayError."""
        result = await self._run(job, write=True)
        try:
            await self._sync.refresh()
        except StoreError as error:
            raise store_failed(error) from None
        return result

    async def _checked(self, entries: Sequence[object]) -> Sequence[KeySpec]:
        settings = self._settings
        # Thousands of them take a second.
        return await asyncio.to_thread(
            checked_specs, entries, settings.keys, settings.groups, self.now()
        )

    def _stored_name(self, request: Request) -> str:
        """The path's name or id. Raises: GatewayError (409) if it is a key of the settings."""
        name = _name(request)
        for spec in self._settings.keys:
            if name in {spec.id, spec.name}:
                raise GatewayError(
                    409,
                    "key_of_settings",
                    f"'{truncate_echo(name)}' is a key of the settings: change or remove it there.",
                )
        return name

    def _check_models(self, specs: Sequence[KeySpec]) -> Sequence[str]:
        """Warnings of models that nobody serves yet.

        Raises: KeysRefused, if nobody serves them and every node has said what it serves.
        """
        aliases, catalog = ModelAliases(self._settings.models), self.catalog
        problems, warnings = [], dict[str, None]()
        for index, key, name in _named_models(specs):
            if aliases.has_catch_all or aliases.knows(name, catalog):
                continue
            if name == CATCH_ALL:
                message, remedy = "the settings have no catch-all", 'they need models: {"*"'
                problems.append(KeyProblem(index, key, f"{message} model", f"{remedy}: ...}}"))
            elif catalog.not_found_error(name).status == 404:
                problems.append(
                    KeyProblem(
                        index,
                        key,
                        f"no node serves the model '{truncate_echo(name)}'",
                        _known_models(catalog),
                    )
                )
            else:
                warnings[f"no node has said yet that it serves '{truncate_echo(name)}'"] = None
            if len(problems) + len(warnings) >= MOST_PROBLEMS:
                break
        if problems:
            raise KeysRefused(problems)
        return list(warnings)


def _named_models(specs: Sequence[KeySpec]) -> Iterator[tuple[int, str, str]]:
    """The models that keys name: the key's place, the field, the model."""
    for index, spec in enumerate(specs):
        limited = spec.limits.models if spec.limits is not None else None
        for key, names in (("models", spec.models), ("limits.models", limited)):
            for name in names or ():
                yield index, key, name


MOST_SHOWN_MODELS = 20


def _known_models(catalog: ServedModels) -> str:
    names = catalog.model_names()
    more = f" and {len(names) - MOST_SHOWN_MODELS} more" if len(names) > MOST_SHOWN_MODELS else ""
    shown = ", ".join(names[:MOST_SHOWN_MODELS])
    return f"they serve {single_line(shown)}{more}" if names else "they serve none"


def store_failed(error: StoreError) -> GatewayError:
    """503: the store can't do it now. A change may have been made all the same: ask again."""
    return store_unavailable(
        f"The store can't do that now: {error.message}. Remedy: {error.remedy}."
    )


def _name(request: Request) -> str:
    name = str(request.path_params["name"])
    if not name:
        raise key_not_found(name)
    return name


def _set_target(request: Request, name: object) -> None:
    """Tell the audit log what is changed, where the path does not."""
    if isinstance(name, str):
        request.scope[AUDIT_TARGET_KEY] = name


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
    shown = shown_key(stored, now, is_hidden=False)
    return {**({} if made is None else {"key": made.text}), **shown, "warnings": warnings}


def _refused(error: KeysRefused) -> Response:
    """The refusal of an import, with every problem."""
    problems = [
        {
            "index": problem.index,
            "key": problem.key,
            "message": single_line(problem.message),
            "remedy": single_line(problem.remedy),
        }
        for problem in error.problems
    ]
    body = msgspec.json.encode({"error": openai_error(error), "problems": problems})
    headers = {"x-gateway-reason": error.code}
    return Response(body, error.status, headers, media_type="application/json")
