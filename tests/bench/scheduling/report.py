"""The report: Markdown tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from tests.bench.report import number
from tests.bench.scheduling.fronts import FRONTS, PEERS
from tests.bench.scheduling.results import FIGURES, LOADS, Figure, Played, Results

MARKS = ("<!-- bench-scheduling: begin -->", "<!-- bench-scheduling: end -->")


@dataclass(frozen=True, slots=True)
class Setting:
    """The command, plan and machine of a run."""

    command: str
    machine: dict[str, str]
    scale: float
    seeds: int
    rates: dict[str, float]  # sessions a second of each load, the mean over the seeds


@dataclass(frozen=True, slots=True)
class Outcome:
    """The output of a run."""

    tables: str
    page: str
    json: str
    marks: tuple[str, str]
    failed: bool


def outcome(results: Results, setting: Setting) -> Outcome:
    """The output of a run with verdicts."""
    text = tables(results)
    failed = any(played.problems for played in results.played)
    return Outcome(text, page(text, setting), as_json(results, setting), MARKS, failed)


def brief(
    played: Sequence[Played],
    tables: str,
    seeds: int,
    command: str,
    facts: dict[str, str],
    marks: tuple[str, str],
) -> Outcome:
    """The output of a run without verdicts: tables, setting and every request."""
    text = _page(command, facts | {"seeds": str(seeds)}, tables)
    as_json = json.dumps(
        {"command": command, "machine": facts, "played": [asdict(one) for one in played]}
    )
    return Outcome(tables, text, as_json, marks, any(one.problems for one in played))


def figures(head: str, titles: Mapping[str, str], cell: Callable[[str, Figure], str]) -> str:
    """A row for each front of `titles`, a column for each figure."""
    rows = [
        [title, *(cell(front, figure) for figure in FIGURES)] for front, title in titles.items()
    ]
    return table([head, *(figure.title for figure in FIGURES)], rows)


def failures(results: Results) -> list[str]:
    """The runs in which requests failed: one list of them, or nothing."""
    lines = [
        f"- {p.front}, {p.load}, seed {p.seed}: {len(p.problems)}, the first: {p.problems[0]}"
        for p in results.played
        if p.problems
    ]
    return ["\n".join(["Failed, and counted in no figure:", "", *lines])] if lines else []


def tables(results: Results) -> str:
    """The figures of each load, the verdicts, and how busy the cores were."""
    parts = [_figures(results, load) for load in results.loads()]
    if verdicts := results.verdicts():
        rows = [
            [v.name, f"{v.value:.2f}", f"<= {v.must:g}", f"<= {v.aim:g}" if v.aim else "-", v.kept]
            for v in verdicts
        ]
        parts.append(table(["target", "measured", "must", "aim", "kept"], rows))
    parts.append(_cores(results))
    parts += failures(results)
    return "\n\n".join(parts) + "\n"


def _figures(results: Results, load: str) -> str:
    share = LOADS.get(load)
    head = f"load: {load}" + (f", {share:g} x capacity" if share else "")
    titles = {front: FRONTS[front].title for front in results.fronts()}
    found = figures(head, titles, lambda front, figure: _cell(results, front, load, figure))
    return "\n\n".join(filter(None, (found, _bounds(results, load))))


def _cell(results: Results, front: str, load: str, figure: Figure) -> str:
    value = results.value(front, load, figure)
    if value is None:
        return "-"
    shown = f"{value:.0%}" if figure.name == "cached" else number(value)
    ratios = [
        results.ratio(front, peer, load, figure)
        for peer in PEERS
        if peer != front and peer in results.fronts()
    ]
    text = ", ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)
    return f"{shown} ({text})" if text else shown


def _bounds(results: Results, load: str) -> str:
    """Mean completion divided by the bounds that no scheduler can beat."""
    rows = []
    mean = FIGURES[0]
    for front in results.fronts():
        alone, queued = (results.bound(front, load, name) for name in ("alone", "queued"))
        value = results.value(front, load, mean)
        if alone is None or queued is None or value is None:
            continue
        times = value / max(alone, queued)
        rows.append([FRONTS[front].title, number(alone), number(queued), f"{times:.2f} x"])
    head = ["lower bounds of the mean, s", "each alone", "one queue", "measured / the greater"]
    return table(head, rows) if rows else ""


def _cores(results: Results) -> str:
    rows = []
    for load in results.loads():
        row = [load]
        for front in results.fronts():
            runs = results.runs(front, load)
            shares = [
                max((getattr(played, name) for played in runs), default=0.0)
                for name in ("front_busy", "load_busy", "disturbed")
            ]
            row.append(" / ".join(f"{share:.0%}" for share in shares))
        rows.append(row)
    head = ["core busy, the busiest seed: front / nodes and clients / disturbed"]
    return table([*head, *(FRONTS[front].title for front in results.fronts())], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(report: str, setting: Setting) -> str:
    """The tables with the command that made them and the facts of the machine."""
    facts = setting.machine | {
        "seeds": str(setting.seeds),
        "scale": f"{setting.scale:g} seconds of the fleet's time in one of the clock's",
        "sessions a second": ", ".join(f"{k} {v:.2f}" for k, v in setting.rates.items()),
    }
    return _page(setting.command, facts, report)


def _page(command: str, facts: Mapping[str, str], tables: str) -> str:
    text = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return f"```console\n$ {command}\n```\n\n{text}\n\n{tables}"


def as_json(results: Results, setting: Setting) -> str:
    """Every request, the figures, the verdicts and the setting."""
    figures = [
        {"front": front, "load": load}
        | {figure.name: results.value(front, load, figure) for figure in FIGURES}
        for load in results.loads()
        for front in results.fronts()
    ]
    return json.dumps(
        asdict(setting)
        | {
            "figures": figures,
            "verdicts": [asdict(verdict) for verdict in results.verdicts()],
            "played": [asdict(played) for played in results.played],
        }
    )
