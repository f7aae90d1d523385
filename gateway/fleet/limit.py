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

START = 8
LEAST = 1
MOST = 1024

STEADY = 1.5
"""Times the least latency up to which the limit may grow."""
SLOW = 2.0
"""Times the least latency from which it shrinks."""
USED = 0.8
"""Share of the limit that a round must have used for the limit to grow."""
CUT = 0.7
"""What a refusal leaves of the limit, as in TCP CUBIC (RFC 9438)."""
REMEMBERED = 60.0
"""Seconds for which the limit stays below the one that was refused."""
STALE = 600.0
"""Seconds in which the least latency, unless it is seen again, is believed to have doubled."""

FIRST_PAUSE = 0.25
"""Seconds without new work after a refusal that asks for none; doubles with each in a row, up to"""
LONGEST_OWN_PAUSE = 30.0
LONGEST_PAUSE = 900.0
"""Seconds; an endpoint that asks for more is tried again after this."""

ROUND_LEAST, ROUND_MOST = 5, 64
"""Answers that a round waits for: as many as the limit, within these."""
ENOUGH = 5
"""Answers of one kind that a median needs."""
STEP = 0.25
"""Share of the way that the least latency goes towards a lower one."""
SHORT_ANSWER = 8
"""Tokens of an answer below which its pace is mostly chance."""

Kind = tuple[str, int]


@dataclass(slots=True)
class _Least:
    """The least latency seen of one kind of answers."""

    seconds: float
    seen: float

    def after(self, level: float, now: float) -> float:
        """The least, now that this median has been seen."""
        least = self.seconds * 2 ** ((now - self.seen) / STALE)
        if level <= least:
            self.seconds, self.seen = least + STEP * (level - least), now
        return min(least, level)


@dataclass(slots=True)
class Limit:
    """Requests at once for one endpoint. Told the time (monotonic seconds) with each call."""

    value: float = float(START)
    paused_until: float = -math.inf
    _changed: float = -math.inf
    """Answers to what began before this tell of another limit."""
    _peak: int = 0
    """The most that was out at once in this round."""
    _answers: int = 0
    _seconds: defaultdict[Kind, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=ROUND_MOST))
    )
    """Of the answers since it changed, the newest of each kind."""
    _least: dict[Kind, _Least] = field(default_factory=dict)
    _tokens: float = 128.0
    """Length of a usual answer."""
    _refusals: int = 0
    """In a row, each round's counted once."""
    _refused_at: int = MOST
    """The limit that was refused last."""
    _refused: float = -math.inf

    @property
    def slots(self) -> int:
        """Requests that it may be given at once."""
        return int(self.value)

    def paused(self, now: float) -> bool:
        """Whether it gets no new work at this moment."""
        return now < self.paused_until

    def took(self, out: int) -> None:
        """So many requests are out now, the newest included."""
        self._peak = max(self._peak, out)

    def answered(
        self,
        began: float,
        now: float,
        *,
        first: float | None,
        prompt: float,
        completion: float,
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
        if first is None:
            self._note("whole", completion, seconds)
        else:
            self._note("first", prompt, first)
            if completion >= SHORT_ANSWER:
                self._tokens += (completion - self._tokens) / 16
                self._note("pace", 0, (seconds - first) / (completion - 1))
        if self._answers < min(max(self.slots, ROUND_LEAST), ROUND_MOST):
            return False
        if self._answers < ROUND_MOST and not self._tells():
            return False
        return self._end_round(now)

    def refused(self, began: float, now: float, retry_after: float | None = None) -> bool:
        """Take in a 429 or 503 to a request that `began` then; whether anything has changed.

        `retry_after`: seconds that the endpoint asks to be left alone, if it says so.
        """
        before = self.slots, self.paused_until
        if retry_after is not None and retry_after > 0:
            self._pause(now + min(retry_after, LONGEST_PAUSE))
        if began >= self._changed:
            # Those sent together are refused together: that is one sign, not many.
            self._refusals += 1
            if retry_after is None:
                own = FIRST_PAUSE * 2.0 ** min(self._refusals - 1, 16)
                self._pause(now + min(own, LONGEST_OWN_PAUSE))
            self._refused_at, self._refused = self.slots, now
            self._set(self.value * CUT, now)
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
        return 2 * sum(count for count in kinds if count >= ENOUGH) >= sum(kinds)

    def _end_round(self, now: float) -> bool:
        before = self.slots
        slowness = self._slowness(now)
        used = self._peak >= USED * self.slots
        self._answers = self._peak = 0
        if slowness > SLOW:
            self._set(self.value * max(0.5, SLOW / slowness), now)
        elif slowness <= STEADY and used:
            careful = self._refused > -math.inf
            grown = self.value + (1.0 if careful else math.sqrt(self.value))
            if now - self._refused < REMEMBERED:
                grown = min(grown, max(self.value, self._refused_at - 1))
            if grown > self.value:
                self._set(grown, now)
        return self.slots != before

    def _slowness(self, now: float) -> float:
        """How many times the least latency answers take, since the limit is what it is."""
        taken = least = 0.0
        for kind, seconds in self._seconds.items():
            if len(seconds) < ENOUGH:
                continue
            level = statistics.median(seconds)
            lowest = self._least.setdefault(kind, _Least(level, now)).after(level, now)
            weight = len(seconds) * (self._tokens if kind[0] == "pace" else 1.0)
            taken += weight * level
            least += weight * lowest
        return taken / least if least else 1.0

    def _set(self, value: float, now: float) -> None:
        self.value = min(max(value, float(LEAST)), float(MOST))
        self._changed = now
        self._seconds.clear()
        self._answers = self._peak = 0
