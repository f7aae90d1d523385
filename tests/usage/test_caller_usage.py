"""`GET /v1/usage`: what a caller learns of itself, and nothing of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.access.keys import new_key
from gateway.config.settings import Settings
from gateway.request import Caller, Priority
from gateway.store.failures import StoreUnavailable
from gateway.usage.limits import LimitBook
from gateway.usage.reports import (
    MOST_KEPT,
    NO_STORE,
    CallerUsage,
    Reporter,
    ReportQuery,
    Sums,
    UsageReport,
)
from tests.gateways import Running
from tests.usage.ledger_rows import NOON
from tests.usage.metered_gateway import (
    ALICE,
    CALLERS,
    CHAT,
    VIP,
    bearer,
    chat,
    metered_gateway,
    recorded,
)


async def usage(running: Running, key: Any = None, path: str = "", **headers: str) -> Any:
    sent = headers if key is None else bearer(key, **headers)
    response = await running.client.get(f"/v1/usage{path}", headers=sent)
    assert response.status_code == 200, response.text
    return response.json()


async def test_callers_see_their_own_figures_and_what_is_left(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        for _ in range(3):
            await chat(running, ALICE)
        await chat(running, VIP)
        await chat(running, CHAT, **{"X-User-Id": "bob"})
        await chat(running, CHAT, **{"X-User-Id": "eve"})
        await chat(running)
        await recorded(running, 7)
        alice = await usage(running, ALICE)
        assert (alice["key"], alice["name"], alice["group"]) == ("alice", "Alice", "team")
        assert alice["today"]["requests"] == alice["month"]["requests"] == 3
        assert alice["today"]["completion_tokens"] == 24
        assert [one["requests"] for one in alice["month"]["models"]] == [3]
        assert alice["today"]["cost"] > 0
        limits = {one["limit"]: one for one in alice["limits"]}
        assert list(limits) == ["rpm", "tokens_per_day", "budget", "concurrency"]
        assert limits["rpm"]["remaining"] == 97
        used = alice["today"]["prompt_tokens"] + alice["today"]["completion_tokens"]
        assert limits["tokens_per_day"]["used"] == used
        assert limits["budget"]["used"] == pytest.approx(alice["month"]["cost"])
        assert limits["concurrency"] | {"of": "key"} == limits["concurrency"]
        assert limits["budget"]["resets_at"].endswith("-01T00:00:00Z")

        both = await usage(running, CHAT)
        assert (both["user"], both["today"]["requests"]) == (None, 2)
        bob = await usage(running, CHAT, "?user=bob")
        assert (bob["user"], bob["today"]["requests"]) == ("bob", 1)
        assert [(one["of"], one["used"]) for one in bob["limits"]] == [("user", 1)]
        eve = await usage(running, CHAT, **{"X-User-Id": "eve"})
        assert (eve["user"], eve["today"]["requests"]) == ("eve", 1)
        assert (await usage(running, CHAT, "?user=nobody"))["today"]["requests"] == 0

        anyone = await usage(running)
        assert (anyone["key"], anyone["today"]["requests"]) == ("anonymous:127.0.0.1", 1)
        # None of these questions was a request.
        assert running.gateway.ledger is not None
        assert running.gateway.ledger.written == 7
        assert (await usage(running, ALICE))["limits"][0]["used"] == 3


async def test_a_key_that_is_not_trusted_may_not_ask_for_users(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        response = await running.client.get("/v1/usage?user=bob", headers=bearer(ALICE))
        assert response.status_code == 400
        assert "trust_user_headers" in response.json()["error"]["message"]


async def test_a_revoked_key_gets_no_figures(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        await usage(running, ALICE)
        left = [caller for caller in CALLERS if caller["id"] != "alice"]
        running.write_settings({"keys": left, "allow_anonymous": True})
        await running.gateway.reload()
        for key in (ALICE, new_key("alice")):
            response = await running.client.get("/v1/usage", headers=bearer(key))
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"


async def test_a_stored_key_that_was_revoked_gets_no_figures_and_loses_none(tmp_path: Path) -> None:
    async with (
        metered_gateway(tmp_path) as running,
        httpx.AsyncClient(base_url=running.admin_url, trust_env=False) as admin,
    ):
        made = (await admin.post("/admin/keys", json={"name": "stored"})).json()
        headers = {"Authorization": f"Bearer {made['key']}"}
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        sent = await running.client.post("/v1/chat/completions", json=body, headers=headers)
        assert sent.status_code == 200
        assert (await running.client.get("/v1/usage", headers=headers)).status_code == 200
        await recorded(running, 1)
        assert (await admin.delete("/admin/keys/stored")).status_code == 200
        refused = await running.client.get("/v1/usage", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert "today" not in refused.text
        # Its operators still see what it used.
        report = (await admin.get("/admin/usage?by=key")).json()
        assert [(row["key"], row["requests"]) for row in report["rows"]] == [(made["id"], 1)]


async def test_cached_figures_are_hidden_where_the_settings_say_so(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path, cache={"hide": True}) as running:
        await chat(running, ALICE)
        await recorded(running, 1)
        told = await usage(running, ALICE)
        assert told["today"]["cached_tokens"] is None
        assert told["month"]["cached_tokens"] is None
        assert told["month"]["models"][0]["cached_tokens"] is None
        assert told["today"]["requests"] == 1


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

    async def read(self, query: ReportQuery) -> UsageReport:
        self.asked.append(query)
        self.times[0] += self.seconds
        if self.fails:
            raise StoreUnavailable("the store is away", "wait")
        group = (("m", "2027-01-15"), Sums(requests=len(self.asked)))
        return UsageReport(query, [group], group[1], 1, {}, [])


def caller_usage(seconds: float = 0.0) -> tuple[CallerUsage, CountingReporter, list[float]]:
    times = [0.0]
    reporter = CountingReporter(times, seconds)
    book = LimitBook(Settings())
    return CallerUsage(book, reporter, lambda: NOON, lambda: times[0]), reporter, times


async def asked(about: CallerUsage, key: str) -> Any:
    caller = Caller(key, key, Priority.NORMAL)
    return await about.describe(about.book.accounts(caller), hides_cache=False)


async def test_figures_are_read_from_the_first_of_the_month_and_kept_for_seconds() -> None:
    about, reporter, times = caller_usage()
    assert (await asked(about, "a"))["today"]["requests"] == 1
    assert (await asked(about, "a"))["today"]["requests"] == 1
    times[0] += 5.0
    assert (await asked(about, "a"))["today"]["requests"] == 2
    assert (await asked(about, "b"))["today"]["requests"] == 3
    query = reporter.asked[0]
    assert query.until - query.since == 15 * 86400
    assert query.whole_days


async def test_figures_that_take_long_to_read_are_kept_for_longer() -> None:
    about, reporter, times = caller_usage(seconds=2.0)
    await asked(about, "a")
    times[0] += 39.0
    await asked(about, "a")
    assert len(reporter.asked) == 1
    times[0] += 2.0
    await asked(about, "a")
    assert len(reporter.asked) == 2


async def test_a_store_that_fails_is_told_and_asked_again() -> None:
    about, reporter, _ = caller_usage()
    reporter.fails = True
    told = await asked(about, "a")
    assert (told["today"], told["reason"]) == (None, "the store is away")
    reporter.fails = False
    assert (await asked(about, "a"))["reason"] is None


async def test_only_so_many_callers_are_kept() -> None:
    about, reporter, _ = caller_usage()
    for number in range(MOST_KEPT + 1):
        await asked(about, f"k{number}")
    await asked(about, f"k{MOST_KEPT}")
    assert len(reporter.asked) == MOST_KEPT + 1
    await asked(about, "k0")
    assert len(reporter.asked) == MOST_KEPT + 2
