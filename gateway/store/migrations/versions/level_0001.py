"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

NEEDED_LEVEL = 1
"""The lowest level of a program that can use the tables after this migration."""


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "audit",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=True),
        sa.Column("details", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_at"), "audit", ["at"], unique=False)
    op.create_table(
        "keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("previous_sha256", sa.Text(), nullable=True),
        sa.Column("previous_until", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.Column("class", sa.Text(), nullable=True),
        sa.Column("max_class", sa.Text(), nullable=True),
        sa.Column("models", sa.Text(), nullable=True),
        sa.Column("group_name", sa.Text(), nullable=True),
        sa.Column("trust_user_headers", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("limits", sa.Text(), nullable=True),
        sa.Column("user_limits", sa.Text(), nullable=True),
        sa.Column("privacy", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
    )
    op.create_index(
        "uq_keys_name_in_force",
        "keys",
        ["name"],
        unique=True,
        sqlite_where=sa.text("revoked_at IS NULL"),
        postgresql_where=sa.text("revoked_at IS NULL"),
    )
    op.create_table(
        "node_hours",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("day", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("cost", sa.Float(), nullable=False),
        sa.Column("counted_until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("node", "tier", "day", name=op.f("pk_node_hours")),
    )
    op.create_table(
        "open_requests",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("group_name", sa.Text(), nullable=True),
        sa.Column("user", sa.Text(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("class", sa.Text(), nullable=True),
        sa.Column("tier", sa.Text(), nullable=True),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("stream", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("reserved_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("reserved_cost", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "completion_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False
        ),
        sa.Column("slot_seconds", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.Column("cost", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_open_requests")),
    )
    op.create_index(op.f("ix_open_requests_process"), "open_requests", ["process"], unique=False)
    op.create_table(
        "processes",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_processes")),
    )
    op.create_table(
        "revisions",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_revisions")),
    )
    op.create_table(
        "store_levels",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("needed_level", sa.Integer(), nullable=False),
        sa.Column("program", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.Float(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_store_levels_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_store_levels")),
    )
    op.create_table(
        "usage",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("group_name", sa.Text(), nullable=True),
        sa.Column("user", sa.Text(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("class", sa.Text(), nullable=True),
        sa.Column("tier", sa.Text(), nullable=True),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("stream", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "completion_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False
        ),
        sa.Column("slot_seconds", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.Column("cost", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.Column("gpu_cost", sa.Float(), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("status", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage")),
    )
    op.create_index(op.f("ix_usage_ended_at"), "usage", ["ended_at"], unique=False)
    op.create_index(op.f("ix_usage_key_ended_at"), "usage", ["key", "ended_at"], unique=False)
    op.create_index(
        op.f("ix_usage_process_sequence"), "usage", ["process", "sequence"], unique=False
    )
    op.create_table(
        "usage_days",
        sa.Column("day", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), server_default=sa.text("('')"), nullable=False),
        sa.Column("group_name", sa.Text(), server_default=sa.text("('')"), nullable=False),
        sa.Column("user", sa.Text(), server_default=sa.text("('')"), nullable=False),
        sa.Column("model", sa.Text(), server_default=sa.text("('')"), nullable=False),
        sa.Column("class", sa.Text(), server_default=sa.text("('')"), nullable=False),
        sa.Column("tier", sa.Text(), server_default=sa.text("('')"), nullable=False),
        sa.Column("node", sa.Text(), server_default=sa.text("('')"), nullable=False),
        sa.Column("outcome", sa.Text(), server_default=sa.text("('')"), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        sa.Column("clients_left", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("slot_seconds", sa.Float(), nullable=False),
        sa.Column("cost", sa.Float(), nullable=False),
        sa.Column("gpu_cost", sa.Float(), nullable=False),
        sa.Column("gpu_priced", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "day",
            "key",
            "group_name",
            "user",
            "model",
            "class",
            "tier",
            "node",
            "outcome",
            name=op.f("pk_usage_days"),
        ),
    )
