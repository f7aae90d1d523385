"""A place in the queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.fleet.lease import Lease
from gateway.request import Request

Shape = tuple[object, ...]
"""What the choice of a node goes by: requests of one shape can go to the same nodes."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in the queue."""

    request: Request
    entered: float
    until: float
    """When it has waited long enough; monotonic seconds."""
    granted: asyncio.Future[tuple[Lease, str]]
    out_since: float | None = None
    """Since when every node that could serve it has been out."""

    @property
    def position(self) -> float:
        """The key of the queue's order."""
        return self.request.received


@dataclass(frozen=True, slots=True)
class Waiting:
    """One waiting request, as the admin API shows it."""

    request: Request
    position: int
    seconds: float


def shape_of(request: Request, smallest: float) -> Shape:
    """The shape of a request, where no node has a context below `smallest` tokens."""
    needed = max(request.prompt_tokens, request.smallest_context)
    return (
        request.candidates,
        request.endpoint,
        request.vision,
        request.native,
        request.slots,
        needed if needed > smallest else 0,
        frozenset(request.failed),
        frozenset(request.refused),
    )
