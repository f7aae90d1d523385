"""Requests that have ended are found in the ledger, a page at a time."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from gateway.callers import ended
from gateway.callers.ended import EndedQuery, EndedReader, parse_ended_query, rows_of_name
from gateway.callers.reports import InvalidQuery
from gateway.store.store import Store
from tests.callers.ledger_rows import DAY, NOON, a_row, add_rows
from tests.each_case import each_case

NAMES = {"k1": "web", "k2": "web", "k3": "night"}


def fill(store: Store, rows: list[dict[str, Any]]) -> None:
    store.run_now(lambda connection: add_rows(connection, rows))


def page(store: Store, given: dict[str, str], **bounds: Any) -> dict[str, Any]:
    query = parse_ended_query(NOON + 1, given, lambda word: named(word) or [word])
    reader = EndedReader(query, **bounds)
    while not store.run_now(reader.step, write=False):
        pass
    return reader.page(NAMES.get)


def named(name: str) -> list[str]:
    return [id_ for id_, one in NAMES.items() if one == name]


def ids(store: Store, **given: str) -> list[str]:
    return [row.id for row in page(store, {"since": "30d", **given})["requests"]]


def all_ids(store: Store, given: dict[str, str], **bounds: Any) -> list[str]:
    """The ids of all pages."""
    found: list[str] = []
    for _ in range(1000):
        one = page(store, given, **bounds)
        found += [row.id for row in one["requests"]]
        if one["next"] is None:
            assert one["complete"]
            return found
        given = {**given, "before": one["next"]}
    raise AssertionError("the pages have no end")


def made_up(count: int) -> list[dict[str, Any]]:
    """Requests of which many ended at the same moment, or took as long as others."""
    rng = random.Random(5)
    rows = []
    for number in range(count):
        at = NOON - rng.randrange(20) * 60.0
        seconds = float(rng.randrange(8))
        rows.append(a_row(number, id=f"r{number:03}", ended_at=at, started_at=at - seconds))
    return rows


@pytest.mark.parametrize("order", ["latest", "slowest"])
def test_pages_have_every_request_once_and_in_order(store: Store, order: str) -> None:
    rows = made_up(200)
    fill(store, rows)

    def rank(row: dict[str, Any]) -> tuple[float, str]:
        seconds = row["ended_at"] - row["started_at"]
        return (row["ended_at"] if order == "latest" else seconds), row["id"]

    expected = [row["id"] for row in sorted(rows, key=rank, reverse=True)]
    given = {"order": order, "limit": "7", "since": "1d"}
    assert all_ids(store, given, rows_per_step=13) == expected
    assert all_ids(store, {**given, "limit": "1000"}) == expected


def test_a_page_that_has_looked_at_enough_ends_and_the_next_one_goes_on(store: Store) -> None:
    rows = [a_row(number, ended_at=NOON - number, node="rare" if number > 90 else "cpu-a")
            for number in range(100)]  # fmt: skip
    fill(store, rows)
    bounds = {"rows_per_step": 10, "most_examined": 30}
    first = page(store, {"node": "rare"}, **bounds)
    assert (first["requests"], first["complete"]) == ([], False)
    assert first["since"] == "2027-01-15T11:59:30Z", "how far it has looked"
    found = all_ids(store, {"node": "rare", "before": first["next"]}, **bounds)
    assert found == [f"r{number}" for number in range(91, 100)]
    slow = page(store, {"order": "slowest"}, **bounds)
    assert (len(slow["requests"]), slow["complete"], slow["next"]) == (30, False, None)


def test_filters_find_what_they_name(store: Store) -> None:
    kinds: list[dict[str, Any]] = [
        {"key": "k1", "group_name": "team"},
        {"key": "k2", "user": "bob"},
        {"key": "k3", "model": "phi"},
        {"node": "cpu-b", "tier": "gpu"},
        {"class_": "batch"},
        {"status": 499, "outcome": "client_closed"},
        {"status": 503, "outcome": "queue_timeout"},
        {"status": 0, "outcome": "lost"},
        {"started_at": NOON - 40},
        {"ended_at": NOON - 20 * DAY},
        {"ended_at": NOON - 31 * DAY},
    ]
    fill(store, [a_row(number, **kind) for number, kind in enumerate(kinds)])
    assert ids(store, key="k1") == ["r0"]
    assert ids(store, key="web") == ["r1", "r0"]
    assert ids(store, group="team") == ["r0"]
    assert ids(store, user="bob") == ["r1"]
    assert ids(store, model="phi") == ["r2"]
    assert ids(store, node="cpu-b") == ids(store, tier="gpu") == ["r3"]
    assert ids(store, **{"class": "batch"}) == ["r4"]
    assert ids(store, outcome="left") == ["r5"]
    assert ids(store, outcome="failed") == ["r7", "r6"]
    assert ids(store, outcome="queue_timeout") == ["r6"]
    assert ids(store, outcome="ok") == ["r8", "r4", "r3", "r2", "r1", "r0", "r9"]
    assert ids(store, slower_than="39.5") == ids(store, slower_than="1", key="team-a") == ["r8"]
    assert ids(store, until="1d") == ["r9"]
    assert ids(store, since="90d", until="21d") == ["r10"]


def test_rows_tell_what_is_known_and_old_ones_that_the_rest_is_not(store: Store) -> None:
    unknown = dict.fromkeys(
        ("wait_seconds", "ttft_seconds", "prefill_seconds", "decode_seconds", "resumptions")
    )
    times = {"wait_seconds": 1.5, "ttft_seconds": 2.0004, "prefill_seconds": 0.5}
    fill(
        store,
        [
            a_row(0, key="k1", client_request_id="mine", resumptions=2, **times),
            a_row(1, key=None, ended_at=NOON - 1, **unknown),
        ],
    )
    new, old = page(store, {})["requests"]
    assert (new.started_at, new.ended_at) == (
        "2027-01-15T11:59:59.000Z",
        "2027-01-15T12:00:00.000Z",
    )
    assert (new.seconds, new.wait_seconds, new.ttft_seconds) == (1.0, 1.5, 2.0)
    assert (new.prefill_seconds, new.decode_seconds, new.resumptions) == (0.5, None, 2)
    assert (new.key, new.key_name, new.client_request_id) == ("k1", "web", "mine")
    assert (old.key, old.key_name, old.client_request_id) == (None, None, None)
    assert [getattr(old, name) for name in unknown] == [None] * 5


def test_requests_are_found_by_their_own_id_before_the_clients_and_the_newest_first(
    store: Store,
) -> None:
    rows = [a_row(n, ended_at=NOON - n, client_request_id="r7") for n in range(1, 30)]
    fill(store, rows)
    find = partial(rows_of_name, name="r7")
    found = [ended.ended_row(row, NAMES.get).id for row in store.run_now(find, write=False)]
    others = [f"r{n}" for n in range(1, 30) if n != 7]
    assert found == ["r7", *others][: ended.MOST_NAMED]
    for name in ("nobody", "a\0b", "x" * 10_000, "\udcff"):
        assert store.run_now(partial(rows_of_name, name=name), write=False) == []


def test_a_page_reads_no_more_rows_than_it_needs_of_one_key(store: Store) -> None:
    """SQLite goes through the index of the key, and PostgreSQL may."""
    query = EndedQuery(NOON - DAY, NOON, keys=("k1",))

    def plan(connection: Connection) -> str:
        if connection.dialect.name != "sqlite":
            return "ix_usage_key_ended_at"
        statement = EndedReader(query).statement(None)
        literal = statement.compile(connection, compile_kwargs={"literal_binds": True})
        return str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {literal}").all())

    assert "ix_usage_key_ended_at" in store.run_now(plan, write=False)


@each_case(
    ("given", "parameter"),
    [
        ({"since": "soon"}, "since"),
        ({"since": "1d", "until": "2d"}, "until"),
        ({"since": "2999-01-01"}, "since"),
        ({"order": "fastest"}, "order"),
        ({"limit": "0"}, "limit"),
        ({"limit": "1001"}, "limit"),
        ({"slower_than": "-1"}, "slower_than"),
        ({"slower_than": "nan"}, "slower_than"),
        ({"slower_than": "inf"}, "slower_than"),
        ({"before": "later"}, "before"),
        ({"before": "s1.5~r1"}, "before"),
        ({"order": "slowest", "before": "l1.5"}, "before"),
        ({"node": "a\0b"}, "node"),
        ({"model": ""}, "model"),
        ({"user": "x" * 257}, "user"),
    ],
)
def test_questions_that_make_no_sense_are_refused(given: dict[str, str], parameter: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        parse_ended_query(NOON, given, lambda word: [word])
    assert caught.value.parameter == parameter
