"""What a llama.cpp server remembers of prompts: in its slots, and in host memory.

The rules are llama.cpp's own (`get_available_slot` in `tools/server/server-context.cpp`,
`server_prompt_cache` in `server-task.cpp`), with its defaults. A real server confirms them in
`tests/planning/test_reality.py`.
"""

from __future__ import annotations

from gateway.planning.job import Prompt, in_common
from gateway.planning.machine import SIMILARITY

KEPT = 0.5
"""A slot that would keep less than this share of what it holds saves it first."""
WORTH = 0.25
"""An evicted prompt is not taken back for the sake of less than this share of it."""

EMPTY = Prompt(-1, 0)


class PromptCache:
    """The prompts of one server. A slot's prompt is `EMPTY` before its first use."""

    __slots__ = ("_limit", "_total", "evicted", "held", "used")

    def __init__(self, slots: int, host_tokens: int) -> None:
        self.held = [EMPTY] * slots
        """What each slot holds."""
        self.used = [-1.0] * slots
        """When each slot ended its last work."""
        self.evicted: list[Prompt] = []
        """What host memory holds, the oldest first."""
        self._limit = host_tokens
        self._total = 0

    def choose(self, prompt: Prompt, free: list[int]) -> tuple[int, int]:
        """The slot, one of `free`, that takes a prompt, and the tokens of it that are there.

        The slot that has most of the prompt, if that is enough; else the one that idles longest.
        What it loses goes to host memory, from where a better one may come back. One token at
        least is always read.
        """
        size = prompt.tokens
        held = self.held
        slot, best = -1, SIMILARITY * size
        for candidate in free:
            common = in_common(held[candidate], prompt)
            if common > best:
                slot, best = candidate, common
        if slot < 0:
            used = self.used
            slot = free[0]
            for candidate in free:
                if used[candidate] <= used[slot]:
                    slot = candidate
            swap = True
        else:
            swap = best < KEPT * held[slot].tokens
        if swap and self._limit:
            self._swap(slot, prompt)
        cached = min(in_common(held[slot], prompt), size - 1)
        return slot, cached

    def keep(self, slot: int, prompt: Prompt, now: float) -> None:
        """A slot has ended its work and holds this."""
        self.held[slot] = prompt
        self.used[slot] = now

    def _swap(self, slot: int, prompt: Prompt) -> None:
        """Save what the slot holds, and take back what suits the prompt better, if there is one."""
        old = self.held[slot]
        evicted = self.evicted
        gain, share = 0, -1.0
        if old.tokens:
            gain = in_common(old, prompt)
            share = gain / old.tokens
            if not any(in_common(one, old) == old.tokens for one in evicted):
                kept = [one for one in evicted if in_common(one, old) != one.tokens]
                kept.append(old)
                self.evicted = evicted = kept
                self._total = sum([one.tokens for one in kept])
        found = -1
        for place, one in enumerate(evicted):
            common = in_common(one, prompt)
            if common > gain and common >= WORTH * one.tokens and common / one.tokens > share:
                found, share, gain = place, common / one.tokens, common
        if found >= 0:
            self.held[slot] = evicted.pop(found)
            self._total -= self.held[slot].tokens
        while self._total > self._limit and evicted:
            self._total -= evicted.pop(0).tokens
