"""How many requests at once an endpoint without slots can take: learnt from its answers.

After TCP's congestion avoidance and Netflix's concurrency-limits (`AIMDLimit`, `VegasLimit`,
`Gradient2Limit`):

- the limit grows by its square root each round while all of it is used and latency is steady, and
  by one after the endpoint has refused anything (429, 503);
- a refusal cuts it to 0.7 of its value, and it stays below the refused value for a minute;
- latency is compared with the least that was seen, as in Vegas: TTFT among prompts of about the
  same length and the time per token, or for answers in one piece the time of those of about the
  same length. Up to 1.5 times the least latency the limit may grow; from 2 times it shrinks in
  proportion, at most to a half. Medians of whole answers are compared, and the least follows a
  lower one by steps, so that some cached prompts do not pass for the usual latency;
- a pause that the endpoint asks for (`Retry-After`) is kept; if it refuses again and again without
  asking for one, its pauses get longer and longer.
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
"""Share of the limit that a refusal leaves, as in TCP CUBIC (RFC 9438)."""

REFUSAL_REMEMBERED = 60.0
"""Seconds for which the limit stays below the one that was refused."""

LATENCY_STALE = 600.0
"""Seconds after which the least latency counts as doubled, unless it is seen again."""

LEAST_OWN_PAUSE = 0.25
"""Seconds without new work after a refusal that asks for no pause; doubled with each in a row."""

MOST_OWN_PAUSE = 30.0
"""Seconds; the most that the doubling comes to."""

MOST_PAUSE = 900.0
"""Seconds; an endpoint that asks for more is tried again after this."""

LEAST_ROUND_ANSWERS, MOST_ROUND_ANSWERS = 5, 64
"""Answers of a round: as many as the limit, but not fewer or more than these."""

LEAST_MEDIAN_ANSWERS = 5
"""Answers of one kind that a median needs."""

LEAST_LATENCY_STEP = 0.25
"""Share of the difference by which the least latency approaches a lower one."""

LEAST_DECODE_TOKENS = 8
"""Tokens of an answer below which its time per token is mostly chance."""

AnswerKind = tuple[str, int]
"""Which latency (`whole`, `ttft`, `token`), and the class of the answer's or prompt's length."""


@dataclass(slots=True)
class ConcurrencyLimit:
    """Requests at once for one endpoint. Every method gets the time (monotonic seconds)."""

    value: float = float(START_LIMIT)
    paused_until: float = -math.inf
    _changed_at: float = -math.inf
    """When the limit last changed: answers to earlier requests show another limit's latency."""
    _peak: int = 0
    """Most requests in flight in this round."""
    _answers: int = 0
    """Answers in this round."""
    _latencies: defaultdict[AnswerKind, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=MOST_ROUND_ANSWERS))
    )
    """Seconds of the newest answers of each kind since the limit changed."""
    _least: dict[AnswerKind, LeastLatency] = field(default_factory=dict)
    _usual_tokens: float = 128.0
    """Mean length of recent answers."""
    _refusals: int = 0
    """Rounds in a row with a refusal."""
    _refused_limit: int = MOST_LIMIT
    """The limit that was last refused."""
    _refused_at: float = -math.inf

    @property
    def slots(self) -> int:
        """Requests that the endpoint may be given at once."""
        return int(self.value)

    def paused(self, now: float) -> bool:
        """Whether the endpoint gets no new work at this moment."""
        return now < self.paused_until

    def record_in_flight(self, in_flight: int) -> None:
        """So many requests are in flight now, the newest included."""
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
        """Count a whole answer to a request that `began` then; whether `slots` has changed.

        `ttft`: seconds to its first token, None if it came in one piece. `prompt_tokens` that had
        to be read; `completion_tokens` written.
        """
        self._refusals = 0
        if began < self._changed_at:
            return False
        seconds = now - began
        self._answers += 1
        if ttft is None:
            self._note("whole", completion_tokens, seconds)
        else:
            self._note("ttft", prompt_tokens, ttft)
            if completion_tokens >= LEAST_DECODE_TOKENS:
                self._usual_tokens += (completion_tokens - self._usual_tokens) / 16
                self._note("token", 0, (seconds - ttft) / (completion_tokens - 1))
        if self._answers < min(max(self.slots, LEAST_ROUND_ANSWERS), MOST_ROUND_ANSWERS):
            return False
        if self._answers < MOST_ROUND_ANSWERS and not self._enough_known():
            return False
        return self._end_round(now)

    def record_refusal(
        self, began: float, now: float, retry_after: float | None = None, *, crowded: bool = True
    ) -> bool:
        """Count a 402, 429 or 503 to a request that `began` then; whether limit or pause changed.

        `retry_after`: seconds for which the endpoint asks for no new work, if it does. `crowded`:
        whether the reason is the number of requests; out of credit (402) it refuses any.
        """
        before = self.slots, self.paused_until
        if retry_after is not None and retry_after > 0:
            self._pause(now + min(retry_after, MOST_PAUSE))
        if began >= self._changed_at:
            # Requests sent together are refused together: they count as one refusal.
            self._refusals += 1
            if retry_after is None:
                own = LEAST_OWN_PAUSE * 2.0 ** min(self._refusals - 1, 16)
                self._pause(now + min(own, MOST_OWN_PAUSE))
            if crowded:
                self._refused_limit, self._refused_at = self.slots, now
                self._set(self.value * REFUSAL_CUT, now)
            self._changed_at = now
        return (self.slots, self.paused_until) != before

    def _pause(self, until: float) -> None:
        self.paused_until = max(self.paused_until, until)

    def _note(self, latency: str, tokens: float, seconds: float) -> None:
        if not (0 <= seconds < math.inf and 0 <= tokens < math.inf):
            return
        size = int(math.log(max(1.0, tokens / 16), 4))  # 16, 64, 256, ... tokens
        self._latencies[latency, min(size, 10)].append(max(seconds, 1e-6))

    def _enough_known(self) -> bool:
        """Whether most answers since the limit changed are of kinds with enough for a median."""
        kinds = [len(seconds) for kind, seconds in self._latencies.items() if kind[0] != "token"]
        return 2 * sum(count for count in kinds if count >= LEAST_MEDIAN_ANSWERS) >= sum(kinds)

    def _end_round(self, now: float) -> bool:
        """Grow or shrink the limit; whether `slots` has changed."""
        before = self.slots
        slowness = self._slowness(now)
        used = self._peak >= USED_SHARE * self.slots
        self._answers = self._peak = 0
        if slowness > SLOW_LATENCY:
            self._set(self.value * max(0.5, SLOW_LATENCY / slowness), now)
        elif slowness <= STEADY_LATENCY and used:
            ever_refused = self._refused_at > -math.inf
            grown = self.value + (1.0 if ever_refused else math.sqrt(self.value))
            if now - self._refused_at < REFUSAL_REMEMBERED:
                grown = min(grown, max(self.value, self._refused_limit - 1))
            if grown > self.value:
                self._set(grown, now)
        return self.slots != before

    def _slowness(self, now: float) -> float:
        """Present latency over the least latency, for a usual answer."""
        present = least = 0.0
        for kind, seconds in self._latencies.items():
            if len(seconds) < LEAST_MEDIAN_ANSWERS:
                continue
            median = statistics.median(seconds)
            lowest = self._least.setdefault(kind, LeastLatency(median, now)).after(median, now)
            weight = len(seconds) * (self._usual_tokens if kind[0] == "token" else 1.0)
            present += weight * median
            least += weight * lowest
        return present / least if least else 1.0

    def _set(self, value: float, now: float) -> None:
        self.value = min(max(value, float(LEAST_LIMIT)), float(MOST_LIMIT))
        self._changed_at = now
        self._latencies.clear()
        self._answers = self._peak = 0


@dataclass(slots=True)
class LeastLatency:
    """The least latency seen for one kind of answer."""

    seconds: float
    seen_at: float

    def after(self, median: float, now: float) -> float:
        """Take in the median of a round; returns the least latency at this moment."""
        least = self.seconds * 2 ** ((now - self.seen_at) / LATENCY_STALE)
        if median <= least:
            self.seconds = least + LEAST_LATENCY_STEP * (median - least)
            self.seen_at = now
        return min(least, median)
