"""Who may wait: the line is bounded by count and by the wait that is predicted.

A class is let in while the line is filled less than its share, so that the lower classes are
refused first. One that was refused for the predicted wait stays out until that has fallen some
way below its limit: else every slot that comes free would let one in and refuse the next.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from gateway import errors
from gateway.access.fair_share import soft_limit
from gateway.config.queue import DEFAULT_QUEUE_SHARE
from gateway.config.settings import Settings
from gateway.request import Priority, Request
from gateway.scheduling.waiters import Waiter, Waiters, caller_and_user

MOST_REFUSED_CALLERS = 4096
"""Callers of a class that are remembered as refused for the wait."""


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """What one class may take of the line. Seconds, requests, shares."""

    most_waiting: int
    refuse_above: float
    """Predicted wait above which it is refused."""
    reopen_below: float
    """Predicted wait below which it is let in again."""
    max_wait: float
    """The longest that any of it waits."""


def class_limits(settings: Settings, priority: Priority) -> ClassLimits:
    """The bounds of one class."""
    queue, label = settings.queue, priority.label
    rule = settings.classes.get(label)  # type: ignore[call-overload]
    share = DEFAULT_QUEUE_SHARE[label]
    max_wait = queue.max_wait
    if rule is not None:
        share = share if rule.queue_share is None else rule.queue_share
        max_wait = max_wait if rule.max_wait is None else rule.max_wait
    wait = share * max_wait
    return ClassLimits(math.ceil(share * queue.max), wait, queue.reopen * wait, max_wait)


def combine_waits(
    completion_rate: CompletionRate, slots: int, ahead: int, by_work: float | None, now: float
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
    by_rate = (
        completion_rate.seconds_until(ahead + 1, now) if completion_rate.total >= slots else None
    )
    if by_rate is None or by_work is None:
        return by_work if by_rate is None else by_rate
    return min(by_rate, by_work)


@dataclass(slots=True)
class Admission:
    """Decides by the settings in force; remembers which classes are refused for the wait."""

    settings: Settings
    _bounds: dict[Priority, ClassLimits] = field(default_factory=dict)
    _closed: set[tuple[Priority, str]] = field(default_factory=set)
    """Classes of callers: the wait of one with few in line is not that of one with many."""

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force."""
        self.settings = settings
        self._bounds.clear()

    def limits(self, priority: Priority) -> ClassLimits:
        """What one class may take of the line."""
        found = self._bounds.get(priority)
        if found is None:
            found = self._bounds[priority] = class_limits(self.settings, priority)
        return found

    def has_room(self, waiting: int, priority: Priority) -> bool:
        """Whether one more of this class may wait beside so many, by count alone."""
        return waiting < self.limits(priority).most_waiting

    def admit(
        self,
        request: Request,
        waiting: int,
        predicted: float | None,
        retry_after: float,
        now: float,
    ) -> float:
        """Until when a request may wait.

        Raises: GatewayError, as `refusal` says, or when its client will have left before.
        """
        until = now + self.limits(request.priority).max_wait
        if request.deadline is not None:
            if predicted is not None and now + predicted > request.deadline:
                raise errors.queue_timeout(
                    f"A slot is expected in {predicted:.0f} s: longer than this client will wait.",
                    max(1.0, now + predicted - request.deadline),
                )
            until = min(until, request.deadline)
        # What has been let in once is not turned away because its node failed it.
        if not (request.failed_nodes or request.admitted):
            refusal = self.refusal(
                request.priority, waiting, predicted, retry_after, request.caller.id
            )
            if refusal is not None:
                raise refusal
        return until

    def refusal(
        self,
        priority: Priority,
        waiting: int,
        predicted: float | None,
        retry_after: float,
        caller: str = "",
    ) -> errors.GatewayError | None:
        """Why a request may not wait now; None: it may.

        `predicted` is the wait expected of it, None where nobody knows; `place_free_in` the time
        until one fewer waits. All in seconds.
        """
        bounds, whose = self.limits(priority), (priority, caller)
        if waiting >= bounds.most_waiting:
            return errors.queue_full(
                f"{waiting} requests wait already. Try again later.", retry_after
            )
        if predicted is None:
            self._closed.discard(whose)
            return None
        if predicted > bounds.max_wait:
            self._close(whose)
            return errors.queue_timeout(
                f"A slot is expected in {predicted:.0f} s, and nobody of the class "
                f"'{priority.label}' waits longer than {bounds.max_wait:.0f} s.",
                predicted - bounds.reopen_below,
            )
        if predicted > bounds.refuse_above:
            self._close(whose)
        elif predicted <= bounds.reopen_below:
            self._closed.discard(whose)
        if whose in self._closed:
            return errors.queue_full(
                f"A slot is expected in {predicted:.0f} s: the queue is too long for the class "
                f"'{priority.label}' now. Try again later.",
                max(1.0, predicted - bounds.reopen_below),
            )
        return None

    def _close(self, whose: tuple[Priority, str]) -> None:
        if len(self._closed) >= MOST_REFUSED_CALLERS:
            self._closed.clear()
        self._closed.add(whose)


@dataclass(frozen=True, slots=True)
class QueueRoom:
    """Whether one more may wait."""

    counted_waiting: int
    """How many wait already, as far as that counts for this request."""
    displaced: Waiter | None = None
    """The one that has to go for it."""


def queue_room(request: Request, waiters: Waiters, admission: Admission) -> QueueRoom:
    """The place of `request`, if there is one."""
    caller, user = caller_and_user(request)
    waiting, most = len(waiters), admission.settings.queue.max
    count = admission.limits(request.priority).most_waiting
    holdings = waiters.fair_share
    if holdings.held_by(caller) >= soft_limit(most) or not holdings.fits(caller, 1, count):
        # Its caller has its share; within that, another of the caller's users may have more.
        yields = _newest(waiters, holdings.larger_user(caller, 1, user))
        return QueueRoom(max(waiting, count) if yields is None else count - 1, yields)
    if waiting < count:
        return QueueRoom(waiting)
    for other in holdings.victims(caller, 1, count):
        yields = _newest(waiters, *((other, name) for name in holdings.users_by_size(other)))
        if yields is not None:
            # A class below is not turned away while there is room that its own share leaves free.
            needed = waiting >= admission.limits(yields.request.priority).most_waiting
            return QueueRoom(count - 1, yields if needed else None)
    return QueueRoom(count - 1 if waiting < most else waiting)


def _newest(tickets: Waiters, *whose: tuple[str, str] | None) -> Waiter | None:
    for one in whose:
        ticket = None if one is None else tickets.newest_sheddable(*one)
        if ticket is not None:
            return ticket
    return None


RATE_WINDOW = 60.0
"""Seconds that are looked back."""

DEFAULT_RETRY_AFTER = 5.0
"""Seconds to advise while nothing has been measured yet."""

LONGEST_RETRY_AFTER = 600.0
"""Seconds; nobody is told to wait longer."""


class CompletionRate:
    """Completed requests per second over the last minute."""

    def __init__(self) -> None:
        self.total = 0
        """All that were ever completed."""
        self._ends: deque[float] = deque(maxlen=1024)

    def completed(self, now: float) -> None:
        """A request has given its slot back."""
        self.total += 1
        self._ends.append(now)

    def per_second(self, now: float) -> float | None:
        """Completions per second, or None while too few were seen to tell."""
        ends = self._ends
        while ends and ends[0] < now - RATE_WINDOW:
            ends.popleft()
        if len(ends) < 2:
            return None
        return len(ends) / max(now - ends[0], 1e-3)

    def seconds_until(self, ahead: int, now: float) -> float | None:
        """Seconds until `ahead` more requests are done, or None while unknown."""
        rate = self.per_second(now)
        return None if rate is None else ahead / rate

    def retry_after(self, ahead: int, now: float) -> float:
        """Whole seconds to advise a caller who would be behind `ahead` others."""
        wait = self.seconds_until(ahead, now)
        return float(
            min(
                LONGEST_RETRY_AFTER,
                max(1, math.ceil(DEFAULT_RETRY_AFTER if wait is None else wait)),
            )
        )
