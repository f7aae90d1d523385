"""Several processes work on the same batches: counts are exact, and nothing counts twice."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import pytest
from sqlalchemy import Connection, func, select

from gateway.batches.batch_rows import (
    Batch,
    begin_finalizing,
    cancel_batch,
    end_batch,
    expire_lines,
    find_batch,
)
from gateway.batches.claims import put_back, record, release_lost, renew
from gateway.batches.request_rows import BatchState, RequestState, StoredRow
from gateway.store.schema import stored_requests
from gateway.store.store import Store
from gateway.usage.processes import ProcessIdentity
from tests.batches.stored_rows import (
    DAY,
    FOLDER,
    LEASE,
    NOW,
    a_batch,
    a_line,
    a_result,
    begin,
    once_unlocked,
)
from tests.batches.stored_rows import claim as claim_once
from tests.batches.stored_rows import do as do_once
from tests.store.stores import opened

P = ParamSpec("P")
T = TypeVar("T")

WORKERS, BATCHES, LINES = 3, 6, 60
CANCELLED = {1, 2}
LIMIT = 120.0


def do(
    store: Store, job: Callable[Concatenate[Connection, P], T], *args: P.args, **keys: P.kwargs
) -> T:
    return once_unlocked(lambda: do_once(store, job, *args, **keys))


def claim(store: Store, process: str, limit: int, *, model: str | None) -> list[StoredRow]:
    return once_unlocked(lambda: claim_once(store, process, limit, model=model))


class Trouble:
    """Works on all batches as one of several processes, and forgets some rows that it has."""

    def __init__(self, url: str, number: int, batches: list[Batch], seed: int) -> None:
        self.url = url
        self.own = ProcessIdentity(f"p{number}.0", "host", 1, NOW)
        self.rng = random.Random(10 * seed + number)
        self.batches = batches
        self.recorded: Counter[str] = Counter()
        self.ended: list[str] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with opened(self.url) as store:
                left = {one.id for one in self.batches}
                while left:
                    self._step(store)
                    for id_ in sorted(left):
                        if self._try_to_end(store, id_):
                            left.discard(id_)
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            self.error = error

    def _step(self, store: Store) -> None:
        rng, own = self.rng, self.own
        rows = claim(store, own.id, rng.randint(1, 12), model=rng.choice([None, "demo"]))
        ids = [row.id for row in rows]
        if rng.random() < 0.3:
            do(store, renew, own.id, ids, NOW, LEASE)
        forgotten = ids[:1] if rng.random() < 0.2 else []
        back = [id_ for id_ in ids if id_ not in forgotten and rng.random() < 0.2]
        do(store, put_back, own.id, back, NOW, failed=rng.random() < 0.5)
        states = [RequestState.DONE, RequestState.DONE, RequestState.FAILED]
        results = [
            a_result(row, state=rng.choice(states), place=f"results-{own.id}")
            for row in rows
            if row.id not in forgotten
        ]
        first = do(store, record, own.id, results, NOW)
        assert sorted(do(store, record, own.id, results, NOW)) == sorted(first)
        self.recorded.update(first)
        if rng.random() < 0.2:
            # Far behind all leases: what others hold at this moment is taken from them.
            do(store, release_lost, FOLDER, own, NOW + rng.choice([0.0, 10 * LEASE]))
        if rng.random() < 0.1:
            number = rng.choice(sorted(CANCELLED))
            do(store, cancel_batch, "alice", self.batches[number].id, "openai", NOW, limit=7)
        do(store, expire_lines, FOLDER, NOW, limit=5)

    def _try_to_end(self, store: Store, id_: str) -> bool:
        do(store, begin_finalizing, id_, NOW, limit=7)
        if do(store, end_batch, id_, None, None, NOW, lambda *_: self.ended.append(id_)):
            return True
        batch = do(store, find_batch, "alice", id_, "openai")
        return batch is not None and batch.state.ended


def batch_now(store: Store, batch: Batch) -> Batch:
    found = do(store, find_batch, "alice", batch.id, "openai")
    assert found is not None
    return found


def states_of(store: Store, batch: Batch) -> dict[str, int]:
    column = stored_requests.c.state
    asked = select(column, func.count()).where(stored_requests.c.batch == batch.id)
    found = store.run_now(lambda c: c.execute(asked.group_by(column)).all())
    return {str(state): int(number) for state, number in found}


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
        threads = [threading.Thread(target=one.run) for one in workers]
        for one in threads:
            one.start()
        for one in threads:
            one.join(LIMIT)
        assert [one.error for one in workers] == [None] * WORKERS
        assert not any(one.is_alive() for one in threads)
        recorded = sum((one.recorded for one in workers), Counter[str]())
        assert set(recorded.values()) == {1}
        counted = 0
        for number, before in enumerate(batches):
            batch = batch_now(store, before)
            counts = {
                "done": batch.completed, "failed": batch.failed,
                "cancelled": batch.cancelled, "expired": batch.expired,
            }  # fmt: skip
            assert states_of(store, batch) == {k: v for k, v in counts.items() if v}
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
