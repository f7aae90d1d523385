from __future__ import annotations

import pytest

from gateway.scheduling.matching import MOST_COMPARED, MOST_DECLINES
from tests.bench.choosing import Crowd, small_fleet


@pytest.mark.parametrize("waiting", [100, 400])
def test_what_is_compared_for_one_placement_is_bounded_however_many_wait(waiting: int) -> None:
    crowd = Crowd(nodes=100, waiting=waiting)
    before = crowd.dispatcher.evaluations
    for _ in range(100):
        crowd.step()
    assert crowd.dispatcher.waiting >= waiting
    assert crowd.dispatcher.evaluations - before <= 100 * (2 * MOST_COMPARED + MOST_DECLINES)


def test_the_small_fleet_is_timed_with_work_that_was_placed() -> None:
    assert small_fleet(10) > 0.0
