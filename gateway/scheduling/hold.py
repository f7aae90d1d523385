"""Free slots that are not taken at once: two reasons, both with an end.

Held back: a request whose prompt a busy node has in its cache waits for that node, where it is
expected to finish sooner than on a free one. The n-th that is held for a node counts on the n-th
slot that comes free there, no node is waited for by more than it has slots, and a hold ends when
its time has passed by a margin: predictions may be wrong, and must not wedge the queue.

Kept: the free slots of one node are kept for a request that takes several at once, else narrow
ones would take each as it comes.

Both are worked out anew at each placement, from what is known then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.scheduling import forecast
from gateway.scheduling.finish import seconds_after

if TYPE_CHECKING:
    from gateway.scheduling.ask import Ask
    from gateway.scheduling.board import Board, Pool, Row

TURNS = 1
"""Turns of each of its slots that a node may be waited for at most: no node is overrun for the sake
of its cache."""
LEAST_WARM = 32.0
"""Cached tokens that are worth a wait."""
LONGEST = 60.0
"""Seconds that a request is held back at most."""
MARGIN, LEAST_MARGIN = 2.0, 5.0
"""A hold ends this share of the predicted wait, and so many seconds, after it: by then the
prediction has failed."""


@dataclass(slots=True, eq=False)
class Holds:
    """What is held back, and what is kept, until the next look."""

    board: Board
    asks: list[Ask] = field(default_factory=list)

    def clear(self) -> None:
        """Nothing is held or kept: before a new look."""
        for ask in self.asks:
            if ask.held is not None:
                ask.held.held.clear()
                ask.held = None
        self.asks.clear()
        for row in self.board.kept:
            row.kept = None
        self.board.kept.clear()

    def drop(self, ask: Ask) -> None:
        """It does not wait any more."""
        if ask.held is not None:
            ask.held.held.remove(ask)
            ask.held = None
            self.asks.remove(ask)
        for row in self.board.kept:
            if row.kept is ask:
                row.kept = None
                self.board.kept.remove(row)
                break

    def better_later(self, ask: Ask, pool: Pool, here: float, now: float) -> bool:
        """Hold `ask` back if a busy node that knows its prompt would finish it sooner.

        `here`: seconds that it is expected to take if it is placed at once.
        """
        if ask.held_until and now >= ask.held_until:
            return False
        best: Row | None = None
        least = here
        longest = 0.0
        for index in ask.warmest:
            if index not in pool.members:
                continue
            row = self.board.rows[index]
            if not self._worth_waiting(row, ask):
                continue
            ahead = sum([other.slots for other in row.held])
            if ahead + ask.slots > TURNS * (row.capacity - row.foreign):
                continue  # The guard: no node is overrun for the sake of its cache.
            wait = forecast.release(row, max(1, ahead + ask.slots - row.free), now)
            if wait is None or wait > LONGEST:
                continue
            there = seconds_after(row, ask, wait)
            if there < least:
                best, least, longest = row, there, wait
        if best is None:
            return False
        best.held.append(ask)
        self.asks.append(ask)
        ask.held = best
        if not ask.held_until:
            ask.held_until = now + longest * (1.0 + MARGIN) + LEAST_MARGIN
        return True

    @staticmethod
    def _worth_waiting(row: Row, ask: Ask) -> bool:
        index = row.index
        return (
            row.free < ask.slots <= row.capacity
            and index not in ask.closed
            and index not in ask.failed
            and max(ask.cached.get(index, 0.0), ask.coming.get(index, 0.0)) >= LEAST_WARM
        )

    def keep_for(self, ask: Ask, *, strictly: bool = False) -> bool:
        """Keep a node's free slots for a wide request; whether there is one that can hold it.

        `strictly`: from the classes above it too.
        """
        rows = [
            row
            for pool in ask.groups[0]
            for row in pool.rows
            if row.capacity >= ask.slots and row.kept is None and row.index not in ask.closed
        ]
        if not rows:
            return False
        row = max(rows, key=lambda row: (row.index not in ask.failed, row.free - row.foreign))
        row.kept, row.strictly = ask, strictly
        self.board.kept.append(row)
        return True
