"""How many slots of a node are in use: ours by count, those of others by what the node reports.

The counts are also integrated over time. For any span between two moments the difference of two
sums gives the mean: how many slots were busy during a request's decode, and for how long prompts
were being read meanwhile, which delays the other slots.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SLOT_LINGER = 0.25
"""Seconds for which a slot may still be reported busy after its answer has ended."""


class LeasePhase(enum.Enum):
    """How far the node has got with the request."""

    WAITING_HEAD = "waiting"
    """Sent, no head yet: the node queues it, or works on an answer that it does not stream."""
    PREFILL = "prefill"
    """The head has come, content has not: the node reads the prompt."""
    DECODE = "decode"
    """Content has come."""
    RECLAIM = "reclaim"
    """The gateway has left; the node may still be at work."""
    RELEASED = "over"
    """The slots are free."""


@dataclass(slots=True, eq=False)
class SlotsQuery:
    """A request to the node's `/slots` that is under way."""

    peak_leased: int
    """The most busy slots in its answer that our leases can account for."""
    lent: int = 0
    """The busy slots in its answer that may be lent."""

    def leases_grew(self, leased: int) -> None:
        """Our leases hold so many slots now."""
        self.peak_leased = max(self.peak_leased, leased)

    def slot_lent(self) -> None:
        """A slot is lent."""
        self.lent = 1


@dataclass(slots=True, eq=False)
class SlotLoan:
    """A slot that counts as free while a calibration uses it, until a lease wants any slot."""

    call_in: Callable[[], None]

    def leases_grew(self, leased: int) -> None:
        """Our leases hold so many slots now."""
        if leased:
            self.call_in()

    def slot_lent(self) -> None:
        """A slot is lent."""


@dataclass(slots=True)
class SlotOccupancy:
    """The counts of one node's slots."""

    leased: int = 0
    foreign: int = 0
    slot_seconds: float = 0.0
    """Busy slots, ours and others', integrated over time up to the last change."""
    prefill_seconds: float = 0.0
    """Our prompts that are being read, integrated likewise."""
    prefills: int = 0
    """Our prompts that are being read."""
    tokens_reading: tuple[int, ...] | None = None
    """The tokens of each busy slot, ours and others', by the last reading; None: it was taken."""
    _integrated_at: float = 0.0
    """Up to when the sums go."""
    _window: int = 0
    """Number of the current window of `SLOT_LINGER` seconds."""
    _peak: int = 0
    """The most slots leased in this window."""
    _earlier_peak: int = 0
    """The most in the window before."""
    _watchers: list[SlotsQuery | SlotLoan] = field(default_factory=list)
    """All that is told of each lease."""
    _lent: int = 0

    def integrate(self, now: float) -> None:
        """Bring the sums up to this moment."""
        elapsed = now - self._integrated_at
        if elapsed > 0:
            self._integrated_at = now
            self.slot_seconds += elapsed * (self.leased + self.foreign)
            self.prefill_seconds += elapsed * self.prefills

    def take(self, slots: int, now: float, prefilling: bool = False) -> None:  # noqa: FBT001, FBT002
        """A lease takes slots; `prefilling`: `prefill_done` will say when its prompt is read."""
        if int(now / SLOT_LINGER) != self._window:
            self._roll(now)
        elapsed = now - self._integrated_at
        if elapsed > 0:
            # `integrate`, inlined here and below: both run for each request.
            self._integrated_at = now
            self.slot_seconds += elapsed * (self.leased + self.foreign)
            self.prefill_seconds += elapsed * self.prefills
        self.leased += slots
        self.prefills += prefilling
        if self._peak < self.leased:  # noqa: PLR1730 - a call costs four times as much
            self._peak = self.leased
        for watcher in self._watchers:
            watcher.leases_grew(self.leased)

    def prefill_done(self, now: float) -> None:
        """One of our prompts has been read."""
        elapsed = now - self._integrated_at
        if elapsed > 0:
            self._integrated_at = now
            self.slot_seconds += elapsed * (self.leased + self.foreign)
            self.prefill_seconds += elapsed * self.prefills
        self.prefills -= 1

    def release(self, slots: int, now: float, prefilling: bool = False) -> None:  # noqa: FBT001, FBT002
        """A lease gives back slots; `prefilling`: its prompt had not been read yet."""
        if int(now / SLOT_LINGER) != self._window:
            self._roll(now)
        elapsed = now - self._integrated_at
        if elapsed > 0:
            self._integrated_at = now
            self.slot_seconds += elapsed * (self.leased + self.foreign)
            self.prefill_seconds += elapsed * self.prefills
        self.leased -= slots
        self.prefills -= prefilling

    @contextmanager
    def slots_query(self, now: float) -> Iterator[SlotsQuery]:
        """Watch our leases while the node is asked for its busy slots."""
        self._roll(now)
        query = SlotsQuery(max(self._peak, self._earlier_peak), self._lent)
        self._watchers.append(query)
        try:
            yield query
        finally:
            self._watchers.remove(query)

    @contextmanager
    def lend_slot(self, call_in: Callable[[], None]) -> Iterator[None]:
        """Lend a slot of an idle node; it goes on counting as free. Each lease calls `call_in`."""
        loan = SlotLoan(call_in)
        for watcher in self._watchers:
            watcher.slot_lent()
        self._watchers.append(loan)
        self._lent = 1
        try:
            yield
        finally:
            self._lent = 0
            self._watchers.remove(loan)

    def record_busy(self, busy: int, query: SlotsQuery, now: float | None = None) -> None:
        """The node reported busy slots: those that our leases can't account for are others'."""
        if now is not None:
            self.integrate(now)
        self.foreign = max(0, busy - query.peak_leased - query.lent)

    def record_tokens(self, reading: tuple[int, ...]) -> None:
        """The node reported the tokens of its busy slots."""
        self.tokens_reading = reading

    def take_tokens_reading(self) -> tuple[int, ...] | None:
        """The last reading of the busy slots' tokens, the first time; then None."""
        reading, self.tokens_reading = self.tokens_reading, None
        return reading

    def clear_foreign(self) -> None:
        """The node reports no slots: nothing is known of others' work."""
        self.foreign, self.tokens_reading = 0, ()

    def _roll(self, now: float) -> None:
        window = int(now / SLOT_LINGER)
        if window != self._window:
            self._earlier_peak = self._peak if window == self._window + 1 else self.leased
            self._peak = self.leased
            self._window = window
