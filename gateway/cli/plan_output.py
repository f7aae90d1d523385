"""The output of `llama-gateway plan`: tables and arithmetic for people, JSON for scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gateway.cli.terminal import print_table
from gateway.workshop.plan.answer import BreakEven, Deployment, PlanAnswer
from gateway.workshop.plan.catalogue import HOURS_PER_MONTH
from gateway.workshop.plan.running_fleet import FleetAnswer
from gateway.workshop.plan.search import (
    WARM_UP_SHARE,
    FleetOption,
    FleetTrial,
    PlanQuestion,
    times_of,
)
from gateway.workshop.plan.workload import SECONDS_PER_HOUR

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
    workload, node_type, trial = question.workload, option.parts[0].node_type, option.trial
    times = times_of(node_type, workload)
    lines = {}
    if workload.backlog_hours is None:
        lines["arrivals"] = (
            f"{workload.requests_per_hour:,.10g} an hour x peak {workload.peak:g} / 3,600 = "
            f"{workload.arrivals:.4g} a second"
        )
    else:
        lines["arrivals"] = (
            f"{workload.requests_per_hour:,.10g} at once / {workload.backlog_hours:g} h / 3,600"
            f" = {workload.arrivals:.4g} a second to be done"
        )
    pure, whole = pure_instances(question, option)
    lines["pure sum"] = (
        f"{workload.arrivals:.4g} a second x {workload.completion:g} tokens / "
        f"{node_type.decode_tps:g} tokens/s = {pure:.2f}: {whole} instances of one slot"
    )
    lines["left out"] = (
        f"reading the prompts, and waiting: {whole} would be used to {pure / whole:.0%}, and "
        "at full use the queue grows without end"
    )
    if workload.repeat:
        lines["cached"] = (
            f"{workload.repeat:.0%} of {workload.prompt:g} prompt tokens repeat: "
            f"{workload.uncached:g} are read"
        )
    if times.slots == 1:
        capacity = f"1 / {times.full:.2f} s"
    else:
        lines["slots share"] = (
            f"{times.slots} x {times.reading:.2f} s of reading, one after the other, + "
            f"{times.writing:.2f} s of writing x (1 + {times.batch_cost:g} x {times.slots - 1})"
            f" = {times.full:.2f} s with all busy, {times.alone:.2f} s alone"
        )
        capacity = f"{times.slots} slots / {times.full:.2f} s"
    lines["one server"] = (
        f"{capacity} = {times.capacity:.4g} requests a second, "
        f"{times.capacity * SECONDS_PER_HOUR:,.0f} an hour"
    )
    servers = "" if node_type.servers == 1 else f" x {node_type.servers} servers"
    if len(option.parts) == 1 and workload.backlog is None:
        lines["use"] = (
            f"{workload.arrivals:.4g} / ({option.parts[0].count}{servers} x {times.capacity:.4g}) "
            f"= {option.use:.0%} of the capacity"
        )
        guess = option.estimate
        if guess is not None and math.isfinite(guess.wait):
            lines["estimate"] = (
                f"Erlang C: {guess.waiting_share:.3g} of the requests wait, at most; Allen-Cunneen "
                f"with Cs² {guess.service_scv:.2f}: {guess.wait:.3g} s in the mean"
            )
    if trial is not None and workload.backlog is not None:
        lines["simulator"] = (
            f"{trial.requests:,} requests through the real scheduler: all "
            f"{workload.backlog:,.10g} done in {trial.seconds / SECONDS_PER_HOUR:.2f} h"
        )
    elif trial is not None:
        lines["simulator"] = (
            f"{trial.requests:,} requests through the real scheduler ({WARM_UP_SHARE:.0%} to warm "
            f"up before): mean wait {trial.wait.mean:.3g} s ± {trial.wait_error:.2g}, completion "
            f"{trial.completion.mean:.3g} s ± {trial.completion_error:.2g} (95 %)"
        )
    return lines | _price_lines(question, option)


def _price_lines(question: PlanQuestion, option: FleetOption) -> dict[str, str]:
    price, workload = option.price, question.workload
    if price.per_hour is None:
        return {"price": "unknown: the node has no price (--price-per-hour)"}
    hourly = [(part.count, part.node_type.price.per_hour or 0.0) for part in option.parts]
    hours = " + ".join(f"{count} x {hour:.4g}" for count, hour in hourly)
    extra = ""
    tokens = price.per_hour - price.electricity_per_hour
    for count, hour in hourly:
        tokens -= count * hour
    if tokens > 1e-12:
        extra += f" + {tokens:.4g} for tokens"
    if price.electricity_per_hour:
        extra += f" + {price.electricity_per_hour:.4g} of electricity"
    lines = {
        "price": f"{hours}{extra} = {price.per_hour:.4g} an hour x {HOURS_PER_MONTH:g} = "
        f"{price.month or 0.0:,.2f} a month; all machines run, used or not"
    }
    if price.per_million is None:
        return lines
    lines["per token"] = f"{price.per_million:.4g} a million tokens, prompts included" + (
        "" if workload.peak == 1 else ", of the mean hour"
    )
    node_type = option.parts[0].node_type
    if node_type.price.per_hour:
        hour = node_type.price.per_hour / node_type.servers
        lines["per token"] += (
            f"; one slot that always writes {node_type.decode_tps:g} tokens/s at {hour:.4g} an "
            f"hour makes {_per_million_tokens(hour, node_type.decode_tps):.3g} a million written"
        )
    return lines


def headline(option: FleetOption) -> str:
    """The answer in a line."""
    cost = "price unknown" if option.price.month is None else f"{option.price.month:,.2f} a month"
    unsure = "" if option.trial is not None else " or more (estimated, not simulated)"
    return f"{option.name}{unsure}: {cost}"


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


def show(
    found: PlanAnswer, rows: Sequence[Deployment], crossing: BreakEven | None, currency: str
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
                row.verdict,
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
    for word, line in explain(found.question, best).items():
        print(f"  {word:<12}{line}")


def _row(option: FleetOption) -> list[object]:
    trial, guess = option.trial, option.estimate
    times: list[str | None] = ["-"] * 4
    if trial is not None:
        times = _times(trial)
    elif guess is not None and math.isfinite(guess.wait):
        times = [f"{guess.wait:.2f}", "-", f"{guess.completion:.2f}", "-"]
    return [
        option.name if trial is not None or option.rejected else f"{option.name} or more",
        f"{option.use:.0%}",
        *times,
        _money(option.price.per_hour, 4),
        _money(option.price.month),
        _money(option.price.per_million),
        "estimate" if trial is None else "simulator",
    ]


def _times(trial: FleetTrial | None) -> list[str | None]:
    if trial is None:
        return [None] * 4
    wait, completion = trial.wait, trial.completion
    return [f"{one:.2f}" for one in (wait.mean, trial.ttft.p95, completion.mean, completion.p95)]


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
    found: PlanAnswer, rows: Sequence[Deployment], crossing: BreakEven | None, currency: str
) -> dict[str, Any]:
    """The answer for scripts: seconds, tokens, and the catalogue's currency."""
    best = found.best
    assert best is not None
    question = found.question
    offered, instances = pure_instances(question, best)
    return {
        "nodes": sum(part.servers for part in best.parts),
        "answer": option_dict(best),
        "arithmetic": {
            "instances": instances,
            "offered": offered,
            "leaves_out": ["reading the prompts", "waiting, which has no bound at full use"],
            "lines": explain(question, best),
        },
        **_asked(question),
        "options": [option_dict(one) for one in found.options],
        "decisions": [row.as_dict() for row in rows],
        "break_even": None if crossing is None else crossing.as_dict(),
        "currency": currency,
        "simulations": found.trials,
        "notes": list(found.notes),
    }


def option_dict(option: FleetOption) -> dict[str, Any]:
    """One fleet for scripts."""
    found, guess = option.estimate, None
    if found is not None and math.isfinite(found.wait):
        guess = {
            "waiting_share": found.waiting_share,
            "wait": found.wait,
            "service": found.service,
            "completion": found.completion,
            "erlang_c": found.waiting_share,
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


def _asked(question: PlanQuestion) -> dict[str, Any]:
    workload, goal = question.workload, question.goal
    return {
        "traffic": {
            "requests_per_hour": workload.requests_per_hour,
            "prompt_tokens": workload.prompt,
            "completion_tokens": workload.completion,
            "repeat": workload.repeat,
            "peak": workload.peak,
            "backlog_hours": workload.backlog_hours,
            "arrivals_per_second": workload.arrivals,
        },
        "goal": {
            "ttft_p95": goal.ttft_p95,
            "completion_p95": goal.completion_p95,
            "most_use": goal.use,
        },
        "start": "warm" if question.warm else "cold",
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
                *_times(row.trial),
                _money(row.price.month),
                ", ".join(row.missed) or "met",
            ]
            for row in found.changes
        ),
    )
    print(f"\n{found.advice.sentence}")


def changes_as_dict(question: PlanQuestion, found: FleetAnswer) -> dict[str, Any]:
    """The same for scripts."""
    hour = found.traffic.hour
    return {
        **_asked(question),
        "busiest_hour": None if hour is None else hour.as_dict(),
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
