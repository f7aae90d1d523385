from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from gateway.config.scheduling import ModelPlacementSettings
from gateway.schedule.core.model_placement import ModelPlacementPolicy
from gateway.workshop.simulate.fleets import (
    GIB,
    RouterFleet,
    SimulatedModel,
    describe_placement,
    from_text,
    greedy_placement,
    models_from_text,
    random_placements,
)
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


def test_a_fleet_is_read_from_text() -> None:
    machines = from_text("2x2@40:600, 1x4@16.5:250+0.3", 256, cache_ram_mib=0)
    known = [(m.name, m.slots, m.decode_tps, m.prefill_tps, m.batch_cost) for m in machines]
    assert known == [
        ("node-1", 2, 40.0, 600.0, 0.15),
        ("node-2", 2, 40.0, 600.0, 0.15),
        ("node-3", 4, 16.5, 250.0, 0.3),
    ]
    assert (machines[0].batch_tokens, machines[0].cache_tokens) == (256, 0)
    assert machines[0].token_step == pytest.approx(0.15 / 40)
    assert from_text("1x1@1:1")[0].cache_tokens == 65_536


ROUTER = from_text("1x1@10:1000/16GiB")
PAIR = [SimulatedModel("a", 8 * GIB, 8.0), SimulatedModel("b", 8 * GIB, 8.0)]
HALVES = [replace(ROUTER[0], name=name, host="epyc") for name in ("numa0", "numa1")]


class ByIndex(Front):
    """Sends each request to the instance of its place in the trace."""

    def arrive(self, job: Job) -> None:
        self.fleet.send(job, job.id)

    def ended(self, job: Job) -> None:
        pass


def test_instances_that_compute_at_the_same_time_share_their_routers_speed() -> None:
    ends = []
    for count in (1, 2):
        played = trace([job(prompt=1000, output=10) for _ in range(count)])
        fleet = simulate(ByIndex(RouterFleet(ROUTER, PAIR, played, loaded={0, 1})))
        ends.append([one.ended for one in fleet.jobs])
    # A second to read, of which the first token comes, and nine tokens.
    assert ends == [[pytest.approx(1.9, abs=0.1)], [pytest.approx(3.8, abs=0.1)] * 2]
    # When its neighbour has ended, an instance goes on faster: both take a tenth of a second to
    # read; then 10 s and 1 s alone.
    played = trace([job(output=101), job(output=11)])
    long, short = simulate(ByIndex(RouterFleet(ROUTER, PAIR, played, loaded={0, 1}))).jobs
    assert short.ended == pytest.approx(2.2, abs=0.1)
    assert long.ended == pytest.approx(0.2 + 1.0 + 10.0, abs=0.1)


def test_routers_of_one_host_share_its_memory() -> None:
    fleet = RouterFleet(HALVES, PAIR)
    names = [one.machine.name for one in fleet.instances]
    assert names == ["numa0/a", "numa0/b", "numa1/a", "numa1/b"]
    fleet.load(0)
    fleet.load(3)
    with pytest.raises(ValueError, match="numa1/a does not fit"):
        fleet.load(2)
    apart = RouterFleet([replace(one, host="") for one in HALVES], PAIR)
    for index in range(4):
        apart.load(index)


def test_placements_by_hand_hold_every_model_and_fit() -> None:
    routers = from_text("1x2@40:600/16GiB,1x2@40:600/24GiB,1x2@20:300/40GiB")
    models = models_from_text("6x2GiB:12GiB")
    fleet = RouterFleet(routers, models)
    placed = list(random_placements(fleet, 20, random.Random(1)))
    greedy = greedy_placement(fleet, {"model-1": 90, "model-6": 10})
    assert greedy is not None
    assert len(placed) > 10
    for indexes in (greedy, *placed):
        by_router = describe_placement(fleet, indexes)
        assert {name for names in by_router.values() for name in names} == {
            model.name for model in models
        }
        RouterFleet(routers, models, loaded=indexes)  # Raises where they don't fit.
    too_many = RouterFleet(ROUTER, [*PAIR, SimulatedModel("c", GIB, 1.0)])
    assert greedy_placement(too_many, {}) is None
    assert list(random_placements(too_many, 5, random.Random(1))) == []


# The gateway and a router by itself in front.


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


ONE, TWO = (from_text(f"{count}x2@10:1000/10GiB") for count in (1, 2))
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
