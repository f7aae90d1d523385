"""The output of `llama-gateway plan`: tables and arithmetic for people, JSON for scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gateway.tools.cli.terminal import print_table
from gateway.tools.plan.answer import FleetOption, PlanAnswer, PlanQuestion
from gateway.tools.plan.break_even import BreakEven
from gateway.tools.plan.deployments import Deployment
from gateway.tools.plan.explanation import explain, headline, pure_instances, whole_instances
from gateway.tools.plan.running_fleet import FleetAnswer
from gateway.tools.plan.search import Goal
from gateway.tools.plan.trial import FleetTrial
from gateway.tools.plan.workload import Workload

_COLUMNS = (
    "FLEET",
    "USE",
    "WAIT",
    "TTFT P95",
    "COMPLETION",
    "P95",
    "HOUR",
    "MONTH",
    "PER 1M",
    "FIGURES BY",
)

_DEPLOYMENTS = ("DEPLOYMENT", "FLEET", "", "P95", "MONTH", "REASON")

_CHANGES = ("CHANGE", "FLEET", "USE", "WAIT", "TTFT P95", "COMPLETION", "P95", "MONTH", "GOAL")

_MARKS = {"best": "best", "works": "works", "no": "no"}


def show(
    found: PlanAnswer,
    rows: Sequence[Deployment],
    crossing: BreakEven | None,
    currency: str,
) -> None:
    """Print the answer."""
    best = found.best
    assert best is not None
    unit = f" {currency}" if currency and best.price.month is not None else ""
    print(f"{headline(best)}{unit}\n")
    print_table(_COLUMNS, map(_row, found.options))
    for option in found.options:
        if option.rejected:
            print(f"  {option.name} misses the goal: {option.rejected}")
    print()
    print_table(
        _DEPLOYMENTS,
        (
            [
                row.way,
                row.fleet,
                _MARKS[row.verdict],
                None if row.trial is None else f"{row.trial.completion.p95:.1f}",
                _money(row.per_month),
                row.reason,
            ]
            for row in rows
        ),
    )
    if crossing is not None:
        print()
        for line in crossing_lines(crossing):
            print(line)
    print("\nhow it comes about")
    for word, line in explain(found.question, best):
        print(f"  {word:<12}{line}")


def _row(option: FleetOption) -> list[object]:
    trial, found = option.trial, option.found
    if trial is not None:
        times = [
            f"{trial.wait.mean:.2f}",
            f"{trial.ttft.p95:.2f}",
            f"{trial.completion.mean:.2f}",
            f"{trial.completion.p95:.2f}",
        ]
    elif found is not None and not math.isinf(found.estimate.wait):
        guess = found.estimate
        times = [f"{guess.wait:.2f}", "-", f"{guess.completion:.2f}", "-"]
    else:
        times = ["-"] * 4
    name = option.name if trial is not None or option.rejected else f"{option.name} or more"
    return [
        name,
        f"{option.use:.0%}",
        *times,
        _money(option.price.per_hour, 4),
        _money(option.price.month),
        _money(option.price.per_million),
        "estimate" if trial is None else "simulator",
    ]


def _money(value: float | None, digits: int = 2) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def crossing_lines(found: BreakEven) -> list[str]:
    """Say where another kind of fleet is cheaper."""
    least, most = found.curves[0].rates[0], found.curves[0].rates[-1]
    lines = []
    for one in found.crossings:
        if one.first is None:
            where = f"at no rate from {least:,.4g} to {most:,.10g} requests an hour"
        elif one.stays is None:
            where = f"at some rates from {one.first:,.0f} requests an hour on"
        elif one.stays <= least:
            where = f"at every rate from {least:,.4g} requests an hour on"
        else:
            where = f"from {one.stays:,.0f} requests an hour on"
            if one.first < one.stays:
                where += f", and at some rates from {one.first:,.0f} on"
        lines.append(f"{one.cheaper} are cheaper than {one.than} {where} (by the estimate)")
    return lines


def as_dict(
    found: PlanAnswer,
    rows: Sequence[Deployment],
    crossing: BreakEven | None,
    currency: str,
) -> dict[str, Any]:
    """The answer for scripts: seconds, tokens, and the catalogue's currency."""
    best = found.best
    assert best is not None
    question = found.question
    pure = pure_instances(question, best)
    return {
        "nodes": sum(part.servers for part in best.parts),
        "answer": option_dict(best),
        "arithmetic": {
            "instances": whole_instances(pure),
            "offered": pure,
            "leaves_out": ["reading the prompts", "waiting, which has no bound at full use"],
            "lines": dict(explain(question, best)),
        },
        "traffic": _traffic(question.workload),
        "goal": _goal(question.goal),
        "options": [option_dict(one) for one in found.options],
        "decisions": [row.as_dict() for row in rows],
        "break_even": None if crossing is None else crossing.as_dict(),
        "currency": currency,
        "start": _start(question),
        "simulations": found.trials,
        "notes": list(found.notes),
    }


def option_dict(option: FleetOption) -> dict[str, Any]:
    """One fleet for scripts."""
    found = option.found
    guess = None
    if found is not None and not math.isinf(found.estimate.wait):
        guess = {
            "waiting_share": found.estimate.waiting_share,
            "wait": found.estimate.wait,
            "service": found.estimate.service,
            "completion": found.estimate.completion,
            "erlang_c": found.estimate.erlang_c,
        }
    return {
        "fleet": option.name,
        "parts": [
            {
                "type": part.node_type.name,
                "tier": part.node_type.tier,
                "count": part.count,
                "servers": part.servers,
                "slots": part.node_type.slots,
            }
            for part in option.parts
        ],
        "utilisation": option.use,
        "source": "estimate" if option.trial is None else "simulator",
        "estimate": guess,
        "simulated": None if option.trial is None else option.trial.as_dict(),
        "price": option.price.as_dict(),
        "rejected": option.rejected or None,
    }


def _traffic(workload: Workload) -> dict[str, Any]:
    return {
        "requests_per_hour": workload.requests_per_hour,
        "prompt_tokens": workload.prompt,
        "completion_tokens": workload.completion,
        "repeat": workload.repeat,
        "peak": workload.peak,
        "backlog_hours": workload.backlog_hours,
        "arrivals_per_second": workload.arrivals,
    }


def _start(question: PlanQuestion) -> str:
    """As `--start`."""
    return "warm" if question.warm else "cold"


def _goal(goal: Goal) -> dict[str, Any]:
    return {
        "ttft_p95": goal.ttft_p95,
        "completion_p95": goal.completion_p95,
        "most_use": goal.use,
    }


def show_changes(question: PlanQuestion, found: FleetAnswer) -> None:
    """Print what changes of the running fleet would do, and what to do."""
    workload = question.workload
    print(
        f"{workload.requests_per_hour:,.1f} requests an hour, {workload.peak:.2f} times as many in "
        f"the busiest; {workload.prompt:,.0f} prompt tokens, {workload.repeat:.0%} of them cached; "
        f"{workload.completion:,.0f} written"
    )
    for part in found.fleet.parts:
        one = part.node_type
        print(
            f"{part.count} {'node' if part.count == 1 else 'nodes'} like {one.name}: {one.slots} "
            f"slots, {one.prefill_tps:.0f} prompt tokens/s, {one.decode_tps:.1f} written (measured)"
        )
    print()
    print_table(
        _CHANGES,
        (
            [
                row.change,
                row.fleet,
                f"{row.use:.0%}" if math.isfinite(row.use) else None,
                *_change_times(row.trial),
                _money(row.price.month),
                ", ".join(row.missed) or "met",
            ]
            for row in found.changes
        ),
    )
    print(f"\n{found.advice.sentence}")


def _change_times(trial: FleetTrial | None) -> list[str | None]:
    if trial is None:
        return [None] * 4
    return [
        f"{value:.2f}"
        for value in (
            trial.wait.mean,
            trial.ttft.p95,
            trial.completion.mean,
            trial.completion.p95,
        )
    ]


def changes_as_dict(question: PlanQuestion, found: FleetAnswer) -> dict[str, Any]:
    """The same for scripts."""
    hour = found.traffic.hour
    return {
        "traffic": _traffic(question.workload),
        "busiest_hour": None if hour is None else hour.as_dict(),
        "goal": _goal(question.goal),
        "start": _start(question),
        "nodes": [
            {
                "like": part.node_type.name,
                "count": part.count,
                "tier": part.node_type.tier,
                "slots": part.node_type.slots,
                "prefill_tps": part.node_type.prefill_tps,
                "decode_tps": part.node_type.decode_tps,
                "batch_cost": part.node_type.batch_cost,
            }
            for part in found.fleet.parts
        ],
        "changes": [row.as_dict() for row in found.changes],
        "advice": found.advice.as_dict(),
        "notes": [*found.fleet.notes, *found.traffic.notes, *found.notes],
    }
