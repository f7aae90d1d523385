"""Limits on use: who may send one more request, and what it reserves until it is settled.

A request reserves an estimate of its tokens and cost when it is admitted, and is settled by what
it really used. So a limit is exceeded by no more than what running requests use beyond their
estimates.
At every time a counter is the sum of the ledger's rows in its window and the reservations of open
requests: requests count when they are admitted, tokens and money when the request has ended.

All times that are passed in are Unix times, as in the ledger. Windows of a minute are kept by the
monotonic clock, so that no wall clock that is set moves them; days and months by the wall clock.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec

from gateway import errors
from gateway.callers.windows import Calendar, PeriodSums, SlidingSum, date_of, time_text
from gateway.config.keys import Budget, GroupSpec, LimitSpec
from gateway.config.settings import Settings
from gateway.errors import GatewayError, truncate_echo
from gateway.lease import LeaseRequest
from gateway.terms import Caller, Priority

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


class Part(NamedTuple):
    """What this process may admit while it can't know what others do: its part of each limit."""

    processes: int  # those that share all limits
    of: Callable[[int, str], int]  # its share of so many requests of a subject


class LedgerSums(NamedTuple):
    """What the ledger's rows of a day, and of its month, come to."""

    day_tokens: int
    day_cost: float
    month_cost: float


@dataclass(slots=True, eq=False)
class Account:
    """The counters of one subject: all callers, a group, a key, or an end user of a key."""

    kind: Kind
    subject: str  # `total`, `group:NAME`, `key:ID` or `user:ID/NAME`
    who: str  # whose it is, for messages to its caller
    spec: LimitSpec
    part: Part | None = None
    """Of its limits, within which it admits; None: it counts what all processes do."""
    requests: SlidingSum = field(default_factory=lambda: SlidingSum(MINUTE, overestimate=True))
    tokens: SlidingSum = field(default_factory=lambda: SlidingSum(MINUTE, overestimate=True))
    tokens_by_day: PeriodSums = field(default_factory=PeriodSums)
    cost_by_day: PeriodSums = field(default_factory=PeriodSums)
    cost_by_month: PeriodSums = field(default_factory=PeriodSums)
    running: int = 0
    open: int = 0  # reservations that are not settled
    reserved_tokens: int = 0
    reserved_cost: float = 0.0
    others: OtherUse = NO_OTHERS
    used_before: tuple[dict[int, float], ...] = ({}, {}, {})
    """Of the periods of its sums, what had been used when it began to count for a part."""
    mean_seconds: float = 1.0  # how long its requests ran of late
    refused: dict[LimitName, float] = field(default_factory=dict)
    """By limit: until when it refuses requests like one that it has refused; Unix time."""
    rpm: float = math.inf
    tpm: float = math.inf
    tokens_per_day: float = math.inf
    concurrency: float = math.inf
    budget: Budget | None = None
    most_cost: float = math.inf
    is_budget_monthly: bool = False

    def __post_init__(self) -> None:
        self.configure(self.spec)

    def configure(self, spec: LimitSpec) -> None:
        """Put these limits in force; what is counted stays counted."""
        self.spec, self.refused = spec, {}
        self.rpm = _or_infinite(spec.rpm)
        self.tpm = _or_infinite(spec.tpm)
        self.tokens_per_day = _or_infinite(spec.tokens_per_day)
        self.concurrency = _or_infinite(spec.concurrency)
        self.budget = spec.budget_limit
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
        if self.part is not None:
            return self._refuses_in(self.part, tokens, cost, now, calendar)
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

    def divide(self, part: Part | None) -> None:
        """Admit within this part of all limits from now on; None: within all of them."""
        self.part = part
        sums = self.tokens_by_day, self.cost_by_day, self.cost_by_month
        self.used_before = dict(sums[0]), dict(sums[1]), dict(sums[2])

    def _refuses_in(
        self, part: Part, tokens: int, cost: float, now: float, calendar: Calendar
    ) -> LimitName | None:
        """As `refuses`: what is left of days and budgets is divided, and each minute is."""
        spec, subject, day, month = self.spec, self.subject, calendar.day, calendar.month
        if spec.concurrency is not None and self.running >= part.of(spec.concurrency, subject):
            return "concurrency"
        if spec.rpm is not None and self.requests.value(now) >= part.of(spec.rpm, subject):
            return "rpm"
        open_tokens = self.reserved_tokens + tokens
        if (self.tokens.value(now) + open_tokens) * part.processes > self.tpm:
            return "tpm"
        of_day, cost_of_day, cost_of_month = self.used_before
        before = of_day.get(day, 0)
        used = self.tokens_by_day.get(day, 0) - before + open_tokens
        if before + used * part.processes > self.tokens_per_day:
            return "tokens_per_day"
        spent_before = (
            cost_of_month.get(month, 0.0) if self.is_budget_monthly else cost_of_day.get(day, 0.0)
        )
        spent = self.cost_used(calendar) - spent_before + self.reserved_cost
        spent_by_all = spent_before + spent * part.processes
        if spent_by_all + cost * part.processes > self.most_cost or spent_by_all >= self.most_cost:
            return "budget"
        return None

    # Count.

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

    def admit(self, tokens: int, cost: float, now: float, requests: int = 1) -> None:
        """One more request runs, with these reservations; `requests`: 0, if it counts as one."""
        self.running += 1
        self.open += 1
        self.requests.add(now, requests)
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


@dataclass(slots=True, eq=False)
class Accounts:
    """Who sent a request, and the accounts on which it counts; kept with a parsed head."""

    caller: Caller  # with the highest class and the models that all limits allow
    user: str | None = None  # the end user that a trusted caller names
    tracked: tuple[Account, ...] = ()
    version: int = 0
    prompt_tokens: int | None = None  # of the largest prompt
    completion_tokens: int | None = None  # most of one answer
    most_tokens: float = math.inf  # that a request can have at all
    most_cost: float = math.inf
    has_rates: bool = False  # whether responses have `x-ratelimit-*` headers

    def __post_init__(self) -> None:
        self.caller = _restricted(self.caller, self.tracked)
        self.replace_accounts(self.tracked, self.version)

    def replace_accounts(self, tracked: tuple[Account, ...], version: int) -> None:
        """The accounts of the same caller and user, as the book of this version has them."""
        self.tracked, self.version = tracked, version
        self.prompt_tokens = _least(one.spec.prompt_tokens for one in tracked)
        self.completion_tokens = _least(one.spec.completion_tokens for one in tracked)
        tokens = (min(one.tpm, one.tokens_per_day) for one in tracked)
        self.most_tokens = min(tokens, default=math.inf)
        self.most_cost = min((one.most_cost for one in tracked), default=math.inf)
        self.has_rates = self.most_tokens < math.inf or any(one.rpm < math.inf for one in tracked)


def _least(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _restricted(caller: Caller, tracked: tuple[Account, ...]) -> Caller:
    """The caller with what all of these accounts allow as well."""
    best, models = caller.max_priority, caller.models
    for account in tracked:
        spec = account.spec
        if spec.max_class is not None:
            best = max(best, Priority[spec.max_class.upper()])
        if spec.models is not None:
            models = frozenset(spec.models) if models is None else models & frozenset(spec.models)
    if best == caller.max_priority and models == caller.models:
        return caller
    return replace(caller, max_priority=best, models=models)


BYTES_PER_TOKEN = 4  # bytes of text in a token, as estimated before a node has read it
# Tokens that are reserved for an answer to which neither client nor limit sets a bound.
DEFAULT_COMPLETION_TOKENS = 1024
# End users of one key that are counted each by itself; any more share one account.
MOST_USERS = 10_000
EVICTION_TRIES = 16  # accounts that are looked at to find one that can make room for another
_QUOTAS: frozenset[LimitName] = frozenset({"tokens_per_day", "budget"})
# The name of the account of all end users beyond `MOST_USERS`, which no header can hold.
_FURTHER_USERS = "\0"
MOST_RATES = 1024  # models whose cost for each token is remembered
RATE_WEIGHT = 0.1  # of the newest request in a model's mean cost for each token


# A struct of msgspec: a NamedTuple takes three times as long to make.
class RateLimit(msgspec.Struct, frozen=True):
    """The tightest limit of one kind, as `x-ratelimit-*` headers tell it."""

    limit: int
    remaining: int
    reset: float  # seconds until all of it is available again, if nothing more is sent
    resets_at: float  # the Unix time of that


class LimitStanding(NamedTuple):
    """How much of one limit is used."""

    kind: Kind  # whose it is: `total`, `group`, `key` or `user`
    limit: LimitName
    period: str | None  # `minute`, `day` or `month`; None: it holds at any time
    most: float
    used: float
    reserved: float  # by requests that run
    resets_at: float | None
    """Unix time at which all of it is available again, if nothing more is sent."""

    def as_json(self) -> dict[str, Any]:
        """As callers and operators are told of it."""
        shown, left = self._asdict(), max(0, self.most - self.used - self.reserved)
        resets_at = None if self.resets_at is None else time_text(self.resets_at)
        return {"of": shown.pop("kind"), **shown, "remaining": left, "resets_at": resets_at}


class UsedQuota(NamedTuple):
    """Money or tokens of a day or month that a key, a group or all callers have nearly used up."""

    id: str  # of the key, or the group's name; empty: of all callers
    standing: LimitStanding
    spent: bool  # nothing is left, or too little for a request that came

    @property
    def share(self) -> float:
        """How much of it is used; 1: all."""
        return self.standing.used / self.standing.most

    @property
    def name(self) -> str:
        """Names this limit in this day or month: another amount is another limit."""
        one = self.standing
        date = date_of((one.resets_at or 0.0) - 1.0)[: 10 if one.period == "day" else 7]
        return f"{one.kind}:{self.id}/{one.limit}/{one.most:g}/{date}"


@dataclass(slots=True, eq=False)
class Reservation:
    """One admitted request, and what it holds of its caller's limits until it is settled."""

    _book: LimitBook
    accounts: Accounts
    tracked: tuple[Account, ...]  # those of `accounts` when it was admitted, of this version
    version: int
    request: LeaseRequest
    admitted_at: float  # Unix time at which it counts; the ledger's `started_at`
    tokens: int
    cost: float
    ended_at: float | None = None  # Unix time of the end of the response; the ledger's
    _is_settled: bool = False

    def release(self, now: float) -> None:
        """The response has ended: another request may run. Only the first call counts."""
        if self.ended_at is None:
            self.ended_at = now
            if self.tracked:
                seconds = max(now - self.admitted_at, 0.0)
                for account in self.tracked:
                    account.release(seconds)

    def settle(self, tokens: int, cost: float, ended_at: float) -> None:
        """Count what the request has used; only the first call counts.

        `ended_at`: as in the ledger's row.
        """
        if self.ended_at is None:
            self.release(ended_at)
        if not self._is_settled:
            self._is_settled = True
            self._book.settled(self, tokens, cost, ended_at)


@dataclass(eq=False)
class LimitBook:
    """All accounts of one gateway. It outlives reloads: `configure` changes limits alone."""

    settings: InitVar[Settings]
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    learn_pending: Callable[[], None] = lambda: None  # settles what has ended and is not settled
    dearest_token: Callable[[LeaseRequest], float] = lambda _: 0.0
    """The most that a token of a request can cost, of a model whose mean is unknown."""
    on_refusal: Callable[[LimitName, Kind], None] = lambda _, __: None

    def __post_init__(self, settings: Settings) -> None:
        self._calendar = Calendar()
        self._groups: Mapping[str, GroupSpec] = {}

        self._accounts: dict[str, Account] = {}  # by subject; without those of end users
        self._users: dict[str, OrderedDict[str, Account]] = {}
        """By the id of their key, then by their names, those to be evicted first in front."""
        self._user_limits: dict[str, LimitSpec] = {}
        """The limits of each end user, by the id of the key."""
        self._unloaded: dict[str, float] = {}
        """Scopes that lack what the ledger has of them, and the Unix times from which on this
        process counts them. A scope is an account's subject, or `users:ID`: the users of a key."""
        self._rates: dict[str, float] = {}  # mean cost of a token, by model
        self._part: Part | None = None
        self._version = 0
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Put the limits of these settings in force; what is counted stays counted."""
        self._groups = settings.groups
        if settings.limits.total is None:
            self._forget("total")
        else:
            self._account("total", "total", "all callers together", settings.limits.total)
        for subject in [one for one in self._accounts if one.startswith("group:")]:
            group = self._groups.get(subject.removeprefix("group:"))
            if group is None or group.limits is None:
                self._forget(subject)
        for name, group in self._groups.items():
            if group.limits is not None:
                self._account("group", f"group:{name}", f"group '{name}'", group.limits)
        self._version += 1

    def divide(self, part: Part | None) -> None:
        """Admit within this part of all limits from now on; None: within all of them."""
        if part is None and self._part is None:
            return
        self._part = part
        users = (account for of_key in self._users.values() for account in of_key.values())
        for account in (*self._accounts.values(), *users):
            account.divide(part)

    def prepare(self, callers: Iterable[Caller]) -> None:
        """Make the accounts of these callers, so that the next load includes them."""
        for caller in callers:
            self._look_up(caller, None)

    def _forget(self, subject: str) -> None:
        """Drop an account that is not limited any more, and so not counted from now on."""
        if self._accounts.pop(subject, None) is not None:
            self._unloaded.pop(subject, None)
            self._version += 1

    # Look up accounts.

    def accounts(self, caller: Caller, user: str | None = None) -> Accounts:
        """The accounts on which the requests of this caller and end user count."""
        return Accounts(caller, user, self._look_up(caller, user), self._version)

    def _look_up(self, caller: Caller, user: str | None) -> tuple[Account, ...]:
        tracked = [account for _, account in self._shared(caller.group)]
        if caller.limits is not None:
            who = f"key '{caller.name}'"
            tracked.append(self._account("key", f"key:{caller.id}", who, caller.limits))
        else:
            self._forget(f"key:{caller.id}")
        limits = caller.user_limits
        if limits is None and (group := self._groups.get(caller.group or "")) is not None:
            limits = group.user_limits
        self._limit_users(caller.id, limits)
        if user is not None and limits is not None:
            tracked.append(self._user_account(caller.id, user))
        return tuple(tracked)

    def _shared(self, group: str | None) -> list[tuple[str, Account]]:
        """The accounts of all callers and of this group, as far as they have limits."""
        subjects = ("total",) if group is None else ("total", f"group:{group}")
        return [(one, self._accounts[one]) for one in subjects if one in self._accounts]

    def _account(self, kind: Kind, subject: str, who: str, spec: LimitSpec) -> Account:
        account = self._accounts.get(subject)
        if account is None:
            account = self._accounts[subject] = Account(kind, subject, who, spec, self._part)
            self._unloaded[subject] = self.wall_clock()
            self._version += 1
        elif account.spec != spec:
            account.configure(spec)
        return account

    def _limit_users(self, key: str, limits: LimitSpec | None) -> None:
        """Put the limits of each end user of a key in force."""
        if self._user_limits.get(key) == limits:
            return
        if limits is None:
            del self._user_limits[key]
            self._users.pop(key, None)
            self._unloaded.pop(f"users:{key}", None)
            self._version += 1
            return
        if key not in self._user_limits:
            self._unloaded[f"users:{key}"] = self.wall_clock()
            self._version += 1
        self._user_limits[key] = limits
        for account in self._users.setdefault(key, OrderedDict()).values():
            account.configure(limits)

    def _user_account(self, key: str, user: str) -> Account:
        users, spec = self._users[key], self._user_limits[key]
        account = users.get(user)
        if account is not None:
            users.move_to_end(user)
            return account
        if len(users) < MOST_USERS or self._evict_one(users):
            who = f"end user '{truncate_echo(user)}' of key '{key}'"
            users[user] = Account("user", f"user:{key}/{user}", who, spec, self._part)
            return users[user]
        # Together they have one user's share, and take nothing from other callers.
        if (account := users.get(_FURTHER_USERS)) is None:
            who = f"further end users of key '{key}'"
            account = Account("user", f"others:{key}", who, spec, self._part)
            users[_FURTHER_USERS] = account
        users.move_to_end(_FURTHER_USERS)
        return account

    def _evict_one(self, users: OrderedDict[str, Account]) -> bool:
        """Drop an account that counts nothing; returns whether one was found.

        One that counts something is kept, since its user must not escape its limits. It moves to
        the end, so that the next call looks at others.
        """
        now, wall = self.clock(), self.wall_clock()
        self._calendar.look_up(wall)
        for user, account in list(islice(users.items(), EVICTION_TRIES)):
            if account.is_idle(now, self._calendar):
                del users[user]
                self._version += 1
                return True
            users.move_to_end(user)
        return False

    def existing(self, key: str, group: str | None, user: str | None) -> list[tuple[str, Account]]:
        """The accounts on which a request of the ledger counts, each with its scope."""
        found = self._shared(group)
        if (account := self._accounts.get(f"key:{key}")) is not None:
            found.append((f"key:{key}", account))
        if user is not None and key in self._user_limits:
            found.append((f"users:{key}", self._user_account(key, user)))
        return found

    def unloaded(self) -> dict[str, float]:
        """The scopes that lack what the ledger has, and since when this process counts them."""
        return dict(self._unloaded)

    def loaded(self, scopes: Iterable[str]) -> None:
        """What the ledger has of these scopes is counted."""
        for scope in scopes:
            self._unloaded.pop(scope, None)

    # Admit and settle.

    def reserve(
        self, accounts: Accounts, request: LeaseRequest, now: float, prompts: int = 1
    ) -> Reservation:
        """Admit a request at `now`, and reserve what it may use; `prompts`: it has so many.

        Raises: GatewayError 400 if it is larger than a limit, 429 if a limit is reached.
        """
        self.bring_up_to_date(accounts)
        tracked = accounts.tracked
        if not tracked:
            return Reservation(self, accounts, tracked, accounts.version, request, now, 0, 0.0)
        tokens = _estimate(accounts, request, prompts) if request.size.slots else 0
        cost = self._expected_cost(accounts, request, tokens)
        clock, calendar = self.clock(), self._calendar
        calendar.look_up(now)
        for account in tracked:
            if account.refuses(tokens, cost, clock, calendar) is not None:
                # It may have ended already, and used less than it had reserved.
                self.learn_pending()
                self._check(tracked, tokens, cost, clock, now)
                break
        for account in tracked:
            account.admit(tokens, cost, clock)
        return Reservation(self, accounts, tracked, accounts.version, request, now, tokens, cost)

    def adopt(
        self, accounts: Accounts, request: LeaseRequest, admitted_at: float, prompts: int
    ) -> Reservation:
        """Reserve for a request that another process has admitted, which has counted it as one."""
        self.bring_up_to_date(accounts)
        try:
            tokens = _estimate(accounts, request, prompts) if request.size.slots else 0
        except GatewayError:  # The limit has changed.
            tokens = int(min(request.size.prompt_tokens, accounts.most_tokens))
        cost, clock = self._expected_cost(accounts, request, tokens), self.clock()
        for account in accounts.tracked:
            account.admit(tokens, cost, clock, requests=0)
        return Reservation(
            self, accounts, accounts.tracked, accounts.version, request, admitted_at, tokens, cost
        )

    def _expected_cost(self, accounts: Accounts, request: LeaseRequest, tokens: int) -> float:
        """What so many tokens may cost, where a budget limits that; else 0."""
        if accounts.most_cost == math.inf:
            return 0.0
        rate = self._rates.get(request.wanted.model)
        if rate is None:
            rate = self.dearest_token(request)
        return min(tokens * rate, accounts.most_cost)

    def bring_up_to_date(self, accounts: Accounts) -> None:
        """Have them be those on which the caller's requests count by now."""
        if accounts.version != self._version:
            tracked = self._look_up(accounts.caller, accounts.user)
            accounts.replace_accounts(tracked, self._version)

    def _check(
        self, tracked: tuple[Account, ...], tokens: int, cost: float, clock: float, now: float
    ) -> None:
        """Raises: GatewayError 429 if an account has no room for one more request."""
        found: list[tuple[GatewayError, LimitName, Account]] = []
        for account in tracked:
            limit = account.refuses(tokens, cost, clock, self._calendar)
            if limit is not None:
                error = refusal(account, limit, tokens, clock, now, self._calendar)
                found.append((error, limit, account))
        if found:
            # The wait must be long enough for all of them.
            error, limit, account = max(found, key=lambda one: one[0].retry_after or 0.0)
            account.refused[limit] = now + (error.retry_after or 0.0)
            self.on_refusal(limit, account.kind)
            raise error

    def settled(self, reservation: Reservation, tokens: int, cost: float, ended_at: float) -> None:
        """A request has ended that used so much; its reservation calls this once."""
        tracked = reservation.tracked
        if tokens > 0:
            rates, model, rate = self._rates, reservation.request.wanted.model, cost / tokens
            mean = rates.get(model)
            if mean is None:
                if len(rates) >= MOST_RATES:
                    del rates[next(iter(rates))]
                rates[model] = rate
            else:
                rates[model] = mean + (rate - mean) * RATE_WEIGHT
        if reservation.version != self._version:
            # On the accounts that were made since it was admitted.
            self.count_recovered(reservation.accounts, tokens, cost, ended_at, tracked)
        if not tracked:
            return
        ended = self.monotonic(ended_at)
        self._calendar.look_up(ended_at)
        for account in tracked:
            account.give_back(reservation.tokens, reservation.cost)
            account.count(tokens, cost, ended, self._calendar)

    def count_recovered(
        self,
        accounts: Accounts,
        tokens: int,
        cost: float,
        ended_at: float,
        tracked: Sequence[Account] = (),
    ) -> None:
        """Count a request that an earlier process has run, and this one records.

        `tracked`: the accounts that count it already.
        """
        caller, ended = accounts.caller, self.monotonic(ended_at)
        self._calendar.look_up(ended_at)
        for scope, account in self.existing(caller.id, caller.group, accounts.user):
            # Accounts that were made later read it from the ledger, with its row.
            if account not in tracked and ended_at >= self._unloaded.get(scope, 0.0):
                account.count(tokens, cost, ended, self._calendar)

    def monotonic(self, when: float) -> float:
        """The monotonic time of a Unix time within the last minute; others count as its ends."""
        age = self.wall_clock() - when
        # Comparisons: `min` and `max` cost twice as much.
        if age < 0.0:
            age = 0.0
        elif age > MINUTE:
            age = MINUTE
        return self.clock() - age

    # Tell callers.

    def rate_limits(self, accounts: Accounts) -> tuple[RateLimit | None, RateLimit | None]:
        """The tightest limit of requests, and that of tokens; None: there is none."""
        now, calendar = self.clock(), self._calendar
        wall = self.wall_clock()
        calendar.look_up(wall)
        least_requests = least_tokens = math.inf
        of_requests: Account | None = None
        of_tokens: Account | None = None
        daily = False
        for account in accounts.tracked:
            left = account.rpm - account.requests.value(now)
            if left < least_requests:
                least_requests, of_requests = left, account
            reserved = account.reserved_tokens + account.others.tokens
            left = account.tpm - account.tokens.value(now) - reserved
            if left < least_tokens:
                least_tokens, of_tokens, daily = left, account, False
            left = account.tokens_per_day - account.tokens_by_day.get(calendar.day, 0) - reserved
            if left < least_tokens:
                least_tokens, of_tokens, daily = left, account, True
        requests = tokens = None
        if of_requests is not None:
            reset = of_requests.requests.seconds_until_empty(now)
            requests = _rate_limit(of_requests.rpm, least_requests, reset, wall)
        if of_tokens is not None and daily:
            untouched = least_tokens == of_tokens.tokens_per_day
            reset = 0.0 if untouched else calendar.day_ends - wall
            tokens = _rate_limit(of_tokens.tokens_per_day, least_tokens, reset, wall)
        elif of_tokens is not None:
            reset = MINUTE if of_tokens.open else of_tokens.tokens.seconds_until_empty(now)
            tokens = _rate_limit(of_tokens.tpm, least_tokens, reset, wall)
        return requests, tokens

    def group_accounts(self) -> Iterator[tuple[str, Account]]:
        """The accounts of groups that have limits, by the groups' names."""
        for name in self._groups:
            if (account := self._accounts.get(f"group:{name}")) is not None:
                yield name, account

    def user_accounts(self, key: str) -> Sequence[tuple[str, Account]]:
        """The accounts of a key's end users that are counted each by itself."""
        return [one for one in self._users.get(key, {}).items() if one[0] != _FURTHER_USERS]

    def quota_accounts(self) -> Sequence[Account]:
        """The accounts of keys, groups and all callers that have a limit for a day or month."""
        accounts = self._accounts.values()
        return [one for one in accounts if one.budget is not None or one.tokens_per_day < math.inf]

    def used_quotas(self, account: Account, least: float) -> Iterator[UsedQuota]:
        """The limits of a day or month of which at least this share is used."""
        calendar = self._calendar
        calendar.look_up(self.wall_clock())
        tokens = account.tokens_by_day.get(calendar.day, 0)
        if (
            tokens < least * account.tokens_per_day
            and account.cost_used(calendar) < least * account.most_cost
        ):
            return  # So it is of nearly all, of which there may be a hundred thousand.
        for one in self.standings([account]):
            if one.limit in _QUOTAS and one.used >= least * one.most:
                refuses = account.refused.get(one.limit, 0.0) > self.wall_clock()
                id_ = account.subject.partition(":")[2]
                yield UsedQuota(id_, one, refuses or one.used >= one.most)

    def standings(self, accounts: Iterable[Account]) -> Iterator[LimitStanding]:
        """Each limit of these accounts, with what is used of it now."""
        now, wall, calendar = self.clock(), self.wall_clock(), self._calendar
        calendar.look_up(wall)
        for one in accounts:
            kind, spec, reserved = one.kind, one.spec, one.open_tokens()
            if spec.rpm is not None:
                reset = wall + one.requests.seconds_until_empty(now)
                used = one.requests.value(now)
                yield LimitStanding(kind, "rpm", "minute", spec.rpm, used, 0, reset)
            if spec.tpm is not None:
                reset = wall + one.tokens.seconds_until_empty(now)
                used = one.tokens.value(now)
                yield LimitStanding(kind, "tpm", "minute", spec.tpm, used, reserved, reset)
            if spec.tokens_per_day is not None:
                used, most = one.tokens_by_day.get(calendar.day, 0), spec.tokens_per_day
                reset = calendar.day_ends
                yield LimitStanding(kind, "tokens_per_day", "day", most, used, reserved, reset)
            if one.budget is not None:
                period = one.budget.period
                reset = calendar.day_ends if period == "day" else calendar.month_ends
                used, held = one.cost_used(calendar), one.reserved_cost + one.others.cost
                yield LimitStanding(kind, "budget", period, one.budget.amount, used, held, reset)
            if spec.concurrency is not None:
                running = one.running + one.others.running
                yield LimitStanding(kind, "concurrency", None, spec.concurrency, running, 0, None)


def _rate_limit(limit: float, left: float, reset: float, wall: float) -> RateLimit:
    return RateLimit(int(limit), int(left) if left > 0 else 0, reset, wall + reset)


def _estimate(accounts: Accounts, request: LeaseRequest, prompts: int) -> int:
    """Tokens to reserve for a request. Raises: GatewayError 400 if it can never be admitted."""
    known = request.size.prompt_tokens
    text = int(request.size.text_bytes) // BYTES_PER_TOKEN
    prompt = max(text + request.size.exact_tokens + request.size.media_tokens, known)
    if accounts.prompt_tokens is not None and known > accounts.prompt_tokens * prompts:
        most = accounts.prompt_tokens
        who = next(one.who for one in accounts.tracked if one.spec.prompt_tokens == most)
        raise errors.prompt_limit_exceeded(known, most, who)
    completion = 0
    named: int | None = None
    if request.size.generates:
        answers = request.size.slots * prompts
        bound = request.size.max_tokens
        if bound is None:
            bound = accounts.completion_tokens
        named = None if bound is None else bound * answers
        completion = (DEFAULT_COMPLETION_TOKENS * answers) if named is None else named
    least = accounts.most_tokens
    if known + (named or 0) > least:
        account = next(one for one in accounts.tracked if min(one.tpm, one.tokens_per_day) == least)
        limit = "minute (tpm)" if account.tpm == least else "day (tokens_per_day)"
        of_whom = f"{account.who}: {int(least)} tokens a {limit}"
        raise errors.larger_than_limit(known, named, of_whom)
    return int(min(prompt + completion, least))


def refusal(
    account: Account, limit: LimitName, tokens: int, now: float, wall: float, calendar: Calendar
) -> GatewayError:
    """The error of a request that would exceed this limit of the account."""
    who = account.who
    if account.part is not None:
        return errors.rate_limit_exceeded(
            f"{who}: its part of what is allowed ({limit}), since this one of "
            f"{account.part.processes} machines can't reach the others",
            min(MINUTE, account.mean_seconds),
        )
    if limit == "rpm":
        over = account.requests.value(now) + 1 - account.rpm
        wait = account.requests.seconds_until_left(now, over)
        return errors.rate_limit_exceeded(f"{who}: {account.rpm} requests a minute (rpm)", wait)
    if limit == "concurrency":
        running = account.running + account.others.running
        wait = min(MINUTE, account.mean_seconds / max(1, running))
        return errors.rate_limit_exceeded(
            f"{who}: {account.concurrency} requests at one time (concurrency)", wait
        )
    reserved = account.open_tokens()
    if limit == "tpm":
        used = account.tokens.value(now)
        over = used + reserved + tokens - account.tpm
        wait = account.tokens.seconds_until_left(now, over)
        if wait == math.inf:
            # Running requests must end; what they have not used comes free then.
            wait = min(MINUTE, account.mean_seconds)
        return errors.rate_limit_exceeded(
            f"{who}: {account.tpm} tokens a minute (tpm), of which {int(used)} are used, "
            f"{reserved} reserved by running requests and {tokens} needed",
            wait,
        )
    if limit == "tokens_per_day":
        used = account.tokens_by_day.get(calendar.day, 0)
        return errors.insufficient_quota(
            f"{who}: {account.tokens_per_day} tokens a day (tokens_per_day), of which {int(used)} "
            f"are used, {reserved} reserved by running requests and {tokens} needed",
            calendar.day_ends - wall,
        )
    assert account.budget is not None
    ends = calendar.day_ends if account.budget.period == "day" else calendar.month_ends
    return errors.insufficient_quota(
        f"{who}: a budget of {account.budget.amount:g} a {account.budget.period} (budget)",
        ends - wall,
    )
