"""What `llama-gateway plan` is told: checked figures, traces, catalogues and the running fleet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.tools.cli.terminal import CommandFailed, print_note

if TYPE_CHECKING:
    from gateway.tools.cli.admin_client import AdminClient
    from gateway.tools.plan.catalogue import NodeCatalogue, NodeType
    from gateway.tools.plan.running_fleet import FleetTraffic, MeasuredFleet
    from gateway.tools.plan.workload import Workload
    from gateway.tools.simulate.trace import Trace

PREFILL_FACTOR = 10.0
"""Prompt tokens per second by written ones, where only these are given: CPUs read some ten times as
fast as they write."""


def check_numbers(given: dict[str, tuple[float | None, float, float, bool]]) -> None:
    """Check each option's bounds: value, least, most, and whether the least is allowed."""
    for name, (value, least, most, inclusive) in given.items():
        if value is None:
            continue
        above = value >= least if inclusive else value > least
        if not (math.isfinite(value) and above and value <= most):
            bound = f"at least {least:g}" if inclusive else f"above {least:g}"
            raise CommandFailed(
                f"{name} {value:g}: must be a number {bound}, and at most {most:,.0f}", status=2
            )


def check_alone(*, own: bool, **given: float | None) -> None:
    """Options of a node of one's own make no sense without its speed."""
    for name, value in given.items():
        if value is not None and not own:
            option = f"--{name.replace('_', '-')}"
            raise CommandFailed(
                f"{option} is of your node: give --tokens-per-second, too; prices of types are in "
                "the catalogue (--catalogue FILE)",
                status=2,
            )


def build_workload(
    requests_per_hour: float | None,
    backlog: float | None,
    prompt: float | None,
    completion: float | None,
    repeat: float,
    peak: float,
    within: float,
) -> Workload:
    """Return the traffic of the figures on the command line. Raises CommandFailed."""
    from gateway.tools.plan.workload import Workload

    if (requests_per_hour is None) == (backlog is None):
        raise CommandFailed(
            "how much is there to do? One of --requests-per-hour N, --backlog N, --trace FILE or "
            "--fleet",
            status=2,
        )
    for name, value in (("--prompt", prompt), ("--completion", completion)):
        if value is None:
            raise CommandFailed(f"{name} TOKENS is missing: how long are they?", status=2)
    try:
        return Workload(
            requests_per_hour or backlog or 0.0,
            prompt or 0.0,
            completion or 0.0,
            repeat=repeat,
            peak=1.0 if backlog is not None else peak,
            backlog_hours=within if backlog is not None else None,
        )
    except ValueError as error:
        raise CommandFailed(str(error), status=2) from None


def read_recorded(path: Path, limit: int) -> Trace:
    """Return the first `limit` requests of a recorded trace. Raises CommandFailed, ConfigError."""
    from gateway.tools.simulate.trace import read_trace

    try:
        return read_trace(path, limit=limit)
    except OSError as error:
        raise CommandFailed(
            f"--trace {path}: can't be read: {error.strerror} (check the path and its rights)",
            status=2,
        ) from None


def traced_workload(trace: Trace) -> Workload:
    """Return the figures of a recorded trace. Raises CommandFailed."""
    from gateway.tools.plan.workload import TraceTooShortError, from_trace

    try:
        return from_trace(trace)
    except (TraceTooShortError, ValueError) as error:
        raise CommandFailed(f"--trace: {error}", status=2) from None


def ledger_traffic(
    admin: AdminClient, since: str, fleet: MeasuredFleet, peak: float
) -> FleetTraffic:
    """Return the busiest hour of the running gateway's ledger, `peak` times as fast.

    Notes go to stderr. Raises CommandFailed.
    """
    from gateway.tools.cli.admin_client import AdminRefused
    from gateway.tools.plan.running_fleet import UnmeasuredFleetError, busiest_hour

    instead = "--requests-per-hour, --prompt and --completion or --trace tell the traffic"
    try:
        told = admin.request("GET", "/admin/usage/arrivals", {"since": since}, timeout=90.0)
    except AdminRefused as error:
        if error.code == 404:
            raise CommandFailed(
                f"the gateway at {admin.url} is older than this command and does not tell its "
                f"busiest hour: upgrade it; or {instead}"
            ) from None
        raise CommandFailed(f"{error}; instead of its ledger, {instead}") from None
    try:
        traffic = busiest_hour(told, fleet, peak)
    except (UnmeasuredFleetError, ValueError) as error:
        raise CommandFailed(f"--fleet: {error}") from None
    for note in traffic.notes:
        print_note(note)
    return traffic


def read_measured(nodes: list[dict[str, object]]) -> MeasuredFleet:
    """Return the running fleet, in kinds of nodes. Raises CommandFailed."""
    from gateway.tools.plan.running_fleet import UnmeasuredFleetError, measured_fleet

    try:
        found = measured_fleet(nodes)
    except (UnmeasuredFleetError, ValueError) as error:
        raise CommandFailed(f"--fleet: {error}") from None
    for note in found.notes:
        print_note(note)
    return found


def own_node(
    figures: tuple[float, float | None, int, float],
    prices: tuple[float | None, float | None],
    power: tuple[float, float],
) -> NodeType:
    """Return the node that the command line describes: speeds and slots, prices, watts."""
    from gateway.tools.plan.catalogue import NodeType

    decode, prefill, slots, batch_cost = figures
    if prices[0] is not None and prices[1] is not None:
        raise CommandFailed("--price-per-hour and --price-per-month: give one of them", status=2)
    if power[1] > power[0]:
        raise CommandFailed(
            f"--idle-watts {power[1]:g}: must not be above --watts {power[0]:g}", status=2
        )
    if prefill is None:
        prefill = min(1e7, PREFILL_FACTOR * decode)
        print_note(
            f"assumed that a node reads {prefill:g} prompt tokens/s, {PREFILL_FACTOR:g} times what "
            "it writes: --prefill-tokens-per-second tells more"
        )
    return NodeType(
        name="node",
        slots=slots,
        decode_tps=max(decode, 1e-3),
        prefill_tps=max(prefill, 1e-3),
        batch_cost=batch_cost,
        price_per_hour=prices[0],
        price_per_month=prices[1],
        watts=power[0],
        idle_watts=power[1],
    )


def choose_types(
    listed: NodeCatalogue, model_gib: float | None, names: tuple[str, ...]
) -> tuple[NodeType, ...]:
    """Return the catalogue's types that can serve the model. Raises CommandFailed."""
    from gateway.tools.plan.catalogue import NoTypeFitsError, fitting_types

    try:
        found, notes = fitting_types(listed, model_gib, names)
    except NoTypeFitsError as error:
        raise CommandFailed(str(error), status=2) from None
    for note in notes:
        print_note(note)
    return found


def check_claim(node: NodeType, claimed: float) -> None:
    """Say whether a claimed price of a million tokens can be. Raises CommandFailed."""
    from gateway.tools.plan.explanation import contradiction

    hour = node.price.per_hour
    if hour is None:
        raise CommandFailed("--claimed-per-million needs --price-per-hour or -month", status=2)
    wrong = contradiction(hour, node.decode_tps, claimed)
    print_note(wrong or f"{claimed:g} a million tokens is what its speed and price make")
