from __future__ import annotations

from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from gateway.store.database import THIS_PROGRAM
from gateway.store.schema import SCHEMA_LEVEL, levels, metadata
from tests.store.stores import opened


def differences(connection: Connection) -> list[Any]:
    options = {"compare_type": True, "compare_server_default": True}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def test_the_migrations_make_the_tables_of_the_schema(store_url: str) -> None:
    with opened(store_url) as store:
        assert store.run_now(differences) == []


def test_the_indexes_of_the_schema_are_there_with_their_conditions(store_url: str) -> None:
    def index(connection: Connection) -> Any:
        return next(
            one
            for one in inspect(connection).get_indexes("keys")
            if one["name"] == "uq_keys_name_in_force"
        )

    with opened(store_url) as store:
        found = store.run_now(index)
        dialect = "sqlite" if store_url.startswith("sqlite") else "postgresql"
    assert found["unique"]
    assert "revoked_at IS NULL" in str(found["dialect_options"][f"{dialect}_where"])


def test_the_level_is_the_number_of_the_newest_migration() -> None:
    scripts = ScriptDirectory(str(THIS_PROGRAM.migrations))
    assert scripts.get_heads() == [f"{SCHEMA_LEVEL:04}"]


def test_every_migration_says_which_programs_it_shuts_out() -> None:
    scripts = ScriptDirectory(str(THIS_PROGRAM.migrations))
    needed = [script.module.NEEDED_LEVEL for script in scripts.walk_revisions()][::-1]
    assert needed == sorted(needed)
    assert all(need <= level for level, need in enumerate(needed, 1))


def test_a_new_store_tells_its_level_and_who_made_it(store_url: str) -> None:
    with opened(store_url) as store:
        row = store.run_now(lambda connection: connection.execute(levels.select()).one())
        assert (row.level, row.needed_level) == (SCHEMA_LEVEL, 1)
        assert row.program
        assert store.status().level == SCHEMA_LEVEL
