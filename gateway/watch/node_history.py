"""A day of each node, for its page: busy slots and speed, in steps of five minutes.

A node takes 2.3 KiB, whether little or much happens: a thousand nodes some 2.6 MB. Steps are
numbered by the time of day, so that those of an earlier process have their places too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.nodes.speed import Speed

STEP_SECONDS = 300.0
STEPS = 288  # of a day
MOST_NODES = 10_000  # nodes that are followed, models of routers included
COLUMNS = ("at", "busy", "slots", "prefill_tps", "decode_tps")
_POINT = struct.Struct("<4e")  # half floats: three digits, in two bytes each
_LARGEST = 65504.0  # of a half float
_UNKNOWN = _POINT.pack(*[math.nan] * 4)


class KeptDay(msgspec.Struct, frozen=True):
    """The day of one node as it outlives the process."""

    newest: int  # number of its last step
    points: bytes  # of `STEPS` steps, the oldest first


@dataclass(slots=True)
class _Day:
    """The steps of one node, each in its place of a ring; and the sums of the one that runs."""

    step: int  # number of the step that runs
    newest: int  # number of the last one in the ring
    ring: bytearray = field(default_factory=lambda: bytearray(_UNKNOWN * STEPS))
    readings: int = 0
    busy: int = 0
    slots: int = 0

    def running(self, speed: Speed) -> bytes:
        """The point of the step that runs."""
        mean = self.busy / self.readings, self.slots / self.readings
        values = (*mean, speed.prefill_tps, speed.decode_tps)
        return _POINT.pack(*(math.nan if one is None else min(one, _LARGEST) for one in values))

    def put(self, step: int, point: bytes) -> None:
        """This is the point of a later step; what lies between is unknown."""
        if not self.newest < step < self.newest + STEPS:  # Away for a day, or a clock set back.
            self.ring[:] = _UNKNOWN * STEPS
        for number in range(max(self.newest + 1, step - STEPS), step):
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

    def read(self, name: str, at: float, busy: int, slots: int, speed: Speed) -> None:
        """Count the slots that a node has, and has busy, at this moment.

        It is called every few seconds, while the node is there: the time without is a gap.
        """
        step = int(at // STEP_SECONDS)
        day = self._day(name, step)
        if day is None:
            return
        if day.step != step:
            if day.readings:
                day.put(day.step, day.running(speed))
            day.step, day.readings, day.busy, day.slots = step, 0, 0, 0
        day.readings += 1
        day.busy += busy
        day.slots += slots

    def as_json(self, name: str, at: float, speed: Speed) -> dict[str, Any]:
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
        """The days of all nodes, to be kept."""
        for name, day in [*self._days.items()]:
            yield name, KeptDay(day.newest, b"".join(point for _, point in day.points()))

    def restore(self, name: str, kept: KeptDay, at: float) -> bool:
        """Fill in what this process has not seen of a node; False: it can't be used."""
        day = self._day(name, int(at // STEP_SECONDS))
        if day is None or len(kept.points) != STEPS * _POINT.size:
            return False
        known = dict(day.points())
        first = kept.newest - STEPS + 1
        for number, (point,) in enumerate(struct.iter_unpack("8s", kept.points)):
            if known.get(first + number) == _UNKNOWN:
                day.write(first + number, point)
        return True

    def _day(self, name: str, step: int) -> _Day | None:
        """The day of a node, which may be new; None: there are too many."""
        if name not in self._days:
            if len(self._days) >= MOST_NODES:  # Those that are gone make room.
                kept = {name: day for name, day in self._days.items() if day.step >= step - 1}
                self._days = kept
            if len(self._days) < MOST_NODES:
                self._days[name] = _Day(step, step - 1)
        return self._days.get(name)


def _unpacked(point: bytes) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(one) else round(one, 2) for one in _POINT.unpack(point))
