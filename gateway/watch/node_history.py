"""A day of each node, for its page: busy slots and speed, in steps of five minutes.

A node takes 5.6 KiB once it has been at work for a day: a thousand nodes some 6 MB. Steps are
numbered by the time of day, so that those of an earlier process have their places too.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gateway.nodes.speed import Speed

STEP_SECONDS = 300.0
STEPS = 288  # of a day
MOST_NODES = 10_000  # nodes that are followed, models of routers included
COLUMNS = ("at", "busy", "slots", "prefill_tps", "decode_tps")
_WIDTH = len(COLUMNS)


@dataclass(slots=True)
class _Day:
    """The steps of one node that have ended, and the sums of the one that runs."""

    step: int  # number of the step that runs
    points: array[float] = field(default_factory=lambda: array("f"))
    """Of each step its number, and the values of `COLUMNS`; NaN: unknown."""
    readings: int = 0
    busy: int = 0
    slots: int = 0

    def running(self, speed: Speed) -> tuple[float, ...]:
        """The values of the step that runs."""
        tps = (speed.prefill_tps, speed.decode_tps)
        mean = self.busy / self.readings, self.slots / self.readings
        return (*mean, *(math.nan if one is None else one for one in tps))

    def begin(self, step: int, speed: Speed) -> None:
        """The step that runs is over, and this one begins."""
        if self.readings:
            while self.points and self.points[-_WIDTH] >= self.step:  # The clock was set back.
                del self.points[-_WIDTH:]
            self.points.extend((self.step, *self.running(speed)))
            del self.points[: -STEPS * _WIDTH]
        self.step, self.readings, self.busy, self.slots = step, 0, 0, 0


class NodeHistory:
    """The days of all nodes, by their names. Times are Unix time."""

    def __init__(self) -> None:
        self._days: dict[str, _Day] = {}

    def read(self, name: str, at: float, busy: int, slots: int, speed: Speed) -> None:
        """Count the slots that a node has, and has busy, at this moment.

        It is called every few seconds, while the node is there: the time without is a gap.
        """
        step = int(at // STEP_SECONDS)
        day = self._day(name, step)
        if day is None:
            return
        if day.step != step:
            day.begin(step, speed)
        day.readings += 1
        day.busy += busy
        day.slots += slots

    def as_json(self, name: str, at: float, speed: Speed) -> dict[str, Any]:
        """What is known of a node's last day, as rows under the names of `COLUMNS`."""
        rows: list[tuple[float | None, ...]] = []
        day, now = self._days.get(name), at // STEP_SECONDS
        if day is not None:
            for place in range(0, len(day.points), _WIDTH):
                step, *values = day.points[place : place + _WIDTH]
                if now - STEPS <= step <= now:
                    rows.append(((step + 1) * STEP_SECONDS, *map(_rounded, values)))
            if day.readings:
                rows.append((round(at, 1), *map(_rounded, day.running(speed))))
        return {"node": name, "step": STEP_SECONDS, "columns": COLUMNS, "points": rows}

    def export(self) -> Iterator[tuple[str, bytes]]:
        """The days of all nodes, to be kept."""
        for name, day in [*self._days.items()]:
            yield name, day.points.tobytes()

    def restore(self, name: str, kept: bytes, at: float) -> bool:
        """Put a day of an earlier process before what was seen here; False: it can't be used."""
        day = self._day(name, int(at // STEP_SECONDS))
        if day is None or len(kept) % (4 * _WIDTH):
            return False
        points, first = array("f", kept[: 4 * _WIDTH * STEPS]), (*day.points, math.inf)[0]
        while points and not points[-_WIDTH] < first:
            del points[-_WIDTH:]
        day.points = (points + day.points)[-STEPS * _WIDTH :]
        return True

    def _day(self, name: str, step: int) -> _Day | None:
        """The day of a node, which may be new; None: there are too many."""
        if name not in self._days:
            if len(self._days) >= MOST_NODES:  # Those that are gone make room.
                kept = {name: day for name, day in self._days.items() if day.step >= step - 1}
                self._days = kept
            if len(self._days) < MOST_NODES:
                self._days[name] = _Day(step)
        return self._days.get(name)


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 2)
