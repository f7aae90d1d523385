"""What a report counts, and the times and dimensions that it is asked by."""

from __future__ import annotations

import csv
import io
import math
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Connection, create_engine, insert, update

from gateway.callers import reports
from gateway.callers.keys import hash_key
from gateway.callers.limits import LimitBook
from gateway.callers.reports import (
    MOST_KEPT,
    MOST_RESTARTS,
    NO_STORE,
    PERCENTILES,
    ROLLED_UP,
    ArrivalsReader,
    CallerUsage,
    InvalidQuery,
    LedgerReport,
    Reporter,
    ReportInterrupted,
    ReportQuery,
    Sums,
    parse_query,
    parse_time,
    roll_up,
)
from gateway.callers.windows import time_text
from gateway.config.settings import Settings
from gateway.store.database import locate_store
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import metadata, node_hours, open_requests, revisions
from gateway.store.store import Store
from gateway.terms import Caller, Priority
from tests.callers.ledger_rows import DAY, NOON, a_row, add_rows
from tests.callers.metered_gateway import ALICE, CHAT, bearer, chat, metered_gateway, recorded
from tests.each_case import each_case
from tests.gateways import Running

MIDNIGHT = NOON - DAY / 2


def read(connection: Connection, query: ReportQuery, rows_per_step: int = 3) -> LedgerReport:
    reader = LedgerReport(query, rows_per_step)
    steps = 0
    while not reader.step(connection):
        steps += 1
        assert steps < 1000
    return reader.finish()


async def test_rows_by_key_have_the_names_of_keys_also_of_revoked_ones(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        made = (await running.admin.post("/admin/keys", json={"name": "=Bob"})).json()
        await chat(running, ALICE)
        await chat(running, hash_key(made["key"]))
        await recorded(running, 2)
        await running.admin.delete("/admin/keys/=Bob")

        async def names() -> dict[str, str | None]:
            report = (await running.admin.get("/admin/usage?by=key,model")).json()
            return {row["key"]: row["key_name"] for row in report["rows"]}

        assert await names() == {"alice": "Alice", made["id"]: "=Bob"}
        answer = await running.admin.get("/admin/usage?by=key&format=csv")
        assert answer.headers["content-type"].startswith("text/csv")
        table = answer.text.splitlines()
        assert table[0].startswith("key,key_name,requests,failures,clients_left,")
        assert {tuple(line.split(",")[:2]) for line in table[1:]} == {
            ("alice", "Alice"), (made["id"], "'=Bob"),
        }  # fmt: skip
        assert (
            "key_name" not in (await running.admin.get("/admin/usage?by=model")).json()["rows"][0]
        )


def asked(**parameters: str) -> ReportQuery:
    return parse_query(NOON, **parameters)


def rows_of(report: LedgerReport) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = report.to_json()["rows"]
    return rows


def test_requests_tokens_and_money_are_summed_by_key(connection: Connection) -> None:
    add_rows(
        connection,
        [
            a_row(1, key="a", cost=0.25, cached_tokens=50),
            a_row(2, key="a", cost=0.5, status=502, outcome="node_failed", attempts=3),
            a_row(3, key="a", status=499, outcome="client_closed"),
            a_row(4, key="b", cost=0.125),
        ],
    )
    report = read(connection, asked(by="key"))
    first, second = rows_of(report)
    assert first == {
        "key": "a", "key_name": None, "requests": 3, "failures": 1, "clients_left": 1,
        "prompt_tokens": 300, "cached_tokens": 50, "completion_tokens": 30, "slot_seconds": 3.0,
        "attempts": 5, "cost": 1.25, "gpu_cost": 0.0, "gpu_priced": 0,
        "cost_per_request": pytest.approx(1.25 / 3),
        "cost_per_million_tokens": pytest.approx(1.25 / 330 * 1e6),
    }  # fmt: skip
    assert (second["key"], second["requests"]) == ("b", 1)
    assert (report.total.requests, report.total.cost) == (4, 1.375)


def test_every_dimension_can_be_asked_for_and_two_make_a_table_of_both(
    connection: Connection,
) -> None:
    dimensions = ("key", "group", "user", "model", "class", "tier")
    columns = {"group": "group_name", "class": "class_"}
    named = {columns.get(by, by): f"a {by}" for by in dimensions}
    add_rows(connection, [a_row(1, **named), a_row(2, **dict.fromkeys(named), cost=0.0)])
    for by in dimensions:
        found = rows_of(read(connection, asked(by=by)))
        assert [(row[by], row["requests"]) for row in found] == [(f"a {by}", 1), (None, 1)]
    add_rows(connection, [a_row(3, **{**named, "model": "other"})])
    report = read(connection, asked(by="model,key"))
    assert report.query.by == ("key", "model")
    assert {(row["key"], row["model"], row["requests"]) for row in rows_of(report)} == {
        ("a key", "a model", 1), ("a key", "other", 1), (None, None, 1),
    }  # fmt: skip


def test_days_are_those_of_utc_and_stand_in_order(connection: Connection) -> None:
    moments = [MIDNIGHT - 0.001, MIDNIGHT, MIDNIGHT + 1, MIDNIGHT - 2 * DAY]
    add_rows(connection, [a_row(n, ended_at=when) for n, when in enumerate(moments)])
    found = rows_of(read(connection, asked(by="day")))
    days = {"2027-01-13": 1, "2027-01-14": 1, "2027-01-15": 2}
    assert [(row["day"], row["requests"]) for row in found] == [*days.items()]


def test_only_requests_that_ended_within_the_time_count(connection: Connection) -> None:
    ends = [NOON - 10, NOON - 5, NOON - 1]
    add_rows(connection, [a_row(n, ended_at=when) for n, when in enumerate(ends)])
    query = ReportQuery(("key",), NOON - 5, NOON - 1)
    assert read(connection, query).total.requests == 1


def test_steps_of_any_size_give_the_same_report(connection: Connection) -> None:
    ends = [NOON - 10, NOON - 5, NOON - 5, NOON - 5, NOON - 5, NOON - 1]
    add_rows(connection, [a_row(n, ended_at=when, key=f"{n}") for n, when in enumerate(ends)])
    query = asked(by="key")
    wanted = read(connection, query, 100).to_json()
    assert wanted["total"]["requests"] == 6
    assert all(read(connection, query, size).to_json() == wanted for size in (1, 2, 3, 4, 5))


def test_a_report_begins_anew_when_rows_became_sums_meanwhile(connection: Connection) -> None:
    add_rows(connection, [a_row(n, ended_at=NOON - n * DAY) for n in range(5)])
    reader = LedgerReport(asked(by="day"), 1)
    assert not reader.step(connection)
    roll_up(connection, NOON - DAY, 10)
    while not reader.step(connection):
        pass
    assert reader.finish().total.requests == 5


def test_a_report_that_is_disturbed_again_and_again_gives_up(connection: Connection) -> None:
    connection.execute(insert(revisions).values(name=ROLLED_UP, number=0))
    add_rows(connection, [a_row(n, ended_at=NOON - n) for n in range(2)])
    reader = LedgerReport(asked(), 1)
    for _ in range(2 * MOST_RESTARTS + 1):
        reader.step(connection)
        connection.execute(update(revisions).values(number=revisions.c.number + 1))
    with pytest.raises(ReportInterrupted, match="later"):
        reader.step(connection)


def test_a_cut_day_that_is_kept_as_a_sum_counts_in_full_and_is_told(connection: Connection) -> None:
    add_rows(connection, [a_row(1, ended_at=MIDNIGHT + 60)])
    roll_up(connection, NOON)
    report = read(connection, ReportQuery(("key",), MIDNIGHT + 3600, NOON + DAY / 2))
    assert report.total.requests == 1
    (note,) = report.notes
    assert "such a day is counted in full" in note


def test_the_dearest_come_first_and_the_total_has_all(connection: Connection) -> None:
    add_rows(connection, [a_row(n, key=f"k{n}", cost=float(n)) for n in range(5)])
    report = read(connection, asked(by="key", limit="2"))
    assert [row["key"] for row in rows_of(report)] == ["k4", "k3"]
    assert (report.found, report.total.requests) == (5, 5)


def test_too_many_groups_are_refused_with_a_remedy(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.callers.reports.MOST_GROUPS", 3)
    add_rows(connection, [a_row(n, key=f"k{n}") for n in range(4)])
    with pytest.raises(InvalidQuery, match="shorten the time"):
        read(connection, asked(by="key"))


def test_percentiles_are_within_five_percent_of_what_requests_took(connection: Connection) -> None:
    rng = random.Random(7)
    waits = [0.0] * 500 + [rng.lognormvariate(1.0, 1.5) for _ in range(500)]
    firsts = [rng.lognormvariate(0.0, 1.0) for _ in waits]
    lasted = [rng.lognormvariate(2.0, 1.0) for _ in waits]
    add_rows(
        connection,
        [
            a_row(n, started_at=NOON - lasted[n], ttft_seconds=firsts[n], wait_seconds=waits[n])
            for n in range(1000)
        ],
    )
    # Refusals take no time, and old rows do not tell it.
    add_rows(connection, [a_row(n, started_at=NOON, status=503, outcome="queue_full", model="busy")
                          for n in range(1000, 1100)])  # fmt: skip
    old = {"model": "old", "wait_seconds": None, "outcome": "lost", "status": 0}
    add_rows(connection, [a_row(n, **old) for n in range(1100, 1110)])
    rows = {row["model"]: row for row in rows_of(read(connection, asked(percentiles="true"), 77))}
    told = rows["mistral"]

    def exact(times: list[float], share: float) -> Any:
        return pytest.approx(sorted(times)[math.ceil(share * 1000) - 1], rel=0.051)

    assert told["ttft_p50"] == exact(firsts, 0.5)
    assert told["ttft_p95"] == exact(firsts, 0.95)
    assert told["seconds_p50"] == exact(lasted, 0.5)
    assert told["seconds_p95"] == exact(lasted, 0.95)
    assert told["wait_p95"] == exact(waits, 0.95)
    assert [rows["busy"][name] for name in PERCENTILES] == [None, None, None, None, 0.0]
    assert [rows["old"][name] for name in PERCENTILES] == [None] * 5
    assert "wait_p95" not in rows_of(read(connection, asked()))[0]
    table = read(connection, asked(percentiles="true")).to_csv().splitlines()
    assert table[0].endswith(",ttft_p50,ttft_p95,seconds_p50,seconds_p95,wait_p95")
    assert table[1].count(",") == table[0].count(",")


def test_percentiles_of_too_many_groups_are_refused_and_sums_of_days_have_none(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_rows(connection, [a_row(n, user=f"u{n}", ended_at=NOON - 3 * DAY) for n in range(4)])
    monkeypatch.setattr(reports, "MOST_TIMED_GROUPS", 3)
    with pytest.raises(InvalidQuery) as caught:
        read(connection, asked(by="user", percentiles="true"))
    assert caught.value.parameter == "percentiles"
    assert roll_up(connection, NOON - 2 * DAY) == 4
    report = read(connection, asked(by="user", percentiles="true"))
    assert [row["seconds_p50"] for row in rows_of(report)] == [None] * 4
    assert any("percentiles leave out" in note for note in report.notes)


def test_a_caller_is_shown_its_own_rows_alone(connection: Connection) -> None:
    add_rows(
        connection,
        [a_row(1, key="a", user="u"), a_row(2, key="a", user="v"), a_row(3, key="b", user="u")],
    )
    add_hours(connection)
    query = ReportQuery(("model",), MIDNIGHT, NOON + 1, key="a", user="u")
    report = read(connection, query)
    assert report.total.requests == 1
    assert report.hours == []
    roll_up(connection, NOON + 1)
    assert read(connection, query).total.requests == 1


def add_hours(connection: Connection) -> None:
    """Ten hours of a CPU node at 0.20 and of a GPU node at 2.00."""
    day = {"day": "2027-01-15", "seconds": 36000.0, "counted_until": NOON}
    nodes = [("cpu-a", "cpu", 2.0), ("gpu-a", "gpu", 20.0)]
    rows = [{"node": node, "tier": tier, "cost": cost, **day} for node, tier, cost in nodes]
    connection.execute(insert(node_hours), rows)


def test_the_hybrid_is_weighted_by_requests_and_the_machines_are_not(
    connection: Connection,
) -> None:
    add_hours(connection)
    add_rows(connection, [a_row(n, cost=0.125, gpu_cost=1.0) for n in range(9)])
    add_rows(connection, [a_row(9, tier="gpu", node="gpu-a", cost=0.5, gpu_cost=0.5)])
    add_rows(connection, [a_row(10, tier=None, node=None, cost=0.0, gpu_cost=0.0, status=503)])
    told = read(connection, asked(by="tier")).to_json()["money"]
    assert told["effective_per_hour"]["value"] == pytest.approx(0.38)
    assert told["running_per_hour"]["value"] == pytest.approx(2.20)
    assert told["cost"] == 1.625
    assert told["node_hours_cost"] == 22.0
    assert told["idle"] == {"value": 22.0 - 1.625}
    assert told["all_gpu"] == {"value": 9.5}
    assert told["tiers"]["cpu"]["idle"] == {"value": 2.0 - 9 * 0.125}
    assert told["tiers"]["gpu"]["node_hours"] == 10.0
    assert sorted(told["tiers"]) == ["cpu", "gpu"]


def test_tokens_that_were_bought_do_not_pay_for_idle_machines(connection: Connection) -> None:
    """And idle time within a part of a day is not known."""
    add_hours(connection)
    add_rows(connection, [a_row(1, tier="gpu", node="hosted", cost=5.0)])
    told = read(connection, asked()).to_json()["money"]
    assert told["idle"] == {"value": 22.0}
    assert told["all_gpu"]["value"] is None
    assert "1 of 1" in told["all_gpu"]["reason"]
    told = read(connection, asked(since="11h")).to_json()["money"]
    assert told["idle"]["value"] is None
    assert "whole days" in told["idle"]["reason"]


def test_a_report_of_nothing_has_no_figures_and_says_why(connection: Connection) -> None:
    told = read(connection, asked()).to_json()
    assert told["rows"] == []
    assert told["total"]["requests"] == 0
    assert told["total"]["cost_per_request"] is None
    for name in ("per_request", "per_million_tokens", "idle", "all_gpu", "effective_per_hour"):
        assert told["money"][name]["value"] is None
        assert told["money"][name]["reason"]


def test_a_spreadsheet_gets_numbers_in_full_and_quoted_names(connection: Connection) -> None:
    add_rows(connection, [a_row(1, user='a,"b"', cost=0.1)])
    (row,) = csv.DictReader(io.StringIO(read(connection, asked(by="user")).to_csv()))
    assert (row["user"], row["cost"], row["gpu_priced"]) == ('a,"b"', "0.1", "0")


def test_no_name_that_a_caller_chose_is_a_formula(connection: Connection) -> None:
    starts = ["=", "+", "-", "@", "\t", "\r", "\n", " =", "＝", "－"]  # noqa: RUF001
    names = ("key", "user", "group_name", "model")
    formulas = [f"{start}{number}+1\r=2" for number, start in enumerate(starts)]
    rows = [a_row(at, **dict.fromkeys(names, formula)) for at, formula in enumerate(formulas)]
    add_rows(connection, rows)
    wanted = {"'" + formula.replace("\r", " ").replace("\n", " ") for formula in formulas}
    for by in ("key", "user", "group", "model"):
        table = read(connection, asked(by=by)).to_csv()
        assert {row[by] for row in csv.DictReader(io.StringIO(table, newline=""))} == wanted


@each_case(
    ("text", "moment"),
    [
        ("2027-01-14", "2027-01-14T00:00:00Z"),
        ("2027-01-14T08:30:00Z", "2027-01-14T08:30:00Z"),
        ("2027-01-14t08:30:00.5+02:00", "2027-01-14T06:30:00Z"),
        ("2027-01-14T08:30", "2027-01-14T08:30:00Z"),
        ("7d", "2027-01-08T00:00:00Z"),
        ("0d", "2027-01-15T00:00:00Z"),
        ("90m", "2027-01-15T10:30:00Z"),
        ("99999d", "1970-01-01T00:00:00Z"),
    ],
)
def test_times_are_read_in_utc(text: str, moment: str) -> None:
    assert time_text(float(int(parse_time("since", text, NOON)))) == moment


def test_a_date_as_the_end_includes_the_day() -> None:
    query = asked(since="2027-01-13", until="2027-01-14")
    assert time_text(query.since) == "2027-01-13T00:00:00Z"
    assert time_text(query.until) == "2027-01-15T00:00:00Z"


@each_case(
    ("parameters", "parameter", "message"),
    [
        ({"since": "2027-01-16"}, "since", "in the future"),
        ({"since": "2027-01-15T12:00:01Z"}, "since", "2027-01-15T12:00:00Z now"),
        ({"since": "7d", "until": "8d"}, "until", "not after"),
        ({"since": "yesterday-ish"}, "since", "is no time"),
        ({"since": "2027-13-01"}, "since", "is no time"),
        ({"since": "1e999s"}, "since", "is no time"),
        ({"until": "x" * 10_000}, "until", "is no time"),
        ({"by": "node"}, "by", "none of key, group"),
        ({"by": "key,key"}, "by", "at most 2 different"),
        ({"by": "key,user,day"}, "by", "at most 2 different"),
        ({"limit": "0"}, "limit", "from 1 to"),
        ({"limit": "²"}, "limit", "from 1 to"),
        ({"limit": "99999999999"}, "limit", "from 1 to"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    parameters: dict[str, str], parameter: str, message: str
) -> None:
    with pytest.raises(InvalidQuery, match=message) as error:
        asked(**parameters)
    assert error.value.parameter == parameter


async def test_a_report_is_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, made = [], LedgerReport.finish

    def report(reader: LedgerReport) -> LedgerReport:
        threads.append(threading.get_ident())
        return made(reader)

    monkeypatch.setattr(LedgerReport, "step", lambda *_: True)
    monkeypatch.setattr(LedgerReport, "finish", report)

    class Jobs:
        async def run(self, job: Callable[[None], bool], *, write: bool) -> bool:
            assert not write
            return job(None)

    await Reporter(cast("Store", Jobs())).read(asked())
    assert threads
    assert threads != [threading.get_ident()]


HOUR = 3600.0


@pytest.fixture
def connection(store_url: str) -> Iterator[Connection]:
    """Return a connection to a store of each kind in turn, with all tables."""
    engine = create_engine(locate_store(store_url, Path("/nonexistent")).url)
    with engine.connect() as connection:
        metadata.create_all(connection)
        yield connection
    engine.dispose()


def told(
    connection: Connection, *, since: str = "7d", until: str | None = None, **most: int
) -> dict[str, Any]:
    query = parse_query(NOON, since=since, until=until)
    reader = ArrivalsReader(query, NOON, rows_per_step=3, **most)
    for _ in range(1000):
        if reader.step(connection):
            return reader.to_json()
    raise AssertionError("it never ended")


def lasting(number: int, began: float, seconds: float = 30.0, **more: Any) -> dict[str, Any]:
    row = a_row(number, ended_at=began + seconds, slot_seconds=seconds, **more)
    return {**row, "started_at": began}


def add_open(connection: Connection, id_: str) -> None:
    """A request that runs since 50 seconds."""
    row = {"id": id_, "process": "p1", "started_at": NOON - 50, "updated_at": NOON}
    connection.execute(insert(open_requests).values(**row, class_="normal"))


def test_the_hour_is_found_that_asked_most_of_the_nodes(connection: Connection) -> None:
    """Batches, which fill idle slots, make no hour busy."""
    many = [lasting(n, NOON - 30 * HOUR + n, 0.1) for n in range(20)]
    long = [lasting(100 + n, NOON - 5 * HOUR + n * 300, 200.0) for n in range(12)]
    night = [lasting(200 + n, NOON - 12 * HOUR + n, 900.0, class_="batch") for n in range(9)]
    add_rows(connection, [*many, *long, *night])
    found = told(connection)
    hour = {"from": "2027-01-15T07:00:00Z", "to": "2027-01-15T08:00:00Z", "seconds": HOUR}
    assert found["hour"] == hour
    assert found["requests"] == 32
    assert found["first"] == "2027-01-14T06:00:00Z"
    assert [row[0] for row in found["arrivals"]] == [n * 300.0 for n in range(12)]
    # What came before `since` does not count.
    assert told(connection, since="2h")["arrivals"] == []
    assert told(connection, since="4h30m")["requests"] == 6


def test_an_hour_is_told_without_a_name_of_a_caller(connection: Connection) -> None:
    names = {"key": "key-x", "user": "user-x", "group_name": "group-x"}
    add_rows(connection, [lasting(1, NOON - 600, 20.0, cached_tokens=40, **names)])
    found = told(connection)
    assert dict(zip(found["columns"], found["arrivals"][0], strict=True)) == {
        "seconds": 0.0, "model": "mistral", "class": "normal", "node": "cpu-a",
        "prompt_tokens": 100, "cached_tokens": 40, "completion_tokens": 10, "slot_seconds": 20.0,
        "lasted": 20.0, "unserved": False,
    }  # fmt: skip
    assert "-x" not in str(found)
    # An hour that is not over is as long as it was.
    assert found["hour"]["seconds"] == 600.0


def test_requests_without_a_slot_count_and_others_without_work_do_not(
    connection: Connection,
) -> None:
    nothing = {"prompt_tokens": 0, "completion_tokens": 0}
    rows = [
        lasting(1, NOON - 500),
        lasting(2, NOON - 400, status=429, outcome="queue_full", **nothing),
        lasting(3, NOON - 300, status=499, outcome="client_closed", **nothing),
        lasting(4, NOON - 200, status=400, outcome="invalid_request", **nothing),
        lasting(5, NOON - 100, **nothing),
    ]
    for row in rows[1:]:
        row["slot_seconds"] = 0.0
    add_rows(connection, rows)
    add_open(connection, "r6")
    arrivals = told(connection)["arrivals"]
    assert [row[0] for row in arrivals] == [40.0, 140.0, 240.0, 490.0]
    assert [row[6] for row in arrivals] == [10, None, None, None]
    assert [row[9] for row in arrivals] == [False, True, False, False]


def test_of_too_many_requests_a_shorter_time_is_told(connection: Connection) -> None:
    rng = random.Random(1)
    add_rows(connection, [lasting(n, NOON - rng.random() * HOUR, 2.0) for n in range(400)])
    found = told(connection, most_arrivals=50)
    assert found["hour"]["seconds"] == 300.0
    assert 20 < len(found["arrivals"]) <= 50
    assert len(told(connection, most_arrivals=3)["arrivals"]) == 3


def test_what_still_runs_is_of_no_hour_before_it_began(connection: Connection) -> None:
    add_open(connection, "r1")
    found = told(connection, until="1h")
    assert (found["requests"], found["arrivals"]) == (0, [])
    add_rows(connection, [lasting(2, NOON - 2 * HOUR)])
    found = told(connection, until="1h")
    assert (found["requests"], found["hour"]["seconds"]) == (1, HOUR)
    assert [row[0] for row in found["arrivals"]] == [0.0]


def test_an_empty_ledger_has_no_hour_and_too_many_minutes_are_refused(
    connection: Connection,
) -> None:
    add_rows(connection, [lasting(0, NOON - 9 * DAY)])
    found = told(connection)
    assert (found["requests"], found["first"], found["arrivals"]) == (0, None, [])
    add_rows(connection, [lasting(n, NOON - n * 120.0) for n in range(1, 20)])
    with pytest.raises(InvalidQuery, match="take a later one"):
        told(connection, most_minutes=10)


# `GET /v1/usage`: what a caller learns of itself, and nothing of others.


async def usage(running: Running, key: Any = None, path: str = "", **headers: str) -> Any:
    sent = headers if key is None else bearer(key, **headers)
    response = await running.client.get(f"/v1/usage{path}", headers=sent)
    assert response.status_code == 200, response.text
    return response.json()


async def test_callers_see_their_own_figures_and_what_is_left(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        for _ in range(3):
            await chat(running, ALICE)
        await chat(running, CHAT, **{"X-User-Id": "bob"})
        await chat(running, CHAT, **{"X-User-Id": "eve"})
        await chat(running)
        await recorded(running, 6)
        alice = await usage(running, ALICE)
        assert (alice["key"], alice["name"], alice["group"]) == ("alice", "Alice", "team")
        assert alice["today"]["requests"] == alice["month"]["requests"] == 3
        assert alice["today"]["completion_tokens"] == 24
        assert [one["requests"] for one in alice["month"]["models"]] == [3]
        assert alice["today"]["cost"] > 0
        limits = {one["limit"]: one for one in alice["limits"]}
        assert list(limits) == ["rpm", "tokens_per_day", "budget", "concurrency"]
        assert (limits["rpm"]["used"], limits["rpm"]["remaining"]) == (3, 97)
        used = alice["today"]["prompt_tokens"] + alice["today"]["completion_tokens"]
        assert limits["tokens_per_day"]["used"] == used
        assert limits["budget"]["used"] == pytest.approx(alice["month"]["cost"])
        assert {one["of"] for one in limits.values()} == {"key"}
        assert limits["budget"]["resets_at"].endswith("-01T00:00:00Z")

        async def shown(question: str = "", **headers: str) -> tuple[Any, int]:
            found = await usage(running, CHAT, question, **headers)
            return found["user"], found["today"]["requests"]

        assert await shown() == (None, 2)
        assert await shown("?user=bob") == ("bob", 1)
        assert await shown("?user=nobody") == ("nobody", 0)
        assert await shown(**{"X-User-Id": "eve"}) == ("eve", 1)
        bob = await usage(running, CHAT, "?user=bob")
        assert [(one["of"], one["used"]) for one in bob["limits"]] == [("user", 1)]
        anyone = await usage(running)
        assert (anyone["key"], anyone["today"]["requests"]) == ("anonymous:127.0.0.1", 1)
        # None of these questions was a request.
        assert running.gateway.ledger is not None
        assert running.gateway.ledger.written == 6


async def test_a_key_that_is_not_trusted_may_not_ask_for_users_and_cached_figures_can_be_hidden(
    tmp_path: Path,
) -> None:
    async with metered_gateway(tmp_path, cache={"hide": True}) as running:
        response = await running.client.get("/v1/usage?user=bob", headers=bearer(ALICE))
        assert response.status_code == 400
        assert "trust_user_headers" in response.json()["error"]["message"]
        await chat(running, ALICE)
        await recorded(running, 1)
        told = await usage(running, ALICE)
        for figures in (told["today"], told["month"], told["month"]["models"][0]):
            assert (figures["requests"], figures["cached_tokens"]) == (1, None)


async def test_without_a_store_limits_are_told_and_figures_are_not(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path, store={"url": "off"}) as running:
        await chat(running, ALICE)
        told = await usage(running, ALICE)
        assert (told["today"], told["month"], told["reason"]) == (None, None, NO_STORE)
        assert told["limits"][0]["used"] == 1


class CountingReporter(Reporter):
    """A reporter of a store that counts what it is asked, and takes its time."""

    def __init__(self, times: list[float], seconds: float = 0.0) -> None:
        self.asked: list[ReportQuery] = []
        self.times = times
        self.seconds = seconds
        self.fails = False

    async def read(self, query: ReportQuery) -> LedgerReport:
        self.asked.append(query)
        self.times[0] += self.seconds
        if self.fails:
            raise StoreUnavailable("the store is away", "wait")
        group = (("m", "2027-01-15"), Sums(requests=len(self.asked)))
        return LedgerReport(query, groups=[group], total=group[1])


def caller_usage(seconds: float = 0.0) -> tuple[CallerUsage, CountingReporter, list[float]]:
    times = [0.0]
    reporter = CountingReporter(times, seconds)
    book = LimitBook(Settings())
    return CallerUsage(book, reporter, lambda: NOON, lambda: times[0]), reporter, times


async def caller_asked(about: CallerUsage, key: str) -> Any:
    caller = Caller(key, key, Priority.NORMAL)
    return await about.describe(about.book.accounts(caller), hides_cache=False)


async def test_figures_are_read_from_the_first_of_the_month_and_kept_for_seconds() -> None:
    about, reporter, times = caller_usage()
    for key, seconds, reads in (("a", 0.0, 1), ("a", 0.0, 1), ("a", 5.0, 2), ("b", 0.0, 3)):
        times[0] += seconds
        assert (await caller_asked(about, key))["today"]["requests"] == reads
    query = reporter.asked[0]
    assert query.until - query.since == 15 * 86400
    assert query.since % DAY == query.until % DAY == 0
    # Those that take long to read are kept for longer.
    about, reporter, times = caller_usage(seconds=2.0)
    for seconds, reads in ((0.0, 1), (39.0, 1), (2.0, 2)):
        times[0] += seconds
        await caller_asked(about, "a")
        assert len(reporter.asked) == reads


async def test_a_store_that_fails_is_told_and_asked_again() -> None:
    about, reporter, _ = caller_usage()
    reporter.fails = True
    told = await caller_asked(about, "a")
    assert (told["today"], told["reason"]) == (None, "the store is away")
    reporter.fails = False
    assert (await caller_asked(about, "a"))["reason"] is None


async def test_only_so_many_callers_are_kept() -> None:
    about, reporter, _ = caller_usage()
    for number in (*range(MOST_KEPT + 1), MOST_KEPT):
        await caller_asked(about, f"k{number}")
    assert len(reporter.asked) == MOST_KEPT + 1
    await caller_asked(about, "k0")
    assert len(reporter.asked) == MOST_KEPT + 2
