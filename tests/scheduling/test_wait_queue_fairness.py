from __future__ import annotations

import random
from collections import Counter

import pytest

from gateway.scheduling.placement_state import QueuedRequest
from gateway.scheduling.wait_queue import MOST_ACCOUNTS, VirtualTokenCounters
from tests.scheduling.queue_simulation import QueueSimulation


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
        queued = placement.queued
        served[queued.fairness_key] += queued.prompt_tokens + 10 * queued.completion_tokens  # type: ignore[assignment]
        done[queued.fairness_key] += 1
        sim.finish(placement, placement.ends)
        assert dispatcher.waiting
    assert served["greedy"] == pytest.approx(served["modest"], rel=0.1)


def test_the_charge_is_replaced_by_the_real_usage() -> None:
    sim = QueueSimulation((1,))
    _, lucky = sim.arrive(fairness_key="lucky", prompt_tokens=1e6, completion_tokens=1e5)
    assert lucky is not None
    sim.arrive(fairness_key="lucky")
    other, _ = sim.arrive(fairness_key="other")
    sim.running.remove(lucky)
    sim.dispatcher.finished(lucky, 1.0, 10, 0, 1)
    first = sim.match(1.0)[0]
    assert first.queued.fairness_key == "lucky"
    sim.dispatcher.cancelled(first, 1.0)
    assert sim.match(1.0)[0].queued is other


def test_a_caller_that_was_idle_has_saved_up_no_credit() -> None:
    counters = VirtualTokenCounters()
    busy = counters.account("busy")
    busy.counter = 1000.0
    counters.started(busy, 50.0)
    assert counters.account("new").counter == 1000.0


def test_a_caller_that_was_served_more_keeps_its_counter() -> None:
    counters = VirtualTokenCounters()
    counters.account("busy").counter = 1000.0
    counters.start_counter = 10.0
    assert counters.account("busy").counter == 1000.0


def test_idle_accounts_are_dropped_but_no_running_ones() -> None:
    counters = VirtualTokenCounters()
    kept = counters.account("kept")
    counters.started(kept, 5.0)
    for i in range(3 * MOST_ACCOUNTS):
        counters.account(f"caller {i}")
    assert len(counters.accounts) <= MOST_ACCOUNTS
    assert counters.accounts["kept"] is kept
