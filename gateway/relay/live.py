"""The requests that wait and run, for the admin API, drains and the shutdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gateway.errors import GatewayError
from gateway.events import RequestFinished
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


@dataclass(slots=True, eq=False)
class Live:
    """A request on its way."""

    request: Request
    record: RequestFinished
    attempt: Attempt | None = None
    ended_by: GatewayError | None = None
    prefill: Prefill | None = None
    """How far its prompt has been read, for a client that wants to know."""

    def end(self, error: GatewayError) -> None:
        """End it where it stands; its client gets `error`, as an event if the reply has begun."""
        if self.ended_by is None:
            self.ended_by = error
            if self.attempt is not None:
                self.attempt.fail(Ended(error))

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
        return iter(list(self._live.values()))

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
            tagged = [live for live in self._live.values() if live.request.tag == name]
            live = tagged[0] if len(tagged) == 1 else None
        return live

    def end_where(self, chosen: Callable[[Live], bool], error: GatewayError) -> int:
        """End all that `chosen` says; returns how many."""
        ended = [live for live in self if chosen(live)]
        for live in ended:
            live.end(error)
        return len(ended)
