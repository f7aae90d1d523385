from __future__ import annotations

from gateway.tools.simulate.fronts import LeastConn, LeastConnQueued
from gateway.tools.simulate.simulation import simulate
from tests.tools.simulate.build import job, machine, trace


def test_least_conn_sends_at_once_and_takes_turns_among_equals() -> None:
    jobs = [job(time=i / 1000, output=100) for i in range(7)]
    simulate(trace(jobs), [machine(1, str(i)) for i in range(3)], LeastConn(3))
    assert [one.node for one in jobs] == [0, 1, 2, 0, 1, 2, 0]
    assert all(one.sent == one.arrived for one in jobs)


def test_maxconn_keeps_the_rest_in_one_queue() -> None:
    jobs = [job(time=i / 1000, output=100 if i % 2 else 30) for i in range(6)]
    simulate(trace(jobs), [machine(1, str(i)) for i in range(2)], LeastConnQueued([1, 1]))
    assert [one.node for one in jobs[:2]] == [0, 1]
    # The first node is free earlier and gets the next two in their order.
    assert jobs[2].node == jobs[3].node == 0
    assert all(one.began == one.sent for one in jobs)
