"""How fast a node reads and writes, learnt from the `timings` that llama.cpp sends unasked.

A prompt of n uncached tokens takes `overhead + n / reading` seconds, a token of an answer
`token_base + token_step * (busy - 1)` with so many slots busy: decoding on CPUs is bound by memory,
so that a batch costs little until computing binds. Both are straight lines through what was
measured (`trend.py`), seconds per token over 1 / n and over busy slots.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

PREFILL_HALF_LIFE = 8192.0
"""Tokens after which a measurement of the prefill weighs half."""

DECODE_HALF_LIFE = 1024.0
"""Tokens after which a measurement of the decode weighs half."""

STEP_PRIOR = 0.2
"""A neighbour's share in a token's time until it is measured: between nothing (bound by memory)
and 0.66 (the demo model on one busy thread)."""

STEP_STRENGTH = 64.0
"""Tokens with one neighbour more or less that weigh as much as this first guess."""

MOST_STEP = 2.0
"""One neighbour can't cost more than writing twice anew."""

OVERHEAD_STRENGTH = 0.25
"""The overhead of a read is guessed as none, as firmly as four reads of 16 tokens can tell."""

MOST_OVERHEAD = 256.0
"""Tokens that could be read in the overhead of a read, at most."""


@dataclass(frozen=True, slots=True)
class SpeedPrior:
    """What to reckon with until it is measured."""

    prefill_tps: float
    """Prompt tokens a second."""
    token_base: float
    """Seconds a token, alone on the node."""
    token_step: float
    """Seconds that each busy neighbour adds."""

    def scaled(self, factor: float) -> SpeedPrior:
        """The same for a node that is so many times as fast."""
        return SpeedPrior(
            self.prefill_tps * factor, self.token_base / factor, self.token_step / factor
        )


CPU_PRIOR = SpeedPrior(100.0, 0.1, 0.02)
"""A server CPU with a model of 7 to 8 billion parameters in 4 bits, of hint 1.0."""

GPU_FACTOR = 20.0
"""How many times faster a GPU is taken to be than such a CPU."""


class RatedSpec(Protocol):
    """What a node's specification says of its speed."""

    @property
    def tier(self) -> str:
        """`cpu` or `gpu`."""

    @property
    def speed_hint(self) -> float:
        """Its speed relative to other nodes, as the operator guesses it."""


class RatedNode(Protocol):
    """A node as far as its speed is compared with those of others."""

    @property
    def spec(self) -> RatedSpec:
        """What the inventory says of it."""

    @property
    def speed(self) -> Speed:
        """What is known of its speed."""

    @property
    def public_models(self) -> frozenset[str]:
        """What it serves, by the names that clients use."""


def compare_speeds(nodes: Iterable[RatedNode]) -> None:
    """Set every node's `speed.relative`, on one scale for the nodes that serve the same models.

    The scale is where hints and measurements meet: a node of hint 1.0 is as fast as the median
    of the measured ones divided by their hints, so that a node that nobody has measured yet
    stands fairly beside them. The same gives what to reckon with for such a node (`guess`).
    """
    groups: dict[frozenset[str], list[RatedNode]] = defaultdict(list)
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
        _set_priors(group)


def _set_priors(group: list[RatedNode]) -> None:
    """What to reckon with for the nodes of one group that are not measured, of each tier."""
    for tier in {node.spec.tier for node in group}:
        nodes = [node for node in group if node.spec.tier == tier]
        usual = CPU_PRIOR if tier == "cpu" else CPU_PRIOR.scaled(GPU_FACTOR)
        read = [tps / n.spec.speed_hint for n in nodes if (tps := n.speed.prefill_tps)]
        wrote = [n for n in nodes if n.speed.decode_tps]
        unit = SpeedPrior(
            statistics.median(read) if read else usual.prefill_tps,
            _median(wrote, "token_base") or usual.token_base,
            _median(wrote, "token_step") if wrote else usual.token_step,
        )
        for node in nodes:
            guess = unit.scaled(node.spec.speed_hint)
            if guess != node.speed.prior:
                node.speed.prior = guess
                node.speed.version += 1


def _median(nodes: list[RatedNode], what: str) -> float:
    """The median of that, as it would be with a hint of 1.0; 0 without nodes."""
    return (
        statistics.median(getattr(n.speed, what) * n.spec.speed_hint for n in nodes)
        if nodes
        else 0.0
    )


LEAST_SAMPLE_TOKENS = 2
"""One token's time is mostly rounding and overhead."""

SLOWEST_TPS, FASTEST_TPS = 1e-3, 1e6
"""Tokens/s outside of which a measurement is a mistake."""

MOST_REQUEST_TOKENS = 1e8
"""Of one request; what claims more is wrong."""

CLOCK_SLACK = 0.25
"""Seconds by which our clock and the node's may differ for reasons of the way between them."""

SUSPICIOUS_FACTOR = 4.0
"""A node that claims to have been so many times quicker than we saw is not taken at its word."""

MOST_STALLED_SHARE = 0.875
"""Share of a decode that others' prompts can at most have taken."""


_NEVER, _NAN = math.inf, math.nan


@dataclass(slots=True)
class ObservedTiming:
    """What the gateway saw of a request. Seconds by its own clock."""

    duration: float
    """From when it was sent until it had ended."""
    ttft: float | None = None
    """Of it, until the first content; None: the answer came in one piece."""
    busy_slots: float = 1.0
    """Mean number of slots in use while it wrote, its own included."""
    stalled_seconds: float = 0.0
    """Seconds, of those in which it wrote, in which the node read others' prompts."""
    mean_prefills: float = 1.0
    """Mean number of prompts being read while its own was, its own included."""


@dataclass(slots=True)
class TokenTime:
    """So many tokens took between `low` and `high` seconds each."""

    tokens: float
    low: float
    high: float


@dataclass(slots=True)
class SpeedSample:
    """What one request measured; None: nothing."""

    prefill: TokenTime | None = None
    decode: TokenTime | None = None
    busy_slots: float | None = None
    """Mean number of busy slots during the decode; None: unknown."""
    context_tokens: float = 0.0
    """Tokens in the slot when the decode began."""


def sample_from_timings(
    timings: Mapping[str, object], seen: ObservedTiming | None = None
) -> SpeedSample:
    """Read llama.cpp's `timings` (`cache_n`, `prompt_n`, `prompt_ms`, `predicted_n`, ...).

    `prompt_n` leaves out what the cache held (`cache_n`), so it is what was read.
    """
    prefill = _token_time(_number(timings, "prompt_n"), _number(timings, "prompt_ms") / 1000)
    decode = _token_time(_number(timings, "predicted_n"), _number(timings, "predicted_ms") / 1000)
    sample = SpeedSample(prefill, decode)
    if prefill is not None:
        cached = _number(timings, "cache_n")
        sample.context_tokens = prefill.tokens + (
            cached if 0 < cached <= MOST_REQUEST_TOKENS else 0.0
        )
    if seen is None or not _is_sane(seen):
        return sample
    sample.busy_slots = max(1.0, seen.busy_slots)
    read, readers, stalled = seen.ttft, seen.mean_prefills, seen.stalled_seconds
    if prefill is not None:
        _bound(prefill, seen.duration if read is None else read)
        if read is None:
            read = prefill.high * prefill.tokens
        else:
            _widen(prefill, read)
    if decode is not None:
        _bound(decode, seen.duration)
        _widen(decode, seen.duration - (read or 0.0))
        if seen.ttft is None and read:
            # Nobody knows when its neighbours read: for the same share of their time, say.
            wrote = decode.high * decode.tokens
            others = (sample.busy_slots - 1) * read / (read + wrote)
            readers, stalled = max(readers, 1 + others), max(stalled, others * wrote)
        _allow_stalls(decode, stalled)
    if prefill is not None:
        prefill.low /= max(1.0, readers)
    return sample


def sample_from_clock(
    prompt_tokens: float, cached_tokens: float, completion_tokens: float, seen: ObservedTiming
) -> SpeedSample:
    """The same for an endpoint that tells no timings: what we saw, its own queue included."""
    if not _is_sane(seen) or not all(
        math.isfinite(n) and 0 <= n <= MOST_REQUEST_TOKENS
        for n in (prompt_tokens, cached_tokens, completion_tokens)
    ):
        return SpeedSample()
    sample = SpeedSample(busy_slots=max(1.0, seen.busy_slots), context_tokens=prompt_tokens)
    if seen.ttft is None:
        # Reading is in it, for how long nobody knows.
        sample.decode = _token_time(completion_tokens, seen.duration)
        if sample.decode is not None:
            sample.decode.low /= 2
        else:
            sample.prefill = _token_time(prompt_tokens - cached_tokens, seen.duration)
    else:
        sample.prefill = _token_time(prompt_tokens - cached_tokens, seen.ttft)
        sample.decode = _token_time(completion_tokens - 1, seen.duration - seen.ttft)
    if sample.prefill is not None:
        sample.prefill.low /= max(1.0, seen.mean_prefills)
    if sample.decode is not None:
        _allow_stalls(sample.decode, seen.stalled_seconds)
    return sample


def _token_time(tokens: float, seconds: float) -> TokenTime | None:
    if not (LEAST_SAMPLE_TOKENS <= tokens <= MOST_REQUEST_TOKENS and 0 < seconds < _NEVER):
        return None
    each = seconds / tokens
    return TokenTime(tokens, each, each) if 1 / FASTEST_TPS <= each <= 1 / SLOWEST_TPS else None


def _bound(rate: TokenTime, saw: float) -> None:
    """It can't have worked on it for longer than the `saw` seconds that the whole took."""
    if rate.high * rate.tokens > saw + CLOCK_SLACK:
        rate.low = rate.high = max(saw, CLOCK_SLACK) / rate.tokens


def _widen(rate: TokenTime, saw: float) -> None:
    """It should not have been idle for most of the `saw` seconds that this took."""
    if saw > SUSPICIOUS_FACTOR * rate.high * rate.tokens + CLOCK_SLACK:
        rate.high = saw / rate.tokens


def _allow_stalls(rate: TokenTime, stalled: float) -> None:
    """Leave open how much of its time a decode stood still while others' prompts were read."""
    seconds = rate.low * rate.tokens
    rate.low = (seconds - min(stalled, MOST_STALLED_SHARE * seconds)) / rate.tokens


def _is_sane(seen: ObservedTiming) -> bool:
    return (
        0 < seen.duration < _NEVER
        and 0 <= (seen.ttft or 0.0) < _NEVER
        and 0 <= seen.busy_slots < _NEVER
        and 0 <= seen.stalled_seconds < _NEVER
        and 0 <= seen.mean_prefills < _NEVER
    )


def _number(timings: Mapping[str, object], key: str) -> float:
    value = timings.get(key)
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _NAN
    try:
        return float(value)
    except OverflowError:
        return _NAN


MOST_TREND_STEP = 4.0
"""One measurement counts as at most so many times more or less than the line says."""

SURPRISE_FACTOR = 1.5
"""A measurement that differs by this factor is unexpected."""

SURPRISES_BELIEVED = 3
"""So many unexpected ones in a row, all to the same side, are a change and no accident."""

SURPRISE_WEIGHT = 0.25
"""What counts of the weight of an unexpected measurement until others agree with it."""

EVIDENCE_AFTER_CHANGE = 0.25
"""What is left of earlier evidence when a change is believed."""

MOST_SAMPLE_WEIGHT = 0.25
"""One measurement weighs at most this share of the memory."""

WIDEST_FIRST_SAMPLE = 1 / 32
"""An interval whose ends differ more than that is no measurement to begin with."""


@dataclass(slots=True)
class LinearTrend:
    """`y = level + slope * x` for positive y and x >= 0, by decayed weighted least squares.

    `prior` is the slope to begin with as a share of the level, worth `strength` (weight times x
    squared); the slope stays between 0 and `steepest` levels. Evidence of `memory` weight makes
    all that came before count half.
    """

    half_life: float
    slope_prior: float
    prior_strength: float
    most_slope: float
    level: float = 0.0
    """0: nothing is known."""
    slope: float = 0.0
    _w: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _surprises: int = 0
    """Unexpected measurements in a row; negative: on the lower side."""

    def predict(self, x: float) -> float:
        """What the line says; 0 while nothing is known."""
        return self.level + self.slope * x

    def learn(self, x: float, low: float, high: float, weight: float) -> bool:
        """Take in that y lies between `low` and `high` (0 < low <= high); whether it was used.

        What is certain moves the line by its whole weight. A wide interval moves it little: to its
        nearer end, and slowly on to the lower one, since what makes an interval wide (others'
        work) mostly did cost time.
        """
        weight = min(weight, self.half_life * MOST_SAMPLE_WEIGHT) * low / high
        expected = self.predict(x)
        left = 1.0
        if expected:
            least, most = expected / MOST_TREND_STEP, expected * MOST_TREND_STEP
            y = min(max(min(max(expected, low), high), least), most)
            surprise = (y > expected * SURPRISE_FACTOR) - (y < expected / SURPRISE_FACTOR)
            if surprise:
                same = surprise * self._surprises > 0
                self._surprises = self._surprises + surprise if same else surprise
                if abs(self._surprises) < SURPRISES_BELIEVED:
                    weight *= SURPRISE_WEIGHT
                else:
                    left = EVIDENCE_AFTER_CHANGE
            else:
                self._surprises = 0
            if low < y:
                y = math.sqrt(y * max(low, least))
        elif low < high * WIDEST_FIRST_SAMPLE:
            return False
        else:
            y = math.sqrt(low * high)
        kept = left * 0.5 ** (weight / self.half_life)
        self._w = self._w * kept + weight
        self._x = self._x * kept + weight * x
        self._y = self._y * kept + weight * y
        self._xx = self._xx * kept + weight * x * x
        self._xy = self._xy * kept + weight * x * y
        self._fit()
        return True

    def _fit(self) -> None:
        x, y = self._x / self._w, self._y / self._w
        spread = max(0.0, self._xx - self._x * x)
        usual = self.slope_prior * y / (1 + self.slope_prior * x)
        slope = (self._xy - self._x * y + self.prior_strength * usual) / (
            spread + self.prior_strength
        )
        self.slope = min(max(slope, 0.0), y / (x + 1 / self.most_slope))
        self.level = y - self.slope * x


@dataclass(slots=True)
class Speed:
    """What is known of a node's speed."""

    relative: float = 1.0
    """Compared with other nodes of the same models: the inventory's `speed_hint` until measured."""
    prior: SpeedPrior = CPU_PRIOR
    """What holds until it is measured; kept by `weigh`."""
    version: int = 0
    """Goes up whenever `reading`, `token_base` or `token_step` may have changed."""
    samples: int = 0
    """From how many answers it was learnt."""
    _prefill: LinearTrend = field(
        default_factory=lambda: LinearTrend(
            PREFILL_HALF_LIFE, 0.0, OVERHEAD_STRENGTH, MOST_OVERHEAD
        )
    )
    _decode: LinearTrend = field(
        default_factory=lambda: LinearTrend(DECODE_HALF_LIFE, STEP_PRIOR, STEP_STRENGTH, MOST_STEP)
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
    def expected_prefill_tps(self) -> float:
        """Prompt tokens per second to reckon with: measured, else guessed."""
        level = self._prefill.level
        return 1 / level if level else self.prior.prefill_tps

    @property
    def token_base(self) -> float:
        """Seconds a token with nobody else on the node: measured, else guessed."""
        return self._decode.level or self.prior.token_base

    @property
    def token_step(self) -> float:
        """Seconds that each busy neighbour adds to a token."""
        return self._decode.slope if self._decode.level else self.prior.token_step

    def seconds_per_token(self, busy: float) -> float:
        """Seconds a token with so many slots busy, the one that writes included."""
        return self.token_base + self.token_step * max(0.0, busy - 1)

    def learn_timings(
        self, timings: Mapping[str, object], seen: ObservedTiming | None = None
    ) -> SpeedSample:
        """Take in llama.cpp's `timings` and what the gateway saw; what was measured."""
        return self._take_in(sample_from_timings(timings, seen))

    def observe(
        self,
        prompt_tokens: float,
        cached: float,
        completion: float,
        ttft: float | None,
        duration: float,
        busy: float = 1.0,
    ) -> SpeedSample:
        """The same for an endpoint without timings, in seconds of our clock."""
        return self.learn_clocked(
            prompt_tokens, cached, completion, ObservedTiming(duration, ttft, busy)
        )

    def learn_clocked(
        self,
        prompt_tokens: float,
        cached_tokens: float,
        completion_tokens: float,
        seen: ObservedTiming,
    ) -> SpeedSample:
        """The same with all that the gateway saw."""
        return self._take_in(
            sample_from_clock(prompt_tokens, cached_tokens, completion_tokens, seen)
        )

    def forget(self) -> None:
        """Another model or another server: nothing is known any more."""
        fresh = Speed()
        self._prefill, self._decode = fresh._prefill, fresh._decode
        self.samples = 0
        self.version += 1

    def _take_in(self, sample: SpeedSample) -> SpeedSample:
        rate = sample.prefill
        if rate is not None:
            self._prefill.learn(1 / rate.tokens, rate.low, rate.high, rate.tokens)
        rate = sample.decode
        if rate is not None:
            self._decode.learn((sample.busy_slots or 1.0) - 1, rate.low, rate.high, rate.tokens)
        self.version += 1
        self.samples += 1
        return sample
