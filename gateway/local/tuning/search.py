"""Which setting to measure next: pure, from the scores so far.

One knob after the other is turned, beginning with the rule of thumb. From the best value known
the search walks in both directions until it is clearly worse; those that seem better are measured
again, the worse half falling out each time; and the last one has to be better by more than noise.
It ends when a round over all knobs has changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.local.tuning.history import History
from gateway.local.tuning.setting import KNOBS, Setting, Space

REPEATS = 3
"""Measurements of a setting before it is believed, and of the first one before anything else."""
ROUNDS = 3
"""Times that each knob is turned at most."""


@dataclass(slots=True)
class Search:
    """The state of a search: `steps` tells what to measure, `best` what is best so far."""

    space: Space
    start: Setting
    history: History = field(default_factory=History)
    best: Setting = field(init=False)
    turned: list[str] = field(default_factory=list)  # knobs that were searched, in order
    turning: str | None = None

    def __post_init__(self) -> None:
        self.best = self.start

    def steps(self) -> Iterator[Setting]:
        """What to measure next. Its score must be in the history when the next one is asked for."""
        yield from self._measured(self.start, REPEATS)
        if self.start in self.history.failed:
            return
        knobs = [knob for knob in KNOBS if len(self.space.values(knob)) > 1]
        unchanged = 0
        for knob in knobs * ROUNDS:
            if unchanged == len(knobs):
                break
            if self.turned:
                # A machine that has become slower since would make every new value look bad.
                yield from self._once_more(self.best)
            before = self.best
            self.turning = knob
            yield from self._turn(knob)
            self.turning = None
            self.turned.append(knob)
            unchanged = unchanged + 1 if self.best == before else 1

    def untried(self) -> list[str]:
        """Knobs that the search did not come to, or not to the end of."""
        return [
            knob for knob in KNOBS if len(self.space.values(knob)) > 1 and knob not in self.turned
        ]

    def steps_expected(self) -> int:
        """About how many measurements it takes: each value once, and some repeats."""
        values = [len(self.space.values(knob)) for knob in KNOBS]
        turned = [count for count in values if count > 1]
        return REPEATS + sum(turned) + 3 * len(turned)

    def _turn(self, knob: str) -> Iterator[Setting]:
        base, history = self.best, self.history
        seen: list[Setting] = []
        for way in self.space.directions(knob, getattr(base, knob)):
            for value in way:
                rival = base.changed(knob, value)
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
            if rival not in history.failed and history.level(rival) < history.level(base)
        ]
        return sorted(ahead, key=history.level)

    def _once_more(self, setting: Setting) -> Iterator[Setting]:
        yield from self._measured(setting, self.history.count(setting) + 1)

    def _measured(self, setting: Setting, times: int) -> Iterator[Setting]:
        for _ in range(times - self.history.count(setting)):
            if setting not in self.history.failed:
                yield setting
