"""How late this program is itself: a load generator must not measure its own slowness."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.tools.simulate.report import Percentiles

TICK_SECONDS = 0.01
"""Between two looks at the clock."""

MOST_SAMPLES = 20_000
"""Kept of the looks at the clock; of more, a random choice."""


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """What the load generator itself did. Seconds."""

    lag: Percentiles
    """How late a timer of its event loop fired: an event's time is late by no more than that. Up to
    a millisecond is the timers' own step."""
    start_lag: Percentiles
    """How late requests of an open loop started."""
    cpu_share: float
    """CPU time per second; 1 is a whole CPU, and more this program can't use."""
    held_back: int = 0
    """Requests of an open loop that waited, since too many were under way."""


@dataclass(slots=True)
class LagMonitor:
    """Watches the event loop within its context."""

    clock: Callable[[], float] = time.monotonic
    cpu_clock: Callable[[], float] = time.process_time
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    _samples: list[float] = field(default_factory=list)
    _seen: int = 0
    _began: tuple[float, float] = (0.0, 0.0)
    _ended: tuple[float, float] | None = None

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None, None]:
        """Watch until the context ends."""
        self._began = self.clock(), self.cpu_clock()
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._ended = self.clock(), self.cpu_clock()

    async def _watch(self) -> None:
        while True:
            due = self.clock() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._keep(max(0.0, self.clock() - due))

    def _keep(self, lag: float) -> None:
        self._seen += 1
        if len(self._samples) < MOST_SAMPLES:
            self._samples.append(lag)
        elif (place := self.rng.randrange(self._seen)) < MOST_SAMPLES:
            self._samples[place] = lag

    def figures(self, start_lags: list[float], held_back: int) -> ClientFigures:
        """The figures of the context."""
        ended, cpu_ended = self._ended or (self.clock(), self.cpu_clock())
        began, cpu_began = self._began
        seconds = ended - began
        share = (cpu_ended - cpu_began) / seconds if seconds > 0 else 0.0
        return ClientFigures(
            Percentiles.of(self._samples), Percentiles.of(start_lags), share, held_back
        )
