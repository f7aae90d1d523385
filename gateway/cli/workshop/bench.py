"""`llama-gateway bench`: measures any OpenAI-compatible server under load."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from gateway.cli import options
from gateway.cli.options import Panel, argument, examples_epilog
from gateway.cli.terminal import (
    CommandFailed,
    WrongUsage,
    failing_by,
    print_json,
    print_note,
    print_rows,
    print_table,
    run_interruptibly,
)

if TYPE_CHECKING:
    from gateway.local.energy import EnergyMeter
    from gateway.workshop.bench.load import BenchPlan, Load, LoadRun
    from gateway.workshop.bench.report import BenchReport, Difference
    from gateway.workshop.simulate.simulation import Trace

EXAMPLES = examples_epilog(
    (
        "llama-gateway bench http://127.0.0.1:8000",
        "1, 4 and 8 requests at a time, of 256 + 64 tokens",
    ),
    (
        "llama-gateway bench http://epyc-a:8080 --concurrency 16 --prompt 2000 --prefix-share 0.5",
        "long prompts, of which half is the same in all",
    ),
    (
        "llama-gateway bench http://127.0.0.1:8000 --rate 0.5,1 --duration 300 --goal-ttft 5",
        "arrivals at random, five minutes at each rate; the share that kept the goal",
    ),
    (
        "llama-gateway bench http://127.0.0.1:8000 --trace yesterday.jsonl --html report.html",
        "your own traffic, and a page to pass on",
    ),
    (
        "llama-gateway bench http://127.0.0.1:8000 --json > new.json",
        "the report, for scripts and for --compare",
    ),
    ("llama-gateway bench --compare old.json new.json", "what has changed, and what may be chance"),
)

DEFAULT_LEVELS = "1,4,8"
_load = Panel("Load")
_request = Panel("Requests")
_server = Panel("Server")
_goal = Panel("Goal")
_output = Panel("Output")


EndpointName = Literal["chat", "completions", "embeddings"]


class LoadFlags(options.FlagGroup):
    """The load of a benchmark."""

    concurrency: str | None = _load(
        "N,...",
        "Closed loop: so many requests at a time, one load after the other.",
        show_default=DEFAULT_LEVELS,
    )
    rate: str | None = _load(
        "R,...",
        "Open loop: so many requests a second at random times (Poisson), whether the "
        "server keeps up or not.",
    )
    trace: Path | None = _load(
        "FILE",
        "Open loop: the requests of a trace at its times (JSON lines, or .csv in the "
        "layout of the Azure LLM traces). A later turn of a conversation waits for "
        "the one before.",
    )
    speed_up: float = _load("X", "Play the trace X times as fast.", 1.0, min=0.001, max=1e6)
    requests: int | None = _load(
        "N",
        "Requests of each load.",
        min=1,
        max=200_000,
        show_default="closed loop: 4 for each at a time, at least 10",
    )
    duration: float | None = _load(
        "SECONDS",
        "No request of a load starts later. Those under way are awaited.",
        min=0.1,
        max=7 * 86_400,
        show_default="--rate: 60",
    )
    warm_up: int = _load(
        "N",
        "Requests before the first load, one after the other. They show what a request "
        "takes alone, and are not counted.",
        2,
        min=0,
        max=1000,
    )
    in_flight: int = _load(
        "N",
        "Open loop: most requests under way; others start late, which is told.",
        512,
        min=1,
        max=20_000,
    )

    def loads(self, played: Trace | None) -> list[Load]:
        """Return the loads, of which `played` is the trace. Raises CommandFailed."""
        from gateway.workshop.bench.load import Load, LoadError, Loop, parse_loads

        names = ("concurrency", "rate", "trace")
        given = [f"--{name}" for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise WrongUsage(f"{' and '.join(given)}: choose one of them")
        if played is None and self.speed_up != 1.0:
            raise WrongUsage("--speed-up is for --trace")
        with failing_by(LoadError, before=f"{given[0] if given else '--concurrency'} ", status=2):
            if played is not None:
                return [Load(Loop.TRACE, self.speed_up, len(played.jobs), self.duration)]
            loop, levels = Loop.CLOSED, self.concurrency or DEFAULT_LEVELS
            if self.rate is not None:
                loop, levels = Loop.POISSON, self.rate
            return parse_loads(loop, levels, self.requests, self.duration)

    def played_trace(self) -> Trace | None:
        """Read the trace, if one is named. Raises CommandFailed."""
        from gateway.cli.workshop.simulate import read_trace_file
        from gateway.workshop.bench.exchange import MOST_PROMPT_TOKENS
        from gateway.workshop.bench.load import MOST_REQUESTS

        if self.trace is None:
            return None
        trace = read_trace_file(self.trace, limit=self.requests or MOST_REQUESTS)
        longest = max(max(job.prompt.tokens, job.output) for job in trace.jobs)
        if longest > MOST_PROMPT_TOKENS:
            raise WrongUsage(
                f"--trace {self.trace}: a request has {longest:,} tokens, bench sends at most "
                f"{MOST_PROMPT_TOKENS:,}"
            )
        return trace


def bench(
    *,
    url: str | None = argument(
        "URL", "Address of the server or gateway, with or without /v1.", None, show_default=False
    ),
    load: LoadFlags,
    endpoint: EndpointName = _request(
        "NAME", "chat, completions (both streamed) or embeddings.", "chat"
    ),
    prompt: int = _request(
        "TOKENS", "Length of a prompt, in the server's tokens.", 256, min=1, max=200_000
    ),
    max_tokens: int = _request("TOKENS", "Length of an answer, at most.", 64, min=1, max=100_000),
    prefix_share: float = _request(
        "SHARE",
        "Share of a prompt that is the same in all, such as a system prompt.",
        0.0,
        min=0.0,
        max=1.0,
    ),
    prefixes: int = _request("N", "Different beginnings, taken in turn.", 1, min=1, max=10_000),
    ignore_eos: bool | None = _request.switch(
        "--ignore-eos/--no-ignore-eos",
        "Ask for answers that go on to --max-tokens.",
        None,
        show_default="where the server is known to understand it",
    ),
    body: str = _request(
        "JSON", 'Fields of every body, such as {"top_k": 1}; null leaves one of ours out.', "{}"
    ),
    seed: int = _request("N", "Same seed, same requests.", 1),
    model: str | None = _server(
        "NAME", "The model to ask for.", show_default="the server's first one"
    ),
    key_file: Path | None = options.KEY_FILE,
    ca: Path | None = options.CA,
    timeout: float = _server(
        "SECONDS", "For a request; a longer one has failed.", 600.0, min=0.1, max=86_400
    ),
    goal_ttft: float | None = _goal("SECONDS", "Longest time to the first token.", min=0.0),
    goal_inter_token: float | None = _goal("SECONDS", "Longest mean time between tokens.", min=0.0),
    goal_completion: float | None = _goal(
        "SECONDS", "Longest time to the end of the answer.", min=0.0
    ),
    compare: tuple[Path, Path] | None = _output(
        "BEFORE.json AFTER.json",
        "Measure nothing: compare two reports that --json wrote.",
        show_default=False,
    ),
    csv: Path | None = _output("FILE", "Write a line for each request."),
    plot: Path | None = _output("FILE", "Plot the results: .png, .svg or .pdf."),
    html: Path | None = _output("FILE", "Write the report as one page that needs nothing else."),
    as_json: bool = options.JSON,
) -> None:
    """Put load on an OpenAI-compatible server, and measure what its clients get.

    With --concurrency a fixed number of requests is under way (closed loop). With --rate or --trace
    they start at times of their own, however slow the server is (open loop), and their latencies
    count from those times. Measured are the time to the first token (TTFT), the time between
    tokens, tokens per second, failures by reason, and what limits: client, slots, prefill, decode
    or network.

    Prompts are random words of the wanted length. Ctrl-C ends the run, and reports what was
    measured.
    """
    if compare is not None:
        unfit = {url, load.concurrency, load.rate, load.trace, csv, plot, html}
        if unfit != {None}:
            raise WrongUsage("--compare measures nothing: leave URL and load out")
        _compare(compare, as_json=as_json)
        return
    from gateway.cli.client import find_key, json_object, tls_context
    from gateway.config.errors import single_line
    from gateway.config.fields import normalise_node_url
    from gateway.workshop.bench import report as reports
    from gateway.workshop.bench.exchange import ENDPOINTS
    from gateway.workshop.bench.load import BenchPlan, RequestGoal, RequestPattern

    if url is None:
        raise WrongUsage("name the server's URL, such as http://127.0.0.1:8000")
    try:
        address = str(normalise_node_url(url.rstrip("/").removesuffix("/v1")))
    except ValueError:
        raise WrongUsage(f"{url}: must be like http://127.0.0.1:8000") from None
    options.check_folder("--csv", csv)
    options.check_folder("--html", html)
    options.check_plot_file(plot)
    played = load.played_trace()
    if (extra := json_object(body)) is None:
        raise WrongUsage(f"--body {body[:60]}: must be a JSON object")
    plan = BenchPlan(
        url=address,
        endpoint=ENDPOINTS[endpoint],
        loads=load.loads(played),
        pattern=RequestPattern(prompt, max_tokens, round(prompt * prefix_share), prefixes),
        key=find_key(key_file),
        tls=tls_context(ca) if address.startswith("https:") else None,
        model=model,
        extra=extra,
        ignore_eos=ignore_eos,
        trace=played,
        goal=RequestGoal(goal_ttft, goal_inter_token, goal_completion),
        seed=seed,
        warm_up=load.warm_up,
        timeout=timeout,
        most_in_flight=load.in_flight,
        meter=_meter(address),
    )
    report, runs, status = _measure(plan)
    if as_json:
        print_json(report.as_dict())
    else:
        print_rows(reports.table_rows(report))
        print()
        for line in reports.remarks(report):
            print(single_line(line))
    if csv is not None:
        with csv.open("w", encoding="utf-8", newline="") as file:
            reports.write_requests(file, runs)
    if plot is not None:
        reports.draw_report(plot, report)
    if html is not None:
        html.write_text(reports.render_page(report), encoding="utf-8")
    print_note(*(f"written: {path}" for path in (csv, plot, html) if path is not None))
    raise typer.Exit(status or not any(one.succeeded for one in report.loads))


def _measure(plan: BenchPlan) -> tuple[BenchReport, list[LoadRun], int]:
    """Run, and return the report, also of an interrupted run, and the exit status."""
    import uvloop

    from gateway.cli.progress import BenchProgress
    from gateway.system import raise_open_file_limit
    from gateway.workshop.bench.exchange import TargetError
    from gateway.workshop.bench.report import BenchSession, FitError

    raise_open_file_limit()
    with BenchProgress() as progress:
        session = BenchSession(
            plan,
            on_phase=progress.phase,
            on_load=progress.load_started,
            on_request=progress.request_done,
            on_load_end=progress.load_done,
        )
        try:
            with failing_by(TargetError, before=f"{plan.url}: "):
                status = run_interruptibly(session.run(), uvloop.new_event_loop)
        except FitError as error:
            raise WrongUsage(f"{error}. Remedy: a shorter --prompt or --max-tokens") from None
    if status and not session.runs:
        raise CommandFailed("interrupted before the first load began", status)
    return session.report(), session.runs, status


def _meter(url: str) -> EnergyMeter | None:
    """A meter of this machine's energy, if the server is on it and it shows its counters."""
    from urllib.parse import urlsplit

    from gateway.local.energy import EnergyUnavailableError, open_meter
    from gateway.workshop.bench.exchange import is_this_machine

    with suppress(EnergyUnavailableError):
        if is_this_machine(urlsplit(url).hostname or ""):
            return open_meter()
    return None


def _compare(paths: tuple[Path, Path], *, as_json: bool) -> None:
    from dataclasses import asdict

    from gateway.workshop.bench.report import CONFIDENCE, ComparisonError, compare, read_report

    try:
        with failing_by(ComparisonError, before="--compare: ", status=2):
            before, after = (read_report(path) for path in paths)
            differences, notes = compare(before, after)
    except OSError as error:
        raise WrongUsage(f"--compare {error.filename}: can't be read: {error.strerror}") from None
    if as_json:
        rows = [asdict(one) | {"verdict": one.verdict} for one in differences]
        print_json({"confidence": CONFIDENCE, "differences": rows, "notes": notes})
        return
    print_table(
        ("LOAD", "FIGURE", "BEFORE", "AFTER", "CHANGE", "95 % INTERVAL", "VERDICT"),
        map(_difference_row, differences),
    )
    print(
        "\nIntervals by bootstrap: 2,000 times requests are drawn anew from those measured. What "
        "made one run\nas a whole faster or slower (other work on the machine, warm caches) is not "
        "in them: repeat both runs."
    )
    for note in notes:
        print(note)


def _difference_row(one: Difference) -> list[object]:
    from gateway.workshop.bench.report import milliseconds

    show = milliseconds if one.less_is_better else "{:.1f}".format
    return [
        one.load,
        one.figure,
        show(one.before),
        show(one.after),
        f"{one.change:+.1%}",
        f"{one.low:+.1%} to {one.high:+.1%}",
        one.verdict,
    ]
