"""Old rows become sums, and no report can tell."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, func, select

from gateway.store.schema import metadata, revisions, usage, usage_days
from gateway.usage.reports import DIMENSIONS, Dimension, ReportQuery, UsageReport
from gateway.usage.retention import RollUp, RowCounter, give_back_pages
from tests.usage.ledger_rows import DAY, NOON, a_row, add_rows, count_rows
from tests.usage.test_reports import MIDNIGHT, read

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


def reports(connection: Connection, by: list[Dimension]) -> list[UsageReport]:
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
            gone = RollUp(MIDNIGHT + days * DAY, most)(connection)
            assert gone <= most
            assert count_rows(connection) == kept - gone
            assert reports(connection, by) == before
    engine.dispose()


def test_the_oldest_rows_go_first_and_young_ones_stay(connection: Connection) -> None:
    add_rows(connection, [a_row(n, ended_at=NOON - n * DAY) for n in range(4)])
    assert RollUp(NOON - DAY / 2, 2)(connection) == 2
    assert list(connection.scalars(select(usage.c.id).order_by(usage.c.id))) == ["r0", "r1"]
    assert RollUp(NOON - DAY / 2, 2)(connection) == 1
    assert RollUp(NOON - DAY / 2, 2)(connection) == 0


def test_requests_alike_make_one_sum(connection: Connection) -> None:
    add_rows(connection, [a_row(n, ended_at=NOON - n) for n in range(50)])
    for _ in range(5):
        RollUp(NOON + 1, 10)(connection)
    day = connection.execute(select(usage_days)).mappings().one()
    assert (day["requests"], day["prompt_tokens"], day["day"]) == (50, 5000, "2027-01-15")
    assert count_rows(connection) == 0


def test_the_number_rises_only_when_rows_move(connection: Connection) -> None:
    number = select(func.max(revisions.c.number))
    add_rows(connection, [a_row(1)])
    RollUp(NOON)(connection)
    assert connection.scalar(number) is None
    RollUp(NOON + 1)(connection)
    RollUp(NOON + 1)(connection)
    assert connection.scalar(number) == 1


@given(st.lists(st.integers(0, 5), max_size=25), st.integers(1, 6))
def test_rows_are_counted_in_steps(seconds: list[int], rows_per_step: int) -> None:
    """Also where more requests than a step counts ended at the same time."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        add_rows(connection, [a_row(n, ended_at=NOON + at) for n, at in enumerate(seconds)])
        counter, steps = RowCounter(rows_per_step), 1
        while not counter(connection):
            steps += 1
        assert counter.counted == len(seconds)
        assert steps <= 1 + len(seconds)
    engine.dispose()


def test_a_file_that_does_not_shrink_by_itself_is_left_alone(connection: Connection) -> None:
    rng = random.Random(1)
    add_rows(connection, [a_row(n, key=f"{rng.random()}") for n in range(2000)])
    connection.execute(usage.delete())
    assert not give_back_pages(connection)
