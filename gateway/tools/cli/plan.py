"""`llama-gateway plan`: how many of which nodes, at what wait and price."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.tools.cli import options, plan_input
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.terminal import CommandFailed, print_json, print_note

if TYPE_CHECKING:
    from gateway.tools.plan.answer import PlanQuestion
    from gateway.tools.plan.catalogue import NodeType
    from gateway.tools.plan.running_fleet import FleetTraffic, MeasuredFleet
    from gateway.tools.plan.trial import TimeLimit

EXAMPLES = examples_epilog(
    (
        "llama-gateway plan --requests-per-hour 1000 --prompt 500 --completion 150",
        "by the catalogue, which comes with examples: how many of which, and what they cost",
    ),
    (
        (
            "llama-gateway plan --requests-per-hour 1000 --prompt 300 --completion 100"
            " --tokens-per-second 10 --prefill-tokens-per-second 90 --slots 2 --price-per-month 60"
        ),
        "of a node of your own, as measured",
    ),
    (
        (
            "llama-gateway plan --requests-per-hour 200 --peak 4 --prompt 1200 --repeat 0.7"
            " --completion 200 --ttft-p95 8 --completion-p95 40 --plot break-even.png"
        ),
        "with a goal, a busy hour and system prompts that repeat; drawn",
    ),
    (
        "llama-gateway plan --backlog 50000 --within 8 --prompt 1500 --completion 120",
        "a nightly batch, to be done in eight hours",
    ),
    (
        "llama-gateway plan --trace yesterday.jsonl --catalogue mine.yaml --ttft-p95 5",
        "recorded traffic, your own prices",
    ),
    (
        "llama-gateway plan --fleet --completion-p95 60",
        "the running fleet, as measured: what if one more, one less, another goal",
    ),
)

MOST_TRACE_REQUESTS = 200_000
"""Requests of a trace that are played unless `--limit` says more."""

MOST_SECONDS = 1e7

_TRAFFIC, _GOAL, _NODES, _FLEET = "Traffic", "Goal", "Nodes", "Running fleet"

_SIMULATION = "Simulation and output"


def plan(
    requests_per_hour: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Requests of a mean hour.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    prompt: Annotated[
        float | None,
        typer.Option(metavar="TOKENS", help="Mean prompt.", rich_help_panel=_TRAFFIC),
    ] = None,
    completion: Annotated[
        float | None,
        typer.Option(metavar="TOKENS", help="Mean completion.", rich_help_panel=_TRAFFIC),
    ] = None,
    repeat: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Share of the prompt that all have in common, 0 to 1: a node reads it once.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = 0.0,
    peak: Annotated[
        float,
        typer.Option(
            metavar="FACTOR",
            help=(
                "Requests of the busiest hour, as a multiple of the mean hour: latency is that of "
                "the busiest hour, prices are those of the mean. With --fleet: how many times as "
                "many as in the ledger's."
            ),
            rich_help_panel=_TRAFFIC,
        ),
    ] = 1.0,
    backlog: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="In place of --requests-per-hour: requests that all wait from the start.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    within: Annotated[
        float,
        typer.Option(
            metavar="HOURS", help="Hours that a backlog may take.", rich_help_panel=_TRAFFIC
        ),
    ] = 8.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Recorded requests, as `llama-gateway simulate --trace` reads them.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            min=2, metavar="N", help="First requests of the trace.", rich_help_panel=_TRAFFIC
        ),
    ] = MOST_TRACE_REQUESTS,
    ttft_p95: Annotated[
        float | None,
        typer.Option(
            "--ttft-p95",
            metavar="SECONDS",
            help="95 % of the requests have their first token by then.",
            rich_help_panel=_GOAL,
        ),
    ] = None,
    completion_p95: Annotated[
        float | None,
        typer.Option(
            "--completion-p95",
            metavar="SECONDS",
            help="95 % of the requests have ended by then.",
            rich_help_panel=_GOAL,
        ),
    ] = None,
    most_use: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Without a goal: share of the capacity that the busiest hour may use.",
            rich_help_panel=_GOAL,
        ),
    ] = 0.8,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            show_default="nodes by the catalogue",
            help="Your node: tokens/s of one request alone.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    prefill_tokens_per_second: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            show_default="10 times --tokens-per-second",
            help="Your node: prompt tokens/s.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    slots: Annotated[
        int,
        typer.Option(
            min=1,
            max=256,
            metavar="N",
            help="Your node: requests at a time.",
            rich_help_panel=_NODES,
        ),
    ] = 1,
    batch_cost: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Your node: by how much one more busy slot prolongs a step.",
            rich_help_panel=_NODES,
        ),
    ] = 0.15,
    price_per_hour: Annotated[
        float | None,
        typer.Option(metavar="PRICE", help="Your node.", rich_help_panel=_NODES),
    ] = None,
    price_per_month: Annotated[
        float | None,
        typer.Option(metavar="PRICE", help="Likewise, of 730 hours.", rich_help_panel=_NODES),
    ] = None,
    watts: Annotated[
        float,
        typer.Option(metavar="W", help="Your node, while it works.", rich_help_panel=_NODES),
    ] = 0.0,
    idle_watts: Annotated[
        float, typer.Option(metavar="W", help="Your node, idle.", rich_help_panel=_NODES)
    ] = 0.0,
    catalogue: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default="the package's, of examples",
            help="Node types with their speeds and prices.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            metavar="NAME",
            show_default="all",
            help="A type of the catalogue, also beside your node. Repeat it.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    model_gib: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            show_default="the catalogue's model",
            help="Size of the model's file: scales the catalogue's speeds, checks its memory.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    price_per_kwh: Annotated[
        float,
        typer.Option(
            "--price-per-kwh",
            metavar="PRICE",
            help="Electricity of the types that have `watts`.",
            rich_help_panel=_NODES,
        ),
    ] = 0.0,
    claimed_per_million: Annotated[
        float | None,
        typer.Option(
            metavar="PRICE",
            help="A price of a million tokens that somebody claims of your node: is it possible?",
            rich_help_panel=_NODES,
        ),
    ] = None,
    fleet: Annotated[
        bool,
        typer.Option(
            "--fleet",
            help=(
                "Nodes of the gateway that runs, and the busiest hour of its ledger: what if one "
                "more, one less?"
            ),
            rich_help_panel=_FLEET,
        ),
    ] = False,
    since: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="The busiest hour of the ledger from then on: a date, or how long ago.",
            rich_help_panel=_FLEET,
        ),
    ] = "7d",
    config: options.ConfigFile = None,
    admin_url: options.AdminUrl = None,
    admin_key_file: options.AdminKeyFile = None,
    admin_ca: options.AdminCa = None,
    requests: Annotated[
        int,
        typer.Option(
            min=100,
            max=1_000_000,
            metavar="N",
            help="Made-up requests of a simulation: more make its figures surer.",
            rich_help_panel=_SIMULATION,
        ),
    ] = 3000,
    seed: Annotated[
        int,
        typer.Option(metavar="N", help="Same seed, same plan.", rich_help_panel=_SIMULATION),
    ] = 1,
    start: options.Start = options.StartKind.COLD,
    time_limit: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Longest time for all simulations; what is missing then is estimated.",
            rich_help_panel=_SIMULATION,
        ),
    ] = 180.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the break-even of CPU, GPU and hybrid: .png, .svg or .pdf.",
            rich_help_panel=_SIMULATION,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Say how many of which nodes a traffic takes, at what wait and price.

    The first estimate is queueing theory (Erlang C, Allen-Cunneen, with slots that share a node's
    speed). The answer is a simulation in which the gateway's own scheduler places the requests. The
    table says which figure is from which. Nothing is sent anywhere, but for --fleet.
    """
    options.check_plot_file(plot)
    plan_input.check_numbers(
        {
            "--requests-per-hour": (requests_per_hour, 0.0, 1e9, False),
            "--prompt": (prompt, 0.0, 1e6, True),
            "--completion": (completion, 0.0, 1e6, False),
            "--repeat": (repeat, 0.0, 1.0, True),
            "--peak": (peak, 1.0, 1000.0, True),
            "--backlog": (backlog, 0.0, 1e9, False),
            "--within": (within, 0.0, 10_000.0, False),
            "--ttft-p95": (ttft_p95, 0.0, MOST_SECONDS, False),
            "--completion-p95": (completion_p95, 0.0, MOST_SECONDS, False),
            "--most-use": (most_use, 0.0, 1.0, False),
            "--tokens-per-second": (tokens_per_second, 0.0, 1e7, False),
            "--prefill-tokens-per-second": (prefill_tokens_per_second, 0.0, 1e7, False),
            "--batch-cost": (batch_cost, 0.0, 100.0, True),
            "--price-per-hour": (price_per_hour, 0.0, 1e9, True),
            "--price-per-month": (price_per_month, 0.0, 1e9, True),
            "--watts": (watts, 0.0, 1e6, True),
            "--idle-watts": (idle_watts, 0.0, 1e6, True),
            "--model-gib": (model_gib, 0.0, 1e6, False),
            "--price-per-kwh": (price_per_kwh, 0.0, 1e6, True),
            "--claimed-per-million": (claimed_per_million, 0.0, 1e9, True),
            "--time-limit": (time_limit, 0.0, 86_400.0, False),
        }
    )
    from gateway.tools.plan.answer import PlanQuestion
    from gateway.tools.plan.catalogue import packaged_catalogue, read_catalogue
    from gateway.tools.plan.search import Goal

    warm = start is options.StartKind.WARM
    goal = Goal(ttft_p95, completion_p95, most_use)
    recorded = None if trace is None else plan_input.read_recorded(trace, limit)
    given = (requests_per_hour, backlog, prompt, completion)
    if fleet:
        for name, unfit in (("--backlog", backlog), ("--plot", plot)):
            if unfit is not None:
                raise CommandFailed(f"{name} has no meaning with --fleet: leave it out", status=2)
        from gateway.tools.cli.admin_client import connect_admin
        from gateway.tools.plan.running_fleet import traffic_of

        with connect_admin(admin_url, admin_key_file, config, ca=admin_ca) as admin:
            measured = plan_input.read_measured(admin.nodes())
            if recorded is not None:
                traffic = traffic_of(plan_input.traced_workload(recorded), recorded)
            elif any(value is not None for value in given):
                traffic = traffic_of(plan_input.build_workload(*given, repeat, peak, within))
            else:
                traffic = plan_input.ledger_traffic(admin, since, measured, peak)
        # The fleet has learnt its speeds.
        question = PlanQuestion(
            traffic.workload, goal, (), price_per_kwh, requests, seed, True, traffic.recorded
        )
        _plan_fleet(question, measured, traffic, time_limit, as_json)
        return
    workload = (
        plan_input.traced_workload(recorded)
        if recorded is not None
        else plan_input.build_workload(*given, repeat, peak, within)
    )
    listed = packaged_catalogue() if catalogue is None else read_catalogue(catalogue)
    nodes: list[NodeType] = []
    if tokens_per_second is not None:
        figures = (tokens_per_second, prefill_tokens_per_second, slots, batch_cost)
        nodes.append(
            plan_input.own_node(figures, (price_per_hour, price_per_month), (watts, idle_watts))
        )
    plan_input.check_alone(
        own=tokens_per_second is not None,
        prefill_tokens_per_second=prefill_tokens_per_second,
        price_per_hour=price_per_hour,
        price_per_month=price_per_month,
        claimed_per_million=claimed_per_million,
    )
    currency = ""
    if not nodes or types:
        nodes += plan_input.choose_types(listed, model_gib, tuple(types or ()))
        currency = listed.currency
    if claimed_per_million is not None:
        plan_input.check_claim(nodes[0], claimed_per_million)
    question = PlanQuestion(
        workload, goal, tuple(nodes), price_per_kwh, requests, seed, warm, recorded
    )
    _plan_new(question, currency, time_limit, plot, as_json)


def _plan_new(
    question: PlanQuestion,
    currency: str,
    time_limit: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    from gateway.tools.cli import plan_output
    from gateway.tools.plan.answer import answer
    from gateway.tools.plan.break_even import break_even, plot_break_even
    from gateway.tools.plan.deployments import compare_deployments
    from gateway.tools.simulate.simulation import StuckError

    try:
        with _time_limit(time_limit) as limit:
            found = answer(question, limit)
            rows = compare_deployments(found, limit)
    except StuckError as error:
        raise CommandFailed(str(error)) from None
    if found.best is None:
        reasons = "\n".join(f"{one.name}: {one.rejected}" for one in found.options)
        raise CommandFailed(f"no fleet of these nodes meets the goal:\n{reasons}")
    crossing = break_even(found)
    if as_json:
        print_json(plan_output.as_dict(found, rows, crossing, currency))
    else:
        plan_output.show(found, rows, crossing, currency)
    for note in found.notes:
        print_note(note)
    if plot is not None:
        if crossing is None:
            raise CommandFailed(
                "--plot: there is no break-even to draw: it takes priced types of both tiers that "
                "meet the goal, and no backlog (--type adds types of the catalogue to your node)"
            )
        plot_break_even(plot, crossing, currency)
        print_note(f"written: {plot}")


def _plan_fleet(
    question: PlanQuestion,
    measured: MeasuredFleet,
    traffic: FleetTraffic,
    time_limit: float,
    as_json: bool,
) -> None:
    from gateway.tools.cli import plan_output
    from gateway.tools.plan.running_fleet import UnmeasuredFleetError, what_if
    from gateway.tools.simulate.simulation import StuckError

    try:
        with _time_limit(time_limit) as limit:
            found = what_if(question, measured, traffic, limit)
    except (UnmeasuredFleetError, StuckError) as error:
        raise CommandFailed(f"--fleet: {error}") from None
    for note in found.notes:
        print_note(note)
    if as_json:
        print_json(plan_output.changes_as_dict(question, found))
    else:
        plan_output.show_changes(question, found)


@contextmanager
def _time_limit(seconds: float) -> Iterator[TimeLimit]:
    """The limit of all simulations, with a bar on a terminal."""
    import sys

    from gateway.tools.cli.terminal import console
    from gateway.tools.plan.trial import TimeLimit

    shown = console(sys.stderr)
    if not shown.is_terminal:
        yield TimeLimit(seconds)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("simulating {task.description}"),
        BarColumn(),
        TextColumn("of the time limit"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=shown, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        update: Callable[[str, float], None] = lambda name, share: bar.update(  # noqa: E731
            task, completed=share, description=name
        )
        yield TimeLimit(seconds, on_trial=update)
