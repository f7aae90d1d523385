from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from gateway.config.scheduling import ModelPlacementSettings
from gateway.schedule.core.model_placement import ModelPlacementPolicy
from gateway.workshop.simulate.fleets import GIB, RouterFleet, SimulatedModel, from_text
from gateway.workshop.simulate.fronts import (
    ExactKnowledge,
    GatewayFront,
    Knowledge,
    LearntKnowledge,
    LeastRecentlyUsed,
    ModelPlacingFront,
)
from gateway.workshop.simulate.simulation import Front, Job, SimulatedMachine, simulate
from tests.workshop.simulate.build import job, machine, play, trace


@pytest.mark.parametrize("knowledge", [ExactKnowledge, LearntKnowledge])
def test_a_request_that_waited_finds_what_was_cached_meanwhile(knowledge: Knowledge) -> None:
    """One slot: the second turn of a conversation arrives while the first one runs."""
    jobs = [
        job(prompt=1000, output=100, stream=1, head=5, shared=900),
        job(time=0.5, prompt=1100, output=5, stream=2, head=5, shared=900),
    ]
    play(jobs, [machine(1)], partial(GatewayFront, knowledge=knowledge))
    assert jobs[1].began == jobs[0].ended
    assert jobs[1].cached == 900


ONE = from_text("1x2@10:1000/10GiB")
TWO = from_text("2x2@10:1000/10GiB")
MODELS = [SimulatedModel(name, 8 * GIB, 5.0) for name in ("a", "b", "c")]


def asking(*requests: tuple[float, str]) -> list[Job]:
    """Requests of a second each: when, and for which model."""
    made = []
    for time, model in requests:
        made.append(job(time, prompt=100, output=10))
        made[-1].model = model
    return made


def played(
    jobs: Sequence[Job],
    build: Callable[[RouterFleet], Front],
    routers: Sequence[SimulatedMachine] = ONE,
) -> RouterFleet:
    fleet = RouterFleet(routers, MODELS, trace(jobs))
    simulate(build(fleet))
    return fleet


def placing(**settings: Any) -> Callable[[RouterFleet], Front]:
    policy = ModelPlacementPolicy(ModelPlacementSettings(**settings))
    return partial(ModelPlacingFront, placement=policy)


def test_a_router_by_itself_loads_the_model_of_a_request_and_unloads_the_least_recent() -> None:
    jobs = asking((0.0, "a"), (10.0, "b"), (20.0, "a"))
    fleet = played(jobs, LeastRecentlyUsed)
    assert fleet.loads == 3
    assert [round(one.began - one.arrived) for one in fleet.jobs] == [5, 6, 6]
    # It lets requests end before it unloads their model.
    jobs = asking((0.0, "a"), (5.5, "b"), (5.6, "a"))
    first, other, later = played(jobs, LeastRecentlyUsed).jobs
    assert other.began - first.ended >= 6.0
    assert later.began > other.ended


def test_the_gateway_serves_a_queue_before_it_changes_the_model() -> None:
    def alternating(seconds: float) -> list[Job]:
        return asking(*((place * seconds, "ab"[place % 2]) for place in range(60)))

    alone = played(alternating(2.0), LeastRecentlyUsed).loads
    assert played(alternating(2.0), placing()).loads < alone
    # With two routers each model has a node of its own.
    fleet = played(alternating(0.7), placing(), TWO)
    assert fleet.loads == 2
    assert len({(one.model, one.node) for one in fleet.jobs}) == 2


def test_no_model_waits_longer_than_the_bound_and_a_load() -> None:
    jobs = asking(*((place * 0.4, "a") for place in range(300)), (30.0, "b"), (31.0, "c"))
    fleet = played(jobs, placing(starvation=20.0))
    waits = {one.model: one.began - one.arrived for one in fleet.jobs if one.model != "a"}
    # The last ones of `a` must end, and c waits for the hysteresis of b.
    assert waits["b"] <= 20.0
    assert waits["c"] <= 20.0 + 10.0 + 8.0
