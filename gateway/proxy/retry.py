"""When a failed attempt may be followed by another: one policy for retries and resumptions.

tenacity holds the policy: how many attempts, how long to wait between them, and a stop when the
retry budget is spent. All requests of the process share that budget, so that an outage is not
multiplied by retries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tenacity import (
    AsyncRetrying,
    AttemptManager,
    RetryCallState,
    retry_if_result,
    stop_after_attempt,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from gateway.config.routing import RetrySettings
from gateway.lease import LeaseService

MOST_POOL_OVERFLOWS = 4
"""Times that one request, or one cut stream, is sent again because the slots of its node had no
room left for their tokens together. These are no retries: they take nothing of the budget, and
nobody has failed. From the second on it runs alone."""

BUDGET_WINDOW = 60.0
"""Seconds of the past that the budget counts."""


class Failure(Protocol):
    """What the policy must know of a failed attempt."""

    @property
    def retryable(self) -> bool:
        """Whether another attempt could succeed."""

    @property
    def reached_node(self) -> bool:
        """Whether a node received the request; if none did, a retry adds no load."""


class RetryBudget:
    """Counts requests and retries of the last minute; retries are at most a share of requests."""

    def __init__(self) -> None:
        self._requests: deque[tuple[int, int]] = deque()
        """Seconds of the clock, and the requests counted in each."""
        self._request_count = 0
        self._retries: deque[float] = deque()

    def count_request(self, now: float) -> None:
        """Count a request's first attempt."""
        second = int(now)
        requests = self._requests
        if requests and requests[-1][0] == second:
            requests[-1] = (second, requests[-1][1] + 1)
        else:
            requests.append((second, 1))
            self._forget(now)
        self._request_count += 1

    def spend(self, now: float, *, share: float, minimum: int) -> bool:
        """Count a retry if one is left."""
        if not self.remaining(now, share=share, minimum=minimum):
            return False
        self._retries.append(now)
        return True

    def remaining(self, now: float, *, share: float, minimum: int) -> int:
        """Retries left: `share` of the last minute's requests, or `minimum` if that is more."""
        self._forget(now)
        return max(0, max(minimum, int(share * self._request_count)) - len(self._retries))

    def _forget(self, now: float) -> None:
        while self._requests and self._requests[0][0] < int(now) - BUDGET_WINDOW:
            self._request_count -= self._requests.popleft()[1]
        while self._retries and self._retries[0] < now - BUDGET_WINDOW:
            self._retries.popleft()


@dataclass(slots=True, eq=False)
class RetryPolicy:
    """Grants retries and resumptions within one budget."""

    leases: LeaseService
    clock: Callable[[], float]
    budget: RetryBudget = field(default_factory=RetryBudget)

    def count_request(self) -> None:
        """Count a request's first attempt; the budget is a share of these."""
        self.budget.count_request(self.clock())

    def retries(self, settings: RetrySettings, attempts: int) -> Retries:
        """The attempts that may follow the first one of a request, `attempts` in all."""
        return Retries(settings, attempts, lambda: self._spend(settings))

    def remaining(self, settings: RetrySettings) -> int:
        """Retries that could be made now."""
        share, minimum = self._allowance(settings)
        return self.budget.remaining(self.clock(), share=share, minimum=minimum)

    def _spend(self, settings: RetrySettings) -> bool:
        share, minimum = self._allowance(settings)
        return self.budget.spend(self.clock(), share=share, minimum=minimum)

    def _allowance(self, settings: RetrySettings) -> tuple[float, int]:
        """Retries a minute: this share of the minute's requests, or at least so many.

        The minimum covers the slots of the largest host: all its requests may have to move at once.
        """
        return settings.budget, max(settings.budget_min, self.leases.most_slots_of_a_host())


class Retries:
    """The further attempts of one request, granted one by one.

    tenacity's first trial stands for the attempt that was made without asking, so that a request
    whose first attempt succeeds pays nothing for the policy.
    """

    __slots__ = ("_budget", "_loop", "_trial")

    def __init__(self, settings: RetrySettings, attempts: int, spend: Callable[[], bool]) -> None:
        self._budget = _StopWithoutBudget(spend)
        self._loop = AsyncRetrying(
            retry=retry_if_result(_is_retryable),
            stop=stop_after_attempt(attempts) | self._budget,
            wait=wait_random_exponential(multiplier=settings.backoff, max=settings.backoff_max),
            retry_error_callback=_give_up,
        )
        self._trial: AttemptManager | None = None

    async def granted(self, failure: Failure) -> bool:
        """Whether another attempt follows `failure`; returns when it is time to make it."""
        if self._trial is None:
            self._trial = await anext(aiter(self._loop))
        self._trial.retry_state.set_result(failure)
        self._trial = await anext(self._loop, None)
        return self._trial is not None

    @property
    def out_of_budget(self) -> bool:
        """Whether the last attempt was refused because the budget is spent."""
        return self._budget.spent


class _StopWithoutBudget(stop_base):
    """Stops when the budget is spent; an attempt that reached no node costs nothing."""

    def __init__(self, spend: Callable[[], bool]) -> None:
        self._spend = spend
        self.spent = False

    def __call__(self, retry_state: RetryCallState) -> bool:
        failure: Failure = _failure_of(retry_state)
        self.spent = failure.reached_node and not self._spend()
        return self.spent


def _is_retryable(failure: Failure) -> bool:
    return failure.retryable


def _failure_of(retry_state: RetryCallState) -> Failure:
    assert retry_state.outcome is not None
    failure: Failure = retry_state.outcome.result()
    return failure


def _give_up(retry_state: RetryCallState) -> None:
    """End the trials without an exception of tenacity's."""
