"""Claims of stored requests: who runs which, under a lease, and the one result of each.

A claimed request is `running` until its result is recorded or its process puts it back. The process
renews its claims. When a lease is over, or its process gone, any other process of the folder puts
the request back. Then it may run twice, and only the process that has the claim can record a result
(`record`): an execution without a claim is the operator's loss.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, bindparam, or_, select, update

from gateway.batches.folder import DiskThreads, Folder, FolderError
from gateway.batches.request_rows import (
    COLUMNS,
    COUNTED_AS,
    IS_RUNNING,
    IS_WAITING,
    BatchState,
    RequestKind,
    RequestState,
    StoredRow,
    chunks,
    count_lines,
    job,
    lock_batches,
    row_of,
    runnable_batches,
    those_with,
)
from gateway.store.failures import StoreError
from gateway.store.schema import batches, processes, stored_requests
from gateway.store.store import Store
from gateway.usage.ledger import ROW_COLUMNS, UsageRow
from gateway.usage.processes import ProcessIdentity, SeenProcess, is_gone

_ROW: Final = stored_requests.c


@dataclass(frozen=True, slots=True)
class Pick:
    """Which waiting requests are wanted, and how many.

    Lines come with their prefix: those that begin alike together, the longest first. Without a
    batch the oldest batch comes first. Requests without a batch come in the order of their age.
    """

    limit: int
    kind: RequestKind
    batch: str | None = None
    owner: str | None = None
    model: str | None = None
    prefix: int | None = None
    ids: Sequence[str] | None = None  # of these requests alone, which have no batch
    by_deadline: bool = False  # the nearest deadline first; all lines of a batch have the same


def claim(
    connection: Connection,
    folder: str,
    process: str,
    picks: Sequence[Pick],
    now: float,
    lease_seconds: float,
) -> list[StoredRow]:
    """Claim waiting requests of a folder for a process, pick by pick.

    Returns those that nobody else has; each once, though several picks may want it. What was
    claimed by a transaction whose commit nobody knows of is to be taken back (`take_back`), or
    waits again when its lease is over.
    """
    claimed: list[StoredRow] = []
    for pick in picks:
        picked = _picked_lines if pick.kind is RequestKind.LINE else _picked_alone
        ids = picked(connection, folder, pick, now)
        taken = {
            row.id: row_of(row)
            for some in chunks(ids)
            for row in connection.execute(
                update(stored_requests)
                .where(_ROW.id.in_(some), IS_WAITING)
                .values(
                    state=RequestState.RUNNING.value,
                    claimed_by=process,
                    claimed_until=now + lease_seconds,
                    started_at=now,
                )
                .returning(*COLUMNS)
            )
        }
        claimed += [taken[id_] for id_ in ids if id_ in taken]
    return claimed


def _picked_lines(connection: Connection, folder: str, pick: Pick, now: float) -> list[str]:
    """The lines of one pick; on PostgreSQL they are locked."""
    # What is late is about to be ended (`expire_lines`).
    in_time = or_(_ROW.deadline.is_(None), _ROW.deadline > now)
    wanted: list[ColumnElement[bool]] = [IS_WAITING, _ROW.not_before <= now, in_time]
    if pick.model is not None:
        wanted.append(_ROW.model == pick.model)
    if pick.prefix is not None:
        wanted.append(_ROW.prefix == pick.prefix)
    of_batches = runnable_batches(folder, batches.c.id)
    if pick.owner is not None:
        of_batches = of_batches.where(batches.c.owner == pick.owner)
    if pick.batch is not None:
        of_batches = of_batches.where(batches.c.id == pick.batch)
    else:
        # A batch that all of its lines are taken from gives at least one: so few suffice.
        waits = select(_ROW.id).where(_ROW.batch == batches.c.id, *wanted)
        order = (batches.c.expires_at, batches.c.id) if pick.by_deadline else (batches.c.id,)
        of_batches = of_batches.where(waits.exists()).order_by(*order).limit(pick.limit)
    ids: list[str] = []
    for batch in connection.scalars(of_batches).all():
        lines = select(_ROW.id).where(_ROW.batch == batch, *wanted)
        lines = lines.order_by(_ROW.prefix, _ROW.max_tokens.desc(), _ROW.number)
        ids += connection.scalars(unlocked(lines, pick.limit - len(ids)))
        if len(ids) == pick.limit:
            break
    return ids


def _picked_alone(connection: Connection, folder: str, pick: Pick, now: float) -> list[str]:
    """The requests without a batch of one pick; on PostgreSQL they are locked."""
    asked = select(_ROW.id).where(
        _ROW.folder == folder,
        _ROW.kind == pick.kind.value,
        _ROW.batch.is_(None),
        IS_WAITING,
        _ROW.not_before <= now,
    )
    if pick.owner is not None:
        asked = asked.where(_ROW.owner == pick.owner)
    if pick.ids is not None:
        asked = asked.where(_ROW.id.in_(pick.ids))
    if pick.by_deadline:
        asked = asked.order_by(_ROW.deadline.is_(None), _ROW.deadline)
    return list(connection.scalars(unlocked(asked.order_by(_ROW.id), pick.limit)))


def unlocked(asked: Select[Any], limit: int) -> Select[Any]:
    """Rows to be claimed, of any table: those that no other transaction holds, which it locks.

    On SQLite there is no other transaction.
    """
    return asked.limit(limit).with_for_update(skip_locked=True)


def renew(
    connection: Connection, process: str, ids: Iterable[str], now: float, lease_seconds: float
) -> set[str]:
    """Renew the claims of a process; those that are still wanted.

    The others were cancelled, or have been taken from it: it ends their runs, then puts them back.
    """
    unwanted = select(batches.c.id).where(
        batches.c.ended_at.is_(None), batches.c.state == BatchState.CANCELLING.value
    )
    wanted: set[str] = set()
    for some in chunks(ids):
        renewed = update(stored_requests).where(
            _ROW.id.in_(some),
            _ROW.claimed_by == process,
            IS_RUNNING,
            or_(_ROW.batch.is_(None), _ROW.batch.not_in(unwanted)),
        )
        renewed = renewed.values(claimed_until=now + lease_seconds)
        wanted.update(connection.scalars(renewed.returning(_ROW.id)))
    return wanted


def paused(connection: Connection, ids: Iterable[str]) -> set[str]:
    """Those of the batches that are paused."""
    return those_with(connection, batches.c.id, ids, batches.c.paused_at.is_not(None))


def still_unfinished(connection: Connection, ids: Iterable[str]) -> set[str]:
    """Those of the requests that wait or run."""
    unfinished = _ROW.state.in_([RequestState.WAITING.value, RequestState.RUNNING.value])
    return those_with(connection, _ROW.id, ids, unfinished)


def put_back(
    connection: Connection,
    process: str,
    ids: Iterable[str],
    not_before: float,
    *,
    failed: bool = False,
) -> None:
    """Let requests that a process runs wait until `not_before`; `failed`: nodes failed this run.

    Lines whose batch is being cancelled end as cancelled.
    """
    for some in chunks(ids):
        _let_wait(
            connection,
            [_ROW.id.in_(some), _ROW.claimed_by == process],
            {"not_before": not_before, "attempts": _ROW.attempts + int(failed)},
        )


def take_back(
    connection: Connection, folder: str, process: str, claimed_at: Iterable[float]
) -> int:
    """Let requests wait that a process has claimed at these times, unknown to it; how many."""
    at = _ROW.started_at.in_(sorted(set(claimed_at)))
    return _let_wait(connection, [_ROW.folder == folder, _ROW.claimed_by == process, at], {})


def release_lost(
    connection: Connection,
    folder: str,
    own: ProcessIdentity,
    now: float,
    own_kinds: Iterable[RequestKind] = tuple(RequestKind),
) -> int:
    """Let requests wait whose lease is over or whose process is gone; how many.

    `own_kinds`: the kinds whose claims the caller has just renewed. After the store was away, the
    process may still run its requests of other kinds, though their leases are over.
    """
    running = _ROW.folder == folder, IS_RUNNING
    kinds = [kind.value for kind in own_kinds]
    is_mine = or_(_ROW.claimed_by != own.id, _ROW.kind.in_(kinds))
    lost: list[ColumnElement[bool]] = [(_ROW.claimed_until <= now) & is_mine]
    claimers = set(connection.scalars(select(_ROW.claimed_by).where(*running).distinct()))
    if gone := gone_processes(connection, claimers - {own.id}, own.host):
        lost.append(_ROW.claimed_by.in_(gone))
    # Whoever holds one of them at this moment renews it, or ends it.
    return _let_wait(connection, [_ROW.folder == folder, or_(*lost)], {}, skip_locked=True)


def gone_processes(connection: Connection, ids: set[str], host: str) -> list[str]:
    """Those of the processes that do not run any more for sure, or are not registered."""
    columns = processes.c.id, processes.c.host, processes.c.pid, processes.c.seen_at
    asked = select(*columns).where(processes.c.id.in_(ids))
    seen = {row.id: SeenProcess(*row) for row in connection.execute(asked)} if ids else {}
    return sorted(id_ for id_ in ids if id_ not in seen or is_gone(seen[id_], host))


def _let_wait(
    connection: Connection,
    conditions: Iterable[ColumnElement[bool]],
    values: dict[str, Any],
    *,
    skip_locked: bool = False,
) -> int:
    """Let running requests of these conditions wait, or end if their batch is being cancelled."""
    chosen = select(_ROW.id, _ROW.batch).where(*conditions, IS_RUNNING)
    of_batches = {row.batch for row in connection.execute(chosen)}
    lock_batches(connection, of_batches)
    locked = connection.execute(chosen.with_for_update(skip_locked=skip_locked))
    found = {row.id: row.batch for row in locked if row.batch in of_batches}
    cancelling = those_with(
        connection,
        batches.c.id,
        (batch for batch in of_batches if batch is not None),
        batches.c.state == BatchState.CANCELLING.value,
    )
    cancelled = Counter(batch for batch in found.values() if batch in cancelling)
    since = select(batches.c.cancelling_at).where(batches.c.id == _ROW.batch).scalar_subquery()
    ends = {"state": RequestState.CANCELLED.value, "ended_at": since}
    waits = {"state": RequestState.WAITING.value, **values}
    for is_end, changes in ((True, ends), (False, waits)):
        for some in chunks(id_ for id_, batch in found.items() if (batch in cancelling) is is_end):
            changed = update(stored_requests).where(_ROW.id.in_(some), IS_RUNNING)
            connection.execute(changed.values(claimed_by=None, claimed_until=None, **changes))
    for batch in sorted(cancelled):
        count_lines(connection, batch, RequestState.CANCELLED, cancelled[batch])
    return len(found)


_COUNTED: Final = tuple(
    (ROW_COLUMNS.index(name), batches.c[name])
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "cost")
)
"""The places in a row of the ledger that a batch sums up, and its columns."""


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """The result of one stored request: `length` bytes of the folder's file `place`."""

    id: str  # of the stored request
    state: RequestState
    status: int | None = None  # the HTTP status; None: it was not answered
    error_code: str | None = None
    place: str | None = None  # None: there is no result to be read
    offset: int = 0
    length: int = 0
    usage: UsageRow | None = None  # the row for the ledger; None: it was not admitted


def record(
    connection: Connection, process: str, results: Sequence[RecordedResult], now: float
) -> list[str]:
    """Give requests that this process runs their results, and count them in their batches.

    Returns the ids of those whose result is recorded; done again, the same ids. The other results
    do not count: their requests were cancelled, or taken by another process.
    """
    wanted = {one.id: one for one in results}
    asked = select(
        _ROW.id, _ROW.state, _ROW.batch, _ROW.result_place, _ROW.result_offset,
    )  # fmt: skip
    recorded: list[str] = []
    new: list[dict[str, Any]] = []
    sums: defaultdict[str, Counter[Any]] = defaultdict(Counter)
    of_batches: set[str | None] = set()
    for ids in chunks(wanted):
        own = _ROW.id.in_(ids), _ROW.claimed_by == process
        of_batches.update(connection.scalars(select(_ROW.batch).where(*own).distinct()))
    lock_batches(connection, of_batches)
    for ids in chunks(wanted):
        locked = asked.where(_ROW.id.in_(ids), _ROW.claimed_by == process).with_for_update()
        for row in connection.execute(locked):
            result = wanted[row.id]
            if row.state == RequestState.RUNNING.value:
                new.append(_values_of(result, now))
                if row.batch is not None:
                    _add(sums[row.batch], result)
            elif not _is_same(row, result):
                continue
            recorded.append(row.id)
    if new:
        connection.execute(_RECORDED, new)
    for batch in sorted(sums):
        values = {column: column + number for column, number in sums[batch].items()}
        connection.execute(update(batches).where(batches.c.id == batch).values(values))
    return recorded


_RECORDED: Final = (
    update(stored_requests)
    .where(_ROW.id == bindparam("of_id"))
    .values(
        {
            name: bindparam(name)
            for name in (
                "state", "ended_at", "status", "error_code",
                "result_place", "result_offset", "result_length",
            )
        }
        | {"claimed_until": None}
    )
)  # fmt: skip
"""`claimed_by` stays: it tells who has recorded the result."""


def _values_of(result: RecordedResult, now: float) -> dict[str, Any]:
    return {
        "of_id": result.id,
        "state": result.state.value,
        "ended_at": now,
        "status": result.status,
        "error_code": result.error_code,
        "result_place": result.place,
        "result_offset": None if result.place is None else result.offset,
        "result_length": None if result.place is None else result.length,
    }


def _is_same(row: Any, result: RecordedResult) -> bool:
    """Whether the row, which has ended, has this result."""
    offset = None if result.place is None else result.offset
    found = row.state, row.result_place, row.result_offset
    return bool(found == (result.state.value, result.place, offset))


def _add(sums: Counter[Any], result: RecordedResult) -> None:
    sums[COUNTED_AS[result.state]] += 1
    sums[batches.c.result_bytes] += result.length
    if result.usage is not None:
        for index, column in _COUNTED:
            sums[column] += result.usage[index]


LEASE_SECONDS = 60.0  # for which a claim holds unless it is renewed
AWAY_SECONDS = 2.0  # seconds after which rows whose bodies could not be read are tried again

CALM_SECONDS = 20.0
"""Seconds for which no lease counts as over after this machine's clock was set forward: until then
all processes have renewed theirs."""

JUMP_SECONDS = 5.0  # seconds by which the clock must have been set forward for that

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

    async def claim_rows(self, picks: Sequence[Pick]) -> list[StoredRow]:
        """Claim rows; their bodies are for others to read. Raises: StoreError, FolderError."""
        folder, now = await self.threads.opened(self.folder), self.now()
        try:
            rows = await self.store.run(
                job(claim, folder, self.process.id, picks, now, self.lease_seconds)
            )
        except (StoreError, asyncio.CancelledError):
            self._unknown.append(now)
            raise
        # Rows that others have put back meanwhile: from now on they run again.
        claimed = {row.id for row in rows}
        for ids in self._put_back.values():
            ids.difference_update(claimed)
        return rows

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
        given_back = {id_ for some in self._put_back.values() for id_ in some}
        asked = [id_ for id_ in ids if id_ not in given_back]
        waiting = given_back.intersection(ids)
        if not asked:
            return waiting
        return waiting | await self.store.run(
            job(renew, self.process.id, asked, self.now(), self.lease_seconds)
        )

    async def paused(self, batches: Iterable[str]) -> set[str]:
        """Those of the batches that are paused. Raises: StoreError."""
        ids = frozenset(batches)
        return await self.store.run(job(paused, ids), write=False) if ids else set()

    async def release_lost(self) -> int:
        """Let rows of processes that are gone wait again; how many. Raises: StoreError.

        To be called after `renew`.
        """
        folder, now = await self.threads.opened(self.folder), self.now()
        if self._jumps.jumped(now):
            return 0
        return await self.store.run(job(release_lost, folder, self.process, now, self.kinds))

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
            folder = await self.threads.opened(self.folder)
            taken = await self.store.run(
                job(take_back, folder, self.process.id, list(self._unknown))
            )
            self._unknown.clear()
        for (not_before, failed), ids in (found := list(self._put_back.items())):
            chosen = frozenset(ids)
            await self.store.run(job(put_back, self.process.id, chosen, not_before, failed=failed))
            self._put_back[not_before, failed] -= chosen
            if not self._put_back[not_before, failed]:
                del self._put_back[not_before, failed]
        return bool(found) or taken > 0


def _read_bodies(folder: Folder, rows: Sequence[StoredRow]) -> list[bytes | None]:
    """The bodies of rows; None: the file is gone. Raises: FolderError."""
    bodies: list[bytes | None] = []
    for row in rows:
        try:
            bodies.append(folder.read(row.place, row.offset, row.length))
        except FileNotFoundError:
            bodies.append(None)
    return bodies
