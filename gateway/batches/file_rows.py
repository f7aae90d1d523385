"""The rows of files in the store: one dataclass for a row, and the jobs that read and write them.

A job that changes rows raises the revision of the files first, so that of two processes one waits
for the other: limits hold for all of them together. Each may be done twice. A job that lets a batch
read a file does the same before it looks for the file (`raise_revision`, `find`): then the file
can't be deleted in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.batches.kept_bytes import Kept, kept_by
from gateway.store.schema import batches, files, revisions

FILES = "files"
"""Name of the revision that every change of a file raises."""

UPLOADED, PROCESSED = "uploaded", "processed"
"""States of a file: still growing, and complete."""

SortOrder = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a caller, complete in the folder under its id."""

    id: str
    owner: str
    name: str
    """As the caller named it."""
    purpose: str
    bytes: int
    sha256: str
    created_at: float
    """Unix time, as all times here."""
    expires_at: float | None
    folder: str
    """The id of the folder that holds it."""
    state: str = PROCESSED


class FilePage(NamedTuple):
    """Some files of a list, in its order."""

    files: list[StoredFile]
    has_more: bool


_COLUMNS = tuple(files.c[name] for name in StoredFile.__dataclass_fields__)


def visible(now: float) -> ColumnElement[bool]:
    """The condition of a file that its owner still has."""
    return and_(
        files.c.deleted_at.is_(None), or_(files.c.expires_at.is_(None), files.c.expires_at > now)
    )


def find(connection: Connection, owner: str, id_: str, now: float) -> StoredFile | None:
    """The owner's file."""
    asked = select(*_COLUMNS).where(files.c.id == id_, files.c.owner == owner, visible(now))
    row = connection.execute(asked).one_or_none()
    return None if row is None else _file_of(row)


@dataclass(frozen=True, slots=True)
class ReadPage:
    """A job of the store: a page of an owner's files."""

    owner: str
    now: float
    limit: int
    after: str | None = None
    """The last id of the page before."""
    order: SortOrder = "desc"
    purpose: str | None = None

    def __call__(self, connection: Connection) -> FilePage:
        """Run within the transaction of `connection`."""
        asked = select(*_COLUMNS).where(files.c.owner == self.owner, visible(self.now))
        if self.purpose is not None:
            asked = asked.where(files.c.purpose == self.purpose)
        # Ids grow with time.
        if self.after is not None:
            later = files.c.id > self.after
            asked = asked.where(later if self.order == "asc" else files.c.id < self.after)
        by = files.c.id.asc() if self.order == "asc" else files.c.id.desc()
        found = connection.execute(asked.order_by(by).limit(self.limit + 1)).all()
        return FilePage([_file_of(row) for row in found[: self.limit]], len(found) > self.limit)


@dataclass(frozen=True, slots=True)
class AddFile:
    """A job of the store: add a file, unless its owner would have more than it may.

    `most_bytes`: of all that it keeps. Returns None if it is added, else what the owner has.
    """

    file: StoredFile
    most_files: int
    most_bytes: int

    def __call__(self, connection: Connection) -> Kept | None:
        """Run within the transaction of `connection`."""
        raise_revision(connection)
        kept = kept_by(connection, self.file.owner, self.file.created_at)
        if kept.files + 1 > self.most_files or kept.bytes + self.file.bytes > self.most_bytes:
            known = connection.scalar(select(files.c.id).where(files.c.id == self.file.id))
            return None if known is not None else kept
        add(connection, self.file)
        return None


def add(connection: Connection, file: StoredFile) -> None:
    """Add a file whatever its owner has, such as the result of a batch; done again, nothing."""
    added = _insert_into(connection).values(**asdict(file))
    connection.execute(added.on_conflict_do_nothing(index_elements=[files.c.id]))


class Deleted(NamedTuple):
    """What became of a deletion."""

    file: StoredFile | None
    """None: the owner has no such file."""
    used_by_batch: str | None = None
    """The unfinished batch that still reads it, so that it stays."""


@dataclass(frozen=True, slots=True)
class DeleteFile:
    """A job of the store: take a file from its owner; its bytes are removed afterwards."""

    owner: str
    id: str
    now: float

    def __call__(self, connection: Connection) -> Deleted:
        """Run within the transaction of `connection`."""
        raise_revision(connection)
        found = find(connection, self.owner, self.id, self.now)
        if found is None:
            return Deleted(None)
        asked = select(batches.c.id).where(
            batches.c.input_file == self.id, batches.c.ended_at.is_(None)
        )
        batch = connection.scalar(asked.limit(1))
        if batch is not None:
            return Deleted(found, batch)
        connection.execute(update(files).where(files.c.id == self.id).values(deleted_at=self.now))
        return Deleted(found)


def take_due(connection: Connection, folder: str, now: float, limit: int) -> list[str]:
    """Ids of files of the folder whose bytes are to be removed: deleted or expired ones.

    An expired file stays while an unfinished batch reads it. From now on none can begin to.
    """
    raise_revision(connection)
    used = select(batches.c.input_file).where(
        batches.c.ended_at.is_(None), batches.c.input_file.is_not(None)
    )
    expired = and_(files.c.expires_at <= now, files.c.id.not_in(used))
    asked = select(files.c.id).where(
        files.c.folder == folder, or_(files.c.deleted_at.is_not(None), expired)
    )
    ids = list(connection.scalars(asked.limit(limit)))
    taken = update(files).where(files.c.id.in_(ids), files.c.deleted_at.is_(None))
    connection.execute(taken.values(deleted_at=now))
    return ids


def remove(connection: Connection, ids: Sequence[str]) -> None:
    """Remove the rows of files whose bytes are gone."""
    connection.execute(delete(files).where(files.c.id.in_(ids)))


def known(connection: Connection, ids: Sequence[str]) -> set[str]:
    """Those of the ids that have a row."""
    return set(connection.scalars(select(files.c.id).where(files.c.id.in_(ids))))


def raise_revision(connection: Connection) -> None:
    """Take the turn of the processes that add to what owners keep, until the transaction ends."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    raised = dialect.insert(revisions).values(name=FILES, number=1)
    connection.execute(
        raised.on_conflict_do_update(
            index_elements=[revisions.c.name], set_={"number": revisions.c.number + 1}
        )
    )


def _insert_into(connection: Connection) -> postgresql.Insert | sqlite.Insert:
    postgres = connection.dialect.name == "postgresql"
    return postgresql.insert(files) if postgres else sqlite.insert(files)


def _file_of(row: Row[Any]) -> StoredFile:
    # In the order of the fields.
    values: tuple[Any, ...] = tuple(row)
    return StoredFile(*values)
