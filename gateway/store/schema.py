"""The tables of the store, for SQLAlchemy Core.

Times are Unix seconds, as floats. Lists and mappings are JSON texts. Tokens are counted as
integers, money as floats in the currency of the settings.

A new store gets these tables, and a store that is there gets what it lacks of them. Processes of
the version before and of this one use a store at the same time, for as long as a hand-over lasts,
so a change of these tables only adds: tables, nullable columns, columns with a server default,
indexes. It raises `SCHEMA_LEVEL`. A version that can't live with programs of lower levels raises
`NEEDED_LEVEL`, which shuts them out.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    false,
    text,
)
from sqlalchemy.types import TypeEngine

# The lowest level that a store may have: that of version 0.1.0, the first that people ran.
OLDEST_LEVEL = 3
SCHEMA_LEVEL = 6  # the level of these tables
NEEDED_LEVEL = 1  # the lowest level of a program that can use them

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _columns(
    kind: type[TypeEngine[Any]], *names: str, needed: bool = False, default: str | None = None
) -> list[Column[Any]]:
    """Columns alike; those with a `default`, as SQL has it, are never NULL either."""
    never_null = needed or default is not None
    initial = None if default is None else text(default)
    return [Column(name, kind, nullable=not never_null, server_default=initial) for name in names]


def _key_columns(*names: str, default: str | None = None) -> list[Column[Any]]:
    """Texts that are parts of the primary key."""
    initial = None if default is None else text(default)
    return [
        Column(name.rstrip("_"), Text, key=name, primary_key=True, server_default=initial)
        for name in names
    ]


def _partial_index(
    name: str, where: str, table: Table, *columns: str, unique: bool = False
) -> None:
    """An index of the rows alone for which this SQL holds; a column after `-` goes down."""
    parts = [table.c[one[1:]].desc() if one[0] == "-" else table.c[one] for one in columns]
    condition = text(where)
    Index(name, *parts, unique=unique, sqlite_where=condition, postgresql_where=condition)


# SQLite numbers rows by itself only where the column's type is INTEGER.
_RowNumber = BigInteger().with_variant(Integer, "sqlite")

# One row: the level of these tables, the lowest `SCHEMA_LEVEL` of a program that can use them, and
# the version of the program that made them.
levels = Table(
    "store_levels",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    *_columns(Integer, "level", "needed_level", needed=True),
    Column("program", Text, nullable=False),
    Column("changed_at", Float, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
)

# API keys that commands and the admin API make. `previous_sha256` is valid until `previous_until`,
# after a rotation.
keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    *_columns(Text, "name", "sha256", needed=True),
    Column("previous_sha256", Text),
    Column("previous_until", Float),
    Column("created_at", Float, nullable=False),
    *_columns(Float, "expires_at", "revoked_at"),
    Column("class", Text, key="class_"),
    *_columns(Text, "max_class", "models", "group_name"),
    Column("trust_user_headers", Boolean, nullable=False, server_default=false()),
    *_columns(Text, "limits", "user_limits", "privacy"),
)

_partial_index("uq_keys_name_in_force", "revoked_at IS NULL", keys, "name", unique=True)

# Groups of keys that commands and the admin API make; those of the settings come before them. What
# is in `limits`, `user_limits` and `privacy` is as `keys` has it.
groups = Table(
    "groups",
    metadata,
    Column("name", Text, primary_key=True),
    *_columns(Float, "created_at", "changed_at", needed=True),
    *_columns(Text, "limits", "user_limits", "privacy"),
)

# A number for each group of tables, which every transaction that changes them raises: one cheap
# read tells whether there is something new.
revisions = Table(
    "revisions",
    metadata,
    Column("name", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
)

# The ledger: one row for each request that was admitted and has ended. `process` has written the
# row, and `sequence` numbers its rows in the order in which they were committed. `wait_seconds` is
# the time in the queue, `ttft_seconds` that from arrival to the first content, `client_request_id`
# the `X-Request-ID` that the client sent. What is NULL is unknown, as in rows of before level 6.
usage = Table(
    "usage",
    metadata,
    Column("id", Text, primary_key=True),
    Column("process", Text, nullable=False),
    Column("sequence", BigInteger, nullable=False, server_default=text("0")),
    *_columns(Float, "started_at", "ended_at", needed=True),
    *_columns(Text, "key", "group_name", "user", "model"),
    Column("class", Text, key="class_"),
    *_columns(Text, "tier", "node", "path"),
    Column("stream", Boolean, nullable=False, server_default=false()),
    *_columns(BigInteger, "prompt_tokens", "cached_tokens", "completion_tokens", default="0"),
    *_columns(Float, "slot_seconds", "cost", default="0"),
    Column("gpu_cost", Float),
    *_columns(Integer, "attempts", "status", default="0"),
    Column("outcome", Text),
    *_columns(Float, "wait_seconds", "ttft_seconds", "prefill_seconds", "decode_seconds"),
    Column("resumptions", Integer),
    Column("client_request_id", Text),
    Index(None, "ended_at"),
    Index(None, "process", "sequence"),
    Index(None, "key", "ended_at"),
)

_partial_index(
    "ix_usage_client_request_id_ended_at",
    "client_request_id IS NOT NULL",
    usage,
    *("client_request_id", "ended_at"),
)

# Requests that still run, with what they have reserved; `id` is that of their later usage row.
open_requests = Table(
    "open_requests",
    metadata,
    Column("id", Text, primary_key=True),
    Column("process", Text, nullable=False, index=True),
    *_columns(Float, "started_at", "updated_at", needed=True),
    *_columns(Text, "key", "group_name", "user", "model"),
    Column("class", Text, key="class_"),
    *_columns(Text, "tier", "node", "path"),
    Column("stream", Boolean, nullable=False, server_default=false()),
    Column("reserved_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("reserved_cost", Float, nullable=False, server_default=text("0")),
    *_columns(BigInteger, "prompt_tokens", "completion_tokens", default="0"),
    *_columns(Float, "slot_seconds", "cost", default="0"),
)

# The gateways that use the store, and when each was last seen alive.
processes = Table(
    "processes",
    metadata,
    Column("id", Text, primary_key=True),
    *_columns(Float, "started_at", "seen_at", needed=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
)

# Sums of usage rows that retention has deleted, by day (UTC, `2026-11-23`) and every dimension. A
# part of a primary key can't be NULL: an unknown value is ''.
usage_days = Table(
    "usage_days",
    metadata,
    *_key_columns("day"),
    *_key_columns("key", "group_name", "user", "model", "class_", default="''"),
    *_key_columns("tier", "node", "outcome", default="''"),
    *_columns(BigInteger, "requests", "failures", "clients_left", needed=True),
    *_columns(BigInteger, "prompt_tokens", "cached_tokens", "completion_tokens", needed=True),
    *_columns(Float, "slot_seconds", "cost", "gpu_cost", needed=True),
    *_columns(BigInteger, "gpu_priced", "attempts", needed=True),
)

# How long each node was up on a day (UTC), and what that cost by its `cost_per_hour`. The time up
# to `counted_until` is counted: of several processes each adds what lies after it.
node_hours = Table(
    "node_hours",
    metadata,
    *_key_columns("node", "tier", "day"),
    *_columns(Float, "seconds", "cost", "counted_until", needed=True),
)

# Changes that operators made, by whom and when.
audit = Table(
    "audit",
    metadata,
    Column("id", _RowNumber, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False, index=True),
    *_columns(Text, "actor", "role", "action", needed=True),
    *_columns(Text, "target", "details"),
)

# Files of callers, and those that batches write for them. `owner` is the id of a key, `folder` the
# id of the folder that holds the file under the name `id`. Ids grow with time. A row with a
# `deleted_at` is nobody's any more: the process that has the folder removes the file, then the row.
files = Table(
    "files",
    metadata,
    Column("id", Text, primary_key=True),
    *_columns(Text, "owner", "name", "purpose", needed=True),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    *_columns(Float, "expires_at", "deleted_at"),
    Column("folder", Text, nullable=False),
    Column("state", Text, nullable=False, server_default=text("'processed'")),
    Index(None, "owner", "id"),
    Index(None, "folder", "expires_at"),
    Index(None, "folder", "deleted_at"),
)

# Batches of both APIs (`api`: `openai` or `anthropic`). `expires_at` is the deadline. A batch
# without an `ended_at` is unfinished. Only the processes that have its `folder` work on it. One
# with a `deleted_at` is nobody's any more, and is removed with its lines and files, as is one whose
# `keep_until` is over. `requests_bytes` is the size of a file that holds the lines of this batch
# alone, 0 once that is removed; `result_bytes` that of the recorded results: after the end they are
# in files that have rows.
batches = Table(
    "batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    *_columns(Text, "group_name", "user"),
    *_columns(Text, "api", "endpoint", needed=True),
    Column("input_file", Text, index=True),
    *_columns(Text, "output_file", "error_file"),
    *_columns(Float, "created_at", "expires_at", needed=True),
    *_columns(Float, "in_progress_at", "finalizing_at", "ended_at", "cancelling_at", "paused_at"),
    Column("pause_reason", Text),
    Column("state", Text, nullable=False),
    Column("model", Text),
    *_columns(Integer, "total", "completed", "failed", "cancelled", "expired", default="0"),
    *_columns(BigInteger, "prompt_tokens", "cached_tokens", "completion_tokens", default="0"),
    Column("cost", Float, nullable=False, server_default=text("0")),
    Column("output_seconds", Float),
    *_columns(Text, "webhook_url", "metadata", "idempotency_key", "request_digest", "errors"),
    *_columns(BigInteger, "requests_bytes", "result_bytes", default="0"),
    Column("keep_until", Float, nullable=False),
    Column("deleted_at", Float),
    Column("class", Text, key="class_", nullable=False),
    Column("folder", Text, nullable=False),
    Index(None, "owner", "id"),
    Index(None, "owner", "ended_at"),
    Index(None, "folder", "keep_until"),
    Index("uq_batches_owner_idempotency_key", "owner", "idempotency_key", unique=True),
)

_partial_index("ix_batches_unfinished", "ended_at IS NULL", batches, "folder", "expires_at")

_partial_index("ix_batches_with_requests", "requests_bytes > 0", batches, "owner", "requests_bytes")

# Requests that wait, run or have run without a client that holds a connection (`kind`: `line`,
# `response` or `deferred`). The body is `length` bytes of the file `place` in the folder, the
# result likewise: no text is in the store. A line of a batch whose `custom_id` is missing or used
# by an earlier line has none here. `id` is also that of the ledger's row, so a result is counted
# once.
stored_requests = Table(
    "stored_requests",
    metadata,
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("batch", Text),
    Column("number", Integer),
    Column("custom_id", Text),
    Column("owner", Text, nullable=False),
    *_columns(Text, "group_name", "user"),
    Column("path", Text, nullable=False),
    Column("model", Text),
    Column("stream", Boolean, nullable=False, server_default=false()),
    Column("webhook_url", Text),
    Column("class", Text, key="class_", nullable=False),
    Column("place", Text, nullable=False),
    *_columns(BigInteger, "offset", "length", needed=True),
    *_columns(BigInteger, "prompt_tokens", "max_tokens", "prefix", default="0"),
    Column("state", Text, nullable=False),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("claimed_by", Text),
    Column("claimed_until", Float),
    Column("not_before", Float, nullable=False, server_default=text("0")),
    Column("deadline", Float),
    Column("created_at", Float, nullable=False),
    *_columns(Float, "started_at", "ended_at"),
    Column("status", Integer),
    Column("result_place", Text),
    *_columns(BigInteger, "result_offset", "result_length"),
    Column("error_code", Text),
    Column("keep_until", Float, nullable=False),
    Column("folder", Text, nullable=False),
    Index("uq_stored_requests_batch_number", "batch", "number", unique=True),
    Index("uq_stored_requests_batch_custom_id", "batch", "custom_id", unique=True),
)

# All entries have the same `state`. SQLite prefers this index to the unique ones for its two
# equalities.
_partial_index(
    "ix_stored_requests_waiting_lines",
    "state = 'waiting'",
    stored_requests,
    *("batch", "state", "prefix", "-max_tokens", "number", "model", "not_before", "prompt_tokens"),
)
"""In the order in which lines are claimed; what groups of waiting lines need is all in it."""

_partial_index(
    "ix_stored_requests_waiting_alone",
    "batch IS NULL AND state = 'waiting'",
    stored_requests,
    *("folder", "state", "kind", "id"),
)

_partial_index(
    "ix_stored_requests_running",
    "state = 'running'",
    stored_requests,
    *("folder", "claimed_by", "claimed_until", "batch"),
)

_partial_index(
    "ix_stored_requests_running_lines", "state = 'running'", stored_requests, "batch", "state"
)

_partial_index(
    "ix_stored_requests_keep_until", "batch IS NULL", stored_requests, "folder", "keep_until"
)
"""Lines are removed with their batch."""

_partial_index(
    "ix_stored_requests_kept", "batch IS NULL", stored_requests, "owner", "length", "result_length"
)
"""All that the sum of an owner's bytes needs. `result_length` of a response is the size of its log.
"""

# Events to be delivered to callers' webhooks. `body` holds ids and states, never text. Whoever
# tries a delivery first moves `next_at` behind its own time limit, so that nobody else does; when
# it has ended, `next_at` says when that was. `origin` is the part of `url` in front of its path.
webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("group_name", Text),
    *_columns(Text, "event", "object_id", "url", "origin", "body", needed=True),
    *_columns(Float, "created_at", "next_at", needed=True),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("state", Text, nullable=False),
    Column("last_error", Text),
)

_partial_index(
    "ix_webhook_deliveries_waiting", "state = 'waiting'", webhook_deliveries, "origin", "next_at"
)

# What each gateway has learnt of nodes and callers (`gateway.app.learnt`), as JSON. `version` is
# that of the section's values: a program leaves the rows of other versions alone. `caller` is the
# id of the key from whose requests it was learnt: revoking the key deletes it.
learnt = Table(
    "learnt",
    metadata,
    *_key_columns("gateway", "section"),
    Column("version", Integer, primary_key=True, autoincrement=False),
    *_key_columns("key"),
    Column("caller", Text, index=True),
    Column("changed_at", Float, nullable=False, index=True),
    Column("value", Text, nullable=False),
)

# Who leads each cluster of gateways (`gateway.cluster.leadership`), and the lists of those that
# share the nodes' slots without a leader, as JSON.
leadership = Table(
    "leadership",
    metadata,
    Column("cluster", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    *_columns(BigInteger, "epoch", "counter", needed=True),
    Column("sharers", Text, nullable=False, server_default=text("'[]'")),
)

# Who belongs to each cluster (`gateway.cluster.tables`). `generation` counts the processes that
# have registered as this member; `process` is the last one.
members = Table(
    "members",
    metadata,
    *_key_columns("cluster", "member"),
    Column("process", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    *_columns(Text, "address", "version", needed=True),
)
