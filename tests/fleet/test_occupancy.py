from __future__ import annotations

from gateway.fleet.occupancy import LINGER, Occupancy


def foreign_after(occupancy: Occupancy, busy: int, now: float) -> int:
    with occupancy.reading(now) as reading:
        pass
    occupancy.saw(busy, reading)
    return occupancy.foreign


def test_busy_slots_beyond_our_leases_are_others_work() -> None:
    occupancy = Occupancy()
    occupancy.take(1, 10.0)
    assert foreign_after(occupancy, 3, 11.0) == 2
    assert foreign_after(occupancy, 1, 12.0) == 0


def test_fewer_busy_slots_than_leases_are_no_negative_load() -> None:
    occupancy = Occupancy()
    occupancy.take(3, 10.0)
    assert foreign_after(occupancy, 0, 11.0) == 0


def test_a_lease_that_came_or_went_during_the_reading_is_ours() -> None:
    occupancy = Occupancy()
    occupancy.take(1, 10.0)
    with occupancy.reading(20.0) as reading:
        occupancy.take(1, 20.1)
        occupancy.give_back(1, 20.2)
        occupancy.give_back(1, 20.3)
    occupancy.saw(2, reading)
    assert occupancy.foreign == 0


def test_a_slot_just_given_back_may_still_be_reported_busy() -> None:
    occupancy = Occupancy()
    occupancy.take(2, 10.0)
    occupancy.give_back(2, 20.0)
    assert foreign_after(occupancy, 2, 20.0 + LINGER / 2) == 0
    assert foreign_after(occupancy, 2, 20.0 + 3 * LINGER) == 2


def test_overlapping_readings_each_know_their_own_peak() -> None:
    occupancy = Occupancy()
    occupancy.take(2, 10.0)
    with occupancy.reading(20.0) as first:
        occupancy.give_back(1, 20.1)
        with occupancy.reading(21.0) as second:
            pass
    assert (first.peak, second.peak) == (2, 1)
