"""A place in the queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.fleet.lease import Lease
from gateway.request import Request
from gateway.scheduling.ask import Ask
from gateway.scheduling.eligible import Plan


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits, and what the dispatcher has of it in line."""

    request: Request
    plan: Plan
    ask: Ask
    entered: float
    until: float
    """When it has waited long enough; monotonic seconds."""
    granted: asyncio.Future[tuple[Lease, str]]
    out_since: float | None = None
    """Since when every node that could serve it has been out."""
    rank: tuple[int, float, int] = (0, 0.0, 0)
    """Its order among its party's: by class, then by age."""
    number: int = -1
    """Its place among the times that `Tickets` keeps."""

    @property
    def may_go(self) -> bool:
        """Whether it can be turned away.

        What has been at a node once can't, nor what is part of a request that has: its reply may
        have begun.
        """
        request = self.request
        return not (request.failed or request.admitted or self.granted.done())


@dataclass(frozen=True, slots=True)
class Waiting:
    """One waiting request, as the admin API shows it."""

    request: Request
    position: int
    seconds: float
    expected: float | None = None
    """Seconds until it is expected to start; None: nobody knows."""
