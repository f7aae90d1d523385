"""Which setting to measure next: pure, from the scores so far.

One knob after the other is turned, beginning with the rule of thumb. From the best value known
the search walks in both directions until it is clearly worse; those that seem better are measured
again, the worse half falling out each time; and the last one has to be better by more than noise.
It ends when a round over all knobs has changed nothing.
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
"""Measurements of a setting before it is believed, and of the first one before anything else."""

MOST_ROUNDS = 3
"""Times that each knob is turned at most."""


@dataclass(slots=True)
class Search:
    """The state of a search: `steps` tells what to measure, `best` what is best so far."""

    space: SearchSpace
    baseline: Setting
    history: ScoreHistory = field(default_factory=ScoreHistory)
    best: Setting = field(init=False)
    searched_knobs: list[str] = field(default_factory=list)  # knobs that were searched, in order
    current_knob: str | None = None

    def __post_init__(self) -> None:
        self.best = self.baseline

    def settings_to_measure(self) -> Iterator[Setting]:
        """What to measure next. Its score must be in the history when the next one is asked for."""
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
            yield from self._turn(knob)
            self.current_knob = None
            self.searched_knobs.append(knob)
            unchanged = unchanged + 1 if self.best == before else 1

    def unsearched_knobs(self) -> list[str]:
        """Knobs that the search did not come to, or not to the end of."""
        return [
            knob
            for knob in KNOBS
            if len(self.space.values(knob)) > 1 and knob not in self.searched_knobs
        ]

    def expected_measurements(self) -> int:
        """About how many measurements it takes: each value once, and some repeats."""
        values = [len(self.space.values(knob)) for knob in KNOBS]
        turned = [count for count in values if count > 1]
        return REPEATS + sum(turned) + 3 * len(turned)

    def _turn(self, knob: str) -> Iterator[Setting]:
        base, history = self.best, self.history
        seen: list[Setting] = []
        for way in self.space.directions(knob, getattr(base, knob)):
            for value in way:
                rival = base.with_knob(knob, value)
                yield from self._measured(rival, 1)
                if rival in history.failed:
                    break  # what does not fit will not fit with more of it
                seen.append(rival)
                if history.clearly_better(base, rival):
                    break  # farther on it is worse still
        field = self._ahead(seen, base)
        for times in range(2, REPEATS + 1):
            field = field[: math.ceil(len(field) / 2)]
            if not field:
                return
            for rival in field:
                yield from self._measured(rival, times)
            yield from self._once_more(base)
            field = self._ahead(field, base)
        if field and history.clearly_better(field[0], base):
            self.best = field[0]

    def _ahead(self, rivals: list[Setting], base: Setting) -> list[Setting]:
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
    """What the session does next, for whoever shows it."""

    setting: Setting
    number: int  # of measurements made by this run, from 1
    seconds_left: float
    seconds_each: float | None  # None before the first is done


@dataclass(slots=True)
class TuningSession:
    """All that is known. It stays whole when `run` is cancelled between two measurements."""

    search: Search
    request: BenchmarkRequest
    goal: Goal
    earlier: list[Measurement]  # of earlier runs, used before anything is measured again
    measurements: list[Measurement] = field(default_factory=list)
    end_reason: EndReason = "interrupted"
    new_measurements: int = 0  # measurements of this run

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
        """Measure until the search ends or `seconds` are over; `keep` writes each down.

        Nothing is begun that would take longer than is left. Raises what `measure` and `keep`
        raise, but a setting that does not run is only noted.
        """
        until = clock() + seconds
        earlier: defaultdict[Setting, deque[Measurement]] = defaultdict(deque)
        for one in self.earlier:
            if one.figures is not None:  # what did not run may run now
                earlier[one.setting].append(one)
        for setting in self.search.settings_to_measure():
            if earlier[setting]:
                self._take(earlier[setting].popleft())
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
            except SettingFailedError as why:
                error = str(why)
            except TimeoutError:
                self.end_reason = "time"
                return
            one = Measurement(setting, figures, error, clock() - begun, now(), others)
            self.new_measurements += 1
            record(one)
            self._take(one)
            on_end(one)
        self.end_reason = "complete"

    def seconds_each(self) -> float | None:
        """What a measurement takes, by those that ran."""
        took = [one.seconds for one in self.measurements if one.figures is not None]
        return statistics.median(took) if took else None

    def median_by_setting(self) -> dict[Setting, Figures]:
        """The medians of each setting that ran, in the order of their first measurement."""
        many: dict[Setting, list[Figures]] = {}
        for one in self.measurements:
            if one.figures is not None:
                many.setdefault(one.setting, []).append(one.figures)
        return {setting: median_figures(figures) for setting, figures in many.items()}

    def errors(self) -> dict[Setting, str]:
        """Why settings did not run."""
        return {one.setting: one.error for one in self.measurements if one.error is not None}

    def _take(self, one: Measurement) -> None:
        self.measurements.append(one)
        value = None if one.figures is None else score(one.figures, self.request, self.goal)
        self.search.history.add(one.setting, value)
