"""Plots of a run."""

from __future__ import annotations

from pathlib import Path

from gateway.tools.bench.report import BenchReport

SHOWN_SHARE = 0.99
"""Share of the requests that the curves show: the last per cent would squeeze the rest."""


def draw_report(path: Path, report: BenchReport) -> None:
    """Draw TTFT and completion of each load, and tokens/s; the suffix gives the format.

    Needs the extra `plots`. Raises OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    for axes, name in zip(panels, ("ttft", "completion"), strict=False):
        farthest = 0.0
        for one in report.loads:
            values = sorted(getattr(one.figures.samples, name))
            if not values:
                continue
            shares = [(place + 1) / len(values) for place in range(len(values))]
            axes.step(values, shares, where="post", label=one.figures.load.label, linewidth=1.3)
            farthest = max(farthest, values[round(SHOWN_SHARE * (len(values) - 1))])
        axes.set_xlim(0, farthest * 1.05 or 1.0)
        axes.set_ylim(0, 1)
        axes.set_xlabel("TTFT, seconds" if name == "ttft" else "completion, seconds")
        axes.grid(alpha=0.3)
        if farthest:
            axes.legend(fontsize=7, loc="lower right")
    panels[0].set_ylabel("share of requests")
    labels = [one.figures.load.label for one in report.loads]
    panels[2].bar(labels, [one.figures.total_tokens_per_second for one in report.loads])
    panels[2].set_ylabel("tokens/s, all requests")
    panels[2].tick_params(axis="x", labelsize=7)
    figure.suptitle(report.title.replace("$", r"\$"), fontsize=9)
    figure.savefig(path)
