"""The order of waiting requests, fairness between callers, and how long they will wait."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gateway.schedule.core.requests import (
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
