"""How many slots of a node are in use: ours by count, others' by what the node reports.

The counts are also integrated over time, so that of any span between two moments the mean is known
from two differences: how many slots were busy while a request wrote, and for how long prompts were
read meanwhile (which holds up those who write).
"""

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
    slot_seconds: float = 0.0
    """Busy slots, ours and others', summed over time up to the last change."""
    reader_seconds: float = 0.0
    """Prompts being read by ours, summed over time likewise."""
    _readers: int = 0
    _counted: float = 0.0
    """Up to when the sums go."""
    _window: int = 0
    _peak: int = 0
    """The most that was leased in this window."""
    _earlier: int = 0
    """The most in the window before."""
    _readings: list[Reading] = field(default_factory=list)

    def count(self, now: float) -> None:
        """Bring the sums up to this moment."""
        elapsed = now - self._counted
        if elapsed > 0:
            self._counted = now
            self.slot_seconds += elapsed * (self.leased + self.foreign)
            self.reader_seconds += elapsed * self._readers

    def take(self, slots: int, now: float, reads: bool = False) -> None:  # noqa: FBT001, FBT002
        """So many more are ours; `reads`: and it will be told when the prompt is read."""
        if int(now / LINGER) != self._window:
            self._roll(now)
        elapsed = now - self._counted
        if elapsed > 0:
            # `count`, spelt out, here and below: both are for each request.
            self._counted = now
            self.slot_seconds += elapsed * (self.leased + self.foreign)
            self.reader_seconds += elapsed * self._readers
        self.leased += slots
        self._readers += reads
        if self._peak < self.leased:  # noqa: PLR1730 - a call costs four times as much
            self._peak = self.leased
        for reading in self._readings:
            reading.peak = max(reading.peak, self.leased)

    def has_read(self, now: float) -> None:
        """One of ours has read its prompt."""
        self.count(now)
        self._readers -= 1

    def give_back(self, slots: int, now: float, reads: bool = False) -> None:  # noqa: FBT001, FBT002
        """So many fewer are ours; `reads`: one that had not read its prompt yet."""
        if int(now / LINGER) != self._window:
            self._roll(now)
        elapsed = now - self._counted
        if elapsed > 0:
            self._counted = now
            self.slot_seconds += elapsed * (self.leased + self.foreign)
            self.reader_seconds += elapsed * self._readers
        self.leased -= slots
        self._readers -= reads

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

    def saw(self, busy: int, reading: Reading, now: float | None = None) -> None:
        """The node reported so many busy slots: what ours can't account for is others' work."""
        if now is not None:
            self.count(now)
        self.foreign = max(0, busy - reading.peak)

    def _roll(self, now: float) -> None:
        window = int(now / LINGER)
        if window != self._window:
            self._earlier = self._peak if window == self._window + 1 else self.leased
            self._peak = self.leased
            self._window = window
