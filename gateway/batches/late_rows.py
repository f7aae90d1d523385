"""Rows whose deadline is in danger: in a higher class they wait for their turn, a few at a time.

Other rows are offered only where a slot is free, so requests of clients that want all slots would
keep them waiting for ever. These stand in the scheduler's queue like any other request of their
class, and are ended by their deadline, wherever they are. How many may wait is bounded
(`feeding.late_places`): the rest stays in the store.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gateway.batches.request_rows import StoredRow
from gateway.batches.runner import Runner
from gateway.lease import BatchRoomService
from gateway.request import Priority

REFUSED_SECONDS = 1.0
"""Most seconds until late rows are offered again of which one found no place in the queue."""


@dataclass(slots=True, eq=False)
class LateRows:
    """Those of one target."""

    batches: dict[str, Priority] = field(default_factory=dict)
    """The batches whose class is raised, and to which; the nearest deadline first."""
    waiting: Counter[str] = field(default_factory=Counter)
    """Rows that wait for a slot, by owner."""
    paused_until: float = 0.0
    """Monotonic seconds."""

    def update(self, in_danger: Mapping[str, tuple[str, str]], runner: Runner) -> None:
        """Of these batches the deadline is in danger: their owners, and the class of their rows.

        A row's class is raised to that one, within what its owner may have now.
        """
        raised = {
            batch: max(runner.late_priority(owner), Priority.parse(label) or Priority.BATCH)
            for batch, (owner, label) in in_danger.items()
        }
        self.batches = {batch: one for batch, one in raised.items() if one < Priority.BATCH}
        self.waiting.clear()

    def raise_class(
        self, offered: Iterable[StoredRow], rooms: BatchRoomService, runner: Runner
    ) -> None:
        """Raise those of the rows that were offered before, and count those that wait."""
        by_priority: defaultdict[Priority, list[StoredRow]] = defaultdict(list)
        for row in offered:
            if (priority := self.batches.get(row.batch or "")) is not None:
                by_priority[priority].append(row)
        for priority, rows in by_priority.items():
            waiting = rooms.raise_class({row.id for row in rows}, priority)
            for row in rows:
                runner.note_raised(row.id, priority)
                # The scheduler has not seen all of them, or knows their prompts by other ids.
                self.waiting[row.owner] += row.id in waiting or not runner.has_begun(row.id)

    def note_offered(self, owner: str) -> None:
        """One more is about to wait."""
        self.waiting[owner] += 1

    def owners_with(self, rows: int) -> set[str]:
        """Owners of whom so many rows wait."""
        return {owner for owner, waiting in self.waiting.items() if waiting >= rows}

    def refused(self, now: float, seconds: float) -> None:
        """One found no place in the queue, and may in so many seconds."""
        self.paused_until = now + min(seconds, REFUSED_SECONDS)
