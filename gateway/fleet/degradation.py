"""Whether a node is far slower than it used to be: it swaps, its host is busy, it is throttled.

Like is compared with like: the time of a token with others at as many busy slots and as much text
in the slot, the prefill of a prompt with those of about its length. So neither more load nor longer
prompts make a node look degraded. A handful of requests over some time must agree, by their median.
A span of a running stream counts as one, by the events that have come: long answers of a slow node
end late. An event holds about as many tokens as in streams before. Spans in which others' requests
run on the node, or the client lags, prove nothing.
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

from gateway.fleet.speed import ObservedTiming, SpeedSample, TokenTime, sample_from_clock

DEGRADED_BELOW = 0.4
"""Share of its usual speed below which a node is degraded."""

RECOVERED_ABOVE = 0.6
"""Share of its usual speed above which a degraded node has recovered."""

RECENT_REQUESTS = 9
"""Requests whose median is the present speed."""

LEAST_REQUESTS = 5
"""Fewer requests prove nothing."""

DEGRADED_AFTER = 12.0
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

MOST_TOKENS_PER_EVENT = 64.0

MOST_DOUBT = 1.5
"""A stream whose events held so many times more tokens than was known has not shown its speed."""

EVENT_LEARNING = 1 / 32
"""Share of the way to a lower `tokens_per_event` that one stream makes."""

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

    @property
    def is_young(self) -> bool:
        """Whether too few requests have made it to compare others with it."""
        return self.samples < YOUNG_BASELINE

    def learn(self, rate: TokenTime, now: float) -> None:
        """Learn from a request."""
        learned = math.log(max(rate.low, LEAST_ALLOWED_SHARE * rate.high))
        if self.is_young:
            self.samples += 1
            self.log_seconds += (learned - self.log_seconds) / self.samples
            self.learned_at = now
            return
        elapsed = min(now - self.learned_at, MOST_WORK_GAP)
        if elapsed > 0:
            self.learned_at = now
            half_life = BASELINE_HALF_LIFE if learned > self.log_seconds else FASTER_HALF_LIFE
            self.log_seconds += (learned - self.log_seconds) * (1 - 0.5 ** (elapsed / half_life))


def _is_slow(share: float | None) -> bool:
    return share is not None and share < DEGRADED_BELOW


def _share(usual: float, rate: TokenTime) -> float:
    """A request's speed as a share of the usual one, whose seconds have the logarithm `usual`."""
    return math.exp(max(-50.0, min(50.0, usual - math.log(rate.low))))


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
    bounded: bool = False
    """Whether kinds are busy slots and contexts, so that one bounds another (`_usual`)."""
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

        Doubt is the node's: what is learnt from it is less fast. A kind that is new does not learn
        its usual speed while the node is slow.
        """
        baseline = self.baselines.get(kind)
        if baseline is None:
            if len(self.baselines) >= MOST_BASELINES:
                return
            baseline = self.baselines[kind] = SpeedBaseline()
        usual = self._usual(kind)
        share = None if usual is None else _share(usual, rate)
        if not baseline.is_young or (self.slow_since is None and not _is_slow(share)):
            baseline.learn(rate, now)
        if usual is not None and share is not None:
            self._judge(share, usual, now)

    def watch(self, kind: tuple[int, int], rate: TokenTime, now: float) -> None:
        """Compare a span of a running request, from which no usual speed is learnt."""
        usual = self._usual(kind)
        if usual is not None:
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
        return min(
            [
                known.log_seconds
                + math.log(2) * (max(0, busy - other) / 2 + max(0, context - text))
                for (other, text), known in self.baselines.items()
                if not known.is_young
            ],
            default=None,
        )

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


_Class = Annotated[int, msgspec.Meta(ge=-64, le=64)]


class UsualSpeed(msgspec.Struct, frozen=True, array_like=True):
    """A `SpeedBaseline` and its kind of request, as they outlive their process."""

    first: _Class
    second: _Class
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
    decode: SpeedHistory = field(default_factory=lambda: SpeedHistory(bounded=True))
    tokens_per_event: float = 1.0
    """Tokens that an event of a stream holds: the most lately, since it depends on the text."""

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
            self.decode.learn(_decode_kind(sample), rate, now)
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
        self.prefill, self.decode = SpeedHistory(), SpeedHistory(bounded=True)

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


def _decode_kind(sample: SpeedSample) -> tuple[int, int]:
    """Busy slots and text: tokens of one kind take about as long."""
    return round(2 * math.log2(sample.busy_slots or 1.0)), _size_class(sample.context_tokens)


def _size_class(tokens: float) -> int:
    """The class of a length, a factor of four wide: within one the speeds are alike."""
    return int(math.log2(max(1.0, tokens)) / 2)


def _duration(now: float, history: SpeedHistory) -> str:
    seconds = now - (now if history.slow_since is None else history.slow_since)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
