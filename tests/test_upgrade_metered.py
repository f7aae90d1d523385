"""Limits, keys and the ledger over a hand-over, while both processes live."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection, select

from gateway.callers.keys import ApiKey, new_key
from gateway.store.database import locate_store
from gateway.store.schema import open_requests, processes
from gateway.store.store import Store
from tests.callers.build import read_rows
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import RawConnection, post, raw_connection
from tests.gateway_processes import LIMIT, serving
from tests.gateways import until
from tests.polling import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SPENT, PAIR, COUNTED = new_key("spent"), new_key("pair"), new_key("counted")
SETTINGS = {
    "keys": [
        {"id": "spent", "sha256": SPENT.sha256, "limits": {"budget": "0.01/month"}},
        {"id": "pair", "sha256": PAIR.sha256, "limits": {"concurrency": 2}},
        {"id": "counted", "sha256": COUNTED.sha256, "limits": {"tokens_per_day": 100_000}},
    ]
}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
PRICE = {"prompt": 0.0, "completion": 100_000.0}
KEPT = 40
"""Connections to the old process: each has one more reply after the hand-over."""


async def status(kept: RawConnection, key: str) -> int:
    """The status of one chat on a connection that is never made anew."""
    await kept.send(post("/v1/chat/completions", CHAT, f"Authorization: Bearer {key}\r\n"))
    head = await kept.head()
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    await kept.reader.readexactly(length)
    return int(head.split(b" ")[1])


def client_of(url: str) -> httpx.AsyncClient:
    """A client each of whose requests comes to the process that accepts connections."""
    anew = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=LIMIT, limits=anew)


def bearer(key: ApiKey | str) -> dict[str, str]:
    return {"authorization": f"Bearer {key if isinstance(key, str) else key.text}"}


def opened(folder: Path) -> Store:
    store = Store(locate_store(f"sqlite:///{folder}/state/llama-gateway/gateway.db", folder))
    store.start()
    return store


def left(connection: Connection) -> tuple[int, int]:
    """Open requests and processes in the store."""
    tables = open_requests, processes
    counts = [len(connection.execute(select(table)).all()) for table in tables]
    return counts[0], counts[1]


async def test_limits_keys_and_the_ledger_hold_while_both_processes_live(tmp_path: Path) -> None:
    admitted = 0
    refused: list[tuple[int, str | None]] = []
    async with (
        AsyncExitStack() as stack,
        EmulatedNode(slots=64) as node,
        serving(tmp_path, node, settings=SETTINGS, cost_per_million_tokens=PRICE) as line,
        client_of(line.url) as client,
        client_of(line.admin_url) as admin,
    ):
        store = opened(tmp_path)

        async def ask(key: ApiKey | str, **body: Any) -> httpx.Response:
            nonlocal admitted
            response = await client.post(
                "/v1/chat/completions", json=CHAT | body, headers=bearer(key)
            )
            admitted += response.status_code == 200
            return response

        async def recorded(count: int) -> list[dict[str, Any]]:
            async def look() -> list[dict[str, Any]] | None:
                rows = await store.run(read_rows)
                return rows if len(rows) >= count else None

            return await eventually(look, LIMIT)

        async def opened_requests(count: int) -> None:
            async def look() -> bool | None:
                return (await store.run(left))[0] >= count or None

            await eventually(look, LIMIT)

        made = (await admin.post("/admin/keys", json={"name": "alice"})).json()["key"]
        assert (await ask(SPENT)).status_code == 200
        for _ in range(3):
            assert (await ask(COUNTED)).status_code == 200
        kept = [await stack.enter_async_context(raw_connection(line.url)) for _ in range(KEPT)]
        for one in kept:
            assert await status(one, made) == 200
            admitted += 1
        # One request of each of these keys hangs in the old process.
        node.faults.next("hang", n=2, after_events=2)
        hanging = [asyncio.create_task(ask(key, stream=True)) for key in (PAIR, made)]
        rows = await recorded(admitted)
        used = sum(
            row["prompt_tokens"] + row["completion_tokens"]
            for row in rows
            if row["key"] == "counted"
        )
        await opened_requests(2)

        over = asyncio.Event()

        async def ask_on() -> None:
            """A key with nothing left asks all the time, of whichever process accepts."""
            while not over.is_set():
                response = await ask(SPENT)
                refused.append((response.status_code, response.headers.get("x-gateway-reason")))

        asking = asyncio.create_task(ask_on())
        await line.succeed()
        # The successor knows all of it before its first answer.
        told = (await client.get("/v1/usage", headers=bearer(COUNTED))).json()
        assert [one["used"] for one in told["limits"]] == [used]
        told = (await client.get("/v1/usage", headers=bearer(PAIR))).json()
        assert [one["used"] for one in told["limits"]] == [1]
        before = len(refused)
        await until(lambda: len(refused) >= before + 3, LIMIT)
        over.set()
        await asking
        assert set(refused) == {(429, "insufficient_quota")}

        # The limit holds across both.
        node.faults.next("hang", after_events=2)
        hanging.append(asyncio.create_task(ask(PAIR, stream=True)))
        await opened_requests(3)
        assert (await ask(PAIR)).headers["x-gateway-reason"] == "rate_limit_exceeded"
        # The old process hears of it within a second.
        admitted += await until_answered(kept, PAIR.text, 429)

        # One of them revokes a key, since both accept admin connections. The other hears of it,
        # and the old process refuses it on its connections.
        assert (await admin.delete("/admin/keys/alice")).status_code == 200
        async with asyncio.timeout(LIMIT):
            while (await ask(made)).status_code != 401:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        admitted += await until_answered(kept, made, 401)
        assert await status(kept[-1], made) == 401

        # What runs is served to its end, by the process that has it.
        assert len(line.logged("ended")) == 0
        node.faults.release()
        for response in await asyncio.gather(*hanging):
            assert response.status_code == 200
            assert response.text.endswith("data: [DONE]\n\n")
        for one in kept:
            await one.leave()
        await line.until("ended")

        # Each request once, and nothing is left of the old process.
        rows = await recorded(admitted)
        assert len(rows) == len({row["id"] for row in rows}) == admitted
        assert {row["outcome"] for row in rows} == {"ok"}
        assert len({row["process"] for row in rows}) == 2
        assert await store.run(left) == (0, 1)
        assert await store.aclose(LIMIT)


async def until_answered(kept: list[RawConnection], key: str, wanted: int) -> int:
    """Use one connection after the other until this is the answer; how many had another one.

    Each has one reply left, so the old process is asked only now and then.
    """
    served = 0
    while (found := await status(kept[-1], key)) != wanted:
        assert found == 200
        await kept.pop().leave()
        served += 1
        assert len(kept) > 2, f"{served} requests of a key that should get {wanted} were served"
        await asyncio.sleep(0.1)
    await kept.pop().leave()
    return served
