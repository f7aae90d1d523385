"""What the ledger tells: reports, the busiest hour, and what callers may know of their own use.

A report has sums of requests, tokens and money by key, model, day and the like. It counts the
ledger's rows (`usage`) and the sums of those that retention has deleted (`usage_days`). It is read
in steps of `ROWS_PER_STEP` rows, each a job of its own for the store, so that the rows of requests
that end meanwhile are written in between.

`Retention` lets old rows of the ledger become sums by day, so that the store stays bounded. A row
that goes is added to `usage_days` in the transaction that deletes it: reports and budgets count the
sums like the rows. What is lost is when in its day a request ran, and its id.
"""

from __future__ import annotations

import asyncio
import csv
import heapq
import io
import math
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal

import structlog
from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    RowMapping,
    Select,
    Table,
    and_,
    case,
    delete,
    func,
    literal,
    or_,
    select,
)

from gateway.callers import money
from gateway.callers.limits import Accounts, LimitBook
from gateway.callers.processes import LOST
from gateway.callers.stored_keys import key_names, revision_of
from gateway.callers.windows import DAY, date_of, percentile, time_class, time_text
from gateway.config.errors import safe_cell
from gateway.config.fields import parse_duration
from gateway.config.stored import RetentionSettings
from gateway.errors import CLIENT_CLOSED_STATUS
from gateway.store.database import insert_for
from gateway.store.failures import StoreError
from gateway.store.schema import node_hours, open_requests, revisions, usage, usage_days
from gateway.store.store import Store, StoreWorker

Dimension = Literal["key", "group", "user", "model", "class", "day", "tier"]
DIMENSIONS: tuple[Dimension, ...] = ("key", "group", "user", "model", "class", "day", "tier")
MOST_DIMENSIONS = 2
DEFAULT_SINCE = "30d"
# Some 35 ms of work: longer than that no other job of the store waits for a report.
ROWS_PER_STEP = 10_000
MOST_GROUPS = 100_000  # groups that a report keeps in memory, some 50 MB
MOST_ROWS = 10_000  # rows of one report; `total` has the others too
# Times that a report begins anew because the retention of another process has moved rows.
MOST_RESTARTS = 5
SUMMED_NOTE = (
    "some of these requests are kept as sums of whole days: such a day is counted in full, and "
    "percentiles leave out its requests"
)
MOST_SECONDS = 60.0  # seconds that a report may take, the wait for another one included
# Name of the number in `revisions` that rises whenever rows of `usage` become sums.
ROLLED_UP = "usage_days"


class InvalidQuery(ValueError):  # noqa: N818 - what is wrong with a question, for its asker
    """A report can't be made of these parameters; `parameter` is the one to blame."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class ReportInterrupted(Exception):  # noqa: N818 - not this time
    """The report could not be read now."""


@dataclass(slots=True)
class Sums:
    """What some requests came to; also the names of the columns that hold it in `usage_days`."""

    requests: int = 0
    failures: int = 0  # that ended with an error; a client that left is none
    clients_left: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # part of `prompt_tokens`
    completion_tokens: int = 0
    slot_seconds: float = 0.0
    attempts: int = 0
    cost: float = 0.0
    gpu_cost: float = 0.0  # what those whose price is known would have cost on the GPU tier
    gpu_priced: int = 0  # how many these are

    @property
    def tokens(self) -> int:
        """Of prompts and completions."""
        return self.prompt_tokens + self.completion_tokens

    def add(self, values: Sequence[Any]) -> None:
        """Add the values of another, in the order of the fields."""
        # Each by its name: a report has a hundred thousand groups. PostgreSQL sums big integers as
        # decimals.
        self.requests += int(values[0] or 0)
        self.failures += int(values[1] or 0)
        self.clients_left += int(values[2] or 0)
        self.prompt_tokens += int(values[3] or 0)
        self.cached_tokens += int(values[4] or 0)
        self.completion_tokens += int(values[5] or 0)
        self.slot_seconds += float(values[6] or 0)
        self.attempts += int(values[7] or 0)
        self.cost += float(values[8] or 0)
        self.gpu_cost += float(values[9] or 0)
        self.gpu_priced += int(values[10] or 0)

    def values(self) -> tuple[Any, ...]:
        """The values, in the order of the fields."""
        return tuple(getattr(self, name) for name in SUM_NAMES)

    def to_json(self) -> dict[str, Any]:
        """For a report, with what the requests cost each."""
        return {
            **dict(zip(SUM_NAMES, self.values(), strict=True)),
            "cost_per_request": money.per_request(self.cost, self.requests).value,
            "cost_per_million_tokens": money.per_million_tokens(self.cost, self.tokens).value,
        }


SUM_NAMES = tuple(one.name for one in fields(Sums))


PERCENTILES: dict[str, tuple[int, float]] = {
    "ttft_p50": (0, 0.5),
    "ttft_p95": (0, 0.95),
    "seconds_p50": (1, 0.5),
    "seconds_p95": (1, 0.95),
    "wait_p95": (2, 0.95),
}
"""Of each group: which of its `Latencies.counts`, and the share of requests that took no longer."""
TIME_CLASSES = 192  # the last one begins at 22 hours
# Groups whose percentiles are told: of each, 3 * 192 counts of 4 bytes, some 30 MB in all.
MOST_TIMED_GROUPS = 10_000


class Latencies:
    """How long the requests of a group took, counted in classes of fixed bounds."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [array("I", bytes(4 * TIME_CLASSES)) for _ in range(3)]
        """Of the times to the first content, of whole answers, and in the queue."""

    def add(self, *times: float | None) -> None:
        """Add the times of a request; None: it has none, or it is unknown."""
        for counts, seconds in zip(self.counts, times, strict=True):
            if seconds is not None:
                counts[min(TIME_CLASSES - 1, time_class(seconds))] += 1

    def to_json(self) -> dict[str, float | None]:
        """The percentiles; None: no request has such a time."""
        found = {
            name: percentile(enumerate(self.counts[which]), share)
            for name, (which, share) in PERCENTILES.items()
        }
        return {name: None if one is None else float(f"{one:.3g}") for name, one in found.items()}


_LEFT = usage.c.status == CLIENT_CLOSED_STATUS
_TIMES = (
    usage.c.ttft_seconds,
    case(
        (
            and_(usage.c.status < 400, usage.c.outcome != LOST),
            usage.c.ended_at - usage.c.started_at,
        )
    ),
    usage.c.wait_seconds,
)
"""What `Latencies` count. Refusals, which take no time, would hide how long answers take."""
_SPECIAL_SUMS: dict[str, ColumnElement[Any]] = {
    "requests": func.count(),
    "failures": func.sum(case(((usage.c.status >= 400) & ~_LEFT, 1), else_=0)),
    "clients_left": func.sum(case((_LEFT, 1), else_=0)),
    "gpu_priced": func.count(usage.c.gpu_cost),
}
ROW_SUMS = tuple(
    _SPECIAL_SUMS[name] if name in _SPECIAL_SUMS else func.sum(usage.c[name]) for name in SUM_NAMES
)
"""The sums of rows of `usage`, in the order of the fields of `Sums`."""
_DAY_SUMS = tuple(func.sum(usage_days.c[name]) for name in SUM_NAMES)
_COLUMNS = {"group": "group_name", "class": "class_"}


def dimension(table: FromClause, name: Dimension) -> ColumnElement[Any]:
    """What rows of the table are summed by."""
    if name == "day":
        # Days since 1970 in `usage`, a date in `usage_days`; `label_of` makes them the same.
        return func.floor(usage.c.ended_at / DAY) if table is usage else usage_days.c.day
    return table.c[_COLUMNS.get(name, name)]


def label_of(name: str, value: Any) -> str:
    """The value of a dimension, as reports and the sums of days name it."""
    if name == "day" and not isinstance(value, str):
        return date_of(float(value) * DAY)
    return "" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class ReportQuery:
    """What a report counts: the requests that ended from `since` on and before `until`."""

    by: tuple[Dimension, ...]
    since: float
    until: float
    limit: int = MOST_ROWS
    key: str | None = None  # only requests of this key; with `user`, of this end user of it
    user: str | None = None
    percentiles: bool = False  # whether it tells the percentiles of times


def parse_query(
    now: float,
    by: str | None = None,
    since: str | None = None,
    until: str | None = None,
    limit: str | None = None,
    key: str | None = None,
    percentiles: str | None = None,
) -> ReportQuery:
    """The query of a command or a URL, whose parameters are texts. Raises: InvalidQuery."""
    names = [name.strip().lower() for name in (by or "model").split(",")]
    for name in names:
        if name not in DIMENSIONS:
            raise InvalidQuery(
                "by", f"{name[:32]!r} is none of {', '.join(DIMENSIONS)}, or two of them: key,model"
            )
    if len(set(names)) < len(names) or len(names) > MOST_DIMENSIONS:
        raise InvalidQuery("by", f"at most {MOST_DIMENSIONS} different ones, such as key,model")
    # By default to the end of this day: nothing can have ended later, and days are counted in full.
    start, end = parse_span(since, until, now, (math.floor(now / DAY) + 1) * DAY)
    most = parse_limit(limit, MOST_ROWS, MOST_ROWS)
    if percentiles not in {None, "true", "false"}:
        raise InvalidQuery("percentiles", "must be true or false")
    dimensions = tuple(name for name in DIMENSIONS if name in names)
    return ReportQuery(dimensions, start, end, most, key, percentiles=percentiles == "true")


def parse_span(since: str | None, until: str | None, now: float, end: float) -> tuple[float, float]:
    """From when until when is asked, in Unix time; `end`: where it is not said. Raises as below."""
    start = parse_time("since", since or DEFAULT_SINCE, now)
    if until:
        end = parse_time("until", until, now, end=True)
    if start > now:
        raise InvalidQuery(
            "since", f"{time_text(start)} is in the future: it is {time_text(now)} now"
        )
    if end <= start:
        raise InvalidQuery(
            "until", f"{time_text(end)} is not after the beginning, {time_text(start)}"
        )
    return start, end


def parse_limit(text: str | None, usual: int, most: int) -> int:
    """How many rows are asked for. Raises: InvalidQuery."""
    if text is None:
        return usual
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise InvalidQuery("limit", f"must be a number from 1 to {most}")
    return int(text)


_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DAYS_AGO = re.compile(r"(\d{1,5})d")


def parse_time(parameter: str, text: str, now: float, *, end: bool = False) -> float:
    """A date, a time of RFC 3339, or how long ago: `7d`, `12h`. All in UTC.

    A date is its first moment, with `end` the first moment after it. `7d` is the midnight seven
    days ago, so that days are counted in full; other durations count from now to the second.

    Raises: InvalidQuery.
    """
    text = text.strip()[:64]
    try:
        if found := _DAYS_AGO.fullmatch(text):
            return max(0.0, math.floor(now / DAY) * DAY - int(found[1]) * DAY)
        if _DATE.fullmatch(text):
            day = datetime.fromisoformat(text).replace(tzinfo=UTC)
            return (day + timedelta(days=1) if end else day).timestamp()
        if text[:1].isdigit() and "T" in text.upper():
            moment = datetime.fromisoformat(text.upper())
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if text[-1:].isalpha():
            return max(0.0, now - parse_duration(text))
    except (ValueError, OverflowError):
        pass
    raise InvalidQuery(
        parameter,
        f"{text!r} is no time: write a date (2026-11-23), a time (2026-11-23T08:00:00Z), or how "
        "long ago (7d, 12h)",
    )


Group = tuple[str, ...]


@dataclass(slots=True)
class LedgerReport:
    """A report, for people, programs and spreadsheets.

    Call `step` until it returns True, in jobs of the store, then `finish`.
    """

    query: ReportQuery
    rows_per_step: int = ROWS_PER_STEP
    groups: list[tuple[Group, Sums]] = field(default_factory=list)
    total: Sums = field(default_factory=Sums)
    """Of all groups, those beyond `query.limit` too."""
    found: int = field(default=0, init=False)  # groups that there are
    nodes: dict[Group, Sums] = field(default_factory=dict, init=False)  # by tier and node
    hours: list[money.NodeHours] = field(default_factory=list, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    key_names: dict[str, str] = field(default_factory=dict, init=False)
    _groups: dict[Group, Sums] = field(default_factory=dict, init=False, compare=False)
    _latencies: dict[Group, Latencies] = field(default_factory=dict, init=False, compare=False)
    _at: float | None = field(default=None, init=False, compare=False)
    """Rows that ended before it are counted; None: the report has not begun."""
    _revision: int = field(default=0, init=False, compare=False)
    _restarts: int = field(default=0, init=False, compare=False)

    def step(self, connection: Connection) -> bool:
        """Read some more; whether all is read. Raises: InvalidQuery, if there are too many groups.

        Rows that retention turns into sums between two steps would be counted twice or not at all,
        so the report then begins anew. Raises: ReportInterrupted, if that happens again and again.
        """
        if self._at is None:
            self._groups, self.nodes, self._at = {}, {}, self.query.since
            self._latencies = {}
            self._revision = revision_of(connection, ROLLED_UP)
        ended = usage.c.ended_at
        later = self._of_caller(select(ended).where(ended < self.query.until), usage)
        end = end_of_step(connection, later, self._at, self.rows_per_step)
        places, until = self._places(usage), self.query.until if end is None else end
        rows = select(*places, *ROW_SUMS).where(ended >= self._at, ended < until).group_by(*places)
        self._add(connection, self._of_caller(rows, usage))
        if self.query.percentiles:
            self._add_times(connection, self._at, until)
        self._at = end
        if end is not None:
            return False
        self._read_days(connection)
        self.hours = self._read_hours(connection)
        if revision_of(connection, ROLLED_UP) != self._revision:
            self._restarts += 1
            self._at = None
            if self._restarts > MOST_RESTARTS:
                raise ReportInterrupted("old rows are being summed up just now: ask again later")
            return False
        return True

    def _add_times(self, connection: Connection, start: float, end: float) -> None:
        ended, width = usage.c.ended_at, len(self.query.by)
        places = [dimension(usage, name) for name in self.query.by]
        rows = select(*places, *_TIMES).where(ended >= start, ended < end)
        by_values: dict[Group, Latencies] = {}
        for row in connection.execute(self._of_caller(rows, usage)):
            values = row[:width]
            latencies = by_values.get(values)
            if latencies is None:
                group = tuple(map(label_of, self.query.by, values))
                latencies = by_values[values] = self._latencies.setdefault(group, Latencies())
            latencies.add(*row[width:])
        if len(self._latencies) > MOST_TIMED_GROUPS:
            raise _too_many_groups("percentiles", MOST_TIMED_GROUPS)

    def _of_caller(self, statement: Select[Any], table: FromClause) -> Select[Any]:
        if self.query.key is not None:
            statement = statement.where(table.c.key == self.query.key)
        if self.query.user is not None:
            statement = statement.where(table.c.user == self.query.user)
        return statement

    def _read_days(self, connection: Connection) -> None:
        """Count the sums of deleted rows: those of each day that the report touches."""
        first, last = date_of(self.query.since), date_of(self.query.until - 0.001)
        places, day = self._places(usage_days), usage_days.c.day
        statement = select(*places, *_DAY_SUMS).where(day >= first, day <= last)
        self._add(connection, self._of_caller(statement, usage_days).group_by(*places))
        edges = ((first, self.query.since), (last, self.query.until))
        within: ColumnElement[bool] = day.in_([cut for cut, edge in edges if edge % DAY])
        if self.query.percentiles:
            within = and_(day >= first, day <= last)
        summed = self._of_caller(select(day).where(within).limit(1), usage_days)
        self.notes = [SUMMED_NOTE] if connection.scalar(summed) is not None else []

    def _places(self, table: FromClause) -> list[ColumnElement[Any]]:
        """The columns of a group: its dimensions, then tier and node."""
        return [*(dimension(table, name) for name in self.query.by), table.c.tier, table.c.node]

    def _add(self, connection: Connection, statement: Select[Any]) -> None:
        width = len(self.query.by)
        for row in connection.execute(statement):
            group = tuple(map(label_of, self.query.by, row[:width]))
            values = row[width + 2 :]
            if group not in self._groups and len(self._groups) >= MOST_GROUPS:
                raise _too_many_groups("by", MOST_GROUPS)
            self._groups.setdefault(group, Sums()).add(values)
            node = (label_of("tier", row[width]), label_of("node", row[width + 1]))
            self.nodes.setdefault(node, Sums()).add(values)

    def _read_hours(self, connection: Connection) -> list[money.NodeHours]:
        if self.query.key is not None:
            return []  # What machines cost is no caller's affair.
        columns, day = node_hours.c, node_hours.c.day
        first, last = date_of(self.query.since), date_of(self.query.until - 0.001)
        statement = (
            select(columns.node, columns.tier, func.sum(columns.seconds), func.sum(columns.cost))
            .where(day >= first, day <= last)
            .group_by(columns.node, columns.tier)
            .order_by(columns.tier, columns.node)
        )
        return [money.NodeHours(*row) for row in connection.execute(statement)]

    def finish(self) -> LedgerReport:
        """Order the groups, and add them up. Off the event loop: there may be many."""
        for sums in self.nodes.values():
            self.total.add(sums.values())
        day = self.query.by.index("day") if "day" in self.query.by else None

        def order(item: tuple[Group, Sums]) -> tuple[str, float, int, int, Group]:
            """The dearest first, then those with the most tokens and requests; by day, if asked."""
            group, sums = item
            date = "" if day is None else group[day]
            return date, -sums.cost, -sums.tokens, -sums.requests, group

        # A sort of all groups would be one call into C, which no other thread interrupts.
        self.groups = heapq.nsmallest(self.query.limit, iter(self._groups.items()), key=order)
        self.found = len(self._groups)
        return self

    @property
    def keys(self) -> frozenset[str]:
        """The ids of the keys that its rows name."""
        if "key" not in self.query.by:
            return frozenset()
        place = self.query.by.index("key")
        return frozenset(group[place] for group, _ in self.groups)

    def name_keys(self, name_of: Callable[[str], str | None]) -> None:
        """Give keys their names by this, before those that they have."""
        self.key_names |= {key: name for key in self.keys if (name := name_of(key)) is not None}

    def _labels(self, group: Group) -> dict[str, str]:
        """What a row is of, with the name of its key."""
        labels = dict[str, str]()
        for by, label in zip(self.query.by, group, strict=True):
            labels[by] = label
            if by == "key":
                labels["key_name"] = self.key_names.get(label, "")
        return labels

    def _figures(self, group: Group, sums: Sums) -> dict[str, Any]:
        if not self.query.percentiles:
            return sums.to_json()
        return sums.to_json() | (self._latencies.get(group) or Latencies()).to_json()

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "since": time_text(self.query.since),
            "until": time_text(self.query.until),
            "by": list(self.query.by),
            "rows": [
                {name: label or None for name, label in self._labels(group).items()}
                | self._figures(group, sums)
                for group, sums in self.groups
            ],
            "rows_found": self.found,
            "total": self.total.to_json(),
            "money": money_json(self),
            "notes": self.notes,
        }

    def to_csv(self) -> str:
        """The rows, with a line of names above them; numbers in full."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = [*Sums().to_json(), *(PERCENTILES if self.query.percentiles else ())]
        writer.writerow([*self._labels(("",) * len(self.query.by)), *names])
        for group, sums in self.groups:
            labels, figures = self._labels(group).values(), self._figures(group, sums)
            # Python's writer quotes no carriage return.
            cells = [safe_cell(one).replace("\r", " ").replace("\n", " ") for one in labels]
            writer.writerow([*cells, *(figures[name] for name in names)])
        return text.getvalue()


def _too_many_groups(parameter: str, most: int) -> InvalidQuery:
    shorten = "shorten the time with since and until, or choose another dimension"
    return InvalidQuery(parameter, f"more than {most} groups: {shorten}")


def end_of_step(connection: Connection, ends: Select[Any], start: float, rows: int) -> float | None:
    """When the first request ended that is too many for a step of `rows`; None: none is.

    `ends`: when requests ended.
    """
    ended = usage.c.ended_at
    ends = ends.order_by(ended)
    end = connection.scalar(ends.where(ended >= start).offset(rows).limit(1))
    if end == start:
        # More requests than a step takes ended at the same time.
        end = connection.scalar(ends.where(ended > start).limit(1))
    return None if end is None else float(end)


@dataclass(eq=False)
class Reporter:
    """Reads reports from the store beside the event loop, one at a time."""

    store: Store
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a report is read; retention moves no rows meanwhile."""

    async def read(self, query: ReportQuery) -> LedgerReport:
        """The report. Raises: InvalidQuery, ReportInterrupted, StoreError."""
        report = LedgerReport(query)
        await self.read_steps(report.step)
        await asyncio.to_thread(report.finish)
        if report.keys:
            stored = await self.store.run(lambda c: key_names(c, report.keys), write=False)
            report.name_keys(stored.get)
        return report

    async def read_steps(self, step: Callable[[Connection], bool]) -> None:
        """Call `step` in jobs of the store until it returns True. Raises as `read` does."""
        try:
            async with asyncio.timeout(MOST_SECONDS), self.reading:
                while not await self.store.run(step, write=False):
                    pass
        except TimeoutError:
            raise ReportInterrupted(
                f"it takes longer than {MOST_SECONDS:.0f} s: ask for a shorter time with since"
            ) from None


def money_json(report: LedgerReport) -> dict[str, Any]:
    """What the report's requests and the machines cost, by tier and in all."""
    hours: dict[str, list[money.NodeHours]] = {}
    for one in report.hours:
        hours.setdefault(one.tier, []).append(one)
    paid_by_hour = {(one.tier, one.node) for one in report.hours if one.cost > 0}
    tiers: dict[str, Sums] = {}
    charged: dict[str, float] = {}
    for (tier, node), sums in report.nodes.items():
        tiers.setdefault(tier, Sums()).add(sums.values())
        if (tier, node) in paid_by_hour:
            charged[tier] = charged.get(tier, 0.0) + sums.cost
    total = report.total
    requests = {tier: sums.requests for tier, sums in tiers.items() if tier}
    has_whole_days = not (report.query.since % DAY or report.query.until % DAY)

    def costs(sums: Sums, hours: list[money.NodeHours], charged: float) -> dict[str, Any]:
        why = "the hours of nodes are recorded by day: ask for whole days, such as since=7d"
        idle = money.idle_cost(hours, charged) if has_whole_days else money.Amount(None, why)
        return {
            "cost": sums.cost,
            "per_request": money.per_request(sums.cost, sums.requests).to_json(),
            "per_million_tokens": money.per_million_tokens(sums.cost, sums.tokens).to_json(),
            "node_hours_cost": math.fsum(one.cost for one in hours),
            "idle": idle.to_json(),
        }

    return {
        **costs(total, report.hours, sum(charged.values())),
        "all_gpu": money.all_gpu_cost(total.gpu_cost, total.gpu_priced, total.requests).to_json(),
        "effective_per_hour": money.effective_hourly_cost(requests, hours).to_json(),
        "running_per_hour": money.running_hourly_cost(report.hours).to_json(),
        "tiers": {
            tier: {
                "requests": requests.get(tier, 0),
                **costs(tiers.get(tier, Sums()), hours.get(tier, []), charged.get(tier, 0.0)),
                "node_hours": math.fsum(one.seconds for one in hours.get(tier, [])) / 3600,
            }
            for tier in sorted({*requests, *hours})
        },
    }


# The busiest hour.


MINUTE = 60
# Minutes of what is called the busiest hour: the longest of which all requests can be told.
STRETCHES = (60, 20, 5, 1)
MOST_ARRIVALS = 20_000  # requests that are told, some 2 MB of JSON
# Minutes with requests that are compared: a hundred days of them, some 30 MB.
MOST_MINUTES = 150_000
BATCH = "batch"  # the class of requests that nobody waits for
UNSERVED = ("queue_full", "queue_timeout")  # outcomes of requests that the gateway had no slot for

_IS_AWAITED = open_requests.c.class_.is_distinct_from(BATCH)
_WANTED_SLOTS = and_(
    usage.c.class_.is_distinct_from(BATCH),
    or_(usage.c.slot_seconds > 0, usage.c.outcome.in_(UNSERVED), _LEFT),
)
"""Requests that a node worked for, and those that it would have if there had been a slot. Batches
are none of them: they fill slots that are idle, and wait for those."""
COLUMNS = (
    "seconds", "model", "class", "node", "prompt_tokens", "cached_tokens", "completion_tokens",
    "slot_seconds", "lasted", "unserved",
)  # fmt: skip
"""Of each request. `seconds`: its arrival, from the beginning of the hour. Tokens are null of a
request that has not been served, `lasted` of one that has not ended."""


@dataclass(slots=True)
class _Minute:
    requests: int = 0
    served: int = 0
    slot_seconds: float = 0.0

    def add(self, requests: int, served: int, slot_seconds: float) -> None:
        self.requests += int(requests)
        self.served += int(served)
        self.slot_seconds += float(slot_seconds)

    def asked(self, each: float) -> float:
        """Slot seconds, with `each` of a request that had no slot."""
        return self.slot_seconds + each * (self.requests - self.served)


@dataclass(slots=True)
class ArrivalsReader:
    """Reads the busiest hour, request by request, which a plan of the fleet plays again.

    It holds times, sizes, models and classes, and nothing that names a caller. The hour is the one
    for which requests asked most of the nodes: the seconds that they held slots, and the mean of
    those for each request that the gateway had no slot for. Call `step` until it returns True, in
    jobs of the store; then `to_json`. Of `query` its times count.
    """

    query: ReportQuery
    now: float
    rows_per_step: int = ROWS_PER_STEP
    most_arrivals: int = MOST_ARRIVALS
    most_minutes: int = MOST_MINUTES
    _minutes: dict[int, _Minute] = field(default_factory=dict, init=False)
    _arrivals: list[list[Any]] = field(default_factory=list, init=False)
    _at: float | None = field(default=None, init=False)
    """Rows that ended before it have been read; None: all minutes are counted."""
    _hour: tuple[float, float] | None = field(default=None, init=False)
    """From when to when it was; None: not found yet."""
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        self._at = self.query.since
        self._until = min(self.now, self.query.until)

    def step(self, connection: Connection) -> bool:
        """Read some more; whether all is read. Raises: InvalidQuery, for too long a time."""
        if self._at is not None:
            ended = usage.c.ended_at
            later = select(ended).where(ended < self.query.until)
            end = end_of_step(connection, later, self._at, self.rows_per_step)
            until = self.query.until if end is None else end
            wanted = and_(ended >= self._at, ended < until, _WANTED_SLOTS)
            if self._hour is None:
                held = usage.c.slot_seconds
                served = func.sum(case((held > 0, 1), else_=0))
                self._add_minutes(connection, usage, served, func.sum(held), wanted)
            else:
                self._add(connection, usage, wanted)
            self._at = end
            return False
        if self._hour is None:
            self._add_minutes(connection, open_requests, literal(0), literal(0.0), _IS_AWAITED)
            if not self._minutes:
                return True
            self._hour = self._busiest()
            self._at = self._hour[0]
            return False
        self._add(connection, open_requests, _IS_AWAITED)
        self._arrivals.sort(key=lambda one: one[0])
        return True

    def _add_minutes(
        self,
        connection: Connection,
        table: Table,
        served: ColumnElement[int],
        slot_seconds: ColumnElement[float],
        wanted: ColumnElement[bool],
    ) -> None:
        minute = func.floor(table.c.started_at / MINUTE)
        counted = select(minute, func.count(), served, slot_seconds).where(wanted).group_by(minute)
        for number, *counts in connection.execute(counted):
            if self.query.since - MINUTE < number * MINUTE < self._until:
                self._minutes.setdefault(int(number), _Minute()).add(*counts)
        if len(self._minutes) > self.most_minutes:
            raise InvalidQuery("since", "so long a time can't be compared: take a later one")

    def _busiest(self) -> tuple[float, float]:
        served = sum(one.served for one in self._minutes.values())
        held = sum(one.slot_seconds for one in self._minutes.values())
        each = held / served if served else 1.0
        ordered = sorted(self._minutes.items())
        minutes, found = 0, (0, 0)
        for minutes in STRETCHES:
            best, asked, first, requests = -1.0, 0.0, 0, 0
            for number, one in ordered:
                requests += one.requests
                asked += one.asked(each)
                while number - ordered[first][0] >= minutes:
                    left = ordered[first][1]
                    requests -= left.requests
                    asked -= left.asked(each)
                    first += 1
                # Of equal ones the last: it is the fleet of today that is asked about.
                if asked >= best:
                    best, found = asked, (ordered[first][0], requests)
            if found[1] <= self.most_arrivals:
                break
        start = max(self.query.since, float(found[0] * MINUTE))
        return start, min(self._until, float((found[0] + minutes) * MINUTE))

    def _add(self, connection: Connection, table: Table, wanted: ColumnElement[bool]) -> None:
        (start, end), started = self._hour or (0.0, 0.0), table.c.started_at
        within = select(table).where(wanted, started >= start, started <= end)
        rows = connection.execute(within.limit(self.most_arrivals - len(self._arrivals)))
        self._arrivals += (_arrival(row, start) for row in rows.mappings())

    def to_json(self) -> dict[str, Any]:
        """The hour as JSON values; `step` has returned True."""
        start, end = self._hour or (self.query.since, self.query.since)
        return {
            "since": time_text(self.query.since),
            "until": time_text(self._until),
            "first": time_text(min(self._minutes, default=0) * MINUTE) if self._minutes else None,
            "requests": sum(one.requests for one in self._minutes.values()),
            "hour": {"from": time_text(start), "to": time_text(end), "seconds": end - start},
            "columns": list(COLUMNS),
            "arrivals": self._arrivals,
        }


def _arrival(row: RowMapping, start: float) -> list[Any]:
    lasted = row["ended_at"] - row["started_at"] if "ended_at" in row else None
    served = lasted is not None and row["slot_seconds"] > 0
    return [
        round(row["started_at"] - start, 3),
        *(row[name] for name in COLUMNS[1:4]),
        *(row[name] if served else None for name in COLUMNS[4:7]),
        round(row["slot_seconds"], 3),
        None if lasted is None else round(lasted, 3),
        lasted is not None and row["outcome"] in UNSERVED,
    ]


# What a caller may know of its own use.


LEAST_AGE = 5.0  # seconds for which figures are kept at least
# Figures are kept for so many times as long as it took to read them: a caller that polls takes a
# twentieth of the store's time at most.
AGE_FACTOR = 20.0
MOST_KEPT = 1000  # callers and end users whose figures are kept
NO_STORE = "the gateway has no store: requests are not recorded"


@dataclass(slots=True, eq=False)
class CallerUsage:
    """Answers callers about themselves. `reporter` is None where there is no store.

    Figures come from the ledger and are kept for some seconds, longer the more rows they took; so
    callers that poll cost the store little, however much they have used. Limits are live.
    """

    book: LimitBook
    reporter: Reporter | None
    now: Callable[[], float]  # Unix seconds
    clock: Callable[[], float]  # monotonic seconds
    _kept: OrderedDict[tuple[str, str | None], tuple[dict[str, Any], float]] = field(
        default_factory=OrderedDict
    )
    """Figures by key and end user, and until when they are told."""
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def describe(self, accounts: Accounts, *, hides_cache: bool) -> dict[str, Any]:
        """The use of this caller, or of the end user that it names, as JSON values.

        `hides_cache`: without what tells of prompt caches. What the store can't say now is None,
        with the reason.
        """
        caller = accounts.caller
        return {
            "object": "usage",
            "key": caller.id,
            "name": caller.name,
            "group": caller.group,
            "user": accounts.user,
            **_without_cache(await self._figures(caller.id, accounts.user), hides_cache),
            "limits": [one.as_json() for one in self.book.standings(accounts.tracked)],
            "max_class": caller.max_priority.label,
            "models_allowed": None if caller.models is None else sorted(caller.models),
            "largest_prompt_tokens": accounts.prompt_tokens,
            "largest_completion_tokens": accounts.completion_tokens,
        }

    async def _figures(self, key: str, user: str | None) -> dict[str, Any]:
        if self.reporter is None:
            return _unknown(NO_STORE)
        async with self._reading:
            kept, until = self._kept.get((key, user), (None, 0.0))
            if kept is not None and self.clock() < until:
                return kept
            began, now = self.clock(), self.now()
            today = now // DAY * DAY
            first_of_month = today - (int(date_of(now)[8:]) - 1) * DAY
            days = ReportQuery(("model", "day"), first_of_month, today + DAY, key=key, user=user)
            try:
                report = await self.reporter.read(days)
            except (StoreError, ReportInterrupted, InvalidQuery) as error:
                return _unknown(error.message if isinstance(error, StoreError) else str(error))
            figures = await asyncio.to_thread(_figures_json, report, self.now())
            until = self.clock() + max(LEAST_AGE, AGE_FACTOR * (self.clock() - began))
            self._kept[key, user] = figures, until
            self._kept.move_to_end((key, user))
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return figures


_TOLD_SUMS = (
    "requests", "failures", "prompt_tokens", "cached_tokens", "completion_tokens", "cost",
)  # fmt: skip


def _unknown(reason: str) -> dict[str, Any]:
    return {"as_of": None, "today": None, "month": None, "reason": reason}


def _figures_json(report: LedgerReport, now: float) -> dict[str, Any]:
    models, days = dict[str, Sums](), dict[str, Sums]()
    for (model, day), sums in report.groups:
        models.setdefault(model, Sums()).add(sums.values())
        days.setdefault(day, Sums()).add(sums.values())
    return {
        "as_of": time_text(now),
        "today": {"since": date_of(now), **_sums_json(days.get(date_of(now), Sums()))},
        "month": {
            "since": date_of(report.query.since),
            **_sums_json(report.total),
            "models": [
                {"model": model or None, **_sums_json(sums)}
                for model, sums in sorted(models.items(), key=lambda one: -one[1].requests)
            ],
            "days": [{"day": day, **_sums_json(sums)} for day, sums in sorted(days.items())],
        },
        "reason": None,
    }


def _sums_json(sums: Sums) -> dict[str, Any]:
    return {name: getattr(sums, name) for name in _TOLD_SUMS}


def _without_cache(figures: dict[str, Any], hidden: bool) -> dict[str, Any]:  # noqa: FBT001
    """The figures, without those that tell whose prompts a node has cached."""
    if not hidden or figures["month"] is None:
        return figures
    hidden_figures: dict[str, Any] = {"cached_tokens": None}
    month = figures["month"] | hidden_figures
    for name in ("models", "days"):
        month[name] = [one | hidden_figures for one in month[name]]
    return {**figures, "today": figures["today"] | hidden_figures, "month": month}


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
_PLACE = (dimension(usage, "day"), *(usage.c[name] for name in _DIMENSIONS))
log = structlog.get_logger()


def roll_up(connection: Connection, before: float, rows: int = BATCH_ROWS) -> int:
    """A job of the store: turn the oldest rows, which ended before then, into sums; how many."""
    oldest = select(usage.c.id).where(usage.c.ended_at < before)
    if rows <= 0 or connection.scalar(oldest.limit(1)) is None:
        return 0
    # Before the rows are read, so that of two processes one waits for the other.
    raised = insert_for(connection)(revisions).values(name=ROLLED_UP, number=1)
    connection.execute(
        raised.on_conflict_do_update(
            index_elements=[revisions.c.name], set_={"number": revisions.c.number + 1}
        )
    )
    ids = list(connection.scalars(oldest.order_by(usage.c.ended_at).limit(rows)))
    if not ids:
        return 0
    sums: dict[tuple[str, ...], Sums] = {}
    summed = select(*_PLACE, *ROW_SUMS).where(usage.c.id.in_(ids)).group_by(*_PLACE)
    for day, *values in connection.execute(summed):
        place, numbers = values[: len(_DIMENSIONS)], values[len(_DIMENSIONS) :]
        whose = (label_of("day", day), *(value or "" for value in place))
        sums.setdefault(whose, Sums()).add(numbers)
    add = insert_for(connection)(usage_days)
    add = add.on_conflict_do_update(
        index_elements=list(usage_days.primary_key),
        set_={name: usage_days.c[name] + add.excluded[name] for name in SUM_NAMES},
    )
    names = ("day", *(usage_days.c[n].key for n in _DIMENSIONS), *SUM_NAMES)
    connection.execute(
        add, [dict(zip(names, (*place, *one.values()), strict=True)) for place, one in sums.items()]
    )
    gone = connection.execute(delete(usage).where(usage.c.id.in_(ids))).rowcount
    assert gone == len(ids), "rows were deleted by somebody else"
    return gone


@dataclass(eq=False)
class Retention:
    """Keeps the ledger within its limits, a batch at a time.

    `settings` gives those in force. No report is read while a batch moves: it would count the rows
    twice or not at all.
    """

    reporter: Reporter
    settings: Callable[[], RetentionSettings]
    now: Callable[[], float]

    def __post_init__(self) -> None:
        self.worker = StoreWorker(
            self.keep_within_limits,
            PASS_INTERVAL,
            first=FIRST_PASS,
            on_away=lambda why: log.warning("old usage stays", why=why),
        )

    async def keep_within_limits(self) -> int:
        """Turn into sums what is too old, then the oldest of what is too many; returns how many.

        Raises: StoreError; what is done by then stays done.
        """
        gone, run = 0, self.reporter.store.run
        settings, now = self.settings(), self.now()
        youngest = now - YOUNGEST
        if settings.days:
            before = (now // DAY - settings.days) * DAY
            gone += await self._roll_up(min(before, youngest))
        if settings.rows:
            start: float | None = 0.0
            rows = 0
            while start is not None:
                some, start = await run(partial(count_some, start=start), write=False)
                rows += some
                await asyncio.sleep(BATCH_PAUSE)
            gone += await self._roll_up(youngest, rows - settings.rows)
        if gone:
            log.info("old usage summed by day", rows=gone)
            for _ in range(MOST_VACUUMS):
                if not await run(give_back_pages):
                    break
                await asyncio.sleep(BATCH_PAUSE)
        return gone

    async def _roll_up(self, before: float, most: int = sys.maxsize) -> int:
        gone = 0
        while gone < most:
            rows = min(BATCH_ROWS, most - gone)
            async with self.reporter.reading:
                done = await self.reporter.store.run(partial(roll_up, before=before, rows=rows))
            gone += done
            if done < rows:
                break
            await asyncio.sleep(BATCH_PAUSE)
        return gone


def count_some(
    connection: Connection, start: float, rows: int = COUNTED_ROWS
) -> tuple[int, float | None]:
    """A job of the store: how many of the next rows there are, which ended from `start` on.

    Returns when the row ended from which to go on, too; None: all are counted.
    """
    ended = usage.c.ended_at
    end = end_of_step(connection, select(ended), start, rows)
    some = ended >= start if end is None else and_(ended >= start, ended < end)
    return connection.scalar(select(func.count()).select_from(usage).where(some)) or 0, end


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
