"""The slots of an emulated node, granted first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.emulator.prompt_cache import PromptCache, Tokens, reusable


class PoolFullError(Exception):
    """The slots have no room left for their tokens."""


@dataclass(slots=True)
class Slot:
    """One slot, with the values that `/slots` shows."""

    id: int
    busy: bool = False
    task: int = -1
    prompt_tokens: int = 0
    cached: int = 0  # of them, tokens that the slot had cached
    processed: int = 0  # read by this request
    decoded: int = 0
    limit: int = -1
    contents: Tokens = b""
    foreign: str = ""  # the weights by which another model has read them
    used_at: int = 0
    failed: bool = False  # the pool of tokens was full

    @property
    def used(self) -> int:
        """Tokens of the pool that its request takes; those of an idle slot are given up."""
        return self.cached + self.processed + self.decoded if self.busy else 0

    def begin(self, prompt_tokens: int, limit: int, cached: int = 0) -> None:
        self.failed = False
        self.foreign = self.foreign if cached else ""
        self.prompt_tokens = prompt_tokens
        self.cached = cached
        self.processed = self.decoded = 0
        self.limit = limit

    def as_json(self, context: int) -> dict[str, Any]:
        """The slot as `/slots` shows it; before its first task it shows less."""
        about = {"id": self.id, "n_ctx": context, "speculative": False}
        value: dict[str, Any] = {**about, "is_processing": self.busy}
        if self.task < 0:
            return value
        left = self.limit - self.decoded if self.busy else -1
        token = {"has_next_token": self.busy, "has_new_line": False, "n_remain": left}
        return value | {
            "id_task": self.task,
            "n_prompt_tokens": self.prompt_tokens + self.decoded,
            "n_prompt_tokens_processed": self.processed if self.busy else 0,
            "n_prompt_tokens_cache": self.cached if self.busy else 0,
            "params": {"n_predict": self.limit},
            "next_token": [token | {"n_decoded": self.decoded if self.busy else 0}],
        }


class SlotPool:
    """All slots of one node. Requests wait in order of arrival while none is free.

    Without a prompt cache every prompt is read from the beginning. With `tokens` all slots share
    the room for so many; once it is full, every request that runs fails.
    """

    def __init__(
        self, count: int, cache: PromptCache | None = None, tokens: int | None = None
    ) -> None:
        self.slots = [Slot(i) for i in range(count)]
        self.cache = cache
        self.tokens = tokens
        self.peak_busy = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called when slots were asked for, taken or given back."""
        self.waiting: deque[tuple[int, Tokens, int, asyncio.Future[list[Slot]]]] = deque()
        self._tasks = 0
        self._uses = 0

    @property
    def busy(self) -> int:
        return sum(slot.busy for slot in self.slots)

    async def acquire(self, count: int, prompt: Tokens = b"", wanted: int = -1) -> list[Slot]:
        """Acquires `count` slots at once (at most all), the first of them chosen for `prompt`.

        With `wanted` it is that one, if there is such a slot.
        """
        future: asyncio.Future[list[Slot]] = asyncio.get_running_loop().create_future()
        wanted = wanted if wanted < len(self.slots) else -1
        self.waiting.append((min(count, len(self.slots)), prompt, wanted, future))
        self._grant()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result())
            raise

    def release(self, slots: list[Slot]) -> None:
        for slot in slots:
            slot.busy = False
            self._uses += 1
            slot.used_at = self._uses
        self._grant()

    def check_room(self, slot: Slot) -> None:
        """Raises `PoolFullError` when there is no room for what this slot has taken."""
        if self.tokens is not None and sum(one.used for one in self.slots) > self.tokens:
            for one in self.slots:
                one.failed = one.busy
        if slot.failed:
            raise PoolFullError

    def cached(self, slot: Slot, prompt: Tokens) -> int:
        return reusable(slot.contents, prompt) if self.cache is not None and prompt else 0

    def clear_prompts(self) -> None:
        """Drops all cached prompts, as by a restart."""
        for slot in self.slots:
            slot.contents, slot.used_at = b"", 0
        if self.cache is not None:
            self.cache.evicted.clear()

    def _grant(self) -> None:
        while self.waiting:
            count, prompt, wanted, future = self.waiting[0]
            free = [slot for slot in self.slots if not slot.busy and wanted in {-1, slot.id}]
            if not future.cancelled():
                if len(free) < count:
                    break
                if self.cache is not None and prompt and wanted < 0:
                    chosen = self.cache.choose(free, prompt)
                    free = [chosen, *(slot for slot in free if slot is not chosen)]
                for slot in free[:count]:
                    slot.busy = True
                    slot.task = self._tasks
                    self._tasks += 1
                self.peak_busy = max(self.peak_busy, self.busy)
                future.set_result(free[:count])
            self.waiting.popleft()
        self.on_change()
