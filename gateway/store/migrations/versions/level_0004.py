"""What gateways have learnt of nodes and callers, so that a restart does not begin anew."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

NEEDED_LEVEL = 1
"""The lowest level of a program that can use the tables after this migration."""


def upgrade() -> None:
    """Add the table and its indexes."""
    op.create_table(
        "learnt",
        sa.Column("gateway", sa.Text(), nullable=False),
        sa.Column("section", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("caller", sa.Text(), nullable=True),
        sa.Column("changed_at", sa.Float(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("gateway", "section", "version", "key", name="pk_learnt"),
    )
    op.create_index("ix_learnt_caller", "learnt", ["caller"], unique=False)
    op.create_index("ix_learnt_changed_at", "learnt", ["changed_at"], unique=False)
