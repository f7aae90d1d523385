"""What a llama.cpp server remembers of prompts: in its slots, and evicted ones in host memory.

The rules are those of `get_available_slot` and `server_prompt_cache` in llama.cpp's server:

- A request goes to the free slot whose contents share the longest beginning with its prompt, if
  that is more than a tenth of the prompt (`--slot-prompt-similarity`), else to the free slot that
  was used longest ago.
- If less than half of that slot's contents would stay, they are kept in host memory
  (`--cache-ram`), and the slot gets from there the prompt that fits better in both ways: more of
  itself stays, and more of the new prompt is in it. One of which less than a quarter would stay
  is never taken.
- Whenever a request begins, what the other idle slots hold is copied to host memory as well
  (`--cache-idle-slots`, on by default): so it can be had while its slot is busy.
- Host memory is bounded; what was put there first goes first.
- What the slot's contents and the prompt have in common at their beginning need not be read.
  The last token of a prompt always is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

SIMILAR = 0.1
"""llama.cpp's default of `--slot-prompt-similarity`, a share of the new prompt."""
WORTH_SAVING = 0.5
"""Below this share of a slot's contents that stay, they are saved."""
WORTH_LOADING = 0.25

Tokens = bytes
"""Token ids, four bytes each, so that prefixes are compared at the speed of memory."""
WIDTH = 4


class Place(Protocol):
    """A slot, as far as the cache is concerned."""

    contents: Tokens
    used_at: int
    """Ordinal of its last use; 0: never."""


def pack(ids: Iterable[int]) -> Tokens:
    """Token ids as one piece of memory."""
    return array("I", ids).tobytes()


def size(tokens: Tokens) -> int:
    return len(tokens) // WIDTH


def common_prefix(first: Tokens, second: Tokens) -> int:
    """How many tokens two texts have in common at their beginning."""
    low, high = 0, min(size(first), size(second))
    if first[: high * WIDTH] == second[: high * WIDTH]:
        return high
    while high - low > 1:  # the first `low` tokens are equal, the first `high` aren't
        middle = (low + high) // 2
        if first[low * WIDTH : middle * WIDTH] == second[low * WIDTH : middle * WIDTH]:
            low = middle
        else:
            high = middle
    return low


P = TypeVar("P", bound=Place)


@dataclass(slots=True)
class PromptCache:
    """The cache of one node; `limit` is the tokens that host memory holds, 0 for none."""

    limit: int
    evicted: list[Tokens] = field(default_factory=list)

    def choose(self, free: list[P], prompt: Tokens) -> P:
        """The slot that a prompt goes to, its contents exchanged where that is worth it."""
        best = max(free, key=lambda slot: common_prefix(slot.contents, prompt))
        shared = common_prefix(best.contents, prompt)
        if shared > SIMILAR * size(prompt):
            exchange = shared < WORTH_SAVING * size(best.contents)
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
        if any(kept.startswith(contents) for kept in self.evicted):
            return
        self.evicted = [kept for kept in self.evicted if not contents.startswith(kept)]
        self.evicted.append(contents)

    def _load(self, contents: Tokens, prompt: Tokens) -> Tokens:
        """What the slot goes on with."""
        shared = common_prefix(contents, prompt)
        stays, fits = shared / size(contents), shared / size(prompt)
        found = -1
        for i, kept in enumerate(self.evicted):
            shared = common_prefix(kept, prompt)
            its_stays, its_fits = shared / size(kept), shared / size(prompt)
            if its_stays >= WORTH_LOADING and its_stays > stays and its_fits > fits:
                found, stays, fits = i, its_stays, its_fits
        return self.evicted.pop(found) if found >= 0 else contents

    def _bound(self) -> None:
        while len(self.evicted) > 1 and sum(map(size, self.evicted)) > self.limit:
            del self.evicted[0]


def reusable(contents: Tokens, prompt: Tokens) -> int:
    """Tokens of a prompt that need not be read where a slot holds `contents`."""
    return min(common_prefix(contents, prompt), size(prompt) - 1)
