"""How long those who wait are likely to wait, and what a request is likely to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.scheduling import forecast
from gateway.scheduling.fairness import LEAST_WEIGHT, MOST_WEIGHT
from gateway.scheduling.finish import LEAST_READ

if TYPE_CHECKING:
    from gateway.scheduling.ask import Ask
    from gateway.scheduling.board import Board
    from gateway.scheduling.line import Line

RENEWAL = 256
"""Placements after which the means over the fleet are taken again."""
FEW = 64
"""Rows whose forecasts are looked at."""


@dataclass(slots=True, eq=False)
class Outlook:
    """What a board and a line let expect."""

    board: Board
    line: Line
    _weight: float = LEAST_WEIGHT
    _per_prompt: float = 0.0
    _per_token: float = 0.0
    _renewed: int = -RENEWAL

    @property
    def weight(self) -> float:
        """What a written token costs, in prompt tokens: by the fleet's measured speeds."""
        if self.board.placed - self._renewed >= RENEWAL:
            self._renew()
        return self._weight

    def work(self, ask: Ask) -> float:
        """Seconds that `ask` is likely to keep its slots, on a node of middling speed."""
        if self.board.placed - self._renewed >= RENEWAL:
            self._renew()
        cached = max(ask.cached.values(), default=0.0)
        uncached = max(LEAST_READ, ask.prompt - cached)
        return uncached * self._per_prompt + ask.completion * self._per_token

    def position(self, ask: Ask) -> int:
        """About the place of `ask` in line, from 1; 0 if it does not wait.

        Classes above go first; within its class callers take turns, each its oldest first.
        """
        own = ask.account
        if own is None:
            return 0
        ranks = self.line.ranks
        ahead = sum(rank.count for rank in ranks[: ask.priority])
        turns = sum(other.age < ask.age for lane in own.lanes.values() for other in lane)
        mine = (own.counter, own.number)
        for counter, number, account in ranks[ask.priority].shares.order:
            if account is not own:
                theirs = sum(map(len, account.lanes.values()))
                ahead += min(theirs, turns + ((counter, number) < mine))
        return ahead + turns + 1

    def wait_of(self, ask: Ask, now: float) -> float:
        """Seconds until `ask` has its slots; for one that does not wait yet: if it came now."""
        queued = ask.groups[0][0].queued
        place = self.position(ask)
        if place:
            work = (place - 1) * sum(queued) / max(1, self.line.count)
        else:
            work = sum(queued[: ask.priority + 1])
        return self._after(work, ask, now)

    def _after(self, work: float, ask: Ask, now: float) -> float:
        """Seconds until so many seconds of work have been begun, and one slot more is free."""
        pool = ask.groups[0][0]
        slots = pool.slots(self.board)
        if not slots:
            return work
        waits = [
            wait
            for row in pool.rows[:FEW]
            if row.running and (wait := forecast.release(row, 1, now)) is not None
        ]
        first = min(waits, default=0.0) * min(1.0, FEW / len(pool.rows))
        return first + work * max(1, ask.slots) / slots

    def _renew(self) -> None:
        self._renewed = self.board.placed
        rows = [row for row in self.board.by_name.values() if row.alive]
        if not rows:
            return
        self._per_prompt = sum(1.0 / row.prefill for row in rows) / len(rows)
        self._per_token = sum(
            row.token_base + row.token_step * max(0, row.total - 1) for row in rows
        ) / len(rows)
        weight = self._per_token / self._per_prompt
        self._weight = min(max(weight, LEAST_WEIGHT), MOST_WEIGHT)
