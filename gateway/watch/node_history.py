"""A day of each node, for its page: busy slots and speed, in steps of five minutes.

A node takes 2.3 KiB, whether little or much happens: a thousand nodes some 2.6 MB. Steps are
numbered by the time of day, so that those of an earlier process have their places too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

STEP_SECONDS = 300.0
STEPS = 288  # of a day
MOST_NODES = 10_000  # nodes that are followed, models of routers included
COLUMNS = ("at", "busy", "slots", "prefill_tps", "decode_tps")
_POINT = struct.Struct("<4e")  # half floats: three digits, in two bytes each
_LARGEST = 65504.0  # of a half float
_UNKNOWN = _POINT.pack(*[math.nan] * 4)


class MeasuredSpeed(Protocol):
    """What was measured of a node, in tokens/s; None: nothing yet."""

    @property
    def prefill_tps(self) -> float | None:
        """Of prompts."""

    @property
    def decode_tps(self) -> float | None:
        """Of answers, of one request alone."""


class KeptDay(msgspec.Struct, frozen=True):
    """The day of one node as it outlives the process."""

    newest: int  # number of its last step
    points: bytes  # of `STEPS` steps, the oldest first


@dataclass(slots=True)
class _Day:
    """The steps of one node, each in its place of a ring; and the sums of the one that runs."""

    step: int  # number of the step that runs
    newest: int  # number of the last one that has a point
    ring: bytearray = field(default_factory=lambda: bytearray(_UNKNOWN * STEPS))
    readings: int = 0
    busy: int = 0
    slots: int = 0

    def end_step(self, speed: MeasuredSpeed, step: int) -> None:
        """Another step begins, of this number."""
        if self.readings:
            self.put(self.step, self.running(speed))
        self.step, self.readings, self.busy, self.slots = step, 0, 0, 0

    def running(self, speed: MeasuredSpeed) -> bytes:
        """The point of the step that runs."""
        values = (
            *(self.busy / self.readings, self.slots / self.readings),
            *(speed.prefill_tps, speed.decode_tps),
        )
        return _POINT.pack(*(math.nan if one is None else min(one, _LARGEST) for one in values))

    def put(self, step: int, point: bytes) -> None:
        """This is the point of a step, the newest one from now on."""
        if abs(step - self.newest) >= STEPS:
            self.ring[:] = _UNKNOWN * STEPS
        else:  # What lies between is unknown, and what was later is of a clock that was set back.
            for number in range(min(step, self.newest) + 1, max(step, self.newest) + 1):
                self.write(number, _UNKNOWN)
        self.write(step, point)
        self.newest = step

    def write(self, step: int, point: bytes) -> None:
        """Replace the point of a step of this day."""
        at = step % STEPS * _POINT.size
        self.ring[at : at + _POINT.size] = point

    def points(self) -> Iterator[tuple[int, bytes]]:
        """The steps with their points, the oldest first."""
        for step in range(self.newest - STEPS + 1, self.newest + 1):
            at = step % STEPS * _POINT.size
            yield step, bytes(self.ring[at : at + _POINT.size])


class NodeHistory:
    """The days of all nodes, by their names. Times are Unix time."""

    def __init__(self) -> None:
        self._days: dict[str, _Day] = {}

    def read(self, name: str, at: float, busy: int, slots: int, speed: MeasuredSpeed) -> None:
        """Count the slots that a node has, and has busy, at this moment.

        It is called every few seconds, while the node is there: the time without is a gap.
        """
        step = int(at // STEP_SECONDS)
        day = self._days.get(name) or self._begin(name, step)
        if day is None:
            return
        if day.step != step:
            day.end_step(speed, step)
        day.readings += 1
        day.busy += busy
        day.slots += slots

    def as_json(self, name: str, at: float, speed: MeasuredSpeed) -> dict[str, Any]:
        """What is known of a node's last day, as rows under the names of `COLUMNS`."""
        rows: list[tuple[float | None, ...]] = []
        day, now = self._days.get(name), at // STEP_SECONDS
        for step, point in () if day is None else day.points():
            if point != _UNKNOWN and now - STEPS <= step <= now:
                rows.append(((step + 1) * STEP_SECONDS, *_unpacked(point)))
        if day is not None and day.readings:
            rows.append((round(at, 1), *_unpacked(day.running(speed))))
        return {"node": name, "step": STEP_SECONDS, "columns": COLUMNS, "points": rows}

    def export(self) -> Iterator[tuple[str, KeptDay]]:
        """The days of all nodes that have any, to be kept."""
        for name, day in [*self._days.items()]:
            points = b"".join(point for _, point in day.points())
            if points != _UNKNOWN * STEPS:
                yield name, KeptDay(day.newest, points)

    def restore(self, name: str, kept: KeptDay, at: float) -> bool:
        """Fill in what this process has not seen of a node; False: it is too old.

        Raises: ValueError.
        """
        if len(kept.points) != STEPS * _POINT.size:
            raise ValueError("a day of another length")
        now = int(at // STEP_SECONDS)
        if not now - STEPS < kept.newest <= now:
            return False
        day = self._days.get(name) or self._begin(name, now)
        if day is None:
            return False
        seen = {step: point for step, point in day.points() if point != _UNKNOWN}
        first = kept.newest - STEPS + 1
        for number, (values,) in enumerate(struct.iter_unpack("8s", kept.points)):
            if now - STEPS < (step := first + number):
                seen.setdefault(step, values)
        for step in sorted(seen):
            day.put(step, seen[step])
        return True

    def _begin(self, name: str, step: int) -> _Day | None:
        """The empty day of a node; the one that was not there for longest makes room."""
        if len(self._days) >= MOST_NODES:
            gone = min(self._days, key=lambda one: self._days[one].step)
            if self._days[gone].step >= step - 1:
                return None
            del self._days[gone]
        day = self._days[name] = _Day(step, step - 1)
        return day


def _unpacked(point: bytes) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(one) else round(one, 2) for one in _POINT.unpack(point))
