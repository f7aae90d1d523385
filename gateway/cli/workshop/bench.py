"""`llama-gateway bench`: measures any OpenAI-compatible server under load."""

from __future__ import annotations

import enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gateway.cli import options
from gateway.cli.options import examples_epilog
from gateway.cli.terminal import (
    CommandFailed,
    failing_by,
    print_json,
    print_note,
    print_rows,
    print_table,
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
_load = partial(typer.Option, rich_help_panel="Load")
_request = partial(typer.Option, rich_help_panel="Requests")
_server = partial(typer.Option, rich_help_panel="Server")
_goal = partial(typer.Option, rich_help_panel="Goal")
_output = partial(typer.Option, rich_help_panel="Output")


class EndpointName(enum.StrEnum):
    """Endpoints that can be measured."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


def bench(
    url: str | None = typer.Argument(
        None,
        metavar="URL",
        show_default=False,
        help="Address of the server or gateway, with or without /v1.",
    ),
    concurrency: str | None = _load(
        None,
        metavar="N,...",
        show_default=DEFAULT_LEVELS,
        help="Closed loop: so many requests at a time, one load after the other.",
    ),
    rate: str | None = _load(
        None,
        metavar="R,...",
        help=(
            "Open loop: so many requests a second at random times (Poisson), whether the "
            "server keeps up or not."
        ),
    ),
    trace: Path | None = _load(
        None,
        metavar="FILE",
        help=(
            "Open loop: the requests of a trace at its times (JSON lines, or .csv in the "
            "layout of the Azure LLM traces). A later turn of a conversation waits for "
            "the one before."
        ),
    ),
    speed_up: float = _load(
        1.0, min=0.001, max=1e6, metavar="X", help="Play the trace X times as fast."
    ),
    requests: int | None = _load(
        None,
        min=1,
        max=200_000,
        metavar="N",
        show_default="closed loop: 4 for each at a time, at least 10",
        help="Requests of each load.",
    ),
    duration: float | None = _load(
        None,
        min=0.1,
        max=7 * 86_400,
        metavar="SECONDS",
        show_default="--rate: 60",
        help="No request of a load starts later. Those under way are awaited.",
    ),
    warm_up: int = _load(
        2,
        min=0,
        max=1000,
        metavar="N",
        help=(
            "Requests before the first load, one after the other. They show what a request "
            "takes alone, and are not counted."
        ),
    ),
    in_flight: int = _load(
        512,
        min=1,
        max=20_000,
        metavar="N",
        help="Open loop: most requests under way; others start late, which is told.",
    ),
    endpoint: EndpointName = _request(
        EndpointName.CHAT, metavar="NAME", help="chat, completions (both streamed) or embeddings."
    ),
    prompt: int = _request(
        256,
        min=1,
        max=200_000,
        metavar="TOKENS",
        help="Length of a prompt, in the server's tokens.",
    ),
    max_tokens: int = _request(
        64, min=1, max=100_000, metavar="TOKENS", help="Length of an answer, at most."
    ),
    prefix_share: float = _request(
        0.0,
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Share of a prompt that is the same in all, such as a system prompt.",
    ),
    prefixes: int = _request(
        1, min=1, max=10_000, metavar="N", help="Different beginnings, taken in turn."
    ),
    ignore_eos: bool | None = _request(
        None,
        "--ignore-eos/--no-ignore-eos",
        show_default="where the server is known to understand it",
        help="Ask for answers that go on to --max-tokens.",
    ),
    body: str = _request(
        "{}",
        metavar="JSON",
        help='Fields of every body, such as {"top_k": 1}; null leaves one of ours out.',
    ),
    seed: int = _request(1, metavar="N", help="Same seed, same requests."),
    model: str | None = _server(
        None, metavar="NAME", show_default="the server's first one", help="The model to ask for."
    ),
    key_file: options.KeyFile = None,
    ca: options.Ca = None,
    timeout: float = _server(
        600.0,
        min=0.1,
        max=86_400,
        metavar="SECONDS",
        help="For a request; a longer one has failed.",
    ),
    goal_ttft: float | None = _goal(
        None, min=0.0, metavar="SECONDS", help="Longest time to the first token."
    ),
    goal_inter_token: float | None = _goal(
        None, min=0.0, metavar="SECONDS", help="Longest mean time between tokens."
    ),
    goal_completion: float | None = _goal(
        None, min=0.0, metavar="SECONDS", help="Longest time to the end of the answer."
    ),
    compare: tuple[Path, Path] | None = _output(
        None,
        metavar="BEFORE.json AFTER.json",
        show_default=False,
        help="Measure nothing: compare two reports that --json wrote.",
    ),
    csv: Path | None = _output(None, metavar="FILE", help="Write a line for each request."),
    plot: Path | None = _output(None, metavar="FILE", help="Plot the results: .png, .svg or .pdf."),
    html: Path | None = _output(
        None, metavar="FILE", help="Write the report as one page that needs nothing else."
    ),
    as_json: options.Json = False,
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
        if any(one is not None for one in (url, concurrency, rate, trace, csv, plot, html)):
            raise CommandFailed("--compare measures nothing: leave URL and load out", status=2)
        _compare(compare, as_json=as_json)
        return
    from gateway.cli.client import find_key, tls_context
    from gateway.config.errors import single_line
    from gateway.workshop.bench.exchange import ENDPOINTS
    from gateway.workshop.bench.load import BenchPlan, RequestGoal, RequestPattern
    from gateway.workshop.bench.report import (
        draw_report,
        remarks,
        render_page,
        table_rows,
        write_requests,
    )

    address = _checked_url(url)
    for flag, path in (("--csv", csv), ("--html", html)):
        if path is not None and not path.parent.is_dir():
            raise CommandFailed(f"{flag} {path}: there is no folder {path.parent}", status=2)
    options.check_plot_file(plot)
    played = None if trace is None else _played_trace(trace, requests)
    plan = BenchPlan(
        url=address,
        endpoint=ENDPOINTS[endpoint.value],
        loads=_loads(concurrency, rate, played, speed_up, requests, duration),
        pattern=RequestPattern(prompt, max_tokens, round(prompt * prefix_share), prefixes),
        key=find_key(key_file),
        tls=tls_context(ca) if address.startswith("https:") else None,
        model=model,
        extra=_extra_fields(body),
        ignore_eos=ignore_eos,
        trace=played,
        goal=RequestGoal(goal_ttft, goal_inter_token, goal_completion),
        seed=seed,
        warm_up=warm_up,
        timeout=timeout,
        most_in_flight=in_flight,
        meter=_meter(address),
    )
    report, runs, status = _measure(plan)
    if as_json:
        print_json(report.as_dict())
    else:
        print_rows(table_rows(report))
        print()
        for line in remarks(report):
            print(single_line(line))
    if csv is not None:
        with csv.open("w", encoding="utf-8", newline="") as file:
            write_requests(file, runs)
    if plot is not None:
        draw_report(plot, report)
    if html is not None:
        html.write_text(render_page(report), encoding="utf-8")
    for path in (csv, plot, html):
        if path is not None:
            print_note(f"written: {path}")
    raise typer.Exit(status or (0 if report.has_success else 1))


def _measure(plan: BenchPlan) -> tuple[BenchReport, list[LoadRun], int]:
    """Run, and return the report, also of an interrupted run, and the exit status."""
    import asyncio
    import signal

    import uvloop

    from gateway.cli.progress import BenchProgress
    from gateway.system import raise_open_file_limit
    from gateway.workshop.bench.exchange import TargetError
    from gateway.workshop.bench.report import BenchSession, FitError

    async def measure(session: BenchSession) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await session.run()

    status = 0
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
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(measure(session))
        except TargetError as error:
            raise CommandFailed(f"{plan.url}: {error}") from None
        except FitError as error:
            raise CommandFailed(
                f"{error}. Remedy: a shorter --prompt or --max-tokens", status=2
            ) from None
        except KeyboardInterrupt:
            status = 130
        except asyncio.CancelledError:
            status = 143
    if status and not session.runs:
        raise CommandFailed("interrupted before the first load began", status)
    return session.report(), session.runs, status


def _checked_url(url: str | None) -> str:
    from urllib.parse import urlsplit

    if url is None:
        raise CommandFailed("name the server's URL, such as http://127.0.0.1:8000", status=2)
    address = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(address)
        sound = (
            parts.scheme in {"http", "https"}
            and bool(parts.hostname)
            and parts.port != 0
            and "@" not in parts.netloc
            and not parts.query
            and not parts.fragment
            and address.isascii()
            and address.isprintable()
            and " " not in address
        )
    except ValueError:
        sound = False
    if not sound:
        raise CommandFailed(f"{url}: must be like http://127.0.0.1:8000", status=2)
    return address


def _loads(
    concurrency: str | None,
    rate: str | None,
    trace: Trace | None,
    speed_up: float,
    requests: int | None,
    duration: float | None,
) -> list[Load]:
    from gateway.workshop.bench.load import Load, LoadError, Loop, closed_loads, poisson_loads

    given = [
        flag
        for flag, value in (("--concurrency", concurrency), ("--rate", rate), ("--trace", trace))
        if value is not None
    ]
    if len(given) > 1:
        raise CommandFailed(f"{' and '.join(given)}: choose one of them", status=2)
    if trace is None and speed_up != 1.0:
        raise CommandFailed("--speed-up is for --trace", status=2)
    with failing_by(LoadError, before=f"{given[0] if given else '--concurrency'} ", status=2):
        if trace is not None:
            return [Load(Loop.TRACE, speed_up, len(trace.jobs), duration)]
        if rate is not None:
            return poisson_loads(rate, requests, duration)
        return closed_loads(concurrency or DEFAULT_LEVELS, requests, duration)


def _played_trace(path: Path, requests: int | None) -> Trace:
    from gateway.cli.workshop.simulate import read_trace_file
    from gateway.workshop.bench.exchange import MOST_PROMPT_TOKENS
    from gateway.workshop.bench.load import MOST_REQUESTS

    trace = read_trace_file(path, limit=requests or MOST_REQUESTS)
    longest = max(max(job.prompt.tokens, job.output) for job in trace.jobs)
    if longest > MOST_PROMPT_TOKENS:
        raise CommandFailed(
            f"--trace {path}: a request has {longest:,} tokens, bench sends at most "
            f"{MOST_PROMPT_TOKENS:,}",
            status=2,
        )
    return trace


def _extra_fields(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise CommandFailed(f"--body {text[:60]}: must be a JSON object", status=2)
    return value


def _meter(url: str) -> EnergyMeter | None:
    """A meter of this machine's energy, if the server is on it and it shows its counters."""
    from urllib.parse import urlsplit

    from gateway.local.energy import EnergyUnavailableError, open_meter
    from gateway.workshop.bench.exchange import is_this_machine

    if not is_this_machine(urlsplit(url).hostname or ""):
        return None
    try:
        return open_meter()
    except EnergyUnavailableError:
        return None


def _compare(paths: tuple[Path, Path], *, as_json: bool) -> None:
    from dataclasses import asdict

    from gateway.workshop.bench.report import CONFIDENCE, ComparisonError, compare, read_report

    try:
        before, after = (read_report(path) for path in paths)
        differences, notes = compare(before, after)
    except ComparisonError as error:
        raise CommandFailed(f"--compare: {error}", status=2) from None
    except OSError as error:
        raise CommandFailed(
            f"--compare {error.filename}: can't be read: {error.strerror}", status=2
        ) from None
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
