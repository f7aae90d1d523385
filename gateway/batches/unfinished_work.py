"""Whether anything in the folder is unfinished: whoever looks for work in the store asks here.

While nothing waits or runs, nothing can become due, late or lost. It then takes one of three things
for new work to be there, and until then nobody asks the store: this process adds some, and says so
(`added`); the store tells that another process has committed; or `LONGEST_UNREAD` is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from sqlalchemy import Connection, or_, select

from gateway.batches.disk_threads import DiskThreads
from gateway.batches.folder import Folder
from gateway.batches.request_rows import IS_RUNNING, IS_WAITING
from gateway.store.schema import batches, stored_requests
from gateway.store.store import Store

LONGEST_UNREAD = 30.0
"""Seconds after which the store is read, though nothing tells that there is anything new."""

UNTOLD_SECONDS = 5.0
"""The same on PostgreSQL, which does not tell what other processes commit."""

BUSY_SECONDS = 5.0
"""Seconds for which work that was found counts as still there."""

_ROW: Final = stored_requests.c


@dataclass(slots=True, eq=False)
class UnfinishedWork:
    """What is unfinished in a folder, as this process knows it. `clock` is monotonic."""

    store: Store
    folder: Folder
    threads: DiskThreads
    clock: Callable[[], float]
    _found: bool | None = None
    """What the last look found; None: there was none."""
    _read_at: float = 0.0
    _seen: tuple[int, int] = -1, -1
    """The additions of this process, and the changes of the store, before that look."""
    _additions: int = 0
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def added(self) -> None:
        """This process has added something, or may have: to be called behind the attempt."""
        self._additions += 1

    async def exists(self) -> bool:
        """Whether something waits, runs, or has not ended. Raises: StoreError, FolderError."""
        if (known := self._known()) is not None:
            return known
        async with self._reading:
            if (known := self._known()) is not None:  # Somebody else has looked meanwhile.
                return known
            # Before the look: what comes after it is new.
            seen = self._additions, self.store.changes
            opened = self.folder.id
            folder = opened if opened is not None else await self.threads.run(self.folder.open)
            found = await self.store.run(partial(has_unfinished, folder=folder), write=False)
            self._found, self._read_at, self._seen = found, self.clock(), seen
            return found

    def _known(self) -> bool | None:
        """What is known without a look; None: it must be looked."""
        additions, changes = self._seen
        age = self.clock() - self._read_at
        if self._found is None or additions != self._additions:
            return None
        if self._found:
            return True if age < BUSY_SECONDS else None
        if age >= LONGEST_UNREAD:
            return None
        tells = self.store.location.path is not None
        quiet = changes == self.store.changes or (not tells and age < UNTOLD_SECONDS)
        return False if quiet else None


def has_unfinished(connection: Connection, folder: str) -> bool:
    """Whether the folder has a batch that has not ended, or a request that waits or runs."""
    unfinished = select(batches.c.id).where(
        batches.c.folder == folder, batches.c.ended_at.is_(None)
    )
    running = select(_ROW.id).where(_ROW.folder == folder, IS_RUNNING)
    # Lines wait only while their batch has not ended.
    waiting = select(_ROW.id).where(_ROW.folder == folder, _ROW.batch.is_(None), IS_WAITING)
    asked = select(or_(unfinished.exists(), running.exists(), waiting.exists()))
    return bool(connection.scalar(asked))
