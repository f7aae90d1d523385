from __future__ import annotations

from gateway.request import Priority
from gateway.scheduling.wait_queue import WARM_ROWS_PER_REQUEST, warmest_rows
from tests.scheduling.rows import Desk


def test_it_is_read_by_class_and_then_by_age() -> None:
    desk = Desk((1,))
    desk.fill()
    late = desk.arrive(2.0)[0]
    early = desk.arrive(2.0, received_at=1.0)[0]
    urgent = desk.arrive(3.0, priority=Priority.URGENT)[0]
    assert desk.dispatcher.queued_requests() == [urgent, early, late]
    assert desk.dispatcher.depths() == {
        Priority.URGENT: 1, Priority.PREMIUM: 0, Priority.NORMAL: 2, Priority.BATCH: 0,
    }  # fmt: skip


def test_a_request_leaves_no_trace() -> None:
    desk = Desk((1,))
    desk.fill()
    asks = [desk.arrive(fairness_key=f"{i % 2}", cached={0: 50.0})[0] for i in range(6)]
    line = desk.dispatcher._line
    assert set(line.warm_for_row(0)) == set(asks)
    for ask in asks[::-1]:
        assert desk.dispatcher.withdraw(ask)
        assert not desk.dispatcher.withdraw(ask)
    assert line.count == 0
    assert not line.warm_for_row(0)
    assert not line.levels[Priority.NORMAL].fifos
    assert not line.levels[Priority.NORMAL].counters.by_counter
    assert [sum(tokens) for tokens in desk.pool.queued_tokens] == [0.0, 0.0]


def test_the_warmest_nodes_are_those_that_have_or_will_have_most() -> None:
    desk = Desk()
    cached = {i: float(i) for i in range(20)}
    ask = desk.ask(cached=cached, pending={3: 100.0, 30: 50.0})
    assert warmest_rows(ask)[:2] == (3, 30)
    assert len(warmest_rows(ask)) == WARM_ROWS_PER_REQUEST
