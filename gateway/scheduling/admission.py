"""Admission to the queue, which is bounded by count and by the predicted wait.

A class is admitted while the queue is filled less than its share, so that lower classes are refused
first. A class that was refused for its predicted wait stays refused until that has fallen some way
below the limit: else every slot that comes free would admit one request and refuse the next.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from gateway import errors
from gateway.access.fair_share import soft_limit
from gateway.config.scheduling import DEFAULT_QUEUE_SHARE
from gateway.config.settings import Settings
from gateway.lease import LeaseRequest
from gateway.request import Priority
from gateway.scheduling.waiters import Waiter, Waiters, caller_and_user

MOST_REFUSED_CALLERS = 4096
"""Pairs of class and caller that are remembered as refused for the wait."""


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """What one class may take of the queue; waits in seconds."""

    most_waiting: int
    """Requests in the whole queue from which on the class is refused."""
    refuse_above: float
    """Predicted wait above which it is refused."""
    reopen_below: float
    """Predicted wait below which it is admitted again."""
    max_wait: float
    """The longest that one of its requests waits."""


def class_limits(settings: Settings, priority: Priority) -> ClassLimits:
    """The limits of one class."""
    queue, label = settings.queue, priority.label
    rule = settings.classes.get(label)  # type: ignore[call-overload]
    share = DEFAULT_QUEUE_SHARE[label]
    max_wait = queue.max_wait
    if rule is not None:
        share = share if rule.queue_share is None else rule.queue_share
        max_wait = max_wait if rule.max_wait is None else rule.max_wait
    wait = share * max_wait
    return ClassLimits(math.ceil(share * queue.max), wait, queue.reopen * wait, max_wait)


@dataclass(slots=True)
class Admission:
    """Decides by the settings in force; remembers which classes are refused for the wait."""

    settings: Settings
    _limits: dict[Priority, ClassLimits] = field(default_factory=dict)
    _refused: set[tuple[Priority, str]] = field(default_factory=set)
    """By class and caller: a caller with few waiting requests waits less than one with many."""

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force."""
        self.settings = settings
        self._limits.clear()

    def limits(self, priority: Priority) -> ClassLimits:
        """What one class may take of the queue."""
        limits = self._limits.get(priority)
        if limits is None:
            limits = self._limits[priority] = class_limits(self.settings, priority)
        return limits

    def admit(
        self,
        request: LeaseRequest,
        waiting: int,
        predicted: float | None,
        retry_after: float,
        now: float,
        deadline: float | None = None,
        *,
        retried: bool = False,
    ) -> float:
        """Until when a request may wait; `deadline`: until when its client does.

        Raises: GatewayError, as `refusal`, or when its client will have stopped waiting before.
        """
        until = now + self.limits(request.caller.priority).max_wait
        if request.caller.yields or request.caller.patient:
            # Work that can wait, as long as its deadline allows.
            until, predicted = math.inf, None
        if deadline is not None:
            if predicted is not None and now + predicted > deadline:
                raise errors.queue_timeout(
                    f"A slot is expected in {predicted:.0f} s: longer than this client will wait.",
                    max(1.0, now + predicted - deadline),
                )
            until = min(until, deadline)
        # A request that was admitted once is not refused because its node failed it.
        if not (retried or request.caller.admitted):
            refusal = self.refusal(
                request.caller.priority, waiting, predicted, retry_after, request.caller.id
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

        `predicted` is its expected wait, None where that is unknown; `retry_after` the time until
        one fewer waits. Both in seconds.
        """
        limits, key = self.limits(priority), (priority, caller)
        if waiting >= limits.most_waiting:
            return errors.queue_full(
                f"{waiting} requests wait already. Try again later.", retry_after
            )
        if predicted is None:
            self._refused.discard(key)
            return None
        if predicted > limits.max_wait:
            self._refuse(key)
            return errors.queue_timeout(
                f"A slot is expected in {predicted:.0f} s, and no request of the class "
                f"'{priority.label}' waits longer than {limits.max_wait:.0f} s.",
                predicted - limits.reopen_below,
            )
        if predicted > limits.refuse_above:
            self._refuse(key)
        elif predicted <= limits.reopen_below:
            self._refused.discard(key)
        if key in self._refused:
            return errors.queue_full(
                f"A slot is expected in {predicted:.0f} s: the queue is too long for the class "
                f"'{priority.label}' now. Try again later.",
                max(1.0, predicted - limits.reopen_below),
            )
        return None

    def _refuse(self, key: tuple[Priority, str]) -> None:
        if len(self._refused) >= MOST_REFUSED_CALLERS:
            self._refused.clear()
        self._refused.add(key)


@dataclass(frozen=True, slots=True)
class QueueRoom:
    """Whether one more request may wait."""

    counted_waiting: int
    """Waiting requests, as far as they count for this one."""
    displaced: Waiter | None = None
    """The one that is shed for it."""


def queue_room(request: LeaseRequest, waiters: Waiters, admission: Admission) -> QueueRoom:
    """The room for `request`, within its caller's fair share of the queue."""
    caller, user = caller_and_user(request)
    waiting, most = len(waiters), admission.settings.queue.max
    count = admission.limits(request.caller.priority).most_waiting
    fair_share = waiters.fair_share
    if fair_share.held_by(caller) >= soft_limit(most) or not fair_share.fits(caller, 1, count):
        # Its caller has its share; within that, another of the caller's users may have more.
        displaced = _newest(waiters, fair_share.larger_user(caller, 1, user))
        if displaced is None and not request.caller.patient:
            displaced = waiters.newest_patient(caller)
        return QueueRoom(max(waiting, count) if displaced is None else count - 1, displaced)
    if waiting < count:
        return QueueRoom(waiting)
    for other in fair_share.victims(caller, 1, count):
        displaced = _newest(waiters, *((other, name) for name in fair_share.users_by_size(other)))
        if displaced is not None:
            # A lower class is not shed while its own share of the queue leaves room.
            needed = waiting >= admission.limits(displaced.request.caller.priority).most_waiting
            return QueueRoom(count - 1, displaced if needed else None)
    return QueueRoom(count - 1 if waiting < most else waiting)


def _newest(waiters: Waiters, *users: tuple[str, str] | None) -> Waiter | None:
    for user in users:
        waiter = None if user is None else waiters.newest_sheddable(*user)
        if waiter is not None:
            return waiter
    return None


RATE_WINDOW = 60.0
"""Seconds over which completions are counted."""

DEFAULT_RETRY_AFTER = 5.0
"""Seconds to advise while no rate has been measured."""

LONGEST_RETRY_AFTER = 600.0
"""Seconds; no longer `Retry-After` is sent."""


class CompletionRate:
    """Completed requests per second over the last minute."""

    def __init__(self) -> None:
        self.total = 0
        """Requests completed since the start."""
        self._ends: deque[float] = deque(maxlen=1024)

    def completed(self, now: float) -> None:
        """A request has released its slot."""
        self.total += 1
        self._ends.append(now)

    def per_second(self, now: float) -> float | None:
        """Completions per second; None while fewer than two were seen."""
        ends = self._ends
        while ends and ends[0] < now - RATE_WINDOW:
            ends.popleft()
        if len(ends) < 2:
            return None
        return len(ends) / max(now - ends[0], 1e-3)

    def seconds_until(self, ahead: int, now: float) -> float | None:
        """Seconds until `ahead` more requests are completed; None while unknown."""
        rate = self.per_second(now)
        return None if rate is None else ahead / rate

    def retry_after(self, ahead: int, now: float) -> float:
        """Whole seconds of `Retry-After` for a request that would be behind `ahead` others."""
        wait = self.seconds_until(ahead, now)
        return float(
            min(
                LONGEST_RETRY_AFTER,
                max(1, math.ceil(DEFAULT_RETRY_AFTER if wait is None else wait)),
            )
        )


def combine_waits(
    completion_rate: CompletionRate, slots: int, ahead: int, by_work: float | None, now: float
) -> float | None:
    """The lower of two predictions of the wait behind `ahead` others, seconds; None: unknown.

    One is by the rate at which slots came free, once as many have as there are `slots`; the other,
    `by_work`, by the work that runs and waits. The lower one, since a wrong refusal costs more than
    a wait in vain. With nobody ahead it depends on the lengths of one or two answers, so only half
    of it is believed.
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
