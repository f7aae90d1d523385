"""Reports, retention and hours of nodes on real stores: SQLite's file and a PostgreSQL server."""

from __future__ import annotations

import asyncio
import itertools
import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, func, select

from gateway.callers.money import AliveNode, NodeHoursRecorder
from gateway.callers.reports import (
    DIMENSIONS,
    Dimension,
    LedgerReport,
    Reporter,
    ReportQuery,
    Retention,
    count_some,
    give_back_pages,
    parse_query,
    roll_up,
)
from gateway.config.stored import RetentionSettings
from gateway.store.schema import metadata, revisions, usage, usage_days
from gateway.store.store import Store
from tests.callers.ledger_rows import DAY, NOON, a_row, add_rows, count_rows, made_up_rows
from tests.callers.test_reports import read
from tests.store.stores import opened

MIDNIGHT = NOON - DAY / 2


def told(report: LedgerReport) -> dict[str, object]:
    """A report, whose rows of one cost may stand in any order."""
    body = report.to_json()
    return {**body, "rows": sorted(body["rows"], key=str)}


async def test_every_report_is_the_same_before_and_after_retention(store: Store) -> None:
    rows = list(made_up_rows(3000, 20, random.Random(7)))
    await store.run(lambda connection: add_rows(connection, rows))
    reporter = Reporter(store)
    pairs = itertools.combinations(DIMENSIONS, 2)
    questions = [(name,) for name in DIMENSIONS] + list(pairs)
    queries = [ReportQuery(by, MIDNIGHT - 30 * DAY, MIDNIGHT + DAY) for by in questions]
    before = [told(await reporter.read(query)) for query in queries]
    assert all("'requests': 3000" in str(one["total"]) for one in before)
    settings = RetentionSettings(days=10, rows=1000)
    assert await retention(store, settings).keep_within_limits() == 2000
    assert await store.run(count_rows) == 1000
    assert [told(await reporter.read(query)) for query in queries] == before


async def test_rows_that_two_processes_sum_up_at_once_count_once(
    store: Store, store_url: str
) -> None:
    rows = list(made_up_rows(2000, 5, random.Random(3)))
    await store.run(lambda connection: add_rows(connection, rows))

    async def sum_up(one: Store) -> int:
        gone = 0
        while done := await one.run(partial(roll_up, before=NOON + 1, rows=50)):
            gone += done
        return gone

    with opened(store_url) as other:
        assert sum(await asyncio.gather(sum_up(store), sum_up(other))) == 2000
    report = await Reporter(store).read(parse_query(NOON, by="key"))
    assert report.total.requests == 2000


def retention(store: Store, settings: RetentionSettings) -> Retention:
    return Retention(Reporter(store), lambda: settings, lambda: NOON)


async def test_young_rows_stay_and_without_limits_all(store: Store) -> None:
    rows = [a_row(n, ended_at=NOON - 60 * n) for n in range(300)]
    await store.run(lambda connection: add_rows(connection, rows))
    unlimited = retention(store, RetentionSettings(days=0, rows=0))
    assert await unlimited.keep_within_limits() == 0
    await retention(store, RetentionSettings(days=0, rows=10)).keep_within_limits()
    assert await store.run(count_rows) == 121
    await store.run(lambda connection: add_rows(connection, [a_row(999, ended_at=NOON - 3 * DAY)]))
    assert await retention(store, RetentionSettings(days=1)).keep_within_limits() == 1


async def test_the_file_shrinks_when_old_rows_go(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path / 'gateway.db'}") as store:
        rows = [a_row(n, ended_at=NOON - n * 60) for n in range(20_000)]
        await store.run(lambda connection: add_rows(connection, rows))

        async def pages(pragma: str) -> int:
            return int(await store.run(lambda c: c.exec_driver_sql(pragma).scalar()) or 0)

        size = await pages("PRAGMA page_count")
        await retention(store, RetentionSettings(days=2)).keep_within_limits()
        assert await pages("PRAGMA page_count") < size / 3
        assert await pages("PRAGMA freelist_count") == 0


async def test_a_node_that_two_gateways_look_at_is_paid_once(store: Store) -> None:
    now = NOON
    nodes = [AliveNode("cpu-a", "cpu", 0.20), AliveNode("gpu-a", "gpu", 2.00)]
    first = NodeHoursRecorder(store, lambda: nodes, lambda: now)
    second = NodeHoursRecorder(store, lambda: nodes[:1], lambda: now)
    first.look()
    for minute in range(60):
        now = NOON + 60 * minute + 30
        second.look()
        await second.write()
        now = NOON + 60 * minute + 60
        first.look()
        await first.write()
    report = await Reporter(store).read(parse_query(NOON))
    assert [one.node for one in report.hours] == ["cpu-a", "gpu-a"]
    assert [one.seconds for one in report.hours] == pytest.approx([3600, 3600])
    assert sum(one.cost for one in report.hours) == pytest.approx(2.20)


async def test_a_machine_that_slept_claims_nothing_of_that_time(store: Store) -> None:
    times = iter([0, 60, 8000, 8060, 7000, 7060])
    alive = [AliveNode("a", "cpu", 3.6)]
    recorder = NodeHoursRecorder(store, lambda: alive, lambda: NOON + next(times))
    for _ in range(6):
        recorder.look()
    await recorder.write()
    await recorder.write()
    report = await Reporter(store).read(parse_query(NOON))
    assert [one.seconds for one in report.hours] == [120.0]


# Old rows become sums, and no report can tell.


LONG_AGO = MIDNIGHT - 40 * DAY
END = MIDNIGHT + DAY


# Multiples of 1/1024, which floats sum without an error in any order.
money = st.integers(0, 10_000).map(lambda parts: parts / 1024)

rows = st.lists(
    st.fixed_dictionaries(
        {
            "ended_at": st.floats(MIDNIGHT - 3 * DAY, MIDNIGHT + DAY, exclude_max=True),
            "key": st.sampled_from(["a", "b", None]),
            "group_name": st.sampled_from(["g", None]),
            "user": st.sampled_from(["u", "v", None]),
            "model": st.sampled_from(["m", "n", None]),
            "class_": st.sampled_from(["batch", "normal"]),
            "tier": st.sampled_from(["cpu", "gpu", None]),
            "node": st.sampled_from(["x", "y", None]),
            "outcome": st.sampled_from(["ok", "node_failed", None]),
            "status": st.sampled_from([200, 404, 499, 502]),
            "prompt_tokens": st.integers(0, 10**12),
            "completion_tokens": st.integers(0, 10**6),
            "slot_seconds": money,
            "cost": money,
            "gpu_cost": st.none() | money,
        }
    ),
    max_size=30,
)

batches = st.lists(st.tuples(st.floats(-3, 1), st.integers(0, 20)), max_size=6)

questions = st.lists(st.sampled_from(DIMENSIONS), min_size=1, max_size=2, unique=True)


def reports(connection: Connection, by: list[Dimension]) -> list[LedgerReport]:
    return [
        read(connection, ReportQuery(tuple(by), LONG_AGO, END)),
        read(connection, ReportQuery(tuple(by), MIDNIGHT - DAY, MIDNIGHT)),
        read(connection, ReportQuery(("model", "day"), LONG_AGO, END, key="a", user="u")),
    ]


@pytest.mark.slow
@given(rows, batches, questions)
def test_no_report_changes_when_rows_become_sums(
    listed: list[dict[str, object]], moves: list[tuple[float, int]], by: list[Dimension]
) -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        add_rows(connection, [a_row(n, **values) for n, values in enumerate(listed)])
        before = reports(connection, by)
        for days, most in moves:
            kept = count_rows(connection)
            gone = roll_up(connection, MIDNIGHT + days * DAY, most)
            assert gone <= most
            assert count_rows(connection) == kept - gone
            assert reports(connection, by) == before
    engine.dispose()


def test_the_oldest_rows_go_first_and_the_number_rises_only_then(connection: Connection) -> None:
    number = select(func.max(revisions.c.number))
    add_rows(connection, [a_row(n, ended_at=NOON - n * DAY) for n in range(4)])
    assert roll_up(connection, NOON - 9 * DAY, 2) == 0
    assert connection.scalar(number) is None
    assert roll_up(connection, NOON - DAY / 2, 2) == 2
    assert list(connection.scalars(select(usage.c.id).order_by(usage.c.id))) == ["r0", "r1"]
    assert roll_up(connection, NOON - DAY / 2, 2) == 1
    assert roll_up(connection, NOON - DAY / 2, 2) == 0
    assert connection.scalar(number) == 2


def test_requests_alike_make_one_sum(connection: Connection) -> None:
    add_rows(connection, [a_row(n, ended_at=NOON - n) for n in range(50)])
    for _ in range(5):
        roll_up(connection, NOON + 1, 10)
    day = connection.execute(select(usage_days)).mappings().one()
    assert (day["requests"], day["prompt_tokens"], day["day"]) == (50, 5000, "2027-01-15")
    assert count_rows(connection) == 0


@given(st.lists(st.integers(0, 5), max_size=25), st.integers(1, 6))
def test_rows_are_counted_in_steps(seconds: list[int], rows_per_step: int) -> None:
    """Also where more requests than a step counts ended at the same time."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        add_rows(connection, [a_row(n, ended_at=NOON + at) for n, at in enumerate(seconds)])
        start: float | None = 0.0
        counted = steps = 0
        while start is not None:
            some, start = count_some(connection, start, rows_per_step)
            counted, steps = counted + some, steps + 1
        assert counted == len(seconds)
        assert steps <= 1 + len(seconds)
    engine.dispose()


def test_a_file_that_does_not_shrink_by_itself_is_left_alone(connection: Connection) -> None:
    rng = random.Random(1)
    add_rows(connection, [a_row(n, key=f"{rng.random()}") for n in range(2000)])
    connection.execute(usage.delete())
    assert not give_back_pages(connection)
