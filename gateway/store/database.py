"""Where the store is and how it is opened: the URL, SQLite's file, PostgreSQL's limits, the level.

A store has a level, that of the newest program that has opened it. Every program knows its own,
`SCHEMA_LEVEL`. A program that opens an older store adds what its tables lack, under a lock; one
below `OLDEST_LEVEL` it refuses. It uses a newer one as it is, if the store says that programs of
this level still can (`needed_level`); else it refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from sqlalchemy import (
    URL,
    Column,
    ColumnElement,
    Connection,
    MetaData,
    Row,
    Select,
    Table,
    Update,
    create_engine,
    delete,
    event,
    insert,
    inspect,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateColumn

from gateway import __version__
from gateway.config.stored import masked_store_url
from gateway.store.failures import StoreGone, StoreTooNew, StoreTooOld, store_error
from gateway.store.schema import NEEDED_LEVEL, OLDEST_LEVEL, SCHEMA_LEVEL, levels, metadata

FILE_NAME = "gateway.db"  # the store's file in the state folder, where the settings name no other
LOCK_SECONDS = 2.0  # seconds that a job waits for the lock of another process
# Seconds that PostgreSQL may work on one statement, unless its job may take longer.
STATEMENT_SECONDS = 10
_MIGRATION_LOCK = 0x6C67_7374_6F72  # number of PostgreSQL's advisory lock for migrations: `lgstor`
# Bytes to which SQLite cuts its WAL file once all of it is in the database.
_LARGEST_IDLE_WAL = 64 << 20
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """Where a store is."""

    url: URL
    path: Path | None  # SQLite's file; None: the store is PostgreSQL

    @property
    def shown(self) -> str:
        """The URL for people, its password masked."""
        if self.path is not None:
            return f"sqlite:///{self.path}"
        whole = self.url.set(drivername="postgresql").render_as_string(hide_password=False)
        return masked_store_url(whole)


def locate_store(url: str | None, state_folder: Path) -> StoreLocation:
    """The store of this `store.url`; None: SQLite's file in the state folder. Raises: ValueError.

    A relative path starts in the working folder.
    """
    if url is None:
        url = f"sqlite:///{state_folder / FILE_NAME}"
    if url.startswith("sqlite:///"):
        path = Path(url.removeprefix("sqlite:///")).absolute()
        return StoreLocation(URL.create("sqlite", database=str(path)), path)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ValueError("it is no URL") from None
    if parsed.get_backend_name() not in {"postgresql", "postgres"}:
        raise ValueError("it must begin with sqlite:/// or postgresql://")
    return StoreLocation(parsed.set(drivername="postgresql+psycopg"), None)


@dataclass(frozen=True, slots=True)
class Program:
    """What a program knows of the tables."""

    level: int
    needed_level: int = NEEDED_LEVEL  # the lowest level of a program that can use its tables
    tables: MetaData = metadata


THIS_PROGRAM = Program(SCHEMA_LEVEL)


def connect(
    location: StoreLocation, on_connect: Callable[[Any], None], *, read_only: bool = False
) -> Connection:
    """Connect; nothing is read yet. Raises: StoreError, DBAPIError, OSError.

    `on_connect` gets the driver's connection before anything is sent over it. `read_only`: leave
    SQLite's settings as they are, and make no file.
    """
    url, own_file = location.url, None if read_only else location.path
    if location.path is None:
        arguments = {k: v for k, v in _POSTGRES_LIMITS.items() if k not in location.url.query}
    else:
        # `isolation_level` None: Python begins no transactions, `transaction` does.
        arguments = {"timeout": LOCK_SECONDS, "isolation_level": None}
        if read_only:
            # Not `ro`: who closes it last could not remove its log.
            there = {"mode": "rw", "uri": "true"}
            url = URL.create("sqlite", database=location.path.as_uri(), query=there)
    engine = create_engine(url, poolclass=NullPool, connect_args=arguments)

    @event.listens_for(engine, "do_connect")
    def _connect(dialect: Any, _record: Any, args: Any, parameters: Any) -> Any:
        made = dialect.connect(*args, **parameters)
        on_connect(made)
        return made

    if own_file is not None:
        _create_file(own_file)
    connection = engine.connect()
    try:
        if location.path is None:
            with connection.begin():
                for name, value in _POSTGRES_SESSION.items():
                    connection.exec_driver_sql(f"SET {name} = {value}")
        elif own_file is not None:
            _set_up_sqlite(connection)
    except BaseException:
        disconnect(connection)
        raise
    return connection


def disconnect(connection: Connection) -> None:
    """Close it, whatever its state."""
    # A connection that is lost may fail to end its transaction.
    with contextlib.suppress(Exception):
        connection.close()


def _set_up_sqlite(connection: Connection) -> None:
    execute = connection.connection.cursor().execute
    # Before anything is written into a new file: later only a rewrite of the file changes it. Then
    # retention can give freed pages back to the file system a few at a time. In a file that has
    # pages it would wait for the lock of another process, and change nothing.
    if execute("PRAGMA page_count").fetchone() == (0,):
        execute("PRAGMA auto_vacuum = INCREMENTAL")
    mode = execute("PRAGMA journal_mode = WAL").fetchone()
    # In WAL mode NORMAL loses at most the last commits, and only when the machine loses its power:
    # a process that is killed loses nothing. It saves a wait for the disk at every commit. Where
    # WAL is impossible (network file systems), NORMAL could damage the database.
    in_wal = mode is not None and mode[0] == "wal"
    execute(f"PRAGMA synchronous = {'NORMAL' if in_wal else 'FULL'}")
    execute("PRAGMA foreign_keys = ON")
    execute("PRAGMA trusted_schema = OFF")
    execute(f"PRAGMA journal_size_limit = {_LARGEST_IDLE_WAL}")


def _create_file(path: Path) -> None:
    """Make SQLite's file, for its owner alone; SQLite gives its other files the same mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        # A backup that was copied back, perhaps. A group may be let in on purpose; all others not.
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) and mode & 0o007:
            with contextlib.suppress(OSError):
                path.chmod(stat.S_IMODE(mode) & ~0o007)


def never_had_keys(location: StoreLocation) -> bool:
    """Whether no key was ever stored there: SQLite's file is missing, or holds none.

    A start on a full disk leaves a file without tables. False if that can't be told. Nothing is
    written, so a read-only file system can be asked, too.
    """
    path = location.path
    if path is None:
        return False
    try:
        logs = [path.with_name(f"{path.name}{end}") for end in ("-wal", "-journal")]
        if any(log.exists() and log.stat().st_size for log in logs):
            return False
        # A link that leads nowhere is the sign of a store: its file system is not mounted, perhaps.
        if not os.path.lexists(path):
            return True
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        # Immutable: without locks and without other files, which a full disk has no room for.
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as found:
            tables = {name for (name,) in found.execute("SELECT name FROM sqlite_master")}
            if "keys" not in tables:
                return not tables
            return found.execute("SELECT id FROM keys LIMIT 1").fetchone() is None
    except (OSError, sqlite3.Error):
        return False


class SqliteFiles:
    """The files of an open SQLite database, by their inodes.

    SQLite goes on with a file that was moved, removed or replaced, and does not notice. Worse, it
    would apply the write-ahead log of the former database to one that was put in its place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = path.with_name(f"{path.name}-wal")
        self._inode = _inode(path)
        self._log_inode = _inode(self._log)

    def are_in_place(self) -> bool:
        """Whether the path still leads to the open file."""
        if self._log_inode is None:
            # SQLite makes it with the first write.
            self._log_inode = _inode(self._log)
        return _inode(self.path) == self._inode

    def remove_stale_log(self) -> None:
        """Remove the log, once the database is closed, if another has taken its place."""
        replaced = not self.are_in_place()
        if replaced and self._log_inode is not None and _inode(self._log) == self._log_inode:
            self._log.unlink()
            self._log.with_name(f"{self.path.name}-shm").unlink(missing_ok=True)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - for every job; `Path.stat` takes twice as long
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def empty_log(connection: Connection) -> None:
    """Bring what SQLite's write-ahead log holds into the database file, where that is possible."""
    if connection.dialect.name == "sqlite":
        with contextlib.suppress(Exception):
            connection.connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")


def act_as_owner(path: Path) -> None:
    """Let this thread, if it is root's, touch files as the owner of the file's folder.

    Otherwise root's commands would leave files in the folder of a service that the service can't
    open, and follow whatever its user has put there.
    """
    if os.geteuid() != 0 or not hasattr(os, "setresuid"):
        return
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    owner = folder.stat()
    if owner.st_uid == 0:
        return
    # A folder's owner may not read the libraries of a Python that is root's alone: import what the
    # making of tables imports.
    with create_engine("sqlite://", poolclass=NullPool).begin() as connection:
        store_level(connection)
        metadata.create_all(connection)
    # Of this thread alone (setfsuid(2)); it also takes root's power over files from it.
    libc = ctypes.CDLL(None)
    libc.setfsgid(owner.st_gid)
    libc.setfsuid(owner.st_uid)
    try:
        folder.stat()
    except PermissionError:
        # Its owner can't even reach it, as in a container whose root has it in a folder of its own.
        libc.setfsuid(0)
        libc.setfsgid(0)


# Where the URL says nothing else.
_POSTGRES_LIMITS: dict[str, Any] = {
    "connect_timeout": 5,  # seconds to accept a connection
    # A server whose host has vanished is noticed after some ten seconds.
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "llama-gateway",
    # PgBouncer in transaction mode may give each transaction another connection of the server.
    "prepare_threshold": None,
}


# The server frees what a gateway holds locked that is stopped, or has vanished. In the midst of a
# pipeline, where it waits for the next statement and no other limit holds, TCP alone tells.
_POSTGRES_SESSION = {
    "statement_timeout": STATEMENT_SECONDS * 1000,
    "lock_timeout": int(LOCK_SECONDS * 1000),
    "idle_in_transaction_session_timeout": STATEMENT_SECONDS * 1000,
    "tcp_keepalives_idle": 5,
    "tcp_keepalives_interval": 2,
    "tcp_keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


@contextlib.contextmanager
def transaction(
    connection: Connection, *, write: bool = True, seconds: float = STATEMENT_SECONDS
) -> Iterator[None]:
    """Run the block in a transaction of its own.

    `seconds` limits PostgreSQL's statements and, where it is longer than usual, the pauses between.

    SQLite takes its write lock at the beginning: a transaction that reads first and writes later
    fails at once, without waiting, if another process has written in between. All statements of a
    transaction that only reads see one state of the store.
    """
    with connection.begin():
        if connection.dialect.name == "sqlite":
            sqlite_driver(connection).execute("BEGIN IMMEDIATE" if write else "BEGIN")
        else:
            if not write:
                # By default each statement sees what was committed before it began.
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            if seconds > STATEMENT_SECONDS:
                for limit in ("statement_timeout", "idle_in_transaction_session_timeout"):
                    connection.exec_driver_sql(f"SET LOCAL {limit} = {int(seconds * 1000)}")
        yield


def insert_for(connection: Connection) -> Any:
    """`insert` with `on_conflict_…`, which both databases have alike."""
    return postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert


class Rows(Generic[R]):
    """The rows of a table as objects of a dataclass, whose fields are named as columns are.

    `enums`: fields that are members of one; `texts`: fields that the table has as JSON.
    """

    def __init__(
        self, kind: type[R], table: Table, enums: Mapping[str, type[Enum]], *texts: str
    ) -> None:
        self._kind, self._enums, self._texts = kind, enums, texts
        self._names = tuple(one.name for one in fields(cast("Any", kind)))
        self.columns: tuple[Column[Any], ...] = tuple(table.c[name] for name in self._names)

    def where(self, *conditions: ColumnElement[bool]) -> Select[Any]:
        """Asks for the rows of these conditions."""
        return select(*self.columns).where(*conditions)

    def all(self, connection: Connection, asked: Select[Any]) -> list[R]:
        """The rows that were asked for."""
        return [self._made(row) for row in connection.execute(asked)]

    def one(self, connection: Connection, *conditions: ColumnElement[bool]) -> R | None:
        """The only row of these conditions."""
        return next(iter(self.all(connection, self.where(*conditions))), None)

    def changed(self, connection: Connection, changing: Update) -> list[R]:
        """Change rows, and return them."""
        return [self._made(row) for row in connection.execute(changing.returning(*self.columns))]

    def values(self, one: R) -> dict[str, Any]:
        """What the table gets."""
        values = {name: getattr(one, name) for name in self._names}
        for name in self._enums:
            values[name] = values[name].value
        for name in self._texts:
            if values[name] is not None:
                values[name] = json.dumps(values[name], ensure_ascii=False)
        return values

    def _made(self, row: Row[Any]) -> R:
        values: dict[str, Any] = dict(zip(self._names, row, strict=True))
        for name, enum in self._enums.items():
            values[name] = enum(values[name])
        for name in self._texts:
            if values[name] is not None:
                values[name] = json.loads(values[name])
        return self._kind(**values)


def sqlite_driver(connection: Connection) -> sqlite3.Connection:
    """Python's own connection to SQLite, for the few statements of each job and each row.

    SQLAlchemy takes several times the instructions of such a statement.
    """
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def data_version(connection: Connection) -> int | None:
    """A number that changes when another connection has committed; None: the database has none."""
    if connection.dialect.name != "sqlite":
        return None
    (number,) = sqlite_driver(connection).execute("PRAGMA data_version").fetchone()
    return int(number)


def store_level(connection: Connection) -> int | None:
    """The store's level; None: it has no tables yet. In a transaction."""
    if not inspect(connection).has_table(levels.name):
        return None
    return connection.execute(select(levels.c.level)).scalar()


def check_level(connection: Connection, program: Program) -> int:
    """The store's level, in a transaction. Raises: StoreTooNew; StoreGone if it has none."""
    try:
        if connection.dialect.name == "sqlite":
            row = sqlite_driver(connection).execute(_LEVEL).fetchone()
        else:
            row = connection.exec_driver_sql(_LEVEL).one_or_none()
    except (DBAPIError, sqlite3.Error) as error:
        if store_error(error) is not None:
            raise
        row = None
    if row is None:
        raise StoreGone("the store has lost its tables", "put a backup in its place")
    level, needed_level, version = row
    if needed_level > program.level:
        raise StoreTooNew(
            f"version {version} has changed the store for versions that know its level "
            f"{needed_level}; this one ({__version__}) knows {program.level}",
            f"run version {version} or later, or put back a backup from before",
        )
    return int(level)


_LEVEL = "SELECT level, needed_level, program FROM store_levels"


def try_write(connection: Connection) -> None:
    """Write what is there already, in a transaction, to see whether the store can be written."""
    connection.execute(update(levels).values(id=levels.c.id))


def make_tables(connection: Connection, program: Program, now: float) -> bool:
    """Make the tables, or bring them to the program's level; returns whether there were none.

    In a transaction, under a lock: of several processes that start at once, one does it. Raises:
    StoreError, DBAPIError.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
    level = store_level(connection)
    if level is not None and level >= program.level:
        return False
    if level is not None and level < OLDEST_LEVEL:
        raise StoreTooOld(
            f"the store has the level {level}, of a version before 0.1.0; this one "
            f"({__version__}) knows {OLDEST_LEVEL} to {program.level}",
            "start version 0.1.0 (commit 925fef89) on it once, or put a newer one in its place",
        )
    if level is not None:
        _add_columns_and_indexes(connection, program.tables)
    program.tables.create_all(connection, checkfirst=level is not None)
    connection.execute(delete(levels))
    made = {"id": 1, "level": program.level, "needed_level": program.needed_level}
    connection.execute(insert(levels).values(made | {"program": __version__, "changed_at": now}))
    return level is None


def _add_columns_and_indexes(connection: Connection, tables: MetaData) -> None:
    found, written = inspect(connection), connection.dialect.identifier_preparer
    for table in tables.sorted_tables:
        if not found.has_table(table.name):
            continue
        columns = {one["name"] for one in found.get_columns(table.name)}
        for column in table.columns:
            if column.name not in columns:
                name, added = written.format_table(table), CreateColumn(column)
                text = added.compile(dialect=connection.dialect)
                connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN {text}")
        indexes = {one["name"] for one in found.get_indexes(table.name)}
        for index in table.indexes:
            if index.name not in indexes:
                index.create(connection)
