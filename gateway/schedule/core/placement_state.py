"""The placement state: a table of all nodes, a row for each, with what runs on them.

It alone changes rows (`requests.py`), so that the sets and counters that it keeps about all of them
never fall behind.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from gateway.config.scheduling import DEFAULT_SLOTLESS
from gateway.schedule.core.requests import CandidateSet, NodeSlots, QueuedRequest, clamp

ROUNDING = 1e-9  # by so much a product may fall short of a whole number, as 0.29 of 100 does


def spread_reserve(share: float, totals: Sequence[int]) -> list[int]:
    """Slots that `batch` leaves free on each of several alike nodes with so many slots.

    Together they are that share of all slots, rounded down: the first nodes that fit into it whole,
    and what is left by turns on the others, the largest first. At least one node stays open to
    `batch` with one slot, whatever the share.
    """
    reserve = [0] * len(totals)
    left = int(share * sum(totals) + ROUNDING)
    open_nodes = sum(total > 0 for total in totals)
    for number, total in enumerate(totals):
        if 0 < total <= left and open_nodes > 1:
            reserve[number] = total
            left -= total
            open_nodes -= 1
    others = [number for number, total in enumerate(totals) if total - reserve[number] > 1]
    while left > 0 and others:
        others.sort(key=lambda number: reserve[number] - totals[number])
        for number in others[:left]:
            reserve[number] += 1
            left -= 1
        others = [number for number in others if totals[number] - reserve[number] > 1]
    return reserve


@dataclass(slots=True, eq=False)
class PlacementState:
    """All rows, and what is kept about all of them together."""

    batch_reserve: float = 0.0  # share of the slots of alike nodes that `batch` leaves free
    slotless_limit: int = DEFAULT_SLOTLESS  # requests without a slot that one node runs at once
    rows: list[NodeSlots] = field(default_factory=list)
    """By index; a removed row stays until its index is used again."""
    by_name: dict[str, NodeSlots] = field(default_factory=dict)
    free_rows: dict[int, NodeSlots] = field(default_factory=dict)
    free_rows_version: int = 0  # changes whenever a row enters or leaves `free_rows`
    placement_count: int = 0
    speed_changes: int = 0  # rows that became twice as fast, or half, since `clear_speed_changes`
    slots_freed: bool = False
    exploring: set[int] = field(default_factory=set)
    """Indexes of rows that may get requests in order to learn their speed."""
    reserved_rows: list[NodeSlots] = field(default_factory=list)
    """Rows whose free slots are reserved for a wide request."""
    last_release: float = 0.0  # when a placement last ended, anywhere
    pools: int = 0  # rows whose slots share one pool of tokens
    pools_version: int = 0  # changes with the size of any row's pool
    slots_version: int = 0
    _reserve_is_stale: bool = False
    """Whether rows or slots have changed since `spread_batch_reserve`."""
    _changed: set[int] = field(default_factory=set)
    """Indexes of rows that have changed since `take_changed_rows`."""
    _unused: list[int] = field(default_factory=list)
    _candidate_sets: WeakSet[CandidateSet] = field(default_factory=WeakSet)

    # Rows and candidate sets.

    def add(self, name: str, *, total: float = 1, gpu: bool = False) -> NodeSlots:
        """A row for a new node, which takes work on all its slots."""
        index = self._unused.pop() if self._unused else len(self.rows)
        row = self.by_name[name] = NodeSlots(index, name, zlib.crc32(name.encode()))
        self.rows[index : index + 1] = [row]
        self.set_tier(row, gpu=gpu)
        self.set_slots(row, total, total, 0)
        return row

    def remove(self, row: NodeSlots) -> None:
        """Take a row out of every candidate set. What runs there may still end."""
        if self.by_name.get(row.name) is not row:
            return
        del self.by_name[row.name]
        self.set_slots(row, 0, 0, 0)
        self.exploring.discard(row.index)
        self.set_pool(row, 0, 0)
        for candidates in list(self._candidate_sets):
            if row.index in candidates.row_indexes:
                candidates.replace_rows(other for other in candidates.rows if other is not row)
        self._unused.append(row.index)

    def candidate_set(self, rows: Iterable[NodeSlots] = ()) -> CandidateSet:
        """A new candidate set, which loses its rows as they are removed."""
        candidates = CandidateSet(tuple(rows))
        self._candidate_sets.add(candidates)
        return candidates

    @property
    def node_count(self) -> int:
        """How many nodes there are."""
        return len(self.by_name)

    def take_changed_rows(self) -> list[NodeSlots]:
        """The rows that have changed since the last call."""
        rows = self.rows
        changed = [rows[index] for index in self._changed]
        self._changed.clear()
        return changed

    # Slots and speeds of the nodes.

    def set_tier(self, row: NodeSlots, *, gpu: bool) -> None:
        """Whether the node is of tier `gpu`."""
        row.set_tier(gpu=gpu)
        self._reserve_is_stale = True

    def set_reserve_group(self, row: NodeSlots, group: object) -> None:
        """Rows of equal groups, in the same tier, share their reserve."""
        if row.reserve_group != group:
            row.set_reserve_group(group)
            self._reserve_is_stale = True

    def set_slots(
        self,
        row: NodeSlots,
        total: float,
        capacity: float,
        foreign: float,
        *,
        alive: bool | None = None,
        paused: bool = False,
    ) -> None:
        """`total` slots, of which requests may use `capacity` now; others' work fills `foreign`.

        `alive`: worth waiting for, though it may take nothing now; None: if it takes work.
        `paused`: it wants nothing for a while.
        """
        old_total, was_alive, before = row.total, row.alive, row.free
        row.set_slots(total, capacity, foreign, alive=alive, paused=paused)
        self.slots_version += 1
        if row.total != old_total or row.alive is not was_alive:
            self._reserve_is_stale = True
        row.recompute()
        self._note_free(row, before)

    def set_pool(self, row: NodeSlots, tokens: int, foreign: int) -> None:
        """The slots of `row` share so many tokens, of which others use `foreign`; 0: none."""
        self.pools += bool(tokens) - bool(row.pool)
        self.pools_version += tokens != row.pool
        row.set_pool(tokens, foreign)
        self.slots_freed = True

    def set_speed(
        self, row: NodeSlots, prefill_tps: float, token_base: float, token_step: float
    ) -> None:
        """Prompt tokens/s, seconds per output token alone, seconds more for each neighbour."""
        self.speed_changes += row.set_speed(prefill_tps, token_base, token_step)
        self._changed.add(row.index)

    def set_learnt(self, row: NodeSlots, samples: int, hope: float, *, measured: bool) -> None:
        """How many responses have shown the speeds of `row`, up to `EXPLORING_REQUESTS`.

        With fewer it may be explored, by its `hope`; with fewer than before, from the beginning.
        `measured`: whether its speeds were measured, or are guesses.
        """
        row.set_learnt(samples, hope, measured=measured)
        (self.exploring.add if row.exploring else self.exploring.discard)(row.index)

    def clear_speed_changes(self) -> None:
        """Count `speed_changes` from 0 again."""
        self.speed_changes = 0

    def set_penalty(self, row: NodeSlots, seconds: float, *, wake: float = 0.0) -> None:
        """Seconds by which a node is made to look slower; negative: faster.

        `wake`: those of them in which it wakes up.
        """
        row.set_penalty(seconds, wake)
        self._changed.add(row.index)

    def set_limits(self, batch_reserve: float, slotless_limit: int) -> None:
        """Set `batch_reserve` (0..1) and `slotless_limit`."""
        self.slotless_limit = slotless_limit
        self.batch_reserve = clamp(batch_reserve, 0.0, 1.0, 0.0)
        self._reserve_is_stale = True
        self.spread_batch_reserve()

    def spread_batch_reserve(self) -> None:
        """Bring the reserve of each row up to date; before `batch` is given a slot.

        Not with each change, since that would look at all rows for each of them. Rows that are not
        alive have none: then others keep the reserve.
        """
        if not self._reserve_is_stale:
            return
        self._reserve_is_stale = False
        self.slots_version += 1
        groups: dict[tuple[bool, object], list[NodeSlots]] = {}
        for row in self.rows:
            if row.alive and self.batch_reserve:
                groups.setdefault((row.gpu, row.reserve_group), []).append(row)
            else:
                self._set_batch_reserve(row, 0)
        for rows in groups.values():
            reserve = spread_reserve(self.batch_reserve, [row.total for row in rows])
            for row, slots in zip(rows, reserve, strict=True):
                self._set_batch_reserve(row, slots)

    def _set_batch_reserve(self, row: NodeSlots, slots: int) -> None:
        row.set_batch_reserve(slots)
        self._changed.add(row.index)

    # Requests on them.

    def start(self, queued: QueuedRequest, row: NodeSlots, now: float) -> None:
        """Start a request on this row."""
        self.placement_count = number = self.placement_count + 1
        before, exploring = row.free, row.exploring
        row.start(queued, now, number)
        if exploring and not row.exploring:
            self.exploring.discard(row.index)
        self._note_free(row, before)

    def prefill_done(self, placement: QueuedRequest, now: float) -> None:
        """The prompt of `placement` has been read; after its end that is no news."""
        if placement.released:
            return
        row = placement.row
        row.prefill_done(placement, now)
        self._changed.add(row.index)

    def end(self, placement: QueuedRequest, now: float) -> None:
        """`placement` has ended: its slots are free. Calling it again does nothing."""
        if placement.released:
            return
        row = placement.row
        before = row.free
        row.end(placement, now)
        if not placement.slots:
            self.slots_freed = True
        self.last_release = now
        self._note_free(row, before)

    def set_slots_freed(self, *, freed: bool) -> None:
        """Whether free slots are left that the waiting requests have not been offered."""
        self.slots_freed = freed

    def has_slotless_room(self, row: NodeSlots, caller: str) -> bool:
        """Whether `row` may run one more of this caller's requests without a slot.

        One caller gets half of the places at most, so that the next one finds room.
        """
        most = self.slotless_limit
        return (
            row.slotless_running < most and row.slotless_by_caller.get(caller, 0) < (most + 1) // 2
        )

    def reserve(self, row: NodeSlots, queued: QueuedRequest, *, from_all_classes: bool) -> None:
        """Reserve the row's free slots for a wide request."""
        row.reserve(queued, from_all_classes=from_all_classes)
        self.reserved_rows.append(row)

    def unreserve(self, row: NodeSlots) -> None:
        """End the reservation of `row`."""
        row.reserve(None)
        self.reserved_rows.remove(row)

    def _note_free(self, row: NodeSlots, before: int) -> None:
        """The row has changed, and had so many free slots before."""
        free = row.free
        if free > before:
            self.slots_freed = True
            if not before:
                self.free_rows[row.index] = row
                self.free_rows_version += 1
        elif before and not free:
            self.free_rows_version += 1
            self.free_rows.pop(row.index, None)
        self._changed.add(row.index)
