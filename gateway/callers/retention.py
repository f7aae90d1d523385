"""Retention: old rows of the ledger become sums by day, so that the store stays bounded.

A row that goes is added to `usage_days` in the transaction that deletes it: reports and budgets
count the sums like the rows. What is lost is when in its day a request ran, and its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection, delete, func, select

from gateway.callers import reports
from gateway.callers.reports import Reporter, Sums
from gateway.callers.windows import DAY
from gateway.config.stored import RetentionSettings
from gateway.store.database import insert_for
from gateway.store.schema import revisions, usage, usage_days
from gateway.store.worker import StoreWorker

BATCH_ROWS = 500  # rows that one job of the store turns into sums: some 40 ms of work
# Rows that one job of the store counts: some 2 ms of work. Meanwhile the ledger writes nothing, so
# a million at once would be too many on a slow machine.
COUNTED_ROWS = 20_000
BATCH_PAUSE = 0.02  # seconds between two batches, in which the store does its other work
PASS_INTERVAL = 600.0  # seconds between two passes
FIRST_PASS = 30.0  # seconds after the start: not while a predecessor hands over
# Seconds for which a row stays in any case, however many there are: so long the windows of limits
# and the repetition of a lost write need it.
YOUNGEST = 2 * 3600.0
VACUUM_PAGES = 500  # free pages that one job gives back to the file system, 2 MB of a SQLite file
MOST_VACUUMS = 1000  # such jobs in one pass
_DIMENSIONS = ("key", "group_name", "user", "model", "class_", "tier", "node", "outcome")
# What sums of rows are kept by.
_PLACE = (reports.dimension(usage, "day"), *(usage.c[name] for name in _DIMENSIONS))
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RollUp:
    """A job of the store: turns the oldest rows into sums; returns how many."""

    before: float  # only rows of requests that ended before it
    rows: int = BATCH_ROWS

    def __call__(self, connection: Connection) -> int:
        """Run within the transaction of `connection`."""
        old = select(usage.c.id).where(usage.c.ended_at < self.before).limit(1)
        if self.rows <= 0 or connection.scalar(old) is None:
            return 0
        # Before the rows are read, so that of two processes one waits for the other.
        raised = insert_for(connection)(revisions).values(name=reports.ROLLED_UP, number=1)
        connection.execute(
            raised.on_conflict_do_update(
                index_elements=[revisions.c.name], set_={"number": revisions.c.number + 1}
            )
        )
        oldest = select(usage.c.id).where(usage.c.ended_at < self.before)
        ids = list(connection.scalars(oldest.order_by(usage.c.ended_at).limit(self.rows)))
        if not ids:
            return 0
        sums: dict[tuple[str, ...], Sums] = {}
        summed = select(*_PLACE, *reports.ROW_SUMS).where(usage.c.id.in_(ids)).group_by(*_PLACE)
        for day, *values in connection.execute(summed):
            place, numbers = values[: len(_DIMENSIONS)], values[len(_DIMENSIONS) :]
            whose = (reports.label_of("day", day), *(value or "" for value in place))
            sums.setdefault(whose, Sums()).add(numbers)
        _add_to_days(connection, sums)
        gone = connection.execute(delete(usage).where(usage.c.id.in_(ids))).rowcount
        assert gone == len(ids), "rows were deleted by somebody else"
        return gone


def _add_to_days(connection: Connection, sums: dict[tuple[str, ...], Sums]) -> None:
    add = insert_for(connection)(usage_days)
    add = add.on_conflict_do_update(
        index_elements=list(usage_days.primary_key),
        set_={name: usage_days.c[name] + add.excluded[name] for name in reports.SUM_NAMES},
    )
    names = ("day", *(usage_days.c[n].key for n in _DIMENSIONS), *reports.SUM_NAMES)
    connection.execute(
        add, [dict(zip(names, (*place, *one.values()), strict=True)) for place, one in sums.items()]
    )


class Retention:
    """Keeps the ledger within its limits, a batch at a time.

    `settings` gives those in force. No report is read while a batch moves: it would count the rows
    twice or not at all.
    """

    def __init__(
        self,
        reporter: Reporter,
        settings: Callable[[], RetentionSettings],
        now: Callable[[], float],
    ) -> None:
        self._store = reporter.store
        self._settings = settings
        self._reading = reporter.reading
        self._now = now
        self.worker = StoreWorker(
            self._one_pass,
            PASS_INTERVAL,
            first=FIRST_PASS,
            on_away=lambda why: log.warning("old usage stays", why=why),
        )

    async def _one_pass(self) -> None:
        if gone := await self.keep_within_limits():
            log.info("old usage summed by day", rows=gone)

    async def keep_within_limits(self) -> int:
        """Turn into sums what is too old, then the oldest of what is too many; returns how many.

        Raises: StoreError; what is done by then stays done.
        """
        gone = 0
        settings, now = self._settings(), self._now()
        youngest = now - YOUNGEST
        if settings.days:
            before = (now // DAY - settings.days) * DAY
            gone += await self._roll_up(min(before, youngest), None)
        if settings.rows:
            gone += await self._roll_up(youngest, await self._count_rows() - settings.rows)
        if gone:
            for _ in range(MOST_VACUUMS):
                if not await self._store.run(give_back_pages):
                    break
                await asyncio.sleep(BATCH_PAUSE)
        return gone

    async def _count_rows(self) -> int:
        counter = RowCounter()
        while True:
            if await self._store.run(counter, write=False):
                return counter.counted
            await asyncio.sleep(BATCH_PAUSE)

    async def _roll_up(self, before: float, most: int | None) -> int:
        gone = 0
        while most is None or gone < most:
            rows = BATCH_ROWS if most is None else min(BATCH_ROWS, most - gone)
            async with self._reading:
                done = await self._store.run(RollUp(before, rows))
            gone += done
            if done < rows:
                break
            await asyncio.sleep(BATCH_PAUSE)
        return gone


class RowCounter:
    """A job of the store, run until it returns True: counts the ledger's rows, some each time."""

    def __init__(self, rows_per_step: int = COUNTED_ROWS) -> None:
        self.counted = 0  # rows so far. Those that come meanwhile may be among them.
        self._rows_per_step = rows_per_step
        self._from = 0.0  # `ended_at` of the next row

    def __call__(self, connection: Connection) -> bool:
        """Run within the transaction of `connection`."""
        ended = usage.c.ended_at
        left = ended >= self._from
        later = select(ended).order_by(ended)
        end = reports.end_of_step(connection, later, self._from, self._rows_per_step)
        counting = select(func.count()).select_from(usage).where(left)
        if end is not None:
            counting = counting.where(ended < end)
        self.counted += connection.scalar(counting) or 0
        if end is None:
            return True
        self._from = end
        return False


def give_back_pages(connection: Connection) -> bool:
    """A job of the store: shrink SQLite's file by some free pages; whether more may be free.

    A file of 10 GB is never rewritten whole (`VACUUM`), which would stop the store for minutes.
    PostgreSQL does it by itself.
    """
    if connection.dialect.name != "sqlite":
        return False
    free = connection.exec_driver_sql("PRAGMA freelist_count").scalar() or 0
    if not free or connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() != INCREMENTAL:
        return False
    # One page each: Python's driver takes one step of a statement that has no columns.
    for _ in range(min(free, VACUUM_PAGES)):
        connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
    return free > VACUUM_PAGES


INCREMENTAL = 2  # SQLite's number for `auto_vacuum=INCREMENTAL`
