"""Which rows have room for a request, and the policies that choose one of them.

`LeastFinish` is the gateway's own policy; the others exist for comparison.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.request import Priority
from gateway.scheduling.comparison import MOST_COMPARED_ROWS, Comparison, RowFigures
from gateway.scheduling.cost import LOOP_ROWS, CostColumns, row_cost, row_costs, row_figures
from gateway.scheduling.node_slots import (
    LEAST_UNCACHED_TOKENS,
    AvailableRows,
    CandidateSet,
    NodeSlots,
    QueuedRequest,
    Requirements,
)
from gateway.scheduling.placement_state import PlacementState


class SelectionPolicy(Protocol):
    """Chooses one of the rows that have room for a request."""

    @property
    def by_cost(self) -> bool:
        """Whether it goes by the expected cost (`cost.py`).

        Then waiting requests are compared with each other for a free slot, and one that arrives
        may be deferred to a busy node that has its prompt cached.
        """

    def choose(
        self, available: AvailableRows, queued: QueuedRequest, now: float, rng: random.Random
    ) -> NodeSlots:
        """One of the rows."""

    def best_rows(
        self, available: AvailableRows, queued: QueuedRequest, now: float, most: int
    ) -> Sequence[NodeSlots]:
        """Up to `most` of the rows, the best by what the policy compares, in no order."""


class LeastFinish:
    """Where the request and the requests that it holds up end first; ties at random."""

    by_cost = True

    def __init__(self, placement_state: PlacementState) -> None:
        self._columns = CostColumns(placement_state)
        self._last: tuple[QueuedRequest, float, list[float]] | None = None
        """The costs of the rows that were compared last, for `best_rows`: whose and when."""

    def choose(
        self, available: AvailableRows, queued: QueuedRequest, now: float, rng: random.Random
    ) -> NodeSlots:
        """The row of the least expected cost."""
        rows = available.rows
        if len(rows) >= LOOP_ROWS and available.unfiltered:
            row = self._columns.least_finish(available.candidate_set, queued, now, rng)
            assert row is not None
            return row
        costs = row_costs(rows, queued, now)
        self._last = queued, now, costs
        least = min(costs)
        if costs.count(least) == 1:
            return rows[costs.index(least)]
        ties = [row for row, cost in zip(rows, costs, strict=True) if cost == least]
        return ties[int(rng.random() * len(ties))]

    def best_rows(
        self, available: AvailableRows, queued: QueuedRequest, now: float, most: int
    ) -> Sequence[NodeSlots]:
        """Those of the least cost."""
        rows, last = available.rows, self._last
        if len(rows) >= LOOP_ROWS and available.unfiltered:
            return self._columns.least_costs(available.candidate_set, queued, now, most)
        if last is not None and last[0] is queued and last[1] == now and len(last[2]) == len(rows):
            costs = last[2]
        else:
            costs = row_costs(rows, queued, now)
        # Of so few rows sorting all is faster than looking for the least.
        best = sorted(range(len(rows)), key=costs.__getitem__)
        return [rows[index] for index in best[:most]]


class LeastLoaded:
    """The least share of slots in use, the new request's included; ties at random."""

    by_cost = False

    def choose(
        self, available: AvailableRows, queued: QueuedRequest, _now: float, rng: random.Random
    ) -> NodeSlots:
        """The row that is least loaded."""
        best = available.rows[0]
        least = _load(best, queued)
        ties = 1
        for row in available.rows[1:]:
            load = _load(row, queued)
            if load < least:
                best, least, ties = row, load, 1
            elif load == least:
                ties += 1
                if rng.random() * ties < 1.0:
                    best = row
        return best

    def best_rows(
        self, available: AvailableRows, queued: QueuedRequest, _now: float, most: int
    ) -> Sequence[NodeSlots]:
        """Those that are least loaded."""
        return heapq.nsmallest(most, available.rows, lambda row: _load(row, queued))


def _load(row: NodeSlots, queued: QueuedRequest) -> float:
    return (row.busy + queued.slots) / max(1, row.total)


class RoundRobin:
    """The row that was used the longest ago."""

    by_cost = False

    def choose(
        self, available: AvailableRows, _queued: QueuedRequest, _now: float, _rng: random.Random
    ) -> NodeSlots:
        """The next row in turn."""
        return min(available.rows, key=lambda row: (row.last_placement, row.index))

    def best_rows(
        self, available: AvailableRows, _queued: QueuedRequest, _now: float, most: int
    ) -> Sequence[NodeSlots]:
        """The next rows in turn."""
        rows = available.rows
        return heapq.nsmallest(most, rows, lambda row: (row.last_placement, row.index))


class PrefixHash:
    """The highest row by rendezvous hashing of the prompt's shared beginning.

    A full node leaves the request to the next in the same order, as consistent hashing with
    bounded loads does (Mirrokni et al. 2018).
    """

    by_cost = False

    def choose(
        self, available: AvailableRows, queued: QueuedRequest, _now: float, _rng: random.Random
    ) -> NodeSlots:
        """The row that the prompt's beginning belongs to, of those with room."""
        return max(available.rows, key=lambda row: _rendezvous(row, queued))

    def best_rows(
        self, available: AvailableRows, queued: QueuedRequest, _now: float, most: int
    ) -> Sequence[NodeSlots]:
        """The first rows in the order of the prompt's beginning."""
        return heapq.nlargest(most, available.rows, lambda row: _rendezvous(row, queued))


def _rendezvous(row: NodeSlots, queued: QueuedRequest) -> int:
    return _mix64(queued.affinity_hash ^ row.name_hash * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)


def _mix64(value: int) -> int:
    # splitmix64's finaliser: every bit of the input moves every bit of the output.
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


POLICIES: Final[dict[str, Callable[[PlacementState], SelectionPolicy]]] = {
    "least_finish": LeastFinish,
    "least_loaded": lambda _: LeastLoaded(),
    "round_robin": lambda _: RoundRobin(),
    "prefix_hash": lambda _: PrefixHash(),
}
"""Makes the policy of each name, for one placement state."""


def compare(
    available: AvailableRows,
    queued: QueuedRequest,
    chosen: NodeSlots,
    policy: SelectionPolicy,
    now: float,
) -> Comparison:
    """What a request is compared with that is about to be placed on `chosen`."""
    rows = available.rows
    count = len(rows)
    others: tuple[RowFigures, ...] = ()
    if count > 1:
        best: Sequence[NodeSlots] = rows
        if count > MOST_COMPARED_ROWS:
            best = policy.best_rows(available, queued, now, MOST_COMPARED_ROWS)
        found = [row_figures(row, queued, now) for row in best if row is not chosen]
        others = tuple(found[: MOST_COMPARED_ROWS - 1])
    return Comparison(
        row_figures(chosen, queued, now),
        others,
        count,
        len(available.candidate_set.rows),
        policy.by_cost,
    )


MOST_FREELY_EXPLORED = 8
"""Rows whose speed is known up to which each request may explore another; of more rows, one in so
many: the more are known, the less likely is it that the next one is the fastest."""

LONG_PROMPT_TOKENS = 2048
"""Each such number of tokens to be read counts as one more request when an unknown row is explored:
on a slow node they take minutes."""


def explore(
    state: PlacementState,
    available: AvailableRows,
    queued: QueuedRequest,
    chosen: NodeSlots,
    now: float,
    rng: random.Random,
) -> NodeSlots:
    """The row that gets the request in order to learn how fast it is; else `chosen`.

    The row that has the prompt cached would win against any other for ever. So a row that has shown
    nothing yet is compared as if it had as much of the prompt cached, and by the speeds alone,
    without what runs on `chosen`. The difference in cost becomes a bonus of the request. Rows are
    explored while most are idle, since more load teaches their speeds by itself: those that are
    idle, awake and well, and less for `premium`, `urgent` and clients that hurry. A session that a
    header names stays on its row.
    """
    known = state.node_count - len(state.exploring)
    if (
        queued.failed
        or not queued.slots
        or queued.penalties.get(chosen.index, 0.0) < 0.0
        or rng.random() * (known + 1) >= MOST_FREELY_EXPLORED
    ):
        return chosen
    rows = available.rows
    if len(rows) > LOOP_ROWS:
        rows = rng.sample(rows, LOOP_ROWS)
    idle = len([row for row in rows if not row.busy]) / len(rows) * len(available.rows)
    if 2 * idle <= len(available.candidate_set.rows):
        return chosen
    careful = (queued.priority < Priority.NORMAL) + (queued.deadline is not None)
    warm = queued.cached.get(chosen.index, 0.0)
    best, least = chosen, _seconds_alone(chosen, queued, warm)
    for row in rows:
        if row.exploring <= careful or row.busy or row.penalty > 0.0:
            continue
        cached = queued.cached.get(row.index, 0.0)
        if row.hope < 1.0 and not row.samples:
            long = (queued.prompt_tokens - cached) // LONG_PROMPT_TOKENS
            if row.exploring <= careful + long:
                continue
        hoped = row.hope * _seconds_alone(row, queued, cached if row.samples else max(cached, warm))
        if hoped < least:
            best, least = row, hoped
    if best is not chosen:
        bonus = row_cost(chosen, queued, now) - row_cost(best, queued, now)
        own = queued.penalties.get(best.index, 0.0)
        queued.set_penalties({**queued.penalties, best.index: own + bonus})
    return best


def _seconds_alone(row: NodeSlots, queued: QueuedRequest, cached: float) -> float:
    """Seconds of a request on an idle row that has so many of its tokens cached."""
    uncached = max(LEAST_UNCACHED_TOKENS, queued.prompt_tokens - cached)
    return uncached / row.prefill_tps + queued.completion_tokens * row.token_base


def available_rows(
    placement_state: PlacementState,
    queued: QueuedRequest,
    *,
    any_pool: bool = False,
) -> AvailableRows | None:
    """The rows that have room for a request now; None: no row has.

    A tier is passed over when it is full, a group only when none of its rows is alive and not
    paused.
    `any_pool`: the slots suffice, whether a shared pool has room for the request's tokens or not.
    """
    by_tokens = placement_state.pools > 0 and queued.slots > 0 and not any_pool
    if queued.slots == 1 and not (
        queued.excluded
        or queued.failed
        or placement_state.reserved_rows
        or placement_state.batch_reserve
    ):
        # Nearly always: the rows found for one request hold until a row fills or frees a slot.
        candidates = queued.groups[0][0]
        version = placement_state.free_rows_version
        if candidates.available_version != version:
            candidates.set_available(_rows_with_room(placement_state, candidates, queued), version)
        found = candidates.available
        if found is not None and by_tokens:
            found = _with_tokens(found, queued)
        if found is not None:
            return found
    keeps_reserve = placement_state.batch_reserve > 0.0 and queued.keeps_batch_reserve
    if keeps_reserve:
        placement_state.spread_batch_reserve()
    avoided: Collection[int] = queued.failed if queued.failed and _another_is_alive(queued) else ()
    for group, tiers in enumerate(queued.groups):
        for candidates in tiers:
            rows = _rows_with_room(placement_state, candidates, queued)
            count = len(rows)
            if rows and (queued.excluded or avoided):
                rows = [
                    r for r in rows if r.index not in queued.excluded and r.index not in avoided
                ]
            if rows and placement_state.reserved_rows and queued.slots:
                rows = [r for r in rows if _is_open_to(r, queued)]
            if rows:
                unfiltered = len(rows) == count and queued.slots > 0
                found = AvailableRows(rows, candidates, group, unfiltered)
                if not by_tokens or (found := _with_tokens(found, queued)) is not None:
                    return found
        if any(
            row.alive
            and not row.paused
            and row.index not in queued.excluded
            and row.index not in avoided
            for candidates in tiers
            for row in candidates.rows
        ):
            break
    return _idle_kept_rows(queued, avoided) if keeps_reserve and queued.slots else None


def _idle_kept_rows(queued: QueuedRequest, avoided: Collection[int]) -> AvailableRows | None:
    """Idle rows that are kept from `batch`, for a request that can go nowhere else.

    For example a prompt for which only their context is long enough: it must not wait for ever.
    """
    for group, tiers in enumerate(queued.groups):
        by_tier = [[row for row in one.rows if _may_take(row, queued, avoided)] for one in tiers]
        for candidates, rows in zip(tiers, by_tier, strict=True):
            if any(not row.kept_from_batch for row in rows):
                return None
            idle = [
                row
                for row in rows
                if not row.busy and row.free >= queued.slots and _is_open_to(row, queued)
            ]
            if idle:
                return AvailableRows(idle, candidates, group, unfiltered=False)
        if any(by_tier):
            break
    return None


def _may_take(row: NodeSlots, queued: QueuedRequest, avoided: Collection[int]) -> bool:
    """Whether a row could take the request at some time."""
    return (
        row.alive
        and row.total >= queued.slots
        and row.index not in queued.excluded
        and row.index not in avoided
    )


def _rows_with_room(
    state: PlacementState, candidates: CandidateSet, queued: QueuedRequest
) -> list[NodeSlots]:
    slots = queued.slots
    if not slots:
        caller = queued.slotless_caller
        return [r for r in candidates.rows if r.capacity and state.has_slotless_room(r, caller)]
    if len(state.free_rows) < len(candidates.rows):
        members = candidates.row_indexes
        if slots == 1 and len(members) == state.node_count:
            rows = list(state.free_rows.values())  # A copy costs a fiftieth of testing each row.
        else:
            rows = [
                row
                for index, row in state.free_rows.items()
                if index in members and row.free >= slots
            ]
    else:
        rows = [row for row in candidates.rows if row.free >= slots]
    if state.batch_reserve and queued.keeps_batch_reserve:
        # An idle node with a part of the reserve takes a batch request of any width: it could have
        # no place otherwise.
        rows = [
            row
            for row in rows
            if row.free - slots >= row.batch_reserve or not (row.busy or row.kept_from_batch)
        ]
    return rows


def _with_tokens(found: AvailableRows, queued: QueuedRequest) -> AvailableRows | None:
    """Those of the rows whose slots share no pool, or one that has room; None: there are none."""
    needed = queued.tokens_needed
    rows = [row for row in found.rows if row.pool_room >= needed]
    if len(rows) == len(found.rows):
        return found
    return AvailableRows(rows, found.candidate_set, found.group, False) if rows else None


def _another_is_alive(queued: QueuedRequest) -> bool:
    return any(
        row.alive and row.index not in queued.failed and row.index not in queued.excluded
        for tiers in queued.groups
        for candidates in tiers
        for row in candidates.rows
    )


def _is_open_to(row: NodeSlots, queued: QueuedRequest) -> bool:
    wide = row.reserved_for
    return (
        wide is None
        or wide is queued
        or (wide.priority > queued.priority and not row.reserved_from_all)
    )


@dataclass(slots=True)
class AvailabilityCache:
    """`available_rows` for waiting requests, found once for each kind of requirements."""

    placement_state: PlacementState
    _found: dict[Requirements, AvailableRows | None] = field(default_factory=dict)
    """By slots alone."""
    _least_refused: dict[Requirements, float] = field(default_factory=dict)
    """The fewest tokens for which no shared pool had room: none has room for more."""

    def rows_for(self, queued: QueuedRequest) -> AvailableRows | None:
        """The rows with room for a waiting request; None: no row has."""
        state, requirements = self.placement_state, queued.requirements
        if queued.excluded or queued.failed or not queued.slots:
            return available_rows(state, queued)
        if requirements not in self._found:
            self._found[requirements] = available_rows(state, queued, any_pool=True)
        rows = self._found[requirements]
        if rows is None or not state.pools:
            return rows
        needed, refused = queued.tokens_needed, self._least_refused.get(requirements, math.inf)
        if needed >= refused and not (
            queued.was_reserved_for
            and any(row.reserved_for is queued for row in state.reserved_rows)
        ):
            return None
        rows = available_rows(state, queued)
        if rows is None:
            self._least_refused[requirements] = min(needed, refused)
        return rows

    def lacks_tokens(self, queued: QueuedRequest) -> bool:
        """Whether a request without room would have it if it needed fewer tokens of a pool."""
        return self._found.get(queued.requirements) is not None

    def clear(self) -> None:
        """Forget all: rows have been reserved since."""
        self._found.clear()
        self._least_refused.clear()
