"""The audit log: who has changed what, when, and with which outcome.

Each change is logged at once, and kept in the store for `/admin/audit`. While the store can't be
written, a bounded number of changes waits for it. Attempts that were refused have bounds of their
own, here and in the store: whoever may change nothing can't push out what others have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
import structlog
from sqlalchemy import ColumnElement, Connection, delete, func, insert, not_, or_, select

from gateway.callers.windows import time_text
from gateway.events import InventoryChanged
from gateway.store.failures import StoreError
from gateway.store.schema import audit as audit_table
from gateway.store.store import Store

log = structlog.get_logger()
LONGEST_TEXT = 200  # characters of a name or value that are kept
# Changes that wait for the store, or without one are all that is kept; further ones replace the
# oldest.
MOST_PENDING = 1000
MOST_ROWS = 100_000  # changes that the store keeps; a hundredth more until old ones are removed
# Refused attempts that wait for the store, or without one are all that is kept.
MOST_REFUSED_PENDING = 100
MOST_REFUSED_ROWS = 10_000  # refused attempts that the store keeps
RETRY_SECONDS = 5.0  # seconds until a store that failed is tried again
_LOGGED = ("actor", "role", "action", "target", "outcome")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change, or an attempt at one. It holds no secret."""

    id: Annotated[int, "grows with time"] = 0  # 0: not yet stored
    at: float  # seconds since 1970
    actor: Annotated[str, "an admin key's id, `key_file`, `local` (no key is needed), `file`, "
        "`signal` or `gateway`"]  # fmt: skip
    role: Annotated[str | None, "of the key"]
    action: Annotated[str, "`drain`, `resume`, `probe`, `cancel`, `reload`, `settings`, "
        "`inventory`, `certificate`, `handover`, `start`, `stop`; `keys.…`, `models.…`, "
        "`placements.…`, `batches.…`"]  # fmt: skip
    target: Annotated[str, "the node, request, key or file"]
    outcome: Annotated[str, "`done`, or the code of the error"]
    refused: Annotated[bool, "whether it was refused (4xx) and changed nothing"] = False
    details: Annotated[Mapping[str, str], "what else is known, such as a drain's deadline, or the "
        "`member` of a cluster that was asked"]  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The entry as JSON values."""
        return {**msgspec.structs.asdict(self), "at": time_text(self.at, "milliseconds")}


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """Which entries to show, the latest first. Times are in seconds since 1970."""

    since: float | None = None
    until: float | None = None
    before: int | None = None  # only those with a smaller id
    action: str | None = None
    """Only this action, or those that begin with it and a dot: `keys` for `keys.revoke`."""
    target: str | None = None
    limit: int = 100


@dataclass(eq=False)
class AuditTrail:
    """Logs changes and keeps them; `record` never waits.

    Without `store` the last ones are kept in memory.
    """

    wall_clock: Callable[[], float]
    store: Store | None = None
    member: str = ""  # of a cluster; empty: there is none
    retry_seconds: float = RETRY_SECONDS
    most_rows: int = MOST_ROWS
    most_refused_rows: int = MOST_REFUSED_ROWS
    lost: int = 0  # changes that were logged but could not be kept

    def __post_init__(self) -> None:
        self._pending: deque[AuditEntry] = deque()
        self._refused: deque[AuditEntry] = deque(maxlen=MOST_REFUSED_PENDING)
        self._recorded = asyncio.Event()
        self._writing = asyncio.Lock()
        self._last_at = 0.0
        self._last_id = 0

    def record(
        self,
        actor: str,
        role: str | None,
        action: str,
        target: str = "",
        outcome: str = "done",
        *,
        details: Mapping[str, str] | None = None,
        refused: bool = False,
        member: str = "",
    ) -> None:
        """Tell of a change, or of an attempt at one that was `refused`.

        Texts are shortened; nothing secret may be in them. `member`: of a cluster, which was asked
        for it, if not this one.
        """
        if member or self.member:
            details = {**(details or {}), "member": member or self.member}
        # No two entries have the same time, by which a repeated write is recognised.
        self._last_at = max(self.wall_clock(), self._last_at + 1e-6)
        self._last_id += 1
        entry = AuditEntry(
            id=self._last_id if self.store is None else 0,
            at=self._last_at,
            actor=_shortened(actor),
            role=role,
            action=action,
            target=_shortened(target),
            outcome=outcome,
            refused=refused,
            details={_shortened(key): _shortened(value) for key, value in (details or {}).items()},
        )
        told = {name: getattr(entry, name) for name in _LOGGED}
        log.info("audit", **told, **({"details": dict(entry.details)} if entry.details else {}))
        kept = self._refused if refused else self._pending
        kept.append(entry)
        if len(self._pending) > MOST_PENDING:
            self._pending.popleft()
            if self.store is not None:
                self.lost += 1
                log.warning("audit entries lost", lost=self.lost, why="the store can't be written")
        self._recorded.set()

    async def run(self) -> None:
        """Write what is recorded to the store; never ends."""
        while self.store is not None:
            await self._recorded.wait()
            try:
                await self.flush()
            except StoreError:  # the store itself tells of its state
                await asyncio.sleep(self.retry_seconds)

    async def flush(self) -> None:
        """Write what is recorded to the store now. Raises: StoreError; then it is kept."""
        if self.store is None:
            return
        async with self._writing:
            self._recorded.clear()
            entries = list(self._kept())
            if not entries:
                return
            bounds = {False: self.most_rows, True: self.most_refused_rows}
            try:
                await self.store.run(partial(_write, entries=entries, bounds=bounds))
            except StoreError:
                self._recorded.set()
                raise
            written = set(map(id, entries))
            for kept in (self._pending, self._refused):
                while kept and id(kept[0]) in written:
                    kept.popleft()

    async def entries(self, query: AuditQuery) -> list[AuditEntry]:
        """The changes, the latest first. Raises: StoreError."""
        if self.store is not None:
            with contextlib.suppress(StoreError):
                await self.flush()
            return await self.store.run(
                lambda connection: read_audit(connection, query), write=False
            )
        found = [entry for entry in self._kept() if _is_wanted(entry, query)]
        return found[::-1][: query.limit]

    def _kept(self) -> Iterable[AuditEntry]:
        """All that is kept here, in the order of time."""
        return heapq.merge(self._pending, self._refused, key=lambda entry: entry.at)

    def record_settings(self, actor: str, changed: Sequence[str], *, invalid: bool) -> None:
        """Tell of settings that were read again: the top-level keys that have changed."""
        if changed or invalid:
            outcome = "invalid_configuration" if invalid else "done"
            details = {"changed": ", ".join(changed)} if changed else {}
            self.record(actor, None, "settings", "", outcome, details=details)

    def record_inventory(self, actor: str, change: InventoryChanged | None) -> None:
        """Tell of an inventory that was read again; None: it was invalid."""
        if change is None:
            self.record(actor, None, "inventory", "", "invalid_configuration")
            return
        groups = {"added": change.added, "changed": change.changed, "removed": change.removed}
        details = {group: ", ".join(names) for group, names in groups.items() if names}
        if details:
            self.record(actor, None, "inventory", details=details)


def _shortened(text: str) -> str:
    """The text as it is kept: not too long, and without what PostgreSQL can't store."""
    text = text[: LONGEST_TEXT + 1].encode(errors="replace").decode().replace("\0", "?")
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def _is_wanted(entry: AuditEntry, query: AuditQuery) -> bool:
    return (
        (query.since is None or entry.at >= query.since)
        and (query.until is None or entry.at < query.until)
        and (query.before is None or entry.id < query.before)
        and (query.target is None or entry.target == query.target)
        and (
            query.action is None
            or entry.action == query.action
            or entry.action.startswith(f"{query.action}.")
        )
    )


# How the details of a refused attempt begin in the store: the table has no column for it.
_REFUSED_MARK = '{"refused": true'

_IS_REFUSED: ColumnElement[bool] = func.coalesce(audit_table.c.details, "").startswith(
    _REFUSED_MARK, autoescape=True
)


def _write(
    connection: Connection, *, entries: Sequence[AuditEntry], bounds: Mapping[bool, int]
) -> None:
    """Insert the entries that are not there yet: a write that failed may have been done.

    `bounds`: how many changes, and (True) refused attempts, are kept.
    """
    columns = audit_table.c
    first = entries[0].at
    known = {
        (at, actor, action)
        for at, actor, action in connection.execute(
            select(columns.at, columns.actor, columns.action).where(columns.at >= first)
        )
    }
    new = [entry for entry in entries if (entry.at, entry.actor, entry.action) not in known]
    rows = [
        {name: getattr(entry, name) for name in ("at", "actor", "action", "target")}
        | {"role": entry.role or "", "details": _details(entry)}
        for entry in new
    ]
    if not rows:
        return
    connection.execute(insert(audit_table), rows)
    newest = connection.execute(select(func.max(columns.id))).scalar_one()
    for is_refused, most in bounds.items():
        # Counting takes a while, so it is not done for each row.
        every = max(1, most // 100)
        if newest // every != (newest - len(rows)) // every:
            kind = _IS_REFUSED if is_refused else not_(_IS_REFUSED)
            beyond = select(columns.id).where(kind).order_by(columns.id.desc()).offset(most)
            oldest = connection.execute(beyond.limit(1)).scalar()
            if oldest is not None:
                connection.execute(delete(audit_table).where(kind, columns.id <= oldest))


def _details(entry: AuditEntry) -> str:
    mark = {"refused": True} if entry.refused else {}
    return json.dumps({**mark, "outcome": entry.outcome, **entry.details})


def read_audit(connection: Connection, query: AuditQuery) -> list[AuditEntry]:
    """The entries of the store, the latest first: a job of the store's thread."""
    columns = audit_table.c
    wanted = select(audit_table).order_by(columns.id.desc()).limit(query.limit)
    if query.since is not None:
        wanted = wanted.where(columns.at >= query.since)
    if query.until is not None:
        wanted = wanted.where(columns.at < query.until)
    if query.before is not None:
        wanted = wanted.where(columns.id < query.before)
    if query.target is not None:
        wanted = wanted.where(columns.target == query.target)
    if query.action is not None:
        within = columns.action.startswith(f"{query.action}.", autoescape=True)
        wanted = wanted.where(or_(columns.action == query.action, within))
    return [_entry(row._asdict()) for row in connection.execute(wanted)]


def _entry(row: Mapping[str, Any]) -> AuditEntry:
    details = json.loads(row["details"] or "{}")
    known = {"role": row["role"] or None, "target": row["target"] or "", "details": details}
    outcome, refused = details.pop("outcome", "done"), details.pop("refused", False)
    return AuditEntry(**{**row, **known}, outcome=outcome, refused=refused)
