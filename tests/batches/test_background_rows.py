"""Rows of background requests, in real stores."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from sqlalchemy import Connection

from gateway.batches.background_requests import (
    AddBackground,
    EndBackground,
    WaitingUse,
    delete_background,
    find_background,
    waiting_owners,
)
from gateway.batches.request_rows import RequestKind, RequestState, StoredRow
from gateway.store.database import locate_store
from gateway.store.store import Store

KIND = RequestKind.DEFERRED


def row(number: int, owner: str = "k1") -> StoredRow:
    return StoredRow(
        f"bg_{number:032x}", KIND, owner, "/v1/completions", f"request-{number:032x}", 0, 10,
        float(number), 100.0, "folder", "normal", deadline=50.0,
    )  # fmt: skip


def test_requests_are_bounded_cancelled_once_and_deleted(tmp_path: Path) -> None:
    location = locate_store(None, tmp_path)
    assert location is not None
    store = Store(location)
    store.start()
    ended: list[str] = []

    def also(_: Connection, found: StoredRow) -> None:
        ended.append(found.id)

    try:
        assert store.run_now(AddBackground(row(1), 2, 100, 1 << 40)) is None
        assert store.run_now(AddBackground(row(1), 2, 100, 1 << 40)) is None
        assert store.run_now(AddBackground(row(2), 2, 15, 1 << 40)) == WaitingUse(1, 10)
        assert store.run_now(AddBackground(row(2), 2, 100, 1 << 40)) is None
        assert store.run_now(AddBackground(row(3), 2, 100, 1 << 40)) == WaitingUse(2, 20)
        assert store.run_now(AddBackground(row(3, "k2"), 2, 100, 1 << 40)) is None
        owners = store.run_now(lambda c: waiting_owners(c, "folder", 5.0))
        assert sorted(owners) == [("k1", KIND), ("k2", KIND)]
        for _ in range(2):
            job = EndBackground("k1", row(1).id, KIND, 5.0, 60.0, also)
            cancelled = store.run_now(job)
            assert cancelled is not None
            assert cancelled.state is RequestState.CANCELLED
        assert ended == [row(1).id]
        assert store.run_now(EndBackground("k2", row(1).id, KIND, 5.0, 60.0, also)) is None
        for now, there in ((59.0, True), (61.0, False)):
            find = partial(find_background, owner="k1", id_=row(1).id, kind=KIND, now=now)
            found = store.run_now(find)
            assert (found is not None) is there
        for wanted in (row(2), None):
            gone = store.run_now(lambda c: delete_background(c, "k1", row(2).id, KIND, 5.0))
            assert gone == wanted
    finally:
        store.close(5.0)
