"""What the ledger tells: its reports, and the requests that have ended, a page at a time."""

from __future__ import annotations

import asyncio
import csv
import io
import itertools
import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, insert, select, update

from gateway.callers import ended, reports
from gateway.callers.ended import EndedReader, parse_ended_query, rows_of_name
from gateway.callers.keys import ApiKey
from gateway.callers.limits import LimitBook
from gateway.callers.money import (
    INTERVAL,
    AliveNode,
    Amount,
    NodeHours,
    NodeHoursRecorder,
    NodeUptime,
    count_claims,
    effective_hourly_cost,
    idle_cost,
    per_million_tokens,
    per_request,
    running_hourly_cost,
)
from gateway.callers.reports import (
    DIMENSIONS,
    MOST_KEPT,
    MOST_RESTARTS,
    NO_STORE,
    PERCENTILES,
    ArrivalsReader,
    CallerUsage,
    InvalidQuery,
    LedgerReport,
    Reporter,
    ReportInterrupted,
    ReportQuery,
    Retention,
    Sums,
    parse_query,
    parse_time,
    roll_up,
)
from gateway.callers.windows import time_text
from gateway.config.settings import Settings
from gateway.config.stored import RetentionSettings
from gateway.store.database import locate_store
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import metadata, node_hours, revisions
from gateway.store.store import Store
from gateway.terms import Caller, Priority
from tests.beside import beside
from tests.callers.build import FlakyStore
from tests.callers.ledger_rows import DAY, NOON, a_row, add_rows, count_rows, made_up_rows
from tests.callers.metered_gateway import (
    ALICE,
    CHAT,
    VIP,
    bearer,
    chat,
    metered_gateway,
    own_usage,
    recorded,
)
from tests.each_case import each_case
from tests.gateways import Running, answered, until
from tests.known import known
from tests.store.stores import opened
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import bare_gateway, error_of

MIDNIGHT = NOON - DAY / 2


def read(connection: Connection, query: ReportQuery, rows_per_step: int = 3) -> LedgerReport:
    reader = LedgerReport(query, rows_per_step)
    steps = 0
    while not reader.step(connection):
        steps += 1
        assert steps < 1000
    return reader.finish()


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


def test_every_dimension_can_be_asked_for_and_two_together(connection: Connection) -> None:
    dimensions = ("key", "group", "user", "model", "class", "tier")
    columns = {"group": "group_name", "class": "class_"}
    named = {columns.get(by, by): f"a {by}" for by in dimensions}
    others = dict.fromkeys(named)
    moments = [MIDNIGHT - 0.001, MIDNIGHT]
    add_rows(
        connection,
        [a_row(1, ended_at=moments[0], **named), a_row(2, ended_at=moments[1], **others, cost=0.0)],
    )
    for by in dimensions:
        found = rows_of(read(connection, asked(by=by)))
        assert [(row[by], row["requests"]) for row in found] == [(f"a {by}", 1), (None, 1)]
    days = [row["day"] for row in rows_of(read(connection, asked(by="day")))]
    assert days == ["2027-01-14", "2027-01-15"]
    assert read(connection, ReportQuery(("key",), moments[0], moments[1])).total.requests == 1
    add_rows(connection, [a_row(3, **{**named, "model": "other"})])
    report = read(connection, asked(by="model,key", limit="2"))
    # The dearest come first, and the total has all.
    assert (report.query.by, report.found, report.total.requests) == (("key", "model"), 3, 3)
    assert {(row["key"], row["model"], row["requests"]) for row in rows_of(report)} == {
        ("a key", "a model", 1), ("a key", "other", 1),
    }  # fmt: skip


def test_a_disturbed_report_begins_anew_but_not_for_ever(connection: Connection) -> None:
    add_rows(connection, [a_row(n, ended_at=NOON - n * DAY) for n in range(5)])
    reader = LedgerReport(asked(by="day"), 1)
    assert not reader.step(connection)
    roll_up(connection, NOON - DAY, 10)
    while not reader.step(connection):
        pass
    assert reader.finish().total.requests == 5
    reader = LedgerReport(asked(), 1)

    def disturbed(times: int) -> None:
        for _ in range(times):
            reader.step(connection)
            connection.execute(update(revisions).values(number=revisions.c.number + 1))

    with pytest.raises(ReportInterrupted, match="later"):
        disturbed(20 * MOST_RESTARTS)


def test_a_cut_day_that_is_kept_as_a_sum_counts_in_full_and_is_told(connection: Connection) -> None:
    add_rows(connection, [a_row(1, ended_at=MIDNIGHT + 60)])
    roll_up(connection, NOON)
    report = read(connection, ReportQuery(("key",), MIDNIGHT + 3600, NOON + DAY / 2))
    assert report.total.requests == 1
    (note,) = report.notes
    assert "such a day is counted in full" in note


def test_percentiles_are_within_five_percent_of_what_requests_took(connection: Connection) -> None:
    rng = random.Random(7)
    waits = [0.0] * 500 + [rng.lognormvariate(1.0, 1.5) for _ in range(500)]
    firsts = [rng.lognormvariate(0.0, 1.0) for _ in waits]
    lasted = [rng.lognormvariate(2.0, 1.0) for _ in waits]
    rows = [
        a_row(n, started_at=NOON - lasted[n], ttft_seconds=firsts[n], wait_seconds=waits[n])
        for n in range(1000)
    ]
    # Refusals take no time, and old rows do not tell it.
    busy = {"started_at": NOON, "status": 503, "outcome": "queue_full", "model": "busy"}
    old = {"model": "old", "wait_seconds": None, "outcome": "lost", "status": 0}
    for n in range(1000, 1100):
        rows += [a_row(n, **busy), a_row(n + 100, **old)]
    add_rows(connection, rows)
    report = read(connection, asked(percentiles="true"), 77)
    told = {row["model"]: row for row in rows_of(report)}
    for name, times, share in (
        ("ttft_p50", firsts, 0.5), ("ttft_p95", firsts, 0.95), ("seconds_p50", lasted, 0.5),
        ("seconds_p95", lasted, 0.95), ("wait_p95", waits, 0.95),
    ):  # fmt: skip
        exact = sorted(times)[math.ceil(share * 1000) - 1]
        assert told["mistral"][name] == pytest.approx(exact, rel=0.051), name
    assert [told["busy"][name] for name in PERCENTILES] == [None, None, None, None, 0.0]
    assert [told["old"][name] for name in PERCENTILES] == [None] * 5
    assert "wait_p95" not in rows_of(read(connection, asked()))[0]
    table = report.to_csv().splitlines()
    assert table[0].endswith(",ttft_p50,ttft_p95,seconds_p50,seconds_p95,wait_p95")


def test_too_many_groups_are_refused_and_sums_of_days_have_no_percentiles(
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
    monkeypatch.setattr(reports, "MOST_GROUPS", 3)
    with pytest.raises(InvalidQuery, match="shorten the time"):
        read(connection, asked(by="user"))


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


def test_the_hybrid_is_weighted_by_requests_and_machines_are_not(connection: Connection) -> None:
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


def test_what_is_not_known_of_money_has_a_reason_and_no_figure(connection: Connection) -> None:
    told = read(connection, asked()).to_json()
    assert (told["rows"], told["total"]["cost_per_request"]) == ([], None)
    for name in ("per_request", "per_million_tokens", "idle", "all_gpu", "effective_per_hour"):
        assert told["money"][name]["value"] is None
        assert told["money"][name]["reason"]
    add_hours(connection)
    # Tokens that were bought do not pay for idle machines.
    add_rows(connection, [a_row(1, tier="gpu", node="hosted", cost=5.0)])
    told = read(connection, asked()).to_json()["money"]
    assert told["idle"] == {"value": 22.0}
    assert told["all_gpu"]["value"] is None
    told = read(connection, asked(since="11h")).to_json()["money"]
    assert told["idle"]["value"] is None
    assert "whole days" in told["idle"]["reason"]


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
    add_rows(connection, [a_row(99, ended_at=NOON - 2 * DAY, user='a,"b"', cost=0.1)])
    query = ReportQuery(("user",), NOON - 3 * DAY, NOON - DAY)
    (row,) = csv.DictReader(io.StringIO(read(connection, query).to_csv()))
    assert (row["user"], row["cost"], row["gpu_priced"]) == ('a,"b"', "0.1", "0")


@each_case(
    ("text", "moment"),
    [
        ("2027-01-14", "2027-01-14T00:00:00Z"),
        ("2027-01-14T08:30:00Z", "2027-01-14T08:30:00Z"),
        ("2027-01-14t08:30:00.5+02:00", "2027-01-14T06:30:00Z"),
        ("2027-01-14T08:30", "2027-01-14T08:30:00Z"),
        ("7d", "2027-01-08T00:00:00Z"),
        ("90m", "2027-01-15T10:30:00Z"),
        ("99999d", "1970-01-01T00:00:00Z"),
    ],
)
def test_times_are_read_in_utc(text: str, moment: str) -> None:
    assert time_text(float(int(parse_time("since", text, NOON)))) == moment
    # A date as the end includes the day.
    assert time_text(asked(until="2027-01-14").until) == "2027-01-15T00:00:00Z"


@each_case(
    ("parameters", "parameter", "message"),
    [
        ({"since": "2027-01-16"}, "since", "in the future"),
        ({"since": "2027-01-15T12:00:01Z"}, "since", "2027-01-15T12:00:00Z now"),
        ({"since": "7d", "until": "8d"}, "until", "not after"),
        ({"since": "yesterday-ish"}, "since", "is no time"),
        ({"since": "2027-13-01"}, "since", "is no time"),
        ({"by": "node"}, "by", "none of key, group"),
        ({"by": "key,user,day"}, "by", "at most 2 different"),
        ({"limit": "0"}, "limit", "from 1 to"),
        ({"limit": "²"}, "limit", "from 1 to"),
    ],
)
def test_a_bad_question_is_refused_by_name(
    parameters: dict[str, str], parameter: str, message: str
) -> None:
    with pytest.raises(InvalidQuery, match=message) as error:
        asked(**parameters)
    assert error.value.parameter == parameter


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


def test_the_hour_is_found_that_asked_most_of_the_nodes(connection: Connection) -> None:
    """Batches, which fill idle slots, make no hour busy."""
    many = [lasting(n, NOON - 30 * HOUR + n, 0.1) for n in range(20)]
    names = {"key": "key-x", "user": "user-x", "group_name": "group-x", "cached_tokens": 40}
    long = [lasting(100 + n, NOON - 5 * HOUR + n * 300, 200.0, **names) for n in range(12)]
    night = [lasting(200 + n, NOON - 12 * HOUR + n, 900.0, class_="batch") for n in range(9)]
    add_rows(connection, [*many, *long, *night])
    found = told(connection)
    hour = {"from": "2027-01-15T07:00:00Z", "to": "2027-01-15T08:00:00Z", "seconds": HOUR}
    assert found["hour"] == hour
    assert found["requests"] == 32
    assert found["first"] == "2027-01-14T06:00:00Z"
    assert [row[0] for row in found["arrivals"]] == [n * 300.0 for n in range(12)]
    assert dict(zip(found["columns"], found["arrivals"][0], strict=True)) == {
        "seconds": 0.0, "model": "mistral", "class": "normal", "node": "cpu-a",
        "prompt_tokens": 100, "cached_tokens": 40, "completion_tokens": 10, "slot_seconds": 200.0,
        "lasted": 200.0, "unserved": False,
    }  # fmt: skip
    assert "-x" not in str(found), "no name of a caller is told"
    # What came before `since` does not count.
    assert told(connection, since="2h")["arrivals"] == []
    assert told(connection, since="4h30m")["requests"] == 6


def test_of_too_many_requests_a_shorter_time_is_told(connection: Connection) -> None:
    rng = random.Random(1)
    add_rows(connection, [lasting(n, NOON - rng.random() * HOUR, 2.0) for n in range(400)])
    found = told(connection, most_arrivals=50)
    assert found["hour"]["seconds"] == 300.0
    assert 20 < len(found["arrivals"]) <= 50
    assert len(told(connection, most_arrivals=3)["arrivals"]) == 3
    with pytest.raises(InvalidQuery, match="take a later one"):
        told(connection, most_minutes=10)


# What callers learn of themselves, and nothing of others, and what operators learn of all.


PATH = "/v1/usage/requests"


async def test_callers_see_their_own_figures_and_operators_those_of_all(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        for name in ("mine-1", "mine-2", ""):
            await chat(running, ALICE, **{"X-Request-ID": name})
        await chat(running, VIP, **{"X-Request-ID": "theirs"})
        for user in ("bob", "eve"):
            await chat(running, CHAT, **{"X-User-Id": user})
        await chat(running)
        await recorded(running, 7)
        alice = await own_usage(running, ALICE)
        assert (alice["key"], alice["name"], alice["group"]) == ("alice", "Alice", "team")
        today, month = alice["today"], alice["month"]
        assert today["requests"] == month["requests"] == month["models"][0]["requests"] == 3
        assert (today["completion_tokens"], today["cost"] > 0) == (24, True)
        limits = {one["limit"]: one for one in alice["limits"]}
        assert list(limits) == ["rpm", "tokens_per_day", "budget", "concurrency"]
        assert (limits["rpm"]["used"], limits["rpm"]["remaining"]) == (3, 97)
        tokens = today["prompt_tokens"] + today["completion_tokens"]
        assert limits["tokens_per_day"]["used"] == tokens
        assert limits["budget"]["used"] == pytest.approx(month["cost"])
        assert limits["budget"]["resets_at"].endswith("-01T00:00:00Z")
        for user, requests in (("", 2), ("bob", 1), ("nobody", 0)):
            found = await own_usage(running, CHAT, f"?user={user}" if user else "")
            assert (found["user"], found["today"]["requests"]) == (user or None, requests)
        eve = await own_usage(running, CHAT, **{"X-User-Id": "eve"})
        assert (eve["user"], eve["today"]["requests"]) == ("eve", 1)
        assert [(one["of"], one["used"]) for one in eve["limits"]] == [("user", 1)]
        anyone = await own_usage(running)
        assert (anyone["key"], anyone["today"]["requests"]) == ("anonymous:127.0.0.1", 1)
        await own_requests(running)
        await operators_figures(running)
        for path, parameter in (
            ("/v1/usage?user=bob", "user"),
            *((f"{PATH}?{name}=x", name) for name in ("limit", "before", "since", "user")),
        ):
            refused = await running.client.get(path, headers=bearer(ALICE))
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "invalid_request")
            assert error["param"] == parameter
            assert parameter != "user" or "trust_user_headers" in error["message"]
        wrong = await running.client.get(PATH, headers={"Authorization": "Bearer lg_alice_x"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
        assert wrong.headers["www-authenticate"].startswith("Bearer")
        # None of these questions was a request.
        assert known(running.gateway.ledger).written == 7
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        assert {"record the hours of nodes", "sum up old usage"} <= tasks


async def operators_figures(running: Running) -> None:
    """Check that operators see what every key used and cost."""
    told = await answered(running.admin, "/admin/usage?by=key")
    rows = {row["key"]: row for row in told["rows"]}
    asked = {key: row["requests"] for key, row in rows.items()}
    assert asked == {"alice": 3, "vip": 1, "chat": 2, "anonymous:127.0.0.1": 1}
    alice, vip = rows["alice"], rows["vip"]
    for row, costs in ((alice, ("gpu_cost",)), (vip, ("gpu_cost", "cost"))):
        price = (row["prompt_tokens"] * 1000 + row["completion_tokens"] * 2000) / 1e6
        assert [row[name] for name in costs] == pytest.approx([price] * len(costs))
    assert alice["slot_seconds"] > 0
    assert told["money"]["all_gpu"]["value"] == pytest.approx(told["total"]["gpu_cost"])
    assert set(told["money"]["tiers"]) == {"cpu", "gpu"}
    assert told["total"]["requests"] == told["rows_found"] + 3 == 7
    assert (alice["key_name"], vip["key_name"]) == ("Alice", "vip")
    answer = await running.admin.get("/admin/usage?by=key&format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.text.startswith("key,key_name,requests,failures,clients_left,")


async def own_requests(running: Running) -> None:
    """Check that callers see their own requests and no others."""
    found = await own_usage(running, ALICE, "/requests")
    latest, _, first = found["requests"]
    assert (found["object"], found["next"], found["complete"]) == ("list", None, True)
    assert (first["client_request_id"], latest["client_request_id"]) == ("mine-1", None)
    assert (first["status"], first["outcome"], first["completion_tokens"]) == (200, "ok", 8)
    assert 0 <= first["wait_seconds"] <= first["seconds"]
    # Neither text nor where it ran.
    assert not {"key", "key_name", "node", "tier", "slot_seconds"} & set(first)
    assert "Hello" not in str(found)
    assert "cpu-a" not in str(found)
    document = await answered(running.admin, "/openapi.json?listener=public")
    answer = document["paths"][PATH]["get"]["responses"]["200"]["content"]["application/json"]
    jsonschema.validate(found, answer["schema"] | {"components": document["components"]})
    assert set(found) == set(answer["schema"]["properties"])
    for question, user, users in (
        ("", "", ["eve", "bob"]), ("?user=bob", "", ["bob"]), ("", "eve", ["eve"]),
    ):  # fmt: skip
        headers = {"X-User-Id": user} if user else {}
        rows = (await own_usage(running, CHAT, f"/requests{question}", **headers))["requests"]
        assert [row["user"] for row in rows] == users
    assert len((await own_usage(running, path="/requests"))["requests"]) == 1
    # What an operator may filter by leads to nothing of others.
    for question in ("?key=vip", "?key=alice&node=cpu-a", "?group=team", "?outcome=failed"):
        rows = (await own_usage(running, VIP, f"/requests{question}"))["requests"]
        assert [row["client_request_id"] for row in rows] == ["theirs"], question


async def test_without_a_store_there_is_no_report_and_what_makes_no_sense_is_refused() -> None:
    async with bare_gateway() as gateway:
        for query in ("by=node", "format=xml", "user=bob"):
            response = await gateway.admin.get(f"/admin/usage?{query}")
            assert response.status_code == 400
            assert error_of(response)["param"] == query.partition("=")[0]
        response = await gateway.admin.get("/admin/usage")
    assert (response.status_code, error_of(response)["code"]) == (501, "not_supported")
    assert "retry-after" not in response.headers


# `GET /admin/requests/ended`, and `why` of a request that only the ledger still knows.


async def secret_chat(running: Running, key: ApiKey, **body: Any) -> str:
    """The id of a chat of which no report may tell a word."""
    messages = [{"role": "user", "content": "the launch code is 7391"}]
    headers = body.pop("headers", None)
    response = await running.chat(key, headers, messages=messages, max_tokens=8, **body)
    assert response.status_code == 200, response.text
    return response.headers["x-request-id"]


async def requests(running: Running, path: str) -> Any:
    found = await answered(running.admin, f"/admin/requests/{path}")
    assert "launch" not in str(found)
    return found["requests"]


async def test_what_has_ended_is_found_with_times_and_the_name_of_its_key(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        await secret_chat(running, VIP, stream=True, headers={"x-request-id": "mine"})
        own = await secret_chat(running, ALICE)
        await recorded(running, 2)
        latest, first = await requests(running, "ended")
        by_key = await requests(running, "ended?key=Alice&outcome=ok&limit=1")
        assert await requests(running, "ended?outcome=failed") == []
    assert (latest["id"], latest["client_request_id"]) == (own, None)
    assert (latest["key"], latest["key_name"], latest["group"]) == ("alice", "Alice", "team")
    assert (first["client_request_id"], first["stream"]) == ("mine", True)
    assert first["id"] != "mine"
    assert 0 <= first["wait_seconds"] < first["ttft_seconds"] <= first["seconds"] + 0.05
    for one in (latest, first):
        on_node = one["prefill_seconds"] + one["decode_seconds"]
        assert 0 < on_node <= one["seconds"] + 0.05
        assert one["resumptions"] == 0
    assert [one["id"] for one in by_key] == [own]


async def test_what_memory_has_forgotten_is_explained_by_the_ledger_if_it_knows(
    tmp_path: Path,
) -> None:
    async with metered_gateway(tmp_path) as running:
        old = a_row(
            1, started_at=1_800_000_000.0, ended_at=1_800_000_009.5, wait_seconds=2.5,
            ttft_seconds=4.0, prefill_seconds=1.5, decode_seconds=5.5, attempts=2, resumptions=1,
            cached_tokens=30, client_request_id="mine",
        )  # fmt: skip
        older = a_row(
            2, ended_at=1_799_000_000.0, wait_seconds=None, resumptions=None, status=0,
            outcome="lost", client_request_id="mine",
        )  # fmt: skip
        store = known(running.gateway.store)
        await store.run(lambda connection: add_rows(connection, [old, older]))
        (by_id,) = await requests(running, "r1/why")
        _, lost = await requests(running, "mine/why")
        remembered = await secret_chat(running, ALICE)
        await until(lambda: len(running.gateway.registry) == 0)
        (live,) = await requests(running, f"{remembered}/why")
        for name in ("nobody", "a%00b", "%ff"):
            response = await running.admin.get(f"/admin/requests/{name}/why")
            assert (response.status_code, error_of(response)["code"]) == (404, "request_not_found")
            assert "nor in the ledger" in error_of(response)["message"]
        for query in ("since=soon", "by=key"):
            response = await running.admin.get(f"/admin/requests/ended?{query}")
            assert response.status_code == 400
            assert error_of(response)["param"] == query.partition("=")[0]
    assert (by_id["from"], by_id["state"], by_id["decisions"]) == ("ledger", "finished", [])
    assert (by_id["id"], by_id["request_id"], by_id["caller"]) == ("r1", "mine", "team-a")
    assert (by_id["received_at"], by_id["seconds"]) == ("2027-01-15T08:00:00.000Z", 9.5)
    assert by_id["summary"] == (
        "The decisions about it are no longer remembered; this is what the ledger keeps. It waited "
        "2.5 s in the queue. It ran on cpu-a, the last of 2 attempts: 1.5 s to read 70 tokens of "
        "the prompt (30 were cached), 5.5 s to write 10. Its stream was resumed once. It was "
        "answered after 9.5 s."
    )
    assert (lost["id"], lost["state"], lost["outcome"]["reason"]) == ("r2", "failed", "lost")
    assert "how long it waited, and when its first token came" in lost["unknown"]
    assert (live["from"], live["row"], live["unknown"]) == ("memory", None, [])


class CountingReporter(Reporter):
    """A reporter that counts what it is asked and takes its time; what callers are told by it."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.asked: list[ReportQuery] = []
        self.time, self.seconds, self.fails = 0.0, seconds, False
        self.usage = CallerUsage(LimitBook(Settings()), self, lambda: NOON, lambda: self.time)

    async def read(self, query: ReportQuery) -> LedgerReport:
        self.asked.append(query)
        self.time += self.seconds
        if self.fails:
            raise StoreUnavailable("the store is away", "wait")
        group = (("m", "2027-01-15"), Sums(requests=len(self.asked)))
        return LedgerReport(query, groups=[group], total=group[1])

    async def tell(self, key: str, after: float = 0.0) -> Any:
        self.time += after
        caller = Caller(key, key, Priority.NORMAL)
        return await self.usage.describe(self.usage.book.accounts(caller), hides_cache=False)


async def test_figures_are_of_this_month_and_kept_for_seconds_for_so_many_callers() -> None:
    reporter = CountingReporter()
    reporter.fails = True
    told = await reporter.tell("a")
    assert (told["today"], told["reason"]) == (None, "the store is away")
    reporter.fails = False
    # Failures are not kept.
    for key, seconds, reads in (("a", 0.0, 2), ("a", 0.0, 2), ("a", 5.0, 3), ("b", 0.0, 4)):
        assert (await reporter.tell(key, seconds))["today"]["requests"] == reads
    query = reporter.asked[0]
    assert query.until - query.since == 15 * 86400
    assert query.since % DAY == query.until % DAY == 0
    # Those that take long to read are kept for longer.
    slow = CountingReporter(seconds=2.0)
    for seconds, reads in ((0.0, 1), (39.0, 1), (2.0, 2)):
        await slow.tell("a", seconds)
        assert len(slow.asked) == reads
    reporter = CountingReporter()
    for number in (*range(MOST_KEPT + 1), MOST_KEPT):
        await reporter.tell(f"k{number}")
    assert len(reporter.asked) == MOST_KEPT + 1
    await reporter.tell("k0")
    assert len(reporter.asked) == MOST_KEPT + 2


async def test_cached_figures_can_be_hidden_and_limits_need_no_store(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path, cache={"hide": True}) as running:
        await chat(running, ALICE)
        await recorded(running, 1)
        told = await own_usage(running, ALICE)
        (row,) = (await own_usage(running, ALICE, "/requests"))["requests"]
        for figures in (told["today"], told["month"], told["month"]["models"][0], row):
            assert (figures.get("requests", 1), figures["cached_tokens"]) == (1, None)
        assert row["prompt_tokens"] > 0
    async with metered_gateway(tmp_path, store={"url": "off"}) as running:
        await chat(running, ALICE)
        told = await own_usage(running, ALICE)
        assert (told["today"], told["month"], told["reason"]) == (None, None, NO_STORE)
        assert told["limits"][0]["used"] == 1
        response = await running.client.get(PATH, headers=bearer(ALICE))
        assert (response.status_code, response.json()["error"]["code"]) == (501, "not_supported")


def in_any_order(report: LedgerReport) -> dict[str, object]:
    """A report, whose rows of one cost may stand in any order."""
    body = report.to_json()
    return {**body, "rows": sorted(body["rows"], key=str)}


async def test_every_report_is_the_same_before_and_after_retention(store: Store) -> None:
    rows = list(made_up_rows(3000, 20, random.Random(7)))
    fill(store, rows)
    reporter = Reporter(store)
    pairs = itertools.combinations(DIMENSIONS, 2)
    questions = [(name,) for name in DIMENSIONS] + list(pairs)
    queries = [ReportQuery(by, MIDNIGHT - 30 * DAY, MIDNIGHT + DAY) for by in questions]
    before = [in_any_order(await reporter.read(query)) for query in queries]
    assert all("'requests': 3000" in str(one["total"]) for one in before)
    settings = RetentionSettings(days=10, rows=1000)
    assert await retention(store, settings).keep_within_limits() == 2000
    assert await store.run(count_rows) == 1000
    assert [in_any_order(await reporter.read(query)) for query in queries] == before


async def test_rows_that_two_processes_sum_up_count_once(store: Store, store_url: str) -> None:
    rows = list(made_up_rows(2000, 5, random.Random(3)))
    fill(store, rows)

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
    fill(store, rows)
    unlimited = retention(store, RetentionSettings(days=0, rows=0))
    assert await unlimited.keep_within_limits() == 0
    await retention(store, RetentionSettings(days=0, rows=10)).keep_within_limits()
    assert await store.run(count_rows) == 121
    await store.run(lambda connection: add_rows(connection, [a_row(999, ended_at=NOON - 3 * DAY)]))
    assert await retention(store, RetentionSettings(days=1)).keep_within_limits() == 1


async def test_the_file_shrinks_when_old_rows_go(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path / 'gateway.db'}") as store:
        rows = [a_row(n, ended_at=NOON - n * 200) for n in range(6000)]
        fill(store, rows)

        async def pages(pragma: str) -> int:
            return int(await store.run(lambda c: c.exec_driver_sql(pragma).scalar()) or 0)

        size = await pages("PRAGMA page_count")
        await retention(store, RetentionSettings(days=2)).keep_within_limits()
        assert await pages("PRAGMA page_count") < size / 3
        assert await pages("PRAGMA freelist_count") == 0


# The sums of docs/usage-reports.md, with its figures, and what is said of unknown ones.


CPU = NodeHours("cpu-a", "cpu", 10 * HOUR, 2.0)
GPU = NodeHours("gpu-a", "gpu", 10 * HOUR, 20.0)


def test_idle_time_costs_what_no_request_was_charged_and_never_less_than_nothing() -> None:
    assert idle_cost([CPU, GPU], 0.5) == Amount(21.5)
    assert idle_cost([CPU], 2.01) == Amount(0.0)
    told = idle_cost([CPU], 3.0)
    assert told.value is None
    assert "does not cover" in str(told.reason)
    assert per_request(3.0, 1200) == Amount(0.0025)
    assert per_million_tokens(3.0, 1_500_000) == Amount(2.0)
    # Four machines weigh as one of their mean price; a tier without requests needs none.
    machines = [NodeHours(f"cpu-{name}", "cpu", 10 * HOUR, 2.0) for name in "abcd"]
    told = effective_hourly_cost({"cpu": 9, "gpu": 1}, {"cpu": machines, "gpu": [GPU]})
    assert told.value == pytest.approx(0.38)
    told = effective_hourly_cost({"cpu": 5, "gpu": 0}, {"cpu": [CPU]})
    assert told.value == pytest.approx(0.20)
    unpriced = NodeHours("g", "gpu", HOUR, 0.0)
    for told, reason in (
        (effective_hourly_cost({"gpu": 1}, {"cpu": [CPU]}), "tier gpu"),
        (effective_hourly_cost({"gpu": 1}, {"gpu": [unpriced]}), "cost_per_hour"),
        (running_hourly_cost([NodeHours("a", "cpu", 0.0, 0.0)]), "no hour"),
        (idle_cost([unpriced], 0.0), "no hour"),
    ):
        assert (told.value, reason in str(told.reason)) == (None, True)


NODE = AliveNode("cpu-a", "cpu", 0.36)
NEXT_MIDNIGHT = NOON + DAY / 2


def recorded_hours(connection: Connection) -> dict[str, tuple[float, float]]:
    return {
        row.day: (row.seconds, round(row.cost, 9))
        for row in connection.execute(select(node_hours).order_by(node_hours.c.day))
    }


def test_a_time_over_midnight_belongs_to_both_days_by_price(connection: Connection) -> None:
    dearer = NODE._replace(cost_per_hour=3.6)
    end = NEXT_MIDNIGHT + 40
    claims = [NodeUptime(NODE, NEXT_MIDNIGHT - 20, end), NodeUptime(dearer, end, end + 60)]
    count_claims(connection, claims)
    assert recorded_hours(connection) == {"2027-01-15": (20.0, 0.002), "2027-01-16": (100.0, 0.064)}


@in_virtual_time
async def test_the_loop_looks_once_a_minute_also_while_the_store_is_away(
    connection: Connection,
) -> None:
    store: Any = FlakyStore(connection)
    began = now()
    recorder = NodeHoursRecorder(store, lambda: [NODE], lambda: NOON + now() - began)
    async with beside(recorder.run()):
        for is_away, waits, counted in ((False, 5, 5), (True, 3, 5), (False, 1, 9)):
            store.is_away = is_away
            await asyncio.sleep(waits * INTERVAL + (waits == 5))
            told = recorded_hours(connection)["2027-01-15"][0]
            assert told == pytest.approx(counted * INTERVAL)


def test_claims_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.callers.money.MOST_CLAIMS", 3)
    times, names = iter(range(0, 10**9, 60)), itertools.count()
    recorder = NodeHoursRecorder(
        cast("Any", FlakyStore(None)),
        lambda: [AliveNode(f"n{next(names)}", "cpu", 0.1)],
        lambda: NOON + next(times),
    )
    for _ in range(9):
        recorder.look()
    assert len(recorder.claims) == 3


looks = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), min_size=1, max_size=40)


@given(looks)
def test_the_time_counts_in_which_any_process_looked(moves: list[tuple[int, int]]) -> None:
    """Each claims the time since its own last look, in the order of the looks."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        time, looked, seen = NOON, dict.fromkeys(range(3), NOON), set[int]()
        for process, seconds in moves:
            time += seconds
            count_claims(connection, [NodeUptime(NODE, looked[process], time)])
            count_claims(connection, [NodeUptime(NODE, looked[process], time)])  # Told twice.
            count_claims(connection, [NodeUptime(NODE, NOON, NOON + 1)])  # Told late.
            seen.update(range(int(looked[process] - NOON), int(time - NOON)))
            looked[process] = time
        assert recorded_hours(connection)["2027-01-15"][0] == len(seen)
    engine.dispose()


# Requests that have ended.


NAMES = {"k1": "web", "k2": "web", "k3": "night"}


def fill(store: Store, rows: list[dict[str, Any]]) -> None:
    store.run_now(lambda connection: add_rows(connection, rows))


def page(store: Store, given: dict[str, str], **bounds: Any) -> dict[str, Any]:
    query = parse_ended_query(NOON + 1, given, lambda word: named(word) or [word])
    reader = EndedReader(query, **bounds)
    while not store.run_now(reader.step, write=False):
        pass
    return reader.page(NAMES.get)


def named(name: str) -> list[str]:
    return [id_ for id_, one in NAMES.items() if one == name]


def ids(store: Store, **given: str) -> list[str]:
    return [row.id for row in page(store, {"since": "30d", **given})["requests"]]


def all_ids(store: Store, given: dict[str, str], **bounds: Any) -> list[str]:
    found: list[str] = []
    for _ in range(1000):
        one = page(store, given, **bounds)
        found += [row.id for row in one["requests"]]
        if one["next"] is None:
            assert one["complete"]
            return found
        given = {**given, "before": one["next"]}
    raise AssertionError("the pages have no end")


@pytest.mark.parametrize("order", ["latest", "slowest"])
def test_pages_have_every_request_once_and_in_order(store: Store, order: str) -> None:
    # Many of them ended at the same moment, or took as long as others.
    rng = random.Random(5)
    rows = [
        a_row(n, ended_at=(at := NOON - rng.randrange(20) * 60.0), started_at=at - rng.randrange(8))
        for n in range(200)
    ]
    fill(store, rows)

    def rank(row: dict[str, Any]) -> tuple[float, str]:
        seconds = row["ended_at"] - row["started_at"]
        return (row["ended_at"] if order == "latest" else seconds), row["id"]

    expected = [row["id"] for row in sorted(rows, key=rank, reverse=True)]
    given = {"order": order, "limit": "7", "since": "1d"}
    assert all_ids(store, given, rows_per_step=13) == expected
    assert all_ids(store, {**given, "limit": "1000"}) == expected


def test_a_page_that_has_looked_at_enough_ends_and_the_next_one_goes_on(store: Store) -> None:
    rows = [a_row(number, ended_at=NOON - number, node="rare" if number > 90 else "cpu-a")
            for number in range(100)]  # fmt: skip
    fill(store, rows)
    bounds = {"rows_per_step": 10, "most_examined": 30}
    first = page(store, {"node": "rare"}, **bounds)
    assert (first["requests"], first["complete"]) == ([], False)
    assert first["since"] == "2027-01-15T11:59:30Z", "how far it has looked"
    found = all_ids(store, {"node": "rare", "before": first["next"]}, **bounds)
    assert found == [f"r{number}" for number in range(91, 100)]
    slow = page(store, {"order": "slowest"}, **bounds)
    assert (len(slow["requests"]), slow["complete"], slow["next"]) == (30, False, None)


def test_filters_find_what_they_name(store: Store) -> None:
    kinds: list[dict[str, Any]] = [
        {"key": "k1", "group_name": "team"},
        {"key": "k2", "user": "bob"},
        {"key": "k3", "model": "phi"},
        {"node": "cpu-b", "tier": "gpu"},
        {"class_": "batch"},
        {"status": 499, "outcome": "client_closed"},
        {"status": 503, "outcome": "queue_timeout"},
        {"status": 0, "outcome": "lost"},
        {"started_at": NOON - 40},
        {"ended_at": NOON - 20 * DAY},
        {"ended_at": NOON - 31 * DAY},
    ]
    fill(store, [a_row(number, **kind) for number, kind in enumerate(kinds)])
    assert ids(store, key="k1") == ["r0"]
    assert ids(store, key="web") == ["r1", "r0"]
    assert ids(store, group="team") == ["r0"]
    assert ids(store, user="bob") == ["r1"]
    assert ids(store, model="phi") == ["r2"]
    assert ids(store, node="cpu-b") == ids(store, tier="gpu") == ["r3"]
    assert ids(store, **{"class": "batch"}) == ["r4"]
    assert ids(store, outcome="left") == ["r5"]
    assert ids(store, outcome="failed") == ["r7", "r6"]
    assert ids(store, outcome="queue_timeout") == ["r6"]
    assert ids(store, outcome="ok") == ["r8", "r4", "r3", "r2", "r1", "r0", "r9"]
    assert ids(store, slower_than="39.5") == ids(store, slower_than="1", key="team-a") == ["r8"]
    assert ids(store, until="1d") == ["r9"]
    assert ids(store, since="90d", until="21d") == ["r10"]


def test_requests_are_found_by_own_id_before_the_clients_the_newest_first(store: Store) -> None:
    rows = [a_row(n, ended_at=NOON - n, key="k1", client_request_id="r7") for n in range(1, 30)]
    fill(store, rows)
    find = partial(rows_of_name, name="r7")
    found = [ended.ended_row(row, NAMES.get) for row in store.run_now(find, write=False)]
    assert (found[0].key, found[0].key_name, found[0].client_request_id) == ("k1", "web", "r7")
    assert (found[0].ended_at, found[0].seconds) == ("2027-01-15T11:59:53.000Z", 1.0)
    others = [f"r{n}" for n in range(1, 30) if n != 7]
    assert [one.id for one in found] == ["r7", *others][: ended.MOST_NAMED]
    for name in ("nobody", "a\0b", "x" * 10_000, "\udcff"):
        assert store.run_now(partial(rows_of_name, name=name), write=False) == []


@each_case(
    ("given", "parameter"),
    [
        ({"since": "soon"}, "since"),
        ({"since": "1d", "until": "2d"}, "until"),
        ({"since": "2999-01-01"}, "since"),
        ({"order": "fastest"}, "order"),
        ({"limit": "1001"}, "limit"),
        ({"slower_than": "nan"}, "slower_than"),
        ({"before": "later"}, "before"),
        ({"before": "s1.5~r1"}, "before"),
        ({"order": "slowest", "before": "l1.5"}, "before"),
        ({"node": "a\0b"}, "node"),
        ({"user": "x" * 257}, "user"),
    ],
)
def test_questions_that_make_no_sense_are_refused(given: dict[str, str], parameter: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        parse_ended_query(NOON, given, lambda word: [word])
    assert caught.value.parameter == parameter
