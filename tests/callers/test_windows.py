from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.callers.windows import WINDOW_PARTS, SlidingSum

# The sliding sum.


def test_an_addition_leaves_exactly_after_the_window() -> None:
    total = SlidingSum(60.0, overestimate=True)
    total.add(0.0, 1.0)
    total.add(10.0, 2.0)
    assert total.value(59.9) == 3.0
    assert total.value(60.0) == 2.0
    assert total.value(69.9) == 2.0
    assert total.value(70.0) == 0.0


def test_memory_is_bounded_however_much_is_added() -> None:
    total = SlidingSum(60.0, overestimate=True)
    for number in range(100_000):
        total.add(number * 0.001, 1.0)
    assert len(total.parts) <= WINDOW_PARTS + 1
    assert total.value(100.0) == pytest.approx(60_000, abs=120)


additions = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 5)), max_size=200)


counts = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2**60)), max_size=100)


@given(counts, st.floats(0, 80))
def test_a_sum_of_counts_is_exact(added: list[tuple[float, int]], after: float) -> None:
    total, now = SlidingSum(60.0, overestimate=True), 0.0
    for gap, count in added:
        now += gap
        total.add(now, count)
    assert total.value(now + after) == sum(
        int(count) for when, count in total.parts if when > now + after - 60.0
    )
    assert total.value(now + after + 61.0) == 0


def test_amounts_of_every_kind_leave_without_a_rest() -> None:
    total = SlidingSum(60.0, overestimate=True)
    for when, amount in ((0.0, 3), (10.0, 0.1), (20.0, 0.2), (30.0, 2**53)):
        total.add(when, amount)
    assert total.value(60.0) == math.fsum((0.1, 0.2, 2**53))
    assert total.value(85.0) == 2**53
    assert total.value(90.0) == 0


@given(additions, st.booleans(), st.floats(0, 80))
def test_the_sum_errs_to_one_side_by_at_most_one_part_of_the_window(
    added: list[tuple[float, float]], late: bool, after: float
) -> None:
    total, now = SlidingSum(60.0, overestimate=late), 0.0
    told = []
    for gap, amount in added:
        now += gap
        total.add(now, amount)
        told.append((now, amount))
    now += after
    part = 60.0 / WINDOW_PARTS

    def within(span: float) -> float:
        return math.fsum(amount for when, amount in told if when > now - span)

    least, greatest = (
        (within(60.0), within(60.0 + part + 1e-9))
        if late
        else (within(60.0 - part - 1e-9), within(60.0))
    )
    assert least - 1e-6 <= total.value(now) <= greatest + 1e-6
