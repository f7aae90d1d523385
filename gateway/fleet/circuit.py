"""Keeps work from a node that fails it: a circuit breaker, and a pause after a rejected key."""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass, field

from gateway.config.routing import HealthSettings

OPEN_JITTER = 0.1
"""Share by which an open time varies, so that nodes ejected together do not return together."""

SLOW_START_LEAST = 0.1
"""Share of the slots with which a slow start begins (as Envoy's `min_weight_percent`)."""

SLOW_START_STEP = 1.0
"""Seconds between two looks at a node in slow start."""

LEAST_DELAY = 0.001
"""Least seconds to the next look, so that rounding cannot make a busy loop."""

KEY_REJECTED_SECONDS = 300.0
"""Seconds without work for a node that has rejected the gateway's key."""


class CircuitPhase(enum.Enum):
    """Which requests the circuit lets through: all, none, or one on trial."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(slots=True)
class Circuit:
    """One node's breaker. It has no clock and no timer: every method gets the time.

    A request's outcome counts by the time at which the request `began`: one that began before the
    circuit opened proves nothing about the node since then.
    """

    settings: HealthSettings
    rng: random.Random
    failures: int = 0
    """Failed requests in a row that the node is to blame for."""
    suspect_callers: set[str] = field(default_factory=set)
    """Callers of failed requests in this row that the request itself may have caused."""
    open_until: float | None = None
    """None: closed."""
    fully_closed: bool = True
    """Whether it lets all requests through, and will until one fails: no slow start."""
    trial: object | None = None
    """The lease that is on trial."""
    open_seconds: float = 0.0
    """Seconds of the last opening, before jitter."""
    _opened_at: float = -math.inf
    _closed_at: float = -math.inf
    _slow_start_at: float | None = None
    """When the slow start began; None: it is over."""

    def phase(self, now: float) -> CircuitPhase:
        """Which requests it lets through at this moment."""
        if self.open_until is None:
            return CircuitPhase.CLOSED
        return CircuitPhase.OPEN if now < self.open_until else CircuitPhase.HALF_OPEN

    def wants_trial(self, now: float) -> bool:
        """Whether it is half-open and no request is on trial."""
        return self.open_until is not None and now >= self.open_until and self.trial is None

    def begin_trial(self, lease: object) -> None:
        """This lease's outcome decides whether the circuit closes."""
        self.trial = lease

    def end_trial(self, lease: object) -> None:
        """This lease has ended; if it proved nothing, the next request is on trial."""
        if self.trial is lease:
            self.trial = None

    def record_failure(
        self,
        now: float,
        began: float | None = None,
        *,
        caller: str | None = None,
        node_at_fault: bool = True,
    ) -> bool:
        """Count a failed request of `caller`; True if that opened the circuit.

        Without `node_at_fault` the request itself may have made the node fail. However many such
        requests one caller sends, they count as one failure, and never open the circuit alone.
        """
        began = now if began is None else began
        if began < self._opened_at:
            return False
        if node_at_fault:
            self.suspect_callers.discard(caller or "")
        elif self.open_until is not None:
            return False  # a trial that proves nothing
        else:
            self.suspect_callers.add(caller or "")
        if self.open_until is None:
            self.failures += node_at_fault
            # Without a failure that the node is surely to blame for, it takes two callers.
            least = 1 if self.failures else 2
            if self.failures + len(self.suspect_callers) < max(self.settings.failures, least):
                return False
            reopened = now - self._closed_at < self.settings.open_max
        elif began < self.open_until:
            return False
        else:
            self.failures += 1
            reopened = True
        self.failures += len(self.suspect_callers)
        self.suspect_callers.clear()
        self._open(now, longer=reopened)
        return True

    def record_success(self, now: float, began: float | None = None) -> bool:
        """Count a request that went well; True if that closed the circuit."""
        if self.open_until is None:
            self.failures = 0
            if self.suspect_callers:
                self.suspect_callers.clear()
            return False
        if (now if began is None else began) < self.open_until:
            return False
        return self.close(now)

    def _open(self, now: float, *, longer: bool) -> None:
        """Let nothing through; `longer`: for twice the last time, up to `open_max`."""
        seconds = 2 * self.open_seconds if longer else 0.0
        self.open_seconds = min(
            max(seconds, self.settings.open), max(self.settings.open_max, self.settings.open)
        )
        self._opened_at = now
        self.fully_closed = False
        self.open_until = now + self.open_seconds * self.rng.uniform(
            1 - OPEN_JITTER, 1 + OPEN_JITTER
        )
        self.trial = None

    def close(self, now: float) -> bool:
        """Let work in again, with a slow start; True if it was not closed."""
        self.failures = 0
        self.suspect_callers.clear()
        if self.open_until is None:
            return False
        self.open_until = None
        self.trial = None
        self._closed_at = self._slow_start_at = now
        self.fully_closed = False  # Not before the slow start is over.
        return True

    def server_restarted(self, now: float) -> None:
        """The node's server is a new process: close, as the old one's death failed all it ran.

        If the circuit opens again soon afterwards it stays open for its time.
        """
        if self.open_until is not None and self.open_seconds <= self.settings.open:
            self.close(now)

    def configure(self, settings: HealthSettings) -> None:
        """Put changed settings in force."""
        self.settings = settings

    def slow_start_share(self, now: float) -> float:
        """The share of its slots that the node may use in a slow start; (0, 1]."""
        if self._slow_start_at is None:
            return 1.0
        elapsed = now - self._slow_start_at
        if elapsed >= self.settings.slow_start:
            self._slow_start_at = None
            self.fully_closed = self.open_until is None
            return 1.0
        return max(SLOW_START_LEAST, elapsed / self.settings.slow_start)

    def slow_start_slots(self, slots: int, now: float) -> int:
        """How many of these slots may be used in a slow start; at least one."""
        if self._slow_start_at is None:
            return slots
        return max(1, math.ceil(slots * self.slow_start_share(now)))

    def next_change(self, now: float) -> float:
        """When time alone may change what it lets through; infinity: never."""
        if self.open_until is not None:
            return self.open_until if now < self.open_until else math.inf
        if self._slow_start_at is None or self.slow_start_share(now) >= 1.0:
            return math.inf
        left = self._slow_start_at + self.settings.slow_start - now
        return now + min(SLOW_START_STEP, max(LEAST_DELAY, left))


@dataclass(slots=True)
class KeyRejection:
    """Whether a node gets no work because it has rejected the gateway's key.

    Some proxies answer so for one model only. If a request has gone well since the last
    rejection, it takes a second one.
    """

    reason: str = ""
    """How the node rejected the key, for an operator."""
    until: float = -math.inf
    """Until when the rejection is believed."""
    key_worked: bool = False
    """Whether a request has gone well since the last rejection."""

    def active(self, now: float) -> bool:
        """Whether the node gets no work at this moment."""
        return now < self.until

    def record_success(self) -> None:
        """A request went well, so the node accepts the key."""
        self.key_worked = True

    def record(self, reason: str, now: float) -> None:
        """A request was refused because the key is wrong (401)."""
        if not self.key_worked:
            self.reason, self.until = reason, now + KEY_REJECTED_SECONDS
        self.key_worked = False

    def clear(self) -> None:
        """The key may have changed: try it."""
        self.until = -math.inf
