"""The counters of one subject: what they refuse, what survives, and when nothing would be lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from gateway.config.usage_limits import LimitSpec
from gateway.usage.limits import NO_OTHERS, Account, LedgerSums, OtherUse
from gateway.usage.windows import Calendar
from tests.each_case import each_case
from tests.usage.build import NOW

AT = 1000.0
"""A monotonic time."""
DAY = 86400.0


def an_account(**limits: Any) -> Account:
    return Account("key", "key:alice", "key 'alice'", LimitSpec.model_validate(limits))


def the_calendar(when: float = NOW) -> Calendar:
    calendar = Calendar()
    calendar.look_up(when)
    return calendar


def refused(account: Account, tokens: int = 0, cost: float = 0.0) -> str | None:
    return account.refuses(tokens, cost, AT, the_calendar())


# Room for one more.


@each_case(
    ("limits", "other", "tokens", "cost", "wanted"),
    [
        ({"concurrency": 3}, OtherUse(running=2), 0, 0.0, None),
        ({"concurrency": 3}, OtherUse(running=3), 0, 0.0, "concurrency"),
        ({"tpm": 100}, OtherUse(1, tokens=60), 40, 0.0, None),
        ({"tpm": 100}, OtherUse(1, tokens=60), 41, 0.0, "tpm"),
        ({"tokens_per_day": 100}, OtherUse(1, tokens=60), 40, 0.0, None),
        ({"tokens_per_day": 100}, OtherUse(1, tokens=60), 41, 0.0, "tokens_per_day"),
        ({"budget": "2/month"}, OtherUse(1, cost=1.5), 0, 0.5, None),
        ({"budget": "2/month"}, OtherUse(1, cost=1.5), 0, 0.6, "budget"),
        ({"budget": "2/day"}, OtherUse(1, cost=2.0), 0, 0.0, "budget"),
    ],
)
def test_open_requests_of_other_processes_take_room(
    limits: dict[str, Any], other: OtherUse, tokens: int, cost: float, wanted: str | None
) -> None:
    account = an_account(**limits)
    account.set_others(other)
    assert refused(account, tokens, cost) == wanted
    account.set_others(NO_OTHERS)
    assert refused(account, tokens, cost) is None


def test_a_request_of_another_process_leaves_the_minute_when_it_is_a_minute_old() -> None:
    account = an_account(rpm=1)
    account.count_request(AT - 20.0)
    assert refused(account) == "rpm"
    assert account.refuses(0, 0.0, AT + 39.9, the_calendar()) == "rpm"
    assert account.refuses(0, 0.0, AT + 40.0, the_calendar()) is None


@pytest.mark.parametrize(("period", "seconds"), [("day", DAY), ("month", 31 * DAY)])
def test_money_is_that_of_the_budgets_own_period(period: str, seconds: float) -> None:
    account = an_account(budget=f"3/{period}")
    account.count(10, 3.0, AT, the_calendar())
    assert refused(account) == "budget"
    assert account.refuses(0, 0.0, AT, the_calendar(NOW + seconds)) is None
    assert (period == "day") == (account.refuses(0, 0.0, AT, the_calendar(NOW + DAY)) is None)


def test_many_reservations_leave_no_rounding_behind() -> None:
    account = an_account(budget="100/month")
    costs = [0.1 * number for number in range(1, 50)]
    for cost in costs:
        account.admit(7, cost, AT)
    for cost in costs:
        account.release(1.0)
        account.give_back(7, cost)
    assert (account.reserved_tokens, account.reserved_cost) == (0, 0.0)
    assert (account.open, account.running) == (0, 0)


# Changes of limits.


def test_other_limits_find_what_was_counted_before() -> None:
    account = an_account(rpm=100)
    account.admit(300, 2.0, AT)
    account.count(400, 5.0, AT, the_calendar())
    account.configure(LimitSpec.model_validate({"tpm": 600}))
    assert refused(account) == "tpm"  # 400 used and 300 reserved
    account.configure(LimitSpec.model_validate({"tokens_per_day": 700}))
    assert (refused(account), refused(account, 1)) == (None, "tokens_per_day")
    account.configure(LimitSpec.model_validate({"budget": "8/day"}))
    assert (refused(account, 0, 1.0), refused(account, 0, 1.1)) == (None, "budget")
    account.configure(LimitSpec())
    assert refused(account, 10**9, math.inf) is None


# Sums of the ledger.


def test_sums_are_added_once_and_raised_however_often() -> None:
    account, calendar = an_account(tokens_per_day=100), the_calendar()
    sums = LedgerSums(day_tokens=60, day_cost=1.0, month_cost=4.0)
    account.add_sums(sums, calendar)
    account.count(10, 0.5, AT, calendar)
    for _ in range(3):
        account.raise_sums(sums, calendar)
    assert account.tokens_by_day[calendar.day] == 70
    assert (account.cost_by_day[calendar.day], account.cost_by_month[calendar.month]) == (1.5, 4.5)
    account.raise_sums(LedgerSums(90, 2.0, 5.0), calendar)
    assert refused(account, 10) is None
    assert refused(account, 11) == "tokens_per_day"


# Whether it may be dropped.


def holding(account: Account, how: str) -> Callable[[], None]:
    """Make an account of which something counts; returns what ends that, if time does not."""
    if how == "runs":
        account.admit(0, 0.0, AT - 100.0)
        account.give_back(0, 0.0)
        return lambda: account.release(1.0)
    if how == "not settled":
        account.admit(0, 0.0, AT - 100.0)
        account.release(1.0)
        return lambda: account.give_back(0, 0.0)
    if how == "runs elsewhere":
        account.set_others(OtherUse(running=1))
        return lambda: account.set_others(NO_OTHERS)
    if how == "sent a request":
        account.count_request(AT - 30.0)
    else:
        account.count(5, 0.25, AT - 30.0, the_calendar())
    return lambda: None


@pytest.mark.parametrize("how", ["runs", "not settled", "runs elsewhere"])
def test_an_account_with_an_open_request_is_not_idle(how: str) -> None:
    account = an_account(concurrency=1)
    end = holding(account, how)
    assert not account.is_idle(AT, the_calendar())
    end()
    assert account.is_idle(AT, the_calendar())


@each_case(
    ("limits", "how", "seconds"),
    [
        ({"rpm": 5}, "sent a request", 30.0),
        ({"tpm": 5}, "used tokens", 30.0),
        ({"tokens_per_day": 9}, "used tokens", DAY),
        ({"budget": "1/day"}, "used tokens", DAY),
        ({"budget": "1/month"}, "used tokens", 31 * DAY),
    ],
)
def test_an_account_is_idle_when_all_that_it_counts_is_over(
    limits: dict[str, Any], how: str, seconds: float
) -> None:
    account = an_account(**limits)
    holding(account, how)
    assert not account.is_idle(AT, the_calendar())
    assert not account.is_idle(AT + min(seconds, 30.0) - 1.0, the_calendar())
    assert account.is_idle(AT + seconds, the_calendar(NOW + seconds))
