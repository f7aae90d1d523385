"""The limits of attempts, by one timer for all of them rather than one for each token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.config.routing import TimeoutSettings
from gateway.fleet.evidence import PREFILL_FACTOR, another_reads
from gateway.fleet.lease import Lease
from gateway.relay.routes import ROUTES
from gateway.request import Request
from gateway.transport.errors import Overdue, UpstreamError

GRACE = 5.0
"""Seconds that a stream has to move again when what excused its silence is over."""

EVERY = 0.2
"""Seconds between two looks: no limit is kept more exactly than that."""


JUST_BEHIND = 0.001
"""Seconds that a client's own deadline is kept too late, rather than too early."""


@dataclass(slots=True)
class Limits:
    """Seconds. `first_byte` None: the answer comes in one piece, only `until` bounds it."""

    first_byte: float | None
    silence: float
    until: float
    """When the whole request must be over; monotonic."""


class Watched(Protocol):
    """What an attempt shows while it is watched."""

    lease: Lease
    sent: float
    excused: float
    """When it was last silent through no fault of its node."""

    @property
    def limits(self) -> Limits:
        """How long it may take."""

    @property
    def complete(self) -> bool:
        """Whether the node has sent all of its answer."""

    @property
    def lagging(self) -> bool:
        """Whether its client has yet to take what the node has sent."""

    def fail(self, error: UpstreamError) -> None:
        """End it with `error`."""


class Watch:
    """Fails attempts whose nodes are overdue; their leases tell when they last moved.

    All attempts are looked at several times a second, by one timer: a timer for each attempt
    would cost a short request more than the looking costs a long one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watched: set[Watched] = set()
        self._deadlines: dict[Watched, asyncio.TimerHandle] = {}
        """Of those whose client is to be told in the very moment."""
        self._timer: asyncio.TimerHandle | None = None
        self._held_up = False

    def add(self, attempt: Watched) -> None:
        """Watch `attempt` from now on."""
        self._watched.add(attempt)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._look)

    def add_deadline(self, attempt: Watched, deadline: float) -> None:
        """End an attempt that is watched in that very moment (monotonic), not at the next look."""
        self._deadlines[attempt] = asyncio.get_running_loop().call_later(
            max(0.0, deadline - self._clock()) + JUST_BEHIND, self._at_deadline, attempt
        )

    def remove(self, attempt: Watched) -> None:
        """The attempt is over."""
        self._watched.discard(attempt)
        if self._deadlines and (timer := self._deadlines.pop(attempt, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop looking."""
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        timer, self._timer = self._timer, None
        # An event loop that was held up reads what the nodes have sent before its next look.
        self._held_up = not self._held_up and timer is not None and _is_late(timer)
        if not self._held_up:
            self._judge()
        if self._watched:
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._look)

    def _judge(self) -> None:
        now = self._clock()
        for attempt in list(self._watched):
            if attempt.complete:
                # Its client is slow to read the rest, which is here: the slot is for others.
                attempt.lease.give_back()
            failure = overdue(attempt.lease, attempt.limits, attempt.sent, now)
            if failure is not None and not _excused(attempt, failure, now):
                self._watched.discard(attempt)
                attempt.fail(failure)

    def _at_deadline(self, attempt: Watched) -> None:
        if attempt in self._watched and not attempt.complete:
            self._watched.discard(attempt)
            attempt.fail(out_of_time())


def out_of_time() -> Overdue:
    """The whole request takes too long."""
    return Overdue("total", "The request took longer than it may")


def _is_late(timer: asyncio.TimerHandle) -> bool:
    return asyncio.get_running_loop().time() > timer.when() + EVERY


def overdue(lease: Lease, limits: Limits, sent: float, now: float) -> Overdue | None:
    """Which limit has passed for a request that was sent at `sent`, if one has."""
    if now >= limits.until:
        return out_of_time()
    moved = lease.last_moved
    if moved is not None:
        if now < max(sent, moved) + limits.silence:
            return None
        return Overdue("silence", f"The node was silent for {limits.silence:.0f} s")
    if limits.first_byte is None or now < sent + limits.first_byte:
        return None
    return Overdue("first_byte", f"Nothing came for {limits.first_byte:.0f} s")


def _excused(attempt: Watched, failure: Overdue, now: float) -> bool:
    """Whether the node can't help being silent: it reads another prompt, or the client lags."""
    if failure.limit == "total":
        return False
    if attempt.lagging or another_reads(attempt.lease, now):
        attempt.excused = now
    return now < attempt.excused + min(GRACE, attempt.limits.silence)


def limits_of(lease: Lease, request: Request, timeouts: TimeoutSettings) -> Limits:
    """The limits of this request under this lease; the node's own come before the settings'."""
    own = lease.node.spec.timeouts
    until = request.received + (own.total or timeouts.total)
    if request.deadline is not None:
        until = min(until, request.deadline)
    first_byte = None
    route = ROUTES[request.path]
    if lease.stream or not (route.streams or route.form):
        # Any other answer comes in one piece, after its last token.
        first_byte = first_byte_limit(own.first_byte or timeouts.first_byte, lease)
    return Limits(first_byte, own.silence or timeouts.silence, until)


def first_byte_limit(base: float, lease: Lease) -> float:
    """Seconds until the first content must be here, for a prompt of this length on this node.

    The same factor as for the state `mute`, so that a node is not given up for one reason
    while it is excused for the other.
    """
    return max(base, PREFILL_FACTOR * (lease.expected_prefill or 0.0))
