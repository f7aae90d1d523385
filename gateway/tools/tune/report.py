"""What a search has found, as one value: for people, for scripts, for host vars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway.tools.local.errors import MissingExtraError
from gateway.tools.tune.measurements import Figures
from gateway.tools.tune.other_work import MOST_OTHER_WORK
from gateway.tools.tune.search import REPEATS, TuningSession
from gateway.tools.tune.setting import KNOBS, Setting

MOST_NAMED_SETTINGS = 3  # settings of a kind that the verdict names


@dataclass(frozen=True, slots=True)
class SettingResult:
    """A setting that was measured."""

    setting: Setting
    figures: Figures  # medians
    score: float  # seconds, median
    repeats: int  # it was measured
    gain: float  # against the rule of thumb; negative: worse
    significant: bool  # whether that is more than noise


@dataclass(frozen=True, slots=True)
class TuningReport:
    """Everything that is told at the end."""

    results: tuple[SettingResult, ...]  # best score first
    best: SettingResult
    baseline: SettingResult
    session: TuningSession

    @property
    def noise(self) -> float:
        """Of one measurement, as a share of it."""
        return self.session.search.history.noise()

    @property
    def disturbed_count(self) -> int:
        """Measurements while others worked on the machine."""
        return sum((one.other_work or 0.0) > MOST_OTHER_WORK for one in self.session.measurements)

    def verdict(self) -> list[str]:
        """What the figures allow to say, in sentences."""
        search = self.session.search
        found = []
        if len(self.results) == 1:
            found.append(f"Only the rule of thumb was measured: {self.baseline.setting}.")
        elif self.best.setting == self.baseline.setting:
            found.append(
                "Nothing that was tried is better than the rule of thumb by more than noise: keep "
                f"{self.best.setting}."
            )
        else:
            found.append(
                f"Best: {self.best.setting}. Its score is {self.best.gain:.0%} less than that of "
                f"the rule of thumb ({self.baseline.setting})."
            )
        repeated = any(row.repeats > 1 for row in self.results)
        found.append(
            f"A single measurement {'varies' if repeated else 'is taken to vary'} by "
            f"{self.noise:.1%}, so differences of less than "
            f"{search.history.detectable_difference(REPEATS):.1%} are not told from noise."
        )
        others = [row for row in self.results if row.setting != self.best.setting]
        ahead = [row for row in others if row.repeats < REPEATS and row.score < self.best.score]
        if ahead:
            found.append(f"Seemed better, but not measured often enough: {_named(ahead)}.")
        if ties := [row for row in others if row not in ahead and not self._worse(row)]:
            found.append(f"Not told from the best: {_named(ties)}.")
        if untried := search.unsearched_knobs():
            found.append(
                f"Not searched to the end ({_why(self.session.end_reason)}): "
                f"{', '.join(untried)}. The "
                "same command goes on from here."
            )
        if self.disturbed_count:
            found.append(
                f"Other work was on the machine in {self.disturbed_count} of "
                f"{len(self.session.measurements)} measurements: they say less than they seem to."
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """For scripts."""
        session = self.session
        return {
            "goal": session.goal,
            "request": asdict(session.request),
            "ended": session.end_reason,
            "best": _row(self.best),
            "rule_of_thumb": _row(self.baseline),
            "better_than_rule_of_thumb": self.best.setting != self.baseline.setting,
            "noise": self.noise,
            "verdict": self.verdict(),
            "tried": [_row(row) for row in self.results],
            "failed": [
                {"setting": asdict(setting), "error": error}
                for setting, error in session.errors().items()
            ],
            "measurements": len(session.measurements),
            "disturbed_measurements": self.disturbed_count,
            "settings_of_full_grid": session.search.space.size,
            "not_searched": session.search.unsearched_knobs(),
        }

    def _worse(self, row: SettingResult) -> bool:
        return self.session.search.history.clearly_better(self.best.setting, row.setting)


def build_report(session: TuningSession) -> TuningReport | None:
    """The report on a session; None when not even the first setting was measured."""
    history, start = session.search.history, session.search.baseline
    if history.count(start) == 0:
        return None
    rows = {
        setting: SettingResult(
            setting,
            figures,
            history.median_score(setting),
            history.count(setting),
            history.gain(setting, start),
            history.clearly_better(setting, start) or history.clearly_better(start, setting),
        )
        for setting, figures in session.median_by_setting().items()
    }
    ordered = tuple(sorted(rows.values(), key=lambda row: row.score))
    return TuningReport(ordered, rows[session.search.best], rows[start], session)


def _row(row: SettingResult) -> dict[str, Any]:
    return {
        "setting": asdict(row.setting),
        "figures": row.figures.as_dict(),
        "score": row.score,
        "measured": row.repeats,
        "gain": row.gain,
        "more_than_noise": row.significant,
    }


def _named(rows: list[SettingResult]) -> str:
    named = "; ".join(str(row.setting) for row in rows[:MOST_NAMED_SETTINGS])
    return named + (
        f"; and {len(rows) - MOST_NAMED_SETTINGS} more" if len(rows) > MOST_NAMED_SETTINGS else ""
    )


def _why(ended: str) -> str:
    return {"time": "the time was over", "interrupted": "interrupted"}.get(ended, ended)


PLOTTED_FIGURES: tuple[tuple[str, Callable[[Figures], float | None]], ...] = (
    ("prefill,\ntokens/s", lambda one: one.prefill),
    ("decode alone,\ntokens/s", lambda one: one.decode),
    ("decode, all slots,\ntokens/s", lambda one: one.decode_busy),
    ("stall, s", lambda one: one.stall),
)

KNOB_LABELS = {"micro_batch": "micro-batch"}


def draw_report(path: Path, report: TuningReport, title: str) -> None:
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
    space = report.session.search.space
    knobs = [knob for knob in KNOBS if len(space.values(knob)) > 1]
    rows = ["score", *(label for label, _ in PLOTTED_FIGURES)]
    figure = Figure(
        figsize=(2.4 * max(1, len(knobs)) + 0.8, 1.7 * len(rows)), dpi=110, layout="constrained"
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), max(1, len(knobs)), sharey="row", squeeze=False)
    for column, knob in enumerate(knobs):
        near = settings_along_knob(report, knob)
        values = [value for value in space.values(knob) if value in near]
        for line, panel in enumerate(panels[:, column]):
            for at, value in enumerate(values):
                points = _points(report, near[value], line)
                panel.plot([at] * len(points), points, ".", color="grey", markersize=4)
            medians = [(at, _median(report, near[value], line)) for at, value in enumerate(values)]
            known = [(at, value) for at, value in medians if value is not None]
            panel.plot(*zip(*known, strict=True), linewidth=1.2) if known else None
            best = getattr(report.best.setting, knob)
            if best in values:
                panel.axvline(values.index(best), color="tab:green", alpha=0.4, linewidth=4)
            panel.set_xlim(-0.5, max(1, len(values)) - 0.5)
            panel.set_xticks(range(len(values)), [str(value) for value in values], fontsize=7)
            panel.grid(alpha=0.3)
            panel.tick_params(axis="y", labelsize=7)
        panels[-1][column].set_xlabel(KNOB_LABELS.get(knob, knob), fontsize=8)
    for line, label in enumerate(rows):
        text = f"{report.session.goal}, s\n(less is better)" if line == 0 else label
        panels[line][0].set_ylabel(text, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)


def settings_along_knob(report: TuningReport, knob: str) -> dict[object, Setting]:
    """For each value of the knob the setting that is otherwise like the best one.

    Where there is none, the one that is like a setting the search has passed.
    """
    tried = {row.setting for row in report.results}
    passed = [
        report.best.setting,
        report.baseline.setting,
        *(row.setting for row in report.results),
    ]
    many = [
        {
            value: base.with_knob(knob, value)
            for value in report.session.search.space.values(knob)
            if base.with_knob(knob, value) in tried
        }
        for base in passed
    ]
    # The fullest series; of equals the one around the best setting, which comes first.
    return max(many, key=len)


def _points(found: TuningReport, setting: Setting, line: int) -> list[float]:
    if line == 0:
        return list(found.session.search.history.scores[setting])
    figures = [one.figures for one in found.session.measurements if one.setting == setting]
    values = [PLOTTED_FIGURES[line - 1][1](one) for one in figures if one is not None]
    return [value for value in values if value is not None]


def _median(found: TuningReport, setting: Setting, line: int) -> float | None:
    row = next(row for row in found.results if row.setting == setting)
    return row.score if line == 0 else PLOTTED_FIGURES[line - 1][1](row.figures)
