from __future__ import annotations

import random
from collections import Counter

import pytest

from gateway.fleet.lifecycle import QUICK_PROBE_DELAY, probe_delay


def test_a_thousand_nodes_are_not_probed_in_one_tick() -> None:
    rng = random.Random(3)
    nodes, interval, minutes = 1000, 5.0, 10
    ticks: Counter[int] = Counter()
    for _ in range(nodes):
        # All are probed at once at the start; a node's probe takes some milliseconds.
        now = probe_delay(interval, rng, first=True, unstable=False)
        while now < minutes * 60:
            ticks[int(now / 0.1)] += 1
            now += 0.005 + probe_delay(interval, rng, first=False, unstable=False)
    fair = nodes * 0.1 / interval
    assert max(ticks.values()) < 2.5 * fair
    assert min(ticks[tick] for tick in range(minutes * 600)) > 0


def test_nodes_that_meet_by_chance_part_again() -> None:
    rng = random.Random(3)
    ends = []
    for _ in range(100):
        now = 0.0
        for _ in range(20):
            now += probe_delay(5.0, rng, first=False, unstable=False)
        ends.append(now)
    assert max(ends) - min(ends) > 2.0


@pytest.mark.parametrize("first", [True, False])
def test_a_node_about_to_change_is_looked_at_soon(first: bool) -> None:
    rng = random.Random(3)
    assert probe_delay(5.0, rng, first=first, unstable=True) <= QUICK_PROBE_DELAY * 1.1
    assert probe_delay(0.2, rng, first=first, unstable=True) <= 0.22
