"""The simulation: a trace, a fleet of simulated nodes and a front that places the requests.

Time is the trace's; nothing waits for the clock. Same trace, fleet, front and seed: same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from gateway.tools.simulate.server import SimulatedMachine, SimulatedServer
from gateway.tools.simulate.trace import Job, Trace

PROGRESS_EVERY = 2000
"""Requests between two reports of the progress."""


class SimulatedFleet:
    """The simulated nodes, as a front sees them: it may send, and is told what became of it."""

    __slots__ = ("_ends", "jobs", "now", "servers")

    def __init__(self, machines: Sequence[SimulatedMachine], jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.servers = [SimulatedServer(machine) for machine in machines]
        self.now = 0.0
        # When steps end, of which node; void where the node's version is another by now.
        self._ends: list[tuple[float, int, int]] = []

    def send(self, job: Job, node: int) -> None:
        """Hand a job to a node, now. A node without a free slot lets it wait inside."""
        now = self.now
        job.sent = now
        job.node = node
        server = self.servers[node]
        if server.take(job, now):
            heappush(self._ends, (server.next_end, node, server.end_version))

    def next_step_end(self) -> float:
        """When the next steps end; infinite while every node idles."""
        ends = self._ends
        servers = self.servers
        while ends:
            time, node, version = ends[0]
            if version == servers[node].end_version:
                return time
            heappop(ends)
        return math.inf

    def end_steps(self) -> tuple[list[Job], list[Job]]:
        """End those steps, now: who wrote a first token, who is done."""
        _, node, _ = heappop(self._ends)
        server = self.servers[node]
        told = server.end_steps(self.now)
        if server.next_end >= 0:
            heappush(self._ends, (server.next_end, node, server.end_version))
        return told


class Arrivals:
    """Who comes when: openings at their times, later turns when the earlier one has ended."""

    __slots__ = ("_jobs", "_later", "_openings", "_turns", "next_time")

    def __init__(self, trace: Trace) -> None:
        self._jobs = trace.jobs
        self._turns = trace.next_turns
        self._openings = [job for job in reversed(trace.jobs) if not job.is_later_turn]
        self._later: list[tuple[float, int]] = []
        self.next_time = self._openings[-1].time if self._openings else math.inf

    def pop(self) -> Job:
        """The one that comes at `next`."""
        if self._later and self._later[0][0] <= self.next_time:
            job = self._jobs[heappop(self._later)[1]]
        else:
            job = self._openings.pop()
        self._look()
        return job

    def schedule_next_turn(self, job: Job) -> None:
        """A job has ended: the next turn of its conversation may come."""
        place = self._turns.get(job.id)
        if place is not None:
            turn = self._jobs[place]
            heappush(self._later, (max(turn.time, job.ended + turn.pause), place))
            self._look()

    def _look(self) -> None:
        opening = self._openings[-1].time if self._openings else math.inf
        later = self._later[0][0] if self._later else math.inf
        self.next_time = min(opening, later)


class Front(Protocol):
    """What stands before the nodes and says where a request goes, and when."""

    alarm: float
    """When it wants to be woken if nothing else happens; infinite: never."""

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """A request has come: send it, or keep it."""

    def started(self, job: Job, fleet: SimulatedFleet) -> None:
        """Its first token is there."""

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """Its last token is there and its slot is free."""

    def wake(self, fleet: SimulatedFleet) -> None:
        """The time of the alarm has come; it must set a later one."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a run came to; each job of the trace tells the rest."""

    jobs: Sequence[Job]
    servers: Sequence[SimulatedServer]
    began: float
    """The first arrival."""
    ended: float
    """The last end."""


class StuckError(Exception):
    """A front kept requests for ever although nothing else was to happen."""


def simulate(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    front: Front,
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Play a trace through a front on a fleet.

    What became of the jobs is written into them: read it before the trace is played again.
    `progress` is called with the number of requests that have ended, now and then. Raises
    StuckError if the front leaves requests unsent when nothing more can happen.
    """
    jobs = trace.jobs
    for job in jobs:
        job.reset()
    fleet = SimulatedFleet(machines, jobs)
    arrivals = Arrivals(trace)
    ended = 0
    while True:
        step = fleet.next_step_end()
        now = min(step, arrivals.next_time, front.alarm)
        if now == math.inf:
            break
        fleet.now = now
        if step <= now:
            first, done = fleet.end_steps()
            for job in first:
                front.started(job, fleet)
            for job in done:
                arrivals.schedule_next_turn(job)
                front.ended(job, fleet)
                ended += 1
                if progress is not None and not ended % PROGRESS_EVERY:
                    progress(ended)
        elif arrivals.next_time <= now:
            job = arrivals.pop()
            job.arrived = now
            front.arrive(job, fleet)
        else:
            front.wake(fleet)
            if front.alarm <= now:
                raise StuckError(f"the front would be woken for ever at {now:g} s")
    if ended != len(jobs):
        raise StuckError(f"{len(jobs) - ended} of {len(jobs)} requests were never served")
    return SimulationResult(
        jobs,
        fleet.servers,
        min((job.arrived for job in jobs), default=0.0),
        max((job.ended for job in jobs), default=0.0),
    )
