"""What all requests share on their way: leases, settings, clock, and the budget of retries."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tenacity import AsyncRetrying, RetryCallState, wait_random_exponential

from gateway.api.tokens import UsageOptions
from gateway.config.scheduling import RetrySettings
from gateway.config.settings import Settings
from gateway.events import EventBus
from gateway.forward.attempt_ends import AttemptEnds, Quarantine
from gateway.forward.in_flight import TimeoutMonitor
from gateway.lease import KeyedHash, LeaseService
from gateway.request.body import TimeSlicer
from gateway.request.preparation import Request

# Times that one request, or one cut stream, is sent again because the slots of its node had no room
# left for their tokens together. These are no retries: they take nothing of the budget, and nobody
# has failed. From the second on it runs alone.
MOST_POOL_OVERFLOWS = 4
# Times that one request is sent again at once since its node had not loaded the model; no retries.
MOST_UNLOADED = 4
BUDGET_WINDOW = 60.0  # Seconds of the past that the budget counts


class RetryBudget:
    """Counts requests and retries of the last minute; retries are at most a share of requests."""

    def __init__(self) -> None:
        self._requests: deque[list[int]] = deque()
        """Each second of the clock, and the requests counted in it."""
        self._request_count = 0
        self._retries: deque[float] = deque()

    def count_request(self, now: float) -> None:
        """Count a request's first attempt."""
        second = int(now)
        requests = self._requests
        if requests and requests[-1][0] == second:
            requests[-1][1] += 1
        else:
            requests.append([second, 1])
            self._forget(now)
        self._request_count += 1

    def spend(self, now: float, share: float, minimum: int) -> bool:
        """Count a retry if one is left."""
        if not self.remaining(now, share, minimum):
            return False
        self._retries.append(now)
        return True

    def remaining(self, now: float, share: float, minimum: int) -> int:
        """Retries left: `share` of the last minute's requests, or `minimum` if that is more."""
        self._forget(now)
        return max(0, max(minimum, int(share * self._request_count)) - len(self._retries))

    def _forget(self, now: float) -> None:
        while self._requests and self._requests[0][0] < int(now) - BUDGET_WINDOW:
            self._request_count -= self._requests.popleft()[1]
        while self._retries and self._retries[0] < now - BUDGET_WINDOW:
            self._retries.popleft()


class Retries:
    """The further attempts of one request, granted one by one within the budget.

    The pauses before them are random, so that requests that failed together do not come together
    again, and at most doubled from one to the next.
    """

    __slots__ = ("_most", "_pause", "_spend", "_state", "out_of_budget")

    def __init__(self, settings: RetrySettings, attempts: int, spend: Callable[[], bool]) -> None:
        """`attempts`: with the first one. `spend`: take a retry of the budget, if it has one."""
        self._most, self._spend = attempts, spend
        self._pause = wait_random_exponential(settings.backoff, settings.backoff_max)
        self._state = RetryCallState(AsyncRetrying(), None, (), {})
        self.out_of_budget = False
        """Whether the last attempt was refused because the budget is spent."""

    async def granted(self, *, reached_node: bool = True) -> bool:
        """Whether another attempt may follow one that failed; returns when it is time to make it.

        `reached_node`: whether the failed one did; if not, a retry adds no load and costs nothing.
        """
        if self._state.attempt_number >= self._most:
            return False
        self.out_of_budget = reached_node and not self._spend()
        if self.out_of_budget:
            return False
        pause = self._pause(self._state)
        self._state.attempt_number += 1
        await asyncio.sleep(pause)
        return True


@dataclass(slots=True, eq=False)
class ForwardContext:
    """What every request's attempts need; one for the whole process."""

    leases: LeaseService
    settings: Settings
    bus: EventBus
    timeout_monitor: TimeoutMonitor
    clock: Callable[[], float]
    time_slicer: TimeSlicer = field(default_factory=TimeSlicer)
    """Runs slow preparations of requests in steps."""
    keyed_hash: KeyedHash = field(default_factory=KeyedHash)
    """Identifies requests that nodes died on."""
    usage_options: UsageOptions = field(default_factory=UsageOptions)
    """Remembers which nodes can be asked for the usage of a stream."""
    quarantine: Quarantine = field(init=False)
    ends: AttemptEnds = field(init=False)
    retry_budget: RetryBudget = field(default_factory=RetryBudget)

    def __post_init__(self) -> None:
        self.quarantine = Quarantine(self.keyed_hash)
        self.ends = AttemptEnds(self.leases, self.bus, self.clock, self.quarantine)

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to the attempts that begin from now on."""
        self.settings = settings

    def check_quarantine(self, request: Request) -> None:
        """Raises: GatewayError, if nodes have died on this very request."""
        if self.quarantine.entries:
            self.quarantine.check(request, self.clock(), self.settings.retries.quarantine)

    def retries(self, attempts: int) -> Retries:
        """The attempts that may follow the first one of a request, `attempts` in all."""
        return Retries(self.settings.retries, attempts, self._spend_retry)

    def retries_left(self) -> int:
        """Retries that could be made now, for the metric."""
        return self.retry_budget.remaining(self.clock(), *self._allowance())

    def _spend_retry(self) -> bool:
        return self.retry_budget.spend(self.clock(), *self._allowance())

    def _allowance(self) -> tuple[float, int]:
        """Retries a minute: this share of the minute's requests, or at least so many.

        The minimum covers the slots of the largest host: all its requests may have to move at once.
        """
        settings = self.settings.retries
        return settings.budget, max(settings.budget_min, self.leases.most_slots_of_a_host())
