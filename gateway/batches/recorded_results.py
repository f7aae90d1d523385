"""Records the results of stored requests, each once.

The job returns which results count, and their usage goes into the ledger in the same transaction
(`Ledger.write_with`). A result of a request that another process has claimed meanwhile, or that
was ended, is not recorded: that execution is the operator's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, bindparam, select, update

from gateway.batches.request_rows import COUNTED_AS, chunks, lock_batches
from gateway.batches.states import RequestState
from gateway.store.schema import batches, stored_requests
from gateway.usage.ledger import ROW_COLUMNS, UsageRow

_ROW: Final = stored_requests.c

_COUNTED: Final = tuple(
    (ROW_COLUMNS.index(name), batches.c[name])
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "cost")
)
"""The places in a row of the ledger that a batch sums up, and its columns."""


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """The result of one stored request: `length` bytes of the folder's file `place`."""

    id: str
    """Of the stored request."""
    state: RequestState
    status: int | None = None
    """The HTTP status; None: it was not answered."""
    error_code: str | None = None
    place: str | None = None
    """None: there is no result to be read."""
    offset: int = 0
    length: int = 0
    usage: UsageRow | None = None
    """The row for the ledger; None: it was not admitted."""


@dataclass(slots=True)
class _Sums:
    """What is added to a batch."""

    values: dict[Any, float] = field(default_factory=dict)

    def add(self, column: Any, number: float) -> None:
        self.values[column] = self.values.get(column, 0) + number


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
    sums: dict[str, _Sums] = {}
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
                    _add(sums.setdefault(row.batch, _Sums()), result)
            elif not _is_same(row, result):
                continue
            recorded.append(row.id)
    if new:
        connection.execute(_RECORDED, new)
    for batch in sorted(sums):
        values = {column: column + number for column, number in sums[batch].values.items()}
        connection.execute(update(batches).where(batches.c.id == batch).values(values))
    return recorded


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


def _is_same(row: Any, result: RecordedResult) -> bool:
    """Whether the row, which has ended, has this result."""
    place = None if result.place is None else result.offset
    return (row.state, row.result_place, row.result_offset) == (
        result.state.value, result.place, place,
    )  # fmt: skip


def _add(sums: _Sums, result: RecordedResult) -> None:
    sums.add(COUNTED_AS[result.state], 1)
    sums.add(batches.c.result_bytes, result.length)
    if result.usage is not None:
        for index, column in _COUNTED:
            sums.add(column, result.usage[index])
