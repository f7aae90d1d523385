"""How commands reach the store: through the running gateway's admin API, else by themselves.

A gateway keeps in memory what it has read of its store, so while one runs its admin API is the
way. Without one a command opens the store that the settings name.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.tools.cli import options
from gateway.tools.cli.nodes import AdminClient, NoGateway, connect_admin
from gateway.tools.cli.terminal import CommandFailed, print_note

if TYPE_CHECKING:
    from gateway.store.database import StoreLocation
    from gateway.store.store import Store

CLOSE_SECONDS = 10.0
"""Most seconds to close a store."""


@contextlib.contextmanager
def gateway_or_store(
    admin_url: str | None, admin_key_file: Path | None, config: Path | None, *, may_create: bool
) -> Iterator[AdminClient | Store]:
    """The admin API of the gateway that runs, else the open store; says on stderr which store.

    `may_create`: make a store that does not exist. Raises CommandFailed: the gateway uses another
    store than the settings name, or there is none.
    """
    location = _named_store(config)
    with connect_admin(admin_url, admin_key_file, config) as admin:
        try:
            used = admin.get("/admin/status").get("store")
        except NoGateway:
            if admin_url is not None:
                raise
        else:
            _check_same(admin.url, used, location, options.settings_file(config))
            yield admin
            return
    if location is None:
        raise CommandFailed("store.url is 'off' in the settings: there is no store", status=2)
    yield from _opened(location, may_create=may_create)


def _named_store(config: Path | None) -> StoreLocation | None:
    """The store that the settings name; None: they switch it off."""
    from gateway.config.settings import Settings, load_settings
    from gateway.startup import Options, store_location

    path = options.settings_file(config)
    settings = Settings() if path is None else load_settings(path)
    return store_location(Options(options.DEFAULT_NODES, path), settings)


def _check_same(
    url: str, used: Any, named: StoreLocation | None, settings_file: Path | None
) -> None:
    """Note the store of the gateway at `url`. Raises CommandFailed if the settings name another."""
    from gateway.config.settings import load_settings

    shown = used.get("url") if isinstance(used, dict) else None
    if shown is None:
        raise CommandFailed(f"the gateway at {url} has no store: set store.url, and restart it")
    # Where they name none, the gateway's state folder is another than ours if it is another user's.
    is_named = settings_file is not None and load_settings(settings_file).store.url is not None
    if is_named and (named is None or named.shown != shown):
        raise CommandFailed(
            f"the gateway at {url} uses the store {shown}, and {settings_file} names "
            f"{'none' if named is None else named.shown}: name the gateway's settings with "
            "--config, or the admin listener of another gateway with --admin-url",
            status=2,
        )
    print_note(f"store: {shown} (of the gateway at {url})")


def _opened(location: StoreLocation, *, may_create: bool) -> Iterator[Store]:
    from gateway.store.failures import StoreError
    from gateway.store.store import Store

    print_note(f"store: {location.shown} (no gateway runs)")
    if not may_create and location.path is not None and not location.path.is_file():
        raise CommandFailed(
            f"there is no {location.path}: no gateway has used it yet; --config names the settings"
        )
    store = Store(location)
    with _quiet():
        store.start()
        try:
            yield store
        except StoreError as error:
            raise CommandFailed(f"the store can't be used: {error}") from None
        finally:
            store.close(CLOSE_SECONDS)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing: a command's output is its result, and its error says what is wrong."""
    import structlog

    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
