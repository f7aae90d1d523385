"""Copies a whole store to an empty place: into another file, or into the other kind of database.

The source is read in one transaction, so that all rows are of one moment although a gateway goes on
writing (SQLite in WAL mode, PostgreSQL by `REPEATABLE READ`). Rows go over in steps, and memory
stays small. Each row that was read is counted and goes into a digest, which does not depend on the
order of the rows or the kind of database; then the copy is read, and must have the same. Only then
it appears: PostgreSQL's tables are committed, and SQLite's file gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Column, Connection, Table, func, insert, inspect, select, update
from sqlalchemy.exc import DBAPIError

from gateway import __version__
from gateway.store import database
from gateway.store.database import THIS_PROGRAM, StoreLocation
from gateway.store.failures import StoreCorrupt, StoreError, store_error
from gateway.store.schema import OLDEST_LEVEL, audit, batches, files, levels, metadata, processes

RESTORED = "restored"  # the `pause_reason` of a batch that was not at its end
STEP_ROWS = 1000  # rows that are in memory at one time
LONGEST_SECONDS = 7 * 86_400  # seconds that a statement of PostgreSQL may take
# Seconds since its last sign of life within which a gateway is taken to be at work.
LIVING_SECONDS = 30.0
_FILES_BESIDE = ("-wal", "-shm", "-journal")  # SQLite's, of a database of that name
_CACHE = "cache_size = -65536"  # KiB of SQLite's pages while a copy is written, for its indexes


@dataclass(frozen=True, slots=True)
class CopiedStore:
    """What was copied, and is in the copy."""

    level: int  # of the source's tables; the copy has this program's
    tables: dict[str, int]  # rows by table
    digest: str  # of all rows, as the source has them
    paused_batches: int  # batches that were not at their end, and are paused in the copy
    folders: dict[str, int]  # files of callers, and unfinished batches, by the folder's id
    used_by: str | None  # the gateway that was at work on the source, in words


def copy_store(
    source: StoreLocation,
    target: StoreLocation,
    *,
    pause_batches: bool,
    on_rows: Callable[[str, int, int], None] = lambda _table, _done, _total: None,
    now: Callable[[], float] = time.time,
) -> CopiedStore:
    """Copy the store at `source` to `target`, where there is none yet.

    `on_rows` is told how many rows of how many are copied, and of which table the last were.
    Raises: StoreError, which names the place; OSError.
    """
    with _opened(source, write=False) as old:
        level = _checked_level(old, source)
        columns = dict(_columns_of(old))
        counts = [old.scalar(select(func.count()).select_from(table)) for table in columns]
        total = sum(number or 0 for number in counts)
        folders, used_by = _folders(old), _living_gateway(old, now())
        new_store = _new_database if target.path is None else _new_file
        done, read = 0, {table: _Tally() for table in columns}
        with new_store(target, now()) as new:
            for table, some in columns.items():
                names = [column.key for column in some]
                for rows in _steps(old, source, some):
                    read[table].add(rows)
                    values = [dict(zip(names, row, strict=True)) for row in rows]
                    with _told(target, table.name):
                        new.execute(insert(table), values)
                    done += len(rows)
                    on_rows(table.name, done, total)
            on_rows("checking the copy", done, total)
            for table, some in columns.items():
                written = _Tally()
                for rows in _steps(new, target, some):
                    written.add(rows)
                if written != read[table]:
                    raise StoreError(
                        f"the table {table.name} differs from what was written",
                        "look for errors of its disk, and copy again",
                    )
            _go_on_numbering(new)
            paused = 0
            if pause_batches:  # Those that are not at their end, whatever they were paused for.
                unfinished = update(batches).where(batches.c.ended_at.is_(None))
                unfinished = unfinished.values(paused_at=now(), pause_reason=RESTORED)
                paused = new.execute(unfinished).rowcount
    lines = sorted(f"{table.name} {tally}\n" for table, tally in read.items() if tally.rows)
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    rows_of = {table.name: tally.rows for table, tally in read.items()}
    return CopiedStore(level, rows_of, digest, paused, folders, used_by)


def _living_gateway(connection: Connection, now: float) -> str | None:
    """A gateway that is at work on the store, in words; None: no sign of one."""
    recent = processes.c.seen_at > now - LIVING_SECONDS, processes.c.seen_at < now + LIVING_SECONDS
    row = connection.execute(select(processes.c.host, processes.c.pid).where(*recent)).first()
    return None if row is None else f"a gateway on {row[0].partition(' ')[0]} (process {row[1]})"


# The source.


def _checked_level(connection: Connection, source: StoreLocation) -> int:
    """The level of the source, whose file is whole. Raises: StoreError."""
    if source.path is not None:
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if found != "ok":
            raise StoreCorrupt(f"SQLite says: {found}", "")
    if database.store_level(connection) is None:
        raise StoreError("it holds no store", "name the file or the database of a gateway")
    level = database.check_level(connection, THIS_PROGRAM)
    made_by = connection.scalar(select(levels.c.program))
    if not OLDEST_LEVEL <= level <= THIS_PROGRAM.level:
        raise StoreError(
            f"its tables have the level {level}, of version {made_by}, of which something would be "
            f"left out: this one ({__version__}) copies {OLDEST_LEVEL} to {THIS_PROGRAM.level}",
            f"use the command of version {made_by}",
        )
    return level


def _columns_of(connection: Connection) -> Iterator[tuple[Table, Sequence[Column[Any]]]]:
    """The tables to copy, each with the columns that the source has: an older one has fewer."""
    found = inspect(connection)
    there = set(found.get_table_names())
    for table in metadata.sorted_tables:
        if table is not levels and table.name in there:
            names = {column["name"] for column in found.get_columns(table.name)}
            yield table, [column for column in table.columns if column.name in names]


def _folders(connection: Connection) -> dict[str, int]:
    """How many files and unfinished batches there are, by the id of their folder."""
    found: dict[str, int] = {}
    for table, open_ones in ((files, files.c.deleted_at), (batches, batches.c.ended_at)):
        asked = select(table.c.folder, func.count()).where(open_ones.is_(None))
        for folder, number in connection.execute(asked.group_by(table.c.folder)):
            found[folder] = found.get(folder, 0) + number
    return found


def _steps(
    connection: Connection, location: StoreLocation, columns: Sequence[Column[Any]]
) -> Iterator[Sequence[Sequence[Any]]]:
    with _told(location, columns[0].table.name):
        found = connection.execute(select(*columns), execution_options={"yield_per": STEP_ROWS})
        yield from found.partitions()


@dataclass(slots=True)
class _Tally:
    """What a table holds: so many rows, and the sum of their digests."""

    rows: int = 0
    total: int = 0

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        encode = msgspec.json.Encoder().encode
        for row in rows:
            self.rows += 1
            values = list(row)
            # A store of a lower level lacks the last columns, which are empty in its copy.
            while values and values[-1] is None:
                values.pop()
            digest = hashlib.blake2b(encode(values), digest_size=32).digest()
            self.total = (self.total + int.from_bytes(digest)) % (1 << 256)

    def __str__(self) -> str:
        return f"{self.rows} {self.total:064x}"


# The copy.


@contextlib.contextmanager
def _new_file(target: StoreLocation, now: float) -> Iterator[Connection]:
    """A new SQLite store in a transaction; its file gets its name at the end.

    The file is its owner's alone, and root's command gives it to the owner of the folder.
    """
    path = target.path
    assert path is not None
    _check_no_file(path, now)
    if not path.parent.is_dir():
        raise _PlacedError(f"there is no folder {path.parent}", "make it")
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with _opened(database.locate_store(f"sqlite:///{part}", part), write=True) as connection:
            if os.geteuid() == 0:
                owner = path.parent.stat()
                os.chown(part, owner.st_uid, owner.st_gid, follow_symlinks=False)
            database.make_tables(connection, THIS_PROGRAM, now)
            yield connection
        _check_no_file(path, now)
        part.rename(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        os.fsync(folder)
        os.close(folder)
    finally:
        part.unlink(missing_ok=True)


def _check_no_file(path: Path, now: float) -> None:
    """Raises: StoreError, if there is something already."""
    for one in (path, *(path.with_name(f"{path.name}{end}") for end in _FILES_BESIDE)):
        if os.path.lexists(one):
            user, old = None, database.locate_store(f"sqlite:///{path}", path)
            with contextlib.suppress(StoreError), _opened(old, write=False) as connection:
                user = _living_gateway(connection, now)
            raise _PlacedError(
                f"{one} is there already" + (f", and {user} uses it" if user else ""),
                f"name another place; or stop the gateway, and move {path.name} with its -wal and "
                "-shm away"
                if path.exists()
                else "move it away: it belongs to a store that was here",
            )


@contextlib.contextmanager
def _new_database(target: StoreLocation, now: float) -> Iterator[Connection]:
    """A store in an empty database of PostgreSQL, which others see at the end."""
    with _opened(target, write=True) as connection:
        if not database.make_tables(connection, THIS_PROGRAM, now):
            user = _living_gateway(connection, now)
            raise StoreError(
                "it holds a store already" + (f", and {user} uses it" if user else ""),
                "stop the gateway, and name an empty database (CREATE DATABASE makes one)",
            )
        yield connection


def _go_on_numbering(connection: Connection) -> None:
    """Let PostgreSQL number new rows of the audit log from behind those that were copied."""
    last = connection.scalar(select(func.max(audit.c.id)))
    if last is not None and connection.dialect.name == "postgresql":
        sequence = func.pg_get_serial_sequence(audit.name, audit.c.id.name)
        connection.execute(select(func.setval(sequence, last)))


# Both.


@contextlib.contextmanager
def _opened(location: StoreLocation, *, write: bool) -> Iterator[Connection]:
    """A connection in a transaction. Its errors, and those inside that name no place, name this."""
    if not write and location.path is not None and not os.access(location.path, os.R_OK):
        why = "is not there, or this user may not read it"
        raise StoreError(f"{location.path} {why}", "name another, or run this as its owner (sudo)")
    with _told(location):
        connection = database.connect(location, lambda _: None, read_only=not write)
    try:
        if write and location.path is not None:
            # Without files beside it: what breaks off is thrown away.
            for setting in ("journal_mode = MEMORY", _CACHE):
                connection.connection.cursor().execute(f"PRAGMA {setting}")
        with (
            _told(location),
            database.transaction(connection, write=write, seconds=LONGEST_SECONDS),
        ):
            yield connection
    finally:
        database.disconnect(connection)


@contextlib.contextmanager
def _told(location: StoreLocation, table: str | None = None) -> Iterator[None]:
    """Turn the errors of a database into those of the store, which name the place.

    Of a statement that fails for its values only the first line is told, which has none of them.
    """
    try:
        yield
    except _PlacedError:
        raise
    except (StoreError, DBAPIError, sqlite3.Error) as error:
        problem = store_error(error)
        if problem is None:
            said = str(getattr(error, "orig", error)).strip().partition("\n")[0]
            problem = StoreError(f"{table or 'it'} is refused: {said}", "mend the row or the table")
        remedy = problem.remedy
        if isinstance(problem, StoreCorrupt):
            remedy = "take another backup; sqlite3's .recover saves what can be read"
        raise _PlacedError(f"{location.shown}: {problem.message}", remedy) from None


class _PlacedError(StoreError):
    """An error that names its place."""
