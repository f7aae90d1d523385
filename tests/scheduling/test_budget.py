from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.node import TokenCost
from gateway.config.scheduling import SpillSettings
from gateway.scheduling.tiers import (
    TEMPLATE_TOKENS,
    SpillBudget,
    SpillReservation,
    cost_of,
    most_cost,
)
from gateway.usage.windows import SlidingSum
from tests.fleet.build import a_spec

WINDOW = 60.0


def a_budget(**keys: float) -> SpillBudget:
    return SpillBudget(SpillSettings.model_validate({"window": WINDOW, **keys}))


def money(amount: float) -> SpillBudget:
    """A budget of `amount` within one window."""
    return a_budget(money_per_hour=amount * 3600 / WINDOW)


def reserved(budget: SpillBudget, now: float, most: float = 1.0) -> SpillReservation:
    reservation = budget.reserve(now, most)
    assert reservation is not None
    return reservation


# Admission.


def test_without_arrivals_nothing_spills() -> None:
    assert a_budget(share=0.5).reserve(0.0, 0.0) is None


def test_a_tenth_of_the_requests_may_spill() -> None:
    budget = a_budget(share=0.1)
    let_in = 0
    for number in range(100):
        budget.arrived(number * 0.1)
        if (reservation := budget.reserve(number * 0.1, 1.0)) is not None:
            reservation.settle(0.0, happened=True, now=number * 0.1)
            let_in += 1
    assert let_in == 10


def test_a_share_of_one_is_no_limit() -> None:
    budget = a_budget(share=1.0)
    for number in range(50):
        budget.arrived(float(number))
        reserved(budget, float(number), math.inf)


def test_an_unused_share_can_be_used_later_in_the_window() -> None:
    budget = a_budget(share=0.1)
    for number in range(100):
        budget.arrived(number * 0.1)
    for _ in range(10):
        reserved(budget, 20.0)
    assert budget.reserve(20.0, 1.0) is None
    assert budget.reserve(71.0, 1.0) is None  # not settled yet, and no arrival since


def test_money_is_reserved_before_and_settled_after_the_request() -> None:
    budget = money(10.0)
    first = reserved(budget, 0.0, 9.0)
    second = reserved(budget, 0.0, 9.0)  # the one that may exceed the budget
    assert budget.reserve(0.0, 0.01) is None
    first.settle(1.0, happened=True, now=1.0)
    second.settle(2.0, happened=True, now=2.0)
    assert (budget.reserved, budget.paid.value(2.0)) == (0.0, 3.0)
    reserved(budget, 2.0, 100.0)
    assert budget.reserve(2.0, 0.01) is None


def test_a_cancelled_reservation_is_given_back() -> None:
    budget = a_budget(share=0.5, money_per_hour=60.0)
    budget.arrived(0.0)
    budget.arrived(0.0)
    reserved(budget, 0.0, 5.0).cancel()
    failed = reserved(budget, 0.0, 5.0)
    failed.settle(0.25, happened=False, now=1.0)  # it failed, and cost something
    assert budget.paid.value(1.0) == 0.25
    assert budget.spilled.value(1.0) == 0
    reserved(budget, 1.0, 5.0)


def test_a_late_settlement_does_not_leave_the_window_early() -> None:
    total = SlidingSum(60.0, overestimate=True)
    total.add(10.0, 1.0)
    total.add(5.0, 1.0)
    assert total.value(69.9) == 2.0


def test_a_reservation_is_settled_once() -> None:
    budget = money(10.0)
    reservation = reserved(budget, 0.0, 5.0)
    reservation.settle(1.0, happened=True, now=0.0)
    reservation.settle(1.0, happened=True, now=0.0)
    reservation.cancel()
    assert (budget.outstanding, budget.paid.value(0.0)) == (0, 1.0)


@pytest.mark.parametrize("boundless", [math.inf, math.nan, -1.0])
def test_nothing_is_admitted_beside_an_unbounded_reservation(boundless: float) -> None:
    budget = money(10.0)
    first = reserved(budget, 0.0, boundless)
    assert budget.reserved == math.inf
    assert budget.reserve(0.0, 0.0) is None
    first.settle(3.0, happened=True, now=1.0)
    reserved(budget, 1.0, 0.0)


def test_nothing_is_admitted_without_money() -> None:
    assert money(0.0).reserve(0.0, 0.0) is None


def test_spending_is_counted_over_a_change_of_settings() -> None:
    budget = money(10.0)
    reserved(budget, 0.0, 6.0).settle(6.0, happened=True, now=0.0)
    held = reserved(budget, 0.0, 3.0)
    budget.configure(SpillSettings(window=WINDOW, money_per_hour=9 * 3600 / WINDOW))
    assert budget.reserve(1.0, 0.01) is None
    held.settle(0.5, happened=True, now=1.0)
    reserved(budget, 1.0, 0.01).cancel()
    budget.configure(SpillSettings(window=WINDOW, money_per_hour=6 * 3600 / WINDOW))
    assert budget.reserve(1.0, 0.01) is None
    assert budget.reserve(59.0, 0.01) is None
    reserved(budget, 61.0, 0.01)


@dataclass
class Spent:
    """One request that was admitted."""

    let_in: float
    over: float
    cost: float


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    amount=st.floats(0.5, 20.0),
    gap=st.floats(0.01, 4.0),
    length=st.floats(0.1, 90.0),
    boundless=st.sampled_from([0.0, 0.2, 1.0]),
    reloads=st.booleans(),
)
def test_no_window_ever_costs_more_than_the_budget_and_one_request(
    seed: int, amount: float, gap: float, length: float, boundless: float, reloads: bool
) -> None:
    rng = random.Random(seed)
    budget = money(amount)
    spent: list[Spent] = []
    running: list[tuple[float, float, SpillReservation, float]] = []
    now = 0.0
    for number in range(300):
        now += rng.expovariate(1 / gap)
        if reloads and number % 40 == 39:
            budget.configure(budget.settings.model_copy())
        for one in [one for one in running if one[0] <= now]:
            running.remove(one)
            over, let_in, held, cost = one
            held.settle(cost, happened=rng.random() < 0.8, now=over)
            spent.append(Spent(let_in, over, cost))
        bound = rng.choice([0.1, 1.0, 5.0])
        cost = bound * rng.random()
        known = math.inf if rng.random() < boundless else bound
        reservation = budget.reserve(now, known)
        if reservation is None:
            continue
        if rng.random() < 0.1:
            reservation.cancel()
            continue
        running.append((now + rng.expovariate(1 / length), now, reservation, cost))
    spent += [Spent(let_in, over, cost) for over, let_in, _, cost in running]
    # Whether it counts as paid at its start, at its end, or in between.
    for share in (0.0, 0.5, 1.0):
        paid = sorted((one.let_in + share * (one.over - one.let_in), one.cost) for one in spent)
        for first, (begin, _) in enumerate(paid):
            window = [cost for moment, cost in paid[first:] if moment < begin + WINDOW]
            assert math.fsum(window) <= amount + max(window) + 1e-6


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    share=st.floats(0.0, 1.0),
    gap=st.floats(0.01, 5.0),
    length=st.floats(0.1, 60.0),
)
def test_whenever_one_is_admitted_the_share_holds(
    seed: int, share: float, gap: float, length: float
) -> None:
    rng = random.Random(seed)
    budget = a_budget(share=share)
    start_lease: list[float] = []
    let_in: list[float] = []
    running: list[tuple[float, SpillReservation]] = []
    now = 0.0
    for _ in range(300):
        now += rng.expovariate(1 / gap)
        for over, reservation in [one for one in running if one[0] <= now]:
            running.remove((over, reservation))
            reservation.settle(0.0, happened=True, now=over)
        budget.arrived(now)
        start_lease.append(now)
        if rng.random() < 0.5:
            continue
        granted = budget.reserve(now, math.inf)
        if granted is not None:
            let_in.append(now)
            running.append((now + rng.expovariate(1 / length), granted))
            of_all = sum(when > now - WINDOW for when in start_lease)
            assert sum(when > now - WINDOW for when in let_in) <= share * of_all + 1e-6


# Costs.


def test_tokens_cost_what_the_inventory_says() -> None:
    spec = a_spec(cost_per_million_tokens=TokenCost(prompt=1.0, completion=4.0))
    cost = cost_of(spec, 8, prompt=500_000, completion=250_000, slots=1, seconds=99.0)
    assert cost == pytest.approx(1.5)


def test_a_node_paid_by_the_hour_costs_its_share_of_the_time() -> None:
    spec = a_spec(cost_per_hour=2.0)
    assert cost_of(spec, 4, prompt=1e9, completion=1e9, slots=1, seconds=1800) == pytest.approx(
        0.25
    )
    # The total may have shrunk below the slots that it holds.
    assert cost_of(spec, 1, prompt=0, completion=0, slots=3, seconds=3600) == pytest.approx(2.0)


def test_the_most_cost_is_that_of_the_longest_answer_to_the_longest_prompt() -> None:
    spec = a_spec(cost_per_million_tokens=TokenCost(prompt=1.0, completion=4.0))

    def of(**keys: int | None) -> float:
        given = {"prompt_bytes": 1000, "max_tokens": 100, "context": None, "slots": 1, **keys}
        return most_cost(spec, 8, seconds=60.0, **given) * 1e6  # type: ignore[arg-type]

    assert of() == pytest.approx(1000 + TEMPLATE_TOKENS + 400)
    assert of(slots=2) == pytest.approx(1000 + TEMPLATE_TOKENS + 800)
    assert of(max_tokens=10**18, context=500) == pytest.approx(500 + 2000)
    assert of(max_tokens=None, context=500) == pytest.approx(500 + 2000)
    assert of(max_tokens=None) == math.inf


def test_the_most_cost_of_an_answer_without_price_is_bounded() -> None:
    spec = a_spec(cost_per_million_tokens=TokenCost(prompt=1.0))
    bound = most_cost(
        spec, 8, prompt_bytes=488, max_tokens=None, context=None, slots=1, seconds=60.0
    )
    assert bound * 1e6 == pytest.approx(1000)


def test_the_most_cost_by_the_hour_is_that_of_the_longest_time() -> None:
    spec = a_spec(cost_per_hour=2.0)
    bound = most_cost(
        spec, 8, prompt_bytes=10**9, max_tokens=None, context=None, slots=1, seconds=3600.0
    )
    assert bound == pytest.approx(0.25)


@given(
    st.floats(0, 100), st.floats(0, 100), st.integers(0, 10_000), st.integers(1, 10_000),
    st.integers(1, 8), st.floats(0, 1), st.floats(0, 1),
)  # fmt: skip
def test_no_request_costs_more_than_its_most_cost(
    prompt: float, completion: float, size: int, tokens: int, slots: int, read: float, wrote: float
) -> None:
    spec = a_spec(cost_per_million_tokens=TokenCost(prompt=prompt, completion=completion))
    bound = most_cost(
        spec, 8, prompt_bytes=size, max_tokens=tokens, context=None, slots=slots, seconds=1.0
    )
    came = cost_of(
        spec, 8, prompt=size * read, completion=tokens * slots * wrote, slots=slots, seconds=9.0
    )
    assert came <= bound + 1e-12
