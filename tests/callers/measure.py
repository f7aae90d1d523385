"""How long the ledger's readers take: `python -m tests.callers.measure [--rows N] [--postgres]`.

Fills a new store with made-up requests of 30 days (40 keys, 500 users, 4 models, 10 nodes), finds
requests in it and reads reports from it while another task writes a row every 50 ms, makes the
index of the store's sixth level anew, and sums up its oldest fifth, 200,000 rows at most.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import operator
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, insert, select

from gateway.callers.ended import EndedFinder, parse_ended_query
from gateway.callers.ledger import ROW_COLUMNS, insert_rows
from gateway.callers.reports import (
    Reporter,
    ReportInterrupted,
    ReportQuery,
    Retention,
    parse_query,
)
from gateway.config.stored import RetentionSettings
from gateway.store.database import locate_store
from gateway.store.schema import usage
from gateway.store.store import Store
from tests.callers.ledger_rows import DAY, NOON, a_row, add_rows, made_up_rows
from tests.postgres import running_postgres

ROWS_AT_ONCE = 5000
DAYS, COPIES = 30, 10  # The rows of the last days are made up, and copied to the days before.

T = TypeVar("T")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.callers.measure", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--postgres", action="store_true", help="PostgreSQL instead of SQLite")
    options = parser.parse_args()
    structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = f"sqlite:///{folder / 'gateway.db'}"
        if options.postgres:
            url = stack.enter_context(running_postgres()).new_database()
        asyncio.run(measure(url, folder, options.rows))


async def measure(url: str, folder: Path, rows: int) -> None:
    """Fill the store, read and shrink it."""
    store = Store(locate_store(url, folder))
    store.start()
    assert await store.wait_opened(60.0)
    began = time.perf_counter()
    made_up = made_up_rows(rows // COPIES, DAYS // COPIES, random.Random(11), in_order=True)
    for number, batch in enumerate(batches(made_up, ROWS_AT_ONCE)):
        await store.run(partial(fill, batch, number * ROWS_AT_ONCE), seconds=60.0)
    for number in range(1, COPIES):
        await store.run(partial(copy, number), seconds=1800.0)
    print(f"{rows} rows written in {time.perf_counter() - began:.0f} s")
    size = await store.run(store_bytes, write=False)
    print(f"{size / rows:.0f} bytes a row, indexes included")
    await find_ended(store, rows)
    reporter = Reporter(store)
    for by in ("model", "key", "day", "user", "key,day"):
        query = parse_query(NOON, by=by)
        await timed(store, f"30 days by {by}", partial(reporter.read, query))
    month = ReportQuery(("model", "day"), NOON - 14.5 * DAY, NOON + DAY / 2, key="key-7")
    await timed(store, "/v1/usage of one key (1/40 of 15 days)", partial(reporter.read, month))
    for since in ("1d", "7d", "30d"):
        times = parse_query(NOON, by="model", since=since, percentiles="true")
        await timed(store, f"{since} by model with percentiles", partial(reporter.read, times))
    index = next(one for one in usage.indexes if "client_request_id" in str(one.name))

    def make_index(connection: Connection) -> None:
        index.drop(connection)
        index.create(connection)

    await timed(store, "the index of clients' ids", partial(store.run, make_index, seconds=600.0))
    gone_rows = min(200_000, rows // 5)
    settings = RetentionSettings(days=0, rows=rows - gone_rows)
    retention = Retention(reporter, lambda: settings, lambda: NOON)
    gone = await timed(store, f"retention of {gone_rows} rows", retention.keep_within_limits)
    print(f"{gone} rows summed up")
    by_key = parse_query(NOON, by="key")
    await timed(store, "30 days by key, then", partial(reporter.read, by_key))
    await store.aclose(10.0)


def fill(batch: list[dict[str, Any]], first: int, connection: Connection) -> None:
    """Add rows as the ledger does."""
    pick = operator.itemgetter(*("class_" if name == "class" else name for name in ROW_COLUMNS))
    insert_rows(connection, [pick(row) for row in batch], first)


def copy(number: int, connection: Connection) -> None:
    """Add the first rows once more, `number` times their days earlier and with other ids."""
    earlier = number * DAYS // COPIES * DAY
    changed = {
        "id": usage.c.id.concat(f"-{number}"),
        "client_request_id": usage.c.client_request_id.concat(f"-{number}"),
        "started_at": usage.c.started_at - earlier,
        "ended_at": usage.c.ended_at - earlier,
    }
    columns = [changed.get(column.name, column) for column in usage.columns]
    first = select(*columns).where(usage.c.ended_at > NOON - DAYS // COPIES * DAY)
    connection.execute(insert(usage).from_select(list(usage.columns), first))


async def find_ended(store: Store, rows: int) -> None:
    """Find pages of ended requests, and single ones."""
    ended = EndedFinder(store, lambda _: None, lambda word: [word], time.monotonic)
    questions: dict[str, dict[str, str]] = {
        "the latest 100": {},
        "the latest 1000": {"limit": "1000"},
        "the latest 100 of a key": {"key": "key-7"},
        "the latest 100 that failed (1 %)": {"outcome": "failed"},
        "the 100 slowest of a day": {"order": "slowest", "since": "1d"},
        "the 100 slowest of 30 days": {"order": "slowest"},
        "those of a node that had none": {"node": "nobody"},
        "those of a key that had none": {"key": "nobody"},
    }
    for name, given in questions.items():
        query = parse_ended_query(NOON, given, ended.ids_of)
        reader = await timed(store, name, partial(ended.read, query))
        assert reader is not None
        page = reader.page(ended.name_of)
        bound = "" if page["complete"] else f", as far as {page['since']}"
        print(f"    {len(page['requests'])} found{bound}")
    await timed(store, "a request by its id", partial(ended.named, "r1234-7"))
    name = f"trace-{1234:032x}-7"
    await timed(store, "requests by the client's id", partial(ended.named, name))


async def timed(store: Store, name: str, work: Callable[[], Awaitable[T]]) -> T | None:
    """Print how long the work took, and the longest wait of the rows written meanwhile."""
    waits: list[float] = []
    writing = asyncio.create_task(write(store, waits))
    began, used, result = time.perf_counter(), time.process_time(), None
    try:
        result = await work()
    except ReportInterrupted as error:
        print(f"{name}: {error}")
    seconds, used = time.perf_counter() - began, time.process_time() - used
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    print(f"{name}: {seconds:.2f} s, of them {used:.2f} of this process's CPU")
    print(
        f"    a row that is written meanwhile waits {max(waits, default=0.0) * 1000:.0f} ms at most"
    )
    return result


_numbers = itertools.count(10**9)


async def write(store: Store, waits: list[float]) -> None:
    """Write a row every 50 ms, and note how long each waited."""
    while True:
        row = a_row(next(_numbers), ended_at=NOON)
        began = time.perf_counter()
        await store.run(adding([row]))
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)


def adding(rows: list[dict[str, Any]]) -> Callable[[Connection], None]:
    """A job of the store that adds these rows."""
    return lambda connection: add_rows(connection, rows)


def batches(rows: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    """The rows, so many at a time."""
    while batch := list(itertools.islice(rows, size)):
        yield batch


def store_bytes(connection: Connection) -> int:
    """Bytes of the ledger on disk."""
    if connection.dialect.name == "sqlite":
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar() or 0
        return int(pages) * 4096
    return int(connection.exec_driver_sql("SELECT pg_total_relation_size('usage')").scalar() or 0)


if __name__ == "__main__":
    main()
