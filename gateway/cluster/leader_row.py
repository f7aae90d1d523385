"""The row of the leadership in the store, on a connection of its own.

No other job of the store can delay it. Each step is one statement in a transaction of its own, with
time limits that hold for that transaction alone, so that it works through pgbouncer in transaction
mode: no session has a state, no statement is prepared, no lock outlives the statement.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from gateway.cluster.leadership import FIRST_ROW, TERM_SECONDS, Change, LeaderRow
from gateway.store.database import StoreLocation, act_as_owner
from gateway.store.failures import StoreError, StoreUnavailable, store_error
from gateway.store.store import DatabaseLink

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
