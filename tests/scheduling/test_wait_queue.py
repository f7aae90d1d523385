from __future__ import annotations

from gateway.request import Priority
from gateway.scheduling.placement_state import WARM_ROWS_PER_REQUEST
from gateway.scheduling.wait_queue import WaitQueue
from tests.scheduling.queue_simulation import QueueSimulation


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
        order.append(running.queued)
    assert order == [urgent, early, late]


def test_a_request_that_leaves_leaves_nothing_behind() -> None:
    sim = QueueSimulation((1,))
    queue = WaitQueue()
    level = queue.levels[Priority.NORMAL]
    requests = [sim.request(fairness_key=f"{i % 2}", cached={0: 50.0}) for i in range(6)]
    for queued in requests:
        queued.expect_work(50.0, 10.0)
        queue.add(queued, level.counters.account(queued.fairness_key))
    assert set(queue.warm_for_row(0)) == set(requests)
    for queued in requests[::-1]:
        queue.remove(queued)
        assert queued.account is None
    assert queue.count == 0
    assert not queue.warm_for_row(0)
    assert not level.fifos
    assert not level.counters.by_counter
    assert [sum(tokens) for tokens in sim.candidates.queued_tokens] == [0.0, 0.0]


def test_a_request_is_withdrawn_once() -> None:
    sim = QueueSimulation((1,))
    sim.fill()
    queued, _ = sim.arrive()
    assert sim.dispatcher.withdraw(queued)
    assert not sim.dispatcher.withdraw(queued)
    assert sim.dispatcher.waiting == 0


def test_the_warmest_rows_are_those_that_have_or_will_have_most_cached() -> None:
    sim = QueueSimulation()
    cached = {i: float(i) for i in range(20)}
    queued = sim.request(cached=cached, pending={3: 100.0, 30: 50.0})
    queued.find_warmest_rows()
    assert queued.warmest_rows[:2] == (3, 30)
    assert len(queued.warmest_rows) == WARM_ROWS_PER_REQUEST
