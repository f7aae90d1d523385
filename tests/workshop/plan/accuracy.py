"""How near the first estimate is to the simulator: `python -m tests.workshop.plan.accuracy`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from gateway.workshop.plan.search import (
    FleetPart,
    FleetTrial,
    TimeLimit,
    WaitEstimate,
    Workload,
    estimate,
    make_trace,
    node_times,
)
from tests.workshop.plan.build import a_type, try_fleet

USES = (0.3, 0.6, 0.8)
SEED = 11


@dataclass(frozen=True, slots=True)
class Shape:
    """A fleet of equal nodes, and its requests. Tokens, and tokens per second."""

    nodes: int
    slots: int
    decode: float
    prefill: float
    prompt: float
    completion: float


SHAPES = (
    Shape(1, 1, 10, 100, 300, 100),
    Shape(3, 1, 10, 100, 100, 100),
    Shape(1, 2, 10, 100, 300, 100),
    Shape(1, 4, 10, 100, 800, 100),
    Shape(2, 2, 40, 600, 1500, 180),
    Shape(4, 2, 10, 100, 300, 100),
)


def both(shape: Shape, use: float, requests: int) -> tuple[WaitEstimate, FleetTrial]:
    """The estimate and the simulation of a fleet that is used to this share of its capacity."""
    node_type = a_type(slots=shape.slots, decode_tps=shape.decode, prefill_tps=shape.prefill)
    times = node_times(node_type.machine("m"), shape.prompt, shape.completion)
    arrivals = use * shape.nodes * times.capacity
    workload = Workload(arrivals * 3600, shape.prompt, shape.completion)
    found = estimate(times, shape.nodes, arrivals, lengths_scv=workload.lengths_scv)
    trace = make_trace(workload, requests, SEED)
    trial = try_fleet((FleetPart(node_type, shape.nodes),), trace, TimeLimit(3600.0))
    return found, trial


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    given = parser.parse_args()
    print("| nodes x slots | prompt, completion | use | estimate | simulator (± 95 %) | off |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        for use in USES:
            found, trial = both(shape, use, given.requests)
            off = found.wait / trial.wait.mean - 1 if trial.wait.mean else 0.0
            print(
                f"| {shape.nodes} x {shape.slots} | {shape.prompt:g}, {shape.completion:g} | "
                f"{use:.0%} | {found.wait:.3g} s | {trial.wait.mean:.3g} ± {trial.wait_error:.2g} "
                f"s | {off:+.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
