"""`/admin/keys` and `/admin/groups`: API keys, and groups of them with their limits.

A key's secret is in one response, that of the request that made it, and nowhere else. A change by
this API is in force when its response is sent; other gateways of the store follow within a second.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.admin.configuration import GatewayControl, problems_response
from gateway.admin.reports import AUDIT_TARGET_KEY
from gateway.callers.key_desk import KeyDesk
from gateway.callers.stored_keys import MOST_PROBLEMS, MOST_STORED_KEYS, KeyProblem, KeysRefused
from gateway.config.errors import single_line
from gateway.config.keys import KeySpec
from gateway.config.scheduling import CATCH_ALL
from gateway.errors import truncate_echo
from gateway.request.preparation import ModelAliases
from gateway.store.failures import StoreError
from gateway.web.asgi import JsonResponse, page_limit, read_fields, store_unavailable

T = TypeVar("T")
MOST_SHOWN_MODELS = 20  # that an error names
LARGEST_KEY_BODY = 64 << 10  # bytes of a request about one key
LARGEST_IMPORT = 16 << 20  # bytes of an import
MOST_IMPORTED = 10_000  # keys of one import


@dataclass(frozen=True, slots=True)
class KeyEndpoints:
    """The endpoints of API keys and their groups."""

    gateway: GatewayControl
    now: Callable[[], float]  # Unix seconds

    async def list(self, request: Request) -> Response:
        """The keys of settings and store by name, or the first `?limit=` of them.

        `?revoked=1`: revoked ones as well. `?name=`: those of that name or id. `?find=`: those with
        these letters in name, id or group.
        """
        query = request.query_params
        revoked = query.get("revoked", "") in {"1", "true"}
        limit = query.get("limit")
        most = None if limit is None else page_limit(limit, MOST_STORED_KEYS)
        find = query.get("find", "")
        listed = self._desk().list(revoked=revoked, name=query.get("name"), find=find, most=most)
        return JsonResponse({**await _done(listed), "problem": self.gateway.key_sync.problem})

    async def show(self, request: Request) -> Response:
        return JsonResponse(await _done(self._desk().show(request.path_params["name"])))

    async def create(self, request: Request) -> Response:
        """Store a key. Without `sha256` in the body it is made here, and shown only now."""
        fields = await self._fields(request)
        _set_target(request, fields.get("name") or fields.get("id"))
        return JsonResponse(await _done(self._desk().create(fields)))

    async def import_(self, request: Request) -> Response:
        """Store the keys of a list, by their hashes: all of them or none."""
        fields = await self._fields(request, LARGEST_IMPORT)
        entries = fields.get("keys")
        if not isinstance(entries, list) or not 0 < len(entries) <= MOST_IMPORTED:
            raise errors.invalid_field("keys", f"must be a list of 1 to {MOST_IMPORTED} keys.")
        _set_target(request, f"{len(entries)} keys")
        try:
            return JsonResponse(await _done(self._desk().import_keys(entries)))
        except KeysRefused as error:
            problems = [
                {
                    **asdict(one),
                    "message": single_line(one.message),
                    "remedy": single_line(one.remedy),
                }
                for one in error.problems
            ]
            return problems_response(error, problems)

    async def change(self, request: Request) -> Response:
        """Change a key's name or rights by a JSON merge patch (RFC 7396); its secret stays."""
        patch = await self._fields(request)
        return JsonResponse(await _done(self._desk().change(request.path_params["name"], patch)))

    async def rotate(self, request: Request) -> Response:
        """Give a key a new secret; the old one works for `grace` more (24 h if unset)."""
        fields = await self._fields(request, may_be_empty=True)
        return JsonResponse(await _done(self._desk().rotate(request.path_params["name"], fields)))

    async def revoke(self, request: Request) -> Response:
        return JsonResponse(await _done(self._desk().revoke(request.path_params["name"])))

    def _desk(self) -> KeyDesk:
        gateway = self.gateway
        return KeyDesk(gateway.settings, gateway.standings, self._check_models, self.now)

    async def list_groups(self, _: Request) -> Response:
        """All groups, by name, with what is used of their limits."""
        return JsonResponse(await _done(self._desk().list_groups()))

    async def put_group(self, request: Request) -> Response:
        """Define a group, by its limits and those of its end users."""
        fields = await self._fields(request, may_be_empty=True)
        return JsonResponse(
            await _done(self._desk().put_group(request.path_params["name"], fields))
        )

    async def remove_group(self, request: Request) -> Response:
        return JsonResponse(await _done(self._desk().remove_group(request.path_params["name"])))

    async def _fields(
        self, request: Request, most_bytes: int = LARGEST_KEY_BODY, *, may_be_empty: bool = False
    ) -> dict[str, Any]:
        timeout = self.gateway.settings.limits.body_timeout
        return await read_fields(request, most_bytes, timeout, may_be_empty=may_be_empty)

    def _check_models(self, specs: Sequence[KeySpec]) -> Sequence[str]:
        """Warnings of models that nobody serves yet.

        Raises: KeysRefused, if nobody serves them and every node has said what it serves.
        """
        catalog = self.gateway.fleet.model_index
        aliases = ModelAliases(self.gateway.settings.models, catalog)
        problems, warnings = [], dict[str, None]()
        for index, key, name in _named_models(specs):
            if aliases.has_catch_all or aliases.knows(name):
                continue
            if name == CATCH_ALL:
                message, remedy = "the settings have no catch-all", 'they need models: {"*"'
                problems.append(KeyProblem(index, key, f"{message} model", f"{remedy}: ...}}"))
            elif catalog.not_found_error(name).status == 404:
                message = f"no node serves the model '{truncate_echo(name)}'"
                names = catalog.model_names()
                remedy = "they serve none"
                if names:
                    remedy = f"they serve {single_line(', '.join(names[:MOST_SHOWN_MODELS]))}"
                if len(names) > MOST_SHOWN_MODELS:
                    remedy += f" and {len(names) - MOST_SHOWN_MODELS} more"
                problems.append(KeyProblem(index, key, message, remedy))
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


async def _done(work: Awaitable[T]) -> T:
    """What the desk answers. Raises: GatewayError (503 while the store fails)."""
    try:
        return await work
    except StoreError as error:
        raise store_unavailable(
            f"The store can't do that now: {error.message}. Remedy: {error.remedy}."
        ) from None


def _set_target(request: Request, name: object) -> None:
    """Tell the audit log what is changed, where the path does not."""
    if isinstance(name, str):
        request.scope[AUDIT_TARGET_KEY] = name
