"""How many slots of a node are in use: ours by count, others' by what the node reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LINGER = 0.25
"""Seconds within which a slot may still be reported busy after its answer has ended."""


@dataclass(slots=True, eq=False)
class Reading:
    """A look at the node's `/slots` that is under way."""

    peak: int
    """The most of the node's slots that leases of ours can account for in its answer."""


@dataclass(slots=True)
class Occupancy:
    """The count of one node's slots."""

    leased: int = 0
    foreign: int = 0
    _window: int = 0
    _peak: int = 0
    """The most that was leased in this window."""
    _earlier: int = 0
    """The most in the window before."""
    _readings: list[Reading] = field(default_factory=list)

    def take(self, slots: int, now: float) -> None:
        """So many more are ours."""
        self._roll(now)
        self.leased += slots
        self._peak = max(self._peak, self.leased)
        for reading in self._readings:
            reading.peak = max(reading.peak, self.leased)

    def give_back(self, slots: int, now: float) -> None:
        """So many fewer are ours."""
        self._roll(now)
        self.leased -= slots

    @contextmanager
    def reading(self, now: float) -> Iterator[Reading]:
        """Watch the count while the node is asked."""
        self._roll(now)
        reading = Reading(max(self._peak, self._earlier))
        self._readings.append(reading)
        try:
            yield reading
        finally:
            self._readings.remove(reading)

    def saw(self, busy: int, reading: Reading) -> None:
        """The node reported so many busy slots: what ours can't account for is others' work."""
        self.foreign = max(0, busy - reading.peak)

    def _roll(self, now: float) -> None:
        window = int(now / LINGER)
        if window != self._window:
            self._earlier = self._peak if window == self._window + 1 else self.leased
            self._peak = self.leased
            self._window = window
