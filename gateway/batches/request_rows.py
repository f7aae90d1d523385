"""The rows of stored requests in the store: add, find and read them, and end those that wait.

Each job may be done twice. Several processes may work on one store at the same time: a job that
changes lines and their batch takes the batch's turn first (`lock_batch`), so that none waits for
another in a circle. Claims take no turn, and pass over rows that others hold (`claims.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Row,
    Select,
    func,
    literal_column,
    or_,
    select,
    update,
)

from gateway.batches.folder import DiskThreads, Folder
from gateway.store.database import insert_for
from gateway.store.schema import batches, stored_requests
from gateway.store.store import Store

LINE_PREFIX = "batch_req_"  # begins the id of a batch's line


P = ParamSpec("P")

T = TypeVar("T")


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
        return self in _ENDED


_ENDED = frozenset(
    {BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED}
)

BEFORE: Final[dict[BatchState, Collection[BatchState]]] = {
    BatchState.VALIDATING: (),
    BatchState.IN_PROGRESS: (BatchState.VALIDATING,),
    BatchState.FINALIZING: (BatchState.VALIDATING, BatchState.IN_PROGRESS),
    BatchState.FAILED: (BatchState.VALIDATING,),
    BatchState.CANCELLING: (
        BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.FINALIZING,
    ),
    BatchState.COMPLETED: (BatchState.FINALIZING,),
    BatchState.EXPIRED: (BatchState.FINALIZING,),
    BatchState.CANCELLED: (BatchState.CANCELLING,),
}  # fmt: skip
"""The states from which a batch may come into each state."""


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
    return f"{LINE_PREFIX}{batch.rpartition('_')[2]}_{number}"


STEP_ROWS = 4_000  # rows that one job ends or removes: some 20 ms of work
IDS_AT_ONCE = 500  # ids that one statement names

_ROW: Final = stored_requests.c


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A stored request. Its body is `length` bytes of the folder's file `place`."""

    id: str  # also that of the ledger's row
    kind: RequestKind
    owner: str
    path: str  # A path of `ROUTES`
    place: str
    offset: int
    length: int
    created_at: float  # Unix time, as all times here
    keep_until: float
    folder: str
    class_: str = "batch"  # the label of its class
    batch: str | None = None
    number: int | None = None  # of its line in the input, from 1
    custom_id: str | None = None  # None: the line has none, or an earlier line has the same
    group_name: str | None = None
    user: str | None = None
    model: str | None = None  # as its body names it
    stream: bool = False
    webhook_url: str | None = None
    prompt_tokens: int = 0  # estimated
    max_tokens: int = 0  # 0: its body names none
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


_FIELDS: Final = tuple(StoredRow.__dataclass_fields__)

COLUMNS: Final[tuple[Column[Any], ...]] = tuple(_ROW[name] for name in _FIELDS)  # for `row_of`


def in_state(state: RequestState) -> ColumnElement[bool]:
    """The condition of rows in this state; written out, so that partial indexes are used."""
    return _ROW.state == literal_column(f"'{state.value}'")


IS_WAITING: Final = in_state(RequestState.WAITING)

IS_RUNNING: Final = in_state(RequestState.RUNNING)


def row_of(row: Row[Any]) -> StoredRow:
    """The dataclass of a row of `COLUMNS`."""
    values: dict[str, Any] = dict(zip(_FIELDS, row, strict=True))
    values["kind"], values["state"] = RequestKind(values["kind"]), RequestState(values["state"])
    return StoredRow(**values)


def job(
    function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
) -> Callable[[Connection], T]:
    """A job of the store: `store.run(job(find_batch, owner, id_, api))`."""
    return lambda connection: function(connection, *args, **kwargs)


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


def lock_batch(connection: Connection, id_: str) -> BatchState | None:
    """Take the batch's turn until the transaction ends; its state, None if it is gone."""
    asked = select(batches.c.state).where(batches.c.id == id_).with_for_update()
    state = connection.scalar(asked)
    return None if state is None else BatchState(state)


def lock_batches(connection: Connection, ids: Iterable[str | None]) -> None:
    """Take the turns of batches, in an order that keeps processes from waiting in a circle."""
    for some in chunks(id_ for id_ in ids if id_ is not None):
        asked = select(batches.c.id).where(batches.c.id.in_(some)).order_by(batches.c.id)
        connection.execute(asked.with_for_update()).all()


# Add and find.


def add_rows(connection: Connection, rows: Sequence[StoredRow]) -> bool:
    """Add stored requests; those that are there already stay as they are.

    False: their batch takes no lines any more, as it was cancelled or has ended, and none is added.
    """
    for id_ in sorted({row.batch for row in rows if row.batch is not None}):
        if lock_batch(connection, id_) not in {BatchState.VALIDATING, BatchState.IN_PROGRESS}:
            return False
    added = insert_for(connection)(stored_requests).on_conflict_do_nothing(index_elements=["id"])
    if rows:
        connection.execute(added, [_values_of(row) for row in rows])
    return True


def result_rows(
    connection: Connection, batch: str, after_number: int, limit: int
) -> list[StoredRow]:
    """Lines of a batch that have ended, behind line `after_number`, by their numbers."""
    unfinished = [RequestState.WAITING.value, RequestState.RUNNING.value]
    asked = select(*COLUMNS).where(
        _ROW.batch == batch, _ROW.number > after_number, _ROW.state.not_in(unfinished)
    )
    return [row_of(row) for row in connection.execute(asked.order_by(_ROW.number).limit(limit))]


# What waits.


def waiting_by_kind(connection: Connection, folder: str, now: float) -> Counter[str]:
    """How many requests without a batch may run now in the folder, by their kind."""
    asked = select(_ROW.kind, func.count()).where(
        _ROW.folder == folder, _ROW.batch.is_(None), IS_WAITING, _ROW.not_before <= now
    )
    found = Counter[str]()
    for kind, rows in connection.execute(asked.group_by(_ROW.kind)):
        found[kind] += rows
    return found


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

COUNTED_AS: Final = {
    RequestState.DONE: batches.c.completed,
    RequestState.FAILED: batches.c.failed,
    RequestState.CANCELLED: batches.c.cancelled,
    RequestState.EXPIRED: batches.c.expired,
}
"""The column in which a batch counts its lines that have ended so."""


def count_lines(connection: Connection, batch: str, state: RequestState, number: int) -> None:
    """Count lines of the batch that have ended so."""
    column = COUNTED_AS[state]
    connection.execute(
        update(batches).where(batches.c.id == batch).values({column: column + number})
    )


def end_waiting_lines(
    connection: Connection, batch: str, state: RequestState, now: float, limit: int = STEP_ROWS
) -> int:
    """End lines that wait in this state, and count them; how many. The batch must be locked."""
    some = select(_ROW.id).where(_ROW.batch == batch, IS_WAITING).limit(limit)
    ended = update(stored_requests).where(_ROW.id.in_(some), IS_WAITING)
    number = connection.execute(ended.values(state=state.value, ended_at=now)).rowcount
    if number:
        count_lines(connection, batch, state, number)
    return number


def _values_of(row: StoredRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in _FIELDS}
    values["kind"], values["state"] = row.kind.value, row.state.value
    return values


LONGEST_UNREAD = 30.0
"""Seconds after which the store is read, though nothing tells that there is anything new."""

UNTOLD_SECONDS = 5.0  # the same on PostgreSQL, which does not tell what other processes commit
BUSY_SECONDS = 5.0  # seconds for which work that was found counts as still there


@dataclass(slots=True, eq=False)
class UnfinishedWork:
    """What is unfinished in a folder, as this process knows it. `clock` is monotonic."""

    store: Store
    folder: Folder
    threads: DiskThreads
    clock: Callable[[], float]
    _found: bool | None = None  # what the last look found; None: there was none
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
            folder = await self.threads.opened(self.folder)
            found = await self.store.run(job(has_unfinished, folder), write=False)
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
