from __future__ import annotations

import math

import pytest

from gateway.tools.simulate.fronts import LeastConn
from gateway.tools.simulate.simulation import SimulatedFleet, StuckError, simulate
from gateway.tools.simulate.trace import Job
from gateway.tools.simulate.traffic import Traffic, generate
from tests.tools.simulate.build import job, machine, trace


class Keeper:
    """A front that sends nothing."""

    alarm = math.inf

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None: ...

    def started(self, job: Job, fleet: SimulatedFleet) -> None: ...

    def ended(self, job: Job, fleet: SimulatedFleet) -> None: ...

    def wake(self, fleet: SimulatedFleet) -> None: ...


class Delayer(Keeper):
    """A front that sends each request a second later."""

    def __init__(self) -> None:
        self.alarm = math.inf
        self._kept: list[Job] = []

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        self._kept.append(job)
        self.alarm = self._kept[0].arrived + 1.0

    def wake(self, fleet: SimulatedFleet) -> None:
        fleet.send(self._kept.pop(0), 0)
        self.alarm = self._kept[0].arrived + 1.0 if self._kept else math.inf


def test_a_front_that_serves_nothing_is_an_error() -> None:
    with pytest.raises(StuckError, match="2 of 2 requests were never served"):
        simulate(trace([job(), job()]), [machine()], Keeper())


def test_a_front_whose_alarm_never_ends_is_an_error() -> None:
    ringing = Keeper()
    ringing.alarm = 0.0
    with pytest.raises(StuckError, match="for ever"):
        simulate(trace([job(time=1.0)]), [machine()], ringing)


def test_a_front_is_woken_at_its_alarm() -> None:
    jobs = [job(time=2.0), job(time=2.25)]
    simulate(trace(jobs), [machine()], Delayer())
    assert [one.sent for one in jobs] == [3.0, 3.25]


def test_a_trace_can_be_played_again() -> None:
    played = generate(Traffic(requests=300, rate=1.0), seed=3)
    machines = [machine(2, str(i)) for i in range(3)]
    first = [(one.node, one.ended) for one in simulate(played, machines, LeastConn(3)).jobs]
    again = [(one.node, one.ended) for one in simulate(played, machines, LeastConn(3)).jobs]
    assert first == again


def test_progress_is_reported() -> None:
    reported: list[int] = []
    played = generate(Traffic(requests=4100, rate=50.0), seed=3)
    machines = [machine(4, str(i)) for i in range(40)]
    simulate(played, machines, LeastConn(40), reported.append)
    assert reported == [2000, 4000]
