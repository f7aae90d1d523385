"""The answer: which fleets meet the goal, at what price, and the cheapest of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.tools.plan.catalogue import NodeType
from gateway.tools.plan.pricing import FleetPrice, PricedPart, fleet_price
from gateway.tools.plan.search import (
    FoundFleet,
    Goal,
    estimated,
    find_fleet,
    least_count,
    least_that,
    meets_goal,
    times_of,
)
from gateway.tools.plan.trial import (
    MOST_SIMULATED_NODES,
    FleetPart,
    FleetTrial,
    OutOfTimeError,
    TimeLimit,
    fleet_name,
    hours,
    try_fleet,
)
from gateway.tools.plan.workload import Workload, make_trace
from gateway.tools.simulate.trace import Trace

SIMULATED_TYPES = 3
"""Types that are simulated: the cheapest by their least number. Others are if they may be the
cheapest of their tier."""

DEFAULT_REQUESTS = 3000
"""Requests of a trial."""

MOST_TRIAL_REQUESTS = 1_000_000

REQUESTS_PER_SLOT = 20
"""Requests of a backlog's sample for each slot, so that its end does not weigh."""


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What a plan is asked."""

    workload: Workload
    goal: Goal
    types: tuple[NodeType, ...]
    price_per_kwh: float = 0.0
    requests: int = DEFAULT_REQUESTS
    """Of a trial."""
    seed: int = 1
    warm: bool = False
    """Whether the gateway knows the nodes' speeds from the start."""
    recorded: Trace | None = None
    """A recorded trace, to be played in place of made-up requests."""

    def trace(self, slots: int = 0) -> Trace:
        """The requests of a trial."""
        if self.recorded is not None:
            return self.recorded
        requests = self.requests
        if self.workload.backlog_hours is not None:
            requests = max(requests, REQUESTS_PER_SLOT * slots)
            requests = max(1, min(requests, math.ceil(self.workload.requests_per_hour)))
        return make_trace(self.workload, requests, self.seed)


@dataclass(frozen=True, slots=True)
class FleetOption:
    """A fleet that could be run, with its latency and its price."""

    parts: tuple[FleetPart, ...]
    use: float
    """Share of the capacity that is used in the busiest hour."""
    trial: FleetTrial | None
    """None: only estimated."""
    price: FleetPrice
    found: FoundFleet | None = None
    """How its number was found, if its nodes are equal."""
    rejected: str = ""
    """Why it does not meet the goal; empty: it does."""

    @property
    def name(self) -> str:
        """Such as `3 x cpu-16`."""
        return fleet_name(self.parts)

    @property
    def machines(self) -> int:
        """All machines."""
        return sum(part.count for part in self.parts)

    @property
    def tiers(self) -> frozenset[str]:
        """The tiers of its parts."""
        return frozenset(part.node_type.tier for part in self.parts)

    @property
    def order(self) -> tuple[float, int]:
        """Sorts options: by price, without prices by number."""
        hour = self.price.per_hour
        return (math.inf if hour is None else hour, self.machines)


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """All options, the cheapest first; those that miss the goal last."""

    question: PlanQuestion
    options: tuple[FleetOption, ...]
    trials: int
    notes: tuple[str, ...] = field(default=())

    @property
    def best(self) -> FleetOption | None:
        """The cheapest option that meets the goal; None: there is none."""
        return next((one for one in self.options if not one.rejected), None)

    def of_tiers(self, *tiers: str) -> FleetOption | None:
        """The cheapest that meets the goal with parts of exactly these tiers."""
        wanted = frozenset(tiers)
        return next((one for one in self.options if not one.rejected and one.tiers == wanted), None)


def answer(question: PlanQuestion, limit: TimeLimit) -> PlanAnswer:
    """Find what each type would take, simulate those that may be the cheapest, and the hybrid."""
    options: list[FleetOption] = []
    best = {"cpu": math.inf, "gpu": math.inf}
    simulated = 0
    for hour, node_type in sorted(_least_prices(question), key=lambda one: one[0]):
        if simulated >= SIMULATED_TYPES and hour >= best[node_type.tier]:
            options.append(_estimate_only(question, node_type))
            continue
        option = _searched(question, node_type, limit)
        options.append(option)
        if option.trial is not None:
            simulated += 1
        if not option.rejected and option.price.per_hour is not None:
            best[node_type.tier] = min(best[node_type.tier], option.price.per_hour)
    options += _hybrids(question, options, limit)
    notes = [
        f"{one.name}: not simulated to the end: {one.found.why_estimated}"
        for one in options
        if one.found is not None and one.found.why_estimated
    ]
    options.sort(key=lambda one: (bool(one.rejected), one.trial is None, one.order))
    return PlanAnswer(question, tuple(options), limit.trials, tuple(dict.fromkeys(notes)))


def _least_prices(question: PlanQuestion) -> list[tuple[float, NodeType]]:
    """Each type with the price of an hour of the least number that could do the work."""
    found = []
    for node_type in question.types:
        count = least_count(node_type, question.workload, question.goal)
        price = option_price(question, (FleetPart(node_type, count),), None)
        found.append((math.inf if price.per_hour is None else price.per_hour, node_type))
    return found


def _searched(question: PlanQuestion, node_type: NodeType, limit: TimeLimit) -> FleetOption:
    count = least_count(node_type, question.workload, question.goal)
    slots = min(count * node_type.servers, MOST_SIMULATED_NODES) * node_type.slots
    found = find_fleet(
        node_type,
        question.workload,
        question.goal,
        question.trace(slots),
        limit,
        question.seed,
        warm=question.warm,
    )
    return _option(question, found)


def _estimate_only(question: PlanQuestion, node_type: NodeType) -> FleetOption:
    """What a type takes that can't be the cheapest: by the estimate alone."""
    workload = question.workload
    count = least_count(node_type, workload, question.goal)
    guess = estimated(node_type, count, workload)
    return _option(
        question, FoundFleet(node_type, count, times_of(node_type, workload), guess, None)
    )


def _option(question: PlanQuestion, found: FoundFleet) -> FleetOption:
    price = option_price(question, found.parts, found.trial)
    return FleetOption(
        found.parts, found.estimate.utilisation, found.trial, price, found, found.impossible
    )


def use_of(parts: Sequence[FleetPart], workload: Workload) -> float:
    """Share of a fleet's capacity that the busiest hour uses."""
    capacity = math.fsum(
        part.servers * times_of(part.node_type, workload).capacity for part in parts
    )
    return workload.arrivals / capacity


def option_price(
    question: PlanQuestion, parts: Sequence[FleetPart], trial: FleetTrial | None
) -> FleetPrice:
    """What a fleet costs in a mean hour; of a backlog: in an hour in which it works."""
    workload = question.workload
    use = use_of(parts, workload) / workload.peak
    served = workload.requests_per_hour
    if workload.backlog_hours is not None:
        use = 1.0
        served /= hours(trial.seconds) if trial is not None else workload.backlog_hours
    capacities = [part.servers * times_of(part.node_type, workload).capacity for part in parts]
    priced = []
    for place, part in enumerate(parts):
        prompt_share = completion_share = capacities[place] / sum(capacities)
        if trial is not None:
            prompt_share = trial.shares[place].prompt_tokens
            completion_share = trial.shares[place].completion_tokens
        busy = use * (prompt_share + completion_share) / 2 * sum(capacities) / capacities[place]
        priced.append(
            PricedPart(
                part.node_type.price,
                part.count,
                busy,
                served * workload.prompt * prompt_share,
                served * workload.completion * completion_share,
            )
        )
    return fleet_price(priced, question.price_per_kwh)


def _hybrids(
    question: PlanQuestion, options: Sequence[FleetOption], limit: TimeLimit
) -> list[FleetOption]:
    """One of the cheapest GPU type beside as few as possible of the cheapest CPU type."""
    ranked = sorted((one for one in options if one.trial is not None), key=lambda one: one.order)
    cpu = next((one for one in ranked if one.tiers == {"cpu"}), None)
    gpu_types = [one.parts[0].node_type for one in options if one.tiers == {"gpu"}]
    if cpu is None or not gpu_types:
        return []
    cheapest = min(
        gpu_types,
        key=lambda one: option_price(question, (FleetPart(one, 1),), None).per_hour or math.inf,
    )
    option = try_hybrid(question, cpu.parts[0].node_type, cheapest, cpu.machines, limit)
    return [] if option is None else [option]


def try_hybrid(
    question: PlanQuestion, cpu: NodeType, gpu: NodeType, most: int, limit: TimeLimit
) -> FleetOption | None:
    """As few CPU nodes, from 1 to `most`, as meet the goal beside one GPU node.

    All requests may go to both: each goes where it is expected to end first. None: none was tried.
    """
    workload, goal = question.workload, question.goal
    if most * cpu.servers + gpu.servers > MOST_SIMULATED_NODES:
        return None
    slots = most * cpu.servers * cpu.slots + gpu.slots
    trace = question.trace(slots)
    trials: dict[int, FleetTrial] = {}

    def fleet(count: int) -> tuple[FleetPart, ...]:
        return (FleetPart(cpu, count), FleetPart(gpu, 1))

    def meets(count: int) -> bool:
        if use_of(fleet(count), workload) > goal.use and workload.backlog_hours is None:
            return False
        if count not in trials:
            backlog = workload.requests_per_hour if workload.backlog_hours is not None else None
            trials[count] = try_fleet(
                fleet(count),
                trace,
                limit,
                backlog=backlog,
                seed=question.seed,
                warm=question.warm,
            )
        return meets_goal(trials[count], workload, goal)

    rejected = ""
    try:
        count = least_that(meets, 1, most)
    except OutOfTimeError:
        count = min((one for one in trials if meets(one)), default=None)
    if count is None:
        if most not in trials:
            return None
        count = most
        missed = goal.misses(trials[most].ttft.p95, trials[most].completion.p95)
        rejected = ", ".join(missed) or "not done in time"
    trial = trials[count]
    parts = fleet(count)
    return FleetOption(
        parts,
        use_of(parts, workload),
        trial,
        option_price(question, parts, trial),
        rejected=rejected,
    )
