from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection

from gateway.batches.batch_rows import cancel_batch, pause_batch, resume_batch
from gateway.batches.claims import put_back, record
from gateway.batches.request_rows import (
    RequestKind,
    RequestState,
    WaitingGroup,
    WorkLeft,
    add_rows,
    find_row,
    result_rows,
    waiting_groups,
    work_left,
)
from gateway.store.store import Store
from tests.batches.stored_rows import (
    DAY,
    FOLDER,
    NOW,
    PATH,
    a_batch,
    a_line,
    a_result,
    alone,
    begin,
    claim,
    do,
    numbers,
)
from tests.store.stores import opened


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as made:
        yield made


def groups(store: Store, now: float = NOW) -> list[WaitingGroup]:
    return store.run_now(lambda connection: waiting_groups(connection, FOLDER, now), write=False)


def test_a_row_comes_back_as_it_was_added(store: Store) -> None:
    line = a_line(1, custom_id="ü\u2028/1", prefix=-(1 << 62), stream=True, user="ann")
    begin(store, a_batch(), [line])
    kind = RequestKind.LINE
    assert store.run_now(lambda c: find_row(c, "alice", line.id, kind)) == line
    assert store.run_now(lambda c: find_row(c, "bob", line.id, kind)) is None
    assert store.run_now(lambda c: find_row(c, "alice", line.id, RequestKind.DEFERRED)) is None


def test_lines_that_are_added_again_stay_as_they_are(store: Store) -> None:
    batch, lines = a_batch(), [a_line(number) for number in range(1, 4)]
    begin(store, batch, lines)
    (first,) = claim(store, limit=1)
    assert store.run_now(lambda c: add_rows(c, lines))
    assert store.run_now(lambda c: work_left(c, batch.id)) == WorkLeft(2, 1, 30, 60)
    assert store.run_now(lambda c: find_row(c, "alice", first.id, first.kind)) == first


def test_a_cancelled_batch_takes_no_more_lines(store: Store) -> None:
    batch = a_batch()
    begin(store, batch, [a_line(1)])
    store.run_now(lambda c: cancel_batch(c, "alice", batch.id, "openai", NOW))
    assert not store.run_now(lambda c: add_rows(c, [a_line(2)]))
    assert store.run_now(lambda c: work_left(c, batch.id)) == WorkLeft(0, 0, 0, 0)


def test_groups_are_sums_of_what_may_run_now(store: Store) -> None:
    first, second = a_batch(1), a_batch(2, owner="bob", class_="normal", expires_at=NOW + 60)
    begin(store, first, [a_line(n, first, max_tokens=10 * n) for n in range(1, 5)])
    several = [a_line(n, second, model=f"m{n % 2}" if n > 1 else None) for n in range(1, 6)]
    begin(store, second, several, model=None)
    store.run_now(lambda c: add_rows(c, [alone(1), alone(2, deadline=NOW + 5, max_tokens=7)]))
    found = sorted(groups(store), key=lambda one: (one.owner, one.kind, one.model or ""))
    assert found == [
        WaitingGroup(first.id, "alice", RequestKind.LINE, PATH, "demo", "batch",
                     4, 40, 100, 40, NOW + DAY),
        WaitingGroup(None, "alice", RequestKind.RESPONSE, "/v1/responses", "demo", "normal",
                     2, 0, 7, 7, NOW + 5),
        WaitingGroup(second.id, "bob", RequestKind.LINE, PATH, None, "normal",
                     1, 10, 20, 20, NOW + 60),
        WaitingGroup(second.id, "bob", RequestKind.LINE, PATH, "m0", "normal",
                     2, 20, 40, 20, NOW + 60),
        WaitingGroup(second.id, "bob", RequestKind.LINE, PATH, "m1", "normal",
                     2, 20, 40, 20, NOW + 60),
    ]  # fmt: skip


def test_what_runs_is_put_off_or_paused_is_in_no_group(store: Store) -> None:
    batch = a_batch()
    begin(store, batch, [a_line(number) for number in range(1, 4)])
    taken = claim(store, limit=2)
    store.run_now(lambda c: put_back(c, "p1", [taken[0].id], NOW + 60))
    assert [one.rows for one in groups(store)] == [1]
    assert [one.rows for one in groups(store, NOW + 60)] == [2]
    store.run_now(lambda c: pause_batch(c, "alice", batch.id, NOW, "by its owner"))
    assert groups(store) == []
    store.run_now(lambda c: resume_batch(c, "alice", batch.id))
    assert [one.rows for one in groups(store)] == [1]


def test_another_folders_requests_are_not_seen(store: Store) -> None:
    other = a_batch(1, folder="e" * 32)
    begin(store, other, [a_line(1, other)])
    store.run_now(lambda c: add_rows(c, [alone(1, folder="e" * 32)]))
    assert groups(store) == []
    assert claim(store) == claim(store, kind=RequestKind.RESPONSE) == []


def test_results_come_page_by_page_in_the_order_of_the_lines(store: Store) -> None:
    batch = a_batch()
    broken = a_line(3, state=RequestState.FAILED, error_code="invalid_json_line")
    begin(store, batch, [a_line(1), a_line(2), broken, a_line(4), a_line(5)])
    rows = {row.number: row for row in claim(store, limit=3)}
    assert sorted(rows, key=str) == [1, 2, 4]

    def end(connection: Connection) -> None:
        record(connection, "p1", [a_result(rows[4]), a_result(rows[1])], NOW)

    store.run_now(end)
    first = store.run_now(lambda c: result_rows(c, batch.id, 0, 2))
    assert numbers(first) == [1, 3]
    assert (first[0].result_place, first[0].result_offset) == ("results-1", 100)
    assert numbers(store.run_now(lambda c: result_rows(c, batch.id, 3, 2))) == [4]


def test_sqlite_reads_waiting_lines_by_their_index(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path / 'gateway.db'}") as store:

        def plan(connection: Connection, sql: str) -> str:
            return " ".join(r[3] for r in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}"))

        for state, index in (("waiting", "waiting_lines"), ("running", "running_lines")):
            sql = f"SELECT id FROM stored_requests WHERE batch = 'b' AND state = '{state}' LIMIT 9"
            assert index in do(store, plan, sql)
        order = "ORDER BY prefix, max_tokens DESC, number LIMIT 9"
        sql = f"SELECT id FROM stored_requests WHERE batch = 'b' AND state = 'waiting' {order}"
        found = do(store, plan, sql)
        assert "waiting_lines" in found
        assert "TEMP B-TREE" not in found
