"""The report of a run: for people, for scripts, and as a table of requests."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from gateway.tools.bench.figures import Goal, LoadFigures
from gateway.tools.bench.limiting import Verdict
from gateway.tools.bench.load import Loop
from gateway.tools.bench.runner import LoadRun
from gateway.tools.bench.target import Baseline, ServerDescription
from gateway.tools.simulate.report import Percentiles

FORMAT = 1
"""Of the JSON report; a later one that older programs can't read has a higher number."""

CSV_COLUMNS = (
    "load",
    "request",
    "intended_start",
    "start_lag",
    "ttft",
    "inter_token",
    "longest_gap",
    "completion",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "events",
    "queue_seconds",
    "error",
)

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
class LoadResult:
    """A load's figures, and what limits it."""

    figures: LoadFigures
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A run."""

    url: str
    endpoint: str
    started_at: str
    """ISO 8601."""
    server: ServerDescription
    request: dict[str, Any]
    """What was asked for: tokens, prefix, seed."""
    client: dict[str, Any]
    """The machine and the program that put the load."""
    goal: Goal
    baseline: Baseline
    loads: list[LoadResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """One line for pictures and pages."""
        return f"{self.server.model or 'unnamed model'} at {self.url}"

    @property
    def has_success(self) -> bool:
        """Whether any request succeeded."""
        return any(one.figures.succeeded for one in self.loads)

    def as_dict(self) -> dict[str, Any]:
        """For scripts, and for `--compare`."""
        return {
            "format": FORMAT,
            "url": self.url,
            "endpoint": self.endpoint,
            "started_at": self.started_at,
            "server": asdict(self.server),
            "request": self.request,
            "client": self.client,
            "goal": asdict(self.goal),
            "baseline": asdict(self.baseline),
            "loads": [one.figures.as_dict() | {"limit": asdict(one.verdict)} for one in self.loads],
            "notes": self.notes,
        }


def table_columns(report: BenchReport) -> list[str]:
    """Heads of the table's columns."""
    energy = any(one.figures.joules_per_token is not None for one in report.loads)
    return [
        "LOAD",
        "REQUESTS",
        "FAILED",
        "TTFT P50",
        "P95",
        "P99",
        "INTER-TOKEN P50",
        "P95",
        "COMPLETION P50",
        "P95",
        "TOK/S EACH",
        "TOK/S ALL",
        "REQ/S",
        *(["GOOD"] if report.goal else []),
        *(["J/TOK"] if energy else []),
        "LIMIT",
    ]


def table_rows(report: BenchReport) -> Iterator[list[str | None]]:
    """Rows of the table."""
    energy = any(one.figures.joules_per_token is not None for one in report.loads)
    for one in report.loads:
        found = one.figures
        good, joules = found.goodput, found.joules_per_token
        yield [
            found.load.label,
            str(found.requests),
            str(found.failed),
            *_shown(found.ttft, "p50", "p95", "p99"),
            *_shown(found.inter_token, "p50", "p95"),
            *_shown(found.completion, "p50", "p95"),
            None if found.tokens_per_second is None else f"{found.tokens_per_second.p50:.1f}",
            f"{found.total_tokens_per_second:.1f}",
            f"{found.requests_per_second:.3g}",
            *([None if good is None else f"{good.share:.0%}"] if report.goal else []),
            *([None if joules is None else f"{joules:.3g}"] if energy else []),
            one.verdict.limit.value,
        ]


def remarks(report: BenchReport) -> list[str]:
    """What to know beside the table."""
    lines = [f"{one.figures.load.label}: {_limit_line(one.verdict)}" for one in report.loads]
    for one in report.loads:
        found = one.figures
        for reason, count in found.errors.items():
            words = found.details.get(reason)
            lines.append(
                f"{found.load.label}: {count} failed with {reason}"
                + (f" ({words})" if words else "")
            )
        if not found.is_whole:
            lines.append(f"{found.load.label}: interrupted, its figures are of what ended")
        if (each := found.tokens_per_event) is not None and each > MANY_TOKENS:
            lines.append(
                f"{found.load.label}: {each:.2g} tokens an event; the time between tokens is the "
                "mean over an event's tokens"
            )
    if report.loads:
        lines.append(_client_line(report.loads))
    return lines + report.notes


MANY_TOKENS = 1.1
"""Tokens of an event from which on it is said."""


def milliseconds(seconds: float) -> str:
    """A time span in a unit that suits it."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def write_requests(file: TextIO, runs: Sequence[LoadRun]) -> None:
    """Write a table of all requests, in the order of their ends."""
    writer = csv.writer(file)
    writer.writerow(CSV_COLUMNS)
    for run in runs:
        began = min((one.intended for one in run.results), default=0.0)
        for one in run.results:
            server = one.server
            cells: list[object] = [
                run.load.label,
                one.number,
                one.intended - began,
                one.started - one.intended,
                one.ttft,
                one.inter_token,
                one.longest_gap,
                one.completion,
                server.prompt_tokens,
                server.cached_tokens,
                one.tokens,
                one.events,
                one.queue_seconds,
                one.error,
            ]
            writer.writerow([f"{x:.6f}" if isinstance(x, float) else x for x in cells])


def _shown(found: Percentiles | None, *names: str) -> list[str | None]:
    return [None if found is None else milliseconds(getattr(found, name)) for name in names]


def _limit_line(verdict: Verdict) -> str:
    return f"{verdict.limit.value}: {verdict.reason}"


def _client_line(loads: Sequence[LoadResult]) -> str:
    clients = [one.figures.client for one in loads if one.figures.client is not None]
    lag = max((one.lag.p95 for one in clients), default=0.0)
    share = max((one.cpu_share for one in clients), default=0.0)
    starts = [
        one.figures.client.start_lag.p95
        for one in loads
        if one.figures.client is not None and one.figures.load.loop is not Loop.CLOSED
    ]
    late = f"requests started at most {milliseconds(max(starts))} late, " if starts else ""
    return (
        f"The load generator itself: lag at most {milliseconds(lag)} (95th percentile; a timer's "
        f"step is 1 ms), {late}{share:.0%} of a CPU."
    )
