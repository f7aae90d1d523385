"""What the feeder asks the store besides claims: prompts that begin alike, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, func, or_, select

from gateway.batches.feeding import PrefixGroup
from gateway.batches.request_rows import IS_WAITING, WaitingGroup, waiting_groups
from gateway.store.schema import batches, stored_requests

MOST_GROUPS = 64
"""Groups of one batch that are told apart at a time: those with the longest rows."""

_ROW: Final = stored_requests.c


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits in a folder."""

    groups: list[WaitingGroup]
    batches: dict[str, int] = field(default_factory=dict)
    """Batches by state."""
    oldest: float | None = None
    """When the oldest batch with waiting lines was created, as Unix time; None: there is none."""


@dataclass(frozen=True, slots=True)
class ReadWaiting:
    """A job of the store: what waits in a folder, and may run now."""

    folder: str
    now: float
    """Unix time."""

    def __call__(self, connection: Connection) -> Waiting:
        """Run within the transaction of `connection`."""
        groups = waiting_groups(connection, self.folder, self.now)
        by_state = select(batches.c.state, func.count()).where(batches.c.folder == self.folder)
        states = connection.execute(by_state.group_by(batches.c.state)).all()
        waits = select(_ROW.id).where(_ROW.batch == batches.c.id, IS_WAITING).limit(1).exists()
        oldest = select(func.min(batches.c.created_at)).where(
            batches.c.folder == self.folder, batches.c.ended_at.is_(None), waits
        )
        counts = {state: number for state, number in states}  # noqa: C416 - rows are no tuples
        return Waiting(groups, counts, connection.scalar(oldest))


@dataclass(frozen=True, slots=True)
class ReadPrefixes:
    """A job of the store: groups of waiting lines of a batch whose prompts begin alike.

    Lines whose beginning no other has are left out; those of short prompts are one group.
    """

    batch: str
    now: float
    most: int = MOST_GROUPS

    def __call__(self, connection: Connection) -> tuple[PrefixGroup, ...]:
        """Run within the transaction of `connection`."""
        longest = func.max(_ROW.max_tokens)
        asked = (
            select(_ROW.prefix, func.count(), longest, func.sum(_ROW.max_tokens))
            .where(_ROW.batch == self.batch, IS_WAITING, _ROW.not_before <= self.now)
            .group_by(_ROW.prefix)
            .having(or_(func.count() > 1, _ROW.prefix == 0))
            .order_by(longest.desc(), _ROW.prefix)
            .limit(self.most)
        )
        return tuple(
            PrefixGroup(prefix, rows, int(most or 0), int(tokens or 0))
            for prefix, rows, most, tokens in connection.execute(asked)
        )
