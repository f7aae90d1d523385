"""How fast a node reads and writes, learnt from the `timings` that llama.cpp sends unasked.

A prompt of n uncached tokens takes `overhead + n / reading` seconds, a token of an answer
`token_base + token_step * (busy - 1)` with so many slots busy: decoding on CPUs is bound by memory,
so that a batch costs little until computing binds. Both are straight lines through what was
measured (`trend.py`), seconds per token over 1 / n and over busy slots.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.fleet.timings import Sample, Seen, by_clock, read_timings
from gateway.fleet.trend import Trend

if TYPE_CHECKING:
    from gateway.fleet.node import Node

PREFILL_MEMORY = 8192.0
"""Tokens after which a measurement of the prefill weighs half."""
DECODE_MEMORY = 1024.0
"""Tokens after which a measurement of the decode weighs half."""
USUAL_STEP = 0.2
"""A neighbour's share in a token's time until it is measured: between nothing (bound by memory)
and 0.66 (the demo model on one busy thread)."""
STEP_STRENGTH = 64.0
"""Tokens with one neighbour more or less that weigh as much as this first guess."""
STEEPEST_STEP = 2.0
"""One neighbour can't cost more than writing twice anew."""
OVERHEAD_STRENGTH = 0.25
"""The overhead of a read is guessed as none, as firmly as four reads of 16 tokens can tell."""
MOST_OVERHEAD = 256.0
"""Tokens that could be read in the overhead of a read, at most."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What to reckon with until it is measured."""

    reading: float
    """Prompt tokens a second."""
    token_base: float
    """Seconds a token, alone on the node."""
    token_step: float
    """Seconds that each busy neighbour adds."""

    def times(self, factor: float) -> Guess:
        """The same for a node that is so many times as fast."""
        return Guess(self.reading * factor, self.token_base / factor, self.token_step / factor)


UNMEASURED = Guess(100.0, 0.1, 0.02)
"""A server CPU with a model of 7 to 8 billion parameters in 4 bits, of hint 1.0."""
UNMEASURED_GPU = 20.0
"""How many times faster a GPU is taken to be than such a CPU."""


@dataclass(slots=True)
class Speed:
    """What is known of a node's speed."""

    relative: float = 1.0
    """Compared with other nodes of the same models: the inventory's `speed_hint` until measured."""
    guess: Guess = UNMEASURED
    """What holds until it is measured; kept by `weigh`."""
    version: int = 0
    """Goes up whenever `reading`, `token_base` or `token_step` may have changed."""
    answers: int = 0
    """From how many answers it was learnt."""
    _prefill: Trend = field(
        default_factory=lambda: Trend(PREFILL_MEMORY, 0.0, OVERHEAD_STRENGTH, MOST_OVERHEAD)
    )
    _decode: Trend = field(
        default_factory=lambda: Trend(DECODE_MEMORY, USUAL_STEP, STEP_STRENGTH, STEEPEST_STEP)
    )

    @property
    def prefill_tps(self) -> float | None:
        """Prompt tokens read per second by one request; None: not measured."""
        level = self._prefill.level
        return 1 / level if level else None

    @property
    def decode_tps(self) -> float | None:
        """Tokens written per second by one request that is alone there; None: not measured."""
        level = self._decode.level
        return 1 / level if level else None

    @property
    def reading(self) -> float:
        """Prompt tokens per second to reckon with: measured, else guessed."""
        level = self._prefill.level
        return 1 / level if level else self.guess.reading

    @property
    def token_base(self) -> float:
        """Seconds a token with nobody else on the node: measured, else guessed."""
        return self._decode.level or self.guess.token_base

    @property
    def token_step(self) -> float:
        """Seconds that each busy neighbour adds to a token."""
        return self._decode.slope if self._decode.level else self.guess.token_step

    def seconds_per_token(self, busy: float) -> float:
        """Seconds a token with so many slots busy, the one that writes included."""
        return self.token_base + self.token_step * max(0.0, busy - 1)

    def learn(self, timings: Mapping[str, object], seen: Seen | None = None) -> Sample:
        """Take in llama.cpp's `timings` and what the gateway saw; what was measured."""
        return self._take_in(read_timings(timings, seen))

    def observe(
        self,
        prompt_tokens: float,
        cached: float,
        completion: float,
        ttft: float | None,
        duration: float,
        busy: float = 1.0,
    ) -> Sample:
        """The same for an endpoint without timings, in seconds of our clock."""
        return self.clocked(prompt_tokens, cached, completion, Seen(duration, ttft, busy))

    def clocked(self, prompt: float, cached: float, completion: float, seen: Seen) -> Sample:
        """The same with all that the gateway saw."""
        return self._take_in(by_clock(prompt, cached, completion, seen))

    def forget(self) -> None:
        """Another model or another server: nothing is known any more."""
        fresh = Speed()
        self._prefill, self._decode = fresh._prefill, fresh._decode
        self.answers = 0
        self.version += 1

    def _take_in(self, sample: Sample) -> Sample:
        rate = sample.prefill
        if rate is not None:
            self._prefill.learn(1 / rate.tokens, rate.low, rate.high, rate.tokens)
        rate = sample.decode
        if rate is not None:
            self._decode.learn((sample.busy or 1.0) - 1, rate.low, rate.high, rate.tokens)
        self.version += 1
        self.answers += 1
        return sample


def weigh(nodes: Iterable[Node]) -> None:
    """Set every node's `speed.relative`, on one scale for the nodes that serve the same models.

    The scale is where hints and measurements meet: a node of hint 1.0 is as fast as the median
    of the measured ones divided by their hints, so that a node that nobody has measured yet
    stands fairly beside them. The same gives what to reckon with for such a node (`guess`).
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
        _guess(group)


def _guess(group: list[Node]) -> None:
    """What to reckon with for the nodes of one group that are not measured, of each tier."""
    for tier in {node.spec.tier for node in group}:
        nodes = [node for node in group if node.spec.tier == tier]
        usual = UNMEASURED if tier == "cpu" else UNMEASURED.times(UNMEASURED_GPU)
        read = [tps / n.spec.speed_hint for n in nodes if (tps := n.speed.prefill_tps)]
        wrote = [n for n in nodes if n.speed.decode_tps]
        unit = Guess(
            statistics.median(read) if read else usual.reading,
            _median(wrote, "token_base") or usual.token_base,
            _median(wrote, "token_step") if wrote else usual.token_step,
        )
        for node in nodes:
            guess = unit.times(node.spec.speed_hint)
            if guess != node.speed.guess:
                node.speed.guess = guess
                node.speed.version += 1


def _median(nodes: list[Node], what: str) -> float:
    """The median of that, as it would be with a hint of 1.0; 0 without nodes."""
    return (
        statistics.median(getattr(n.speed, what) * n.spec.speed_hint for n in nodes)
        if nodes
        else 0.0
    )
