"""Others that keep slots busy again and again, told apart from requests of our own."""

from __future__ import annotations

import pytest

from gateway.nodes.node import RECENT_MINUTES, SlotOccupancy

MINUTE = 60.0


def reads(occupancy: SlotOccupancy, busy: int, now: float) -> None:
    with occupancy.slots_query(now) as query:
        pass
    occupancy.record_busy((0,) * busy, query, now)


def test_minutes_in_which_others_kept_slots_busy_are_counted_once_each() -> None:
    occupancy = SlotOccupancy()
    for minute in range(4):
        for second in (0.0, 10.0, 20.0):
            reads(occupancy, 1, 600.0 + minute * MINUTE + second)
    assert occupancy.minutes_of_others(600.0 + 3 * MINUTE + 30.0) == 4


@pytest.mark.parametrize(
    ("later", "left"), [(0, 3), (RECENT_MINUTES - 3, 3), (RECENT_MINUTES - 1, 1), (10_000, 0)]
)
def test_minutes_that_are_long_ago_do_not_count(later: int, left: int) -> None:
    occupancy = SlotOccupancy()
    for minute in range(3):
        reads(occupancy, 2, 600.0 + minute * MINUTE)
    assert occupancy.minutes_of_others(600.0 + (2 + later) * MINUTE) == left


def test_our_own_requests_are_nobody_elses() -> None:
    occupancy = SlotOccupancy()
    occupancy.take(2, 600.0)  # as long as a request that we have left is at work, it holds its slot
    for minute in range(RECENT_MINUTES):
        reads(occupancy, 2, 601.0 + minute * MINUTE)
    assert occupancy.minutes_of_others(600.0 + RECENT_MINUTES * MINUTE) == 0
