"""The traffic that is planned for: figures, or a recorded trace, and the requests to simulate."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, pvariance

from gateway.workshop.simulate.routers import SPEED_MEMORY, SimulatedModel
from gateway.workshop.simulate.trace import (
    Job,
    Trace,
    TracePrompt,
    build_trace,
    random_length,
    unread_tokens,
)

SECONDS_PER_HOUR = 3600.0
MOST_REQUESTS_PER_HOUR = 1e9
MOST_PEAK = 1000.0
MOST_TOKENS_OF_A_REQUEST = 1_000_000  # of a mean prompt or completion; more is a mistake
# Of all requests of a trial: what is known of their prompts takes some 100 MB of memory.
MOST_SIMULATED_TOKENS = 200_000_000
LEAST_REQUESTS_OF_A_TRIAL = 100
LENGTHS_SCV = 0.841  # squared coefficient of variation of made-up lengths (`random_length`)


@dataclass(frozen=True, slots=True)
class Workload:
    """Traffic in figures: means, tokens. Raises ValueError for what can't be."""

    requests_per_hour: float
    """Over all hours that are paid for; of a backlog: the requests there are."""
    prompt: float
    completion: float
    repeat: float = 0.0
    """Share of the prompt with which all begin, such as a system prompt: read once by a node."""
    peak: float = 1.0  # requests of the busiest hour, as a multiple of the mean
    backlog_hours: float | None = None
    """All requests wait from the start and are to be done in so many hours; None: they arrive."""
    lengths_scv: float = LENGTHS_SCV
    """Squared coefficient of variation of the lengths, for the estimate."""
    arrival_scv: float = 1.0  # the same of the times between arrivals; 1: a Poisson process
    models: tuple[SimulatedModel, ...] = ()
    """That nodes load on demand, each with its share of the requests; none: all have all."""

    def __post_init__(self) -> None:
        if not 0 < self.requests_per_hour <= MOST_REQUESTS_PER_HOUR:
            raise ValueError(
                f"requests per hour must be above 0, at most {MOST_REQUESTS_PER_HOUR:g}"
            )
        if not 0 <= self.prompt <= MOST_TOKENS_OF_A_REQUEST:
            raise ValueError(f"tokens of a prompt must be from 0 to {MOST_TOKENS_OF_A_REQUEST}")
        if not 1 <= self.completion <= MOST_TOKENS_OF_A_REQUEST:
            raise ValueError(f"tokens of a completion must be from 1 to {MOST_TOKENS_OF_A_REQUEST}")
        if not 0 <= self.repeat < 1:
            raise ValueError("the share that repeats must be at least 0 and below 1")
        if not 1 <= self.peak <= MOST_PEAK:
            raise ValueError(f"the peak must be from 1 to {MOST_PEAK:g} times the mean")
        if self.backlog_hours is not None and not 0 < self.backlog_hours <= 10_000:
            raise ValueError("the hours of a backlog must be above 0, at most 10,000")

    @property
    def arrivals(self) -> float:
        """Requests per second in the busiest hour; of a backlog: that must end per second."""
        hours = self.backlog_hours or 1.0
        return self.requests_per_hour * self.peak / hours / SECONDS_PER_HOUR

    @property
    def uncached(self) -> float:
        """Prompt tokens that a node has to read, once it knows the shared beginning."""
        return max(1.0, self.prompt * (1.0 - self.repeat))

    @property
    def backlog(self) -> float | None:
        """Requests that all wait from the start; None: they arrive."""
        return None if self.backlog_hours is None else self.requests_per_hour

    @property
    def work(self) -> float:
        """Work of a mean request, as a multiple of one for a model of `SPEED_MEMORY`."""
        shares = [one.share or 0.0 for one in self.models]
        if not sum(shares):
            return 1.0
        return fmean((one.memory / SPEED_MEMORY for one in self.models), shares)

    def with_requests(self, requests_per_hour: float) -> Workload:
        """The same at another rate."""
        return replace(self, requests_per_hour=requests_per_hour)


def make_trace(workload: Workload, requests: int, seed: int) -> Trace:
    """Requests of the busiest hour, as a Poisson process; of a backlog all at once.

    No front is told how long answers will be. Very long requests are fewer: see
    MOST_SIMULATED_TOKENS.
    """
    rng = random.Random(seed)
    fit = int(MOST_SIMULATED_TOKENS / (workload.prompt + workload.completion))
    requests = min(requests, max(fit, LEAST_REQUESTS_OF_A_TRIAL))
    shared = round(workload.prompt * workload.repeat)
    own = workload.prompt - shared
    names = [one.name for one in workload.models] or [""]
    shares = [one.share or 0.0 for one in workload.models] or [1.0]
    models = random.Random(f"models of {seed}").choices(names, shares, k=requests)
    jobs: list[Job] = []
    time = 0.0
    for number in range(requests):
        if workload.backlog_hours is None:
            time += rng.expovariate(workload.arrivals)
        length = shared + random_length(rng, own)
        prompt = TracePrompt(-1 - number, length, int(shared > 0), shared)
        written = random_length(rng, workload.completion)
        jobs.append(Job(0, time, prompt, written, model=models[number]))
    return build_trace(jobs)


def from_trace(trace: Trace, models: Sequence[SimulatedModel] = ()) -> Workload:
    """The figures of a trace: of its mean, and its busiest hour as the peak.

    Each of the `models` gets the share that it has there.

    The share that repeats is what a cache could know: shared beginnings, and earlier turns of a
    conversation. Raises ValueError.
    """
    jobs = trace.jobs
    tokens = sum(job.prompt.tokens + job.output for job in jobs)
    if tokens > MOST_SIMULATED_TOKENS * 10:
        raise ValueError(
            f"{tokens:,} tokens are more than can be simulated: take fewer requests (--limit N)"
        )
    span = max(job.time for job in jobs) - min(job.time for job in jobs)
    if len(jobs) < 2 or span <= 0:
        raise ValueError("it needs two requests at different times, to tell a rate")
    # The last gap is as long as the others: n requests have n - 1 gaps.
    rate = (len(jobs) - 1) / span * SECONDS_PER_HOUR
    peak = 1.0
    if span >= 2 * SECONDS_PER_HOUR:
        hours = Counter(int(job.time // SECONDS_PER_HOUR) for job in jobs)
        peak = max(1.0, min(MOST_PEAK, max(hours.values()) / rate))
    prompt = fmean(job.prompt.tokens for job in jobs)
    completion = fmean(job.output for job in jobs)
    gaps = [after.time - before.time for before, after in pairwise(jobs)]
    return Workload(
        rate,
        prompt,
        completion,
        repeat=min(0.999, 1.0 - sum(unread_tokens(jobs)) / (prompt * len(jobs))),
        peak=peak,
        lengths_scv=max(_scv([job.output for job in jobs]), 0.0),
        arrival_scv=_scv(gaps),
        models=asked_models(jobs, models),
    )


def asked_models(
    jobs: Sequence[Job], models: Sequence[SimulatedModel]
) -> tuple[SimulatedModel, ...]:
    """Models with the number of requests for each as its share."""
    counts = Counter(job.model for job in jobs)
    return tuple(replace(one, share=float(counts[one.name])) for one in models)


def _scv(values: Sequence[float]) -> float:
    mean = fmean(values)
    return pvariance(values, mean) / mean**2 if mean > 0 else 0.0
