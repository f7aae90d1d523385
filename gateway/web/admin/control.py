"""What the admin listener needs of the process that it stands in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.config.settings import Settings
from gateway.events import InventoryChanged, SettingsChanged


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What came of reading both files again."""

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
        """When the process began to serve, by `clock`."""

    @property
    def version(self) -> str:
        """The gateway's own."""

    @property
    def inventory_error(self) -> str | None:
        """What is wrong with the inventory on disk, while an older one is in force."""

    @property
    def settings_error(self) -> str | None:
        """What is wrong with the settings on disk, while older ones are in force."""

    @property
    def keys_lost(self) -> str | None:
        """Why the public listener lets nobody in though it listens; None: it does."""

    @property
    def closing(self) -> bool:
        """Whether it is shutting down."""

    async def reload(self) -> ReloadResult:
        """Read the inventory and the settings again and put them in force.

        Raises: ConfigError, or OSError where a TLS file can't be used; the file that is to blame
        has changed nothing then.
        """
