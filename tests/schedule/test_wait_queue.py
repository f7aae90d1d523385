"""The order of waiting requests, fairness between callers, and how long they will wait."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gateway.schedule.core.requests import (
    LEAST_UNCACHED_TOKENS,
    WARM_ROWS_PER_REQUEST,
    PlacementState,
    QueuedRequest,
)
from gateway.schedule.core.wait_queue import (
    LEAST_TOKEN_WEIGHT,
    MOST_ACCOUNTS,
    MOST_TOKEN_WEIGHT,
    VirtualTokenCounters,
    WaitForecast,
    WaitQueue,
    prospects,
)
from gateway.terms import Priority
from tests.schedule.queue_simulation import QueueSimulation


def test_requests_go_by_class_and_then_by_age() -> None:
    sim = QueueSimulation((1,))
    (running,) = sim.fill()
    late = sim.arrive(2.0)[0]
    early = sim.arrive(2.0, received_at=1.0)[0]
    urgent = sim.arrive(3.0, priority=Priority.URGENT)[0]
    assert sim.dispatcher.depths() == {
        Priority.URGENT: 1, Priority.PREMIUM: 0, Priority.NORMAL: 2, Priority.BATCH: 0,
    }  # fmt: skip
    assert sim.waiting() == [urgent, early, late]
    order = []
    for now in (4.0, 5.0, 6.0):
        (running,) = sim.finish(running, now)
        order.append(running)
    assert order == [urgent, early, late]


def test_a_request_that_leaves_leaves_nothing_behind() -> None:
    sim = QueueSimulation((1,))
    queue = WaitQueue()
    level = queue.levels[Priority.NORMAL]
    requests = [sim.request(fairness_key=f"{i % 2}", cached={0: 50.0}) for i in range(6)]
    for queued in requests:
        queue.add(queued, 0.0)
    assert set(queue.warm_for_row(0)) == set(requests)
    for queued in requests[::-1]:
        queue.remove(queued)
        assert queued.account is None
    assert queue.count == 0
    assert not queue.warm_for_row(0)
    assert not level.fifos
    assert not level.counters.by_counter
    assert [sum(tokens) for tokens in sim.candidates.queued_tokens] == [0.0, 0.0]


def test_the_warmest_rows_are_those_that_have_or_will_have_most_cached() -> None:
    sim = QueueSimulation()
    cached = {i: float(i) for i in range(20)}
    queued = sim.request(cached=cached, pending={3: 100.0, 30: 50.0})
    queued.find_warmest_rows()
    assert queued.warmest_rows[:2] == (3, 30)
    assert len(queued.warmest_rows) == WARM_ROWS_PER_REQUEST


@pytest.mark.parametrize("seed", range(3))
def test_ten_times_the_requests_get_a_caller_no_more_tokens(seed: int) -> None:
    rng = random.Random(seed)
    sim = QueueSimulation((2, 2, 2), speeds=(300.0, 200.0, 100.0), seed=seed)
    requests: list[tuple[float, QueuedRequest]] = []
    for caller, count in (("greedy", 4000), ("modest", 400)):
        for _ in range(count):
            prompt, completion = rng.expovariate(1 / 400) + 1, rng.expovariate(1 / 60) + 1
            requests.append(
                (
                    0.0,
                    sim.request(
                        fairness_key=caller, prompt_tokens=prompt, completion_tokens=completion
                    ),
                )
            )
    served: Counter[str] = Counter()
    done: Counter[str] = Counter()
    dispatcher = sim.dispatcher
    for now, queued in requests:
        placement = dispatcher.place_or_queue(queued, now)
        if placement is not None:
            sim.running.append(placement)
    while done["greedy"] < 200 or done["modest"] < 200:
        placement = min(sim.running, key=lambda one: one.ends)
        queued = placement
        served[queued.fairness_key] += queued.prompt_tokens + 10 * queued.completion_tokens  # type: ignore[assignment]
        done[queued.fairness_key] += 1
        sim.finish(placement, placement.ends)
        assert dispatcher.waiting
    assert served["greedy"] == pytest.approx(served["modest"], rel=0.1)


def test_the_charge_is_replaced_by_the_real_usage() -> None:
    sim = QueueSimulation((1,))
    lucky = sim.placed(fairness_key="lucky", prompt_tokens=1e6, completion_tokens=1e5)
    sim.arrive(fairness_key="lucky")
    other, _ = sim.arrive(fairness_key="other")
    sim.running.remove(lucky)
    sim.dispatcher.finished(lucky, 1.0, 10, 1)
    first = sim.match(1.0)[0]
    assert first.fairness_key == "lucky"
    sim.dispatcher.cancelled(first, 1.0)
    assert sim.match(1.0)[0] is other


def test_a_caller_that_was_idle_has_no_credit_and_one_that_was_served_more_keeps_its_counter() -> (
    None
):
    counters = VirtualTokenCounters()
    busy = counters.account("busy")
    busy.counter = 1000.0
    counters.started(busy, 50.0)
    assert counters.account("new").counter == 1000.0
    counters.account("new").counter = 5000.0
    assert counters.account("new").counter == 5000.0


def test_idle_accounts_are_dropped_but_no_running_ones() -> None:
    counters = VirtualTokenCounters()
    kept = counters.account("kept")
    counters.started(kept, 5.0)
    for i in range(3 * MOST_ACCOUNTS):
        counters.account(f"caller {i}")
    assert len(counters.accounts) <= MOST_ACCOUNTS
    assert counters.accounts["kept"] is kept


@pytest.mark.parametrize(
    ("token_seconds", "weight"),
    [(1e-6, LEAST_TOKEN_WEIGHT), (0.1, 10.0), (100.0, MOST_TOKEN_WEIGHT)],
)
def test_an_output_token_costs_what_the_fleet_measures_within_bounds(
    token_seconds: float, weight: float
) -> None:
    state = PlacementState()
    state.add("a", total=1).set_speed(100.0, token_seconds, 0.0)
    forecast = WaitForecast(state, WaitQueue())
    forecast.refresh_if_due(0)
    assert forecast.token_weight == pytest.approx(weight)


def test_what_some_node_has_cached_is_no_work() -> None:
    sim = QueueSimulation()
    sim.fill()
    left: dict[float, dict[int, float]] = {
        100.0: {}, 40.0: {0: 30.0, 1: 60.0}, LEAST_UNCACHED_TOKENS: {0: 100.0}
    }  # fmt: skip
    for uncached, cached in left.items():
        queued, _ = sim.arrive(cached=cached)
        assert queued.work_tokens == (uncached, 10.0)


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
        sim.rows[0].set_slots(1, 0 if paused else 1, 0, alive=True, paused=paused)
        assert forecast.predicted_wait(queued, 0.0) == pytest.approx(row.running[0].ends)


def test_the_rows_that_a_waiting_request_may_go_to_are_told_with_their_waits() -> None:
    sim = QueueSimulation((1, 1, 1), speeds=(300.0, 100.0, 300.0))
    sim.fill()
    sim.rows[2].set_slots(1, 0, 0, alive=False)
    queued, placed = sim.arrive()
    assert placed is None
    found = prospects(queued, 0.0)
    assert {one.row.name for one in found} == {"node-0", "node-1"}, "one is down"
    assert [one.cost for one in found] == sorted(one.cost for one in found)
    for one in found:
        assert one.wait is not None
        assert one.wait == pytest.approx(one.row.running[0].ends)
        assert one.cost > one.wait
