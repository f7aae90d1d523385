"""The expected finish: what a request costs if it goes to one node, in seconds.

    T = W + R + u/p + c·(b + s·k)  +  (u/p)·k + d·Σr  +  D

- W  until a slot is free there: 0 where one is
- R  until the prompts that are queued there have been read: a server reads one after the other
- u  prompt tokens that its cache does not hold; p  prompt tokens it reads a second
- c  tokens of the answer; b  seconds a token takes alone; s  seconds more for each neighbour:
     decoding waits for memory, so a batch shares the reading of the weights
- k  neighbours that run there. (u/p)·k is what the newcomer's reading holds them up: a server that
     reads a prompt writes nothing
- Σr seconds that the neighbours still have to run; d = s / (b + s·(k-1)) is the share by which one
     more sequence slows them down; nothing where nobody writes
- D  seconds for doubt: one that has failed lately; negative for one that needs a request on trial,
     and for the one that its conversation went to last

The first four terms are the newcomer's own time, the next two its price to those who run there, so
the least T is what all of them together lose least by.

Sources: llama.cpp's server as measured (a slot that wrote stood still for 14 s while its neighbour
read 3,000 tokens; 1,400 tokens took 10.3 s cold and 0.06 s from the cache). The marginal cost of a
placement, instead of its own time alone: Harchol-Balter, "Performance Modeling and Design of
Computer Systems", 2013, on least work left and size-based assignment. Uncached prefill against
load: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", 2024.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeVar

from gateway.scheduling.placement_state import (
    CandidateSet,
    NodeSlots,
    PlacementState,
    QueuedRequest,
)

Numbers = TypeVar("Numbers", bound=Any)
"""A float, or an array of them: one for each row."""

LEAST_UNCACHED_TOKENS = 1.0
"""Tokens that are read whatever is cached: a server always reads the last one."""


def expected_cost(
    uncached: float,
    completion: float,
    per_prompt_token: Numbers,
    per_output_token: Numbers,
    delay: Numbers,
    decode_slowdown: Numbers,
    remaining: Numbers,
) -> Numbers:
    """T by a row's coefficients, for floats as for numpy arrays.

    `per_prompt` = (1 + k)/p, `per_token` = b + s·k, `before` = W + R + D, `drag` = d, `left` = Σr.
    """
    total: Numbers = (
        delay
        + uncached * per_prompt_token
        + completion * per_output_token
        + decode_slowdown * remaining
    )
    return total


def row_cost(row: NodeSlots, queued: QueuedRequest, now: float) -> float:
    """T of `ask` on `row`, where it has room now."""
    before = row.penalty
    if row.prefill_until > now:
        before += row.prefill_until - now
    index = row.index
    if queued.penalties:
        before += queued.penalties.get(index, 0.0)
    uncached = queued.prompt_tokens
    if queued.cached:
        uncached = max(LEAST_UNCACHED_TOKENS, uncached - queued.cached.get(index, 0.0))
    left = 0.0
    if row.decode_slowdown:
        left = row.ends_sum - now * len(row.running)
        if left < 0.0:  # noqa: PLR1730 - a call costs four times as much
            left = 0.0
    return expected_cost(
        uncached,
        queued.completion_tokens,
        row.per_prompt_token,
        row.per_output_token,
        before,
        row.decode_slowdown,
        left,
    )


def row_costs(rows: Sequence[NodeSlots], queued: QueuedRequest, now: float) -> list[float]:
    """`seconds` of each row, in one go where nothing is known of one row alone."""
    if queued.cached or queued.penalties:
        return [row_cost(row, queued, now) for row in rows]
    prompt, completion = queued.prompt_tokens, queued.completion_tokens
    found = []
    for row in rows:
        before = row.penalty
        if row.prefill_until > now:
            before += row.prefill_until - now
        left, drag = 0.0, row.decode_slowdown
        if drag:
            left = row.ends_sum - now * len(row.running)
            if left < 0.0:  # noqa: PLR1730 - as above
                left = 0.0
        # `cost`, spelt out: calls would be most of it.
        found.append(
            before + prompt * row.per_prompt_token + completion * row.per_output_token + drag * left
        )
    return found


def row_cost_after(row: NodeSlots, queued: QueuedRequest, wait: float) -> float:
    """T of `ask` on `row` if it gets the slots there that come free after `wait` seconds.

    The one that makes room has gone by then, and its neighbours are taken to go on.
    """
    index = row.index
    cached = max(queued.cached.get(index, 0.0), queued.pending.get(index, 0.0))
    uncached = max(LEAST_UNCACHED_TOKENS, queued.prompt_tokens - cached)
    neighbours = max(0, row.busy - queued.slots)
    doubt = queued.penalties.get(index, 0.0)
    return expected_cost(
        uncached,
        queued.completion_tokens,
        (1 + neighbours) / row.prefill_tps,
        row.token_base + row.token_step * neighbours,
        # That its conversation was there last is no reason to wait.
        wait + row.penalty + max(0.0, doubt),
        0.0,
        0.0,
    )


LOOP_ROWS = 64
"""Rows up to which a loop is as fast."""

_FIELDS = 9


class CostColumns:
    """What the formula needs of all rows, brought up to date before it is used."""

    def __init__(self, placement_state: PlacementState) -> None:
        self._board = placement_state
        self._numpy: ModuleType | None = None
        self._missing = False
        self._table: Any = None
        """With columns to spare, and ..."""
        self._used: Any = None
        """... those of the board's rows."""

    @property
    def available(self) -> bool:
        """Whether numpy is there."""
        if self._numpy is None and not self._missing:
            try:
                import numpy as np
            except ImportError:
                self._missing = True
            else:
                self._numpy = np
        return self._numpy is not None

    def least_finish(
        self, candidate_set: CandidateSet, queued: QueuedRequest, now: float, rng: random.Random
    ) -> NodeSlots | None:
        """The row of `pool` with room where `ask` is expected to finish first; ties at random.

        As `policies.least_finish`, for requests that no row is closed to.
        """
        np = self._numpy
        assert np is not None
        self._renew(np)
        free, per_prompt, per_token, drag, ends, running, reading, doubt, spare = self._used
        rows = self._board.rows
        zero = np.maximum
        total = expected_cost(
            max(LEAST_UNCACHED_TOKENS, queued.prompt_tokens)
            if queued.cached
            else queued.prompt_tokens,
            queued.completion_tokens,
            per_prompt,
            per_token,
            doubt + zero(reading - now, 0.0),
            drag,
            zero(ends - now * running, 0.0),
        )
        if queued.cached:
            self._credit(np, total, queued)
        for index, seconds in queued.penalties.items():
            total[index] += seconds
        room = free >= queued.slots
        if queued.requirements[2]:
            room &= (free - queued.slots >= spare) | (running == 0)
        total[~room] = np.inf
        if len(candidate_set.rows) < self._board.node_count:
            total[self._outside(np, candidate_set)] = np.inf
        best = int(total.argmin())
        least = total[best]
        if least == np.inf:
            return None
        ties = np.flatnonzero(total == least)
        return rows[int(ties[int(rng.random() * len(ties))]) if len(ties) > 1 else best]

    def _credit(self, np: Any, total: Any, ask: QueuedRequest) -> None:
        """Take off what reading would cost of the tokens that are cached."""
        per_prompt = self._used[1]
        most = max(0.0, ask.prompt_tokens - LEAST_UNCACHED_TOKENS)
        count = len(ask.cached)
        if count <= LOOP_ROWS // 4:
            for index, tokens in ask.cached.items():
                total[index] -= (min(most, tokens)) * per_prompt[index]
        else:
            indexes = np.fromiter(ask.cached.keys(), np.intp, count)
            tokens = np.minimum(np.fromiter(ask.cached.values(), np.float64, count), most)
            known = indexes < len(total)
            indexes, tokens = indexes[known], tokens[known]
            total[indexes] -= tokens * per_prompt[indexes]

    def _outside(self, np: Any, pool: CandidateSet) -> Any:
        size = self._used.shape[1]
        if pool.excluded_mask is None or len(pool.excluded_mask) != size:
            pool.excluded_mask = np.ones(size, np.bool_)
            pool.excluded_mask[list(pool.row_indexes)] = False
        return pool.excluded_mask

    def _renew(self, np: Any) -> None:
        board = self._board
        rows = board.rows
        if self._table is None or self._table.shape[1] < len(rows):
            self._table = np.zeros((_FIELDS, 2 * len(rows)))
            self._used = None
            dirty = rows
        else:
            dirty = board.dirty_rows
        if self._used is None or self._used.shape[1] != len(rows):
            self._used = self._table[:, : len(rows)]
        if not dirty:
            return
        values = [
            (
                row.free, row.per_prompt_token, row.per_output_token, row.decode_slowdown,
                row.ends_sum,
                len(row.running), row.prefill_until, row.penalty, row.batch_reserve,
            )
            for row in dirty
        ]  # fmt: skip
        self._table[:, [row.index for row in dirty]] = np.array(values).T
        for row in dirty:
            row.dirty = False
        board.dirty_rows.clear()
