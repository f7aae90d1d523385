from __future__ import annotations

import pytest

from gateway.schedule.core.dispatcher import MOST_COMPARED, MOST_DECLINES
from tests.bench.placement_cost import LoadedFleet


@pytest.mark.parametrize("waiting", [100, 400])
def test_comparisons_for_one_placement_are_bounded_however_many_wait(waiting: int) -> None:
    fleet = LoadedFleet(nodes=100, waiting=waiting)
    matcher = fleet.dispatcher._matcher
    before = matcher.evaluations
    for _ in range(100):
        fleet.step()
    assert fleet.dispatcher.waiting >= waiting
    assert matcher.evaluations - before <= 100 * (2 * MOST_COMPARED + MOST_DECLINES)
