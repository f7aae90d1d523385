"""How long jobs take beside 50,000 waiting lines: `python -m tests.batches.measure_rows`.

On SQLite and on a PostgreSQL server of its own, each job several times: shortest time and median.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gateway.batches.batch_rows import begin_finalizing
from gateway.batches.claims import Claim, Pick, record, release_lost, renew
from gateway.batches.request_rows import RequestKind, waiting_groups, work_left
from gateway.store.store import Store
from gateway.usage.processes import ProcessIdentity
from tests.batches.stored_rows import (
    FOLDER,
    LEASE,
    NOW,
    a_batch,
    a_line,
    a_result,
    begin,
    claim,
)
from tests.postgres import running_postgres
from tests.store.stores import opened

LINES = 50_000
TIMES = 20
PREFIXES = 100


def measured(store: Store, name: str, make: Callable[[], Callable[[Any], Any]]) -> None:
    """Do the job that `make` makes, again and again."""
    took = []
    for _ in range(TIMES):
        job = make()
        began = time.perf_counter()
        store.run_now(job)
        took.append(1000 * (time.perf_counter() - began))
    middle = statistics.median(took)
    print(f"  {name}: {min(took):.1f} ms at least, {middle:.1f} ms in the middle", flush=True)


def measure(url: str) -> None:
    """Measure on an empty store."""
    batch = a_batch()
    lines = [a_line(n, batch, prefix=n % PREFIXES, max_tokens=n % 7) for n in range(1, LINES + 1)]
    own = ProcessIdentity("p1", "host", 1, NOW)
    with opened(url) as store:
        began = time.perf_counter()
        begin(store, batch, lines)
        print(f"  adding {LINES} lines, 500 at a time: {time.perf_counter() - began:.1f} s")
        measured(store, "waiting_groups", lambda: partial(waiting_groups, folder=FOLDER, now=NOW))
        measured(store, "work_left", lambda: partial(work_left, batch=batch.id))
        for name, pick in (
            ("of a batch", Pick(32, RequestKind.LINE, batch.id)),
            ("of a prefix", Pick(32, RequestKind.LINE, batch.id, prefix=77)),
            ("of any batch", Pick(32, RequestKind.LINE)),
        ):
            job = Claim(FOLDER, "p1", [pick], NOW, LEASE)
            measured(store, f"claiming 32 {name}", lambda job=job: job)  # type: ignore[misc]

        def a_record() -> Callable[[Any], Any]:
            results = [a_result(row) for row in claim(store, "p1", 100)]
            return partial(record, process="p1", results=results, now=NOW)

        measured(store, "recording 100 results", a_record)
        ids = [row.id for row in claim(store, "p1", 100)]
        measured(
            store, "renewing 100",
            lambda: partial(renew, process="p1", ids=ids, now=NOW, lease_seconds=LEASE),
        )  # fmt: skip
        measured(
            store, "release_lost, nothing lost",
            lambda: partial(release_lost, folder=FOLDER, own=own, now=0.0),
        )  # fmt: skip
        measured(
            store, "begin_finalizing, unfinished",
            lambda: partial(begin_finalizing, id_=batch.id, now=NOW),
        )  # fmt: skip


if __name__ == "__main__":
    print("SQLite")
    with tempfile.TemporaryDirectory() as folder:
        measure(f"sqlite:///{folder}/gateway.db")
    print("PostgreSQL")
    with running_postgres() as server:
        measure(server.new_database())
