"""The objects that all requests share on their way through the proxy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.config.settings import Settings
from gateway.events import EventBus
from gateway.lease import KeyedHash, LeaseService
from gateway.proxy.accounting import Accounting, Quarantine
from gateway.proxy.inbound.body import TimeSlicer
from gateway.proxy.retry import RetryPolicy
from gateway.proxy.timeouts import TimeoutMonitor
from gateway.proxy.usage import UsageOptions


@dataclass(slots=True, eq=False)
class ProxyContext:
    """What every request's attempts need; one for the whole process."""

    leases: LeaseService
    settings: Settings
    bus: EventBus
    timeout_monitor: TimeoutMonitor
    clock: Callable[[], float]
    time_slicer: TimeSlicer = field(default_factory=TimeSlicer)
    """Runs slow preparations of requests in steps."""
    keyed_hash: KeyedHash = field(default_factory=KeyedHash)
    """Identifies requests that nodes died on."""
    usage_options: UsageOptions = field(default_factory=UsageOptions)
    """Remembers which nodes can be asked for the usage of a stream."""
    accounting: Accounting = field(init=False)
    retry_policy: RetryPolicy = field(init=False)

    def __post_init__(self) -> None:
        self.accounting = Accounting(self.leases, self.bus, self.clock, Quarantine(self.keyed_hash))
        self.retry_policy = RetryPolicy(self.leases, self.clock)

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to the attempts that begin from now on."""
        self.settings = settings

    def retries_left(self) -> int:
        """Retries that could be made now, for the metric."""
        return self.retry_policy.remaining(self.settings.retries)
