from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, insert

from gateway.store.database import locate_store
from gateway.store.schema import metadata, open_requests
from gateway.usage.reports import ArrivalsReader, InvalidQuery, parse_query
from tests.usage.ledger_rows import DAY, NOON, a_row, add_rows

HOUR = 3600.0


@pytest.fixture
def connection(store_url: str) -> Iterator[Connection]:
    """Return a connection to a store of each kind in turn, with all tables."""
    engine = create_engine(locate_store(store_url, Path("/nonexistent")).url)
    with engine.connect() as connection:
        metadata.create_all(connection)
        yield connection
    engine.dispose()


def told(
    connection: Connection, *, since: str = "7d", until: str | None = None, **most: int
) -> dict[str, Any]:
    query = parse_query(NOON, since=since, until=until)
    reader = ArrivalsReader(query, NOON, rows_per_step=3, **most)
    for _ in range(1000):
        if reader.step(connection):
            return reader.to_json()
    raise AssertionError("it never ended")


def lasting(number: int, began: float, seconds: float = 30.0, **more: Any) -> dict[str, Any]:
    row = a_row(number, ended_at=began + seconds, slot_seconds=seconds, **more)
    return {**row, "started_at": began}


def test_the_hour_is_found_that_asked_most_of_the_nodes(connection: Connection) -> None:
    many = [lasting(n, NOON - 30 * HOUR + n, 0.1) for n in range(20)]
    long = [lasting(100 + n, NOON - 5 * HOUR + n * 300, 200.0) for n in range(12)]
    add_rows(connection, [*many, *long])
    found = told(connection)
    assert found["hour"] == {
        "from": "2027-01-15T07:00:00Z",
        "to": "2027-01-15T08:00:00Z",
        "seconds": HOUR,
    }
    assert found["requests"] == 32
    assert found["first"] == "2027-01-14T06:00:00Z"
    assert [row[0] for row in found["arrivals"]] == [n * 300.0 for n in range(12)]
    # What came before `since` does not count.
    assert told(connection, since="2h")["arrivals"] == []
    assert told(connection, since="4h30m")["requests"] == 6


def test_batches_which_fill_idle_slots_make_no_hour_busy(connection: Connection) -> None:
    chats = [lasting(n, NOON - 5 * HOUR + n, 1.0) for n in range(3)]
    night = [lasting(10 + n, NOON - 12 * HOUR + n, 900.0, class_="batch") for n in range(9)]
    add_rows(connection, [*chats, *night])
    found = told(connection)
    assert found["requests"] == len(found["arrivals"]) == 3


def test_an_hour_is_told_without_a_name_of_a_caller(connection: Connection) -> None:
    row = lasting(
        1, NOON - 600, 20.0, key="key-x", user="user-x", group_name="group-x", cached_tokens=40
    )
    add_rows(connection, [row])
    found = told(connection)
    assert dict(zip(found["columns"], found["arrivals"][0], strict=True)) == {
        "seconds": 0.0,
        "model": "mistral",
        "class": "normal",
        "node": "cpu-a",
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "completion_tokens": 10,
        "slot_seconds": 20.0,
        "lasted": 20.0,
        "unserved": False,
    }
    assert "-x" not in str(found)
    # An hour that is not over is as long as it was.
    assert found["hour"]["seconds"] == 600.0


def test_requests_without_a_slot_count_and_others_without_work_do_not(
    connection: Connection,
) -> None:
    nothing = {"prompt_tokens": 0, "completion_tokens": 0}
    rows = [
        lasting(1, NOON - 500),
        lasting(2, NOON - 400, status=429, outcome="queue_full", **nothing),
        lasting(3, NOON - 300, status=499, outcome="client_closed", **nothing),
        lasting(4, NOON - 200, status=400, outcome="invalid_request", **nothing),
        lasting(5, NOON - 100, **nothing),
    ]
    for row in rows[1:]:
        row["slot_seconds"] = 0.0
    add_rows(connection, rows)
    connection.execute(
        insert(open_requests).values(
            id="r6", process="p1", started_at=NOON - 50, updated_at=NOON, class_="normal"
        )
    )
    arrivals = told(connection)["arrivals"]
    assert [row[0] for row in arrivals] == [40.0, 140.0, 240.0, 490.0]
    assert [row[6] for row in arrivals] == [10, None, None, None]
    assert [row[9] for row in arrivals] == [False, True, False, False]


def test_of_too_many_requests_a_shorter_time_is_told(connection: Connection) -> None:
    rng = random.Random(1)
    add_rows(connection, [lasting(n, NOON - rng.random() * HOUR, 2.0) for n in range(400)])
    found = told(connection, most_arrivals=50)
    assert found["hour"]["seconds"] == 300.0
    assert 20 < len(found["arrivals"]) <= 50
    assert len(told(connection, most_arrivals=3)["arrivals"]) == 3


def test_a_time_with_too_many_minutes_is_refused(connection: Connection) -> None:
    add_rows(connection, [lasting(n, NOON - n * 120.0) for n in range(1, 20)])
    with pytest.raises(InvalidQuery, match="take a later one"):
        told(connection, most_minutes=10)


def test_what_still_runs_is_of_no_hour_before_it_began(connection: Connection) -> None:
    connection.execute(
        insert(open_requests).values(
            id="r1", process="p1", started_at=NOON - 50, updated_at=NOON, class_="normal"
        )
    )
    found = told(connection, until="1h")
    assert (found["requests"], found["arrivals"]) == (0, [])
    add_rows(connection, [lasting(2, NOON - 2 * HOUR)])
    found = told(connection, until="1h")
    assert (found["requests"], found["hour"]["seconds"]) == (1, HOUR)
    assert [row[0] for row in found["arrivals"]] == [0.0]


def test_an_empty_ledger_has_no_hour(connection: Connection) -> None:
    add_rows(connection, [lasting(1, NOON - 9 * DAY)])
    found = told(connection)
    assert (found["requests"], found["first"], found["arrivals"]) == (0, None, [])
