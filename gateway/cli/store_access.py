"""How a command reads the store: through the running gateway's admin API, else by itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cli import options
from gateway.cli.client import AdminClient, NoGateway, connect_admin
from gateway.cli.terminal import CommandFailed, print_note

if TYPE_CHECKING:
    from gateway.config.settings import Settings
    from gateway.store.database import StoreLocation
    from gateway.store.store import Store

# The state folder of the systemd unit that the deployment installs.
UNIT_STATE_FOLDER = Path("/var/lib/llama-gateway")
OPEN_SECONDS = 10.0  # seconds to wait for the store


class NoStore(CommandFailed):
    """The settings, or the gateway that runs, have no store."""

    def __init__(self) -> None:
        super().__init__(
            "the settings have no store (store.url: off): 'llama-gateway keys create' shows the "
            "lines for the settings",
            status=2,
        )


@contextlib.contextmanager
def gateway_or_store(
    admin_url: str | None, admin_key_file: Path | None, config: Path | None
) -> Iterator[AdminClient | Store]:
    """The admin API of the gateway that runs, else the open store; says on stderr which store.

    A store that does not exist is not made. Raises CommandFailed: the gateway uses another store
    than the settings name, or there is none.
    """
    from gateway.config.stored import STORE_OFF
    from gateway.store.failures import StoreError

    with connect_admin(admin_url, admin_key_file, config) as admin:
        if is_gateway_running(admin, admin_url, config):
            yield admin
            return
    settings = read_settings(config)
    if settings.store.url == STORE_OFF:
        raise CommandFailed("the settings have no store (store.url: off)", status=2)
    location = named_store(settings)
    print_note(f"store: {location.shown} (no gateway answers at {admin.url})")
    if location.path is not None and not location.path.is_file():
        raise CommandFailed(
            f"there is no {location.path}: no gateway has used it yet; --config names the settings"
        )
    with open_alone(location) as store:
        try:
            yield store
        except StoreError as error:
            raise CommandFailed(f"the store {location.shown} can't be used: {error}") from None


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
    from gateway.config.stored import STORE_OFF

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
    """Return the store that the settings name; by default the unit's, else the user's.

    Raises CommandFailed.
    """
    from gateway.app.startup import state_folder
    from gateway.config.stored import STORE_OFF
    from gateway.store.database import FILE_NAME, locate_store

    url = settings.store.url
    if url == STORE_OFF:
        raise NoStore
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
    from gateway.store.store import Store
    from gateway.watch.logs import set_up_logging

    # What fails is in the command's own error.
    with set_up_logging("error", "console"):
        store = Store(location)
        store.start()
        try:
            yield store
        finally:
            store.close(OPEN_SECONDS)
