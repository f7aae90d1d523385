"""What can be wrong with a store: one error for each cause, with its remedy.

A broken store never ends a request. The gateway serves on with the keys and limits that it knows,
keeps what it could not write within a bound, and writes it when the store is back.
"""

from __future__ import annotations

import sqlite3
from typing import ClassVar

from sqlalchemy.exc import DBAPIError


class Remedied(Exception):  # noqa: N818 - the errors below say of what
    """What can't be done now, and the remedy."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


class StoreError(Remedied):
    """The store can't do its work now."""

    state: ClassVar[str] = "unavailable"
    """The store's state while this holds, as `/admin/status` shows it."""
    ends_connection: ClassVar[bool] = True
    """Whether the store must be opened anew. Else it can still be read."""

    def copy(self) -> StoreError:
        """The same error, to be raised anew: an exception collects where it was raised."""
        return type(self)(self.message, self.remedy)


class StoreUnavailable(StoreError):  # noqa: N818 - named for what it says of the store
    """It does not answer, or can't be opened. Jobs that were under way may have been done."""


class StoreGone(StoreUnavailable):
    """The file was there, and has been removed or emptied."""

    state = "gone"


class StoreCorrupt(StoreError):  # noqa: N818 - as above
    """The file is damaged, or no database."""

    state = "corrupt"


class StoreTooNew(StoreError):  # noqa: N818 - as above
    """A newer version has changed the tables so that this one can't use them."""

    state = "too new"


class StoreTooOld(StoreError):  # noqa: N818 - as above
    """It was made before the first release, and this version can't bring its tables up to date."""

    state = "too old"


class StoreLocked(StoreError):  # noqa: N818 - as above
    """Another process holds it for too long."""

    state = "locked"
    ends_connection = False


class StoreReadOnly(StoreError):  # noqa: N818 - as above
    """It can't be written."""

    state = "read-only"
    ends_connection = False


class StoreFull(StoreError):  # noqa: N818 - as above
    """There is no room for more."""

    state = "full"
    ends_connection = False


_RESTORE = "stop its gateways, move it away, and 'llama-gateway store restore' a backup"
_WAITS = "the gateway serves on and tries again"
_NO_ROOM = "free space on its file system, raise the quota, or look for errors of the disk"

_HELD = "end the program that holds it locked (fuser shows it)"
_MAY_WRITE = "let the gateway's user write the file and its folder"
_NO_FOLDER = "make its folder, and let the gateway's user write into it"
_DISK = "look for errors of the disk in the system's log"

# Result codes. Extended ones come before those of the first byte.
_SQLITE: dict[int, tuple[type[StoreError], str]] = {
    sqlite3.SQLITE_FULL: (StoreFull, _NO_ROOM),
    # A quota or a limit on the size of files; ENOSPC has a code of its own.
    sqlite3.SQLITE_IOERR_WRITE: (StoreFull, _NO_ROOM),
    sqlite3.SQLITE_IOERR_SHMSIZE: (StoreFull, _NO_ROOM),
    sqlite3.SQLITE_BUSY: (StoreLocked, _HELD),
    sqlite3.SQLITE_LOCKED: (StoreLocked, _HELD),
    sqlite3.SQLITE_PROTOCOL: (StoreLocked, _HELD),
    sqlite3.SQLITE_READONLY: (StoreReadOnly, _MAY_WRITE),
    sqlite3.SQLITE_PERM: (StoreReadOnly, _MAY_WRITE),
    sqlite3.SQLITE_READONLY_DBMOVED: (StoreGone, "put it back"),
    sqlite3.SQLITE_CORRUPT: (StoreCorrupt, _RESTORE),
    sqlite3.SQLITE_NOTADB: (StoreCorrupt, _RESTORE),
    sqlite3.SQLITE_CANTOPEN: (StoreUnavailable, _NO_FOLDER),
    sqlite3.SQLITE_IOERR: (StoreUnavailable, _DISK),
    sqlite3.SQLITE_INTERRUPT: (StoreUnavailable, _WAITS),
    sqlite3.SQLITE_NOMEM: (StoreUnavailable, "give the gateway more memory"),
}

# Classes of SQLSTATE (PostgreSQL's documentation, appendix A), and some of their values.
_POSTGRES: tuple[tuple[str, type[StoreError], str], ...] = (
    ("53100", StoreFull, "free space on the file system of the PostgreSQL server"),
    ("53", StoreUnavailable, "give the PostgreSQL server more memory or connections"),
    ("55P03", StoreLocked, "end the session that holds the lock (pg_stat_activity shows it)"),
    ("40", StoreLocked, _WAITS),
    ("25006", StoreReadOnly, "name the server that takes writes, not a standby"),
    ("42501", StoreReadOnly, "grant the role of store.url the right to write its tables"),
    ("28", StoreUnavailable, "correct the role and the password in store.url"),
    ("3D", StoreUnavailable, "create the database, or correct its name in store.url"),
    ("3F", StoreUnavailable, "create the schema, or correct the role's search_path"),
    ("57", StoreUnavailable, _WAITS),
    ("58", StoreUnavailable, "look into the log of the PostgreSQL server"),
    ("XX001", StoreCorrupt, "look into the log of the PostgreSQL server"),
    ("XX002", StoreCorrupt, "look into the log of the PostgreSQL server"),
    ("XX", StoreUnavailable, "look into the log of the PostgreSQL server"),
    ("08", StoreUnavailable, "see that the PostgreSQL server runs and can be reached"),
)


def store_error(error: Exception) -> StoreError | None:
    """What this error of a job says of the store; None: it is the job's own."""
    if isinstance(error, StoreError):
        return error
    original = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(original, sqlite3.Error):
        code = getattr(original, "sqlite_errorcode", None) or 0
        kind, remedy = _SQLITE.get(code) or _SQLITE.get(code & 0xFF) or (None, "")
        return None if kind is None else kind(f"SQLite says: {original}", remedy)
    # psycopg is imported only where the store is PostgreSQL.
    if type(original).__module__.startswith("psycopg"):
        lost = isinstance(error, DBAPIError) and error.connection_invalidated
        return _postgres_error(original, lost=lost)
    return None


def _postgres_error(error: BaseException | None, *, lost: bool) -> StoreError | None:
    state = getattr(error, "sqlstate", None) or ""
    # Further lines hold the statement, whose values may be a caller's.
    said = next(iter(str(error).strip().splitlines()), type(error).__name__)
    for prefix, kind, remedy in _POSTGRES:
        if state.startswith(prefix):
            return kind(f"PostgreSQL says: {said}", remedy)
    if lost or (not state and type(error).__name__ in {"OperationalError", "ConnectionTimeout"}):
        # What a server says to a new connection comes without its SQLSTATE.
        remedy = "see that the server runs and can be reached at the address of store.url"
        if "FATAL" in said:
            remedy = "correct the role, the password or the database in store.url"
        return StoreUnavailable(f"PostgreSQL does not answer: {said}", remedy)
    return None
