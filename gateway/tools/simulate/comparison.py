"""The same trace on the same fleet under one policy after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.scheduling.autoscaling_policy import AutoscalingRules
from gateway.scheduling.matching import DispatchRules
from gateway.scheduling.selection import POLICIES
from gateway.tools.simulate.bound import lower_bound
from gateway.tools.simulate.fronts import AutoscalingFront, GatewayFront, LeastConn, LeastConnQueued
from gateway.tools.simulate.knowledge import ExactKnowledge, LearntKnowledge
from gateway.tools.simulate.report import PolicyReport, summarise
from gateway.tools.simulate.server import SimulatedMachine
from gateway.tools.simulate.simulation import Front, simulate
from gateway.tools.simulate.trace import Trace

OTHER_PROXIES = ("nginx", "haproxy")
"""What is not the gateway's own: `least_conn`, and `leastconn` with `maxconn` of the slots."""


class UnknownPolicyError(Exception):
    """A policy that does not exist, told with those that do."""


def known_policies() -> tuple[str, ...]:
    """All that can be compared: the gateway's, then the peers."""
    return (*POLICIES, *OTHER_PROXIES)


def build_front(
    name: str,
    machines: Sequence[SimulatedMachine],
    *,
    rules: DispatchRules | None = None,
    exact: bool = False,
    seed: int = 0,
) -> Front:
    """The front of that name for a fleet. Raises UnknownPolicyError.

    `rules` are the gateway's queue settings, whose policy is replaced by `name`. `exact`: it knows
    speeds, lengths and caches instead of learning them (`knowledge.Exact`).
    """
    if name == "nginx":
        return LeastConn(len(machines))
    if name == "haproxy":
        return LeastConnQueued([machine.slots for machine in machines])
    if name not in POLICIES:
        raise UnknownPolicyError(_unknown(name))
    given = rules or DispatchRules()
    line = DispatchRules(name, given.overdue_after, given.overdue_share, given.batch_reserve)
    return GatewayFront(machines, line, seed, ExactKnowledge() if exact else LearntKnowledge())


def compare(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    names: Sequence[str],
    *,
    rules: DispatchRules | None = None,
    exact: bool = False,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
) -> list[PolicyReport]:
    """Play the trace under each policy; `progress` gets its name and the requests that ended.

    Raises UnknownPolicyError before anything is played, and `simulation.StuckError`.
    """
    for name in names:
        if name not in known_policies():
            raise UnknownPolicyError(_unknown(name))
    reports: list[PolicyReport] = []
    for name in names:
        # Made only now, and gone with its run: what a front learns may be large.
        stood = build_front(name, machines, rules=rules, exact=exact, seed=seed)
        reports.append(_played(trace, machines, name, stood, progress))
    return reports


def _unknown(name: str) -> str:
    return f"there is no policy {name!r}; known: {', '.join(known_policies())}"


def _played(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    name: str,
    stood: Front,
    progress: Callable[[str, int], None] | None,
) -> PolicyReport:
    begun = time.process_time()
    told = None if progress is None else lambda ended: progress(name, ended)
    outcome = simulate(trace, machines, stood, told)
    spent = time.process_time() - begun
    return summarise(name, outcome, lower_bound(outcome), spent)


SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class StandbyResult:
    """One way to run the machines."""

    fleet: str
    report: PolicyReport
    machine_hours: float
    """Of all machines, from a start to the end of its stop."""
    starts: int = 0

    def as_dict(self, cost: float) -> dict[str, object]:
        """For a script; `cost` of a machine's hour."""
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
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
) -> list[StandbyResult]:
    """Play the trace on `base` and `standby` always on, elastic, and on `base` alone.

    Speeds, lengths and caches are learnt. Raises `simulation.StuckError`.
    """
    spares = [replace(one, name=f"standby-{place}") for place, one in enumerate(standby, 1)]
    every = [*base, *spares]
    found: list[StandbyResult] = []

    def played(name: str, machines: Sequence[SimulatedMachine], front: Front) -> PolicyReport:
        told = None if progress is None else lambda ended: progress(name, ended)
        return summarise(name, simulate(trace, machines, front, told))

    always = played("always on", every, GatewayFront(every, seed=seed, knowledge=LearntKnowledge()))
    found.append(StandbyResult("always on", always, len(every) * always.seconds / SECONDS_PER_HOUR))
    front = AutoscalingFront(
        GatewayFront(every, seed=seed, knowledge=LearntKnowledge()),
        every,
        len(base),
        rules,
        startup,
    )
    elastic = played("elastic", every, front)
    end = max(job.ended for job in trace.jobs)
    seconds = len(base) * elastic.seconds + front.standby_seconds(end)
    found.append(StandbyResult("elastic", elastic, seconds / SECONDS_PER_HOUR, front.starts))
    if base:
        alone = played(
            "base alone", base, GatewayFront(base, seed=seed, knowledge=LearntKnowledge())
        )
        found.append(
            StandbyResult("base alone", alone, len(base) * alone.seconds / SECONDS_PER_HOUR)
        )
    return found
