"""Four ways to deploy, compared: one node alone, one behind the queue, several, and a hybrid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.tools.plan.answer import FleetOption, PlanAnswer, option_price, try_hybrid, use_of
from gateway.tools.plan.catalogue import NodeType
from gateway.tools.plan.pricing import price_by_share, price_of_all
from gateway.tools.plan.search import meets_goal, why_impossible
from gateway.tools.plan.trial import (
    DIRECT,
    GATEWAY,
    FleetPart,
    FleetTrial,
    OutOfTimeError,
    TimeLimit,
    try_fleet,
)

Way = Literal["single", "queue", "balanced", "hybrid"]

Verdict = Literal["best", "works", "no"]

MOST_WAITING_ALONE = 0.05
"""Share of requests that may wait in a server without a queue in front: nobody orders or bounds
those waits."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One way, and whether it works."""

    way: Way
    fleet: str
    verdict: Verdict
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
    """The decision matrix. Among the ways that work the cheapest is best, and of equals the first.

    `single` and `queue` are one node of the type that the cheapest fleet of equal nodes has.
    """
    base = next((one for one in found.options if len(one.parts) == 1), None)
    if base is None:
        return []
    node_type = base.parts[0].node_type
    rows = [
        _one_node(found, node_type, "single", limit),
        _one_node(found, node_type, "queue", limit),
        _balanced(found, base),
        _hybrid(found, limit),
    ]
    working = [row for row in rows if row.verdict == "works"]
    if not working:
        return rows
    # min keeps the first of equals: fewer parts.
    best = min(working, key=lambda row: (row.per_month is None, row.per_month or 0.0))
    return [
        row
        if row is not best
        else Deployment(row.way, row.fleet, "best", row.reason, row.trial, row.per_month)
        for row in rows
    ]


def _one_node(found: PlanAnswer, node_type: NodeType, way: Way, limit: TimeLimit) -> Deployment:
    question = found.question
    workload, goal = question.workload, question.goal
    parts = (FleetPart(node_type, 1),)
    name = f"1 x {node_type.name}"
    month = option_price(question, parts, None).month
    use = use_of(parts, workload)
    if impossible := why_impossible(node_type, question.trace(), goal):
        return Deployment(way, name, "no", impossible, per_month=month)
    if use >= 1.0:
        reason = (
            f"the busiest hour brings {use:.2f} times what it can do: the queue grows by "
            f"{workload.arrivals * 3600 * (1 - 1 / use):,.0f} requests an hour"
        )
        if workload.backlog_hours is not None:
            reason = f"would take {use:.2f} times as long as there is time"
        elif way == "queue" and use / workload.peak < 1.0:
            reason += "; enough for the mean hour, so only for work that can wait (class batch)"
        return Deployment(way, name, "no", reason, per_month=month)
    backlog = workload.requests_per_hour if workload.backlog_hours is not None else None
    policy = DIRECT if way == "single" else GATEWAY
    try:
        trace = question.trace(node_type.servers * node_type.slots)
        trial = try_fleet(
            parts,
            trace,
            limit,
            backlog=backlog,
            policy=policy,
            seed=question.seed,
            warm=question.warm,
        )
    except OutOfTimeError as error:
        return Deployment(way, name, "no", f"not simulated: {error}", per_month=month)
    missed = goal.misses(trial.ttft.p95, trial.completion.p95)
    share = f"{trial.waiting_share:.0%} of the requests wait, {trial.wait.mean:.1f} s in the mean"
    verdict: Verdict = "works"
    if missed or not meets_goal(trial, workload, goal):
        verdict, reason = "no", f"{share}: {', '.join(missed) or 'not done in time'}"
    elif not goal.is_timed and backlog is None and use > goal.most_use:
        verdict = "no"
        reason = f"{share}: it is used to {use:.0%}, more than the {goal.most_use:.0%} planned with"
    elif way == "single" and trial.waiting_share > MOST_WAITING_ALONE:
        verdict = "no"
        reason = (
            f"{share}, in the server, where nothing orders or bounds it (more than "
            f"{MOST_WAITING_ALONE:.0%})"
        )
    elif way == "single":
        reason = f"{share}; simplest, and down when the machine is"
    else:
        reason = f"{share}, in order of class and fair; down when the machine is"
    return Deployment(way, name, verdict, reason, trial, month)


def _balanced(found: PlanAnswer, option: FleetOption) -> Deployment:
    if option.rejected:
        return Deployment(
            "balanced",
            option.name,
            "no",
            option.rejected,
            option.trial,
            option.price.month,
        )
    question, part = found.question, option.parts[0]
    if part.count > 1:
        left = use_of((FleetPart(part.node_type, part.count - 1),), question.workload)
        after = "the rest could do it" if left < 1.0 else "the rest would be overloaded"
        reason = f"used to {option.use:.0%}; if one fails, {after} ({left:.0%})"
        return Deployment(
            "balanced", option.name, "works", reason, option.trial, option.price.month
        )
    parts = (FleetPart(part.node_type, 2),)
    price = option_price(question, parts, None)
    reason = "one is enough; a second only keeps it up when one fails"
    return Deployment("balanced", f"2 x {part.node_type.name}", "works", reason, None, price.month)


def _hybrid(found: PlanAnswer, limit: TimeLimit) -> Deployment:
    option = next((one for one in found.options if len(one.parts) > 1), None)
    if option is None:
        cpu, gpu = found.of_tiers("cpu"), found.of_tiers("gpu")
        if cpu is not None and gpu is not None:
            option = try_hybrid(
                found.question, cpu.parts[0].node_type, gpu.parts[0].node_type, cpu.machines, limit
            )
    if option is None or option.trial is None:
        reason = "the catalogue needs a type of each tier that can be simulated"
        return Deployment("hybrid", "-", "no", reason)
    if option.rejected:
        return Deployment(
            "hybrid", option.name, "no", option.rejected, option.trial, option.price.month
        )
    reason = f"{option.trial.shares[-1].requests:.0%} of the requests on the GPU"
    prices = [part.node_type.price for part in option.parts]
    if all(price.per_hour for price in prices):
        shares = [
            (share.requests, price.per_hour or 0.0)
            for share, price in zip(option.trial.shares, prices, strict=True)
        ]
        each = price_by_share(shares)
        kinds = price_of_all(shares)
        reason += (
            f"; weighted by these shares one hour of each kind is {each:.2f}, but both run, used "
            f"or not: {kinds:.2f}"
        )
    return Deployment("hybrid", option.name, "works", reason, option.trial, option.price.month)
