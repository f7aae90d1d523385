"""Run by Alembic: applies the migrations in the transaction of its caller."""

from __future__ import annotations

from alembic import context

from gateway.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
context.run_migrations()
