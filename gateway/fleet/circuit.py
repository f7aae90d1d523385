"""A circuit breaker: keeps work from a node that fails it, and lets it back in step by step."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from gateway.config.routing import HealthSettings

JITTER = 0.1
"""Share by which an open time varies, so that nodes ejected together do not return together."""
LEAST_SHARE = 0.1
"""Where a slow start begins (as Envoy's `min_weight_percent`)."""
RAMP_STEP = 1.0
"""Seconds between two looks at a node in slow start."""
SOONEST = 0.001
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

    rules: HealthSettings
    rng: random.Random
    failures: int = 0
    """Failed requests in a row that the node is to blame for."""
    suspects: set[str] = field(default_factory=set)
    """Callers of other failures among them: the node's fault, or that of what they asked for."""
    open_until: float | None = None
    """None: closed."""
    trial: object | None = None
    """The lease that is out on trial."""
    length: float = 0.0
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
    def steady(self) -> bool:
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

    def failed(
        self,
        now: float,
        began: float | None = None,
        *,
        caller: str | None = None,
        certain: bool = True,
    ) -> bool:
        """Count a failed request of `caller`; True if that opened the circuit.

        Not `certain`: the request itself may have made the node fail. However many such requests
        one caller sends, they count as one failure, and never open the circuit alone.
        """
        began = now if began is None else began
        if began < self._opened:
            return False
        if certain:
            self.suspects.discard(caller or "")
        elif self.open_until is not None:
            return False  # a trial that proves nothing
        else:
            self.suspects.add(caller or "")
        if self.open_until is None:
            self.failures += certain
            if self.failures + len(self.suspects) < max(self.rules.failures, self._least()):
                return False
            recent = now - self._closed < self.rules.open_max
        elif began < self.open_until:
            return False
        else:
            self.failures += 1
            recent = True
        self.failures += len(self.suspects)
        self.suspects.clear()
        longer = 2 * self.length if recent else 0.0
        self.length = min(max(longer, self.rules.open), max(self.rules.open_max, self.rules.open))
        self._opened = now
        self.open_until = now + self.length * self.rng.uniform(1 - JITTER, 1 + JITTER)
        self.trial = None
        return True

    def _least(self) -> int:
        """Failures that it takes at least, by who may have caused them."""
        return 1 if self.failures else 2

    def succeeded(self, now: float, began: float | None = None) -> bool:
        """Count a request that went well; True if that closed the circuit."""
        if self.open_until is None:
            self.failures = 0
            if self.suspects:
                self.suspects.clear()
            return False
        if (now if began is None else began) < self.open_until:
            return False
        return self.close(now)

    def close(self, now: float) -> bool:
        """Let work in again, slowly; True if it was not closed."""
        self.failures = 0
        self.suspects.clear()
        if self.open_until is None:
            return False
        self.open_until = None
        self.trial = None
        self._closed = self._ramp = now
        return True

    def came_back(self, now: float) -> None:
        """The node was gone and is there again: what failed went with the process that was killed.

        All that it ran fails at that moment, which opens the circuit though nothing is wrong with
        its successor. One that is opened again soon afterwards stays open for its time.
        """
        if self.open_until is not None and self.length <= self.rules.open:
            self.close(now)

    def share(self, now: float) -> float:
        """The part of its slots that a node may use while it starts slowly; (0, 1]."""
        if self._ramp is None:
            return 1.0
        elapsed = now - self._ramp
        if elapsed >= self.rules.slow_start:
            self._ramp = None
            return 1.0
        return max(LEAST_SHARE, elapsed / self.rules.slow_start)

    def allowed(self, slots: int, now: float) -> int:
        """How many of so many slots may be used while it starts slowly; at least one."""
        if self._ramp is None:
            return slots
        return max(1, math.ceil(slots * self.share(now)))

    def next_change(self, now: float) -> float:
        """When time alone may change what it lets through; infinity: never."""
        if self.open_until is not None:
            return self.open_until if now < self.open_until else math.inf
        if self._ramp is None or self.share(now) >= 1.0:
            return math.inf
        left = self._ramp + self.rules.slow_start - now
        return now + min(RAMP_STEP, max(SOONEST, left))
