"""`GET /v1/usage/requests`: what callers see of their own requests, and nothing of others'."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gateway.callers.ended import EndedFinder, EndedQuery, EndedReader, OwnRequests
from gateway.callers.reports import ReportInterrupted
from gateway.errors import GatewayError
from tests.callers.ledger_rows import NOON, a_row, add_rows
from tests.callers.metered_gateway import (
    ALICE,
    CHAT,
    VIP,
    bearer,
    chat,
    metered_gateway,
    recorded,
)
from tests.gateways import Running

PATH = "/v1/usage/requests"


async def asked(running: Running, key: Any = None, question: str = "", **headers: str) -> Any:
    sent = headers if key is None else bearer(key, **headers)
    response = await running.client.get(f"{PATH}{question}", headers=sent)
    assert response.status_code == 200, response.text
    return response.json()


async def test_callers_see_their_own_requests_and_no_others(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        await chat(running, ALICE, **{"X-Request-ID": "mine-1"})
        await chat(running, ALICE)
        await chat(running, VIP, **{"X-Request-ID": "theirs"})
        await chat(running, CHAT, **{"X-User-Id": "bob"})
        await chat(running, CHAT, **{"X-User-Id": "eve"})
        await chat(running)
        await recorded(running, 6)
        found = await asked(running, ALICE)
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

        both = await asked(running, CHAT)
        assert [row["user"] for row in both["requests"]] == ["eve", "bob"]
        bob = await asked(running, CHAT, "?user=bob")
        assert [row["user"] for row in bob["requests"]] == ["bob"]
        eve = await asked(running, CHAT, **{"X-User-Id": "eve"})
        assert [row["user"] for row in eve["requests"]] == ["eve"]
        assert len((await asked(running))["requests"]) == 1
        # What an operator may filter by leads to nothing of others.
        for question in ("?key=vip", "?key=alice&node=cpu-a", "?group=team", "?outcome=failed"):
            rows = (await asked(running, VIP, question))["requests"]
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
        [row] = (await asked(running, ALICE))["requests"]
        assert row["cached_tokens"] is None
        assert row["prompt_tokens"] > 0
    async with metered_gateway(tmp_path, store={"url": "off"}) as running:
        response = await running.client.get(PATH, headers=bearer(ALICE))
        assert (response.status_code, response.json()["error"]["code"]) == (501, "not_supported")


class SlowEnded(EndedFinder):
    """Reads when it is let; what it was asked is kept."""

    def __init__(self) -> None:
        self.asked: list[EndedQuery] = []
        self.go = asyncio.Event()
        self.ids_of = lambda word: (word,)

    async def read(self, query: EndedQuery) -> EndedReader:
        self.asked.append(query)
        await self.go.wait()
        if len(self.asked) > 2:
            raise ReportInterrupted("others are being read")
        return EndedReader(query)


async def test_of_a_caller_one_page_is_read_at_a_time_and_others_go_on() -> None:
    slow = SlowEnded()
    own = OwnRequests(slow, lambda: NOON)
    first = asyncio.create_task(own.read("alice", None, {}))
    await asyncio.sleep(0)
    with pytest.raises(GatewayError) as refused:
        await own.read("alice", None, {})
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    other = asyncio.create_task(own.read("bob", "eve", {"limit": "7"}))
    await asyncio.sleep(0)
    slow.go.set()
    await asyncio.gather(first, other)
    assert [(one.keys, one.equal, one.limit) for one in slow.asked] == [
        (("alice",), (), 100),
        (("bob",), (("user", "eve"),), 7),
    ]
    with pytest.raises(GatewayError) as away:
        await own.read("alice", None, {})
    assert (away.value.status, away.value.code) == (503, "store_unavailable")


async def test_a_user_who_is_rare_among_many_rows_is_found_page_by_page(tmp_path: Path) -> None:
    """A page looks at a bounded number of rows; the next one goes on behind them."""
    now = time.time()
    async with metered_gateway(tmp_path) as running:
        store, own = running.gateway.store, running.gateway.metering.own_requests
        assert store is not None
        assert own is not None
        own.ended.most_examined = 10_000
        users = {3: "rare", 24_000: "rare"}
        rows = [
            a_row(number, key="chat", ended_at=now - number, user=users.get(number, "other"))
            for number in range(25_000)
        ]
        rows.append(a_row(99_999, key="vip", ended_at=now - 24_500))
        await store.run(lambda connection: add_rows(connection, rows))
        found: list[str] = []
        question, pages = "?user=rare", 0
        while question:
            page = await asked(running, CHAT, question)
            found += [row["id"] for row in page["requests"]]
            question = f"?user=rare&before={page['next']}" if page["next"] else ""
            pages += 1
            # Another key's cursor shows nothing of that key.
            others = await asked(running, VIP, question.replace("user=rare&", ""))
            assert {row["id"] for row in others["requests"]} <= {"r99999"}
        assert found == ["r3", "r24000"]
        assert pages == 3
