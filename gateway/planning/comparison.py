"""The same trace on the same fleet under one policy after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gateway.planning.bound import lower_bound
from gateway.planning.gateway_front import GatewayFront
from gateway.planning.job import Trace
from gateway.planning.knowledge import Exact
from gateway.planning.learnt import Learnt
from gateway.planning.machine import Machine
from gateway.planning.peers import LeastConn, LeastConnQueued
from gateway.planning.report import Report, report
from gateway.planning.simulation import Front, simulate
from gateway.scheduling.dispatch import LineRules
from gateway.scheduling.policies import POLICIES

PEERS = ("nginx", "haproxy")
"""What is not the gateway's own: `least_conn`, and `leastconn` with `maxconn` of the slots."""


class UnknownPolicyError(Exception):
    """A policy that does not exist, told with those that do."""


def known_policies() -> tuple[str, ...]:
    """All that can be compared: the gateway's, then the peers."""
    return (*POLICIES, *PEERS)


def front(
    name: str,
    machines: Sequence[Machine],
    *,
    rules: LineRules | None = None,
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
    given = rules or LineRules()
    line = LineRules(name, given.patience, given.overdue_share, given.reserve)
    return GatewayFront(machines, line, seed, Exact() if exact else Learnt())


def compare(
    trace: Trace,
    machines: Sequence[Machine],
    names: Sequence[str],
    *,
    rules: LineRules | None = None,
    exact: bool = False,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
) -> list[Report]:
    """Play the trace under each policy; `progress` gets its name and the requests that ended.

    Raises UnknownPolicyError before anything is played, and `simulation.StuckError`.
    """
    for name in names:
        if name not in known_policies():
            raise UnknownPolicyError(_unknown(name))
    reports: list[Report] = []
    for name in names:
        # Made only now, and gone with its run: what a front learns may be large.
        stood = front(name, machines, rules=rules, exact=exact, seed=seed)
        reports.append(_played(trace, machines, name, stood, progress))
    return reports


def _unknown(name: str) -> str:
    return f"there is no policy {name!r}; known: {', '.join(known_policies())}"


def _played(
    trace: Trace,
    machines: Sequence[Machine],
    name: str,
    stood: Front,
    progress: Callable[[str, int], None] | None,
) -> Report:
    begun = time.process_time()
    told = None if progress is None else lambda ended: progress(name, ended)
    outcome = simulate(trace, machines, stood, told)
    spent = time.process_time() - begun
    return report(name, outcome, lower_bound(outcome), spent)
