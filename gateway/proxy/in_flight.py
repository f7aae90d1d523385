"""The requests that wait and run, for the admin API, drains and the shutdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.fleet.node import Lease
from gateway.proxy.attempt import Attempt
from gateway.proxy.prefill_progress import PrefillProgress
from gateway.request import Request
from gateway.transport.errors import UpstreamError


class RequestCancelled(UpstreamError):  # noqa: N818 - beside `Overdue`
    """We end the request ourselves; the client gets `error`."""

    outcome = "cancelled"

    def __init__(self, error: GatewayError) -> None:
        super().__init__(error.message)
        self.error = error


class RequestEvicted(UpstreamError):  # noqa: N818 - beside `Ended`
    """Its node is to be free: the request goes elsewhere, or its client gets `error`."""

    outcome = "moved"

    def __init__(self, error: GatewayError) -> None:
        super().__init__(error.message)
        self.error = error


class UnattributedFailure(NamedTuple):
    """A failure that either the node or the request itself is to blame for."""

    lease: Lease
    response_started: bool = False
    """Whether the answer had begun."""
    counted: bool = True
    """Whether it is among the node's failures already."""


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request on its way."""

    request: Request
    record: RequestFinished
    attempt: Attempt | None = None
    cancel_error: GatewayError | None = None
    prefill_progress: PrefillProgress | None = None
    """How far its prompt has been read, for a client that wants to know."""
    sub_requests: dict[str, InFlightRequest] | None = None
    """What waits and runs of a request of several prompts, by id; None: it is one itself."""
    on_cancel: Callable[[GatewayError], None] | None = None
    """Called when it is ended, by what runs its parts."""
    unattributed_failures: tuple[UnattributedFailure, ...] = ()
    """Its failures of which it is yet to be seen who is to blame."""

    def cancel(self, error: GatewayError) -> None:
        """End it where it stands; its client gets `error`, as an event if the reply has begun."""
        if self.cancel_error is None:
            self.cancel_error = error
            if self.attempt is not None:
                self.attempt.fail(RequestCancelled(error))
            if self.on_cancel is not None:
                self.on_cancel(error)

    def evict(self, error: GatewayError) -> None:
        """Have it leave its node; its client gets `error` if it can't go on elsewhere."""
        if self.attempt is not None:
            self.attempt.fail(RequestEvicted(error))

    def begin_attempt(self, attempt: Attempt) -> None:
        """An attempt begins; it is failed at once if the request was ended meanwhile."""
        self.attempt = attempt
        if self.cancel_error is not None:
            attempt.fail(RequestCancelled(self.cancel_error))


class InFlightRegistry:
    """All live requests by their own id."""

    def __init__(self) -> None:
        self._live: dict[str, InFlightRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[InFlightRequest]:
        """Each, and behind it the parts that it runs in."""
        found: list[InFlightRequest] = []
        for live in self._live.values():
            found.append(live)
            if live.sub_requests is not None:
                found += live.sub_requests.values()
        return iter(found)

    def add(self, in_flight: InFlightRequest) -> None:
        """A request has been read."""
        self._live[in_flight.request.id] = in_flight

    def remove(self, in_flight: InFlightRequest) -> None:
        """A request is over."""
        self._live.pop(in_flight.request.id, None)

    def find(self, name: str) -> InFlightRequest | None:
        """The request of this id, or with this `X-Request-ID` if only one has it."""
        live = self._live.get(name)
        if live is None:
            tagged = [live for live in self if name in {live.request.x_request_id, live.request.id}]
            live = tagged[0] if len(tagged) == 1 else None
        return live

    def cancel_where(
        self, predicate: Callable[[InFlightRequest], bool], error: GatewayError
    ) -> int:
        """End all that `chosen` says; returns how many."""
        ended = [live for live in self if predicate(live)]
        for live in ended:
            live.cancel(error)
        return len(ended)
