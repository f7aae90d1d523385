"""A circuit breaker: keeps work from a node that fails it, and lets it back in step by step."""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass, field

from gateway.config.routing import HealthSettings

OPEN_JITTER = 0.1
"""Share by which an open time varies, so that nodes ejected together do not return together."""

SLOW_START_LEAST = 0.1
"""Where a slow start begins (as Envoy's `min_weight_percent`)."""

SLOW_START_STEP = 1.0
"""Seconds between two looks at a node in slow start."""

LEAST_DELAY = 0.001
"""Seconds to the next look at least: rounding must not make it now, again and again."""


class CircuitPhase(enum.Enum):
    """What the circuit lets through: all, nothing, or one request on trial."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(slots=True)
class Circuit:
    """One node's breaker. It does nothing by itself: every method is told the time.

    A request's outcome counts by when the request `began`: one that began before the circuit
    opened says nothing about the node since then.
    """

    settings: HealthSettings
    rng: random.Random
    failures: int = 0
    """Failed requests in a row that the node is to blame for."""
    suspect_callers: set[str] = field(default_factory=set)
    """Callers of other failures among them: the node's fault, or that of what they asked for."""
    open_until: float | None = None
    """None: closed."""
    trial: object | None = None
    """The lease that is out on trial."""
    open_seconds: float = 0.0
    """Seconds of the last opening, before jitter."""
    _opened: float = -math.inf
    _closed: float = -math.inf
    _ramp: float | None = None

    def phase(self, now: float) -> CircuitPhase:
        """What it lets through at this moment."""
        if self.open_until is None:
            return CircuitPhase.CLOSED
        return CircuitPhase.OPEN if now < self.open_until else CircuitPhase.HALF_OPEN

    @property
    def fully_closed(self) -> bool:
        """Whether it lets everything through, and goes on to while nothing fails."""
        return self.open_until is None and self._ramp is None

    def wants_trial(self, now: float) -> bool:
        """Whether it is half-open and nothing is out on trial."""
        return self.open_until is not None and now >= self.open_until and self.trial is None

    def begin_trial(self, lease: object) -> None:
        """`lease` decides whether the circuit closes."""
        self.trial = lease

    def end_trial(self, lease: object) -> None:
        """`lease` has ended; if it proved nothing, the next one is tried."""
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

        Not `certain`: the request itself may have made the node fail. However many such requests
        one caller sends, they count as one failure, and never open the circuit alone.
        """
        began = now if began is None else began
        if began < self._opened:
            return False
        if node_at_fault:
            self.suspect_callers.discard(caller or "")
        elif self.open_until is not None:
            return False  # a trial that proves nothing
        else:
            self.suspect_callers.add(caller or "")
        if self.open_until is None:
            self.failures += node_at_fault
            if self.failures + len(self.suspect_callers) < max(
                self.settings.failures, self._least()
            ):
                return False
            recent = now - self._closed < self.settings.open_max
        elif began < self.open_until:
            return False
        else:
            self.failures += 1
            recent = True
        self.failures += len(self.suspect_callers)
        self.suspect_callers.clear()
        longer = 2 * self.open_seconds if recent else 0.0
        self.open_seconds = min(
            max(longer, self.settings.open), max(self.settings.open_max, self.settings.open)
        )
        self._opened = now
        self.open_until = now + self.open_seconds * self.rng.uniform(
            1 - OPEN_JITTER, 1 + OPEN_JITTER
        )
        self.trial = None
        return True

    def _least(self) -> int:
        """Failures that it takes at least, by who may have caused them."""
        return 1 if self.failures else 2

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

    def close(self, now: float) -> bool:
        """Let work in again, slowly; True if it was not closed."""
        self.failures = 0
        self.suspect_callers.clear()
        if self.open_until is None:
            return False
        self.open_until = None
        self.trial = None
        self._closed = self._ramp = now
        return True

    def server_restarted(self, now: float) -> None:
        """The node was gone and is there again: what failed went with the process that was killed.

        All that it ran fails at that moment, which opens the circuit though nothing is wrong with
        its successor. One that is opened again soon afterwards stays open for its time.
        """
        if self.open_until is not None and self.open_seconds <= self.settings.open:
            self.close(now)

    def slow_start_share(self, now: float) -> float:
        """The part of its slots that a node may use while it starts slowly; (0, 1]."""
        if self._ramp is None:
            return 1.0
        elapsed = now - self._ramp
        if elapsed >= self.settings.slow_start:
            self._ramp = None
            return 1.0
        return max(SLOW_START_LEAST, elapsed / self.settings.slow_start)

    def slow_start_slots(self, slots: int, now: float) -> int:
        """How many of so many slots may be used while it starts slowly; at least one."""
        if self._ramp is None:
            return slots
        return max(1, math.ceil(slots * self.slow_start_share(now)))

    def next_change(self, now: float) -> float:
        """When time alone may change what it lets through; infinity: never."""
        if self.open_until is not None:
            return self.open_until if now < self.open_until else math.inf
        if self._ramp is None or self.slow_start_share(now) >= 1.0:
            return math.inf
        left = self._ramp + self.settings.slow_start - now
        return now + min(SLOW_START_STEP, max(LEAST_DELAY, left))
