"""The counts of a node's slots and their integrals over time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.node import SLOT_LINGER, SlotOccupancy
from tests.fleet.build import Clock, a_node, take


def foreign_after(occupancy: SlotOccupancy, busy: int, now: float) -> int:
    with occupancy.slots_query(now) as query:
        pass
    occupancy.record_busy(busy, query)
    return occupancy.foreign


def test_busy_slots_beyond_our_leases_are_others_work() -> None:
    occupancy = SlotOccupancy()
    occupancy.take(1, 10.0)
    assert foreign_after(occupancy, 3, 11.0) == 2
    assert foreign_after(occupancy, 1, 12.0) == 0


def test_fewer_busy_slots_than_leases_are_no_negative_load() -> None:
    occupancy = SlotOccupancy()
    occupancy.take(3, 10.0)
    assert foreign_after(occupancy, 0, 11.0) == 0


def test_a_lease_that_came_or_went_during_the_query_is_ours() -> None:
    occupancy = SlotOccupancy()
    occupancy.take(1, 10.0)
    with occupancy.slots_query(20.0) as query:
        occupancy.take(1, 20.1)
        occupancy.release(1, 20.2)
        occupancy.release(1, 20.3)
    occupancy.record_busy(2, query)
    assert occupancy.foreign == 0


def test_a_slot_just_released_may_still_be_reported_busy() -> None:
    occupancy = SlotOccupancy()
    occupancy.take(2, 10.0)
    occupancy.release(2, 20.0)
    assert foreign_after(occupancy, 2, 20.0 + SLOT_LINGER / 2) == 0
    assert foreign_after(occupancy, 2, 20.0 + 3 * SLOT_LINGER) == 2


def test_overlapping_queries_each_have_their_own_peak() -> None:
    occupancy = SlotOccupancy()
    occupancy.take(2, 10.0)
    with occupancy.slots_query(20.0) as first:
        occupancy.release(1, 20.1)
        with occupancy.slots_query(21.0) as second:
            pass
    assert (first.peak_leased, second.peak_leased) == (2, 1)


def test_busy_slots_are_integrated_over_time() -> None:
    occupancy = SlotOccupancy()
    occupancy.take(1, 100.0)
    occupancy.take(2, 102.0)
    occupancy.release(1, 103.0)
    occupancy.integrate(105.0)
    assert occupancy.slot_seconds == pytest.approx(2 * 1 + 1 * 3 + 2 * 2)
    with occupancy.slots_query(105.0) as query:
        pass
    occupancy.record_busy(5, query, 106.0)
    occupancy.integrate(107.0)
    assert occupancy.slot_seconds == pytest.approx(9 + 2 + 5)


def test_a_clock_that_stands_still_or_goes_back_adds_nothing() -> None:
    occupancy = SlotOccupancy()
    occupancy.take(1, 100.0, prefilling=True)
    occupancy.integrate(100.0)
    occupancy.integrate(90.0)
    assert (occupancy.slot_seconds, occupancy.prefill_seconds) == (0, 0)


def test_a_lease_measures_the_busy_slots_during_its_decode() -> None:
    clock = Clock()
    node = a_node(clock, slots=4)
    lease = take(node)
    lease.content_received(clock.passes(2))
    other = take(node, stream=False)
    clock.passes(3)
    other.release()
    clock.passes(1)
    assert lease.observed_timing() is None
    lease.release()
    seen = lease.observed_timing()
    assert seen is not None
    assert (seen.ttft, seen.duration) == (2, 6)
    assert seen.busy_slots == pytest.approx((2 * 3 + 1 * 1) / 4)
    assert (seen.stalled_seconds, seen.mean_prefills) == (0, 1)


def test_a_lease_measures_the_prefills_of_others_meanwhile() -> None:
    clock = Clock()
    node = a_node(clock, slots=4)
    first, second = take(node), take(node)
    second.content_received(clock.passes(2))
    first.content_received(clock.passes(2))
    third = take(node)
    third.content_received(clock.passes(5))
    clock.passes(1)
    for lease in (first, second, third):
        lease.release()
    seen = [lease.observed_timing() for lease in (first, second, third)]
    assert [one and one.mean_prefills for one in seen] == pytest.approx([1.5, 2, 1])
    assert [one and one.stalled_seconds for one in seen] == pytest.approx([5, 7, 0])


def test_an_answer_in_one_piece_has_no_ttft() -> None:
    clock = Clock()
    node = a_node(clock, slots=4)
    lease, other = take(node, stream=False), take(node, stream=False)
    clock.passes(4)
    lease.release()
    other.release()
    seen = lease.observed_timing()
    assert seen is not None
    assert (seen.ttft, seen.duration, seen.busy_slots) == (None, 4, 2)


def test_a_lease_without_slots_or_duration_measures_nothing_wrong() -> None:
    node = a_node()
    none = take(node, 0)
    none.release()
    assert none.observed_timing() is None
    lease = take(node)
    lease.release()
    seen = lease.observed_timing()
    assert seen is not None
    assert (seen.duration, seen.busy_slots) == (0, 1)


def test_an_abandoned_prefill_counts_until_its_slot_is_free() -> None:
    clock = Clock()
    node = a_node(clock, slots=2)
    left, other = take(node), take(node)
    other.content_received(clock.passes(1))
    left.abandon()
    clock.passes(3)
    left.release()
    clock.passes(1)
    other.release()
    seen = other.observed_timing()
    assert seen is not None
    assert seen.stalled_seconds == pytest.approx(3)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "plain", "move", "leave", "give"]),
            st.integers(0, 7),
            st.floats(0, 100),
        )
    )
)
def test_any_events_leave_the_means_possible(
    events: list[tuple[str, int, float]],
) -> None:
    clock = Clock()
    node = a_node(clock, slots=8)
    leases = []
    for what, which, seconds in events:
        now = clock.passes(seconds)
        if what in {"take", "plain"}:
            leases.append(take(node, 1 + which % 2, stream=what == "take"))
        elif leases:
            lease = leases[which % len(leases)]
            match what:
                case "move":
                    lease.content_received(now)
                case "leave":
                    lease.abandon()
                case _:
                    lease.release()
    for lease in leases:
        lease.release()
        seen = lease.observed_timing()
        assert seen is not None
        assert lease.slots - 1e-6 <= seen.busy_slots <= 2 * len(leases) + 1e-6
        assert 0 <= seen.stalled_seconds <= seen.duration
        assert 1 - 1e-6 <= seen.mean_prefills <= 2 * len(leases) + 1e-6
    assert node.occupancy.leased == node.occupancy.prefills == 0
