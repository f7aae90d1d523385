"""Requests that have ended are found in the ledger, a page at a time."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gateway.callers import ended
from gateway.callers.ended import EndedReader, parse_ended_query, rows_of_name
from gateway.callers.reports import InvalidQuery
from gateway.store.store import Store
from tests.callers.ledger_rows import DAY, NOON, a_row, add_rows
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


def made_up(count: int) -> list[dict[str, Any]]:
    """Requests of which many ended at the same moment, or took as long as others."""
    rng = random.Random(5)
    rows = []
    for number in range(count):
        at = NOON - rng.randrange(20) * 60.0
        seconds = float(rng.randrange(8))
        rows.append(a_row(number, id=f"r{number:03}", ended_at=at, started_at=at - seconds))
    return rows


@pytest.mark.parametrize("order", ["latest", "slowest"])
def test_pages_have_every_request_once_and_in_order(store: Store, order: str) -> None:
    rows = made_up(200)
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


# `GET /v1/usage/requests`: what callers see of their own requests, and nothing of others'.


PATH = "/v1/usage/requests"


async def test_callers_see_their_own_requests_and_no_others(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        await chat(running, ALICE, **{"X-Request-ID": "mine-1"})
        await chat(running, ALICE)
        await chat(running, VIP, **{"X-Request-ID": "theirs"})
        await chat(running, CHAT, **{"X-User-Id": "bob"})
        await chat(running, CHAT, **{"X-User-Id": "eve"})
        await chat(running)
        await recorded(running, 6)
        found = await own_usage(running, ALICE, "/requests")
        latest, first = found["requests"]
        assert (found["object"], found["next"], found["complete"]) == ("list", None, True)
        assert (first["client_request_id"], latest["client_request_id"]) == ("mine-1", None)
        assert (first["status"], first["outcome"], first["completion_tokens"]) == (200, "ok", 8)
        assert 0 <= first["wait_seconds"] <= first["seconds"]
        # Neither text nor where it ran.
        assert not {"key", "key_name", "node", "tier", "slot_seconds"} & set(first)
        assert "Hello there" not in str(found)
        assert "cpu-a" not in str(found)
        document = (await running.admin.get("/openapi.json?listener=public")).json()
        answer = document["paths"][PATH]["get"]["responses"]["200"]["content"]["application/json"]
        jsonschema.validate(found, answer["schema"] | {"components": document["components"]})
        assert set(found) == set(answer["schema"]["properties"])

        both = await own_usage(running, CHAT, "/requests")
        assert [row["user"] for row in both["requests"]] == ["eve", "bob"]
        bob = await own_usage(running, CHAT, "/requests?user=bob")
        assert [row["user"] for row in bob["requests"]] == ["bob"]
        eve = await own_usage(running, CHAT, "/requests", **{"X-User-Id": "eve"})
        assert [row["user"] for row in eve["requests"]] == ["eve"]
        assert len((await own_usage(running, path="/requests"))["requests"]) == 1
        # What an operator may filter by leads to nothing of others.
        for question in ("?key=vip", "?key=alice&node=cpu-a", "?group=team", "?outcome=failed"):
            rows = (await own_usage(running, VIP, f"/requests{question}"))["requests"]
            assert [row["client_request_id"] for row in rows] == ["theirs"], question
        # No question was a request.
        ledger = running.gateway.ledger
        assert ledger is not None
        assert ledger.written == 6


async def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        for parameter in ("limit", "before", "since", "user"):
            refused = await running.client.get(f"{PATH}?{parameter}=x", headers=bearer(ALICE))
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (
                400, "invalid_request", parameter
            )  # fmt: skip
        wrong = await running.client.get(PATH, headers={"Authorization": "Bearer lg_alice_x"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
        assert wrong.headers["www-authenticate"].startswith("Bearer")


async def test_hidden_figures_and_a_missing_store_are_told_as_such(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path, cache={"hide": True}) as running:
        await chat(running, ALICE)
        await recorded(running, 1)
        [row] = (await own_usage(running, ALICE, "/requests"))["requests"]
        assert row["cached_tokens"] is None
        assert row["prompt_tokens"] > 0
    async with metered_gateway(tmp_path, store={"url": "off"}) as running:
        response = await running.client.get(PATH, headers=bearer(ALICE))
        assert (response.status_code, response.json()["error"]["code"]) == (501, "not_supported")
