"""The prompt cache of a llama.cpp server: prompts in slots, and evicted ones in host memory.

The rules are those of `get_available_slot` and `server_prompt_cache` in llama.cpp's server:

- A request goes to the free slot whose contents share the longest prefix with its prompt, if that
  is more than a tenth of the prompt (`--slot-prompt-similarity`), else to the least recently used
  free slot.
- If less than half of that slot's contents would be reused, they are saved in host memory
  (`--cache-ram`), and the slot loads from there the prompt that fits better in both ways: more of
  it is reused, and it covers more of the new prompt. A prompt of which less than a quarter would
  be reused is never loaded.
- Whenever a request begins, the contents of the other idle slots are copied to host memory as well
  (`--cache-idle-slots`, on by default), so that they can be loaded while their slot is busy.
- Host memory is bounded; the oldest entry is evicted first.
- The common prefix of the slot's contents and the prompt is not read again. The last token of a
  prompt always is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

MIN_SIMILARITY = 0.1  # llama.cpp's default of `--slot-prompt-similarity`, a share of the new prompt
SAVE_BELOW = 0.5  # A slot's contents are saved if a smaller share of them would be reused
LOAD_FROM = 0.25  # A saved prompt is loaded only if at least this share of it would be reused

Tokens = bytes  # token ids, four bytes each, so that prefixes are compared at memory speed
TOKEN_BYTES = 4


class CacheSlot(Protocol):
    contents: Tokens
    used_at: int  # ordinal of its last use; 0: never


def pack(ids: Iterable[int]) -> Tokens:
    return array("I", ids).tobytes()


def token_count(tokens: Tokens) -> int:
    return len(tokens) // TOKEN_BYTES


def common_prefix(first: Tokens, second: Tokens) -> int:
    low, high = 0, min(token_count(first), token_count(second))
    if first[: high * TOKEN_BYTES] == second[: high * TOKEN_BYTES]:
        return high
    while high - low > 1:  # the first `low` tokens are equal, the first `high` aren't
        middle = (low + high) // 2
        if (
            first[low * TOKEN_BYTES : middle * TOKEN_BYTES]
            == second[low * TOKEN_BYTES : middle * TOKEN_BYTES]
        ):
            low = middle
        else:
            high = middle
    return low


P = TypeVar("P", bound=CacheSlot)


@dataclass(slots=True)
class PromptCache:
    """The cache of one node; `limit` is the size of host memory in tokens, 0 for none."""

    limit: int
    evicted: list[Tokens] = field(default_factory=list)

    def choose(self, free: list[P], prompt: Tokens) -> P:
        """The slot for a prompt, whose contents are exchanged where that saves work."""
        best = max(free, key=lambda slot: common_prefix(slot.contents, prompt))
        shared = common_prefix(best.contents, prompt)
        if shared > MIN_SIMILARITY * token_count(prompt):
            exchange = shared < SAVE_BELOW * token_count(best.contents)
        else:
            best, exchange = min(free, key=lambda slot: slot.used_at), True
        if exchange and best.contents and self.limit:
            self._save(best.contents)
            best.contents = self._load(best.contents, prompt)
        if self.limit:
            for slot in free:
                if slot is not best and slot.contents:
                    self._save(slot.contents)
            self._bound()
        return best

    def _save(self, contents: Tokens) -> None:
        if any(saved.startswith(contents) for saved in self.evicted):
            return
        self.evicted = [saved for saved in self.evicted if not contents.startswith(saved)]
        self.evicted.append(contents)

    def _load(self, contents: Tokens, prompt: Tokens) -> Tokens:
        """The contents that the slot continues with: its own, or a saved prompt."""
        shared = common_prefix(contents, prompt)
        reused, covers = shared / token_count(contents), shared / token_count(prompt)
        found = -1
        for i, saved in enumerate(self.evicted):
            shared = common_prefix(saved, prompt)
            saved_reused, saved_covers = shared / token_count(saved), shared / token_count(prompt)
            if saved_reused >= LOAD_FROM and saved_reused > reused and saved_covers > covers:
                found, reused, covers = i, saved_reused, saved_covers
        return self.evicted.pop(found) if found >= 0 else contents

    def _bound(self) -> None:
        while len(self.evicted) > 1 and sum(map(token_count, self.evicted)) > self.limit:
            del self.evicted[0]


def reusable(contents: Tokens, prompt: Tokens) -> int:
    """Tokens of a prompt that need not be read again in a slot with these contents."""
    return min(common_prefix(contents, prompt), token_count(prompt) - 1)
