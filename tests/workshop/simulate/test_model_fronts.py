from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gateway.config.scheduling import ModelPlacementSettings, ModelRule
from gateway.schedule.core.model_placement import ModelPlacementPolicy
from gateway.workshop.simulate.fleets import (
    GIB,
    RouterFleet,
    SimulatedModel,
    from_text,
)
from gateway.workshop.simulate.fronts import (
    FewestConnections,
    GatewayFront,
    LeastRecentlyUsed,
    ModelPlacingFront,
)
from gateway.workshop.simulate.simulation import Front, Job, simulate
from tests.each_case import each_case
from tests.workshop.simulate.build import job, trace

ONE = from_text("1x2@10:1000/10GiB")
TWO = from_text("2x2@10:1000/10GiB")
MODELS = [SimulatedModel(name, 8 * GIB, 5.0) for name in ("a", "b", "c")]


def asking(*requests: tuple[float, str], **more: str) -> list[Job]:
    """Requests of a second each: when, and for which model."""
    made = []
    for time, model in requests:
        made.append(job(time, prompt=100, output=10, **more))  # type: ignore[arg-type]
        made[-1].model = model
    return made


def played(
    jobs: Sequence[Job],
    build: Callable[[RouterFleet], Front],
    routers: object = ONE,
    loaded: Sequence[int] = (),
) -> RouterFleet:
    fleet = RouterFleet(routers, MODELS, trace(jobs), loaded)  # type: ignore[arg-type]
    simulate(build(fleet))
    return fleet


def placing(
    models: Mapping[str, ModelRule] | None = None, **settings: float
) -> Callable[[RouterFleet], Front]:
    policy = ModelPlacementPolicy(ModelPlacementSettings(**settings), models)  # type: ignore[arg-type]
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


@each_case("build", [FewestConnections, GatewayFront])
def test_placed_by_hand_nothing_is_loaded_and_nodes_that_have_the_model_serve(
    build: Callable[[RouterFleet], Front],
) -> None:
    fleet = played(asking((0.0, "a"), (0.0, "a"), (0.0, "b")), build, TWO, loaded=(0, 4))
    assert fleet.loads == 0
    assert [one.node for one in fleet.jobs] == [0, 0, 4]


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


def test_an_overloaded_router_spends_little_of_its_time_on_loads() -> None:
    # Two slots, requests of a second, and one more of them every 0.4 s: there is always a queue.
    jobs = asking(*((place * 0.4, "abc"[place % 3]) for place in range(300)))
    fleet = played(jobs, placing(starvation=20.0))
    lasted = max(one.ended for one in fleet.jobs)
    assert fleet.load_seconds <= 0.2 * lasted


def test_batch_rows_wait_for_memory_that_callers_do_not_use() -> None:
    callers = asking(*((place * 5.0, "a") for place in range(40)))
    rows = asking((20.0, "b"), (21.0, "b"), label="batch")
    fleet = played([*callers, *rows], placing())
    last = max(one.ended for one in fleet.jobs if one.model == "a")
    assert all(one.began > last for one in fleet.jobs if one.model == "b")


def test_an_idle_model_is_unloaded_by_its_rules() -> None:
    rules = {"a": ModelRule(idle_unload=30.0)}
    jobs = asking((0.0, "a"), (100.0, "b"), (101.0, "b"))
    fleet = played(jobs, placing(models=rules), TWO)
    assert {fleet.model_of(index).name for index in fleet.held} == {"b"}
