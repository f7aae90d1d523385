"""Medians, ratios and verdicts from samples; Markdown tables for people, JSON for programs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import operator
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.bench.scenarios import Scenario

PEER, OURS = "nginx", "gateway"
SGLANG_TO_NGINX = 144 / 22
"""CPU of sglang-router 0.3 to nginx 1.22 at plain c32, measured on the reference machine."""
DELAY_LIMIT_MS = 50.0  # a number of streams is sustained while their p99 delay stays below this
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"

Verdict = Literal["aim", "must", "MISS", "not measured"]


@dataclass(frozen=True, slots=True)
class Sample:
    scenario: str
    target: str
    round: int
    figures: dict[str, float]
    errors: int = 0
    first_error: str = ""


@dataclass(frozen=True, slots=True)
class Results:
    samples: Sequence[Sample]

    def invalid(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.errors]

    def rounds(self, scenario: str, target: str, figure: str) -> dict[int, float]:
        """A figure of the valid samples, by round."""
        return {
            sample.round: sample.figures[figure]
            for sample in self.samples
            if (sample.scenario, sample.target) == (scenario, target)
            and not sample.errors
            and figure in sample.figures
        }

    def median(self, scenario: str, target: str, figure: str) -> float | None:
        """Median over the rounds; None where nothing valid was measured."""
        values = self.rounds(scenario, target, figure).values()
        return statistics.median(values) if values else None

    def paired(
        self,
        one: tuple[str, str],
        other: tuple[str, str],
        figure: str = "cpu_us",
        combine: Callable[[float, float], float] = lambda a, b: a / b if b else float("inf"),
    ) -> float | None:
        """Median over the rounds of two figures, combined within each round: by their ratio.

        `one` and `other` are (scenario, target). Within a round both ran under the same
        conditions; medians of each alone would mix conditions.
        """
        left, right = self.rounds(*one, figure), self.rounds(*other, figure)
        both = [combine(left[i], right[i]) for i in left.keys() & right.keys()]
        return statistics.median(both) if both else None


@dataclass(frozen=True, slots=True)
class Goal:
    """A target figure of the data plane."""

    name: str
    must: float
    aim: float
    measure: Callable[[Results], float | None]
    sign: Literal["<=", ">="] = "<="

    def verdict(self, value: float | None) -> Verdict:
        """The better of the two bounds that a value keeps."""
        if value is None:
            return "not measured"
        keeps = operator.le if self.sign == "<=" else operator.ge
        return "aim" if keeps(value, self.aim) else "must" if keeps(value, self.must) else "MISS"

    def row(self, results: Results) -> list[str]:
        value = self.measure(results)
        shown = "-" if value is None else number(value)
        bounds = (f"{self.sign} {bound:g}" for bound in (self.must, self.aim))
        return [self.name, shown, *bounds, self.verdict(value)]


def _to_peer(scenario: str, peer_scenario: str = "") -> Callable[[Results], float | None]:
    return lambda results: results.paired((scenario, OURS), (peer_scenario or scenario, PEER))


def _to_sglang(results: Results) -> float | None:
    ratio = _to_peer("plain-c32")(results)
    return None if ratio is None else ratio / SGLANG_TO_NGINX


def _to_own(results: Results) -> float | None:
    return results.paired(("plain-c256", OURS), ("plain-c32", OURS))


def _added(results: Results) -> float | None:
    return results.paired(("latency", OURS), ("latency", "direct"), "p50_ms", operator.sub)


def _streams(results: Results) -> float | None:
    """The largest number of streams with a p99 delay below the limit; 0 when there is none."""
    counts = {
        int(sample.figures["streams"])
        for sample in results.samples
        if sample.target == OURS and {"streams", "p99_ms"} <= sample.figures.keys()
    }
    delays = {count: results.median(f"streams-{count}", OURS, "p99_ms") for count in counts}
    kept = [n for n, delay in delays.items() if delay is not None and delay < DELAY_LIMIT_MS]
    return max(kept, default=0) if counts else None


def _long_turns(results: Results) -> float | None:
    """Turns above 50 ms in the run with most of them, of all runs of many streams."""
    valid = (sample.figures for sample in results.samples if not sample.errors)
    return max((found["long_turns"] for found in valid if "long_turns" in found), default=None)


GOALS = (
    Goal("chunk / nginx", 2.0, 1.5, _to_peer("chunk")),
    Goal("chunk full / nginx", 2.5, 1.5, _to_peer("chunk-full")),
    Goal("plain c32 / nginx", 6, 5, _to_peer("plain-c32")),
    Goal("assembled plain chat: per token / nginx chunk", 2.5, 1.5, _to_peer("assembled", "chunk")),
    Goal("plain c256 / own c32", 1.5, 1.2, _to_own),
    Goal("plain c32 / sglang-router (by its recorded 6.5 x nginx)", 1.0, 0.7, _to_sglang),
    Goal("added median at 100 requests/s, ms", 1.0, 0.6, _added),
    Goal("streams of 10 tokens/s with p99 delay < 50 ms", 2000, 3000, _streams, ">="),
    Goal("turns of the event loop above 50 ms with many streams", 0, 0, _long_turns),
    Goal("RSS with idle streams, MB", 100, 60, lambda found: found.median("rss", OURS, "rss_mb")),
)


def number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tables(results: Results, scenarios: Sequence[Scenario], targets: Sequence[str]) -> str:
    """The figures, the verdicts and the load of the cores, as Markdown tables."""

    def each(head: str, cell: Callable[[Scenario, str], str]) -> str:
        rows = [[s.title, *(cell(s, target) for target in targets)] for s in scenarios]
        return table([head, *targets], rows)

    def figure(scenario: Scenario, target: str) -> str:
        value = results.median(scenario.name, target, scenario.figure)
        if value is None or (target == "direct" and scenario.figure == "cpu_us"):
            return "-"
        ratio = results.paired((scenario.name, target), (scenario.name, PEER), scenario.figure)
        return number(value) if ratio is None else f"{number(value)} ({ratio:.2f} x)"

    def cores(scenario: Scenario, target: str) -> str:
        names = ("proxy_busy", "load_busy", "disturbed")
        shares = [results.median(scenario.name, target, name) for name in names]
        return " / ".join(f"{share:.0%}" for share in shares if share is not None) or "-"

    parts = [each("", figure)]
    if OURS in targets:
        verdicts = [goal.row(results) for goal in GOALS]
        parts.append(table(["target", "measured", "must", "aim", "kept"], verdicts))
    parts.append(each("core busy: proxy / upstream and load / disturbed", cores))
    turns = []
    for scenario in scenarios:
        names = ("longest_turn_ms", "long_turns")
        found = [results.median(scenario.name, OURS, name) for name in names]
        if shown := [number(value) for value in found if value is not None]:
            turns.append([scenario.title, *shown])
    if turns:
        head = ["turns of the gateway's event loop, CPU", "longest, ms", "above 50 ms"]
        parts.append(table(head, turns))
    parts += invalid(results)
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def invalid(results: Results) -> list[str]:
    """A list of the samples that count in no figure; nothing if all do."""
    lines = [
        f"- {one.scenario}, {one.target}, round {one.round}: {one.errors} errors, "
        f"the first: {one.first_error}"
        for one in results.invalid()
    ]
    return ["\n".join(["Invalid, and counted in no figure:", "", *lines])] if lines else []


def finish(
    options: argparse.Namespace,
    results: Results,
    goals: Sequence[Goal],
    tables: str,
    folder: Path,
    setting: Mapping[str, Any],
    marks: tuple[str, str] = (BEGIN, END),
) -> int:
    """Print the tables and write what else is wanted; returns the exit status.

    A page gets the tables only if all samples are valid; the folder of the logs is then removed.
    The setting has at least the command and the facts about the machine.
    """
    sys.stdout.write(tables)
    if options.json:
        verdicts = {goal.name: goal.verdict(goal.measure(results)) for goal in goals}
        samples = [dataclasses.asdict(sample) for sample in results.samples]
        found = {**setting, "goals": verdicts, "samples": samples}
        options.json.write_text(json.dumps(found, indent=2))
    if results.invalid():
        sys.stderr.write(f"invalid samples; logs and configurations: {folder}\n")
        return 1
    shutil.rmtree(folder)
    if options.markdown:
        lines = "\n".join(f"- {name}: {value}" for name, value in setting["machine"].items())
        page = f"```console\n$ {setting['command']}\n```\n\n{lines}\n\n{tables}"
        write_between_markers(options.markdown, page, marks)
    return 0


def write_between_markers(page: Path, text: str, marks: tuple[str, str]) -> None:
    """Replace the text between the page's markers; a page without them gets both at its end."""
    first, last = marks
    before, _, rest = (page.read_text() if page.exists() else "").partition(first)
    after = rest.partition(last)[2] or "\n"
    page.write_text(f"{before}{first}\n\n{text}\n{last}{after}")
