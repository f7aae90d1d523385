"""Work that takes long, in short steps between which everybody else has their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class TimeSlicer:
    """Runs what takes many steps, one step of all such work in each round of the event loop."""

    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, work: Generator[None, None, T]) -> T:
        """Run it to its end, whose value it returns."""
        try:
            while True:
                async with self._turn:
                    try:
                        next(work)
                    finally:
                        # Whoever waits for the turn has it in the next round.
                        await asyncio.sleep(0)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            work.close()

    async def run_once(self, work: Callable[[], T]) -> T:
        """The same of work that is one step."""
        async with self._turn:
            try:
                return work()
            finally:
                await asyncio.sleep(0)
