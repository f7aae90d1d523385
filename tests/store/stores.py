"""Stores for tests, and waits for what their thread does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, func, insert, select, text

from gateway.store.database import locate_store
from gateway.store.schema import revisions
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
