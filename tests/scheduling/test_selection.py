from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from gateway.request import Priority
from gateway.scheduling.candidates import HOPE_AWAITED, HOPE_GUESSED, HOPE_UNKNOWN
from gateway.scheduling.dispatcher import DispatchRules
from gateway.scheduling.placement_state import EXPLORING_REQUESTS, MOST_COMPARED_ROWS, AvailableRows
from gateway.scheduling.selection import (
    POLICIES,
    LeastFinish,
    available_rows,
    compare,
    cost_of_figures,
    explore,
    row_cost,
)
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


WARM = {"prompt_tokens": 1600.0, "completion_tokens": 40.0}
"""A chat whose system prompt of 1,500 tokens is cached on the first node."""


def unknown(sim: QueueSimulation, *, samples: int = 0, hope: float = HOPE_UNKNOWN) -> None:
    """Let nothing but this be known of every node but the first."""
    for row in sim.rows[1:]:
        sim.state.set_learnt(row, samples, hope, measured=False)


def explored(sim: QueueSimulation, times: int = 20, **keys: Any) -> Counter[str]:
    """How often the other nodes get one of so many requests that come one by one."""
    names: Counter[str] = Counter()
    for _ in range(times):
        _, placement = sim.arrive(cached={0: 1500.0}, **{**WARM, **keys})
        assert placement is not None
        names[placement.row.name] += 1
        sim.finish(placement, 0.0)
    del names["node-0"]
    return names


def test_nodes_of_unknown_speed_get_a_few_requests_though_the_prompt_is_cached_elsewhere() -> None:
    sim = QueueSimulation((2,) * 4)
    assert not explored(sim)
    unknown(sim)
    assert explored(sim) == {f"node-{i}": EXPLORING_REQUESTS for i in (1, 2, 3)}
    assert not sim.state.exploring
    # Another server, of unknown speed.
    sim.state.set_learnt(sim.rows[1], EXPLORING_REQUESTS, 1.0, measured=True)
    sim.state.set_learnt(sim.rows[1], 0, HOPE_UNKNOWN, measured=False)
    assert explored(sim) == {"node-1": EXPLORING_REQUESTS}


@each_case(
    "keys",
    [
        {"priority": Priority.PREMIUM},
        {"priority": Priority.URGENT},
        {"deadline": 60.0},
        {"prompt_tokens": 3000.0},
    ],
)
def test_requests_that_would_suffer_explore_less(keys: dict[str, Any]) -> None:
    sim = QueueSimulation((2, 2))
    unknown(sim)
    assert explored(sim, **keys) == {"node-1": EXPLORING_REQUESTS - 1}, keys


@each_case(
    "keys",
    [{"priority": Priority.PREMIUM, "prompt_tokens": 4000.0}, {"prompt_tokens": 9000.0}],
)
def test_the_dearest_requests_never_explore(keys: dict[str, Any]) -> None:
    sim = QueueSimulation((2, 2))
    unknown(sim)
    assert not explored(sim, **keys), keys


def test_a_request_that_a_node_has_failed_does_not_explore() -> None:
    sim = QueueSimulation((2, 2, 2))
    unknown(sim)
    assert not explored(sim, failed=[1])


def test_a_node_in_use_is_not_explored() -> None:
    sim = QueueSimulation((2, 2))
    unknown(sim)
    sim.state.set_slots(sim.rows[1], 2, 2, 1)
    assert not explored(sim)


def test_a_calibrated_node_is_explored_only_if_it_is_faster() -> None:
    for speed, count in ((100.0, 0), (110.0, 0), (140.0, EXPLORING_REQUESTS)):
        sim = QueueSimulation((2, 2), speeds=(100.0, speed))
        unknown(sim, hope=HOPE_GUESSED)
        assert explored(sim).total() == count, speed


def test_a_node_that_is_about_to_be_calibrated_is_not_explored() -> None:
    sim = QueueSimulation((2, 2))
    unknown(sim, hope=HOPE_AWAITED)
    assert not explored(sim)


def test_the_more_nodes_are_known_the_fewer_requests_explore() -> None:
    sim = QueueSimulation((2,) * 101)
    sim.state.set_learnt(sim.rows[100], 0, HOPE_UNKNOWN, measured=False)
    # About one of twelve requests explores.
    assert explored(sim, 4).total() < EXPLORING_REQUESTS
    assert explored(sim, 200).total() <= EXPLORING_REQUESTS


def test_the_figures_of_an_exploring_request_say_why_it_went_there() -> None:
    sim = QueueSimulation((2, 2))
    unknown(sim)
    queued = sim.request(cached={0: 1500.0}, **WARM)
    available = available_rows(sim.state, queued)
    assert available is not None
    row = explore(sim.state, available, queued, sim.rows[0], 0.0, random.Random(1))
    assert row is sim.rows[1]
    found = compare(available, queued, row, LeastFinish(sim.state), 0.0)
    least = cost_of_figures(found.others[0], 1600.0, 40.0)
    assert cost_of_figures(found.chosen, 1600.0, 40.0) == pytest.approx(least)
