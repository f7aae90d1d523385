"""`llama-gateway simulate`: plays traffic on a model of a fleet, under one policy or several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.cli import options
from gateway.cli.options import Panel, examples_epilog, flag
from gateway.cli.terminal import (
    WrongUsage,
    failing_by,
    print_json,
    print_note,
    print_rows,
)

if TYPE_CHECKING:
    from gateway.workshop.simulate.fleets import SimulatedModel
    from gateway.workshop.simulate.report import PolicyReport
    from gateway.workshop.simulate.simulation import SimulatedMachine, Trace


EXAMPLES = examples_epilog(
    ("llama-gateway simulate --fleet 4x2@40:600,2x2@16:250", "every policy, generated chats"),
    (
        "llama-gateway simulate --fleet 100x2@40:600 --generate rate=15,requests=50000,system=3000",
        "a larger fleet, 15 requests a second, system prompts of 3,000 tokens",
    ),
    (
        "llama-gateway nodes --json > speeds.json && llama-gateway simulate --speeds speeds.json",
        "your own fleet, with the speeds that the running gateway measured",
    ),
    (
        "llama-gateway simulate --trace yesterday.jsonl --policy least_finish --policy nginx",
        "your own traffic, two policies",
    ),
    (
        "llama-gateway simulate --fleet 4x2@40:600,2x2@16:250 --start warm",
        "the same nodes, with speeds that are known from the start",
    ),
    (
        "llama-gateway simulate --fleet 2x2@40:600 --standby 4x2@40:600 --generate burst=8",
        "bursts: what standby machines save, and what they cost in waits",
    ),
    (
        "llama-gateway simulate --fleet 1x2@40:600/24GiB,2x2@40:600/48GiB --models 8x2GiB:20GiB",
        "routers: models placed by the gateway, by each router, and by hand",
    ),
    (
        "llama-gateway simulate --trace AzureLLMInferenceTrace_conv.csv --plot conv.png",
        "a public trace, and a plot",
    ),
)

_fleet = Panel("Fleet")
_traffic = Panel("Traffic")


class TrafficFlags(options.FlagGroup):
    """The requests that are played."""

    trace: Path | None = _traffic(
        "FILE",
        "Requests: JSON lines, or .csv in the layout of the public Azure LLM traces.",
        show_default="generated traffic",
    )
    skip_broken: bool = _traffic.switch(
        "--skip-broken", "Skip broken lines of the trace, and print their number."
    )
    limit: int | None = _traffic("N", "Only the first N requests of the trace.", min=1)
    generate: str = _traffic(
        "NAME=VALUE,...",
        "Traffic without a trace: rate (requests/s), requests, turns, tenants, system, "
        "question, answer, limit (tokens), pause (s), callers, urgent, premium, batch "
        "(shares); burst (times as many), every, lasting (s); of several models: zipf, and "
        "moves (s until others are popular).",
        "rate=1,requests=5000",
    )
    seed: int = _traffic("N", "Same seed, same traffic.", 1)

    def requests(
        self, models: Sequence[SimulatedModel] = (), others: Collection[str] = ()
    ) -> Trace:
        """Return the requests: for these models, if any are given. Raises CommandFailed."""
        if self.trace is None:
            from gateway.workshop.simulate.simulation import Traffic, parse_figures
            from gateway.workshop.simulate.simulation import generate as generate_traffic

            names = [model.name for model in models]
            shares = [model.share for model in models if model.share is not None]
            with failing_by(ValueError, before="--generate: ", status=2):
                traffic = parse_figures(self.generate, Traffic)
            return generate_traffic(traffic, self.seed, names, shares)
        known = {*others, *(model.name for model in models)}
        requests = read_trace_file(
            self.trace, known, skip_broken=self.skip_broken, limit=self.limit
        )
        if requests.skipped:
            print_note(f"{self.trace}: skipped {requests.skipped} broken lines")
        return requests


def simulate(
    *,
    nodes: Path = options.NODES,
    fleet: str | None = _fleet(
        "COUNTxSLOTS@DECODE:PREFILL",
        "A made-up fleet: nodes, slots each, tokens/s of decode for one request, tokens/s "
        "of prefill. Several kinds with commas; +0.3 behind one: the share that another "
        "busy slot adds to a step (default 0.15); /64GiB: routers with so much memory.",
        show_default="the inventory",
    ),
    models: str | None = _fleet(
        "COUNTxSMALLEST:LARGEST",
        "Models that routers load on demand, such as 12x2GiB:30GiB; or a file: a list of name, "
        "memory and, if known, load_seconds and share, or the output of `llama-gateway models "
        "--json`. Compares model placements; speeds are those of a model of 8 GiB, but those "
        "that --speeds has of a model.",
    ),
    placements: int = _fleet(
        "N", "Random placements by hand that are tried.", 30, min=0, max=100_000
    ),
    standby: str | None = _fleet(
        "COUNTxSLOTS@DECODE:PREFILL",
        "Standby machines beside --fleet. Compares all always on, autoscaled, and without them.",
    ),
    elastic: str = _fleet(
        "NAME=VALUE,...",
        "Their rules, as `elastic` in the settings: start_above, start_after, stop_after, "
        "cooldown (s), min, max; startup: seconds from a start to work; cost of an hour.",
        "startup=60",
    ),
    speeds: Path | None = _fleet(
        "FILE", "Speeds of the inventory's nodes: the output of `llama-gateway nodes --json`."
    ),
    speed: str = _fleet(
        "DECODE:PREFILL",
        "Tokens/s of a node that is not in --speeds, times its `speed_hint`.",
        "10:100",
    ),
    batch: int = _fleet("TOKENS", "Tokens of a step.", 512, min=32, max=65536),
    cache_ram: int = _fleet(
        "MiB", "Host memory of each node for prompts; 0 for none.", 8192, min=0
    ),
    traffic: TrafficFlags,
    policy: list[str] | None = flag(
        "NAME",
        "Repeat it to compare: least_finish, least_loaded, round_robin, prefix_hash; "
        "nginx (least_conn), haproxy (leastconn, maxconn = slots).",
        show_default="all",
    ),
    exact: bool = flag.switch(
        "--exact",
        "The gateway knows speeds, lengths and caches instead of learning them. For "
        "fleets of some dozens of nodes.",
    ),
    start: options.StartKind = options.START,
    plot: Path | None = flag("FILE", "Plot the results: .png, .svg or .pdf."),
    as_json: bool = options.JSON,
) -> None:
    """Play traffic on a model of the fleet, under one policy after the other.

    The model has llama.cpp's slots, batches and prompt caches; the gateway's policies are its own
    code. Nothing is sent anywhere. Times are seconds; BOUND x is the mean completion over a bound
    that no schedule could beat.
    """
    from gateway.workshop.simulate.comparison import compare, known_policies
    from gateway.workshop.simulate.fleets import FleetError
    from gateway.workshop.simulate.report import overload_warning, plot_reports
    from gateway.workshop.simulate.simulation import StuckError

    warm = start == "warm"
    if exact and warm:
        raise WrongUsage("--exact knows all speeds: leave --start out")
    names = list(dict.fromkeys(policy or known_policies()))
    servers = batch, cache_ram
    with failing_by(FleetError, status=2):
        machines = _machines(nodes, fleet, speeds, speed, servers, on_demand=models is not None)
    unfit = {"--policy": policy not in (None, ["least_finish"]), "--plot": plot, "--exact": exact}
    if models is not None:
        _check_alone("--models", {**unfit, "--standby": standby})
        _simulate_models(machines, models, traffic, placements, warm=warm, as_json=as_json)
        return
    if standby is not None:
        _check_alone("--standby", {**unfit, "an inventory": fleet is None})
        _simulate_elastic(machines, standby, elastic, servers, traffic, warm=warm, as_json=as_json)
        return
    options.check_plot_file(plot)
    if unknown := [name for name in names if name not in known_policies()]:
        known = ", ".join(known_policies())
        raise WrongUsage(f"--policy: there is no policy {unknown[0]!r}; known: {known}")
    requests = traffic.requests()
    with failing_by(StuckError), _progress(len(names) * len(requests.jobs)) as progress:
        reports = compare(
            requests, machines, names, exact=exact, warm=warm, seed=traffic.seed, progress=progress
        )
    slots = sum(machine.slots for machine in machines)
    if as_json:
        print_json(
            {
                "start": start,
                "nodes": len(machines),
                "slots": slots,
                "requests": len(requests.jobs),
                "skipped_lines": requests.skipped,
                "policies": [report.as_dict() for report in reports],
            }
        )
    else:
        print_rows(map(_row, reports), state_column=0)
        if warning := overload_warning(reports):
            print(f"\n{warning}")
    if plot is not None:
        title = f"{len(requests.jobs):,} requests on {len(machines):,} nodes of {slots:,} slots"
        plot_reports(plot, reports, title)
        print_note(f"written: {plot}")


def _check_alone(option: str, unfit: dict[str, object]) -> None:
    """Refuse what has no meaning beside an option. Raises CommandFailed."""
    if given := [name for name, value in unfit.items() if value]:
        raise WrongUsage(
            f"{option} compares under least_finish alone: leave {', '.join(given)} out"
        )


def _machines(
    nodes: Path,
    fleet: str | None,
    speeds: Path | None,
    speed: str,
    servers: tuple[int, int],
    *,
    on_demand: bool,
) -> list[SimulatedMachine]:
    from gateway.workshop.simulate import fleets

    if fleet is not None:
        if speeds is not None:
            raise fleets.FleetError("--speeds is for an inventory; --fleet holds its own speeds")
        machines = fleets.from_text(fleet, *servers)
        if not on_demand and any(machine.memory for machine in machines):
            raise fleets.FleetError(fleets.MODELS_NEEDED)
        return machines
    from gateway.config.inventory import load_inventory

    usual = fleets.from_text(f"1x1@{speed}", *servers)[0]
    known = {} if speeds is None else fleets.read_speeds(speeds)
    machines, notes = fleets.from_inventory(
        load_inventory(nodes), known, usual, on_demand=on_demand
    )
    print_note(*notes)
    return machines


def read_trace_file(
    path: Path,
    models: Collection[str] = (),
    *,
    skip_broken: bool = False,
    limit: int | None = None,
) -> Trace:
    """Read the file of `--trace`, which names no other models than these, if there are any.

    Raises CommandFailed, ConfigError.
    """
    from gateway.workshop.simulate.simulation import read_trace

    try:
        requests = read_trace(path, skip_broken=skip_broken, limit=limit)
    except OSError as error:
        raise WrongUsage(
            f"--trace {path}: can't be read: {error.strerror} (check the path and its rights)"
        ) from None
    unknown = {job.model for job in requests.jobs}.difference(models)
    if models and unknown:
        shown = ", ".join(sorted(name or "none" for name in unknown)[:3])
        raise WrongUsage(f"--trace {path}: not in --models: {shown}")
    return requests


@contextmanager
def _progress(requests: int) -> Iterator[Callable[[str, int], None] | None]:
    """Show a bar on a terminal, nothing elsewhere."""
    from gateway.cli.progress import Progress

    with Progress() as bar:
        task = bar.add_task("", total=requests)
        done: dict[str, int] = {}

        def update(name: str, ended: int) -> None:
            done[name] = ended
            bar.update(task, completed=sum(done.values()), description=name)

        yield update if bar.on_terminal else None


def _seconds(*cells: tuple[str, float]) -> list[tuple[str, object]]:
    return [(title, f"{value:.2f}") for title, value in cells]


def _row(report: PolicyReport) -> list[tuple[str, object]]:
    ttft = report.ttft
    return [
        ("POLICY", report.policy),
        *_seconds(("COMPLETION", report.completion.mean), ("BOUND x", report.ratio)),
        *_seconds(("TTFT P50", ttft.p50), ("P95", ttft.p95), ("P99", ttft.p99)),
        *_seconds(("WAIT", report.wait.mean), ("SERVICE", report.service)),
        ("TOKENS/S", f"{report.tokens_per_second:.0f}"),
        ("CACHED", f"{report.cached_share:.0%}"),
        ("BUSY", f"{report.utilisation:.0%}"),
        ("LOAD", None if report.load is None else f"{report.load:.0%}"),
        ("QUEUE", str(report.longest_queue)),
        ("CPU", f"{report.cpu_seconds:.1f}"),
    ]


def _simulate_models(
    nodes: Sequence[SimulatedMachine],
    text: str,
    traffic: TrafficFlags,
    placements: int,
    *,
    warm: bool,
    as_json: bool,
) -> None:
    from gateway.workshop.simulate.comparison import HAND_TRIED, compare_model_placements
    from gateway.workshop.simulate.fleets import FleetError, check_fit, models_from_text
    from gateway.workshop.simulate.simulation import StuckError

    with failing_by(FleetError, status=2), failing_by(StuckError):
        models = models_from_text(text)
        check_fit(nodes, models)
        others = {name for node in nodes if not node.memory for name in node.models}
        trace = traffic.requests(models, others)
        with _progress(placements + HAND_TRIED + 3) as progress:
            found = compare_model_placements(
                trace, nodes, models, placements, warm=warm, seed=traffic.seed, progress=progress
            )
    if as_json:
        print_json(
            {
                "start": "warm" if warm else "cold",
                "nodes": len(nodes),
                "models": [
                    {"name": one.name, "memory": one.memory, "load_seconds": one.load_seconds}
                    for one in models
                ],
                "requests": len(trace.jobs),
                "placements": [{"placement": one.policy, **one.as_dict()} for one in found],
            }
        )
        return
    print_rows(map(_model_row, found), state_column=0)
    by_hand = next((one.loaded for one in found if one.loaded), None)
    if by_hand is None:
        print("\nby hand: no placement tried holds all models at once")
        return
    print("\nThe best placement by hand, for this traffic:")
    for node, names in by_hand.items():
        print(f"  {node}: {', '.join(names) or 'nothing'}")


def _model_row(one: PolicyReport) -> list[tuple[str, object]]:
    whole, ttft = one.completion, one.ttft
    return [
        ("PLACEMENT", one.policy),
        *_seconds(("COMPLETION", whole.mean), ("P50", whole.p50), ("P95", whole.p95)),
        *_seconds(("TTFT P50", ttft.p50), ("TTFT P95", ttft.p95), ("WAIT", one.wait.mean)),
        ("LONGEST", f"{one.longest_wait:.1f}"),
        ("LOADS", one.loads),
        ("LOADING", f"{one.load_seconds:.0f}"),
        ("CPU", f"{one.cpu_seconds:.1f}"),
    ]


def _simulate_elastic(
    base: list[SimulatedMachine],
    standby: str,
    rules_text: str,
    servers: tuple[int, int],
    traffic: TrafficFlags,
    *,
    warm: bool,
    as_json: bool,
) -> None:
    from gateway.workshop.simulate.comparison import ElasticFigures, compare_elastic
    from gateway.workshop.simulate.fleets import FleetError, from_text
    from gateway.workshop.simulate.simulation import StuckError, parse_figures

    trace = traffic.requests()
    with failing_by(ValueError, before="--elastic: ", status=2):
        rules = parse_figures(rules_text, ElasticFigures)
    with failing_by(FleetError, before="--standby: ", status=2):
        spares = from_text(standby, *servers)
    with failing_by(StuckError):
        found = compare_elastic(trace, base, spares, rules, warm=warm, seed=traffic.seed)
    costs = [one.machine_hours * rules.cost for one in found]
    pairs = list(zip(found, costs, strict=True))
    if as_json:
        told = [{"fleet": one.policy, "cost": cost, **one.as_dict()} for one, cost in pairs]
        print_json({"start": "warm" if warm else "cold", "fleets": told})
        return
    rows = (
        [
            ("FLEET", one.policy),
            *_seconds(("MACHINE-HOURS", one.machine_hours), ("COST", cost)),
            ("STARTS", one.starts),
            *_seconds(("WAIT", one.wait.mean), ("WAIT P95", one.wait.p95)),
            *_seconds(("TTFT P50", one.ttft.p50), ("P95", one.ttft.p95), ("P99", one.ttft.p99)),
            *_seconds(("COMPLETION", one.completion.mean)),
        ]
        for one, cost in pairs
    )
    print_rows(rows, state_column=0)
