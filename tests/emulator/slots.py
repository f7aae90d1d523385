"""Slots of an emulated node: first in, first out, counted."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from tests.emulator.cache import PromptCache, Tokens, reusable


@dataclass(slots=True)
class Slot:
    """One sequence the server can work on, with what `/slots` tells about it."""

    id: int
    busy: bool = False
    task: int = -1
    prompt_tokens: int = 0
    cached: int = 0  # of them, what was in the slot
    processed: int = 0  # read since
    decoded: int = 0
    limit: int = -1
    contents: Tokens = b""
    used_at: int = 0

    def begin(self, prompt_tokens: int, limit: int, cached: int = 0) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached = cached
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
            "n_prompt_tokens_cache": self.cached if self.busy else 0,
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
    """All slots of one node. Who asks while they are taken waits in the order of asking.

    Without a prompt cache every prompt is read anew.
    """

    def __init__(self, count: int, cache: PromptCache | None = None) -> None:
        self.slots = [Slot(i) for i in range(count)]
        self.cache = cache
        self.peak_busy = 0
        self.waiting: deque[tuple[int, Tokens, asyncio.Future[list[Slot]]]] = deque()
        self._tasks = 0
        self._uses = 0

    @property
    def busy(self) -> int:
        return sum(slot.busy for slot in self.slots)

    async def take(self, count: int, prompt: Tokens = b"") -> list[Slot]:
        """Takes `count` slots at once (bounded by the number there are), the first for `prompt`."""
        future: asyncio.Future[list[Slot]] = asyncio.get_running_loop().create_future()
        self.waiting.append((min(count, len(self.slots)), prompt, future))
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
            self._uses += 1
            slot.used_at = self._uses
        self._serve()

    def cached(self, slot: Slot, prompt: Tokens) -> int:
        """Tokens of a prompt that need not be read on a slot."""
        return reusable(slot.contents, prompt) if self.cache is not None and prompt else 0

    def forget(self) -> None:
        """Loses all prompts, as a server that was started anew."""
        for slot in self.slots:
            slot.contents, slot.used_at = b"", 0
        if self.cache is not None:
            self.cache.evicted.clear()

    def _serve(self) -> None:
        while self.waiting:
            count, prompt, future = self.waiting[0]
            free = [slot for slot in self.slots if not slot.busy]
            if not future.cancelled():
                if len(free) < count:
                    return
                if self.cache is not None and prompt:
                    chosen = self.cache.choose(free, prompt)
                    free = [chosen, *(slot for slot in free if slot is not chosen)]
                for slot in free[:count]:
                    slot.busy = True
                    slot.task = self._tasks
                    self._tasks += 1
                self.peak_busy = max(self.peak_busy, self.busy)
                future.set_result(free[:count])
            self.waiting.popleft()
