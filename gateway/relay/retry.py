"""How often, how soon and how much may be tried again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from gateway.config.routing import RetrySettings

WINDOW = 60.0
"""Seconds of the past that the budget counts."""


Affordable = Callable[[BaseException | None], bool]


class RetryBudget:
    """Keeps an outage from being multiplied: retries are at most a share of recent requests."""

    def __init__(self) -> None:
        self._requests: deque[tuple[int, int]] = deque()
        self._counted = 0
        self._retries: deque[float] = deque()

    def request(self, now: float) -> None:
        """Count a request that is tried for the first time."""
        second = int(now)
        requests = self._requests
        if requests and requests[-1][0] == second:
            requests[-1] = (second, requests[-1][1] + 1)
        else:
            requests.append((second, 1))
            self._forget(now)
        self._counted += 1

    def spend(self, now: float, *, share: float, least: int) -> bool:
        """Count a retry, if one is left."""
        if not self.left(now, share=share, least=least):
            return False
        self._retries.append(now)
        return True

    def left(self, now: float, *, share: float, least: int) -> int:
        """Retries that could be made now, of `share` of the last minute's requests or `least`."""
        self._forget(now)
        return max(0, max(least, int(share * self._counted)) - len(self._retries))

    def _forget(self, now: float) -> None:
        while self._requests and self._requests[0][0] < int(now) - WINDOW:
            self._counted -= self._requests.popleft()[1]
        while self._retries and self._retries[0] < now - WINDOW:
            self._retries.popleft()


class _OutOfBudget(stop_base):
    def __init__(self, affordable: Affordable) -> None:
        self._affordable = affordable

    def __call__(self, retry_state: RetryCallState) -> bool:
        outcome = retry_state.outcome
        return not self._affordable(None if outcome is None else outcome.exception())


def retrying(
    settings: RetrySettings,
    may_retry: Callable[[BaseException], bool],
    affordable: Affordable,
) -> AsyncRetrying:
    """The loop of tenacity for one request; `affordable` is asked once for each further attempt.

    It is told how the attempt before it failed.
    """
    return AsyncRetrying(
        stop=stop_after_attempt(settings.attempts) | _OutOfBudget(affordable),
        wait=wait_random_exponential(multiplier=settings.backoff, max=settings.backoff_max),
        retry=retry_if_exception(may_retry),
        reraise=True,
    )
