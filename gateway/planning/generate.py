"""Traffic made up: conversations that share system prompts, as chat users make it.

Conversations begin as a Poisson process. One has a number of turns (geometric); every turn reads
the tenant's system prompt, all that was said before, and a new question, and a person reads and
thinks before the next turn. Lengths of questions and answers are log-normal: most are short, a
few are very long, as in every public trace of such traffic.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

from gateway.planning.job import Job, Prompt, Trace

SPREAD = 0.8
"""Sigma of the logarithm of lengths: the 95th percentile is about 3.7 times the median."""
ROOM = 8.0
"""No length is more than so many times its mean: a context has an end."""


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
    urgent: float = 0.0
    """Share of the conversations that are of this class; what is left is `normal`."""
    premium: float = 0.0
    batch: float = 0.0

    def __post_init__(self) -> None:
        positive = (self.rate, self.question, self.answer)
        if not all(math.isfinite(value) and value > 0 for value in positive):
            raise ValueError("rate and lengths must be positive")
        if self.requests < 1 or self.turns < 1 or self.tenants < 1 or self.callers < 1:
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
        given: dict[str, float] = {"rate": 1.0, "requests": 10_000}
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
    jobs: list[Job] = []
    weights = [1.0 / rank for rank in range(1, traffic.tenants + 1)]
    tenants = range(1, traffic.tenants + 1)
    classes = ("urgent", "premium", "batch", "normal")
    shares = [traffic.urgent, traffic.premium, traffic.batch]
    shares.append(1.0 - sum(shares))
    now = 0.0
    stream = 0
    # The pauses hold later turns back, so a conversation's turns are spread over the same span.
    while len(jobs) < traffic.requests:
        now += rng.expovariate(traffic.rate / traffic.turns)
        stream += 1
        (tenant,) = rng.choices(tenants, weights)
        (klass,) = rng.choices(classes, shares)
        caller = f"caller-{rng.randrange(traffic.callers)}"
        told = traffic.system
        opening = True
        while len(jobs) < traffic.requests:
            told += _length(rng, traffic.question)
            output = min(_length(rng, traffic.answer), traffic.limit)
            prompt = Prompt(stream, told, tenant if traffic.system else 0, traffic.system)
            job = Job(0, now, prompt, output, traffic.limit, klass, caller)
            if not opening:
                job.pause = rng.expovariate(1.0 / traffic.pause) if traffic.pause else 0.0
            jobs.append(job)
            told += output
            opening = False
            if rng.random() >= more:
                break
    return in_order(jobs)


def in_order(jobs: list[Job]) -> Trace:
    """Number jobs by their times and tell which follows which: turns of a stream in their order."""
    jobs.sort(key=lambda job: job.time)  # stable: turns of a stream keep their order
    turns: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, job in enumerate(jobs):
        job.id = place
        stream = job.prompt.stream
        before = last.get(stream)
        if before is not None:
            turns[before] = place
            job.follows = True
        last[stream] = place
    return Trace(jobs, turns)


def _length(rng: random.Random, mean: float) -> int:
    drawn = rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
    return max(1, round(min(drawn, ROOM * mean)))
