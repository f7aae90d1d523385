"""The rows of requests in the background: responses and deferred requests, each alone.

The jobs of the store that add, end and remove them; each may be done twice. What they share with
the lines of batches is in `request_rows.py` and `claims.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sqlalchemy import Connection, delete, func, select, update

from gateway.batches.file_rows import raise_revision
from gateway.batches.kept_bytes import Kept, kept_by
from gateway.batches.request_rows import (
    COLUMNS,
    IS_RUNNING,
    IS_WAITING,
    StoredRow,
    add_rows,
    chunks,
    row_of,
)
from gateway.batches.states import RequestKind, RequestState
from gateway.store.schema import stored_requests

_ROW: Final = stored_requests.c

BACKGROUND_KINDS: Final = (RequestKind.RESPONSE, RequestKind.DEFERRED)

_IS_BACKGROUND = _ROW.kind.in_([kind.value for kind in BACKGROUND_KINDS])

EndListener = Callable[[Connection, StoredRow], None]
"""Called in the transaction in which a row ends, with the row as it is then."""


class WaitingUse(NamedTuple):
    """What one owner has that waits or runs."""

    number: int
    bytes: int


@dataclass(frozen=True, slots=True)
class AddBackground:
    """A job of the store: add a request, unless its owner would have more than it may.

    `most` requests of `most_bytes` may wait or run, and `most_kept` bytes be kept. Returns None if
    it is added, else what the owner has.
    """

    row: StoredRow
    most: int
    most_bytes: int
    most_kept: int

    def __call__(self, connection: Connection) -> WaitingUse | Kept | None:
        """Run within the transaction of `connection`."""
        row = self.row
        raise_revision(connection)
        if connection.scalar(select(_ROW.id).where(_ROW.id == row.id)) is not None:
            return None  # Done again.
        sums = select(func.count(), func.coalesce(func.sum(_ROW.length), 0)).where(
            _ROW.owner == row.owner,
            _ROW.folder == row.folder,
            _ROW.batch.is_(None),
            IS_WAITING | IS_RUNNING,
        )
        number, size = connection.execute(sums).one()
        if number + 1 > self.most or int(size) + row.length > self.most_bytes:
            return WaitingUse(number, int(size))
        kept = kept_by(connection, row.owner, row.created_at)
        if kept.bytes + row.length + (row.result_length or 0) > self.most_kept:
            return kept
        add_rows(connection, [row])
        return None


def find_background(
    connection: Connection, owner: str, id_: str, kind: RequestKind, now: float
) -> StoredRow | None:
    """The owner's request, unless its time is over."""
    asked = select(*COLUMNS).where(
        _ROW.id == id_, _ROW.owner == owner, _ROW.kind == kind.value, _ROW.keep_until > now
    )
    row = connection.execute(asked).one_or_none()
    return None if row is None else row_of(row)


@dataclass(frozen=True, slots=True)
class EndBackground:
    """A job of the store: end the owner's request if it waits or runs; returns it as it is then.

    Whoever runs it notices when it renews its claim.
    """

    owner: str
    id: str
    kind: RequestKind
    now: float
    keep_until: float
    """Of the request that has ended."""
    also: EndListener
    state: RequestState = RequestState.CANCELLED
    status: int | None = None
    error_code: str | None = None

    def __call__(self, connection: Connection) -> StoredRow | None:
        """Run within the transaction of `connection`."""
        ended = update(stored_requests).where(
            _ROW.id == self.id,
            _ROW.owner == self.owner,
            _ROW.kind == self.kind.value,
            IS_WAITING | IS_RUNNING,
        )
        values = {
            "state": self.state.value,
            "status": self.status,
            "error_code": self.error_code,
            "ended_at": self.now,
            "claimed_until": None,
            "keep_until": self.keep_until,
        }
        row = connection.execute(ended.values(values).returning(*COLUMNS)).one_or_none()
        if row is not None:
            found = row_of(row)
            self.also(connection, found)
            return found
        return find_background(connection, self.owner, self.id, self.kind, self.now)


def delete_background(
    connection: Connection, owner: str, id_: str, kind: RequestKind, now: float
) -> StoredRow | None:
    """Remove the owner's request, whatever its state; as it was. Its files are removed then."""
    found = find_background(connection, owner, id_, kind, now)
    if found is not None:
        connection.execute(delete(stored_requests).where(_ROW.id == id_, _ROW.owner == owner))
    return found


def due_background(connection: Connection, folder: str, now: float, limit: int) -> list[StoredRow]:
    """Requests of the folder that nobody may read any more, though their files are still there."""
    asked = select(*COLUMNS).where(
        _ROW.folder == folder, _ROW.keep_until <= now, _ROW.batch.is_(None), _IS_BACKGROUND
    )
    return [row_of(row) for row in connection.execute(asked.limit(limit))]


def remove_background(connection: Connection, ids: Sequence[str]) -> None:
    """Remove the rows of requests whose files are gone."""
    for some in chunks(ids):
        connection.execute(delete(stored_requests).where(_ROW.id.in_(some), _IS_BACKGROUND))


def known_places(connection: Connection, folder: str, places: Sequence[str]) -> set[str]:
    """Those of the folder's files that a request needs."""
    known: set[str] = set()
    alone = _ROW.folder == folder, _ROW.batch.is_(None)
    for some in chunks(places):
        for column in (_ROW.place, _ROW.result_place):
            known.update(connection.scalars(select(column).where(*alone, column.in_(some))))
    return known


def keep(connection: Connection, ids: Sequence[str], keep_until: float) -> list[StoredRow]:
    """Keep requests that have ended until then; returns them."""
    found: list[StoredRow] = []
    for some in chunks(ids):
        kept = update(stored_requests).where(_ROW.id.in_(some), _IS_BACKGROUND)
        changed = kept.values(keep_until=keep_until).returning(*COLUMNS)
        found += [row_of(row) for row in connection.execute(changed)]
    return found


@dataclass(frozen=True, slots=True)
class ExpireBackground:
    """A job of the store: end requests that wait and whose deadline is over; returns them."""

    folder: str
    now: float
    keep_seconds: Callable[[StoredRow], float]
    also: EndListener
    limit: int = 200

    def __call__(self, connection: Connection) -> list[StoredRow]:
        """Run within the transaction of `connection`."""
        late = select(_ROW.id).where(
            _ROW.folder == self.folder,
            _ROW.batch.is_(None),
            _ROW.deadline <= self.now,
            IS_WAITING,
            _IS_BACKGROUND,
        )
        ids = list(connection.scalars(late.limit(self.limit)))
        found: list[StoredRow] = []
        for some in chunks(ids):
            ended = update(stored_requests).where(_ROW.id.in_(some), IS_WAITING)
            values = {"state": RequestState.EXPIRED.value, "ended_at": self.now}
            found += [
                row_of(row) for row in connection.execute(ended.values(values).returning(*COLUMNS))
            ]
        for row in found:
            keep(connection, [row.id], self.now + self.keep_seconds(row))
            self.also(connection, row)
        return found


def waiting_before(connection: Connection, folder: str, created_at: float) -> int:
    """How many requests of the folder wait that came before."""
    asked = select(func.count()).where(
        _ROW.folder == folder, _ROW.batch.is_(None), IS_WAITING, _ROW.created_at < created_at
    )
    return connection.scalar(asked) or 0


def waiting_owners(
    connection: Connection, folder: str, now: float
) -> list[tuple[str, RequestKind]]:
    """Whose requests may run now, and of which kind."""
    asked = select(_ROW.owner, _ROW.kind).where(
        _ROW.folder == folder,
        _ROW.batch.is_(None),
        IS_WAITING,
        _ROW.not_before <= now,
        _IS_BACKGROUND,
    )
    return [(owner, RequestKind(kind)) for owner, kind in connection.execute(asked.distinct())]
