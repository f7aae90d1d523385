"""`llama-gateway plan`: how many of which nodes, at what wait and price."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.cli import options
from gateway.cli.client import AdminFlags, GatewayRefused
from gateway.cli.options import Panel, examples_epilog
from gateway.cli.terminal import (
    CommandFailed,
    WrongUsage,
    failing_by,
    print_json,
    print_note,
    print_rows,
)

if TYPE_CHECKING:
    from gateway.workshop.plan.answer import BreakEven, Deployment, PlanAnswer
    from gateway.workshop.plan.catalogue import NodeType
    from gateway.workshop.plan.running_fleet import FleetAnswer, FleetTraffic, MeasuredFleet
    from gateway.workshop.plan.search import (
        FleetOption,
        FleetTrial,
        PlanQuestion,
        TimeLimit,
        Workload,
    )
    from gateway.workshop.simulate.fleets import SimulatedModel
    from gateway.workshop.simulate.simulation import Trace

# Prompt tokens per second by written ones, where only these are given: CPUs read some ten times as
# fast as they write.
PREFILL_FACTOR = 10.0

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
        (
            "llama-gateway plan --requests-per-hour 600 --prompt 400 --completion 100"
            " --models 12x2GiB:30GiB --completion-p95 60"
        ),
        "twelve models, loaded on demand by nodes with memory for some of them",
    ),
    (
        "llama-gateway plan --fleet --completion-p95 60",
        "the running fleet, as measured: what if one more, one less, another goal",
    ),
)

_traffic = Panel("Traffic")
_goal = Panel("Goal")
_nodes = Panel("Nodes")
_fleet = Panel("Running fleet")
_simulation = Panel("Simulation and output")


class WorkloadFlags(options.FlagGroup):
    """What is to be done: figures, or a trace."""

    requests_per_hour: float | None = _traffic("N", "Requests of a mean hour.")
    prompt: float | None = _traffic("TOKENS", "Mean prompt.")
    completion: float | None = _traffic("TOKENS", "Mean completion.")
    repeat: float = _traffic(
        "SHARE", "Share of the prompt that all have in common, 0 to 1: a node reads it once.", 0.0
    )
    peak: float = _traffic(
        "FACTOR",
        "Requests of the busiest hour, as a multiple of the mean hour: latency is that of "
        "the busiest hour, prices are those of the mean. With --fleet: how many times as "
        "many as in the ledger's.",
        1.0,
    )
    backlog: float | None = _traffic(
        "N", "In place of --requests-per-hour: requests that all wait from the start."
    )
    within: float = _traffic("HOURS", "Hours that a backlog may take.", 8.0)
    trace: Path | None = _traffic(
        "FILE", "Recorded requests, as `llama-gateway simulate --trace` reads them."
    )
    limit: int = _traffic("N", "First requests of the trace.", 200_000, min=2)
    models: str | None = _traffic(
        "COUNTxSMALLEST:LARGEST",
        "Models that the nodes load on demand, as `simulate --models` takes them. Your node's "
        "speeds are then those of a model of 8 GiB.",
    )

    @property
    def has_figures(self) -> bool:
        """Whether one of the figures is given that make traffic up."""
        figures = (self.requests_per_hour, self.backlog, self.prompt, self.completion)
        return any(one is not None for one in figures)

    def workload(self) -> Workload:
        """Return the traffic of the figures on the command line. Raises CommandFailed."""
        from gateway.workshop.plan.search import Workload

        if (self.requests_per_hour is None) == (self.backlog is None):
            raise WrongUsage(
                "how much is there to do? One of --requests-per-hour N, --backlog N, --trace FILE "
                "or --fleet"
            )
        for name, value in (("--prompt", self.prompt), ("--completion", self.completion)):
            if value is None:
                raise WrongUsage(f"{name} TOKENS is missing: how long are they?")
        with failing_by(ValueError, status=2):
            return Workload(
                self.requests_per_hour or self.backlog or 0.0,
                self.prompt or 0.0,
                self.completion or 0.0,
                repeat=self.repeat,
                peak=1.0 if self.backlog is not None else self.peak,
                backlog_hours=self.within if self.backlog is not None else None,
            )


class OwnNodeFlags(options.FlagGroup):
    """A node of the user's own, as measured or offered."""

    tokens_per_second: float | None = _nodes(
        "R", "Your node: tokens/s of one request alone.", show_default="nodes by the catalogue"
    )
    prefill_tokens_per_second: float | None = _nodes(
        "R", "Your node: prompt tokens/s.", show_default="10 times --tokens-per-second"
    )
    slots: int = _nodes("N", "Your node: requests at a time.", 1, min=1, max=256)
    batch_cost: float = _nodes(
        "SHARE", "Your node: by how much one more busy slot prolongs a step.", 0.15
    )
    memory: str | None = _nodes(
        "SIZE", "Your node, with --models: what it has for them, such as 64GiB."
    )
    price_per_hour: float | None = _nodes("PRICE", "Your node.")
    price_per_month: float | None = _nodes("PRICE", "Likewise, of 730 hours.")
    watts: float = _nodes("W", "Your node, while it works.", 0.0)
    idle_watts: float = _nodes("W", "Your node, idle.", 0.0)

    def node(self, decode: float, models: Sequence[SimulatedModel]) -> NodeType:
        """Return the node, which must have memory for each of the models. Raises CommandFailed."""
        from pydantic import ValidationError

        from gateway.config.fields import parse_size
        from gateway.config.yaml_file import error_words
        from gateway.workshop.plan.catalogue import NodeType
        from gateway.workshop.simulate.fleets import GIB, FleetError, check_fit

        prefill, memory = self.prefill_tokens_per_second, self.memory
        if prefill is None:
            prefill = min(1e7, PREFILL_FACTOR * decode)
            print_note(
                f"assumed that a node reads {prefill:g} prompt tokens/s, {PREFILL_FACTOR:g} times "
                "what it writes: --prefill-tokens-per-second tells more"
            )
        try:
            node = NodeType(
                name="node",
                slots=self.slots,
                decode_tps=decode,
                prefill_tps=prefill,
                batch_cost=self.batch_cost,
                memory_gib=None if memory is None else parse_size(memory) / GIB,
                price_per_hour=self.price_per_hour,
                price_per_month=self.price_per_month,
                watts=self.watts,
                idle_watts=self.idle_watts,
            )
        except ValidationError as error:
            wrong = error.errors()[0]
            key = str(wrong["loc"][0])
            option = _OPTIONS.get(key, "--" + key.replace("_", "-"))
            words = filter(None, error_words(wrong, NodeType, wrong["loc"]))
            raise WrongUsage(f"{option}: {'; '.join(words)}") from None
        except ValueError as error:
            raise WrongUsage(f"--memory {memory}: {error}") from None
        if models:
            with failing_by(FleetError, before="--models: ", status=2):
                check_fit(node.machines(1), models)
        return node


def plan(
    *,
    load: WorkloadFlags,
    ttft_p95: float | None = _goal(
        "SECONDS", "95 % of the requests have their first token by then."
    ),
    completion_p95: float | None = _goal("SECONDS", "95 % of the requests have ended by then."),
    most_use: float = _goal(
        "SHARE", "Without a goal: share of the capacity that the busiest hour may use.", 0.8
    ),
    own: OwnNodeFlags,
    catalogue: Path | None = _nodes(
        "FILE",
        "Node types with their speeds and prices.",
        show_default="the package's, of examples",
    ),
    types: list[str] | None = _nodes(
        "NAME",
        "A type of the catalogue, also beside your node. Repeat it.",
        name="--type",
        show_default="all",
    ),
    model_gib: float | None = _nodes(
        "GIB",
        "Size of the model's file: scales the catalogue's speeds, checks its memory.",
        show_default="the catalogue's model",
    ),
    price_per_kwh: float = _nodes("PRICE", "Electricity of the types that have `watts`.", 0.0),
    claimed_per_million: float | None = _nodes(
        "PRICE", "A price of a million tokens that somebody claims of your node: is it possible?"
    ),
    fleet: bool = _fleet.switch(
        "--fleet",
        "Nodes of the gateway that runs, and the busiest hour of its ledger: what if one "
        "more, one less?",
    ),
    since: str = _fleet(
        "TIME", "The busiest hour of the ledger from then on: a date, or how long ago.", "7d"
    ),
    gateway: AdminFlags,
    requests: int = _simulation(
        "N",
        "Made-up requests of a simulation: more make its figures surer.",
        3000,
        min=100,
        max=1_000_000,
    ),
    seed: int = _simulation("N", "Same seed, same plan.", 1),
    start: options.StartKind = options.START,
    time_limit: float = _simulation(
        "SECONDS", "Longest time for all simulations; what is missing then is estimated.", 180.0
    ),
    plot: Path | None = _simulation(
        "FILE", "Draw the break-even of CPU, GPU and hybrid: .png, .svg or .pdf."
    ),
    as_json: bool = options.JSON,
) -> None:
    """Say how many of which nodes a traffic takes, at what wait and price.

    The first estimate is queueing theory (Erlang C, Allen-Cunneen, with slots that share a node's
    speed). The answer is a simulation in which the gateway's own scheduler places the requests. The
    table says which figure is from which. Nothing is sent anywhere, but for --fleet.
    """
    options.check_plot_file(plot)
    for name, value, least, most in (
        # Of traffic in figures `Workload` checks it.
        ("--peak", load.peak if fleet else None, 1.0, 1000.0),
        ("--price-per-kwh", price_per_kwh, 0.0, 1e6),
        ("--claimed-per-million", claimed_per_million, 0.0, 1e9),
        ("--time-limit", time_limit, 1e-6, 86_400.0),
    ):
        if value is not None and not least <= value <= most:
            raise WrongUsage(f"{name} {value:g}: must be a number from {least:g} to {most:,.0f}")
    from gateway.cli.workshop.simulate import read_trace_file
    from gateway.workshop.plan.catalogue import (
        NoTypeFitsError,
        fitting_types,
        packaged_catalogue,
        read_catalogue,
    )
    from gateway.workshop.plan.search import Goal, PlanQuestion, from_trace
    from gateway.workshop.simulate.fleets import FleetError, models_from_text, with_shares

    with failing_by(ValueError, FleetError, status=2):
        goal = Goal(ttft_p95, completion_p95, most_use)
        models = load.models
        on_demand = with_shares(models_from_text(models), seed) if models is not None else []
    # A fleet that runs has learnt its speeds.
    question = partial(
        PlanQuestion,
        goal=goal,
        price_per_kwh=price_per_kwh,
        requests=requests,
        seed=seed,
        warm=fleet or start == "warm",
    )
    for name, unfit in (("--backlog", load.backlog), ("--plot", plot), ("--models", models)):
        if fleet and unfit is not None:
            raise WrongUsage(f"{name} has no meaning with --fleet: leave it out")
    recorded, asked = None, None
    if load.trace is not None:
        names = [one.name for one in on_demand]
        recorded = read_trace_file(load.trace, names, limit=load.limit)
        with failing_by(ValueError, before="--trace: ", status=2):
            asked = from_trace(recorded, on_demand)
    elif load.has_figures or not fleet:
        asked = replace(load.workload(), models=tuple(on_demand))
    if asked is None or fleet:
        measured, traffic = _running_fleet(gateway, asked, recorded, since, load.peak, seed)
        played = question(traffic.workload, types=(), recorded=traffic.recorded)
        _plan_fleet(played, measured, traffic, time_limit, as_json)
        return
    listed = packaged_catalogue() if catalogue is None else read_catalogue(catalogue)
    nodes: list[NodeType] = []
    if own.tokens_per_second is not None:
        nodes.append(own.node(own.tokens_per_second, on_demand))
    else:
        told = {**vars(own), "claimed_per_million": claimed_per_million}
        if given := [name for name in _OF_OWN_NODE if told[name] is not None]:
            raise WrongUsage(
                f"--{given[0].replace('_', '-')} is of your node: give --tokens-per-second, too; "
                "prices of types are in the catalogue (--catalogue FILE)"
            )
    currency = ""
    if not nodes or types:
        with failing_by(NoTypeFitsError, status=2):
            fitting, notes = fitting_types(listed, model_gib, tuple(types or ()), on_demand)
        print_note(*notes)
        nodes += fitting
        currency = listed.currency
    if claimed_per_million is not None:
        _check_claim(nodes[0], claimed_per_million)
    new = question(asked, types=tuple(nodes), recorded=recorded)
    _plan_new(new, currency, time_limit, plot, as_json)


def _running_fleet(
    gateway: AdminFlags,
    asked: Workload | None,
    recorded: Trace | None,
    since: str,
    peak: float,
    seed: int,
) -> tuple[MeasuredFleet, FleetTraffic]:
    """Return the nodes of the running gateway as measured, and the traffic to play on them.

    Without traffic that is asked for it is the busiest hour of its ledger, `peak` times as fast.
    Notes go to stderr. Raises CommandFailed.
    """
    from gateway.workshop.plan import running_fleet

    with (
        failing_by(running_fleet.UnmeasuredFleetError, ValueError, before="--fleet: "),
        gateway.connect() as admin,
    ):
        nodes = admin.nodes()
        has_routers = any(node.get("router") for node in nodes)
        placed = admin.request("GET", "/admin/placements") if has_routers else {}
        measured = running_fleet.measured_fleet(nodes, placed)
        print_note(*measured.notes)
        if asked is not None:
            return measured, running_fleet.traffic_of(asked, measured, recorded, seed)
        try:
            told = admin.request("GET", "/admin/usage/arrivals", {"since": since}, timeout=90.0)
        except GatewayRefused as error:
            raise CommandFailed(
                f"{error}; instead of its ledger, --requests-per-hour, --prompt and --completion "
                "or --trace tell the traffic"
            ) from None
        traffic = running_fleet.busiest_hour(told, measured, peak)
        print_note(*traffic.notes)
        return measured, traffic


_OF_OWN_NODE = (
    *("prefill_tokens_per_second", "price_per_hour", "price_per_month"),
    *("memory", "claimed_per_million"),
)
_OPTIONS = {
    "decode_tps": "--tokens-per-second",
    "prefill_tps": "--prefill-tokens-per-second",
    "memory_gib": "--memory",
}


def _check_claim(node: NodeType, claimed: float) -> None:
    """Say whether a claimed price of a million tokens can be. Raises CommandFailed."""
    from gateway.workshop.plan.answer import contradiction

    if node.per_hour is None:
        raise WrongUsage("--claimed-per-million needs --price-per-hour or -month")
    wrong = contradiction(node.per_hour, node.decode_tps, claimed)
    print_note(wrong or f"{claimed:g} a million tokens is what its speed and price make")


def _plan_new(
    question: PlanQuestion, currency: str, time_limit: float, plot: Path | None, as_json: bool
) -> None:
    from gateway.workshop.plan import answer
    from gateway.workshop.simulate.simulation import StuckError

    with failing_by(StuckError), _time_limit(time_limit) as limit:
        found = answer.answer(question, limit)
        rows = answer.compare_deployments(found, limit)
    if found.best is None:
        reasons = "\n".join(f"{one.name}: {one.rejected}" for one in found.options)
        raise CommandFailed(f"no fleet of these nodes meets the goal:\n{reasons}")
    crossing = answer.break_even(found)
    if as_json:
        print_json(answer.as_dict(found, rows, crossing, currency))
    else:
        _show(found, rows, crossing, currency)
    print_note(*found.notes)
    if plot is not None:
        if crossing is None:
            raise CommandFailed(
                "--plot: there is no break-even to draw: it takes priced types of both tiers that "
                "meet the goal, and no backlog (--type adds types of the catalogue to your node)"
            )
        answer.plot_break_even(plot, crossing, currency)
        print_note(f"written: {plot}")


def _plan_fleet(
    question: PlanQuestion,
    measured: MeasuredFleet,
    traffic: FleetTraffic,
    time_limit: float,
    as_json: bool,
) -> None:
    from gateway.workshop.plan.running_fleet import UnmeasuredFleetError, what_if
    from gateway.workshop.simulate.simulation import StuckError

    with (
        failing_by(UnmeasuredFleetError, StuckError, before="--fleet: "),
        _time_limit(time_limit) as limit,
    ):
        found = what_if(question, measured, traffic, limit)
    print_note(*found.notes)
    if as_json:
        print_json(found.as_dict(question))
    else:
        _show_changes(question, found)


@contextmanager
def _time_limit(seconds: float) -> Iterator[TimeLimit]:
    """The limit of all simulations, with a bar on a terminal."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from gateway.cli.progress import Progress
    from gateway.workshop.plan.search import TimeLimit

    with Progress(
        TextColumn("simulating {task.description}"),
        BarColumn(),
        TextColumn("of the time limit"),
        TimeElapsedColumn(),
    ) as bar:
        task = bar.add_task("", total=1.0)

        def update(name: str, share: float) -> None:
            if bar.on_terminal:
                bar.update(task, completed=share, description=name)

        yield TimeLimit(seconds, on_trial=update)


def _show(
    found: PlanAnswer, rows: Sequence[Deployment], crossing: BreakEven | None, currency: str
) -> None:
    from gateway.workshop.plan.answer import crossing_lines, explain, headline

    best = found.best
    assert best is not None
    unit = f" {currency}" if currency and best.price.month is not None else ""
    print(f"{headline(best)}{unit}\n")
    print_rows(map(_row, found.options))
    for option in found.options:
        if option.rejected:
            print(f"  {option.name} misses the goal: {option.rejected}")
    print()
    print_rows(
        [
            ("DEPLOYMENT", row.way),
            ("FLEET", row.fleet),
            ("", row.verdict),
            ("P95", None if row.trial is None else f"{row.trial.completion.p95:.1f}"),
            ("MONTH", _money(row.per_month)),
            ("REASON", row.reason),
        ]
        for row in rows
    )
    if crossing is not None:
        print("", *crossing_lines(crossing), sep="\n")
    print("\nhow it comes about")
    for word, line in explain(found.question, best).items():
        print(f"  {word:<12}{line}")


def _row(option: FleetOption) -> list[tuple[str, object]]:
    trial, guess = option.trial, option.estimate
    times = _times(trial)
    if trial is None and guess is not None and math.isfinite(guess.wait):
        times[0] = "WAIT", f"{guess.wait:.2f}"
        times[2] = "COMPLETION", f"{guess.completion:.2f}"
    is_least = trial is None and not option.rejected
    return [
        ("FLEET", f"{option.name} or more" if is_least else option.name),
        ("USE", f"{option.use:.0%}"),
        *times,
        ("HOUR", _money(option.price.per_hour, 4)),
        ("MONTH", _money(option.price.month)),
        ("PER 1M", _money(option.price.per_million_tokens)),
        ("FIGURES BY", "estimate" if trial is None else "simulator"),
    ]


def _times(trial: FleetTrial | None) -> list[tuple[str, object]]:
    titles = ("WAIT", "TTFT P95", "COMPLETION", "P95")
    if trial is None:
        return [(title, None) for title in titles]
    wait, completion = trial.wait, trial.completion
    figures = (wait.mean, trial.ttft.p95, completion.mean, completion.p95)
    return [(title, f"{one:.2f}") for title, one in zip(titles, figures, strict=True)]


def _money(value: float | None, digits: int = 2) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def _show_changes(question: PlanQuestion, found: FleetAnswer) -> None:
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
            + (f"; models on demand in {one.memory_gib:.3g} GiB" if one.memory_gib else "")
        )
    print()
    print_rows(
        [
            ("CHANGE", row.change),
            ("FLEET", row.fleet),
            ("USE", f"{row.use:.0%}" if math.isfinite(row.use) else None),
            *_times(row.trial),
            ("MONTH", _money(row.price.month)),
            ("GOAL", ", ".join(row.missed) or "met"),
        ]
        for row in found.changes
    )
    print(f"\n{found.advice.sentence}")
