"""The tables of a cluster in the store: its members, and the row of its leadership.

The table of members says who belongs to it, and where each is reached. The leadership has a
connection of its own, so that no other job of the store can delay it. Each of its steps is one
statement in a transaction of its own, with time limits that hold for that transaction alone, so
that it works through pgbouncer in transaction mode: no session has a state, no statement is
prepared, no lock outlives the statement.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, select, update

from gateway.cluster.leadership import FIRST_ROW, TERM_SECONDS, Change, LeaderRow, parse_holder
from gateway.store.database import StoreLocation, act_as_owner, insert_for
from gateway.store.failures import StoreError, StoreUnavailable, store_error
from gateway.store.schema import leadership, members, processes
from gateway.store.store import DatabaseLink


class MemberRow(NamedTuple):
    """A member as the store has it."""

    name: str
    # The one that has registered last; no other one has this name. Empty: the member was removed.
    process: str
    generation: int  # counts the processes that have registered by this name
    address: str  # HOST:PORT for the other members
    version: str  # of its program

    @property
    def contender(self) -> str:
        """Its process, as it contends for the leadership."""
        return f"{self.name}/{self.process}"


def read_members(connection: Connection, cluster: str) -> list[MemberRow]:
    """All members of the cluster, by name; removed ones too."""
    wanted = select(*(members.c[name] for name in _COLUMNS)).where(members.c.cluster == cluster)
    return [MemberRow(*row) for row in connection.execute(wanted.order_by(members.c.member))]


def register(connection: Connection, cluster: str, own: MemberRow) -> list[MemberRow]:
    """Make this process its member's, over those that registered before; all members then.

    `own.generation`: the one that it has had, in a state of the database that is lost; else 0.
    """
    found = next((one for one in read_members(connection, cluster) if one.name == own.name), None)
    before = 0 if found is None else found.generation
    row = own._replace(generation=max(own.generation, before + 1))
    values = dict(zip(_COLUMNS, row, strict=True))
    keys = ["cluster", "member"]
    put = insert_for(connection)(members).values(cluster=cluster, **values)
    connection.execute(put.on_conflict_do_update(index_elements=keys, set_=values))
    return read_members(connection, cluster)


class StoredMember(NamedTuple):
    """A member, and what the store knows of its process."""

    row: MemberRow
    epoch: int | None  # in which it leads, or has led last; None: another one does
    seen_at: float | None  # its last sign of life, by its clock, Unix time; None: it has ended


def stored_members(connection: Connection, cluster: str) -> list[StoredMember]:
    """All members of the cluster, for operators."""
    row = leadership.c
    lead = connection.execute(select(row.holder, row.epoch).where(row.cluster == cluster)).first()
    holder, epoch = ("", 0) if lead is None else lead
    leading = parse_holder(holder)[0]
    signs = connection.execute(select(processes.c.id, processes.c.seen_at))
    seen = {process: seen_at for process, seen_at in signs}  # noqa: C416 - of rows, for mypy
    return [
        StoredMember(one, epoch if leading == one.contender else None, seen.get(one.process))
        for one in read_members(connection, cluster)
        if one.process
    ]


def remove(connection: Connection, cluster: str, name: str, process: str | None = None) -> bool:
    """Remove a member whose process has ended for good; False: there is none of this name.

    `process`: only if that is its process still. Its row stays: that one is missing may also be an
    old state of the database.
    """
    row = members.c
    of_process = row.process != "" if process is None else row.process == process
    gone = update(members).where(row.cluster == cluster, row.member == name, of_process)
    return connection.execute(gone.values(process="")).rowcount > 0


def read_sharers(connection: Connection, cluster: str) -> str:
    """The lists of those that share the slots without a leader, in JSON."""
    wanted = select(leadership.c.sharers).where(leadership.c.cluster == cluster)
    return connection.scalar(wanted) or "[]"


def write_sharers(
    connection: Connection, cluster: str, holder: str, epoch: int, sharers: str
) -> bool:
    """Replace these lists, as the leader of this epoch; False: another one has the leadership."""
    row = leadership.c
    own = row.cluster == cluster, row.holder == holder, row.epoch == epoch
    return connection.execute(update(leadership).where(*own).values(sharers=sharers)).rowcount > 0


_COLUMNS = ("member", "process", "generation", "address", "version")


# For both databases; PostgreSQL's driver writes its parameters in another way.
LOOK = "SELECT holder, epoch, counter FROM leadership WHERE cluster = :cluster"
FIRST = (
    "INSERT INTO leadership (cluster, holder, epoch, counter) "
    "VALUES (:cluster, :holder, :epoch, :counter) ON CONFLICT DO NOTHING"
)
_CHANGE = (
    "UPDATE leadership SET holder = :holder, epoch = :epoch, counter = :counter "
    "WHERE cluster = :cluster AND holder = :old_holder AND epoch = :old_epoch"
)
RENEW = f"{_CHANGE} RETURNING epoch"
CLAIM = f"{_CHANGE} AND counter = :old_counter RETURNING epoch"
_PARAMETER = re.compile(r":(\w+)")


def update_of(change: Change) -> tuple[str, dict[str, Any]]:
    """The one conditional update that does it, and its values but for the cluster's name."""
    values = {f"old_{name}": value for name, value in change.old._asdict().items()}
    return CLAIM if change.is_claim else RENEW, {**change.wanted._asdict(), **values}


class StoredLeadership:
    """A `Leadership` in the store, whose tables are there. One step at a time.

    `seconds`: the time that a step may take, from its connection to its answer.
    """

    def __init__(
        self, location: StoreLocation, cluster: str, *, seconds: float = TERM_SECONDS / 4
    ) -> None:
        self._location = location
        self._cluster = cluster
        self._seconds = seconds
        self._connection: Any = None  # psycopg's; SQLite's file is opened for each statement
        self._link = DatabaseLink(lambda: 0.0)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "leadership", self._begin)
        self._running: concurrent.futures.Future[Any] | None = None

    async def look(self) -> LeaderRow:
        """The row; made, where it is missing. Raises: StoreError."""
        found = await self._run(LOOK, {})
        if not found:
            await self._run(FIRST, FIRST_ROW._asdict())
            found = await self._run(LOOK, {})
        if not found:
            raise StoreUnavailable("the leadership's row is gone again", "see who deletes it")
        return LeaderRow(*found[0])

    async def change(self, change: Change) -> bool:
        """Do it; False: its condition does not hold. Raises: StoreError."""
        return bool(await self._run(*update_of(change)))

    async def close(self) -> None:
        """Close the connection."""
        self._link.cut()
        self._thread.submit(self._disconnect)
        self._thread.shutdown(wait=False)

    async def _run(self, sql: str, values: Mapping[str, Any]) -> list[Any]:
        """The rows that the statement gives. Raises: StoreError."""
        if self._running is not None and not self._running.done():
            raise self._silence()
        given = {**values, "cluster": self._cluster}
        self._running = running = self._thread.submit(self._attempt, sql, given)
        try:
            await asyncio.wait([asyncio.wrap_future(running)], timeout=self._seconds)
        finally:
            if not running.done():
                self._link.cut()
        if not running.done():
            raise self._silence()
        result = running.result()
        if isinstance(result, StoreError):
            raise result
        return result

    def _silence(self) -> StoreError:
        return StoreUnavailable(
            f"the store has not answered for {self._seconds:g} s",
            "see whether its server is stopped or overloaded",
        )

    # On the thread.

    def _begin(self) -> None:
        if self._location.path is not None:
            with contextlib.suppress(OSError):
                act_as_owner(self._location.path)

    def _attempt(self, sql: str, values: Mapping[str, Any]) -> list[Any] | StoreError:
        try:
            return self._in_sqlite(sql, values) if self._location.path else self._ask(sql, values)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next step begins anew
            self._disconnect()
            return store_error(error) or StoreUnavailable(
                f"{type(error).__name__}: {error}", "see that the gateway's tables are there"
            )

    def _in_sqlite(self, sql: str, values: Mapping[str, Any]) -> list[Any]:
        assert self._location.path is not None
        place, wait = f"{self._location.path.as_uri()}?mode=rw", self._seconds * 0.8
        opened = sqlite3.connect(place, timeout=wait, isolation_level=None, uri=True)
        with contextlib.closing(opened) as connection:
            return connection.execute(sql, dict(values)).fetchall()

    def _ask(self, sql: str, values: Mapping[str, Any]) -> list[Any]:
        if self._connection is None:
            self._connect()
        limit = int(self._seconds * 800)  # milliseconds; the server gives up before its client does
        limits = f"SET LOCAL statement_timeout = {limit}; SET LOCAL lock_timeout = {limit}"
        statement = _PARAMETER.sub(r"%(\1)s", sql)
        # One message and one answer: the transaction is over before anything else can happen.
        cursor = self._connection.execute(f"BEGIN; {limits}; {statement}; COMMIT", values)
        return [row for one in cursor.results() if one.description for row in one.fetchall()]

    def _connect(self) -> None:
        import psycopg

        _, arguments = self._location.url.get_dialect()().create_connect_args(self._location.url)
        limits: dict[str, Any] = {
            "connect_timeout": 2,  # the shortest that libpq knows
            "keepalives_idle": 1,
            "keepalives_interval": 1,
            "keepalives_count": 2,
            "tcp_user_timeout": int(self._seconds * 1000),
            "application_name": "llama-gateway leadership",
        }
        self._connection = psycopg.connect(
            **{**limits, **arguments},
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=psycopg.ClientCursor,
        )
        self._link.hold(self._connection)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._link.release()
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()
