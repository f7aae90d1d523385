"""Signs of life on a stream that has nothing to say yet, so that nobody in between gives it up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PROGRESS_EVERY = 1.0
"""Seconds between two comments to a client that wants to know how long it will wait."""


class Heartbeat:
    """Calls `beat` every `interval` seconds from then on, until `stop`."""

    __slots__ = ("_beat", "_handle", "_interval", "_loop", "_task")

    def __init__(self, interval: float, beat: Callable[[], Awaitable[None]]) -> None:
        self._interval = interval
        self._beat = beat
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(interval, self._begin)

    def stop(self) -> None:
        """There is something to say, or nothing any more."""
        self._handle.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._go_on())

    async def _go_on(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(self._interval)
