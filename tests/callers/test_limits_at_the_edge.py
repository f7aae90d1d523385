"""Fifty callers at once at the edge of a limit, through a whole gateway over emulated nodes."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import new_key
from gateway.callers.limits import Account
from tests.callers.build import all_accounts, read_rows
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until

CALLERS = 50

KEY = new_key("edge")

USER = "ann"

PRICE = {"prompt": 1000.0, "completion": 4000.0}
"""For a million tokens: a thousand tokens cost some units."""


async def chat(running: Running, most: int | None, **body: Any) -> httpx.Response:
    return await running.client.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "Say something."}],
            "max_tokens": most,
            **body,
        },
        headers={"Authorization": f"Bearer {KEY.text}", "X-User-Id": USER},
    )


async def fifty(running: Running, most: int) -> list[httpx.Response]:
    return await asyncio.gather(*(chat(running, most) for _ in range(CALLERS)))


def settings(**limits: Any) -> dict[str, Any]:
    return {"keys": [{"id": KEY.id, "sha256": KEY.sha256, "limits": limits}]}


def settings_of(owner: str, limits: dict[str, Any]) -> dict[str, Any]:
    """These limits of a key, of its group, of each of its end users, or of all callers."""
    key: dict[str, Any] = {"id": KEY.id, "sha256": KEY.sha256}
    if owner == "key":
        return {"keys": [{**key, "limits": limits}]}
    if owner == "user":
        return {"keys": [{**key, "trust_user_headers": True, "user_limits": limits}]}
    if owner == "group":
        return {"keys": [{**key, "group": "team"}], "groups": {"team": {"limits": limits}}}
    return {"keys": [key], "limits": {"total": limits}}


async def settle(running: Running) -> list[dict[str, Any]]:
    """Wait until all is settled and written; the ledger's rows."""
    gateway = running.gateway
    assert gateway.ledger is not None
    assert gateway.store is not None
    ledger = gateway.ledger
    await until(lambda: all(one.open == 0 for one in all_accounts(gateway.metering.limit_book)))
    gateway.bus.flush()
    await until(lambda: not ledger.pending)
    return await gateway.store.run(read_rows)


def codes(responses: list[httpx.Response]) -> Counter[str]:
    return Counter(
        "ok" if one.status_code == 200 else one.headers["x-gateway-reason"] for one in responses
    )


@pytest.mark.parametrize("owner", ["key", "group", "user", "total"])
async def test_as_many_run_at_one_time_as_may(owner: str, tmp_path: Path) -> None:
    async with (
        EmulatedNode(slots=8) as node,
        running_gateway(tmp_path, [node.url], settings_of(owner, {"concurrency": 5})) as running,
    ):
        # None of them ends before all have been admitted or refused.
        node.faults.set("hang", path="/v1/chat/completions", after_events=1)
        sent = [asyncio.create_task(chat(running, 4)) for _ in range(CALLERS)]
        await until(lambda: sum(one.done() for one in sent) == CALLERS - 5)
        await until(lambda: node.faults.hanging == 5)
        node.faults.clear()
        node.faults.release()
        assert codes(await asyncio.gather(*sent)) == {"ok": 5, "rate_limit_exceeded": 45}
        # A place is free as soon as a response has ended.
        for _ in range(10):
            assert (await chat(running, 1)).status_code == 200
        assert len(await settle(running)) == 15


@pytest.mark.parametrize(
    ("owner", "limits", "reason"),
    [
        ("key", {"rpm": 20}, "rate_limit_exceeded"),
        ("group", {"tpm": 500}, "rate_limit_exceeded"),
        ("user", {"tokens_per_day": 500}, "insufficient_quota"),
        ("total", {"budget": "1.5/month"}, "insufficient_quota"),
    ],
)
async def test_requests_that_use_less_than_they_reserve_never_exceed_it(
    limits: dict[str, Any], reason: str, owner: str, tmp_path: Path
) -> None:
    """Of a key, a group, an end user and all callers; what was not used is there for the next."""
    async with EmulatedNode(slots=8, answer_tokens=10) as node:
        priced = {"name": "n", "url": node.url, "cost_per_million_tokens": PRICE}
        async with running_gateway(tmp_path, [priced], settings_of(owner, limits)) as running:
            found = Counter[str]()
            # In turns: as long as something is left, some of fifty are admitted.
            while (more := codes(responses := await fifty(running, 40)))["ok"]:
                found += more
                await settle(running)
            rows = await settle(running)
    assert set(found + more) <= {"ok", reason}
    assert more[reason] == CALLERS
    assert int(responses[0].headers["retry-after"]) >= 1
    if reason == "insufficient_quota":
        assert responses[0].headers["x-should-retry"] == "false"
        assert responses[0].json()["error"]["type"] == reason
    assert len(rows) == found["ok"]
    tokens = sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows)
    paid = math.fsum(row["cost"] for row in rows)
    if "rpm" in limits:
        assert len(rows) == 20
    elif "budget" in limits:
        assert 1.5 - 5 * max(row["cost"] for row in rows) < paid <= 1.5
    else:
        # Nobody asks for more than 40 tokens of answer, and 10 of prompt.
        assert 500 - 50 < tokens <= 500


async def test_a_request_beyond_the_whole_limit_is_told_so(tmp_path: Path) -> None:
    limits = {"tpm": 100, "prompt_tokens": 50, "completion_tokens": 60}
    async with (
        EmulatedNode(slots=8) as node,
        running_gateway(tmp_path, [node.url], settings(**limits)) as running,
    ):
        long = [{"role": "user", "content": "word " * 100}]
        response = await chat(running, 10, messages=long)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "'prompt_tokens' of key 'edge'" in error["message"]
        # A longer answer than may be is lowered to what may be.
        response = await chat(running, 5000, ignore_eos=True)
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 60
        response = await chat(running, 60, n=2)
        assert response.status_code == 400
        assert "100 tokens a minute (tpm)" in response.json()["error"]["message"]
        assert "could never be admitted" in response.json()["error"]["message"]


async def test_what_one_gateway_admits_is_gone_for_another(tmp_path: Path, store_url: str) -> None:
    """What it has used, and what runs there."""
    chosen = {"store": {"url": store_url}, **settings(rpm=4, concurrency=2)}
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(EmulatedNode(slots=8))
        gateways = []
        for name in "ab":
            (tmp_path / name).mkdir()
            started = running_gateway(tmp_path / name, [node.url], chosen)
            gateways.append(await stack.enter_async_context(started))
        one, other = gateways

        def account() -> Account:
            return next(all_accounts(other.gateway.metering.limit_book))

        node.faults.next("hang", n=2, after_events=1)
        running = [asyncio.create_task(chat(one, 4)) for _ in range(2)]
        await until(lambda: account().others.running == 2)
        refused = await chat(other, 4)
        assert "2 requests at one time" in refused.json()["error"]["message"]
        node.faults.release()
        assert codes(await asyncio.gather(*running)) == {"ok": 2}
        await until(lambda: account().others.running == 0)
        assert codes([await chat(other, 4) for _ in range(3)])["ok"] == 2
        rows = await settle(other)
        assert len({row["process"] for row in rows}) == 2
