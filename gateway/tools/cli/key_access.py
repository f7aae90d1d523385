"""Where `llama-gateway keys` finds the keys: in the running gateway, else in the store itself.

While a gateway runs, its admin API makes every change, so that there is one program that knows the
models, the settings in force and the audit log. If none answers, the command opens the store.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

from gateway.tools.cli import options
from gateway.tools.cli.admin_client import AdminClient, AdminRefused, NoGateway, connect_admin
from gateway.tools.cli.terminal import CommandFailed, print_note

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from gateway.access.stored_keys import KeyProblem, StoredKey
    from gateway.config.settings import Settings
    from gateway.store.database import StoreLocation
    from gateway.store.store import Store

    T = TypeVar("T")

UNIT_STATE_FOLDER = Path("/var/lib/llama-gateway")
"""The state folder of the systemd unit that the deployment installs."""

OPEN_SECONDS = 10.0
"""Seconds to wait for the store."""


class KeysNotStored(Exception):  # noqa: N818 - says what happened to the keys
    """None of several keys was stored; `problems` says what is wrong with which."""

    def __init__(self, problems: Sequence[KeyProblem]) -> None:
        super().__init__()
        self.problems = problems


class KeyAccess(Protocol):
    """The keys of settings and store. The methods raise CommandFailed, with words for people."""

    def list(self, *, revoked: bool) -> dict[str, Any]:
        """Return `keys`, without secrets, and `warnings`."""

    def show(self, name: str) -> dict[str, Any]:
        """Return the key of this name or id."""

    def create(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Store a key, which has an id and a hash, and return it."""

    def import_keys(self, entries: Sequence[object]) -> Sequence[str]:
        """Store all of these or none; returns warnings. Raises KeysNotStored, too."""

    def change(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change a key by a JSON merge patch (RFC 7396), and return it, with `warnings`."""

    def rotate(self, name: str, sha256: str, grace: float) -> dict[str, Any]:
        """Give a key another secret, and return it."""

    def revoke(self, name: str) -> dict[str, Any]:
        """Revoke a key, and return it."""


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
    with open_alone(location) as store:
        yield StoreAlone(store, settings, nodes)


class RunningGateway:
    """The keys of a running gateway, by its admin API."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin

    def list(self, *, revoked: bool) -> dict[str, Any]:
        """Return all keys."""
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
        """Store a key."""
        return self._admin.request("POST", "/admin/keys", body=entry)

    def import_keys(self, entries: Sequence[object]) -> Sequence[str]:
        """Store keys."""
        from gateway.access.stored_keys import KeyProblem

        try:
            done = self._admin.request("POST", "/admin/keys/import", body={"keys": entries})
        except AdminRefused as error:
            problems = error.body.get("problems")
            if not isinstance(problems, list) or not problems:
                raise
            raise KeysNotStored([KeyProblem(**problem) for problem in problems]) from None
        return list(done.get("warnings", ()))

    def change(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change a key."""
        return self._admin.request("PATCH", self._path(name), body=patch)

    def rotate(self, name: str, sha256: str, grace: float) -> dict[str, Any]:
        """Give a key another secret."""
        path = f"{self._path(name)}/rotate"
        return self._admin.request("POST", path, body={"sha256": sha256, "grace": grace})

    def revoke(self, name: str) -> dict[str, Any]:
        """Revoke a key."""
        return self._admin.request("DELETE", self._path(name))

    def _path(self, name: str) -> str:
        return f"/admin/keys/{quote(str(self.show(name)['id']), safe='')}"


class StoreAlone:
    """The keys of a store that this command has open, and of the settings."""

    def __init__(self, store: Store, settings: Settings, nodes: Path) -> None:
        self._store = store
        self._settings = settings
        self._nodes = nodes

    def list(self, *, revoked: bool) -> dict[str, Any]:
        """Return all keys."""
        from gateway.access.stored_keys import (
            key_warnings,
            read_keys,
            shown_key,
            shown_settings_key,
        )

        stored = self._run(lambda connection: read_keys(connection, revoked=revoked))
        own, now = self._settings.keys, time.time()
        ids = {spec.id for spec in own}
        keys = [shown_settings_key(spec, now) for spec in own]
        keys += [shown_key(key, now, is_hidden=key.spec.id in ids) for key in stored]
        return {
            "keys": sorted(keys, key=lambda key: (key["name"], key["id"])),
            "warnings": key_warnings(own, stored),
        }

    def show(self, name: str) -> dict[str, Any]:
        """Return one key."""
        from gateway.access.stored_keys import find_key, shown_key, shown_settings_key

        for spec in self._settings.keys:
            if name in {spec.id, spec.name}:
                return shown_settings_key(spec, time.time())
        key = self._run(lambda connection: find_key(connection, name))
        return shown_key(key, time.time(), is_hidden=False)

    def create(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Store a key."""
        from gateway.access.stored_keys import KeysRefused

        try:
            [stored], warnings = self._add([entry])
        except KeysRefused as error:
            raise CommandFailed(error.message, 2 if error.status == 400 else 1) from None
        return {**self._shown(stored), "warnings": warnings}

    def import_keys(self, entries: Sequence[object]) -> Sequence[str]:
        """Store keys."""
        from gateway.access.stored_keys import KeysRefused

        try:
            _, warnings = self._add(entries)
        except KeysRefused as error:
            raise KeysNotStored(error.problems) from None
        return warnings

    def change(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change a key."""
        from gateway.access.stored_keys import KeysRefused, change_key, checked_change, find_key

        self._refuse_settings_key(name)
        settings, now = self._settings, time.time()

        def change(connection: Connection) -> StoredKey:
            key = find_key(connection, name)
            spec = checked_change(key, patch, settings.keys, settings.groups, now)
            return change_key(connection, key.spec.id, spec, now)

        try:
            changed = self._run(change, write=True)
        except KeysRefused as error:
            raise CommandFailed(error.message, 2 if error.status == 400 else 1) from None
        wanted = [changed.spec.models or ()] if "models" in patch else []
        warnings = unknown_models(settings, self._nodes, wanted)
        return {**self._shown(changed), "warnings": warnings}

    def rotate(self, name: str, sha256: str, grace: float) -> dict[str, Any]:
        """Give a key another secret."""
        from gateway.access.stored_keys import rotate_key

        self._refuse_settings_key(name)
        now = time.time()
        return self._shown(
            self._run(
                lambda connection: rotate_key(connection, name, sha256, grace, now), write=True
            )
        )

    def revoke(self, name: str) -> dict[str, Any]:
        """Revoke a key."""
        from gateway.access.stored_keys import revoke_key

        self._refuse_settings_key(name)
        now = time.time()
        return self._shown(
            self._run(lambda connection: revoke_key(connection, name, now), write=True)
        )

    def _add(self, entries: Sequence[object]) -> tuple[Sequence[StoredKey], Sequence[str]]:
        """Store keys, and warn of models. Raises KeysRefused, too."""
        from gateway.access.stored_keys import add_keys, checked_specs

        settings, now = self._settings, time.time()
        specs = checked_specs(entries, settings.keys, settings.groups, now)
        warnings = unknown_models(settings, self._nodes, [spec.models or () for spec in specs])
        return self._run(lambda connection: add_keys(connection, specs, now), write=True), warnings

    def _shown(self, key: StoredKey) -> dict[str, Any]:
        from gateway.access.stored_keys import shown_key

        return shown_key(key, time.time(), is_hidden=False)

    def _refuse_settings_key(self, name: str) -> None:
        if any(name in {spec.id, spec.name} for spec in self._settings.keys):
            raise CommandFailed(f"'{name}' is a key of the settings: change or remove it there")

    def _run(self, job: Callable[[Connection], T], *, write: bool = False) -> T:
        from gateway.access.stored_keys import KeysRefused
        from gateway.errors import GatewayError
        from gateway.store.failures import StoreError

        try:
            return self._store.run_now(job, write=write, seconds=OPEN_SECONDS)
        except KeysRefused:
            raise
        except StoreError as error:
            shown = self._store.location.shown
            raise CommandFailed(f"the store {shown} can't be used: {error}") from None
        except GatewayError as error:
            raise CommandFailed(error.message) from None


def unknown_models(
    settings: Settings, nodes: Path, wanted: Sequence[Sequence[str]]
) -> Sequence[str]:
    """Return a warning for each model that no node of the inventory declares."""
    from gateway.config.errors import ConfigError
    from gateway.config.inventory import load_inventory
    from gateway.config.routing import CATCH_ALL

    names = list(dict.fromkeys(name for models in wanted for name in models))
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


def read_settings(config: Path | None) -> Settings:
    """Read the settings file that is named, else the default one. Raises ConfigError."""
    from gateway.config.settings import load_settings

    return load_settings(options.settings_file(config))


def is_gateway_running(admin: AdminClient, admin_url: str | None, config: Path | None) -> bool:
    """Whether a gateway answers; then tell its store.

    Raises CommandFailed as `check_same_store`, and if none answers at an `admin_url` of the user's.
    """
    try:
        status = admin.status()
    except NoGateway:
        if admin_url is not None:
            raise
        return False
    check_same_store(admin, status, config)
    return True


def check_same_store(admin: AdminClient, status: dict[str, Any], config: Path | None) -> None:
    """Tell the store of the running gateway.

    Raises CommandFailed if the settings name another one: the command would change keys of a
    gateway that its user does not mean.
    """
    from gateway.config.errors import ConfigError
    from gateway.config.store import STORE_OFF

    store = status.get("store")
    state = store.get("state") if isinstance(store, dict) else None
    own = store.get("url") if isinstance(store, dict) else None
    print_note(f"store: {own or STORE_OFF} (of the gateway at {admin.url}, state: {state})")
    try:
        settings = read_settings(config)
    except ConfigError:
        return  # `connect_admin` has told it; the gateway has its own settings.
    if settings.store.url is None:
        return
    location = None if settings.store.url == STORE_OFF else named_store(settings)
    named = None if location is None else location.shown
    if _real(named) != _real(own):
        raise CommandFailed(
            f"the gateway at {admin.url} has the store {own or STORE_OFF}, but "
            f"{options.settings_file(config)} names {named or STORE_OFF}: name that gateway's "
            "settings with --config, or another gateway with --admin-url",
            status=2,
        )


def _real(url: str | None) -> str | None:
    """Follow links in the path of a SQLite file."""
    prefix = "sqlite:///"
    if url is not None and url.startswith(prefix):
        return prefix + os.path.realpath(url.removeprefix(prefix))
    return url


def named_store(settings: Settings, unit_folder: Path = UNIT_STATE_FOLDER) -> StoreLocation:
    """Return the store that the settings name; by default the unit's, else the user's."""
    from gateway.config.store import STORE_OFF
    from gateway.startup import state_folder
    from gateway.store.database import FILE_NAME, locate_store

    url = settings.store.url
    if url == STORE_OFF:
        raise CommandFailed(
            "the settings have no store (store.url: off): 'llama-gateway keys create --print' "
            "shows the lines for the settings",
            status=2,
        )
    folder = state_folder()
    if url is None and "STATE_DIRECTORY" not in os.environ:
        try:
            (unit_folder / FILE_NAME).stat()
            folder = unit_folder
        except FileNotFoundError:
            pass
        except PermissionError:
            if not (folder / FILE_NAME).exists():
                raise CommandFailed(
                    f"{unit_folder / FILE_NAME}, the store of the installed gateway, can't be "
                    "opened by this user: use sudo, or name another store in the settings "
                    "(store.url)"
                ) from None
    return locate_store(url, folder)


@contextlib.contextmanager
def open_alone(location: StoreLocation) -> Iterator[Store]:
    """Open the store while no gateway runs, and log nothing but errors."""
    from gateway.observe.logs import set_up_logging
    from gateway.store.store import Store

    # What fails is in the command's own error.
    with set_up_logging("error", "console"):
        store = Store(location)
        store.start()
        try:
            yield store
        finally:
            store.close(OPEN_SECONDS)
