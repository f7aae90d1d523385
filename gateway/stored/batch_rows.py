"""The rows of batches in the store, the jobs that read and write them, and how far batches are.

Each job may be done twice. One that changes a batch takes its turn first (`lock_batch`), so that of
two processes one waits for the other.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import ColumnElement, Connection, delete, func, literal, select, update

from gateway.config.stored import BatchSettings
from gateway.errors import GatewayError, truncate_echo
from gateway.store.database import Rows, insert_for
from gateway.store.schema import batches, stored_requests
from gateway.stored import claims, files
from gateway.stored.claims import BatchState, RequestState, WorkLeft
from gateway.stored.files import StoredFile

PREFIXES = {"openai": "batch_", "anthropic": "msgbatch_"}  # of the ids of each API's batches
INPUT_PURPOSE = "batch"  # purpose of a file that a batch may read
_BATCH: Final = batches.c
_ROW: Final = stored_requests.c


@dataclass(frozen=True, slots=True)
class AskedBatch:
    """What a caller asks for."""

    owner: str  # the id of a key
    api: str  # `openai` or `anthropic`
    endpoint: str  # the path of all its lines
    input_file: str | None = None
    class_: str = "batch"  # the highest class that its lines may be raised to
    group_name: str | None = None
    user: str | None = None  # the end user whom its caller has named
    output_seconds: float | None = None
    """For how long its output files are kept (`output_expires_after`)."""
    webhook_url: str | None = None
    metadata: dict[str, str] | None = None
    idempotency_key: str | None = None
    request_digest: str | None = None
    """Of the request that created it: the same idempotency key with another request is refused."""
    requests_bytes: int = 0
    """Of the file with its lines, where there is no input file; 0 once that is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(AskedBatch):
    """A batch of a caller. Times are Unix seconds."""

    id: str  # `batch_...` or `msgbatch_...`; ids grow with time
    created_at: float
    expires_at: float  # its deadline
    keep_until: float  # when it and its results are removed
    folder: str  # the id of the folder that holds its files
    state: BatchState = BatchState.VALIDATING
    output_file: str | None = None
    error_file: str | None = None
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    ended_at: float | None = None
    cancelling_at: float | None = None
    paused_at: float | None = None
    pause_reason: str | None = None
    model: str | None = None  # the model of its lines, if they name one only
    total: int = 0  # its lines, broken ones included
    completed: int = 0  # lines with a response (status below 400)
    failed: int = 0  # lines whose result is an error, broken lines included; not the next two
    cancelled: int = 0
    expired: int = 0
    prompt_tokens: int = 0  # of all recorded results, as the next three
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    errors: list[dict[str, Any]] | None = None
    """Why it failed as a whole: objects with code, message, param and line."""
    result_bytes: int = 0  # of all recorded results, errors of broken lines included

    @property
    def ended_lines(self) -> int:
        """Lines that have a result, or will never have one."""
        return self.completed + self.failed + self.cancelled + self.expired


# Is told of a batch that ends, in the transaction in which it does.
EndListener = Callable[[Connection, Batch], None]


class BatchPage(NamedTuple):
    """Some batches, the newest first."""

    batches: list[Batch]
    has_more: bool


_BATCHES: Final = Rows(Batch, batches, {"state": BatchState}, "metadata", "errors")
_SHOWN: Final = _BATCH.deleted_at.is_(None)


def add_batch(connection: Connection, batch: Batch, settings: BatchSettings) -> Batch:
    """Add a batch; returns it, or the earlier one with the same idempotency key.

    Raises: GatewayError 400, 422 (that key with another request), 429, 503.
    """
    # Until the end of the transaction the input file can't be deleted.
    files.raise_revision(connection)
    earlier = _BATCHES.one(connection, _BATCH.id == batch.id)
    if earlier is not None:
        return earlier  # Done again.
    if batch.idempotency_key is not None:
        key = _BATCH.idempotency_key == batch.idempotency_key
        earlier = _BATCHES.one(connection, _BATCH.owner == batch.owner, key)
    if earlier is not None:
        if earlier.request_digest == batch.request_digest:
            return earlier
        raise GatewayError(
            422,
            "idempotency_key_reused",
            "This Idempotency-Key was sent before with another request: send a new key with a new "
            "request.",
            retryable=False,
        )
    if batch.input_file is not None:
        _check_input(connection, batch, batch.input_file)
    unfinished_ones = select(func.count()).where(
        _BATCH.owner == batch.owner, _BATCH.ended_at.is_(None)
    )
    if (connection.scalar(unfinished_ones) or 0) >= settings.batches_per_key:
        raise GatewayError(
            429,
            "too_many_batches",
            f"This key has {settings.batches_per_key} batches that have not ended, and may have no "
            "more: wait for the end of one, or cancel it.",
            retryable=False,
        )
    kept = files.kept_by(connection, batch.owner, batch.created_at)
    # Its results need room too.
    if kept.bytes + max(1, batch.requests_bytes) > settings.bytes_per_key:
        raise files.kept_too_much(kept, settings)
    connection.execute(insert_for(connection)(batches).values(**_BATCHES.values(batch)))
    return batch


def _check_input(connection: Connection, batch: Batch, id_: str) -> None:
    """Raises: GatewayError 400, 503, if the batch can't read this file."""
    file = files.find_file(connection, batch.owner, id_, batch.created_at)
    shown = truncate_echo(id_)
    if file is None:
        raise GatewayError(
            400, "file_not_found", f"No such File object: {shown}", param="input_file_id"
        )
    if file.purpose != INPUT_PURPOSE:
        raise GatewayError(
            400,
            "invalid_value",
            f"The file '{shown}' was not uploaded for a batch: upload it with the purpose 'batch'.",
            param="input_file_id",
        )
    if file.folder != batch.folder:
        raise files.file_elsewhere("The input file")


def find_batch(
    connection: Connection, owner: str | None, id_: str, api: str | None = None
) -> Batch | None:
    """The owner's batch of this API, or of both; `owner`: None: whoever owns it."""
    return _BATCHES.one(connection, *_of_owner(owner, id_, api))


def read_batches(
    connection: Connection,
    owner: str | None,
    api: str | None,
    limit: int,
    after: str | None = None,
    before: str | None = None,
    *,
    ended: bool | None = None,
) -> BatchPage:
    """A page of batches, the newest first; None: those of all owners, or of both APIs.

    `after`: older ones than that; `before`: the next newer ones than that. Batches of these ids
    need not be there any more. `ended`: only those that have ended, or have not.
    """
    chosen: list[ColumnElement[bool]] = [_SHOWN]
    if owner is not None:
        chosen.append(_BATCH.owner == owner)
    if ended is not None:
        chosen.append(_BATCH.ended_at.is_not(None) if ended else _BATCH.ended_at.is_(None))
    order = _BATCH.id.asc() if before is not None else _BATCH.id.desc()
    found: list[Batch] = []
    for of_api, prefix in PREFIXES.items():
        if api in {None, of_api}:
            asked = _BATCHES.where(_BATCH.api == of_api, *chosen)
            # Of one API ids grow with time. Of both, what follows the prefix does.
            if after is not None:
                asked = asked.where(_BATCH.id < prefix + age_key(after))
            if before is not None:
                asked = asked.where(_BATCH.id > prefix + age_key(before))
            found += _BATCHES.all(connection, asked.order_by(order).limit(limit + 1))
    found.sort(key=lambda one: age_key(one.id), reverse=before is None)
    page = found[:limit]
    return BatchPage(page[::-1] if before is not None else page, len(found) > limit)


def age_key(id_: str) -> str:
    """What is smaller for older batches, whatever their API."""
    return id_.rpartition("_")[2]


class ErrorKind(NamedTuple):
    """Lines of a batch that have ended with one error, or without any result."""

    code: str
    lines: int
    first_line: int  # of the input


def count_errors(connection: Connection, id_: str) -> list[ErrorKind]:
    """How the batch's lines have failed so far, the most frequent error first."""
    failed = [RequestState.FAILED.value, RequestState.CANCELLED.value, RequestState.EXPIRED.value]
    code = func.coalesce(_ROW.error_code, literal("batch_") + _ROW.state)
    counted = select(code, func.count(), func.min(_ROW.number)).where(
        _ROW.batch == id_, _ROW.state.in_(failed)
    )
    kinds = [ErrorKind(*row) for row in connection.execute(counted.group_by(code))]
    return sorted(kinds, key=lambda one: (-one.lines, one.code))


def unfinished(connection: Connection, folder: str) -> list[Batch]:
    """All unfinished batches of the folder, the oldest first."""
    asked = _BATCHES.where(_BATCH.folder == folder, _BATCH.ended_at.is_(None))
    return _BATCHES.all(connection, asked.order_by(_BATCH.id))


# From the beginning to the end. Each job returns the batch as it is then; None: it is gone.


def begin_batch(connection: Connection, id_: str, model: str | None, now: float) -> Batch | None:
    """All its lines are there: they may run. Nothing, if it isn't `validating` any more."""
    if claims.lock_batch(connection, id_) is not BatchState.VALIDATING:
        return _BATCHES.one(connection, _BATCH.id == id_)
    counts = _counts(connection, id_)
    changes = {**counts, "model": model, "in_progress_at": now}
    if counts["failed"] == counts["total"]:
        return _move(connection, id_, BatchState.FINALIZING, {**changes, "finalizing_at": now})
    return _move(connection, id_, BatchState.IN_PROGRESS, changes)


def fail_batch(
    connection: Connection,
    id_: str,
    errors: Sequence[dict[str, Any]],
    now: float,
    also: EndListener | None = None,
) -> Batch | None:
    """Its input can't be used at all. Nothing, if it isn't `validating` any more."""
    if claims.lock_batch(connection, id_) is not BatchState.VALIDATING:
        return _BATCHES.one(connection, _BATCH.id == id_)
    changes = {"errors": json.dumps(errors, ensure_ascii=False), "ended_at": now}
    failed = _move(connection, id_, BatchState.FAILED, changes)
    if failed is not None and also is not None:
        also(connection, failed)
    return failed


def cancel_batch(
    connection: Connection,
    owner: str,
    id_: str,
    api: str,
    now: float,
    limit: int = claims.STEP_ROWS,
) -> Batch | None:
    """Cancel the owner's batch: lines that wait end, those that run are told by `renew`.

    Of more than `limit` lines some end later, by `begin_finalizing`. A batch that has ended stays
    as it is.
    """
    if find_batch(connection, owner, id_, api) is None:
        return None
    state = claims.lock_batch(connection, id_)
    changes: dict[str, Any] = {"cancelling_at": now}
    if state is BatchState.VALIDATING:
        changes |= _counts(connection, id_)  # It gets no more lines: these are all.
    if state in {BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.FINALIZING}:
        _move(connection, id_, BatchState.CANCELLING, changes)
        claims.end_waiting_lines(connection, id_, RequestState.CANCELLED, now, limit)
    return _BATCHES.one(connection, _BATCH.id == id_)


def pause_batch(
    connection: Connection, owner: str, id_: str, now: float, reason: str, api: str | None = None
) -> Batch | None:
    """Claim no more lines of the owner's batch; those that run go on. Its deadline stays.

    Nothing, if it is paused already, or is none of this API.
    """
    conditions = _of_owner(owner, id_, api)
    changed = update(batches).where(
        *conditions, _BATCH.ended_at.is_(None), _BATCH.paused_at.is_(None)
    )
    connection.execute(changed.values(paused_at=now, pause_reason=reason))
    return _BATCHES.one(connection, *conditions)


def resume_batch(
    connection: Connection,
    owner: str,
    id_: str,
    api: str | None = None,
    reasons: Collection[str] | None = None,
) -> Batch | None:
    """Let the lines of the owner's batch run again; `reasons`: only if it was paused for one."""
    conditions = _of_owner(owner, id_, api)
    changed = update(batches).where(*conditions, _BATCH.ended_at.is_(None))
    if reasons is not None:
        changed = changed.where(_BATCH.pause_reason.in_(reasons))
    connection.execute(changed.values(paused_at=None, pause_reason=None))
    return _BATCHES.one(connection, *conditions)


def _of_owner(owner: str | None, id_: str, api: str | None) -> list[ColumnElement[bool]]:
    conditions = [_BATCH.id == id_, _SHOWN]
    if owner is not None:
        conditions.append(_BATCH.owner == owner)
    return conditions if api is None else [*conditions, _BATCH.api == api]


def begin_finalizing(
    connection: Connection, id_: str, now: float, limit: int = claims.STEP_ROWS
) -> Batch | None:
    """All its lines have ended: its output can be put together.

    None: lines still wait or run, or it isn't so far for another reason. Waiting lines of a batch
    that is being cancelled end here, at most `limit` at a time.
    """
    state = claims.lock_batch(connection, id_)
    if state is BatchState.CANCELLING:
        ended = claims.end_waiting_lines(connection, id_, RequestState.CANCELLED, now, limit)
        if ended == limit:
            return None
    elif state not in {BatchState.IN_PROGRESS, BatchState.FINALIZING}:
        return None
    if claims.has_unfinished_lines(connection, id_):
        return None
    if state is BatchState.CANCELLING:
        first = update(batches).where(_BATCH.id == id_, _BATCH.finalizing_at.is_(None))
        connection.execute(first.values(finalizing_at=now))
        return _BATCHES.one(connection, _BATCH.id == id_)
    return _move(connection, id_, BatchState.FINALIZING, {"finalizing_at": now})


def end_batch(
    connection: Connection,
    id_: str,
    output: StoredFile | None,
    error_file: StoredFile | None,
    now: float,
    also: EndListener | None = None,
) -> Batch | None:
    """Give the batch its files and its last state.

    None: it is not `finalizing`, or has ended with other files, so that these can be discarded.
    """
    claims.lock_batch(connection, id_)
    batch = _BATCHES.one(connection, _BATCH.id == id_)
    if batch is None or batch.finalizing_at is None:
        return None
    names = tuple(None if file is None else file.id for file in (output, error_file))
    if batch.ended_at is not None:
        # Done again: these are its files, unless another process was faster.
        return batch if (batch.output_file, batch.error_file) == names else None
    last = BatchState.COMPLETED
    if batch.cancelling_at is not None:
        last = BatchState.CANCELLED
    elif batch.expired:
        last = BatchState.EXPIRED
    for file in (output, error_file):
        if file is not None:
            files.add_file(connection, file)
    changes = {
        "output_file": names[0], "error_file": names[1], "ended_at": now,
        # It may have been paused for want of room, which there was after all.
        "paused_at": None, "pause_reason": None,
    }  # fmt: skip
    ended = _move(connection, id_, last, changes)
    if ended is not None and also is not None:
        also(connection, ended)
    return ended


def expire_lines(
    connection: Connection, folder: str, now: float, limit: int = claims.STEP_ROWS
) -> int:
    """End waiting lines of the folder whose deadline has passed; how many, at most `limit`."""
    late = select(_BATCH.id).where(
        _BATCH.folder == folder,
        _BATCH.ended_at.is_(None),
        _BATCH.expires_at <= now,
        _BATCH.state == BatchState.IN_PROGRESS.value,
    )
    number = 0
    for id_ in connection.scalars(late.order_by(_BATCH.id)).all():
        if number < limit and claims.lock_batch(connection, id_) is BatchState.IN_PROGRESS:
            number += claims.end_waiting_lines(
                connection, id_, RequestState.EXPIRED, now, limit - number
            )
    return number


# The end of batches and of all that they have.


def delete_batch(connection: Connection, owner: str, id_: str, api: str) -> list[str] | None:
    """Take an ended batch from its owner; None: there is none.

    Returns the folder's files that are to be deleted, before `remove_batches` removes the rows.
    """
    found = find_batch(connection, owner, id_, api)
    if found is None or found.ended_at is None:
        return None
    gone = update(batches).where(_BATCH.id == id_, _BATCH.ended_at.is_not(None))
    connection.execute(gone.values(deleted_at=found.ended_at, keep_until=0.0, idempotency_key=None))
    return _places(connection, found.id, found.input_file)


def take_due_batches(
    connection: Connection, folder: str, now: float, limit: int
) -> dict[str, list[str]]:
    """Ended batches of the folder whose time is over, or that were deleted: from now on nobody's.

    Each with its files in the folder: bodies and results of its lines. The caller deletes these,
    then removes the rows (`remove_batches`).
    """
    due = select(_BATCH.id, _BATCH.input_file).where(
        _BATCH.folder == folder, _BATCH.keep_until <= now, _BATCH.ended_at.is_not(None)
    )
    found = connection.execute(due.order_by(_BATCH.keep_until).limit(limit)).all()
    ids = [row.id for row in found]
    taken = update(batches).where(_BATCH.id.in_(ids), _SHOWN)
    connection.execute(taken.values(deleted_at=now, idempotency_key=None))
    return {id_: _places(connection, id_, input_file) for id_, input_file in found}


def remove_batches(
    connection: Connection, ids: Iterable[str], limit: int = claims.STEP_ROWS
) -> bool:
    """Remove batches that were deleted or taken as due, with their lines.

    At most `limit` lines: returns whether all is removed. If not, it is to be done again.
    """
    gone = select(_BATCH.id).where(_BATCH.deleted_at.is_not(None))
    for some in claims.chunks(ids):
        for id_ in connection.scalars(gone.where(_BATCH.id.in_(some))).all():
            lines = select(_ROW.id).where(_ROW.batch == id_).limit(limit)
            removed = delete(stored_requests).where(_ROW.id.in_(lines))
            limit -= connection.execute(removed).rowcount
            if limit <= 0:
                return False
            connection.execute(delete(batches).where(_BATCH.id == id_))
    return True


def _places(connection: Connection, id_: str, input_file: str | None) -> list[str]:
    """The folder's files that only the lines of this batch need."""
    pairs = select(_ROW.place, _ROW.result_place).where(_ROW.batch == id_).distinct()
    names = {name for pair in connection.execute(pairs) for name in pair if name is not None}
    # The input file is its owner's, and goes when that one or its expiry says so.
    return sorted(names - {input_file})


def with_requests(connection: Connection, folder: str, limit: int) -> list[Batch]:
    """Ended batches of the folder whose requests, which nobody reads any more, are still there."""
    asked = _BATCHES.where(
        files.HAS_REQUESTS, _BATCH.folder == folder, _BATCH.ended_at.is_not(None)
    )
    return _BATCHES.all(connection, asked.limit(limit))


def requests_removed(connection: Connection, ids: Iterable[str]) -> None:
    """The files with the requests of these batches are gone."""
    for some in claims.chunks(ids):
        connection.execute(update(batches).where(_BATCH.id.in_(some)).values(requests_bytes=0))


def _counts(connection: Connection, id_: str) -> dict[str, int]:
    """How many lines the batch has, how many are broken, and the bytes of these ones' errors."""
    broken = func.count().filter(_ROW.state == RequestState.FAILED.value)
    asked = select(func.count(), broken, func.sum(_ROW.result_length)).where(_ROW.batch == id_)
    total, failed, size = connection.execute(asked).one()
    return {"total": total, "failed": failed, "result_bytes": int(size or 0)}


def _move(
    connection: Connection, id_: str, state: BatchState, changes: dict[str, Any]
) -> Batch | None:
    """Bring the batch, whose turn was taken, into a state; the batch as it is then."""
    moved = update(batches).where(_BATCH.id == id_)
    connection.execute(moved.values(state=state.value, **changes))
    return _BATCHES.one(connection, _BATCH.id == id_)


SAMPLE_SECONDS = 5.0  # seconds between two looks at what a batch has done
WINDOW_SECONDS = 180.0  # seconds over which its speed is measured
# Of a line whose request names no limit, while no line of its batch has ended.
DEFAULT_COMPLETION_TOKENS = 256


# `speed`: by the results of its own last minutes; `nodes`: by how fast its nodes read and write, if
# all their slots were its own from its start on.
Reckoning = Literal["speed", "nodes"]


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is."""

    waiting: int = 0
    running: int = 0
    tokens_per_second: float | None = None
    """Recorded completion tokens of the last minutes; None: not known yet, or it has ended."""
    expected_end: float | None = None  # Unix time; None: not known
    cost: float = 0.0  # of its recorded results, in the settings' currency
    expected_cost: float | None = None
    """Of all its lines, also before it starts; None: no price is known."""
    expected_start: float | None = None
    """When a line of it is expected to run, in Unix time; None: one does, or nobody knows."""
    expected_by: Reckoning | None = None  # how `expected_end` was reckoned; None: it is not known


class _Sample(NamedTuple):
    at: float  # monotonic seconds
    tokens: int
    lines: int


class BatchSpeed(NamedTuple):
    """What was recorded in a second, of late."""

    tokens: float
    lines: float


@dataclass(slots=True, eq=False)
class SpeedMeter:
    """Measures the speeds of batches by what is recorded of them."""

    _samples: dict[str, deque[_Sample]] = field(default_factory=dict)

    def look(self, batches: Iterable[Batch], now: float) -> None:
        """Note what these have done, and forget all others; `now` in monotonic seconds."""
        before, self._samples = self._samples, {}
        for batch in batches:
            samples = before.get(batch.id) or deque()
            self._samples[batch.id] = samples
            if batch.paused_at is not None:
                samples.clear()
            elif not samples or now - samples[-1].at >= SAMPLE_SECONDS:
                ended = batch.completed + batch.failed
                samples.append(_Sample(now, batch.completion_tokens, ended))
            while samples and now - samples[0].at > WINDOW_SECONDS:
                samples.popleft()

    def speed(self, id_: str) -> BatchSpeed | None:
        """The speed of this batch; None: it is not known yet."""
        samples = self._samples.get(id_)
        if not samples or len(samples) < 2:
            return None
        first, last = samples[0], samples[-1]
        seconds = last.at - first.at
        return BatchSpeed(
            (last.tokens - first.tokens) / seconds, (last.lines - first.lines) / seconds
        )


class Ahead(NamedTuple):
    """What a batch has before it."""

    starts_at: float | None = None  # Unix time; None: unknown, or it runs
    prefill_tps: float = 0.0  # prompt tokens a second of its nodes together; 0: none is up
    decode_tps: float = 0.0  # tokens a second that they write together


NOTHING_AHEAD = Ahead()


def progress_of(
    batch: Batch,
    left: WorkLeft,
    speed: BatchSpeed | None,
    price: float | None,
    now: float,
    ahead: Ahead = NOTHING_AHEAD,
) -> BatchProgress:
    """How far the batch is.

    `price`: the mean cost of a token of its model, as far as known; `now`: Unix time.
    """
    lines = left.waiting + left.running
    if batch.state.ended or not lines:
        return BatchProgress(
            cost=batch.cost, expected_cost=batch.cost if batch.state.ended else None
        )
    tokens = _completion_tokens_left(batch, left)
    seconds: float | None = None
    by: Reckoning | None = None
    if batch.paused_at is not None:
        pass  # Nobody knows when it is resumed.
    elif speed is not None and speed.tokens > 0 and tokens > 0:
        seconds, by = tokens / speed.tokens, "speed"
    elif speed is not None and speed.lines > 0:
        seconds, by = lines / speed.lines, "speed"
    elif ahead.prefill_tps > 0 and ahead.decode_tps > 0:
        seconds = left.prompt_tokens / ahead.prefill_tps + tokens / ahead.decode_tps
        by = "nodes"
    begins = max(now, ahead.starts_at or 0.0)
    expected_end = None if seconds is None else begins + seconds
    done = batch.prompt_tokens + batch.completion_tokens
    mean = batch.cost / done if done and batch.cost > 0 else price
    expected_cost = None
    if mean is not None and batch.in_progress_at is not None:
        expected_cost = batch.cost + mean * (left.prompt_tokens + tokens)
    tokens_per_second = None if speed is None else speed.tokens
    return BatchProgress(
        left.waiting, left.running, tokens_per_second, expected_end, batch.cost, expected_cost,
        ahead.starts_at, by,
    )  # fmt: skip


def _completion_tokens_left(batch: Batch, left: WorkLeft) -> float:
    """What the lines that have not ended will probably generate."""
    lines = left.waiting + left.running
    named = left.max_tokens / lines
    if not batch.completed:
        return lines * (named or DEFAULT_COMPLETION_TOKENS)
    mean = batch.completion_tokens / batch.completed
    return lines * (min(mean, named) if named else mean)
