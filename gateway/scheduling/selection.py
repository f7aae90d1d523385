"""How one of several rows with room is chosen: pure functions, selectable by name.

`least_finish` is the gateway's own; the others are there to compare with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.scheduling.cost import row_costs
from gateway.scheduling.placement_state import (
    CandidateSet,
    NodeSlots,
    PlacementState,
    QueuedRequest,
    Requirements,
)

SelectionPolicy = Callable[
    [Sequence[NodeSlots], QueuedRequest, float, random.Random], NodeSlots | None
]
"""`(rows with room, ask, now, rng)`: one of the rows, or None where there is none."""


def least_finish(
    rows: Sequence[NodeSlots], queued: QueuedRequest, now: float, rng: random.Random
) -> NodeSlots | None:
    """Where the request, and what it holds up, is expected to end first; ties at random."""
    if not rows:
        return None
    costs = row_costs(rows, queued, now)
    least = min(costs)
    if costs.count(least) == 1:
        return rows[costs.index(least)]
    ties = [row for row, cost in zip(rows, costs, strict=True) if cost == least]
    return ties[int(rng.random() * len(ties))]


def least_loaded(
    rows: Sequence[NodeSlots], queued: QueuedRequest, _now: float, rng: random.Random
) -> NodeSlots | None:
    """Slots in use, the newcomer's included, against slots owned; ties at random."""
    best: NodeSlots | None = None
    least = 0.0
    ties = 1
    for row in rows:
        load = (row.busy + queued.slots) / max(1, row.total)
        if best is None or load < least:
            best, least, ties = row, load, 1
        elif load == least:
            ties += 1
            if rng.random() * ties < 1.0:
                best = row
    return best


def round_robin(
    rows: Sequence[NodeSlots], _ask: QueuedRequest, _now: float, _rng: random.Random
) -> NodeSlots | None:
    """The one that was used the longest ago."""
    return min(rows, key=lambda row: (row.last_placement, row.index), default=None)


def prefix_hash(
    rows: Sequence[NodeSlots], queued: QueuedRequest, _now: float, _rng: random.Random
) -> NodeSlots | None:
    """The highest by rendezvous hashing of what the request shares with its like.

    A full node passes it on to the next of the same order, as consistent hashing with bounded
    loads does (Mirrokni et al. 2018).
    """
    return max(
        rows,
        key=lambda row: _mix64(
            queued.affinity_hash ^ row.name_hash * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        ),
        default=None,
    )


def _mix64(value: int) -> int:
    # splitmix64's finaliser: every bit of the input moves every bit of the output.
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


POLICIES: Final[dict[str, SelectionPolicy]] = {
    "least_finish": least_finish,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "prefix_hash": prefix_hash,
}


@dataclass(slots=True)
class AvailableRows:
    """Rows with room for a request."""

    rows: list[NodeSlots]
    """At least one."""
    candidate_set: CandidateSet
    group: int
    """The group of the request that the pool is from."""
    unfiltered: bool = True
    """Whether these are all rows of the pool that have the slots."""


def available_rows(placement_state: PlacementState, queued: QueuedRequest) -> AvailableRows | None:
    """The rows that can take `ask` now, or None.

    A tier is passed over when it has no room, a group only when none of its rows is alive.
    """
    if queued.slots == 1 and not (
        queued.excluded
        or queued.failed
        or placement_state.reserved_rows
        or placement_state.batch_reserve
    ):
        # Nearly always: what is found for one holds for the next, until a row opens or closes.
        pool = queued.groups[0][0]
        if pool.available_version != placement_state.free_rows_version:
            rows = _with_room(placement_state, pool, queued)
            pool.available, pool.available_version = (
                AvailableRows(rows, pool, 0) if rows else None,
                placement_state.free_rows_version,
            )
        if pool.available is not None:
            usual: AvailableRows = pool.available
            return usual
    avoided: Collection[int] = queued.failed if queued.failed and _another_lives(queued) else ()
    for group, tiers in enumerate(queued.groups):
        for pool in tiers:
            rows = _with_room(placement_state, pool, queued)
            count = len(rows)
            if rows and (queued.excluded or avoided):
                rows = [
                    r for r in rows if r.index not in queued.excluded and r.index not in avoided
                ]
            if rows and placement_state.reserved_rows and queued.slots:
                rows = [r for r in rows if _may_use(r, queued)]
            if rows:
                return AvailableRows(
                    rows, pool, group, unfiltered=len(rows) == count and queued.slots > 0
                )
        if any(
            row.alive and row.index not in queued.excluded and row.index not in avoided
            for pool in tiers
            for row in pool.rows
        ):
            break
    return None


def _with_room(board: PlacementState, pool: CandidateSet, ask: QueuedRequest) -> list[NodeSlots]:
    slots = ask.slots
    if not slots:
        owner = ask.slotless_caller
        return [row for row in pool.rows if row.capacity and board.has_slotless_room(row, owner)]
    if len(board.free_rows) < len(pool.rows):
        members = pool.row_indexes
        if slots == 1 and len(members) == board.node_count:
            rows = list(board.free_rows.values())  # A copy is a fiftieth of looking at each.
        else:
            rows = [
                row
                for index, row in board.free_rows.items()
                if index in members and row.free >= slots
            ]
    else:
        rows = [row for row in pool.rows if row.free >= slots]
    if board.batch_reserve and ask.keeps_batch_reserve:
        # A node that is idle is no use to anybody: there even a wide one fits, or one beside a
        # reserve of all slots.
        rows = [row for row in rows if row.free - slots >= row.batch_reserve or not row.busy]
    return rows


def _another_lives(ask: QueuedRequest) -> bool:
    return any(
        row.alive and row.index not in ask.failed and row.index not in ask.excluded
        for tiers in ask.groups
        for pool in tiers
        for row in pool.rows
    )


def _may_use(row: NodeSlots, ask: QueuedRequest) -> bool:
    kept = row.reserved_for
    return (
        kept is None or kept is ask or (kept.priority > ask.priority and not row.reserved_from_all)
    )


@dataclass(slots=True)
class AvailabilityCache:
    """The rooms of one look at what waits, found once for each shape."""

    placement_state: PlacementState
    _found: dict[Requirements, AvailableRows | None] = field(default_factory=dict)

    def rows_for(self, queued: QueuedRequest) -> AvailableRows | None:
        """The room for `ask`, which waits."""
        if queued.excluded or queued.failed or not queued.slots:
            return available_rows(self.placement_state, queued)
        if queued.requirements in self._found:
            return self._found[queued.requirements]
        room = self._found[queued.requirements] = available_rows(self.placement_state, queued)
        return room

    def clear(self) -> None:
        """Rows have been closed since."""
        self._found.clear()
