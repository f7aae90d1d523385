"""Requests that have ended, as the ledger has them: found by a question, a page at a time.

A page is read in steps of some thousand rows, each a job of its own for the store, so that the rows
of requests that end meanwhile are written in between. It ends when it is full, when there is
nothing older, or after so many rows and seconds; the next page goes on from there. What retention
has summed up by day is no longer there.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Annotated, Any, Final, Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, and_, or_, select

from gateway import errors
from gateway.callers.processes import LOST
from gateway.callers.reports import (
    ROWS_PER_STEP,
    InvalidQuery,
    ReportInterrupted,
    parse_limit,
    parse_span,
)
from gateway.callers.windows import time_text
from gateway.errors import CLIENT_CLOSED_STATUS, GatewayError
from gateway.store.failures import StoreError
from gateway.store.schema import usage
from gateway.store.store import Store

Order = Literal["latest", "slowest"]
MOST_LISTED = 1000  # requests of one page
DEFAULT_LISTED = 100
MOST_EXAMINED = 1_000_000  # rows that are looked at for one page
MOST_SECONDS = 15.0  # seconds for one page, without the wait for others
LONGEST_WAIT = 30.0  # seconds that a page waits while others are read
MOST_KEYS = 100  # keys of one name that are looked for
MOST_NAMED = 20  # requests of one `X-Request-ID`
LONGEST_TEXT = 256  # characters of a value that is looked for, and of a cursor

_lasted = usage.c.ended_at - usage.c.started_at
_LEFT = usage.c.status == CLIENT_CLOSED_STATUS
_LOST = usage.c.outcome == LOST
_OUTCOMES: Final = {
    "ok": and_(usage.c.status < 400, usage.c.outcome.is_distinct_from(LOST)),
    "failed": or_(and_(usage.c.status >= 400, ~_LEFT), _LOST),
    "left": _LEFT,
}
# Parameters that a column must be equal to; `key` is one that leads to ids.
FILTERS: Final = {
    "group": usage.c.group_name,
    "user": usage.c.user,
    "model": usage.c.model,
    "node": usage.c.node,
    "class": usage.c.class_,
    "tier": usage.c.tier,
}
PARAMETERS: Final = frozenset(
    {*FILTERS, "key", "since", "until", "outcome", "slower_than", "order", "limit", "before"}
)


class OwnRow(msgspec.Struct, kw_only=True, rename={"class_": "class"}):
    """A request that has ended, as its caller sees it. What is null is unknown, or is not."""

    id: Annotated[str, "inside the gateway"]
    client_request_id: Annotated[str | None, "the `X-Request-ID` that its client sent"]
    started_at: Annotated[str, "when it was admitted, UTC"]
    ended_at: Annotated[str, "when it ended, UTC"]
    seconds: Annotated[float, "between the two"]
    wait_seconds: Annotated[float | None, "of these in the queue"]
    ttft_seconds: Annotated[float | None, "from its arrival to the first content of a stream"]
    user: Annotated[str | None, "end user that a trusted caller named"]
    model: Annotated[str | None, "its public name"]
    class_: Annotated[str | None, "in force"]
    path: Annotated[str | None, "asked for"]
    stream: Annotated[bool, "asked for"]
    prompt_tokens: Annotated[int, "of all its prompts"]
    cached_tokens: Annotated[int | None, "of these from a node's cache; null: hidden by `cache`"]
    completion_tokens: Annotated[int, "of all its answers"]
    cost: Annotated[float, "in the settings' currency"]
    attempts: Annotated[int, "nodes tried"]
    resumptions: Annotated[int | None, "how often its stream went on on another node, or after it "
        "had given up its slot"]  # fmt: skip
    status: Annotated[int, "that it ended with; 499: its client left; 0: its process was killed"]
    outcome: Annotated[str | None, "`ok`, or the error's code"]


class EndedRow(OwnRow, kw_only=True, rename={"class_": "class"}):
    """A request that has ended, as an operator sees it."""

    cached_tokens: Annotated[int, "of these from a node's cache"]
    prefill_seconds: Annotated[float | None, "for which nodes read its prompts"]
    decode_seconds: Annotated[float | None, "for which nodes wrote its answers"]
    key: Annotated[str | None, "the key's id, or the address of a caller without one"]
    key_name: Annotated[str | None, "of the key, while there is one of that id"]
    group: Annotated[str | None, "of the key"]
    tier: Annotated[str | None, "`cpu` or `gpu`, where it ran last"]
    node: Annotated[str | None, "where it ran last"]
    slot_seconds: Annotated[float, "for which it held slots"]


# `key_name` is no column.
_FIELDS: Final = tuple(name for name in EndedRow.__struct_fields__ if name != "key_name")
_COLUMNS: Final = tuple(
    _lasted.label("seconds")
    if name == "seconds"
    else usage.c.group_name.label("group")
    if name == "group"
    else usage.c[name]
    for name in _FIELDS
)
_AT, _STARTED, _LASTED, _ID = (
    _FIELDS.index(name) for name in ("ended_at", "started_at", "seconds", "id")
)
Found = Row[Any]
"""A row of the columns `_COLUMNS`."""


class Cursor(msgspec.Struct, frozen=True):
    """Where a page begins: behind the request with this id and this rank in the order."""

    order: Order
    rank: float  # Unix time when it ended, or its seconds
    id: str | None = None  # None: before all requests of that rank

    def __str__(self) -> str:
        """As the parameter `before` has it."""
        return f"{self.order[0]}{self.rank!r}" + ("" if self.id is None else f"~{self.id}")


_CURSOR = re.compile(r"([ls])(\d+(?:\.\d+)?(?:e-?\d+)?)(?:~(.+))?")


@dataclass(frozen=True, slots=True)
class EndedQuery:
    """What is asked: the requests that ended from `since` on and before `until`."""

    since: float
    until: float
    keys: tuple[str, ...] = ()  # ids; empty: all keys
    equal: tuple[tuple[str, str], ...] = ()  # names of `FILTERS`, each with its value
    outcome: str | None = None
    slower_than: float | None = None  # seconds
    order: Order = "latest"
    limit: int = DEFAULT_LISTED
    before: Cursor | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """All but the times and the cursor."""
        found: list[ColumnElement[bool]] = [FILTERS[name] == word for name, word in self.equal]
        if self.keys:
            found.append(usage.c.key.in_(self.keys))
        if self.outcome is not None:
            found.append(_OUTCOMES.get(self.outcome, usage.c.outcome == self.outcome))
        if self.slower_than is not None:
            found.append(_lasted > self.slower_than)
        return found


IdsOf = Callable[[str], Sequence[str]]
"""The ids of the keys that a word may mean: an id, or a name."""
NameOf = Callable[[str], str | None]
"""The name of the key with this id; None: it is unknown."""


def parse_ended_query(now: float, given: dict[str, str], ids_of: IdsOf) -> EndedQuery:
    """The question that these parameters of a URL or a command ask. Raises: InvalidQuery."""
    for name, word in given.items():
        if not word.isprintable() or not 0 < len(word) <= LONGEST_TEXT:
            raise InvalidQuery(name, f"must be 1 to {LONGEST_TEXT} printable characters")
    since, until = parse_span(given.get("since"), given.get("until"), now, now + 1)
    order = given.get("order", "latest")
    if order not in {"latest", "slowest"}:
        raise InvalidQuery("order", "must be latest or slowest")
    return EndedQuery(
        since,
        until,
        tuple(ids_of(given["key"])[:MOST_KEYS]) if "key" in given else (),
        tuple((name, given[name]) for name in FILTERS if name in given),
        given.get("outcome"),
        _parse_seconds(given.get("slower_than")),
        "latest" if order == "latest" else "slowest",
        parse_limit(given.get("limit"), DEFAULT_LISTED, MOST_LISTED),
        _parse_cursor(given.get("before"), order),
    )


def _parse_seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidQuery("slower_than", "must be a number of seconds, 0 or more")
    return seconds


def _parse_cursor(text: str | None, order: str) -> Cursor | None:
    if text is None:
        return None
    found = _CURSOR.fullmatch(text)
    if found is None or found[1] != order[0]:
        raise InvalidQuery("before", "must be the `next` of a page of the same question")
    return Cursor("latest" if found[1] == "l" else "slowest", float(found[2]), found[3])


@dataclass(slots=True)
class EndedReader:
    """Reads one page: call `step` until it returns True, in jobs of the store."""

    query: EndedQuery
    rows_per_step: int = ROWS_PER_STEP
    most_examined: int = MOST_EXAMINED
    found: list[Found] = field(default_factory=list, init=False)
    """In their order; one more than a page has if there is another page."""
    at: float = field(init=False)
    """What ended after it has been read, and what ended just then as well if `_id` is None."""
    is_over: bool = field(default=False, init=False)
    """Whether all has been read that the page needs."""
    _id: str | None = field(default=None, init=False)
    """Of the requests that ended at `at` those with lower ids are left; None: all of them."""
    _examined: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.at = math.nextafter(self.query.until, -math.inf)
        before = self.query.before
        if before is not None and before.order == "latest" and before.rank <= self.at:
            self.at, self._id = before.rank, before.id

    def step(self, connection: Connection) -> bool:
        """Read some more; whether the page is read, or so many rows have been looked at."""
        wanted, start = self.query.limit + 1, self._start_of_step(connection)
        rows = connection.execute(self.statement(start)).all()
        if self.query.order == "latest":
            self.found += rows
            self.is_over = len(self.found) == wanted
        else:
            slowness = itemgetter(_LASTED, _ID)
            merged = heapq.merge(self.found, rows, key=slowness, reverse=True)
            self.found = list(itertools.islice(merged, wanted))
        if start is None or self.is_over:
            self.is_over = True
            return True
        self.at, self._id = start, None
        self._examined += self.rows_per_step
        return self._examined >= self.most_examined

    def statement(self, start: float | None) -> Select[Any]:
        """What a step reads: of what is left, what ended after `start`; None: all of it."""
        query, ended = self.query, usage.c.ended_at
        left = ended <= self.at
        if self._id is not None:
            left = or_(ended < self.at, and_(ended == self.at, usage.c.id < self._id))
        statement = select(*_COLUMNS).where(left, *query.conditions())
        statement = statement.where(ended >= query.since if start is None else ended > start)
        if query.order == "latest":
            statement = statement.order_by(ended.desc(), usage.c.id.desc())
            return statement.limit(query.limit + 1 - len(self.found))
        if (before := query.before) is not None:
            behind = _lasted < before.rank
            if before.id is not None:
                behind = or_(behind, and_(_lasted == before.rank, usage.c.id < before.id))
            statement = statement.where(behind)
        if len(self.found) > query.limit:
            statement = statement.where(_lasted >= self.found[-1][_LASTED])
        return statement.order_by(_lasted.desc(), usage.c.id.desc()).limit(query.limit + 1)

    def _start_of_step(self, connection: Connection) -> float | None:
        """When the first request ended that is left for the next step; None: none is."""
        ended = usage.c.ended_at
        left = select(ended).where(ended >= self.query.since).order_by(ended.desc())
        if len(self.query.keys) == 1:
            # The only filter with an index of its own: others are counted in.
            left = left.where(usage.c.key == self.query.keys[0])
        start = connection.scalar(left.where(ended <= self.at).offset(self.rows_per_step).limit(1))
        if start == self.at:
            # More requests than a step takes ended at the same time.
            start = connection.scalar(left.where(ended < self.at).limit(1))
        return None if start is None else float(start)

    def page(self, name_of: NameOf) -> dict[str, Any]:
        """The page as operators see it, as JSON values; `name_of`: a key by its id."""
        return self.page_of(lambda one: ended_row(one, name_of))

    def page_of(self, tell: Callable[[Found], OwnRow]) -> dict[str, Any]:
        """The page as JSON values; `tell` makes each row."""
        query, shown, following = self.query, self.found[: self.query.limit], None
        if len(self.found) > query.limit:
            last = shown[-1]
            rank = last[_AT] if query.order == "latest" else last[_LASTED]
            following = str(Cursor(query.order, rank, last[_ID]))
        elif not self.is_over and query.order == "latest":
            following = str(Cursor("latest", self.at))
        return {
            "requests": [tell(one) for one in shown],
            "next": following,
            "since": time_text(query.since if self.is_over else self.at),
            "until": time_text(query.until),
            "complete": self.is_over,
        }


def ended_row(found: Found, name_of: NameOf) -> EndedRow:
    """A row as it is told; `name_of`: a key by its id."""
    values = _told_values(found)
    key = values["key"]
    return EndedRow(**values, key_name=None if key is None else name_of(key))


def own_row(found: Found, *, hides_cache: bool) -> OwnRow:
    """A row as its caller sees it; `hides_cache`: without what tells of prompt caches."""
    values = _told_values(found)
    hidden = {"cached_tokens": None} if hides_cache else {}
    return OwnRow(**{name: values[name] for name in OwnRow.__struct_fields__} | hidden)


def _told_values(found: Found) -> dict[str, Any]:
    values = dict(zip(_FIELDS, found, strict=True))
    for name in ("started_at", "ended_at"):
        values[name] = time_text(values[name], "milliseconds")
    for name in ("seconds", "wait_seconds", "ttft_seconds", "prefill_seconds", "decode_seconds"):
        if values[name] is not None:
            values[name] = round(values[name], 3)
    return values


def rows_of_name(connection: Connection, name: str) -> list[Found]:
    """A job of the store: the request with this id, and the latest with this `X-Request-ID`."""
    if not name.isprintable() or len(name) > LONGEST_TEXT:
        return []
    own, clients = usage.c.id == name, usage.c.client_request_id == name
    latest = select(*_COLUMNS).where(clients, ~own).order_by(usage.c.ended_at.desc())
    found = [*connection.execute(select(*_COLUMNS).where(own))]
    return [*found, *connection.execute(latest.limit(MOST_NAMED))][:MOST_NAMED]


@dataclass(slots=True, eq=False)
class EndedFinder:
    """Finds requests that have ended beside the event loop, a page at a time.

    `clock` gives monotonic seconds.
    """

    store: Store
    name_of: NameOf
    ids_of: IdsOf
    clock: Callable[[], float]
    most_examined: int = MOST_EXAMINED  # rows that are looked at for one page
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, query: EndedQuery) -> EndedReader:
        """The reader that has read a page. Raises: ReportInterrupted, StoreError."""
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                await self._reading.acquire()
        except TimeoutError:
            raise ReportInterrupted("others are being read: ask again later") from None
        try:
            reader = EndedReader(query, most_examined=self.most_examined)
            end = self.clock() + MOST_SECONDS
            while not await self.store.run(reader.step, write=False) and self.clock() < end:
                pass
        finally:
            self._reading.release()
        return reader

    async def named(self, name: str) -> list[EndedRow]:
        """Those of this id or `X-Request-ID`, at most `MOST_NAMED`. Raises: StoreError."""
        found = await self.store.run(lambda c: rows_of_name(c, name), write=False)
        return [ended_row(one, self.name_of) for one in found]


OWN_EXAMINED = 50_000  # rows that are looked at for one page of a caller


@dataclass(slots=True, eq=False)
class OwnRequests:
    """Finds the requests of callers for themselves.

    `ended` is not that of operators, who then wait for no caller. Of a caller one page is read at
    a time, so that nobody waits long for one that polls.
    """

    ended: EndedFinder
    now: Callable[[], float]  # Unix seconds
    _asking: set[str] = field(default_factory=set)
    """The keys of callers for whom a page is being read."""

    async def read(self, key: str, user: str | None, given: dict[str, str]) -> EndedReader:
        """The reader that has read a page of this key, or of one of its end users.

        `given`: `since`, `until`, `limit` and `before`. Raises: GatewayError (400, 429, 503).
        """
        if key in self._asking:
            message = "A page of your requests is being read already: ask for one at a time."
            raise GatewayError(429, "rate_limit_exceeded", message, retry_after=1.0)
        equal = () if user is None else (("user", user),)
        self._asking.add(key)
        try:
            query = parse_ended_query(self.now(), given, self.ended.ids_of)
            return await self.ended.read(replace(query, keys=(key,), equal=equal))
        except InvalidQuery as error:
            message = f"'{error.parameter}': {error}."
            raise errors.invalid_request(message, error.parameter) from None
        except (ReportInterrupted, StoreError):
            message = "The record of requests can't be read now."
            raise GatewayError(503, "store_unavailable", message, retry_after=5.0) from None
        finally:
            self._asking.discard(key)
