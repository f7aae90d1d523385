"""The tables of the store, for SQLAlchemy Core.

Times are Unix seconds, as floats. Lists and mappings are JSON texts. Tokens are counted as
integers, money as floats in the currency of the settings.

A new store gets these tables. A change of a table is also a new step in `STEPS`, for the stores
that are there. Processes of the version before and of this one use a store at the same time, for as
long as a hand-over lasts, so a step only adds: tables, nullable columns, columns with a server
default, indexes. What nothing uses any more goes in a step of a later version, whose `needed_level`
shuts out the programs that still used it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

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

OLDEST_LEVEL = 3
"""The lowest level that a store may have: that of version 0.1.0, the first that people ran."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only where the column's type is INTEGER.
_RowNumber = BigInteger().with_variant(Integer, "sqlite")

levels = Table(
    "store_levels",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("level", Integer, nullable=False),
    Column("needed_level", Integer, nullable=False),
    Column("program", Text, nullable=False),
    Column("changed_at", Float, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
)
"""One row: the level of these tables, the lowest `SCHEMA_LEVEL` of a program that can use them, and
the version of the program that made them."""

keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("previous_sha256", Text),
    Column("previous_until", Float),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("class", Text, key="class_"),
    Column("max_class", Text),
    Column("models", Text),
    Column("group_name", Text),
    Column("trust_user_headers", Boolean, nullable=False, server_default=false()),
    Column("limits", Text),
    Column("user_limits", Text),
    Column("privacy", Text),
)
"""API keys that commands and the admin API make. `previous_sha256` is valid until `previous_until`,
after a rotation."""

Index(
    "uq_keys_name_in_force",
    keys.c.name,
    unique=True,
    sqlite_where=text("revoked_at IS NULL"),
    postgresql_where=text("revoked_at IS NULL"),
)

revisions = Table(
    "revisions",
    metadata,
    Column("name", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
)
"""A number for each group of tables, which every transaction that changes them raises: one cheap
read tells whether there is something new."""

usage = Table(
    "usage",
    metadata,
    Column("id", Text, primary_key=True),
    Column("process", Text, nullable=False),
    Column("sequence", BigInteger, nullable=False, server_default=text("0")),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float, nullable=False),
    Column("key", Text),
    Column("group_name", Text),
    Column("user", Text),
    Column("model", Text),
    Column("class", Text, key="class_"),
    Column("tier", Text),
    Column("node", Text),
    Column("path", Text),
    Column("stream", Boolean, nullable=False, server_default=false()),
    Column("prompt_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("cached_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("completion_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("slot_seconds", Float, nullable=False, server_default=text("0")),
    Column("cost", Float, nullable=False, server_default=text("0")),
    Column("gpu_cost", Float),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("status", Integer, nullable=False, server_default=text("0")),
    Column("outcome", Text),
    Index(None, "ended_at"),
    Index(None, "process", "sequence"),
    Index(None, "key", "ended_at"),
)
"""The ledger: one row for each request that was admitted and has ended. `process` has written the
row, and `sequence` numbers its rows in the order in which they were committed."""

open_requests = Table(
    "open_requests",
    metadata,
    Column("id", Text, primary_key=True),
    Column("process", Text, nullable=False, index=True),
    Column("started_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("key", Text),
    Column("group_name", Text),
    Column("user", Text),
    Column("model", Text),
    Column("class", Text, key="class_"),
    Column("tier", Text),
    Column("node", Text),
    Column("path", Text),
    Column("stream", Boolean, nullable=False, server_default=false()),
    Column("reserved_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("reserved_cost", Float, nullable=False, server_default=text("0")),
    Column("prompt_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("completion_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("slot_seconds", Float, nullable=False, server_default=text("0")),
    Column("cost", Float, nullable=False, server_default=text("0")),
)
"""Requests that still run, with what they have reserved; `id` is that of their later usage row."""

processes = Table(
    "processes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("started_at", Float, nullable=False),
    Column("seen_at", Float, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
)
"""The gateways that use the store, and when each was last seen alive."""

_UNKNOWN = text("''")

usage_days = Table(
    "usage_days",
    metadata,
    Column("day", Text, primary_key=True),
    # A part of a primary key can't be NULL: an unknown value is ''.
    Column("key", Text, primary_key=True, server_default=_UNKNOWN),
    Column("group_name", Text, primary_key=True, server_default=_UNKNOWN),
    Column("user", Text, primary_key=True, server_default=_UNKNOWN),
    Column("model", Text, primary_key=True, server_default=_UNKNOWN),
    Column("class", Text, key="class_", primary_key=True, server_default=_UNKNOWN),
    Column("tier", Text, primary_key=True, server_default=_UNKNOWN),
    Column("node", Text, primary_key=True, server_default=_UNKNOWN),
    Column("outcome", Text, primary_key=True, server_default=_UNKNOWN),
    Column("requests", BigInteger, nullable=False),
    Column("failures", BigInteger, nullable=False),
    Column("clients_left", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("slot_seconds", Float, nullable=False),
    Column("cost", Float, nullable=False),
    Column("gpu_cost", Float, nullable=False),
    Column("gpu_priced", BigInteger, nullable=False),
    Column("attempts", BigInteger, nullable=False),
)
"""Sums of usage rows that retention has deleted, by day (UTC, `2026-11-23`) and every dimension."""

node_hours = Table(
    "node_hours",
    metadata,
    Column("node", Text, primary_key=True),
    Column("tier", Text, primary_key=True),
    Column("day", Text, primary_key=True),
    Column("seconds", Float, nullable=False),
    Column("cost", Float, nullable=False),
    Column("counted_until", Float, nullable=False),
)
"""How long each node was up on a day (UTC), and what that cost by its `cost_per_hour`. The time up
to `counted_until` is counted: of several processes each adds what lies after it."""

audit = Table(
    "audit",
    metadata,
    Column("id", _RowNumber, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False, index=True),
    Column("actor", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text),
    Column("details", Text),
)
"""Changes that operators made, by whom and when."""

files = Table(
    "files",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("deleted_at", Float),
    Column("folder", Text, nullable=False),
    Column("state", Text, nullable=False, server_default=text("'processed'")),
    Index(None, "owner", "id"),
    Index(None, "folder", "expires_at"),
    Index(None, "folder", "deleted_at"),
)
"""Files of callers, and those that batches write for them. `owner` is the id of a key, `folder` the
id of the folder that holds the file under the name `id`. Ids grow with time. A row with a
`deleted_at` is nobody's any more: the process that has the folder removes the file, then the row.
"""

batches = Table(
    "batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("group_name", Text),
    Column("user", Text),
    Column("api", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file", Text, index=True),
    Column("output_file", Text),
    Column("error_file", Text),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("in_progress_at", Float),
    Column("finalizing_at", Float),
    Column("ended_at", Float),
    Column("cancelling_at", Float),
    Column("paused_at", Float),
    Column("pause_reason", Text),
    Column("state", Text, nullable=False),
    Column("model", Text),
    Column("total", Integer, nullable=False, server_default=text("0")),
    Column("completed", Integer, nullable=False, server_default=text("0")),
    Column("failed", Integer, nullable=False, server_default=text("0")),
    Column("cancelled", Integer, nullable=False, server_default=text("0")),
    Column("expired", Integer, nullable=False, server_default=text("0")),
    Column("prompt_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("cached_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("completion_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("cost", Float, nullable=False, server_default=text("0")),
    Column("output_seconds", Float),
    Column("webhook_url", Text),
    Column("metadata", Text),
    Column("idempotency_key", Text),
    Column("request_digest", Text),
    Column("errors", Text),
    Column("requests_bytes", BigInteger, nullable=False, server_default=text("0")),
    Column("result_bytes", BigInteger, nullable=False, server_default=text("0")),
    Column("keep_until", Float, nullable=False),
    Column("deleted_at", Float),
    Column("class", Text, key="class_", nullable=False),
    Column("folder", Text, nullable=False),
    Index(None, "owner", "id"),
    Index(None, "owner", "ended_at"),
    Index(None, "folder", "keep_until"),
    Index(
        "uq_batches_owner_idempotency_key",
        "owner",
        "idempotency_key",
        unique=True,
    ),
)
"""Batches of both APIs (`api`: `openai` or `anthropic`). `expires_at` is the deadline. A batch
without an `ended_at` is unfinished. Only the processes that have its `folder` work on it. One with
a `deleted_at` is nobody's any more, and is removed with its lines and files, as is one whose
`keep_until` is over. `requests_bytes` is the size of a file that holds the lines of this batch
alone, 0 once that is removed; `result_bytes` that of the recorded results: after the end they are
in files that have rows."""

_UNFINISHED = text("ended_at IS NULL")

Index(
    "ix_batches_unfinished",
    batches.c.folder,
    batches.c.expires_at,
    sqlite_where=_UNFINISHED,
    postgresql_where=_UNFINISHED,
)

_WITH_REQUESTS = text("requests_bytes > 0")

Index(
    "ix_batches_with_requests",
    batches.c.owner,
    batches.c.requests_bytes,
    sqlite_where=_WITH_REQUESTS,
    postgresql_where=_WITH_REQUESTS,
)

stored_requests = Table(
    "stored_requests",
    metadata,
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("batch", Text),
    Column("number", Integer),
    Column("custom_id", Text),
    Column("owner", Text, nullable=False),
    Column("group_name", Text),
    Column("user", Text),
    Column("path", Text, nullable=False),
    Column("model", Text),
    Column("stream", Boolean, nullable=False, server_default=false()),
    Column("webhook_url", Text),
    Column("class", Text, key="class_", nullable=False),
    Column("place", Text, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("max_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("prefix", BigInteger, nullable=False, server_default=text("0")),
    Column("state", Text, nullable=False),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("claimed_by", Text),
    Column("claimed_until", Float),
    Column("not_before", Float, nullable=False, server_default=text("0")),
    Column("deadline", Float),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("status", Integer),
    Column("result_place", Text),
    Column("result_offset", BigInteger),
    Column("result_length", BigInteger),
    Column("error_code", Text),
    Column("keep_until", Float, nullable=False),
    Column("folder", Text, nullable=False),
    Index("uq_stored_requests_batch_number", "batch", "number", unique=True),
    Index("uq_stored_requests_batch_custom_id", "batch", "custom_id", unique=True),
)
"""Requests that wait, run or have run without a client that holds a connection (`kind`: `line`,
`response` or `deferred`). The body is `length` bytes of the file `place` in the folder, the result
likewise: no text is in the store. A line of a batch whose `custom_id` is missing or used by an
earlier line has none here. `id` is also that of the ledger's row, so a result is counted once."""

_WAITING = text("state = 'waiting'")

_RUNNING = text("state = 'running'")

_WITHOUT_BATCH = text("batch IS NULL")

_WAITING_WITHOUT_BATCH = text("batch IS NULL AND state = 'waiting'")

Index(
    "ix_stored_requests_waiting_lines",
    stored_requests.c.batch,
    # All entries have the same. SQLite prefers the index to the unique ones for its two equalities.
    stored_requests.c.state,
    stored_requests.c.prefix,
    stored_requests.c.max_tokens.desc(),
    stored_requests.c.number,
    stored_requests.c.model,
    stored_requests.c.not_before,
    stored_requests.c.prompt_tokens,
    sqlite_where=_WAITING,
    postgresql_where=_WAITING,
)
"""In the order in which lines are claimed; what groups of waiting lines need is all in it."""

Index(
    "ix_stored_requests_waiting_alone",
    stored_requests.c.folder,
    stored_requests.c.state,
    stored_requests.c.kind,
    stored_requests.c.id,
    sqlite_where=_WAITING_WITHOUT_BATCH,
    postgresql_where=_WAITING_WITHOUT_BATCH,
)

Index(
    "ix_stored_requests_running",
    stored_requests.c.folder,
    stored_requests.c.claimed_by,
    stored_requests.c.claimed_until,
    stored_requests.c.batch,
    sqlite_where=_RUNNING,
    postgresql_where=_RUNNING,
)

Index(
    "ix_stored_requests_running_lines",
    stored_requests.c.batch,
    stored_requests.c.state,
    sqlite_where=_RUNNING,
    postgresql_where=_RUNNING,
)

Index(
    "ix_stored_requests_keep_until",
    stored_requests.c.folder,
    stored_requests.c.keep_until,
    sqlite_where=_WITHOUT_BATCH,
    postgresql_where=_WITHOUT_BATCH,
)
"""Lines are removed with their batch."""

Index(
    "ix_stored_requests_kept",
    stored_requests.c.owner,
    stored_requests.c.length,
    stored_requests.c.result_length,
    sqlite_where=_WITHOUT_BATCH,
    postgresql_where=_WITHOUT_BATCH,
)
"""All that the sum of an owner's bytes needs. `result_length` of a response is the size of its log.
"""

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("group_name", Text),
    Column("event", Text, nullable=False),
    Column("object_id", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("origin", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("next_at", Float, nullable=False),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("state", Text, nullable=False),
    Column("last_error", Text),
)
"""Events to be delivered to callers' webhooks. `body` holds ids and states, never text. Whoever
tries a delivery first moves `next_at` behind its own time limit, so that nobody else does; when it
has ended, `next_at` says when that was. `origin` is the part of `url` in front of its path."""

Index(
    "ix_webhook_deliveries_waiting",
    webhook_deliveries.c.origin,
    webhook_deliveries.c.next_at,
    sqlite_where=_WAITING,
    postgresql_where=_WAITING,
)

learnt = Table(
    "learnt",
    metadata,
    Column("gateway", Text, primary_key=True),
    Column("section", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("caller", Text, index=True),
    Column("changed_at", Float, nullable=False, index=True),
    Column("value", Text, nullable=False),
)
"""What each gateway has learnt of nodes and callers (`gateway.app.learnt`), as JSON. `version` is
that of the section's values: a program leaves the rows of other versions alone. `caller` is the
id of the key from whose requests it was learnt: revoking the key deletes it."""


class Step(NamedTuple):
    """How a store of the level before comes to this level."""

    statements: tuple[str, ...]
    """SQL for both databases. It stays as it is when the tables change again."""
    needed_level: int = 1
    """The lowest level of a program that can use the tables afterwards."""


_LEARNT = """
CREATE TABLE learnt (
    gateway TEXT NOT NULL, section TEXT NOT NULL, version INTEGER NOT NULL, key TEXT NOT NULL,
    caller TEXT, changed_at FLOAT NOT NULL, value TEXT NOT NULL,
    CONSTRAINT pk_learnt PRIMARY KEY (gateway, section, version, key)
)
"""

STEPS: Final[Mapping[int, Step]] = {
    4: Step(
        (
            _LEARNT,
            "CREATE INDEX ix_learnt_caller ON learnt (caller)",
            "CREATE INDEX ix_learnt_changed_at ON learnt (changed_at)",
        )
    ),
}
"""By the level to which they lead."""

SCHEMA_LEVEL = max(STEPS)
"""The level of the tables above."""
