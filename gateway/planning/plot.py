"""A picture of a comparison: how many requests are through by when, under every policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway.planning.report import CURVE, Report

SHOWN = 0.99
"""Share of the requests that the curves show: the last per cent would press the rest together."""


class NoPlotsError(Exception):
    """The extra that draws is not installed."""


def draw(path: Path, reports: Sequence[Report], title: str) -> None:
    """Write the curves of time to first token and of completion; the suffix says the format.

    Raises NoPlotsError without the extra `plots`, ValueError for a suffix that nothing is known
    about, and OSError.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPlotsError(
            f"plots need the package {error.name!r}, which is not installed: "
            "pip install 'llama-gateway[plots]'"
        ) from error
    figure = Figure(figsize=(9, 4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    shares = [step / CURVE for step in range(CURVE + 1)]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, what in zip(panels, ("time to first token", "completion"), strict=True):
        farthest = 0.0
        for one in reports:
            first = what.startswith("time")
            curve = one.curve if first else one.completion_curve
            spread = one.ttft if first else one.completion
            if not curve:
                continue
            axes.plot(
                curve, shares, label=f"{one.policy} (mean {spread.mean:.3g} s)", linewidth=1.3
            )
            farthest = max(farthest, curve[round(SHOWN * CURVE)])
        axes.set_xlim(0, farthest * 1.02 or 1.0)
        axes.set_xlabel(f"{what}, seconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower right")
    bound = max((one.bound for one in reports), default=0.0)
    if bound:
        panels[1].axvline(bound, color="black", linestyle=":", linewidth=1)
        panels[1].annotate("bound of the mean", (bound, 0.02), fontsize=7, rotation=90)
    panels[0].set_ylabel("share of requests")
    panels[0].set_ylim(0, 1)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)
