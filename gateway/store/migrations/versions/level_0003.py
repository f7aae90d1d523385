"""Bytes that batches keep, so that one limit holds for all that a key has on the disk."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

NEEDED_LEVEL = 1
"""The lowest level of a program that can use the tables after this migration."""


def upgrade() -> None:
    """Add the columns and their indexes."""
    for name in ("requests_bytes", "result_bytes"):
        column = sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)
        op.add_column("batches", column)
    op.create_index(
        "ix_batches_with_requests",
        "batches",
        ["owner", "requests_bytes"],
        unique=False,
        sqlite_where=sa.text("requests_bytes > 0"),
        postgresql_where=sa.text("requests_bytes > 0"),
    )
    op.create_index(
        "ix_stored_requests_kept",
        "stored_requests",
        ["owner", "length", "result_length"],
        unique=False,
        sqlite_where=sa.text("batch IS NULL"),
        postgresql_where=sa.text("batch IS NULL"),
    )
