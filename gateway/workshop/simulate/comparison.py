"""Comparisons: the same trace on the same fleet under several policies, or with autoscaling.

`lower_bound` tells how fast any schedule could be.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import product
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway.config.scheduling import ElasticSettings
from gateway.schedule.core.selection import POLICIES
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
    Count,
    FromZero,
    Front,
    Job,
    SimulatedFleet,
    SimulatedMachine,
    Trace,
    build_trace,
    simulate,
    unread_tokens,
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


def _play(
    name: str, front: Front, progress: Callable[[int], None] | None = None, *, bound: bool = False
) -> PolicyReport:
    """Play the trace of a front, and report on it; `bound`: with that of any schedule."""
    begun = time.process_time()
    fleet = simulate(front, progress)
    spent = time.process_time() - begun
    return summarise(name, fleet, lower_bound(fleet) if bound else 0.0, spent)


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
        told = None if progress is None else partial(progress, name)
        reports.append(_play(name, front, told, bound=True))
    return reports


SECONDS_PER_HOUR = 3600.0


class ElasticFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules of standby machines, as `elastic` in the settings; here a time may be 0."""

    start_above: FromZero = 10.0
    start_after: FromZero = 5.0
    stop_after: FromZero = 600.0
    min: Annotated[int, msgspec.Meta(ge=0)] = 0
    max: Count | None = None
    cooldown: FromZero = 60.0
    startup: FromZero = 60.0  # seconds from a start to work
    cost: FromZero = 0.0  # of a machine's hour

    def __post_init__(self) -> None:
        if self.max is not None and self.max < self.min:
            raise ValueError("max must not be below min")

    def settings(self) -> ElasticSettings:
        """The rules that the policy follows."""
        told = msgspec.structs.asdict(self)
        del told["startup"], told["cost"]
        return ElasticSettings.model_construct(**told)


def compare_elastic(
    trace: Trace,
    base: Sequence[SimulatedMachine],
    standby: Sequence[SimulatedMachine],
    rules: ElasticFigures,
    *,
    warm: bool = False,
    seed: int = 0,
) -> list[PolicyReport]:
    """Play the trace with `standby` machines always on, autoscaled, and on `base` alone.

    Speeds, lengths and caches are learnt; `warm`: speeds were before. Raises
    `simulation.StuckError`.
    """
    spares = [replace(one, name=f"standby-{place}") for place, one in enumerate(standby, 1)]
    every = [*base, *spares]
    knowledge = partial(LearntKnowledge, warm=warm)

    def fixed(name: str, machines: Sequence[SimulatedMachine]) -> PolicyReport:
        report = _play(name, GatewayFront(SimulatedFleet(machines, trace), seed, knowledge))
        return replace(report, machine_hours=len(machines) * report.seconds / SECONDS_PER_HOUR)

    always = fixed("always on", every)
    fleet = SimulatedFleet(every, trace, loaded=range(len(base)))
    front = AutoscalingFront(fleet, rules.settings(), rules.startup, seed, knowledge)
    elastic = _play("elastic", front)
    hours = (len(base) * elastic.seconds + front.standby_seconds) / SECONDS_PER_HOUR
    found = [always, replace(elastic, machine_hours=hours, starts=front.starts)]
    return [*found, fixed("base alone", base)] if base else found


# Placements by hand: all are played behind a proxy, on a sample of one in so many conversations, so
# many times as fast; the best share of them on all; the best few behind the gateway.
SAMPLE, HAND_SHARE, HAND_TRIED = 5, 0.1, 12


def compare_model_placements(
    trace: Trace,
    routers: Sequence[SimulatedMachine],
    models: Sequence[SimulatedModel],
    placements: int,
    *,
    warm: bool = False,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
) -> list[PolicyReport]:
    """Play the trace with models placed by the gateway, by each router, and by hand.

    By hand: the best of a greedy and of so many random `placements`, each with the trace known
    beforehand; left out where the models don't fit at once. `progress` gets what is played, and how
    many plays of it have ended. Raises `simulation.StuckError`.
    """
    ended = Counter[str]()
    knowledge = partial(LearntKnowledge, warm=warm)

    def played(
        name: str,
        build: Callable[[RouterFleet], Front],
        loaded: Collection[int] = (),
        traffic: Trace = trace,
    ) -> PolicyReport:
        fleet = RouterFleet(routers, models, traffic, loaded)
        report = _play(name, build(fleet))
        ended[name] += 1
        if progress is not None:
            progress(name, ended[name])
        return replace(report, loaded=describe_placement(fleet, loaded) if loaded else {})

    found = [
        played("gateway", partial(ModelPlacingFront, seed=seed, knowledge=knowledge)),
        played("each router's own", LeastRecentlyUsed),
    ]
    idle = RouterFleet(routers, models)
    best = list(dict.fromkeys(random_placements(idle, placements, random.Random(seed))))
    for traffic, most in (
        (_sample(trace), max(HAND_TRIED, round(placements * HAND_SHARE))),
        (trace, HAND_TRIED),
    ):
        if len(best) > most:
            means = {
                loaded: played("by hand", FewestConnections, loaded, traffic).completion.mean
                for loaded in best
            }
            best = sorted(best, key=means.__getitem__)[:most]
    counts = Counter(job.model for job in trace.jobs)
    if (greedy := greedy_placement(idle, counts)) is not None:
        best.append(greedy)
    gateway = partial(GatewayFront, seed=seed, knowledge=knowledge)
    by_hand = [played("by hand", gateway, loaded) for loaded in best]
    if by_hand:
        found.append(min(by_hand, key=lambda one: one.completion.mean))
    return found


def _sample(trace: Trace) -> Trace:
    """One in `SAMPLE` conversations, in as much less time."""
    streams = dict.fromkeys(job.prompt.stream for job in trace.jobs)
    kept = set(list(streams)[::SAMPLE])
    return build_trace(
        [replace(job, time=job.time / SAMPLE) for job in trace.jobs if job.prompt.stream in kept]
    )


Needs = NDArray[np.float64]  # of each request: uncached tokens; tokens behind the first one
SAMPLE_REQUESTS = 400  # requests in the sample
MOST_NODE_KINDS = 6  # more kinds of nodes than this are merged into bands, each as fast as its best
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
PRICES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
PRICE_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class _Kind:
    """Equal nodes, or nodes that are at most as fast as this. Seconds per token."""

    nodes: int
    read: float
    base: float
    step: float
    slots: int

    def alone(self, needs: Needs) -> Needs:
        """Seconds of each request, if it is alone there."""
        seconds: Needs = np.maximum(self.base, needs[0] * self.read) + needs[1] * self.base
        return seconds

    def rates(self, share: float) -> tuple[float, float]:
        """Least seconds that an uncached token and an output token cost the node."""
        writing = share * (self.base - self.step) / self.slots + self.step
        return (1.0 - share) * self.read, writing


def lower_bound(fleet: SimulatedFleet) -> float:
    """Least possible mean completion of the arrivals that were played on a fleet, seconds.

    No schedule can do better, even one that knows everything. It holds for the nodes of
    `simulation.py`. Each assumption is in favour of the schedule:

    - every request finds cached all that could be: its conversation's last turn and its shared
      prefix, if an earlier request has read them;
    - on a node it is as fast as if it were alone there: `s`, seconds;
    - a node's work per second is limited. A step with p prompt tokens and k decoding slots takes
      max(base, p / prefill) + step x k, and k is at most the number of slots. So for any share a of
      0..1 a request costs its node at least
      `w` = (1 - a) u / prefill + (o - 1) (a (base - step) / slots + step) seconds,
      for u uncached tokens and o output tokens.

    **By capacity.** A request that ends more than D seconds after the last arrival took D seconds
    or more. All others share the nodes' time until then, T seconds each. With a price l >= 0 for a
    second of each kind of node, by weak duality the sum of all completions is at least

        sum over requests of min(D, min over kinds of (s + l w)) - T x sum over nodes of l

    for any D, a and prices: good ones are searched for on a sample, and the sum is taken over all.

    **By queueing.** All nodes together are no better than one server of their summed speed that
    always serves the request with the least work left, the best order for a single server (Schrage,
    1968). This one matters above capacity.

    The result is the larger of the two.
    """
    jobs = fleet.jobs
    if not jobs:
        return 0.0
    kinds = _kinds(fleet.machines)
    unread = unread_tokens(sorted(jobs, key=lambda job: job.began))
    needs = np.array([unread, [job.output - 1 for job in jobs]], dtype=float)
    capacity = _by_capacity(kinds, needs, max(job.arrived for job in jobs) - fleet.began)
    queueing = max(_by_queueing(kinds, jobs, needs, share) for share in SHARES)
    return max(capacity, queueing) / len(jobs)


def _kinds(machines: Iterable[SimulatedMachine]) -> list[_Kind]:
    counted = Counter(
        (one.token_base, 1.0 / one.prefill_tps, min(one.token_step, one.token_base), one.slots)
        for one in machines
    )
    ranked = sorted(counted)
    band = -(-len(ranked) // MOST_NODE_KINDS)
    kinds = []
    for place in range(0, len(ranked), band):
        part = ranked[place : place + band]
        bases, reads, steps, slots = zip(*part, strict=True)
        nodes = sum(counted[key] for key in part)
        kinds.append(_Kind(nodes, min(reads), min(bases), min(steps), max(slots)))
    return kinds


def _by_capacity(kinds: list[_Kind], needs: Needs, span: float) -> float:
    """A lower bound of the sum of all completions."""
    count = needs.shape[1]
    sample = needs[:, :: max(1, count // SAMPLE_REQUESTS)]
    scale = count / sample.shape[1]
    slowest = sorted(np.max([kind.alone(sample) for kind in kinds], axis=0))
    best = (0.0, 0.0, 0.0, [0.0] * len(kinds))
    lates = {slowest[len(slowest) // 2], slowest[-1], 2 * slowest[-1]}
    for late, share in product(lates, SHARES):
        prices = [0.0] * len(kinds)
        value = _dual(kinds, sample, span, late, share, prices, scale)
        for _, place, price in product(range(PRICE_ROUNDS), range(len(kinds)), PRICES):
            tried = [*prices[:place], price, *prices[place + 1 :]]
            found = _dual(kinds, sample, span, late, share, tried, scale)
            if found > value:
                value, prices = found, tried
        if value > best[0]:
            best = (value, late, share, prices)
    _, late, share, prices = best
    return _dual(kinds, needs, span, late, share, prices)


def _dual(
    kinds: list[_Kind],
    needs: Needs,
    span: float,
    late: float,
    share: float,
    prices: list[float],
    scale: float = 1.0,
) -> float:
    costs, paid = [np.full(needs.shape[1], late)], 0.0
    for kind, price in zip(kinds, prices, strict=True):
        paid += price * kind.nodes
        costs.append(kind.alone(needs) + price * np.dot(kind.rates(share), needs))
    return float(np.min(costs, axis=0).sum()) * scale - paid * (span + late)


def _by_queueing(kinds: list[_Kind], jobs: Sequence[Job], needs: Needs, share: float) -> float:
    """The sum of all completions on one server of the summed speed, least work left first."""
    rates = [kind.rates(share) for kind in kinds]
    costs = [max(rate[i] for rate in rates) for i in range(2)]
    # The most that a node of each kind can be worth, in nodes of the highest costs.
    speed = 0.0
    for kind, rate in zip(kinds, rates, strict=True):
        ratios = [most / own for most, own in zip(costs, rate, strict=True) if most > 0]
        speed += kind.nodes * max(ratios)
    work = np.dot(costs, needs) / speed
    left: list[float] = []
    total = now = 0.0
    for arrived, seconds in sorted(zip([job.arrived for job in jobs], work.tolist(), strict=True)):
        while left and now + left[0] <= arrived:
            now += heappop(left)
            total += now
        if left:
            # The smallest stays the smallest, so the heap stays valid.
            left[0] -= max(0.0, arrived - now)
        now = max(now, arrived)
        heappush(left, seconds)
        total -= arrived
    while left:
        now += heappop(left)
        total += now
    return total
