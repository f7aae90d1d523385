"""Hours of nodes are counted by the minute, and once, whoever looks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, select

from gateway.store.failures import StoreUnavailable
from gateway.store.schema import metadata, node_hours
from gateway.usage.node_hours import (
    INTERVAL,
    MOST_CLAIMS,
    AliveNode,
    NodeHoursRecorder,
    NodeUptime,
    by_day,
    count_claims,
)
from tests.usage.ledger_rows import DAY, NOON
from tests.virtual import in_virtual_time, now

T = TypeVar("T")
NODE = AliveNode("cpu-a", "cpu", 0.36)
MIDNIGHT = NOON + DAY / 2


def recorded(connection: Connection) -> dict[str, tuple[float, float]]:
    return {
        row.day: (row.seconds, round(row.cost, 9))
        for row in connection.execute(select(node_hours).order_by(node_hours.c.day))
    }


def test_each_minute_adds_its_share_of_the_price(connection: Connection) -> None:
    for minute in range(10):
        start = NOON + 60 * minute
        count_claims(connection, [NodeUptime(NODE, start, start + 60)])
    assert recorded(connection) == {"2027-01-15": (600.0, 0.06)}


def test_a_minute_that_two_processes_saw_counts_once(connection: Connection) -> None:
    count_claims(connection, [NodeUptime(NODE, NOON, NOON + 60)])
    count_claims(connection, [NodeUptime(NODE, NOON + 30, NOON + 90)])
    count_claims(connection, [NodeUptime(NODE, NOON, NOON + 60)])
    assert recorded(connection) == {"2027-01-15": (90.0, 0.009)}


def test_a_time_over_midnight_belongs_to_both_days(connection: Connection) -> None:
    count_claims(connection, [NodeUptime(NODE, MIDNIGHT - 20, MIDNIGHT + 40)])
    assert recorded(connection) == {"2027-01-15": (20.0, 0.002), "2027-01-16": (40.0, 0.004)}
    assert list(by_day(NOON, NOON)) == []


def test_a_new_price_holds_from_then_on(connection: Connection) -> None:
    dearer = NODE._replace(cost_per_hour=3.6)
    claims = [NodeUptime(NODE, NOON, NOON + 60), NodeUptime(dearer, NOON + 60, NOON + 120)]
    count_claims(connection, claims)
    assert recorded(connection) == {"2027-01-15": (120.0, 0.066)}


class OneConnection:
    """A store that does its jobs at once, or fails."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.fails = False

    async def run(self, job: Callable[[Connection], T], /, *, write: bool = True) -> T:
        if self.fails:
            raise StoreUnavailable("the store is away", "wait")
        return job(self.connection)


@in_virtual_time
async def test_the_loop_looks_once_a_minute_also_while_the_store_is_away() -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        store = OneConnection(connection)
        began = now()
        recorder = NodeHoursRecorder(store, lambda: [NODE], lambda: NOON + now() - began)
        task = asyncio.create_task(recorder.run())
        await asyncio.sleep(5 * INTERVAL + 1)
        assert recorded(connection)["2027-01-15"][0] == pytest.approx(5 * INTERVAL)
        store.fails = True
        await asyncio.sleep(3 * INTERVAL)
        assert recorded(connection)["2027-01-15"][0] == pytest.approx(5 * INTERVAL)
        store.fails = False
        await asyncio.sleep(INTERVAL)
        assert recorded(connection)["2027-01-15"][0] == pytest.approx(9 * INTERVAL)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    engine.dispose()


@pytest.mark.slow
def test_claims_that_nobody_takes_are_bounded() -> None:
    store, times = OneConnection(None), iter(range(0, 10**9, 60))  # type: ignore[arg-type]
    names = itertools.count()
    alive = [AliveNode("", "cpu", 0.1)] * 3000
    recorder = NodeHoursRecorder(
        store,
        lambda: [node._replace(name=f"n{next(names)}") for node in alive],
        lambda: NOON + next(times),
    )
    for _ in range(6):
        recorder.look()
    assert recorder.waiting == MOST_CLAIMS


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
            seen.update(range(int(looked[process] - NOON), int(time - NOON)))
            looked[process] = time
        assert recorded(connection)["2027-01-15"][0] == len(seen)
    engine.dispose()
