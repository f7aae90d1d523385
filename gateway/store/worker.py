"""Work that is due again and again, on a store that may be away.

A pass that raises StoreError has met a store that is away. It is told of once, until a pass
succeeds again, and the next passes follow at growing distances. So a pass must keep what it has
not written, and be one that can be done twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gateway.store.failures import StoreError

# Seconds until a pass that failed is tried again, at most, where the worker says nothing else.
LONGEST_PAUSE = 5.0


@dataclass(eq=False)
class StoreWorker:
    """Does one pass after the other. Its owner runs `run` in a task, and cancels and awaits it.

    `period`: seconds from the beginning of a pass to that of the next. `first`: seconds until the
    first pass, in place of a period. `longest_pause`: seconds until a pass that failed is tried
    again, at most, unless `period` is longer. `on_away` is told, once for each time that the store
    is away, why; the store itself has a line in the log. `clock` is monotonic; by default it is the
    event loop's.
    """

    one_pass: Callable[[], Awaitable[object]]
    period: float
    first: float | None = None
    longest_pause: float = LONGEST_PAUSE
    on_away: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()
    problem: str | None = None  # why the last pass failed; None: it did not
    failures: int = 0  # passes that failed
    due: float | None = None
    """When the pass that is under way, or else the next, was to begin, by `clock`; None: `run` has
    not begun."""
    _pause: float = 0.0
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Work until cancelled."""
        self.due = due = self.clock() + (self.period if self.first is None else self.first)
        while True:
            await self._rest(due - self.clock())
            began = self.clock()
            due = began + self.period if await self.attempt() else self.clock() + self._pause
            self.due = due

    async def attempt(self) -> bool:
        """Do one pass now; returns whether the store took it."""
        try:
            await self.one_pass()
        except StoreError as error:
            self.failed(str(error))
            return False
        self.succeeded()
        return True

    async def attempt_within(self, seconds: float, work: Callable[[], Awaitable[object]]) -> None:
        """Do what comes before the first pass; a store that takes longer is away."""
        try:
            async with asyncio.timeout(seconds):
                await work()
        except StoreError as error:
            self.failed(str(error))
        except TimeoutError:
            self.failed("the store has not answered yet")

    def wake(self) -> None:
        """Do the next pass at once, unless the store is away."""
        if self.problem is None:
            self._woken.set()

    def failed(self, why: str) -> None:
        """The store is away."""
        if self.problem is None:
            self._pause = self.period
            self.on_away(why)
        else:
            self._pause = min(2 * self._pause, max(self.longest_pause, self.period))
        self.problem = why
        self.failures += 1

    def succeeded(self) -> None:
        """The store has taken all of a pass."""
        self.problem = None

    async def _rest(self, seconds: float) -> None:
        if seconds > 0:
            # By hand: `asyncio.timeout` takes half as many instructions again.
            timer = asyncio.get_running_loop().call_later(seconds, self._woken.set)
            try:
                await self._woken.wait()
            finally:
                timer.cancel()
        self._woken.clear()
