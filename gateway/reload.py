"""Reads the inventory and the settings again while the gateway serves, on request or by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from gateway.config.errors import ConfigError, Problem
from gateway.config.inventory import Inventory, load_inventory
from gateway.config.settings import RejectedFiles, Settings, load_settings
from gateway.config.watch import watch_files
from gateway.events import EventBus, InventoryChanged, SettingsChanged
from gateway.fleet.fleet import Fleet
from gateway.observe.audit import AuditTrail
from gateway.startup import Options, StartError, check_extras, reread_admin_key
from gateway.transport.certificates import CertificateError
from gateway.web.admin.certificates import CertificateRenewal
from gateway.web.admin.configuration import ReloadResult, changed_keys


class FileReloader:
    """Both files. An invalid one changes nothing, and does not keep the other from being read."""

    def __init__(
        self,
        options: Options,
        *,
        settings: Callable[[], Settings],
        apply_settings: Callable[[Settings, str | None], SettingsChanged],
        fleet: Fleet,
        bus: EventBus,
        audit: AuditTrail,
        certificates: CertificateRenewal,
    ) -> None:
        """`settings` are those in force; `apply_settings` takes the key of `admin.key_file` too."""
        self.inventory_error: str | None = None
        """The problems of the inventory on disk, while an older one is in force."""
        self.settings_error: str | None = None
        """The problems of the settings on disk, while older ones are in force."""
        self._options = options
        self._settings = settings
        self._apply_settings = apply_settings
        self._fleet = fleet
        self._bus = bus
        self._audit = audit
        self._certificates = certificates
        self._reloading = asyncio.Lock()

    @property
    def has_defaults(self) -> bool:
        """Whether the settings in force are the defaults."""
        return self._settings() == self._options.apply_to(Settings())

    async def reload(self) -> ReloadResult:
        """Reload both files, and read the certificates again.

        Raises: ConfigError; then an invalid file has changed nothing.
        """
        async with self._reloading:
            problems: list[Problem] = []
            inventory_change = settings_change = None
            try:
                settings_change = await self._reload_settings()
            except ConfigError as error:
                problems += error.problems
            try:
                inventory_change = await self._reload_inventory()
            except ConfigError as error:
                problems += error.problems
            problems += await self._certificates.reread()
            if inventory_change is None or settings_change is None or problems:
                raise ConfigError(problems)
            return ReloadResult(inventory_change, settings_change)

    async def reload_on_signal(self) -> None:
        """Reload both files, and read the certificates again; problems are only told."""
        self._audit.record("signal", None, "reload")
        await self._reload_quietly("signal", inventory=True, settings=True)
        await self._certificates.reread()

    async def watch(self, inventory: Inventory) -> None:
        """Reload each file when it changes; never ends. `inventory` is the one in force."""
        options = self._options
        paths = [path for path in (options.inventory_file, options.settings_file) if path]
        edits = watch_files(paths)
        # They may have been edited since the start, which may have taken minutes.
        differs = await self._differs_from(inventory)
        await self._reload_quietly("file", inventory=differs, settings=True)
        async for changed in edits:
            await self._reload_quietly(
                "file",
                inventory=options.inventory_file in changed,
                settings=options.settings_file in changed,
            )

    async def _differs_from(self, inventory: Inventory) -> bool:
        path = self._options.inventory_file
        try:
            return await asyncio.to_thread(load_inventory, path) != inventory
        except (ConfigError, OSError):
            return True

    async def _reload_quietly(self, actor: str, *, inventory: bool, settings: bool) -> None:
        async with self._reloading:
            # Each file on its own: an invalid one must not keep the other from being read.
            if settings:
                before = self._settings()
                with contextlib.suppress(ConfigError, OSError):
                    await self._reload_settings()
                changed = changed_keys(before, self._settings())
                invalid = self.settings_error is not None
                self._audit.record_settings(actor, changed, invalid=invalid)
            if inventory:
                change = None
                with contextlib.suppress(ConfigError, OSError):
                    change = await self._reload_inventory()
                self._audit.record_inventory(actor, change)

    async def _reload_inventory(self) -> InventoryChanged:
        try:
            inventory = await asyncio.to_thread(load_inventory, self._options.inventory_file)
            change = self._fleet.apply(inventory)
        except (ConfigError, OSError) as error:
            self.inventory_error = str(error)
            self._bus.publish(InventoryChanged(error=self.inventory_error))
            raise
        self.inventory_error = None
        self._bus.publish(change)
        return change

    async def _reload_settings(self) -> SettingsChanged:
        try:
            # An empty file changes nothing: it may come of an unfinished edit or a full disk.
            rejected: RejectedFiles = "nothing" if self.has_defaults else "empty"
            path = self._options.settings_file
            loaded = await asyncio.to_thread(load_settings, path, rejected=rejected)
            settings = self._options.apply_to(loaded)
            admin_key = await asyncio.to_thread(reread_admin_key, settings.admin.key_file)
            check_extras(settings, path)
        except (ConfigError, OSError) as error:
            self.settings_error = str(error)
            self._bus.publish(SettingsChanged(error=self.settings_error))
            raise
        self.settings_error = None
        return self._apply_settings(settings, admin_key)


def load_certificates(settings: Settings, fleet: Fleet, audit: AuditTrail) -> CertificateRenewal:
    """The certificates of the settings, at the start. Raises: StartError."""
    try:
        return CertificateRenewal(settings, fleet, audit)
    except CertificateError as error:
        raise StartError(str(error), 2) from None
