"""Who goes where, and when: the core that the gateway and the simulator both run.

Nothing here waits, sleeps or looks at a clock: time comes in with each call.

A slot never idles while a request that may use it waits, but for three reasons: a request is held
back for a node that has its prompt in its cache and is predicted to finish it sooner, though the
wait; a wide request keeps a node's slots until there are enough of them; `batch` leaves a reserve.

Requests that need no slot stand in a line of their own, in the same order: neither waits for what
the other waits for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from gateway.request import Priority
from gateway.scheduling import forecast
from gateway.scheduling.ask import MOST_TOKENS, Ask
from gateway.scheduling.board import Board, Row, bounded
from gateway.scheduling.fairness import Account
from gateway.scheduling.finish import LEAST_READ, seconds
from gateway.scheduling.forecast import Placement
from gateway.scheduling.hold import Holds
from gateway.scheduling.line import Line, warmest
from gateway.scheduling.matching import Candidate, LineRules, Matcher
from gateway.scheduling.outlook import Outlook
from gateway.scheduling.room import Room, room_for

__all__ = ["Dispatcher", "LineRules", "Placement"]


class Dispatcher:
    """Places requests on the rows of a board, and keeps those in line that find no room."""

    def __init__(self, board: Board, rules: LineRules, rng: random.Random) -> None:
        self.board = board
        self._line, self._slotless = Line(), Line()
        self._holds = Holds(board)
        self._matcher = Matcher(board, self._line, self._holds, rules, rng)
        self._slotless_matcher = Matcher(board, self._slotless, self._holds, rules, rng)
        self._outlook, self._slotless_outlook = (
            Outlook(board, self._line),
            Outlook(board, self._slotless),
        )
        self._waking = math.inf
        self.set_rules(rules)

    def set_rules(self, rules: LineRules) -> None:
        """Go by these from now on. Raises KeyError for a policy that does not exist."""
        self._matcher.set_rules(rules)
        self._slotless_matcher.set_rules(rules)
        self.rules = rules
        self.board.slotless = rules.slotless
        self.board.set_reserve(rules.reserve)

    @property
    def evaluations(self) -> int:
        """Requests that were compared so far, to see that it stays bounded."""
        return self._matcher.evaluations + self._slotless_matcher.evaluations

    @property
    def recall(self) -> Callable[[Ask], None] | None:
        """Looks up again what is `cached` and `coming` of a request that waits, and sets both."""
        return self._matcher.recall

    @recall.setter
    def recall(self, recall: Callable[[Ask], None] | None) -> None:
        self._matcher.recall = recall

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
        while self._slotless.count and (found := self._slotless_matcher.next(now)) is not None:
            placements.append(self._take_next(found, now))
        while self._line.count and self.board.open:
            found = self._matcher.next(now)
            if found is None:
                break
            placements.append(self._take_next(found, now))
        self._waking = min([ask.held_until for ask in self._holds.asks], default=math.inf)
        return placements

    def withdraw(self, ask: Ask) -> bool:
        """Take `ask` out of the line; whether it was in it. Then call `match`."""
        self._holds.drop(ask)
        if ask.account is None:
            return False
        self._line_of(ask).remove(ask)
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
            if placement.ask.slots:
                row.ours -= placement.ask.slots
            else:
                self.board.gave_slotless(row, placement.ask.owner)
            self.board.released = now
            self.board.settle(row)

    def settled(
        self, placement: Placement, prompt: float, cached: float, completion: float
    ) -> None:
        """It took so many tokens: its caller is charged for these instead of the estimate."""
        used = bounded(prompt - cached, 0.0, MOST_TOKENS, 0.0)
        if completion:
            used += bounded(completion, 0.0, MOST_TOKENS, 0.0) * placement.weight
        self._correct(placement, used)

    def cancelled(self, placement: Placement, now: float) -> None:
        """It was never sent: as if it had not been placed."""
        self.released(placement, now)
        self._correct(placement, 0.0)

    def _correct(self, placement: Placement, used: float) -> None:
        account = placement.account
        if account is not None:
            placement.account = None
            ask = placement.ask
            line = self._line if ask.slots else self._slotless
            shares = line.ranks[ask.priority].shares
            shares.settled(account, used - placement.charge)

    # What is to be expected.

    @property
    def waiting(self) -> int:
        """How many are in line."""
        return self._line.count + self._slotless.count

    def asks(self) -> list[Ask]:
        """What waits, by class and age; what needs no slot at the end."""
        return [*self._line, *self._slotless]

    def depths(self) -> dict[Priority, int]:
        """How many of each class wait."""
        ranks = zip(Priority, self._line.ranks, self._slotless.ranks, strict=True)
        return {priority: rank.count + other.count for priority, rank, other in ranks}

    def ahead(self, ask: Ask) -> int:
        """About how many go before `ask`, which waits or comes now."""
        return (self._outlook if ask.slots else self._slotless_outlook).ahead(ask)

    def places(self, now: float) -> Iterator[tuple[Ask, float]]:
        """What waits in about the order in which it will go, and seconds until it has its slots.

        One pass over all of it; the line must not change meanwhile. How long what needs no slot
        will wait is not known: infinity.
        """
        yield from self._outlook.places(now)
        for ask in self._slotless_outlook.order():
            yield ask, math.inf

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
        line = self._line if ask.slots else self._slotless
        if line.count and self.board.freed:
            return None
        room = room_for(self.board, ask)
        if room is None:
            return None
        row = self._matcher.best(room, ask, now)
        if (ask.cached or ask.coming) and self._matcher.fitting:
            ask.warmest = warmest(ask)
            if self._holds.better_later(ask, room.pool, seconds(row, ask, now), now):
                return None
        account = line.ranks[ask.priority].shares.account(ask.caller)
        return self._take(ask, account, row, room, now)

    def _enter(self, ask: Ask, now: float) -> None:
        if not self.waiting:
            self.board.freed = False  # It has just looked at all there is.
        ask.known = now
        if ask.slots:
            ask.work = self._outlook.work(ask)
        line = self._line_of(ask)
        line.add(ask, line.ranks[ask.priority].shares.account(ask.caller))
        if ask.held is not None:
            self._waking = min(self._waking, ask.held_until)

    def _take(self, ask: Ask, account: Account, row: Row, room: Room, now: float) -> Placement:
        board = self.board
        placement = forecast.place(ask, row, room.pool, room.group, now)
        line = self._line
        if ask.slots:
            row.ours += ask.slots
        else:
            line = self._slotless
            board.took_slotless(row, ask.owner)
        board.placed = row.used = board.placed + 1
        board.settle(row)
        placement.account = account
        charge = ask.prompt
        if ask.cached:
            charge = max(LEAST_READ, charge - ask.cached.get(row.index, 0.0))
        placement.weight = weight = self._outlook.weight
        charge += ask.completion * weight
        placement.charge = charge
        line.ranks[ask.priority].shares.served(account, charge)
        return placement

    def _take_next(self, found: Candidate, now: float) -> Placement:
        """Place what waits and is next."""
        ask, account = found.ask, found.ask.account
        assert account is not None
        self._line_of(ask).remove(ask)
        self._holds.drop(ask)
        return self._take(ask, account, found.row, found.room, now)

    def _line_of(self, ask: Ask) -> Line:
        return self._line if ask.slots else self._slotless
