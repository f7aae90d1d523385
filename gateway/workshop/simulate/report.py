"""Reports: the figures of a run, beside a bound that no schedule could beat; plots of them.

The lower bound of the mean completion is one for any schedule, even one that knows everything. It
holds for the nodes of `simulation.py` and the arrivals of one run. Each assumption is in favour of
the schedule:

- every request finds cached all that could be: its conversation's last turn and its shared prefix,
  if an earlier request has read them;
- on a node it is as fast as if it were alone there: `s`, seconds;
- a node's work per second is limited. A step with p prompt tokens and k decoding slots takes
  max(base, p / prefill) + step x k, and k is at most the number of slots. So for any share a of
  0..1 a request costs its node at least
  `w` = (1 - a) u / prefill + (o - 1) (a (base - step) / slots + step) seconds,
  for u uncached tokens and o output tokens.

**By capacity.** A request that ends more than D seconds after the last arrival took D seconds or
more. All others share the nodes' time until then, T seconds each. With a price l >= 0 for a second
of each kind of node, by weak duality the sum of all completions is at least

    sum over requests of min(D, min over kinds of (s + l w)) - T x sum over nodes of l

for any D, a and prices: good ones are searched for on a sample, and the sum is taken over all.

**By queueing.** All nodes together are no better than one server of their summed speed that always
serves the request with the least work left, the best order for a single server (Schrage, 1968).
This one matters above capacity.

The result is the larger of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path

from gateway.config.scheduling import QueueSettings
from gateway.workshop.simulate.simulation import (
    Job,
    SimulatedMachine,
    SimulationResult,
    unread_tokens,
)

SAMPLE_REQUESTS = 400  # requests in the sample
MOST_NODE_KINDS = 6  # more kinds of nodes than this are merged into bands, each as fast as its best
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
PRICES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
PRICE_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class _Kind:
    """Equal nodes, or nodes that are at most as fast as this. Seconds per token."""

    nodes: int
    read: float
    base: float
    step: float
    slots: int

    def alone(self, uncached: int, output: int) -> float:
        return max(self.base, uncached * self.read) + (output - 1) * self.base

    def rates(self, share: float) -> tuple[float, float]:
        """Least seconds that an uncached token and an output token cost the node."""
        writing = share * (self.base - self.step) / self.slots + self.step
        return (1.0 - share) * self.read, writing


def lower_bound(result: SimulationResult) -> float:
    """Least possible mean completion of these arrivals on these nodes, seconds."""
    jobs = result.jobs
    if not jobs:
        return 0.0
    kinds = _kinds(server.machine for server in result.servers)
    unread = unread_tokens(sorted(jobs, key=lambda job: job.began))
    needs = [(uncached, job.output) for job, uncached in zip(jobs, unread, strict=True)]
    last = max(job.arrived for job in jobs)
    capacity = _by_capacity(kinds, needs, last - result.began)
    queueing = max(_by_queueing(kinds, jobs, needs, share) for share in SHARES)
    return max(capacity, queueing) / len(jobs)


def _kinds(machines: Iterable[SimulatedMachine]) -> list[_Kind]:
    counted: dict[tuple[float, float, float, int], int] = {}
    for machine in machines:
        step = min(machine.token_step, machine.token_base)
        key = (machine.token_base, 1.0 / machine.prefill_tps, step, machine.slots)
        counted[key] = counted.get(key, 0) + 1
    ranked = sorted(counted.items())
    band = -(-len(ranked) // MOST_NODE_KINDS)
    kinds = []
    for place in range(0, len(ranked), band):
        part = ranked[place : place + band]
        base, read, step = (min(key[i] for key, _ in part) for i in range(3))
        most = max(key[3] for key, _ in part)
        kinds.append(_Kind(sum(count for _, count in part), read, base, step, most))
    return kinds


def _by_capacity(kinds: list[_Kind], needs: list[tuple[int, int]], span: float) -> float:
    """A lower bound of the sum of all completions."""
    sample = needs[:: max(1, len(needs) // SAMPLE_REQUESTS)]
    scale = len(needs) / len(sample)
    slowest = sorted(max(kind.alone(*need) for kind in kinds) for need in sample)
    best = (0.0, 0.0, 0.0, [0.0] * len(kinds))
    for late in {slowest[len(slowest) // 2], slowest[-1], 2 * slowest[-1]}:
        for share in SHARES:
            prices = [0.0] * len(kinds)
            value = _dual(kinds, sample, scale, span, late, share, prices=prices)
            for _ in range(PRICE_ROUNDS):
                for place in range(len(kinds)):
                    for price in PRICES:
                        tried = [*prices[:place], price, *prices[place + 1 :]]
                        found = _dual(kinds, sample, scale, span, late, share, prices=tried)
                        if found > value:
                            value, prices = found, tried
            if value > best[0]:
                best = (value, late, share, prices)
    _, late, share, prices = best
    return _dual(kinds, needs, 1.0, span, late, share, prices=prices)


def _dual(
    kinds: list[_Kind],
    needs: list[tuple[int, int]],
    scale: float,
    span: float,
    late: float,
    share: float,
    prices: list[float],
) -> float:
    paid = sum(price * kind.nodes for price, kind in zip(prices, kinds, strict=True))
    terms = []
    for kind, price in zip(kinds, prices, strict=True):
        read, write = kind.rates(share)
        terms.append((kind.base, kind.read, price * read, price * write))
    total = 0.0
    for uncached, output in needs:
        least = late
        written = output - 1
        for base, reading, priced_read, priced_write in terms:
            read = uncached * reading
            cost = max(read, base) + written * base
            cost += uncached * priced_read + written * priced_write
            least = min(least, cost)
        total += least
    return total * scale - paid * (span + late)


def _by_queueing(
    kinds: list[_Kind], jobs: Sequence[Job], needs: list[tuple[int, int]], share: float
) -> float:
    """The sum of all completions on one server of the summed speed, least work left first."""
    rates = [kind.rates(share) for kind in kinds]
    read, write = (max(rate[i] for rate in rates) for i in range(2))
    # The most that a node of each kind can be worth, in nodes of the highest costs.
    speed = 0.0
    for kind, (own_read, own_write) in zip(kinds, rates, strict=True):
        ratios = [
            slowest / own for slowest, own in ((read, own_read), (write, own_write)) if slowest > 0
        ]
        speed += kind.nodes * max(ratios)
    order = sorted(range(len(jobs)), key=lambda place: jobs[place].arrived)
    left: list[float] = []
    total = 0.0
    now = 0.0
    for place in order:
        arrived = jobs[place].arrived
        while left and now + left[0] <= arrived:
            now += heappop(left)
            total += now
        if left:
            # The smallest stays the smallest, so the heap stays valid.
            left[0] -= max(0.0, arrived - now)
        now = max(now, arrived)
        uncached, output = needs[place]
        heappush(left, (uncached * read + (output - 1) * write) / speed)
        total -= arrived
    while left:
        now += heappop(left)
        total += now
    return total


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles of a list of seconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Of values in any order; all 0 for no value. Percentiles by the nearest rank."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0)
        ranked = sorted(values)
        last = len(ranked) - 1
        p50, p95, p99 = (ranked[round(share * last)] for share in (0.5, 0.95, 0.99))
        return cls(sum(ranked) / len(ranked), p50, p95, p99)


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """One policy's figures. Times are seconds from a request's arrival."""

    policy: str
    requests: int
    completion: Percentiles  # until the last token
    ttft: Percentiles  # until the first token
    wait: Percentiles  # until it got a slot: in the front's queue or inside a node
    service: float  # mean seconds in a slot
    slots: int
    classes: dict[str, Percentiles]  # TTFT by class
    seconds: float  # from the first arrival to the last end
    tokens_per_second: float  # output tokens
    cached_share: float  # share of the prompt tokens that were cached
    utilisation: float  # share of the slots' time in which they were busy, while requests arrived
    load: float | None = None
    """Seconds of work that arrived per second of the slots; None: all arrived at once."""
    longest_queue: int = 0  # the most requests that waited for a slot at one time
    too_late: int = 0
    """Requests that waited longer than `LONGEST_WAIT`: the simulation refuses none."""
    bound: float = 0.0
    """Lower bound of the mean completion under any schedule (`lower_bound`); 0: not computed."""
    cpu_seconds: float = 0.0  # CPU time that its simulation took
    curve: tuple[float, ...] = field(default=(), repr=False)
    """Quantiles of TTFT for a plot: 0 %, 0.5 %, ... 100 %."""
    completion_curve: tuple[float, ...] = field(default=(), repr=False)
    """The same of the completion."""

    def as_dict(self) -> dict[str, object]:
        """For scripts; without the curves."""
        figures = asdict(self)
        del figures["curve"], figures["completion_curve"]
        return figures | {"ratio": self.ratio, "overloaded": self.overloaded}

    @property
    def ratio(self) -> float:
        """Mean completion divided by the bound."""
        return self.completion.mean / self.bound if self.bound else 0.0

    @property
    def overloaded(self) -> bool:
        """Whether more work arrived than the fleet can do, so that the queue grew."""
        return (
            self.load is not None
            and self.load > 1.0
            and self.utilisation > OVERLOAD_UTILISATION
            and self.longest_queue > self.slots
        )


# Seconds after which the gateway refuses with its default settings (503 `queue_timeout`).
LONGEST_WAIT = QueueSettings().max_wait
# A fleet busier than this is full: slots also idle between the turns of conversations.
OVERLOAD_UTILISATION = 0.85
CURVE_STEPS = 200  # steps of the curves


def summarise(
    policy: str, result: SimulationResult, bound: float = 0.0, cpu_seconds: float = 0.0
) -> PolicyReport:
    """The report of a run; to be made before the trace is played again."""
    jobs = result.jobs
    seconds = result.ended - result.began
    slots = sum(server.machine.slots for server in result.servers)
    prompt = sum(job.prompt.tokens for job in jobs)
    ttft = [job.first - job.arrived for job in jobs]
    completion = [job.ended - job.arrived for job in jobs]
    busy_seconds = sum(job.ended - job.began for job in jobs)
    return PolicyReport(
        policy,
        requests=len(jobs),
        completion=Percentiles.of(completion),
        ttft=Percentiles.of(ttft),
        wait=Percentiles.of([job.began - job.arrived for job in jobs]),
        service=busy_seconds / len(jobs) if jobs else 0.0,
        slots=slots,
        classes=_by_class(jobs),
        seconds=seconds,
        tokens_per_second=sum(job.output for job in jobs) / seconds if seconds else 0.0,
        cached_share=sum(job.cached for job in jobs) / prompt if prompt else 0.0,
        utilisation=utilisation(result, slots),
        load=_load(jobs, busy_seconds, slots),
        longest_queue=_longest_queue(jobs),
        too_late=sum(job.began - job.arrived > LONGEST_WAIT for job in jobs),
        bound=bound,
        cpu_seconds=cpu_seconds,
        curve=_curve(ttft),
        completion_curve=_curve(completion),
    )


def overload_warning(reports: Sequence[PolicyReport]) -> str:
    """A warning about policies under which the fleet is overloaded; empty: there are none."""
    overloaded = "\n".join(
        f"  {one.policy}: {one.load:.0%} of what it can do; up to {one.longest_queue:,} waited; "
        f"{one.too_late:,} of {one.requests:,} requests waited longer than {LONGEST_WAIT:.0f} s"
        for one in reports
        if one.overloaded
    )
    if not overloaded:
        return ""
    return f"""\
OVERLOAD: more work arrives than this fleet can do, and the queue grows all the time.
{overloaded}
Here every request waits; the gateway would refuse those that wait longer than queue.max_wait (503
queue_timeout). So the waits above depend on how long the traffic lasts. Remedy: more nodes or
slots, or less traffic."""


def utilisation(result: SimulationResult, slots: int) -> float:
    """Share of the slots' time in which they were busy: up to the last arrival.

    If all arrive at once, up to the end.
    """
    jobs = result.jobs
    last = max((job.arrived for job in jobs), default=0.0)
    until = last if last > result.began else result.ended
    span = slots * (until - result.began)
    busy = sum(min(job.ended, until) - job.began for job in jobs if job.began < until)
    return busy / span if span else 0.0


def _load(jobs: Sequence[Job], busy_seconds: float, slots: int) -> float | None:
    """By the trace's times: under overload the real arrivals of later turns are late."""
    times = [job.time for job in jobs]
    span = max(times, default=0.0) - min(times, default=0.0)
    return busy_seconds / (slots * span) if slots and span else None


def _longest_queue(jobs: Sequence[Job]) -> int:
    # At equal times a slot comes free before the next request arrives.
    changes = sorted([(job.began, -1) for job in jobs] + [(job.arrived, 1) for job in jobs])
    return max(accumulate((change for _, change in changes), initial=0))


def _by_class(jobs: Sequence[Job]) -> dict[str, Percentiles]:
    found: dict[str, list[float]] = {}
    for job in jobs:
        found.setdefault(job.priority_label, []).append(job.first - job.arrived)
    return {label: Percentiles.of(values) for label, values in found.items()}


def _curve(values: list[float]) -> tuple[float, ...]:
    ranked = sorted(values)
    last = len(ranked) - 1
    return (
        tuple(ranked[round(step * last / CURVE_STEPS)] for step in range(CURVE_STEPS + 1))
        if ranked
        else ()
    )


# Share of the requests that the curves show: the last per cent would squeeze the rest.
SHOWN_SHARE = 0.99


def plot_reports(path: Path, reports: Sequence[PolicyReport], title: str) -> None:
    """Draw the curves of time to first token and of completion; the suffix gives the format.

    Needs the extra `plots`. Raises ValueError for an unknown suffix, and OSError.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=100, layout="constrained")
    shares = [step / CURVE_STEPS for step in range(CURVE_STEPS + 1)]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, what in zip(panels, ("time to first token", "completion"), strict=True):
        farthest = 0.0
        for one in reports:
            first = what.startswith("time")
            curve = one.curve if first else one.completion_curve
            spread = one.ttft if first else one.completion
            if not curve:
                continue
            axes.plot(
                curve, shares, label=f"{one.policy} (mean {spread.mean:.3g} s)", linewidth=1.3
            )
            farthest = max(farthest, curve[round(SHOWN_SHARE * CURVE_STEPS)])
        axes.set_xlim(0, farthest * 1.02 or 1.0)
        axes.set_xlabel(f"{what}, seconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower right")
    bound = max((one.bound for one in reports), default=0.0)
    if bound:
        panels[1].axvline(bound, color="black", linestyle=":", linewidth=1)
        panels[1].annotate("bound of the mean", (bound, 0.02), fontsize=7, rotation=90)
    panels[0].set_ylabel("share of requests")
    panels[0].set_ylim(0, 1)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)
