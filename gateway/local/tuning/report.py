"""What a search has found, as one value: for people, for scripts, for host vars."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gateway.local.tuning.goals import Figures
from gateway.local.tuning.other_work import LIMIT
from gateway.local.tuning.search import REPEATS
from gateway.local.tuning.session import Session
from gateway.local.tuning.setting import Setting

NAMED = 3  # settings of a kind that the verdict names


@dataclass(frozen=True, slots=True)
class Row:
    """A setting that was measured."""

    setting: Setting
    figures: Figures  # medians
    score: float  # seconds, median
    times: int  # it was measured
    gain: float  # against the rule of thumb; negative: worse
    told_apart: bool  # whether that is more than noise


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is told at the end."""

    rows: tuple[Row, ...]  # best score first
    best: Row
    start: Row
    session: Session

    @property
    def noise(self) -> float:
        """Of one measurement, as a share of it."""
        return self.session.search.history.noise()

    @property
    def disturbed(self) -> int:
        """Measurements while others worked on the machine."""
        return sum((one.other_work or 0.0) > LIMIT for one in self.session.done)

    def verdict(self) -> list[str]:
        """What the figures allow to say, in sentences."""
        search = self.session.search
        found = []
        if len(self.rows) == 1:
            found.append(f"Only the rule of thumb was measured: {self.start.setting}.")
        elif self.best.setting == self.start.setting:
            found.append(
                "Nothing that was tried is better than the rule of thumb by more than noise: keep "
                f"{self.best.setting}."
            )
        else:
            found.append(
                f"Best: {self.best.setting}. Its score is {self.best.gain:.0%} less than that of "
                f"the rule of thumb ({self.start.setting})."
            )
        repeated = any(row.times > 1 for row in self.rows)
        found.append(
            f"A single measurement {'varies' if repeated else 'is taken to vary'} by "
            f"{self.noise:.1%}, so differences of less than "
            f"{search.history.resolution(REPEATS):.1%} are not told from noise."
        )
        others = [row for row in self.rows if row.setting != self.best.setting]
        ahead = [row for row in others if row.times < REPEATS and row.score < self.best.score]
        if ahead:
            found.append(f"Seemed better, but not measured often enough: {_named(ahead)}.")
        if ties := [row for row in others if row not in ahead and not self._worse(row)]:
            found.append(f"Not told from the best: {_named(ties)}.")
        if untried := search.untried():
            found.append(
                f"Not searched to the end ({_why(self.session.ended)}): {', '.join(untried)}. The "
                "same command goes on from here."
            )
        if self.disturbed:
            found.append(
                f"Other work was on the machine in {self.disturbed} of "
                f"{len(self.session.done)} measurements: they say less than they seem to."
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """For scripts."""
        session = self.session
        return {
            "goal": session.goal,
            "request": asdict(session.request),
            "ended": session.ended,
            "best": _row(self.best),
            "rule_of_thumb": _row(self.start),
            "better_than_rule_of_thumb": self.best.setting != self.start.setting,
            "noise": self.noise,
            "verdict": self.verdict(),
            "tried": [_row(row) for row in self.rows],
            "failed": [
                {"setting": asdict(setting), "error": error}
                for setting, error in session.errors().items()
            ],
            "measurements": len(session.done),
            "disturbed_measurements": self.disturbed,
            "settings_of_full_grid": session.search.space.size,
            "not_searched": session.search.untried(),
        }

    def _worse(self, row: Row) -> bool:
        return self.session.search.history.clearly_better(self.best.setting, row.setting)


def report(session: Session) -> Report | None:
    """The report on a session; None when not even the first setting was measured."""
    history, start = session.search.history, session.search.start
    if history.count(start) == 0:
        return None
    rows = {
        setting: Row(
            setting,
            figures,
            history.level(setting),
            history.count(setting),
            history.gain(setting, start),
            history.clearly_better(setting, start) or history.clearly_better(start, setting),
        )
        for setting, figures in session.figures().items()
    }
    ordered = tuple(sorted(rows.values(), key=lambda row: row.score))
    return Report(ordered, rows[session.search.best], rows[start], session)


def _row(row: Row) -> dict[str, Any]:
    return {
        "setting": asdict(row.setting),
        "figures": row.figures.as_dict(),
        "score": row.score,
        "measured": row.times,
        "gain": row.gain,
        "more_than_noise": row.told_apart,
    }


def _named(rows: list[Row]) -> str:
    named = "; ".join(str(row.setting) for row in rows[:NAMED])
    return named + (f"; and {len(rows) - NAMED} more" if len(rows) > NAMED else "")


def _why(ended: str) -> str:
    return {"time": "the time was over", "interrupted": "interrupted"}.get(ended, ended)
