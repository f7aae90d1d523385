"""A place in the queue."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from gateway import errors
from gateway.access.fair_share import FairShare
from gateway.config.settings import Settings
from gateway.fleet.node import Lease
from gateway.request import Request
from gateway.scheduling.candidates import NodeCandidates, NodesByModel
from gateway.scheduling.placement_state import QueuedRequest


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits, and what the dispatcher has of it in line."""

    request: Request
    candidates: NodeCandidates
    queued: QueuedRequest
    queued_at: float
    expires_at: float
    """When it has waited long enough; monotonic seconds."""
    granted: asyncio.Future[tuple[Lease, str]]
    nodes_down_since: float | None = None
    """Since when every node that could serve it has been out."""
    shed_key: tuple[int, float, int] = (0, 0.0, 0)
    """Its order among its party's: by class, then by age."""
    timer_id: int = -1
    """Its place among the times that `Tickets` keeps."""

    @property
    def can_shed(self) -> bool:
        """Whether it can be turned away.

        What has been at a node once can't, nor what is part of a request that has: its reply may
        have begun.
        """
        request = self.request
        return not (request.failed_nodes or request.admitted or self.granted.done())


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """One waiting request, as the admin API shows it."""

    request: Request
    position: int
    waited_seconds: float
    expected_seconds: float | None = None
    """Seconds until it is expected to start; None: nobody knows."""


MOST_STALE_TIMERS = 64
"""Times of tickets that have left, beside as many as wait, that are kept until they are sorted
out."""

_shed_key = attrgetter("shed_key")


@dataclass(slots=True, eq=False)
class Waiters:
    """Tickets by what stands in line for them, by party, and by when they reach their limits."""

    fair_share: FairShare = field(default_factory=FairShare)
    """How many wait of each party."""
    _of: dict[tuple[str, str], list[Waiter]] = field(default_factory=dict)
    """By caller and user: those of the best class first, of a class the oldest."""
    _serials: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    _by_ask: dict[QueuedRequest, Waiter] = field(default_factory=dict)
    _by_number: dict[int, Waiter] = field(default_factory=dict)
    """Those whose time is still to come."""
    _times: list[tuple[float, int]] = field(default_factory=list)
    """A heap; some are of tickets that have left."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._by_ask)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._by_ask.values())

    def __contains__(self, ask: QueuedRequest) -> bool:
        return ask in self._by_ask

    def get(self, queued: QueuedRequest) -> Waiter | None:
        """The ticket for which `ask` stands in line."""
        return self._by_ask.get(queued)

    def by_request_id(self, request_id: str) -> Waiter | None:
        """The ticket of one request."""
        return next((one for one in self if one.request.id == request_id), None)

    def add(self, waiter: Waiter) -> None:
        """It waits from now on."""
        self._by_ask[waiter.queued] = waiter
        self._put(waiter)
        request = waiter.request
        if not waiter.shed_key[2]:
            waiter.shed_key = (int(request.priority), waiter.queued_at, next(self._serials))
        whose = caller_and_user(request)
        self.fair_share.add(whose[0], 1, whose[1])
        lane = self._of.setdefault(whose, [])
        insort(lane, waiter, key=_shed_key)

    def pop(self, queued: QueuedRequest) -> Waiter | None:
        """The same as `get`; it does not wait any more."""
        ticket = self._by_ask.pop(queued, None)
        if ticket is not None:
            self._drop(ticket)
            whose = caller_and_user(ticket.request)
            self.fair_share.remove(whose[0], 1, whose[1])
            lane = self._of[whose]
            del lane[bisect_left(lane, ticket.shed_key, key=_shed_key)]
            if not lane:
                del self._of[whose]
        return ticket

    def newest_sheddable(self, caller: str, user: str) -> Waiter | None:
        """The newest of a user that can be turned away, of its lowest class.

        One whose client has been told to wait by a heartbeat is the last choice, since its error
        comes in a reply of status 200.
        """
        told: Waiter | None = None
        for ticket in reversed(self._of.get((caller, user), ())):
            if not ticket.can_shed:
                continue
            if not ticket.request.response_started:
                return ticket
            told = told or ticket
        return told

    def set_candidates(self, waiter: Waiter, candidates: NodeCandidates) -> None:
        """Give one that waits another plan."""
        moved = candidates.fallback_at != waiter.candidates.fallback_at
        waiter.candidates = candidates
        if moved:
            self._drop(waiter)
            self._put(waiter)

    def next_due(self) -> float:
        """When the next one falls due; infinity: none will."""
        times = self._times
        while times and times[0][1] not in self._by_number:
            heapq.heappop(times)
        return times[0][0] if times else math.inf

    def pop_due(self, now: float) -> list[Waiter]:
        """Those that have fallen due since the last call. They wait until they are taken out."""
        found = []
        while self.next_due() <= now:
            found.append(self._by_number.pop(heapq.heappop(self._times)[1]))
        return found

    def _put(self, ticket: Waiter) -> None:
        ticket.timer_id = next(self._numbers)
        self._by_number[ticket.timer_id] = ticket
        heapq.heappush(
            self._times, (min(ticket.expires_at, ticket.candidates.fallback_at), ticket.timer_id)
        )

    def _drop(self, ticket: Waiter) -> None:
        self._by_number.pop(ticket.timer_id, None)
        if len(self._times) > MOST_STALE_TIMERS + 2 * len(self._by_number):
            self._times = [one for one in self._times if one[1] in self._by_number]
            heapq.heapify(self._times)


def caller_and_user(request: Request) -> tuple[str, str]:
    """The caller of a request, and the user that it names: else itself."""
    caller = request.caller.id
    return caller, request.fairness_key or caller


def standby_ready_in(nodes_by_model: NodesByModel, cooldown: float, now: float) -> float | None:
    """Seconds until a standby node among these is expected to work; None: none is coming."""
    return min(
        (
            node.lifecycle.ready_in(now, cooldown)
            for _, nodes in nodes_by_model
            for node in nodes
            if node.spec.standby and node.startable
        ),
        default=None,
    )


def expiry_error(
    waiter: Waiter, settings: Settings, retry_after: float, now: float
) -> errors.GatewayError | None:
    """Why a request may not wait any longer; None: it may. `retry_after`: seconds for a place.

    While all its nodes are out it waits `retries.wait_for_node`; but for a standby node that is
    coming it waits as for any slot.
    """
    coming = None
    if waiter.candidates.any_alive():
        waiter.nodes_down_since = None
    else:
        coming = standby_ready_in(waiter.candidates.by_model, settings.elastic.cooldown, now)
        if coming is not None:
            waiter.nodes_down_since = None
        elif waiter.nodes_down_since is None:
            waiter.nodes_down_since = now
    out = waiter.nodes_down_since
    if out is not None and now - out >= settings.retries.wait_for_node:
        names = ", ".join(repr(name) for name in waiter.request.model_names)
        return errors.no_node(f"Every node for {names} is out.", retry_after)
    if now < waiter.expires_at:
        return None
    waited = now - waiter.queued_at
    if coming is not None:
        return errors.starting(
            f"The node for it is still being started after {waited:.0f} s; "
            f"it is expected in {coming:.0f} s.",
            coming,
        )
    return errors.queue_timeout(f"No slot came free in {waited:.0f} s.", retry_after)
