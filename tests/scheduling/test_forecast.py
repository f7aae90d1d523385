from __future__ import annotations

import pytest

from gateway.request import Priority
from gateway.scheduling.placement_state import LEAST_UNCACHED_TOKENS, PlacementState, QueuedRequest
from gateway.scheduling.wait_queue import (
    LEAST_TOKEN_WEIGHT,
    MOST_TOKEN_WEIGHT,
    WaitForecast,
    WaitQueue,
    prospects,
)
from tests.scheduling.queue_simulation import QueueSimulation


def wait_in(queue: WaitQueue, sim: QueueSimulation, caller: str, **more: object) -> QueuedRequest:
    queued = sim.request(fairness_key=caller, **more)
    queue.add(queued, queue.levels[queued.priority].counters.account(caller))
    return queued


def test_higher_classes_go_first_and_callers_of_a_class_take_turns() -> None:
    sim, queue = QueueSimulation(), WaitQueue()
    a1, a2, a3 = (wait_in(queue, sim, "a", received_at=at) for at in (1.0, 2.0, 3.0))
    b1 = wait_in(queue, sim, "b", received_at=9.0)
    urgent = wait_in(queue, sim, "c", received_at=10.0, priority=Priority.URGENT)
    batch = wait_in(queue, sim, "d", priority=Priority.BATCH)
    forecast = WaitForecast(sim.state, queue)
    order = list(forecast.likely_order())
    assert order == [urgent, a1, b1, a2, a3, batch]
    assert [forecast.count_ahead(one) for one in order] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("token_seconds", "weight"),
    [(1e-6, LEAST_TOKEN_WEIGHT), (0.1, 10.0), (100.0, MOST_TOKEN_WEIGHT)],
)
def test_an_output_token_costs_what_the_fleet_measures_within_bounds(
    token_seconds: float, weight: float
) -> None:
    state = PlacementState()
    state.add("a", total=1, prefill_tps=100.0, token_base=token_seconds)
    forecast = WaitForecast(state, WaitQueue())
    forecast.refresh_if_due(0)
    assert forecast.token_weight == pytest.approx(weight)


def test_what_some_node_has_cached_is_no_work() -> None:
    sim = QueueSimulation()
    forecast = WaitForecast(sim.state, WaitQueue())
    assert forecast.work_tokens(sim.request()) == (100.0, 10.0)
    assert forecast.work_tokens(sim.request(cached={0: 30.0, 1: 60.0})) == (40.0, 10.0)
    cached = forecast.work_tokens(sim.request(cached={0: 100.0}))
    assert cached == (LEAST_UNCACHED_TOKENS, 10.0)


def test_nobody_waits_while_nothing_runs() -> None:
    sim = QueueSimulation()
    forecast = WaitForecast(sim.state, WaitQueue())
    assert forecast.predicted_wait(sim.request(), 0.0) == 0.0


def test_the_wait_is_that_for_nodes_that_want_no_pause() -> None:
    sim = QueueSimulation((1, 1), speeds=(300.0, 100.0))
    sim.fill()
    first, second = (sim.state.candidate_set([row]) for row in sim.rows)
    forecast, queued = (
        WaitForecast(sim.state, WaitQueue()),
        sim.request(groups=((first,), (second,))),
    )
    for row, paused in ((sim.rows[0], False), (sim.rows[1], True)):
        sim.state.set_slots(sim.rows[0], 1, 0 if paused else 1, 0, alive=True, paused=paused)
        assert forecast.predicted_wait(queued, 0.0) == pytest.approx(row.running[0].ends)


def test_the_rows_that_a_waiting_request_may_go_to_are_told_with_their_waits() -> None:
    sim = QueueSimulation((1, 1, 1), speeds=(300.0, 100.0, 300.0))
    sim.fill()
    sim.state.set_slots(sim.rows[2], 1, 0, 0, alive=False)
    queued, placed = sim.arrive()
    assert placed is None
    found = prospects(queued, 0.0)
    assert {one.row.name for one in found} == {"node-0", "node-1"}, "one is down"
    assert [one.cost for one in found] == sorted(one.cost for one in found)
    for one in found:
        assert one.wait is not None
        assert one.wait == pytest.approx(one.row.running[0].ends)
        assert one.cost > one.wait
