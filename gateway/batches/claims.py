"""Who runs which stored request: claims under leases, which their process renews.

A claimed request is `running` until its result is recorded or its process puts it back. If its
lease is over, or its process gone, any other process of the folder puts it back. Then it may run
twice, and only the process that has the claim can record a result (`recorded_results.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, or_, select, update

from gateway.batches.request_rows import (
    COLUMNS,
    IS_RUNNING,
    IS_WAITING,
    StoredRow,
    chunks,
    count_lines,
    lock_batches,
    row_of,
    runnable_batches,
)
from gateway.batches.states import BatchState, RequestKind, RequestState
from gateway.store.schema import batches, processes, stored_requests
from gateway.usage.processes import ProcessIdentity, SeenProcess, is_gone

_ROW: Final = stored_requests.c


@dataclass(frozen=True, slots=True)
class Pick:
    """Which waiting requests are wanted, and how many.

    Lines come with their prefix: those that begin alike together, the longest first. Without a
    batch the oldest batch comes first. Requests without a batch come in the order of their age.
    """

    limit: int
    kind: RequestKind
    batch: str | None = None
    owner: str | None = None
    model: str | None = None
    prefix: int | None = None
    ids: Sequence[str] | None = None
    """Of these requests alone, which have no batch."""
    by_deadline: bool = False
    """The nearest deadline first; all lines of a batch have the same."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job of the store: claim waiting requests of a folder for a process, pick by pick.

    Returns those that nobody else has; each once, though several picks may want it. What was
    claimed by a transaction whose commit nobody knows of is to be taken back (`take_back`), or
    waits again when its lease is over.
    """

    folder: str
    process: str
    """Its id."""
    picks: Sequence[Pick]
    now: float
    """Unix time."""
    lease_seconds: float

    def __call__(self, connection: Connection) -> list[StoredRow]:
        """Run within the transaction of `connection`."""
        claimed: list[StoredRow] = []
        for pick in self.picks:
            if ids := self._picked(connection, pick):
                claimed += self._claim(connection, ids)
        return claimed

    def _picked(self, connection: Connection, pick: Pick) -> list[str]:
        """The requests of one pick; on PostgreSQL they are locked."""
        wanted: list[ColumnElement[bool]] = [IS_WAITING, _ROW.not_before <= self.now]
        if pick.model is not None:
            wanted.append(_ROW.model == pick.model)
        if pick.prefix is not None:
            wanted.append(_ROW.prefix == pick.prefix)
        if pick.kind is not RequestKind.LINE:
            return self._picked_alone(connection, pick, wanted)
        ids: list[str] = []
        # What is late is about to be ended (`expire_lines`).
        wanted.append(or_(_ROW.deadline.is_(None), _ROW.deadline > self.now))
        for batch in connection.scalars(self._batches(pick, wanted)).all():
            lines = select(_ROW.id).where(_ROW.batch == batch, *wanted)
            lines = lines.order_by(_ROW.prefix, _ROW.max_tokens.desc(), _ROW.number)
            ids += _free(connection, lines, pick.limit - len(ids))
            if len(ids) == pick.limit:
                break
        return ids

    def _batches(self, pick: Pick, wanted: Iterable[ColumnElement[bool]]) -> Select[Any]:
        """The batches that the pick's lines come from, in their order."""
        asked = runnable_batches(self.folder, batches.c.id)
        if pick.owner is not None:
            asked = asked.where(batches.c.owner == pick.owner)
        if pick.batch is not None:
            return asked.where(batches.c.id == pick.batch)
        # A batch that all of its lines are taken from gives at least one: so few suffice.
        waits = select(_ROW.id).where(_ROW.batch == batches.c.id, *wanted)
        order = (batches.c.expires_at, batches.c.id) if pick.by_deadline else (batches.c.id,)
        return asked.where(waits.exists()).order_by(*order).limit(pick.limit)

    def _picked_alone(
        self, connection: Connection, pick: Pick, wanted: Iterable[ColumnElement[bool]]
    ) -> list[str]:
        asked = select(_ROW.id).where(
            _ROW.folder == self.folder, _ROW.kind == pick.kind.value, _ROW.batch.is_(None), *wanted
        )
        if pick.owner is not None:
            asked = asked.where(_ROW.owner == pick.owner)
        if pick.ids is not None:
            asked = asked.where(_ROW.id.in_(pick.ids))
        if pick.by_deadline:
            asked = asked.order_by(_ROW.deadline.is_(None), _ROW.deadline)
        return _free(connection, asked.order_by(_ROW.id), pick.limit)

    def _claim(self, connection: Connection, ids: list[str]) -> list[StoredRow]:
        place = {id_: number for number, id_ in enumerate(ids)}
        claimed = [
            row_of(row)
            for some in chunks(ids)
            for row in connection.execute(
                update(stored_requests)
                .where(_ROW.id.in_(some), IS_WAITING)
                .values(
                    state=RequestState.RUNNING.value,
                    claimed_by=self.process,
                    claimed_until=self.now + self.lease_seconds,
                    started_at=self.now,
                )
                .returning(*COLUMNS)
            )
        ]
        return sorted(claimed, key=lambda row: place[row.id])


def _free(connection: Connection, asked: Select[Any], limit: int) -> list[str]:
    """Ids of rows that no other transaction holds; on SQLite there is no other one."""
    return list(connection.scalars(asked.limit(limit).with_for_update(skip_locked=True)))


def renew(
    connection: Connection, process: str, ids: Iterable[str], now: float, lease_seconds: float
) -> set[str]:
    """Renew the claims of a process; those that are still wanted.

    The others were cancelled, or have been taken from it: it ends their runs, then puts them back.
    """
    unwanted = select(batches.c.id).where(
        batches.c.ended_at.is_(None), batches.c.state == BatchState.CANCELLING.value
    )
    wanted: set[str] = set()
    for some in chunks(ids):
        renewed = update(stored_requests).where(
            _ROW.id.in_(some),
            _ROW.claimed_by == process,
            IS_RUNNING,
            or_(_ROW.batch.is_(None), _ROW.batch.not_in(unwanted)),
        )
        renewed = renewed.values(claimed_until=now + lease_seconds)
        wanted.update(connection.scalars(renewed.returning(_ROW.id)))
    return wanted


def paused(connection: Connection, ids: Iterable[str]) -> set[str]:
    """Those of the batches that are paused."""
    asked = select(batches.c.id).where(batches.c.paused_at.is_not(None))
    return {
        id_
        for some in chunks(ids)
        for id_ in connection.scalars(asked.where(batches.c.id.in_(some)))
    }


def still_unfinished(connection: Connection, ids: Iterable[str]) -> set[str]:
    """Those of the requests that wait or run."""
    unfinished = _ROW.state.in_([RequestState.WAITING.value, RequestState.RUNNING.value])
    asked = select(_ROW.id).where(unfinished)
    return {
        id_ for some in chunks(ids) for id_ in connection.scalars(asked.where(_ROW.id.in_(some)))
    }


def put_back(
    connection: Connection,
    process: str,
    ids: Iterable[str],
    not_before: float,
    *,
    failed: bool = False,
) -> None:
    """Let requests that a process runs wait until `not_before`; `failed`: nodes failed this run.

    Lines whose batch is being cancelled end as cancelled.
    """
    for some in chunks(ids):
        _let_wait(
            connection,
            [_ROW.id.in_(some), _ROW.claimed_by == process],
            {"not_before": not_before, "attempts": _ROW.attempts + int(failed)},
        )


def take_back(
    connection: Connection, folder: str, process: str, claimed_at: Iterable[float]
) -> int:
    """Let requests wait that a process has claimed at these times, unknown to it; how many."""
    at = _ROW.started_at.in_(sorted(set(claimed_at)))
    return _let_wait(connection, [_ROW.folder == folder, _ROW.claimed_by == process, at], {})


def release_lost(
    connection: Connection,
    folder: str,
    own: ProcessIdentity,
    now: float,
    own_kinds: Iterable[RequestKind] = tuple(RequestKind),
) -> int:
    """Let requests wait whose lease is over or whose process is gone; how many.

    `own_kinds`: the kinds whose claims the caller has just renewed. After the store was away, the
    process may still run its requests of other kinds, though their leases are over.
    """
    running = _ROW.folder == folder, IS_RUNNING
    kinds = [kind.value for kind in own_kinds]
    is_mine = or_(_ROW.claimed_by != own.id, _ROW.kind.in_(kinds))
    lost: list[ColumnElement[bool]] = [(_ROW.claimed_until <= now) & is_mine]
    claimers = set(connection.scalars(select(_ROW.claimed_by).where(*running).distinct()))
    if gone := _gone(connection, claimers - {own.id}, own.host):
        lost.append(_ROW.claimed_by.in_(gone))
    # Whoever holds one of them at this moment renews it, or ends it.
    return _let_wait(connection, [_ROW.folder == folder, or_(*lost)], {}, skip_locked=True)


def _gone(connection: Connection, ids: set[str], host: str) -> list[str]:
    """Those of the processes that do not run any more for sure, or are not registered."""
    columns = processes.c.id, processes.c.host, processes.c.pid, processes.c.seen_at
    asked = select(*columns).where(processes.c.id.in_(ids))
    seen = {row.id: SeenProcess(*row) for row in connection.execute(asked)} if ids else {}
    return sorted(id_ for id_ in ids if id_ not in seen or is_gone(seen[id_], host))


def _let_wait(
    connection: Connection,
    conditions: Iterable[ColumnElement[bool]],
    values: dict[str, Any],
    *,
    skip_locked: bool = False,
) -> int:
    """Let running requests of these conditions wait, or end if their batch is being cancelled."""
    chosen = select(_ROW.id, _ROW.batch).where(*conditions, IS_RUNNING)
    of_batches = {row.batch for row in connection.execute(chosen)}
    lock_batches(connection, of_batches)
    locked = connection.execute(chosen.with_for_update(skip_locked=skip_locked))
    found = {row.id: row.batch for row in locked if row.batch in of_batches}
    cancelling = _cancelling(connection, {batch for batch in of_batches if batch is not None})
    cancelled = Counter(batch for batch in found.values() if batch in cancelling)
    since = select(batches.c.cancelling_at).where(batches.c.id == _ROW.batch).scalar_subquery()
    ends = {"state": RequestState.CANCELLED.value, "ended_at": since}
    waits = {"state": RequestState.WAITING.value, **values}
    for is_end, changes in ((True, ends), (False, waits)):
        for some in chunks(id_ for id_, batch in found.items() if (batch in cancelling) is is_end):
            changed = update(stored_requests).where(_ROW.id.in_(some), IS_RUNNING)
            connection.execute(changed.values(claimed_by=None, claimed_until=None, **changes))
    for batch in sorted(cancelled):
        count_lines(connection, batch, RequestState.CANCELLED, cancelled[batch])
    return len(found)


def _cancelling(connection: Connection, ids: Iterable[str]) -> set[str]:
    """Those of the batches that are being cancelled."""
    asked = select(batches.c.id).where(batches.c.state == BatchState.CANCELLING.value)
    return {
        id_
        for some in chunks(ids)
        for id_ in connection.scalars(asked.where(batches.c.id.in_(some)))
    }
