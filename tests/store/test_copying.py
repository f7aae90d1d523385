"""Whole stores are copied: to files, to databases and back, while others write, and not in part."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Boolean, Column, Connection, Float, Integer, Table, insert, select, update

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
    migrate,
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
    usage,
)
from tests.callers.ledger_rows import a_row, add_rows
from tests.postgres import PostgresServer
from tests.store.levels import later_program, make_released_store

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
def connected(location: StoreLocation) -> Iterator[Connection]:
    connection = connect(location, lambda _: None)
    try:
        yield connection
    finally:
        disconnect(connection)


def a_value(column: Column[Any], number: int) -> Any:
    if column.nullable and number % 2:
        return None
    if isinstance(column.type, Boolean):
        return number % 3 == 0
    if isinstance(column.type, Float):
        return number / 3 + 1e9
    if isinstance(column.type, Integer):
        return number + 1
    return f"{column.name} '{number}' \u00fc\U0001f680\n"


def fill(location: StoreLocation, rows: int = 3, program: Program = THIS_PROGRAM) -> None:
    """Make a store with rows in every table, whose columns all have values or none."""
    with connected(location) as connection:
        migrate(connection, program, 1.0)
        with transaction(connection):
            for table in COPIED:
                values = [
                    {column.key: a_value(column, number) for column in table.columns}
                    for number in range(rows)
                ]
                connection.execute(insert(table), values)


def rows_of(location: StoreLocation) -> dict[str, list[Any]]:
    with connected(location) as connection, transaction(connection, write=False):
        return {table.name: sorted(map(repr, read(connection, table))) for table in COPIED}


def read(connection: Connection, table: Table) -> Sequence[Any]:
    return [tuple(row) for row in connection.execute(select(table))]


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


def test_the_digest_tells_one_store_from_another(new_place: NewPlace) -> None:
    source = new_place("sqlite")
    fill(source)
    before = exact(source, new_place("sqlite")).digest
    with connected(source) as connection, transaction(connection):
        connection.execute(update(usage).where(usage.c.id == a_value(usage.c.id, 1)).values(cost=2))
    assert exact(source, new_place("sqlite")).digest != before


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_copy_goes_on_where_the_store_was(new_place: NewPlace, kind: str) -> None:
    source, target = new_place("sqlite"), new_place(kind)
    fill(source)
    exact(source, target)
    with connected(target) as connection:
        with transaction(connection):
            row = connection.execute(select(levels)).one()
            assert (row.level, row.needed_level) == (SCHEMA_LEVEL, 1)
            entry = {"at": 1.0, "actor": "a", "role": "admin", "action": "drain"}
            connection.execute(insert(audit).values(entry))
        migrate(connection, THIS_PROGRAM, 2.0)
        with transaction(connection, write=False):
            assert [row.id for row in connection.execute(select(audit.c.id).order_by("id"))] == [
                1, 2, 3, 4,
            ]  # fmt: skip


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_copy_is_of_one_moment_while_a_gateway_writes(
    new_place: NewPlace, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "STEP_ROWS", 10)
    source, target = new_place(kind), new_place("sqlite")
    with connected(source) as connection:
        migrate(connection, THIS_PROGRAM, 1.0)
        with transaction(connection):
            add_rows(connection, [a_row(number) for number in range(100)])
    calls = []

    def write(*call: Any) -> None:
        calls.append(call)
        with connected(source) as connection, transaction(connection):
            add_rows(connection, [a_row(1000 + len(calls))])

    copied = exact(source, target, on_rows=write)
    assert copied.tables["usage"] == 100
    assert calls[:10] == [("usage", done, 100) for done in range(10, 101, 10)]
    with connected(source) as connection, transaction(connection, write=False):
        assert len(read(connection, usage)) == 100 + len(calls)


def a_batch(id_: str, **values: Any) -> dict[str, Any]:
    given = {
        "id": id_, "owner": "alice", "api": "openai", "endpoint": "/v1/embeddings",
        "created_at": 1.0, "expires_at": 2.0, "keep_until": 3.0, "class_": "batch",
        "state": "in_progress", "folder": "f1", "paused_at": None, "pause_reason": None,
        "ended_at": None,
    }  # fmt: skip
    return {**given, **values}


def test_unfinished_batches_are_paused_for_a_reason_that_nothing_else_resumes(
    new_place: NewPlace,
) -> None:
    source, target = new_place("sqlite"), new_place("sqlite")
    made = [
        a_batch("running"),
        a_batch("full", paused_at=5.0, pause_reason="storage_full"),
        a_batch("done", state="completed", ended_at=6.0),
    ]
    with connected(source) as connection:
        migrate(connection, THIS_PROGRAM, 1.0)
        with transaction(connection):
            connection.execute(insert(batches), made)
    copied = copy_store(source, target, pause_batches=True, now=lambda: 9.0)
    assert (copied.paused_batches, copied.folders) == (2, {"f1": 2})
    with connected(target) as connection, transaction(connection, write=False):
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


def test_a_file_is_its_owners_alone_and_has_no_others_beside_it(new_place: NewPlace) -> None:
    source, target = new_place("sqlite"), new_place("sqlite")
    fill(source)
    exact(source, target)
    assert target.path is not None
    assert target.path.stat().st_mode & 0o777 == 0o600
    assert list(target.path.parent.iterdir()) == [target.path]
    with contextlib.closing(sqlite3.connect(target.path)) as file:
        assert file.execute("PRAGMA auto_vacuum").fetchone() == (2,)  # retention needs it
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_source_is_read_without_a_change(new_place: NewPlace) -> None:
    store, backup = new_place("sqlite"), new_place("sqlite")
    fill(store)
    exact(store, backup)
    for source in (store, backup):
        assert source.path is not None
        before = source.path.read_bytes()
        exact(source, new_place("sqlite"))
        assert source.path.read_bytes() == before
        assert list(source.path.parent.iterdir()) == [source.path]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_gives_the_file_to_the_owner_of_its_folder(new_place: NewPlace) -> None:
    source, target = new_place("sqlite"), new_place("sqlite")
    fill(source)
    assert target.path is not None
    os.chown(target.path.parent, 65534, 65534)
    exact(source, target)
    assert (target.path.stat().st_uid, target.path.stat().st_gid) == (65534, 65534)


# What is refused.


def note_gateway(location: StoreLocation) -> None:
    """Let a gateway be at work on the store."""
    alive = {"id": "p", "started_at": 1.0, "seen_at": time.time(), "host": "hal boot", "pid": 7}
    with connected(location) as connection, transaction(connection):
        connection.execute(insert(processes).values(alive))


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_place_with_a_store_is_refused_and_who_uses_it_is_told(
    new_place: NewPlace, kind: str
) -> None:
    source, target = new_place("sqlite"), new_place(kind)
    fill(source)
    with connected(target) as connection:
        migrate(connection, THIS_PROGRAM, 1.0)
    error = refused(source, target)
    assert "already" in error.message
    assert source.shown not in error.message
    assert "a gateway on" not in error.message
    note_gateway(target)
    error = refused(source, target)
    assert "a gateway on hal (process 7) uses it" in error.message
    assert "stop the gateway" in error.remedy
    with connected(target) as connection, transaction(connection, write=False):
        assert read(connection, keys) == []


@pytest.mark.parametrize("end", ["-wal", "-journal"])
def test_what_a_former_store_left_is_refused(new_place: NewPlace, end: str) -> None:
    source, target = new_place("sqlite"), new_place("sqlite")
    fill(source)
    assert target.path is not None
    left = target.path.with_name(f"gateway.db{end}")
    left.write_bytes(b"of a former store")
    assert str(left) in refused(source, target).message
    assert not target.path.exists()


def test_a_gateway_that_uses_the_source_is_told(new_place: NewPlace) -> None:
    source = new_place("sqlite")
    fill(source)
    assert exact(source, new_place("sqlite")).used_by is None
    note_gateway(source)
    assert exact(source, new_place("sqlite")).used_by == "a gateway on hal (process 7)"


def test_missing_places_are_told(new_place: NewPlace, tmp_path: Path) -> None:
    source, target = new_place("sqlite"), new_place("sqlite")
    assert "is not there" in refused(source, target).message
    assert source.path is not None
    assert not source.path.exists()
    fill(source)
    nowhere = locate_store(f"sqlite:///{tmp_path}/nowhere/gateway.db", tmp_path)
    assert refused(source, nowhere).message == f"there is no folder {tmp_path}/nowhere"
    off = locate_store("postgresql://gateway:hidden@127.0.0.1:9/x", tmp_path)
    error = refused(source, off)
    assert isinstance(error, StoreError)
    assert "127.0.0.1:9" in error.message
    assert "hidden" not in str(error)


def spoil_middle(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size // 4))


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def of_something_else(path: Path) -> None:
    path.write_text("a text, and no database. " * 100)


@pytest.mark.parametrize("spoil", [spoil_middle, cut_short, of_something_else])
def test_a_broken_file_is_told(new_place: NewPlace, spoil: Callable[[Path], None]) -> None:
    source, backup, target = (new_place("sqlite") for _ in range(3))
    fill(source, rows=300)
    exact(source, backup)
    assert backup.path is not None
    assert target.path is not None
    spoil(backup.path)
    error = refused(backup, target)
    assert str(backup.path) in error.message
    assert "another backup" in error.remedy
    assert list(target.path.parent.iterdir()) == []


def test_a_database_without_tables_is_no_store(new_place: NewPlace) -> None:
    source = new_place("sqlite")
    assert source.path is not None
    source.path.touch()
    assert "holds no store" in refused(source, new_place("sqlite")).message


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_an_older_store_is_copied_into_the_tables_of_today(new_place: NewPlace, kind: str) -> None:
    source, target = new_place(kind), new_place("sqlite")
    make_released_store(source.url.render_as_string(hide_password=False))
    row = {name: value for name, value in a_row(1).items() if name not in ROW_COLUMNS[-6:]}
    with connected(source) as connection, transaction(connection):
        add_rows(connection, [row])
    copied = exact(source, target)
    assert (copied.level, copied.tables["usage"]) == (3, 1)
    assert "learnt" not in copied.tables
    with connected(source) as connection, transaction(connection, write=False):
        assert connection.scalar(select(levels.c.level)) == 3
    # The digest is of what there is, whatever the level.
    assert exact(target, new_place("sqlite")).digest == copied.digest


def test_stores_of_other_versions_that_would_lose_something_are_refused(
    new_place: NewPlace,
) -> None:
    newer, ancient = new_place("sqlite"), new_place("sqlite")
    with connected(newer) as connection:
        migrate(connection, later_program(), 1.0)
    error = refused(newer, new_place("sqlite"))
    assert "something would be left out" in error.message
    assert "use the command of version" in error.remedy
    make_released_store(ancient.url.render_as_string(hide_password=False), level=2)
    assert "level 2" in refused(ancient, new_place("sqlite")).message


def test_a_row_that_postgresql_does_not_take_is_told_by_its_table(new_place: NewPlace) -> None:
    source, target = new_place("sqlite"), new_place("postgresql")
    with connected(source) as connection:
        migrate(connection, THIS_PROGRAM, 1.0)
        with transaction(connection):
            add_rows(connection, [a_row(1, user="a\0secret")])
    error = refused(source, target)
    assert "usage is refused" in error.message
    assert "NUL" in error.message
    assert "secret" not in str(error).replace("secret-of-tests", "")


WITH_LITTLE_ROOM = """
import resource, signal, sys
from pathlib import Path
from gateway.store.copying import copy_store
from gateway.store.database import locate_store
from gateway.store.failures import StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
try:
    copy_store(*(locate_store("sqlite:///" + path, Path()) for path in sys.argv[1:]),
               pause_batches=False)
except StoreError as error:
    print(error)
"""


def test_no_room_is_told_and_leaves_nothing(new_place: NewPlace) -> None:
    source, target = new_place("sqlite"), new_place("sqlite")
    fill(source)
    with connected(source) as connection, transaction(connection):
        add_rows(connection, [a_row(number) for number in range(20_000)])
    ended = subprocess.run(
        [sys.executable, "-c", WITH_LITTLE_ROOM, str(source.path), str(target.path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert target.path is not None
    assert f"{target.path.parent}/.gateway.db." in ended.stdout
    assert "free space" in ended.stdout
    assert list(target.path.parent.iterdir()) == []
