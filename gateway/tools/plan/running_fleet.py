"""A fleet that runs: its measured nodes and traffic, and what a change of either would do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.tools.plan.answer import PlanQuestion, option_price, use_of
from gateway.tools.plan.catalogue import MOST_SLOTS_OF_A_SERVER, NodeType, TokenPrice
from gateway.tools.plan.pricing import FleetPrice
from gateway.tools.plan.search import Goal, meets_goal
from gateway.tools.plan.trial import (
    MOST_SIMULATED_NODES,
    FleetPart,
    FleetTrial,
    OutOfTimeError,
    TimeLimit,
    fleet_name,
    try_fleet,
)
from gateway.tools.plan.workload import Workload

SAME_SPEED = 0.2
"""Nodes whose speeds differ by less, as a share, are of one kind."""

GOAL_FACTORS = (0.75, 1.5)
"""To what the goal is moved, as a multiple."""

SECONDS_PER_DAY = 86400.0

HOURS_PER_DAY = 24.0


class UnmeasuredFleetError(Exception):
    """The fleet's answers hold too little to plan with; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class MeasuredFleet:
    """The nodes of a gateway that get work, in kinds."""

    parts: tuple[FleetPart, ...]
    notes: tuple[str, ...]


def measured_fleet(nodes: Sequence[Mapping[str, Any]]) -> MeasuredFleet:
    """Sort the nodes of `GET /admin/nodes` into kinds of about equal speed.

    Nodes that get no work (disabled, standby, draining) are left out; one without a measured speed
    is taken to be like the others of its tier. Raises UnmeasuredFleetError.
    """
    notes: list[str] = []
    working = [
        node
        for node in nodes
        if node.get("enabled", True) and not node.get("standby") and not node.get("draining")
    ]
    if not working:
        raise UnmeasuredFleetError("the gateway has no node that gets work")
    measured = [node for node in working if _speeds(node) is not None]
    if not measured:
        raise UnmeasuredFleetError(
            "no node's speed is measured yet: send some requests, or give --tokens-per-second and "
            "--prefill-tokens-per-second"
        )
    kinds: list[tuple[NodeType, int]] = []
    for node in working:
        speeds = _speeds(node)
        if speeds is None:
            like = next((one for one in measured if one.get("tier") == node.get("tier")), None)
            like = like or measured[0]
            speeds = _speeds(like)
            notes.append(f"{node.get('name')} is not measured yet: taken to be like {like['name']}")
        assert speeds is not None
        kind = _kind(node, speeds)
        for place, (known, count) in enumerate(kinds):
            if _is_alike(known, kind):
                kinds[place] = (_merged(known, kind, count), count + 1)
                break
        else:
            kinds.append((kind, 1))
    parts = tuple(FleetPart(kind, count) for kind, count in kinds)
    return MeasuredFleet(parts, tuple(notes))


def _speeds(node: Mapping[str, Any]) -> tuple[float, float] | None:
    found = []
    for key in ("prefill_tps", "decode_tps"):
        value = node.get(key)
        sound = isinstance(value, int | float) and not isinstance(value, bool)
        if (
            not sound
            or not math.isfinite(float(value or 0))
            or not 1e-3 <= float(value or 0) <= 1e7
        ):
            return None
        found.append(float(value or 0))
    return found[0], found[1]


def _kind(node: Mapping[str, Any], speeds: tuple[float, float]) -> NodeType:
    slots = node.get("slots_total")
    per_token = node.get("cost_per_million_tokens")
    fields: dict[str, Any] = {
        "name": str(node.get("name", "node"))[:64],
        "tier": "gpu" if node.get("tier") == "gpu" else "cpu",
        "slots": max(1, min(int(slots), MOST_SLOTS_OF_A_SERVER)) if isinstance(slots, int) else 1,
        "prefill_tps": speeds[0],
        "decode_tps": speeds[1],
    }
    if isinstance(per_token, Mapping):
        fields["price_per_million_tokens"] = TokenPrice.model_validate(dict(per_token))
    else:
        # 0 is the inventory's default: nobody has said what it costs.
        fields["price_per_hour"] = node.get("cost_per_hour") or None
    return NodeType.model_validate(fields)


def _is_alike(one: NodeType, other: NodeType) -> bool:
    return (one.tier, one.slots, one.price) == (other.tier, other.slots, other.price) and all(
        abs(mine - theirs) <= SAME_SPEED * max(mine, theirs)
        for mine, theirs in (
            (one.prefill_tps, other.prefill_tps),
            (one.decode_tps, other.decode_tps),
        )
    )


def _merged(known: NodeType, other: NodeType, count: int) -> NodeType:
    """The kind with one node more: mean speeds."""
    return known.model_copy(
        update={
            "prefill_tps": (known.prefill_tps * count + other.prefill_tps) / (count + 1),
            "decode_tps": (known.decode_tps * count + other.decode_tps) / (count + 1),
        }
    )


def traffic_seconds(report: Mapping[str, Any], now: float) -> float:
    """Seconds until `now` (Unix time) from the first day in a report by day that had requests."""
    rows = report.get("rows")
    days = [row.get("day") for row in rows or () if isinstance(row, Mapping)]
    first = min((day for day in days if isinstance(day, str)), default="")
    try:
        began = datetime.fromisoformat(first).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return SECONDS_PER_DAY
    return max(3600.0, now - began)


def workload_of_usage(
    report: Mapping[str, Any], seconds: float, peak: float
) -> tuple[Workload, tuple[str, ...]]:
    """The traffic in a report of `GET /admin/usage?by=day` over so many seconds, and notes.

    `peak`: the busiest hour as a multiple of the mean hour of the busiest day, since the ledger's
    reports count days. Raises UnmeasuredFleetError.
    """
    total = report.get("total")
    total = total if isinstance(total, Mapping) else {}
    rows = report.get("rows")
    requests, prompt, cached, completion = (
        _count(total, key)
        for key in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    )
    if not requests or not completion:
        raise UnmeasuredFleetError(
            "the ledger has no request with tokens in that time: give --requests-per-hour, "
            "--prompt and --completion, or --trace"
        )
    mean = requests / (seconds / 3600.0)
    busiest = max(
        (_count(row, "requests") for row in rows or () if isinstance(row, Mapping)), default=0.0
    )
    days = seconds / SECONDS_PER_DAY
    day_factor = 1.0
    if days >= 2 and busiest:
        day_factor = max(1.0, busiest / HOURS_PER_DAY / mean)
    notes = (
        (
            f"from the ledger: {requests:,.0f} requests, {mean:,.1f} an hour; the busiest day "
            f"brought {day_factor:.2f} times the mean, its busiest hour is taken to "
            f"be {peak:g} times that (--peak)"
        ),
    )
    workload = Workload(
        mean,
        prompt / requests,
        max(1.0, completion / requests),
        repeat=min(0.999, cached / prompt) if prompt else 0.0,
        peak=min(1000.0, day_factor * peak),
    )
    return workload, notes


def _count(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change, and what comes of it."""

    change: str
    fleet: str
    use: float
    trial: FleetTrial | None
    price: FleetPrice
    missed: tuple[str, ...]
    """What is missed of the goal; empty: nothing."""

    def as_dict(self) -> dict[str, object]:
        """For scripts."""
        return {
            "change": self.change,
            "fleet": self.fleet,
            "utilisation": self.use,
            "simulated": None if self.trial is None else self.trial.as_dict(),
            "price": self.price.as_dict(),
            "missed": list(self.missed),
        }


def what_if(question: PlanQuestion, fleet: MeasuredFleet, limit: TimeLimit) -> list[WhatIf]:
    """The fleet as it is, with one node more or less of each kind, and with the goal moved."""
    if sum(part.servers for part in fleet.parts) > MOST_SIMULATED_NODES:
        raise UnmeasuredFleetError(f"more than {MOST_SIMULATED_NODES} nodes are not simulated")
    now = _tried(question, "as it is", fleet.parts, question.goal, limit)
    found = [now]
    for place, part in enumerate(fleet.parts):
        for change, count in (("one more", part.count + 1), ("one less", part.count - 1)):
            parts = tuple(
                one if other != place else FleetPart(part.node_type, count)
                for other, one in enumerate(fleet.parts)
            )
            parts = tuple(one for one in parts if one.count)
            if parts:
                name = f"{change} like {part.node_type.name}"
                found.append(_tried(question, name, parts, question.goal, limit))
    for factor in GOAL_FACTORS if question.goal.is_timed else ():
        goal = Goal(
            None if question.goal.ttft_p95 is None else question.goal.ttft_p95 * factor,
            None if question.goal.completion_p95 is None else question.goal.completion_p95 * factor,
        )
        missed = _missed(question, now.trial, now.use, goal)
        found.append(WhatIf(f"goal x {factor:g}", now.fleet, now.use, now.trial, now.price, missed))
    return found


def _tried(
    question: PlanQuestion,
    change: str,
    parts: Sequence[FleetPart],
    goal: Goal,
    limit: TimeLimit,
) -> WhatIf:
    use = use_of(parts, question.workload)
    trial = None
    if use < 1.0:
        try:
            trial = try_fleet(
                parts, question.trace(), limit, seed=question.seed, warm=question.warm
            )
        except OutOfTimeError:
            trial = None
    price = option_price(question, parts, trial)
    missed = _missed(question, trial, use, goal)
    return WhatIf(change, fleet_name(parts), use, trial, price, missed)


def _missed(
    question: PlanQuestion, trial: FleetTrial | None, use: float, goal: Goal
) -> tuple[str, ...]:
    if use >= 1.0:
        return (f"overloaded: {use:.2f} times what it can do",)
    if trial is None:
        return ("not simulated: out of time",)
    if meets_goal(trial, question.workload, goal):
        return ()
    return tuple(goal.misses(trial.ttft.p95, trial.completion.p95))
