"""The sums of docs/usage-reports.md, with its figures, and what is said of unknown ones."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, select

from gateway.callers.money import (
    INTERVAL,
    MOST_CLAIMS,
    AliveNode,
    Amount,
    NodeHours,
    NodeHoursRecorder,
    NodeUptime,
    all_gpu_cost,
    by_day,
    count_claims,
    effective_hourly_cost,
    idle_cost,
    per_million_tokens,
    per_request,
    running_hourly_cost,
)
from gateway.store.schema import metadata, node_hours
from tests.callers.build import FlakyStore
from tests.callers.ledger_rows import DAY, NOON
from tests.each_case import each_case
from tests.virtual import in_virtual_time, now

HOUR = 3600.0
CPU = NodeHours("cpu-a", "cpu", 10 * HOUR, 2.0)
GPU = NodeHours("gpu-a", "gpu", 10 * HOUR, 20.0)


def test_a_request_and_a_million_tokens_cost_their_share() -> None:
    assert per_request(3.0, 1200) == Amount(0.0025)
    assert per_million_tokens(3.0, 1_500_000) == Amount(2.0)


def test_idle_time_costs_what_no_request_was_charged_and_never_less_than_nothing() -> None:
    assert idle_cost([CPU], 0.5) == Amount(1.5)
    assert idle_cost([CPU, GPU], 0.0) == Amount(22.0)
    assert idle_cost([CPU], 2.01) == Amount(0.0)
    told = idle_cost([CPU], 3.0)
    assert told.value is None
    assert "does not cover" in str(told.reason)


def test_the_hybrid_costs_its_prices_weighted_by_share_of_requests() -> None:
    told = effective_hourly_cost({"cpu": 90, "gpu": 10}, {"cpu": [CPU], "gpu": [GPU]})
    assert told.value == pytest.approx(0.38)
    assert running_hourly_cost([CPU, GPU]).value == pytest.approx(2.20)


def test_four_machines_of_a_tier_weigh_as_one_of_their_mean_price() -> None:
    machines = [NodeHours(f"cpu-{name}", "cpu", 10 * HOUR, 2.0) for name in "abcd"]
    told = effective_hourly_cost({"cpu": 9, "gpu": 1}, {"cpu": machines, "gpu": [GPU]})
    assert told.value == pytest.approx(0.38)
    assert running_hourly_cost([*machines, GPU]).value == pytest.approx(2.80)
    # A tier without requests needs no price.
    told = effective_hourly_cost({"cpu": 5, "gpu": 0}, {"cpu": [CPU]})
    assert told.value == pytest.approx(0.20)


@each_case(
    ("told", "reason"),
    [
        (per_request(0.0, 0), "no request"),
        (per_million_tokens(1.0, 0), "no token"),
        (idle_cost([], 0.0), "no hour"),
        (idle_cost([NodeHours("a", "cpu", HOUR, 0.0)], 0.0), "no hour"),
        (effective_hourly_cost({}, {}), "no request"),
        (effective_hourly_cost({"gpu": 1}, {"cpu": [CPU]}), "tier gpu"),
        (
            effective_hourly_cost({"gpu": 1}, {"gpu": [NodeHours("g", "gpu", HOUR, 0.0)]}),
            "cost_per_hour",
        ),
        (running_hourly_cost([]), "no hour"),
        (running_hourly_cost([NodeHours("a", "cpu", 0.0, 0.0)]), "no hour"),
        (all_gpu_cost(1.0, 9, 10), "1 of 10"),
        (all_gpu_cost(0.0, 0, 0), "no request"),
    ],
)
def test_what_is_unknown_has_a_reason_and_no_figure(told: Amount, reason: str) -> None:
    assert told.value is None
    assert reason in str(told.reason)
    assert told.to_json() == {"value": None, "reason": told.reason}


amounts = st.floats(0, 1e9)
hours = st.lists(
    st.builds(
        NodeHours,
        st.just("n"),
        st.sampled_from(["cpu", "gpu"]),
        st.floats(0, 1e9),
        st.floats(0, 1e9),
    ),
    max_size=4,
)


@given(hours, amounts, st.dictionaries(st.sampled_from(["cpu", "gpu"]), st.integers(0, 10**9)))
def test_no_figure_is_negative_or_not_a_number(
    listed: list[NodeHours], charged: float, requests: dict[str, int]
) -> None:
    by_tier = {tier: [one for one in listed if one.tier == tier] for tier in ("cpu", "gpu")}
    for told in (
        idle_cost(listed, charged),
        effective_hourly_cost(requests, by_tier),
        running_hourly_cost(listed),
        per_request(charged, sum(requests.values())),
        per_million_tokens(charged, sum(requests.values())),
    ):
        if told.value is None:
            assert told.reason
        else:
            assert told.value >= 0
            assert not math.isnan(told.value)


# Hours of nodes are counted by the minute, and once, whoever looks.


T = TypeVar("T")
NODE = AliveNode("cpu-a", "cpu", 0.36)
MIDNIGHT = NOON + DAY / 2


def recorded(connection: Connection) -> dict[str, tuple[float, float]]:
    return {
        row.day: (row.seconds, round(row.cost, 9))
        for row in connection.execute(select(node_hours).order_by(node_hours.c.day))
    }


def test_a_time_over_midnight_belongs_to_both_days(connection: Connection) -> None:
    count_claims(connection, [NodeUptime(NODE, MIDNIGHT - 20, MIDNIGHT + 40)])
    assert recorded(connection) == {"2027-01-15": (20.0, 0.002), "2027-01-16": (40.0, 0.004)}
    assert list(by_day(NOON, NOON)) == []


def test_a_new_price_holds_from_then_on(connection: Connection) -> None:
    dearer = NODE._replace(cost_per_hour=3.6)
    claims = [NodeUptime(NODE, NOON, NOON + 60), NodeUptime(dearer, NOON + 60, NOON + 120)]
    count_claims(connection, claims)
    assert recorded(connection) == {"2027-01-15": (120.0, 0.066)}


@in_virtual_time
async def test_the_loop_looks_once_a_minute_also_while_the_store_is_away() -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        store = FlakyStore(connection)
        began = now()
        recorder = NodeHoursRecorder(
            cast("Any", store), lambda: [NODE], lambda: NOON + now() - began
        )
        task = asyncio.create_task(recorder.run())
        await asyncio.sleep(5 * INTERVAL + 1)
        assert recorded(connection)["2027-01-15"][0] == pytest.approx(5 * INTERVAL)
        store.is_away = True
        await asyncio.sleep(3 * INTERVAL)
        assert recorded(connection)["2027-01-15"][0] == pytest.approx(5 * INTERVAL)
        store.is_away = False
        await asyncio.sleep(INTERVAL)
        assert recorded(connection)["2027-01-15"][0] == pytest.approx(9 * INTERVAL)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    engine.dispose()


@pytest.mark.slow
def test_claims_that_nobody_takes_are_bounded() -> None:
    store, times = FlakyStore(None), iter(range(0, 10**9, 60))
    names = itertools.count()
    alive = [AliveNode("", "cpu", 0.1)] * 3000
    recorder = NodeHoursRecorder(
        cast("Any", store),
        lambda: [node._replace(name=f"n{next(names)}") for node in alive],
        lambda: NOON + next(times),
    )
    for _ in range(6):
        recorder.look()
    assert len(recorder.claims) == MOST_CLAIMS


looks = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), min_size=1, max_size=40)


@given(looks)
def test_processes_that_look_in_turn_count_the_time_in_which_any_looked(
    moves: list[tuple[int, int]],
) -> None:
    """Each claims the time since its own last look, in the order of the looks."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        time, looked, seen = NOON, dict.fromkeys(range(3), NOON), set[int]()
        for process, seconds in moves:
            time += seconds
            count_claims(connection, [NodeUptime(NODE, looked[process], time)])
            count_claims(connection, [NodeUptime(NODE, looked[process], time)])  # Told twice.
            count_claims(connection, [NodeUptime(NODE, NOON, NOON + 1)])  # Told late.
            seen.update(range(int(looked[process] - NOON), int(time - NOON)))
            looked[process] = time
        assert recorded(connection)["2027-01-15"][0] == len(seen)
    engine.dispose()
