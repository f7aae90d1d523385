"""The requests that wait: by caller, for shedding, and by the time at which each falls due."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from msgspec.structs import replace

from gateway import errors
from gateway.access.fair_share import FairShare
from gateway.config.settings import Settings
from gateway.lease import GrantedLease, LeaseRequest, Tried
from gateway.request import Priority
from gateway.scheduling.fleet_sync import NodeCandidates, NodesByModel
from gateway.scheduling.node_slots import QueuedRequest

MOST_STALE_TIMERS = 64
"""Due times of requests that have left, beside two for each that waits, before they are dropped."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits, its entry in the wait queue, and the future of its lease."""

    request: LeaseRequest
    tried: Tried
    candidates: NodeCandidates
    queued: QueuedRequest
    queued_at: float
    expires_at: float
    """When it has waited long enough; monotonic seconds."""
    granted: asyncio.Future[GrantedLease]
    nodes_down_since: float | None = None
    """Since when every node that could serve it has been down."""
    response_started: bool = False
    """Whether its client has the head of a response, with a heartbeat."""
    shed_key: tuple[int, float, int] = (0, 0.0, 0)
    """Sorts its user's requests by class, then by age."""
    timer_id: int = -1
    """Its entry among the due times of `Waiters`."""
    yield_asked_at: float = -math.inf
    """When running requests were last asked to yield to it."""

    @property
    def can_shed(self) -> bool:
        """Whether it can be refused to make room for another.

        Not once it, or the request that it is a part of, has been at a node: its response may have
        begun.
        """
        return not (self.tried.was_sent or self.request.caller.admitted or self.granted.done())

    @property
    def due_at(self) -> float:
        """When it is to be checked: its wait expires, or another tier opens for it."""
        return min(self.expires_at, self.candidates.fallback_at)

    def set_candidates(self, candidates: NodeCandidates) -> None:
        """Replace its candidates; it keeps its place in the queue."""
        self.candidates = candidates

    def requeue_as(self, candidates: NodeCandidates, queued: QueuedRequest) -> None:
        """Replace its candidates and its entry in the queue, which it has left."""
        self.candidates, self.queued = candidates, queued

    def set_shed_key(self, serial: int) -> None:
        """Set `shed_key`, the first time that it waits."""
        if not self.shed_key[2]:
            self.shed_key = (int(self.request.caller.priority), self.queued_at, serial)

    def raise_to(self, priority: Priority) -> None:
        """Let it wait in this class, and yield no more; it is not in the queue meanwhile."""
        caller = replace(self.request.caller, priority=priority, patient=True, yields=False)
        self.request = replace(self.request, caller=caller)
        self.shed_key = (int(priority), *self.shed_key[1:])

    def note_yield_asked(self, now: float) -> None:
        """Running requests were asked to yield to it."""
        self.yield_asked_at = now

    def note_response_started(self) -> None:
        """Its client has the head of a response."""
        self.response_started = True

    def set_timer(self, timer_id: int) -> None:
        """Its due time has this entry."""
        self.timer_id = timer_id

    def expiry_error(
        self, settings: Settings, retry_after: float, now: float
    ) -> errors.GatewayError | None:
        """Why it may not wait any longer; None: it may. `retry_after`: seconds to advise.

        While all its nodes are down it waits `retries.wait_for_node`; but if a standby node is
        starting, it waits as for any slot.
        """
        starting_in = None
        if self.candidates.any_alive():
            self.nodes_down_since = None
        else:
            starting_in = standby_ready_in(self.candidates.by_model, settings.elastic.cooldown, now)
            if starting_in is not None:
                self.nodes_down_since = None
            elif self.nodes_down_since is None:
                self.nodes_down_since = now
        # What a request has that has yielded is kept until its time limit.
        down_since = None if self.request.caller.times_yielded else self.nodes_down_since
        if down_since is not None and now - down_since >= settings.retries.wait_for_node:
            names = ", ".join(repr(name) for name in self.request.wanted.model_names)
            return errors.no_node(f"Every node for {names} is out.", retry_after)
        if now < self.expires_at:
            return None
        waited = now - self.queued_at
        if starting_in is not None:
            return errors.starting(
                f"The node for it is still being started after {waited:.0f} s; "
                f"it is expected in {starting_in:.0f} s.",
                starting_in,
            )
        return errors.queue_timeout(f"No slot came free in {waited:.0f} s.", retry_after)


_shed_key = attrgetter("shed_key")


@dataclass(slots=True, eq=False)
class Waiters:
    """All waiting requests."""

    fair_share: FairShare = field(default_factory=FairShare)
    """How many places each caller and user holds."""
    _by_queued: dict[QueuedRequest, Waiter] = field(default_factory=dict)
    _by_request_id: dict[str, Waiter] = field(default_factory=dict)
    _by_user: dict[tuple[str, str], list[Waiter]] = field(default_factory=dict)
    """By caller and user: the highest class first, within a class the oldest."""
    _patient: dict[str, dict[Waiter, None]] = field(default_factory=dict)
    """Those that are patient, by caller, in the order in which they came."""
    _serials: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _by_timer: dict[int, Waiter] = field(default_factory=dict)
    """Those that have not fallen due."""
    timers: list[tuple[float, int]] = field(default_factory=list)
    """A heap of due times; some belong to requests that have left."""
    _timer_ids: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._by_queued)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._by_queued.values())

    def __contains__(self, queued: QueuedRequest) -> bool:
        return queued in self._by_queued

    def get(self, queued: QueuedRequest) -> Waiter | None:
        """The waiter of this entry in the wait queue."""
        return self._by_queued.get(queued)

    def by_request_id(self, request_id: str) -> Waiter | None:
        """The waiter of one request."""
        return self._by_request_id.get(request_id)

    def add(self, waiter: Waiter) -> None:
        """It waits from now on."""
        self._by_queued[waiter.queued] = waiter
        self._by_request_id[waiter.request.id] = waiter
        self._add_timer(waiter)
        waiter.set_shed_key(next(self._serials))
        user = caller_and_user(waiter.request)
        self.fair_share.add(user[0], 1, user[1])
        insort(self._by_user.setdefault(user, []), waiter, key=_shed_key)
        if waiter.request.caller.patient:
            self._patient.setdefault(user[0], {})[waiter] = None

    def pop(self, queued: QueuedRequest) -> Waiter | None:
        """Take out the waiter of this entry; it does not wait any more."""
        waiter = self._by_queued.pop(queued, None)
        if waiter is not None:
            self._by_request_id.pop(waiter.request.id, None)
            self._remove_timer(waiter)
            user = caller_and_user(waiter.request)
            self.fair_share.remove(user[0], 1, user[1])
            waiting = self._by_user[user]
            del waiting[bisect_left(waiting, waiter.shed_key, key=_shed_key)]
            if not waiting:
                del self._by_user[user]
            if waiter.request.caller.patient:
                del self._patient[user[0]][waiter]
                if not self._patient[user[0]]:
                    del self._patient[user[0]]
        return waiter

    def longest_waits(self, now: float) -> dict[Priority, float]:
        """Seconds for which the oldest waiting request of each class has waited."""
        since: dict[Priority, float] = {}
        for waiter in self:
            priority = waiter.request.caller.priority
            since[priority] = min(waiter.queued_at, since.get(priority, math.inf))
        return {priority: max(0.0, now - queued_at) for priority, queued_at in since.items()}

    def newest_sheddable(self, caller: str, user: str) -> Waiter | None:
        """A user's newest request that can be shed, of its lowest class.

        One whose response has begun with heartbeats is the last choice, since its error comes in a
        response of status 200.
        """
        begun: Waiter | None = None
        for waiter in reversed(self._by_user.get((caller, user), ())):
            if not waiter.can_shed:
                continue
            if not waiter.response_started:
                return waiter
            begun = begun or waiter
        return begun

    def newest_patient(self, caller: str) -> Waiter | None:
        """A caller's newest patient request that can be shed."""
        patient = reversed(self._patient.get(caller, {}))
        return next((waiter for waiter in patient if waiter.can_shed), None)

    def set_candidates(self, waiter: Waiter, candidates: NodeCandidates) -> None:
        """Replace the candidates of one that waits."""
        moved = candidates.fallback_at != waiter.candidates.fallback_at
        waiter.set_candidates(candidates)
        if moved:
            self._remove_timer(waiter)
            self._add_timer(waiter)

    def next_due(self) -> float:
        """When the next one falls due; infinity: none will."""
        timers = self.timers
        while timers and timers[0][1] not in self._by_timer:
            heapq.heappop(timers)
        return timers[0][0] if timers else math.inf

    def pop_due(self, now: float) -> list[Waiter]:
        """Those that have fallen due since the last call. They wait until they are taken out."""
        due = []
        while self.next_due() <= now:
            due.append(self._by_timer.pop(heapq.heappop(self.timers)[1]))
        return due

    def _add_timer(self, waiter: Waiter) -> None:
        waiter.set_timer(next(self._timer_ids))
        self._by_timer[waiter.timer_id] = waiter
        heapq.heappush(self.timers, (waiter.due_at, waiter.timer_id))

    def _remove_timer(self, waiter: Waiter) -> None:
        self._by_timer.pop(waiter.timer_id, None)
        if len(self.timers) > MOST_STALE_TIMERS + 2 * len(self._by_timer):
            self.timers = [one for one in self.timers if one[1] in self._by_timer]
            heapq.heapify(self.timers)


def caller_and_user(request: LeaseRequest) -> tuple[str, str]:
    """The caller of a request, and the user that it names: else the caller itself."""
    return request.caller.id, request.caller.fairness_key


def standby_ready_in(nodes_by_model: NodesByModel, cooldown: float, now: float) -> float | None:
    """Seconds until a standby node among these is expected to work; None: none will."""
    return min(
        (
            node.lifecycle.ready_in(now, cooldown)
            for _, nodes in nodes_by_model
            for node in nodes
            if node.spec.standby and node.startable
        ),
        default=None,
    )
