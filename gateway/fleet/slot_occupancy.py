"""How many slots of a node are in use: ours by count, others' by what the node reports.

The counts are also integrated over time, so that of any span between two moments the mean is known
from two differences: how many slots were busy while a request wrote, and for how long prompts were
read meanwhile (which holds up those who write).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SLOT_LINGER = 0.25
"""Seconds within which a slot may still be reported busy after its answer has ended."""


@dataclass(slots=True, eq=False)
class SlotsQuery:
    """A look at the node's `/slots` that is under way."""

    peak_leased: int
    """The most of the node's slots that leases of ours can account for in its answer."""


@dataclass(slots=True)
class SlotOccupancy:
    """The count of one node's slots."""

    leased: int = 0
    foreign: int = 0
    slot_seconds: float = 0.0
    """Busy slots, ours and others', summed over time up to the last change."""
    prefill_seconds: float = 0.0
    """Prompts being read by ours, summed over time likewise."""
    _readers: int = 0
    _counted: float = 0.0
    """Up to when the sums go."""
    _window: int = 0
    _peak: int = 0
    """The most that was leased in this window."""
    _earlier: int = 0
    """The most in the window before."""
    _readings: list[SlotsQuery] = field(default_factory=list)

    def integrate(self, now: float) -> None:
        """Bring the sums up to this moment."""
        elapsed = now - self._counted
        if elapsed > 0:
            self._counted = now
            self.slot_seconds += elapsed * (self.leased + self.foreign)
            self.prefill_seconds += elapsed * self._readers

    def take(self, slots: int, now: float, prefilling: bool = False) -> None:  # noqa: FBT001, FBT002
        """So many more are ours; `reads`: and it will be told when the prompt is read."""
        if int(now / SLOT_LINGER) != self._window:
            self._roll(now)
        elapsed = now - self._counted
        if elapsed > 0:
            # `count`, spelt out, here and below: both are for each request.
            self._counted = now
            self.slot_seconds += elapsed * (self.leased + self.foreign)
            self.prefill_seconds += elapsed * self._readers
        self.leased += slots
        self._readers += prefilling
        if self._peak < self.leased:  # noqa: PLR1730 - a call costs four times as much
            self._peak = self.leased
        for reading in self._readings:
            reading.peak_leased = max(reading.peak_leased, self.leased)

    def prefill_done(self, now: float) -> None:
        """One of ours has read its prompt."""
        self.integrate(now)
        self._readers -= 1

    def release(self, slots: int, now: float, prefilling: bool = False) -> None:  # noqa: FBT001, FBT002
        """So many fewer are ours; `reads`: one that had not read its prompt yet."""
        if int(now / SLOT_LINGER) != self._window:
            self._roll(now)
        elapsed = now - self._counted
        if elapsed > 0:
            self._counted = now
            self.slot_seconds += elapsed * (self.leased + self.foreign)
            self.prefill_seconds += elapsed * self._readers
        self.leased -= slots
        self._readers -= prefilling

    @contextmanager
    def slots_query(self, now: float) -> Iterator[SlotsQuery]:
        """Watch the count while the node is asked."""
        self._roll(now)
        reading = SlotsQuery(max(self._peak, self._earlier))
        self._readings.append(reading)
        try:
            yield reading
        finally:
            self._readings.remove(reading)

    def record_busy(self, busy: int, query: SlotsQuery, now: float | None = None) -> None:
        """The node reported so many busy slots: what ours can't account for is others' work."""
        if now is not None:
            self.integrate(now)
        self.foreign = max(0, busy - query.peak_leased)

    def _roll(self, now: float) -> None:
        window = int(now / SLOT_LINGER)
        if window != self._window:
            self._earlier = self._peak if window == self._window + 1 else self.leased
            self._peak = self.leased
            self._window = window
