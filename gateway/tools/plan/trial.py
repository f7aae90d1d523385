"""A trial: the traffic played through the real scheduler on simulated nodes of a fleet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from statistics import fmean, stdev

from gateway.tools.plan.catalogue import NodeType
from gateway.tools.plan.workload import SECONDS_PER_HOUR, unread_tokens
from gateway.tools.simulate.comparison import build_front
from gateway.tools.simulate.report import LONGEST_WAIT, Percentiles
from gateway.tools.simulate.simulation import simulate
from gateway.tools.simulate.trace import Job, Trace

GATEWAY = "least_finish"
"""The gateway's own policy; `DIRECT`: none, requests wait inside the node."""

DIRECT = "nginx"

MOST_SIMULATED_NODES = 2000

WARM_UP_SHARE = 0.1
"""Share of the requests that come while the fleet fills and its speeds are learnt: not counted."""

BATCHES = 20
"""Batches of requests whose means tell how sure a mean is."""

STUDENT_95 = 2.093
"""Of 20 batches: 97.5th percentile of Student's t with 19 degrees of freedom."""


class OutOfTimeError(Exception):
    """The time for simulations is used up."""


@dataclass(slots=True)
class TimeLimit:
    """How long all trials of a plan may take together, in seconds, and who hears of them."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    on_trial: Callable[[str, float], None] | None = None
    """Called with the fleet of the trial that runs, and the share of the time that is used."""
    trials: int = 0
    _ends: float = field(init=False)

    def __post_init__(self) -> None:
        self._ends = self.clock() + self.seconds

    def begin(self, fleet: str) -> None:
        """A trial begins. Raises OutOfTimeError."""
        self.check(fleet)
        self.trials += 1

    def check(self, fleet: str) -> None:
        """A trial goes on. Raises OutOfTimeError."""
        left = self._ends - self.clock()
        if self.on_trial is not None:
            self.on_trial(fleet, min(1.0, 1.0 - left / self.seconds))
        if left <= 0:
            raise OutOfTimeError(f"{self.seconds:g} s for simulations are used up")


@dataclass(frozen=True, slots=True)
class FleetPart:
    """So many of one type."""

    node_type: NodeType
    count: int

    @property
    def servers(self) -> int:
        """llama.cpp servers: nodes of the gateway."""
        return self.count * self.node_type.servers


def fleet_name(parts: Sequence[FleetPart]) -> str:
    """Such as `3 x cpu-16 + 1 x l4`."""
    return " + ".join(f"{part.count} x {part.node_type.name}" for part in parts)


@dataclass(frozen=True, slots=True)
class PartShare:
    """What one part of the fleet served."""

    requests: float
    """Share of the requests."""
    prompt_tokens: float
    """Share of the prompt tokens."""
    completion_tokens: float


@dataclass(frozen=True, slots=True)
class FleetTrial:
    """What came of a trial. Seconds from a request's arrival."""

    requests: int
    """Counted ones."""
    wait: Percentiles
    """Until it had a slot."""
    ttft: Percentiles
    completion: Percentiles
    service: float
    """Mean seconds in a slot."""
    waiting_share: float
    """Requests that did not get a slot at once."""
    wait_error: float
    """Half the width of the 95 % confidence interval of the mean wait."""
    completion_error: float
    slots_busy: float
    """Share of the slots' time."""
    too_late: int
    """Requests that waited longer than the gateway lets them (`queue.max_wait`)."""
    seconds: float
    """Until the last request ended; of a backlog: until all of it would have."""
    shares: tuple[PartShare, ...]

    def as_dict(self) -> dict[str, object]:
        """For scripts."""
        return {
            "requests": self.requests,
            "wait": _figures(self.wait) | {"error_95": self.wait_error},
            "ttft": _figures(self.ttft),
            "completion": _figures(self.completion) | {"error_95": self.completion_error},
            "service": self.service,
            "waiting_share": self.waiting_share,
            "slots_busy": self.slots_busy,
            "waited_too_long": self.too_late,
            "seconds": self.seconds,
        }


def _figures(one: Percentiles) -> dict[str, float]:
    return {"mean": one.mean, "p50": one.p50, "p95": one.p95, "p99": one.p99}


def try_fleet(
    parts: Sequence[FleetPart],
    trace: Trace,
    limit: TimeLimit,
    *,
    backlog: float | None = None,
    policy: str = GATEWAY,
    seed: int = 1,
    warm: bool = False,
) -> FleetTrial:
    """Play a trace on a fleet.

    `backlog`: the requests there really are, of which the trace is a sample that waits from the
    start; times grow in proportion. `warm`: the nodes' speeds are known.
    Raises OutOfTimeError.
    """
    name = fleet_name(parts)
    limit.begin(name)
    machines = [one for part in parts for one in part.node_type.machines(part.count)]
    front = build_front(policy, machines, warm=warm, seed=seed)
    result = simulate(trace, machines, front, lambda _: limit.check(name))
    jobs = list(result.jobs)
    bounds = [0]
    for part in parts:
        bounds.append(bounds[-1] + part.servers)
    if backlog is None:
        counted = jobs[int(len(jobs) * WARM_UP_SHARE) :]
        growth = 1.0
    else:
        counted, growth = jobs, max(1.0, backlog / len(jobs))
    waits = [(job.began - job.arrived) * growth for job in counted]
    first = [wait + job.first - job.began for wait, job in zip(waits, counted, strict=True)]
    completions = [wait + job.ended - job.began for wait, job in zip(waits, counted, strict=True)]
    slots = sum(machine.slots for machine in machines)
    last = max(job.arrived for job in jobs)
    until = last if last > result.began else result.ended
    busy = sum(min(job.ended, until) - job.began for job in jobs if job.began < until)
    began = max(job.began for job in jobs)
    return FleetTrial(
        len(counted),
        Percentiles.of(waits),
        Percentiles.of(first),
        Percentiles.of(completions),
        fmean(job.ended - job.began for job in counted),
        sum(wait > 0 for wait in waits) / len(waits),
        error_of_mean(waits),
        error_of_mean(completions),
        busy / (slots * (until - result.began)) if until > result.began else 0.0,
        sum(wait > LONGEST_WAIT for wait in waits),
        began * growth + (result.ended - began),
        tuple(_share(counted, low, high) for low, high in pairwise(bounds)),
    )


def bounded(
    trial: FleetTrial, other: FleetTrial, pick: Callable[[float, float], float]
) -> FleetTrial:
    """The trial with its times picked from it and another one, by `max` or `min`."""

    def each(one: Percentiles, two: Percentiles) -> Percentiles:
        return Percentiles(*map(pick, astuple(one), astuple(two)))

    return replace(
        trial,
        wait=each(trial.wait, other.wait),
        ttft=each(trial.ttft, other.ttft),
        completion=each(trial.completion, other.completion),
        waiting_share=pick(trial.waiting_share, other.waiting_share),
        too_late=int(pick(trial.too_late, other.too_late)),
    )


def error_of_mean(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of a mean, by the method of batch means.

    Values that follow each other depend on each other; means of long batches hardly do. Infinite
    where there are too few values to tell.
    """
    size = len(values) // BATCHES
    if size < 2:
        return math.inf
    means = [fmean(values[place * size : (place + 1) * size]) for place in range(BATCHES)]
    return STUDENT_95 * stdev(means) / math.sqrt(BATCHES)


def alone(jobs: Sequence[Job], node_type: NodeType) -> tuple[float, float]:
    """95th percentiles of TTFT and completion, if each request had a node to itself.

    No fleet of these nodes is faster. What a cache may hold does not need to be read.
    """
    machine = node_type.machine("alone")
    first, whole = [], []
    for job, unread in zip(jobs, unread_tokens(jobs), strict=True):
        read = max(machine.token_base, unread / machine.prefill_tps)
        first.append(read)
        whole.append(read + (job.output - 1) * machine.token_base)
    return Percentiles.of(first).p95, Percentiles.of(whole).p95


def _share(jobs: Sequence[Job], low: int, high: int) -> PartShare:
    own = [job for job in jobs if low <= job.node < high]
    prompts = sum(job.prompt.tokens for job in jobs)
    outputs = sum(job.output for job in jobs)
    return PartShare(
        len(own) / len(jobs),
        sum(job.prompt.tokens for job in own) / prompts,
        sum(job.output for job in own) / outputs,
    )


def hours(seconds: float) -> float:
    """Seconds as hours."""
    return seconds / SECONDS_PER_HOUR
