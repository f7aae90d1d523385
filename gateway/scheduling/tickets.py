"""All that waits, whose it is, and which of it falls due next, however much it is."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from gateway.access.holdings import Holdings
from gateway.request import Request
from gateway.scheduling.ask import Ask
from gateway.scheduling.eligible import Plan
from gateway.scheduling.ticket import Ticket

SPARE = 64
"""Times of tickets that have left, beside as many as wait, that are kept until they are sorted
out."""

_rank = attrgetter("rank")


@dataclass(slots=True, eq=False)
class Tickets:
    """Tickets by what stands in line for them, by party, and by when they reach their limits."""

    holdings: Holdings = field(default_factory=Holdings)
    """How many wait of each party."""
    _of: dict[tuple[str, str], list[Ticket]] = field(default_factory=dict)
    """By caller and user: those of the best class first, of a class the oldest."""
    _serials: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    _by_ask: dict[Ask, Ticket] = field(default_factory=dict)
    _by_number: dict[int, Ticket] = field(default_factory=dict)
    """Those whose time is still to come."""
    _times: list[tuple[float, int]] = field(default_factory=list)
    """A heap; some are of tickets that have left."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._by_ask)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._by_ask.values())

    def __contains__(self, ask: Ask) -> bool:
        return ask in self._by_ask

    def get(self, ask: Ask) -> Ticket | None:
        """The ticket for which `ask` stands in line."""
        return self._by_ask.get(ask)

    def of_request(self, request_id: str) -> Ticket | None:
        """The ticket of one request."""
        return next((one for one in self if one.request.id == request_id), None)

    def add(self, ticket: Ticket) -> None:
        """It waits from now on."""
        self._by_ask[ticket.ask] = ticket
        self._put(ticket)
        request = ticket.request
        if not ticket.rank[2]:
            ticket.rank = (int(request.priority), ticket.entered, next(self._serials))
        whose = whose_is(request)
        self.holdings.add(whose[0], 1, whose[1])
        lane = self._of.setdefault(whose, [])
        insort(lane, ticket, key=_rank)

    def pop(self, ask: Ask) -> Ticket | None:
        """The same as `get`; it does not wait any more."""
        ticket = self._by_ask.pop(ask, None)
        if ticket is not None:
            self._drop(ticket)
            whose = whose_is(ticket.request)
            self.holdings.remove(whose[0], 1, whose[1])
            lane = self._of[whose]
            del lane[bisect_left(lane, ticket.rank, key=_rank)]
            if not lane:
                del self._of[whose]
        return ticket

    def newest(self, caller: str, user: str) -> Ticket | None:
        """The newest of a user that can be turned away, of its lowest class.

        One whose client has been told to wait by a heartbeat is the last choice, since its error
        comes in a reply of status 200.
        """
        told: Ticket | None = None
        for ticket in reversed(self._of.get((caller, user), ())):
            if not ticket.may_go:
                continue
            if not ticket.request.begun:
                return ticket
            told = told or ticket
        return told

    def planned(self, ticket: Ticket, plan: Plan) -> None:
        """Give one that waits another plan."""
        moved = plan.open_at != ticket.plan.open_at
        ticket.plan = plan
        if moved:
            self._drop(ticket)
            self._put(ticket)

    def soonest(self) -> float:
        """When the next one falls due; infinity: none will."""
        times = self._times
        while times and times[0][1] not in self._by_number:
            heapq.heappop(times)
        return times[0][0] if times else math.inf

    def due(self, now: float) -> list[Ticket]:
        """Those that have fallen due since the last call. They wait until they are taken out."""
        found = []
        while self.soonest() <= now:
            found.append(self._by_number.pop(heapq.heappop(self._times)[1]))
        return found

    def _put(self, ticket: Ticket) -> None:
        ticket.number = next(self._numbers)
        self._by_number[ticket.number] = ticket
        heapq.heappush(self._times, (min(ticket.until, ticket.plan.open_at), ticket.number))

    def _drop(self, ticket: Ticket) -> None:
        self._by_number.pop(ticket.number, None)
        if len(self._times) > SPARE + 2 * len(self._by_number):
            self._times = [one for one in self._times if one[1] in self._by_number]
            heapq.heapify(self._times)


def whose_is(request: Request) -> tuple[str, str]:
    """The caller of a request, and the user that it names: else itself."""
    caller = request.caller.id
    return caller, request.party or caller
