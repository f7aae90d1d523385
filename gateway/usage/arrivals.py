"""The busiest hour of the ledger, request by request: what a plan of the fleet plays again.

It holds times, sizes, models and classes, and nothing that names a caller. The hour is the one for
which requests asked most of the nodes: the seconds that they held slots, and the mean of those for
each request that the gateway had no slot for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    and_,
    case,
    func,
    literal,
    or_,
    select,
)

from gateway.errors import CLIENT_CLOSED_STATUS
from gateway.store.schema import open_requests, usage
from gateway.usage.reports import ROWS_PER_STEP, InvalidQuery, ReportQuery, end_of_step, time_text

MINUTE = 60

STRETCHES = (60, 20, 5, 1)
"""Minutes of what is called the busiest hour: the longest of which all requests can be told."""

MOST_ARRIVALS = 20_000
"""Requests that are told, some 2 MB of JSON."""

MOST_MINUTES = 150_000
"""Minutes with requests that are compared: a hundred days of them, some 30 MB."""

BATCH = "batch"
"""The class of requests that nobody waits for."""

UNSERVED = ("queue_full", "queue_timeout")
"""Outcomes of requests that the gateway had no slot for."""

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

    def asked(self, each: float) -> float:
        """Slot seconds, with `each` of a request that had no slot."""
        return self.slot_seconds + each * (self.requests - self.served)


@dataclass(slots=True)
class ArrivalsReader:
    """Reads the busiest hour: call `step` until it returns True, in jobs of the store.

    Then `to_json`. Of `query` its times count.
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
            later = select(ended).where(ended < self.query.until).order_by(ended)
            end = end_of_step(connection, later, self._at, self.rows_per_step)
            until = self.query.until if end is None else end
            read = self._count if self._hour is None else self._read
            read(connection, self._at, until)
            self._at = end
            return False
        if self._hour is None:
            self._count_open(connection)
            if not self._minutes:
                return True
            self._hour = self._busiest()
            self._at = self._hour[0]
            return False
        waits_not = select(open_requests).where(open_requests.c.class_.is_distinct_from(BATCH))
        self._add(connection, waits_not, open_requests.c.started_at)
        self._arrivals.sort(key=lambda one: one[0])
        return True

    def _count(self, connection: Connection, start: float, end: float) -> None:
        minute = func.floor(usage.c.started_at / MINUTE)
        served = func.sum(case((usage.c.slot_seconds > 0, 1), else_=0))
        counted = (
            select(minute, func.count(), served, func.sum(usage.c.slot_seconds))
            .where(usage.c.ended_at >= start, usage.c.ended_at < end, _wanted_slots())
            .group_by(minute)
        )
        self._add_minutes(connection, counted)

    def _count_open(self, connection: Connection) -> None:
        minute = func.floor(open_requests.c.started_at / MINUTE)
        counted = (
            select(minute, func.count(), literal(0), literal(0.0))
            .where(open_requests.c.class_.is_distinct_from(BATCH))
            .group_by(minute)
        )
        self._add_minutes(connection, counted)

    def _add_minutes(self, connection: Connection, counted: Select[Any]) -> None:
        for number, requests, served, slot_seconds in connection.execute(counted):
            if not self.query.since - MINUTE < number * MINUTE < self._until:
                continue
            minute = self._minutes.setdefault(int(number), _Minute())
            minute.requests += int(requests)
            minute.served += int(served)
            minute.slot_seconds += float(slot_seconds)
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

    def _read(self, connection: Connection, start: float, end: float) -> None:
        ended = select(usage).where(usage.c.ended_at >= start, usage.c.ended_at < end)
        self._add(connection, ended.where(_wanted_slots()), usage.c.started_at)

    def _add(
        self, connection: Connection, found: Select[Any], started: ColumnElement[float]
    ) -> None:
        start, end = self._hour or (0.0, 0.0)
        within = found.where(started >= start, started <= end)
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


def _wanted_slots() -> ColumnElement[bool]:
    """Requests that a node worked for, and those that it would have if there had been a slot.

    Batches are none of them: they fill slots that are idle, and wait for those.
    """
    return and_(
        usage.c.class_.is_distinct_from(BATCH),
        or_(
            usage.c.slot_seconds > 0,
            usage.c.outcome.in_(UNSERVED),
            usage.c.status == CLIENT_CLOSED_STATUS,
        ),
    )


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
