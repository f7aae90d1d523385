"""Stores of other levels: older, newer, and used by an old and a new program at once.

What a newer version has changed is told with the remedy, and nothing in it is touched.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import Connection, MetaData, Table, inspect, select, text, update
from sqlalchemy.engine.interfaces import ReflectedIndex

from gateway.callers.keys import new_key
from gateway.store.database import THIS_PROGRAM, Program, connect, disconnect, locate_store
from gateway.store.failures import StoreLocked, StoreTooNew
from gateway.store.schema import SCHEMA_LEVEL, levels, metadata
from tests.cli.running import run
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until
from tests.known import known
from tests.store.stores import (
    LIMIT,
    NEXT,
    RELEASED,
    a_value,
    add,
    count,
    later_program,
    make_released_store,
    opened,
)


def described(connection: Connection) -> dict[str, Any]:
    """Return every table with its columns, key and indexes, as texts."""
    found = inspect(connection)
    return {
        table: (
            # The default of an unknown dimension is written ('') or ''.
            sorted(str(one).replace("('')", "''") for one in found.get_columns(table)),
            found.get_pk_constraint(table)["constrained_columns"],
            sorted(_index(index) for index in found.get_indexes(table)),
        )
        for table in found.get_table_names()
        if table != "alembic_version"
    }


def _index(index: ReflectedIndex) -> str:
    conditions = {name: str(value) for name, value in index.get("dialect_options", {}).items()}
    return str(sorted({**index, "dialect_options": conditions}.items()))


def reflected(connection: Connection) -> dict[str, Table]:
    """Return the tables that jobs use, as they are in the database."""
    tables = MetaData()
    tables.reflect(connection)
    of_levels = {"store_levels", "alembic_version"}
    return {name: table for name, table in tables.tables.items() if name not in of_levels}


def test_a_released_store_gets_the_tables_of_a_new_one(
    store_url: str, request: pytest.FixtureRequest
) -> None:
    make_released_store(store_url)
    other_url = f"{store_url}.other"
    if store_url.startswith("postgresql"):
        other_url = request.getfixturevalue("postgres").new_database()
    with opened(store_url) as old, opened(other_url) as new:
        assert old.status().level == new.status().level == SCHEMA_LEVEL
        assert old.run_now(described) == new.run_now(described)
        assert new.run_now(described).keys() == metadata.tables.keys()


@pytest.mark.parametrize("level", [1, 2])
def test_a_store_from_before_the_first_release_is_refused_with_the_version_to_start_once(
    store_url: str, level: int
) -> None:
    make_released_store(store_url, level=level)
    with opened(store_url) as store:
        status = store.status()
        assert (status.state, status.level) == ("too old", None)
        assert f"level {level}" in str(status.error)
        assert "0.1.0 (commit 925fef89)" in str(status.remedy)
    connection = connect(locate_store(store_url, Path("unused")), lambda _: None)
    row = connection.execute(levels.select()).one()
    assert (row.level, row.program) == (level, "0.1.0"), "nothing was touched"
    assert "learnt" not in inspect(connection).get_table_names()
    disconnect(connection)


def test_the_released_program_goes_on_with_all_of_its_tables(store_url: str) -> None:
    make_released_store(store_url)
    with opened(store_url, program=RELEASED, check_seconds=0.1) as old:
        tables = old.run_now(reflected)
        before = old.run_now(described)

        def write(number: int) -> None:
            def job(connection: Connection) -> None:
                for table in tables.values():
                    values = {column.name: a_value(column, number) for column in table.columns}
                    connection.execute(table.insert().values(**values))

            old.run_now(job)

        def counts(connection: Connection) -> dict[str, int]:
            return {
                name: len(connection.execute(select(table)).all()) for name, table in tables.items()
            }

        write(1)
        with opened(store_url) as new:
            after = new.run_now(described)
            assert {name: after[name] for name in before if name != "usage"} == {
                name: table for name, table in before.items() if name != "usage"
            }
            for mine, more in zip(before["usage"], after["usage"], strict=True):
                assert set(mine) <= set(more), "columns and indexes are added alone"
            added = {"learnt", "leadership", "members", "groups"}
            assert after.keys() - before.keys() == added
            write(2)
            assert old.run_now(counts) == new.run_now(counts) == dict.fromkeys(tables, 2)
            assert (old.status().state, old.status().level) == ("up", SCHEMA_LEVEL)
        write(3)
    # And one that is put back in the place of the new one.
    with opened(store_url, program=RELEASED) as again:
        assert (again.status().state, again.status().level) == ("up", SCHEMA_LEVEL)
        assert again.run_now(counts) == dict.fromkeys(tables, 3)


def note(connection: Connection) -> None:
    connection.execute(text("INSERT INTO revisions (name, number, note) VALUES ('n', 1, 'x')"))


def test_a_program_refuses_a_store_that_a_later_one_has_contracted(store_url: str) -> None:
    newer = later_program(needed=NEXT)
    with opened(store_url, check_seconds=0.1) as old:
        old.run_now(add("before"))
        with opened(store_url, program=newer) as new:
            # The one that runs notices before its next job touches anything.
            with pytest.raises(StoreTooNew, match="run version"):
                old.run_now(add("after"))
            assert old.status().state == "too new"
            assert new.run_now(count) == 1
    with opened(store_url) as late:
        assert late.status().state == "too new"
        assert str(NEXT) in str(late.status().error)
        assert "backup" in str(late.status().remedy)


def test_a_migration_that_fails_changes_nothing(store_url: str) -> None:
    newer = later_program(default="nothing_of_this_name()")
    with opened(store_url, check_seconds=0.1) as old:
        old.run_now(add("before"))
        with opened(store_url, program=newer) as new:
            assert not new.status().up
            assert "nothing_of_this_name" in str(new.status().error)
            old.run_now(add("after"))
            with pytest.raises(Exception, match="note"):
                old.run_now(note)
        assert (old.status().state, old.status().level) == ("up", SCHEMA_LEVEL)


@pytest.mark.slow
def test_old_and_new_programs_write_at_the_same_time(store_url: str) -> None:
    begun = threading.Event()

    def write(program: Program) -> int:
        written = 0
        with opened(store_url, program=program, check_seconds=0.1) as store:
            # The old one writes until it has seen the new level, and 300 rows at least.
            while written < 300 or store.status().level != NEXT:
                with contextlib.suppress(
                    StoreLocked
                ):  # by a migration, for longer than a job waits
                    store.run_now(add(f"{program.level}-{written}"))
                    written += 1
                begun.set()
        return written

    with ThreadPoolExecutor(2) as threads:
        old = threads.submit(write, THIS_PROGRAM)
        assert begun.wait(LIMIT)
        new = threads.submit(write, later_program())
        written = old.result(LIMIT * 2) + new.result(LIMIT * 2)
    with opened(store_url) as store:
        assert store.run_now(count) == written


KEY = new_key("own")
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
REMEDY = "run version 9.9.9 or later, or put back a backup from before"


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """Return the file of a store that only later programs can use."""
    file = tmp_path / "state" / "gateway.db"
    with opened(f"sqlite:///{file}") as store:
        store.run_now(add("kept"))
        later = {"level": SCHEMA_LEVEL + 2, "needed_level": SCHEMA_LEVEL + 1, "program": "9.9.9"}
        store.run_now(lambda connection: connection.execute(update(levels).values(later)))
    return file


def contents(file: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(file)) as reader:
        return list(reader.iterdump())


def settings_of(file: Path, **more: Any) -> dict[str, Any]:
    return {
        "store": {"url": f"sqlite:///{file}"},
        "keys": [{"id": KEY.id, "sha256": KEY.sha256, "limits": {"rpm": 3}}],
        **more,
    }


async def test_a_gateway_serves_on_and_says_what_to_do(newer: Path, tmp_path: Path) -> None:
    before = contents(newer)
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], settings_of(newer)) as running,
    ):
        store, admin = known(running.gateway.store), running.admin
        await until(lambda: store.status().state == "too new")
        headers = {"authorization": f"Bearer {KEY.text}"}
        for status in (200, 200, 200, 429):  # the limit holds, by counters in memory
            path = "/v1/chat/completions"
            answer = await running.client.post(path, json=HELLO, headers=headers)
            assert answer.status_code == status
        found = (await admin.get("/admin/status")).json()["store"]
        assert (found["state"], found["remedy"]) == ("too new", REMEDY)
        for path in ("/admin/usage", "/admin/audit"):
            response = await admin.get(path)
            assert response.status_code in {200, 503}, path
            assert response.status_code == 200 or "9.9.9" in response.text
        refused = await admin.post("/admin/keys", json={"name": "alice"})
        assert refused.status_code == 503
        assert REMEDY in refused.text
        assert known(running.gateway.ledger).written == 0
    assert contents(newer) == before


@pytest.mark.parametrize("command", [("keys", "list"), ("keys", "create"), ("usage",)], ids=str)
def test_a_command_is_refused_with_the_remedy(
    command: tuple[str, ...], newer: Path, tmp_path: Path
) -> None:
    before = contents(newer)
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(settings_of(newer, admin={"port": 1})))
    ran = run(
        *command, *(("--name", "alice") if "create" in command else ()), "--config", str(file)
    )
    assert (ran.status, ran.out) == (1, "")
    assert "version 9.9.9 has changed the store" in ran.err
    assert REMEDY in ran.err
    assert contents(newer) == before
