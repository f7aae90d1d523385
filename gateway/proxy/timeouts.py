"""The limits of attempts, by one timer for all of them rather than one for each token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.config.routing import TimeoutSettings
from gateway.fleet.health import PREFILL_GRACE_FACTOR, another_prefills
from gateway.fleet.node import Lease
from gateway.proxy.inbound.routes import ROUTES
from gateway.request import Request
from gateway.transport.errors import UpstreamError, UpstreamTimeout

SILENCE_GRACE = 5.0
"""Seconds that a stream has to move again when what excused its silence is over."""

CHECK_INTERVAL = 0.2
"""Seconds between two looks: no limit is kept more exactly than that."""


DEADLINE_SLACK = 0.001
"""Seconds that a client's own deadline is kept too late, rather than too early."""


@dataclass(slots=True)
class AttemptTimeouts:
    """Seconds. `first_byte` None: the answer comes in one piece, only `until` bounds it."""

    first_byte: float | None
    silence: float
    deadline: float
    """When the whole request must be over; monotonic."""


class MonitoredAttempt(Protocol):
    """What an attempt shows while it is watched."""

    lease: Lease
    sent_at: float
    excused_at: float
    """When it was last silent through no fault of its node."""

    @property
    def timeouts(self) -> AttemptTimeouts:
        """How long it may take."""

    @property
    def complete(self) -> bool:
        """Whether the node has sent all of its answer."""

    @property
    def client_lagging(self) -> bool:
        """Whether its client has yet to take what the node has sent."""

    def fail(self, error: UpstreamError) -> None:
        """End it with `error`."""


class TimeoutMonitor:
    """Fails attempts whose nodes are overdue; their leases tell when they last moved.

    All attempts are looked at several times a second, by one timer: a timer for each attempt
    would cost a short request more than the looking costs a long one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watched: set[MonitoredAttempt] = set()
        self._deadlines: dict[MonitoredAttempt, asyncio.TimerHandle] = {}
        """Of those whose client is to be told in the very moment."""
        self._timer: asyncio.TimerHandle | None = None
        self._held_up = False

    def add(self, attempt: MonitoredAttempt) -> None:
        """Watch `attempt` from now on."""
        self._watched.add(attempt)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL, self._look)

    def add_deadline(self, attempt: MonitoredAttempt, deadline: float) -> None:
        """End an attempt that is watched in that very moment (monotonic), not at the next look."""
        self._deadlines[attempt] = asyncio.get_running_loop().call_later(
            max(0.0, deadline - self._clock()) + DEADLINE_SLACK, self._at_deadline, attempt
        )

    def remove(self, attempt: MonitoredAttempt) -> None:
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
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL, self._look)

    def _judge(self) -> None:
        now = self._clock()
        for attempt in list(self._watched):
            if attempt.complete:
                # Its client is slow to read the rest, which is here: the slot is for others.
                attempt.lease.release()
            failure = passed_timeout(attempt.lease, attempt.timeouts, attempt.sent_at, now)
            if failure is not None and not _excused(attempt, failure, now):
                self._watched.discard(attempt)
                attempt.fail(failure)

    def _at_deadline(self, attempt: MonitoredAttempt) -> None:
        if attempt in self._watched and not attempt.complete:
            self._watched.discard(attempt)
            attempt.fail(total_timeout())


def total_timeout() -> UpstreamTimeout:
    """The whole request takes too long."""
    return UpstreamTimeout("total", "The request took longer than it may")


def _is_late(timer: asyncio.TimerHandle) -> bool:
    return asyncio.get_running_loop().time() > timer.when() + CHECK_INTERVAL


def passed_timeout(
    lease: Lease, timeouts: AttemptTimeouts, sent_at: float, now: float
) -> UpstreamTimeout | None:
    """Which limit has passed for a request that was sent at `sent`, if one has."""
    if now >= timeouts.deadline:
        return total_timeout()
    moved = lease.last_content_at
    if moved is not None:
        if now < max(sent_at, moved) + timeouts.silence:
            return None
        return UpstreamTimeout("silence", f"The node was silent for {timeouts.silence:.0f} s")
    if timeouts.first_byte is None or now < sent_at + timeouts.first_byte:
        return None
    return UpstreamTimeout("first_byte", f"Nothing came for {timeouts.first_byte:.0f} s")


def _excused(attempt: MonitoredAttempt, failure: UpstreamTimeout, now: float) -> bool:
    """Whether the node can't help being silent: it reads another prompt, or the client lags."""
    if failure.limit == "total":
        return False
    if attempt.client_lagging or another_prefills(attempt.lease, now):
        attempt.excused_at = now
    return now < attempt.excused_at + min(SILENCE_GRACE, attempt.timeouts.silence)


def timeouts_for(lease: Lease, request: Request, timeouts: TimeoutSettings) -> AttemptTimeouts:
    """The limits of this request under this lease; the node's own come before the settings'."""
    own = lease.node.spec.timeouts
    until = request.received_at + (own.total or timeouts.total)
    if request.deadline is not None:
        until = min(until, request.deadline)
    first_byte = None
    route = ROUTES[request.path]
    if lease.stream or not (route.generates or route.multipart):
        # Any other answer comes in one piece, after its last token.
        first_byte = first_byte_timeout(own.first_byte or timeouts.first_byte, lease)
    return AttemptTimeouts(first_byte, own.silence or timeouts.silence, until)


def first_byte_timeout(base: float, lease: Lease) -> float:
    """Seconds until the first content must be here, for a prompt of this length on this node.

    The same factor as for the state `mute`, so that a node is not given up for one reason
    while it is excused for the other.
    """
    return max(base, PREFILL_GRACE_FACTOR * (lease.expected_prefill or 0.0))
