"""Which row a request gets, and what each would cost."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from gateway.schedule.candidates import HOPE_AWAITED, HOPE_UNKNOWN
from gateway.schedule.core.requests import EXPLORING_REQUESTS, MOST_COMPARED_ROWS
from gateway.schedule.core.selection import (
    CostColumns,
    LeastFinish,
    available_rows,
    compare,
    cost_of_figures,
    row_cost,
    row_costs,
)
from gateway.terms import Priority
from tests.each_case import each_case
from tests.schedule.queue_simulation import QueueSimulation


def chosen(sim: QueueSimulation, count: int, **options: Any) -> Counter[str]:
    names: Counter[str] = Counter()
    for _ in range(count):
        placement = sim.placed(**options)
        names[placement.row.name] += 1
    return names


@each_case("nodes", [1, 3, 8, 9, 40, 64, 300])
def test_a_comparison_has_the_chosen_row_and_a_bounded_number_of_the_best(nodes: int) -> None:
    rng = random.Random(nodes)
    sim = QueueSimulation((2,) * nodes)
    for row in sim.rows:
        row.set_speed(rng.uniform(50, 500), rng.uniform(0.02, 0.2), 0.01)
    for _ in range(nodes // 2):
        sim.dispatcher.place(sim.request(prompt_tokens=rng.uniform(1, 900)), 0.0)
    queued = sim.request(prompt_tokens=400, completion_tokens=80)
    policy = LeastFinish(sim.state)
    available = available_rows(sim.state, queued)
    assert available is not None
    row = policy.choose(available, queued, 1.0, rng)
    found = compare(available, queued, row, policy, 1.0)
    names = [found.chosen.name, *(one.name for one in found.others)]
    assert names[0] == row.name
    assert len(set(names)) == len(names) == min(len(available.rows), MOST_COMPARED_ROWS)
    assert found.nodes.with_room == len(available.rows)
    assert (found.nodes.candidates, found.nodes.fleet) == (nodes, nodes)
    assert found.by_cost
    costs = sorted(row_cost(one, queued, 1.0) for one in available.rows)
    kept = [cost_of_figures(found, one, 400, 80) for one in (found.chosen, *found.others)]
    assert kept[0] == pytest.approx(costs[0])
    assert sorted(kept) == pytest.approx(costs[: len(kept)])


WARM = {"prompt_tokens": 1600.0, "completion_tokens": 40.0}
"""A chat whose system prompt of 1,500 tokens is cached on the first node."""


def unknown(sim: QueueSimulation, *, samples: int = 0, hope: float = HOPE_UNKNOWN) -> None:
    """Let nothing but this be known of every node but the first."""
    for row in sim.rows[1:]:
        row.set_learnt(samples, hope, measured=False)


def explored(sim: QueueSimulation, times: int = 20, **keys: Any) -> Counter[str]:
    """How often the other nodes get one of so many requests that come one by one."""
    names: Counter[str] = Counter()
    for _ in range(times):
        placement = sim.placed(cached={0: 1500.0}, **{**WARM, **keys})
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
    sim.rows[1].set_learnt(EXPLORING_REQUESTS, 1.0, measured=True)
    sim.rows[1].set_learnt(0, HOPE_UNKNOWN, measured=False)
    assert explored(sim) == {"node-1": EXPLORING_REQUESTS}


@each_case(
    ("keys", "hope", "foreign", "count"),
    [
        # Requests that would suffer explore less, and the dearest never.
        ({"priority": Priority.PREMIUM}, HOPE_UNKNOWN, 0, EXPLORING_REQUESTS - 1),
        ({"priority": Priority.URGENT}, HOPE_UNKNOWN, 0, EXPLORING_REQUESTS - 1),
        ({"deadline": 60.0}, HOPE_UNKNOWN, 0, EXPLORING_REQUESTS - 1),
        ({"prompt_tokens": 3000.0}, HOPE_UNKNOWN, 0, EXPLORING_REQUESTS - 1),
        ({"priority": Priority.PREMIUM, "prompt_tokens": 4000.0}, HOPE_UNKNOWN, 0, 0),
        ({"prompt_tokens": 9000.0}, HOPE_UNKNOWN, 0, 0),
        # Nor does one that a node has failed; nor to nodes in use, or about to be calibrated.
        ({"failed": [2]}, HOPE_UNKNOWN, 0, 0),
        ({}, HOPE_UNKNOWN, 1, 0),
        ({}, HOPE_AWAITED, 0, 0),
    ],
)
def test_how_many_requests_explore_a_node_of_unknown_speed(
    keys: dict[str, Any], hope: float, foreign: int, count: int
) -> None:
    sim = QueueSimulation((2, 2, 0))
    unknown(sim, hope=hope)
    sim.rows[1].set_slots(2, 2, foreign)
    assert explored(sim, **keys).total() == count


@each_case(
    ("completion", "cached", "cost"),
    [(30, {}, 2.0 + 3.0), (10, {0: 150.0}, 0.5 + 1.0), (10, {0: 200.0}, 0.01 + 1.0)],
)
def test_on_an_idle_node_the_cost_is_decoding_and_what_of_the_prompt_is_not_cached(
    completion: int, cached: dict[int, float], cost: float
) -> None:
    """Of a prompt that is cached as a whole one token is read."""
    sim = QueueSimulation((2,))
    sim.rows[0].set_speed(100.0, 0.1, 0.05)
    queued = sim.request(prompt_tokens=200, completion_tokens=completion, cached=cached)
    assert row_cost(sim.rows[0], queued, 0.0) == pytest.approx(cost)


def test_a_neighbour_adds_its_own_delay_and_the_one_it_causes() -> None:
    sim = QueueSimulation((2,))
    row = sim.rows[0]
    row.set_speed(100.0, 0.1, 0.05)
    first = sim.placed(prompt_tokens=100, completion_tokens=40)
    assert (first.prefill_ends, first.ends) == pytest.approx((1.0, 5.0))
    queued = sim.request(prompt_tokens=200, completion_tokens=10)
    delay, prefill, decoding = 1.0, 2.0, 10 * 0.15
    stall, slowdown = 2.0, 5.0 * 0.05 / 0.1
    assert row_cost(row, queued, 0.0) == pytest.approx(
        delay + prefill + decoding + stall + slowdown
    )


@each_case("seed", range(5))
def test_numpy_and_the_loop_choose_rows_of_the_same_cost(seed: int) -> None:
    rng = random.Random(seed)
    sim = QueueSimulation((2,) * 90)
    for row in sim.rows:
        speed = rng.uniform(50, 900)
        row.set_speed(speed, 10 / speed, rng.choice([0.0, 1 / speed]))
        row.set_penalty(rng.choice([0.0, 0.0, rng.random()]))
    columns = CostColumns(sim.state)
    for i in range(120):
        now = 0.1 * i
        cached = {rng.randrange(90): rng.uniform(0, 900) for _ in range(rng.choice([0, 3, 40]))}
        queued = sim.request(prompt_tokens=rng.uniform(10, 900), cached=cached, penalties={5: 1.0})
        room = [row for row in sim.candidates.rows if row.free >= 1]
        chosen = columns.least_finish(sim.candidates, queued, now, rng)
        assert row_cost(chosen, queued, now) == pytest.approx(min(row_costs(room, queued, now)))
        placement = sim.dispatcher.place(queued, now)
        if placement is not None:
            sim.running.append(placement)
        if rng.random() < 0.4 and sim.running:
            sim.finish(rng.choice(sim.running), now)
