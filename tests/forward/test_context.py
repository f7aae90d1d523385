"""How often a failed request is tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.scheduling import RetrySettings
from gateway.forward.context import BUDGET_WINDOW, Retries, RetryBudget
from tests.virtual import in_virtual_time, now


def spent(budget: RetryBudget, now: float, share: float, least: int) -> int:
    count = 0
    while count < 10_000 and budget.spend(now, share, least):
        count += 1
    return count


def test_what_is_left_is_a_share_of_what_came_lately_and_never_negative() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.count_request(0.0)
    assert spent(budget, 0.0, 0.2, 10) == 200
    assert budget.remaining(1.0, 0.1, 10) == 0, "the settings may have changed"
    assert budget.remaining(1.0, 0.5, 10) == 300
    later = 2 * BUDGET_WINDOW
    assert budget.remaining(later, 0.2, 10) == 10
    budget.count_request(later)
    assert spent(budget, later, 0.2, 10) == 10


@given(st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=200))
def test_retries_never_pass_the_share_or_the_minimum(steps: list[tuple[float, bool]]) -> None:
    budget, retries = RetryBudget(), 0
    for requests, (at, fails) in enumerate(sorted(steps), 1):
        budget.count_request(at)
        if fails and budget.spend(at, 0.2, 3):
            retries += 1
        assert retries <= max(3, 0.2 * requests)


AT_ONCE = RetrySettings(backoff=0.0, backoff_max=0.0)


@pytest.mark.parametrize("reached", [True, False])
async def test_the_budget_is_asked_once_for_each_further_attempt(reached: bool) -> None:
    asked: list[bool] = []

    def spend() -> bool:
        asked.append(True)
        return True

    retries, count = Retries(AT_ONCE, 3, spend), 1
    while await retries.granted(reached_node=reached):
        count += 1
    # No node has more work by a failure that reached none.
    assert (count, len(asked)) == (3, 2 if reached else 0)


async def test_a_lack_of_budget_is_told_from_the_most_attempts() -> None:
    for most, spend in ((3, lambda: False), (1, lambda: True)):
        retries = Retries(AT_ONCE, most, spend)
        assert not await retries.granted()
        assert retries.out_of_budget is (most > 1)


@in_virtual_time
async def test_pauses_double_up_to_the_longest() -> None:
    retries, pauses = Retries(RetrySettings(backoff=1.0, backoff_max=3.0), 200, lambda: True), []
    for _ in range(199):
        began = now()
        assert await retries.granted()
        pauses.append(now() - began)
    assert pauses[0] <= 1.0
    assert pauses[1] <= 2.0
    assert 2.0 < max(pauses) <= 3.0
