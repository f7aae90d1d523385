"""What a simulated node can do: the numbers behind `server.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

BATCH = 512
"""Tokens of one step (`n_batch`): what `llama-gateway up` and its advice to operators set."""
BATCH_COST = 0.15
"""A busy slot more makes a decoding step so much longer, as a share of the step of one slot.

Reading the weights dominates a step on a CPU; another token costs little beside it.
"""
CACHE_RAM = 8192
"""MiB of evicted prompts in host memory: llama.cpp's default (`--cache-ram`)."""
KV_BYTES = 131_072
"""Bytes of a token's keys and values: 32 layers, 8 heads of 128, F16, as in Mistral 7B."""
SIMILARITY = 0.1
"""Share of a prompt that a slot must hold to be chosen for it (`--slot-prompt-similarity`)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One llama.cpp server. Speeds in tokens per second."""

    name: str
    slots: int
    prefill: float
    """Prompt tokens read in a second."""
    decode: float
    """Tokens written in a second by one request alone."""
    batch_cost: float = BATCH_COST
    batch: int = BATCH
    cache_tokens: int = CACHE_RAM * 1024 * 1024 // KV_BYTES
    """Tokens of evicted prompts that the host-memory cache holds; 0: it has none."""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.batch <= self.slots or self.cache_tokens < 0:
            raise ValueError("a node needs a slot, and a batch larger than its slots")
        for speed in (self.prefill, self.decode):
            if not (math.isfinite(speed) and speed > 0):
                raise ValueError("speeds must be positive")
        if not (math.isfinite(self.batch_cost) and self.batch_cost >= 0):
            raise ValueError("the cost of a busy slot more must not be negative")

    @property
    def token_base(self) -> float:
        """Seconds of a step that writes one token."""
        return 1.0 / self.decode

    @property
    def token_step(self) -> float:
        """Seconds that every further busy slot adds to a step."""
        return self.batch_cost / self.decode
