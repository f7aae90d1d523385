"""The tables of the store, for SQLAlchemy Core.

Times are Unix seconds, as floats. Lists and mappings are JSON texts. Tokens are counted as
integers, money as floats in the currency of the settings.

A change of a table is a new migration in `migrations/versions`, and a new `SCHEMA_LEVEL`. Processes
of the version before and of this one use a store at the same time, for as long as a hand-over
lasts, so a migration only adds: tables, nullable columns, columns with a server default, indexes.
What nothing uses any more goes in a migration of a later version, whose `NEEDED_LEVEL` shuts out
the programs that still used it.
"""

from __future__ import annotations

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

SCHEMA_LEVEL = 1
"""The level of the tables below: the number of the newest migration."""

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
