"""A search from its beginning, or from where it was stopped, to its end or the end of its time."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from gateway.local.tuning.goals import Figures, Goal, Request, median, score
from gateway.local.tuning.measuring import DoesNotRunError, Measured
from gateway.local.tuning.records import Measurement
from gateway.local.tuning.search import Search
from gateway.local.tuning.setting import Setting

Ended = Literal["complete", "time", "interrupted"]


@dataclass(frozen=True, slots=True)
class Step:
    """What the session does next, for whoever shows it."""

    setting: Setting
    number: int  # of measurements made by this run, from 1
    seconds_left: float
    seconds_each: float | None  # None before the first is done


@dataclass(slots=True)
class Session:
    """All that is known. It stays whole when `run` is cancelled between two measurements."""

    search: Search
    request: Request
    goal: Goal
    kept: list[Measurement]  # of earlier runs, used before anything is measured again
    done: list[Measurement] = field(default_factory=list)
    ended: Ended = "interrupted"
    new: int = 0  # measurements of this run

    async def run(
        self,
        measure: Callable[[Setting, float], Awaitable[Measured]],
        *,
        seconds: float,
        keep: Callable[[Measurement], None],
        on_step: Callable[[Step], None] = lambda _: None,
        on_done: Callable[[Measurement], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Measure until the search ends or `seconds` are over; `keep` writes each down.

        Nothing is begun that would take longer than is left. Raises what `measure` and `keep`
        raise, but a setting that does not run is only noted.
        """
        until = clock() + seconds
        earlier: defaultdict[Setting, deque[Measurement]] = defaultdict(deque)
        for one in self.kept:
            if one.figures is not None:  # what did not run may run now
                earlier[one.setting].append(one)
        for setting in self.search.steps():
            if earlier[setting]:
                self._take(earlier[setting].popleft())
                continue
            left = until - clock()
            each = self.seconds_each()
            if left <= (each or 0.0):
                self.ended = "time"
                return
            on_step(Step(setting, self.new + 1, left, each))
            begun = clock()
            figures, error, others = None, None, None
            try:
                measured = await measure(setting, left)
                figures, others = measured.figures, measured.other_work
            except DoesNotRunError as why:
                error = str(why)
            except TimeoutError:
                self.ended = "time"
                return
            one = Measurement(setting, figures, error, clock() - begun, now(), others)
            self.new += 1
            keep(one)
            self._take(one)
            on_done(one)
        self.ended = "complete"

    def seconds_each(self) -> float | None:
        """What a measurement takes, by those that ran."""
        took = [one.seconds for one in self.done if one.figures is not None]
        return statistics.median(took) if took else None

    def figures(self) -> dict[Setting, Figures]:
        """The medians of each setting that ran, in the order of their first measurement."""
        many: dict[Setting, list[Figures]] = {}
        for one in self.done:
            if one.figures is not None:
                many.setdefault(one.setting, []).append(one.figures)
        return {setting: median(figures) for setting, figures in many.items()}

    def errors(self) -> dict[Setting, str]:
        """Why settings did not run."""
        return {one.setting: one.error for one in self.done if one.error is not None}

    def _take(self, one: Measurement) -> None:
        self.done.append(one)
        value = None if one.figures is None else score(one.figures, self.request, self.goal)
        self.search.history.add(one.setting, value)
