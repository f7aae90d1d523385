"""How much an endpoint takes at once that has no slots to tell of: found by trying.

After TCP's congestion avoidance and Netflix's concurrency-limits (`AIMDLimit`, `VegasLimit`,
`Gradient2Limit`):

- the limit grows by its square root each round while all of it is used and nothing slows down,
  by one once the endpoint has refused anything (429, 503);
- a refusal takes it to 0.7 of what it was, and for a minute it stays below that;
- latency is set against the least that was seen, as in Vegas: the time to the first token among
  prompts of about the same length and the time per token, or for answers in one piece the time of
  those of about the same length. Up to 1.5 times the least the limit may grow, from 2 times it
  shrinks in proportion, at most to a half. What is compared is the time of a whole answer, of
  medians, and the least follows a lower one by steps: prompts found in a cache here and there
  must not pass for what is usual;
- a pause that the endpoint asks for (`Retry-After`) is kept; one that refuses again and again
  without asking for one gets longer and longer pauses.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field

START_LIMIT = 8

LEAST_LIMIT = 1

MOST_LIMIT = 1024

STEADY_LATENCY = 1.5
"""Times the least latency up to which the limit may grow."""

SLOW_LATENCY = 2.0
"""Times the least latency from which it shrinks."""

USED_SHARE = 0.8
"""Share of the limit that a round must have used for the limit to grow."""

REFUSAL_CUT = 0.7
"""What a refusal leaves of the limit, as in TCP CUBIC (RFC 9438)."""

REFUSAL_REMEMBERED = 60.0
"""Seconds for which the limit stays below the one that was refused."""

LATENCY_STALE = 600.0
"""Seconds in which the least latency, unless it is seen again, is believed to have doubled."""

LEAST_OWN_PAUSE = 0.25
"""Seconds without new work after a refusal that asks for none; doubles with each in a row, up to"""

MOST_OWN_PAUSE = 30.0

MOST_PAUSE = 900.0
"""Seconds; an endpoint that asks for more is tried again after this."""

LEAST_ROUND_ANSWERS, MOST_ROUND_ANSWERS = 5, 64
"""Answers that a round waits for: as many as the limit, within these."""

LEAST_MEDIAN_ANSWERS = 5
"""Answers of one kind that a median needs."""

LEAST_LATENCY_STEP = 0.25
"""Share of the way that the least latency goes towards a lower one."""

LEAST_PACE_TOKENS = 8
"""Tokens of an answer below which its pace is mostly chance."""

AnswerKind = tuple[str, int]


@dataclass(slots=True)
class _LeastLatency:
    """The least latency seen of one kind of answers."""

    seconds: float
    seen: float

    def after(self, level: float, now: float) -> float:
        """The least, now that this median has been seen."""
        least = self.seconds * 2 ** ((now - self.seen) / LATENCY_STALE)
        if level <= least:
            self.seconds, self.seen = least + LEAST_LATENCY_STEP * (level - least), now
        return min(least, level)


@dataclass(slots=True)
class ConcurrencyLimit:
    """Requests at once for one endpoint. Told the time (monotonic seconds) with each call."""

    value: float = float(START_LIMIT)
    paused_until: float = -math.inf
    _changed: float = -math.inf
    """Answers to what began before this tell of another limit."""
    _peak: int = 0
    """The most that was out at once in this round."""
    _answers: int = 0
    _seconds: defaultdict[AnswerKind, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=MOST_ROUND_ANSWERS))
    )
    """Of the answers since it changed, the newest of each kind."""
    _least: dict[AnswerKind, _LeastLatency] = field(default_factory=dict)
    _tokens: float = 128.0
    """Length of a usual answer."""
    _refusals: int = 0
    """In a row, each round's counted once."""
    _refused_at: int = MOST_LIMIT
    """The limit that was refused last."""
    _refused: float = -math.inf

    @property
    def slots(self) -> int:
        """Requests that it may be given at once."""
        return int(self.value)

    def paused(self, now: float) -> bool:
        """Whether it gets no new work at this moment."""
        return now < self.paused_until

    def record_in_flight(self, in_flight: int) -> None:
        """So many requests are out now, the newest included."""
        self._peak = max(self._peak, in_flight)

    def record_success(
        self,
        began: float,
        now: float,
        *,
        ttft: float | None,
        prompt_tokens: float,
        completion_tokens: float,
    ) -> bool:
        """Take in a whole answer to a request that `began` then; whether `slots` has changed.

        `first`: seconds to its first token, None where it came in one piece. `prompt`: tokens
        that had to be read; `completion`: tokens written.
        """
        self._refusals = 0
        if began < self._changed:
            return False
        seconds = now - began
        self._answers += 1
        if ttft is None:
            self._note("whole", completion_tokens, seconds)
        else:
            self._note("first", prompt_tokens, ttft)
            if completion_tokens >= LEAST_PACE_TOKENS:
                self._tokens += (completion_tokens - self._tokens) / 16
                self._note("pace", 0, (seconds - ttft) / (completion_tokens - 1))
        if self._answers < min(max(self.slots, LEAST_ROUND_ANSWERS), MOST_ROUND_ANSWERS):
            return False
        if self._answers < MOST_ROUND_ANSWERS and not self._tells():
            return False
        return self._end_round(now)

    def record_refusal(self, began: float, now: float, retry_after: float | None = None) -> bool:
        """Take in a 429 or 503 to a request that `began` then; whether anything has changed.

        `retry_after`: seconds that the endpoint asks to be left alone, if it says so.
        """
        before = self.slots, self.paused_until
        if retry_after is not None and retry_after > 0:
            self._pause(now + min(retry_after, MOST_PAUSE))
        if began >= self._changed:
            # Those sent together are refused together: that is one sign, not many.
            self._refusals += 1
            if retry_after is None:
                own = LEAST_OWN_PAUSE * 2.0 ** min(self._refusals - 1, 16)
                self._pause(now + min(own, MOST_OWN_PAUSE))
            self._refused_at, self._refused = self.slots, now
            self._set(self.value * REFUSAL_CUT, now)
        return (self.slots, self.paused_until) != before

    def _pause(self, until: float) -> None:
        self.paused_until = max(self.paused_until, until)

    def _note(self, what: str, tokens: float, seconds: float) -> None:
        if not (0 <= seconds < math.inf and 0 <= tokens < math.inf):
            return
        size = int(math.log(max(1.0, tokens / 16), 4))  # 16, 64, 256, ... tokens
        self._seconds[what, min(size, 10)].append(max(seconds, 1e-6))

    def _tells(self) -> bool:
        """Whether enough is known of most of the answers since the limit is what it is."""
        kinds = [len(of) for kind, of in self._seconds.items() if kind[0] != "pace"]
        return 2 * sum(count for count in kinds if count >= LEAST_MEDIAN_ANSWERS) >= sum(kinds)

    def _end_round(self, now: float) -> bool:
        before = self.slots
        slowness = self._slowness(now)
        used = self._peak >= USED_SHARE * self.slots
        self._answers = self._peak = 0
        if slowness > SLOW_LATENCY:
            self._set(self.value * max(0.5, SLOW_LATENCY / slowness), now)
        elif slowness <= STEADY_LATENCY and used:
            careful = self._refused > -math.inf
            grown = self.value + (1.0 if careful else math.sqrt(self.value))
            if now - self._refused < REFUSAL_REMEMBERED:
                grown = min(grown, max(self.value, self._refused_at - 1))
            if grown > self.value:
                self._set(grown, now)
        return self.slots != before

    def _slowness(self, now: float) -> float:
        """How many times the least latency answers take, since the limit is what it is."""
        taken = least = 0.0
        for kind, seconds in self._seconds.items():
            if len(seconds) < LEAST_MEDIAN_ANSWERS:
                continue
            level = statistics.median(seconds)
            lowest = self._least.setdefault(kind, _LeastLatency(level, now)).after(level, now)
            weight = len(seconds) * (self._tokens if kind[0] == "pace" else 1.0)
            taken += weight * level
            least += weight * lowest
        return taken / least if least else 1.0

    def _set(self, value: float, now: float) -> None:
        self.value = min(max(value, float(LEAST_LIMIT)), float(MOST_LIMIT))
        self._changed = now
        self._seconds.clear()
        self._answers = self._peak = 0
