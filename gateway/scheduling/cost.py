"""The expected finish: what placing a request on one node costs, in seconds.

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

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from gateway.scheduling.comparison import RowFigures
from gateway.scheduling.node_slots import (
    LEAST_UNCACHED_TOKENS,
    MOST_SLOTS,
    CandidateSet,
    NodeSlots,
    QueuedRequest,
)
from gateway.scheduling.placement_state import PlacementState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Numbers = TypeVar("Numbers", float, "Floats")
"""A float, or an array with one for each row."""


def expected_cost(
    uncached: float,
    completion: float,
    per_prompt_token: Numbers,
    per_output_token: Numbers,
    delay: Numbers,
    decode_slowdown: Numbers,
    remaining: Numbers,
) -> Numbers:
    """T from a row's coefficients, for floats as for numpy arrays.

    `per_prompt_token` = (1 + k)/p, `per_output_token` = b + s·k, `delay` = W + R + D,
    `decode_slowdown` = d, `remaining` = Σr.
    """
    return (
        delay
        + uncached * per_prompt_token
        + completion * per_output_token
        + decode_slowdown * remaining
    )


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
    remaining = 0.0
    if row.decode_slowdown:
        remaining = row.ends_sum - now * len(row.running)
        if remaining < 0.0:  # noqa: PLR1730 - a call costs four times as much
            remaining = 0.0
    return expected_cost(
        uncached,
        queued.completion_tokens,
        row.per_prompt_token,
        row.per_output_token,
        delay,
        row.decode_slowdown,
        remaining,
    )


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
            if remaining < 0.0:  # noqa: PLR1730 - as above
                remaining = 0.0
        # `expected_cost`, inlined: the calls would be most of the time.
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
    penalty = queued.penalties.get(index, 0.0)
    return expected_cost(
        uncached,
        queued.completion_tokens,
        (1 + neighbours) / row.prefill_tps,
        row.token_base + row.token_step * neighbours,
        # A bonus, as of the node that served its session last, is no reason to wait.
        wait + row.penalty + max(0.0, penalty),
        0.0,
        0.0,
    )


def row_figures(row: NodeSlots, queued: QueuedRequest, now: float) -> RowFigures:
    """The terms of `row_cost`, to be kept. It runs for each request."""
    index, slowdown, remaining = row.index, row.decode_slowdown, 0.0
    if slowdown:
        remaining = max(0.0, row.ends_sum - now * len(row.running))
    wait = row.prefill_until - now
    cached, penalties = queued.cached, queued.penalties
    return RowFigures(
        row.name,
        row.measured,
        row.total,
        row.busy,
        row.prefill_tps,
        row.token_base,
        row.token_step,
        slowdown,
        remaining,
        max(0.0, wait),
        row.penalty,
        penalties.get(index, 0.0) if penalties else 0.0,
        cached.get(index, 0.0) if cached else 0.0,
        row.wake,
        row.pool,
        round(row.pool_reserved) + row.pool_foreign if row.pool else 0,
    )


def cost_of_figures(figures: RowFigures, prompt_tokens: float, completion_tokens: float) -> float:
    """T of a request of so many tokens, as `row_cost` had it when the figures were taken."""
    return expected_cost(
        uncached_tokens(figures, prompt_tokens),
        completion_tokens,
        (1 + figures.busy) / figures.prefill_tps,
        figures.token_base + figures.token_step * figures.busy,
        figures.prefill_wait + figures.penalty + figures.own_penalty,
        figures.decode_slowdown,
        figures.remaining,
    )


def uncached_tokens(figures: RowFigures, prompt_tokens: float) -> float:
    """u: tokens of a prompt that the row would have to read."""
    if not figures.cached:
        return prompt_tokens
    return max(LEAST_UNCACHED_TOKENS, prompt_tokens - figures.cached)


LOOP_ROWS = 64
"""Rows up to which the loop of `row_costs` is as fast as numpy."""

KEPT = 2.0 * MOST_SLOTS
"""The reserve of rows that are kept from `batch`, in the columns: more than a row can have."""

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
    ) -> NodeSlots | None:
        """The row of the least T among those with room; ties at random; None: none has room.

        For requests that are excluded from no row.
        """
        import numpy as np

        costs = self._costs(candidate_set, queued, now)
        best = int(costs.argmin())
        least = costs[best]
        if least == np.inf:
            return None
        ties = np.flatnonzero(costs == least)
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
        costs: Floats = expected_cost(
            max(LEAST_UNCACHED_TOKENS, queued.prompt_tokens)
            if queued.cached
            else queued.prompt_tokens,
            queued.completion_tokens,
            per_prompt,
            per_output,
            penalty + np.maximum(prefill - now, 0.0),
            slowdown,
            np.maximum(ends - now * running, 0.0),
        )
        if queued.cached:
            self._subtract_cached(costs, per_prompt, queued)
        for index, seconds in queued.penalties.items():
            costs[index] += seconds
        room = free >= queued.slots
        if queued.keeps_batch_reserve:
            room &= (free - queued.slots >= reserve) | ((running == 0) & (reserve < KEPT))
        costs[~room] = np.inf
        if len(candidate_set.rows) < self._state.node_count:
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
