"""Which running batch requests yield: properties of the policy, and of what a waiter lacks."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gateway.request import Priority
from gateway.scheduling.batch_slots import (
    LEAST_DECODE_SECONDS,
    LEAST_SECONDS_LEFT,
    MOST_YIELDS,
    YieldCandidate,
    choose_yields,
    may_yield,
)

SECONDS = st.floats(0, 100)
CANDIDATES = st.lists(
    st.builds(
        YieldCandidate,
        lease_id=st.integers(1, 1000),
        row=st.integers(0, 3),
        slots=st.just(1),
        priority=st.sampled_from(Priority),
        decode_seconds=st.none() | SECONDS,
        seconds_left=SECONDS,
        repetition_seconds=st.floats(0.1, 20),
        times_yielded=st.integers(0, MOST_YIELDS),
    ),
    max_size=10,
    unique_by=lambda one: one.lease_id,
)
MISSING = st.dictionaries(st.integers(0, 3), st.integers(1, 3), min_size=1)
CLASSES = st.sampled_from([Priority.URGENT, Priority.PREMIUM, Priority.NORMAL])


def running(lease_id: int = 1, **fields: float | Priority | None) -> YieldCandidate:
    """A request of the class batch that may yield."""
    values = {
        "row": 0, "slots": 1, "priority": Priority.BATCH, "decode_seconds": 20.0,
        "seconds_left": 60.0, "repetition_seconds": 1.0, "times_yielded": 0,
    } | fields  # fmt: skip
    return YieldCandidate(lease_id, **values)  # type: ignore[arg-type]


@given(CLASSES, MISSING, CANDIDATES)
def test_those_that_yield_may_and_give_one_row_just_what_it_lacks(
    priority: Priority, missing: dict[int, int], candidates: list[YieldCandidate]
) -> None:
    chosen = choose_yields(priority, missing, candidates)
    by_id = {one.lease_id: one for one in candidates}
    able = [one for one in candidates if one.row in missing and may_yield(one, priority)]
    if not chosen:
        for row, lacking in missing.items():
            assert sum(one.row == row for one in able) < lacking
        return
    assert len(set(chosen)) == len(chosen)
    assert all(by_id[one] in able for one in chosen)
    (row,) = {by_id[one].row for one in chosen}
    assert len(chosen) == missing[row]


@given(CLASSES, MISSING, CANDIDATES)
def test_no_other_choice_repeats_less(
    priority: Priority, missing: dict[int, int], candidates: list[YieldCandidate]
) -> None:
    chosen = choose_yields(priority, missing, candidates)
    costs = [
        sum(one.repetition_seconds for one in together)
        for row, lacking in missing.items()
        for together in combinations(
            [one for one in candidates if one.row == row and may_yield(one, priority)], lacking
        )
    ]
    by_id = {one.lease_id: one.repetition_seconds for one in candidates}
    if costs:
        assert sum(by_id[one] for one in chosen) <= min(costs) + 1e-9


@given(CLASSES, MISSING, CANDIDATES)
def test_the_order_in_which_they_run_decides_nothing(
    priority: Priority, missing: dict[int, int], candidates: list[YieldCandidate]
) -> None:
    cost = {one.lease_id: one.repetition_seconds for one in candidates}
    one, other = (
        choose_yields(priority, missing, those) for those in (candidates, candidates[::-1])
    )
    assert sorted(cost[lease_id] for lease_id in one) == sorted(
        cost[lease_id] for lease_id in other
    )


def test_only_lower_classes_in_decode_yield() -> None:
    assert may_yield(running(), Priority.NORMAL)
    assert not may_yield(running(), Priority.BATCH)
    assert not may_yield(running(priority=Priority.NORMAL), Priority.NORMAL)
    assert may_yield(running(priority=Priority.NORMAL), Priority.URGENT)
    assert not may_yield(running(decode_seconds=None), Priority.URGENT)


def test_what_ends_soon_is_left_alone() -> None:
    assert not may_yield(running(seconds_left=LEAST_SECONDS_LEFT), Priority.NORMAL)
    # Nor what would take longer to repeat than to end.
    assert not may_yield(running(seconds_left=10.0, repetition_seconds=12.0), Priority.NORMAL)
    assert may_yield(running(seconds_left=13.0, repetition_seconds=12.0), Priority.NORMAL)


def test_one_that_has_yielded_gets_time_to_go_on_and_at_last_runs_to_its_end() -> None:
    again = running(times_yielded=1, decode_seconds=LEAST_DECODE_SECONDS - 0.1)
    assert not may_yield(again, Priority.NORMAL)
    assert may_yield(again._replace(decode_seconds=LEAST_DECODE_SECONDS), Priority.NORMAL)
    assert may_yield(again._replace(times_yielded=0), Priority.NORMAL)
    assert not may_yield(
        running(times_yielded=MOST_YIELDS, decode_seconds=1e6, seconds_left=1e6), Priority.URGENT
    )
