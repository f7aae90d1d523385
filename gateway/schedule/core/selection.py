"""Which rows have room for a request, what each would cost, and the policies that choose one.

`LeastFinish` is the gateway's own policy: it goes by the expected finish, the cost of placing a
request on one node, in seconds.

    T = W + R + u/p + c·(b + s·k)  +  (u/p)·k + d·Σr  +  D

- W  seconds until a slot is free there; 0 where one is
- R  seconds until the prompts queued there have been read: a server reads one after the other
- u  prompt tokens that its cache does not hold; p: prompt tokens that it reads per second
- c  output tokens; b: seconds of one alone; s: seconds more for each neighbour (decoding waits for
     memory, so a batch shares the reading of the weights)
- k  neighbours that run there; (u/p)·k is how long the new prefill holds them up: a server that
     reads a prompt decodes nothing
- Σr seconds that the neighbours still have to run; d = s / (b + s·(k-1)): the share by which one
     more sequence slows them down; 0 where none decodes
- D  penalty in seconds: of a node that failed lately, and of one that sleeps, which wakes up
     first; negative for one that needs a request on trial, and for the one that served the
     request's session last

The first four terms are the request's own time, the next two what it costs its neighbours: with the
least T all of them together lose least.

Sources: llama.cpp's server as measured (a decoding slot stood still for 14 s while its neighbour
read 3,000 tokens; 1,400 tokens took 10.3 s cold and 0.06 s from the cache). The marginal cost of a
placement, instead of its own time alone: Harchol-Balter, "Performance Modeling and Design of
Computer Systems", 2013, on least work left and size-based assignment. Uncached prefill against
load: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", 2024.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final
from weakref import WeakKeyDictionary

from gateway.schedule.core.requests import (
    LEAST_UNCACHED_TOKENS,
    MOST_COMPARED_ROWS,
    MOST_SLOTS,
    NO_OWN_FIGURES,
    AvailableRows,
    CandidateSet,
    Comparison,
    NodeCounts,
    NodeSlots,
    OwnFigures,
    PlacementState,
    QueuedRequest,
    Requirements,
    RowFigures,
    alive_rows,
)
from gateway.terms import Priority

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def row_cost(row: NodeSlots, queued: QueuedRequest, now: float) -> float:
    """T of a request on a row that has room for it now."""
    delay = row.penalty
    if row.prefill_until > now:
        delay += row.prefill_until - now
    index = row.index
    if queued.penalties:
        delay += queued.penalties.get(index, 0.0)
    uncached = queued.prompt_tokens
    if queued.cached:
        uncached = max(LEAST_UNCACHED_TOKENS, uncached - queued.cached.get(index, 0.0))
    slowed = 0.0
    if row.decode_slowdown:
        remaining = row.ends_sum - now * len(row.running)
        if remaining > 0.0:
            slowed = row.decode_slowdown * remaining
    output = queued.completion_tokens * row.per_output_token
    return delay + uncached * row.per_prompt_token + output + slowed


def row_costs(rows: Sequence[NodeSlots], queued: QueuedRequest, now: float) -> list[float]:
    """`row_cost` of each row; in one loop if the request has no cache and no penalty anywhere."""
    if queued.cached or queued.penalties:
        return [row_cost(row, queued, now) for row in rows]
    prompt, completion = queued.prompt_tokens, queued.completion_tokens
    costs = []
    for row in rows:
        delay = row.penalty
        if row.prefill_until > now:
            delay += row.prefill_until - now
        remaining, slowdown = 0.0, row.decode_slowdown
        if slowdown:
            remaining = row.ends_sum - now * len(row.running)
            if remaining < 0.0:  # noqa: PLR1730 - a call costs four times as much
                remaining = 0.0
        costs.append(
            delay
            + prompt * row.per_prompt_token
            + completion * row.per_output_token
            + slowdown * remaining
        )
    return costs


def row_cost_after(row: NodeSlots, queued: QueuedRequest, wait: float) -> float:
    """T of a request on a row whose slots come free after `wait` seconds.

    The placement that makes room has ended by then; its neighbours are taken to go on.
    """
    index = row.index
    cached = max(queued.cached.get(index, 0.0), queued.pending.get(index, 0.0))
    uncached = max(LEAST_UNCACHED_TOKENS, queued.prompt_tokens - cached)
    neighbours = max(0, row.busy - queued.slots)
    # A bonus, as of the node that served its session last, is no reason to wait.
    delay = wait + row.penalty + max(0.0, queued.penalties.get(index, 0.0))
    output = queued.completion_tokens * (row.token_base + row.token_step * neighbours)
    return delay + uncached * ((1 + neighbours) / row.prefill_tps) + output


def cost_of_figures(
    comparison: Comparison, row: RowFigures, prompt_tokens: float, completion_tokens: float
) -> float:
    """T of a request of so many tokens on a row that it was compared with, as `row_cost` had it."""
    speed, work, own = row.speed, row.work, comparison.own_figures(row)
    delay = comparison.prefill_wait(row) + speed.penalty + own.penalty
    prefill = uncached_tokens(own, prompt_tokens) * ((1 + work.busy) / speed.prefill_tps)
    output = completion_tokens * (speed.token_base + speed.token_step * work.busy)
    return delay + prefill + output + work.decode_slowdown * comparison.remaining(row)


def uncached_tokens(own: OwnFigures, prompt_tokens: float) -> float:
    """u: tokens of a prompt that the row would have to read."""
    if not own.cached:
        return prompt_tokens
    return max(LEAST_UNCACHED_TOKENS, prompt_tokens - own.cached)


LOOP_ROWS = 64  # rows up to which the loop of `row_costs` is as fast as numpy
# The reserve of rows that are kept from `batch`, in the columns: more than a row can have.
KEPT = 2.0 * MOST_SLOTS
_FIELDS = 9


class CostColumns:
    """The cost coefficients of all rows as numpy arrays, brought up to date before each use.

    numpy is imported here, when the first large fleet needs it: the import takes 0.1 s.
    """

    def __init__(self, placement_state: PlacementState) -> None:
        self._state = placement_state
        self._table: Floats | None = None
        """A line for each coefficient, a column for each row, and columns to spare."""
        self._excluded: WeakKeyDictionary[
            CandidateSet, tuple[frozenset[int], NDArray[np.bool_]]
        ] = WeakKeyDictionary()
        """For candidate sets: their indexes, and a mask of the rows that are not among them."""
        self._last: tuple[QueuedRequest, float, Floats] | None = None
        """The costs that were computed last: whose and when."""

    def least_finish(
        self, candidate_set: CandidateSet, queued: QueuedRequest, now: float, rng: random.Random
    ) -> NodeSlots:
        """The row of the least T among those with room, of which there is one; ties at random.

        For requests that are excluded from no row.
        """
        import numpy as np

        costs = self._costs(candidate_set, queued, now)
        best = int(costs.argmin())
        ties = np.flatnonzero(costs == costs[best])
        rows = self._state.rows
        return rows[int(ties[int(rng.random() * len(ties))]) if len(ties) > 1 else best]

    def least_costs(
        self, candidate_set: CandidateSet, queued: QueuedRequest, now: float, most: int
    ) -> list[NodeSlots]:
        """Up to `most` rows of the least T among those with room, in no order."""
        import numpy as np

        last = self._last
        if last is not None and last[0] is queued and last[1] == now:
            costs = last[2]
        else:
            costs = self._costs(candidate_set, queued, now)
        rows = self._state.rows
        if len(costs) > most:
            found = np.argpartition(costs, most)[:most].tolist()
        else:
            found = range(len(costs))
        return [rows[index] for index in found if costs[index] < np.inf]

    def _costs(self, candidate_set: CandidateSet, queued: QueuedRequest, now: float) -> Floats:
        """T of each row, by index; infinity for those without room."""
        import numpy as np

        columns = self._columns()
        free, per_prompt, per_output, slowdown, ends, running, prefill, penalty, reserve = columns
        rows = self._state.rows
        prompt, output = queued.prompt_tokens, queued.completion_tokens * per_output
        if queued.cached:
            prompt = max(LEAST_UNCACHED_TOKENS, prompt)
        delay, slowed = np.maximum(prefill - now, 0.0), np.maximum(ends - now * running, 0.0)
        costs: Floats = penalty + delay + prompt * per_prompt + output + slowdown * slowed
        if queued.cached:
            self._subtract_cached(costs, per_prompt, queued)
        for index, seconds in queued.penalties.items():
            costs[index] += seconds
        room = free >= queued.slots
        if queued.keeps_batch_reserve:
            room &= (free - queued.slots >= reserve) | ((running == 0) & (reserve < KEPT))
        costs[~room] = np.inf
        if len(candidate_set.rows) < len(self._state.by_name):
            costs[self._excluded_mask(candidate_set, len(rows))] = np.inf
        self._last = queued, now, costs
        return costs

    def _subtract_cached(self, costs: Floats, per_prompt: Floats, queued: QueuedRequest) -> None:
        """Take off what prefilling the cached tokens would cost."""
        import numpy as np

        most = max(0.0, queued.prompt_tokens - LEAST_UNCACHED_TOKENS)
        count = len(queued.cached)
        if count <= LOOP_ROWS // 4:
            for index, tokens in queued.cached.items():
                costs[index] -= (min(most, tokens)) * per_prompt[index]
            return
        indexes = np.fromiter(queued.cached.keys(), np.intp, count)
        cached = np.minimum(np.fromiter(queued.cached.values(), np.float64, count), most)
        known = indexes < len(costs)
        indexes, cached = indexes[known], cached[known]
        costs[indexes] -= cached * per_prompt[indexes]

    def _excluded_mask(self, candidate_set: CandidateSet, size: int) -> NDArray[np.bool_]:
        import numpy as np

        indexes, mask = self._excluded.get(candidate_set, (None, None))
        if mask is None or indexes is not candidate_set.row_indexes or len(mask) != size:
            mask = np.ones(size, np.bool_)
            mask[list(candidate_set.row_indexes)] = False
            self._excluded[candidate_set] = candidate_set.row_indexes, mask
        return mask

    def _columns(self) -> Floats:
        """The table's columns that belong to rows, as of now."""
        import numpy as np

        rows = self._state.rows
        changed = self._state.take_changed_rows()
        table = self._table
        if table is None or table.shape[1] < len(rows):
            table = self._table = np.zeros((_FIELDS, 2 * len(rows)))
            changed = rows
        if changed:
            values = [
                (
                    row.free,
                    row.per_prompt_token,
                    row.per_output_token,
                    row.decode_slowdown,
                    row.ends_sum,
                    len(row.running),
                    row.prefill_until,
                    row.penalty,
                    KEPT if row.kept_from_batch else row.batch_reserve,
                )
                for row in changed
            ]
            table[:, [row.index for row in changed]] = np.array(values).T
        return table[:, : len(rows)]


class LeastFinish:
    """Where the request and the requests that it holds up end first; ties at random."""

    by_cost: Final = True
    """Waiting requests are compared with each other for a free slot, and one that arrives may be
    deferred to a busy node that has its prompt cached."""

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
            return self._columns.least_finish(available.candidate_set, queued, now, rng)
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


@dataclass(frozen=True, slots=True)
class LeastKey:
    """The row of the least key; ties at random. For the simulator, which compares policies."""

    key: Callable[[NodeSlots, QueuedRequest], tuple[float, ...]]
    by_cost: ClassVar[bool] = False

    def choose(
        self, available: AvailableRows, queued: QueuedRequest, _now: float, rng: random.Random
    ) -> NodeSlots:
        """The row of the least key."""
        return min(available.rows, key=lambda row: (*self.key(row, queued), rng.random()))


def _load(row: NodeSlots, queued: QueuedRequest) -> tuple[float, ...]:
    """The share of slots in use, the new request's included."""
    return ((row.busy + queued.slots) / max(1, row.total),)


def _rendezvous(row: NodeSlots, queued: QueuedRequest) -> tuple[float, ...]:
    """Rendezvous hashing of the prompt's shared beginning.

    A full node leaves the request to the next in the same order, as consistent hashing with
    bounded loads does (Mirrokni et al. 2018).
    """
    name = row.name_hash * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return (-_mix64(queued.affinity_hash ^ name),)


def _mix64(value: int) -> int:
    # splitmix64's finaliser: every bit of the input moves every bit of the output.
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


SelectionPolicy = LeastFinish | LeastKey
POLICIES: Final[dict[str, Callable[[PlacementState], SelectionPolicy]]] = {
    "least_finish": LeastFinish,
    "least_loaded": lambda _: LeastKey(_load),
    "round_robin": lambda _: LeastKey(lambda row, _: (row.last_placement, row.index)),
    "prefix_hash": lambda _: LeastKey(_rendezvous),
}


def compare(
    available: AvailableRows,
    queued: QueuedRequest,
    chosen: NodeSlots,
    policy: LeastFinish,
    now: float,
) -> Comparison:
    """What a request is compared with that is about to be placed on `chosen`."""
    rows = available.rows
    count = len(rows)
    others: list[NodeSlots] = []
    if count > 1:
        best: Sequence[NodeSlots] = rows
        if count > MOST_COMPARED_ROWS:
            best = policy.best_rows(available, queued, now, MOST_COMPARED_ROWS)
        others = [row for row in best if row is not chosen][: MOST_COMPARED_ROWS - 1]
    own, cached, penalties = NO_OWN_FIGURES, queued.cached, queued.penalties
    if cached or penalties:
        own = {
            row.name: OwnFigures(cached.get(row.index, 0.0), penalties.get(row.index, 0.0))
            for row in (chosen, *others)
            if row.index in cached or row.index in penalties
        }
    return Comparison(
        chosen.figures or chosen.take_figures(),
        tuple([row.figures or row.take_figures() for row in others]),
        own,
        now,
        NodeCounts(count, len(available.candidate_set.rows), len(chosen.table.by_name)),
        policy.by_cost,
    )


# Rows whose speed is known up to which each request may explore another; of more rows, one in so
# many: the more are known, the less likely is it that the next one is the fastest.
MOST_FREELY_EXPLORED = 8
# Each such number of tokens to be read counts as one more request when an unknown row is explored:
# on a slow node they take minutes.
LONG_PROMPT_TOKENS = 2048


def explore(
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
    known = len(chosen.table.by_name) - len(chosen.table.exploring)
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
    placement_state: PlacementState, queued: QueuedRequest, *, any_pool: bool = False
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
    others = alive_rows(queued.groups, queued.excluded) if queued.failed else ()
    avoids = any(row.index not in queued.failed for row in others)
    avoided: Collection[int] = queued.failed if avoids else ()
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
        alive = alive_rows((tiers,), queued.excluded)
        if any(not row.paused and row.index not in avoided for row in alive):
            break
    return _idle_kept_rows(queued, avoided) if keeps_reserve and queued.slots else None


def _idle_kept_rows(queued: QueuedRequest, avoided: Collection[int]) -> AvailableRows | None:
    """Idle rows that are kept from `batch`, for a request that can go nowhere else.

    For example a prompt for which only their context is long enough: it must not wait for ever.
    """
    for group, tiers in enumerate(queued.groups):
        by_tier = [
            [
                row
                for row in one.rows
                if row.alive
                and row.total >= queued.slots
                and row.index not in queued.excluded
                and row.index not in avoided
            ]
            for one in tiers
        ]
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


def _rows_with_room(
    state: PlacementState, candidates: CandidateSet, queued: QueuedRequest
) -> list[NodeSlots]:
    slots = queued.slots
    if not slots:
        caller = queued.slotless_caller
        return [r for r in candidates.rows if r.capacity and r.has_slotless_room(caller)]
    if len(state.free_rows) < len(candidates.rows):
        members = candidates.row_indexes
        if slots == 1 and len(members) == len(state.by_name):
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
    _found: dict[Requirements, AvailableRows | None] = field(default_factory=dict)  # by slots alone
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
