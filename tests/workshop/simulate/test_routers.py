from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.workshop.simulate.fleets import (
    GIB,
    FleetError,
    RouterFleet,
    SimulatedModel,
    check_fit,
    describe_placement,
    from_text,
    greedy_placement,
    models_from_text,
    random_placements,
    with_all_speeds,
    with_shares,
)
from gateway.workshop.simulate.fronts import LeastRecentlyUsed, ModelPlacingFront
from gateway.workshop.simulate.simulation import (
    Front,
    Job,
    SimulatedMachine,
    simulate,
)
from tests.each_case import each_case
from tests.workshop.simulate.build import job, trace

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


def test_a_fleet_refuses_what_no_router_can_do() -> None:
    models = [*PAIR, SimulatedModel("c", GIB, 1.0)]
    fleet = RouterFleet(ROUTER, models, trace([job()]), loaded={0, 1})
    with pytest.raises(ValueError, match="node-1/c does not fit"):
        fleet.load(2)
    with pytest.raises(ValueError, match="node-1/c is not loaded"):
        fleet.send(fleet.jobs[0], 2)
    fleet.send(fleet.jobs[0], 0)
    with pytest.raises(ValueError, match="node-1/a works"):
        fleet.unload(0)
    fleet.unload(1)
    with pytest.raises(ValueError, match="does not fit"):
        fleet.load(2)
    fleet.now = fleet.next_load_end
    assert fleet.end_loads() == [(1, False)]
    fleet.load(2)
    assert fleet.next_load_end == fleet.now + 1.0


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


@pytest.mark.parametrize("build", [LeastRecentlyUsed, ModelPlacingFront])
def test_routers_of_one_host_and_a_plain_server_serve_all_requests(
    build: Callable[[RouterFleet], Front],
) -> None:
    plain = SimulatedMachine("plain", 1, 1000.0, 10.0, models=frozenset({"b", "d"}))
    jobs = [job(time=place * 0.5) for place in range(80)]
    for place, one in enumerate(jobs):
        one.model = "abcd"[place % 4]
    models = [*PAIR, SimulatedModel("c", 12 * GIB, 3.0)]
    played = trace(jobs)
    fleet = RouterFleet([*HALVES, plain], models, played)
    simulate(build(fleet))
    names = [fleet.servers[one.node].machine.name for one in played.jobs]
    assert {name for name, one in zip(names, played.jobs, strict=True) if one.model == "d"} == {
        "plain"
    }
    assert {"numa0/a", "plain"} <= set(names)
    assert fleet.loads > 0


def test_a_speed_that_is_not_known_follows_from_those_that_are_or_from_the_models_size() -> None:
    sizes = [SimulatedModel("small", 4 * GIB, 1.0), SimulatedModel("large", 12 * GIB, 1.0)]
    by_size = [server.machine.decode_tps for server in RouterFleet(ROUTER, sizes).servers]
    assert by_size == [20.0, pytest.approx(20 / 3)]
    fast, slow = from_text("1x1@10:1000/64GiB,1x1@10:1000/64GiB")
    models = [*PAIR, SimulatedModel("moe", 16 * GIB, 8.0), SimulatedModel("large", 32 * GIB, 8.0)]
    fast = replace(fast, model_speeds={"a": (800.0, 20.0), "moe": (1600.0, 60.0)})
    slow = replace(slow, model_speeds={"a": (400.0, 10.0)}, models=frozenset({"a", "moe"}))
    first, second = with_all_speeds([fast, slow], models)
    # As a dense model of 16 GiB it would have the half of `a`; its experts make it faster.
    assert (first.prefill_tps, first.decode_tps) == (2000.0, 70.0)
    assert first.model_speeds["moe"] == (1600.0, 60.0)
    assert first.model_speeds["large"] == (500.0, 17.5)
    assert second.model_speeds["moe"][1] == pytest.approx(10.0 * 60 / 70)
    assert set(second.model_speeds) == {"a", "moe"}


def test_the_models_of_a_running_fleet_are_read_from_what_its_gateway_tells(
    tmp_path: Path,
) -> None:
    def row(node: str, model: str, memory: int | None, seconds: float) -> dict[str, object]:
        return {"node": node, "model": model, "memory": memory, "expected_load_seconds": seconds}

    rows = [row("r1", "a", 2 * GIB, 3.0), row("r2", "a", None, 5.0), row("r2", "new", None, 30.0)]
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"models": [], "placements": rows, "hosts": {}}))
    assert models_from_text(str(path)) == [
        SimulatedModel("a", 2 * GIB, 4.0),
        SimulatedModel("new", 2 * GIB, 30.0),
    ]
    path.write_text(json.dumps({"placements": rows[1:]}))
    with pytest.raises(FleetError, match="load one, or write"):
        models_from_text(str(path))
    path.write_text(json.dumps({"placements": [{}]}))
    with pytest.raises(FleetError, match="another version"):
        models_from_text(str(path))


def test_shares_are_those_given_or_zipfs() -> None:
    given = [replace(PAIR[0], share=3.0), replace(PAIR[1], share=1.0)]
    assert with_shares(given, 1) == given
    drawn = with_shares([*PAIR, SimulatedModel("c", GIB, 1.0)], 1)
    assert sorted(one.share or 0.0 for one in drawn) == [pytest.approx(1 / 3), 0.5, 1.0]


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


def test_models_are_read_from_text_and_from_a_file(tmp_path: Path) -> None:
    made = [(one.name, one.memory // GIB) for one in models_from_text("3x2GiB:8GiB")]
    assert made == [("model-1", 2), ("model-2", 4), ("model-3", 8)]
    path = tmp_path / "models.yaml"
    path.write_text(
        "- {name: qwen3-8b, memory: 9GiB, share: 1}\n"
        "- {name: tiny, memory: 1GiB, load_seconds: 3, share: 2}\n"
    )
    assert models_from_text(str(path)) == [
        SimulatedModel("qwen3-8b", 9 * GIB, 9.0, 1.0),
        SimulatedModel("tiny", GIB, 3.0, 2.0),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: a}", "required field `memory` - at `\\$\\[0\\]`"),
        ("- {name: a, memory: 1GiB, load_seconds: -1}", r"> 0.0 - at `\$\[0\]\.load_seconds`"),
        ("- {name: a, memory: 1GiB}\n- {name: a, memory: 1GiB}", "one twice"),
        ("[]", "holds no model"),
        ("- {name: a, memory: 1GiB}\n- {name: b, memory: 1GiB, share: 2}", "each model a `share`"),
        ("- {name: a, memory: 1GiB, share: 0}", r"> 0.0 - at `\$\[0\]\.share`"),
        ("a: [", "expected"),
        ("a: 1", "Expected `array`, got `object`"),
    ],
)
def test_a_mistake_in_a_file_of_models_is_reported(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(FleetError, match=message):
        models_from_text(str(path))


@each_case("text", ["0x1GiB:2GiB", "3x8GiB:2GiB", "3x1Gib!:2", "3xa:b", "nowhere"])
def test_a_mistake_in_the_text_of_models_is_reported(text: str) -> None:
    with pytest.raises(FleetError, match="write "):
        models_from_text(text)


def test_a_model_that_fits_nowhere_and_a_router_without_memory_are_reported() -> None:
    with pytest.raises(FleetError, match=r"a takes 32\.0 GiB, the largest router has 16\.0 GiB"):
        check_fit(ROUTER, [SimulatedModel("a", 32 * GIB, 1.0)])
    with pytest.raises(FleetError, match="node-1 has no memory for models"):
        check_fit(from_text("1x1@10:100"), PAIR)
