"""Who may wait: the line is bounded by count and by the wait that is predicted.

A class is let in while the line is filled less than its share, so that the lower classes are
refused first. One that was refused for the predicted wait stays out until that has fallen some
way below its limit: else every slot that comes free would let one in and refuse the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gateway import errors
from gateway.config.settings import Settings
from gateway.config.waiting import QUEUE_SHARE
from gateway.request import Priority, Request
from gateway.scheduling.rate import CompletionRate

MOST_CLOSED = 4096
"""Callers of a class that are remembered as refused for the wait."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one class may take of the line. Seconds, requests, shares."""

    count: int
    wait: float
    """Predicted wait above which it is refused."""
    reopen: float
    """Predicted wait below which it is let in again."""
    max_wait: float
    """The longest that any of it waits."""


def bounds_of(settings: Settings, priority: Priority) -> Bounds:
    """The bounds of one class."""
    queue, label = settings.queue, priority.label
    rule = settings.classes.get(label)  # type: ignore[call-overload]
    share = QUEUE_SHARE[label]
    max_wait = queue.max_wait
    if rule is not None:
        share = share if rule.queue_share is None else rule.queue_share
        max_wait = max_wait if rule.max_wait is None else rule.max_wait
    wait = share * max_wait
    return Bounds(math.ceil(share * queue.max), wait, queue.reopen * wait, max_wait)


def predicted_wait(
    rate: CompletionRate, slots: int, ahead: int, by_work: float | None, now: float
) -> float | None:
    """Seconds that one behind `ahead` others is likely to wait; None: nobody knows.

    By the rate at which slots have come free, once as many have as there are `slots`, and
    `by_work`, by what is expected to run and wait: the lower of both, since who is refused wrongly
    loses more than who waits in vain. With nobody ahead it hangs on one or two answers' lengths, so
    that only half of it is believed.
    """
    if by_work is not None and not math.isfinite(by_work):
        by_work = None
    if not ahead:
        return None if by_work is None else by_work / 2
    by_rate = rate.wait(ahead + 1, now) if rate.seen >= slots else None
    if by_rate is None or by_work is None:
        return by_work if by_rate is None else by_rate
    return min(by_rate, by_work)


@dataclass(slots=True)
class Admission:
    """Decides by the settings in force; remembers which classes are refused for the wait."""

    settings: Settings
    _bounds: dict[Priority, Bounds] = field(default_factory=dict)
    _closed: set[tuple[Priority, str]] = field(default_factory=set)
    """Classes of callers: the wait of one with few in line is not that of one with many."""

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force."""
        self.settings = settings
        self._bounds.clear()

    def bounds(self, priority: Priority) -> Bounds:
        """What one class may take of the line."""
        found = self._bounds.get(priority)
        if found is None:
            found = self._bounds[priority] = bounds_of(self.settings, priority)
        return found

    def has_room(self, waiting: int, priority: Priority) -> bool:
        """Whether one more of this class may wait beside so many, by count alone."""
        return waiting < self.bounds(priority).count

    def admitted(
        self,
        request: Request,
        waiting: int,
        predicted: float | None,
        place_free_in: float,
        now: float,
    ) -> float:
        """Until when a request may wait.

        Raises: GatewayError, as `refusal` says, or when its client will have left before.
        """
        until = now + self.bounds(request.priority).max_wait
        if request.deadline is not None:
            if predicted is not None and now + predicted > request.deadline:
                raise errors.queue_timeout(
                    f"A slot is expected in {predicted:.0f} s: longer than this client will wait.",
                    max(1.0, now + predicted - request.deadline),
                )
            until = min(until, request.deadline)
        # What has been let in once is not turned away because its node failed it.
        if not (request.failed or request.admitted):
            refusal = self.refusal(
                request.priority, waiting, predicted, place_free_in, request.caller.id
            )
            if refusal is not None:
                raise refusal
        return until

    def refusal(
        self,
        priority: Priority,
        waiting: int,
        predicted: float | None,
        place_free_in: float,
        caller: str = "",
    ) -> errors.GatewayError | None:
        """Why a request may not wait now; None: it may.

        `predicted` is the wait expected of it, None where nobody knows; `place_free_in` the time
        until one fewer waits. All in seconds.
        """
        bounds, whose = self.bounds(priority), (priority, caller)
        if waiting >= bounds.count:
            return errors.queue_full(
                f"{waiting} requests wait already. Try again later.", place_free_in
            )
        if predicted is None:
            self._closed.discard(whose)
            return None
        if predicted > bounds.max_wait:
            self._close(whose)
            return errors.queue_timeout(
                f"A slot is expected in {predicted:.0f} s, and nobody of the class "
                f"'{priority.label}' waits longer than {bounds.max_wait:.0f} s.",
                predicted - bounds.reopen,
            )
        if predicted > bounds.wait:
            self._close(whose)
        elif predicted <= bounds.reopen:
            self._closed.discard(whose)
        if whose in self._closed:
            return errors.queue_full(
                f"A slot is expected in {predicted:.0f} s: the queue is too long for the class "
                f"'{priority.label}' now. Try again later.",
                max(1.0, predicted - bounds.reopen),
            )
        return None

    def _close(self, whose: tuple[Priority, str]) -> None:
        if len(self._closed) >= MOST_CLOSED:
            self._closed.clear()
        self._closed.add(whose)
