from __future__ import annotations

import random

import pytest

from gateway.scheduling.cost import CostColumns, row_cost, row_cost_after
from gateway.scheduling.selection import least_finish
from tests.scheduling.rows import Desk


def test_on_an_idle_node_it_is_the_time_to_read_and_to_write() -> None:
    desk = Desk((2,))
    desk.board.set_speed(desk.rows[0], 100.0, 0.1, 0.05)
    assert row_cost(
        desk.rows[0], desk.ask(prompt_tokens=200, completion_tokens=30), 0.0
    ) == pytest.approx(5.0)


def test_what_is_cached_is_not_read_but_for_one_token() -> None:
    desk = Desk((2,))
    ask = desk.ask(prompt_tokens=200, completion_tokens=10, cached={0: 200.0})
    assert row_cost(desk.rows[0], ask, 0.0) == pytest.approx(0.01 + 1.0)


def test_a_neighbour_adds_what_it_holds_up_and_what_it_is_held_up() -> None:
    desk = Desk((2,))
    row = desk.rows[0]
    desk.board.set_speed(row, 100.0, 0.1, 0.05)
    _, first = desk.arrive(prompt_tokens=100, completion_tokens=40)
    assert first is not None
    assert (first.prefill_ends, first.ends) == pytest.approx((1.0, 5.0))
    ask = desk.ask(prompt_tokens=200, completion_tokens=10)
    queued, reading, writing = 1.0, 2.0, 10 * 0.15
    stall, drag = 2.0, 5.0 * 0.05 / 0.1
    assert row_cost(row, ask, 0.0) == pytest.approx(queued + reading + writing + stall + drag)


def test_prompts_that_are_only_read_wait_for_each_other_and_slow_nobody_down() -> None:
    desk = Desk((4,))
    row = desk.rows[0]
    desk.board.set_speed(row, 100.0, 0.1, 0.05)
    _, first = desk.arrive(prompt_tokens=100, completion_tokens=1)
    _, second = desk.arrive(prompt_tokens=100, completion_tokens=1)
    assert first is not None
    assert second is not None
    assert (first.prefill_ends, second.prefill_ends) == pytest.approx((1.0, 2.0))
    assert first.ends == pytest.approx(1.1)
    assert row.ends_sum == pytest.approx(first.ends + second.ends)
    assert row.decode_slowdown == 0.0
    desk.dispatcher.released(second, 0.5)
    assert row.prefill_until == pytest.approx(1.0)
    assert row.ends_sum == pytest.approx(first.ends)
    _, writer = desk.arrive(prompt_tokens=100, completion_tokens=40)
    assert writer is not None
    assert row.decode_slowdown > 0.0
    desk.dispatcher.released(writer, 0.5)
    desk.dispatcher.released(first, 1.0)
    assert (row.decode_slowdown, row.decoding, row.ends_sum, row.prefill_until) == (
        0.0,
        0,
        0.0,
        0.0,
    )


def test_doubts_about_a_node_and_of_a_request_add_up() -> None:
    desk = Desk((2, 2))
    desk.board.set_penalty(desk.rows[0], 3.0)
    plain = row_cost(desk.rows[1], desk.ask(), 0.0)
    assert row_cost(desk.rows[0], desk.ask(penalties={0: 4.0}), 0.0) == pytest.approx(plain + 7.0)


def test_later_it_counts_the_wait_and_what_will_be_cached_by_then() -> None:
    desk = Desk((1,))
    desk.fill()
    ask = desk.ask(prompt_tokens=500, completion_tokens=10, cached={0: 100.0}, pending={0: 400.0})
    assert row_cost_after(desk.rows[0], ask, 2.0) == pytest.approx(2.0 + 1.0 + 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_numpy_and_the_loop_choose_alike(seed: int) -> None:
    rng = random.Random(seed)
    desk = Desk((2,) * 90)
    for row in desk.rows:
        speed = rng.uniform(50, 900)
        desk.board.set_speed(row, speed, 10 / speed, rng.choice([0.0, 1 / speed]))
        desk.board.set_penalty(row, rng.choice([0.0, 0.0, rng.random()]))
    columns = CostColumns(desk.board)
    assert columns.available
    for i in range(120):
        now = 0.1 * i
        cached = {rng.randrange(90): rng.uniform(0, 900) for _ in range(rng.choice([0, 3, 40]))}
        ask = desk.ask(prompt_tokens=rng.uniform(10, 900), cached=cached, penalties={5: 1.0})
        room = [row for row in desk.pool.rows if row.free >= 1]
        chosen = columns.least_finish(desk.pool, ask, now, rng)
        assert chosen is not None
        best = least_finish(room, ask, now, rng)
        assert best is not None
        assert row_cost(chosen, ask, now) == pytest.approx(row_cost(best, ask, now))
        placement = desk.dispatcher.place(ask, now)
        if placement is not None:
            desk.running.append(placement)
        if rng.random() < 0.4 and desk.running:
            desk.finish(rng.choice(desk.running), now)
