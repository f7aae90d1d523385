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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.fleet.timings import Rate, Sample

FAR_BELOW = 0.4
"""Share of its usual speed below which a node is degraded."""
WELL_AGAIN = 0.6
"""Share of its usual speed above which it is not any more."""
RECENT = 9
"""Requests that tell the present speed, by their median."""
ENOUGH = 5
"""Fewer prove nothing."""
LASTS = 20.0
"""Seconds for which they must have shown it: one stall can hit all requests that run."""
STALE = 600.0
"""Seconds after which nothing but a new request can tell how fast a degraded node is."""
KEPT_WHEN_STALE = 2
"""Of its requests so many still count then: three more that are as slow prove it anew."""
HALF_WAY = 6 * 3600.0
"""Seconds of work in which the past goes half of the way to what became usual."""
FASTER_HALF_WAY = 1800.0
"""The same where the node has become faster."""
LONGEST_GAP = 300.0
"""Seconds between two requests that count as work at most."""
YOUNG = 8
"""Requests of one kind from which its past is a mere average; before, they prove nothing."""
LEAST_READ = 64
"""Shorter reads are mostly overhead."""
LEAST_WRITTEN = 8
MOST_KINDS = 64
"""Kinds of requests whose past is kept."""


@dataclass(slots=True)
class Usual:
    """The past of one kind of request: the mean of log seconds per token."""

    log: float = 0.0
    seen: int = 0
    at: float = 0.0
    """When it last learnt; monotonic seconds."""

    def compare(self, log: float, now: float) -> float | None:
        """The usual time over this one (1: as ever, below: slower), and learn; None: too early."""
        if self.seen < YOUNG:
            self.seen += 1
            self.log += (log - self.log) / self.seen
            self.at = now
            return None
        faster = self.log - log
        elapsed = min(now - self.at, LONGEST_GAP)
        if elapsed > 0:
            self.at = now
            half_way = HALF_WAY if faster < 0 else FASTER_HALF_WAY
            self.log -= faster * (1 - 0.5 ** (elapsed / half_way))
        return math.exp(max(-50.0, min(50.0, faster)))


@dataclass(slots=True)
class Course:
    """Reading or writing: its past by kind, and how the last requests compare with it."""

    past: dict[tuple[int, int], Usual] = field(default_factory=dict)
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    low_since: float | None = None
    degraded: bool = False
    at: float = 0.0
    """When it was last compared."""
    usual: float = 0.0
    """Tokens/s that were usual for a request like the last one."""

    @property
    def share(self) -> float:
        """The present speed as a share of the usual one."""
        shares = sorted(self.shares)
        return shares[len(shares) // 2] if shares else 1.0

    def learn(self, kind: tuple[int, int], rate: Rate, now: float) -> None:
        """Compare one more request, at the best that it can mean."""
        usual = self.past.get(kind)
        if usual is None:
            if len(self.past) >= MOST_KINDS:
                return
            usual = self.past[kind] = Usual()
        share = usual.compare(math.log(rate.low), now)
        if share is None:
            return
        self.shares.append(share)
        self.at = now
        self.usual = math.exp(-usual.log)
        share = self.share
        if share >= WELL_AGAIN or (share >= FAR_BELOW and not self.degraded):
            self.low_since, self.degraded = None, False
        elif self.low_since is None:
            self.low_since = now
        elif len(self.shares) >= ENOUGH and now - self.low_since >= LASTS:
            self.degraded = True

    def refresh(self, now: float) -> None:
        """Give a node the benefit of the doubt that nobody has asked anything for long."""
        if self.degraded and now - self.at >= STALE:
            self.degraded = False
            while len(self.shares) > KEPT_WHEN_STALE:
                self.shares.popleft()


@dataclass(slots=True)
class Pace:
    """One node's past and present."""

    reading: Course = field(default_factory=Course)
    writing: Course = field(default_factory=Course)

    @property
    def degraded(self) -> bool:
        """Whether the node is far below its own past."""
        return self.reading.degraded or self.writing.degraded

    def learn(self, sample: Sample, now: float) -> bool:
        """Take in what a request measured; whether `degraded` has changed."""
        before = self.degraded
        rate = sample.prefill
        if rate is not None and rate.tokens >= LEAST_READ:
            self.reading.learn((_size(rate.tokens), _size(sample.context)), rate, now)
        rate = sample.decode
        if rate is not None and rate.tokens >= LEAST_WRITTEN and sample.busy is not None:
            kind = (round(2 * math.log2(sample.busy)), _size(sample.context))
            self.writing.learn(kind, rate, now)
        return self.degraded is not before

    def refresh(self, now: float) -> bool:
        """Look whether time alone changes something; whether `degraded` has changed."""
        before = self.degraded
        self.reading.refresh(now)
        self.writing.refresh(now)
        return self.degraded is not before

    def restarted(self) -> None:
        """The server is back: what slowed it down may have gone with its old process."""
        for course in (self.reading, self.writing):
            course.shares.clear()
            course.low_since, course.degraded = None, False

    def forget(self) -> None:
        """Another model or another server: it has no past."""
        self.reading, self.writing = Course(), Course()

    def reason(self, now: float, *, endpoint: bool = False) -> str:
        """What is wrong, in words that an operator can act on."""
        told = [
            f"{verb} at {course.share:.0%} of its usual speed "
            f"({course.usual * course.share:.3g} tokens/s instead of {course.usual:.3g}) "
            f"for {_time(now, course)}"
            for verb, course in (("writes", self.writing), ("reads", self.reading))
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


def _time(now: float, course: Course) -> str:
    seconds = now - (now if course.low_since is None else course.low_since)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
