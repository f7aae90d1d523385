"""Whether a node is far below its own past: it swaps, its host has other work, it is throttled.

Speeds are compared like with like: a token's time with as many slots busy and as much text in the
slot, a prompt's with prompts of about its length. So neither more load nor longer prompts make a
node look degraded. A handful of requests over some time must agree, by their median; the node is
taken for well again when their median is nearer to the past than it was to leave it.

The past is learnt quickly while it is young. Later it follows what is usual slowly (half of the
way, on a log scale, in `HALF_WAY` of work): a node that stays at 0.3 of its speed shows as degraded
for about eight hours of work, and then this is its norm.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from gateway.fleet.speed import SpeedSample, TokenTime

DEGRADED_BELOW = 0.4
"""Share of its usual speed below which a node is degraded."""

RECOVERED_ABOVE = 0.6
"""Share of its usual speed above which it is not any more."""

RECENT_REQUESTS = 9
"""Requests that tell the present speed, by their median."""

LEAST_REQUESTS = 5
"""Fewer prove nothing."""

DEGRADED_AFTER = 20.0
"""Seconds for which they must have shown it: one stall can hit all requests that run."""

DEGRADED_STALE = 600.0
"""Seconds after which nothing but a new request can tell how fast a degraded node is."""

SHARES_KEPT_WHEN_STALE = 2
"""Of its requests so many still count then: three more that are as slow prove it anew."""

BASELINE_HALF_LIFE = 6 * 3600.0
"""Seconds of work in which the past goes half of the way to what became usual."""

FASTER_HALF_LIFE = 1800.0
"""The same where the node has become faster."""

MOST_WORK_GAP = 300.0
"""Seconds between two requests that count as work at most."""

YOUNG_BASELINE = 8
"""Requests of one kind from which its past is a mere average; before, they prove nothing."""

LEAST_PREFILL_TOKENS = 64
"""Shorter reads are mostly overhead."""

LEAST_DECODE_TOKENS = 8

MOST_BASELINES = 64
"""Kinds of requests whose past is kept."""


@dataclass(slots=True)
class SpeedBaseline:
    """The past of one kind of request: the mean of log seconds per token."""

    log_seconds: float = 0.0
    samples: int = 0
    learned_at: float = 0.0
    """When it last learnt; monotonic seconds."""

    def compare(self, log: float, now: float) -> float | None:
        """The usual time over this one (1: as ever, below: slower), and learn; None: too early."""
        if self.samples < YOUNG_BASELINE:
            self.samples += 1
            self.log_seconds += (log - self.log_seconds) / self.samples
            self.learned_at = now
            return None
        faster = self.log_seconds - log
        elapsed = min(now - self.learned_at, MOST_WORK_GAP)
        if elapsed > 0:
            self.learned_at = now
            half_way = BASELINE_HALF_LIFE if faster < 0 else FASTER_HALF_LIFE
            self.log_seconds -= faster * (1 - 0.5 ** (elapsed / half_way))
        return math.exp(max(-50.0, min(50.0, faster)))


@dataclass(slots=True)
class SpeedHistory:
    """Reading or writing: its past by kind, and how the last requests compare with it."""

    baselines: dict[tuple[int, int], SpeedBaseline] = field(default_factory=dict)
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    slow_since: float | None = None
    degraded: bool = False
    compared_at: float = 0.0
    """When it was last compared."""
    usual_tps: float = 0.0
    """Tokens/s that were usual for a request like the last one."""

    @property
    def current_share(self) -> float:
        """The present speed as a share of the usual one."""
        shares = sorted(self.shares)
        return shares[len(shares) // 2] if shares else 1.0

    def learn(self, kind: tuple[int, int], rate: TokenTime, now: float) -> None:
        """Compare one more request, at the best that it can mean."""
        usual = self.baselines.get(kind)
        if usual is None:
            if len(self.baselines) >= MOST_BASELINES:
                return
            usual = self.baselines[kind] = SpeedBaseline()
        share = usual.compare(math.log(rate.low), now)
        if share is None:
            return
        self.shares.append(share)
        self.compared_at = now
        self.usual_tps = math.exp(-usual.log_seconds)
        share = self.current_share
        if share >= RECOVERED_ABOVE or (share >= DEGRADED_BELOW and not self.degraded):
            self.slow_since, self.degraded = None, False
        elif self.slow_since is None:
            self.slow_since = now
        elif len(self.shares) >= LEAST_REQUESTS and now - self.slow_since >= DEGRADED_AFTER:
            self.degraded = True

    def refresh(self, now: float) -> None:
        """Give a node the benefit of the doubt that nobody has asked anything for long."""
        if self.degraded and now - self.compared_at >= DEGRADED_STALE:
            self.degraded = False
            while len(self.shares) > SHARES_KEPT_WHEN_STALE:
                self.shares.popleft()


@dataclass(slots=True)
class DegradationDetector:
    """One node's past and present."""

    prefill: SpeedHistory = field(default_factory=SpeedHistory)
    decode: SpeedHistory = field(default_factory=SpeedHistory)

    @property
    def degraded(self) -> bool:
        """Whether the node is far below its own past."""
        return self.prefill.degraded or self.decode.degraded

    def learn(self, sample: SpeedSample, now: float) -> bool:
        """Take in what a request measured; whether `degraded` has changed."""
        before = self.degraded
        rate = sample.prefill
        if rate is not None and rate.tokens >= LEAST_PREFILL_TOKENS:
            self.prefill.learn((_size(rate.tokens), _size(sample.context_tokens)), rate, now)
        rate = sample.decode
        if (
            rate is not None
            and rate.tokens >= LEAST_DECODE_TOKENS
            and sample.busy_slots is not None
        ):
            kind = (round(2 * math.log2(sample.busy_slots)), _size(sample.context_tokens))
            self.decode.learn(kind, rate, now)
        return self.degraded is not before

    def refresh(self, now: float) -> bool:
        """Look whether time alone changes something; whether `degraded` has changed."""
        before = self.degraded
        self.prefill.refresh(now)
        self.decode.refresh(now)
        return self.degraded is not before

    def server_restarted(self) -> None:
        """The server is back: what slowed it down may have gone with its old process."""
        for course in (self.prefill, self.decode):
            course.shares.clear()
            course.slow_since, course.degraded = None, False

    def forget(self) -> None:
        """Another model or another server: it has no past."""
        self.prefill, self.decode = SpeedHistory(), SpeedHistory()

    def reason(self, now: float, *, endpoint: bool = False) -> str:
        """What is wrong, in words that an operator can act on."""
        told = [
            f"{verb} at {course.current_share:.0%} of its usual speed "
            f"({course.usual_tps * course.current_share:.3g} tokens/s instead of "
            f"{course.usual_tps:.3g}) "
            f"for {_time(now, course)}"
            for verb, course in (("writes", self.decode), ("reads", self.prefill))
            if course.degraded
        ]
        look = (
            "look at the endpoint's load and its rate limits"
            if endpoint
            else "look on its host for swapping, other load, CPU frequency and thermal throttling"
        )
        return f"{' and '.join(told)}: {look}"


def _size(tokens: float) -> int:
    """The class of a length: within one the speeds are alike (a factor of four)."""
    return int(math.log2(max(1.0, tokens)) / 2)


def _time(now: float, course: SpeedHistory) -> str:
    seconds = now - (now if course.slow_since is None else course.slow_since)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
