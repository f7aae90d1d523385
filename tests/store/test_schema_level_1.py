"""A program of level 1 on a store that this version has brought to its own level."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, MetaData, Table, inspect, select
from sqlalchemy.sql.sqltypes import Boolean, Float, Integer

from gateway.store.database import THIS_PROGRAM, Program
from gateway.store.schema import SCHEMA_LEVEL
from tests.store.stores import opened


@pytest.fixture
def level_1(tmp_path: Path) -> Program:
    """What the version before knew of the tables."""
    folder = tmp_path / "before"
    shutil.copytree(THIS_PROGRAM.migrations, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for later in (folder / "versions").glob("level_*.py"):
        if later.name != "level_0001.py":
            later.unlink()
    return Program(1, folder)


def described(connection: Connection) -> dict[str, Any]:
    """Return every table with its columns, key and indexes, as texts."""
    found = inspect(connection)
    return {
        table: (
            [str(column) for column in found.get_columns(table)],
            found.get_pk_constraint(table)["constrained_columns"],
            sorted(
                (str(index["name"]), index["column_names"], bool(index["unique"]))
                for index in found.get_indexes(table)
            ),
        )
        for table in found.get_table_names()
    }


def reflected(connection: Connection) -> dict[str, Table]:
    """Return the tables that jobs use, as they are in the database."""
    tables = MetaData()
    tables.reflect(connection)
    of_migrations = {"store_levels", "alembic_version"}
    return {name: table for name, table in tables.tables.items() if name not in of_migrations}


def a_row(table: Table, word: str) -> Mapping[str, Any]:
    """Return a row with a value in every column that the table had."""

    def value(kind: Any) -> Any:
        if isinstance(kind, Boolean):
            return True
        if isinstance(kind, Float):
            return 1.5
        return len(word) if isinstance(kind, Integer) else word

    return {
        column.name: value(column.type)
        for column in table.columns
        if not (table.name == "audit" and column.name == "id")
    }


def test_it_goes_on_writing_and_reading_all_of_its_tables(store_url: str, level_1: Program) -> None:
    with opened(store_url, program=level_1, check_seconds=0.1) as old:
        assert old.status().level == 1
        tables = old.run_now(reflected)
        before = old.run_now(described)
        assert "files" not in tables

        def write(word: str) -> None:
            def job(connection: Connection) -> None:
                for table in tables.values():
                    connection.execute(table.insert().values(**a_row(table, word)))

            old.run_now(job)

        def counts(connection: Connection) -> dict[str, int]:
            return {name: len(connection.execute(select(t)).all()) for name, t in tables.items()}

        write("a")
        with opened(store_url) as new:
            assert new.status().level == SCHEMA_LEVEL
            after = new.run_now(described)
            assert {name: after[name] for name in before} == before
            assert {"files", "batches", "stored_requests", "webhook_deliveries"} <= set(after)
            write("bb")
            assert old.run_now(counts) == new.run_now(counts) == dict.fromkeys(tables, 2)
            assert (old.status().state, old.status().level) == ("up", SCHEMA_LEVEL)
        write("ccc")
    # And one that is put back in the place of the new one.
    with opened(store_url, program=level_1) as again:
        assert (again.status().state, again.status().level) == ("up", SCHEMA_LEVEL)
        assert again.run_now(counts) == dict.fromkeys(tables, 3)
