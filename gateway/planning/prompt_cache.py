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
            self._save(held[slot])
            self._take_back(slot, prompt)
        return slot, min(in_common(held[slot], prompt), size - 1)

    def save_idle(self, busy: list[bool]) -> None:
        """Save what idle slots hold, as llama.cpp does whenever work begins in another slot."""
        if not self._limit:
            return
        for held, works in zip(self.held, busy, strict=True):
            if not works:
                self._save(held)

    def keep(self, slot: int, prompt: Prompt, now: float) -> None:
        """A slot has ended its work and holds this."""
        self.held[slot] = prompt
        self.used[slot] = now

    def _save(self, prompt: Prompt) -> None:
        """Put a prompt into host memory, unless it is there; it stands for those it begins with."""
        tokens = prompt.tokens
        if not 0 < tokens <= self._limit:
            return
        part_of_it = False
        for one in self.evicted:
            common = in_common(one, prompt)
            if common == tokens:
                return
            if common == one.tokens:
                part_of_it = True
        if part_of_it:
            self.evicted = [one for one in self.evicted if in_common(one, prompt) != one.tokens]
            self._total = sum([one.tokens for one in self.evicted])
        self.evicted.append(prompt)
        self._total += tokens
        while self._total > self._limit:
            self._total -= self.evicted.pop(0).tokens

    def _take_back(self, slot: int, prompt: Prompt) -> None:
        """Load an evicted prompt, if one is better in both: what is used of it, and what for."""
        old = self.held[slot]
        gain = in_common(old, prompt)
        share = gain / old.tokens if old.tokens else -1.0
        found = -1
        for place, one in enumerate(self.evicted):
            common = in_common(one, prompt)
            if common > gain and common >= WORTH * one.tokens and common / one.tokens > share:
                found, share, gain = place, common / one.tokens, common
        if found >= 0:
            self.held[slot] = self.evicted.pop(found)
            self._total -= self.held[slot].tokens
