"""Who of those that wait goes next, and where: classes, ageing, fair shares, the best fit.

The order is strict between classes, but for the share of the overdue (`ageing.py`). In a class the
caller goes that was served least (`fairness.py`). Of its requests, and of those of callers within a
small slack of it, the one with the highest response ratio goes: the time that it will have been
here when it ends, against the time it takes on the node that has room. So what fits the node, and
what is short, goes before the rest, and what has waited long before both (Brinch Hansen 1971).

Only a bounded number of requests is looked at for one placement, however many wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from gateway.config.waiting import PATIENCE, SLOTLESS
from gateway.request import Priority
from gateway.scheduling.ageing import Turns
from gateway.scheduling.ask import Ask
from gateway.scheduling.board import Board, Row
from gateway.scheduling.columns import FEW, Columns
from gateway.scheduling.fairness import SLACK, Account
from gateway.scheduling.finish import seconds
from gateway.scheduling.hold import Holds
from gateway.scheduling.line import Line, Rank
from gateway.scheduling.policies import POLICIES, Policy, least_finish
from gateway.scheduling.room import Room, Rooms

OLDEST = 24
"""Requests of one lane that are compared, from its oldest on."""
CANDIDATES = 48
"""Requests that are compared for one placement, at most."""
WARM_ROWS = 4
"""Rows with room whose warm requests are looked for further back in line."""
EVALUATIONS = 96
"""Expected finishes that are computed to compare them, about."""
DECLINES = 8
"""Requests that may decline a slot to wait for a warm one; then the first of them takes it."""
RECALLS = 4
"""Requests for one placement of which it is looked up again what is cached: it changes while they
wait."""


def _patience() -> Mapping[Priority, float]:
    return {priority: PATIENCE[priority.label] for priority in Priority}


@dataclass(frozen=True, slots=True)
class LineRules:
    """The settings that the dispatcher goes by."""

    policy: str = "least_finish"
    patience: Mapping[Priority, float] = field(default_factory=_patience)
    """Seconds after which a waiting request of a class is overdue."""
    overdue_share: float = 0.1
    """Of the placements, the share that goes to overdue requests while there are any."""
    reserve: float = 0.0
    """Share of each node's slots that `batch` leaves free."""
    slotless: int = SLOTLESS
    """Requests that need no slot that a node gets at once."""


@dataclass(slots=True)
class Candidate:
    """A waiting request with the best row it could have now."""

    ask: Ask
    room: Room
    row: Row
    cost: float = 0.0
    """Its expected finish there, in seconds."""
    ratio: float = 0.0
    """Its response ratio: the time it would have been here by then, against that."""


class Matcher:
    """Finds the next placement."""

    def __init__(
        self, board: Board, line: Line, holds: Holds, rules: LineRules, rng: random.Random
    ) -> None:
        self.evaluations = 0
        self.recall: Callable[[Ask], None] | None = None
        self._board = board
        self._line = line
        self._holds = holds
        self._columns = Columns(board)
        self._rng = rng
        self._recalls = 0
        self.set_rules(rules)

    def set_rules(self, rules: LineRules) -> None:
        """Go by these from now on. Raises KeyError for a policy that does not exist."""
        self._policy: Policy = POLICIES[rules.policy]
        self.fitting = self._policy is least_finish
        self._patience = [rules.patience[priority] for priority in Priority]
        self._turns = Turns(rules.overdue_share)

    def best(self, room: Room, ask: Ask, now: float) -> Row:
        """The row of a room that the policy chooses."""
        rows = room.rows
        if len(rows) == 1:
            return rows[0]
        if len(rows) >= FEW and room.whole and self.fitting and self._columns.usable:
            row = self._columns.least_finish(room.pool, ask, now, self._rng)
        else:
            row = self._policy(rows, ask, now, self._rng)
        assert row is not None
        return row

    def next(self, now: float) -> Candidate | None:
        """The one that is next among those who wait and can be placed now."""
        self._holds.clear()
        self._recalls = RECALLS
        rooms = Rooms(self._board)
        overdue = self._oldest_overdue(now, rooms)
        ranks: Sequence[Rank] = self._line.ranks
        if overdue is not None and self._turns.due:
            # Its class's turn: between callers it stays as fair as ever.
            ranks = (ranks[overdue.priority], *ranks)
            if rooms.of(overdue) is None and self._holds.keep_for(overdue, strictly=True):
                rooms.forget()
        for rank in ranks:
            if rank.count:
                found = self._from(rank, now, rooms)
                if found is not None:
                    if overdue is not None:
                        self._turns.went(to_overdue=found.ask.priority is overdue.priority)
                    return found
        return None

    def _oldest_overdue(self, now: float, rooms: Rooms) -> Ask | None:
        """The oldest overdue request that some node has room for, or that is wide."""
        oldest: Ask | None = None
        for rank, patience in zip(self._line.ranks, self._patience, strict=True):
            for lane in rank.lanes.values():
                for ask in lane[:OLDEST]:
                    if ask.entered + patience > now or (
                        oldest is not None and oldest.age < ask.age
                    ):
                        break
                    if ask.slots > 1 or rooms.of(ask) is not None:
                        oldest = ask
                        break
        return oldest

    def _from(self, rank: Rank, now: float, rooms: Rooms) -> Candidate | None:
        """The one of a class that is next."""
        shares = rank.shares
        reach = None
        found: list[Candidate] = []
        for counter, _, account in shares.order:
            if (reach is not None and counter > reach) or len(found) >= CANDIDATES:
                break
            self._gather(account, found, rooms, now)
            if found:
                if not self.fitting:
                    break
                if reach is None:
                    reach = counter + SLACK * shares.charge
        if not found:
            return None
        if self.fitting and rank.count > len(found) and reach is not None:
            self._gather_warm(found, reach, rooms, now)
        found.sort(key=lambda one: -one.ratio)
        for declined, one in enumerate(found):
            if declined >= DECLINES:
                break
            if not self._holds.better_later(one.ask, one.room.pool, one.cost, now):
                return one
        else:
            other = self._from_others(rank, DECLINES - len(found), rooms, now)
            if other is not None or rank.count <= DECLINES:
                return other
        # A slot that so many declined is not left idle any longer.
        return found[0]

    def _gather(self, account: Account, found: list[Candidate], rooms: Rooms, now: float) -> None:
        """Add what one caller has in line and could be placed now, its oldest first."""
        if self._line.wide and not found:
            self._keep_for_oldest(account, rooms)
        for lane in account.lanes.values():
            left = OLDEST if self.fitting else 1
            for ask in lane:
                room = rooms.of(ask)
                if room is None:
                    if not ask.closed and not ask.failed:
                        break  # Nobody of this shape has room.
                    continue
                self._consider(ask, room, found, now)
                left = min(left - 1, EVALUATIONS // len(room.rows))
                if left <= 0:
                    break

    def _gather_warm(self, found: list[Candidate], reach: float, rooms: Rooms, now: float) -> None:
        """Add those further back that have their prompt cached where there is room."""
        seen = {one.ask for one in found}
        priority = found[0].ask.priority
        for row in found[0].room.rows[:WARM_ROWS]:
            for ask in list(islice(self._line.warm_at(row.index), OLDEST)):
                account = ask.account
                if ask.priority is priority and account is not None and account.counter <= reach:
                    room = None if ask in seen else rooms.of(ask)
                    if room is not None:
                        seen.add(ask)
                        self._consider(ask, room, found, now)

    def _keep_for_oldest(self, account: Account, rooms: Rooms) -> None:
        """Keep a node for the caller's oldest request if that is too wide for all as they are."""
        oldest = min((lane[0] for lane in account.lanes.values()), key=lambda ask: ask.age)
        if oldest.slots > 1 and rooms.of(oldest) is None and self._holds.keep_for(oldest):
            rooms.forget()

    def _consider(self, ask: Ask, room: Room, found: list[Candidate], now: float) -> None:
        self.evaluations += 1
        if self.recall is not None and self._recalls and ask.known < self._board.released:
            self._recalls -= 1
            ask.known = now
            self.recall(ask)
            self._line.recalled(ask)
        row = self.best(room, ask, now)
        cost = seconds(row, ask, now)
        found.append(Candidate(ask, room, row, cost, (now - ask.entered + cost) / cost))

    def _from_others(self, rank: Rank, most: int, rooms: Rooms, now: float) -> Candidate | None:
        """The first that does not do better to wait, where the likely ones all do."""
        for _, _, account in rank.shares.order:
            for lane in account.lanes.values():
                for ask in lane:
                    if most <= 0:
                        return None
                    room = None if ask.held else rooms.of(ask)
                    if room is not None:
                        row = self.best(room, ask, now)
                        cost = seconds(row, ask, now)
                        if not self._holds.better_later(ask, room.pool, cost, now):
                            return Candidate(ask, room, row, cost)
                        most -= 1
        return None
