"""Limits on what a node does, by which no node is blamed for a gateway that stood still itself."""

from __future__ import annotations

import asyncio
from types import TracebackType

TIMEOUT_STEPS = 10
"""Parts of a limit that pass one after the other. However long the event loop is held up, one or
two of them pass, and then what has come meanwhile is read before the next one ends."""


class LoopTimeout:
    """`asyncio.timeout(seconds)`, of seconds in which the event loop turned; None: no limit.

    Like that it cancels the task in it, and raises TimeoutError on the way out.
    """

    __slots__ = ("_left", "_limit", "_loop", "_part", "_timer")

    def __init__(self, seconds: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._part = None if seconds is None else seconds / TIMEOUT_STEPS
        self._left = TIMEOUT_STEPS
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        if self._part is not None:
            self._timer = self._loop.call_later(self._part, self._look)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _look(self) -> None:
        assert self._part is not None
        self._left -= 1
        if self._left:
            self._timer = self._loop.call_later(self._part, self._look)
        else:
            self._limit.reschedule(self._loop.time())
