"""Slots of an emulated node: first in, first out, counted."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Slot:
    """One sequence the server can work on, with what `/slots` tells about it."""

    id: int
    busy: bool = False
    task: int = -1
    prompt_tokens: int = 0
    processed: int = 0
    decoded: int = 0
    limit: int = -1

    def begin(self, prompt_tokens: int, limit: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.processed = self.decoded = 0
        self.limit = limit

    def seen(self, context: int) -> dict[str, Any]:
        """The slot as `/slots` shows it; before its first task it shows less."""
        value: dict[str, Any] = {
            "id": self.id,
            "n_ctx": context,
            "speculative": False,
            "is_processing": self.busy,
        }
        if self.task < 0:
            return value
        return value | {
            "id_task": self.task,
            "n_prompt_tokens": self.prompt_tokens + self.decoded,
            "n_prompt_tokens_processed": self.processed if self.busy else 0,
            "n_prompt_tokens_cache": 0,
            "params": {"n_predict": self.limit},
            "next_token": [
                {
                    "has_next_token": self.busy,
                    "has_new_line": False,
                    "n_remain": self.limit - self.decoded if self.busy else -1,
                    "n_decoded": self.decoded if self.busy else 0,
                }
            ],
        }


class SlotPool:
    """All slots of one node. Who asks while they are taken waits in the order of asking."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(i) for i in range(count)]
        self.peak_busy = 0
        self.waiting: deque[tuple[int, asyncio.Future[list[Slot]]]] = deque()
        self._tasks = 0

    @property
    def busy(self) -> int:
        return sum(slot.busy for slot in self.slots)

    async def take(self, count: int) -> list[Slot]:
        """Takes `count` slots at once (bounded by the number there are)."""
        future: asyncio.Future[list[Slot]] = asyncio.get_running_loop().create_future()
        self.waiting.append((min(count, len(self.slots)), future))
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back(future.result())
            raise

    def give_back(self, slots: list[Slot]) -> None:
        for slot in slots:
            slot.busy = False
        self._serve()

    def _serve(self) -> None:
        while self.waiting:
            count, future = self.waiting[0]
            free = [slot for slot in self.slots if not slot.busy]
            if not future.cancelled():
                if len(free) < count:
                    return
                for slot in free[:count]:
                    slot.busy = True
                    slot.task = self._tasks
                    self._tasks += 1
                self.peak_busy = max(self.peak_busy, self.busy)
                future.set_result(free[:count])
            self.waiting.popleft()
