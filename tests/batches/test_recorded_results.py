from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, select

from gateway.batches.batch_rows import Batch, cancel_batch, find_batch
from gateway.batches.claims import RecordedResult, put_back, record, release_lost
from gateway.batches.request_rows import RequestKind, RequestState, StoredRow, add_rows, find_row
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import usage
from gateway.store.store import Store
from gateway.usage.ledger import Ledger, UsageRow
from gateway.usage.processes import ProcessIdentity
from tests.batches.stored_rows import (
    FOLDER,
    NOW,
    a_batch,
    a_line,
    a_result,
    alone,
    begin,
    claim,
)
from tests.store.stores import opened


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as made:
        yield made


def batch_now(store: Store) -> Batch:
    found = store.run_now(lambda c: find_batch(c, "alice", a_batch().id, "openai"))
    assert found is not None
    return found


def counts(store: Store) -> dict[str, int]:
    batch = batch_now(store)
    return {
        name: getattr(batch, name)
        for name in ("total", "completed", "failed", "cancelled", "expired")
        if getattr(batch, name)
    }


def recorded(store: Store, results: list[RecordedResult], process: str = "p1") -> list[str]:
    return sorted(store.run_now(lambda c: record(c, process, results, NOW + 5)))


def test_results_are_recorded_and_counted_once_however_often_it_is_tried(store: Store) -> None:
    begin(store, a_batch(), [a_line(number) for number in range(1, 6)])
    rows = claim(store, limit=4)
    states = [
        RequestState.DONE, RequestState.FAILED, RequestState.EXPIRED, RequestState.CANCELLED,
    ]  # fmt: skip
    results = [a_result(row, state=state) for row, state in zip(rows, states, strict=True)]
    for _ in range(3):
        assert recorded(store, results) == sorted(row.id for row in rows)
        assert counts(store) == {
            "total": 5, "completed": 1, "failed": 1, "expired": 1, "cancelled": 1
        }  # fmt: skip
        batch = batch_now(store)
        sums = batch.prompt_tokens, batch.cached_tokens, batch.completion_tokens, batch.cost
        assert sums == (40, 16, 20, 1.0)
    row = store.run_now(lambda c: find_row(c, "alice", rows[0].id, RequestKind.LINE))
    assert row is not None
    assert (row.state, row.status, row.ended_at) == (RequestState.DONE, 200, NOW + 5)
    assert (row.result_place, row.result_offset, row.result_length) == ("results-1", 100, 100)


def test_a_result_without_a_place_or_usage_is_recorded_too(store: Store) -> None:
    begin(store, a_batch(), [a_line(1)])
    (row,) = claim(store)
    result = RecordedResult(row.id, RequestState.EXPIRED)
    assert recorded(store, [result]) == recorded(store, [result]) == [row.id]
    assert counts(store) == {"total": 1, "expired": 1}


def test_the_result_of_a_row_that_another_has_taken_does_not_count(store: Store) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2)])
    rows = claim(store, "p1")
    store.run_now(lambda c: put_back(c, "p1", [rows[0].id], NOW))
    assert recorded(store, [a_result(row) for row in rows]) == [rows[1].id]
    (again,) = claim(store, "p2")
    assert recorded(store, [a_result(rows[0], place="results-9")], "p1") == []
    assert recorded(store, [a_result(again)], "p2") == [again.id]
    assert recorded(store, [a_result(again, place="results-9")], "p1") == []
    assert counts(store) == {"total": 2, "completed": 2}


def test_another_result_of_the_same_process_is_not_taken_for_the_first_one(store: Store) -> None:
    begin(store, a_batch(), [a_line(1)])
    (row,) = claim(store)
    assert recorded(store, [a_result(row)]) == [row.id]
    assert recorded(store, [a_result(row, offset=7)]) == []
    assert recorded(store, [a_result(row, state=RequestState.FAILED)]) == []


def test_the_result_of_a_lost_row_does_not_count(store: Store) -> None:
    begin(store, a_batch(), [a_line(1)])
    rows = claim(store, "p1")
    own = ProcessIdentity("own.0", "host", 1, NOW)
    assert store.run_now(lambda c: release_lost(c, FOLDER, own, NOW)) == 1
    assert recorded(store, [a_result(rows[0])]) == []
    assert counts(store) == {"total": 1}


def test_a_line_that_ends_while_its_batch_is_being_cancelled_keeps_its_result(
    store: Store,
) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2)])
    rows = claim(store, limit=1)
    store.run_now(lambda c: cancel_batch(c, "alice", a_batch().id, "openai", NOW))
    assert recorded(store, [a_result(rows[0])]) == [rows[0].id]
    assert counts(store) == {"total": 2, "completed": 1, "cancelled": 1}


def test_a_request_without_a_batch_has_its_result_alone(store: Store) -> None:
    store.run_now(lambda c: add_rows(c, [alone(1)]))
    rows = claim(store, kind=RequestKind.RESPONSE)
    assert recorded(store, [a_result(rows[0])]) == [rows[0].id]


# With the ledger.


class LossyStore:
    """A store whose jobs fail before or after they are committed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.failures: list[str] = []

    async def run(self, job: Any, *, write: bool = True) -> Any:
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "before":
            raise StoreUnavailable("gone", "wait")
        result = await self._store.run(job, write=write)
        if failure == "after":
            raise StoreUnavailable("gone", "wait")
        return result


@asynccontextmanager
async def a_ledger(store: Store) -> AsyncIterator[tuple[Ledger, LossyStore]]:
    lossy = LossyStore(store)
    own = ProcessIdentity("p1", "host", 1, NOW)
    ledger = Ledger(lossy, own, lambda: NOW, lambda: NOW, lambda _: [])
    await ledger.start(60.0)
    yield ledger, lossy
    await ledger.close(60.0)


async def test_exactly_one_row_of_the_ledger_for_each_recorded_result(store: Store) -> None:
    begin(store, a_batch(), [a_line(number) for number in range(1, 41)])
    rows = claim(store, limit=40)
    store.run_now(lambda c: put_back(c, "p1", [row.id for row in rows[30:]], NOW))
    async with a_ledger(store) as (ledger, lossy):

        async def write(some: list[StoredRow]) -> None:
            """Record as often as needed until it is known to have happened."""
            by_id = {one.id: a_result(one) for one in some}

            def job(connection: Connection) -> list[UsageRow]:
                kept = record(connection, "p1", list(by_id.values()), NOW)
                return [row for id_ in kept if (row := by_id[id_].usage) is not None]

            while True:
                try:
                    await ledger.write_with(job)
                except StoreUnavailable:
                    continue
                return

        lossy.failures = ["after", "before", "", "after"]
        await write(rows[:20])
        await write(rows[20:])
    assert counts(store) == {"total": 40, "completed": 30}
    asked = select(usage.c.id, usage.c.sequence).order_by(usage.c.sequence)
    in_ledger = store.run_now(lambda c: c.execute(asked).all())
    assert sorted(id_ for id_, _ in in_ledger) == sorted(row.id for row in rows[:30])
    assert len({number for _, number in in_ledger}) == 30
