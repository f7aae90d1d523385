"""Who goes where, and when: the core that the gateway and the simulator both run.

Nothing here waits, sleeps or looks at a clock: time comes in with each call.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.request import Priority
from gateway.scheduling.ask import Ask
from gateway.scheduling.board import Board, Pool, Row
from gateway.scheduling.policies import POLICIES, Policy


@dataclass(frozen=True, slots=True)
class LineRules:
    """The settings that the dispatcher goes by."""

    policy: str = "least_finish"
    patience: Mapping[Priority, float] = field(
        default_factory=lambda: {
            Priority.URGENT: 10.0,
            Priority.PREMIUM: 20.0,
            Priority.NORMAL: 60.0,
            Priority.BATCH: 300.0,
        }
    )
    """Seconds after which a waiting request of a class is overdue."""
    overdue_share: float = 0.1
    """Of the slots that come free, the share that goes to overdue requests while there are any."""
    reserve: float = 0.0
    """Share of each node's slots that `batch` leaves free."""


@dataclass(slots=True, eq=False)
class Placement:
    """A request that has slots on a node, until `Dispatcher.finished`."""

    ask: Ask
    row: Row
    pool: Pool
    group: int
    """Which of the request's names it is served under: an index of `ask.groups`."""
    at: float
    read_by: float
    """When its prompt is expected to have been read."""
    ends: float
    """When it is expected to end."""
    charge: float = 0.0
    """What its caller has been charged so far."""


class Dispatcher:
    """Places requests on the rows of a board, and keeps those in line that find no room."""

    def __init__(self, board: Board, rules: LineRules, rng: random.Random) -> None:
        self.board = board
        self.rng = rng
        self._line: list[Ask] = []
        self.set_rules(rules)

    def set_rules(self, rules: LineRules) -> None:
        """Go by these from now on. Raises KeyError for a policy that does not exist."""
        self._policy: Policy = POLICIES[rules.policy]
        self.rules = rules
        self.board.set_reserve(rules.reserve)

    # What happens.

    def arrive(self, ask: Ask, now: float) -> Placement | None:
        """Place `ask` at once, or put it in line: None."""
        if self._line:
            self._line.append(ask)
            return None
        placement = self._placed(ask, now)
        if placement is None:
            self._line.append(ask)
        return placement

    def match(self, now: float) -> list[Placement]:
        """Give free slots to those who wait; to be called when capacity has changed."""
        placements = []
        for ask in sorted(self._line, key=lambda ask: (ask.priority, ask.entered)):
            placement = self._placed(ask, now)
            if placement is not None:
                self._line.remove(ask)
                placements.append(placement)
        return placements

    def withdraw(self, ask: Ask) -> bool:
        """Take `ask` out of the line; whether it was in it."""
        if ask in self._line:
            self._line.remove(ask)
            return True
        return False

    def began(self, placement: Placement, now: float) -> None:
        """The first token came: the prompt has been read."""

    def finished(
        self, placement: Placement, now: float, prompt: float, cached: float, completion: float
    ) -> None:
        """The slots of `placement` are free again, after so many tokens. Then call `match`."""
        row = placement.row
        row.running.remove(placement)
        row.ours -= placement.ask.slots
        row.ends -= placement.ends
        self.board.settle(row)

    # What is to be expected.

    @property
    def waiting(self) -> int:
        """How many are in line."""
        return len(self._line)

    def asks(self) -> list[Ask]:
        """What waits, in the order of the line."""
        return list(self._line)

    def depths(self) -> dict[Priority, int]:
        """How many of each class wait."""
        depths = dict.fromkeys(Priority, 0)
        for ask in self._line:
            depths[ask.priority] += 1
        return depths

    def position(self, ask: Ask) -> int:
        """Its place in line, from 1; 0 if it does not wait."""
        return self._line.index(ask) + 1 if ask in self._line else 0

    def expected_start(self, ask: Ask, now: float) -> float:
        """When `ask`, which waits, is expected to get its slots; monotonic seconds."""
        return now + self.predicted_wait(ask, now)

    def predicted_wait(self, ask: Ask, now: float) -> float:
        """Seconds that `ask` would wait if it came now."""
        return 0.0

    def wake_at(self, now: float) -> float | None:
        """When `match` is to be called though nothing has changed; None: not needed."""
        return None

    # Inside.

    def _placed(self, ask: Ask, now: float) -> Placement | None:
        for group, tiers in enumerate(ask.groups):
            for pool in tiers:
                room = [
                    row
                    for row in pool.rows
                    if row.free >= ask.slots and row.capacity and row.index not in ask.closed
                ]
                row = self._policy(room, ask, now, self.rng)
                if row is not None:
                    return self._take(ask, row, pool, group, now)
            if any(row.alive for pool in tiers for row in pool.rows):
                break
        return None

    def _take(self, ask: Ask, row: Row, pool: Pool, group: int, now: float) -> Placement:
        uncached = max(1.0, ask.prompt - ask.cached.get(row.index, 0.0))
        read_by = max(now, row.reading_until) + uncached / row.prefill
        placement = Placement(
            ask, row, pool, group, now, read_by, read_by + ask.completion * row.per_token
        )
        row.reading_until = read_by
        row.running.append(placement)
        row.ours += ask.slots
        row.ends += placement.ends
        self.board.placed += 1
        row.used = self.board.placed
        self.board.settle(row)
        return placement
