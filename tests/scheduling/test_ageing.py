from __future__ import annotations

import pytest

from gateway.request import Priority
from gateway.scheduling.ageing import Turns
from gateway.scheduling.matching import LineRules
from tests.scheduling.rows import Desk


def test_one_turn_in_ten_is_the_overdues() -> None:
    turns = Turns(0.1)
    given = []
    for _ in range(30):
        given.append(turns.due)
        turns.went(to_overdue=turns.due)
    assert given == ([False] * 9 + [True]) * 3


def test_a_share_of_nothing_is_never_due() -> None:
    turns = Turns(0.0)
    for _ in range(100):
        turns.went(to_overdue=False)
    assert not turns.due


@pytest.mark.parametrize("flood", [Priority.URGENT, Priority.NORMAL])
def test_the_lowest_class_waits_no_longer_than_the_bound(flood: Priority) -> None:
    patience = dict.fromkeys(Priority, 30.0)
    desk = Desk((2, 2), LineRules(patience=patience))
    service, horizon = 2.0, 400.0
    rate = 4 / service
    arrivals = []
    batch = []
    for i in range(5):
        batch.append(desk.ask(priority=Priority.BATCH, caller="patient", entered=0.0 + i))
        arrivals.append((float(i), batch[-1]))
    for i in range(int(1.5 * rate * horizon)):
        at = i / (1.5 * rate)
        arrivals.append((at, desk.ask(priority=flood, caller=f"{i % 7}", entered=at)))
    placed = desk.play(arrivals, until=horizon)
    for place, ask in enumerate(batch):
        # Those above are overdue as well after 30 s, and older ones go first.
        ahead = place + sum(
            1
            for other, placement in placed.items()
            if other.priority is flood and other.age < ask.age and placement.at > ask.entered + 30
        )
        bound = 30.0 + (ahead + 1) / (0.1 * rate) + service
        assert ask in placed
        assert placed[ask].at - ask.entered <= bound


def test_without_overdue_requests_the_class_decides_alone() -> None:
    desk = Desk((1,))
    (running,) = desk.fill()
    low = [desk.arrive(priority=Priority.BATCH)[0] for _ in range(3)]
    high = [desk.arrive(priority=Priority.URGENT)[0] for _ in range(20)]
    order = []
    for i in range(20):
        (running,) = desk.finish(running, i / 10)
        order.append(running.ask)
    assert set(order) == set(high)
    assert desk.dispatcher.asks() == low


def test_callers_of_one_class_share_fairly_however_long_one_of_them_has_waited() -> None:
    desk = Desk((1,), LineRules(patience=dict.fromkeys(Priority, 30.0)))
    (running,) = desk.fill()
    for _ in range(200):
        desk.arrive(caller="much", completion=20.0)
    for _ in range(40):
        desk.arrive(caller="little", completion=20.0)
    callers = []
    for i in range(60):
        (running,) = desk.finish(running, 100.0 + i)
        callers.append(running.ask.caller)
    assert abs(callers.count("much") - callers.count("little")) <= 4
