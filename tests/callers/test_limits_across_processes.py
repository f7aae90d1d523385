"""Two gateways, each a process of its own, on one real store: what one admits the other counts."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import new_key
from tests.callers.build import read_rows
from tests.emulator import EmulatedNode
from tests.gateway_processes import LIMIT, Succession, serving
from tests.postgres import PostgresServer, needs_postgres, running_postgres
from tests.store.stores import opened

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PRICE = {"prompt": 0.0, "completion": 100_000.0}
"""For a million tokens: ten tokens of an answer cost 1."""

TOKENS = 10
"""Of each answer."""


MOST_TOKENS = 40
"""That each asks for, so that no estimate is exceeded."""

LIMITS: dict[str, dict[str, Any]] = {
    "rpm": {"rpm": 12},
    "tpm": {"tpm": 600},
    "tokens_per_day": {"tokens_per_day": 600},
    "budget": {"budget": "12/month"},
}
"""Of each key; it is called like its limit."""

KEYS = {name: new_key(name.replace("_", "-")) for name in LIMITS}


@dataclass
class Two:
    """Two gateways, and what their clients see."""

    store_url: str
    node: EmulatedNode
    clients: list[httpx.AsyncClient]
    admitted: Counter[str] = field(default_factory=Counter)

    async def chat(self, which: int, key: str) -> httpx.Response:
        """Have a chat by this gateway with this key."""
        messages = [{"role": "user", "content": "Say something."}]
        response = await self.clients[which].post(
            "/v1/chat/completions",
            json={"messages": messages, "max_tokens": MOST_TOKENS},
            headers={"authorization": f"Bearer {KEYS[key].text}"},
        )
        assert response.status_code in {200, 429}, response.text
        self.admitted[key] += response.status_code == 200
        return response

    async def used(self, which: int, key: str) -> float:
        """How much of its limit this gateway says that a key has used."""
        headers = {"authorization": f"Bearer {KEYS[key].text}"}
        told = (await self.clients[which].get("/v1/usage", headers=headers)).json()
        return float(next(one["used"] for one in told["limits"] if one["limit"] == key))

    async def until_used(self, which: int, key: str, wanted: float) -> None:
        """Wait until this gateway counts so much."""
        seen = math.nan
        try:
            async with asyncio.timeout(LIMIT):
                while (seen := await self.used(which, key)) != pytest.approx(wanted):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{key}: {seen} is used and not {wanted}") from None

    async def settled(self, key: str) -> float:
        """Wait until the ledger has all of this key and both gateways count that; returns it."""
        wanted = self.admitted[key]
        async with asyncio.timeout(LIMIT):
            while len(rows := await self.rows(key)) < wanted:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.1)
        assert len(rows) == len({row["id"] for row in rows}) == wanted
        assert {row["outcome"] for row in rows} <= {"ok"}
        if key == "rpm":
            used: float = len(rows)
        elif key == "budget":
            used = math.fsum(row["cost"] for row in rows)
        else:
            used = sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows)
        for which in (0, 1):
            await self.until_used(which, key, used)
        return used

    async def rows(self, key: str) -> list[dict[str, Any]]:
        """The ledger's rows of this key."""
        with opened(self.store_url) as store:
            return [row for row in await store.run(read_rows) if row["key"] == KEYS[key].id]


@asynccontextmanager
async def two_gateways(folder: Path, url: str) -> AsyncIterator[Two]:
    settings = {
        "store": {"url": url},
        "keys": [
            {"id": KEYS[name].id, "sha256": KEYS[name].sha256, "limits": limits}
            for name, limits in LIMITS.items()
        ],
    }
    async with (
        EmulatedNode(slots=64, answer_tokens=TOKENS) as node,
        serving(folder / "a", node, settings=settings, cost_per_million_tokens=PRICE) as one,
        serving(folder / "b", node, settings=settings, cost_per_million_tokens=PRICE) as other,
        a_client(one) as first,
        a_client(other) as second,
    ):
        for client in (first, second):
            async with asyncio.timeout(LIMIT):
                while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        yield Two(url, node, [first, second])


def a_client(line: Succession) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=line.url, trust_env=False, timeout=LIMIT, limits=limits)


def reason(response: httpx.Response) -> str | None:
    found: str | None = response.headers.get("x-gateway-reason")
    return found


REASONS = {
    "rpm": "rate_limit_exceeded",
    "tpm": "rate_limit_exceeded",
    "tokens_per_day": "insufficient_quota",
    "budget": "insufficient_quota",
}


async def test_what_one_gateway_admits_is_gone_for_the_other(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    async with two_gateways(tmp_path, postgres.new_database()) as two:
        for key, why in REASONS.items():
            for _ in range(4):
                assert (await two.chat(0, key)).status_code == 200
            each = await two.settled(key) / 4
            most = 12.0 if key in {"rpm", "budget"} else 600.0
            # The rest at the other, one after the other until it is refused.
            while (last := await two.chat(1, key)).status_code == 200:
                assert two.admitted[key] <= most / each
            assert reason(last) == why
            used = await two.settled(key)
            # Of tokens and money the refused one may have needed more than the last ones used.
            assert most - 3 * each < used <= most + 1e-9
            assert reason(await two.chat(0, key)) == why
            assert len({row["process"] for row in await two.rows(key)}) == 2


@needs_postgres
async def test_limits_hold_over_a_store_that_was_halted_and_settle_exactly(tmp_path: Path) -> None:
    key = "tokens_per_day"
    with running_postgres() as server:
        async with two_gateways(tmp_path, server.new_database()) as two:
            for which in (0, 1):
                assert (await two.chat(which, key)).status_code == 200
            each = await two.settled(key) / 2
            loop = asyncio.get_running_loop()
            began = loop.time()
            await asyncio.to_thread(server.halt)
            try:
                meanwhile = Counter[int]()
                while loop.time() - began < 4.0:
                    for which in (0, 1):
                        response = await two.chat(which, key)
                        assert reason(response) in {None, REASONS[key]}
                        meanwhile[which] += response.status_code == 200
                    await asyncio.sleep(0.1)
            finally:
                await asyncio.to_thread(server.go_on)
            # Each knew what it admitted itself.
            for which in (0, 1):
                assert 1 <= meanwhile[which] <= (600 - 2 * each) / each
            used = await two.settled(key)
            assert used == pytest.approx((2 + meanwhile[0] + meanwhile[1]) * each)
            # From now on both go by the sum of both.
            for which in (0, 1):
                while (last := await two.chat(which, key)).status_code == 200:
                    assert two.admitted[key] <= 2 * 600 / each
                assert reason(last) == REASONS[key]
            assert await two.settled(key) >= max(used, 600 - 3 * each)
