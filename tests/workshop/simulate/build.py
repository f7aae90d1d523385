"""Small fleets and traces for the simulator's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gateway.workshop.simulate.fronts import LeastConn
from gateway.workshop.simulate.simulation import (
    Front,
    Job,
    SimulatedFleet,
    SimulatedMachine,
    Trace,
    TracePrompt,
    build_trace,
    simulate,
)


def machine(slots: int = 2) -> SimulatedMachine:
    """A machine of 1,000 prompt and 10 output tokens/s; a neighbour adds a tenth to a step."""
    return SimulatedMachine("node", slots, 1000.0, 10.0, 0.1)


def job(
    time: float = 0.0, prompt: int = 100, output: int = 10, *, stream: int = 0, head: int = 0,
    shared: int = 0, label: str = "normal", pause: float = 0.0,
) -> Job:  # fmt: skip
    """A request; without `stream` its text is its own."""
    made = Job(0, time, TracePrompt(stream, prompt, head, shared), output, 4096, label, pause=pause)
    if not stream:
        made.prompt = made.prompt._replace(stream=-id(made))
    return made


def trace(jobs: Iterable[Job]) -> Trace:
    """A trace of these."""
    return build_trace(list(jobs))


def play(
    jobs: Iterable[Job],
    machines: Sequence[SimulatedMachine],
    build: Callable[[SimulatedFleet], Front] = LeastConn,
) -> SimulatedFleet:
    """Play these through a front on these machines; the fleet, which has the results."""
    return simulate(build(SimulatedFleet(machines, trace(jobs))))
