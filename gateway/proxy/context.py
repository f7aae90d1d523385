"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.config.settings import Settings
from gateway.events import EventBus
from gateway.fleet.fleet import Fleet
from gateway.proxy.accounting import Accounting
from gateway.proxy.time_slicer import TimeSlicer
from gateway.proxy.timeouts import TimeoutMonitor
from gateway.scheduling.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class ProxyContext:
    """What every request's attempts need; one for the whole process."""

    scheduler: Scheduler
    fleet: Fleet
    settings: Settings
    bus: EventBus
    timeout_monitor: TimeoutMonitor
    clock: Callable[[], float]
    time_slicer: TimeSlicer = field(default_factory=TimeSlicer)
    """Of all requests that take long to prepare."""
    accounting: Accounting = field(init=False)

    def __post_init__(self) -> None:
        self.accounting = Accounting(self.fleet, self.scheduler, self.bus, self.clock)

    def configure(self, settings: Settings) -> None:
        """Serve new requests by these settings."""
        self.settings = settings
