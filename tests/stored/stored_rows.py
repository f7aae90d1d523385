"""Batches and lines in a store, as tests of their rows need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from gateway.callers.ledger import ROW_COLUMNS, UsageRow
from gateway.config.stored import BatchSettings
from gateway.store.schema import batches, stored_requests
from gateway.store.store import Store
from gateway.stored import claims
from gateway.stored.batch_rows import Batch, add_batch, begin_batch
from gateway.stored.claims import (
    ROWS,
    Pick,
    RecordedResult,
    RequestKind,
    RequestState,
    StoredRow,
    add_rows,
    line_id,
    new_id,
)
from gateway.stored.folder import job

NOW = 1_800_000_000.0
DAY = 86_400.0
FOLDER = "f" * 32
PATH = "/v1/chat/completions"
LEASE = 30.0
P = ParamSpec("P")
T = TypeVar("T")


def do(
    store: Store, job: Callable[Concatenate[Connection, P], T], *args: P.args, **keys: P.kwargs
) -> T:
    """Run a job of the store with these arguments."""
    return store.run_now(lambda connection: job(connection, *args, **keys))


def limits(**values: Any) -> BatchSettings:
    """Settings with these limits, which need not go together, and with wide others."""
    return BatchSettings().model_copy(update={"bytes_per_key": 1 << 40, **values})


def batch_id(number: int = 1) -> str:
    """The id of the batch that was created `number` seconds after `NOW`."""
    return new_id("batch_", NOW + number, lambda count: "ab" * count)


def a_batch(number: int = 1, **values: Any) -> Batch:
    """A batch of alice."""
    given: dict[str, Any] = {
        "owner": "alice", "api": "openai", "endpoint": PATH, "input_file": None,
        "created_at": NOW, "expires_at": NOW + DAY, "keep_until": NOW + 30 * DAY, "folder": FOLDER,
    }  # fmt: skip
    return Batch(id=batch_id(number), **{**given, **values})


def a_line(number: int, batch: Batch | None = None, **values: Any) -> StoredRow:
    """A line of the batch."""
    batch = batch or a_batch()
    given: dict[str, Any] = {
        "kind": RequestKind.LINE, "owner": batch.owner, "path": PATH, "place": "file-1",
        "offset": 100 * number, "length": 100, "created_at": NOW, "keep_until": NOW + 30 * DAY,
        "folder": batch.folder, "batch": batch.id, "number": number, "custom_id": f"c{number}",
        "model": "demo", "prompt_tokens": 10, "max_tokens": 20, "deadline": batch.expires_at,
    }  # fmt: skip
    return StoredRow(id=line_id(batch.id, number), **{**given, **values})


def alone(number: int, **values: Any) -> StoredRow:
    """A request in the background, of no batch."""
    given: dict[str, Any] = {
        "id": new_id("resp_", NOW + number, lambda count: "cd" * count),
        "kind": RequestKind.RESPONSE, "owner": "alice", "path": "/v1/responses",
        "place": "requests-1", "offset": 0, "length": 100, "created_at": NOW,
        "keep_until": NOW + DAY, "folder": FOLDER, "class_": "normal", "model": "demo",
    }  # fmt: skip
    return StoredRow(**{**given, **values})


def to_run(id_: str, owner: str, path: str, **values: Any) -> StoredRow:
    """A request that is run without a store."""
    given = {"id": id_, "owner": owner, "path": path, "kind": RequestKind.DEFERRED}
    return alone(0, **{**given, "class_": "batch", "model": None, **values})


def find_row(connection: Connection, owner: str, id_: str, kind: RequestKind) -> StoredRow | None:
    """The owner's stored request."""
    row = stored_requests.c
    return ROWS.one(connection, row.id == id_, row.owner == owner, row.kind == kind.value)


def begin(store: Store, batch: Batch, lines: list[StoredRow], model: str | None = "demo") -> None:
    """Add a batch with its lines, and let them run."""
    store.run_now(job(add_batch, batch, limits(batches_per_key=1000)))
    for at in range(0, len(lines), 500):
        some = lines[at : at + 500]
        assert do(store, add_rows, some)
    store.run_now(job(begin_batch, batch.id, model, NOW))


def claim(
    store: Store, process: str = "p1", limit: int = 10, *, now: float = NOW, **values: Any
) -> list[StoredRow]:
    """Claim lines of any batch, or what `values` of a `Pick` say."""
    if not values.keys() & {"kind", "batch"}:
        return do(store, claim_any, FOLDER, process, limit, now, LEASE, **values)
    pick = Pick(limit, **{"kind": RequestKind.LINE, **values})
    return do(store, claims.claim, FOLDER, process, [pick], now, LEASE)


def claim_any(
    connection: Connection, folder: str, process: str, limit: int, now: float, lease_seconds: float,
    model: str | None = None, prefix: int | None = None,
) -> list[StoredRow]:  # fmt: skip
    """Claim lines, those of the oldest batch first."""
    runnable = claims.runnable_batches(folder, batches.c.id).order_by(batches.c.id)
    claimed: list[StoredRow] = []
    for id_ in connection.scalars(runnable).all():
        pick = Pick(limit - len(claimed), RequestKind.LINE, id_, model=model, prefix=prefix)
        claimed += claims.claim(connection, folder, process, [pick], now, lease_seconds)
    return claimed


def numbers(rows: list[StoredRow]) -> list[int | None]:
    """The lines' numbers."""
    return [row.number for row in rows]


def usage_of(row: StoredRow, process: str = "p1") -> UsageRow:
    """What the ledger gets for a request that was answered."""
    values: dict[str, Any] = {
        "id": row.id, "process": process, "started_at": NOW, "ended_at": NOW + 1, "key": row.owner,
        "model": row.model, "class": "batch", "tier": "cpu", "node": "a", "path": row.path,
        "stream": False, "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 5,
        "slot_seconds": 0.5, "cost": 0.25, "attempts": 1, "status": 200, "outcome": "ok",
    }  # fmt: skip
    return tuple(values.get(name) for name in ROW_COLUMNS)


def a_result(row: StoredRow, **values: Any) -> RecordedResult:
    """A response to a stored request, with its usage."""
    given: dict[str, Any] = {
        "state": RequestState.DONE, "status": 200, "result_place": "results-1",
        "result_offset": 100 * (row.number or 0), "result_length": 100, "usage": usage_of(row),
    }  # fmt: skip
    return RecordedResult(row.id, **{**given, **values})
