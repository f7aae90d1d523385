"""Where another tier becomes cheaper: prices by traffic, by the estimate, and their crossings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.tools.plan.answer import FleetOption, PlanAnswer, PlanQuestion, option_price
from gateway.tools.plan.catalogue import NodeType
from gateway.tools.plan.search import times_of
from gateway.tools.plan.trial import FleetPart
from gateway.tools.plan.workload import MOST_REQUESTS_PER_HOUR, SECONDS_PER_HOUR, Workload

STEPS = 160
"""Rates of a curve, evenly spaced by their logarithm."""

SPAN = 100.0
"""From so many times less to so many times more than the traffic that was asked about."""

LEAST_USE = 0.3
"""A plan that leaves more idle does so because its last node is one too many for so little work;
curves do not keep that."""


@dataclass(frozen=True, slots=True)
class PriceCurve:
    """The price of a month by requests an hour, of fleets of one kind."""

    label: str
    rates: tuple[float, ...]
    prices: tuple[float, ...]
    use: float
    """Share of the capacity that it is used to at most."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where one kind of fleet becomes cheaper than another. Requests an hour; None: nowhere."""

    cheaper: str
    than: str
    first: float | None
    """The least rate at which it is."""
    stays: float | None
    """The rate from which on it always is, as far as the curves go."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Curves of the cheapest fleets of each tier and of the hybrid, and their crossings."""

    curves: tuple[PriceCurve, ...]
    crossings: tuple[Crossing, ...]
    asked: float

    def as_dict(self) -> dict[str, object]:
        """For scripts: without the curves' points."""
        return {
            "source": "estimate",
            "crossings": [
                {
                    "cheaper": one.cheaper,
                    "than": one.than,
                    "first_requests_per_hour": one.first,
                    "stays_from_requests_per_hour": one.stays,
                }
                for one in self.crossings
            ],
        }


def break_even(found: PlanAnswer) -> BreakEven | None:
    """Compare the tiers over a range of traffic; None without two tiers that have prices.

    Each type is used to the share of its capacity that the plan found for it. Of a tier the
    cheapest type counts at each rate.
    """
    question = found.question
    if question.workload.backlog_hours is not None:
        return None
    priced = [one for one in found.options if one.price.per_hour is not None and not one.rejected]
    equal = [one for one in priced if len(one.parts) == 1]
    by_tier = {tier: [one for one in equal if one.tiers == {tier}] for tier in ("cpu", "gpu")}
    if not by_tier["cpu"] or not by_tier["gpu"]:
        return None
    asked = question.workload.requests_per_hour
    rates = _rates(asked)
    cpu = _curve(question, "CPU nodes", by_tier["cpu"], rates)
    gpu = _curve(question, "GPU nodes", by_tier["gpu"], rates)
    curves = [cpu, gpu]
    hybrid = next((one for one in priced if len(one.parts) > 1), None)
    if hybrid is not None:
        curves.append(_hybrid_curve(question, hybrid, equal, rates))
    crossings = [_crossing(other, cpu) for other in curves[1:]]
    return BreakEven(tuple(curves), tuple(crossings), asked)


def _rates(asked: float) -> tuple[float, ...]:
    least = max(asked / SPAN, 1e-3)
    most = min(asked * SPAN, MOST_REQUESTS_PER_HOUR)
    return tuple(least * (most / least) ** (step / STEPS) for step in range(STEPS + 1))


def count_for(node_type: NodeType, workload: Workload, use: float) -> int:
    """Machines of a type that are used to this share of their capacity at most."""
    capacity = times_of(node_type, workload).capacity * node_type.servers
    return max(1, math.ceil(workload.arrivals / (capacity * use) - 1e-9))


def _planned_use(question: PlanQuestion, option: FleetOption) -> float:
    """The use that a plan's number of nodes stands for."""
    if option.trial is None or not question.goal.is_timed:
        return question.goal.use
    return min(max(option.use, LEAST_USE), question.goal.use)


def _month(question: PlanQuestion, parts: Sequence[FleetPart], rate: float) -> float:
    asked = PlanQuestion(
        question.workload.with_requests(rate), question.goal, question.types, question.price_per_kwh
    )
    return option_price(asked, parts, None).month or 0.0


def _curve(
    question: PlanQuestion, label: str, options: Sequence[FleetOption], rates: Sequence[float]
) -> PriceCurve:
    uses = [_planned_use(question, one) for one in options]
    prices = []
    for rate in rates:
        workload = question.workload.with_requests(rate)
        prices.append(
            min(
                _month(
                    question,
                    (FleetPart(one.parts[0].node_type, _count(one, workload, use)),),
                    rate,
                )
                for one, use in zip(options, uses, strict=True)
            )
        )
    return PriceCurve(label, tuple(rates), tuple(prices), max(uses))


def _count(option: FleetOption, workload: Workload, use: float) -> int:
    return count_for(option.parts[0].node_type, workload, use)


def _hybrid_curve(
    question: PlanQuestion,
    hybrid: FleetOption,
    equal: Sequence[FleetOption],
    rates: Sequence[float],
) -> PriceCurve:
    """One GPU node, and CPU nodes for what it can't do."""
    cpu, gpu = (part.node_type for part in hybrid.parts)
    uses = {one.parts[0].node_type.name: _planned_use(question, one) for one in equal}
    cpu_use = uses.get(cpu.name, question.goal.use)
    gpu_use = uses.get(gpu.name, question.goal.use)
    prices = []
    for rate in rates:
        workload = question.workload.with_requests(rate)
        gpu_rate = times_of(gpu, workload).capacity * gpu.servers * gpu_use
        left = (workload.arrivals - gpu_rate) * SECONDS_PER_HOUR / workload.peak
        parts = [FleetPart(gpu, 1)]
        if left > 0:
            parts.append(FleetPart(cpu, count_for(cpu, workload.with_requests(left), cpu_use)))
        else:
            parts.append(FleetPart(cpu, 1))
        prices.append(_month(question, parts, rate))
    return PriceCurve("hybrids", tuple(rates), tuple(prices), min(cpu_use, gpu_use))


def _crossing(cheaper: PriceCurve, than: PriceCurve) -> Crossing:
    below = [one < other for one, other in zip(cheaper.prices, than.prices, strict=True)]
    first = next((rate for rate, is_below in zip(than.rates, below, strict=True) if is_below), None)
    stays = None
    for rate, is_below in zip(reversed(than.rates), reversed(below), strict=True):
        if not is_below:
            break
        stays = rate
    return Crossing(cheaper.label, than.label, first, stays)


def plot_break_even(path: Path, found: BreakEven, currency: str) -> None:
    """Draw the curves; the suffix gives the format.

    Needs the extra `plots`. Raises ValueError for an unknown suffix, and OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for curve in found.curves:
        axes.plot(curve.rates, curve.prices, label=curve.label, drawstyle="steps-mid")
    axes.axvline(found.asked, color="black", linestyle=":", linewidth=1)
    axes.annotate("asked", (found.asked, 0.02), xycoords=("data", "axes fraction"), fontsize=8)
    for one in found.crossings:
        if one.stays is not None and one.stays > found.curves[0].rates[0]:
            axes.axvline(one.stays, color="grey", linestyle="--", linewidth=0.8)
            axes.annotate(
                f"{one.cheaper} cheaper from {one.stays:,.0f}",
                (one.stays, 0.97),
                xycoords=("data", "axes fraction"),
                rotation=90,
                va="top",
                fontsize=7,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("requests an hour")
    axes.set_ylabel(f"{currency} a month".strip())
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path)
