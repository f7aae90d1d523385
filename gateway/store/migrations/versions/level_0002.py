"""Files, batches, stored requests and deliveries of webhooks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

NEEDED_LEVEL = 1
"""The lowest level of a program that can use the tables after this migration."""


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "batches",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("group_name", sa.Text(), nullable=True),
        sa.Column("user", sa.Text(), nullable=True),
        sa.Column("api", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("input_file", sa.Text(), nullable=True),
        sa.Column("output_file", sa.Text(), nullable=True),
        sa.Column("error_file", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("in_progress_at", sa.Float(), nullable=True),
        sa.Column("finalizing_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("cancelling_at", sa.Float(), nullable=True),
        sa.Column("paused_at", sa.Float(), nullable=True),
        sa.Column("pause_reason", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("total", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("completed", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("failed", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("cancelled", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("expired", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "completion_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False
        ),
        sa.Column("cost", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.Column("output_seconds", sa.Float(), nullable=True),
        sa.Column("webhook_url", sa.Text(), nullable=True),
        sa.Column("metadata", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("request_digest", sa.Text(), nullable=True),
        sa.Column("errors", sa.Text(), nullable=True),
        sa.Column("keep_until", sa.Float(), nullable=False),
        sa.Column("deleted_at", sa.Float(), nullable=True),
        sa.Column("class", sa.Text(), nullable=False),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index(
        op.f("ix_batches_folder_keep_until"), "batches", ["folder", "keep_until"], unique=False
    )
    op.create_index(op.f("ix_batches_input_file"), "batches", ["input_file"], unique=False)
    op.create_index(op.f("ix_batches_owner_id"), "batches", ["owner", "id"], unique=False)
    op.create_index(
        "ix_batches_unfinished",
        "batches",
        ["folder", "expires_at"],
        unique=False,
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_index(
        op.f("ix_batches_owner_ended_at"), "batches", ["owner", "ended_at"], unique=False
    )
    op.create_index(
        "uq_batches_owner_idempotency_key", "batches", ["owner", "idempotency_key"], unique=True
    )
    op.create_table(
        "files",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("deleted_at", sa.Float(), nullable=True),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'processed'"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index(
        op.f("ix_files_folder_deleted_at"), "files", ["folder", "deleted_at"], unique=False
    )
    op.create_index(
        op.f("ix_files_folder_expires_at"), "files", ["folder", "expires_at"], unique=False
    )
    op.create_index(op.f("ix_files_owner_id"), "files", ["owner", "id"], unique=False)
    op.create_table(
        "stored_requests",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("batch", sa.Text(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("custom_id", sa.Text(), nullable=True),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("group_name", sa.Text(), nullable=True),
        sa.Column("user", sa.Text(), nullable=True),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("stream", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("webhook_url", sa.Text(), nullable=True),
        sa.Column("class", sa.Text(), nullable=False),
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("prefix", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("claimed_by", sa.Text(), nullable=True),
        sa.Column("claimed_until", sa.Float(), nullable=True),
        sa.Column("not_before", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.Column("deadline", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("result_place", sa.Text(), nullable=True),
        sa.Column("result_offset", sa.BigInteger(), nullable=True),
        sa.Column("result_length", sa.BigInteger(), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("keep_until", sa.Float(), nullable=False),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stored_requests")),
    )
    op.create_index(
        "ix_stored_requests_keep_until",
        "stored_requests",
        ["folder", "keep_until"],
        unique=False,
        sqlite_where=sa.text("batch IS NULL"),
        postgresql_where=sa.text("batch IS NULL"),
    )
    op.create_index(
        "ix_stored_requests_running",
        "stored_requests",
        ["folder", "claimed_by", "claimed_until", "batch"],
        unique=False,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_stored_requests_running_lines",
        "stored_requests",
        ["batch", "state"],
        unique=False,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_stored_requests_waiting_alone",
        "stored_requests",
        ["folder", "state", "kind", "id"],
        unique=False,
        sqlite_where=sa.text("batch IS NULL AND state = 'waiting'"),
        postgresql_where=sa.text("batch IS NULL AND state = 'waiting'"),
    )
    op.create_index(
        "ix_stored_requests_waiting_lines",
        "stored_requests",
        [
            "batch",
            "state",
            "prefix",
            sa.text("max_tokens DESC"),
            "number",
            "model",
            "not_before",
            "prompt_tokens",
        ],
        unique=False,
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    )
    op.create_index(
        "uq_stored_requests_batch_custom_id", "stored_requests", ["batch", "custom_id"], unique=True
    )
    op.create_index(
        "uq_stored_requests_batch_number", "stored_requests", ["batch", "number"], unique=True
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("group_name", sa.Text(), nullable=True),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("object_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("next_at", sa.Float(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
    )
    op.create_index(
        "ix_webhook_deliveries_waiting",
        "webhook_deliveries",
        ["origin", "next_at"],
        unique=False,
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    )
