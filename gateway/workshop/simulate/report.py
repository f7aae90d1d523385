"""Reports: the figures of a run, and plots of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from gateway.config.scheduling import QueueSettings
from gateway.workshop.simulate.simulation import SimulatedFleet


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

    policy: str  # or another name of what is compared
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
    # Where machines are started and stopped, or models loaded.
    machine_hours: float = 0.0  # of all machines, from start to stop
    starts: int = 0
    loads: int = 0
    load_seconds: float = 0.0
    longest_wait: float = 0.0
    loaded: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By router: the models that were placed by hand."""
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False)
    """Quantiles for a plot, of TTFT and completion: 0 %, 0.5 %, ... 100 %."""

    def as_dict(self) -> dict[str, object]:
        """For scripts; without the curves."""
        figures = asdict(replace(self, curves={}))
        del figures["curves"]
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
    policy: str, fleet: SimulatedFleet, bound: float = 0.0, cpu_seconds: float = 0.0
) -> PolicyReport:
    """The report of a run; to be made before the trace is played again."""
    jobs = fleet.jobs
    seconds = fleet.ended - fleet.began
    slots = sum(machine.slots for machine in fleet.machines)
    prompt = sum(job.prompt.tokens for job in jobs)
    # By the trace's times: under overload the real arrivals of later turns are late.
    times = [job.time for job in jobs]
    span = slots * (max(times, default=0.0) - min(times, default=0.0))
    # At equal times a slot comes free before the next request arrives.
    changes = sorted([(job.began, -1) for job in jobs] + [(job.arrived, 1) for job in jobs])
    by_class: defaultdict[str, list[float]] = defaultdict(list)
    for job in jobs:
        by_class[job.priority_label].append(job.first - job.arrived)
    ttft = [job.first - job.arrived for job in jobs]
    completion = [job.ended - job.arrived for job in jobs]
    waits = [job.began - job.arrived for job in jobs]
    busy_seconds = sum(job.ended - job.began for job in jobs)
    return PolicyReport(
        policy,
        requests=len(jobs),
        completion=Percentiles.of(completion),
        ttft=Percentiles.of(ttft),
        wait=Percentiles.of(waits),
        service=busy_seconds / len(jobs) if jobs else 0.0,
        slots=slots,
        classes={label: Percentiles.of(values) for label, values in by_class.items()},
        seconds=seconds,
        tokens_per_second=sum(job.output for job in jobs) / seconds if seconds else 0.0,
        cached_share=sum(job.cached for job in jobs) / prompt if prompt else 0.0,
        utilisation=utilisation(fleet, slots),
        load=busy_seconds / span if span else None,
        longest_queue=max(accumulate((change for _, change in changes), initial=0)),
        too_late=sum(wait > LONGEST_WAIT for wait in waits),
        bound=bound,
        cpu_seconds=cpu_seconds,
        loads=fleet.loads,
        load_seconds=fleet.load_seconds,
        longest_wait=max(waits, default=0.0),
        curves={"ttft": _quantiles(ttft), "completion": _quantiles(completion)},
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


def utilisation(fleet: SimulatedFleet, slots: int) -> float:
    """Share of the slots' time in which they were busy: up to the last arrival.

    If all arrive at once, up to the end.
    """
    jobs, began = fleet.jobs, fleet.began
    last = max((job.arrived for job in jobs), default=0.0)
    until = last if last > began else fleet.ended
    span = slots * (until - began)
    busy = sum(min(job.ended, until) - job.began for job in jobs if job.began < until)
    return busy / span if span else 0.0


def _quantiles(values: list[float]) -> list[float]:
    ranked = sorted(values)
    places = (round(step * (len(ranked) - 1) / CURVE_STEPS) for step in range(CURVE_STEPS + 1))
    return [ranked[place] for place in places] if ranked else []


SHOWN_SHARE = 0.99  # of the requests, which curves show: the last per cent would squeeze the rest


def draw_shares(axes: Any, title: str, series: Mapping[str, Sequence[float]]) -> None:
    """Draw what share of the requests took how many seconds: a curve for each label."""
    ranked = {label: sorted(values) for label, values in series.items() if values}
    for label, values in ranked.items():
        shares = [place / len(values) for place in range(1, len(values) + 1)]
        axes.step(values, shares, where="post", label=label, linewidth=1.3)
    shown = (values[round(SHOWN_SHARE * (len(values) - 1))] for values in ranked.values())
    axes.set_xlim(0, max(shown, default=0.0) * 1.05 or 1.0)
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"{title}, seconds")
    axes.grid(alpha=0.3)
    if ranked:
        axes.legend(fontsize=7, loc="lower right")


def plot_reports(path: Path, reports: Sequence[PolicyReport], title: str) -> None:
    """Draw the curves of time to first token and of completion; the suffix gives the format.

    Needs the extra `plots`. Raises ValueError for an unknown suffix, and OSError.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=100, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"ttft": "time to first token", "completion": "completion"}
    for panel, (name, title_of) in zip(panels, titles.items(), strict=True):
        means = [f"{one.policy} (mean {getattr(one, name).mean:.3g} s)" for one in reports]
        values = (one.curves[name] for one in reports)
        draw_shares(panel, title_of, dict(zip(means, values, strict=True)))
    if bound := max((one.bound for one in reports), default=0.0):
        panels[1].axvline(bound, color="black", linestyle=":", linewidth=1)
        panels[1].annotate("bound of the mean", (bound, 0.02), fontsize=7, rotation=90)
    panels[0].set_ylabel("share of requests")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)
