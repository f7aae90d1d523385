"""Traffic made up: conversations that share system prompts, as chat users make it.

Conversations begin as a Poisson process. One has a number of turns (geometric); every turn reads
the tenant's system prompt, all that was said before, and a new question. A person reads the
answer, thinks, and asks again; if the answer is not there by then, once it is. So the load is the
same whatever a policy makes of it, as long as the fleet can bear it. Lengths of questions and
answers are log-normal: most are short, a few are very long, as in public traces of such traffic.
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
"""No length is more than so many times its mean: a context has an end."""

READ_TOKENS_PER_SECOND = 20.0
"""Tokens of an answer that a person reads in a second while it is written."""

WARM_UP_DURATIONS = 3.0
"""Mean durations of a conversation for which some are under way already when a trace begins."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What to make up. Means are of the whole; tokens and seconds."""

    requests: int
    rate: float
    """Requests per second, in the mean."""
    turns: float = 4.0
    """Turns of a conversation."""
    tenants: int = 6
    """System prompts; a few tenants make most of the traffic."""
    system: int = 1500
    question: float = 120.0
    answer: float = 180.0
    pause: float = 20.0
    """Seconds between an answer and the next question."""
    limit: int = 2048
    """`max_tokens` of every request: far above what comes, as clients do."""
    callers: int = 50
    burst: float = 1.0
    """Bursts: so many times more conversations begin in one than between them."""
    every: float = 3600.0
    """Seconds from the begin of a burst to that of the next."""
    lasting: float = 600.0
    """Seconds of a burst."""
    urgent: float = 0.0
    """Share of the conversations that are of this class; what is left is `normal`."""
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
        shares = (self.urgent, self.premium, self.batch)
        if not all(share >= 0 for share in shares) or not sum(shares) <= 1:
            raise ValueError("the shares of the classes must not be more than 1 in all")

    @classmethod
    def from_text(cls, text: str) -> Traffic:
        """From `rate=2,requests=5000,turns=4` and so on; raises ValueError in words."""
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
    """Make a trace; the same seed makes the same."""
    rng = random.Random(seed)
    more = 1.0 - 1.0 / traffic.turns
    weights = [1.0 / rank for rank in range(1, traffic.tenants + 1)]
    tenants = range(1, traffic.tenants + 1)
    classes = ("urgent", "premium", "batch", "normal")
    shares = [traffic.urgent, traffic.premium, traffic.batch]
    shares.append(1.0 - sum(shares))
    # Conversations that began earlier are under way, so that the rate is the same throughout.
    now = (
        -WARM_UP_DURATIONS
        * traffic.turns
        * (traffic.pause + traffic.answer / READ_TOKENS_PER_SECOND)
    )
    jobs: list[Job] = []
    stream = 0
    # What comes later than a conversation may still be followed by something earlier.
    later: list[float] = []
    sure = 0
    while sure < traffic.requests:
        now = _next_begin(rng, traffic, now)
        while later and later[0] <= now:
            heappop(later)
            sure += 1
        stream += 1
        (tenant,) = rng.choices(tenants, weights)
        (klass,) = rng.choices(classes, shares)
        caller = f"caller-{rng.randrange(traffic.callers)}"
        told = traffic.system
        time = now
        while True:
            told += _length(rng, traffic.question)
            output = min(_length(rng, traffic.answer), traffic.limit)
            if time >= 0:
                prompt = TracePrompt(stream, told, tenant if traffic.system else 0, traffic.system)
                jobs.append(Job(0, time, prompt, output, traffic.limit, klass, caller))
                heappush(later, time)
            if rng.random() >= more:
                break
            told += output
            time += output / READ_TOKENS_PER_SECOND
            time += rng.expovariate(1.0 / traffic.pause) if traffic.pause else 0.0
    jobs.sort(key=lambda job: job.time)
    return build_trace(jobs[: traffic.requests])


def _next_begin(rng: random.Random, traffic: Traffic, now: float) -> float:
    """When the next conversation begins: at the rate of bursts, of which the rest is left out."""
    share = traffic.lasting / traffic.every
    quiet = traffic.rate / traffic.turns / (1.0 - share + share * traffic.burst)
    while True:
        now += rng.expovariate(quiet * traffic.burst)
        # The first burst begins half a period after the trace.
        bursts = (now / traffic.every + 0.5) % 1.0 < share
        if traffic.burst == 1.0 or bursts or rng.random() * traffic.burst < 1.0:
            return now


def _length(rng: random.Random, mean: float) -> int:
    drawn = rng.lognormvariate(math.log(mean) - LENGTH_SIGMA**2 / 2, LENGTH_SIGMA)
    return max(1, round(min(drawn, MOST_LENGTH_FACTOR * mean)))
