"""What standby machines are worth: the same trace with all machines on, elastic, and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.planning.elastic_front import ElasticFront
from gateway.planning.gateway_front import GatewayFront
from gateway.planning.job import Trace
from gateway.planning.learnt import Learnt
from gateway.planning.machine import Machine
from gateway.planning.report import Report, report
from gateway.planning.simulation import Front, simulate
from gateway.scheduling.elastic import Rules

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Elasticity:
    """One way to run the machines."""

    fleet: str
    report: Report
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
    base: Sequence[Machine],
    standby: Sequence[Machine],
    rules: Rules,
    startup: float,
    *,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
) -> list[Elasticity]:
    """Play the trace on `base` and `standby` always on, elastic, and on `base` alone.

    Speeds, lengths and caches are learnt. Raises `simulation.StuckError`.
    """
    spares = [replace(one, name=f"standby-{place}") for place, one in enumerate(standby, 1)]
    every = [*base, *spares]
    found: list[Elasticity] = []

    def played(name: str, machines: Sequence[Machine], front: Front) -> Report:
        told = None if progress is None else lambda ended: progress(name, ended)
        return report(name, simulate(trace, machines, front, told))

    always = played("always on", every, GatewayFront(every, seed=seed, knowledge=Learnt()))
    found.append(Elasticity("always on", always, len(every) * always.seconds / HOUR))
    front = ElasticFront(
        GatewayFront(every, seed=seed, knowledge=Learnt()), every, len(base), rules, startup
    )
    elastic = played("elastic", every, front)
    end = max(job.ended for job in trace.jobs)
    seconds = len(base) * elastic.seconds + front.standby_seconds(end)
    found.append(Elasticity("elastic", elastic, seconds / HOUR, front.starts))
    if base:
        alone = played("base alone", base, GatewayFront(base, seed=seed, knowledge=Learnt()))
        found.append(Elasticity("base alone", alone, len(base) * alone.seconds / HOUR))
    return found
