from __future__ import annotations

from typing import Any

import pytest

from gateway.tools.plan.answer import PlanQuestion
from gateway.tools.plan.running_fleet import (
    MeasuredFleet,
    UnmeasuredFleetError,
    measured_fleet,
    traffic_seconds,
    what_if,
    workload_of_usage,
)
from gateway.tools.plan.search import Goal
from gateway.tools.plan.trial import FleetPart, TimeLimit
from gateway.tools.plan.workload import Workload
from tests.each_case import each_case
from tests.tools.plan.build import a_type

DAY = 86_400.0


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


def test_nodes_of_about_equal_speed_are_of_one_kind() -> None:
    nodes = [node("a"), node("b", decode_tps=11.0), node("c", decode_tps=40.0)]
    found = measured_fleet(nodes)
    assert [(part.node_type.name, part.count) for part in found.parts] == [("a", 2), ("c", 1)]
    assert found.parts[0].node_type.decode_tps == pytest.approx(10.5)
    assert found.notes == ()


def test_slots_tiers_and_prices_tell_kinds_apart() -> None:
    nodes = [
        node("a"),
        node("b", slots_total=4),
        node("c", tier="gpu"),
        node("d", cost_per_hour=0.5),
        node("e", cost_per_million_tokens={"prompt": 0.1, "completion": 0.4}),
    ]
    parts = measured_fleet(nodes).parts
    assert len(parts) == 5
    assert parts[4].node_type.price.per_million_completion == 0.4


def test_nodes_that_get_no_work_are_left_out() -> None:
    nodes = [node("a"), node("b", enabled=False), node("c", standby=True), node("d", draining=True)]
    assert [part.count for part in measured_fleet(nodes).parts] == [1]
    with pytest.raises(UnmeasuredFleetError, match="no node that gets work"):
        measured_fleet(nodes[1:])


@each_case("speed", [None, 0, -3.0, float("nan"), "fast", True, 1e99])
def test_an_unmeasured_node_is_taken_to_be_like_the_others(speed: object) -> None:
    found = measured_fleet([node("a"), node("b", decode_tps=speed)])
    assert [part.count for part in found.parts] == [2]
    assert found.notes == ("b is not measured yet: taken to be like a",)
    with pytest.raises(UnmeasuredFleetError, match="no node's speed is measured yet"):
        measured_fleet([node("b", decode_tps=speed)])


def test_a_node_without_a_price_makes_the_price_unknown() -> None:
    assert measured_fleet([node("a", cost_per_hour=0)]).parts[0].node_type.price.per_hour is None


def report(**total: Any) -> dict[str, Any]:
    given = {
        "requests": 1680,
        "prompt_tokens": 1_680_000,
        "cached_tokens": 840_000,
        "completion_tokens": 168_000,
    }
    rows = [{"day": f"2026-11-{day:02}", "requests": 240} for day in range(17, 24)]
    rows[2]["requests"] = 480
    return {"rows": rows, "total": {**given, **total}}


def test_the_ledger_tells_the_traffic() -> None:
    workload, notes = workload_of_usage(report(), 7 * DAY, 1.5)
    assert workload.requests_per_hour == pytest.approx(10)
    assert (workload.prompt, workload.completion) == (1000, 100)
    assert workload.repeat == pytest.approx(0.5)
    # The busiest day has twice the mean, and its busiest hour is 1.5 times its mean hour.
    assert workload.peak == pytest.approx(3.0)
    assert "1,680 requests, 10.0 an hour" in notes[0]


def test_time_before_the_first_request_does_not_count() -> None:
    ending = 1_795_478_400.0  # 2026-11-24 00:00 UTC
    assert traffic_seconds(report(), ending) == pytest.approx(7 * DAY)
    assert traffic_seconds({"rows": []}, ending) == DAY
    assert traffic_seconds({"rows": [{"day": "soon"}]}, ending) == DAY


@each_case(
    "told", [{}, {"total": None}, {"total": {"requests": 0}}, {"total": {"requests": "many"}}]
)
def test_an_empty_ledger_says_what_to_do(told: dict[str, Any]) -> None:
    with pytest.raises(UnmeasuredFleetError, match="give --requests-per-hour"):
        workload_of_usage(told, DAY, 1.0)


def test_one_more_and_one_less_and_the_goal_moved() -> None:
    fleet = MeasuredFleet((FleetPart(a_type("a", slots=2), 2),), ())
    question = PlanQuestion(Workload(600, 100, 100), Goal(completion_p95=40.0), (), requests=1500)
    rows = {row.change: row for row in what_if(question, fleet, TimeLimit(120.0))}
    assert list(rows) == [
        "as it is",
        "one more like a",
        "one less like a",
        "goal x 0.75",
        "goal x 1.5",
    ]
    now, more, less = (rows[name] for name in ("as it is", "one more like a", "one less like a"))
    assert now.trial is not None
    assert more.trial is not None
    assert more.trial.completion.p95 < now.trial.completion.p95
    assert more.price.per_hour == pytest.approx(0.6)
    assert less.trial is None
    assert less.missed[0].startswith("overloaded: 1.")
    assert rows["goal x 0.75"].missed != ()
    assert rows["goal x 1.5"].missed == ()
