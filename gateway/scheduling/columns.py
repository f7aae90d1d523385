"""The choice among many rows at once: the same formula over numpy's columns.

numpy is imported when a fleet is large enough for this to be faster than a loop; where it is not
installed the loop goes on serving.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from gateway.scheduling.finish import LEAST_READ, cost

if TYPE_CHECKING:
    from types import ModuleType

    from gateway.scheduling.ask import Ask
    from gateway.scheduling.board import Board, Pool, Row

FEW = 64
"""Rows up to which a loop is as fast."""

_FIELDS = 9


class Columns:
    """What the formula needs of all rows, brought up to date before it is used."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._numpy: ModuleType | None = None
        self._missing = False
        self._table: Any = None
        """With columns to spare, and ..."""
        self._used: Any = None
        """... those of the board's rows."""

    @property
    def usable(self) -> bool:
        """Whether numpy is there."""
        if self._numpy is None and not self._missing:
            try:
                import numpy as np
            except ImportError:
                self._missing = True
            else:
                self._numpy = np
        return self._numpy is not None

    def least_finish(self, pool: Pool, ask: Ask, now: float, rng: random.Random) -> Row | None:
        """The row of `pool` with room where `ask` is expected to finish first; ties at random.

        As `policies.least_finish`, for requests that no row is closed to.
        """
        np = self._numpy
        assert np is not None
        self._renew(np)
        free, per_prompt, per_token, drag, ends, running, reading, doubt, spare = self._used
        rows = self._board.rows
        zero = np.maximum
        total = cost(
            max(LEAST_READ, ask.prompt) if ask.cached else ask.prompt,
            ask.completion,
            per_prompt,
            per_token,
            doubt + zero(reading - now, 0.0),
            drag,
            zero(ends - now * running, 0.0),
        )
        if ask.cached:
            self._credit(np, total, ask)
        for index, seconds in ask.doubts.items():
            total[index] += seconds
        room = free >= ask.slots
        if ask.shape[2]:
            room &= (free - ask.slots >= spare) | (running == 0)
        total[~room] = np.inf
        if len(pool.rows) < self._board.count:
            total[self._outside(np, pool)] = np.inf
        best = int(total.argmin())
        least = total[best]
        if least == np.inf:
            return None
        ties = np.flatnonzero(total == least)
        return rows[int(ties[int(rng.random() * len(ties))]) if len(ties) > 1 else best]

    def _credit(self, np: Any, total: Any, ask: Ask) -> None:
        """Take off what reading would cost of the tokens that are cached."""
        per_prompt = self._used[1]
        most = max(0.0, ask.prompt - LEAST_READ)
        count = len(ask.cached)
        if count <= FEW // 4:
            for index, tokens in ask.cached.items():
                total[index] -= (min(most, tokens)) * per_prompt[index]
        else:
            indexes = np.fromiter(ask.cached.keys(), np.intp, count)
            tokens = np.minimum(np.fromiter(ask.cached.values(), np.float64, count), most)
            known = indexes < len(total)
            indexes, tokens = indexes[known], tokens[known]
            total[indexes] -= tokens * per_prompt[indexes]

    def _outside(self, np: Any, pool: Pool) -> Any:
        size = self._used.shape[1]
        if pool.mask is None or len(pool.mask) != size:
            pool.mask = np.ones(size, np.bool_)
            pool.mask[list(pool.members)] = False
        return pool.mask

    def _renew(self, np: Any) -> None:
        board = self._board
        rows = board.rows
        if self._table is None or self._table.shape[1] < len(rows):
            self._table = np.zeros((_FIELDS, 2 * len(rows)))
            self._used = None
            dirty = rows
        else:
            dirty = board.dirty
        if self._used is None or self._used.shape[1] != len(rows):
            self._used = self._table[:, : len(rows)]
        if not dirty:
            return
        values = [
            (
                row.free, row.per_prompt, row.per_token, row.drag, row.ends,
                len(row.running), row.reading_until, row.doubt, row.spare,
            )
            for row in dirty
        ]  # fmt: skip
        self._table[:, [row.index for row in dirty]] = np.array(values).T
        for row in dirty:
            row.dirty = False
        board.dirty.clear()
