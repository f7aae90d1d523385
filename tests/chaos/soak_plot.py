"""Plots a soak: memory, descriptors and delay over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PANELS = (
    ("resident memory, MB", ("rss_mb", "text_mb")),
    ("descriptors", ("descriptors",)),
    ("delay of an event, ms", ("p50_ms", "p99_ms")),
)


def draw_soak(path: Path, rows: Sequence[dict[str, float]], title: str) -> None:
    """Write the plot; the file's suffix decides the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    minutes = [row["seconds"] / 60 for row in rows]
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (label, names) in zip(panels, PANELS, strict=True):
        for name in names:
            axes.plot(minutes, [row[name] for row in rows], label=name, linewidth=1.2)
        axes.set_ylabel(label, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=7)
    panels[-1].set_xlabel("minutes")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)
