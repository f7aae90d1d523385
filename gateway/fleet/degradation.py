"""Whether a node is far slower than it used to be: it swaps, its host is busy, it is throttled.

Like is compared with like: the time of a token with others at as many busy slots and as much text
in the slot, the prefill of a prompt with those of about its length. So neither more load nor longer
prompts make a node look degraded. A handful of requests over some time must agree, by their median.
To recover, the median must come nearer to the usual speed than the value at which it was degraded.

The usual speed (the baseline) is learnt quickly at first. Later it follows slowly: half of the way,
on a log scale, in `BASELINE_HALF_LIFE` of work. A node that stays at 0.3 of its speed is degraded
for about eight hours of work; then this is its usual speed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from gateway.fleet.speed import SpeedSample, TokenTime

DEGRADED_BELOW = 0.4
"""Share of its usual speed below which a node is degraded."""

RECOVERED_ABOVE = 0.6
"""Share of its usual speed above which a degraded node has recovered."""

RECENT_REQUESTS = 9
"""Requests whose median is the present speed."""

LEAST_REQUESTS = 5
"""Fewer requests prove nothing."""

DEGRADED_AFTER = 15.0
"""Seconds for which requests must have been slow: one stall can hit all that run."""

DEGRADED_STALE = 600.0
"""Seconds without a request after which a degraded node counts as recovered."""

SHARES_KEPT_WHEN_STALE = 2
"""Requests that still count then, so that three more slow ones prove it again."""

BASELINE_HALF_LIFE = 6 * 3600.0
"""Seconds of work in which the baseline goes half of the way to a lower speed."""

FASTER_HALF_LIFE = 1800.0
"""The same for a higher speed."""

MOST_WORK_GAP = 300.0
"""Most seconds between two requests that count as work."""

LEAST_ALLOWED_SHARE = 0.5
"""Share of a measured time that a baseline takes at least, whatever neighbours are believed to have
taken of it. It is above `DEGRADED_BELOW`: where that belief was wrong, later requests without such
neighbours do not look degraded."""

YOUNG_BASELINE = 8
"""First requests of a kind: they make its baseline and are not compared."""

LEAST_PREFILL_TOKENS = 64
"""Shorter prefills are mostly overhead."""

LEAST_DECODE_TOKENS = 8
"""Shorter decodes are mostly chance."""

MOST_BASELINES = 64
"""Kinds of requests with a baseline."""


@dataclass(slots=True)
class SpeedBaseline:
    """The usual speed for one kind of request."""

    log_seconds: float = 0.0
    """Mean logarithm of the seconds per token."""
    samples: int = 0
    learned_at: float = 0.0
    """When it last learnt; monotonic seconds."""

    def compare(self, rate: TokenTime, now: float) -> float | None:
        """A request's speed as a share of the usual one, and learn from it; None: too early."""
        learned = math.log(max(rate.low, LEAST_ALLOWED_SHARE * rate.high))
        if self.samples < YOUNG_BASELINE:
            self.samples += 1
            self.log_seconds += (learned - self.log_seconds) / self.samples
            self.learned_at = now
            return None
        faster = self.log_seconds - math.log(rate.low)
        elapsed = min(now - self.learned_at, MOST_WORK_GAP)
        if elapsed > 0:
            self.learned_at = now
            half_life = BASELINE_HALF_LIFE if learned > self.log_seconds else FASTER_HALF_LIFE
            self.log_seconds += (learned - self.log_seconds) * (1 - 0.5 ** (elapsed / half_life))
        return math.exp(max(-50.0, min(50.0, faster)))


@dataclass(slots=True)
class SpeedHistory:
    """Prefill or decode: baselines by kind of request, and the last requests' shares of them."""

    baselines: dict[tuple[int, int], SpeedBaseline] = field(default_factory=dict)
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    slow_since: float | None = None
    """Since when the present speed is too low: the end of the first of the slow requests."""
    row_since: float | None = None
    """End of the first of the slow requests that no other request has come between."""
    degraded: bool = False
    compared_at: float = 0.0
    """When a request was last compared."""
    usual_tps: float = 0.0
    """Usual tokens/s of a request like the last one."""

    @property
    def current_share(self) -> float:
        """The present speed as a share of the usual one."""
        shares = sorted(self.shares)
        return shares[len(shares) // 2] if shares else 1.0

    def learn(self, kind: tuple[int, int], rate: TokenTime, now: float) -> None:
        """Compare one more request, by the fastest speed that its measurement allows.

        Doubt is the node's: what is learnt from it is less fast.
        """
        baseline = self.baselines.get(kind)
        if baseline is None:
            if len(self.baselines) >= MOST_BASELINES:
                return
            baseline = self.baselines[kind] = SpeedBaseline()
        share = baseline.compare(rate, now)
        if share is None:
            return
        self.shares.append(share)
        idle, self.compared_at = now - self.compared_at > MOST_WORK_GAP, now
        self.usual_tps = math.exp(-baseline.log_seconds)
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

    def export(self) -> list[UsualSpeed]:
        """The usual speeds, by kind of request."""
        return [
            UsualSpeed(*kind, one.log_seconds, one.samples) for kind, one in self.baselines.items()
        ]

    def restore(self, usual: list[UsualSpeed], kept: float, now: float) -> None:
        """Go on from these; with a smaller share `kept`, the next requests change them sooner."""
        self.baselines = {
            (one.first, one.second): SpeedBaseline(one.log_seconds, round(one.samples * kept), now)
            for one in usual[:MOST_BASELINES]
        }

    def forget_recent(self) -> None:
        """Keep the baselines only."""
        self.shares.clear()
        self.slow_since, self.row_since, self.degraded = None, None, False


class UsualSpeed(msgspec.Struct, frozen=True, array_like=True):
    """A `SpeedBaseline` and its kind of request, as they outlive their process."""

    first: int
    second: int
    log_seconds: Annotated[float, msgspec.Meta(ge=-50, le=50)]
    samples: Annotated[int, msgspec.Meta(ge=0, le=YOUNG_BASELINE)]


class UsualSpeeds(msgspec.Struct, frozen=True):
    """What a `DegradationDetector` knows of a node, as it outlives its process."""

    prefill: list[UsualSpeed]
    decode: list[UsualSpeed]


@dataclass(slots=True)
class DegradationDetector:
    """The usual and the present speed of one node, for prefill and decode."""

    prefill: SpeedHistory = field(default_factory=SpeedHistory)
    decode: SpeedHistory = field(default_factory=SpeedHistory)

    @property
    def degraded(self) -> bool:
        """Whether the node is far slower than usual."""
        return self.prefill.degraded or self.decode.degraded

    def learn(self, sample: SpeedSample, now: float) -> bool:
        """Compare what a request measured; whether `degraded` has changed."""
        before = self.degraded
        rate = sample.prefill
        if rate is not None and rate.tokens >= LEAST_PREFILL_TOKENS:
            self.prefill.learn(
                (_size_class(rate.tokens), _size_class(sample.context_tokens)), rate, now
            )
        rate = sample.decode
        if (
            rate is not None
            and rate.tokens >= LEAST_DECODE_TOKENS
            and sample.busy_slots is not None
        ):
            kind = (round(2 * math.log2(sample.busy_slots)), _size_class(sample.context_tokens))
            self.decode.learn(kind, rate, now)
        return self.degraded is not before

    def refresh(self, now: float) -> bool:
        """Take in that time has passed; whether `degraded` has changed."""
        before = self.degraded
        self.prefill.refresh(now)
        self.decode.refresh(now)
        return self.degraded is not before

    def export(self) -> UsualSpeeds:
        """The usual speeds."""
        return UsualSpeeds(self.prefill.export(), self.decode.export())

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
        self.prefill, self.decode = SpeedHistory(), SpeedHistory()

    def reason(self, now: float, *, endpoint: bool = False) -> str:
        """What is wrong, in words that an operator can act on."""
        findings = [
            f"{verb} at {history.current_share:.0%} of its usual speed "
            f"({history.usual_tps * history.current_share:.3g} tokens/s instead of "
            f"{history.usual_tps:.3g}) "
            f"for {_duration(now, history)}"
            for verb, history in (("writes", self.decode), ("reads", self.prefill))
            if history.degraded
        ]
        advice = (
            "look at the endpoint's load and its rate limits"
            if endpoint
            else "look on its host for swapping, other load, CPU frequency and thermal throttling"
        )
        return f"{' and '.join(findings)}: {advice}"


def _size_class(tokens: float) -> int:
    """The class of a length, a factor of four wide: within one the speeds are alike."""
    return int(math.log2(max(1.0, tokens)) / 2)


def _duration(now: float, history: SpeedHistory) -> str:
    seconds = now - (now if history.slow_since is None else history.slow_since)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
