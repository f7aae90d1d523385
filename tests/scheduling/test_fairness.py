from __future__ import annotations

import random
from collections import Counter

import pytest

from gateway.scheduling.fairness import MOST_ACCOUNTS, VirtualTokenCounters
from gateway.scheduling.placement_state import QueuedRequest
from tests.scheduling.rows import Desk


@pytest.mark.parametrize("seed", range(3))
def test_ten_times_the_requests_get_nobody_more_tokens(seed: int) -> None:
    rng = random.Random(seed)
    desk = Desk((2, 2, 2), speeds=(300.0, 200.0, 100.0), seed=seed)
    asks: list[tuple[float, QueuedRequest]] = []
    for caller, count in (("greedy", 4000), ("modest", 400)):
        for _ in range(count):
            prompt, completion = rng.expovariate(1 / 400) + 1, rng.expovariate(1 / 60) + 1
            asks.append(
                (
                    0.0,
                    desk.ask(
                        fairness_key=caller, prompt_tokens=prompt, completion_tokens=completion
                    ),
                )
            )
    served: Counter[str] = Counter()
    done: Counter[str] = Counter()
    dispatcher = desk.dispatcher
    for now, ask in asks:
        placement = dispatcher.place_or_queue(ask, now)
        if placement is not None:
            desk.running.append(placement)
    while done["greedy"] < 200 or done["modest"] < 200:
        placement = min(desk.running, key=lambda one: one.ends)
        ask = placement.queued
        served[ask.fairness_key] += ask.prompt_tokens + 10 * ask.completion_tokens  # type: ignore[assignment]
        done[ask.fairness_key] += 1
        desk.finish(placement, placement.ends)
        assert dispatcher.waiting
    assert served["greedy"] == pytest.approx(served["modest"], rel=0.1)


def test_the_estimate_is_replaced_by_what_it_took() -> None:
    desk = Desk((1,))
    _, lucky = desk.arrive(fairness_key="lucky", prompt_tokens=1e6, completion_tokens=1e5)
    assert lucky is not None
    desk.arrive(fairness_key="lucky")
    other, _ = desk.arrive(fairness_key="other")
    desk.running.remove(lucky)
    desk.dispatcher.finished(lucky, 1.0, 10, 0, 1)
    first = desk.match(1.0)[0]
    assert first.queued.fairness_key == "lucky"
    desk.dispatcher.cancelled(first, 1.0)
    assert desk.match(1.0)[0].queued is other


def test_who_comes_back_from_idle_has_saved_nothing_up() -> None:
    shares = VirtualTokenCounters()
    busy = shares.account("busy")
    busy.counter = 1000.0
    shares.started(busy, 50.0)
    assert shares.account("new").counter == 1000.0


def test_who_was_served_more_keeps_that_when_it_comes_back() -> None:
    shares = VirtualTokenCounters()
    shares.account("busy").counter = 1000.0
    shares.start_counter = 10.0
    assert shares.account("busy").counter == 1000.0


def test_the_accounts_of_endless_callers_are_forgotten_but_for_those_at_work() -> None:
    shares = VirtualTokenCounters()
    kept = shares.account("kept")
    shares.started(kept, 5.0)
    for i in range(3 * MOST_ACCOUNTS):
        shares.account(f"caller {i}")
    assert len(shares.accounts) <= MOST_ACCOUNTS
    assert shares.accounts["kept"] is kept
