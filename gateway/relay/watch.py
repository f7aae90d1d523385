"""The limits of one attempt, by one timer for all of it rather than one for each token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.fleet.evidence import PREFILL_FACTOR, another_reads
from gateway.fleet.lease import Lease, Phase
from gateway.transport.errors import Overdue, UpstreamError

SUSPENDED = 1.0
"""Seconds until the silence of a stream is looked at again that a neighbour's prefill excuses."""


@dataclass(slots=True)
class Limits:
    """Seconds. `first_byte` None: the answer comes in one piece, only `until` bounds it."""

    connect: float
    first_byte: float | None
    silence: float
    until: float
    """When the whole request must be over; monotonic."""


class Watch:
    """Fails an attempt whose node is overdue; the lease tells when it last moved."""

    __slots__ = ("_clock", "_fail", "_handle", "_lease", "_limits", "_loop", "_since")

    def __init__(
        self,
        lease: Lease,
        limits: Limits,
        fail: Callable[[UpstreamError], None],
        clock: Callable[[], float],
    ) -> None:
        self._lease = lease
        self._limits = limits
        self._fail = fail
        self._clock = clock
        self._since = clock()
        self._loop = asyncio.get_running_loop()
        self._handle = self._arm(self._due(self._since))

    def stop(self) -> None:
        """The attempt is over."""
        self._handle.cancel()

    def _arm(self, due: float) -> asyncio.TimerHandle:
        return self._loop.call_later(max(0.0, due - self._clock()), self._look)

    def _due(self, now: float) -> float:
        """When the next limit passes if nothing moves until then."""
        limits, lease = self._limits, self._lease
        if lease.last_moved is not None:
            return min(limits.until, max(self._since, lease.last_moved) + limits.silence)
        if limits.first_byte is None:
            return limits.until
        return min(limits.until, self._since + limits.first_byte)

    def _look(self) -> None:
        now = self._clock()
        due = self._due(now)
        if now < due:
            self._handle = self._arm(due)
        elif now >= self._limits.until:
            self._fail(Overdue("total", "The request took longer than it may"))
        elif another_reads(self._lease, now):
            self._handle = self._arm(min(now + SUSPENDED, self._limits.until))
        elif self._lease.phase is Phase.DECODE:
            self._fail(Overdue("silence", f"The node was silent for {self._limits.silence:.0f} s"))
        else:
            self._fail(
                Overdue("first_byte", f"Nothing came for {self._limits.first_byte or 0:.0f} s")
            )


def first_byte_limit(base: float, lease: Lease) -> float:
    """Seconds until the first content must be here, for a prompt of this length on this node.

    The same factor as for the state `mute`, so that a node is not given up for one reason
    while it is excused for the other.
    """
    return max(base, PREFILL_FACTOR * (lease.expected_prefill or 0.0))
