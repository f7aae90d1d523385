from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from gateway.scheduling.matching import DispatchRules
from gateway.scheduling.node_slots import AvailableRows
from gateway.scheduling.selection import POLICIES
from tests.scheduling.queue_simulation import QueueSimulation


def chosen(sim: QueueSimulation, count: int, **options: Any) -> Counter[str]:
    names: Counter[str] = Counter()
    for _ in range(count):
        _, placement = sim.arrive(**options)
        assert placement is not None
        names[placement.row.name] += 1
    return names


def test_a_policy_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError):
        QueueSimulation(rules=DispatchRules(policy="best"))


def test_least_finish_prefers_the_fast_node_until_it_is_slower() -> None:
    sim = QueueSimulation((4, 4), speeds=(300.0, 100.0))
    names = chosen(sim, 4)
    assert names["node-0"] > names["node-1"]


def test_least_finish_breaks_ties_at_random() -> None:
    found = {next(iter(chosen(QueueSimulation((1,) * 4, seed=seed), 1))) for seed in range(40)}
    assert len(found) == 4


def test_least_loaded_goes_by_slots_alone() -> None:
    sim = QueueSimulation((4, 2), DispatchRules(policy="least_loaded"), speeds=(1.0, 1e6))
    assert chosen(sim, 3) == {"node-0": 2, "node-1": 1}


def test_round_robin_takes_every_node_in_turn() -> None:
    sim = QueueSimulation((3, 3, 3), DispatchRules(policy="round_robin"))
    order = [next(iter(chosen(sim, 1))) for _ in range(6)]
    assert order == ["node-0", "node-1", "node-2"] * 2


def test_prefix_hash_sends_equal_prefixes_to_one_node_and_on_when_it_is_full() -> None:
    sim = QueueSimulation((2, 2, 2, 2), DispatchRules(policy="prefix_hash"))
    names = chosen(sim, 4, affinity_hash=12345)
    assert sorted(names.values()) == [2, 2]
    again = chosen(
        QueueSimulation((2, 2, 2, 2), DispatchRules(policy="prefix_hash")), 4, affinity_hash=12345
    )
    assert again == names


def test_prefix_hash_spreads_different_prefixes() -> None:
    sim = QueueSimulation((1,) * 8)
    rng = random.Random(1)
    policy = POLICIES["prefix_hash"](sim.state)
    available = AvailableRows(sim.rows, sim.candidates, 0)
    counts: Counter[str] = Counter()
    for _ in range(2000):
        row = policy.choose(available, sim.request(affinity_hash=rng.getrandbits(63)), 0.0, rng)
        counts[row.name] += 1
    assert min(counts.values()) > 150
