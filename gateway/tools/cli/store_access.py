"""How a command reads the store: through the running gateway's admin API, else by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.tools.cli.admin_client import AdminClient, connect_admin
from gateway.tools.cli.key_access import (
    is_gateway_running,
    named_store,
    open_alone,
    read_settings,
)
from gateway.tools.cli.terminal import CommandFailed, print_note

if TYPE_CHECKING:
    from gateway.store.store import Store


@contextlib.contextmanager
def gateway_or_store(
    admin_url: str | None, admin_key_file: Path | None, config: Path | None
) -> Iterator[AdminClient | Store]:
    """The admin API of the gateway that runs, else the open store; says on stderr which store.

    A store that does not exist is not made. Raises CommandFailed: the gateway uses another store
    than the settings name, or there is none.
    """
    from gateway.config.store import STORE_OFF
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
