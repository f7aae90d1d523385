"""`llama-gateway bench`: measures any OpenAI-compatible server under load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gateway.tools.cli import bench_options, options
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.terminal import CommandFailed, print_json, print_note, print_table

if TYPE_CHECKING:
    from gateway.tools.bench.comparison import Difference
    from gateway.tools.bench.load import Load
    from gateway.tools.bench.report import BenchReport
    from gateway.tools.bench.runner import LoadRun
    from gateway.tools.bench.session import BenchPlan
    from gateway.tools.local.energy import EnergyMeter
    from gateway.tools.simulate.trace import Trace


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
    (
        "llama-gateway bench --compare old.json new.json",
        "what has changed, and what may be chance",
    ),
)


def bench(
    url: bench_options.Url = None,
    concurrency: bench_options.Concurrency = None,
    rate: bench_options.Rate = None,
    trace: bench_options.Trace = None,
    speed_up: bench_options.SpeedUp = 1.0,
    requests: bench_options.Requests = None,
    duration: bench_options.Duration = None,
    warm_up: bench_options.WarmUp = 2,
    in_flight: bench_options.InFlight = 512,
    endpoint: bench_options.Endpoint = bench_options.EndpointName.CHAT,
    prompt: bench_options.Prompt = 256,
    max_tokens: bench_options.MaxTokens = 64,
    prefix_share: bench_options.PrefixShare = 0.0,
    prefixes: bench_options.Prefixes = 1,
    ignore_eos: bench_options.IgnoreEos = None,
    body: bench_options.Body = "{}",
    seed: bench_options.Seed = 1,
    model: bench_options.Model = None,
    key_file: bench_options.KeyFile = None,
    ca: bench_options.Ca = None,
    timeout: bench_options.Timeout = bench_options.ANSWER_SECONDS,
    goal_ttft: bench_options.GoalTtft = None,
    goal_inter_token: bench_options.GoalInterToken = None,
    goal_completion: bench_options.GoalCompletion = None,
    compare: bench_options.Compare = None,
    csv: bench_options.Csv = None,
    plot: bench_options.Plot = None,
    html: bench_options.Html = None,
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
        _refuse_with_compare(url, concurrency, rate, trace, csv, plot, html)
        _compare(compare, as_json=as_json)
        return
    from gateway.tools.bench.endpoint import endpoint as endpoint_of
    from gateway.tools.bench.figures import Goal
    from gateway.tools.bench.runner import Workload
    from gateway.tools.bench.session import BenchPlan
    from gateway.tools.cli.client import find_key, tls_context

    address = _checked_url(url)
    for flag, path in (("--csv", csv), ("--html", html)):
        if path is not None and not path.parent.is_dir():
            raise CommandFailed(f"{flag} {path}: there is no folder {path.parent}", status=2)
    options.check_plot_file(plot)
    chosen = endpoint_of(endpoint.value)
    assert chosen is not None
    played = None if trace is None else _read_trace(trace, requests)
    plan = BenchPlan(
        url=address,
        endpoint=chosen,
        loads=_loads(concurrency, rate, played, speed_up, requests, duration),
        workload=Workload(prompt, max_tokens, round(prompt * prefix_share), prefixes),
        key=find_key(key_file),
        tls=tls_context(ca) if address.startswith("https:") else None,
        model=model,
        extra=_extra_fields(body),
        ignore_eos=ignore_eos,
        trace=played,
        goal=Goal(goal_ttft, goal_inter_token, goal_completion),
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
        _print_report(report)
    _write_files(report, runs, csv, plot, html)
    raise typer.Exit(status or (0 if report.has_success else 1))


def _measure(plan: BenchPlan) -> tuple[BenchReport, list[LoadRun], int]:
    """Run, and return the report, also of an interrupted run, and the exit status."""
    import asyncio
    import signal

    import uvloop

    from gateway.system import raise_open_file_limit
    from gateway.tools.bench.session import BenchSession, FitError, TargetError
    from gateway.tools.cli.bench_progress import BenchProgress

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


def _print_report(report: BenchReport) -> None:
    from gateway.config.errors import single_line
    from gateway.tools.bench.report import remarks, table_columns, table_rows

    print_table(table_columns(report), table_rows(report))
    print()
    for line in remarks(report):
        print(single_line(line))


def _write_files(
    report: BenchReport,
    runs: list[LoadRun],
    csv: Path | None,
    plot: Path | None,
    html: Path | None,
) -> None:
    if csv is not None:
        from gateway.tools.bench.report import write_requests

        with csv.open("w", encoding="utf-8", newline="") as file:
            write_requests(file, runs)
    if plot is not None:
        from gateway.tools.bench.drawing import draw_report

        draw_report(plot, report)
    if html is not None:
        from gateway.tools.bench.page import render_page

        html.write_text(render_page(report), encoding="utf-8")
    for path in (csv, plot, html):
        if path is not None:
            print_note(f"written: {path}")


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
    from gateway.tools.bench.load import Load, LoadError, Loop, closed_loads, poisson_loads

    given = [
        flag
        for flag, value in (("--concurrency", concurrency), ("--rate", rate), ("--trace", trace))
        if value is not None
    ]
    if len(given) > 1:
        raise CommandFailed(f"{' and '.join(given)}: choose one of them", status=2)
    if trace is None and speed_up != 1.0:
        raise CommandFailed("--speed-up is for --trace", status=2)
    try:
        if trace is not None:
            return [Load(Loop.TRACE, speed_up, len(trace.jobs), duration)]
        if rate is not None:
            return poisson_loads(rate, requests, duration)
        return closed_loads(concurrency or bench_options.DEFAULT_LEVELS, requests, duration)
    except LoadError as error:
        raise CommandFailed(f"{given[0] if given else '--concurrency'} {error}", status=2) from None


def _read_trace(path: Path, requests: int | None) -> Trace:
    from gateway.tools.bench.load import MOST_REQUESTS
    from gateway.tools.bench.prompts import MOST_PROMPT_TOKENS
    from gateway.tools.simulate.trace import read_trace

    try:
        trace = read_trace(path, limit=requests or MOST_REQUESTS)
    except OSError as error:
        raise CommandFailed(
            f"--trace {path}: can't be read: {error.strerror} (check the path and its rights)",
            status=2,
        ) from None
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

    from gateway.tools.bench.target import is_this_machine
    from gateway.tools.local.energy import EnergyUnavailableError, open_meter

    if not is_this_machine(urlsplit(url).hostname or ""):
        return None
    try:
        return open_meter()
    except EnergyUnavailableError:
        return None


def _refuse_with_compare(*given: object) -> None:
    if any(one is not None for one in given):
        raise CommandFailed("--compare measures nothing: leave URL and load out", status=2)


def _compare(paths: tuple[Path, Path], *, as_json: bool) -> None:
    from dataclasses import asdict

    from gateway.tools.bench import comparison

    try:
        before, after = (comparison.read_report(path) for path in paths)
        differences, notes = comparison.compare(before, after)
    except comparison.ComparisonError as error:
        raise CommandFailed(f"--compare: {error}", status=2) from None
    except OSError as error:
        raise CommandFailed(
            f"--compare {error.filename}: can't be read: {error.strerror}", status=2
        ) from None
    if as_json:
        rows = [asdict(one) | {"verdict": one.verdict} for one in differences]
        print_json({"confidence": comparison.CONFIDENCE, "differences": rows, "notes": notes})
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
    from gateway.tools.bench.report import milliseconds

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
