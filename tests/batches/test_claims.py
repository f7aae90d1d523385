from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.batches.batch_rows import begin_finalizing, cancel_batch, find_batch, pause_batch
from gateway.batches.claims import Claim, Pick, paused, put_back, release_lost, renew
from gateway.batches.request_rows import (
    BatchState,
    RequestKind,
    RequestState,
    StoredRow,
    WorkLeft,
    add_rows,
    find_row,
    work_left,
)
from gateway.store.store import Store
from gateway.usage.processes import ProcessIdentity, register
from tests.batches.stored_rows import (
    FOLDER,
    LEASE,
    NOW,
    a_batch,
    a_line,
    alone,
    begin,
    claim,
    numbers,
    once_unlocked,
)
from tests.processes import gone
from tests.store.stores import opened

ROOT = Path(__file__).parents[2]
LIMIT = 60.0


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as made:
        yield made


def left(store: Store, number: int = 1) -> tuple[int, int]:
    """How many lines of the batch wait, and run."""
    work: WorkLeft = store.run_now(lambda c: work_left(c, a_batch(number).id))
    return work.waiting, work.running


def found(store: Store, row: StoredRow) -> StoredRow:
    again = store.run_now(lambda c: find_row(c, row.owner, row.id, row.kind))
    assert again is not None
    return again


def test_lines_that_begin_alike_come_together_the_longest_first(store: Store) -> None:
    lengths = {1: (5, 10), 2: (9, 30), 3: (5, 40), 4: (9, 10), 5: (5, 10)}
    lines = [a_line(n, prefix=p, max_tokens=most) for n, (p, most) in lengths.items()]
    begin(store, a_batch(), lines)
    taken = claim(store)
    assert numbers(taken) == [3, 1, 5, 2, 4]
    assert {(row.claimed_by, row.claimed_until, row.started_at) for row in taken} == {
        ("p1", NOW + LEASE, NOW)
    }


def test_a_pick_names_batch_owner_model_and_prefix(store: Store) -> None:
    mine, other = a_batch(1), a_batch(2, owner="bob")
    lines = [a_line(n, mine, model=f"m{n % 2}", prefix=n % 3) for n in range(1, 7)]
    begin(store, mine, lines, model=None)
    begin(store, other, [a_line(n, other) for n in range(1, 4)])
    assert numbers(claim(store, model="m0", prefix=1)) == [4]
    assert [row.owner for row in claim(store, owner="bob", limit=2)] == ["bob", "bob"]
    assert numbers(claim(store, batch=mine.id, prefix=0)) == [3, 6]
    assert claim(store, batch=mine.id, owner="bob") == []
    assert [row.batch for row in claim(store)] == [mine.id] * 3 + [other.id]


def test_the_nearest_deadline_comes_first_where_that_is_asked(store: Store) -> None:
    calm, urgent = a_batch(1), a_batch(2, expires_at=NOW + 60)
    begin(store, calm, [a_line(1, calm)])
    begin(store, urgent, [a_line(1, urgent)])
    assert [row.batch for row in claim(store, limit=1, by_deadline=True)] == [urgent.id]
    rows = [alone(1), alone(2, deadline=NOW + 9), alone(3, deadline=NOW + 5)]
    store.run_now(lambda c: add_rows(c, rows))
    kind = RequestKind.RESPONSE
    assert [row.id for row in claim(store, kind=kind, limit=1)] == [rows[0].id]
    taken = claim(store, kind=kind, by_deadline=True)
    assert [row.id for row in taken] == [rows[2].id, rows[1].id]


def test_several_picks_take_each_row_once(store: Store) -> None:
    begin(store, a_batch(), [a_line(n, prefix=n % 2) for n in range(1, 7)])
    picks = [
        Pick(2, RequestKind.LINE, prefix=1),
        Pick(9, RequestKind.LINE),
        Pick(1, RequestKind.LINE),
    ]
    taken = store.run_now(Claim(FOLDER, "p1", picks, NOW, LEASE))
    assert numbers(taken) == [1, 3, 2, 4, 6, 5]


def test_nothing_of_a_paused_batch_is_claimed(store: Store) -> None:
    batch = a_batch()
    begin(store, batch, [a_line(1)])
    store.run_now(lambda c: pause_batch(c, "alice", batch.id, NOW, "by its owner"))
    assert claim(store) == claim(store, batch=batch.id) == []


def test_what_is_put_off_is_not_claimed_before_its_time(store: Store) -> None:
    begin(store, a_batch(), [a_line(1)])
    (row,) = claim(store)
    store.run_now(lambda c: put_back(c, "p1", [row.id], NOW + 60, failed=True))
    assert claim(store, now=NOW + 59) == []
    (again,) = claim(store, now=NOW + 60)
    assert (again.id, again.attempts) == (row.id, 1)


def test_only_the_process_that_has_a_row_renews_it_or_puts_it_back(store: Store) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2)])
    mine, other = claim(store, "p1", 1), claim(store, "p2", 1)
    ids = [mine[0].id, other[0].id, "batch_req_unknown"]
    assert store.run_now(lambda c: renew(c, "p1", ids, NOW + 20, LEASE)) == {mine[0].id}
    assert found(store, mine[0]).claimed_until == NOW + 20 + LEASE
    assert found(store, other[0]).claimed_until == NOW + LEASE
    for _ in range(2):
        store.run_now(lambda c: put_back(c, "p1", ids, NOW, failed=True))
        assert left(store) == (1, 1)
    assert found(store, mine[0]).attempts == 1


def test_running_lines_of_a_cancelled_batch_are_not_wanted_and_end_when_put_back(
    store: Store,
) -> None:
    batch = a_batch()
    begin(store, batch, [a_line(number) for number in range(1, 6)])
    ids = [row.id for row in claim(store, limit=2)]
    cancelled = store.run_now(lambda c: cancel_batch(c, "alice", batch.id, "openai", NOW + 3))
    assert cancelled is not None
    assert (cancelled.state, cancelled.cancelled) == (BatchState.CANCELLING, 3)
    assert store.run_now(lambda c: renew(c, "p1", ids, NOW, LEASE)) == set()
    assert store.run_now(lambda c: begin_finalizing(c, batch.id, NOW)) is None
    for _ in range(2):
        store.run_now(lambda c: put_back(c, "p1", ids, NOW))
        now = store.run_now(lambda c: find_batch(c, "alice", batch.id, "openai"))
        assert now is not None
        assert (now.cancelled, left(store)) == (5, (0, 0))
    row = store.run_now(lambda c: find_row(c, "alice", ids[0], RequestKind.LINE))
    assert row is not None
    assert (row.state, row.ended_at) == (RequestState.CANCELLED, NOW + 3)
    assert store.run_now(lambda c: begin_finalizing(c, batch.id, NOW)) is not None


OWN = ProcessIdentity("own.0", "host-1", 1, NOW)


def release(store: Store, now: float = NOW, own: ProcessIdentity = OWN) -> int:
    return store.run_now(lambda c: release_lost(c, FOLDER, own, now))


def test_rows_wait_again_when_their_lease_is_over(store: Store) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2)])
    other = ProcessIdentity("other.0", "host-2", 1, NOW)
    store.run_now(lambda c: register(c, other, NOW))
    claim(store, other.id, 1)
    claim(store, OWN.id, 1, now=NOW + 10)
    assert release(store, NOW + LEASE - 1) == 0
    assert release(store, NOW + LEASE) == 1
    assert left(store) == (1, 1)
    assert release(store, NOW + LEASE + 10) == 1
    assert left(store) == (2, 0)


def test_rows_of_a_process_that_is_not_registered_wait_again_at_once(store: Store) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2)])
    claim(store, "unknown", 1)
    claim(store, OWN.id, 1)
    assert release(store) == 1
    assert left(store) == (1, 1)


@pytest.mark.slow
def test_rows_of_a_killed_process_wait_again_at_once(store_url: str, store: Store) -> None:
    begin(store, a_batch(), [a_line(number) for number in range(1, 41)])
    with subprocess.Popen(
        [sys.executable, "-m", "tests.batches.claimer", store_url, "7", "hold"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            ids = process.stdout.readline().split()
            assert len(ids) == 7
            assert release(store, own=ProcessIdentity.of_this_process(NOW)) == 0
            assert left(store) == (33, 7)
        finally:
            process.kill()
    assert gone(process.pid)
    assert release(store, own=ProcessIdentity.of_this_process(NOW)) == 7
    assert left(store) == (40, 0)


def test_lost_lines_of_a_cancelled_batch_end_as_cancelled(store: Store) -> None:
    batch = a_batch()
    begin(store, batch, [a_line(1)])
    claim(store, "unknown")
    store.run_now(lambda c: cancel_batch(c, "alice", batch.id, "openai", NOW))
    assert release(store) == 1
    now = store.run_now(lambda c: find_batch(c, "alice", batch.id, "openai"))
    assert now is not None
    assert (now.cancelled, left(store)) == (1, (0, 0))


def test_threads_that_claim_at_once_take_every_row_once(store_url: str) -> None:
    count = 600
    taken: list[list[str]] = [[] for _ in range(4)]
    with opened(store_url) as store:
        begin(store, a_batch(), [a_line(n, prefix=n % 7) for n in range(1, count + 1)])
        start = threading.Barrier(len(taken))

        def work(number: int) -> None:
            with opened(store_url) as own:
                start.wait(LIMIT)
                # A row that another claims at this moment is passed over, so one look may be vain.
                empty = 0
                while empty < 20:
                    rows = once_unlocked(lambda: claim(own, f"p{number}", 1 + number * 3))
                    taken[number] += [row.id for row in rows]
                    empty = 0 if rows else empty + 1

        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(taken))]
        for one in threads:
            one.start()
        for one in threads:
            one.join(LIMIT)
        assert left(store) == (0, count)
    assert set(Counter(id_ for ids in taken for id_ in ids).values()) == {1}
    assert sum(map(len, taken)) == count


@pytest.mark.slow
def test_processes_that_claim_at_once_take_every_row_once(store_url: str) -> None:
    count = 300
    with opened(store_url) as store:
        begin(store, a_batch(), [a_line(n) for n in range(1, count + 1)])
        command = [sys.executable, "-m", "tests.batches.claimer", store_url, "5"]
        processes = [
            subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
            )
            for _ in range(3)
        ]
        told = [process.communicate(timeout=LIMIT)[0].split() for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0]
        assert left(store) == (0, count)
    assert sorted(id_ for ids in told for id_ in ids) == sorted(
        a_line(n).id for n in range(1, count + 1)
    )


def test_own_requests_of_other_kinds_keep_their_claims_though_their_leases_are_over(
    store: Store,
) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2)])
    claim(store, OWN.id, 2)
    late = NOW + LEASE + 1
    others = [RequestKind.RESPONSE, RequestKind.DEFERRED]
    assert store.run_now(lambda c: release_lost(c, FOLDER, OWN, late, others)) == 0
    assert store.run_now(lambda c: release_lost(c, FOLDER, OWN, late, [RequestKind.LINE])) == 2


def test_lines_are_not_claimed_behind_their_deadline(store: Store) -> None:
    begin(store, a_batch(), [a_line(1, deadline=NOW), a_line(2, deadline=NOW + 1)])
    assert numbers(claim(store)) == [2]
    assert left(store) == (1, 1)


def test_paused_batches_are_known(store: Store) -> None:
    begin(store, a_batch(1), [a_line(1)])
    begin(store, a_batch(2), [a_line(1, batch=a_batch(2))])
    ids = [a_batch(1).id, a_batch(2).id, "batch_unknown"]
    assert store.run_now(lambda c: paused(c, ids)) == set()
    store.run_now(lambda c: pause_batch(c, a_batch(2).owner, ids[1], NOW, "paused"))
    assert store.run_now(lambda c: paused(c, ids)) == {ids[1]}
