"""Which rows have room for a request now: the first of its pools that has any."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.scheduling.ask import Ask, Shape
    from gateway.scheduling.board import Board, Pool, Row


@dataclass(slots=True)
class Room:
    """Rows with room for a request."""

    rows: list[Row]
    """At least one."""
    pool: Pool
    group: int
    """The group of the request that the pool is from."""
    whole: bool = True
    """Whether these are all rows of the pool that have the slots."""


def room_for(board: Board, ask: Ask) -> Room | None:
    """The rows that can take `ask` now, or None.

    A tier is passed over when it has no room, a group only when none of its rows is alive.
    """
    if ask.slots == 1 and not (ask.closed or ask.failed or board.kept or board.reserve):
        # Nearly always: what is found for one holds for the next, until a row opens or closes.
        pool = ask.groups[0][0]
        if pool.opened != board.opened:
            rows = _with_room(board, pool, ask)
            pool.room, pool.opened = Room(rows, pool, 0) if rows else None, board.opened
        if pool.room is not None:
            usual: Room = pool.room
            return usual
    avoided: Collection[int] = ask.failed if ask.failed and _another_lives(ask) else ()
    for group, tiers in enumerate(ask.groups):
        for pool in tiers:
            rows = _with_room(board, pool, ask)
            count = len(rows)
            if rows and (ask.closed or avoided):
                rows = [r for r in rows if r.index not in ask.closed and r.index not in avoided]
            if rows and board.kept and ask.slots:
                rows = [r for r in rows if _may_use(r, ask)]
            if rows:
                return Room(rows, pool, group, whole=len(rows) == count and ask.slots > 0)
        if any(
            row.alive and row.index not in ask.closed and row.index not in avoided
            for pool in tiers
            for row in pool.rows
        ):
            break
    return None


def _with_room(board: Board, pool: Pool, ask: Ask) -> list[Row]:
    slots = ask.slots
    if not slots:
        owner = ask.owner
        return [row for row in pool.rows if row.capacity and board.has_slotless_room(row, owner)]
    if len(board.open) < len(pool.rows):
        members = pool.members
        if slots == 1 and len(members) == board.count:
            rows = list(board.open.values())  # A copy is a fiftieth of looking at each.
        else:
            rows = [
                row for index, row in board.open.items() if index in members and row.free >= slots
            ]
    else:
        rows = [row for row in pool.rows if row.free >= slots]
    if board.reserve and ask.spares:
        # A node that is idle is no use to anybody: there even a wide one fits, or one beside a
        # reserve of all slots.
        rows = [row for row in rows if row.free - slots >= row.spare or not row.busy]
    return rows


def _another_lives(ask: Ask) -> bool:
    return any(
        row.alive and row.index not in ask.failed and row.index not in ask.closed
        for tiers in ask.groups
        for pool in tiers
        for row in pool.rows
    )


def _may_use(row: Row, ask: Ask) -> bool:
    kept = row.kept
    return kept is None or kept is ask or (kept.priority > ask.priority and not row.strictly)


@dataclass(slots=True)
class Rooms:
    """The rooms of one look at what waits, found once for each shape."""

    board: Board
    _found: dict[Shape, Room | None] = field(default_factory=dict)

    def of(self, ask: Ask) -> Room | None:
        """The room for `ask`, which waits."""
        if ask.closed or ask.failed or not ask.slots:
            return room_for(self.board, ask)
        if ask.shape in self._found:
            return self._found[ask.shape]
        room = self._found[ask.shape] = room_for(self.board, ask)
        return room

    def forget(self) -> None:
        """Rows have been closed since."""
        self._found.clear()
