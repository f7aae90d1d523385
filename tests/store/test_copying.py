"""Whole stores are copied: to files, to databases and back, while others write, and not in part."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select

from gateway.callers.ledger import ROW_COLUMNS
from gateway.store import copying
from gateway.store.copying import RESTORED, CopiedStore, copy_store
from gateway.store.database import (
    THIS_PROGRAM,
    Program,
    StoreLocation,
    connect,
    disconnect,
    locate_store,
    make_tables,
    transaction,
)
from gateway.store.failures import StoreError
from gateway.store.schema import (
    SCHEMA_LEVEL,
    audit,
    batches,
    keys,
    levels,
    metadata,
    processes,
)
from tests.callers.ledger_rows import a_row, add_rows
from tests.postgres import PostgresServer
from tests.store.stores import a_value, later_program, make_released_store

COPIED = [table for table in metadata.sorted_tables if table is not levels]
NewPlace = Callable[[str], StoreLocation]


@pytest.fixture
def new_place(tmp_path: Path, request: pytest.FixtureRequest) -> NewPlace:
    """Return a maker of places for stores, of the kind that is asked for."""

    def make(kind: str) -> StoreLocation:
        if kind == "sqlite":
            number = len(list(tmp_path.iterdir()))
            (tmp_path / f"place-{number}").mkdir()
            return locate_store(f"sqlite:///{tmp_path}/place-{number}/gateway.db", tmp_path)
        server: PostgresServer = request.getfixturevalue("postgres")
        return locate_store(server.new_database(), tmp_path)

    return make


@contextlib.contextmanager
def using(
    location: StoreLocation, program: Program | None = None, *, write: bool = True
) -> Iterator[Connection]:
    """A transaction in a store, which gets the tables of this program."""
    connection = connect(location, lambda _: None)
    try:
        if program is not None:
            with transaction(connection):
                make_tables(connection, program, 1.0)
        with transaction(connection, write=write):
            yield connection
    finally:
        disconnect(connection)


def fill(location: StoreLocation, rows: int = 3) -> None:
    """Make a store with rows in every table, whose columns all have values or none."""
    with using(location, THIS_PROGRAM) as connection:
        for table in COPIED:
            values = [
                {column.key: a_value(column, number) for column in table.columns}
                for number in range(rows)
            ]
            connection.execute(insert(table), values)


def rows_of(location: StoreLocation) -> dict[str, list[str]]:
    with using(location, write=False) as connection:
        return {
            table.name: sorted(str(tuple(row)) for row in connection.execute(select(table)))
            for table in COPIED
        }


def exact(source: StoreLocation, target: StoreLocation, **options: Any) -> CopiedStore:
    return copy_store(source, target, pause_batches=False, **options)


def refused(source: StoreLocation, target: StoreLocation) -> StoreError:
    with pytest.raises(StoreError) as caught:
        exact(source, target)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    ("first", "second"),
    [("sqlite", "sqlite"), ("sqlite", "postgresql"), ("postgresql", "postgresql")],
)
def test_a_copy_and_the_copy_of_that_have_the_same_rows(
    new_place: NewPlace, first: str, second: str
) -> None:
    source, middle, last = new_place(first), new_place(second), new_place(first)
    fill(source)
    copied = exact(source, middle)
    again = exact(middle, last)
    assert copied.digest == again.digest
    assert copied.tables == again.tables == {table.name: 3 for table in COPIED}
    assert rows_of(source) == rows_of(middle) == rows_of(last)
    assert copied.paused_batches == 0


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_copy_goes_on_where_the_store_was(new_place: NewPlace, kind: str) -> None:
    source, target = new_place("sqlite"), new_place(kind)
    fill(source)
    exact(source, target)
    with using(target) as connection:
        row = connection.execute(select(levels)).one()
        assert (row.level, row.needed_level) == (SCHEMA_LEVEL, 1)
        entry = {"at": 1.0, "actor": "a", "role": "admin", "action": "drain"}
        connection.execute(insert(audit).values(entry))
    with using(target, THIS_PROGRAM) as connection:
        ids = connection.scalars(select(audit.c.id).order_by("id")).all()
        assert ids == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_copy_is_of_one_moment_while_a_gateway_writes(
    new_place: NewPlace, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "STEP_ROWS", 10)
    source, target = new_place(kind), new_place("sqlite")
    with using(source, THIS_PROGRAM) as connection:
        add_rows(connection, [a_row(number) for number in range(100)])
    calls = []

    def write(*call: Any) -> None:
        calls.append(call)
        with using(source) as connection:
            add_rows(connection, [a_row(1000 + len(calls))])

    copied = exact(source, target, on_rows=write)
    assert copied.tables["usage"] == 100
    assert calls[:10] == [("usage", done, 100) for done in range(10, 101, 10)]
    assert len(rows_of(source)["usage"]) == 100 + len(calls)


BATCH = {
    "owner": "alice", "api": "openai", "endpoint": "/v1/embeddings", "created_at": 1.0,
    "expires_at": 2.0, "keep_until": 3.0, "class_": "batch", "folder": "f1",
    "state": "in_progress", "paused_at": None, "pause_reason": None, "ended_at": None,
}  # fmt: skip


def test_unfinished_batches_are_paused_for_a_reason_that_nothing_else_resumes(
    new_place: NewPlace,
) -> None:
    source, target = new_place("sqlite"), new_place("sqlite")
    made = [
        {**BATCH, "id": "running"},
        {**BATCH, "id": "full", "paused_at": 5.0, "pause_reason": "storage_full"},
        {**BATCH, "id": "done", "state": "completed", "ended_at": 6.0},
    ]
    with using(source, THIS_PROGRAM) as connection:
        connection.execute(insert(batches), made)
    copied = copy_store(source, target, pause_batches=True, now=lambda: 9.0)
    assert (copied.paused_batches, copied.folders) == (2, {"f1": 2})
    with using(target, write=False) as connection:
        columns = batches.c.id, batches.c.paused_at, batches.c.pause_reason
        found = {id_: rest for id_, *rest in connection.execute(select(*columns))}
    assert found == {"running": [9.0, RESTORED], "full": [9.0, RESTORED], "done": [None, None]}
    assert exact(source, new_place("sqlite")).digest == copied.digest


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_what_breaks_off_leaves_nothing(new_place: NewPlace, kind: str) -> None:
    source, target = new_place("sqlite"), new_place(kind)
    fill(source)

    def break_off(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exact(source, target, on_rows=break_off)
    if target.path is not None:
        assert list(target.path.parent.iterdir()) == []
    assert exact(source, target).tables["usage"] == 3


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_copy_that_differs_does_not_appear(
    new_place: NewPlace, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = new_place("sqlite"), new_place(kind)
    fill(source)
    steps = copying._steps

    def lossy(connection: Connection, location: StoreLocation, columns: Any) -> Any:
        for rows in steps(connection, location, columns):
            is_lost = location is target and columns[0].table is keys
            yield rows[1:] if is_lost else rows

    with monkeypatch.context() as patched:
        patched.setattr(copying, "_steps", lossy)
        error = refused(source, target)
    assert "keys differs" in error.message
    assert (target.shown if target.path is None else str(target.path.parent)) in error.message
    exact(source, target)


def test_a_copy_is_its_owners_alone_and_leaves_its_source_as_it_was(new_place: NewPlace) -> None:
    source, target = new_place("sqlite"), new_place("sqlite")
    fill(source)
    exact(source, target)
    assert source.path is not None
    assert target.path is not None
    assert target.path.stat().st_mode & 0o777 == 0o600
    with contextlib.closing(sqlite3.connect(target.path)) as file:
        assert file.execute("PRAGMA auto_vacuum").fetchone() == (2,)  # retention needs it
    for read in (source, target):
        assert read.path is not None
        before = read.path.read_bytes()
        exact(read, new_place("sqlite"))
        assert read.path.read_bytes() == before
        assert list(read.path.parent.iterdir()) == [read.path]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_place_with_a_store_is_refused_and_who_uses_it_is_told(
    new_place: NewPlace, kind: str
) -> None:
    source, target = new_place("sqlite"), new_place(kind)
    fill(source)
    with using(target, THIS_PROGRAM):
        pass
    assert "already" in refused(source, target).message
    alive = {"id": "p", "started_at": 1.0, "seen_at": time.time(), "host": "hal boot", "pid": 7}
    with using(target) as connection:
        connection.execute(insert(processes).values(alive))
    error = refused(source, target)
    assert "a gateway on hal (process 7) uses it" in error.message
    assert "stop the gateway" in error.remedy
    assert rows_of(target)["keys"] == []


@pytest.mark.parametrize("end", ["-wal", "-journal"])
def test_what_a_former_store_left_is_refused(new_place: NewPlace, end: str) -> None:
    source, target = new_place("sqlite"), new_place("sqlite")
    fill(source)
    assert target.path is not None
    left = target.path.with_name(f"gateway.db{end}")
    left.write_bytes(b"of a former store")
    assert str(left) in refused(source, target).message
    assert not target.path.exists()


def test_a_broken_file_is_told(new_place: NewPlace) -> None:
    source, backup, target = (new_place("sqlite") for _ in range(3))
    fill(source, rows=300)
    exact(source, backup)
    assert backup.path is not None
    assert target.path is not None
    whole = backup.path.read_bytes()
    size = len(whole)
    spoilt = whole[: size // 2] + b"\xff" * (size // 4) + whole[3 * size // 4 :]
    for content in (spoilt, whole[: size // 2], b"a text, and no database. " * 100, b""):
        backup.path.write_bytes(content)
        error = refused(backup, target)
        assert str(backup.path) in error.message
        assert "another backup" in error.remedy or not content
        assert list(target.path.parent.iterdir()) == []


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_an_older_store_is_copied_into_the_tables_of_today(new_place: NewPlace, kind: str) -> None:
    source, target = new_place(kind), new_place("sqlite")
    make_released_store(source.url.render_as_string(hide_password=False))
    row = {name: value for name, value in a_row(1).items() if name not in ROW_COLUMNS[-6:]}
    with using(source) as connection:
        add_rows(connection, [row])
    copied = exact(source, target)
    assert (copied.level, copied.tables["usage"]) == (3, 1)
    assert "learnt" not in copied.tables
    with using(source, write=False) as connection:
        assert connection.scalar(select(levels.c.level)) == 3
    # The digest is of what there is, whatever the level.
    assert exact(target, new_place("sqlite")).digest == copied.digest


def test_stores_of_other_versions_that_would_lose_something_are_refused(
    new_place: NewPlace,
) -> None:
    newer, ancient = new_place("sqlite"), new_place("sqlite")
    with using(newer, later_program()):
        pass
    error = refused(newer, new_place("sqlite"))
    assert "something would be left out" in error.message
    assert "use the command of version" in error.remedy
    make_released_store(ancient.url.render_as_string(hide_password=False), level=2)
    assert "level 2" in refused(ancient, new_place("sqlite")).message
