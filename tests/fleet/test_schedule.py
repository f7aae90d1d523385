from __future__ import annotations

import random
from collections import Counter

import pytest

from gateway.fleet.schedule import SOON, next_gap


def test_a_thousand_nodes_are_not_probed_in_one_tick() -> None:
    rng = random.Random(3)
    nodes, interval, minutes = 1000, 5.0, 10
    ticks: Counter[int] = Counter()
    for _ in range(nodes):
        # All are probed at once at the start; a node's probe takes some milliseconds.
        now = next_gap(interval, rng, first=True, unsettled=False)
        while now < minutes * 60:
            ticks[int(now / 0.1)] += 1
            now += 0.005 + next_gap(interval, rng, first=False, unsettled=False)
    fair = nodes * 0.1 / interval
    assert max(ticks.values()) < 2.5 * fair
    assert min(ticks[tick] for tick in range(minutes * 600)) > 0


def test_nodes_that_meet_by_chance_part_again() -> None:
    rng = random.Random(3)
    ends = []
    for _ in range(100):
        now = 0.0
        for _ in range(20):
            now += next_gap(5.0, rng, first=False, unsettled=False)
        ends.append(now)
    assert max(ends) - min(ends) > 2.0


@pytest.mark.parametrize("first", [True, False])
def test_a_node_about_to_change_is_looked_at_soon(first: bool) -> None:
    rng = random.Random(3)
    assert next_gap(5.0, rng, first=first, unsettled=True) <= SOON * 1.1
    assert next_gap(0.2, rng, first=first, unsettled=True) <= 0.22
