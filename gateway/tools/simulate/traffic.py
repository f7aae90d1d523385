"""Generated traffic: conversations of chat users, which share system prompts.

Conversations begin as a Poisson process and have a geometric number of turns. The prompt of a turn
is the tenant's system prompt, the conversation so far and a new question. A person reads the
answer, thinks, and asks again; if the answer is late, once it has come. So the load is the same
under every policy, as long as the fleet can bear it. Lengths of questions and answers are
log-normal: most are short, a few very long, as in public traces of such traffic.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields
from heapq import heappop, heappush

from gateway.tools.simulate.trace import Job, Trace, TracePrompt, build_trace

LENGTH_SIGMA = 0.8
"""Sigma of the logarithm of lengths: the 95th percentile is about 3.7 times the median."""

MOST_LENGTH_FACTOR = 8.0
"""No length is more than this many times its mean: a context is finite."""

READ_TOKENS_PER_SECOND = 20.0
"""Tokens of an answer that a person reads per second as they come."""

WARM_UP_DURATIONS = 3.0
"""Mean durations of a conversation by which conversations begin before the trace does."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What to generate. Figures are means; tokens and seconds."""

    requests: int
    rate: float
    """Requests per second."""
    turns: float = 4.0
    """Turns of a conversation."""
    tenants: int = 6
    """Tenants, each with a system prompt; a few make most of the traffic."""
    system: int = 1500
    question: float = 120.0
    answer: float = 180.0
    pause: float = 20.0
    """Seconds between an answer and the next question."""
    limit: int = 2048
    """`max_tokens` of every request: far above the answers' lengths, as clients set it."""
    callers: int = 50
    burst: float = 1.0
    """During a burst this many times more conversations begin than between bursts."""
    every: float = 3600.0
    """Seconds from the start of a burst to that of the next."""
    lasting: float = 600.0
    """Seconds that a burst lasts."""
    urgent: float = 0.0
    """Share of the conversations that are of this class; the rest is `normal`."""
    premium: float = 0.0
    batch: float = 0.0

    def __post_init__(self) -> None:
        positive = (self.rate, self.question, self.answer)
        if not all(math.isfinite(value) and value > 0 for value in positive):
            raise ValueError("rate and lengths must be positive")
        if not (1 <= self.burst < math.inf and 0 < self.lasting < self.every < math.inf):
            raise ValueError("burst must be at least 1, and lasting shorter than every")
        counts = (self.requests, self.turns, self.tenants, self.callers)
        if not all(1 <= value < math.inf for value in counts):
            raise ValueError("requests, turns, tenants and callers must be at least 1")
        if self.system < 0 or not 0 <= self.pause < math.inf or self.limit < 1:
            raise ValueError("system prompt, pause and limit must not be negative")
        class_shares = (self.urgent, self.premium, self.batch)
        if not all(share >= 0 for share in class_shares) or not sum(class_shares) <= 1:
            raise ValueError("the shares of the classes must not be more than 1 in all")

    @classmethod
    def from_text(cls, text: str) -> Traffic:
        """From text such as `rate=2,requests=5000,turns=4`. Raises ValueError with the remedy."""
        kinds = {field.name: int if "int" in str(field.type) else float for field in fields(cls)}
        given: dict[str, float] = {"rate": 1.0, "requests": 5_000}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise ValueError(f"{name!r} is nothing to set; known: {', '.join(kinds)}")
            try:
                given[name] = kinds[name](value)
            except (ValueError, OverflowError):
                number = "a whole number" if kinds[name] is int else "a number"
                raise ValueError(f"{part!r}: write {number} behind the =") from None
        return cls(**given)  # type: ignore[arg-type]


def generate(traffic: Traffic, seed: int) -> Trace:
    """Generate a trace; the same seed gives the same."""
    rng = random.Random(seed)
    continue_share = 1.0 - 1.0 / traffic.turns
    weights = [1.0 / rank for rank in range(1, traffic.tenants + 1)]
    tenants = range(1, traffic.tenants + 1)
    classes = ("urgent", "premium", "batch", "normal")
    class_shares = [traffic.urgent, traffic.premium, traffic.batch]
    class_shares.append(1.0 - sum(class_shares))
    # Earlier conversations are under way, so that the rate is the same from the start.
    now = (
        -WARM_UP_DURATIONS
        * traffic.turns
        * (traffic.pause + traffic.answer / READ_TOKENS_PER_SECOND)
    )
    jobs: list[Job] = []
    stream = 0
    # A conversation's later turns may come after requests that are generated after it.
    later: list[float] = []
    settled = 0
    while settled < traffic.requests:
        now = _next_begin(rng, traffic, now)
        while later and later[0] <= now:
            heappop(later)
            settled += 1
        stream += 1
        (tenant,) = rng.choices(tenants, weights)
        (label,) = rng.choices(classes, class_shares)
        caller = f"caller-{rng.randrange(traffic.callers)}"
        prompt_tokens = traffic.system
        time = now
        while True:
            prompt_tokens += _length(rng, traffic.question)
            output = min(_length(rng, traffic.answer), traffic.limit)
            if time >= 0:
                prompt = TracePrompt(
                    stream, prompt_tokens, tenant if traffic.system else 0, traffic.system
                )
                jobs.append(Job(0, time, prompt, output, traffic.limit, label, caller))
                heappush(later, time)
            if rng.random() >= continue_share:
                break
            prompt_tokens += output
            time += output / READ_TOKENS_PER_SECOND
            time += rng.expovariate(1.0 / traffic.pause) if traffic.pause else 0.0
    jobs.sort(key=lambda job: job.time)
    return build_trace(jobs[: traffic.requests])


def _next_begin(rng: random.Random, traffic: Traffic, now: float) -> float:
    """When the next conversation begins: drawn at the rate of bursts, thinned between them."""
    share = traffic.lasting / traffic.every
    quiet = traffic.rate / traffic.turns / (1.0 - share + share * traffic.burst)
    while True:
        now += rng.expovariate(quiet * traffic.burst)
        # The first burst begins half a period after the trace does.
        bursts = (now / traffic.every + 0.5) % 1.0 < share
        if traffic.burst == 1.0 or bursts or rng.random() * traffic.burst < 1.0:
            return now


def _length(rng: random.Random, mean: float) -> int:
    drawn = rng.lognormvariate(math.log(mean) - LENGTH_SIGMA**2 / 2, LENGTH_SIGMA)
    return max(1, round(min(drawn, MOST_LENGTH_FACTOR * mean)))
