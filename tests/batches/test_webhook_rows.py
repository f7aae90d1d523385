"""The rows of deliveries, on stores of both kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Connection, func, select

from gateway.batches.webhooks import (
    LONGEST_ERROR,
    ClaimDeliveries,
    Delivery,
    DeliveryState,
    WebhookEvent,
    add_deliveries,
    end_delivery,
    put_back_deliveries,
    remove_ended,
    retry_delivery,
    waiting_origins,
)
from gateway.config.webhooks import WebhookUrl
from gateway.store.schema import webhook_deliveries
from gateway.store.store import Store
from tests.store.stores import opened

NOW = 1_800_000_000.0

A, B = WebhookUrl.parse("https://a.example/x"), WebhookUrl.parse("https://b.example:8443/y")


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as store:
        yield store


def event(number: int = 1) -> WebhookEvent:
    return WebhookEvent("batch.completed", f"batch_{number}", "alice", "night", NOW + 0.5)


def add(store: Store, *urls: WebhookUrl, number: int = 1, now: float = NOW) -> list[str]:
    return store.run_now(lambda c: add_deliveries(c, urls, event(number), now))


def claim(store: Store, now: float = NOW, **places: int) -> list[Delivery]:
    origins = {{"a": A, "b": B}[name].origin: number for name, number in places.items()}
    return store.run_now(ClaimDeliveries(origins, now, now + 30))


def row_of(store: Store, id_: str) -> Any:
    asked = select(webhook_deliveries).where(webhook_deliveries.c.id == id_)
    return store.run_now(lambda c: c.execute(asked).one())


def test_an_event_is_one_row_for_each_url_however_often_it_is_added(store: Store) -> None:
    ids = add(store, A, B)
    assert add(store, A, B) == ids
    assert len(set(ids)) == 2
    number = store.run_now(lambda c: c.scalar(select(func.count()).select_from(webhook_deliveries)))
    assert number == 2
    first, second = claim(store, a=5)[0], claim(store, b=5)[0]
    assert first.body == second.body
    told = json.loads(first.body)
    assert told.pop("id").startswith("evt_")
    assert told == {
        "object": "event",
        "type": "batch.completed",
        "created_at": int(NOW),
        "data": {"id": "batch_1"},
    }
    assert (first.owner, first.group_name, first.url) == ("alice", "night", str(A))
    assert first.id.startswith("wh_")
    assert "." not in first.id
    assert (first.created_at, first.attempts) == (NOW + 0.5, 1)


def test_without_a_url_nothing_is_added(store: Store) -> None:
    assert add(store) == []
    assert store.run_now(waiting_origins) == []


def test_what_waits_is_told_by_origin_the_longest_due_first(store: Store) -> None:
    add(store, A, number=1, now=NOW + 5)
    add(store, A, number=2, now=NOW + 9)
    add(store, B, number=3, now=NOW + 1)
    found = [tuple(one) for one in store.run_now(waiting_origins)]
    assert found == [(B.origin, 1, NOW + 1), (A.origin, 2, NOW + 5)]


def test_a_claimed_delivery_is_nobody_elses_until_its_lease_ends(store: Store) -> None:
    add(store, A)
    (first,) = claim(store, a=1)
    assert claim(store, a=1) == []
    assert claim(store, now=NOW + 29, a=1) == []
    (again,) = claim(store, now=NOW + 30, a=1)
    assert (again.id, again.body, again.attempts) == (first.id, first.body, 2)


def test_no_more_are_claimed_than_there_are_places(store: Store) -> None:
    for number in range(5):
        add(store, A, B, number=number, now=NOW - number)
    found = claim(store, a=2, b=1)
    assert sorted(one.origin for one in found) == [A.origin, A.origin, B.origin]
    # Those that have waited for longest.
    assert {one.object_id for one in found} == {"batch_4", "batch_3"}


def test_what_is_not_due_is_not_claimed(store: Store) -> None:
    add(store, A, now=NOW + 10)
    assert claim(store, a=1) == []


def test_an_ended_delivery_waits_no_more(store: Store) -> None:
    (id_,) = add(store, A)
    (claimed,) = claim(store, a=1)
    for _ in range(2):
        store.run_now(lambda c: end_delivery(c, claimed, DeliveryState.DELIVERED, NOW + 2, None))
    row = row_of(store, id_)
    assert (row.state, row.next_at, row.last_error) == ("delivered", NOW + 2, None)
    assert store.run_now(waiting_origins) == []
    assert add(store, A) == [id_]
    assert store.run_now(waiting_origins) == []


def test_a_failure_is_tried_again_at_its_time(store: Store) -> None:
    (id_,) = add(store, A)
    (claimed,) = claim(store, a=1)
    store.run_now(lambda c: retry_delivery(c, claimed, NOW + 5, "x" * 500))
    assert claim(store, now=NOW + 4, a=1) == []
    assert row_of(store, id_).last_error == "x" * LONGEST_ERROR
    assert claim(store, now=NOW + 5, a=1)[0].attempts == 2


def test_a_late_failure_does_not_disturb_who_tries_it_now(store: Store) -> None:
    (id_,) = add(store, A)
    (late,) = claim(store, a=1)
    (current,) = claim(store, now=NOW + 30, a=1)
    store.run_now(lambda c: retry_delivery(c, late, NOW, "late"))
    store.run_now(lambda c: end_delivery(c, late, DeliveryState.GIVEN_UP, NOW, "late"))
    row = row_of(store, id_)
    assert (row.state, row.next_at, row.last_error) == ("waiting", NOW + 60, None)
    # A success counts, however late.
    store.run_now(lambda c: end_delivery(c, late, DeliveryState.DELIVERED, NOW, None))
    store.run_now(lambda c: retry_delivery(c, current, NOW, "failed"))
    assert row_of(store, id_).state == "delivered"


def test_what_a_process_gives_back_is_due_at_once(store: Store) -> None:
    add(store, A)
    claimed = claim(store, a=1)
    store.run_now(lambda c: put_back_deliveries(c, claimed, NOW + 1))
    assert claim(store, now=NOW + 1, a=1)[0].id == claimed[0].id


def test_old_ended_deliveries_are_removed_and_waiting_ones_never(store: Store) -> None:
    add(store, A, number=1, now=NOW - 1000)
    add(store, B, number=2, now=NOW - 1000)
    (claimed,) = claim(store, b=1)
    store.run_now(lambda c: end_delivery(c, claimed, DeliveryState.REFUSED, NOW, "status 410"))
    assert store.run_now(lambda c: remove_ended(c, NOW, 10)) == 0
    assert store.run_now(lambda c: remove_ended(c, NOW + 1, 10)) == 1
    assert [one.origin for one in store.run_now(waiting_origins)] == [A.origin]


def test_looking_for_what_waits_goes_by_its_index(store: Store) -> None:
    if "sqlite" not in store.location.shown:
        pytest.skip("on a small table PostgreSQL reads all of it")
    asked: list[str] = []

    def job(connection: Connection) -> str:
        noted = sqlalchemy.event.listens_for(connection, "before_cursor_execute")
        noted(lambda *given: asked.append(given[2]))
        waiting_origins(connection)
        return str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {asked[0]}").all())

    assert "USING INDEX ix_webhook_deliveries_waiting" in store.run_now(job, write=False)
