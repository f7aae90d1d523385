"""How fast a node reads and writes, learnt from the `timings` that llama.cpp sends unasked."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.fleet.node import Node

PREFILL_MEMORY = 4096.0
"""Tokens after which a measurement of the prefill weighs half."""
DECODE_MEMORY = 512.0
"""Tokens after which a measurement of the decode weighs half."""
LEAST_TOKENS = 2
"""One token's time is mostly rounding and overhead."""
SLOWEST, FASTEST = 1e-3, 1e6
"""Tokens/s outside of which a measurement is a mistake."""
LARGEST_STEP = 4.0
"""One measurement counts as at most so many times faster or slower than the estimate."""


@dataclass(slots=True)
class Rate:
    """Tokens per second over the last `memory` tokens or so: a ratio of two decaying sums.

    A long request weighs more than a short one, and one odd measurement moves it little.
    """

    memory: float
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def value(self) -> float | None:
        """Tokens per second; None: not measured."""
        return self.tokens / self.seconds if self.seconds else None

    def learn(self, tokens: float, seconds: float) -> None:
        """Take in a measurement; nonsense is ignored."""
        if not (math.isfinite(tokens) and math.isfinite(seconds)):
            return
        if tokens < LEAST_TOKENS or seconds <= 0 or not SLOWEST <= tokens / seconds <= FASTEST:
            return
        if self.seconds:
            usual = tokens * self.seconds / self.tokens
            seconds = min(max(seconds, usual / LARGEST_STEP), usual * LARGEST_STEP)
        kept = 0.5 ** (tokens / self.memory)
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds


@dataclass(slots=True)
class Speed:
    """What is known of a node's speed."""

    relative: float = 1.0
    """Compared with other nodes of the same models: the inventory's `speed_hint` until measured."""
    _prefill: Rate = field(default_factory=lambda: Rate(PREFILL_MEMORY))
    _decode: Rate = field(default_factory=lambda: Rate(DECODE_MEMORY))

    @property
    def prefill_tps(self) -> float | None:
        """Prompt tokens read per second by one request; None: not measured."""
        return self._prefill.value

    @property
    def decode_tps(self) -> float | None:
        """Tokens written per second by one request; None: not measured."""
        return self._decode.value

    def learn(self, timings: Mapping[str, object]) -> None:
        """Take in llama.cpp's `timings` (`prompt_n`, `prompt_ms`, `predicted_n`, `predicted_ms`).

        `prompt_n` leaves out what the cache held (`cache_n`), so it is what was read.
        """
        self._prefill.learn(_number(timings, "prompt_n"), _number(timings, "prompt_ms") / 1000)
        self._decode.learn(_number(timings, "predicted_n"), _number(timings, "predicted_ms") / 1000)


def weigh(nodes: Iterable[Node]) -> None:
    """Set every node's `speed.relative`, on one scale for the nodes that serve the same models.

    The scale is where hints and measurements meet: a node of hint 1.0 is as fast as the median
    of the measured ones divided by their hints, so that a node that nobody has measured yet
    stands fairly beside them.
    """
    groups: dict[frozenset[str], list[Node]] = defaultdict(list)
    for node in nodes:
        groups[node.public_models].append(node)
    for group in groups.values():
        rates = [node.speed.decode_tps for node in group]
        if not any(rates):
            rates = [node.speed.prefill_tps for node in group]
        hints = [node.spec.speed_hint for node in group]
        per_hint = [rate / hint for rate, hint in zip(rates, hints, strict=True) if rate]
        unit = statistics.median(per_hint) if per_hint else 1.0
        for node, rate, hint in zip(group, rates, hints, strict=True):
            node.speed.relative = rate / unit if rate else hint


def _number(timings: Mapping[str, object], key: str) -> float:
    value = timings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
