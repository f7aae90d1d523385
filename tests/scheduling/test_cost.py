from __future__ import annotations

import random

import pytest

from gateway.scheduling.selection import (
    CostColumns,
    cost_of_figures,
    row_cost,
    row_cost_after,
    row_costs,
    row_figures,
)
from tests.each_case import each_case
from tests.scheduling.queue_simulation import QueueSimulation


def test_on_an_idle_node_the_cost_is_prefill_and_decoding() -> None:
    sim = QueueSimulation((2,))
    sim.state.set_speed(sim.rows[0], 100.0, 0.1, 0.05)
    assert row_cost(
        sim.rows[0], sim.request(prompt_tokens=200, completion_tokens=30), 0.0
    ) == pytest.approx(5.0)


def test_cached_tokens_are_not_read_except_one() -> None:
    sim = QueueSimulation((2,))
    queued = sim.request(prompt_tokens=200, completion_tokens=10, cached={0: 200.0})
    assert row_cost(sim.rows[0], queued, 0.0) == pytest.approx(0.01 + 1.0)


def test_a_neighbour_adds_its_own_delay_and_the_one_it_causes() -> None:
    sim = QueueSimulation((2,))
    row = sim.rows[0]
    sim.state.set_speed(row, 100.0, 0.1, 0.05)
    _, first = sim.arrive(prompt_tokens=100, completion_tokens=40)
    assert first is not None
    assert (first.prefill_ends, first.ends) == pytest.approx((1.0, 5.0))
    queued = sim.request(prompt_tokens=200, completion_tokens=10)
    delay, prefill, decoding = 1.0, 2.0, 10 * 0.15
    stall, slowdown = 2.0, 5.0 * 0.05 / 0.1
    assert row_cost(row, queued, 0.0) == pytest.approx(
        delay + prefill + decoding + stall + slowdown
    )


def test_prefill_only_requests_wait_for_each_other_and_slow_no_decoding() -> None:
    sim = QueueSimulation((4,))
    row = sim.rows[0]
    sim.state.set_speed(row, 100.0, 0.1, 0.05)
    _, first = sim.arrive(prompt_tokens=100, completion_tokens=1)
    _, second = sim.arrive(prompt_tokens=100, completion_tokens=1)
    assert first is not None
    assert second is not None
    assert (first.prefill_ends, second.prefill_ends) == pytest.approx((1.0, 2.0))
    assert first.ends == pytest.approx(1.1)
    assert row.ends_sum == pytest.approx(first.ends + second.ends)
    assert row.decode_slowdown == 0.0
    sim.dispatcher.released(second, 0.5)
    assert row.prefill_until == pytest.approx(1.0)
    assert row.ends_sum == pytest.approx(first.ends)
    _, writer = sim.arrive(prompt_tokens=100, completion_tokens=40)
    assert writer is not None
    assert row.decode_slowdown > 0.0
    sim.dispatcher.released(writer, 0.5)
    sim.dispatcher.released(first, 1.0)
    assert (row.decode_slowdown, row.decoding, row.ends_sum, row.prefill_until) == (
        0.0,
        0,
        0.0,
        0.0,
    )


def test_penalties_of_a_node_and_of_a_request_add_up() -> None:
    sim = QueueSimulation((2, 2))
    sim.state.set_penalty(sim.rows[0], 3.0)
    plain = row_cost(sim.rows[1], sim.request(), 0.0)
    assert row_cost(sim.rows[0], sim.request(penalties={0: 4.0}), 0.0) == pytest.approx(plain + 7.0)


def test_the_later_cost_counts_the_wait_and_the_pending_tokens() -> None:
    sim = QueueSimulation((1,))
    sim.fill()
    queued = sim.request(
        prompt_tokens=500, completion_tokens=10, cached={0: 100.0}, pending={0: 400.0}
    )
    assert row_cost_after(sim.rows[0], queued, 2.0) == pytest.approx(2.0 + 1.0 + 1.0)


@each_case("seed", range(5))
def test_numpy_and_the_loop_choose_rows_of_the_same_cost(seed: int) -> None:
    rng = random.Random(seed)
    sim = QueueSimulation((2,) * 90)
    for row in sim.rows:
        speed = rng.uniform(50, 900)
        sim.state.set_speed(row, speed, 10 / speed, rng.choice([0.0, 1 / speed]))
        sim.state.set_penalty(row, rng.choice([0.0, 0.0, rng.random()]))
    columns = CostColumns(sim.state)
    for i in range(120):
        now = 0.1 * i
        cached = {rng.randrange(90): rng.uniform(0, 900) for _ in range(rng.choice([0, 3, 40]))}
        queued = sim.request(prompt_tokens=rng.uniform(10, 900), cached=cached, penalties={5: 1.0})
        room = [row for row in sim.candidates.rows if row.free >= 1]
        chosen = columns.least_finish(sim.candidates, queued, now, rng)
        assert chosen is not None
        assert row_cost(chosen, queued, now) == pytest.approx(min(row_costs(room, queued, now)))
        placement = sim.dispatcher.place(queued, now)
        if placement is not None:
            sim.running.append(placement)
        if rng.random() < 0.4 and sim.running:
            sim.finish(rng.choice(sim.running), now)


def test_kept_figures_give_the_cost_by_which_the_row_was_chosen() -> None:
    rng = random.Random(5)
    sim = QueueSimulation((4,) * 6)
    for row in sim.rows:
        sim.state.set_speed(row, rng.uniform(50, 500), rng.uniform(0.02, 0.2), rng.uniform(0, 0.02))
        sim.state.set_penalty(row, rng.choice([0.0, 5.0, -5.0]))
    for _ in range(30):
        queued = sim.request(
            prompt_tokens=rng.uniform(1, 3000),
            completion_tokens=rng.choice([1.0, rng.uniform(2, 400)]),
            cached=rng.choice([{}, {0: 50.0, 3: 5000.0}]),
            penalties=rng.choice([{}, {1: 7.0, 2: -1.5}]),
        )
        now = rng.uniform(0, 20)
        for row in sim.rows:
            figures = row_figures(row, queued, now)
            assert cost_of_figures(
                figures, queued.prompt_tokens, queued.completion_tokens
            ) == pytest.approx(row_cost(row, queued, now), rel=1e-12)
        if sim.state.free_rows:
            sim.dispatcher.place(queued, now)


def test_the_rows_of_the_least_cost_are_found_at_once_in_a_large_fleet() -> None:
    rng = random.Random(6)
    sim = QueueSimulation((1,) * 200)
    for row in sim.rows:
        sim.state.set_speed(row, rng.uniform(50, 500), rng.uniform(0.02, 0.2), 0.0)
    queued = sim.request(prompt_tokens=700, completion_tokens=60, cached={7: 600.0})
    found = CostColumns(sim.state).least_costs(sim.candidates, queued, 0.0, 8)
    costs = sorted(row_cost(row, queued, 0.0) for row in sim.rows)
    assert sorted(row_cost(row, queued, 0.0) for row in found) == pytest.approx(costs[:8])
