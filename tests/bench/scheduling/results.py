"""Figures over all seeds, ratios to the other proxies, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.bench.scenarios import quantile
from tests.bench.scheduling.fronts import OURS, PEERS
from tests.bench.scheduling.play import Record

CAPACITY = "capacity"
LOADS = {"light": 0.5, CAPACITY: 1.0, "above": 1.5}
"""Loads as shares of the fleet's capacity (`capacity.py`)."""
WORSE = 0.05  # the most by which a figure may be worse than another proxy's


@dataclass(frozen=True, slots=True)
class Played:
    """One trace played against one front. Bounds are seconds of this very run (`capacity.py`)."""

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
