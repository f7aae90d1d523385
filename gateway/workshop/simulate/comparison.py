"""Comparisons: the same trace on the same fleet under several policies, or with autoscaling."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gateway.config.scheduling import ElasticSettings
from gateway.schedule.core.selection import POLICIES
from gateway.workshop.simulate.bound import lower_bound
from gateway.workshop.simulate.fleets import (
    RouterFleet,
    SimulatedModel,
    describe_placement,
    greedy_placement,
    random_placements,
)
from gateway.workshop.simulate.fronts import (
    AutoscalingFront,
    ExactKnowledge,
    FewestConnections,
    GatewayFront,
    Knowledge,
    LearntKnowledge,
    LeastConn,
    LeastRecentlyUsed,
    ModelPlacingFront,
)
from gateway.workshop.simulate.report import PolicyReport, summarise
from gateway.workshop.simulate.simulation import (
    Front,
    SimulatedFleet,
    SimulatedMachine,
    Trace,
    build_trace,
    simulate,
)

# Proxies beside the gateway: `least_conn`, and `leastconn` with `maxconn` = a node's slots.
OTHER_PROXIES: Mapping[str, Callable[[SimulatedFleet], Front]] = {
    "nginx": LeastConn,
    "haproxy": partial(LeastConn, capped=True),
}


def known_policies() -> tuple[str, ...]:
    """All policies that can be compared: the gateway's, then the other proxies."""
    return (*POLICIES, *OTHER_PROXIES)


def build_front(
    name: str, fleet: SimulatedFleet, *, exact: bool = False, warm: bool = False, seed: int = 0
) -> Front:
    """The front of that name, one of `known_policies`, for a fleet.

    `exact`: the gateway knows speeds, lengths and caches instead of learning them. `warm`: it has
    learnt the speeds before.
    """
    if name in OTHER_PROXIES:
        return OTHER_PROXIES[name](fleet)
    knowledge: Knowledge = ExactKnowledge if exact else partial(LearntKnowledge, warm=warm)
    return GatewayFront(fleet, seed, knowledge, name)


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

    Raises `simulation.StuckError`.
    """
    reports: list[PolicyReport] = []
    for name in names:
        # Made one by one: what a front learns may be large.
        fleet = SimulatedFleet(machines, trace)
        front = build_front(name, fleet, exact=exact, warm=warm, seed=seed)
        begun = time.process_time()
        simulate(front, None if progress is None else partial(progress, name))
        spent = time.process_time() - begun
        reports.append(summarise(name, fleet, lower_bound(fleet), spent))
    return reports


SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class StandbyResult:
    """The result of one way to run the machines."""

    report: PolicyReport
    machine_hours: float  # of all machines, from start to stop
    starts: int = 0

    def as_dict(self, cost: float) -> dict[str, object]:
        """For scripts; `cost`: of a machine's hour."""
        return {
            "fleet": self.report.policy,
            "machine_hours": self.machine_hours,
            "cost": self.machine_hours * cost,
            "starts": self.starts,
            **self.report.as_dict(),
        }


def compare_elastic(
    trace: Trace,
    base: Sequence[SimulatedMachine],
    standby: Sequence[SimulatedMachine],
    rules: ElasticSettings,
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
    knowledge = partial(LearntKnowledge, warm=warm)

    def fixed(name: str, machines: Sequence[SimulatedMachine]) -> StandbyResult:
        fleet = SimulatedFleet(machines, trace)
        report = summarise(name, simulate(GatewayFront(fleet, seed, knowledge)))
        return StandbyResult(report, len(machines) * report.seconds / SECONDS_PER_HOUR)

    found.append(fixed("always on", every))
    fleet = SimulatedFleet(every, trace, loaded=range(len(base)))
    front = AutoscalingFront(fleet, rules, startup, seed, knowledge)
    elastic = summarise("elastic", simulate(front))
    seconds = len(base) * elastic.seconds + front.standby_seconds
    found.append(StandbyResult(elastic, seconds / SECONDS_PER_HOUR, front.starts))
    if base:
        found.append(fixed("base alone", base))
    return found


# Placements by hand: all are played behind a proxy, on a sample of one in so many conversations, so
# many times as fast; the best share of them on all; the best few behind the gateway.
SAMPLE, HAND_SHARE, HAND_TRIED = 5, 0.1, 12


@dataclass(frozen=True, slots=True)
class ModelPlacementResult:
    """The result of one way to place models."""

    report: PolicyReport
    longest_wait: float  # seconds until a request got a slot
    loads: int
    load_seconds: float
    loaded: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By router: the models that were placed by hand."""

    def as_dict(self) -> dict[str, object]:
        """For scripts."""
        figures = {
            "placement": self.report.policy,
            "longest_wait": self.longest_wait,
            "loads": self.loads,
            "load_seconds": self.load_seconds,
            **self.report.as_dict(),
        }
        return figures | ({"loaded": self.loaded} if self.loaded else {})


def compare_model_placements(
    trace: Trace,
    routers: Sequence[SimulatedMachine],
    models: Sequence[SimulatedModel],
    placements: int,
    *,
    warm: bool = False,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
) -> list[ModelPlacementResult]:
    """Play the trace with models placed by the gateway, by each router, and by hand.

    By hand: the best of a greedy and of so many random `placements`, each with the trace known
    beforehand; left out where the models don't fit at once. `progress` gets what is played, and how
    many plays of it have ended. Raises `simulation.StuckError`.
    """
    ended = Counter[str]()
    knowledge = partial(LearntKnowledge, warm=warm)

    def play(
        name: str,
        build: Callable[[RouterFleet], Front],
        loaded: Collection[int] = (),
        played: Trace = trace,
    ) -> ModelPlacementResult:
        fleet = RouterFleet(routers, models, played, loaded)
        began = time.process_time()
        simulate(build(fleet))
        spent = time.process_time() - began
        ended[name] += 1
        if progress is not None:
            progress(name, ended[name])
        report = summarise(name, fleet, cpu_seconds=spent)
        return ModelPlacementResult(
            report,
            max((job.began - job.arrived for job in played.jobs), default=0.0),
            fleet.loads,
            fleet.load_seconds,
            describe_placement(fleet, loaded) if loaded else {},
        )

    found = [
        play("gateway", partial(ModelPlacingFront, seed=seed, knowledge=knowledge)),
        play("each router's own", LeastRecentlyUsed),
    ]
    idle = RouterFleet(routers, models)
    best = list(dict.fromkeys(random_placements(idle, placements, random.Random(seed))))
    for played, most in (
        (_sample(trace), max(HAND_TRIED, round(placements * HAND_SHARE))),
        (trace, HAND_TRIED),
    ):
        if len(best) > most:
            means = {
                loaded: play("by hand", FewestConnections, loaded, played).report.completion.mean
                for loaded in best
            }
            best = sorted(best, key=means.__getitem__)[:most]
    counts = Counter(job.model for job in trace.jobs)
    if (greedy := greedy_placement(idle, counts)) is not None:
        best.append(greedy)
    gateway = partial(GatewayFront, seed=seed, knowledge=knowledge)
    by_hand = [play("by hand", gateway, loaded) for loaded in best]
    if by_hand:
        found.append(min(by_hand, key=lambda one: one.report.completion.mean))
    return found


def _sample(trace: Trace) -> Trace:
    """One in `SAMPLE` conversations, in as much less time."""
    streams = dict.fromkeys(job.prompt.stream for job in trace.jobs)
    kept = set(list(streams)[::SAMPLE])
    return build_trace(
        [replace(job, time=job.time / SAMPLE) for job in trace.jobs if job.prompt.stream in kept]
    )
