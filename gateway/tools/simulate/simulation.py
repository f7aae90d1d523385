"""The simulation: plays a trace on simulated nodes, through a front that places the requests.

Time is the trace's; nothing waits for the clock. The same trace, fleet, front and seed give the
same result.
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
"""Ended requests between two calls of `progress`."""


class SimulatedFleet:
    """The simulated nodes, to which a front sends jobs."""

    __slots__ = ("_ends", "jobs", "now", "servers")

    def __init__(self, machines: Sequence[SimulatedMachine], jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.servers = [SimulatedServer(machine) for machine in machines]
        self.now = 0.0
        # Ends of steps: time, node, version; void if the node has another `end_version` by now.
        self._ends: list[tuple[float, int, int]] = []

    def send(self, job: Job, node: int) -> None:
        """Send a job to a node, now. A node without a free slot queues it."""
        now = self.now
        job.send_to(node, now)
        server = self.servers[node]
        if server.take(job, now):
            heappush(self._ends, (server.next_end, node, server.end_version))

    def next_step_end(self) -> float:
        """When the next steps end; infinity while every node is idle."""
        ends = self._ends
        servers = self.servers
        while ends:
            time, node, version = ends[0]
            if version == servers[node].end_version:
                return time
            heappop(ends)
        return math.inf

    def end_steps(self) -> tuple[list[Job], list[Job]]:
        """End those steps, now: the jobs that have their first token, and those that have ended."""
        _, node, _ = heappop(self._ends)
        server = self.servers[node]
        ended = server.end_steps(self.now)
        if server.next_end >= 0:
            heappush(self._ends, (server.next_end, node, server.end_version))
        return ended


class Arrivals:
    """Arrivals: first turns at their times, later turns once the turn before has ended."""

    __slots__ = ("_first_turns", "_jobs", "_later", "_next_turns", "next_time")

    def __init__(self, trace: Trace) -> None:
        self._jobs = trace.jobs
        self._next_turns = trace.next_turns
        self._first_turns = [job for job in reversed(trace.jobs) if not job.is_later_turn]
        self._later: list[tuple[float, int]] = []
        self.next_time = self._first_turns[-1].time if self._first_turns else math.inf

    def pop(self) -> Job:
        """The job that arrives at `next_time`."""
        if self._later and self._later[0][0] <= self.next_time:
            job = self._jobs[heappop(self._later)[1]]
        else:
            job = self._first_turns.pop()
        self._set_next_time()
        return job

    def schedule_next_turn(self, job: Job) -> None:
        """A job has ended: schedule the next turn of its conversation."""
        place = self._next_turns.get(job.id)
        if place is not None:
            turn = self._jobs[place]
            heappush(self._later, (max(turn.time, job.ended + turn.pause), place))
            self._set_next_time()

    def _set_next_time(self) -> None:
        first = self._first_turns[-1].time if self._first_turns else math.inf
        later = self._later[0][0] if self._later else math.inf
        self.next_time = min(first, later)


class Front(Protocol):
    """Places requests on nodes: a proxy in front of them."""

    alarm: float
    """When it is to be woken if nothing else happens; infinity: never."""

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        """A request has arrived: send it, or queue it."""

    def started(self, job: Job, fleet: SimulatedFleet) -> None:
        """The first token has come."""

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        """The last token has come and the slot is free."""

    def wake(self, fleet: SimulatedFleet) -> None:
        """The time of the alarm has come. Must set a later one."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a run; the details are in the trace's jobs."""

    jobs: Sequence[Job]
    servers: Sequence[SimulatedServer]
    began: float
    """The first arrival."""
    ended: float
    """The last end."""


class StuckError(Exception):
    """A front never sent some requests, though nothing else was to happen."""


def simulate(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    front: Front,
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Play a trace through a front on a fleet.

    Results are written into the jobs: read them before the trace is played again. `progress` is
    called now and then with the number of requests that have ended. Raises StuckError if the front
    leaves requests unsent when nothing more can happen.
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
            job.arrive(now)
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
