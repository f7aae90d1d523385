"""What nodes read now, and so will remember when that has ended: it can't be shared before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from gateway.fleet.prefixes import Prompt

MOST = 32
"""Running requests that one prompt is compared with."""


class Running:
    """The prompts of requests that run, by how they begin."""

    def __init__(self) -> None:
        self._starts: dict[int, dict[tuple[int, int], Prompt]] = {}
        """By the first block, then by row and the prompt's `id`."""

    def add(self, row: int, prompt: Prompt) -> None:
        """A request starts there."""
        if prompt.blocks:
            self._starts.setdefault(prompt.blocks[0], {})[row, id(prompt)] = prompt

    def remove(self, row: int, prompt: Prompt) -> None:
        """It has ended."""
        if prompt.blocks:
            starts = self._starts[prompt.blocks[0]]
            del starts[row, id(prompt)]
            if not starts:
                del self._starts[prompt.blocks[0]]

    def coming(self, prompt: Prompt, tokens: float) -> dict[int, float]:
        """What each row will know of a prompt of so many tokens, by what it runs now."""
        starts = self._starts.get(prompt.blocks[0]) if prompt.blocks else None
        coming: dict[int, float] = {}
        if starts:
            for (row, _), running in islice(starts.items(), MOST):
                known = prompt.measured(agreed(prompt.blocks, running.blocks)) * tokens
                if known > coming.get(row, 0.0):
                    coming[row] = known
        return coming


def agreed(blocks: Sequence[int], others: Sequence[int]) -> int:
    """How many blocks two prompts begin with alike: each block stands for all before it."""
    least, most = 0, min(len(blocks), len(others))
    while least < most:
        middle = (least + most + 1) // 2
        if blocks[middle - 1] == others[middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least
