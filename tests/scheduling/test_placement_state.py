from __future__ import annotations

import math

import pytest

from gateway.scheduling.placement_state import MOST_PENALTY_SECONDS, PlacementState
from tests.scheduling.rows import Desk


def test_a_name_that_comes_again_keeps_its_row() -> None:
    board = PlacementState()
    row = board.add("a", total=2)
    assert board.add("a", total=3) is row
    assert row.total == row.free == 3


def test_slots_of_others_and_ours_are_not_free() -> None:
    desk = Desk((4,))
    desk.arrive()
    desk.board.set_slots(desk.rows[0], 4, 4, 2)
    assert (desk.rows[0].busy, desk.rows[0].free) == (3, 1)


def test_a_node_that_takes_less_than_it_has_is_free_for_less() -> None:
    desk = Desk((4,))
    desk.board.set_slots(desk.rows[0], 4, 1, 0)
    assert desk.rows[0].free == 1
    desk.arrive()
    assert desk.rows[0].free == 0
    assert not desk.board.free_rows


def test_a_removed_row_leaves_its_pools_and_its_index_is_used_again() -> None:
    desk = Desk((1, 1))
    first, second = desk.rows
    running = desk.fill()
    desk.board.remove(first)
    assert desk.pool.rows == (second,)
    new = desk.board.add("new", total=1)
    assert new.index == first.index
    assert new not in desk.pool.rows
    for placement in running:
        desk.finish(placement, 1.0)
    assert first.ours == 0
    assert new.free == 1


def test_what_writes_without_a_slot_slows_nobody_down() -> None:
    desk = Desk((2,))
    desk.arrive(slots=0, completion_tokens=5.0)
    [row] = desk.rows
    desk.board.set_speed(row, 100.0, 0.1, 0.1)
    assert (row.decoding, row.busy, row.decode_slowdown) == (1, 0, 0.0)


def test_removing_a_row_twice_does_nothing() -> None:
    board = PlacementState()
    row = board.add("a")
    board.remove(row)
    board.remove(row)
    assert board.add("b").index != board.add("c").index


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf, 0.0, -5.0, 1e300])
def test_nonsense_in_speeds_and_slots_is_bounded(nonsense: float) -> None:
    desk = Desk((2, 2))
    row = desk.rows[0]
    desk.board.set_speed(row, nonsense, nonsense, nonsense)
    desk.board.set_penalty(row, nonsense)
    desk.board.set_slots(row, nonsense, nonsense, nonsense)
    desk.board.set_batch_reserve(nonsense)
    desk.arrive()
    assert abs(row.penalty) <= MOST_PENALTY_SECONDS
    for value in (row.prefill_tps, row.token_base, row.per_prompt_token, row.per_output_token):
        assert math.isfinite(value)
        assert value >= 0.0
