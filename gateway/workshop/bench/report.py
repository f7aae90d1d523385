"""What came of a run: figures, what limits, the report in its forms, and two reports compared.

Two runs are compared by bootstrap: for each figure of each load that both have, requests are drawn
again and again from those that were measured; the middle 95 % of the differences between such draws
are the interval. A difference counts where the interval leaves out 0, and it is at least 1 %. It
speaks of these two runs: what made one run as a whole faster (a warmer cache, other work on the
machine) is not in it.
"""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, TextIO

from gateway import __version__
from gateway.transport.pool import ConnectionPool, url_address
from gateway.workshop.bench.exchange import (
    Baseline,
    Calibration,
    PromptWriter,
    RequestResult,
    RequestSender,
    ServerDescription,
    describe_server,
    probe_server,
)
from gateway.workshop.bench.load import (
    BenchPlan,
    ClientFigures,
    Load,
    LoadRun,
    LoadRunner,
    Loop,
    RequestGoal,
)
from gateway.workshop.simulate.report import Percentiles, draw_shares

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Requests whose figures a report holds for each load; of more, evenly spread ones.
MOST_SAMPLES = 5_000


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the mean request's time went; seconds. None: not known."""

    network: float | None = None  # connecting, and one round trip
    waiting: float | None = None  # for a slot
    prefill: float | None = None
    decode: float | None = None
    waiting_source: str = ""  # how waiting and prefill were told apart


class Limit(StrEnum):
    """What limits."""

    CLIENT = "client"
    SLOTS = "slots"
    PREFILL = "prefill"
    DECODE = "decode"
    NETWORK = "network"
    ERRORS = "errors"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits, and why, in one sentence."""

    limit: Limit
    reason: str


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One load's figures. Times are seconds; those of requests are of requests that succeeded."""

    load: Load
    is_whole: bool
    requests: int
    succeeded: int
    errors: dict[str, int]  # failed requests by reason
    details: dict[str, str]  # for each reason an example of the server's words
    seconds: float  # from the first start to the last end
    ttft: Percentiles | None  # None: no request has one
    inter_token: Percentiles | None
    stall: Percentiles | None  # a request's longest time between two events
    completion: Percentiles | None
    tokens_per_second: Percentiles | None  # of a request, from its first token on
    total_tokens_per_second: float  # written, all requests together
    total_prompt_tokens_per_second: float | None
    requests_per_second: float  # that succeeded
    prompt_tokens: float | None  # mean; None: the server does not tell
    cached_tokens: float | None
    completion_tokens: float  # mean
    tokens_per_event: float | None
    goodput: dict[str, float] | None
    """The share of all requests that kept the goal, and such requests per second; None: no goal."""
    client: ClientFigures
    parts: Parts
    joules: float | None  # of the whole machine
    joules_per_token: float | None
    """For a token written; reading prompts and idling included."""
    samples: dict[str, list[float]] = field(repr=False, compare=False)
    """Of requests that succeeded, in the order of their ends: each its seconds and tokens."""
    verdict: Verdict = Verdict(Limit.UNKNOWN, "")

    @property
    def failed(self) -> int:
        """Requests that failed."""
        return self.requests - self.succeeded

    def failure(self, reason: str) -> str:
        """A reason, with an example of the server's words."""
        words = self.details.get(reason)
        return f"{reason} ({words})" if words else reason

    def as_dict(self) -> dict[str, Any]:
        """For scripts."""
        found = asdict(self)
        limit = found.pop("verdict")
        return {"label": self.load.label, "failed": self.failed, "limit": limit, **found}


def figures_of(
    run: LoadRun, goal: RequestGoal, round_trip: float | None, alone_ttft: float | None
) -> LoadFigures:
    """The figures of a load.

    `round_trip`: seconds of a trivial request. `alone_ttft`: TTFT of a request that was alone.
    """
    results, sound = run.results, [one for one in run.results if one.error is None]
    seconds = max((one.ended for one in results), default=0.0) - run.began
    tokens = sum(one.tokens for one in sound)
    prompts = _known(sound, lambda one: one.prompt_tokens)
    events = sum(one.events for one in sound)
    good = sum(goal.is_met(one) for one in results)
    speeds = [1 / gap for gap in _known(sound, lambda one: one.inter_token) if gap > 0]
    failed = [one for one in results if one.error is not None]
    kept = sound[:: -(-len(sound) // MOST_SAMPLES) or 1]
    goodput = {"share": _rate(good, len(results)), "requests_per_second": _rate(good, seconds)}
    return LoadFigures(
        load=run.load,
        is_whole=run.is_whole,
        requests=len(results),
        succeeded=len(sound),
        errors=dict(Counter(str(one.error) for one in failed).most_common()),
        details={str(one.error): one.detail for one in reversed(failed) if one.detail},
        seconds=seconds,
        ttft=_percentiles(sound, lambda one: one.ttft),
        inter_token=_percentiles(sound, lambda one: one.inter_token),
        stall=_percentiles(sound, lambda one: one.longest_gap if one.events > 1 else None),
        completion=_percentiles(sound, lambda one: one.completion),
        tokens_per_second=Percentiles.of(speeds) if speeds else None,
        total_tokens_per_second=_rate(tokens, seconds),
        total_prompt_tokens_per_second=_rate(sum(prompts), seconds) if prompts else None,
        requests_per_second=_rate(len(sound), seconds),
        prompt_tokens=_mean(prompts),
        cached_tokens=_mean(_known(sound, lambda one: one.cached_tokens)),
        completion_tokens=_rate(tokens, len(sound)),
        tokens_per_event=tokens / events if events else None,
        goodput=goodput if goal else None,
        client=run.client,
        parts=_parts(sound, round_trip, alone_ttft),
        joules=run.joules,
        joules_per_token=run.joules / tokens if run.joules is not None and tokens else None,
        samples={
            "ttft": _known(kept, lambda one: one.ttft),
            "inter_token": _known(kept, lambda one: one.inter_token),
            "completion": [one.completion for one in kept],
            "tokens": [one.tokens for one in kept],
        },
    )


def _parts(
    sound: Sequence[RequestResult], round_trip: float | None, alone_ttft: float | None
) -> Parts:
    """Where the time went, as far as the server, the gateway or a request alone tell."""
    if not sound:
        return Parts()
    network = _rate(sum(one.connect_seconds for one in sound), len(sound)) + (round_trip or 0.0)
    ttft = _mean(_known(sound, lambda one: one.ttft))
    if ttft is None:
        return Parts(network=network)
    decode = _mean([(one.last or 0.0) - one.first for one in sound if one.first is not None])
    prefill = _mean(_known(sound, lambda one: one.prefill_seconds))
    queued = _mean(_known(sound, lambda one: one.queue_seconds))
    if prefill is not None:
        waiting, source = max(0.0, ttft - network - prefill), "the server's own timings"
    elif queued is not None:
        waiting, source = queued, "the gateway's X-Gateway-Queue-Ms"
        prefill = max(0.0, ttft - network - queued)
    elif alone_ttft is not None:
        waiting, source = max(0.0, ttft - alone_ttft), "a request that was alone"
        prefill = max(0.0, min(alone_ttft, ttft) - network)
    else:
        return Parts(network=network, decode=decode)
    return Parts(network, waiting, prefill, decode, source)


def _percentiles(
    results: Sequence[RequestResult], read: Callable[[RequestResult], float | None]
) -> Percentiles | None:
    values = _known(results, read)
    return Percentiles.of(values) if values else None


def _known(
    results: Sequence[RequestResult], read: Callable[[RequestResult], float | None]
) -> list[float]:
    return [value for one in results if (value := read(one)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rate(count: float, per: float) -> float:
    return count / per if per > 0 else 0.0


MOST_CPU_SHARE = 0.85  # of one CPU; above, this program is what is measured
# Lag of the client (95th percentile) as a share of the time between tokens, or of TTFT.
MOST_LAG_SHARE = 0.1
LEAST_LAG = 0.005  # seconds below which the client's lag is never what limits


def judge(figures: LoadFigures, server: ServerDescription, baseline: Baseline) -> Verdict:
    """What limits a load: the client if it is too slow, else the longest part of a request."""
    if found := _client(figures):
        return Verdict(Limit.CLIENT, found)
    if not figures.requests:
        return Verdict(Limit.ERRORS, "no request ended")
    if not figures.succeeded:
        told = figures.failure(next(iter(figures.errors)))
        return Verdict(Limit.ERRORS, f"every request failed, most of them with {told}")
    parts, slots, speed = figures.parts, server.slots, figures.tokens_per_second
    times = {
        Limit.NETWORK: parts.network or 0.0,
        Limit.SLOTS: parts.waiting or 0.0,
        Limit.PREFILL: parts.prefill or 0.0,
        Limit.DECODE: parts.decode or 0.0,
    }
    whole = sum(times.values())
    if figures.ttft is None or whole <= 0:
        return Verdict(Limit.UNKNOWN, "the response has no tokens, so its time has no known parts")
    limit = max(times, key=times.__getitem__)
    # Requests that were under way at a time, on average: by Little's law in the open loop.
    at_a_time = min(figures.load.level, figures.requests)
    if figures.load.loop is not Loop.CLOSED:
        completion = 0.0 if figures.completion is None else figures.completion.mean
        at_a_time = figures.requests_per_second * completion
    if limit is Limit.SLOTS and slots is not None and at_a_time <= slots:
        # All had a slot, so what they waited for was other requests' prefill.
        return Verdict(
            Limit.PREFILL,
            f"first tokens come {times[Limit.SLOTS]:.3g} s later than alone, though {slots} slots "
            f"are enough for {at_a_time:.3g} requests at a time: the prompts of other requests are "
            "read meanwhile",
        )
    slot = "a slot" if slots is None else f"one of the {slots} slots"
    length, alone = figures.prompt_tokens, baseline.inter_token
    prompt = "the prompt" if length is None else f"prompts of {length:.0f} tokens"
    what = {
        Limit.NETWORK: "connecting and a round trip are",
        Limit.SLOTS: f"waiting for {slot}, with {at_a_time:.3g} requests at a time, is",
        Limit.PREFILL: f"reading {prompt} is",
        Limit.DECODE: "writing is",
    }
    reason = f"{what[limit]} {times[limit] / whole:.0%} of a request's {whole:.3g} s"
    if limit in {Limit.SLOTS, Limit.PREFILL}:
        reason += f" (by {parts.waiting_source})"
    elif limit is Limit.DECODE and speed is not None:
        reason += f": a stream gets {speed.p50:.3g} tokens/s"
        reason += f", one that is alone {1 / alone:.3g}" if alone else ""
    return Verdict(limit, reason)


def _client(figures: LoadFigures) -> str:
    """Why the client is what limits; empty: it is not."""
    client = figures.client
    if exhausted := figures.errors.get("exhausted"):
        return (
            f"{exhausted} connections could not be opened for lack of descriptors or ports on this "
            "machine: raise `ulimit -n`, or measure with a smaller load"
        )
    if not figures.succeeded:
        return ""
    if client.cpu_share > MOST_CPU_SHARE:
        return (
            f"the load generator used {client.cpu_share:.0%} of a CPU, and can't use more: "
            "run several, or a smaller load"
        )
    if client.held_back:
        return (
            f"{client.held_back} requests started late, since as many as --in-flight were under "
            "way (their latencies count from when they should have started)"
        )
    for name, measured in (("time between tokens", figures.inter_token), ("TTFT", figures.ttft)):
        lag = client.lag.p95
        if measured is not None and lag > max(LEAST_LAG, MOST_LAG_SHARE * measured.p50):
            return (
                f"the load generator's own lag ({milliseconds(lag)} at the 95th percentile) is "
                f"more than {MOST_LAG_SHARE:.0%} of the median {name} "
                f"({milliseconds(measured.p50)}): other work holds up this machine, or the load is "
                "too large for one process"
            )
    return ""


FORMAT = 1  # of the JSON report; a later one that older programs can't read has a higher number

DEFINITIONS = (
    ("TTFT", "time to the first event with content, from the request's (intended) start"),
    ("INTER-TOKEN", "mean time between a request's tokens, from its first event to its last"),
    ("COMPLETION", "time to the end of the response"),
    ("TOK/S EACH", "tokens per second of a request, from its first token on; median"),
    ("TOK/S ALL", "tokens written by all requests, per second of the load"),
    ("REQ/S", "requests that succeeded, per second of the load"),
    ("GOOD", "share of all requests that kept the goal; failed ones did not"),
)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A run."""

    url: str
    endpoint: str
    started_at: str  # ISO 8601
    server: ServerDescription
    request: dict[str, Any]  # what was asked for: tokens, prefix, seed
    client: dict[str, Any]  # the machine and the program that put the load
    goal: RequestGoal
    baseline: Baseline
    loads: list[LoadFigures] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """One line for pictures and pages."""
        return f"{self.server.model or 'unnamed model'} at {self.url}"

    def as_dict(self) -> dict[str, Any]:
        """For scripts, and for `--compare`."""
        loads = [one.as_dict() for one in self.loads]
        return {"format": FORMAT, **asdict(replace(self, loads=[])), "loads": loads}


def table_rows(report: BenchReport) -> list[list[tuple[str, str | None]]]:
    """Rows of the table: of each cell the title of its column, and the text."""
    energy = any(one.joules_per_token is not None for one in report.loads)
    rows = []
    for found in report.loads:
        good, joules, speed = found.goodput, found.joules_per_token, found.tokens_per_second
        row = [
            ("LOAD", found.load.label),
            ("REQUESTS", str(found.requests)),
            ("FAILED", str(found.failed)),
            *_shown("TTFT", found.ttft, "p50", "p95", "p99"),
            *_shown("INTER-TOKEN", found.inter_token, "p50", "p95"),
            *_shown("COMPLETION", found.completion, "p50", "p95"),
            ("TOK/S EACH", None if speed is None else f"{speed.p50:.1f}"),
            ("TOK/S ALL", f"{found.total_tokens_per_second:.1f}"),
            ("REQ/S", f"{found.requests_per_second:.3g}"),
        ]
        if report.goal:
            row.append(("GOOD", None if good is None else f"{good['share']:.0%}"))
        if energy:
            row.append(("J/TOK", None if joules is None else f"{joules:.3g}"))
        rows.append([*row, ("LIMIT", found.verdict.limit.value)])
    return rows


def remarks(report: BenchReport) -> list[str]:
    """What to know beside the table."""
    lines = [f"{one.load.label}: {one.verdict.limit}: {one.verdict.reason}" for one in report.loads]
    for found in report.loads:
        label, each = found.load.label, found.tokens_per_event
        for reason, count in found.errors.items():
            lines.append(f"{label}: {count} failed with {found.failure(reason)}")
        if not found.is_whole:
            lines.append(f"{label}: interrupted, its figures are of what ended")
        if each is not None and each > 1.1:
            lines.append(
                f"{label}: {each:.2g} tokens an event; the time between tokens is the mean over an "
                "event's tokens"
            )
    if report.loads:
        lag = max(one.client.lag.p95 for one in report.loads)
        share = max(one.client.cpu_share for one in report.loads)
        starts = [
            one.client.start_lag.p95 for one in report.loads if one.load.loop is not Loop.CLOSED
        ]
        late = f"requests started at most {milliseconds(max(starts))} late, " if starts else ""
        lines.append(
            f"The load generator itself: lag at most {milliseconds(lag)} (95th percentile; a "
            f"timer's step is 1 ms), {late}{share:.0%} of a CPU."
        )
    return lines + report.notes


def milliseconds(seconds: float) -> str:
    """A time span in a unit that suits it."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


CSV_COLUMNS: dict[str, Callable[[RequestResult], object]] = {
    "start_lag": lambda one: one.started - one.intended,
    "ttft": lambda one: one.ttft,
    "inter_token": lambda one: one.inter_token,
    "longest_gap": lambda one: one.longest_gap,
    "completion": lambda one: one.completion,
    "prompt_tokens": lambda one: one.prompt_tokens,
    "cached_tokens": lambda one: one.cached_tokens,
    "completion_tokens": lambda one: one.tokens,
    "events": lambda one: one.events,
    "queue_seconds": lambda one: one.queue_seconds,
    "error": lambda one: one.error,
}


def write_requests(file: TextIO, runs: Sequence[LoadRun]) -> None:
    """Write a table of all requests, in the order of their ends."""
    writer = csv.writer(file)
    writer.writerow(["load", "request", "intended_start", *CSV_COLUMNS])
    for run in runs:
        for one in run.results:
            cells: list[object] = [run.load.label, one.number, one.intended - run.began]
            cells += [read(one) for read in CSV_COLUMNS.values()]
            writer.writerow([f"{x:.6f}" if isinstance(x, float) else x for x in cells])


def _shown(title: str, found: Percentiles | None, *names: str) -> Iterator[tuple[str, str | None]]:
    """Cells of percentiles, of which the first one's title names the figure."""
    for place, name in enumerate(names):
        text = None if found is None else milliseconds(getattr(found, name))
        yield name.upper() if place else f"{title} {name.upper()}", text


WIDTH, HEIGHT, MARGIN = 520, 260, 46  # of a drawing, in pixels
POINTS = 200  # of a curve, at most
COLOURS = ("#0b6e75", "#c2571a", "#4b4ba8", "#8a6d00", "#a3195b", "#3f7d20", "#555555", "#1d63b8")


def render_page(report: BenchReport) -> str:
    """The page."""
    loads = report.loads
    labels = [one.load.label for one in loads]
    request = ", ".join(f"{name} {value}" for name, value in report.request.items())
    client = ", ".join(f"{name} {value}" for name, value in report.client.items())
    facts = [
        ("Server", report.url),
        ("Model", report.server.model or "not named"),
        ("Slots", "not told" if report.server.slots is None else str(report.server.slots)),
        ("Endpoint", report.endpoint),
        ("Started", report.started_at),
        ("Requests", request),
        ("Load from", client),
    ]
    if report.baseline.ttft is not None:
        facts.append(("TTFT of a request alone", milliseconds(report.baseline.ttft)))
    page = files("gateway.workshop.bench").joinpath("page.html").read_text(encoding="utf-8")
    first, whole = ([one.samples[name] for one in loads] for name in ("ttft", "completion"))
    return Template(page).substitute(
        title=_text(report.title),
        facts=_definitions(facts),
        table=_table(table_rows(report)),
        remarks="\n".join(f"<li>{_text(line)}</li>" for line in remarks(report)),
        ttft=_curves("TTFT, seconds", labels, first),
        completion=_curves("Completion, seconds", labels, whole),
        definitions=_definitions(DEFINITIONS),
    )


def _text(value: str) -> str:
    return escape("".join(char if char.isprintable() else "\ufffd" for char in value))


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    lines = (f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in pairs)
    return f"<dl>{''.join(lines)}</dl>"


def _table(rows: Sequence[Sequence[tuple[str, str | None]]]) -> str:
    head = "".join(f'<th scope="col">{_text(title)}</th>' for title, _ in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell or '-')}</td>" for _, cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _curves(title: str, labels: Sequence[str], series: Sequence[Sequence[float]]) -> str:
    """Share of the requests by seconds."""

    def x(share: float) -> float:
        return MARGIN + share * (WIDTH - 2 * MARGIN)

    def y(share: float) -> float:
        return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)

    most = max((max(values) for values in series if values), default=0.0) or 1.0
    parts = [f'<text x="{MARGIN}" y="14">{_text(title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        ends = f'x1="{x(0):.1f}" x2="{x(1):.1f}" y1="{y(share):.1f}" y2="{y(share):.1f}"'
        parts += [
            f'<line {ends} stroke="currentColor" stroke-opacity=".2"/>',
            f'<text x="4" y="{y(share) + 4:.1f}">{share:.0%}</text>',
            f'<text x="{x(share) - 8:.1f}" y="{HEIGHT - MARGIN + 16}">{share * most:.3g}</text>',
        ]
    for place, (label, values) in enumerate(zip(labels, series, strict=True)):
        if not values:
            continue
        ranked, colour = sorted(values), COLOURS[place % len(COLOURS)]
        steps = min(POINTS, len(ranked))
        points = [f"{x(ranked[0] / most):.1f},{y(0):.1f}"]
        for step in range(1, steps + 1):
            value = ranked[-(-step * len(ranked) // steps) - 1]
            points.append(f"{x(value / most):.1f},{y(step / steps):.1f}")
        curve = " ".join(points)
        top = HEIGHT - MARGIN - 14 * (place + 1)  # of its line in the legend
        parts += [
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{curve}">',
            f"<title>{_text(label)}</title></polyline>",
            f'<rect x="{WIDTH - 130}" y="{top}" width="10" height="10" fill="{colour}"/>',
            f'<text x="{WIDTH - 115}" y="{top + 9}">{_text(label)}</text>',
        ]
    return (
        f'<figure><svg role="img" aria-label="{_text(title)}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg></figure>'
    )


def draw_report(path: Path, report: BenchReport) -> None:
    """Draw TTFT and completion of each load, and tokens/s; the suffix gives the format.

    Needs the extra `plots`. Raises OSError.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), dpi=100, layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, title in zip(panels, ("TTFT", "completion"), strict=False):
        samples = {one.load.label: one.samples[title.lower()] for one in report.loads}
        draw_shares(axes, title, samples)
    panels[0].set_ylabel("share of requests")
    labels = [one.load.label for one in report.loads]
    panels[2].bar(labels, [one.total_tokens_per_second for one in report.loads])
    panels[2].set_ylabel("tokens/s, all requests")
    panels[2].tick_params(axis="x", labelsize=7)
    figure.suptitle(report.title.replace("$", r"\$"), fontsize=9)
    figure.savefig(path)


DRAWS = 2000
CONFIDENCE = 0.95
LEAST_CHANGE = 0.01  # a smaller change is of no interest, however certain it is
LEAST_COMPARED = 5  # requests of a load, below which nothing is said of chance
LARGEST_FILE = 256 << 20
DRAWN_AT_ONCE = 4_000_000  # figures that are in memory at a time
THROUGHPUT = "tokens/s of all"  # the one figure of which more is better


class ComparisonError(Exception):
    """A report can't be compared. The text says why."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How one figure of one load differs."""

    load: str
    figure: str
    before: float
    after: float
    change: float  # relative: 0.1 is 10 % more
    low: float
    high: float  # interval of the change
    less_is_better: bool

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `same` (less than 1 % apart), or `no difference shown`."""
        leaves_out_zero = self.low > 0 or self.high < 0  # neither, where they are not known
        largest = abs(self.change) if leaves_out_zero else max(abs(self.low), abs(self.high))
        if largest < LEAST_CHANGE:
            return "same"
        if not leaves_out_zero:
            return "no difference shown"
        return "better" if (self.change < 0) == self.less_is_better else "worse"


def read_report(path: Path) -> dict[str, Any]:
    """Read a report of `--json`. Raises ComparisonError, OSError."""
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ComparisonError(f"{path}: larger than {LARGEST_FILE >> 20} MiB")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ComparisonError(f"{path}: no JSON. Write it by: bench URL --json > FILE") from None
    if not isinstance(value, dict) or not isinstance(value.get("loads"), list):
        raise ComparisonError(f"{path}: no report of `llama-gateway bench --json`")
    if value.get("format") != FORMAT:
        raise ComparisonError(
            f"{path}: has format {value.get('format')!r}, this program reads {FORMAT}"
        )
    return value


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[Difference], list[str]]:
    """The differences of two reports, and notes about what makes them hard to compare.

    Raises ComparisonError where they have no load in common, or are broken.
    """
    notes = [
        f"The runs differ in `{name}`: {_differing(before.get(name), after.get(name))}."
        for name in ("endpoint", "request")  # should be the same in both
        if before.get(name) != after.get(name)
    ]
    try:
        earlier, later = (
            {str(one["label"]): one for one in report["loads"]} for report in (before, after)
        )
        if earlier.keys().isdisjoint(later):
            raise ComparisonError(
                f"the runs have no load in common: {', '.join(earlier) or 'none'}; "
                f"{', '.join(later) or 'none'}"
            )
        differences = []
        for label in (label for label in earlier if label in later):
            one, two = _comparable(earlier[label]), _comparable(later[label])
            fewest = min(len(run[label]["samples"]["completion"]) for run in (earlier, later))
            if fewest < LEAST_COMPARED:
                notes.append(
                    f"{label}: only {fewest} requests succeeded in one run, too few to compare."
                )
                continue
            differences += [
                _difference(label, name, one[name], two[name]) for name in one if name in two
            ]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ComparisonError(f"a report is broken ({type(error).__name__}: {error})") from None
    return differences, notes


def _differing(one: object, two: object) -> str:
    if isinstance(one, dict) and isinstance(two, dict):
        names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
        return ", ".join(f"{name} {one.get(name)!r} and {two.get(name)!r}" for name in names[:5])
    return f"{one!r} and {two!r}"


_Statistic = Callable[["NDArray[Any]"], "NDArray[Any]"]


def _comparable(load: dict[str, Any]) -> dict[str, tuple[NDArray[Any], _Statistic]]:
    """The figures of a load that can be compared: its requests, each a row, and the statistic."""
    import numpy as np

    ttft, inter_token, completion, tokens = columns = [
        np.array(load["samples"][name], dtype=float)
        for name in ("ttft", "inter_token", "completion", "tokens")
    ]
    for column in columns:
        if column.ndim != 1 or not (np.isfinite(column) & (column >= 0)).all():
            raise ValueError("samples must be finite numbers of at least 0")
    if len(completion) != len(tokens):
        raise ValueError("completion and tokens differ in length")
    found: dict[str, tuple[NDArray[Any], _Statistic]] = {}
    times = {"TTFT": ttft, "inter-token": inter_token, "completion": completion}
    for name, column in times.items():
        for percent in (50, 95) if len(column) >= LEAST_COMPARED else ():
            found[f"{name} p{percent}"] = column, partial(np.percentile, q=percent, axis=-1)
    if load["load"]["loop"] == "closed":
        level = float(load["load"]["level"])

        def rate(drawn: NDArray[Any]) -> NDArray[Any]:
            # By Little's law: those under way times the tokens by the seconds of each.
            sums = drawn.sum(axis=-2)
            speed: NDArray[Any] = level * sums[..., 0] / np.maximum(sums[..., 1], 1e-9)
            return speed

        found[THROUGHPUT] = np.stack([tokens, completion], axis=-1), rate
    return found


def _difference(
    label: str,
    figure: str,
    one: tuple[NDArray[Any], _Statistic],
    two: tuple[NDArray[Any], _Statistic],
) -> Difference:
    """Compare a statistic of the requests of two runs."""
    import numpy as np

    rng = np.random.default_rng(1)  # the same reports make the same intervals
    # Draws in portions that fit into memory.
    at_once = max(1, min(DRAWS, DRAWN_AT_ONCE // max(len(one[0]), len(two[0]))))
    portions = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for done in range(0, DRAWS, at_once):
            draws = min(at_once, DRAWS - done)
            before, after = (
                statistic(rows[rng.integers(len(rows), size=(draws, len(rows)))])
                for rows, statistic in (one, two)
            )
            portions.append(after / before - 1.0)
        was, now = (np.float64(statistic(rows)) for rows, statistic in (one, two))
        change = float(now / was - 1.0)
    changes = np.concatenate(portions)
    finite = changes[np.isfinite(changes)]
    low, high = math.nan, math.nan
    if len(finite):
        tail = (1 - CONFIDENCE) / 2
        low, high = map(float, np.quantile(finite, [tail, 1 - tail]))
    return Difference(
        label, figure, float(was), float(now), change, low, high, figure != THROUGHPUT
    )


class FitError(Exception):
    """The requests do not fit into a slot of the server. The text says by how much."""


@dataclass(slots=True)
class BenchSession:
    """One run. `report` may be asked for at any time, also after an interruption."""

    plan: BenchPlan
    on_phase: Callable[[str], None] = lambda _: None
    on_load: Callable[[Load], None] = lambda _: None
    on_request: Callable[[RequestResult], None] = lambda _: None
    on_load_end: Callable[[LoadFigures], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    runs: list[LoadRun] = field(default_factory=list)
    _server: ServerDescription = field(default_factory=ServerDescription)
    _calibration: Calibration = field(default_factory=Calibration)
    _baseline: Baseline = field(default_factory=Baseline)
    _began: datetime = field(default_factory=lambda: datetime.now(UTC))

    async def run(self) -> None:
        """Measure. Raises TargetError, FitError."""
        plan = self.plan
        with closing(ConnectionPool(url_address(plan.url, plan.key, plan.tls))) as pool:
            self.on_phase("asking the server what it is")
            sender = RequestSender(pool, plan.endpoint, plan.timeout, self.clock)
            self._server = await describe_server(sender, plan.model)
            self._check_fit()
            self.on_phase("calibrating the prompts' length")
            ignores = self._server.ignores_eos if plan.ignore_eos is None else plan.ignore_eos
            self._calibration, extra = await probe_server(
                sender, self._server, plan.extra, ignores, plan.seed
            )
            writer, model = PromptWriter(plan.seed, self._calibration), self._server.model
            runner = LoadRunner(plan, sender, writer, model, extra, self.clock, self.on_request)
            self.on_phase("warming up")
            self._baseline = Baseline.of(await runner.warm_up())
            for load in plan.loads:
                self.on_load(load)
                run = LoadRun(load)
                self.runs.append(run)
                await runner.run(run)
                self.on_load_end(self._figures(run))

    def report(self) -> BenchReport:
        """The report of the loads that have begun."""
        plan, notes = self.plan, list(self._server.notes)
        asked = asdict(plan.pattern) if plan.trace is None else {"trace": len(plan.trace.jobs)}
        client: dict[str, Any] = {
            "version": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "prompt_lengths_by": self._calibration.source,
            "tokens_per_word": round(self._calibration.tokens_per_word, 4),
        }
        if plan.meter is not None and plan.meter.failure is not None:
            notes.append(f"Energy was measured only in part: {plan.meter.failure}")
        return BenchReport(
            url=plan.url,
            endpoint=plan.endpoint.name,
            started_at=self._began.isoformat(timespec="seconds"),
            server=self._server,
            request={**asked, "seed": plan.seed},
            client=client,
            goal=plan.goal,
            baseline=self._baseline,
            loads=[self._figures(run) for run in self.runs],
            notes=notes,
        )

    def _figures(self, run: LoadRun) -> LoadFigures:
        found = figures_of(run, self.plan.goal, self._server.round_trip, self._baseline.ttft)
        return replace(found, verdict=judge(found, self._server, self._baseline))

    def _check_fit(self) -> None:
        context, prompt = self._server.context, self.plan.pattern.prompt_tokens
        answer = self.plan.pattern.max_tokens if self.plan.endpoint.is_stream else 0
        if context is not None and self.plan.trace is None and prompt + answer > context:
            raise FitError(
                f"{prompt} tokens of prompt and {answer} of answer do not fit into a slot of "
                f"{context} tokens"
            )
