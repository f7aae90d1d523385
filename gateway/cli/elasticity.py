"""`llama-gateway simulate --standby`: machine-hours and waits, always on and elastic."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

from gateway.cli.terminal import CommandFailed, put_json, put_table

if TYPE_CHECKING:
    from gateway.planning.elasticity import Elasticity
    from gateway.planning.fleets import Setup
    from gateway.planning.job import Trace
    from gateway.planning.machine import Machine
    from gateway.scheduling.elastic import Rules

_COLUMNS = (
    "FLEET",
    "MACHINE-HOURS",
    "COST",
    "STARTS",
    "WAIT",
    "WAIT P95",
    "TTFT P50",
    "P95",
    "P99",
    "COMPLETION",
)


def show(
    base: list[Machine],
    standby: str,
    given: str,
    setup: Setup,
    trace: Trace,
    seed: int,
    as_json: bool,
) -> None:
    """Play the trace three times and print the table. Raises: CommandFailed."""
    from gateway.planning.elasticity import compare_elastic
    from gateway.planning.fleets import FleetError, from_text
    from gateway.planning.simulation import StuckError

    rules, startup, cost = _rules(given)
    try:
        spares = from_text(standby, setup)
    except FleetError as error:
        raise CommandFailed(f"--standby: {error}", status=2) from None
    try:
        found = compare_elastic(trace, base, spares, rules, startup, seed=seed)
    except StuckError as error:
        raise CommandFailed(str(error)) from None
    if as_json:
        put_json({"fleets": [one.as_dict(cost) for one in found]})
    else:
        put_table(_COLUMNS, [_row(one, cost) for one in found], state=0)


def _rules(given: str) -> tuple[Rules, float, float]:
    """The policy's rules, the start-up time and the cost of an hour."""
    from gateway.scheduling.elastic import Rules

    values = {"startup": 60.0, "cost": 0.0}
    whole = ("min", "max")
    known = (*(field.name for field in fields(Rules)), *values)
    for part in filter(None, given.replace(" ", "").split(",")):
        name, _, text = part.partition("=")
        if name not in known:
            raise CommandFailed(
                f"--elastic: {name!r} is nothing to set; known: {', '.join(known)}", status=2
            )
        try:
            value = int(text) if name in whole else float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            kind = "a whole number" if name in whole else "a number"
            raise CommandFailed(f"--elastic: {part!r}: write {kind} behind the =", status=2)
        values[name] = value
    startup, cost = values.pop("startup"), values.pop("cost")
    if values.get("max", math.inf) < max(1, values.get("min", 0)):
        raise CommandFailed("--elastic: max must be at least 1, and not below min", status=2)
    return Rules(**values), startup, cost  # type: ignore[arg-type]


def _row(one: Elasticity, cost: float) -> list[object]:
    report = one.report
    ttft, wait = report.ttft, report.wait
    return [
        one.fleet,
        f"{one.machine_hours:.2f}",
        f"{one.machine_hours * cost:.2f}",
        one.starts,
        *(f"{value:.2f}" for value in (wait.mean, wait.p95, ttft.p50, ttft.p95, ttft.p99)),
        f"{report.completion.mean:.2f}",
    ]
