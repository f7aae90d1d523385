from __future__ import annotations

import math

from gateway.scheduling.placement_state import MOST_PENALTY_SECONDS, PlacementState
from tests.each_case import each_case
from tests.scheduling.queue_simulation import QueueSimulation


def test_a_name_that_is_added_again_keeps_its_row() -> None:
    state = PlacementState()
    row = state.add("a", total=2)
    assert state.add("a", total=3) is row
    assert row.total == row.free == 3


def test_foreign_and_own_slots_are_not_free() -> None:
    sim = QueueSimulation((4,))
    sim.arrive()
    sim.state.set_slots(sim.rows[0], 4, 4, 2)
    assert (sim.rows[0].busy, sim.rows[0].free) == (3, 1)


def test_capacity_limits_the_free_slots() -> None:
    sim = QueueSimulation((4,))
    sim.state.set_slots(sim.rows[0], 4, 1, 0)
    assert sim.rows[0].free == 1
    sim.arrive()
    assert sim.rows[0].free == 0
    assert not sim.state.free_rows


def test_a_removed_row_leaves_its_candidate_sets_and_its_index_is_reused() -> None:
    sim = QueueSimulation((1, 1))
    first, second = sim.rows
    running = sim.fill()
    sim.state.remove(first)
    assert sim.candidates.rows == (second,)
    new = sim.state.add("new", total=1)
    assert new.index == first.index
    assert new not in sim.candidates.rows
    for placement in running:
        sim.finish(placement, 1.0)
    assert first.ours == 0
    assert new.free == 1


def test_a_slotless_request_that_decodes_slows_nothing_down() -> None:
    sim = QueueSimulation((2,))
    sim.arrive(slots=0, completion_tokens=5.0)
    [row] = sim.rows
    sim.state.set_speed(row, 100.0, 0.1, 0.1)
    assert (row.decoding, row.busy, row.decode_slowdown) == (1, 0, 0.0)


def test_removing_a_row_twice_does_nothing() -> None:
    state = PlacementState()
    row = state.add("a")
    state.remove(row)
    state.remove(row)
    assert state.add("b").index != state.add("c").index


@each_case("nonsense", [math.nan, math.inf, -math.inf, 0.0, -5.0, 1e300])
def test_absurd_speeds_and_slots_are_clamped(nonsense: float) -> None:
    sim = QueueSimulation((2, 2))
    row = sim.rows[0]
    sim.state.set_speed(row, nonsense, nonsense, nonsense)
    sim.state.set_penalty(row, nonsense)
    sim.state.set_slots(row, nonsense, nonsense, nonsense)
    sim.state.set_limits(nonsense, 1)
    sim.arrive()
    assert abs(row.penalty) <= MOST_PENALTY_SECONDS
    for value in (row.prefill_tps, row.token_base, row.per_prompt_token, row.per_output_token):
        assert math.isfinite(value)
        assert value >= 0.0
