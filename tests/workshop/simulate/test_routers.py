from __future__ import annotations

import random
from pathlib import Path

import pytest

from gateway.workshop.simulate.fleets import FleetError, ServerSetup, from_text
from gateway.workshop.simulate.routers import (
    GIB,
    RouterFleet,
    SimulatedModel,
    check_fit,
    describe_placement,
    greedy_placement,
    models_from_text,
    random_placements,
)
from gateway.workshop.simulate.simulation import Front, SimulatedFleet, simulate
from gateway.workshop.simulate.trace import Job
from tests.workshop.simulate.build import job, trace

ROUTER = from_text("1x1@10:1000/16GiB", ServerSetup())
PAIR = [SimulatedModel("a", 8 * GIB, 8.0), SimulatedModel("b", 8 * GIB, 8.0)]


class ByIndex(Front):
    """Sends each request to the instance of its place in the trace."""

    alarm = float("inf")

    def arrive(self, job: Job, fleet: SimulatedFleet) -> None:
        fleet.send(job, job.id)

    def ended(self, job: Job, fleet: SimulatedFleet) -> None:
        pass


def test_instances_that_compute_at_the_same_time_share_their_routers_speed() -> None:
    both = trace([job(prompt=1000, output=10), job(prompt=1000, output=10)])
    alone = trace([job(prompt=1000, output=10)])
    ends = []
    for jobs in (alone.jobs, both.jobs):
        played = alone if jobs is alone.jobs else both
        fleet = RouterFleet(ROUTER, PAIR, jobs, loaded={0, 1})
        simulate(played, (), ByIndex(), fleet=fleet)
        ends.append([one.ended for one in jobs])
    # A second to read, of which the first token comes, and nine tokens.
    assert ends == [[pytest.approx(1.9, abs=0.1)], [pytest.approx(3.8, abs=0.1)] * 2]


def test_an_instance_goes_on_faster_when_its_neighbour_has_ended() -> None:
    played = trace([job(output=101), job(output=11)])
    fleet = RouterFleet(ROUTER, PAIR, played.jobs, loaded={0, 1})
    simulate(played, (), ByIndex(), fleet=fleet)
    long, short = played.jobs
    # Both take a tenth of a second to read; then 10 s and 1 s alone.
    assert short.ended == pytest.approx(2.2, abs=0.1)
    assert long.ended == pytest.approx(0.2 + 1.0 + 10.0, abs=0.1)


def test_a_larger_model_is_slower_in_proportion() -> None:
    models = [SimulatedModel("small", 4 * GIB, 1.0), SimulatedModel("large", 12 * GIB, 1.0)]
    small, large = RouterFleet(ROUTER, models, ()).servers
    assert small.machine.decode_tps == 20.0
    assert large.machine.decode_tps == pytest.approx(20 / 3)


def test_a_fleet_refuses_what_no_router_can_do() -> None:
    fleet = RouterFleet(ROUTER, [*PAIR, SimulatedModel("c", GIB, 1.0)], [job()], loaded={0, 1})
    with pytest.raises(ValueError, match="node-1/c does not fit"):
        fleet.begin_load(2)
    with pytest.raises(ValueError, match="node-1/c is not loaded"):
        fleet.send(fleet.jobs[0], 2)
    fleet.send(fleet.jobs[0], 0)
    with pytest.raises(ValueError, match="node-1/a works"):
        fleet.begin_unload(0)
    fleet.begin_unload(1)
    with pytest.raises(ValueError, match="does not fit"):
        fleet.begin_load(2)
    fleet.end_unload(1)
    assert fleet.begin_load(2) == 1.0


def test_placements_by_hand_hold_every_model_and_fit() -> None:
    routers = from_text("1x2@40:600/16GiB,1x2@40:600/24GiB,1x2@20:300/40GiB", ServerSetup())
    models = models_from_text("6x2GiB:12GiB")
    placed = list(random_placements(routers, models, 20, random.Random(1)))
    greedy = greedy_placement(routers, models, {"model-1": 90, "model-6": 10})
    assert greedy is not None
    assert len(placed) > 10
    for indexes in (greedy, *placed):
        by_router = describe_placement(routers, models, indexes)
        assert {name for names in by_router.values() for name in names} == {
            model.name for model in models
        }
        RouterFleet(routers, models, (), loaded=indexes)  # Raises where they don't fit.


def test_there_is_no_placement_by_hand_where_the_models_do_not_fit_at_once() -> None:
    models = [*PAIR, SimulatedModel("c", GIB, 1.0)]
    assert greedy_placement(ROUTER, models, {}) is None
    assert list(random_placements(ROUTER, models, 5, random.Random(1))) == []


def test_models_are_read_from_text_and_from_a_file(tmp_path: Path) -> None:
    assert [(one.name, one.memory // GIB) for one in models_from_text("3x2GiB:8GiB")] == [
        ("model-1", 2),
        ("model-2", 4),
        ("model-3", 8),
    ]
    path = tmp_path / "models.yaml"
    path.write_text(
        "- {name: qwen3-8b, memory: 9GiB}\n- {name: tiny, memory: 1GiB, load_seconds: 3}\n"
    )
    assert models_from_text(str(path)) == [
        SimulatedModel("qwen3-8b", 9 * GIB, 9.0),
        SimulatedModel("tiny", GIB, 3.0),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: a}", "entry 1 is no model"),
        ("- {name: a, memory: 1GiB, load_seconds: -1}", "entry 1 is no model"),
        ("- {name: a, memory: 1GiB}\n- {name: a, memory: 1GiB}", "one twice"),
        ("[]", "holds no model"),
        ("a: [", "expected"),
        ("a: 1", "entry 1 is no model"),
    ],
)
def test_a_mistake_in_a_file_of_models_is_reported(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(FleetError, match=message):
        models_from_text(str(path))


@pytest.mark.parametrize("text", ["0x1GiB:2GiB", "3x8GiB:2GiB", "3x1Gib!:2", "3xa:b", "nowhere"])
def test_a_mistake_in_the_text_of_models_is_reported(text: str) -> None:
    with pytest.raises(FleetError, match="write "):
        models_from_text(text)


def test_a_model_that_fits_nowhere_and_a_router_without_memory_are_reported() -> None:
    with pytest.raises(FleetError, match=r"a takes 32\.0 GiB, the largest router has 16\.0 GiB"):
        check_fit(ROUTER, [SimulatedModel("a", 32 * GIB, 1.0)])
    with pytest.raises(FleetError, match="node-1 has no memory for models"):
        check_fit(from_text("1x1@10:100", ServerSetup()), PAIR)
