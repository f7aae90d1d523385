"""Accounts: the live counters of one key, group, end user, or of all callers together.

Windows of a minute are kept by the monotonic clock, so that no wall clock that is set moves them;
days and months are those of the wall clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from gateway.config.usage_limits import Budget, LimitSpec
from gateway.request import Caller, Priority
from gateway.usage.windows import Calendar, PeriodSums, SlidingSum

MINUTE = 60.0

Kind = Literal["total", "group", "key", "user"]

LimitName = Literal["concurrency", "rpm", "tpm", "tokens_per_day", "budget"]


@dataclass(frozen=True, slots=True)
class OtherUse:
    """What open requests of other processes on the same store hold of one account."""

    running: int = 0
    tokens: int = 0
    cost: float = 0.0

    def plus(self, tokens: int, cost: float) -> OtherUse:
        """With one more request that has reserved so much."""
        return OtherUse(self.running + 1, self.tokens + tokens, self.cost + cost)


NO_OTHERS = OtherUse()


class LedgerSums(NamedTuple):
    """What the ledger's rows of a day, and of its month, come to."""

    day_tokens: int
    day_cost: float
    month_cost: float


class Account:
    """The counters of one subject: all callers, a group, a key, or an end user of a key."""

    __slots__ = (
        "budget", "concurrency", "cost_by_day", "cost_by_month", "is_budget_monthly", "kind",
        "mean_seconds", "most_cost", "open", "others", "requests", "reserved_cost",
        "reserved_tokens", "rpm",
        "running", "spec", "subject", "tokens", "tokens_by_day", "tokens_per_day", "tpm", "who",
    )  # fmt: skip

    def __init__(self, kind: Kind, subject: str, who: str, spec: LimitSpec) -> None:
        self.kind: Kind = kind
        self.subject = subject
        """`total`, `group:NAME`, `key:ID` or `user:ID/NAME`."""
        self.who = who
        """Whose it is, for messages to its caller."""
        self.requests = SlidingSum(MINUTE, overestimate=True)
        self.tokens = SlidingSum(MINUTE, overestimate=True)
        self.tokens_by_day = PeriodSums()
        self.cost_by_day = PeriodSums()
        self.cost_by_month = PeriodSums()
        self.running = 0
        self.open = 0
        """Reservations that are not settled."""
        self.reserved_tokens = 0
        self.reserved_cost = 0.0
        self.others = NO_OTHERS
        self.mean_seconds = 1.0
        """How long its requests ran of late."""
        self.configure(spec)

    def configure(self, spec: LimitSpec) -> None:
        """Put these limits in force; what is counted stays counted."""
        self.spec = spec
        self.rpm = _or_infinite(spec.rpm)
        self.tpm = _or_infinite(spec.tpm)
        self.tokens_per_day = _or_infinite(spec.tokens_per_day)
        self.concurrency = _or_infinite(spec.concurrency)
        self.budget: Budget | None = spec.budget_limit
        self.most_cost = math.inf if self.budget is None else self.budget.amount
        self.is_budget_monthly = self.budget is not None and self.budget.period == "month"

    # Read the counters.

    def open_tokens(self) -> int:
        """Tokens that open requests have reserved."""
        return self.reserved_tokens + self.others.tokens

    def is_idle(self, now: float, calendar: Calendar) -> bool:
        """Whether nothing would be lost with this account: all that its limits count is 0."""
        return not (
            self.open
            or self.running
            or self.others.running
            or self.requests.value(now)
            or self.tokens.value(now)
            or (self.tokens_per_day < math.inf and self.tokens_by_day.get(calendar.day))
            or (self.budget is not None and self.cost_used(calendar))
        )

    def cost_used(self, calendar: Calendar) -> float:
        """The money used in the budget's day or month, which `calendar` shows."""
        if self.budget is None or self.budget.period == "month":
            return self.cost_by_month.get(calendar.month, 0.0)
        return self.cost_by_day.get(calendar.day, 0.0)

    def refuses(self, tokens: int, cost: float, now: float, calendar: Calendar) -> LimitName | None:
        """The limit that keeps one more request from being admitted; None: none does."""
        others = self.others
        if self.running + others.running >= self.concurrency:
            return "concurrency"
        if self.requests.value(now) >= self.rpm:
            return "rpm"
        open_tokens = self.reserved_tokens + others.tokens + tokens
        if self.tokens.value(now) + open_tokens > self.tpm:
            return "tpm"
        day = calendar.day
        if self.tokens_by_day.get(day, 0) + open_tokens > self.tokens_per_day:
            return "tokens_per_day"
        most = self.most_cost
        if most < math.inf:
            if self.is_budget_monthly:
                used = self.cost_by_month.get(calendar.month, 0.0)
            else:
                used = self.cost_by_day.get(day, 0.0)
            used += self.reserved_cost + others.cost
            # What was used up to the last bit leaves nothing, though the estimate may be 0.
            if used + cost > most or used >= most:
                return "budget"
        return None

    # Count.

    def count_request(self, when: float) -> None:
        """Count a request of another process, which was admitted at this monotonic time."""
        self.requests.add_late(when, 1)

    def add_sums(self, sums: LedgerSums, calendar: Calendar) -> None:
        """Add sums of the ledger, of the day and month that `calendar` shows."""
        self.tokens_by_day.add(calendar.day, sums.day_tokens)
        self.cost_by_day.add(calendar.day, sums.day_cost)
        self.cost_by_month.add(calendar.month, sums.month_cost)

    def raise_sums(self, sums: LedgerSums, calendar: Calendar) -> None:
        """Let no sum of this day and month be below the ledger's."""
        self.tokens_by_day.raise_to(calendar.day, sums.day_tokens)
        self.cost_by_day.raise_to(calendar.day, sums.day_cost)
        self.cost_by_month.raise_to(calendar.month, sums.month_cost)

    def set_others(self, use: OtherUse) -> None:
        """What open requests of other processes hold now."""
        self.others = use

    def admit(self, tokens: int, cost: float, now: float) -> None:
        """One more request runs, with these reservations."""
        self.running += 1
        self.open += 1
        self.requests.add(now, 1)
        self.reserved_tokens += tokens
        self.reserved_cost += cost

    def release(self, seconds: float) -> None:
        """A request that ran so long has ended."""
        self.running -= 1
        self.mean_seconds += (seconds - self.mean_seconds) * 0.1

    def give_back(self, tokens: int, cost: float) -> None:
        """A reservation ends."""
        self.open -= 1
        self.reserved_tokens -= tokens
        # Without what rounding left.
        self.reserved_cost = self.reserved_cost - cost if self.open else 0.0

    def count(self, tokens: int, cost: float, ended: float, calendar: Calendar) -> None:
        """Count what a request has used that ended at this monotonic time, on `calendar`'s day."""
        # Nearly always the day and month are known already.
        day = calendar.day
        if tokens > 0:
            self.tokens.add_late(ended, tokens)
            if day in self.tokens_by_day:
                self.tokens_by_day[day] += tokens
            else:
                self.tokens_by_day.add(day, tokens)
        if cost > 0:
            month = calendar.month
            if day in self.cost_by_day and month in self.cost_by_month:
                self.cost_by_day[day] += cost
                self.cost_by_month[month] += cost
            else:
                self.cost_by_day.add(day, cost)
                self.cost_by_month.add(month, cost)


def _or_infinite(limit: int | None) -> float:
    return math.inf if limit is None else limit


class Accounts:
    """Who sent a request, and the accounts on which it counts; kept with a parsed head."""

    __slots__ = (
        "caller", "completion_tokens", "has_rates", "most_cost", "most_tokens", "prompt_tokens",
        "tracked", "user", "version",
    )  # fmt: skip

    def __init__(
        self, caller: Caller, user: str | None, tracked: tuple[Account, ...], version: int
    ) -> None:
        self.caller = _restricted(caller, tracked)
        """With the highest class and the models that all limits allow."""
        self.user = user
        """The end user that a trusted caller names."""
        self.replace_accounts(tracked, version)

    def replace_accounts(self, tracked: tuple[Account, ...], version: int) -> None:
        """The accounts of the same caller and user, as the book of this version has them."""
        self.tracked: tuple[Account, ...] = tracked
        self.version = version
        self.prompt_tokens = _least(one.spec.prompt_tokens for one in tracked)
        """The largest prompt."""
        self.completion_tokens = _least(one.spec.completion_tokens for one in tracked)
        """Most tokens of one answer."""
        self.most_tokens: float = min(
            (min(one.tpm, one.tokens_per_day) for one in tracked), default=math.inf
        )
        """Tokens that a request can have at all."""
        self.most_cost = min(
            (one.budget.amount for one in tracked if one.budget is not None), default=math.inf
        )
        self.has_rates = any(
            min(one.rpm, one.tpm, one.tokens_per_day) < math.inf for one in tracked
        )
        """Whether responses have `x-ratelimit-*` headers."""


def _least(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _restricted(caller: Caller, tracked: tuple[Account, ...]) -> Caller:
    """The caller with what all of these accounts allow as well."""
    best, models = caller.max_priority, caller.models
    for account in tracked:
        spec = account.spec
        if spec.max_class is not None:
            best = max(best, Priority.parse(spec.max_class) or best)
        if spec.models is not None:
            models = frozenset(spec.models) if models is None else models & frozenset(spec.models)
    if best == caller.max_priority and models == caller.models:
        return caller
    return replace(caller, max_priority=best, models=models)
