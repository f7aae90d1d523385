"""Whether a standby node runs, as far as its hooks and its probes show."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

ASSUMED_STARTUP = 60.0
"""Seconds from a start until a node can work, for one that has not been started yet."""


class LifecyclePhase(enum.Enum):
    """From standby to work and back."""

    UNKNOWN = "unknown"
    """Not probed yet: it may have run since before this gateway started."""
    OFF = "off"
    STARTING = "starting"
    """Its start hook runs, or has ended and the server is not up yet."""
    ON = "on"
    RETIRING = "retiring"
    """It finishes its requests and gets no new ones."""
    STOPPING = "stopping"
    """Its stop hook runs, or has failed and is tried again."""


@dataclass(slots=True)
class Lifecycle:
    """One standby node. Times are monotonic seconds."""

    phase: LifecyclePhase = LifecyclePhase.UNKNOWN
    reason: str = ""
    """For an operator: why it is in this phase."""
    since: float = -math.inf
    """When the phase began."""
    started_at: float = -math.inf
    """When it was last started."""
    stopped_at: float = -math.inf
    """When it was last stopped."""
    retry_at: float = -math.inf
    """After a hook has failed: when it may run again."""
    failures: int = 0
    """Starts and stops that failed in a row."""
    startup_seconds: float | None = None
    """Seconds that its last start took."""
    at_max_running: bool = False
    """It may not be started: the most nodes allowed (`max_running`) run already."""
    down_since: float | None = None
    """Since when it has been down though it should run."""

    def enter(self, phase: LifecyclePhase, reason: str, now: float) -> None:
        """Begin another phase."""
        self.phase, self.reason, self.since = phase, reason, now
        self.down_since = None

    def record_failure(self, now: float, initial: float, longest: float) -> None:
        """A start or a stop has failed: wait before the next try, longer each time."""
        wait = min(longest, initial * 2.0 ** min(self.failures, 30))
        self.failures += 1
        self.retry_at = now + wait

    def start(self, reason: str, now: float) -> None:
        """Its start hook is run now."""
        self.started_at = now
        self.enter(LifecyclePhase.STARTING, reason, now)

    def runs(self, now: float) -> None:
        """Probes show that it runs."""
        if self.phase is LifecyclePhase.STARTING:
            self.startup_seconds = now - self.since
        self.clear_failures()
        self.enter(LifecyclePhase.ON, "it runs", now)

    def clear_failures(self) -> None:
        """Count failures from 0 again."""
        self.failures = 0

    def note_down(self, now: float, *, down: bool) -> None:
        """Keep `down_since`, by the probes of a node that should run."""
        if not down:
            self.down_since = None
        elif self.down_since is None:
            self.down_since = now

    def stop(self, now: float) -> None:
        """Its stop hook has ended well."""
        self.stopped_at = now

    def explain(self, reason: str) -> None:
        """Give another reason for the same phase."""
        self.reason = reason

    def limit(self, *, at_max_running: bool) -> None:
        """Whether it may not be started, since as many run as may."""
        self.at_max_running = at_max_running

    def ready_in(self, now: float, cooldown: float) -> float:
        """Seconds until it can be expected to work, if it is started as soon as it may be."""
        expected = ASSUMED_STARTUP if self.startup_seconds is None else self.startup_seconds
        if self.phase is LifecyclePhase.OFF:
            return expected + max(0.0, self.retry_at - now, self.stopped_at + cooldown - now)
        if self.phase is LifecyclePhase.STARTING:
            # A start that takes longer than the last one is likely to take some more.
            elapsed = now - self.since
            return max(expected - elapsed, 1.0 + 0.2 * elapsed)
        return 1.0
