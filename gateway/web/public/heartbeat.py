"""Signs of life on streams that have nothing to say, so that nobody in between gives them up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PROGRESS_EVERY = 1.0
"""Seconds between two comments to a client that wants to know how long it will wait."""


class Heartbeat:
    """Calls `beat` after `first` seconds, then after as many as it says, until `stop`."""

    __slots__ = ("_beat", "_handle", "_loop")

    def __init__(self, first: float, beat: Callable[[], float]) -> None:
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(first, self._go_on)

    def stop(self) -> None:
        """Nothing more is to be said."""
        self._handle.cancel()

    def _go_on(self) -> None:
        self._handle = self._loop.call_later(self._beat(), self._go_on)
