"""Finds the least number of equal nodes for a question: by a first estimate, then by trials.

**The traffic** that is planned for is figures, or a recorded trace.

**The estimate.** The slots of a llama.cpp node share its speed: prompts are read one after the
other while the neighbours stand still, and each further slot that writes makes a step longer. So
with k of its slots busy a request is there for

    k X + D (1 + c (k - 1))  seconds,

for X seconds of node time that a prompt takes, D seconds that an answer takes alone, and c, the
cost of a busy slot more. Erlang C and Allen-Cunneen's formula take every slot to be as slow as in a
full node, always: waits come out too long rather than too short. The time in a slot is that of the
slots which are busy in the mean (`busy_slots`).

**A trial** plays the traffic through the real scheduler on simulated nodes
(`gateway/workshop/simulate`), and has the last word.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean, pvariance, stdev

from gateway.workshop.plan.catalogue import FleetPrice, NodeType
from gateway.workshop.simulate.comparison import build_front
from gateway.workshop.simulate.fleets import SPEED_MEMORY, RouterFleet, SimulatedModel
from gateway.workshop.simulate.fronts import LearntKnowledge, LeastRecentlyUsed, ModelPlacingFront
from gateway.workshop.simulate.report import LONGEST_WAIT, Percentiles, utilisation
from gateway.workshop.simulate.simulation import (
    Front,
    Job,
    SimulatedFleet,
    SimulatedMachine,
    Trace,
    TracePrompt,
    build_trace,
    random_length,
    simulate,
    unread_tokens,
)

SECONDS_PER_HOUR = 3600.0
MILLION = 1_000_000
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
        most = MOST_REQUESTS_PER_HOUR
        if not 0 < self.requests_per_hour <= most:
            raise ValueError(f"requests per hour must be above 0, at most {most:g}")
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
    names = [one.name for one in workload.models] or [""]
    shares = [one.share or 0.0 for one in workload.models] or [1.0]
    models = random.Random(f"models of {seed}").choices(names, shares, k=requests)
    jobs: list[Job] = []
    time = 0.0
    for number, model in enumerate(models, 1):
        if workload.backlog_hours is None:
            time += rng.expovariate(workload.arrivals)
        length = shared + random_length(rng, workload.prompt - shared)
        prompt = TracePrompt(-number, length, int(shared > 0), shared)
        jobs.append(Job(0, time, prompt, random_length(rng, workload.completion), model=model))
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
    span = jobs[-1].time - jobs[0].time
    if span <= 0:
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
        lengths_scv=_scv([job.output for job in jobs]),
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


# More slots than this are a mistake; the recursions take a second for them.
MOST_SERVERS = 1_000_000


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Seconds that one request takes of a node. Slots share it."""

    slots: int
    reading: float  # X: node time in which its prompt is read and no other slot writes
    writing: float  # D: its answer, if no other slot writes
    batch_cost: float

    def in_slot(self, busy: float) -> float:
        """Seconds of a request in a slot while so many slots are busy, its own among them."""
        return busy * self.reading + self.writing * (1.0 + self.batch_cost * (busy - 1))

    @property
    def alone(self) -> float:
        """Seconds in a slot, if no other is busy."""
        return self.in_slot(1)

    @property
    def full(self) -> float:
        """Mean seconds in a slot while all slots are busy all the time."""
        return self.in_slot(self.slots)

    @property
    def capacity(self) -> float:
        """Most requests that the node ends per second."""
        return self.slots / self.full

    def service_scv(self, lengths_scv: float) -> float:
        """Squared coefficient of variation of the time in a slot of a full node.

        Prompts and answers vary independently, each by `lengths_scv`. Neighbours' prompts come in
        while it writes, so that this part is in proportion to the answer.
        """
        rest = self.full - self.reading
        return lengths_scv * (self.reading**2 + rest**2) / self.full**2


def node_times(machine: SimulatedMachine, prompt: float, completion: float) -> NodeTimes:
    """What a mean request takes of a machine: `prompt` uncached tokens, `completion` tokens.

    A prompt is read in steps of `batch_tokens`. Such a step is one of decoding, too: it costs the
    writers only by how much it is longer than theirs.
    """
    slots = machine.slots
    base, step = machine.token_base, machine.token_step
    steps = math.ceil(prompt / (machine.batch_tokens - slots + 1)) or 1
    one_step = max(base, prompt / steps / machine.prefill_tps)
    alone = steps * one_step + max(0.0, completion - 1.0) * base
    reading = steps * (one_step if slots == 1 else one_step - base + step)
    return NodeTimes(slots, reading, max(alone - reading, 1e-9), machine.batch_cost)


def times_of(node_type: NodeType, workload: Workload) -> NodeTimes:
    """What a mean request takes of a server of this type, which has its model loaded."""
    times = node_times(node_type.machine("server"), workload.uncached, workload.completion)
    work = workload.work if node_type.memory_gib else 1.0
    return replace(times, reading=times.reading * work, writing=times.writing * work)


def erlang_c(servers: int, offered: float) -> float:
    """Probability that a request has to wait in an M/M/c queue.

    `offered`: arrival rate times mean service time, in erlangs. 1 from `servers` erlangs on. By the
    recursion of Erlang B, which can't overflow: B(n) = a B(n-1) / (n + a B(n-1)), and
    C = B / (1 - (1 - B) a / c). Source: A. K. Erlang, "Solution of some problems in the theory of
    probabilities of significance in automatic telephone exchanges" (1917); the form here: Cooper,
    "Introduction to Queueing Theory" (1981), chapter 3.
    """
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1.0 - (1.0 - blocked) * offered / servers)


def busy_slots(times: NodeTimes, nodes: int, arrivals: float) -> float:
    """Mean number of busy slots of equal nodes that are not overloaded.

    Of the birth-death process in which n busy slots, evenly on the nodes, end n / `in_slot(n /
    nodes)` requests per second. Source: the state probabilities of such processes, p(n)
    proportional to the product of arrivals / rate(k); Kleinrock, "Queueing Systems", volume 1
    (1975), section 3.1.
    """
    slots = nodes * times.slots
    # Weights of the states relative to that of an idle fleet; scaled, so that none can overflow.
    total, weight, busy = 1.0, 1.0, 0.0
    for number in range(1, slots + 1):
        weight *= arrivals * times.in_slot(max(1.0, number / nodes)) / number
        if weight > 1e200:
            total, busy, weight = total / weight, busy / weight, 1.0
        if number == slots:  # and any number of requests that wait
            weight /= 1.0 - arrivals / (nodes * times.capacity)
        total += weight
        busy += number * weight
    return busy / total


def allen_cunneen(
    probability: float, arrivals: float, most_rate: float, arrival_scv: float, service_scv: float
) -> float:
    """Mean wait for a server, in seconds, of a queue with any arrivals and any service times.

    `probability`: that a request waits, by `erlang_c`; `most_rate`: requests that all servers end
    per second. The squared coefficients of variation are variance / mean²: 1 for Poisson arrivals
    and exponential times, 0 for regular ones. Infinite without spare capacity. Source: Allen,
    "Probability, Statistics, and Queueing Theory" (1978), section 5.5:
    Wq = C / (c µ - λ) x (Ca² + Cs²) / 2; exact for M/M/c, and for M/G/1 (Pollaczek-Khinchine).
    """
    if arrivals >= most_rate:
        return math.inf
    return probability / (most_rate - arrivals) * (arrival_scv + service_scv) / 2.0


@dataclass(frozen=True, slots=True)
class WaitEstimate:
    """What the formulas say of a fleet of equal nodes. Seconds; infinite when overloaded."""

    utilisation: float  # arrivals as a share of the capacity
    waiting_share: float  # share of the requests that find every slot busy
    wait: float  # mean seconds until a slot is free
    service: float  # mean seconds in a slot
    service_scv: float
    """Squared coefficient of variation of the time in a slot (Allen-Cunneen's Cs²)."""

    @property
    def completion(self) -> float:
        """Mean seconds from arrival to the last token."""
        return self.wait + self.service


def estimate(
    times: NodeTimes, nodes: int, arrivals: float, *, arrival_scv: float = 1.0, lengths_scv: float
) -> WaitEstimate:
    """Estimate the waits of `nodes` equal nodes at `arrivals` requests per second."""
    most = nodes * times.capacity
    waiting = erlang_c(nodes * times.slots, arrivals * times.full)
    service = busy_slots(times, nodes, arrivals) / arrivals if arrivals < most else times.full
    scv = times.service_scv(lengths_scv)
    wait = allen_cunneen(waiting, arrivals, most, arrival_scv, scv)
    return WaitEstimate(arrivals / most, waiting, wait, service, scv)


# Trials.

GATEWAY = "least_finish"  # the gateway's own policy; `DIRECT`: none, requests wait inside the node
DIRECT = "nginx"
# Nodes of a trial; where they load models on demand, models times nodes.
MOST_SIMULATED_NODES, MOST_SIMULATED_INSTANCES = 2000, 20_000
# Share of the requests that come while the fleet fills and its speeds are learnt: not counted.
WARM_UP_SHARE = 0.1
BATCHES = 20  # batches of requests whose means tell how sure a mean is
STUDENT_95 = 2.093  # of 20 batches: 97.5th percentile of Student's t with 19 degrees of freedom


class OutOfTimeError(Exception):
    """The time for simulations is used up."""


@dataclass(slots=True)
class TimeLimit:
    """How long all trials of a plan may take together, in seconds, and who hears of them."""

    seconds: float
    on_trial: Callable[[str, float], None] = lambda _fleet, _share: None
    """Called with the fleet of the trial that runs, and the share of the time that is used."""
    trials: int = 0
    _began: float = field(default_factory=time.monotonic)

    def begin(self, fleet: str) -> None:
        """A trial begins. Raises OutOfTimeError."""
        self.check(fleet)
        self.trials += 1

    def check(self, fleet: str) -> None:
        """A trial goes on. Raises OutOfTimeError."""
        used = (time.monotonic() - self._began) / self.seconds
        self.on_trial(fleet, min(1.0, used))
        if used >= 1.0:
            raise OutOfTimeError(f"{self.seconds:g} s for simulations are used up")


@dataclass(frozen=True, slots=True)
class FleetPart:
    """So many of one type."""

    node_type: NodeType
    count: int

    @property
    def servers(self) -> int:
        """llama.cpp servers: nodes of the gateway."""
        return self.count * self.node_type.servers

    def capacity(self, workload: Workload) -> float:
        """Most requests of this traffic that it ends per second."""
        return self.servers * times_of(self.node_type, workload).capacity


def fleet_name(parts: Sequence[FleetPart]) -> str:
    """Such as `3 x cpu-16 + 1 x l4`."""
    return " + ".join(f"{part.count} x {part.node_type.name}" for part in parts)


@dataclass(frozen=True, slots=True)
class PartShare:
    """The shares of requests and of tokens that one part of a fleet served."""

    requests: float
    prompt_tokens: float
    completion_tokens: float


@dataclass(frozen=True, slots=True)
class FleetTrial:
    """What came of a trial. Seconds from a request's arrival."""

    requests: int  # counted ones
    wait: Percentiles  # until it had a slot
    ttft: Percentiles
    completion: Percentiles
    service: float  # mean seconds in a slot
    waiting_share: float  # requests that did not get a slot at once
    wait_error: float  # half the width of the 95 % confidence interval of the mean wait
    completion_error: float
    slots_busy: float  # share of the slots' time; routers are counted with those of one model
    too_late: int  # requests that waited longer than the gateway lets them (`queue.max_wait`)
    seconds: float  # until the last request ended; of a backlog: until all of it would have
    shares: tuple[PartShare, ...]
    loads: int = 0  # of models
    load_seconds: float = 0.0  # of all of them

    def as_dict(self) -> dict[str, object]:
        """For scripts."""
        found = asdict(self)
        found["wait"]["error_95"] = found.pop("wait_error")
        found["completion"]["error_95"] = found.pop("completion_error")
        found["waited_too_long"] = found.pop("too_late")
        del found["shares"]
        return found


def bounded(
    trial: FleetTrial, other: FleetTrial, pick: Callable[[float, float], float]
) -> FleetTrial:
    """The trial with its times picked from it and another one, by `max` or `min`."""

    def each(one: Percentiles, two: Percentiles) -> Percentiles:
        return Percentiles(*map(pick, astuple(one), astuple(two)))

    return replace(
        trial,
        wait=each(trial.wait, other.wait),
        ttft=each(trial.ttft, other.ttft),
        completion=each(trial.completion, other.completion),
        waiting_share=pick(trial.waiting_share, other.waiting_share),
        too_late=int(pick(trial.too_late, other.too_late)),
    )


def error_of_mean(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of a mean, by the method of batch means.

    Values that follow each other depend on each other; means of long batches hardly do. Infinite
    where there are too few values to tell.
    """
    size = len(values) // BATCHES
    if size < 2:
        return math.inf
    means = [fmean(values[place * size : (place + 1) * size]) for place in range(BATCHES)]
    return STUDENT_95 * stdev(means) / math.sqrt(BATCHES)


def alone(
    jobs: Sequence[Job], node_type: NodeType, models: Sequence[SimulatedModel] = ()
) -> tuple[float, float]:
    """95th percentiles of TTFT and completion, if each request had a node to itself.

    No fleet of these nodes is faster. What a cache may hold does not need to be read, and no model
    be loaded.
    """
    work = {one.name: one.memory / SPEED_MEMORY for one in models}
    machine = node_type.machine("alone")
    first, whole = [], []
    for job, unread in zip(jobs, unread_tokens(jobs), strict=True):
        read = max(machine.token_base, unread / machine.prefill_tps)
        first.append(read * work.get(job.model, 1.0))
        whole.append(first[-1] + (job.output - 1) * machine.token_base * work.get(job.model, 1.0))
    return Percentiles.of(first).p95, Percentiles.of(whole).p95


# The question, and its search.

# Share of the capacity that is planned with where no goal says how long requests may wait.
MOST_USE = 0.8
MOST_USE_WITH_GOAL = 0.95  # never more: above it waits grow for longer than any simulation lasts
MOST_MORE = 64  # nodes up to which the search goes, as a multiple of the least
DEFAULT_REQUESTS = 3000  # requests of a trial
# Requests of a backlog's sample for each slot, so that its end does not weigh.
REQUESTS_PER_SLOT = 20


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked of a fleet. Seconds; None: nothing."""

    ttft_p95: float | None = None
    completion_p95: float | None = None
    most_use: float = MOST_USE  # share of the capacity, where none of the two is given

    def __post_init__(self) -> None:
        for name, value in (("TTFT", self.ttft_p95), ("completion", self.completion_p95)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"the goal of {name} must be a positive number of seconds")
        if not 0 < self.most_use <= 1:
            raise ValueError("the use must be above 0 and at most 1")

    @property
    def is_timed(self) -> bool:
        """Whether it says how long requests may take."""
        return self.ttft_p95 is not None or self.completion_p95 is not None

    @property
    def use(self) -> float:
        """Share of the capacity that may be used at most."""
        return MOST_USE_WITH_GOAL if self.is_timed else self.most_use

    def misses(self, trial: FleetTrial) -> list[str]:
        """What a trial misses, and by how much."""
        found = []
        for name, value, goal in (
            ("TTFT p95", trial.ttft.p95, self.ttft_p95),
            ("completion p95", trial.completion.p95, self.completion_p95),
        ):
            if goal is not None and value > goal:
                found.append(f"{name} {value:.2f} s, {value - goal:.2f} s above the goal")
        return found


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What a plan is asked."""

    workload: Workload
    goal: Goal
    types: tuple[NodeType, ...]
    price_per_kwh: float = 0.0
    requests: int = DEFAULT_REQUESTS  # of a trial
    seed: int = 1
    warm: bool = False  # whether the gateway knows the nodes' speeds from the start
    recorded: Trace | None = None  # a recorded trace, to be played in place of made-up requests

    @property
    def most_nodes(self) -> int:
        """Nodes that a trial has at most."""
        models = len(self.workload.models) or 1
        return min(MOST_SIMULATED_NODES, max(1, MOST_SIMULATED_INSTANCES // models))

    def trace(self, slots: int = 0) -> Trace:
        """The requests of a trial on a fleet of so many slots."""
        if self.recorded is not None:
            return self.recorded
        requests = self.requests
        if self.workload.backlog is not None:
            requests = max(requests, REQUESTS_PER_SLOT * slots)
            requests = max(1, min(requests, math.ceil(self.workload.backlog)))
        return make_trace(self.workload, requests, self.seed)

    def play(
        self, parts: Sequence[FleetPart], trace: Trace, limit: TimeLimit, policy: str = GATEWAY
    ) -> FleetTrial:
        """Play a trace on a fleet. Raises OutOfTimeError.

        Of a backlog it is a sample that waits from the start; times grow in proportion.
        """
        name, models, backlog = fleet_name(parts), self.workload.models, self.workload.backlog
        limit.begin(name)
        machines = [one for part in parts for one in part.node_type.machines(part.count)]
        front: Front
        if not models:
            plain = SimulatedFleet(machines, trace)
            front = build_front(policy, plain, warm=self.warm, seed=self.seed)
        elif policy == DIRECT:
            front = LeastRecentlyUsed(RouterFleet(machines, models, trace))
        else:
            knowledge = partial(LearntKnowledge, warm=self.warm)
            front = ModelPlacingFront(RouterFleet(machines, models, trace), self.seed, knowledge)
        fleet = simulate(front, lambda _: limit.check(name))
        counted, growth = fleet.jobs[int(len(fleet.jobs) * WARM_UP_SHARE) :], 1.0
        if backlog is not None:
            counted, growth = fleet.jobs, max(1.0, backlog / len(fleet.jobs))
        waits = [(job.began - job.arrived) * growth for job in counted]
        after = list(zip(waits, counted, strict=True))
        completions = [wait + job.ended - job.began for wait, job in after]
        began = max(job.began for job in fleet.jobs)
        prompts, written = (
            sum(job.prompt.tokens for job in counted),
            sum(job.output for job in counted),
        )
        shares = []
        for low, high in pairwise(accumulate((part.servers for part in parts), initial=0)):
            own = [job for job in counted if low <= fleet.routers[job.node] < high]
            read = sum(job.prompt.tokens for job in own)
            wrote = sum(job.output for job in own)
            shares.append(PartShare(len(own) / len(counted), read / prompts, wrote / written))
        return FleetTrial(
            requests=len(counted),
            wait=Percentiles.of(waits),
            ttft=Percentiles.of([wait + job.first - job.began for wait, job in after]),
            completion=Percentiles.of(completions),
            service=fmean(job.ended - job.began for job in counted),
            waiting_share=sum(wait > 0 for wait in waits) / len(waits),
            wait_error=error_of_mean(waits),
            completion_error=error_of_mean(completions),
            slots_busy=utilisation(fleet, sum(machine.slots for machine in machines)),
            too_late=sum(wait > LONGEST_WAIT for wait in waits),
            seconds=began * growth + (fleet.ended - began),
            shares=tuple(shares),
            loads=fleet.loads,
            load_seconds=fleet.load_seconds,
        )

    def is_met_by(self, trial: FleetTrial) -> bool:
        """Whether a trial meets the goal; of a backlog: whether it ends in time."""
        if self.workload.backlog_hours is not None:
            return trial.seconds / SECONDS_PER_HOUR <= self.workload.backlog_hours
        return not self.goal.misses(trial)

    def as_dict(self) -> dict[str, object]:
        """For scripts."""
        workload, goal = self.workload, self.goal
        return {
            "traffic": {
                "requests_per_hour": workload.requests_per_hour,
                "prompt_tokens": workload.prompt,
                "completion_tokens": workload.completion,
                "repeat": workload.repeat,
                "peak": workload.peak,
                "backlog_hours": workload.backlog_hours,
                "arrivals_per_second": workload.arrivals,
                "models": [asdict(one) for one in workload.models],
            },
            "goal": {
                "ttft_p95": goal.ttft_p95,
                "completion_p95": goal.completion_p95,
                "most_use": goal.use,
            },
            "start": "warm" if self.warm else "cold",
        }


@dataclass(frozen=True, slots=True)
class FleetOption:
    """A fleet that could be run, with its latency and its price."""

    parts: tuple[FleetPart, ...]
    use: float  # share of the capacity that is used in the busiest hour
    trial: FleetTrial | None  # None: only estimated
    price: FleetPrice
    estimate: WaitEstimate | None = None  # None: its nodes are not equal
    rejected: str = ""  # why it does not meet the goal; empty: it does
    why_estimated: str = ""  # why it was not simulated to the end

    @property
    def name(self) -> str:
        """Such as `3 x cpu-16`."""
        return fleet_name(self.parts)

    @property
    def machines(self) -> int:
        """All machines."""
        return sum(part.count for part in self.parts)

    @property
    def tiers(self) -> frozenset[str]:
        """The tiers of its parts."""
        return frozenset(part.node_type.tier for part in self.parts)

    @property
    def order(self) -> tuple[float, int]:
        """Sorts options: by price, without prices by number."""
        hour = self.price.per_hour
        return (math.inf if hour is None else hour, self.machines)

    def as_dict(self) -> dict[str, object]:
        """For scripts."""
        found, guess = self.estimate, None
        if found is not None and math.isfinite(found.wait):
            guess = asdict(found)
            guess |= {"completion": found.completion, "erlang_c": found.waiting_share}
        return {
            "fleet": self.name,
            "parts": [
                {
                    "type": part.node_type.name,
                    "tier": part.node_type.tier,
                    "count": part.count,
                    "servers": part.servers,
                    "slots": part.node_type.slots,
                }
                for part in self.parts
            ],
            "utilisation": self.use,
            "source": "estimate" if self.trial is None else "simulator",
            "estimate": guess,
            "simulated": None if self.trial is None else self.trial.as_dict(),
            "price": self.price.as_dict(),
            "rejected": self.rejected or None,
        }


def use_of(parts: Sequence[FleetPart], workload: Workload) -> float:
    """Share of a fleet's capacity that the busiest hour uses."""
    return workload.arrivals / math.fsum(part.capacity(workload) for part in parts)


def option_price(
    question: PlanQuestion, parts: Sequence[FleetPart], trial: FleetTrial | None
) -> FleetPrice:
    """What a fleet costs in a mean hour; of a backlog: in an hour in which it works."""
    workload = question.workload
    use = use_of(parts, workload) / workload.peak
    served = workload.requests_per_hour
    if workload.backlog_hours is not None:
        use = 1.0
        hours = workload.backlog_hours if trial is None else trial.seconds / SECONDS_PER_HOUR
        served /= hours
    capacities = [part.capacity(workload) for part in parts]
    electricity, hour = 0.0, 0.0
    for place, part in enumerate(parts):
        share = capacities[place] / sum(capacities)
        own = PartShare(share, share, share) if trial is None else trial.shares[place]
        busy = use * (own.prompt_tokens + own.completion_tokens) / 2 / share
        node_type, per_token = part.node_type, part.node_type.price_per_million_tokens
        electricity += part.count * node_type.electricity(busy, question.price_per_kwh)
        # The hours of a node are paid whether it works or not.
        hour += part.count * (node_type.per_hour or 0.0)
        if per_token is not None:
            tokens = workload.prompt * own.prompt_tokens * per_token.prompt
            tokens += workload.completion * own.completion_tokens * per_token.completion
            hour += served * tokens / MILLION
    if any(part.node_type.per_hour is None for part in parts):
        return FleetPrice(None, electricity)
    hour += electricity
    each = hour / (served * (workload.prompt + workload.completion))
    return FleetPrice(hour, electricity, each * MILLION)


def count_for(node_type: NodeType, workload: Workload, use: float) -> int:
    """Machines of a type that are used to this share of their capacity at most."""
    capacity = FleetPart(node_type, 1).capacity(workload)
    return max(1, math.ceil(workload.arrivals / (capacity * use) - 1e-9))


def least_count(node_type: NodeType, workload: Workload, goal: Goal) -> int:
    """The number that can do the work at all, at the use that the goal allows."""
    return count_for(node_type, workload, 1.0 if workload.backlog is not None else goal.use)


def why_impossible(
    node_type: NodeType, trace: Trace, goal: Goal, models: Sequence[SimulatedModel] = ()
) -> str:
    """The figure that keeps any number of this type from the goal, and by how much; or nothing."""
    ttft, completion = alone(trace.jobs, node_type, models)
    first, whole, prefill = goal.ttft_p95, goal.completion_p95, node_type.prefill_tps
    speeds = []
    if first is not None and ttft > first:
        speeds.append(
            f"prefill_tps {prefill:g} makes a TTFT p95 of {ttft:.2f} s on an idle node, "
            f"{ttft - first:.2f} s above the goal of {first:g} s: it would take "
            f"{prefill * ttft / first:.0f} tokens/s"
        )
    if whole is not None and completion > whole:
        speeds.append(
            f"decode_tps {node_type.decode_tps:g} and prefill_tps {prefill:g} make a completion "
            f"p95 of {completion:.2f} s on an idle node, {completion - whole:.2f} s above the goal "
            f"of {whole:g} s: both would have to be {completion / whole:.2f} times as fast"
        )
    return "; ".join(speeds)


def fleet_option(
    question: PlanQuestion,
    parts: tuple[FleetPart, ...],
    trial: FleetTrial | None = None,
    rejected: str = "",
    why_estimated: str = "",
) -> FleetOption:
    """A fleet with its use and its price; where its nodes are equal, with the estimate too."""
    workload, first, guess = question.workload, parts[0], None
    if len(parts) == 1:
        guess = estimate(
            times_of(first.node_type, workload),
            min(first.servers, MOST_SERVERS // first.node_type.slots),
            workload.arrivals,
            arrival_scv=workload.arrival_scv,
            lengths_scv=workload.lengths_scv,
        )
    price = option_price(question, parts, trial)
    use = use_of(parts, workload)
    return FleetOption(parts, use, trial, price, guess, rejected, why_estimated)


def least_fleet(
    question: PlanQuestion,
    fleet: Callable[[int], tuple[FleetPart, ...]],
    least: int,
    most: int,
    trace: Trace,
    limit: TimeLimit,
) -> FleetOption:
    """The fleet of the least number from `least` to `most` that meets the goal, by trials.

    Out of time, it is the least of those that were tried and meet it, else an estimate.
    """
    trials, why = dict[int, FleetTrial](), ""

    def meets(count: int) -> bool:
        if count not in trials:
            trials[count] = question.play(fleet(count), trace, limit)
        return question.is_met_by(trials[count])

    try:
        count = least_that(meets, least, most)
    except OutOfTimeError as error:
        count = min(filter(meets, trials), default=None)
        if count is None:
            tried = fleet(max(trials, default=least))
            return fleet_option(question, tried, why_estimated=str(error))
        why = f"perhaps fewer: {error}"
    if count is not None:
        return fleet_option(question, fleet(count), trials[count], why_estimated=why)
    missed = ", ".join(question.goal.misses(trials[most])) or "not done in time"
    return fleet_option(question, fleet(most), trials[most], missed)


def find_fleet(question: PlanQuestion, node_type: NodeType, limit: TimeLimit | None) -> FleetOption:
    """The least number of a type that meets the goal. No limit: by the estimate alone."""
    workload, goal, most_nodes = question.workload, question.goal, question.most_nodes
    least = least_count(node_type, workload, goal)

    def fleet(count: int) -> tuple[FleetPart, ...]:
        return (FleetPart(node_type, count),)

    if limit is None:
        return fleet_option(question, fleet(least))
    if least > MOST_SERVERS // (node_type.servers * node_type.slots):
        return fleet_option(question, fleet(least), rejected=f"it would take {least:,} of it")
    trace = question.trace(min(least * node_type.servers, most_nodes) * node_type.slots)
    if impossible := why_impossible(node_type, trace, goal, workload.models):
        return fleet_option(question, fleet(least), rejected=impossible)
    most = min(least * MOST_MORE + 4, most_nodes // node_type.servers)
    if least > most:
        why = f"more than {most_nodes} nodes are not simulated"
        return fleet_option(question, fleet(least), why_estimated=why)
    return least_fleet(question, fleet, least, most, trace, limit)


def least_that(holds: Callable[[int], bool], least: int, most: int) -> int | None:
    """The least number from `least` to `most` for which it holds; None: it does for none.

    If it holds for a number, it must for all above. Steps grow, then halve: few are tried.
    """
    below, step, count = least - 1, 1, least
    while not holds(count):
        if count >= most:
            return None
        below, count = count, min(count + step, most)
        step *= 2
    while count - below > 1:
        middle = (below + count) // 2
        if holds(middle):
            count = middle
        else:
            below = middle
    return count
