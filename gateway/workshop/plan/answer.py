"""The answer: which fleets meet the goal, at what price; ways to deploy; where GPUs are cheaper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gateway.local.memory import format_gib
from gateway.workshop.plan import search
from gateway.workshop.plan.catalogue import HOURS_PER_MONTH, NodeType
from gateway.workshop.plan.search import (
    SECONDS_PER_HOUR,
    WARM_UP_SHARE,
    FleetOption,
    FleetPart,
    FleetTrial,
    OutOfTimeError,
    PlanQuestion,
    TimeLimit,
)
from gateway.workshop.simulate.fleets import SPEED_MEMORY

# Types that are simulated: the cheapest by their least number. Others are if they may be the
# cheapest of their tier.
SIMULATED_TYPES = 3


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """All options, the cheapest first; those that miss the goal last."""

    question: PlanQuestion
    options: tuple[FleetOption, ...]
    trials: int
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> FleetOption | None:
        """The cheapest option that meets the goal; None: there is none."""
        return next((one for one in self.options if not one.rejected), None)


def answer(question: PlanQuestion, limit: TimeLimit) -> PlanAnswer:
    """Find what each type would take, simulate those that may be the cheapest, and the hybrid."""

    def least_price(node_type: NodeType) -> float:
        count = search.least_count(node_type, question.workload, question.goal)
        return _hour(question, FleetPart(node_type, count))

    options: list[FleetOption] = []
    best = {"cpu": math.inf, "gpu": math.inf}
    simulated = 0
    for node_type in sorted(question.types, key=least_price):
        tier = node_type.tier
        is_dear = simulated >= SIMULATED_TYPES and least_price(node_type) >= best[tier]
        option = search.find_fleet(question, node_type, None if is_dear else limit)
        options.append(option)
        simulated += option.trial is not None
        if not option.rejected:
            best[tier] = min(best[tier], option.order[0])
    if (hybrid := _cheapest_hybrid(question, options, limit)) is not None:
        options.append(hybrid)
    notes = [
        f"{one.name}: not simulated to the end: {one.why_estimated}"
        for one in options
        if one.why_estimated
    ]
    options.sort(key=lambda one: (bool(one.rejected), one.trial is None, one.order))
    return PlanAnswer(question, tuple(options), limit.trials, tuple(dict.fromkeys(notes)))


def _hour(question: PlanQuestion, part: FleetPart) -> float:
    """The price of an hour, by the estimate; infinite: not known."""
    hour = search.option_price(question, (part,), None).per_hour
    return math.inf if hour is None else hour


def _cheapest_hybrid(
    question: PlanQuestion, options: Sequence[FleetOption], limit: TimeLimit
) -> FleetOption | None:
    """One of the cheapest GPU type beside as few of the cheapest CPU type as meet the goal.

    All requests may go to both: each goes where it is expected to end first. None: none was tried.
    """
    cpus = [one for one in options if one.trial is not None and one.tiers == {"cpu"}]
    gpu_types = [one.parts[0].node_type for one in options if one.tiers == {"gpu"}]
    if not cpus or not gpu_types:
        return None
    alone = min(cpus, key=lambda one: one.order)
    cpu, most = alone.parts[0].node_type, alone.machines
    gpu = min(gpu_types, key=lambda one: _hour(question, FleetPart(one, 1)) or math.inf)
    workload, goal = question.workload, question.goal
    if most * cpu.servers + gpu.servers > question.most_nodes:
        return None

    def fleet(count: int) -> tuple[FleetPart, ...]:
        return (FleetPart(cpu, count), FleetPart(gpu, 1))

    def can_do_it(count: int) -> bool:
        return workload.backlog is not None or search.use_of(fleet(count), workload) <= goal.use

    least = search.least_that(can_do_it, 1, most)
    if least is None:
        return None
    trace = question.trace(most * cpu.servers * cpu.slots + gpu.slots)
    return search.least_fleet(question, fleet, least, most, trace, limit)


# Ways to deploy.

# Share of requests that may wait in a server without a queue in front: nobody orders or bounds
# those waits.
MOST_WAITING_ALONE = 0.05


@dataclass(frozen=True, slots=True)
class Deployment:
    """One way to deploy, and whether it works."""

    way: Literal["single", "queue", "balanced", "hybrid"]
    fleet: str
    verdict: Literal["best", "works", "no"]
    reason: str
    trial: FleetTrial | None = None
    per_month: float | None = None

    def as_dict(self) -> dict[str, object]:
        """For scripts."""
        return {
            "deployment": self.way,
            "fleet": self.fleet,
            "verdict": self.verdict,
            "reason": self.reason,
            "per_month": self.per_month,
            "ttft_p95": None if self.trial is None else self.trial.ttft.p95,
            "completion_p95": None if self.trial is None else self.trial.completion.p95,
        }


def compare_deployments(found: PlanAnswer, limit: TimeLimit) -> list[Deployment]:
    """Compare one node alone, one behind the queue, several, and a hybrid.

    Among the ways that work the cheapest is best, and of equals the first. `single` and `queue` are
    one node of the type that the cheapest fleet of equal nodes has.
    """
    base = next(one for one in found.options if len(one.parts) == 1)
    node_type = base.parts[0].node_type
    rows = [
        _one_node(found.question, node_type, "single", limit),
        _one_node(found.question, node_type, "queue", limit),
        _balanced(found.question, base),
        _hybrid(found),
    ]
    working = [row for row in rows if row.verdict == "works"]
    if working:
        # min keeps the first of equals: fewer parts.
        best = min(working, key=lambda row: (row.per_month is None, row.per_month or 0.0))
        rows[rows.index(best)] = replace(best, verdict="best")
    return rows


def _one_node(
    question: PlanQuestion, node_type: NodeType, way: Literal["single", "queue"], limit: TimeLimit
) -> Deployment:
    workload, goal = question.workload, question.goal
    parts = (FleetPart(node_type, 1),)
    month = search.option_price(question, parts, None).month
    use, trial = search.use_of(parts, workload), None

    def row(reason: str, verdict: Literal["works", "no"] = "no") -> Deployment:
        return Deployment(way, f"1 x {node_type.name}", verdict, reason, trial, month)

    if impossible := search.why_impossible(node_type, question.trace(), goal, workload.models):
        return row(impossible)
    if use >= 1.0:
        reason = (
            f"the busiest hour brings {use:.2f} times what it can do: the queue grows by "
            f"{workload.arrivals * 3600 * (1 - 1 / use):,.0f} requests an hour"
        )
        if workload.backlog is not None:
            reason = f"would take {use:.2f} times as long as there is time"
        elif way == "queue" and use / workload.peak < 1.0:
            reason += "; enough for the mean hour, so only for work that can wait (class batch)"
        return row(reason)
    try:
        trace = question.trace(node_type.servers * node_type.slots)
        trial = question.play(
            parts, trace, limit, search.DIRECT if way == "single" else search.GATEWAY
        )
    except OutOfTimeError as error:
        return row(f"not simulated: {error}")
    share = f"{trial.waiting_share:.0%} of the requests wait, {trial.wait.mean:.1f} s in the mean"
    missed = goal.misses(trial)
    if missed or not question.is_met_by(trial):
        return row(f"{share}: {', '.join(missed) or 'not done in time'}")
    if not goal.is_timed and workload.backlog is None and use > goal.most_use:
        too_much = f"used to {use:.0%}, more than the {goal.most_use:.0%} planned with"
        return row(f"{share}: it is {too_much}")
    if way == "queue":
        return row(f"{share}, in order of class and fair; down when the machine is", "works")
    if trial.waiting_share > MOST_WAITING_ALONE:
        where = "in the server, where nothing orders or bounds it"
        return row(f"{share}, {where} (more than {MOST_WAITING_ALONE:.0%})")
    return row(f"{share}; simplest, and down when the machine is", "works")


def _balanced(question: PlanQuestion, option: FleetOption) -> Deployment:
    part = option.parts[0]
    row = Deployment("balanced", option.name, "works", "", option.trial, option.price.month)
    if option.rejected:
        return replace(row, verdict="no", reason=option.rejected)
    if part.count > 1:
        left = search.use_of((FleetPart(part.node_type, part.count - 1),), question.workload)
        after = "the rest could do it" if left < 1.0 else "the rest would be overloaded"
        return replace(row, reason=f"used to {option.use:.0%}; if one fails, {after} ({left:.0%})")
    month = search.option_price(question, (FleetPart(part.node_type, 2),), None).month
    reason = "one is enough; a second only keeps it up when one fails"
    return Deployment("balanced", f"2 x {part.node_type.name}", "works", reason, None, month)


def _hybrid(found: PlanAnswer) -> Deployment:
    option = next((one for one in found.options if len(one.parts) > 1), None)
    if option is None or option.trial is None:
        reason = "the catalogue needs a type of each tier that can be simulated"
        return Deployment("hybrid", "-", "no", reason)
    row = Deployment("hybrid", option.name, "works", "", option.trial, option.price.month)
    if option.rejected:
        return replace(row, verdict="no", reason=option.rejected)
    reason = f"{option.trial.shares[-1].requests:.0%} of the requests on the GPU"
    hours = [part.node_type.per_hour for part in option.parts]
    if all(hours):
        prices = [hour or 0.0 for hour in hours]
        shares = [share.requests for share in option.trial.shares]
        by_share = sum(share * price for share, price in zip(shares, prices, strict=True))
        reason += (
            f"; weighted by these shares one hour of each kind is {by_share:.2f}, but both run, "
            f"used or not: {sum(prices):.2f}"
        )
    return replace(row, reason=reason)


# Where another tier becomes cheaper: prices by traffic, by the estimate, and their crossings.

STEPS = 160  # rates of a curve, evenly spaced by their logarithm
SPAN = 100.0  # from so many times less to so many times more than the traffic that was asked about
# A plan that leaves more idle does so because its last node is one too many for so little work;
# curves do not keep that.
LEAST_USE = 0.3


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Prices of the cheapest fleets of each tier and of the hybrid, and where they cross."""

    rates: tuple[float, ...]  # requests an hour
    prices: Mapping[str, tuple[float, ...]]  # of a month at these rates, by the kind of fleet
    asked: float

    def crossing(self, kind: str) -> tuple[float | None, float | None]:
        """The first rate at which a kind is cheaper than CPU nodes, and from which on it stays so.

        None: there is none, as far as the curves go.
        """
        pairs = zip(self.prices[kind], self.prices["CPU nodes"], strict=True)
        cheaper = [one < other for one, other in pairs]
        stays = len(cheaper) - [*reversed(cheaper), False].index(False)
        first = self.rates[cheaper.index(True)] if any(cheaper) else None
        return first, (self.rates[stays] if stays < len(cheaper) else None)

    @property
    def others(self) -> list[str]:
        """The kinds that are compared with CPU nodes."""
        return [kind for kind in self.prices if kind != "CPU nodes"]

    def as_dict(self) -> dict[str, object]:
        """For scripts: without the curves' points."""
        crossings = []
        for kind in self.others:
            first, stays = self.crossing(kind)
            rates = {"first_requests_per_hour": first, "stays_from_requests_per_hour": stays}
            crossings.append({"cheaper": kind, "than": "CPU nodes", **rates})
        return {"source": "estimate", "crossings": crossings}


def break_even(found: PlanAnswer) -> BreakEven | None:
    """Compare the tiers over a range of traffic; None without two tiers that have prices.

    Each type is used to the share of its capacity that the plan found for it. Of a tier the
    cheapest type counts at each rate. A hybrid is one GPU node, and CPU nodes for what it can't do.
    """
    question = found.question
    asked = question.workload.requests_per_hour
    priced = [one for one in found.options if one.price.per_hour is not None and not one.rejected]
    equal = [one for one in priced if len(one.parts) == 1]
    usual = question.goal.use
    # Each type is used to the share that the plan's number of nodes stands for.
    uses = {
        one.parts[0].node_type.name: usual
        if one.trial is None or not question.goal.is_timed
        else min(max(one.use, LEAST_USE), usual)
        for one in equal
    }
    cpus, gpus = ([one for one in equal if one.tiers == {tier}] for tier in ("cpu", "gpu"))
    if question.workload.backlog is not None or not cpus or not gpus:
        return None
    least, most = max(asked / SPAN, 1e-3), min(asked * SPAN, search.MOST_REQUESTS_PER_HOUR)
    rates = tuple(least * (most / least) ** (step / STEPS) for step in range(STEPS + 1))

    def month(parts: Sequence[FleetPart], rate: float) -> float:
        told = replace(question, workload=question.workload.with_requests(rate))
        return search.option_price(told, parts, None).month or 0.0

    def cheapest(options: Sequence[FleetOption], rate: float) -> float:
        workload = question.workload.with_requests(rate)
        return min(
            month([FleetPart(kind, search.count_for(kind, workload, uses[kind.name]))], rate)
            for kind in (one.parts[0].node_type for one in options)
        )

    def with_gpu(cpu: NodeType, gpu: NodeType, rate: float) -> float:
        workload = question.workload.with_requests(rate)
        done = FleetPart(gpu, 1).capacity(workload) * uses.get(gpu.name, usual)
        left = (workload.arrivals - done) * SECONDS_PER_HOUR / workload.peak
        count = 1
        if left > 0:
            left_over = workload.with_requests(left)
            count = search.count_for(cpu, left_over, uses.get(cpu.name, usual))
        return month([FleetPart(gpu, 1), FleetPart(cpu, count)], rate)

    prices = {
        "CPU nodes": tuple(cheapest(cpus, rate) for rate in rates),
        "GPU nodes": tuple(cheapest(gpus, rate) for rate in rates),
    }
    hybrid = next((one for one in priced if len(one.parts) > 1), None)
    if hybrid is not None:
        slow, fast = (part.node_type for part in hybrid.parts)
        prices["hybrids"] = tuple(with_gpu(slow, fast, rate) for rate in rates)
    return BreakEven(rates, prices, asked)


def plot_break_even(path: Path, found: BreakEven, currency: str) -> None:
    """Draw the curves; the suffix gives the format.

    Needs the extra `plots`. Raises ValueError for an unknown suffix, and OSError.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=90, layout="constrained")
    axes = figure.subplots()
    for label, prices in found.prices.items():
        axes.plot(found.rates, prices, label=label, drawstyle="steps-mid")
    axes.axvline(found.asked, color="black", linestyle=":", linewidth=1, label="asked")
    for kind in found.others:
        _, stays = found.crossing(kind)
        if stays is not None and stays > found.rates[0]:
            label = f"{kind} cheaper from {stays:,.0f}"
            axes.axvline(stays, color="grey", linestyle="--", linewidth=0.8, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("requests an hour")
    axes.set_ylabel(f"{currency} a month".strip())
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path)


# The answer in words, and for scripts.

SAME_PRICE = 0.1  # two prices that differ by less are the same, as a share


def pure_instances(question: PlanQuestion, option: FleetOption) -> tuple[float, int]:
    """The published sum, and rounded up: only written tokens, one request at a time, at full use.

    It leaves out the reading of prompts, slots that share a node, and that requests wait long
    before an instance is fully used.
    """
    workload = question.workload
    offered = workload.arrivals * workload.completion / option.parts[0].node_type.decode_tps
    return offered, max(1, math.ceil(offered - 1e-9))


def _per_million_tokens(per_hour: float, tokens_per_second: float) -> float:
    """Price of a million tokens from a machine that writes all the time: its least."""
    return per_hour / (tokens_per_second * SECONDS_PER_HOUR) * 1e6


def contradiction(per_hour: float, tokens_per_second: float, claimed: float) -> str:
    """What is wrong with a price of a million tokens that is claimed of a machine; or nothing."""
    least = _per_million_tokens(per_hour, tokens_per_second)
    if abs(claimed - least) <= SAME_PRICE * least:
        return ""
    return (
        f"{tokens_per_second:g} tokens/s at {per_hour:.2f} an hour are {least:.3g} a million "
        f"tokens, not {claimed:.2f}: a million take {1e6 / tokens_per_second / 3600:.1f} hours"
    )


def explain(question: PlanQuestion, option: FleetOption) -> dict[str, str]:
    """What each figure of a fleet comes from: lines, each with its word."""
    workload, part, trial = question.workload, option.parts[0], option.trial
    node_type, hours = part.node_type, workload.backlog_hours
    times = search.times_of(node_type, workload)
    per_second = f"{workload.arrivals:.4g} a second"
    pure, whole = pure_instances(question, option)
    asked = f"an hour x peak {workload.peak:g}" if hours is None else f"at once / {hours:g} h"
    lines = {
        "arrivals": f"{workload.requests_per_hour:,.10g} {asked} / 3,600 = {per_second}"
        + ("" if hours is None else " to be done"),
        "pure sum": f"{per_second} x {workload.completion:g} tokens / {node_type.decode_tps:g} "
        f"tokens/s = {pure:.2f}: {whole} instances of one slot",
        "left out": f"reading the prompts, and waiting: {whole} would be used to "
        f"{pure / whole:.0%}, and at full use the queue grows without end",
    }
    if workload.repeat:
        lines["cached"] = (
            f"{workload.repeat:.0%} of {workload.prompt:g} prompt tokens repeat: "
            f"{workload.uncached:g} are read"
        )
    if times.slots > 1:
        lines["slots share"] = (
            f"{times.slots} x {times.reading:.2f} s of reading, one after the other, + "
            f"{times.writing:.2f} s of writing x (1 + {times.batch_cost:g} x {times.slots - 1})"
            f" = {times.full:.2f} s with all busy, {times.alone:.2f} s alone"
        )
    lines["one server"] = (
        f"{times.slots} / {times.full:.2f} s = {times.capacity:.4g} requests a second, "
        f"{times.capacity * SECONDS_PER_HOUR:,.0f} an hour"
    )
    guess = option.estimate
    if guess is not None and hours is None:
        lines["use"] = (
            f"{workload.arrivals:.4g} / ({part.servers} x {times.capacity:.4g}) "
            f"= {option.use:.0%} of the capacity"
        )
        if math.isfinite(guess.wait):
            lines["estimate"] = (
                f"Erlang C: {guess.waiting_share:.3g} of the requests wait, at most; Allen-Cunneen "
                f"with Cs² {guess.service_scv:.2f}: {guess.wait:.3g} s in the mean"
            )
    if workload.models:
        memory = sum(one.memory for one in workload.models)
        lines["models"] = (
            f"{len(workload.models)} of {format_gib(memory)} in all; a mean request takes "
            f"{workload.work:.2f} times as long as one for a model of {format_gib(SPEED_MEMORY)}"
        )
        if trial is not None:
            each = trial.load_seconds / max(1, trial.loads)
            lines["models"] += f"; {trial.loads} loads of {each:.1f} s"
    if trial is not None:
        figures = (
            f" ({WARM_UP_SHARE:.0%} to warm up before): mean wait {trial.wait.mean:.3g} s ± "
            f"{trial.wait_error:.2g}, completion {trial.completion.mean:.3g} s ± "
            f"{trial.completion_error:.2g} (95 %)"
        )
        if hours is not None:
            done = trial.seconds / SECONDS_PER_HOUR
            figures = f": all {workload.requests_per_hour:,.10g} done in {done:.2f} h"
        lines["simulator"] = f"{trial.requests:,} requests through the real scheduler{figures}"
    return lines | _price_lines(question, option)


def _price_lines(question: PlanQuestion, option: FleetOption) -> dict[str, str]:
    price, node_type = option.price, option.parts[0].node_type
    if price.per_hour is None or price.per_million_tokens is None:
        return {"price": "unknown: the node has no price (--price-per-hour)"}
    hourly = [(part.count, part.node_type.per_hour or 0.0) for part in option.parts]
    sums = [f"{count} x {hour:.4g}" for count, hour in hourly]
    tokens = price.per_hour - price.electricity_per_hour
    tokens -= sum(count * hour for count, hour in hourly)
    if tokens > 1e-12:
        sums.append(f"{tokens:.4g} for tokens")
    if price.electricity_per_hour:
        sums.append(f"{price.electricity_per_hour:.4g} of electricity")
    each = f"{price.per_million_tokens:.4g} a million tokens, prompts included"
    if question.workload.peak != 1:
        each += ", of the mean hour"
    if node_type.per_hour:
        hour = node_type.per_hour / node_type.servers
        each += (
            f"; one slot that always writes {node_type.decode_tps:g} tokens/s at {hour:.4g} an "
            f"hour makes {_per_million_tokens(hour, node_type.decode_tps):.3g} a million written"
        )
    return {
        "price": f"{' + '.join(sums)} = {price.per_hour:.4g} an hour x {HOURS_PER_MONTH:g} = "
        f"{price.month or 0.0:,.2f} a month; all machines run, used or not",
        "per token": each,
    }


def headline(option: FleetOption) -> str:
    """The answer in a line."""
    cost = "price unknown" if option.price.month is None else f"{option.price.month:,.2f} a month"
    unsure = "" if option.trial is not None else " or more (estimated, not simulated)"
    return f"{option.name}{unsure}: {cost}"


def crossing_lines(found: BreakEven) -> list[str]:
    """Say where another kind of fleet is cheaper."""
    lines = []
    for kind in found.others:
        first, stays = found.crossing(kind)
        where = f"at no rate from {found.rates[0]:,.4g} to {found.rates[-1]:,.10g} requests an hour"
        if stays is not None:
            where = f"from {stays:,.4g} requests an hour on"
        elif first is not None:
            where = f"at some rates from {first:,.4g} requests an hour on"
        lines.append(f"{kind} are cheaper than CPU nodes {where} (by the estimate)")
    return lines


def as_dict(
    found: PlanAnswer, rows: Sequence[Deployment], crossing: BreakEven | None, currency: str
) -> dict[str, object]:
    """The answer for scripts: seconds, tokens, and the catalogue's currency."""
    best = found.best
    assert best is not None
    question = found.question
    offered, instances = pure_instances(question, best)
    return {
        "nodes": sum(part.servers for part in best.parts),
        "answer": best.as_dict(),
        "arithmetic": {
            "instances": instances,
            "offered": offered,
            "leaves_out": ["reading the prompts", "waiting, which has no bound at full use"],
            "lines": explain(question, best),
        },
        **question.as_dict(),
        "options": [one.as_dict() for one in found.options],
        "decisions": [row.as_dict() for row in rows],
        "break_even": None if crossing is None else crossing.as_dict(),
        "currency": currency,
        "simulations": found.trials,
        "notes": list(found.notes),
    }
