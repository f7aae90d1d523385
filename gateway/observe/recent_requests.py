"""The records of requests that have ended lately, to be looked at by their ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.events import EventBus, RequestFinished

MOST_SERVED = 4096
"""Requests that have been at a node."""

MOST_UNSERVED = 1024
"""Requests that have not: a flood of refusals pushes no other out."""


class EndedRequest(NamedTuple):
    """A request that has ended."""

    record: RequestFinished
    ended_at: float
    """Monotonic seconds, up to a twentieth of a second late."""


@dataclass(slots=True, eq=False)
class RecentRequests:
    """The newest requests that have ended; without their text, as records have none."""

    bus: EventBus
    clock: Callable[[], float]
    _served: deque[EndedRequest] = field(default_factory=lambda: deque(maxlen=MOST_SERVED))
    _unserved: deque[EndedRequest] = field(default_factory=lambda: deque(maxlen=MOST_UNSERVED))

    def __post_init__(self) -> None:
        self.bus.subscribe(RequestFinished, self._ended)

    def find(self, name: str) -> Iterator[EndedRequest]:
        """Those of this id or `X-Request-ID`, the newest first in each of the two kinds."""
        self.bus.flush()
        for kind in (self._served, self._unserved):
            for one in reversed(kind):
                if name in {one.record.request_id, one.record.x_request_id}:
                    yield one

    def _ended(self, record: RequestFinished) -> None:
        ended = EndedRequest(record, self.clock())
        (self._served if record.attempts else self._unserved).append(ended)
