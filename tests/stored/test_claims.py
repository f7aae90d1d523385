"""Rows of batches and lines: claimed, put back and recorded once, whoever has had them."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Select, func, select, update

from gateway.callers.processes import ProcessIdentity, register
from gateway.config.stored import BatchSettings
from gateway.errors import GatewayError
from gateway.store.failures import StoreError, StoreLocked
from gateway.store.schema import batches, stored_requests
from gateway.store.store import Store
from gateway.stored import files
from gateway.stored.background_requests import add_background
from gateway.stored.batch_rows import (
    WINDOW_SECONDS,
    Batch,
    BatchSpeed,
    SpeedMeter,
    add_batch,
    begin_batch,
    begin_finalizing,
    cancel_batch,
    delete_batch,
    end_batch,
    expire_lines,
    fail_batch,
    find_batch,
    progress_of,
    remove_batches,
    unfinished,
)
from gateway.stored.claims import (
    BUSY_SECONDS,
    UNTOLD_SECONDS,
    BatchState,
    Pick,
    RecordedResult,
    RequestKind,
    RequestState,
    RowLeases,
    StoredRow,
    UnfinishedWork,
    WaitingLines,
    WorkLeft,
    add_rows,
    new_id,
    put_back,
    record,
    release_lost,
    renew,
    waiting_by_kind,
    waiting_lines,
    work_left,
)
from gateway.stored.files import StoredFile
from gateway.stored.folder import ID_FILE, DiskThreads, Folder, Storage
from tests.known import known
from tests.polling import eventually
from tests.store.stores import CountingStore, opened, wait_until
from tests.stored.stored_rows import (
    DAY,
    FOLDER,
    LEASE,
    NOW,
    PATH,
    a_batch,
    a_line,
    a_result,
    alone,
    batch_id,
    begin,
    claim,
    claim_any,
    do,
    find_row,
    limits,
    numbers,
)

LIMIT = 120.0


def left(store: Store) -> tuple[int, int]:
    """How many lines of the batch wait, and run."""
    work: WorkLeft = do(store, work_left, a_batch().id)
    return work.waiting, work.running


def found(store: Store, row: StoredRow) -> StoredRow:
    return known(do(store, find_row, row.owner, row.id, row.kind))


def the_batch(store: Store) -> Batch:
    return known(do(store, find_batch, "alice", batch_id(), "openai"))


def counts(store: Store) -> dict[str, int]:
    batch = the_batch(store)
    names = ("total", "completed", "failed", "cancelled", "expired")
    return {name: getattr(batch, name) for name in names if getattr(batch, name)}


def add(store: Store, batch: Batch, most: int = 9) -> Batch:
    return do(store, add_batch, batch, limits(batches_per_key=most))


def recorded(store: Store, results: list[RecordedResult], process: str = "p1") -> list[str]:
    return sorted(do(store, record, process, results, NOW + 5))


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
    do(store, add_rows, rows)
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
    assert do(store, renew, "p1", ids, NOW + 20, LEASE) == {mine[0].id}
    assert found(store, mine[0]).claimed_until == NOW + 20 + LEASE
    assert found(store, other[0]).claimed_until == NOW + LEASE
    for _ in range(2):
        do(store, put_back, "p1", ids, NOW, failed=True)
        assert left(store) == (1, 1)
    assert found(store, mine[0]).attempts == 1


def test_running_lines_of_a_cancelled_batch_are_not_wanted_and_end_when_put_back(
    store: Store,
) -> None:
    batch = a_batch()
    begin(store, batch, [a_line(number) for number in range(1, 6)])
    taken = claim(store, limit=2)
    ids = [row.id for row in taken]
    cancelled = do(store, cancel_batch, "alice", batch.id, "openai", NOW + 3)
    assert cancelled is not None
    assert (cancelled.state, cancelled.cancelled) == (BatchState.CANCELLING, 3)
    assert do(store, renew, "p1", ids, NOW, LEASE) == set()
    assert do(store, begin_finalizing, batch.id, NOW) is None
    for _ in range(2):
        do(store, put_back, "p1", ids, NOW)
        assert (the_batch(store).cancelled, left(store)) == (5, (0, 0))
    row = found(store, taken[0])
    assert (row.state, row.ended_at) == (RequestState.CANCELLED, NOW + 3)
    assert do(store, begin_finalizing, batch.id, NOW) is not None


OWN = ProcessIdentity("own.0", "host-1", 1, NOW)


def test_rows_wait_again_when_their_lease_is_over(store: Store) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2)])
    other = ProcessIdentity("other.0", "host-2", 1, NOW)
    do(store, register, other, NOW)
    claim(store, other.id, 1)
    claim(store, OWN.id, 1, now=NOW + 10)
    assert do(store, release_lost, FOLDER, OWN, NOW + LEASE - 1) == 0
    assert do(store, release_lost, FOLDER, OWN, NOW + LEASE) == 1
    assert left(store) == (1, 1)
    assert do(store, release_lost, FOLDER, OWN, NOW + LEASE + 10) == 1
    assert left(store) == (2, 0)


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
        batch = the_batch(store)
        sums = batch.prompt_tokens, batch.cached_tokens, batch.completion_tokens, batch.cost
        assert sums == (40, 16, 20, 1.0)
    row = found(store, rows[0])
    assert (row.state, row.status, row.ended_at) == (RequestState.DONE, 200, NOW + 5)
    assert (row.result_place, row.result_offset, row.result_length) == ("results-1", 100, 100)


def test_the_result_of_a_row_that_another_has_taken_does_not_count(store: Store) -> None:
    begin(store, a_batch(), [a_line(1), a_line(2)])
    rows = claim(store, "p1")
    do(store, put_back, "p1", [rows[0].id], NOW)
    assert recorded(store, [a_result(row) for row in rows]) == [rows[1].id]
    (again,) = claim(store, "p2")
    assert recorded(store, [a_result(rows[0], result_place="results-9")], "p1") == []
    assert recorded(store, [a_result(again)], "p2") == [again.id]
    assert recorded(store, [a_result(again, result_place="results-9")], "p1") == []
    # Nor is another result of the same process taken for the first one.
    for other in ({"result_offset": 7}, {"state": RequestState.FAILED}):
        assert recorded(store, [a_result(again, **other)], "p2") == []
    assert counts(store) == {"total": 2, "completed": 2}


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
        rows = unlocked(store, claim_any, FOLDER, own.id, limit, NOW, LEASE, model=model)
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
    """Do a job, again and again while the store is locked: SQLite's lock is not fair."""
    while True:
        with contextlib.suppress(StoreLocked):
            return do(store, job, *args, **keys)


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


def test_groups_are_sums_of_what_may_run_now(store: Store) -> None:
    first, second = a_batch(1), a_batch(2, owner="bob", class_="normal", expires_at=NOW + 60)
    begin(store, first, [a_line(n, first, max_tokens=10 * n) for n in range(1, 5)])
    several = [a_line(n, second, model=f"m{n % 2}" if n > 1 else None) for n in range(1, 6)]
    begin(store, second, several, model=None)
    do(store, add_rows, [alone(1), alone(2, deadline=NOW + 5, max_tokens=7)])
    groups = do(store, lambda connection: list(waiting_lines(connection, FOLDER, NOW)))
    assert sorted(groups, key=lambda one: (one.owner, one.model or "")) == [
        WaitingLines(first.id, "alice", PATH, "demo", "batch", 4, NOW + DAY),
        WaitingLines(second.id, "bob", PATH, None, "normal", 1, NOW + 60),
        WaitingLines(second.id, "bob", PATH, "m0", "normal", 2, NOW + 60),
        WaitingLines(second.id, "bob", PATH, "m1", "normal", 2, NOW + 60),
    ]
    assert do(store, waiting_by_kind, FOLDER, NOW) == {"response": 2}


def a_request(store: Store) -> None:
    do(store, add_background, alone(1), limits())


def change(store: Store, table: Any, **values: Any) -> None:
    do(store, lambda connection: connection.execute(update(table).values(**values)))


@pytest.fixture
def work(store_url: str, tmp_path: Path) -> Iterator[UnfinishedWork]:
    """The work of a folder, by a clock that stands still."""
    (tmp_path / "batches").mkdir(0o700)
    (tmp_path / "batches" / ID_FILE).write_text(FOLDER)
    folder, seconds = Folder(tmp_path / "batches", most_bytes=lambda: 1 << 30), time.monotonic()
    assert folder.open() == FOLDER
    with opened(store_url), opened(store_url, CountingStore, look_seconds=0.01) as store:
        # It has looked at its version for the first time.
        wait_until(lambda: store.changes >= 2, store)
        yield UnfinishedWork(
            Storage(store, folder, DiskThreads(), BatchSettings, clock=lambda: seconds)
        )


def pass_(work: UnfinishedWork, seconds: float) -> None:
    later = work.storage.clock() + seconds
    work.storage = replace(work.storage, clock=lambda: later)


async def test_the_store_is_not_asked_again_until_this_process_has_added_something(
    work: UnfinishedWork,
) -> None:
    store = work.storage.store
    assert isinstance(store, CountingStore)
    assert not await work.exists()
    asked = store.jobs
    for _ in range(100):
        assert not await work.exists()
    # PostgreSQL does not tell what it has, but then the clock decides.
    assert store.jobs == asked
    a_request(store)
    work.added()
    assert await work.exists()
    assert await work.exists()
    assert store.jobs == asked + 1
    change(store, stored_requests, state="done")
    assert await work.exists()
    pass_(work, BUSY_SECONDS)
    assert not await work.exists()


async def test_what_another_process_adds_is_seen(work: UnfinishedWork, store_url: str) -> None:
    assert not await work.exists()
    with opened(store_url) as other:
        a_request(other)
    if work.storage.store.location.path is None:
        assert not await work.exists()
        pass_(work, UNTOLD_SECONDS)

    async def seen() -> bool | None:
        return await work.exists() or None

    assert await eventually(seen)


async def test_what_waits_runs_or_has_not_ended_is_work(work: UnfinishedWork) -> None:
    store = work.storage.store

    async def exists() -> bool:
        work.added()
        return await work.exists()

    add(store, a_batch())
    assert await exists()
    change(store, batches, ended_at=NOW)
    assert not await exists()
    # Left over by a process that was killed, or by one that still runs it.
    assert do(store, add_rows, [a_line(1)])
    change(store, stored_requests, state="running")
    assert await exists()
    change(store, stored_requests, state="done")
    assert not await exists()
    a_request(store)
    assert await exists()
    assert len(claim(store, kind=RequestKind.RESPONSE)) == 1
    assert await exists()


def test_a_batch_comes_back_as_it_was_added_and_by_its_idempotency_key_to_its_owner_alone(
    store: Store,
) -> None:
    batch = a_batch(
        metadata={"team": "ü"}, errors=[{"code": "x", "line": None}], idempotency_key="k",
        request_digest="d", webhook_url="https://example.org/", output_seconds=3600.0, user="ann",
    )  # fmt: skip
    assert add(store, batch, 1) == the_batch(store) == add(store, batch, 1) == batch
    assert do(store, unfinished, FOLDER) == [batch]
    assert do(store, unfinished, "other") == []
    assert add(store, replace(batch, id=batch_id(2)), 1) == batch
    with pytest.raises(GatewayError, match="sent before with another request"):
        add(store, replace(batch, id=batch_id(3), request_digest="d2"), 1)
    other = replace(batch, id=batch_id(4), owner="bob")
    assert add(store, other, 1) == other


def test_an_owner_has_at_most_so_many_unfinished_batches(store: Store) -> None:
    for number in (1, 2):
        add(store, a_batch(number), 2)
    with pytest.raises(GatewayError, match="2 batches that have not ended"):
        add(store, a_batch(3), 2)
    add(store, a_batch(4, owner="bob"), 2)
    do(store, fail_batch, batch_id(1), [], NOW)
    add(store, a_batch(3), 2)


def test_the_input_file_must_be_the_owners_of_the_right_purpose_and_here(store: Store) -> None:
    file = StoredFile("file-1", "alice", "x.jsonl", "batch", 9, "", NOW, None, FOLDER)
    others = {"purpose": "user_data"}, {"owner": "bob"}, {"folder": "far"}, {"expires_at": NOW}
    for number, values in enumerate(({}, *others), 1):
        do(store, files.add_file, replace(file, id=f"file-{number}", **values))  # type: ignore[arg-type]

    def outcome(number: int) -> str:
        try:
            add(store, a_batch(number, input_file=f"file-{number}"))
        except GatewayError as error:
            return error.code
        return "added"

    assert [outcome(number) for number in range(1, 7)] == [
        "added", "invalid_value", "file_not_found", "file_elsewhere", "file_not_found",
        "file_not_found",
    ]  # fmt: skip
    with pytest.raises(GatewayError, match=f"The batch '{batch_id(1)}' still reads this") as error:
        do(store, files.delete_file, "alice", "file-1", NOW)
    assert (error.value.status, error.value.code) == (409, "file_in_use")


def test_a_batch_that_fails_as_a_whole_tells_its_listener_once(store: Store) -> None:
    add(store, a_batch())
    errors = [{"code": "empty_file", "message": "…", "param": None, "line": None}]
    told: list[Batch] = []
    first, again = (
        do(store, fail_batch, batch_id(), errors, NOW, lambda _, one: told.append(one))
        for _ in range(2)
    )
    begun = do(store, begin_batch, batch_id(), None, NOW)
    assert first is not None
    assert first == again == begun == the_batch(store)
    assert told == [first]
    assert (first.state, first.errors, first.ended_at) == (BatchState.FAILED, errors, NOW)


def end(store: Store) -> Batch:
    assert do(store, begin_finalizing, batch_id(), NOW) is not None
    return known(do(store, end_batch, batch_id(), None, None, NOW))


def test_a_batch_that_is_read_or_finalized_can_be_cancelled_and_ends_so(store: Store) -> None:
    def cancel() -> Batch:
        return known(do(store, cancel_batch, "alice", batch_id(), "openai", NOW))

    add(store, a_batch())
    do(store, add_rows, [a_line(1), a_line(2, state=RequestState.FAILED)])
    batch = cancel()
    assert (batch.state, batch.total, batch.cancelled, batch.failed) == (
        BatchState.CANCELLING, 2, 1, 1,
    )  # fmt: skip
    assert do(store, begin_batch, batch_id(), None, NOW) == batch
    assert cancel() == batch
    assert do(store, begin_finalizing, batch_id(), NOW) is not None
    assert cancel().state is BatchState.CANCELLING
    ended = end(store)
    assert ended.state is BatchState.CANCELLED
    assert cancel() == ended


def test_a_deleted_batch_is_gone_at_once_and_removed_with_its_lines(store: Store) -> None:
    batch, other = a_batch(idempotency_key="k"), a_batch(3)
    begin(store, other, [a_line(1, other)])
    begin(store, batch, [a_line(number) for number in range(1, 6)])
    recorded(store, [a_result(row) for row in claim(store, batch=batch.id)])
    end(store)
    deleted = [
        do(store, delete_batch, "alice", id_, "openai") for id_ in (batch.id, batch.id, other.id)
    ]
    assert deleted == [["file-1", "results-1"], None, None]
    assert [one.id for one in do(store, unfinished, FOLDER)] == [other.id]
    again = a_batch(2, idempotency_key="k")
    assert add(store, again) == again
    removed = [do(store, remove_batches, [batch.id, other.id], limit=3) for _ in range(3)]
    assert removed == [False, True, True]
    assert do(store, find_row, "alice", a_line(1).id, RequestKind.LINE) is None
    assert do(store, work_left, other.id).waiting == 1


BATCH = Batch(
    id="batch_1", owner="alice", api="openai", endpoint="/v1/embeddings", input_file="file-1",
    created_at=0.0, expires_at=9.0, keep_until=99.0, folder="f",
    state=BatchState.IN_PROGRESS, in_progress_at=1.0, total=100,
)  # fmt: skip


def test_ids_grow_with_time() -> None:
    times = [0.0, 1.0, 1_780_000_000.123, 1_780_000_000.124, 4_000_000_000.0]
    ids = [new_id("batch_", at, lambda count: "ab" * count) for at in times]
    assert ids == sorted(set(ids))
    assert ids[2] == f"batch_019e7044887b{'ab' * 10}"


def test_the_cost_is_reckoned_before_the_first_line_and_by_results_afterwards() -> None:
    left = WorkLeft(100, 0, 10_000, 50_000)
    found = progress_of(BATCH, left, None, 0.001, 100.0)
    assert found.expected_cost == pytest.approx(60.0)
    assert (found.waiting, found.running, found.cost) == (100, 0, 0.0)
    assert progress_of(BATCH, left, None, None, 100.0).expected_cost is None
    some = replace(
        BATCH, total=10, completed=5, prompt_tokens=500, completion_tokens=500, cost=1.0, failed=1
    )
    found = progress_of(some, WorkLeft(3, 1, 400, 0), BatchSpeed(50.0, 0.5), None, 100.0)
    assert found.expected_cost == pytest.approx(1.0 + 0.001 * 800)
    assert found.expected_end == pytest.approx(100.0 + 400 / 50)
    stuck = progress_of(some, WorkLeft(3, 1, 400, 0), BatchSpeed(0.0, 0.0), None, 100.0)
    assert stuck.expected_end is None
    ended = replace(BATCH, state=BatchState.COMPLETED, cost=2.0)
    found = progress_of(ended, WorkLeft(0, 0, 0, 0), BatchSpeed(1.0, 1.0), 0.1, 100.0)
    assert (found.cost, found.expected_cost, found.tokens_per_second) == (2.0, 2.0, None)


def test_speed_is_that_of_the_last_minutes() -> None:
    meter = SpeedMeter()
    assert meter.speed(BATCH.id) is None
    for second in range(0, 1000, 10):
        tokens = 0 if second < 500 else 20 * (second - 500)
        meter.look([replace(BATCH, completion_tokens=tokens, completed=second)], float(second))
    speed = meter.speed(BATCH.id)
    assert speed is not None
    assert [speed.tokens, speed.lines] == pytest.approx([20.0, 1.0])
    meter.look([replace(BATCH, paused_at=1.0)], 1001.0)
    assert meter.speed(BATCH.id) is None
    assert WINDOW_SECONDS < 500
