"""Loads: how many requests are under way, or when each one starts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

MOST_LOADS = 32
"""Loads of one run."""

MOST_CONCURRENCY = 4096

MOST_RATE = 10_000.0
"""Requests per second."""

MOST_REQUESTS = 200_000
"""Requests of one load: each one's times stay in memory until the report is written."""

LEAST_REQUESTS = 10
"""Requests of a closed loop where neither number nor duration is given; at least."""

REQUESTS_PER_WORKER = 4
"""Likewise, for each of the requests that are under way at a time."""

OPEN_SECONDS = 60.0
"""Duration of an open loop where neither number nor duration is given."""


class Loop(StrEnum):
    """When the next request starts."""

    CLOSED = "closed"
    """When an earlier one has ended: a fixed number is under way."""
    POISSON = "poisson"
    """At random times of a mean rate, whether earlier ones have ended or not."""
    TRACE = "trace"
    """At the times of a trace."""


class LoadError(Exception):
    """A load that can't be put on a server. The text says why."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a run."""

    loop: Loop
    level: float
    """Closed: requests under way. Poisson: requests per second. Trace: how much faster it plays."""
    requests: int
    """Most requests."""
    seconds: float | None = None
    """No request starts later than this; None: no limit."""

    @property
    def label(self) -> str:
        """Short name, such as `4 at a time`."""
        match self.loop:
            case Loop.CLOSED:
                return f"{self.level:g} at a time"
            case Loop.POISSON:
                return f"{self.level:g}/s"
            case Loop.TRACE:
                return "trace" if self.level == 1 else f"trace x{self.level:g}"


def closed_loads(text: str, requests: int | None, seconds: float | None) -> list[Load]:
    """Loads of text such as `1,4,8`. Raises LoadError."""
    levels = [int(part) if part.isdecimal() and len(part) < 9 else 0 for part in _parts(text)]
    if not all(1 <= level <= MOST_CONCURRENCY for level in levels):
        raise LoadError(
            f"{text!r}: write whole numbers from 1 to {MOST_CONCURRENCY}, such as 1,4,8"
        )
    return [
        Load(Loop.CLOSED, level, requests or _closed_requests(level, seconds), seconds)
        for level in levels
    ]


def poisson_loads(text: str, requests: int | None, seconds: float | None) -> list[Load]:
    """Loads of text such as `0.5,2` (requests per second). Raises LoadError."""
    if requests is None and seconds is None:
        seconds = OPEN_SECONDS
    loads = []
    for part in _parts(text):
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        if not 0 < rate <= MOST_RATE:
            raise LoadError(
                f"{text!r}: write requests per second, above 0 and at most {MOST_RATE:g}, "
                "such as 0.5,2"
            )
        loads.append(Load(Loop.POISSON, rate, requests or MOST_REQUESTS, seconds))
    return loads


def poisson_times(load: Load, rng: random.Random) -> Iterator[float]:
    """Seconds from the load's start at which its requests start."""
    at = 0.0
    for _ in range(load.requests):
        at += rng.expovariate(load.level)
        if load.seconds is not None and at > load.seconds:
            return
        yield at


def _closed_requests(level: int, seconds: float | None) -> int:
    if seconds is not None:
        return MOST_REQUESTS
    return max(LEAST_REQUESTS, REQUESTS_PER_WORKER * level)


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MOST_LOADS:
        raise LoadError(f"{len(parts)} loads: at most {MOST_LOADS}")
    return parts
