"""Notices a client that leaves while its request waits or runs, and cancels the request's task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

WATCH_AFTER = 0.05
"""Seconds. Short requests are over by then and never pay for a watcher."""


class Departure:
    """Watches one client; `stop` must be called when its request is over."""

    __slots__ = ("_handle", "_receive", "_task", "_watcher", "left")

    def __init__(self, receive: Callable[[], Awaitable[Any]]) -> None:
        self.left = False
        """Whether the client has left, and the task was cancelled for it."""
        self._receive = receive
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher: asyncio.Task[None] | None = None
        self._handle = task.get_loop().call_later(WATCH_AFTER, self._begin)

    def stop(self) -> None:
        """The request is over."""
        self._handle.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    def _begin(self) -> None:
        self._watcher = self._task.get_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self._task.cancel()
