"""Hours of nodes are counted by the minute, and once, whoever looks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, select

from gateway.store.schema import metadata, node_hours
from gateway.usage.node_hours import AliveNode, Claim, by_day, count_claims
from tests.usage.ledger_rows import DAY, NOON

NODE = AliveNode("cpu-a", "cpu", 0.36)
MIDNIGHT = NOON + DAY / 2


@pytest.fixture
def connection() -> Iterator[Connection]:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        yield connection
    engine.dispose()


def recorded(connection: Connection) -> dict[str, tuple[float, float]]:
    return {
        row.day: (row.seconds, round(row.cost, 9))
        for row in connection.execute(select(node_hours).order_by(node_hours.c.day))
    }


def test_each_minute_adds_its_share_of_the_price(connection: Connection) -> None:
    for minute in range(10):
        start = NOON + 60 * minute
        count_claims(connection, [Claim(NODE, start, start + 60)])
    assert recorded(connection) == {"2027-01-15": (600.0, 0.06)}


def test_a_minute_that_two_processes_saw_counts_once(connection: Connection) -> None:
    count_claims(connection, [Claim(NODE, NOON, NOON + 60)])
    count_claims(connection, [Claim(NODE, NOON + 30, NOON + 90)])
    count_claims(connection, [Claim(NODE, NOON, NOON + 60)])
    assert recorded(connection) == {"2027-01-15": (90.0, 0.009)}


def test_a_time_over_midnight_belongs_to_both_days(connection: Connection) -> None:
    count_claims(connection, [Claim(NODE, MIDNIGHT - 20, MIDNIGHT + 40)])
    assert recorded(connection) == {"2027-01-15": (20.0, 0.002), "2027-01-16": (40.0, 0.004)}
    assert list(by_day(NOON, NOON)) == []


def test_a_new_price_holds_from_then_on(connection: Connection) -> None:
    dearer = NODE._replace(cost_per_hour=3.6)
    claims = [Claim(NODE, NOON, NOON + 60), Claim(dearer, NOON + 60, NOON + 120)]
    count_claims(connection, claims)
    assert recorded(connection) == {"2027-01-15": (120.0, 0.066)}


looks = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), min_size=1, max_size=40)


@given(looks)
def test_processes_that_look_in_turn_count_the_time_in_which_any_looked(
    moves: list[tuple[int, int]],
) -> None:
    """Each claims the time since its own last look, in the order of the looks."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        now, looked, seen = NOON, dict.fromkeys(range(3), NOON), set[int]()
        for process, seconds in moves:
            now += seconds
            count_claims(connection, [Claim(NODE, looked[process], now)])
            count_claims(connection, [Claim(NODE, looked[process], now)])  # Told twice.
            seen.update(range(int(looked[process] - NOON), int(now - NOON)))
            looked[process] = now
        assert recorded(connection)["2027-01-15"][0] == len(seen)
    engine.dispose()
