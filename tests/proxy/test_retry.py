"""How often a failed request is tried again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from gateway.config.routing import RetrySettings
from gateway.proxy.retry import BUDGET_WINDOW, Retries, RetryBudget


def spent(budget: RetryBudget, now: float, share: float, least: int) -> int:
    count = 0
    while count < 10_000 and budget.spend(now, share=share, minimum=least):
        count += 1
    return count


def test_some_retries_are_always_allowed() -> None:
    assert spent(RetryBudget(), 5.0, 0.2, 10) == 10


def test_more_requests_allow_more_retries() -> None:
    budget = RetryBudget()
    for i in range(1000):
        budget.count_request(i / 100)
    assert spent(budget, 10.0, 0.2, 10) == 200
    assert spent(budget, 11.0, 0.2, 10) == 0


def test_the_past_is_forgotten_on_both_sides() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.count_request(0.0)
    assert spent(budget, 0.0, 0.2, 10) == 200
    later = 2 * BUDGET_WINDOW
    assert budget.remaining(later, share=0.2, minimum=10) == 10
    budget.count_request(later)
    assert spent(budget, later, 0.2, 10) == 10


def test_what_is_left_is_told_and_never_negative() -> None:
    budget = RetryBudget()
    assert budget.remaining(0.0, share=0.2, minimum=10) == 10
    for _ in range(100):
        budget.count_request(0.0)
    assert spent(budget, 1.0, 0.2, 10) == 20
    assert budget.remaining(1.0, share=0.2, minimum=10) == 0
    assert budget.remaining(1.0, share=0.1, minimum=10) == 0, "the settings may have changed"
    assert budget.remaining(1.0, share=0.5, minimum=10) == 30


@given(st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=200))
def test_retries_never_pass_the_share_or_the_minimum(steps: list[tuple[float, bool]]) -> None:
    budget, retries = RetryBudget(), 0
    for requests, (now, fails) in enumerate(sorted(steps), 1):
        budget.count_request(now)
        if fails and budget.spend(now, share=0.2, minimum=3):
            retries += 1
        assert retries <= max(3, 0.2 * requests)


class Failed(NamedTuple):
    """A failed attempt, as the policy sees it."""

    retryable: bool = True
    reached_node: bool = True


AT_ONCE = RetrySettings(backoff=0.0, backoff_max=0.0)


async def attempts(spend: Callable[[], bool], failure: Failed, *, most: int = 3) -> int:
    """How many attempts are made that all fail like this."""
    retries, count = Retries(AT_ONCE, most, spend), 1
    while await retries.granted(failure):
        count += 1
    return count


async def test_the_budget_is_asked_once_for_each_further_attempt() -> None:
    asked = iter(range(10))
    assert await attempts(lambda: next(asked) < 10, Failed()) == 3
    assert next(asked) == 2


async def test_without_a_budget_nothing_is_retried() -> None:
    retries = Retries(AT_ONCE, 3, lambda: False)
    assert not await retries.granted(Failed())
    assert retries.out_of_budget


async def test_the_most_attempts_are_not_a_lack_of_budget() -> None:
    retries = Retries(AT_ONCE, 1, lambda: True)
    assert not await retries.granted(Failed())
    assert not retries.out_of_budget


async def test_a_failure_that_is_not_retryable_costs_no_budget() -> None:
    asked = iter(range(10))
    assert await attempts(lambda: next(asked) < 10, Failed(retryable=False)) == 1
    assert next(asked) == 0


async def test_a_failure_that_reached_no_node_costs_no_budget() -> None:
    asked = iter(range(10))
    assert await attempts(lambda: next(asked) < 10, Failed(reached_node=False)) == 3
    assert next(asked) == 0
