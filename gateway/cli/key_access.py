"""Where `llama-gateway keys` finds the keys: in the running gateway, else in the store itself.

While a gateway runs, its admin API makes every change, so that there is one program that knows the
models, the settings in force and the audit log. If none answers, the command opens the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

from gateway.cli.client import AdminClient, GatewayRefused, connect_admin
from gateway.cli.store_access import (
    OPEN_SECONDS,
    NoStore,
    is_gateway_running,
    named_store,
    open_alone,
    read_settings,
)
from gateway.cli.terminal import CommandFailed, print_note

if TYPE_CHECKING:
    from gateway.callers.key_desk import KeyDesk
    from gateway.callers.stored_keys import KeyProblem
    from gateway.config.keys import KeySpec
    from gateway.config.settings import Settings


class KeysNotStored(Exception):  # noqa: N818 - says what happened to the keys
    """None of several keys was stored; `problems` says what is wrong with which."""

    def __init__(self, problems: Sequence[KeyProblem]) -> None:
        super().__init__()
        self.problems = problems


@contextlib.contextmanager
def open_keys(
    admin_url: str | None, admin_key_file: Path | None, config: Path | None, nodes: Path
) -> Iterator[KeyAccess]:
    """Open the keys of the running gateway, or the store that the settings name.

    Tells on stderr which store it is. Raises CommandFailed.
    """
    with connect_admin(admin_url, admin_key_file, config) as admin:
        if is_gateway_running(admin, admin_url, config):
            yield RunningGateway(admin)
            return
        where = admin.url
    settings = read_settings(config)
    location = named_store(settings)
    print_note(f"store: {location.shown} (no gateway answers at {where})")
    from gateway.callers.key_desk import KeyDesk

    with open_alone(location) as store:
        yield StoreAlone(
            KeyDesk(
                settings,
                store,
                lambda specs: unknown_models(settings, nodes, specs),
                seconds=OPEN_SECONDS,
            ),
            location.shown,
        )


class RunningGateway:
    """The keys of a running gateway, by its admin API. The methods raise CommandFailed."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin

    def list(self, *, revoked: bool) -> dict[str, Any]:
        """Return all `keys`, without secrets, and `warnings`."""
        return self._admin.request("GET", "/admin/keys", {"revoked": "1"} if revoked else None)

    def show(self, name: str) -> dict[str, Any]:
        """Return one key; its name may hold anything, which a path can't."""
        found = self._admin.request("GET", "/admin/keys", {"name": name, "revoked": "1"})
        keys = [key for key in found.get("keys", ()) if isinstance(key, dict)]
        if not keys:
            raise CommandFailed(
                f"there is no key of the name or id '{name}'; 'llama-gateway keys list' shows all"
            )
        return min(keys, key=lambda key: key.get("state") == "revoked")

    def create(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Store a key, which has an id and a hash, and return it. Raises NoStore, too."""
        try:
            return self._admin.request("POST", "/admin/keys", body=entry)
        except GatewayRefused as error:
            if error.code == 501:
                raise NoStore from None
            raise

    def import_keys(self, entries: Sequence[object]) -> Sequence[str]:
        """Store all of these or none; returns warnings. Raises KeysNotStored, too."""
        from gateway.callers.stored_keys import KeyProblem

        try:
            done = self._admin.request("POST", "/admin/keys/import", body={"keys": entries})
        except GatewayRefused as error:
            problems = error.body.get("problems")
            if not isinstance(problems, list) or not problems:
                raise
            raise KeysNotStored([KeyProblem(**problem) for problem in problems]) from None
        return list(done.get("warnings", ()))

    def change(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change a key by a JSON merge patch (RFC 7396), and return it, with `warnings`."""
        return self._admin.request("PATCH", self._path(name), body=patch)

    def rotate(self, name: str, sha256: str, grace: float) -> dict[str, Any]:
        """Give a key another secret, and return it."""
        path = f"{self._path(name)}/rotate"
        return self._admin.request("POST", path, body={"sha256": sha256, "grace": grace})

    def revoke(self, name: str) -> dict[str, Any]:
        """Revoke a key, and return it."""
        return self._admin.request("DELETE", self._path(name))

    def _path(self, name: str) -> str:
        return f"/admin/keys/{quote(str(self.show(name)['id']), safe='')}"


class StoreAlone:
    """The keys of a store that this command has open, and of the settings: as `RunningGateway`."""

    def __init__(self, desk: KeyDesk, store: str) -> None:
        self._desk = desk
        self._store = store

    def list(self, *, revoked: bool) -> dict[str, Any]:
        """Return all keys."""
        return self._do(self._desk.list(revoked=revoked))

    def show(self, name: str) -> dict[str, Any]:
        """Return one key."""
        return self._do(self._desk.show(name))

    def create(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Store a key."""
        return self._do(self._desk.create(entry))

    def import_keys(self, entries: Sequence[object]) -> Sequence[str]:
        """Store keys."""
        warnings: Sequence[str] = self._do(self._desk.import_keys(entries), of_many=True)[
            "warnings"
        ]
        return warnings

    def change(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change a key."""
        changed = self._do(self._desk.change(name, patch))
        # Only of models that this change names: others were warned of before.
        return changed if "models" in patch else {**changed, "warnings": ()}

    def rotate(self, name: str, sha256: str, grace: float) -> dict[str, Any]:
        """Give a key another secret."""
        return self._do(self._desk.rotate(name, {"sha256": sha256, "grace": grace}))

    def revoke(self, name: str) -> dict[str, Any]:
        """Revoke a key."""
        return self._do(self._desk.revoke(name))

    def _do(
        self, work: Coroutine[Any, Any, dict[str, Any]], *, of_many: bool = False
    ) -> dict[str, Any]:
        import asyncio  # heavy for `--help`

        from gateway.callers.stored_keys import KeysRefused
        from gateway.errors import GatewayError
        from gateway.store.failures import StoreError

        try:
            return asyncio.run(work)
        except KeysRefused as error:
            if of_many:
                raise KeysNotStored(error.problems) from None
            raise CommandFailed(error.message, 2 if error.status == 400 else 1) from None
        except StoreError as error:
            raise CommandFailed(f"the store {self._store} can't be used: {error}") from None
        except GatewayError as error:
            raise CommandFailed(error.message) from None


KeyAccess: TypeAlias = RunningGateway | StoreAlone


def unknown_models(settings: Settings, nodes: Path, specs: Sequence[KeySpec]) -> Sequence[str]:
    """Return a warning for each model that no node of the inventory declares."""
    from gateway.config.errors import ConfigError
    from gateway.config.inventory import load_inventory
    from gateway.config.routing import CATCH_ALL

    names = list(dict.fromkeys(name for spec in specs for name in spec.models or ()))
    if not names or CATCH_ALL in settings.models:
        return []
    try:
        inventory = load_inventory(nodes)
    except (ConfigError, OSError):
        return [f"{nodes} can't be read, so nobody knows whether a node serves {', '.join(names)}"]
    enabled = [node for node in inventory.nodes if node.enabled]
    known = {name for node in enabled for name in node.models or ()} | set(settings.models)
    silent = any(node.models is None for node in enabled)
    effect = (
        "a node that declares no models may serve it"
        if silent
        else "requests for it get 404 until one does"
    )
    return [
        f"no node of {nodes} declares the model '{name}'; {effect}"
        for name in names
        if name not in known
    ]
