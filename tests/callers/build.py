"""Limits, meters and ledgers without a gateway: processes on one store, and their clocks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection, select

from gateway.callers.ledger import Ledger
from gateway.callers.limit_sync import LimitSync
from gateway.callers.limits import Account, LimitBook, Reservation
from gateway.callers.meter import Meter
from gateway.callers.processes import ProcessIdentity
from gateway.config.keys import LimitSpec
from gateway.config.settings import Settings
from gateway.events import EventBus, RequestRecord
from gateway.lease import AttemptCharge, LeaseRequest
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import usage
from gateway.store.store import Store
from gateway.terms import Caller, Priority
from tests import lease_requests

T = TypeVar("T")

NOW = 1_780_000_000.0
"""Some day at the end of May 2026."""


class Clocks:
    """A monotonic clock, and a wall clock that can be set."""

    def __init__(self, wall: float = NOW) -> None:
        self.monotonic = 1000.0
        self._ahead = wall - self.monotonic

    def clock(self) -> float:
        return self.monotonic

    def wall(self) -> float:
        return self.monotonic + self._ahead

    def advance(self, seconds: float) -> None:
        self.monotonic += seconds

    def set_wall(self, wall: float) -> None:
        self._ahead = wall - self.monotonic


@dataclass(eq=False)
class FlakyStore:
    """A store over a real one, or over one connection, that fails as it is told."""

    behind: Any
    is_away: bool = False
    seconds: float = 0.0
    """For which each job takes."""
    failures: list[str] = field(default_factory=list)
    """Of the next jobs: `before` the commit, `after` it, or empty."""
    loses: list[str] = field(default_factory=list)
    """Names of jobs whose next answer is lost after the commit."""
    asked: list[float] = field(default_factory=list)
    """The loop's times at which it was asked."""
    more_changes: int = 0
    location: Any = None

    @property
    def changes(self) -> int:
        return self.more_changes + getattr(self.behind, "changes", 0)

    async def wait_opened(self, seconds: float) -> bool:
        return seconds > 0

    async def run(self, job: Callable[[Connection], T], /, *, write: bool = True, **_: Any) -> T:
        self.asked.append(asyncio.get_running_loop().time())
        failure = self.failures.pop(0) if self.failures else ""
        if self.is_away or failure == "before":
            raise StoreUnavailable("gone", "wait")
        await asyncio.sleep(self.seconds)
        if isinstance(self.behind, Store):
            result = await self.behind.run(job, write=write)
        else:
            result = job(self.behind)
        name = getattr(job, "__name__", "")
        if failure == "after" or name in self.loses:
            self.loses = [one for one in self.loses if one != name]
            raise StoreUnavailable("gone", "wait")
        return result


def a_caller(name: str = "alice", *, group: str | None = None, **keys: Any) -> Caller:
    limits, user_limits = keys.pop("limits", None), keys.pop("user_limits", None)
    return Caller(
        name,
        name,
        Priority.PREMIUM,
        group=group,
        limits=None if limits is None else LimitSpec.model_validate(limits),
        user_limits=None if user_limits is None else LimitSpec.model_validate(user_limits),
        **keys,
    )


_NUMBERS = itertools.count()


def a_lease_request(prompt: int = 0, most: int | None = None, **keys: Any) -> LeaseRequest:
    """A chat of so many tokens in its prompt, and at most so many in its answer."""
    values: dict[str, Any] = {
        "prompt_tokens": prompt,
        "exact_tokens": prompt,
        "max_tokens": most,
        **keys,
    }
    return lease_requests.a_lease_request(f"req_{next(_NUMBERS)}", "m", caller="alice", **values)


@dataclass(eq=False)
class LimitedProcess:
    """One process on a store, without its listeners."""

    name: str
    store: Store
    clocks: Clocks
    settings: Settings
    open: list[tuple[Reservation, RequestRecord]] = field(default_factory=list)

    def __post_init__(self) -> None:
        wall, clock = self.clocks.wall, self.clocks.clock
        self.bus = EventBus(lambda _, __: None)
        self.book = LimitBook(
            self.settings, clock=clock, wall_clock=wall, learn_pending=self.bus.flush
        )
        own = ProcessIdentity(f"{self.name}.0", f"host-{self.name}", 1, wall())
        self.ledger = Ledger(
            self.store,
            own,
            now=wall,
            clock=clock,
            open_requests=lambda *which: self.meter.open_requests(*which),  # noqa: PLW0108 - made below
        )
        self.meter = Meter(
            self.book, self.bus, process=own.id, add_row=self.ledger.add, wall_clock=wall
        )
        self.sync = LimitSync(self.book, self.store, own.id, now=wall, clock=clock)

    async def start(self, callers: Iterable[Caller]) -> None:
        await self.ledger.start(10.0)
        self.book.prepare(callers)
        await self.sync.start(10.0)

    async def step(self) -> None:
        """What a process does each half second."""
        self.bus.flush()
        await self.ledger.start(10.0)
        await self.sync.look()

    def admit(self, caller: Caller, request: LeaseRequest, user: str | None = None) -> None:
        record = RequestRecord(request.id, "/v1/chat/completions")
        accounts = self.book.accounts(caller, user)
        self.open.append((self.meter.admit(accounts, request, record), record))

    def end(self, index: int, tokens: int, cost: float = 0.0) -> None:
        reservation, record = self.open.pop(index)
        record.count_tokens(tokens, 0, 0)
        record.charge(AttemptCharge(cost))
        self.meter.ended(reservation, record)

    def account(self, subject: str) -> Account:
        return next(one for one in all_accounts(self.book) if one.subject == subject)


def all_accounts(book: LimitBook) -> Iterator[Account]:
    yield from book._accounts.values()
    for users in book._users.values():
        yield from users.values()


@dataclass(frozen=True)
class Counted:
    """What the ledger's rows of one subject come to now."""

    requests: int
    tokens: int
    day_tokens: int
    month_cost: float


def read_rows(connection: Connection) -> list[dict[str, Any]]:
    return [dict(row._mapping) for row in connection.execute(select(usage))]


def counted(rows: list[dict[str, Any]], subject: str, wall: float) -> Counted:
    kind, _, rest = subject.partition(":")
    mine = [row for row in rows if _counts_for(row, kind, rest)]

    def tokens(since: float) -> int:
        chosen = [row for row in mine if row["ended_at"] > since]
        return sum(row["prompt_tokens"] + row["completion_tokens"] for row in chosen)

    # All tests are within one month.
    return Counted(
        sum(row["started_at"] > wall - 60.0 for row in mine),
        tokens(wall - 60.0),
        tokens(wall // 86400 * 86400 - 0.001),
        sum(row["cost"] for row in mine),
    )


def used(account: Account, clocks: Clocks) -> Counted:
    now = clocks.clock()
    return Counted(
        int(account.requests.value(now)),
        int(account.tokens.value(now)),
        int(sum(account.tokens_by_day.values())),
        sum(account.cost_by_month.values()),
    )


def _counts_for(row: dict[str, Any], kind: str, rest: str) -> bool:
    if kind == "group":
        return bool(row["group_name"] == rest)
    key, _, user = rest.partition("/")
    return kind == "total" or (row["key"] == key and (kind == "key" or row["user"] == user))
