"""The benchmark's report: Markdown tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from tests.bench.results import GOALS, OURS, PEER, Results
from tests.bench.scenarios import Scenario, Sizes

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The command, machine and sizes of a run."""

    command: str
    machine: dict[str, str]
    sizes: Sizes
    rounds: int


def number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tables(results: Results, scenarios: Sequence[Scenario], targets: Sequence[str]) -> str:
    """The figures, the verdicts and the load of the cores, as Markdown tables."""
    parts = [_figures(results, scenarios, targets)]
    if OURS in targets:
        parts.append(_verdicts(results))
    parts.append(_cores(results, scenarios, targets))
    if invalid := results.invalid():
        parts.append(
            "\n".join(
                ["Invalid, and counted in no figure:", ""]
                + [
                    f"- {s.scenario}, {s.target}, round {s.round}: {s.errors} errors, "
                    f"the first: {s.first_error}"
                    for s in invalid
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _figures(results: Results, scenarios: Sequence[Scenario], targets: Sequence[str]) -> str:
    def cell(scenario: Scenario, target: str) -> str:
        if target == "direct" and scenario.figure == "cpu_us":
            return "-"
        value = results.median(scenario.name, target, scenario.figure)
        if value is None:
            return "-"
        ratio = results.ratio((scenario.name, target), (scenario.name, PEER), scenario.figure)
        return number(value) if ratio is None else f"{number(value)} ({ratio:.2f} x)"

    rows = [[s.title, *(cell(s, target) for target in targets)] for s in scenarios]
    return _table(["", *targets], rows)


def _verdicts(results: Results) -> str:
    rows = []
    for goal in GOALS:
        value = goal.measure(results)
        sign = ">=" if goal.more_is_better else "<="
        rows.append(
            [
                goal.name,
                "-" if value is None else number(value),
                f"{sign} {goal.must:g}",
                f"{sign} {goal.aim:g}",
                goal.verdict(value),
            ]
        )
    return _table(["target", "measured", "must", "aim", "kept"], rows)


def _cores(results: Results, scenarios: Sequence[Scenario], targets: Sequence[str]) -> str:
    figures = ("proxy_busy", "load_busy", "disturbed")

    def cell(scenario: Scenario, target: str) -> str:
        shares = [results.median(scenario.name, target, figure) for figure in figures]
        return " / ".join(f"{share:.0%}" for share in shares if share is not None) or "-"

    rows = [[s.title, *(cell(s, target) for target in targets)] for s in scenarios]
    return _table(["core busy: proxy / upstream and load / disturbed", *targets], rows)


def page(report: str, setting: Setting) -> str:
    """The tables with the command that made them and the machine's facts."""
    facts = setting.machine | {"rounds": str(setting.rounds)}
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return f"```console\n$ {setting.command}\n```\n\n{lines}\n\n{report}"


def write_between_markers(page: Path, text: str, marks: tuple[str, str] = (BEGIN, END)) -> None:
    """Replace the text between the page's markers; append both to a page without them."""
    first, last = marks
    before, begin, rest = (page.read_text() if page.exists() else "").partition(first)
    _, _, after = rest.partition(last)
    if not begin and before and not before.endswith("\n\n"):
        before = before.rstrip("\n") + "\n\n"
    page.write_text(f"{before}{first}\n\n{text}\n{last}{after or chr(10)}")


def as_json(results: Results, setting: Setting) -> str:
    """The setting, all samples and the verdicts, as JSON."""
    kept = [(goal, goal.measure(results)) for goal in GOALS]
    goals = [
        {
            "name": goal.name,
            "value": value,
            "must": goal.must,
            "aim": goal.aim,
            "kept": goal.verdict(value),
        }
        for goal, value in kept
    ]
    samples = [dataclasses.asdict(sample) for sample in results.samples]
    return json.dumps(dataclasses.asdict(setting) | {"goals": goals, "samples": samples}, indent=2)
