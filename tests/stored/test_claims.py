"""Rows are claimed, renewed, put back and recorded once, whoever has had them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Select, func, select

from gateway.callers.processes import ProcessIdentity, register
from gateway.config.stored import BatchSettings
from gateway.store.failures import StoreError
from gateway.store.schema import stored_requests
from gateway.store.store import Store
from gateway.stored.batch_rows import (
    Batch,
    begin_finalizing,
    cancel_batch,
    end_batch,
    expire_lines,
    find_batch,
)
from gateway.stored.claims import (
    BatchState,
    Pick,
    RecordedResult,
    RequestKind,
    RequestState,
    RowLeases,
    StoredRow,
    WorkLeft,
    add_rows,
    put_back,
    record,
    release_lost,
    renew,
    work_left,
)
from gateway.stored.folder import DiskThreads, Folder, Storage
from tests.store.stores import opened
from tests.stored.stored_rows import (
    DAY,
    FOLDER,
    LEASE,
    NOW,
    a_batch,
    a_line,
    a_result,
    alone,
    begin,
    claim,
    do,
    find_row,
    numbers,
    once_unlocked,
)

LIMIT = 120.0


def left(store: Store) -> tuple[int, int]:
    """How many lines of the batch wait, and run."""
    work: WorkLeft = do(store, work_left, a_batch().id)
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


def test_a_pick_of_lines_names_batch_model_and_prefix(store: Store) -> None:
    mine, other = a_batch(1), a_batch(2, owner="bob")
    lines = [a_line(n, mine, model=f"m{n % 2}", prefix=n % 3) for n in range(1, 7)]
    begin(store, mine, lines, model=None)
    begin(store, other, [a_line(n, other) for n in range(1, 4)])
    assert numbers(claim(store, model="m0", prefix=1)) == [4]
    assert [row.owner for row in claim(store, batch=other.id, limit=2)] == ["bob", "bob"]
    assert numbers(claim(store, batch=mine.id, prefix=0)) == [3, 6]
    assert [row.batch for row in claim(store)] == [mine.id] * 3 + [other.id]


def test_of_requests_without_a_batch_the_nearest_deadline_comes_first(store: Store) -> None:
    deadlines = None, NOW + 9, NOW + 5, NOW + 5
    rows = [alone(number, deadline=deadline) for number, deadline in enumerate(deadlines, 1)]
    rows.append(alone(5, owner="bob"))
    store.run_now(lambda c: add_rows(c, rows))
    kind = RequestKind.RESPONSE
    assert [row.id for row in claim(store, kind=kind, owner="bob")] == [rows[4].id]
    assert [row.id for row in claim(store, kind=kind, ids=[rows[1].id])] == [rows[1].id]
    taken = [claim(store, kind=kind, limit=2), claim(store, kind=kind)]
    assert [[row.id for row in some] for some in taken] == [
        [rows[2].id, rows[3].id], [rows[0].id],
    ]  # fmt: skip


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
    taken = claim(store, limit=2)
    ids = [row.id for row in taken]
    cancelled = store.run_now(lambda c: cancel_batch(c, "alice", batch.id, "openai", NOW + 3))
    assert cancelled is not None
    assert (cancelled.state, cancelled.cancelled) == (BatchState.CANCELLING, 3)
    assert store.run_now(lambda c: renew(c, "p1", ids, NOW, LEASE)) == set()
    assert store.run_now(lambda c: begin_finalizing(c, batch.id, NOW)) is None
    for _ in range(2):
        store.run_now(lambda c: put_back(c, "p1", ids, NOW))
        assert (batch_now(store).cancelled, left(store)) == (5, (0, 0))
    row = found(store, taken[0])
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
    row = found(store, rows[0])
    assert (row.state, row.status, row.ended_at) == (RequestState.DONE, 200, NOW + 5)
    assert (row.result_place, row.result_offset, row.result_length) == ("results-1", 100, 100)


def test_the_result_of_a_row_that_another_has_taken_does_not_count(store: Store) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2)])
    rows = claim(store, "p1")
    store.run_now(lambda c: put_back(c, "p1", [rows[0].id], NOW))
    assert recorded(store, [a_result(row) for row in rows]) == [rows[1].id]
    (again,) = claim(store, "p2")
    assert recorded(store, [a_result(rows[0], result_place="results-9")], "p1") == []
    assert recorded(store, [a_result(again)], "p2") == [again.id]
    assert recorded(store, [a_result(again, result_place="results-9")], "p1") == []
    assert counts(store) == {"total": 2, "completed": 2}


def test_another_result_of_the_same_process_is_not_taken_for_the_first_one(store: Store) -> None:
    begin(store, a_batch(), [a_line(1)])
    (row,) = claim(store)
    assert recorded(store, [a_result(row)]) == [row.id]
    assert recorded(store, [a_result(row, result_offset=7)]) == []
    assert recorded(store, [a_result(row, state=RequestState.FAILED)]) == []


def leases_of(store: Store, path: Path) -> RowLeases:
    """Leases of this process in a new folder; a batch of three lines waits there."""
    folder = Folder(path / "batches", most_bytes=lambda: 1 << 30)
    batch = replace(a_batch(), folder=folder.open())
    begin(store, batch, [a_line(number, batch) for number in (1, 2, 3)])
    storage = Storage(store, folder, DiskThreads(), BatchSettings, lambda: NOW)
    return RowLeases(storage, ProcessIdentity.of_this_process(time.time()))


async def claim_all(leases: RowLeases) -> list[str]:
    return [row.id for row in await leases.claim([Pick(10, RequestKind.LINE, a_batch().id)])]


def states(store: Store) -> list[RequestState]:
    rows = [do(store, find_row, "alice", a_line(n).id, RequestKind.LINE) for n in (1, 2, 3)]
    return [row.state for row in rows if row is not None]


async def test_rows_are_put_back_when_the_store_takes_them_again(
    store: Store, tmp_path: Path
) -> None:
    leases = leases_of(store, tmp_path)
    ids = await claim_all(leases)
    leases.put_back(ids, NOW)
    leases.storage.store = Store(store.location)
    assert leases.storage.store.close(1.0)
    with pytest.raises(StoreError):
        await leases.write()
    leases.storage.store = store
    assert await leases.renew(ids) == set(ids)
    assert await leases.write()
    assert not await leases.write()
    assert states(store) == [RequestState.WAITING] * 3


async def test_a_row_that_is_claimed_anew_is_not_put_back_for_its_earlier_claim(
    store: Store, tmp_path: Path
) -> None:
    leases = leases_of(store, tmp_path)
    ids = await claim_all(leases)
    do(store, put_back, leases.process.id, ids[:1], NOW)  # Somebody else has, as it was lost.
    leases.put_back(ids[:2], NOW)
    assert await claim_all(leases) == ids[:1]
    assert await leases.write()
    assert states(store) == [RequestState.RUNNING, RequestState.WAITING, RequestState.RUNNING]


WORKERS, BATCHES, LINES = 3, 6, 60
CANCELLED = {1, 2}


class Trouble:
    """Works on all batches as one of several processes, and forgets some rows that it has."""

    def __init__(self, url: str, number: int, batches: list[Batch], seed: int) -> None:
        self.url = url
        self.own = ProcessIdentity(f"p{number}.0", "host", 1, NOW)
        self.rng = random.Random(10 * seed + number)
        self.batches = batches
        self.recorded: Counter[str] = Counter()
        self.ended: list[str] = []

    def run(self) -> None:
        with opened(self.url) as store:
            left = {one.id for one in self.batches}
            while left:
                self._step(store)
                left -= {id_ for id_ in left if self._try_to_end(store, id_)}

    def _step(self, store: Store) -> None:
        rng, own = self.rng, self.own
        limit, model = rng.randint(1, 12), rng.choice([None, "demo"])
        rows = once_unlocked(lambda: claim(store, own.id, limit, model=model))
        ids = [row.id for row in rows]
        if rng.random() < 0.3:
            unlocked(store, renew, own.id, ids, NOW, LEASE)
        forgotten = ids[:1] if rng.random() < 0.2 else []
        back = [id_ for id_ in ids if id_ not in forgotten and rng.random() < 0.2]
        unlocked(store, put_back, own.id, back, NOW, failed=rng.random() < 0.5)
        states = [RequestState.DONE, RequestState.DONE, RequestState.FAILED]
        results = [
            a_result(row, state=rng.choice(states), result_place=f"results-{own.id}")
            for row in rows
            if row.id not in forgotten
        ]
        first = unlocked(store, record, own.id, results, NOW)
        assert sorted(unlocked(store, record, own.id, results, NOW)) == sorted(first)
        self.recorded.update(first)
        if rng.random() < 0.2:
            # Far behind all leases: what others hold at this moment is taken from them.
            unlocked(store, release_lost, FOLDER, own, NOW + rng.choice([0.0, 10 * LEASE]))
        if rng.random() < 0.1:
            id_ = self.batches[rng.choice(sorted(CANCELLED))].id
            unlocked(store, cancel_batch, "alice", id_, "openai", NOW, limit=7)
        unlocked(store, expire_lines, FOLDER, NOW, limit=5)

    def _try_to_end(self, store: Store, id_: str) -> bool:
        unlocked(store, begin_finalizing, id_, NOW, limit=7)
        if unlocked(store, end_batch, id_, None, None, NOW, lambda *_: self.ended.append(id_)):
            return True
        batch: Batch = unlocked(store, find_batch, "alice", id_, "openai")
        return batch.state.ended


def pairs(connection: Connection, asked: Select[Any]) -> list[tuple[str, int]]:
    return [(state, number) for state, number in connection.execute(asked)]


def unlocked(store: Store, job: Callable[..., Any], *args: Any, **keys: Any) -> Any:
    return once_unlocked(lambda: do(store, job, *args, **keys))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_counts_stay_exact_while_several_processes_work_and_cancel(
    store_url: str, seed: int
) -> None:
    # The first one is late from the start: its lines expire, a few at a time.
    batches = [
        a_batch(number, expires_at=NOW if number == 0 else NOW + DAY) for number in range(BATCHES)
    ]
    with opened(store_url) as store:
        for batch in batches:
            begin(store, batch, [a_line(number, batch) for number in range(1, LINES + 1)])
        workers = [Trouble(store_url, number, batches, seed) for number in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS) as threads:
            list(threads.map(Trouble.run, workers))
        recorded = sum((one.recorded for one in workers), Counter[str]())
        assert set(recorded.values()) == {1}
        state, of_batch = stored_requests.c.state, stored_requests.c.batch
        counted = 0
        for number, before in enumerate(batches):
            batch = unlocked(store, find_batch, "alice", before.id, "openai")
            counts = {
                "done": batch.completed, "failed": batch.failed,
                "cancelled": batch.cancelled, "expired": batch.expired,
            }  # fmt: skip
            asked = select(state, func.count()).where(of_batch == batch.id).group_by(state)
            assert dict(do(store, pairs, asked)) == {k: v for k, v in counts.items() if v}
            assert sum(counts.values()) == batch.total == LINES
            has_result = batch.completed + batch.failed
            assert batch.completion_tokens == 5 * has_result
            assert batch.cost == pytest.approx(0.25 * has_result)
            counted += has_result
            if number not in CANCELLED:
                assert not batch.cancelled
                last = BatchState.EXPIRED if batch.expired else BatchState.COMPLETED
                assert batch.state is last
        assert counted == len(recorded)
        # Each was ended by one of them, though all had tried.
        ends = Counter(id_ for one in workers for id_ in one.ended)
        assert ends == {batch.id: 1 for batch in batches}
