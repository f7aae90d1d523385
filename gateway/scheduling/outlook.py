"""How long those who wait are likely to wait, and what a request is likely to take."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from gateway.scheduling import forecast
from gateway.scheduling.fairness import LEAST_WEIGHT, MOST_WEIGHT
from gateway.scheduling.finish import LEAST_READ

if TYPE_CHECKING:
    from gateway.scheduling.ask import Ask
    from gateway.scheduling.board import Board, Pool, Row
    from gateway.scheduling.line import Line

SOONEST_RENEWAL, LATEST_RENEWAL = 8, 256
"""Placements after which the means over the fleet are taken again: about as many as a quarter of
its nodes, so that what a small one has measured counts soon."""
FEW = 64
"""Rows whose forecasts are looked at, and about so many callers' lines."""

_age = attrgetter("age")


@dataclass(slots=True, eq=False)
class Outlook:
    """What a board and a line let expect."""

    board: Board
    line: Line
    _weight: float = LEAST_WEIGHT
    _per_prompt: float = 0.0
    _per_token: float = 0.0
    _renewal: int = 0
    """The placement with which the means are taken again."""

    @property
    def weight(self) -> float:
        """What a written token costs, in prompt tokens: by the fleet's measured speeds."""
        self._keep_up()
        return self._weight

    def work(self, ask: Ask) -> tuple[float, float]:
        """Tokens that are likely to be read and written for `ask`."""
        cached = max(ask.cached.values(), default=0.0)
        return max(LEAST_READ, ask.prompt - cached), ask.completion

    def ahead(self, ask: Ask) -> int:
        """About how many go before `ask`, which waits or comes now.

        Classes above go first; within its class callers take turns, each its oldest first.
        """
        ranks = self.line.ranks
        shares = ranks[ask.priority].shares
        order = shares.order
        own = shares.accounts.get(ask.caller)
        turns = 0
        mine = (order[0][0] if order else shares.level, math.inf)
        if own is not None:
            age = ask.age if ask.account is not None else (ask.entered, math.inf)
            turns = sum([bisect_left(lane, age, key=_age) for lane in own.lanes.values()])
            mine = (max(own.counter, mine[0]), own.number)
        ahead = sum([rank.count for rank in ranks[: ask.priority]]) + turns
        if not turns:
            return ahead + bisect_left(order, mine)
        some = order[:: 1 + len(order) // FEW]
        theirs = 0
        for counter, number, account in some:
            if account is not own:
                waiting = sum(map(len, account.lanes.values()))
                theirs += min(waiting, turns + ((counter, number) < mine))
        return ahead + theirs * len(order) // len(some)

    def wait_of(self, ask: Ask, now: float) -> float:
        """Seconds until `ask` has its slots; for one that does not wait yet: if it came now."""
        pool = self._pool(ask)
        return self._after(self.ahead(ask), ask, pool, self._first(ask, pool, now))

    def places(self, now: float) -> Iterator[tuple[Ask, float]]:
        """All that waits in the order in which it is likely to go, and `wait_of` it."""
        first: dict[tuple[Pool, bool], float] = {}
        for place, ask in enumerate(self.order()):
            pool = self._pool(ask)
            kind = pool, ask.spares
            if kind not in first:
                first[kind] = self._first(ask, pool, now)
            yield ask, self._after(place, ask, pool, first[kind])

    def order(self) -> Iterator[Ask]:
        """All that waits in the order in which it is likely to go."""
        for rank in self.line.ranks:
            turns = deque(
                heapq.merge(*account.lanes.values(), key=_age)
                for _, _, account in rank.shares.order
            )
            while turns:
                own = turns.popleft()
                ask = next(own, None)
                if ask is None:
                    continue
                turns.append(own)
                yield ask

    def _pool(self, ask: Ask) -> Pool:
        """Where it is to be expected: the first pool with a node that is alive."""
        for tiers in ask.groups:
            for pool in tiers:
                if pool.slots(self.board):
                    return pool
        return ask.groups[0][0]

    def _first(self, ask: Ask, pool: Pool, now: float) -> float:
        """Seconds until the next slot comes free to such as `ask`."""
        waits = [
            wait
            for row in pool.rows[:FEW]
            if row.running
            and (wait := forecast.release(row, _short(row) if ask.spares else 1, now)) is not None
        ]
        return min(waits) * min(1.0, FEW / len(pool.rows)) if waits else 0.0

    def _after(self, ahead: int, ask: Ask, pool: Pool, first: float) -> float:
        """Seconds until so many others have begun, and one slot more is free; inf: no telling."""
        slots = (pool.unreserved if ask.spares else pool.slots)(self.board)
        if not slots:
            return math.inf
        self._keep_up()
        read, written = map(sum, ask.groups[0][0].queued)
        queued = read * self._per_prompt + written * self._per_token
        work = ahead * queued / max(1, self.line.count)
        return first + work * max(1, ask.slots) / slots

    def _keep_up(self) -> None:
        """Take the means again after some placements, or when enough rows have other speeds."""
        board = self.board
        if board.placed >= self._renewal or board.moved > len(board.by_name) // 8:
            self._renew()

    def _renew(self) -> None:
        self.board.moved = 0
        rows = [row for row in self.board.by_name.values() if row.alive]
        renewal = min(max(SOONEST_RENEWAL, len(rows) // 4), LATEST_RENEWAL)
        self._renewal = self.board.placed + renewal
        if not rows:
            return
        self._per_prompt = sum(1.0 / row.prefill for row in rows) / len(rows)
        self._per_token = sum(
            row.token_base + row.token_step * max(0, row.total - 1) for row in rows
        ) / len(rows)
        weight = self._per_token / self._per_prompt
        self._weight = min(max(weight, LEAST_WEIGHT), MOST_WEIGHT)


def _short(row: Row) -> int:
    """Slots that must come free on a row before it may take what leaves its reserve alone."""
    return max(1, min(row.ours, row.spare + 1 - row.free))
