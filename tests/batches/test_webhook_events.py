"""Events are recorded in the transaction that ends what they are about."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, select

from gateway.batches.batch_rows import Batch
from gateway.batches.request_rows import BatchState, RequestKind, StoredRow
from gateway.batches.webhook_receivers import WebhookTargets
from gateway.batches.webhooks import WebhookEvents
from gateway.config.webhooks import WebhookSettings
from gateway.store.schema import webhook_deliveries as rows
from gateway.store.store import Store
from tests.batches.receivers import target
from tests.store.stores import opened

NOW = 1_800_000_000.0


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as store:
        yield store


@pytest.fixture
def events() -> WebhookEvents:
    all_, named = target("https://all.example"), target("https://named.example", named_only=True)
    settings = WebhookSettings(targets=(all_, named))
    return WebhookEvents(WebhookTargets(lambda: settings), lambda: NOW + 7)


def batch(state: BatchState, webhook_url: str | None = None) -> Batch:
    return Batch(
        id="batch_1",
        owner="alice",
        api="openai",
        endpoint="/v1/chat/completions",
        input_file=None,
        created_at=NOW - 60,
        expires_at=NOW + 60,
        keep_until=NOW + 3600,
        folder="f",
        state=state,
        ended_at=NOW,
        webhook_url=webhook_url,
    )


def told(store: Store) -> list[tuple[str, str, str, float, float]]:
    asked = select(rows.c.event, rows.c.object_id, rows.c.url, rows.c.created_at, rows.c.next_at)
    return [
        tuple(row) for row in store.run_now(lambda c: c.execute(asked.order_by(rows.c.url)).all())
    ]


@pytest.mark.parametrize(
    "state",
    [BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED],
)
def test_a_batch_that_has_ended_is_told_to_all_and_to_whom_it_names(
    store: Store, events: WebhookEvents, state: BatchState
) -> None:
    ended = batch(state, "https://named.example/x")
    for _ in range(2):
        store.run_now(lambda c: events.batch_ended(c, ended))
    assert told(store) == [
        (f"batch.{state}", "batch_1", "https://all.example/", NOW, NOW + 7),
        (f"batch.{state}", "batch_1", "https://named.example/x", NOW, NOW + 7),
    ]


def test_a_batch_that_goes_on_is_not_told(store: Store, events: WebhookEvents) -> None:
    store.run_now(lambda c: events.batch_ended(c, batch(BatchState.IN_PROGRESS)))
    assert told(store) == []


def test_a_response_is_told_as_it_has_ended(store: Store, events: WebhookEvents) -> None:
    row = StoredRow(
        id="resp_1",
        kind=RequestKind.RESPONSE,
        owner="alice",
        path="/v1/responses",
        place="p",
        offset=0,
        length=1,
        created_at=NOW,
        keep_until=NOW + 1,
        folder="f",
    )
    store.run_now(lambda c: events.response_ended(c, row, "incomplete", NOW + 3))
    assert told(store) == [
        ("response.incomplete", "resp_1", "https://all.example/", NOW + 3, NOW + 7)
    ]


def test_a_transaction_that_fails_tells_nobody(store: Store, events: WebhookEvents) -> None:
    def job(connection: Connection) -> None:
        events.batch_ended(connection, batch(BatchState.COMPLETED))
        raise RuntimeError("the batch could not be ended")

    with pytest.raises(RuntimeError):
        store.run_now(job)
    assert told(store) == []
