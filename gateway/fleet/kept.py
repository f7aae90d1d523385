"""The prompts that one llama.cpp server keeps: in idle slots, and in its host memory.

Whenever work begins in a slot, what the other idle slots hold is copied to host memory
(`--cache-idle-slots`, on by default): so a prompt may be in both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.fleet.prefixes import Held, Prefixes

HOST_TOKENS = 65_536.0
"""First guess of what a node's host memory keeps: llama.cpp's default of 8 GiB, at the 128 KiB a
token of models of 7 to 8 billion parameters (32 layers, 8 KV heads of 128, 16 bits)."""
LEAST_HOST, MOST_HOST = 4096.0, 1_048_576.0
"""Tokens between which the guess moves."""
MOST_PROMPTS = 96
MOST_BLOCKS = 4096
"""Of one node's host memory; what is more is forgotten here first."""


@dataclass(slots=True)
class Kept:
    """What a node keeps, as it is believed."""

    tree: Prefixes
    row: int
    host_tokens: float
    """What host memory is believed to keep, tokens."""
    idle: dict[Held, None] = field(default_factory=dict)
    """What idle slots hold, the one that was used longest ago first."""
    host: dict[Held, None] = field(default_factory=dict)
    """What host memory holds, oldest first."""
    used: float = 0.0
    """Tokens that host memory holds."""
    blocks: int = 0
    """And blocks."""

    def copy_idle(self) -> None:
        """Work begins: what idle slots hold goes to host memory as well."""
        for held in self.idle:
            if held.twin is None and self._has_place(held):
                self._put(self.tree.copy(held))

    def save(self, held: Held) -> None:
        """A slot's prompt goes to host memory."""
        if held.twin is not None or not self._has_place(held):
            self.drop(held)
            return
        del self.idle[held]
        self.tree.move(held)
        self._put(held)

    def drop(self, held: Held) -> None:
        """Something is kept no longer; its copy is, if there is one."""
        if held.idle:
            del self.idle[held]
        else:
            del self.host[held]
            self.used -= held.tokens
            self.blocks -= 0 if held.leaf is None else held.leaf.end
        self.tree.remove(held)

    def settle(self, slots: int) -> None:
        """Let go of what no longer fits, where so many slots are idle."""
        while self.idle and len(self.idle) > slots:
            self.save(next(iter(self.idle)))
        while self.host and (
            self.used > self.host_tokens
            or len(self.host) > MOST_PROMPTS
            or self.blocks > MOST_BLOCKS
        ):
            self.drop(next(iter(self.host)))

    def empty(self) -> None:
        """Nothing is believed any more of what the node keeps."""
        for held in [*self.idle, *self.host]:
            self.drop(held)

    def depth(self, found: Held) -> float:
        """Tokens that host memory holds from the newest prompt down to this one."""
        tokens = 0.0
        for held in reversed(self.host):
            tokens += held.tokens
            if held is found:
                break
        return tokens

    def _has_place(self, held: Held) -> bool:
        """Whether host memory takes it: not what it has, alone or as the beginning of another."""
        leaf = held.leaf
        return leaf is not None and self.row not in leaf.host and self.host_tokens > 0.0

    def _put(self, held: Held) -> None:
        """Keep it in host memory, where nothing is kept that begins another."""
        leaf = held.leaf
        assert leaf is not None
        for edge in leaf.up():
            shorter = edge.ending.get(self.row) if edge.ending else None
            if shorter is not None and shorter.idle:
                shorter = shorter.twin
            if shorter is not None and shorter is not held:
                self.drop(shorter)
        self.host[held] = None
        self.used += held.tokens
        self.blocks += leaf.end
