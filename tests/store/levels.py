"""Programs of other levels, and a store as version 0.1.0 has left it."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, text

from gateway.store.database import Program, connect, disconnect, locate_store
from gateway.store.schema import SCHEMA_LEVEL, STEPS, Step

NEXT = SCHEMA_LEVEL + 1
EXPAND = "ALTER TABLE revisions ADD COLUMN note TEXT"
CONTRACT = "ALTER TABLE revisions DROP COLUMN number"
RELEASED = Program(3, {3: Step(())})
"""Version 0.1.0, commit 925fef89."""


def later_program(*statements: str, needed: int = 1) -> Program:
    """Return a made-up later version, with a step of its own."""
    return Program(NEXT, {**STEPS, NEXT: Step(statements, needed)})


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
