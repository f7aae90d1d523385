"""Figures over all seeds, ratios to the other proxies, targets; tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tests.bench.report import number, page, table
from tests.bench.scenarios import quantile
from tests.bench.scheduling.fronts import FRONTS, OURS, PEERS
from tests.bench.scheduling.play import Record

CAPACITY = "capacity"
LOADS = {"light": 0.5, CAPACITY: 1.0, "above": 1.5}
"""Loads as shares of the fleet's capacity (`trace.py`)."""
WORSE = 0.05  # the most by which a figure may be worse than another proxy's


@dataclass(frozen=True, slots=True)
class Played:
    """One trace played against one front. Bounds are seconds of this very run (`trace.py`)."""

    front: str
    load: str
    seed: int
    records: list[Record] = field(repr=False)
    bounds: dict[str, float] = field(default_factory=dict)
    front_busy: float = 0.0
    """Share of its core that was in use, by the front and what ran beside it."""
    load_busy: float = 0.0  # share of the other core that nodes and clients used
    disturbed: float = 0.0
    """Share of the time that a process, on average, was ready to run but had no core."""

    @property
    def problems(self) -> list[str]:
        return [record.problem for record in self.records if record.problem]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the records of some runs of one front under one load."""

    name: str
    title: str
    of: Callable[[Sequence[Sequence[Record]]], float]
    more_is_better: bool = False


def _mean(runs: Sequence[Sequence[Record]]) -> float:
    return sum(r.took for run in runs for r in run) / max(sum(map(len, runs)), 1)


def _ttft(share: float) -> Callable[[Sequence[Sequence[Record]]], float]:
    return lambda runs: quantile([r.ttft for run in runs for r in run], share)


def _rate(runs: Sequence[Sequence[Record]]) -> float:
    """Output tokens per second, from the first request of a trace to its last answer."""
    seconds = sum(
        max(r.sent + r.took for r in run) - min(r.sent for r in run) for run in runs if run
    )
    return sum(r.completion for run in runs for r in run) / max(seconds, 1e-9)


def _cached(runs: Sequence[Sequence[Record]]) -> float:
    prompt = sum(r.prompt for run in runs for r in run)
    return sum(r.cached for run in runs for r in run) / max(prompt, 1)


FIGURES = (
    Figure("mean", "mean completion, s", _mean),
    Figure("ttft_p50", "TTFT p50, s", _ttft(0.5)),
    Figure("ttft_p95", "TTFT p95, s", _ttft(0.95)),
    Figure("tokens_per_s", "tokens/s", _rate, more_is_better=True),
    Figure("cached", "prompt cached", _cached, more_is_better=True),
)


@dataclass(frozen=True, slots=True)
class Goal:
    """A target: a ratio to nginx at capacity."""

    figure: str
    must: float
    aim: float


GOALS = (Goal("mean", 0.60, 0.50), Goal("ttft_p95", 0.50, 0.35))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target and its result."""

    name: str
    value: float
    must: float
    aim: float | None
    kept: str


@dataclass(slots=True)
class Results:
    """All runs."""

    played: list[Played]

    def loads(self) -> list[str]:
        return list(dict.fromkeys(played.load for played in self.played))

    def fronts(self) -> list[str]:
        return list(dict.fromkeys(played.front for played in self.played))

    def runs(self, front: str, load: str) -> list[Played]:
        return [p for p in self.played if (p.front, p.load) == (front, load)]

    def value(self, front: str, load: str, figure: Figure) -> float | None:
        """The figure over all seeds; None if a request failed or nothing was played."""
        runs = self.runs(front, load)
        if not runs or any(played.problems for played in runs):
            return None
        return figure.of([played.records for played in runs])

    def ratio(self, front: str, peer: str, load: str, figure: Figure) -> float | None:
        ours, theirs = self.value(front, load, figure), self.value(peer, load, figure)
        return ours / theirs if ours is not None and theirs else None

    def bound(self, front: str, load: str, name: str) -> float | None:
        """The mean of a lower bound over the seeds."""
        found = [played.bounds[name] for played in self.runs(front, load) if name in played.bounds]
        return sum(found) / len(found) if found else None

    def verdicts(self) -> list[Verdict]:
        """The verdicts on those targets for which the runs suffice."""
        found = []
        for ours in OURS:
            for goal in GOALS:
                figure = next(f for f in FIGURES if f.name == goal.figure)
                ratio = self.ratio(ours, "nginx", CAPACITY, figure)
                if ratio is not None:
                    kept = _kept(ratio, goal.must, goal.aim)
                    name = f"{ours} at capacity: {figure.title} / nginx"
                    found.append(Verdict(name, ratio, goal.must, goal.aim, kept))
            if worst := self._worst(ours):
                loss, name = worst
                kept = "must" if loss <= 1 + WORSE else "MISS"
                title = f"{ours}, worst figure against a peer: {name}"
                found.append(Verdict(title, loss, 1 + WORSE, None, kept))
        return found

    def _worst(self, ours: str) -> tuple[float, str] | None:
        """The figure with the worst ratio to another proxy's, over all loads; above 1 is worse."""
        found = []
        for load in self.loads():
            for peer in PEERS:
                for figure in FIGURES:
                    ratio = self.ratio(ours, peer, load, figure)
                    if ratio:
                        loss = 1 / ratio if figure.more_is_better else ratio
                        found.append((loss, f"{figure.title} / {peer}, {load}"))
        return max(found, default=None)


def _kept(value: float, must: float, aim: float) -> str:
    return "aim" if value <= aim else "must" if value <= must else "MISS"


MARKS = ("<!-- bench-scheduling: begin -->", "<!-- bench-scheduling: end -->")


@dataclass(frozen=True, slots=True)
class Setting:
    """The command of a run, and the facts of its machine and of its plan."""

    command: str
    machine: dict[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The output of a run."""

    tables: str
    page: str
    json: str
    marks: tuple[str, str]
    failed: bool


def outcome(
    results: Results, setting: Setting, text: str, marks: tuple[str, str] = MARKS
) -> Outcome:
    """The output of a run, of which `text` has the tables."""
    failed = any(played.problems for played in results.played)
    shown = page(setting.command, setting.machine, text)
    return Outcome(text, shown, as_json(results, setting), marks, failed)


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
