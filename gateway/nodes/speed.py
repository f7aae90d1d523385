"""How fast a node reads prompts and writes answers, learnt from llama.cpp's `timings`.

The prefill of n uncached tokens takes `overhead + n / prefill_tps` seconds; each token of the
decode takes `token_base + token_step * (busy - 1)` seconds with `busy` slots in use: on CPUs the
decode is bound by memory, so that a batch costs little until it is bound by computing. Both are
straight lines through the measurements (`LinearTrend`): seconds per token over 1 / n and over busy
slots.

**Degradation.** Whether a node is far slower than it used to be: it swaps, its host is busy, it is
throttled.

Like is compared with like: the time of a token with others at as many busy slots and as much text
in the slot, the prefill of a prompt with those of about its length. So neither more load nor longer
prompts make a node look degraded. A handful of requests over some time must agree, by their median.
A span of a running stream counts as one, by the events that have come: long answers of a slow node
end late. An event holds about as many tokens as in streams before. Spans in which others' requests
run on the node, or the client lags, prove nothing. To recover, the median must come nearer to the
usual speed than the value at which it was degraded.

The usual speed (the baseline) is learnt quickly at first. Later it follows slowly: half of the way,
on a log scale, in `BASELINE_HALF_LIFE` of work. A node that stays at 0.3 of its speed is degraded
for about eight hours of work; then this is its usual speed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

PREFILL_HALF_LIFE = 8192.0  # tokens after which a measurement of the prefill counts half
DECODE_HALF_LIFE = 1024.0  # tokens after which a measurement of the decode counts half
# Each busy neighbour's share of a token's time until it is measured: between 0 (bound by memory)
# and 0.66 (the demo model on one busy thread).
STEP_PRIOR = 0.2
# Tokens with one neighbour more or less that count as much as this first guess.
STEP_STRENGTH = 64.0
MOST_STEP = 2.0  # most of a neighbour's share: it can't cost more than two more decodes of one slot
# The overhead of a prefill is guessed as 0, as firmly as four prefills of 16 tokens would show.
OVERHEAD_STRENGTH = 0.25
MOST_OVERHEAD = 256.0  # most overhead of a prefill, in tokens that could be read meanwhile


SLOWEST_TPS, FASTEST_TPS = 1e-3, 1e6  # tokens/s outside of which a measurement is a mistake
_Tps = Annotated[float, msgspec.Meta(ge=SLOWEST_TPS, le=FASTEST_TPS)]
_TokenBase = Annotated[float, msgspec.Meta(ge=1 / FASTEST_TPS, le=1 / SLOWEST_TPS)]
_TokenStep = Annotated[float, msgspec.Meta(ge=0, le=1 / SLOWEST_TPS)]


@dataclass(frozen=True, slots=True)
class SpeedPrior:
    """The assumed speed of a node until it is measured."""

    prefill_tps: _Tps  # prompt tokens a second
    token_base: _TokenBase  # seconds a token, alone on the node
    token_step: _TokenStep  # seconds that each busy neighbour adds

    def scaled(self, factor: float) -> SpeedPrior:
        """The speed of a node that is so many times as fast."""
        return SpeedPrior(
            self.prefill_tps * factor, self.token_base / factor, self.token_step / factor
        )


# The best server CPU of the catalogue (`workshop/plan/catalogue.yaml`), with a model of 8 billion
# parameters in 4 bits: a node is believed to be fast until a node like it is measured.
CPU_PRIOR = SpeedPrior(300.0, 1 / 52, 0.15 / 52)
GPU_PRIOR = SpeedPrior(2900.0, 1 / 105, 0.03 / 105)  # the best GPU of the catalogue


@dataclass(slots=True)
class Speed:
    """The known speed of one node."""

    prior: SpeedPrior = CPU_PRIOR  # the assumed speed until it is measured; set by `compare_speeds`
    version: int = 0  # goes up whenever one of the figures below may have changed
    samples: int = 0
    hinted: bool = False
    """Whether `prior` is the node's own, by a `speed_hint` that is written in the inventory."""
    calibrated: SpeedPrior | None = None
    """Its assumed speed by a calibration; beats `prior` until an answer shows the real one."""
    # Kept up to date: they are read for each request, and change with a sample.
    prefill_tps: float | None = None
    """Prompt tokens per second of one request alone; None: not measured."""
    decode_tps: float | None = None
    """Tokens written per second by one request alone; None: not measured."""
    expected_prefill_tps: float = CPU_PRIOR.prefill_tps
    """Prompt tokens per second: measured, else assumed."""
    token_base: float = CPU_PRIOR.token_base
    """Seconds a token with one busy slot: measured, else assumed."""
    token_step: float = CPU_PRIOR.token_step
    """Seconds that each busy neighbour adds to a token: measured, else assumed."""
    _prefill: LinearTrend = field(
        default_factory=lambda: LinearTrend(
            PREFILL_HALF_LIFE, 0.0, OVERHEAD_STRENGTH, MOST_OVERHEAD
        )
    )
    _decode: LinearTrend = field(
        default_factory=lambda: LinearTrend(DECODE_HALF_LIFE, STEP_PRIOR, STEP_STRENGTH, MOST_STEP)
    )

    def learn(self, sample: SpeedSample) -> None:
        """Learn from what one answer has shown."""
        if (rate := sample.prefill) is not None:
            self._prefill.learn(1 / rate.tokens, rate.low, rate.high, rate.tokens)
        if (rate := sample.decode) is not None:
            self._decode.learn((sample.busy_slots or 1.0) - 1, rate.low, rate.high, rate.tokens)
        self._update()
        self.samples += 1

    def calibrate(self, timings: Mapping[str, object]) -> tuple[float | None, float | None] | None:
        """Assume what one tiny request's `timings` show, and of the rest what is assumed now.

        It is no sample: the first answer that shows the node's reading or writing replaces it.
        Returns the tokens/s of reading and writing that they show; None: neither.
        """
        shown = sample_from_timings(timings)
        read = wrote = None
        known = self.calibrated or self.prior
        prefill_tps, base, step = known.prefill_tps, known.token_base, known.token_step
        if shown.prefill is not None:
            prefill_tps = read = 1 / shown.prefill.low
        if shown.decode is not None:
            # The first token comes with the prefill: so many tokens take one decode less.
            base = shown.decode.low * shown.decode.tokens / (shown.decode.tokens - 1)
            step, wrote = STEP_PRIOR * base, 1 / base
        if read is None and wrote is None:
            return None
        self.calibrated = SpeedPrior(prefill_tps, base, step)
        self._update()
        return read, wrote

    def set_prior(self, prior: SpeedPrior, *, hinted: bool = False) -> None:
        """Its assumed speed, by other nodes' measurements; `hinted`: and its own `speed_hint`."""
        if prior != self.prior or hinted is not self.hinted:
            self.prior, self.hinted = prior, hinted
            self._update()

    def export(self) -> SpeedState | None:
        """What was learnt; None: nothing was."""
        prefill, decode = self._prefill.line, self._decode.line
        if prefill is None and decode is None and self.calibrated is None:
            return None
        return SpeedState(self.samples, prefill, decode, self.calibrated)

    def restore(self, state: SpeedState, kept: float) -> None:
        """Go on from what was learnt; `kept`: the share that its evidence still counts."""
        self._prefill.restore(state.prefill, kept)
        self._decode.restore(state.decode, kept)
        self.samples, self.calibrated = state.samples, state.calibrated
        self._update()

    def forget(self) -> None:
        """Another model or another server: no measurement holds any more."""
        fresh = Speed()
        self._prefill, self._decode = fresh._prefill, fresh._decode
        self.samples, self.calibrated = 0, None
        self._update()

    def _update(self) -> None:
        """Derive the figures from what was learnt and assumed."""
        self.version += 1
        prior = self.calibrated or self.prior
        prefill, decode = self._prefill.line, self._decode.line
        self.prefill_tps = None if prefill is None else 1 / prefill.level
        self.expected_prefill_tps = self.prefill_tps or prior.prefill_tps
        if decode is not None:
            self.decode_tps = 1 / decode.level
            self.token_base, self.token_step = decode.level, decode.slope
        else:
            self.decode_tps = None
            self.token_base, self.token_step = prior.token_base, prior.token_step


class SpeedState(msgspec.Struct, frozen=True):
    """A `Speed` as it outlives its process."""

    samples: Annotated[int, msgspec.Meta(ge=0)]
    prefill: TrendLine | None
    decode: TrendLine | None
    calibrated: SpeedPrior | None


_Sum = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]


class TrendLine(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a `LinearTrend` has learnt: its line, and the decayed sums of the measurements."""

    level: _Positive
    slope: _Sum
    w: _Positive
    x: _Sum
    y: _Sum
    xx: _Sum
    xy: _Sum


_NO_LINE = TrendLine(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


LEAST_SAMPLE_TOKENS = 2  # one token's time is mostly rounding and overhead
MOST_REQUEST_TOKENS = 1e8  # of one request; timings with more are wrong
# Seconds by which our clock and the node's may differ because of the network between them.
CLOCK_SLACK = 0.25
# Timings that are so many times shorter than the gateway saw are not believed.
SUSPICIOUS_FACTOR = 4.0
# Most of a decode that the prefill of other prompts can have taken, as a share.
MOST_STALLED_SHARE = 0.875
_NAN = math.nan


# Structs of msgspec: some are made for each response from which a speed is learnt.
class ObservedTiming(msgspec.Struct, frozen=True, gc=False):
    """What the gateway saw of a request, in seconds of its own clock."""

    duration: float  # from sending until the end
    ttft: float | None = None
    """From sending until the first content; None: the answer came in one piece."""
    busy_slots: float = 1.0  # mean number of busy slots during its decode, its own included
    stalled_seconds: float = 0.0  # seconds of its decode in which the node read others' prompts
    mean_prefills: float = 1.0
    """Mean number of prompts being read while its own was, its own included."""


class TokenTime(msgspec.Struct, gc=False):
    """So many tokens took between `low` and `high` seconds each."""

    tokens: float
    low: float
    high: float

    def bound(self, seen: float) -> None:
        """All of it can't have taken longer than the `seen` seconds of the whole request."""
        if self.high * self.tokens > seen + CLOCK_SLACK:
            self.low = self.high = max(seen, CLOCK_SLACK) / self.tokens

    def widen(self, seen: float) -> None:
        """It may have taken up to the `seen` seconds, if it claims to be idle for most of them."""
        if seen > SUSPICIOUS_FACTOR * self.high * self.tokens + CLOCK_SLACK:
            self.high = seen / self.tokens

    def allow_stalls(self, stalled: float) -> None:
        """A decode may have stood still for so many seconds while other prompts were read."""
        seconds = self.low * self.tokens
        self.low = (seconds - min(stalled, MOST_STALLED_SHARE * seconds)) / self.tokens

    def shared_by(self, requests: float) -> None:
        """The node may have worked on so many requests in turn."""
        self.low /= max(1.0, requests)


class SpeedSample(msgspec.Struct):
    """What one request showed of its node's speed; None: nothing."""

    prefill: TokenTime | None = None
    decode: TokenTime | None = None
    busy_slots: float | None = None  # mean number of busy slots during the decode; None: unknown
    context_tokens: float = 0.0  # tokens in the slot when the decode began


def sample_from_timings(
    timings: Mapping[str, object], seen: ObservedTiming | None = None
) -> SpeedSample:
    """The sample of llama.cpp's `timings` (`cache_n`, `prompt_n`, `prompt_ms`, `predicted_n`, ...).

    `prompt_n` leaves out the cached tokens (`cache_n`): it counts those that were read.
    """
    prefill = _token_time(_number(timings, "prompt_n"), _number(timings, "prompt_ms") / 1000)
    decode = _token_time(_number(timings, "predicted_n"), _number(timings, "predicted_ms") / 1000)
    sample = SpeedSample(prefill, decode)
    if prefill is not None:
        cached = _number(timings, "cache_n")
        sample.context_tokens = prefill.tokens + (
            cached if 0 < cached <= MOST_REQUEST_TOKENS else 0.0
        )
    if seen is None or seen.duration <= 0:
        return sample
    sample.busy_slots = max(1.0, seen.busy_slots)
    ttft, prefills, stalled = seen.ttft, seen.mean_prefills, seen.stalled_seconds
    if prefill is not None:
        prefill.bound(seen.duration if ttft is None else ttft)
        if ttft is None:
            ttft = prefill.high * prefill.tokens
        else:
            prefill.widen(ttft)
    if decode is not None:
        decode.bound(seen.duration)
        decode.widen(seen.duration - (ttft or 0.0))
        if seen.ttft is None and ttft:
            # When the neighbours' prefills were is unknown: assume the same share of their time.
            decode_seconds = decode.high * decode.tokens
            others = (sample.busy_slots - 1) * ttft / (ttft + decode_seconds)
            prefills, stalled = max(prefills, 1 + others), max(stalled, others * decode_seconds)
        decode.allow_stalls(stalled)
    if prefill is not None and prefills > 1.0:
        prefill.shared_by(prefills)
    return sample


def sample_from_clock(
    prompt_tokens: float, cached_tokens: float, completion_tokens: float, seen: ObservedTiming
) -> SpeedSample:
    """The sample of an endpoint without timings: what the gateway saw, its queue included."""
    if not (
        seen.duration > 0
        and 0 <= prompt_tokens <= MOST_REQUEST_TOKENS
        and 0 <= cached_tokens <= MOST_REQUEST_TOKENS
        and 0 <= completion_tokens <= MOST_REQUEST_TOKENS
    ):
        return SpeedSample()
    duration, ttft, uncached = seen.duration, seen.ttft, prompt_tokens - cached_tokens
    prefill = decode = None
    if ttft is not None:
        prefill = _token_time(uncached, ttft)
        decode = _token_time(completion_tokens - 1, duration - ttft)
    else:
        # It includes the prefill, for an unknown time.
        if completion_tokens:
            decode = _token_time(completion_tokens, duration)
        if decode is not None:
            decode.shared_by(2)
        else:
            prefill = _token_time(uncached, duration)
    if prefill is not None and seen.mean_prefills > 1.0:
        prefill.shared_by(seen.mean_prefills)
    if decode is not None:
        decode.allow_stalls(seen.stalled_seconds)
    busy = seen.busy_slots if seen.busy_slots > 1.0 else 1.0  # noqa: FURB136 - as above
    return SpeedSample(prefill, decode, busy, prompt_tokens)


def _token_time(tokens: float, seconds: float) -> TokenTime | None:
    if not (LEAST_SAMPLE_TOKENS <= tokens <= MOST_REQUEST_TOKENS and seconds > 0):
        return None
    each = seconds / tokens
    return TokenTime(tokens, each, each) if 1 / FASTEST_TPS <= each <= 1 / SLOWEST_TPS else None


def _number(timings: Mapping[str, object], key: str) -> float:
    value = timings.get(key)
    if type(value) is float:
        return value
    # Far larger numbers are no time and no count, and the largest are no floats.
    return float(value) if type(value) is int and value.bit_length() < 64 else _NAN


MOST_TREND_STEP = 4.0  # one measurement counts as at most this factor above or below the prediction
SURPRISE_FACTOR = 1.5  # a measurement that differs from the prediction by this factor is a surprise
# So many surprises in a row, all to the same side, are a change and no accident.
SURPRISES_BELIEVED = 3
SURPRISE_WEIGHT = 0.25  # share of its weight that a surprise counts with until others agree with it
EVIDENCE_AFTER_CHANGE = 0.25  # share of the earlier evidence that is left when a change is believed
MOST_SAMPLE_WEIGHT = 0.25  # most weight of one measurement, as a share of the half-life
WIDEST_FIRST_SAMPLE = 1 / 32  # least low / high of the first interval that is learnt from


@dataclass(slots=True)
class LinearTrend:
    """`y = level + slope * x` for positive y and x >= 0, by decayed weighted least squares.

    `slope_prior` is the assumed slope as a share of the level, worth `prior_strength` (weight
    times x squared); the slope stays between 0 and `most_slope` levels. Measurements with a weight
    of `half_life` together make all earlier ones count half.
    """

    half_life: float
    slope_prior: float
    prior_strength: float
    most_slope: float
    line: TrendLine | None = None  # none: nothing is known
    _surprises: int = 0  # surprises in a row; negative: below the prediction

    def restore(self, line: TrendLine | None, kept: float) -> None:
        """Take over this line, with this share of the evidence for it."""
        if line is not None:
            w, x, y, xx, xy = (kept * one for one in (line.w, line.x, line.y, line.xx, line.xy))
            self.line = TrendLine(line.level, line.slope, w, x, y, xx, xy)

    def learn(self, x: float, low: float, high: float, weight: float) -> None:
        """Learn that y lies between `low` and `high` (0 < low <= high).

        A point (`low` = `high`) moves the line by its whole weight. A wide interval moves it
        little: to its nearer end, and slowly on to the lower one, since the cause of a wide
        interval (other requests' work) mostly did take time.
        """
        half_life, line = self.half_life, self.line or _NO_LINE
        weight = min(weight, half_life * MOST_SAMPLE_WEIGHT) * low / high
        expected = line.level + line.slope * x
        left = 1.0
        if expected:
            least, most = expected / MOST_TREND_STEP, expected * MOST_TREND_STEP
            if expected < low:
                y = min(low, most)
            elif expected > high:
                y = max(high, least)
            else:
                y = expected
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
            return
        else:
            y = math.sqrt(low * high)
        kept = left * 0.5 ** (weight / half_life)
        sum_w = line.w * kept + weight
        sum_x = line.x * kept + weight * x
        sum_y = line.y * kept + weight * y
        sum_xx = line.xx * kept + weight * x * x
        sum_xy = line.xy * kept + weight * x * y
        # Fit the line.
        x, y = sum_x / sum_w, sum_y / sum_w
        prior, strength = self.slope_prior, self.prior_strength
        usual, spread = prior * y / (1 + prior * x), sum_xx - sum_x * x
        slope = (sum_xy - sum_x * y + strength * usual) / (
            spread + strength if spread > 0.0 else strength
        )
        most = y / (x + 1 / self.most_slope)
        if not 0.0 <= slope <= most:
            slope = most if slope > most else 0.0
        self.line = TrendLine(y - slope * x, slope, sum_w, sum_x, sum_y, sum_xx, sum_xy)


DEGRADED_BELOW = 0.4  # share of its usual speed below which a node is degraded
RECOVERED_ABOVE = 0.6  # share of its usual speed above which a degraded node has recovered
RECENT_REQUESTS = 9  # requests whose median is the present speed
LEAST_REQUESTS = 5  # fewer requests prove nothing
# Seconds for which requests must have been slow: one stall can hit all that run.
DEGRADED_AFTER = 12.0
DEGRADED_STALE = 600.0  # seconds without a request after which a degraded node counts as recovered
# Requests that still count then, so that three more slow ones prove it again.
SHARES_KEPT_WHEN_STALE = 2
# Seconds of work in which the baseline goes half of the way to a lower speed.
BASELINE_HALF_LIFE = 6 * 3600.0
# Seconds of work in which the baseline goes half of the way to a higher speed.
FASTER_HALF_LIFE = 1800.0
MOST_WORK_GAP = 300.0  # most seconds between two requests that count as work
# Share of a measured time that a baseline takes at least, whatever neighbours are believed to have
# taken of it. It is above `DEGRADED_BELOW`: where that belief was wrong, later requests without
# such neighbours do not look degraded.
LEAST_ALLOWED_SHARE = 0.5
YOUNG_BASELINE = 8  # first requests of a kind: they make its baseline and are not compared
LEAST_PREFILL_TOKENS = 64  # shorter prefills are mostly overhead
LEAST_DECODE_TOKENS = 8  # shorter decodes are mostly chance
MOST_TOKENS_PER_EVENT = 64.0
# A stream whose events held so many times more tokens than was known has not shown its speed.
MOST_DOUBT = 1.5
EVENT_LEARNING = 1 / 32  # share of the way to a lower `tokens_per_event` that one stream makes
MOST_BASELINES = 64


_Class = Annotated[int, msgspec.Meta(ge=-64, le=64)]


class UsualSpeed(msgspec.Struct, frozen=True, array_like=True):
    """The usual speed (the baseline) for one kind of request, which is named by two numbers."""

    first: _Class
    second: _Class
    log_seconds: Annotated[float, msgspec.Meta(ge=-50, le=50)] = 0.0
    """Mean logarithm of the seconds per token."""
    samples: Annotated[int, msgspec.Meta(ge=0, le=YOUNG_BASELINE)] = 0

    @property
    def is_young(self) -> bool:
        """Whether too few requests have made it to compare others with it."""
        return self.samples < YOUNG_BASELINE

    def after(self, rate: TokenTime, elapsed: float) -> UsualSpeed:
        """What it is after one more request, so many seconds after the last one."""
        learned = math.log(max(rate.low, LEAST_ALLOWED_SHARE * rate.high))
        samples = min(self.samples + 1, YOUNG_BASELINE)
        if self.is_young:
            share = 1 / samples
        else:
            half_life = BASELINE_HALF_LIFE if learned > self.log_seconds else FASTER_HALF_LIFE
            share = 1 - 0.5 ** (max(0.0, min(elapsed, MOST_WORK_GAP)) / half_life)
        log_seconds = self.log_seconds + (learned - self.log_seconds) * share
        return UsualSpeed(self.first, self.second, log_seconds, samples)


def _share(usual: float, rate: TokenTime) -> float:
    """A request's speed as a share of the usual one, whose seconds have the logarithm `usual`."""
    return math.exp(max(-50.0, min(50.0, usual - math.log(rate.low))))


@dataclass(slots=True)
class SpeedHistory:
    """Prefill or decode: baselines by kind of request, and the last requests' shares of them."""

    baselines: dict[tuple[int, int], UsualSpeed] = field(default_factory=dict)
    learned_at: dict[tuple[int, int], float] = field(default_factory=dict)
    """When each of them last learnt; monotonic seconds."""
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    slow_since: float | None = None
    """Since when the present speed is too low: the end of the first of the slow requests."""
    row_since: float | None = None
    """End of the first of the slow requests that no other request has come between."""
    degraded: bool = False
    bounded: bool = False
    """Whether kinds are busy slots and contexts, so that one bounds another (`_usual`)."""
    compared_at: float = 0.0
    usual_tps: float = 0.0  # usual tokens/s of a request like the last one

    @property
    def current_share(self) -> float:
        """The present speed as a share of the usual one."""
        shares = sorted(self.shares)
        return shares[len(shares) // 2] if shares else 1.0

    def learn(self, kind: tuple[int, int], rate: TokenTime, now: float) -> None:
        """Compare one more request, by the fastest speed that its measurement allows.

        Doubt is the node's: what is learnt from it is less fast. A kind that is new does not learn
        its usual speed while the node is slow.
        """
        baseline = self.baselines.get(kind) or UsualSpeed(*kind)
        if not baseline.samples and len(self.baselines) >= MOST_BASELINES:
            return
        usual = self._usual(kind)
        share = None if usual is None else _share(usual, rate)
        is_slow = self.slow_since is not None or (share is not None and share < DEGRADED_BELOW)
        if not (baseline.is_young and is_slow):
            elapsed, self.learned_at[kind] = now - self.learned_at.get(kind, now), now
            self.baselines[kind] = baseline.after(rate, elapsed)
        if usual is not None and share is not None:
            self._judge(share, usual, now)

    def watch(self, kind: tuple[int, int], rate: TokenTime, now: float) -> None:
        """Compare a span of a running request, from which no usual speed is learnt."""
        if (usual := self._usual(kind)) is not None:
            self._judge(_share(usual, rate), usual, now)

    def _usual(self, kind: tuple[int, int]) -> float | None:
        """Logarithm of the usual seconds of this kind; None: unknown.

        Of a kind that is new, of the most that they can be by those that are known: a token takes
        twice as long at most with twice as many slots busy, or with four times as much text.
        """
        baseline = self.baselines.get(kind)
        if baseline is not None and not baseline.is_young:
            return baseline.log_seconds
        if not self.bounded:
            return None
        busy, context = kind
        bounds = [
            known.log_seconds + math.log(2) * (max(0, busy - other) / 2 + max(0, context - text))
            for (other, text), known in self.baselines.items()
            if not known.is_young
        ]
        return min(bounds, default=None)

    def _judge(self, share: float, usual: float, now: float) -> None:
        """One more request, or a span of one, had this share of the usual speed."""
        self.shares.append(share)
        idle, self.compared_at = now - self.compared_at > MOST_WORK_GAP, now
        self.usual_tps = math.exp(-usual)
        if share >= DEGRADED_BELOW:
            self.row_since = None
        elif self.row_since is None or idle:
            self.row_since = now
        share = self.current_share
        if share >= RECOVERED_ABOVE or (share >= DEGRADED_BELOW and not self.degraded):
            self.slow_since, self.degraded = None, False
            return
        if self.slow_since is None:
            self.slow_since = now if self.row_since is None else self.row_since
        if len(self.shares) >= LEAST_REQUESTS and now - self.slow_since >= DEGRADED_AFTER:
            self.degraded = True

    def refresh(self, now: float) -> None:
        """Count a node as recovered after a long time without requests."""
        if self.degraded and now - self.compared_at >= DEGRADED_STALE:
            self.degraded = False
            while len(self.shares) > SHARES_KEPT_WHEN_STALE:
                self.shares.popleft()

    def restore(self, usual: list[UsualSpeed], kept: float, now: float) -> None:
        """Go on from these; with a smaller share `kept`, the next requests change them sooner."""
        self.baselines = {
            (one.first, one.second): msgspec.structs.replace(one, samples=round(one.samples * kept))
            for one in usual[:MOST_BASELINES]
        }
        self.learned_at = dict.fromkeys(self.baselines, now)

    def forget_recent(self) -> None:
        """Keep the baselines only."""
        self.shares.clear()
        self.slow_since, self.row_since, self.degraded = None, None, False


class UsualSpeeds(msgspec.Struct, frozen=True):
    """What a `DegradationDetector` knows of a node, as it outlives its process."""

    prefill: list[UsualSpeed]
    decode: list[UsualSpeed]


@dataclass(slots=True)
class DegradationDetector:
    """The usual and the present speed of one node, for prefill and decode."""

    prefill: SpeedHistory = field(default_factory=SpeedHistory)
    decode: SpeedHistory = field(default_factory=lambda: SpeedHistory(bounded=True))
    tokens_per_event: float = 1.0
    """Tokens that an event of a stream holds: the most lately, since it depends on the text."""

    @property
    def degraded(self) -> bool:
        """Whether the node is far slower than usual."""
        return self.prefill.degraded or self.decode.degraded

    def learn(self, sample: SpeedSample, now: float) -> bool:
        """Compare what a request measured; whether `degraded` has changed."""
        read, wrote = sample.prefill, sample.decode
        if read is not None and read.tokens < LEAST_PREFILL_TOKENS:
            read = None
        if wrote is not None and (wrote.tokens < LEAST_DECODE_TOKENS or sample.busy_slots is None):
            wrote = None
        before = self.degraded
        if read is not None:
            kind = _size_class(read.tokens), _size_class(sample.context_tokens)
            self.prefill.learn(kind, read, now)
        if wrote is not None:
            self.decode.learn(_decode_kind(sample), wrote, now)
        return self.degraded is not before

    def learn_events(self, tokens: float, events: float) -> None:
        """A whole stream of so many tokens came in so many events."""
        if events >= LEAST_DECODE_TOKENS and tokens > 0:
            seen = min(max(1.0, tokens / events), MOST_TOKENS_PER_EVENT)
            known = self.tokens_per_event
            self.tokens_per_event = max(seen, known + (seen - known) * EVENT_LEARNING)
            if seen > known * MOST_DOUBT:
                self.decode.forget_recent()  # Its spans were taken for far slower than they were.

    def watch(self, events: float, seen: ObservedTiming, context_tokens: float, now: float) -> bool:
        """Compare a span of a running stream; whether `degraded` has changed.

        `context_tokens`: of its prompt, and of what it has written.
        """
        before = self.degraded
        tokens = 1.0 + events * self.tokens_per_event  # The first one's time is not the span's.
        sample = sample_from_clock(context_tokens, context_tokens, tokens, seen)
        if sample.decode is not None:
            self.decode.watch(_decode_kind(sample), sample.decode, now)
        return self.degraded is not before

    def refresh(self, now: float) -> bool:
        """Take in that time has passed; whether `degraded` has changed."""
        before = self.degraded
        self.prefill.refresh(now)
        self.decode.refresh(now)
        return self.degraded is not before

    def export(self) -> UsualSpeeds:
        """The usual speeds."""
        prefill, decode = self.prefill.baselines.values(), self.decode.baselines.values()
        return UsualSpeeds(list(prefill), list(decode))

    def restore(self, usual: UsualSpeeds, kept: float, now: float) -> None:
        """Go on from these usual speeds; the present speed is to be seen anew."""
        self.prefill.restore(usual.prefill, kept, now)
        self.decode.restore(usual.decode, kept, now)

    def server_restarted(self) -> None:
        """The server is a new process: the cause may have gone with the old one."""
        self.prefill.forget_recent()
        self.decode.forget_recent()

    def forget(self) -> None:
        """Another model or another server: it has no usual speed yet."""
        self.prefill, self.decode = SpeedHistory(), SpeedHistory(bounded=True)

    def reason(self, now: float, *, endpoint: bool = False) -> str:
        """What is wrong, in words that an operator can act on."""
        findings = [
            f"{verb} at {history.current_share:.0%} of its usual speed "
            f"({history.usual_tps * history.current_share:.3g} tokens/s instead of "
            f"{history.usual_tps:.3g}) "
            f"for {duration_words(now - (history.slow_since or 0.0))}"
            for verb, history in (("writes", self.decode), ("reads", self.prefill))
            if history.degraded
        ]
        advice = (
            "look at the endpoint's load and its rate limits"
            if endpoint
            else "look on its host for swapping, other load, CPU frequency and thermal throttling"
        )
        return f"{' and '.join(findings)}: {advice}"


def _decode_kind(sample: SpeedSample) -> tuple[int, int]:
    """Busy slots and text: tokens of one kind take about as long."""
    return round(2 * math.log2(sample.busy_slots or 1.0)), _size_class(sample.context_tokens)


def _size_class(tokens: float) -> int:
    """The class of a length, a factor of four wide: within one the speeds are alike."""
    return int(math.log2(max(1.0, tokens)) / 2)


def duration_words(seconds: float) -> str:
    """So many seconds, for an operator."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
