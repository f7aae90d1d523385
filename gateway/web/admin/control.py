"""The interface of the running gateway that the admin listener uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.config.settings import Settings
from gateway.events import InventoryChanged, SettingsChanged


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """The changes of a successful reload."""

    inventory: InventoryChanged
    settings: SettingsChanged


class GatewayControl(Protocol):
    """The running gateway."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""

    @property
    def clock(self) -> Callable[[], float]:
        """Monotonic seconds."""

    @property
    def started_at(self) -> float:
        """When the gateway started, by `clock`."""

    @property
    def version(self) -> str:
        """The gateway's version."""

    @property
    def inventory_error(self) -> str | None:
        """The problems of the inventory on disk, while an older one is in force."""

    @property
    def settings_error(self) -> str | None:
        """The problems of the settings on disk, while older ones are in force."""

    @property
    def keys_lost(self) -> str | None:
        """Why the public listener refuses every request; None: it does not."""

    @property
    def closing(self) -> bool:
        """Whether the gateway is shutting down."""

    async def reload(self) -> ReloadResult:
        """Reload the inventory and the settings.

        Raises: ConfigError, or OSError if a TLS file can't be used; then the file with the problem
        has changed nothing.
        """
