"""A program of an older level on a store that this version has brought to its own level."""

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

NEW_TABLES = {
    1: {"files", "batches", "stored_requests", "webhook_deliveries", "learnt"},
    2: {"learnt"},
    3: {"learnt"},
}
"""What later levels have added."""


def program_of(level: int, folder: Path) -> Program:
    """Return what a version of this level knew of the tables."""
    shutil.copytree(THIS_PROGRAM.migrations, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for later in (folder / "versions").glob("level_*.py"):
        if int(later.stem.rpartition("_")[2]) > level:
            later.unlink()
    return Program(level, folder)


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


def as_before(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return of these tables what there was before."""
    return {
        table: (
            [one for one in now[table][0] if one in columns],
            now[table][1],
            [one for one in now[table][2] if one in indexes],
        )
        for table, (columns, _, indexes) in before.items()
    }


@pytest.mark.parametrize("level", range(1, SCHEMA_LEVEL))
def test_it_goes_on_writing_and_reading_all_of_its_tables(
    store_url: str, tmp_path: Path, level: int
) -> None:
    program = program_of(level, tmp_path / "before")
    with opened(store_url, program=program, check_seconds=0.1) as old:
        assert old.status().level == level
        tables = old.run_now(reflected)
        before = old.run_now(described)
        assert not NEW_TABLES[level] & set(tables)

        def write(word: str) -> None:
            def job(connection: Connection) -> None:
                for table in tables.values():
                    connection.execute(table.insert().values(**a_row(table, word)))

            old.run_now(job)

        def counts(connection: Connection) -> dict[str, int]:
            return {
                name: len(connection.execute(select(table)).all()) for name, table in tables.items()
            }

        write("a")
        with opened(store_url) as new:
            assert new.status().level == SCHEMA_LEVEL
            after = new.run_now(described)
            assert as_before(after, before) == before
            assert NEW_TABLES[level] <= set(after)
            write("bb")
            assert old.run_now(counts) == new.run_now(counts) == dict.fromkeys(tables, 2)
            assert (old.status().state, old.status().level) == ("up", SCHEMA_LEVEL)
        write("ccc")
    # And one that is put back in the place of the new one.
    with opened(store_url, program=program) as again:
        assert (again.status().state, again.status().level) == ("up", SCHEMA_LEVEL)
        assert again.run_now(counts) == dict.fromkeys(tables, 3)
