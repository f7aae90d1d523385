"""Finds the least number of equal nodes that meets a goal, by trials."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gateway.tools.plan.catalogue import NodeType
from gateway.tools.plan.occupancy import NodeTimes, WaitEstimate, estimate, node_times
from gateway.tools.plan.queueing import MOST_SERVERS
from gateway.tools.plan.trial import (
    MOST_SIMULATED_NODES,
    FleetPart,
    FleetTrial,
    OutOfTimeError,
    TimeLimit,
    alone,
    hours,
    try_fleet,
)
from gateway.tools.plan.workload import Workload
from gateway.tools.simulate.trace import Trace

MOST_USE = 0.8
"""Share of the capacity that is planned with where no goal says how long requests may wait."""

MOST_USE_WITH_GOAL = 0.95
"""Never more: above it waits grow for longer than any simulation lasts."""

MOST_MORE = 64
"""Nodes up to which the search goes, as a multiple of the least."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked of a fleet. Seconds; None: nothing."""

    ttft_p95: float | None = None
    completion_p95: float | None = None
    most_use: float = MOST_USE
    """Share of the capacity, where none of the two is given."""

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

    def misses(self, ttft_p95: float, completion_p95: float) -> list[str]:
        """What is missed, and by how much."""
        found = []
        for name, value, goal in (
            ("TTFT p95", ttft_p95, self.ttft_p95),
            ("completion p95", completion_p95, self.completion_p95),
        ):
            if goal is not None and value > goal:
                found.append(f"{name} {value:.2f} s, {value - goal:.2f} s above the goal")
        return found


@dataclass(frozen=True, slots=True)
class FoundFleet:
    """Equal nodes for a goal."""

    node_type: NodeType
    count: int
    """Of the type; its servers are more where it has several."""
    times: NodeTimes
    estimate: WaitEstimate
    trial: FleetTrial | None
    """None: not simulated."""
    impossible: str = ""
    """Why no number of these nodes meets the goal; empty: one does."""
    why_estimated: str = ""
    """Why it was not simulated."""

    @property
    def parts(self) -> tuple[FleetPart, ...]:
        """The fleet."""
        return (FleetPart(self.node_type, self.count),)


def times_of(node_type: NodeType, workload: Workload) -> NodeTimes:
    """What a mean request takes of a server of this type."""
    return node_times(node_type.machine("server"), workload.uncached, workload.completion)


def least_count(node_type: NodeType, workload: Workload, goal: Goal) -> int:
    """The number that can do the work at all, at the use that the goal allows."""
    capacity = times_of(node_type, workload).capacity * node_type.servers
    use = 1.0 if workload.backlog_hours is not None else goal.use
    return max(1, math.ceil(workload.arrivals / (capacity * use) - 1e-9))


def most_count(node_type: NodeType) -> int:
    """More of a type than this are no fleet."""
    return MOST_SERVERS // (node_type.servers * node_type.slots)


def estimated(node_type: NodeType, count: int, workload: Workload) -> WaitEstimate:
    """The first estimate of so many of a type, `most_count` at most."""
    count = min(count, most_count(node_type))
    return estimate(
        times_of(node_type, workload),
        count * node_type.servers,
        workload.arrivals,
        arrival_scv=workload.arrival_scv,
        lengths_scv=workload.lengths_scv,
    )


def why_impossible(node_type: NodeType, trace: Trace, goal: Goal) -> str:
    """The figure that keeps any number of this type from the goal, and by how much; or nothing."""
    ttft, completion = alone(trace.jobs, node_type)
    speeds = []
    if goal.ttft_p95 is not None and ttft > goal.ttft_p95:
        need = node_type.prefill_tps * ttft / goal.ttft_p95
        speeds.append(
            f"prefill_tps {node_type.prefill_tps:g} makes a TTFT p95 of {ttft:.2f} s on an idle "
            f"node, {ttft - goal.ttft_p95:.2f} s above the goal of {goal.ttft_p95:g} s: it would "
            f"take {need:.0f} tokens/s"
        )
    if goal.completion_p95 is not None and completion > goal.completion_p95:
        factor = completion / goal.completion_p95
        speeds.append(
            f"decode_tps {node_type.decode_tps:g} and prefill_tps {node_type.prefill_tps:g} make a "
            f"completion p95 of {completion:.2f} s on an idle node, "
            f"{completion - goal.completion_p95:.2f} s above the goal of "
            f"{goal.completion_p95:g} s: both would have to be {factor:.2f} times as fast"
        )
    return "; ".join(speeds)


def find_fleet(
    node_type: NodeType,
    workload: Workload,
    goal: Goal,
    trace: Trace,
    limit: TimeLimit,
    seed: int,
    *,
    warm: bool = False,
) -> FoundFleet:
    """The least number of a type that meets the goal."""
    times = times_of(node_type, workload)
    least = least_count(node_type, workload, goal)

    def found(
        count: int, trial: FleetTrial | None, impossible: str = "", why: str = ""
    ) -> FoundFleet:
        guess = estimated(node_type, count, workload)
        return FoundFleet(node_type, count, times, guess, trial, impossible, why)

    if least > most_count(node_type):
        return found(least, None, f"it would take {least:,} of it")
    if impossible := why_impossible(node_type, trace, goal):
        return found(least, None, impossible)
    trials: dict[int, FleetTrial] = {}

    def meets(count: int) -> bool:
        if count not in trials:
            parts = (FleetPart(node_type, count),)
            backlog = workload.requests_per_hour if workload.backlog_hours is not None else None
            trials[count] = try_fleet(parts, trace, limit, backlog=backlog, seed=seed, warm=warm)
        return meets_goal(trials[count], workload, goal)

    most = min(least * MOST_MORE + 4, MOST_SIMULATED_NODES // node_type.servers)
    if least > most:
        return found(least, None, why=f"more than {MOST_SIMULATED_NODES} nodes are not simulated")
    try:
        count = least_that(meets, least, most)
    except OutOfTimeError as error:
        done = [one for one, trial in trials.items() if meets_goal(trial, workload, goal)]
        best = min(done, default=None)
        if best is not None:
            return found(best, trials[best], why=f"perhaps fewer: {error}")
        return found(max(trials, default=least), None, why=str(error))
    if count is None:
        missed = goal.misses(trials[most].ttft.p95, trials[most].completion.p95)
        return found(most, trials[most], f"{most} of it still miss the goal: {', '.join(missed)}")
    return found(count, trials[count])


def meets_goal(trial: FleetTrial, workload: Workload, goal: Goal) -> bool:
    """Whether a trial meets the goal; of a backlog: whether it ends in time."""
    if workload.backlog_hours is not None:
        return hours(trial.seconds) <= workload.backlog_hours
    return not goal.misses(trial.ttft.p95, trial.completion.p95)


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
