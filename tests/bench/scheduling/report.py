"""Figures over all seeds, ratios to the other proxies, targets; tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tests.bench.report import listed, number, page, table
from tests.bench.scenarios import quantile
from tests.bench.scheduling.fronts import FRONTS, OURS, PEERS
from tests.bench.scheduling.play import Record

CAPACITY = "capacity"
LOADS = {"light": 0.5, CAPACITY: 1.0, "above": 1.5}
"""Loads as shares of the fleet's capacity (`trace.py`)."""
WORSE = 0.05  # the most by which a figure may be worse than another proxy's
MARKS = ("<!-- bench-scheduling: begin -->", "<!-- bench-scheduling: end -->")


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


Runs = Sequence[Sequence[Record]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the records of some runs of one front under one load."""

    name: str
    title: str
    of: Callable[[Runs], float]
    more_is_better: bool = False


def _mean(runs: Runs) -> float:
    return sum(r.took for run in runs for r in run) / max(sum(map(len, runs)), 1)


def _ttft(share: float) -> Callable[[Runs], float]:
    return lambda runs: quantile([r.ttft for run in runs for r in run], share)


def _rate(runs: Runs) -> float:
    """Output tokens per second, from the first request of a trace to its last answer."""
    spans = (max(r.sent + r.took for r in run) - min(r.sent for r in run) for run in runs if run)
    return sum(r.completion for run in runs for r in run) / max(sum(spans), 1e-9)


def _cached(runs: Runs) -> float:
    prompt = sum(r.prompt for run in runs for r in run)
    return sum(r.cached for run in runs for r in run) / max(prompt, 1)


FIGURES = (
    Figure("mean", "mean completion, s", _mean),
    Figure("ttft_p50", "TTFT p50, s", _ttft(0.5)),
    Figure("ttft_p95", "TTFT p95, s", _ttft(0.95)),
    Figure("tokens_per_s", "tokens/s", _rate, more_is_better=True),
    Figure("cached", "prompt cached", _cached, more_is_better=True),
)
MEAN, P95 = FIGURES[0], FIGURES[2]
GOALS = ((MEAN, 0.60, 0.50), (P95, 0.50, 0.35))
"""Figures with what their ratio to nginx at capacity must be, and what it shall be."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target and its result."""

    name: str
    value: float
    must: float
    aim: float | None = None

    @property
    def kept(self) -> str:
        if self.aim is not None and self.value <= self.aim:
            return "aim"
        return "must" if self.value <= self.must else "MISS"

    def row(self) -> list[str]:
        aim = f"<= {self.aim:g}" if self.aim else "-"
        return [self.name, f"{self.value:.2f}", f"<= {self.must:g}", aim, self.kept]


@dataclass(slots=True)
class Results:
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

    def verdicts(self) -> list[Verdict]:
        """The verdicts on those targets for which the runs suffice."""
        found = []
        for ours in OURS:
            for figure, must, aim in GOALS:
                ratio = self.ratio(ours, "nginx", CAPACITY, figure)
                if ratio is not None:
                    name = f"{ours} at capacity: {figure.title} / nginx"
                    found.append(Verdict(name, ratio, must, aim))
            losses = []
            for load in self.loads():
                for peer in PEERS:
                    for figure in FIGURES:
                        if ratio := self.ratio(ours, peer, load, figure):
                            loss = 1 / ratio if figure.more_is_better else ratio
                            losses.append((loss, f"{figure.title} / {peer}, {load}"))
            if losses:
                loss, name = max(losses)
                title = f"{ours}, worst figure against a peer: {name}"
                found.append(Verdict(title, loss, 1 + WORSE))
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """The output of a run: `facts` are those of its machine and of its plan."""

    results: Results
    tables: str
    facts: Mapping[str, str]
    marks: tuple[str, str] = MARKS

    @property
    def failed(self) -> bool:
        return any(played.problems for played in self.results.played)

    def page(self, command: str) -> str:
        return page(command, self.facts, self.tables)

    def as_json(self, command: str) -> str:
        """Every request, the figures, the verdicts and the setting."""
        found = self.results
        figures = [
            {"front": front, "load": load} | {f.name: found.value(front, load, f) for f in FIGURES}
            for load in found.loads()
            for front in found.fronts()
        ]
        verdicts = [asdict(one) | {"kept": one.kept} for one in found.verdicts()]
        played = [asdict(one) for one in found.played]
        setting = {"command": command, "machine": dict(self.facts)}
        return json.dumps(setting | {"figures": figures, "verdicts": verdicts, "played": played})


def figures(head: str, titles: Mapping[str, str], cell: Callable[[str, Figure], str]) -> str:
    """A row for each front of `titles`, a column for each figure."""
    rows = [[title, *(cell(front, f) for f in FIGURES)] for front, title in titles.items()]
    return table([head, *(figure.title for figure in FIGURES)], rows)


def failures(results: Results) -> list[str]:
    """The runs in which requests failed: one list of them, or nothing."""
    return listed(
        "Failed",
        (
            f"{p.front}, {p.load}, seed {p.seed}: {len(p.problems)}, the first: {p.problems[0]}"
            for p in results.played
            if p.problems
        ),
    )


def tables(results: Results) -> str:
    """The figures of each load, the verdicts, and how busy the cores were."""
    titles = {front: FRONTS[front].title for front in results.fronts()}
    parts = []
    for load in results.loads():

        def cell(front: str, figure: Figure, load: str = load) -> str:
            value = results.value(front, load, figure)
            if value is None:
                return "-"
            shown = f"{value:.0%}" if figure.name == "cached" else number(value)
            peers = (peer for peer in PEERS if peer != front)
            ratios = [results.ratio(front, peer, load, figure) for peer in peers]
            text = ", ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)
            return f"{shown} ({text})" if text else shown

        parts.append(figures(f"load: {load}, {LOADS[load]:g} x capacity", titles, cell))
        parts += _bounds(results, load)
    if verdicts := results.verdicts():
        rows = [verdict.row() for verdict in verdicts]
        parts.append(table(["target", "measured", "must", "aim", "kept"], rows))
    parts.append(_cores(results))
    parts += failures(results)
    return "\n\n".join(parts) + "\n"


def _bounds(results: Results, load: str) -> list[str]:
    """Mean completion divided by the bounds that no scheduler can beat, over the seeds."""
    rows = []
    for front in results.fronts():
        found = [played.bounds for played in results.runs(front, load) if played.bounds]
        value = results.value(front, load, MEAN)
        if found and value is not None:
            alone, queued = (sum(one[k] for one in found) / len(found) for k in ("alone", "queued"))
            times = f"{value / max(alone, queued):.2f} x"
            rows.append([FRONTS[front].title, number(alone), number(queued), times])
    head = ["lower bounds of the mean, s", "each alone", "one queue", "measured / the greater"]
    return [table(head, rows)] if rows else []


def _cores(results: Results) -> str:
    def cell(front: str, load: str) -> str:
        runs = results.runs(front, load)
        names = ("front_busy", "load_busy", "disturbed")
        shares = [max((getattr(one, name) for one in runs), default=0.0) for name in names]
        return " / ".join(f"{share:.0%}" for share in shares)

    rows = [[load, *(cell(front, load) for front in results.fronts())] for load in results.loads()]
    head = "core busy, the busiest seed: front / nodes and clients / disturbed"
    return table([head, *(FRONTS[front].title for front in results.fronts())], rows)
