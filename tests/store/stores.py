"""Stores for tests, of this and of other versions, and waits for what their thread does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    MetaData,
    Text,
    create_engine,
    func,
    insert,
    select,
    text,
)

from gateway.store.database import Program, connect, disconnect, locate_store
from gateway.store.schema import SCHEMA_LEVEL, metadata, revisions
from gateway.store.store import Store

LIMIT = 30.0


class CountingStore(Store):
    """Counts the jobs that it is asked for."""

    jobs = 0

    async def run(self, *values: Any, **named: Any) -> Any:
        self.jobs += 1
        return await super().run(*values, **named)


@contextlib.contextmanager
def opened(url: str, kind: type[Store] = Store, **options: Any) -> Iterator[Store]:
    """Run a store inside this context; it is tried to be opened before."""
    store = kind(locate_store(url, Path("unused")), **options)
    store.start()
    try:
        wait_until(lambda: store.status().state != "opening", store)
        yield store
    finally:
        store.close(LIMIT)


@contextlib.contextmanager
def locked(url: str, table: str) -> Iterator[None]:
    """Hold the lock of all that write, in SQLite, or in PostgreSQL of those to this table."""
    location = locate_store(url, Path("unused"))
    in_postgresql = f"LOCK TABLE {table} IN EXCLUSIVE MODE"
    engine = create_engine(location.url)
    try:
        with engine.connect() as connection:
            connection.execute(text(in_postgresql if location.path is None else "BEGIN IMMEDIATE"))
            yield
            connection.rollback()
    finally:
        engine.dispose()


def wait_until(condition: Callable[[], bool], store: Store) -> None:
    """Wait until the condition holds; AssertionError with the store's status after the limit."""
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, store.status()
        time.sleep(0.01)


def add(name: str) -> Callable[[Connection], None]:
    """Return a job that writes a row of this name."""

    def job(connection: Connection) -> None:
        connection.execute(insert(revisions).values(name=name, number=1))

    return job


def names(connection: Connection) -> list[str]:
    """Return the names of the rows: a job that reads."""
    return list(connection.scalars(select(revisions.c.name).order_by(revisions.c.name)))


def count(connection: Connection) -> int:
    """Return the number of the rows: a job that reads."""
    return connection.scalar(select(func.count()).select_from(revisions)) or 0


def a_value(column: Column[Any], number: int) -> Any:
    """A value, or none where there may be none."""
    if column.nullable and number % 2:
        return None
    if isinstance(column.type, Boolean):
        return number % 3 == 0
    if isinstance(column.type, Float):
        return number / 3 + 1e9
    if isinstance(column.type, Integer):
        return number + 1
    return f"{column.name} '{number}' \u00fc\U0001f680\n"


NEXT = SCHEMA_LEVEL + 1
RELEASED = Program(3)
"""Version 0.1.0, commit 925fef89."""


def later_program(*, needed: int = 1, default: str | None = None) -> Program:
    """Return a made-up later version, whose revisions have a note; `default`: as SQL has it."""
    tables = MetaData()
    for table in metadata.sorted_tables:
        table.to_metadata(tables)
    initial = None if default is None else text(default)
    tables.tables["revisions"].append_column(Column("note", Text, server_default=initial))
    return Program(NEXT, needed, tables)


def make_released_store(url: str, *, level: int = 3) -> None:
    """Make the tables as version 0.1.0 did, by Alembic, and say that they have this level."""
    connection = connect(locate_store(url, Path("unused")), lambda _: None)
    with connection.begin():
        for statement in _statements(connection):
            connection.exec_driver_sql(statement)
        row = {"level": level, "program": "0.1.0", "version": f"{level:04}"}
        connection.execute(text("INSERT INTO alembic_version VALUES (:version)"), row)
        new = "INSERT INTO store_levels VALUES (1, :level, 1, :program, 0)"
        connection.execute(text(new), row)
    disconnect(connection)


def _statements(connection: Connection) -> list[str]:
    sql = Path(__file__).with_name("level_3.sql").read_text()
    if connection.dialect.name == "sqlite":
        sql = sql.replace("BIGSERIAL", "INTEGER").replace("DEFAULT false", "DEFAULT 0")
    return [*sql.split(";\n")[:-1], "CREATE TABLE alembic_version (version_num TEXT NOT NULL)"]
