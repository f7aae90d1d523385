"""Stored requests: their rows, who runs which under a lease, and the one result of each.

A claimed request is `running` until its result is recorded or its process puts it back. The process
renews its claims. When a lease is over, or its process gone, any other process of the folder puts
the request back. Then it may run twice, and only the process that has the claim can record a result
(`record`): an execution without a claim is the operator's loss.

Each job may be done twice. Several processes may work on one store at the same time: a job that
changes lines and their batch takes the batch's turn first (`lock_batch`), so that none waits for
another in a circle. Claims take no turn, and pass over rows that others hold.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Select,
    bindparam,
    func,
    literal_column,
    or_,
    select,
    update,
)

from gateway.callers.ledger import ROW_COLUMNS, UsageRow
from gateway.callers.processes import ProcessIdentity, SeenProcess, is_gone
from gateway.store.database import Rows, insert_for
from gateway.store.schema import batches, processes, stored_requests
from gateway.stored.folder import Storage


class BatchState(StrEnum):
    """Where a batch is, in the words of OpenAI's API."""

    VALIDATING = "validating"  # its input is being read
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # all its lines have ended; its output is being put together
    COMPLETED = "completed"
    FAILED = "failed"  # its input could not be used at all: nothing was run
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether it never changes again."""
        ends = BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED
        return self in ends


class RequestState(StrEnum):
    """Where a stored request is."""

    WAITING = "waiting"
    RUNNING = "running"  # A process has claimed it, and says again and again that it still runs it
    DONE = "done"
    FAILED = "failed"  # it has an error as its result: that of a node, or what is wrong with it
    CANCELLED = "cancelled"
    """It was not run, or not to its end, because its caller did not want it any more."""
    EXPIRED = "expired"  # its time was over before it had a result

    @property
    def ended(self) -> bool:
        """Whether it never changes again."""
        return self not in {RequestState.WAITING, RequestState.RUNNING}


# How a response ends, in the words of OpenAI's API.
ResponseEnd = Literal["completed", "failed", "incomplete", "cancelled"]


class RequestKind(StrEnum):
    """What a stored request is for."""

    LINE = "line"  # A line of a batch
    RESPONSE = "response"  # A response in the background, or one that is kept
    DEFERRED = "deferred"  # any other generation that its caller wants to have later


def new_id(prefix: str, now: float, token: Callable[[int], str]) -> str:
    """A new id: ids of the same prefix grow with time.

    `now` is Unix time; `token` gives random hex digits for so many bytes.
    """
    return f"{prefix}{int(now * 1000):012x}{token(10)}"


def line_id(batch: str, number: int) -> str:
    """The id of a batch's line: the same however often its input is read."""
    return f"batch_req_{batch.rpartition('_')[2]}_{number}"


STEP_ROWS = 4_000  # rows that one job ends or removes: some 20 ms of work
IDS_AT_ONCE = 500  # ids that one statement names
_ROW: Final = stored_requests.c


@dataclass(frozen=True, slots=True)
class AskedRow:
    """What is asked of a stored request."""

    kind: RequestKind
    owner: str
    path: str  # A path of `ROUTES`
    class_: str = "batch"  # the label of its class
    group_name: str | None = None
    user: str | None = None
    model: str | None = None  # as its body names it
    stream: bool = False
    webhook_url: str | None = None
    prompt_tokens: int = 0  # estimated
    max_tokens: int = 0  # 0: its body names none


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow(AskedRow):
    """A stored request. Its body is `length` bytes of the folder's file `place`."""

    id: str  # also that of the ledger's row
    place: str
    offset: int
    length: int
    created_at: float  # Unix time, as all times here
    keep_until: float
    folder: str
    batch: str | None = None
    number: int | None = None  # of its line in the input, from 1
    custom_id: str | None = None  # None: the line has none, or an earlier line has the same
    prefix: int = 0  # equal for prompts that begin alike; 0: too short to matter
    state: RequestState = RequestState.WAITING
    attempts: int = 0  # runs that nodes have failed
    claimed_by: str | None = None  # the id of the process that runs it
    claimed_until: float | None = None
    not_before: float = 0.0
    deadline: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    status: int | None = None  # the HTTP status of its result
    result_place: str | None = None
    result_offset: int | None = None
    result_length: int | None = None
    error_code: str | None = None


class WaitingLines(NamedTuple):
    """Lines of a batch that name one model and may run now."""

    batch: str
    owner: str
    path: str
    model: str | None
    class_: str  # the highest class that they may have
    rows: int
    deadline: float  # Unix time


class WorkLeft(NamedTuple):
    """What has not ended yet of a batch; tokens are sums of estimates."""

    waiting: int
    running: int
    prompt_tokens: int
    max_tokens: int


ROWS: Final = Rows(StoredRow, stored_requests, {"kind": RequestKind, "state": RequestState})


# Literals, so that partial indexes are used.
IS_WAITING: Final = _ROW.state == literal_column("'waiting'")
IS_RUNNING: Final = _ROW.state == literal_column("'running'")


def chunks(ids: Iterable[str]) -> Iterable[list[str]]:
    """The ids, as many at a time as one statement names, in an order that all processes have."""
    rest = iter(sorted(set(ids)))
    while some := list(islice(rest, IDS_AT_ONCE)):
        yield some


def those_with(
    connection: Connection, column: Column[Any], values: Iterable[str], *conditions: Any
) -> set[str]:
    """The values that the column has in rows of these conditions."""
    asked = select(column).where(*conditions)
    return {
        found
        for some in chunks(values)
        for found in connection.scalars(asked.where(column.in_(some)))
    }


def lock_batches(connection: Connection, ids: Iterable[str | None]) -> dict[str, BatchState]:
    """Take the turns of batches until the transaction ends; the states of those that are there.

    In an order that keeps processes from waiting in a circle.
    """
    states: dict[str, BatchState] = {}
    for some in chunks(id_ for id_ in ids if id_ is not None):
        asked = select(batches.c.id, batches.c.state).where(batches.c.id.in_(some))
        locked = connection.execute(asked.order_by(batches.c.id).with_for_update())
        states |= {id_: BatchState(state) for id_, state in locked}
    return states


def lock_batch(connection: Connection, id_: str) -> BatchState | None:
    """Take the batch's turn until the transaction ends; its state, None if it is gone."""
    return lock_batches(connection, [id_]).get(id_)


def alone_in(folder: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """The conditions of requests of a folder that are no lines of batches."""
    return _ROW.folder == folder, _ROW.batch.is_(None)


def add_rows(connection: Connection, rows: Sequence[StoredRow]) -> bool:
    """Add stored requests; those that are there already stay as they are.

    False: their batch takes no lines any more, as it was cancelled or has ended, and none is added.
    """
    of_batches = {row.batch for row in rows if row.batch is not None}
    states = lock_batches(connection, of_batches)
    taking = {BatchState.VALIDATING, BatchState.IN_PROGRESS}
    if any(states.get(id_) not in taking for id_ in of_batches):
        return False
    added = insert_for(connection)(stored_requests).on_conflict_do_nothing(index_elements=["id"])
    if rows:
        connection.execute(added, list(map(ROWS.values, rows)))
    return True


def result_rows(
    connection: Connection, batch: str, after_number: int, limit: int
) -> list[StoredRow]:
    """Lines of a batch that have ended, behind line `after_number`, by their numbers."""
    unfinished = [RequestState.WAITING.value, RequestState.RUNNING.value]
    asked = ROWS.where(
        _ROW.batch == batch, _ROW.number > after_number, _ROW.state.not_in(unfinished)
    )
    return ROWS.all(connection, asked.order_by(_ROW.number).limit(limit))


# What waits.


def waiting_by_kind(connection: Connection, folder: str, now: float) -> Counter[str]:
    """How many requests without a batch may run now in the folder, by their kind."""
    asked = select(_ROW.kind, func.count()).where(
        *alone_in(folder), IS_WAITING, _ROW.not_before <= now
    )
    found = connection.execute(asked.group_by(_ROW.kind))
    return Counter({kind: rows for kind, rows in found})  # noqa: C416 - rows are no tuples


def runnable_batches(folder: str, *columns: Column[Any]) -> Select[Any]:
    """The batches whose lines may run."""
    return select(*columns).where(
        batches.c.folder == folder,
        batches.c.ended_at.is_(None),
        batches.c.state == BatchState.IN_PROGRESS.value,
        batches.c.paused_at.is_(None),
    )


def waiting_lines(connection: Connection, folder: str, now: float) -> Iterable[WaitingLines]:
    """The lines of the folder that may run now: not those of a paused batch, or put off."""
    columns = batches.c
    runnable = {
        row.id: row
        for row in connection.execute(
            runnable_batches(
                folder, columns.id, columns.owner, columns.endpoint, columns.class_,
                columns.expires_at,
            )
        )
    }  # fmt: skip
    names = func.min(_ROW.model), func.max(_ROW.model), func.count(_ROW.model)
    waiting = IS_WAITING, _ROW.not_before <= now
    for ids in chunks(runnable):
        # By batch alone: the index has them in this order. Few batches have several models.
        of_batches = select(_ROW.batch, *names, func.count()).where(_ROW.batch.in_(ids), *waiting)
        for id_, least, most, named, rows in connection.execute(
            of_batches.group_by(_ROW.batch)
        ).all():
            models: Iterable[Any] = [(most, rows)]
            if least != most or named not in {0, rows}:
                of_models = select(_ROW.model, func.count()).where(_ROW.batch == id_, *waiting)
                models = connection.execute(of_models.group_by(_ROW.model))
            _, owner, path, class_, deadline = runnable[id_]
            for model, rows_of_model in models:
                yield WaitingLines(id_, owner, path, model, class_, rows_of_model, deadline)


def work_left(connection: Connection, batch: str) -> WorkLeft:
    """What has not ended yet of a batch."""
    sums = func.count(), func.sum(_ROW.prompt_tokens), func.sum(_ROW.max_tokens)
    waiting, running = (
        connection.execute(select(*sums).where(_ROW.batch == batch, condition)).one()
        for condition in (IS_WAITING, IS_RUNNING)
    )
    prompt_tokens, max_tokens = (
        int(waiting[place] or 0) + int(running[place] or 0) for place in (1, 2)
    )
    return WorkLeft(waiting[0], running[0], prompt_tokens, max_tokens)


def has_unfinished_lines(connection: Connection, batch: str) -> bool:
    """Whether a line of the batch waits or runs."""
    # One statement: a line that comes from one state into the other is seen in either.
    waits, runs = (
        select(_ROW.id).where(_ROW.batch == batch, condition).limit(1).exists()
        for condition in (IS_WAITING, IS_RUNNING)
    )
    return bool(connection.scalar(select(waits | runs)))


# The end of rows that wait.

# The column in which a batch counts its lines that have ended so.
COUNTED_AS: Final = {
    RequestState.DONE: batches.c.completed,
    RequestState.FAILED: batches.c.failed,
    RequestState.CANCELLED: batches.c.cancelled,
    RequestState.EXPIRED: batches.c.expired,
}


def _add_to_batch(connection: Connection, batch: str, sums: Mapping[Column[Any], Any]) -> None:
    values = {column: column + number for column, number in sums.items()}
    connection.execute(update(batches).where(batches.c.id == batch).values(values))


def end_waiting_lines(
    connection: Connection, batch: str, state: RequestState, now: float, limit: int = STEP_ROWS
) -> int:
    """End lines that wait in this state, and count them; how many. The batch must be locked."""
    some = select(_ROW.id).where(_ROW.batch == batch, IS_WAITING).limit(limit)
    ended = update(stored_requests).where(_ROW.id.in_(some), IS_WAITING)
    number = connection.execute(ended.values(state=state.value, ended_at=now)).rowcount
    if number:
        _add_to_batch(connection, batch, {COUNTED_AS[state]: number})
    return number


# Seconds after which the store is read, though nothing tells that there is anything new.
LONGEST_UNREAD = 30.0
UNTOLD_SECONDS = 5.0  # the same on PostgreSQL, which does not tell what other processes commit
BUSY_SECONDS = 5.0  # seconds for which work that was found counts as still there


@dataclass(slots=True, eq=False)
class UnfinishedWork:
    """What is unfinished in a folder, as this process knows it."""

    storage: Storage
    _found: bool = False  # what the last look found
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
        async with self._reading:  # Others have what the first one finds.
            storage = self.storage
            # Before the look: what comes after it is new.
            seen, now = (self._additions, storage.store.changes), storage.clock()
            if not self._is_known(seen, now - self._read_at):
                self._found = await storage.read(has_unfinished, await storage.opened())
                self._read_at, self._seen = now, seen
            return self._found

    def _is_known(self, seen: tuple[int, int], age: float) -> bool:
        """Whether what the last look found still holds."""
        if seen[0] != self._seen[0]:
            return False
        if self._found:
            return age < BUSY_SECONDS
        if self.storage.store.location.path is None:
            return age < UNTOLD_SECONDS
        return seen == self._seen and age < LONGEST_UNREAD


def has_unfinished(connection: Connection, folder: str) -> bool:
    """Whether the folder has a batch that has not ended, or a request that waits or runs."""
    unfinished = select(batches.c.id).where(
        batches.c.folder == folder, batches.c.ended_at.is_(None)
    )
    running = select(_ROW.id).where(_ROW.folder == folder, IS_RUNNING)
    # Lines wait only while their batch has not ended.
    waiting = select(_ROW.id).where(*alone_in(folder), IS_WAITING)
    asked = select(or_(unfinished.exists(), running.exists(), waiting.exists()))
    return bool(connection.scalar(asked))


@dataclass(frozen=True, slots=True)
class Pick:
    """Which waiting requests are wanted, and how many.

    Lines are those of one batch. They come with their prefix: those that begin alike together, the
    longest first. Requests without a batch come by their deadlines, then in the order of their age.
    """

    limit: int
    kind: RequestKind
    batch: str | None = None
    owner: str | None = None
    model: str | None = None
    prefix: int | None = None
    ids: Sequence[str] | None = None  # of these requests alone, which have no batch


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
    claimed by a transaction whose commit nobody knows of waits again when its lease is over.
    """
    claimed: list[StoredRow] = []
    for pick in picks:
        ids = _picked(connection, folder, pick, now)
        begun = update(stored_requests).where(_ROW.id.in_(ids), IS_WAITING)
        begun = begun.values(
            state=RequestState.RUNNING.value,
            claimed_by=process,
            claimed_until=now + lease_seconds,
            started_at=now,
        )
        taken = {row.id: row for row in ROWS.changed(connection, begun)}
        claimed += [taken[id_] for id_ in ids if id_ in taken]
    return claimed


def _picked(connection: Connection, folder: str, pick: Pick, now: float) -> list[str]:
    """The requests of one pick; on PostgreSQL they are locked."""
    asked = select(_ROW.id).where(IS_WAITING, _ROW.not_before <= now)
    if pick.kind is RequestKind.LINE:
        runnable = runnable_batches(folder, batches.c.id).where(batches.c.id == pick.batch)
        if connection.scalar(runnable) is None:
            return []
        # What is late is about to be ended (`expire_lines`).
        in_time = or_(_ROW.deadline.is_(None), _ROW.deadline > now)
        asked = asked.where(_ROW.batch == pick.batch, in_time)
        asked = asked.order_by(_ROW.prefix, _ROW.max_tokens.desc(), _ROW.number)
    else:
        asked = asked.where(*alone_in(folder), _ROW.kind == pick.kind.value)
        asked = asked.order_by(_ROW.deadline.is_(None), _ROW.deadline, _ROW.id)
    for column, value in (
        (_ROW.owner, pick.owner), (_ROW.model, pick.model), (_ROW.prefix, pick.prefix),
    ):  # fmt: skip
        if value is not None:
            asked = asked.where(column == value)
    if pick.ids is not None:
        asked = asked.where(_ROW.id.in_(pick.ids))
    return list(connection.scalars(unlocked(asked, pick.limit)))


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


def release_lost(
    connection: Connection,
    folder: str,
    own: ProcessIdentity,
    now: float,
    own_kinds: Iterable[RequestKind] = tuple(RequestKind),
    *,
    is_sole: bool = False,
) -> int:
    """Let requests wait whose lease is over or whose process is gone; how many.

    `own_kinds`: the kinds whose claims the caller has just renewed. After the store was away, the
    process may still run its requests of other kinds, though their leases are over. `is_sole`: no
    other process runs any by now, so that the leases of others mean nothing.
    """
    running = _ROW.folder == folder, IS_RUNNING
    kinds = [kind.value for kind in own_kinds]
    is_mine = or_(_ROW.claimed_by != own.id, _ROW.kind.in_(kinds))
    lost: list[ColumnElement[bool]] = [(_ROW.claimed_until <= now) & is_mine]
    claimers = set(connection.scalars(select(_ROW.claimed_by).where(*running).distinct()))
    if is_sole:
        lost.append(_ROW.claimed_by != own.id)
    elif gone := gone_processes(connection, claimers - {own.id}, own.host):
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
    states = lock_batches(connection, of_batches)
    locked = connection.execute(chosen.with_for_update(skip_locked=skip_locked))
    found = {row.id: row.batch for row in locked if row.batch in of_batches}
    cancelling = {batch for batch, state in states.items() if state is BatchState.CANCELLING}
    cancelled = Counter(batch for batch in found.values() if batch in cancelling)
    since = select(batches.c.cancelling_at).where(batches.c.id == _ROW.batch).scalar_subquery()
    ends = {"state": RequestState.CANCELLED.value, "ended_at": since}
    waits = {"state": RequestState.WAITING.value, **values}
    for is_end, changes in ((True, ends), (False, waits)):
        for some in chunks(id_ for id_, batch in found.items() if (batch in cancelling) is is_end):
            changed = update(stored_requests).where(_ROW.id.in_(some), IS_RUNNING)
            connection.execute(changed.values(claimed_by=None, claimed_until=None, **changes))
    for batch in sorted(cancelled):
        _add_to_batch(connection, batch, {batches.c.cancelled: cancelled[batch]})
    return len(found)


# The places in a row of the ledger that a batch sums up, and its columns.
_COUNTED: Final = tuple(
    (ROW_COLUMNS.index(name), batches.c[name])
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "cost")
)


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """The result of one stored request: bytes of a file of the folder, if it can be read."""

    id: str  # of the stored request
    state: RequestState
    status: int | None = None  # the HTTP status; None: it was not answered
    error_code: str | None = None
    result_place: str | None = None
    result_offset: int | None = None
    result_length: int | None = None
    usage: UsageRow | None = None  # the row for the ledger; None: it was not admitted
    end: ResponseEnd | None = None  # of a response in the background


def record(
    connection: Connection, process: str, results: Sequence[RecordedResult], now: float
) -> list[str]:
    """Give requests that this process runs their results, and count them in their batches.

    Returns the ids of those whose result is recorded; done again, the same ids. The other results
    do not count: their requests were cancelled, or taken by another process.
    """
    wanted = {one.id: one for one in results}
    asked = select(_ROW.id, _ROW.state, _ROW.batch, _ROW.result_place, _ROW.result_offset)
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
            if row.state != RequestState.RUNNING.value:
                found = row.state, row.result_place, row.result_offset
                if found == (result.state.value, result.result_place, result.result_offset):
                    recorded.append(row.id)  # Else it has ended with another one.
                continue
            recorded.append(row.id)
            told = {name: getattr(result, name) for name in _RESULT}
            new.append(told | {"of_id": row.id, "state": result.state.value, "ended_at": now})
            if row.batch is not None:
                counted = sums[row.batch]
                counted[COUNTED_AS[result.state]] += 1
                counted[batches.c.result_bytes] += result.result_length or 0
                if result.usage is not None:
                    for index, column in _COUNTED:
                        counted[column] += result.usage[index]
    if new:
        connection.execute(_RECORDED, new)
    for batch in sorted(sums):
        _add_to_batch(connection, batch, sums[batch])
    return recorded


_RESULT: Final = (
    "state", "status", "error_code", "result_place", "result_offset", "result_length",
)  # fmt: skip
_RECORDED: Final = (
    update(stored_requests)
    .where(_ROW.id == bindparam("of_id"))
    .values({name: bindparam(name) for name in (*_RESULT, "ended_at")} | {"claimed_until": None})
)
"""`claimed_by` stays: it tells who has recorded the result."""


LEASE_SECONDS = 60.0  # for which a claim holds unless it is renewed


@dataclass(slots=True, eq=False)
class RowLeases:
    """Claims rows of a folder for one process, all of these kinds."""

    storage: Storage
    process: ProcessIdentity
    lease_seconds: float = LEASE_SECONDS
    kinds: Sequence[RequestKind] = (RequestKind.LINE,)
    is_sole: bool = False  # whether no other process runs rows while this one claims any
    _put_back: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """Rows that are to wait again: until when, and whether nodes failed them."""

    async def claim(self, picks: Sequence[Pick]) -> list[StoredRow]:
        """Claim rows. Raises: StoreError, FolderError."""
        storage = self.storage
        folder, now = await storage.opened(), storage.now()
        rows = await storage.write(claim, folder, self.process.id, picks, now, self.lease_seconds)
        for row in rows:
            # Others have put it back meanwhile: from now on it runs again.
            self._put_back.pop(row.id, None)
        return rows

    async def renew(self, ids: Iterable[str]) -> set[str]:
        """Those of the claimed rows that are still wanted. Raises: StoreError."""
        asked = [id_ for id_ in ids if id_ not in self._put_back]
        waiting = self._put_back.keys() & set(ids)
        if not asked:
            return waiting
        return waiting | await self.storage.write(
            renew, self.process.id, asked, self.storage.now(), self.lease_seconds
        )

    async def release_lost(self) -> int:
        """Let rows of processes that are gone wait again; how many. Raises: StoreError.

        To be called after `renew`.
        """
        folder, now = await self.storage.opened(), self.storage.now()
        return await self.storage.write(
            release_lost, folder, self.process, now, self.kinds, is_sole=self.is_sole
        )

    @property
    def has_put_back(self) -> bool:
        """Whether there is something to `write`."""
        return bool(self._put_back)

    def put_back(self, ids: Iterable[str], not_before: float, *, failed: bool = False) -> None:
        """Let rows wait until `not_before`; `failed`: nodes failed them. `write` does it."""
        self._put_back |= dict.fromkeys(ids, (round(not_before, 1), failed))

    async def write(self) -> bool:
        """Write what was put back; returns whether there was something. Raises: StoreError."""
        found = defaultdict[tuple[float, bool], set[str]](set)
        for id_, how in self._put_back.items():
            found[how].add(id_)
        for how, ids in found.items():
            not_before, failed = how
            await self.storage.write(put_back, self.process.id, ids, not_before, failed=failed)
            for id_ in ids:
                if self._put_back.get(id_) == how:
                    del self._put_back[id_]
        return bool(found)
