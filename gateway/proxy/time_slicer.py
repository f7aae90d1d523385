"""Runs slow work in short steps, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


def run_at_once(work: Generator[None, None, T]) -> T:
    """Run all steps of short work; return its value."""
    try:
        while True:
            next(work)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


@dataclass(slots=True)
class TimeSlicer:
    """Runs work in steps: in each turn of the event loop one step of all such work together."""

    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, work: Generator[None, None, T]) -> T:
        """Run all steps of `work`; return its value."""
        try:
            while True:
                async with self._lock:
                    try:
                        next(work)
                    finally:
                        # The next waiter gets the lock in the next turn of the loop.
                        await asyncio.sleep(0)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            work.close()

    async def run_once(self, work: Callable[[], T]) -> T:
        """Run work that is a single step."""
        async with self._lock:
            try:
                return work()
            finally:
                await asyncio.sleep(0)
