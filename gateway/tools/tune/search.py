"""Searches for the best setting: which one to measure next, by the scores so far.

It begins with the rule of thumb and turns one knob after the other. From the best value known it
walks in both directions until the score is clearly worse. Values that seem better are measured
again, the worse half dropping out each time; the last one must be better by more than noise. The
search ends when a round over all knobs has changed nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from gateway.tools.tune.machine_benchmark import BenchmarkResult, SettingFailedError
from gateway.tools.tune.measurements import (
    BenchmarkRequest,
    Figures,
    Goal,
    Measurement,
    ScoreHistory,
    median_figures,
    score,
)
from gateway.tools.tune.setting import KNOBS, SearchSpace, Setting

REPEATS = 3
"""Measurements of a setting before it can win, and of the first one before any other."""

MOST_ROUNDS = 3
"""Rounds over all knobs at most."""


@dataclass(slots=True)
class Search:
    """A search: `settings_to_measure` yields what to measure, `best` is the best setting so far."""

    space: SearchSpace
    baseline: Setting
    history: ScoreHistory = field(default_factory=ScoreHistory)
    best: Setting = field(init=False)
    searched_knobs: list[str] = field(default_factory=list)  # in order
    current_knob: str | None = None

    def __post_init__(self) -> None:
        self.best = self.baseline

    def settings_to_measure(self) -> Iterator[Setting]:
        """Yield the next setting; add its score to the history before taking another."""
        yield from self._measured(self.baseline, REPEATS)
        if self.baseline in self.history.failed:
            return
        knobs = [knob for knob in KNOBS if len(self.space.values(knob)) > 1]
        unchanged = 0
        for knob in knobs * MOST_ROUNDS:
            if unchanged == len(knobs):
                break
            if self.searched_knobs:
                # A machine that has become slower since would make every new value look bad.
                yield from self._once_more(self.best)
            before = self.best
            self.current_knob = knob
            yield from self._search_knob(knob)
            self.current_knob = None
            self.searched_knobs.append(knob)
            unchanged = unchanged + 1 if self.best == before else 1

    def unsearched_knobs(self) -> list[str]:
        """Return the knobs whose values were not all tried."""
        return [
            knob
            for knob in KNOBS
            if len(self.space.values(knob)) > 1 and knob not in self.searched_knobs
        ]

    def expected_measurements(self) -> int:
        """Estimate the number of measurements: each value once, and some repeats."""
        values = [len(self.space.values(knob)) for knob in KNOBS]
        turned = [count for count in values if count > 1]
        return REPEATS + sum(turned) + 3 * len(turned)

    def _search_knob(self, knob: str) -> Iterator[Setting]:
        base, history = self.best, self.history
        tried: list[Setting] = []
        for direction in self.space.directions(knob, getattr(base, knob)):
            for value in direction:
                rival = base.with_knob(knob, value)
                yield from self._measured(rival, 1)
                if rival in history.failed:
                    break  # what does not fit will not fit with more of it
                tried.append(rival)
                if history.clearly_better(base, rival):
                    break  # farther on it is worse still
        candidates = self._ahead(tried, base)
        for times in range(2, REPEATS + 1):
            candidates = candidates[: math.ceil(len(candidates) / 2)]
            if not candidates:
                return
            for rival in candidates:
                yield from self._measured(rival, times)
            yield from self._once_more(base)
            candidates = self._ahead(candidates, base)
        if candidates and history.clearly_better(candidates[0], base):
            self.best = candidates[0]

    def _ahead(self, rivals: list[Setting], base: Setting) -> list[Setting]:
        """Return the rivals with a better score than `base`, the best first."""
        history = self.history
        ahead = [
            rival
            for rival in rivals
            if rival not in history.failed
            and history.median_score(rival) < history.median_score(base)
        ]
        return sorted(ahead, key=history.median_score)

    def _once_more(self, setting: Setting) -> Iterator[Setting]:
        yield from self._measured(setting, self.history.count(setting) + 1)

    def _measured(self, setting: Setting, times: int) -> Iterator[Setting]:
        for _ in range(times - self.history.count(setting)):
            if setting not in self.history.failed:
                yield setting


EndReason = Literal["complete", "time", "interrupted"]


@dataclass(frozen=True, slots=True)
class PlannedMeasurement:
    """A measurement that is about to begin."""

    setting: Setting
    number: int  # in this run, from 1
    seconds_left: float
    seconds_each: float | None  # None before the first is done


@dataclass(slots=True)
class TuningSession:
    """A search and its measurements. Cancelling `run` keeps what was measured."""

    search: Search
    request: BenchmarkRequest
    goal: Goal
    earlier: list[Measurement]  # of earlier runs, used instead of measuring again
    measurements: list[Measurement] = field(default_factory=list)
    end_reason: EndReason = "interrupted"
    new_measurements: int = 0  # made by this run

    async def run(
        self,
        measure: Callable[[Setting, float], Awaitable[BenchmarkResult]],
        *,
        seconds: float,
        record: Callable[[Measurement], None],
        on_begin: Callable[[PlannedMeasurement], None] = lambda _: None,
        on_end: Callable[[Measurement], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Measure until the search ends or `seconds` are over; `record` stores each measurement.

        No measurement begins that would take longer than the time left. Raises what `measure` and
        `record` raise, but a SettingFailedError is recorded as a measurement.
        """
        until = clock() + seconds
        earlier: defaultdict[Setting, deque[Measurement]] = defaultdict(deque)
        for one in self.earlier:
            if one.figures is not None:  # a setting that failed may run now
                earlier[one.setting].append(one)
        for setting in self.search.settings_to_measure():
            if earlier[setting]:
                self._add(earlier[setting].popleft())
                continue
            left = until - clock()
            each = self.seconds_each()
            if left <= (each or 0.0):
                self.end_reason = "time"
                return
            on_begin(PlannedMeasurement(setting, self.new_measurements + 1, left, each))
            begun = clock()
            figures, error, others = None, None, None
            try:
                measured = await measure(setting, left)
                figures, others = measured.figures, measured.other_work
            except SettingFailedError as failure:
                error = str(failure)
            except TimeoutError:
                self.end_reason = "time"
                return
            one = Measurement(setting, figures, error, clock() - begun, now(), others)
            self.new_measurements += 1
            record(one)
            self._add(one)
            on_end(one)
        self.end_reason = "complete"

    def seconds_each(self) -> float | None:
        """The median duration of the measurements that ran."""
        took = [one.seconds for one in self.measurements if one.figures is not None]
        return statistics.median(took) if took else None

    def median_by_setting(self) -> dict[Setting, Figures]:
        """Return the median figures of each setting that ran, the first measured first."""
        by_setting: dict[Setting, list[Figures]] = {}
        for one in self.measurements:
            if one.figures is not None:
                by_setting.setdefault(one.setting, []).append(one.figures)
        return {setting: median_figures(figures) for setting, figures in by_setting.items()}

    def errors(self) -> dict[Setting, str]:
        """Return the errors of settings that did not run."""
        return {one.setting: one.error for one in self.measurements if one.error is not None}

    def _add(self, one: Measurement) -> None:
        self.measurements.append(one)
        value = None if one.figures is None else score(one.figures, self.request, self.goal)
        self.search.history.add(one.setting, value)
