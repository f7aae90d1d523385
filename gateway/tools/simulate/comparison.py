"""Comparisons: the same trace on the same fleet under several policies, or with autoscaling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.scheduling.autoscaling_policy import AutoscalingRules
from gateway.scheduling.dispatcher import DispatchRules
from gateway.scheduling.selection import POLICIES
from gateway.tools.simulate.bound import lower_bound
from gateway.tools.simulate.fronts import AutoscalingFront, GatewayFront, LeastConn, LeastConnQueued
from gateway.tools.simulate.knowledge import ExactKnowledge, LearntKnowledge
from gateway.tools.simulate.report import PolicyReport, summarise
from gateway.tools.simulate.server import SimulatedMachine
from gateway.tools.simulate.simulation import Front, simulate
from gateway.tools.simulate.trace import Trace

OTHER_PROXIES: Mapping[str, Callable[[Sequence[SimulatedMachine]], Front]] = {
    "nginx": lambda machines: LeastConn(len(machines)),
    "haproxy": lambda machines: LeastConnQueued([machine.slots for machine in machines]),
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
    rules: DispatchRules | None = None,
    exact: bool = False,
    warm: bool = False,
    seed: int = 0,
) -> Front:
    """The front of that name for a fleet. Raises UnknownPolicyError.

    `rules`: the gateway's queue settings; `name` replaces their policy. `exact`: the gateway knows
    speeds, lengths and caches instead of learning them (`knowledge.ExactKnowledge`). `warm`: it
    has learnt the speeds before.
    """
    if name in OTHER_PROXIES:
        return OTHER_PROXIES[name](machines)
    if name not in POLICIES:
        raise UnknownPolicyError(_unknown(name))
    given = rules or DispatchRules()
    used = DispatchRules(name, given.overdue_after, given.overdue_share, given.batch_reserve)
    knowledge = ExactKnowledge() if exact else LearntKnowledge(warm=warm)
    return GatewayFront(machines, used, seed, knowledge)


def compare(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    names: Sequence[str],
    *,
    rules: DispatchRules | None = None,
    exact: bool = False,
    warm: bool = False,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
) -> list[PolicyReport]:
    """Play the trace under each policy; `progress` gets its name and the number of ended requests.

    Raises UnknownPolicyError before anything is played, and `simulation.StuckError`.
    """
    for name in names:
        if name not in known_policies():
            raise UnknownPolicyError(_unknown(name))
    reports: list[PolicyReport] = []
    for name in names:
        # Made one by one: what a front learns may be large.
        front = build_front(name, machines, rules=rules, exact=exact, warm=warm, seed=seed)
        reports.append(_played(trace, machines, name, front, progress))
    return reports


def _unknown(name: str) -> str:
    return f"there is no policy {name!r}; known: {', '.join(known_policies())}"


def _played(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    name: str,
    front: Front,
    progress: Callable[[str, int], None] | None,
) -> PolicyReport:
    begun = time.process_time()
    report = None if progress is None else lambda ended: progress(name, ended)
    result = simulate(trace, machines, front, report)
    spent = time.process_time() - begun
    return summarise(name, result, lower_bound(result), spent)


SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class StandbyResult:
    """The result of one way to run the machines."""

    fleet: str
    report: PolicyReport
    machine_hours: float
    """Of all machines, from start to stop."""
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
    progress: Callable[[str, int], None] | None = None,
) -> list[StandbyResult]:
    """Play the trace with `standby` machines always on, autoscaled, and on `base` alone.

    Speeds, lengths and caches are learnt; `warm`: speeds were before. Raises
    `simulation.StuckError`.
    """
    standby = [replace(one, name=f"standby-{place}") for place, one in enumerate(standby, 1)]
    every = [*base, *standby]
    found: list[StandbyResult] = []

    def played(name: str, machines: Sequence[SimulatedMachine], front: Front) -> PolicyReport:
        report = None if progress is None else lambda ended: progress(name, ended)
        return summarise(name, simulate(trace, machines, front, report))

    def gateway(machines: Sequence[SimulatedMachine]) -> GatewayFront:
        return GatewayFront(machines, seed=seed, knowledge=LearntKnowledge(warm=warm))

    always = played("always on", every, gateway(every))
    found.append(StandbyResult("always on", always, len(every) * always.seconds / SECONDS_PER_HOUR))
    front = AutoscalingFront(
        gateway(every),
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
        alone = played("base alone", base, gateway(base))
        found.append(
            StandbyResult("base alone", alone, len(base) * alone.seconds / SECONDS_PER_HOUR)
        )
    return found
