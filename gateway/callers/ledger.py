"""The ledger: a row for each request that was admitted, written to the store in batches.

Rows wait in memory for a quarter of a second. A request that has been running for twice as long is
in `open_requests` until the transaction that writes its row: so a gateway that is killed loses no
more than the requests of its last second, and leaves the others to be recovered
(`callers/processes.py`). Writes begin by the clock, however long the ones before took, and where
they are slow, requests are journaled younger. A batch whose commit may or may not have happened is
written again, since rows that are there already are skipped.

While the store is away, rows may be on this machine's disk (`KeptRows`).
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import itertools
import math
import operator
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

import msgspec
import structlog
from sqlalchemy import Connection, Table

from gateway.callers.processes import (
    EDGE_DIED,
    HEARTBEAT_SECONDS,
    LOST,
    MOST_TAKEN,
    ProcessIdentity,
    ProcessWatch,
    SeenProcess,
    leave_open,
    register,
    seen_processes,
    take_open_requests,
    unregister,
)
from gateway.store.database import sqlite_driver
from gateway.store.failures import StoreError
from gateway.store.schema import open_requests, usage
from gateway.store.store import Store, StoreWorker

FLUSH_SECONDS = 0.25  # seconds from the beginning of a flush to that of the next one
JOURNALED_WITHIN = 0.5  # age by which a request that still runs is to be in the store
# What is left of the longest delay of a flush with each further one: half of it after 1.6 s.
DELAY_DECAY = 0.9
FLUSH_ROWS = 500  # rows that are written before that time is over
# Rows of one statement of SQLite: with all columns fewer than 999 parameters.
ROWS_PER_STATEMENT = 25
MOST_ROWS_AT_ONCE = 5_000  # rows of one transaction
# Rows that wait while the store fails, about 50 MB; beyond them the oldest are dropped.
MOST_PENDING = 100_000
# Open requests whose tokens are brought up to date in one transaction, in turns.
MOST_REFRESHED = 1_000
# Open requests that are looked at in one turn of the event loop: two milliseconds.
WALKED_AT_ONCE = 200
# Seconds between two looks how far the open requests have come that the store has.
REFRESH_SECONDS = 0.5
# Slot seconds after which a request is brought up to date that has no new tokens.
REFRESH_SLOT_SECONDS = 1.0
RECOVERY_SECONDS = 15.0  # seconds between two looks for dead processes
# Seconds between two looks whether rows should be on the disk, and for which the store may take to
# answer until they should.
KEEP_SECONDS = 0.5
WARNING_SECONDS = 60.0  # seconds between two warnings that rows are dropped
# The values of `ROW_COLUMNS`. Rows are plain tuples: there is one for each request.
UsageRow = tuple[Any, ...]

# In the table's order, which rows on the disk have as well.
ROW_COLUMNS: Final = tuple(one.name for one in usage.columns if one.name != "sequence")

COLUMNS_BEFORE = 22  # of a row, until the store's level 5

# The last columns of a row of which only tokens and cost are known.
UNKNOWN_TIMES: Final = (None,) * (len(ROW_COLUMNS) - COLUMNS_BEFORE)

_STREAM = ROW_COLUMNS.index("stream")
# Columns that are often NULL.
_OFTEN_NULL: Final = tuple(
    ROW_COLUMNS.index(name)
    for name in ("group_name", "user", "gpu_cost", "ttft_seconds", "client_request_id")
)
_GROUP, _USER, _GPU_COST, _TTFT, _CLIENTS_ID = _OFTEN_NULL

_OPEN_UPDATES: Final = (
    "process", "updated_at", "model", "tier", "node", "prompt_tokens", "completion_tokens",
    "slot_seconds", "cost",
)  # fmt: skip

log = structlog.get_logger()
T = TypeVar("T")


class OpenRequest(NamedTuple):
    """A request that still runs, as the journal has it."""

    id: str
    started_at: float
    key: str
    group: str | None
    user: str | None
    model: str
    class_: str
    tier: str | None
    node: str | None
    path: str
    stream: bool
    reserved_tokens: int
    reserved_cost: float
    prompt_tokens: int
    completion_tokens: int
    slot_seconds: float = 0.0
    cost: float = 0.0


# The requests that still run and were admitted before a Unix time, the oldest first, but those of
# which a mapping has something.
OpenRequests = Callable[[float, Mapping[str, object]], Iterable[OpenRequest]]


@dataclass(slots=True, eq=False)
class Ledger:
    """Writes the rows of one process. `worker` must run in a task while there are any.

    `now` is Unix time, `clock` monotonic seconds.
    """

    store: Store
    own: ProcessIdentity
    now: Callable[[], float]
    clock: Callable[[], float]
    open_requests: OpenRequests
    most_pending: int = MOST_PENDING
    flush_rows: int = FLUSH_ROWS
    kept: KeptRows | None = None  # where rows are while the store is away; None: in memory alone
    written: int = 0  # rows that were written; those of recovered requests included
    recovered: int = 0  # requests of dead processes that were written
    dropped: int = 0  # rows that were dropped, since too many waited
    added: int = 0  # rows that ended requests have brought
    worker: StoreWorker = field(init=False)
    _waiting: deque[UsageRow] = field(default_factory=deque)
    _batch: list[UsageRow] = field(default_factory=list)
    """The rows that are being written, until that is known to have happened."""
    _sequence: int = 0  # number of the last row that was written, or may have been
    _journal: dict[str, OpenRequest | None] = field(default_factory=dict)
    """Each open request as the store has it; None: it may not have the request."""
    _removed: list[str] = field(default_factory=list)
    """Open requests that the store must forget, since their rows were dropped."""
    _left: list[str] = field(default_factory=list)
    """Open requests that another process runs by now."""
    _refresh_after: str = ""  # the open request that was refreshed last
    _next_refresh: float = 0.0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while rows are written: other processes read them in the order of their numbers."""
    _watch: ProcessWatch = field(init=False)
    _next_heartbeat: float = 0.0
    _next_recovery: float = 0.0
    _more_to_recover: bool = False
    _flush_delay: float = 0.0
    """Seconds by which the journal is behind: how late a flush began, and how long it took. The
    longest of late, less with each flush since."""
    _next_drop_warning: float = 0.0
    _gone: int = 0  # rows that waited and do not any more
    _kept_to: int = 0  # and how many there will be when the last of those has gone that are kept
    _overflowed: bool = False  # whether some are there alone
    _flushing_since: float = math.inf
    _keeping: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._watch = ProcessWatch(self.own, self.clock)
        self.worker = StoreWorker(
            self._timed_step,
            FLUSH_SECONDS,
            first=0.0,
            on_away=lambda why: log.warning(
                "usage waits for the store", rows=self.pending, why=why
            ),
            clock=self.clock,
        )

    @property
    def pending(self) -> int:
        """Rows that wait to be written."""
        return len(self._waiting) + len(self._batch)

    @property
    def booked(self) -> int:
        """How many of the rows that were `added` are safe: the first ones.

        The store has them for good, or the disk until the store has them.
        """
        return self.added - self.pending + self._on_disk

    @property
    def _on_disk(self) -> int:
        """How many of the rows that wait, the first ones, are on the disk as well."""
        return max(0, self._kept_to - self._gone)

    def adopt(self, request_id: str) -> None:
        """An open request of another process runs here from now on."""
        self._journal.setdefault(request_id, None)

    def leave(self, request_ids: Iterable[str]) -> None:
        """These open requests have ended here, and go on in another process."""
        self._left += [id_ for id_ in request_ids if self._journal.pop(id_, 0) != 0]

    def add(self, row: UsageRow) -> None:
        """A request has ended."""
        self.added += 1
        waiting = self._waiting
        waiting.append(row)
        count = len(waiting)
        if count == self.flush_rows:
            self.worker.wake()
        elif count + len(self._batch) > self.most_pending:
            self._drop_oldest()

    async def write_with(self, job: Callable[[Connection], Sequence[UsageRow]]) -> None:
        """Do a job of the store, and write the rows that it returns in the same transaction.

        At most `MOST_ROWS_AT_ONCE`; those that are there stay. Raises: StoreError, or the job's own
        error: then it may be done again.
        """
        async with self._turn:
            first, written = self._sequence + 1, MOST_ROWS_AT_ONCE

            def work(connection: Connection) -> int:
                rows = job(connection)
                assert len(rows) <= MOST_ROWS_AT_ONCE, "more rows than numbers"
                insert_rows(connection, rows, first)
                return len(rows)

            try:
                written = await self.store.run(work)
                self.written += written
            finally:
                self._sequence += written  # others may have read them, though it failed for us

    def _drop_oldest(self) -> None:
        row, is_kept = self._waiting.popleft(), self._on_disk > len(self._batch)
        self._gone += 1
        if self._journal.pop(row[0], 0) != 0 and len(self._removed) < self.most_pending:
            self._removed.append(row[0])
        if is_kept:
            self._overflowed = True
            return
        self.dropped += 1
        if self.clock() >= self._next_drop_warning:
            self._next_drop_warning = self.clock() + WARNING_SECONDS
            log.error(
                "usage is lost",
                dropped=self.dropped,
                why=f"{self.most_pending} rows wait for a store that fails: {self.worker.problem}",
            )

    # The loop.

    async def start(self, limit: float) -> None:
        """Register this process and recover what dead ones left, within `limit` seconds if so."""

        async def first_steps() -> None:
            await self._step()
            while self._more_to_recover:
                await self._step()

        await self.worker.attempt_within(limit, first_steps)

    async def close(self, limit: float) -> None:
        """Write what waits, within `limit` seconds; call it when `run` has ended."""
        try:
            async with asyncio.timeout(limit):
                while self.pending or self._left:
                    await self._flush()
                if not self._journal:
                    await self.store.run(lambda connection: unregister(connection, self.own))
        except (TimeoutError, StoreError) as error:
            self.worker.failed(str(error) or "the store does not answer")
        while self.pending > self._on_disk and await self._keep():
            pass
        if self.kept is not None:
            self.kept.close()
        if self.pending > self._on_disk:
            log.error("usage is lost", rows=self.pending - self._on_disk, why=self.worker.problem)

    async def _timed_step(self) -> None:
        """Do a step, and learn how far the journal is behind."""
        began, due = self.clock(), self.worker.due
        late = 0.0 if due is None else max(0.0, began - due)
        try:
            await self._step()
        finally:
            took = self.clock() - began
            self._flush_delay = max(DELAY_DECAY * self._flush_delay, late + took)
        if self.pending >= self.flush_rows:
            self.worker.wake()

    async def _step(self) -> None:
        """Write what is due, and look for dead processes now and then. Raises: StoreError."""
        more, self._more_to_recover = self._more_to_recover, False
        await self._flush()
        if more or self.clock() >= self._next_recovery:
            self._next_recovery = self.clock() + RECOVERY_SECONDS
            await self._recover()
            await self._book_left()
        self.worker.succeeded()

    # Writing.

    async def _flush(self) -> None:
        """Write a batch and the journal. Raises: StoreError; then they wait."""
        async with self._turn:
            self._flushing_since = self.clock()
            await self._flush_now()
            self._flushing_since = math.inf
        if not (self._on_disk or self.kept is None or self.kept.is_empty):
            await self._clear_kept(self.kept)

    async def _flush_now(self) -> None:
        if not self._batch:
            waiting = self._waiting
            count = min(len(waiting), MOST_ROWS_AT_ONCE)
            self._batch = [waiting.popleft() for _ in range(count)]
        work = await self._work()
        if work.is_empty:
            return
        self._sequence += len(work.rows)  # as in `write_with`
        try:
            await self.store.run(work.do)
        except StoreError:
            self._not_written(work)
            raise
        except Exception:
            # One of the rows can't be stored: it must not keep the others from it.
            log.exception("a row of the ledger can't be written")
            self._not_written(work)
            await self._write_one_by_one()
            return
        self._written(self._batch)
        for id_ in work.closed:
            self._journal.pop(id_, None)
        self._removed = [id_ for id_ in self._removed if id_ not in work.closed]
        self._left = self._left[len(work.left) :]
        if work.heartbeat is not None:
            self._next_heartbeat = self.clock() + HEARTBEAT_SECONDS

    def _written(self, rows: Sequence[UsageRow]) -> None:
        self.written += len(rows)
        self._taken(len(rows))

    def _taken(self, count: int) -> None:
        """The first rows that wait do not any more."""
        self._batch = self._batch[count:]
        self._gone += count

    def _not_written(self, work: _Work) -> None:
        for one in work.opened:
            if one[0] in self._journal:
                self._journal[one[0]] = None

    async def _write_one_by_one(self) -> None:
        """Write each row of the batch by itself, and drop those that can't be stored."""
        while self._batch:
            row = self._batch[0]
            work = _Work([row], self._sequence + 1, self.own, closed=[row[0]])
            self._sequence += 1
            try:
                await self.store.run(work.do)
            except StoreError:
                raise
            except Exception:  # noqa: BLE001 - whatever is wrong with it, it is told above
                self._taken(1)
                self.dropped += 1
            else:
                self._written([row])
            self._journal.pop(row[0], None)

    async def _work(self) -> _Work:
        """What is to be written now; others run between the steps of the walk over requests."""
        now, journal = self.now(), self._journal
        work = _Work(self._batch, self._sequence + 1, self.own)
        if journal:
            work.closed = [row[0] for row in self._batch if row[0] in journal]
        if self._removed:
            work.closed += self._removed
        work.left = self._left[:MOST_REFRESHED]
        changed: list[OpenRequest] = []
        # Older ones are journaled, for which the next flush would be too late. A flush that takes
        # longer than usual delays the next one and the end of that.
        behind = self._flush_delay
        age = max(0.0, JOURNALED_WITHIN - max(FLUSH_SECONDS, behind) - behind)
        but: Mapping[str, object] = journal
        if self.clock() >= self._next_refresh:
            self._next_refresh, but = self.clock() + REFRESH_SECONDS, {}
        requests = self.open_requests(now - age, but)
        for number, one in enumerate(requests, 1):
            if number % WALKED_AT_ONCE == 0:
                await asyncio.sleep(0)
            known = journal.get(one.id)
            if known is None:
                journal[one.id] = one
                work.opened.append(_open_row(one, self.own.id, now))
            elif (
                one.prompt_tokens > known.prompt_tokens
                or one.completion_tokens > known.completion_tokens
                or one.slot_seconds >= known.slot_seconds + REFRESH_SLOT_SECONDS
            ):
                changed.append(_not_less(one, known))
        if len(changed) > MOST_REFRESHED:
            # In turns, without a pause: those behind the last one of the time before.
            self._next_refresh = 0.0
            at = next((i for i, one in enumerate(changed) if one.id == self._refresh_after), -1) + 1
            changed = list(itertools.islice(itertools.cycle(changed), at, at + MOST_REFRESHED))
        for number, one in enumerate(changed, 1):
            if number % WALKED_AT_ONCE == 0:
                await asyncio.sleep(0)
            journal[one.id] = one
            self._refresh_after = one.id
            work.opened.append(_open_row(one, self.own.id, now))
        # A pass after one that failed must not succeed because it has nothing to write.
        if self.clock() >= self._next_heartbeat or self.worker.problem is not None:
            work.heartbeat = now
        return work

    # Recovery.

    async def _recover(self) -> None:
        """Write open requests of dead processes into the ledger: some, and the rest later.

        Raises: StoreError.
        """
        try:
            seen = await self.store.run(seen_processes, write=False)
            for dead in self._watch.dead(seen):
                if await self._recover_from(dead) == MOST_TAKEN:
                    self._more_to_recover = True
                    break
        except StoreError:
            raise
        except Exception:
            # Rows that no version should have written must not keep the gateway from serving.
            log.exception("open requests of a dead process can't be recovered")

    async def _recover_from(self, dead: SeenProcess) -> int:
        """Write some of a dead process's open requests into the ledger; how many those were."""
        rows: list[UsageRow] = []

        def recover(connection: Connection) -> list[UsageRow]:
            rows[:] = [_lost_row(one, self.own.id) for one in take_open_requests(connection, dead)]
            return rows

        await self.write_with(recover)
        self.recovered += len(rows)
        if rows:
            log.warning("recovered requests", process=dead.id, requests=len(rows))
        return len(rows)

    # The disk.

    async def keep_rows(self) -> None:
        """Bring rows to the disk while the store is away, until cancelled."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            is_away = self.clock() - self._flushing_since > KEEP_SECONDS
            if is_away or self.worker.problem is not None:
                while self.pending > self._on_disk and await self._keep():
                    pass

    async def _keep(self) -> bool:
        """Bring some of the rows that wait to the disk; False: they can't be kept there."""
        if self.kept is None:
            return False
        async with self._keeping:
            waiting, begin = itertools.chain(self._batch, self._waiting), self._on_disk
            rows = list(itertools.islice(waiting, begin, begin + MOST_ROWS_AT_ONCE))
            kept_to = self._gone + begin + len(rows)
            try:
                await asyncio.to_thread(self.kept.keep, rows)
            except OSError as error:
                if self.clock() >= self._next_drop_warning:
                    self._next_drop_warning = self.clock() + WARNING_SECONDS
                    log.warning("usage is in memory alone", rows=self.pending, why=str(error))
                return False
            self._kept_to = kept_to
        return True

    async def _clear_kept(self, kept: KeptRows) -> None:
        """Remove the file of this process, of which the store has all rows by now."""
        async with self._keeping:
            if self._on_disk == 0:
                overflowed, self._overflowed = self._overflowed, False
                with suppress(OSError):
                    await asyncio.to_thread(kept.set_aside if overflowed else kept.clear)
                self._next_recovery = 0.0

    async def _book_left(self) -> None:
        """Write the rows that processes have left on the disk. Raises: StoreError."""
        if self.kept is None:
            return
        try:
            for path in await asyncio.to_thread(self.kept.left):
                number = 0
                reading = read_rows(path, len(ROW_COLUMNS), MOST_ROWS_AT_ONCE)
                while some := await asyncio.to_thread(next, reading, None):
                    # As those of this process, since others look for no rows of one that is gone.
                    rows = [(row[0], self.own.id, *row[2:]) for row in some]
                    await self.write_with(lambda _, rows=rows: rows)  # type: ignore[misc]
                    number += len(rows)
                await asyncio.to_thread(path.unlink, missing_ok=True)
                self.recovered += number
                log.info("booked rows that were on the disk", rows=number)
        except StoreError:
            raise
        except Exception:
            log.exception("rows on the disk can't be booked")


@dataclass(slots=True)
class _Work:
    """What one transaction writes."""

    rows: Sequence[UsageRow]
    first_sequence: int
    own: ProcessIdentity
    opened: list[tuple[Any, ...]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    heartbeat: float | None = None

    @property
    def is_empty(self) -> bool:
        changes = self.rows or self.opened or self.closed or self.left
        return not (changes or self.heartbeat is not None)

    def do(self, connection: Connection) -> None:
        """Write it."""
        if self.heartbeat is not None:
            register(connection, self.own, self.heartbeat)
        statements = _statements(connection)
        insert_rows(connection, self.rows, self.first_sequence)
        _execute_many(connection, statements.open, self.opened)
        _execute_many(connection, statements.close, [(id_,) for id_ in self.closed])
        if self.left:
            leave_open(connection, self.own, self.left)


def insert_rows(connection: Connection, rows: Sequence[UsageRow], first_sequence: int) -> None:
    """Insert rows of the ledger, unless true ones are there, numbered in their order."""
    if not rows:
        return
    numbered = [(*row, number) for number, row in enumerate(rows, first_sequence)]
    if connection.dialect.name == "sqlite":
        _insert_into_sqlite(connection, numbered)
    else:
        _execute_many(connection, _statements(connection).insert, numbered)


def _insert_into_sqlite(connection: Connection, numbered: Sequence[UsageRow]) -> None:
    """Insert numbered rows with half the instructions of a statement for each.

    Many rows share a statement. Values that are neither number nor text are part of it, since
    Python's driver asks for an adapter of each of them, which takes longer than to store it.
    """
    driver = sqlite_driver(connection)
    by_shape: dict[_Shape, list[UsageRow]] = {}
    for row in numbered:
        shape: _Shape = (
            bool(row[_STREAM]), row[_GROUP] is None, row[_USER] is None, row[_GPU_COST] is None,
            row[_TTFT] is None, row[_CLIENTS_ID] is None,
        )  # fmt: skip
        if shape in by_shape:
            by_shape[shape].append(row)
        else:
            by_shape[shape] = [row]
    for shape, of_shape in by_shape.items():
        pick, one, many = _sqlite_inserts(shape)
        at = 0
        for at in range(ROWS_PER_STATEMENT, len(of_shape) + 1, ROWS_PER_STATEMENT):
            some = of_shape[at - ROWS_PER_STATEMENT : at]
            driver.execute(many, tuple(itertools.chain.from_iterable(map(pick, some))))
        if at < len(of_shape):
            driver.executemany(one, map(pick, of_shape[at:]))


# Whether a row is of a stream, and which of the columns `_OFTEN_NULL` are NULL.
_Shape = tuple[bool, bool, bool, bool, bool, bool]


class _SqliteInserts(NamedTuple):
    """Statements for rows of one shape."""

    pick: Callable[[UsageRow], tuple[Any, ...]]  # the parameters of a row
    one: str
    many: str  # for `ROWS_PER_STATEMENT` of them


@functools.cache
def _sqlite_inserts(shape: _Shape) -> _SqliteInserts:
    stream, *absent = shape
    literals = {_STREAM: str(int(stream))}
    literals |= {index: "NULL" for index, none in zip(_OFTEN_NULL, absent, strict=True) if none}
    indexes = range(len(ROW_COLUMNS) + 1)
    marks = f"({', '.join(literals.get(index, '?') for index in indexes)})"
    begin, _, end = _STATEMENTS["sqlite"].insert.partition(_marks("?", len(indexes)))
    pick = operator.itemgetter(*(index for index in indexes if index not in literals))
    return _SqliteInserts(
        pick, begin + marks + end, begin + ", ".join([marks] * ROWS_PER_STATEMENT) + end
    )


def _execute_many(connection: Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    if not rows:
        return
    if connection.dialect.name == "sqlite":
        sqlite_driver(connection).executemany(statement, rows)
    else:
        connection.exec_driver_sql(statement, list(rows))


def _open_row(one: OpenRequest, process: str, now: float) -> tuple[Any, ...]:
    return (one.id, process, one.started_at, now, *one[2:])


def _not_less(one: OpenRequest, known: OpenRequest) -> OpenRequest:
    """The request, with no less than was known of it.

    What an attempt took is nowhere for a moment, when it has ended and is not accounted for.
    """
    return one._replace(
        prompt_tokens=max(one.prompt_tokens, known.prompt_tokens),
        completion_tokens=max(one.completion_tokens, known.completion_tokens),
        slot_seconds=max(one.slot_seconds, known.slot_seconds),
        cost=max(one.cost, known.cost),
    )


def _lost_row(one: dict[str, Any], process: str) -> UsageRow:
    """The row of a request whose process was killed: what it had used when last heard of."""
    ended = {"process": process, "ended_at": one["updated_at"], "outcome": LOST}
    row = {**one, **ended, "cached_tokens": 0, "attempts": 1, "status": 0}
    return tuple(row.get(name) for name in ROW_COLUMNS)


class _Statements(NamedTuple):
    """The driver's own SQL: values are tuples, and nothing is compiled per row."""

    insert: str
    open: str
    close: str


def _statements(connection: Connection) -> _Statements:
    return _STATEMENTS[connection.dialect.name]


def _written_for(mark: str) -> _Statements:
    columns = (*ROW_COLUMNS, "sequence")
    updates, replaced = (
        ", ".join(f'"{name}" = excluded."{name}"' for name in names)
        for names in (_OPEN_UPDATES, columns[1:])
    )
    # What was written for a process that had died, or seemed to, gives way to what is true.
    return _Statements(
        f"{_insert(usage, columns, mark)} ON CONFLICT (id) DO UPDATE SET {replaced} WHERE "
        f"\"usage\".outcome IN ('{LOST}', '{EDGE_DIED}') "
        f"AND excluded.outcome NOT IN ('{LOST}', '{EDGE_DIED}')",
        _insert(open_requests, [one.name for one in open_requests.columns], mark)
        + f" ON CONFLICT (id) DO UPDATE SET {updates}",
        f"DELETE FROM open_requests WHERE id = {mark}",  # noqa: S608 - names are the tables' own
    )


def _insert(table: Table, columns: Sequence[str], mark: str) -> str:
    names = ", ".join(f'"{name}"' for name in columns)
    marks = _marks(mark, len(columns))
    return f'INSERT INTO "{table.name}" ({names}) VALUES {marks}'  # noqa: S608 - as above


def _marks(mark: str, count: int) -> str:
    return f"({', '.join([mark] * count)})"


_STATEMENTS: Final = {"sqlite": _written_for("?"), "postgresql": _written_for("%s")}


MOST_BYTES = 256 << 20  # of one file: about 650,000 rows
LARGEST_ROW = 64 << 10  # bytes of one line; a longer one is none of ours
_SUFFIX = ".rows"


class KeptRows:
    """The files of rows in `folder`, of which one is that of the process `own`.

    Each process appends to a file of its own, which it locks until it ends, however it ends. When
    the store has all rows that it has in memory as well, it removes the file. What nobody locks was
    left, mostly by a process that has ended: another one books its rows, of which the ledger skips
    those that it has. A line that was not written whole is skipped.

    A row is two lines: the first `COLUMNS_BEFORE` columns, which is all that the version before
    reads and writes, and those that came with the store's sixth level. All methods but the
    properties block: not for event loops.
    """

    def __init__(self, folder: Path, own: str, *, most_bytes: int = MOST_BYTES) -> None:
        self._path = folder / f"{own}{_SUFFIX}"
        self._most_bytes = most_bytes
        self._file: BinaryIO | None = None
        self._size = 0

    @property
    def is_empty(self) -> bool:
        """Whether this process keeps no rows here."""
        return self._file is None

    def keep(self, rows: Sequence[Sequence[Any]]) -> None:
        """Append rows, and bring them to the disk. Raises: OSError; then none of them is kept."""
        if self._file is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self._path, flags, 0o600), "ab", buffering=0)
            self._size = 0
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        parts = [part for row in rows for part in (row[:COLUMNS_BEFORE], row[COLUMNS_BEFORE:])]
        lines = msgspec.json.Encoder().encode_lines(parts)
        if self._size + len(lines) > self._most_bytes:
            raise OSError(f"{self._path} has {self._most_bytes >> 20} MiB of rows already")
        left = memoryview(lines)
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size += len(lines)

    def clear(self) -> None:
        """The store has all rows that this process keeps. Raises: OSError."""
        self._path.unlink(missing_ok=True)
        self.close()

    def set_aside(self) -> None:
        """Let the rows of this process be among those that are `left`. Raises: OSError."""
        self._path.rename(self._path.with_name(f"{time.monotonic_ns()}-{self._path.name}"))
        self.close()

    def close(self) -> None:
        """Leave the rows of this process, if it keeps any, to the next one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def left(self) -> list[Path]:
        """The files of processes that have ended. Raises: OSError."""
        try:
            found = sorted(self._path.parent.glob(f"*{_SUFFIX}"))
        except FileNotFoundError:
            return []
        return [path for path in found if path != self._path and _is_left(path)]


def read_rows(path: Path, columns: int, most: int) -> Iterator[list[tuple[Any, ...]]]:
    """The rows of a file, with so many columns, so many at a time. Raises: OSError."""
    rows, damaged = list[tuple[Any, ...]](), 0
    unknown = (None,) * (columns - COLUMNS_BEFORE)
    goes_on = False  # whether the last line was the first one of a row
    with path.open("rb") as file:
        while line := file.readline(LARGEST_ROW):
            try:
                row = _ROW.decode(line)
            except (msgspec.DecodeError, ValueError):
                row = ()
            if goes_on and len(row) == len(unknown):
                rows[-1] = (*rows[-1][:COLUMNS_BEFORE], *row)
                goes_on = False
                continue
            goes_on = len(row) == COLUMNS_BEFORE
            if not goes_on:
                damaged += 1
                continue
            if len(rows) == most:
                yield rows
                rows = []
            rows.append((*row, *unknown))
    if rows:
        yield rows
    if damaged:
        log.warning("ledger: lines of a file can't be read", path=str(path), lines=damaged)


def _is_left(path: Path) -> bool:
    """Whether the process that wrote the file has ended."""
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


_ROW = msgspec.json.Decoder(tuple[Any, ...])
