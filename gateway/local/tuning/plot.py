"""A picture of what was tried: a column for each knob, a row for each figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gateway.local.errors import MissingExtraError
from gateway.local.tuning.goals import Figures
from gateway.local.tuning.report import Report
from gateway.local.tuning.setting import KNOBS, Setting

FIGURES: tuple[tuple[str, Callable[[Figures], float | None]], ...] = (
    ("prefill,\ntokens/s", lambda one: one.prefill),
    ("decode alone,\ntokens/s", lambda one: one.decode),
    ("decode, all slots,\ntokens/s", lambda one: one.decode_busy),
    ("stall, s", lambda one: one.stall),
)
LABELS = {"micro_batch": "micro-batch"}


def draw(path: Path, found: Report, title: str) -> None:
    """Draw every measurement of the settings on the way, and the medians; the suffix says how.

    Each column shows settings that differ from the best in this knob only (and, for batch and
    micro-batch, in the other where it had to follow). Raises MissingExtraError without the extra
    `plots`, and OSError.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            f"plots need the package {error.name!r}, which is not installed: "
            "pip install 'llama-gateway[plots]'"
        ) from error
    space = found.session.search.space
    knobs = [knob for knob in KNOBS if len(space.values(knob)) > 1]
    rows = ["score", *(label for label, _ in FIGURES)]
    figure = Figure(
        figsize=(2.4 * max(1, len(knobs)) + 0.8, 1.7 * len(rows)), dpi=110, layout="constrained"
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), max(1, len(knobs)), sharey="row", squeeze=False)
    for column, knob in enumerate(knobs):
        near = on_the_way(found, knob)
        values = [value for value in space.values(knob) if value in near]
        for line, panel in enumerate(panels[:, column]):
            for at, value in enumerate(values):
                points = _points(found, near[value], line)
                panel.plot([at] * len(points), points, ".", color="grey", markersize=4)
            medians = [(at, _median(found, near[value], line)) for at, value in enumerate(values)]
            known = [(at, value) for at, value in medians if value is not None]
            panel.plot(*zip(*known, strict=True), linewidth=1.2) if known else None
            best = getattr(found.best.setting, knob)
            if best in values:
                panel.axvline(values.index(best), color="tab:green", alpha=0.4, linewidth=4)
            panel.set_xlim(-0.5, max(1, len(values)) - 0.5)
            panel.set_xticks(range(len(values)), [str(value) for value in values], fontsize=7)
            panel.grid(alpha=0.3)
            panel.tick_params(axis="y", labelsize=7)
        panels[-1][column].set_xlabel(LABELS.get(knob, knob), fontsize=8)
    for line, label in enumerate(rows):
        text = f"{found.session.goal}, s\n(less is better)" if line == 0 else label
        panels[line][0].set_ylabel(text, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)


def on_the_way(found: Report, knob: str) -> dict[object, Setting]:
    """For each value of the knob the setting that is otherwise like the best one.

    Where there is none, the one that is like a setting the search has passed.
    """
    tried = {row.setting for row in found.rows}
    passed = [found.best.setting, found.start.setting, *(row.setting for row in found.rows)]
    many = [
        {
            value: base.changed(knob, value)
            for value in found.session.search.space.values(knob)
            if base.changed(knob, value) in tried
        }
        for base in passed
    ]
    # The fullest series; of equals the one around the best setting, which comes first.
    return max(many, key=len)


def _points(found: Report, setting: Setting, line: int) -> list[float]:
    if line == 0:
        return list(found.session.search.history.scores[setting])
    figures = [one.figures for one in found.session.done if one.setting == setting]
    values = [FIGURES[line - 1][1](one) for one in figures if one is not None]
    return [value for value in values if value is not None]


def _median(found: Report, setting: Setting, line: int) -> float | None:
    row = next(row for row in found.rows if row.setting == setting)
    return row.score if line == 0 else FIGURES[line - 1][1](row.figures)
