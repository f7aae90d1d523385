"""Who goes where, and when: the core that the gateway and the simulator both run.

Nothing here waits, sleeps or looks at a clock: time comes in with each call.

A slot never idles while a request that may use it waits, but for three reasons: a request is held
back for a node that has its prompt in its cache and is predicted to finish it sooner, though the
wait; a wide request keeps a node's slots until there are enough of them; `batch` leaves a reserve.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from gateway.request import Priority
from gateway.scheduling import forecast
from gateway.scheduling.ageing import Turns
from gateway.scheduling.ask import MOST_TOKENS, Ask
from gateway.scheduling.board import Board, Row, bounded
from gateway.scheduling.columns import FEW, Columns
from gateway.scheduling.fairness import SLACK, Account
from gateway.scheduling.finish import LEAST_READ, seconds
from gateway.scheduling.forecast import Placement
from gateway.scheduling.hold import Holds
from gateway.scheduling.line import Line, Rank, warmest
from gateway.scheduling.outlook import Outlook
from gateway.scheduling.policies import POLICIES, Policy, least_finish
from gateway.scheduling.room import Room, Rooms, room_for

__all__ = ["Dispatcher", "LineRules", "Placement"]

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
    return {
        Priority.URGENT: 10.0,
        Priority.PREMIUM: 20.0,
        Priority.NORMAL: 60.0,
        Priority.BATCH: 300.0,
    }


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


@dataclass(slots=True)
class Candidate:
    """A waiting request with the best row it could have now."""

    ask: Ask
    room: Room
    row: Row
    cost: float
    """Its expected finish there, in seconds."""
    ratio: float
    """Its response ratio: the time it would have been here by then, against that."""


class Dispatcher:
    """Places requests on the rows of a board, and keeps those in line that find no room."""

    def __init__(self, board: Board, rules: LineRules, rng: random.Random) -> None:
        self.board = board
        self.rng = rng
        self.evaluations = 0
        """Requests that were compared so far, to see that it stays bounded."""
        self._line = Line()
        self._holds = Holds(board)
        self._columns = Columns(board)
        self._outlook = Outlook(board, self._line)
        self._waking = math.inf
        self._recalls = 0
        self.recall: Callable[[Ask], None] | None = None
        """Looks up again what is `cached` and `coming` of a request that waits, and sets it."""
        self.set_rules(rules)

    def set_rules(self, rules: LineRules) -> None:
        """Go by these from now on. Raises KeyError for a policy that does not exist."""
        self._policy: Policy = POLICIES[rules.policy]
        self._fitting = self._policy is least_finish
        self._patience = [rules.patience[priority] for priority in Priority]
        self._turns = Turns(rules.overdue_share)
        self.rules = rules
        self.board.set_reserve(rules.reserve)

    # What happens.

    def arrive(self, ask: Ask, now: float) -> Placement | None:
        """Place `ask` at once, or put it in line: None."""
        placement = self._placed(ask, now)
        if placement is None:
            self._enter(ask, now)
        return placement

    def place(self, ask: Ask, now: float) -> Placement | None:
        """Place `ask` at once; None where it would have to wait, and it does not."""
        placement = self._placed(ask, now)
        if placement is None:
            self._holds.drop(ask)
        return placement

    def match(self, now: float) -> list[Placement]:
        """Give free slots to those who wait; to be called when capacity has changed."""
        placements: list[Placement] = []
        self.board.freed = False
        self._holds.clear()
        while self._line.count and (self.board.open or self._line.slotless):
            placement = self._next(now)
            if placement is None:
                break
            placements.append(placement)
        self._waking = min([ask.held_until for ask in self._holds.asks], default=math.inf)
        return placements

    def withdraw(self, ask: Ask) -> bool:
        """Take `ask` out of the line; whether it was in it. Then call `match`."""
        self._holds.drop(ask)
        if ask.account is None:
            return False
        self._line.remove(ask)
        return True

    def began(self, placement: Placement, now: float) -> None:
        """The first token came: the prompt has been read. Sharpens what is to be expected."""
        if not placement.over:
            forecast.began(placement, now)
            self.board.touch(placement.row)

    def finished(
        self, placement: Placement, now: float, prompt: float, cached: float, completion: float
    ) -> None:
        """Both `released` and `settled`."""
        self.released(placement, now)
        self.settled(placement, prompt, cached, completion)

    def released(self, placement: Placement, now: float) -> None:
        """The slots of `placement` are free again. Then call `match`."""
        if not placement.over:
            placement.over = True
            row = placement.row
            forecast.end(placement, now)
            row.ours -= placement.ask.slots
            self.board.released = now
            self.board.settle(row)

    def settled(
        self, placement: Placement, prompt: float, cached: float, completion: float
    ) -> None:
        """It took so many tokens: its caller is charged for these instead of the estimate."""
        used = bounded(prompt - cached, 0.0, MOST_TOKENS, 0.0)
        used += bounded(completion, 0.0, MOST_TOKENS, 0.0) * self._outlook.weight
        self._correct(placement, used)

    def cancelled(self, placement: Placement, now: float) -> None:
        """It was never sent: as if it had not been placed."""
        self.released(placement, now)
        self._correct(placement, 0.0)

    def _correct(self, placement: Placement, used: float) -> None:
        account = placement.account
        if account is not None:
            placement.account = None
            shares = self._line.ranks[placement.ask.priority].shares
            shares.settled(account, used - placement.charge)

    # What is to be expected.

    @property
    def waiting(self) -> int:
        """How many are in line."""
        return self._line.count

    def asks(self) -> list[Ask]:
        """What waits, by class and age."""
        return list(self._line)

    def depths(self) -> dict[Priority, int]:
        """How many of each class wait."""
        return {priority: self._line.ranks[priority].count for priority in Priority}

    def position(self, ask: Ask) -> int:
        """About its place in line, from 1; 0 if it does not wait."""
        return self._outlook.position(ask)

    def expected_start(self, ask: Ask, now: float) -> float:
        """When `ask`, which waits, is expected to get its slots; monotonic seconds."""
        return now + self._outlook.wait_of(ask, now)

    def predicted_wait(self, ask: Ask, now: float) -> float:
        """Seconds that `ask` would wait if it came now."""
        return 0.0 if room_for(self.board, ask) else self._outlook.wait_of(ask, now)

    def wake_at(self, now: float) -> float | None:
        """When `match` is to be called though nothing has changed; None: no need to."""
        return self._waking if self._waking < math.inf else None

    # Inside: what arrives.

    def _placed(self, ask: Ask, now: float) -> Placement | None:
        """Place `ask` unless it has to wait, or does better to.

        Where slots have come free that `match` has not given out yet, those who wait go first.
        """
        if self._line.count and self.board.freed:
            return None
        room = room_for(self.board, ask)
        if room is None:
            return None
        row = self._best(room, ask, now)
        if (ask.cached or ask.coming) and self._fitting:
            ask.warmest = warmest(ask)
            if self._holds.better_later(ask, room.pool, seconds(row, ask, now), now):
                return None
        account = self._line.ranks[ask.priority].shares.account(ask.caller)
        return self._take(ask, account, row, room, now)

    def _enter(self, ask: Ask, now: float) -> None:
        ask.known = now
        ask.work = self._outlook.work(ask)
        account = self._line.ranks[ask.priority].shares.account(ask.caller)
        self._line.add(ask, account)
        if ask.held is not None:
            self._waking = min(self._waking, ask.held_until)

    # Inside: who is next.

    def _best(self, room: Room, ask: Ask, now: float) -> Row:
        rows = room.rows
        if len(rows) == 1:
            return rows[0]
        if len(rows) >= FEW and room.whole and self._fitting and self._columns.usable:
            row = self._columns.least_finish(room.pool, ask, now, self.rng)
        else:
            row = self._policy(rows, ask, now, self.rng)
        assert row is not None
        return row

    def _next(self, now: float) -> Placement | None:
        """Place the one that is next among those who wait and can be placed."""
        self._holds.clear()
        self._recalls = RECALLS
        rooms = Rooms(self.board)
        overdue = self._oldest_overdue(now, rooms)
        if overdue is not None and self._turns.due:
            room = rooms.of(overdue)
            if room is not None:
                self._turns.taken()
                return self._leave(overdue, self._best(room, overdue, now), room, now)
            if self._holds.keep_for(overdue, strictly=True):
                rooms.forget()
        for rank in self._line.ranks:
            if rank.count:
                placement = self._from(rank, now, rooms)
                if placement is not None:
                    if overdue is not None and placement.ask is not overdue:
                        self._turns.passed()
                    return placement
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

    def _from(self, rank: Rank, now: float, rooms: Rooms) -> Placement | None:
        """Place the one of a class that is next."""
        shares = rank.shares
        reach = None
        found: list[Candidate] = []
        for counter, _, account in shares.order:
            if (reach is not None and counter > reach) or len(found) >= CANDIDATES:
                break
            self._gather(account, found, rooms, now)
            if found:
                if not self._fitting:
                    break
                if reach is None:
                    reach = counter + SLACK * shares.charge
        if not found:
            return None
        if self._fitting and rank.count > len(found) and reach is not None:
            self._gather_warm(found, reach, rooms, now)
        found.sort(key=lambda one: -one.ratio)
        for declined, one in enumerate(found):
            if declined >= DECLINES:
                break
            if not self._holds.better_later(one.ask, one.room.pool, one.cost, now):
                return self._leave(one.ask, one.row, one.room, now)
        else:
            other = self._from_others(rank, DECLINES - len(found), rooms, now)
            if other is not None or rank.count <= DECLINES:
                return other
        # A slot that so many declined is not left idle any longer.
        first = found[0]
        return self._leave(first.ask, first.row, first.room, now)

    def _gather(self, account: Account, found: list[Candidate], rooms: Rooms, now: float) -> None:
        """Add what one caller has in line and could be placed now, its oldest first."""
        if self._line.wide and not found:
            self._keep_for_oldest(account, rooms)
        for lane in account.lanes.values():
            most = 1
            for place, ask in enumerate(lane):
                if place >= most:
                    break
                room = rooms.of(ask)
                if room is None:
                    if not ask.closed and not ask.failed:
                        break  # Nobody of this shape has room.
                    most += 1
                    continue
                if self._fitting and place == 0:
                    most = min(OLDEST, max(1, EVALUATIONS // len(room.rows)))
                self._consider(ask, room, found, now)

    def _gather_warm(self, found: list[Candidate], reach: float, rooms: Rooms, now: float) -> None:
        """Add those further back that have their prompt cached where there is room."""
        seen = {one.ask for one in found}
        priority = found[0].ask.priority
        for row in found[0].room.rows[:WARM_ROWS]:
            for ask in islice(self._line.warm_at(row.index), OLDEST):
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
        if self.recall is not None and self._recalls and ask.known < self.board.released:
            self._recalls -= 1
            ask.known = now
            self.recall(ask)
            self._line.recalled(ask)
        row = self._best(room, ask, now)
        cost = seconds(row, ask, now)
        found.append(Candidate(ask, room, row, cost, (now - ask.entered + cost) / cost))

    def _from_others(self, rank: Rank, most: int, rooms: Rooms, now: float) -> Placement | None:
        """Place the first that does not do better to wait, where the likely ones all do."""
        for _, _, account in rank.shares.order:
            for lane in account.lanes.values():
                for ask in lane:
                    if most <= 0:
                        return None
                    room = None if ask.held else rooms.of(ask)
                    if room is not None:
                        row = self._best(room, ask, now)
                        cost = seconds(row, ask, now)
                        if not self._holds.better_later(ask, room.pool, cost, now):
                            return self._leave(ask, row, room, now)
                        most -= 1
        return None

    def _leave(self, ask: Ask, row: Row, room: Room, now: float) -> Placement:
        """Place one that waits."""
        account = ask.account
        assert account is not None
        self._line.remove(ask)
        self._holds.drop(ask)
        return self._take(ask, account, row, room, now)

    def _take(self, ask: Ask, account: Account, row: Row, room: Room, now: float) -> Placement:
        board = self.board
        placement = forecast.place(ask, row, room.pool, room.group, now)
        row.ours += ask.slots
        board.placed = row.used = board.placed + 1
        board.settle(row)
        placement.account = account
        charge = ask.prompt
        if ask.cached:
            charge = max(LEAST_READ, charge - ask.cached.get(row.index, 0.0))
        charge += ask.completion * self._outlook.weight
        placement.charge = charge
        self._line.ranks[ask.priority].shares.served(account, charge)
        return placement
