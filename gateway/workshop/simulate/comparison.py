"""Comparisons: the same trace on the same fleet under several policies, or with autoscaling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gateway.schedule.core.autoscaling_policy import AutoscalingRules
from gateway.schedule.core.dispatcher import DispatchRules
from gateway.schedule.core.selection import POLICIES
from gateway.workshop.simulate.fronts import (
    AutoscalingFront,
    ExactKnowledge,
    GatewayFront,
    LearntKnowledge,
    LeastConn,
)
from gateway.workshop.simulate.report import PolicyReport, lower_bound, summarise
from gateway.workshop.simulate.simulation import Front, SimulatedMachine, simulate
from gateway.workshop.simulate.trace import Trace

OTHER_PROXIES: Mapping[str, Callable[[Sequence[SimulatedMachine]], Front]] = {
    "nginx": lambda machines: LeastConn(len(machines)),
    "haproxy": lambda machines: LeastConn(len(machines), [one.slots for one in machines]),
}
"""Proxies beside the gateway: `least_conn`, and `leastconn` with `maxconn` = a node's slots."""


class UnknownPolicyError(Exception):
    """A policy that does not exist; the message names those that do."""


def known_policies() -> tuple[str, ...]:
    """All policies that can be compared: the gateway's, then the other proxies."""
    return (*POLICIES, *OTHER_PROXIES)


def build_front(
    name: str,
    machines: Sequence[SimulatedMachine],
    *,
    exact: bool = False,
    warm: bool = False,
    seed: int = 0,
) -> Front:
    """The front of that name for a fleet. Raises UnknownPolicyError.

    `exact`: the gateway knows speeds, lengths and caches instead of learning them. `warm`: it has
    learnt the speeds before.
    """
    _check(name)
    if name in OTHER_PROXIES:
        return OTHER_PROXIES[name](machines)
    knowledge = ExactKnowledge() if exact else LearntKnowledge(warm=warm)
    return GatewayFront(machines, DispatchRules(name), seed, knowledge)


def compare(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    names: Sequence[str],
    *,
    exact: bool = False,
    warm: bool = False,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
) -> list[PolicyReport]:
    """Play the trace under each policy; `progress` gets its name and the number of ended requests.

    Raises UnknownPolicyError before anything is played, and `simulation.StuckError`.
    """
    for name in names:
        _check(name)
    reports: list[PolicyReport] = []
    for name in names:
        # Made one by one: what a front learns may be large.
        front = build_front(name, machines, exact=exact, warm=warm, seed=seed)
        begun = time.process_time()
        ended = None if progress is None else partial(progress, name)
        result = simulate(trace, machines, front, ended)
        spent = time.process_time() - begun
        reports.append(summarise(name, result, lower_bound(result), spent))
    return reports


def _check(name: str) -> None:
    if name not in known_policies():
        raise UnknownPolicyError(
            f"there is no policy {name!r}; known: {', '.join(known_policies())}"
        )


SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class StandbyResult:
    """The result of one way to run the machines."""

    fleet: str
    report: PolicyReport
    machine_hours: float  # of all machines, from start to stop
    starts: int = 0

    def as_dict(self, cost: float) -> dict[str, object]:
        """For scripts; `cost`: of a machine's hour."""
        return {
            "fleet": self.fleet,
            "machine_hours": self.machine_hours,
            "cost": self.machine_hours * cost,
            "starts": self.starts,
            **self.report.as_dict(),
        }


def compare_elastic(
    trace: Trace,
    base: Sequence[SimulatedMachine],
    standby: Sequence[SimulatedMachine],
    rules: AutoscalingRules,
    startup: float,
    *,
    warm: bool = False,
    seed: int = 0,
) -> list[StandbyResult]:
    """Play the trace with `standby` machines always on, autoscaled, and on `base` alone.

    Speeds, lengths and caches are learnt; `warm`: speeds were before. Raises
    `simulation.StuckError`.
    """
    every = [
        *base,
        *(replace(one, name=f"standby-{place}") for place, one in enumerate(standby, 1)),
    ]
    found: list[StandbyResult] = []

    def fixed(name: str, machines: Sequence[SimulatedMachine]) -> StandbyResult:
        front = GatewayFront(machines, seed=seed, knowledge=LearntKnowledge(warm=warm))
        report = summarise(name, simulate(trace, machines, front))
        return StandbyResult(name, report, len(machines) * report.seconds / SECONDS_PER_HOUR)

    found.append(fixed("always on", every))
    knowledge = LearntKnowledge(warm=warm)
    front = AutoscalingFront(every, len(base), rules, startup, seed, knowledge)
    elastic = summarise("elastic", simulate(trace, every, front))
    end = max(job.ended for job in trace.jobs)
    seconds = len(base) * elastic.seconds + front.standby_seconds(end)
    found.append(StandbyResult("elastic", elastic, seconds / SECONDS_PER_HOUR, front.starts))
    if base:
        found.append(fixed("base alone", base))
    return found
