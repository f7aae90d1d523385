from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from gateway.scheduling.comparison import MOST_COMPARED_ROWS
from gateway.scheduling.cost import cost_of_figures, row_cost
from gateway.scheduling.matching import DispatchRules
from gateway.scheduling.node_slots import AvailableRows
from gateway.scheduling.selection import POLICIES, available_rows, compare
from tests.each_case import each_case
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


@each_case("nodes", [1, 3, 8, 9, 40, 64, 300])
@each_case("policy", sorted(POLICIES))
def test_a_comparison_has_the_chosen_row_and_a_bounded_number_of_the_best(
    policy: str, nodes: int
) -> None:
    rng = random.Random(nodes)
    sim = QueueSimulation((2,) * nodes)
    for row in sim.rows:
        sim.state.set_speed(row, rng.uniform(50, 500), rng.uniform(0.02, 0.2), 0.01)
    for _ in range(nodes // 2):
        sim.dispatcher.place(sim.request(prompt_tokens=rng.uniform(1, 900)), 0.0)
    queued = sim.request(prompt_tokens=400, completion_tokens=80)
    made = POLICIES[policy](sim.state)
    available = available_rows(sim.state, queued)
    assert available is not None
    row = made.choose(available, queued, 1.0, rng)
    found = compare(available, queued, row, made, 1.0)
    names = [found.chosen.name, *(one.name for one in found.others)]
    assert names[0] == row.name
    assert len(set(names)) == len(names) == min(len(available.rows), MOST_COMPARED_ROWS)
    assert (found.with_room, found.candidates) == (len(available.rows), nodes)
    assert found.by_cost is made.by_cost
    if found.by_cost:
        costs = sorted(row_cost(one, queued, 1.0) for one in available.rows)
        kept = [cost_of_figures(one, 400, 80) for one in (found.chosen, *found.others)]
        assert kept[0] == pytest.approx(costs[0])
        assert sorted(kept) == pytest.approx(costs[: len(kept)])


def test_a_comparison_after_another_request_was_compared_is_not_mixed_up_with_it() -> None:
    sim = QueueSimulation((1,) * 20)
    policy = POLICIES["least_finish"](sim.state)
    rng = random.Random(1)
    first = sim.request(cached=dict.fromkeys(range(10), 90.0))
    second = sim.request(cached=dict.fromkeys(range(10, 20), 90.0))
    available = available_rows(sim.state, first)
    assert available is not None
    row = policy.choose(available, first, 0.0, rng)
    policy.choose(available, second, 0.0, rng)
    assert {one.cached for one in compare(available, first, row, policy, 0.0).others} == {90.0}
