"""The timeouts of attempts, checked by one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.config.routing import TimeoutSettings
from gateway.lease import GrantedLease
from gateway.proxy.inbound.request import Request
from gateway.proxy.inbound.routes import ROUTES
from gateway.transport.errors import UpstreamError, UpstreamTimeout

SILENCE_GRACE = 5.0
"""Seconds that a silent stream still has when the excuse for its silence has ended."""

CHECK_INTERVAL = 0.2
"""Seconds between two checks, and so the precision of every timeout."""

REPORT_INTERVAL = 1.0
"""Seconds between two reports to the scheduler on streams that move."""

DEADLINE_SLACK = 0.001
"""Seconds by which a client's own deadline is kept late, so that it is never kept early."""


@dataclass(frozen=True, slots=True)
class AttemptTimeouts:
    """Seconds. `first_byte` None: the response comes in one piece, bounded by `deadline` alone."""

    first_byte: float | None
    silence: float
    deadline: float
    """When the whole request must be over; monotonic."""


class MonitoredAttempt(Protocol):
    """The part of an attempt that the monitor uses."""

    sent_at: float

    @property
    def last_content_at(self) -> float | None:
        """When content last came from the node; None: none has."""

    @property
    def timeouts(self) -> AttemptTimeouts:
        """The attempt's limits."""

    @property
    def complete(self) -> bool:
        """Whether the node has sent its whole response."""

    @property
    def client_lagging(self) -> bool:
        """Whether received bytes are still unread, since the client lags."""

    def is_silence_excused(self) -> bool:
        """Whether the node has a reason to be silent: it reads another prompt."""

    def report_progress(self) -> None:
        """Tell the scheduler if content has come since the last call."""

    def report_received(self) -> None:
        """Tell the scheduler that the whole response has come, though the client still reads it."""

    def fail(self, error: UpstreamError) -> None:
        """End it with `error`."""


class TimeoutMonitor:
    """Fails attempts whose nodes are overdue; each attempt knows when content last came.

    One timer checks all attempts several times a second: a timer for each attempt would cost a
    short request more than the checks cost a long one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._attempts: dict[MonitoredAttempt, float] = {}
        """Each attempt, and until when none of its timeouts can pass."""
        self._deadlines: dict[MonitoredAttempt, asyncio.TimerHandle] = {}
        """Timers of attempts whose client must get the error in that very moment."""
        self._excused_at: dict[MonitoredAttempt, float] = {}
        """When an attempt was last silent through no fault of its node."""
        self._timer: asyncio.TimerHandle | None = None
        self._skipped_check = False
        self._next_report = 0.0

    def __len__(self) -> int:
        return len(self._attempts)

    def add(self, attempt: MonitoredAttempt) -> None:
        """Monitor `attempt` from now on."""
        self._attempts[attempt] = 0.0
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL, self.check)

    def add_deadline(self, attempt: MonitoredAttempt, deadline: float) -> None:
        """Fail a monitored attempt at `deadline` (monotonic) exactly, not at the next check."""
        self._deadlines[attempt] = asyncio.get_running_loop().call_later(
            max(0.0, deadline - self._clock()) + DEADLINE_SLACK, self._deadline_passed, attempt
        )

    def remove(self, attempt: MonitoredAttempt) -> None:
        """The attempt is over."""
        self._attempts.pop(attempt, None)
        if self._excused_at:
            self._excused_at.pop(attempt, None)
        if self._deadlines and (timer := self._deadlines.pop(attempt, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop the timers."""
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """Fail the attempts that are overdue, and set the timer for the next check."""
        timer, self._timer = self._timer, None
        # An event loop that was held up must read what the nodes have sent before the next check.
        self._skipped_check = not self._skipped_check and timer is not None and _is_late(timer)
        if not self._skipped_check:
            self._fail_overdue()
        if self._attempts:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL, self.check)

    def _fail_overdue(self) -> None:
        now = self._clock()
        reports = now >= self._next_report
        if reports:
            self._next_report = now + REPORT_INTERVAL
        for attempt in list(self._attempts):
            due_at = self._attempts.get(attempt)
            if due_at is None:
                continue  # It has ended with another one.
            if attempt.complete:
                # Only the client has yet to read it: the slot is free.
                attempt.report_received()
            elif reports:
                attempt.report_progress()
            if now < due_at:
                continue
            timeouts, sent_at = attempt.timeouts, attempt.sent_at
            failure = passed_timeout(timeouts, sent_at, attempt.last_content_at, now)
            if failure is None:
                until = earliest_timeout(timeouts, sent_at, attempt.last_content_at, now)
                self._attempts[attempt] = until
            elif not self._is_excused(attempt, failure, now):
                self._attempts.pop(attempt, None)
                attempt.fail(failure)

    def _is_excused(self, attempt: MonitoredAttempt, failure: UpstreamTimeout, now: float) -> bool:
        """Whether the silence is not the node's fault: another prefill, or the client lags."""
        if failure.limit == "total":
            return False
        if attempt.client_lagging or attempt.is_silence_excused():
            self._excused_at[attempt] = now
            return True
        excused_at = self._excused_at.get(attempt)
        grace = min(SILENCE_GRACE, attempt.timeouts.silence)
        return excused_at is not None and now < excused_at + grace

    def _deadline_passed(self, attempt: MonitoredAttempt) -> None:
        if attempt in self._attempts and not attempt.complete:
            self._attempts.pop(attempt, None)
            attempt.fail(total_timeout())


def total_timeout() -> UpstreamTimeout:
    """The failure of a request that takes too long as a whole."""
    return UpstreamTimeout("total", "The request took longer than it may")


def _is_late(timer: asyncio.TimerHandle) -> bool:
    return asyncio.get_running_loop().time() > timer.when() + CHECK_INTERVAL


def passed_timeout(
    timeouts: AttemptTimeouts, sent_at: float, last_content_at: float | None, now: float
) -> UpstreamTimeout | None:
    """The timeout that has passed for a request sent at `sent_at`, if any has."""
    if now >= timeouts.deadline:
        return total_timeout()
    if last_content_at is not None:
        if now < max(sent_at, last_content_at) + timeouts.silence:
            return None
        return UpstreamTimeout("silence", f"The node was silent for {timeouts.silence:.0f} s")
    if timeouts.first_byte is None or now < sent_at + timeouts.first_byte:
        return None
    return UpstreamTimeout("first_byte", f"Nothing came for {timeouts.first_byte:.0f} s")


def earliest_timeout(
    timeouts: AttemptTimeouts, sent_at: float, last_content_at: float | None, now: float
) -> float:
    """No timeout passes before this moment, whatever the node sends from `now` on."""
    if last_content_at is not None:
        return min(timeouts.deadline, max(sent_at, last_content_at) + timeouts.silence)
    earliest = min(timeouts.deadline, now + timeouts.silence)
    if timeouts.first_byte is None:
        return earliest
    return min(earliest, sent_at + timeouts.first_byte)


def timeouts_for(
    lease: GrantedLease, request: Request, timeouts: TimeoutSettings
) -> AttemptTimeouts:
    """The timeouts of this request under this lease; the node's own override the settings'."""
    node = lease.node
    deadline = request.received_at + (node.total_timeout or timeouts.total)
    if request.deadline is not None:
        deadline = min(deadline, request.deadline)
    first_byte = None
    route = ROUTES[request.path]
    if lease.stream or not (route.generates or route.multipart):
        # Any other response comes in one piece, after its last token.
        # A node is not failed here while its state (`mute`) excuses it.
        first_byte = max(node.first_byte_timeout or timeouts.first_byte, lease.prefill_grace)
        first_byte += lease.wake
    return AttemptTimeouts(first_byte, node.silence_timeout or timeouts.silence, deadline)
