from __future__ import annotations

import pytest

from gateway.request import Priority
from gateway.scheduling.dispatcher import DispatchRules, StarvationGuard
from tests.scheduling.queue_simulation import QueueSimulation


def test_one_placement_in_ten_is_for_overdue_requests() -> None:
    guard = StarvationGuard(0.1)
    given = []
    for _ in range(30):
        given.append(guard.overdue_next)
        guard.placed(to_overdue=guard.overdue_next)
    assert given == ([False] * 9 + [True]) * 3


def test_with_a_share_of_zero_overdue_requests_get_no_preference() -> None:
    guard = StarvationGuard(0.0)
    for _ in range(100):
        guard.placed(to_overdue=False)
    assert not guard.overdue_next


@pytest.mark.parametrize("flood", [Priority.URGENT, Priority.NORMAL])
def test_the_lowest_class_waits_no_longer_than_the_bound(flood: Priority) -> None:
    patience = dict.fromkeys(Priority, 30.0)
    sim = QueueSimulation((2, 2), DispatchRules(overdue_after=patience))
    service, horizon = 2.0, 400.0
    rate = 4 / service
    arrivals = []
    batch = []
    for i in range(5):
        batch.append(
            sim.request(priority=Priority.BATCH, fairness_key="patient", received_at=0.0 + i)
        )
        arrivals.append((float(i), batch[-1]))
    for i in range(int(1.5 * rate * horizon)):
        at = i / (1.5 * rate)
        arrivals.append((at, sim.request(priority=flood, fairness_key=f"{i % 7}", received_at=at)))
    placed = sim.play(arrivals, until=horizon)
    for place, queued in enumerate(batch):
        # Those above are overdue as well after 30 s, and older ones go first.
        ahead = place + sum(
            1
            for other, placement in placed.items()
            if other.priority is flood
            and other.arrival_key < queued.arrival_key
            and placement.placed_at > queued.received_at + 30
        )
        bound = 30.0 + (ahead + 1) / (0.1 * rate) + service
        assert queued in placed
        assert placed[queued].placed_at - queued.received_at <= bound


def test_without_overdue_requests_the_class_decides_alone() -> None:
    sim = QueueSimulation((1,))
    (running,) = sim.fill()
    low = [sim.arrive(priority=Priority.BATCH)[0] for _ in range(3)]
    high = [sim.arrive(priority=Priority.URGENT)[0] for _ in range(20)]
    order = []
    for i in range(20):
        (running,) = sim.finish(running, i / 10)
        order.append(running.queued)
    assert set(order) == set(high)
    assert sim.waiting() == low


def test_callers_of_one_class_share_fairly_however_long_one_of_them_has_waited() -> None:
    sim = QueueSimulation((1,), DispatchRules(overdue_after=dict.fromkeys(Priority, 30.0)))
    (running,) = sim.fill()
    for _ in range(200):
        sim.arrive(fairness_key="much", completion_tokens=20.0)
    for _ in range(40):
        sim.arrive(fairness_key="little", completion_tokens=20.0)
    callers = []
    for i in range(60):
        (running,) = sim.finish(running, 100.0 + i)
        callers.append(running.queued.fairness_key)
    assert abs(callers.count("much") - callers.count("little")) <= 4
