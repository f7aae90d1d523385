"""The last hour in numbers, for the dashboard's charts, and a day of each node, for its page.

An hour is a ring of steps of some seconds each, a day one of steps of five minutes.

The counts come from the events of the requests that have ended, the gauges from whoever closes a
step. A step costs the same however many requests fall into it, but for a dictionary entry for each
model, caller and kind of failure up to a bound, and times are kept as counts in classes.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.callers.windows import percentile, time_class
from gateway.errors import CLIENT_CLOSED_STATUS, LIMIT_CODES
from gateway.events import EndedKind, EventBus, ModelLoadChanged, RequestRecord
from gateway.nodes.speed import Speed

STEP_SECONDS = 5.0  # Seconds of one step
SPAN_SECONDS = 3600.0  # Seconds that are kept
# Seconds of which a step's percentiles and shares are: one step alone has too few requests.
RECENT_SECONDS = 60.0
# Models of one step whose price on the GPU tier is counted apart; with more it is unknown.
MOST_MODELS = 64
MOST_CALLERS = 256  # Callers of one step that are counted apart
MOST_FAILURES = 64  # Pairs of a reason and a node of one step by which failed requests are counted
MOST_SERVED = 4096  # Ended requests that are kept which have been at a node
MOST_LOADS = 1000  # Loads and unloads of routers' models that are kept
MOST_UNSERVED = 1024  # Those that have not: a flood of refusals pushes no other out
OTHER_CALLER = ""  # Stands for all further callers of a step

# What a model's prompt, cached and completion tokens cost on the GPU tier; None: unknown.
GpuCost = Callable[[str, int, int, int], float | None]


class Gauges(NamedTuple):
    """The state when a step is closed."""

    queued: int  # Requests that wait for a slot
    slots_busy: int
    completion_tokens: int  # Tokens by now of the requests in flight


class HistoryPoint(NamedTuple):
    """One step. Counts are of the step; percentiles and shares of the last minute."""

    at: float  # Unix time of its end
    requests: int  # Requests that ended, without those whose client left
    failed: int
    """Of them, those with a status of 500 or more that were not refused for lack of room."""
    refused: int  # Of them, those with 429 or 503
    ttft_p50: float | None  # Seconds
    ttft_p95: float | None
    tokens_per_second: float  # Tokens written, of all requests together
    queued: int
    slots_busy: int
    cached_share: float | None  # Share of the prompts' tokens that nodes had cached
    gpu_share: float | None  # Share of the requests that ran on GPU nodes
    cost: float  # In the settings' currency
    gpu_cost: float | None
    """What the same would have cost on GPU nodes alone; None: a price is not known."""


COLUMNS = HistoryPoint._fields  # The names of a point's values


@dataclass(slots=True)
class RecentTraffic:
    """The requests that ended within one step, or within the last minute."""

    requests: int = 0
    failed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that the gateway refused, by the error's code."""
    callers: Counter[str] = field(default_factory=Counter)
    """Requests by caller, refused ones included."""
    limited: Counter[str] = field(default_factory=Counter)
    """Those of them that limits refused, likewise."""
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of `failed`, by the error's code and the last node ("": none); up to a bound."""
    served: int = 0  # Requests that ran on a node
    gpu: int = 0
    prompt: int = 0
    cached: int = 0
    times: Counter[int] = field(default_factory=Counter)  # TTFTs by class
    cost: float = 0.0
    models: dict[str, list[int]] = field(default_factory=dict)
    """Of one step by model: prompt, cached and completion tokens."""
    too_many_models: bool = False

    def add(self, other: RecentTraffic) -> None:
        """Add all but costs and models, which are told of each step alone."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_SUMMED = (
    *("requests", "failed", "refused", "callers", "limited", "failures", "served", "gpu"),
    *("prompt", "cached", "times"),
)


class FleetHistory:
    """Counts what ends, a point for each step of the last hour, and keeps the newest requests."""

    def __init__(
        self,
        bus: EventBus,
        gpu_cost: GpuCost = lambda *_: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loads: deque[tuple[float, ModelLoadChanged]] = deque(maxlen=MOST_LOADS)
        """What routers loaded and unloaded, and when by `clock`; the oldest first."""
        self.points: deque[HistoryPoint] = deque(maxlen=int(SPAN_SECONDS / STEP_SECONDS))
        """The oldest first."""
        self._catch_up = bus.catch_up
        self._gpu_cost = gpu_cost
        self._step = RecentTraffic()
        self._recent: deque[RecentTraffic] = deque(maxlen=int(RECENT_SECONDS / STEP_SECONDS))
        self._completion = 0  # Tokens written by all requests that have ended
        self._written = 0  # Tokens written when the last step was closed, by requests in flight too
        self._closed_at: float | None = None
        self._served: deque[RequestRecord] = deque(maxlen=MOST_SERVED)
        self._unserved: deque[RequestRecord] = deque(maxlen=MOST_UNSERVED)
        bus.ended.read_by(self._reader_of, self._add)
        bus.subscribe(ModelLoadChanged, lambda event: self.loads.append((clock(), event)))

    def restore(self, points: Iterable[HistoryPoint], now: float) -> None:
        """Put these points of an earlier process among the others; `now` is Unix time."""
        whole = {one.at: one for one in (*points, *self.points)}
        recent = sorted(at for at in whole if now - SPAN_SECONDS < at < now + STEP_SECONDS)
        self.points.clear()
        self.points.extend(whole[at] for at in recent)

    def _reader_of(self, kind: EndedKind) -> Callable[[RequestRecord], None]:
        """What keeps the newest requests of this kind, and counts their times."""
        keep = (self._served if kind.attempts else self._unserved).append
        if not kind.timed:
            return keep

        def read(record: RequestRecord) -> None:
            keep(record)
            if record.ttft is not None:
                self._step.times[time_class(record.ttft)] += 1

        return read

    def _add(self, kind: EndedKind) -> None:
        step, requests = self._step, kind.requests
        self._completion += kind.completion
        caller = kind.caller
        if caller not in step.callers and len(step.callers) >= MOST_CALLERS:
            caller = OTHER_CALLER
        step.callers[caller] += requests
        if kind.status != CLIENT_CLOSED_STATUS:
            step.requests += requests
            if kind.status in {429, 503}:
                step.refused[kind.reason or "refused"] += requests
                if kind.reason in LIMIT_CODES:
                    step.limited[caller] += requests
            elif kind.status >= 500:
                step.failed += requests
                failure = (kind.reason or f"status {kind.status}", kind.node or "")
                if failure in step.failures or len(step.failures) < MOST_FAILURES:
                    step.failures[failure] += requests
        if kind.tier is None:
            return
        step.served += requests
        if kind.tier == "gpu":
            step.gpu += requests
        step.prompt += kind.prompt
        step.cached += kind.cached
        step.cost += kind.cost
        if not (kind.prompt or kind.completion):
            return
        if kind.model not in step.models and len(step.models) >= MOST_MODELS:
            step.too_many_models = True
            return
        tokens = step.models.setdefault(kind.model, [0, 0, 0])
        for place, more in enumerate((kind.prompt, kind.cached, kind.completion)):
            tokens[place] += more

    def find(self, name: str) -> Iterator[RequestRecord]:
        """Ended requests of this id or `X-Request-ID`, the newest first in each of the two kinds.

        They have no text, as records have none.
        """
        self._catch_up()
        for kind in (self._served, self._unserved):
            for one in reversed(kind):
                if name in {one.request_id, one.x_request_id}:
                    yield one

    def close_step(self, at: float, now: float, gauges: Gauges) -> HistoryPoint:
        """End the step; `at` is Unix time, `now` monotonic seconds."""
        self._catch_up()
        step, self._step = self._step, RecentTraffic()
        self._recent.append(step)
        written = self._completion + gauges.completion_tokens
        elapsed = STEP_SECONDS if self._closed_at is None else now - self._closed_at
        # What is no longer in flight is counted a moment later: the next step has it.
        grown = max(0, written - self._written)
        self._written, self._closed_at = written, now
        minute = RecentTraffic()
        for one in self._recent:
            minute.add(one)
        times = sorted(minute.times.items())
        halves, most = (percentile(times, share) for share in (0.5, 0.95))
        costs = [self._gpu_cost(model, *tokens) for model, tokens in step.models.items()]
        known = [one for one in costs if one is not None]
        point = HistoryPoint(
            at=round(at, 1),
            requests=step.requests,
            failed=step.failed,
            refused=sum(step.refused.values()),
            ttft_p50=None if halves is None else round(halves, 4),
            ttft_p95=None if most is None else round(most, 4),
            tokens_per_second=round(grown / max(elapsed, 0.001), 1),
            queued=gauges.queued,
            slots_busy=gauges.slots_busy,
            cached_share=_share(minute.cached, minute.prompt),
            gpu_share=_share(minute.gpu, minute.served),
            cost=step.cost,
            gpu_cost=None if step.too_many_models or len(known) < len(costs) else sum(known, 0.0),
        )
        self.points.append(point)
        return point

    def recent(self) -> RecentTraffic:
        """What ended within the last minute, the step that runs included."""
        self._catch_up()
        minute = RecentTraffic()
        for step in (*self._recent, self._step):
            minute.add(step)
        del minute.callers[OTHER_CALLER], minute.limited[OTHER_CALLER]
        return minute

    def as_json(self) -> dict[str, Any]:
        """Every point, as rows under the names of `COLUMNS`."""
        return {"step": STEP_SECONDS, "columns": COLUMNS, "points": list(self.points)}


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


DAY_STEP_SECONDS = 300.0  # of one step of a node's day
DAY_STEPS = 288  # of a day
MOST_NODES = 10_000  # nodes that are followed, models of routers included
DAY_COLUMNS = ("at", "busy", "slots", "prefill_tps", "decode_tps")
_WIDTH = len(DAY_COLUMNS)


@dataclass(slots=True)
class _Day:
    """The steps of one node that have ended, and the sums of the one that runs."""

    step: int  # number of the step that runs
    points: array[float] = field(default_factory=lambda: array("f"))
    """Of each step its number, and the values of `DAY_COLUMNS`; NaN: unknown."""
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
            del self.points[: -DAY_STEPS * _WIDTH]
        self.step, self.readings, self.busy, self.slots = step, 0, 0, 0


class NodeHistory:
    """The days of all nodes, by their names. Times are Unix time.

    A node takes 5.6 KiB once it has been at work for a day: a thousand nodes some 6 MB. Steps are
    numbered by the time of day, so that those of an earlier process have their places too.
    """

    def __init__(self) -> None:
        self._days: dict[str, _Day] = {}

    def read(self, name: str, at: float, busy: int, slots: int, speed: Speed) -> None:
        """Count the slots that a node has, and has busy, at this moment.

        It is called every few seconds, while the node is there: the time without is a gap.
        """
        step = int(at // DAY_STEP_SECONDS)
        day = self._day(name, step)
        if day is None:
            return
        if day.step != step:
            day.begin(step, speed)
        day.readings += 1
        day.busy += busy
        day.slots += slots

    def as_json(self, name: str, at: float, speed: Speed) -> dict[str, Any]:
        """What is known of a node's last day, as rows under the names of `DAY_COLUMNS`."""
        rows: list[tuple[float | None, ...]] = []
        day, now = self._days.get(name), at // DAY_STEP_SECONDS
        if day is not None:
            for place in range(0, len(day.points), _WIDTH):
                step, *values = day.points[place : place + _WIDTH]
                if now - DAY_STEPS <= step <= now:
                    rows.append(((step + 1) * DAY_STEP_SECONDS, *map(_rounded, values)))
            if day.readings:
                rows.append((round(at, 1), *map(_rounded, day.running(speed))))
        return {"node": name, "step": DAY_STEP_SECONDS, "columns": DAY_COLUMNS, "points": rows}

    def export(self) -> Iterator[tuple[str, bytes]]:
        """The days of all nodes, to be kept."""
        for name, day in [*self._days.items()]:
            yield name, day.points.tobytes()

    def restore(self, name: str, kept: bytes, at: float) -> bool:
        """Put a day of an earlier process before what was seen here; False: it can't be used."""
        day = self._day(name, int(at // DAY_STEP_SECONDS))
        if day is None or len(kept) % (4 * _WIDTH):
            return False
        points, first = array("f", kept[: 4 * _WIDTH * DAY_STEPS]), (*day.points, math.inf)[0]
        while points and not points[-_WIDTH] < first:
            del points[-_WIDTH:]
        day.points = (points + day.points)[-DAY_STEPS * _WIDTH :]
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
