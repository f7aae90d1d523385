"""Figures over all seeds, ratios to the other proxies, targets, and the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from tests.bench.report import Goal, Results, Sample, invalid, number, table
from tests.bench.scenarios import quantile
from tests.bench.scheduling.fronts import OURS, PEERS
from tests.bench.scheduling.play import CAPACITY, LOADS, Played, mean

MARKS = ("<!-- bench-scheduling: begin -->", "<!-- bench-scheduling: end -->")
FIGURES = {
    "mean": "mean completion, s",
    "ttft_p50": "TTFT p50, s",
    "ttft_p95": "TTFT p95, s",
    "tokens_per_s": "tokens/s",
    "cached": "prompt cached",
}
MORE_IS_BETTER = ("tokens_per_s", "cached")
GOALS = (("mean", 0.60, 0.50), ("ttft_p95", 0.50, 0.35))
"""Figures with what their ratio to nginx at capacity must be, and what it shall be."""
WORSE = 0.05  # the most by which a figure may be worse than another proxy's
BUSY = ("front_busy", "load_busy", "disturbed")


def pooled(played: Sequence[Played]) -> Results:
    """One sample for each load and front: the figures of all seeds together."""
    runs: dict[tuple[str, str], list[Played]] = {}
    for one in played:
        runs.setdefault((one.load, one.front), []).append(one)
    return Results([_sample(*place, some) for place, some in runs.items()])


def _sample(load: str, front: str, runs: Sequence[Played]) -> Sample:
    records = [record for run in runs for record in run.records]
    problems = [record.problem for record in records if record.problem]
    ttft = [record.ttft for record in records]
    # From the first request of a trace to its last answer.
    spans = [
        max(one.sent + one.took for one in run.records) - min(one.sent for one in run.records)
        for run in runs
    ]
    figures = {
        "requests": len(records),
        "mean": mean(records),
        "ttft_p50": quantile(ttft, 0.5),
        "ttft_p95": quantile(ttft, 0.95),
        "tokens_per_s": sum(one.completion for one in records) / max(sum(spans), 1e-9),
        "cached": sum(one.cached for one in records) / max(sum(one.prompt for one in records), 1),
        **{name: max(getattr(run, name) for run in runs) for name in BUSY},
    }
    return Sample(load, front, 1, figures, len(problems), "".join(problems[:1]))


def ratio(ours: str, peer: str, load: str, figure: str, results: Results) -> float | None:
    return results.paired((load, ours), (load, peer), figure)


def goals(results: Results) -> list[Goal]:
    """Those targets for which the samples suffice."""
    found = []
    for ours in OURS:
        for figure, must, aim in GOALS:
            measure = partial(ratio, ours, "nginx", CAPACITY, figure)
            name = f"{ours} at capacity: {FIGURES[figure]} / nginx"
            found.append(Goal(name, must, aim, measure))
        losses = []
        for load in LOADS:
            for peer in PEERS:
                for figure, title in FIGURES.items():
                    if times := ratio(ours, peer, load, figure, results):
                        loss = 1 / times if figure in MORE_IS_BETTER else times
                        losses.append((loss, f"{title} / {peer}, {load}"))
        if losses:
            worst, name = max(losses)
            title = f"{ours}, worst figure against a peer: {name}"
            found.append(Goal(title, 1 + WORSE, 1.0, partial(_worst, worst)))
    return [goal for goal in found if goal.measure(results) is not None]


def _worst(loss: float, _: Results) -> float:
    return loss


def tables(results: Results, titles: Mapping[str, str]) -> str:
    """The figures of each load, with ratios to the peers; the verdicts, and how busy cores were.

    `titles`: those of the fronts.
    """
    parts = []
    loads = list(dict.fromkeys(sample.scenario for sample in results.samples))
    for load in loads:
        rows = []
        for front, title in titles.items():
            row = [title]
            for figure in FIGURES:
                value = results.median(load, front, figure)
                ratios = [
                    ratio(front, peer, load, figure, results) for peer in PEERS if peer != front
                ]
                told = ", ".join(f"{one:.2f}" for one in ratios if one is not None)
                percent = figure == "cached"
                shown = "-" if value is None else f"{value:.1%}" if percent else number(value)
                row.append(f"{shown} ({told})" if told else shown)
            rows.append(row)
        parts.append(table([f"load: {load}, {LOADS[load]:g} x capacity", *FIGURES.values()], rows))
    if verdicts := goals(results):
        rows = [goal.row(results) for goal in verdicts]
        parts.append(table(["target", "measured", "must", "aim", "kept"], rows))
    rows = [[load, *(_busy(results, load, front) for front in titles)] for load in loads]
    head = "core busy, the busiest seed: front / nodes and clients / disturbed"
    parts.append(table([head, *titles.values()], rows))
    return "\n\n".join([*parts, *invalid(results)]) + "\n"


def _busy(results: Results, load: str, front: str) -> str:
    shares = [results.median(load, front, name) or 0.0 for name in BUSY]
    return " / ".join(f"{share:.0%}" for share in shares)
