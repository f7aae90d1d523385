"""Results of stored requests: appended to files of the folder, and recorded in groups.

`LineResults.add` returns when its result is on the disk and recorded in the store, together with
the row of the ledger. A group of results is one append and one fsync for each batch, and one
transaction. A store that is away, or a disk that is full, delays results and loses none.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.batches.disk_threads import DiskThreads
from gateway.batches.folder import Folder
from gateway.batches.request_rows import StoredRow
from gateway.batches.runner import Outcome
from gateway.store.store import Store
from gateway.usage.ledger import Ledger
from gateway.usage.processes import ProcessIdentity


class LineResults:
    """Keeps the results of batches' lines. `run` must run in a task while there are any.

    `now` gives Unix time, `clock` monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        folder: Folder,
        threads: DiskThreads,
        process: ProcessIdentity,
        now: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        raise NotImplementedError

    async def add(self, row: StoredRow, batch_api: str, outcome: Outcome) -> bool:
        """Keep the result of a row that this process runs; returns when that is certain.

        False: the row was cancelled or taken by another process meanwhile.
        """
        raise NotImplementedError

    async def run(self) -> None:
        """Write and record results until cancelled."""
        raise NotImplementedError

    async def close(self, limit: float) -> None:
        """Write and record what waits, within `limit` seconds; call it when `run` has ended."""
        raise NotImplementedError
