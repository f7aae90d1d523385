"""The requests that wait and run, for the admin API, drains and the shutdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.fleet.lease import Lease
from gateway.relay.attempt import Attempt
from gateway.relay.prefill import Prefill
from gateway.request import Request
from gateway.transport.errors import UpstreamError


class Ended(UpstreamError):  # noqa: N818 - beside `Overdue`
    """We end the request ourselves; the client gets `error`."""

    outcome = "cancelled"

    def __init__(self, error: GatewayError) -> None:
        super().__init__(error.message)
        self.error = error


class Moved(UpstreamError):  # noqa: N818 - beside `Ended`
    """Its node is to be free: the request goes elsewhere, or its client gets `error`."""

    outcome = "moved"

    def __init__(self, error: GatewayError) -> None:
        super().__init__(error.message)
        self.error = error


class Doubt(NamedTuple):
    """A failure that either the node or the request itself is to blame for."""

    lease: Lease
    begun: bool = False
    """Whether the answer had begun."""
    counted: bool = True
    """Whether it is among the node's failures already."""


@dataclass(slots=True, eq=False)
class Live:
    """A request on its way."""

    request: Request
    record: RequestFinished
    attempt: Attempt | None = None
    ended_by: GatewayError | None = None
    prefill: Prefill | None = None
    """How far its prompt has been read, for a client that wants to know."""
    parts: dict[str, Live] | None = None
    """What waits and runs of a request of several prompts, by id; None: it is one itself."""
    on_end: Callable[[GatewayError], None] | None = None
    """Called when it is ended, by what runs its parts."""
    doubts: tuple[Doubt, ...] = ()
    """Its failures of which it is yet to be seen who is to blame."""

    def end(self, error: GatewayError) -> None:
        """End it where it stands; its client gets `error`, as an event if the reply has begun."""
        if self.ended_by is None:
            self.ended_by = error
            if self.attempt is not None:
                self.attempt.fail(Ended(error))
            if self.on_end is not None:
                self.on_end(error)

    def move(self, error: GatewayError) -> None:
        """Have it leave its node; its client gets `error` if it can't go on elsewhere."""
        if self.attempt is not None:
            self.attempt.fail(Moved(error))

    def trying(self, attempt: Attempt) -> None:
        """An attempt begins; it is failed at once if the request was ended meanwhile."""
        self.attempt = attempt
        if self.ended_by is not None:
            attempt.fail(Ended(self.ended_by))


class Registry:
    """All live requests by their own id."""

    def __init__(self) -> None:
        self._live: dict[str, Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Live]:
        """Each, and behind it the parts that it runs in."""
        found: list[Live] = []
        for live in self._live.values():
            found.append(live)
            if live.parts is not None:
                found += live.parts.values()
        return iter(found)

    def add(self, live: Live) -> None:
        """A request has been read."""
        self._live[live.request.id] = live

    def remove(self, live: Live) -> None:
        """A request is over."""
        self._live.pop(live.request.id, None)

    def find(self, name: str) -> Live | None:
        """The request of this id, or with this `X-Request-ID` if only one has it."""
        live = self._live.get(name)
        if live is None:
            tagged = [live for live in self if name in {live.request.tag, live.request.id}]
            live = tagged[0] if len(tagged) == 1 else None
        return live

    def end_where(self, chosen: Callable[[Live], bool], error: GatewayError) -> int:
        """End all that `chosen` says; returns how many."""
        ended = [live for live in self if chosen(live)]
        for live in ended:
            live.end(error)
        return len(ended)
