"""Keeps live limits equal to the ledger: loads them at the start, and follows other processes.

Several processes may share a store: both of a hand-over, or gateways on one PostgreSQL. Every half
second each reads what the others have added, if there may be something: rows of the ledger in the
order of their writing, and requests that have been running for about half a second. So a limit
holds across processes, but for what they admit within about a second.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from sqlalchemy import Connection, Row, and_, case, func, not_, or_, select, true

from gateway.callers.limits import MINUTE, NO_OTHERS, Account, LedgerSums, LimitBook, OtherUse
from gateway.callers.processes import LOST
from gateway.callers.windows import DAY, Calendar, date_of, month_start
from gateway.store.schema import open_requests, processes, usage, usage_days
from gateway.store.store import Store, StoreWorker

POLL_SECONDS = 0.5
# Seconds after which the store is read though no other process seems to have changed it.
LONGEST_UNREAD = 30.0
# Seconds for which a start waits for the store. Then requests are admitted by counters that begin
# at 0, and what the ledger has is added when the store answers.
START_SECONDS = 5.0
MOST_KEYS_FILTERED = 50  # keys that a query names; for more it reads the rows of all keys
# Seconds for which the id of another's open request is remembered after it has ended.
FORGET_SECONDS = 60.0
log = structlog.get_logger()


UsedRow = Row[Any]  # of the ledger, with the columns `_ROW`
OpenRow = Row[Any]  # of a request that another process runs, with the columns `_OPEN`
Who = tuple[str | None, str | None, str | None]  # key, group and end user


@dataclass(slots=True)
class LedgerRead:
    """What one look at the store has found."""

    now: float  # Unix time
    cursors: dict[str, int] = field(default_factory=dict)
    """The last sequence number of each process."""
    new_rows: list[UsedRow] = field(default_factory=list)  # rows of others since the look before
    open: Sequence[OpenRow] = ()
    sums: list[tuple[Who, LedgerSums]] = field(default_factory=list)
    """Of the month, but for the last minute, for the scopes to be loaded."""
    recent: Sequence[UsedRow] = ()  # rows of the last minute for these scopes
    all_sums: list[tuple[Who, LedgerSums]] = field(default_factory=list)
    """Of the whole month, for all."""


@dataclass(slots=True, eq=False)
class LimitSync:
    """Reads the store for the limits of one process; `worker` must run in a task."""

    book: LimitBook
    store: Store
    own: str  # the id of this process
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    recovered: Callable[[], int] = lambda: 0
    """How many requests of killed processes this one has written, which no other tells it of."""
    worker: StoreWorker = field(init=False)
    _cursors: dict[str, int] | None = None
    _seen_open: dict[str, float] = field(default_factory=dict)
    """Open requests of others that count as requests already, and when they were last seen."""
    _held: list[Account] = field(default_factory=list)  # accounts of which others hold something
    _calendar: Calendar = field(default_factory=Calendar)
    _last: tuple[float, float] | None = None
    """Unix and monotonic time of the last look that found the store."""
    _seen_changes: int = -1  # the store's number of changes before it was read last
    _seen_recovered: int = 0
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _next_read: float = -math.inf

    def __post_init__(self) -> None:
        self.worker = StoreWorker(
            self._look_if_due,
            POLL_SECONDS,
            longest_pause=POLL_SECONDS,
            on_away=lambda why: log.warning("limits do not follow the store", why=why),
            clock=self.clock,
        )

    async def start(self, limit: float = START_SECONDS) -> None:
        """Load the counters of all accounts, within `limit` seconds if the store answers."""
        await self.worker.attempt_within(limit, self.look)

    async def _look_if_due(self) -> None:
        if (
            self.store.changes != self._seen_changes
            or self.recovered() != self._seen_recovered
            or self.worker.problem is not None
            or self.clock() >= self._next_read
            or self._is_clock_set(self.now())
            or self.book.unloaded()
        ):
            await self.look()

    async def load(self) -> None:
        """Load the counters of the accounts that lack them. Raises: StoreError."""
        if self.book.unloaded():
            await self.look()

    async def look(self) -> None:
        """Read the store once, and count what it has. Raises: StoreError."""
        async with self._looking:  # what two read at a time would be counted twice
            await self._look()

    async def _look(self) -> None:
        wanted, now, cursors = self.book.unloaded(), self.now(), self._cursors
        at = self.clock()
        # Rows that this process has written for another one were never counted here.
        recount = self._is_clock_set(now) or self.recovered() != self._seen_recovered
        self._seen_changes, self._seen_recovered = self.store.changes, self.recovered()
        self._next_read = at + LONGEST_UNREAD
        found = await self.store.run(
            lambda connection: read_ledger(
                connection, self.own, now, cursors, wanted, all_sums=recount
            ),
            write=False,
        )
        self.worker.succeeded()
        self._cursors, self._last = found.cursors, (now, at)
        self._count(found, wanted)

    def _is_clock_set(self, now: float) -> bool:
        """Whether the wall clock was set to another day since the last look.

        The sums that were loaded are those of the day and month that it showed then.
        """
        if self._last is None:
            return False
        before, at = self._last
        set_ahead = (now - before) - (self.clock() - at)
        day, day_before = now // DAY, before // DAY
        return day < day_before or (day > day_before and set_ahead > MINUTE)

    # Count.

    def _count(self, found: LedgerRead, wanted: Mapping[str, float]) -> None:
        current = self.book.unloaded()
        # A scope that was dropped and made anew meanwhile waits for the next look.
        loading = {one: since for one, since in wanted.items() if current.get(one) == since}
        for row in found.new_rows:
            is_new = self._seen_open.pop(row.id, None) is None
            for scope, account in self._existing(row.key, row.group_name, row.user):
                if scope not in current:
                    self._count_row(account, row, request=is_new)
        for row in found.recent:
            self._load_recent(row, loading)
        self._calendar.look_up(found.now)
        for who, sums in found.sums:
            for scope, account in self._existing(*who):
                if scope in loading:
                    account.add_sums(sums, self._calendar)
        for who, sums in found.all_sums:
            for _, account in self._existing(*who):
                account.raise_sums(sums, self._calendar)
        self._count_open(found.open, loading, current)
        self.book.loaded(loading)

    def _load_recent(self, row: UsedRow, loading: Mapping[str, float]) -> None:
        """Count a row of the last minute for the scopes that are being loaded."""
        others = row.process != self.own or row.lost
        for scope, account in self._existing(row.key, row.group_name, row.user):
            if (since := loading.get(scope)) is None:
                continue
            if others or row.ended_at < since:
                self._count_row(account, row, request=False)
            if others or row.started_at < since:
                account.requests.add_late(self.book.monotonic(row.started_at), 1)

    def _existing(
        self, key: str | None, group: str | None, user: str | None
    ) -> list[tuple[str, Account]]:
        return self.book.existing(key or "", group or None, user or None)

    def _count_row(self, account: Account, row: UsedRow, *, request: bool) -> None:
        self._calendar.look_up(row.ended_at)
        account.count(row.tokens, row.cost, self.book.monotonic(row.ended_at), self._calendar)
        if request:
            account.requests.add_late(self.book.monotonic(row.started_at), 1)

    def _count_open(
        self, rows: Iterable[OpenRow], loading: Mapping[str, float], current: Mapping[str, float]
    ) -> None:
        """Replace what open requests of others hold; those that are new count as requests."""
        held: dict[str, tuple[Account, OtherUse]] = {}
        now = self.clock()
        for row in rows:
            is_new = row.id not in self._seen_open
            self._seen_open[row.id] = now
            for scope, account in self._existing(row.key, row.group_name, row.user):
                _, use = held.get(account.subject, (account, NO_OTHERS))
                held[account.subject] = account, use.plus(row.reserved_tokens, row.reserved_cost)
                if scope in loading or (is_new and scope not in current):
                    account.requests.add_late(self.book.monotonic(row.started_at), 1)
        for account in self._held:
            if account.subject not in held:
                account.set_others(NO_OTHERS)
        for account, use in held.values():
            account.set_others(use)
        self._held = [account for account, _ in held.values()]
        for id_ in [one for one, seen in self._seen_open.items() if now - seen > FORGET_SECONDS]:
            del self._seen_open[id_]


# The job of the store.

_TOKENS = usage.c.prompt_tokens + usage.c.completion_tokens
_WHO = (usage.c.key, usage.c.group_name, usage.c.user)

_ROW: tuple[Any, ...] = (
    usage.c.id, usage.c.process, usage.c.sequence, usage.c.started_at, usage.c.ended_at, *_WHO,
    _TOKENS.label("tokens"), usage.c.cost, (usage.c.outcome == LOST).label("lost"),
)  # fmt: skip
_OPEN: tuple[Any, ...] = (
    *(open_requests.c[name] for name in ("id", "started_at", "key", "group_name", "user")),
    open_requests.c.reserved_tokens, open_requests.c.reserved_cost,
)  # fmt: skip


def read_ledger(
    connection: Connection,
    own: str,
    now: float,
    cursors: Mapping[str, int] | None,
    wanted: Mapping[str, float],
    *,
    all_sums: bool,
) -> LedgerRead:
    """All that the limits of the process `own` need to know, of one state of the store.

    `cursors`: the last rows that were read; None: none. `wanted`: the scopes to be loaded, and
    since when the process counts them itself. `all_sums`: of all scopes.
    """
    known = set(connection.execute(select(processes.c.id)).scalars()) | {own}
    known |= set(cursors or ())
    found = LedgerRead(now)
    for process in sorted(known):
        _read_new_rows(connection, process, own, cursors, found)
    of_others = select(*_OPEN).where(open_requests.c.process != own)
    found.open = connection.execute(of_others).all()
    calendar = Calendar()
    calendar.look_up(now)
    if wanted:
        others = or_(usage.c.process != own, usage.c.outcome == LOST)
        counted_before = or_(others, usage.c.ended_at < min(wanted.values()))
        keys = _keys_of(wanted)
        recent = and_(usage.c.ended_at >= now - MINUTE, usage.c.ended_at < now + MINUTE)
        found.sums = _sums(connection, calendar, keys, and_(not_(recent), counted_before))
        rows = select(*_ROW).where(recent).order_by(usage.c.ended_at)
        if keys is not None:
            rows = rows.where(usage.c.key.in_(keys))
        found.recent = connection.execute(rows).all()
    if all_sums:
        found.all_sums = _sums(connection, calendar, None, true())
    return found


def _read_new_rows(
    connection: Connection,
    process: str,
    own: str,
    cursors: Mapping[str, int] | None,
    found: LedgerRead,
) -> None:
    of_process = usage.c.process == process
    newest = connection.scalar(select(func.max(usage.c.sequence)).where(of_process)) or 0
    # What is there at the first look is loaded by scopes.
    last = newest if cursors is None else cursors.get(process, 0)
    if newest > last:
        newer = select(*_ROW).where(of_process, usage.c.sequence > last)
        if process == own:
            newer = newer.where(usage.c.outcome == LOST)
        last = newest
        for row in connection.execute(newer.order_by(usage.c.sequence)):
            found.new_rows.append(row)
            # PostgreSQL shows rows that were committed since `newest` was read.
            last = max(last, row.sequence)
    found.cursors[process] = last


def _keys_of(scopes: Iterable[str]) -> list[str] | None:
    """The ids of the keys of these scopes; None: those of all keys are needed."""
    keys = {id_ for kind, _, id_ in (one.partition(":") for one in scopes) if kind in _OF_A_KEY}
    if len(keys) > MOST_KEYS_FILTERED or any(
        one.partition(":")[0] not in _OF_A_KEY for one in scopes
    ):
        return None
    return sorted(keys)


_OF_A_KEY = frozenset({"key", "users"})


def _sums(
    connection: Connection, calendar: Calendar, keys: list[str] | None, condition: Any
) -> list[tuple[Who, LedgerSums]]:
    """Sums of the rows of `calendar`'s month, by key, group and end user.

    Of days that retention has rolled up, all rows count.
    """
    month_begins, day_begins = month_start(calendar.month), calendar.day * DAY
    rows, days = usage.c, usage_days.c
    # Rows of later days were written while a clock was wrong.
    rows_today = and_(rows.ended_at >= day_begins, rows.ended_at < calendar.day_ends)
    rows_month = and_(rows.ended_at >= month_begins, rows.ended_at < calendar.month_ends, condition)
    last = date_of(calendar.month_ends - 1)
    days_month = and_(days.day >= date_of(month_begins), days.day <= last)
    found = []
    for of, today, month in (
        (rows, rows_today, rows_month),
        (days, days.day == date_of(day_begins), days_month),
    ):
        who, tokens = (of.key, of.group_name, of.user), of.prompt_tokens + of.completion_tokens
        query = select(
            *who,
            func.sum(case((today, tokens), else_=0)),
            func.sum(case((today, of.cost), else_=0.0)),
            func.sum(of.cost),
        ).where(month if keys is None else and_(month, of.key.in_(keys)))
        for key, group, user, *sums in connection.execute(query.group_by(*who)):
            day_tokens, day_cost, month_cost = (one or 0 for one in sums)
            of_day = int(day_tokens), float(day_cost)
            found.append(((key, group, user), LedgerSums(*of_day, float(month_cost))))
    return found
