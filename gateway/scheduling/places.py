"""Places in the queue, as parties share them.

Each class may fill the queue up to its share (`admission.py`), and a caller alone all but a reserve
(`access/holdings.py`). What others have in line beyond what a caller would have itself keeps none
of its requests out, of whatever class: where every place is taken, the newest request of the
largest holder goes for it, of its lowest class first. So a crowd of one caller harms that caller
alone, and between callers with equally many the better class has the last places.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.access.holdings import usual
from gateway.request import Request
from gateway.scheduling.admission import Admission
from gateway.scheduling.ticket import Ticket
from gateway.scheduling.tickets import Tickets, whose_is


@dataclass(frozen=True, slots=True)
class Place:
    """Whether one more may wait."""

    waiting: int
    """How many wait already, as far as that counts for this request."""
    yields: Ticket | None = None
    """The one that has to go for it."""


def place_for(request: Request, tickets: Tickets, admission: Admission) -> Place:
    """The place of `request`, if there is one."""
    caller, user = whose_is(request)
    waiting, most = len(tickets), admission.settings.queue.max
    count = admission.bounds(request.priority).count
    holdings = tickets.holdings
    if holdings.of(caller) >= usual(most) or not holdings.fits(caller, 1, count):
        # Its caller has its share; within that, another of the caller's users may have more.
        yields = _newest(tickets, holdings.larger_user(caller, 1, user))
        return Place(max(waiting, count) if yields is None else count - 1, yields)
    if waiting < count:
        return Place(waiting)
    for other in holdings.yielding(caller, 1, count):
        yields = _newest(tickets, *((other, name) for name in holdings.user_order(other)))
        if yields is not None:
            # A class below is not turned away while there is room that its own share leaves free.
            needed = waiting >= admission.bounds(yields.request.priority).count
            return Place(count - 1, yields if needed else None)
    return Place(count - 1 if waiting < most else waiting)


def _newest(tickets: Tickets, *whose: tuple[str, str] | None) -> Ticket | None:
    for one in whose:
        ticket = None if one is None else tickets.newest(*one)
        if ticket is not None:
            return ticket
    return None
