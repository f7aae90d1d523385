"""What keeps work from a node: a circuit breaker, a pause for a rejected key, a learnt limit.

The limit is that of an endpoint without slots, learnt from its answers. After TCP's congestion
avoidance and Netflix's concurrency-limits (`AIMDLimit`, `VegasLimit`, `Gradient2Limit`):

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
import random
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Literal

from gateway.config.scheduling import HealthSettings

# Share by which an open time varies, so that nodes ejected together do not return together.
OPEN_JITTER = 0.1
# Share of the slots with which a slow start begins (as Envoy's `min_weight_percent`).
SLOW_START_LEAST = 0.1
SLOW_START_STEP = 1.0  # seconds between two looks at a node in slow start
LEAST_DELAY = 0.001  # least seconds to the next look, so that rounding cannot make a busy loop
KEY_REJECTED_SECONDS = 300.0  # seconds without work for a node that has rejected the gateway's key


# Which requests a circuit lets through: all, none, or one on trial.
CircuitPhase = Literal["closed", "open", "half-open"]


@dataclass(slots=True)
class Circuit:
    """One node's breaker. It has no clock and no timer: every method gets the time.

    A request's outcome counts by the time at which the request `began`: one that began before the
    circuit opened proves nothing about the node since then.
    """

    settings: HealthSettings
    rng: random.Random
    failures: int = 0  # failed requests in a row that the node is to blame for
    suspect_callers: set[str] = field(default_factory=set)
    """Callers of failed requests in this row that the request itself may have caused."""
    open_until: float | None = None  # none: closed
    fully_closed: bool = True
    """Whether it lets all requests through, and will until one fails: no slow start."""
    trial: object | None = None
    open_seconds: float = 0.0  # seconds of the last opening, before jitter
    _opened_at: float = -math.inf
    _closed_at: float = -math.inf
    _slow_start_at: float | None = None  # when the slow start began; None: it is over

    def phase(self, now: float) -> CircuitPhase:
        """Which requests it lets through at this moment."""
        if self.open_until is None:
            return "closed"
        return "open" if now < self.open_until else "half-open"

    def wants_trial(self, now: float) -> bool:
        """Whether it is half-open and no request is on trial."""
        return self.open_until is not None and now >= self.open_until and self.trial is None

    def begin_trial(self, lease: object) -> None:
        """This lease's outcome decides whether the circuit closes."""
        self.trial = lease

    def end_trial(self, lease: object) -> None:
        """This lease has ended; if it proved nothing, the next request is on trial."""
        if self.trial is lease:
            self.trial = None

    def record_failure(
        self,
        now: float,
        began: float | None = None,
        *,
        caller: str | None = None,
        node_at_fault: bool = True,
    ) -> bool:
        """Count a failed request of `caller`; True if that opened the circuit.

        Without `node_at_fault` the request itself may have made the node fail. However many such
        requests one caller sends, they count as one failure, and never open the circuit alone.
        """
        began = now if began is None else began
        if began < self._opened_at:
            return False
        if node_at_fault:
            self.suspect_callers.discard(caller or "")
        elif self.open_until is not None:
            return False  # a trial that proves nothing
        else:
            self.suspect_callers.add(caller or "")
        if self.open_until is None:
            self.failures += node_at_fault
            # Without a failure that the node is surely to blame for, it takes two callers.
            least = 1 if self.failures else 2
            if self.failures + len(self.suspect_callers) < max(self.settings.failures, least):
                return False
            reopened = now - self._closed_at < self.settings.open_max
        elif began < self.open_until:
            return False
        else:
            self.failures += 1
            reopened = True
        self.failures += len(self.suspect_callers)
        self.suspect_callers.clear()
        self._open(now, longer=reopened)
        return True

    def record_success(self, now: float, began: float | None = None) -> bool:
        """Count a request that went well; True if that closed the circuit."""
        if self.open_until is None:
            self.failures = 0
            self.suspect_callers.clear()
            return False
        return (now if began is None else began) >= self.open_until and self.close(now)

    def _open(self, now: float, *, longer: bool) -> None:
        """Let nothing through; `longer`: for twice the last time, up to `open_max`."""
        seconds = 2 * self.open_seconds if longer else 0.0
        self.open_seconds = min(
            max(seconds, self.settings.open), max(self.settings.open_max, self.settings.open)
        )
        self._opened_at = now
        self.fully_closed, self.trial = False, None
        self.open_until = now + self.open_seconds * self.rng.uniform(
            1 - OPEN_JITTER, 1 + OPEN_JITTER
        )

    def close(self, now: float) -> bool:
        """Let work in again, with a slow start; True if it was not closed."""
        self.failures = 0
        self.suspect_callers.clear()
        if self.open_until is None:
            return False
        self.open_until = self.trial = None
        self._closed_at = self._slow_start_at = now
        self.fully_closed = False  # Not before the slow start is over.
        return True

    def server_restarted(self, now: float) -> None:
        """The node's server is a new process: close, as the old one's death failed all it ran.

        If the circuit opens again soon afterwards it stays open for its time.
        """
        if self.open_until is not None and self.open_seconds <= self.settings.open:
            self.close(now)

    def configure(self, settings: HealthSettings) -> None:
        """Put changed settings in force."""
        self.settings = settings

    def slow_start_share(self, now: float) -> float:
        """The share of its slots that the node may use in a slow start; (0, 1]."""
        if self._slow_start_at is None:
            return 1.0
        elapsed = now - self._slow_start_at
        if elapsed >= self.settings.slow_start:
            self._slow_start_at = None
            self.fully_closed = self.open_until is None
            return 1.0
        return max(SLOW_START_LEAST, elapsed / self.settings.slow_start)

    def slow_start_slots(self, slots: int, now: float) -> int:
        """How many of these slots may be used in a slow start; at least one."""
        if self._slow_start_at is None:
            return slots
        return max(1, math.ceil(slots * self.slow_start_share(now)))

    def next_change(self, now: float) -> float:
        """When time alone may change what it lets through; infinity: never."""
        if self.open_until is not None:
            return self.open_until if now < self.open_until else math.inf
        if self._slow_start_at is None or self.slow_start_share(now) >= 1.0:
            return math.inf
        left = self._slow_start_at + self.settings.slow_start - now
        return now + min(SLOW_START_STEP, max(LEAST_DELAY, left))


@dataclass(slots=True)
class KeyRejection:
    """Whether a node gets no work because it has rejected the gateway's key.

    Some proxies answer so for one model only. If a request has gone well since the last
    rejection, it takes a second one.
    """

    reason: str = ""  # how the node rejected the key, for an operator
    until: float = -math.inf
    key_worked: bool = False  # whether a request has gone well since the last rejection

    def active(self, now: float) -> bool:
        """Whether the node gets no work at this moment."""
        return now < self.until

    def record_success(self) -> None:
        """A request went well, so the node accepts the key."""
        self.key_worked = True

    def record(self, reason: str, now: float) -> None:
        """A request was refused because the key is wrong (401)."""
        if not self.key_worked:
            self.reason, self.until = reason, now + KEY_REJECTED_SECONDS
        self.key_worked = False

    def clear(self) -> None:
        """The key may have changed: try it."""
        self.until = -math.inf


START_LIMIT = 8
LEAST_LIMIT = 1
MOST_LIMIT = 1024
STEADY_LATENCY = 1.5  # times the least latency up to which the limit may grow
SLOW_LATENCY = 2.0  # times the least latency from which it shrinks
USED_SHARE = 0.8  # share of the limit that a round must have used for the limit to grow
REFUSAL_CUT = 0.7  # share of the limit that a refusal leaves, as in TCP CUBIC (RFC 9438)
REFUSAL_REMEMBERED = 60.0  # seconds for which the limit stays below the one that was refused
# Seconds after which the least latency counts as doubled, unless it is seen again.
LATENCY_STALE = 600.0
# Seconds without new work after a refusal that asks for no pause; doubled with each in a row.
LEAST_OWN_PAUSE = 0.25
MOST_OWN_PAUSE = 30.0  # seconds; the most that the doubling comes to
MOST_PAUSE = 900.0  # seconds; an endpoint that asks for more is tried again after this
# Answers of a round: as many as the limit, but not fewer or more than these.
LEAST_ROUND_ANSWERS, MOST_ROUND_ANSWERS = 5, 64
LEAST_MEDIAN_ANSWERS = 5  # answers of one kind that a median needs
# Share of the difference by which the least latency approaches a lower one.
LEAST_LATENCY_STEP = 0.25
LEAST_DECODE_TOKENS = 8  # tokens of an answer below which its time per token is mostly chance
# Which latency (`whole`, `ttft`, `token`), and the class of the answer's or prompt's length.
AnswerKind = tuple[str, int]


@dataclass(slots=True)
class ConcurrencyLimit:
    """Requests at once for one endpoint. Every method gets the time (monotonic seconds)."""

    value: float = float(START_LIMIT)
    paused_until: float = -math.inf
    _changed_at: float = -math.inf
    """When the limit last changed: answers to earlier requests show another limit's latency."""
    _peak: int = 0  # most requests in flight in this round
    _answers: int = 0
    _latencies: defaultdict[AnswerKind, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=MOST_ROUND_ANSWERS))
    )
    """Seconds of the newest answers of each kind since the limit changed."""
    _least: dict[AnswerKind, tuple[float, float]] = field(default_factory=dict)
    """For each kind the least latency in seconds, and when it was seen."""
    _usual_tokens: float = 128.0  # mean length of recent answers
    _refusals: int = 0  # rounds in a row with a refusal
    _refused_limit: int = MOST_LIMIT
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
        before, pause = (self.slots, self.paused_until), min(retry_after or 0.0, MOST_PAUSE)
        if began >= self._changed_at:
            # Requests sent together are refused together: they count as one refusal.
            self._refusals += 1
            if retry_after is None:
                own = LEAST_OWN_PAUSE * 2.0 ** min(self._refusals - 1, 16)
                pause = min(own, MOST_OWN_PAUSE)
            if crowded:
                self._refused_limit, self._refused_at = self.slots, now
                self._set(self.value * REFUSAL_CUT, now)
            self._changed_at = now
        if pause > 0:
            self.paused_until = max(self.paused_until, now + pause)
        return (self.slots, self.paused_until) != before

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
        before, slowness = self.slots, self._slowness(now)
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
            known, seen_at = self._least.get(kind, (median, now))
            lowest = known * 2 ** ((now - seen_at) / LATENCY_STALE)
            if median <= lowest:
                self._least[kind] = lowest + LEAST_LATENCY_STEP * (median - lowest), now
                lowest = median
            weight = len(seconds) * (self._usual_tokens if kind[0] == "token" else 1.0)
            present += weight * median
            least += weight * lowest
        return present / least if least else 1.0

    def _set(self, value: float, now: float) -> None:
        self.value = min(max(value, float(LEAST_LIMIT)), float(MOST_LIMIT))
        self._changed_at = now
        self._latencies.clear()
        self._answers = self._peak = 0
