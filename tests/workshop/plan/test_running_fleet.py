from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gateway.workshop.plan.catalogue import TokenPrice
from gateway.workshop.plan.running_fleet import (
    FleetAnswer,
    MeasuredFleet,
    UnmeasuredFleetError,
    busiest_hour,
    measured_fleet,
    traffic_of,
    what_if,
)
from gateway.workshop.plan.search import Goal, PlanQuestion, TimeLimit, Workload
from tests.each_case import each_case
from tests.known import known


def node(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "tier": "cpu",
        "slots_total": 2,
        "prefill_tps": 100.0,
        "decode_tps": 10.0,
        "cost_per_hour": 0.2,
        **fields,
    }


def test_speeds_slots_tiers_and_prices_tell_kinds_apart() -> None:
    nodes = [
        node("a"),
        node("as-fast", decode_tps=11.0),
        node("faster", decode_tps=40.0),
        node("b", slots_total=4),
        node("c", tier="gpu"),
        node("d", cost_per_hour=0.5),
        node("free", cost_per_hour=0),
        node("e", cost_per_million_tokens={"prompt": 0.1, "completion": 0.4}),
    ]
    fleet = measured_fleet(nodes)
    assert [part.count for part in fleet.parts] == [2, 1, 1, 1, 1, 1, 1]
    first, *_, free, tokens = (part.node_type for part in fleet.parts)
    assert first.name == "a"
    assert first.decode_tps == pytest.approx(10.5)
    assert free.per_hour is None
    assert tokens.price_per_million_tokens == TokenPrice(prompt=0.1, completion=0.4)
    assert fleet.notes == ()


def test_nodes_that_get_no_work_are_left_out() -> None:
    nodes = [node("a"), node("b", enabled=False), node("c", standby=True), node("d", draining=True)]
    nodes.append(node("e", state="down"))
    found = measured_fleet(nodes)
    assert [part.count for part in found.parts] == [1]
    assert found.notes == ("e is down: left out",)
    with pytest.raises(UnmeasuredFleetError, match="no node that gets work"):
        measured_fleet(nodes[1:])


@each_case("speed", [None, 0, -3.0, float("nan"), "fast", True, 1e99])
def test_an_unmeasured_node_is_taken_to_be_like_the_others(speed: object) -> None:
    found = measured_fleet([node("a"), node("b", decode_tps=speed)])
    assert [part.count for part in found.parts] == [2]
    assert found.notes == ("b is not measured yet: taken to be like a",)
    with pytest.raises(UnmeasuredFleetError, match="no node's speed is measured yet"):
        measured_fleet([node("b", decode_tps=speed)])


def told(*rows: tuple[float, dict[str, Any]], requests: int | None = None) -> dict[str, Any]:
    """What `GET /admin/usage/arrivals` answers, by times of arrival and what is unlike."""
    columns = {
        "model": "mistral",
        "class": "normal",
        "node": "a",
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "completion_tokens": 90,
        "slot_seconds": 10.0,
        "lasted": 10.0,
        "unserved": False,
    }
    return {
        "since": "2026-11-21T00:00:00Z",
        "until": "2026-11-28T15:00:00Z",
        "first": "2026-11-28T05:00:00Z",
        "requests": len(rows) if requests is None else requests,
        "hour": {"from": "2026-11-28T14:00:00Z", "to": "2026-11-28T15:00:00Z", "seconds": 3600.0},
        "columns": ["seconds", *columns],
        "arrivals": [[at, *{**columns, **more}.values()] for at, more in rows],
    }


def slow(name: str, **fields: Any) -> dict[str, Any]:
    return node(name, **{"prefill_tps": 20.0, "decode_tps": 2.0, **fields})


def even(requests: int, **more: Any) -> dict[str, Any]:
    return told(*((n * 3600 / requests, more) for n in range(requests)))


def asked(arrivals: dict[str, Any], fleet: MeasuredFleet, seconds: float = 120.0) -> FleetAnswer:
    traffic = busiest_hour(arrivals, fleet, 1.0)
    question = PlanQuestion(traffic.workload, Goal(), (), warm=True, recorded=traffic.recorded)
    return what_if(question, fleet, traffic, TimeLimit(seconds))


def answer(arrivals: dict[str, Any], *nodes: dict[str, Any]) -> FleetAnswer:
    return asked(arrivals, measured_fleet(nodes))


def test_the_busiest_hour_is_played_as_it_was() -> None:
    fleet = measured_fleet([node("a", models=["mistral"]), node("b", models=["mistral"])])
    late = {"class": "urgent", "prompt_tokens": 300, "cached_tokens": 250, "completion_tokens": 40}
    traffic = busiest_hour(told((5.0, {}), (65.0, late), requests=1000), fleet, 1.0)
    assert [
        (job.time, job.prompt.tokens, job.output, job.priority_label, job.model)
        for job in known(traffic.recorded).jobs
    ] == [(0.0, 100, 90, "normal", "mistral"), (60.0, 50, 40, "urgent", "mistral")]
    # Prices are those of the mean hour: 1,000 requests in ten hours.
    assert traffic.workload.requests_per_hour == pytest.approx(100)
    assert traffic.workload.repeat == pytest.approx(250 / 400)
    assert traffic.workload.arrivals == pytest.approx(2 / 60)
    faster = busiest_hour(told((5.0, {}), (65.0, late), requests=1000), fleet, 4.0)
    assert known(faster.recorded).jobs[1].time == 15.0
    assert faster.workload.arrivals == pytest.approx(8 / 60)


@each_case(
    "told", [told(), even(3, completion_tokens=None), {}, {"arrivals": [[1]], "columns": ["a"]}]
)
def test_an_empty_ledger_says_what_to_do(told: dict[str, Any]) -> None:
    with pytest.raises(UnmeasuredFleetError, match=r"give --requests-per-hour|another version"):
        busiest_hour(told, measured_fleet([node("a")]), 1.0)


def test_a_saturated_fleet_is_called_saturated_and_told_what_to_add() -> None:
    # A request reads 5 s and writes 45 s: two slots end some 0.03 a second.
    found = answer(even(180), slow("a"))
    now = found.changes[0]
    assert 1.4 < now.use < 1.8
    assert known(now.trial).wait.p95 > 600
    advice = found.advice
    assert (advice.verdict, advice.add) == ("saturated", {"like": "a", "count": 1})
    assert advice.sentence.startswith(
        "the fleet is saturated: its busiest hour (2026-11-28T14:00:00Z to 15:00:00Z) asked for 1"
    )
    assert "add one node like a: then it is 7" in advice.sentence


def test_a_node_that_was_added_since_ends_the_saturation() -> None:
    full = even(180, slot_seconds=60.0, lasted=300.0)
    assert answer(full, slow("a")).advice.verdict == "saturated"
    found = answer(full, slow("a"), slow("b"), slow("c"))
    assert found.advice.verdict == "enough"
    assert known(found.traffic.hour).nodes_added_since == ("b", "c")
    # A node of another model could not have served.
    other = slow("b", models=["other"])
    assert answer(full, slow("a", models=["mistral"]), other).advice.verdict == "saturated"
    # One that was removed since is no slowness of the others.
    where = {"slot_seconds": 60.0, "lasted": 65.0}
    full = told(*((n * 20.0, {**where, "node": "gone" if n % 2 else "a"}) for n in range(180)))
    found = answer(full, slow("a"))
    assert (found.advice.verdict, found.notes) == ("saturated", ())
    assert known(found.traffic.hour).nodes_removed_since == ("gone",)


def test_a_model_is_served_by_its_own_nodes() -> None:
    nodes = [slow("a", models=["small"]), slow("b", models=["large"], slots_total=4)]
    kinds = ({"model": "large", "node": "b"}, {"model": "small", "node": "a"})
    arrivals = told(*((n * 15.0, kinds[not n % 4]) for n in range(240)))
    found = answer(arrivals, *nodes)
    rows = {row.change: row for row in found.changes}
    # The nodes of `large` are the busiest place, whatever the others have left.
    assert rows["one more like a"].use == rows["as it is"].use > rows["one more like b"].use
    assert rows["one less like a"].missed == ("no node is left for a model",)
    assert known(found.advice.add)["like"] == "b"


def test_one_more_and_one_less_and_the_goal_moved() -> None:
    fleet = measured_fleet([node("a"), node("b")])
    workload = Workload(600, 100, 100)
    question = PlanQuestion(workload, Goal(completion_p95=40.0), (), requests=1500)
    answered = what_if(question, fleet, traffic_of(workload, fleet), TimeLimit(120.0))
    rows = {row.change: row for row in answered.changes}
    changed = ["as it is", "one more like a", "one less like a"]
    assert list(rows) == [*changed, "goal x 0.75", "goal x 1.5"]
    now, more, less = (rows[name] for name in changed)
    assert known(more.trial).completion.p95 < known(now.trial).completion.p95
    assert more.price.per_hour == pytest.approx(0.6)
    assert less.trial is None
    assert less.missed[0].startswith("overloaded: 1.")
    assert rows["goal x 0.75"].missed != ()
    assert rows["goal x 1.5"].missed == ()
    assert answered.advice.verdict == "enough"


GIB = 1 << 30
PLACED = {
    "hosts": {"epyc": {"memory": 16 * GIB}},
    "placements": [
        {"name": f"{node}/{name}.gguf", "model": name, "memory": size * GIB, **more}
        for node in ("r1", "r2")
        for name, size in (("a", 4), ("b", 8), ("c", 8))
        for more in [{"expected_load_seconds": 5.0}]
    ],
}


def routers(**measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Two routers of one host, and of each three models, of which few are loaded."""
    rows = []
    empty = {"prefill_tps": None, "decode_tps": None, "host": "epyc"}
    for name in ("r1", "r2"):
        rows.append(node(name, **empty, slots_total=0, models=[]))
        for model in "abc":
            own = measured.get(f"{name}_{model}", {"slots_total": 0})
            fields = {**empty, "models": [model], "router": name, **own}
            rows.append(node(f"{name}/{model}.gguf", **fields))
    return rows


SEEN: dict[str, dict[str, Any]] = {
    "r1_a": {"decode_tps": 20.0, "prefill_tps": 200.0, "models": ["a", "alias"]}
}


def test_a_router_is_one_node_with_the_slots_and_speeds_of_its_models() -> None:
    found = measured_fleet(routers(**SEEN), PLACED)
    assert [(part.node_type.name, part.count) for part in found.parts] == [("r1", 1), ("r2", 1)]
    first = found.parts[0].node_type
    # As fast as with a model of 8 GiB: `a` has four.
    assert (first.slots, first.decode_tps, first.memory_gib) == (2, 10.0, 16)
    assert {one.name: one.memory >> 30 for one in found.models} == {"a": 4, "b": 8, "c": 8}
    assert found.notes == ("r2 is not measured yet: taken to be like r1",)
    assert found.known_models == {"a": "a", "alias": "a", "b": "b", "c": "c"}
    seen = {**SEEN, "r2_b": {"decode_tps": 10.5, "prefill_tps": 100.0}}
    (pair,) = measured_fleet(routers(**seen), PLACED).parts
    assert pair.count == 2
    assert {one.host for one in pair.node_type.machines(2)} == {"epyc"}
    assert [one.host for one in pair.node_type.machines(3)][2] == ""
    with pytest.raises(UnmeasuredFleetError, match="another version"):
        measured_fleet(routers(**SEEN), {"placements": [{"name": "r1/a"}]})
    # One whose memory is unknown is taken to hold one model.
    blind = measured_fleet(routers(**SEEN), {**PLACED, "hosts": {"epyc": {"memory": None}}})
    assert blind.parts[0].node_type.memory_gib == 8
    assert "the memory of epyc is unknown: taken to hold one model at a time" in blind.notes
