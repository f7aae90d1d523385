"""The stored requests that this process has claimed, as the store sees them.

Rows are claimed together with their bodies. Those that are put back are written in groups, again
and again until the store takes them: it may be away.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection

from gateway.batches.claims import (
    Claim,
    Pick,
    paused,
    put_back,
    release_lost,
    renew,
    take_back,
)
from gateway.batches.disk_threads import DiskThreads
from gateway.batches.folder import Folder, FolderError
from gateway.batches.request_rows import StoredRow
from gateway.batches.states import RequestKind
from gateway.store.failures import StoreError
from gateway.store.store import Store
from gateway.usage.processes import ProcessIdentity

LEASE_SECONDS = 60.0
"""For which a claim holds unless it is renewed."""

AWAY_SECONDS = 2.0
"""Seconds after which rows whose bodies could not be read are tried again."""

CALM_SECONDS = 20.0
"""Seconds for which no lease counts as over after this machine's clock was set forward: until then
all processes have renewed theirs."""

JUMP_SECONDS = 5.0
"""Seconds by which the clock must have been set forward for that."""

MOST_UNKNOWN = 100
"""Claims that are to be taken back; the rows of earlier ones wait until their lease is over."""


@dataclass(slots=True, eq=False)
class ClockJumps:
    """Tells whether Unix time was set forward of late. `clock` is monotonic."""

    clock: Callable[[], float] = time.monotonic
    _ahead: float | None = None
    """Seconds by which Unix time was ahead of the clock when it was last looked at."""
    _calm_until: float = 0.0

    def jumped(self, now: float) -> bool:
        """Whether leases that seem to be over may not be."""
        clock = self.clock()
        ahead = now - clock
        if self._ahead is not None and ahead - self._ahead > JUMP_SECONDS:
            self._calm_until = clock + CALM_SECONDS
        self._ahead = ahead
        return clock < self._calm_until


@dataclass(slots=True, eq=False)
class RowLeases:
    """Claims rows of a folder for one process, all of these kinds. `now` gives Unix time."""

    store: Store
    folder: Folder
    threads: DiskThreads
    process: ProcessIdentity
    now: Callable[[], float]
    lease_seconds: float = LEASE_SECONDS
    kinds: Sequence[RequestKind] = (RequestKind.LINE,)
    _put_back: defaultdict[tuple[float, bool], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """Rows that are to wait again, by when, and by whether nodes failed them."""
    _unknown: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_UNKNOWN))
    """Times of claims that may have succeeded, though the store did not say so."""
    _jumps: ClockJumps = field(default_factory=ClockJumps)

    async def open_folder(self) -> str:
        """The folder's id. Raises: FolderError."""
        opened = self.folder.id
        return opened if opened is not None else await self.threads.run(self.folder.open)

    async def claim_rows(self, picks: Sequence[Pick]) -> list[StoredRow]:
        """Claim rows; their bodies are for others to read. Raises: StoreError, FolderError."""
        claim = Claim(
            await self.open_folder(), self.process.id, picks, self.now(), self.lease_seconds
        )
        try:
            return await self.store.run(claim)
        except (StoreError, asyncio.CancelledError):
            self._unknown.append(claim.now)
            raise

    async def claim(
        self, picks: Sequence[Pick], most_bytes: int
    ) -> list[tuple[StoredRow, bytes | None]]:
        """Claim rows, and read their bodies: so many bytes and one row more. None: no file.

        Raises: StoreError, FolderError.
        """
        rows, size = await self.claim_rows(picks), 0
        for number, row in enumerate(rows):
            size += row.length
            if size > most_bytes and number:
                self.put_back((one.id for one in rows[number:]), self.now())
                del rows[number:]
                break
        try:
            bodies = await self.threads.run(_read_bodies, self.folder, rows)
        except (FolderError, asyncio.CancelledError):
            self.put_back((row.id for row in rows), self.now() + AWAY_SECONDS)
            raise
        return list(zip(rows, bodies, strict=True))

    async def renew(self, ids: Iterable[str]) -> set[str]:
        """Those of the claimed rows that are still wanted. Raises: StoreError."""
        waits = {id_ for some in self._put_back.values() for id_ in some}
        asked, waiting = [id_ for id_ in ids if id_ not in waits], waits.intersection(ids)
        if not asked:
            return waiting
        job = partial(
            renew,
            process=self.process.id,
            ids=asked,
            now=self.now(),
            lease_seconds=self.lease_seconds,
        )
        return waiting | await self.store.run(job)

    async def paused(self, batches: Iterable[str]) -> set[str]:
        """Those of the batches that are paused. Raises: StoreError."""
        ids = frozenset(batches)
        return await self.store.run(partial(paused, ids=ids), write=False) if ids else set()

    async def release_lost(self) -> int:
        """Let rows of processes that are gone wait again; how many. Raises: StoreError.

        To be called after `renew`.
        """
        folder, now = await self.open_folder(), self.now()
        if self._jumps.jumped(now):
            return 0
        return await self.store.run(
            partial(release_lost, folder=folder, own=self.process, now=now, own_kinds=self.kinds)
        )

    @property
    def has_put_back(self) -> bool:
        """Whether there is something to `write`."""
        return bool(self._put_back)

    def put_back(self, ids: Iterable[str], not_before: float, *, failed: bool = False) -> None:
        """Let rows wait until `not_before`; `failed`: nodes failed them. `write` does it."""
        if some := set(ids):
            self._put_back[round(not_before, 1), failed] |= some

    async def write(self) -> bool:
        """Write what was put back, and what was claimed unknown to this process.

        Returns whether there was something. Raises: StoreError.
        """
        taken = 0
        if self._unknown:
            job = partial(
                take_back,
                folder=await self.open_folder(),
                process=self.process.id,
                claimed_at=list(self._unknown),
            )
            taken = await self.store.run(job)
            self._unknown.clear()
        for (not_before, failed), ids in (found := list(self._put_back.items())):
            chosen = frozenset(ids)
            await self.store.run(
                partial(_put_rows_back, self.process.id, chosen, not_before, failed)
            )
            self._put_back[not_before, failed] -= chosen
            if not self._put_back[not_before, failed]:
                del self._put_back[not_before, failed]
        return bool(found) or taken > 0


def _put_rows_back(
    process: str,
    ids: frozenset[str],
    not_before: float,
    failed: bool,  # noqa: FBT001 - of `partial`
    connection: Connection,
) -> None:
    put_back(connection, process, ids, not_before, failed=failed)


def _read_bodies(folder: Folder, rows: Sequence[StoredRow]) -> list[bytes | None]:
    """The bodies of rows; None: the file is gone. Raises: FolderError."""
    bodies: list[bytes | None] = []
    for row in rows:
        try:
            bodies.append(folder.read(row.place, row.offset, row.length))
        except FileNotFoundError:
            bodies.append(None)
    return bodies
