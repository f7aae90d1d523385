"""Programs of other levels, and a store as version 0.1.0 has left it."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, Text, text

from gateway.store.database import Program, connect, disconnect, locate_store
from gateway.store.schema import SCHEMA_LEVEL, metadata

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
