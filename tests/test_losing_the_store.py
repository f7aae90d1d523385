"""A store that fails ends no request, and neither delays the gateway's start nor its end."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection, func, select

from gateway.app.assembly import DEFAULT_TIMINGS
from gateway.callers.keys import new_key
from gateway.store.schema import open_requests, usage
from tests.emulator import EmulatedNode
from tests.gateways import Running, answered, running_gateway, until
from tests.known import known
from tests.postgres import needs_postgres, running_postgres
from tests.store.stores import opened

LIMIT = 90.0  # what systemd's unit gives a gateway to start and to end
AWAY = 4.0
AROUND = 2.0  # seconds of load before and after
CLIENTS = 16
KEY = new_key("known")


async def store_status(running: Running) -> Any:
    return (await answered(running.admin, "/admin/status"))["store"]


async def asked(running: Running, key: str = "") -> int:
    return (await running.chat(key, max_tokens=1)).status_code


def keyed(url: str, **key: Any) -> dict[str, Any]:
    """Settings with a key of their own: while a store is unknown, strangers may not come in."""
    return {"store": {"url": url}, "keys": [{"id": KEY.id, "sha256": KEY.sha256, **key}]}


@dataclass
class Outcome:
    requests: list[int]
    """That ended before, while the store was away, and afterwards."""
    failed: list[str]
    states: list[str]
    """The store's states, in their order."""
    rows: int
    """Rows of the ledger at the end."""
    left_open: int
    """Requests that the ledger believes to run at the end."""


async def outage(
    folder: Path, url: str, begin: Callable[[], object], end: Callable[[], object]
) -> Outcome:
    """Take the store away by `begin` under streams and plain chats, and give it back by `end`."""
    limits = {"rpm": 10_000_000, "tpm": 1_000_000_000, "budget": "1000000/month"}
    nodes = [EmulatedNode(slots=CLIENTS, decode_tps=200.0) for _ in range(2)]
    found, stopping = Outcome([0], [], [], 0, 0), asyncio.Event()
    async with running_gateway(folder, nodes, keyed(url, limits=limits)) as running:
        store = known(running.gateway.store)

        async def client(number: int) -> None:
            while not stopping.is_set():
                number += 1
                stream = number % 2 == 0
                try:
                    response = await running.chat(KEY, max_tokens=20, stream=stream)
                    if response.status_code != 200:
                        found.failed.append(f"{response.status_code} {response.text[:200]}")
                    elif stream and not response.text.rstrip().endswith("data: [DONE]"):
                        found.failed.append("a stream without its end")
                except httpx.HTTPError as error:
                    found.failed.append(repr(error))
                found.requests[-1] += 1

        async def watch() -> None:
            while not stopping.is_set():
                state = store.status().state
                if found.states[-1:] != [state]:
                    found.states.append(state)
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(work) for work in (watch(), *map(client, range(CLIENTS)))]
        try:
            await asyncio.sleep(AROUND)
            found.requests.append(0)
            await asyncio.to_thread(begin)
            try:
                await asyncio.sleep(AWAY)
            finally:
                await asyncio.to_thread(end)
            found.requests.append(0)
            await until(lambda: store.status().up, 60.0, store.status)
            await asyncio.sleep(AROUND)
        finally:
            stopping.set()
            await asyncio.gather(*tasks)

    def count(connection: Connection) -> list[int]:
        tables = (usage, open_requests)
        return [connection.scalar(select(func.count()).select_from(one)) or 0 for one in tables]

    with opened(url) as one:
        found.rows, found.left_open = await one.run(count)
    return found


def assert_nothing_was_lost(found: Outcome, *states: str) -> None:
    assert found.failed == []
    assert (found.rows, found.left_open) == (sum(found.requests), 0)
    if states:
        assert found.states == ["up", *states, "up"]
        assert all(found.requests)


@needs_postgres
@pytest.mark.slow
async def test_no_request_fails_while_postgresql_is_halted_or_killed(tmp_path: Path) -> None:
    for name in ("halted", "killed"):
        (tmp_path / name).mkdir()
    with running_postgres() as server:
        url = server.new_database()
        found = await outage(tmp_path / "halted", url, server.halt, server.go_on)
        url = server.new_database()
        killed = await outage(tmp_path / "killed", url, server.kill, server.start)
    assert_nothing_was_lost(found)
    assert_nothing_was_lost(killed, "unavailable")


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("state", ["locked", "gone"])
async def test_no_request_fails_while_the_file_cannot_be_used(tmp_path: Path, state: str) -> None:
    file, aside, holding = tmp_path / "gateway.db", tmp_path / "aside.db", ExitStack()

    def lock() -> None:
        other = sqlite3.connect(file, isolation_level=None, timeout=60, check_same_thread=False)
        holding.callback(other.close)
        other.execute("BEGIN IMMEDIATE")

    begin, end = {
        "locked": (lock, holding.close),
        "gone": (lambda: file.rename(aside), lambda: aside.rename(file)),
    }[state]
    found = await outage(tmp_path, f"sqlite:///{file}", begin, end)
    assert_nothing_was_lost(found, state)


@needs_postgres
@pytest.mark.slow
async def test_a_gateway_starts_and_ends_though_its_store_is_halted(tmp_path: Path) -> None:
    with running_postgres() as server:
        url = server.new_database()
        with server.halted():
            began = time.monotonic()
            async with (
                EmulatedNode() as node,
                running_gateway(tmp_path, [node.url], keyed(url)) as running,
            ):
                # The limit is for all steps of the start together, of which there are five.
                assert time.monotonic() - began < 4 * DEFAULT_TIMINGS.store
                assert await asked(running, KEY.text) == 200
                assert not running.gateway.store.status().up  # type: ignore[union-attr]
                began = time.monotonic()
            assert time.monotonic() - began < LIMIT


@pytest.mark.smoke
@needs_postgres
@pytest.mark.slow
async def test_a_store_that_is_not_there_at_the_start_is_used_when_it_comes(
    tmp_path: Path,
) -> None:
    with running_postgres() as server:
        url = server.new_database()
        server.stop()
        async with (
            EmulatedNode() as node,
            running_gateway(tmp_path, [node.url], keyed(url)) as running,
        ):
            assert await asked(running, KEY.text) == 200
            status = await store_status(running)
            assert status["state"] == "unavailable"
            for path in ("/admin/config", "/admin/status", "/metrics"):
                assert "secret-of-tests" not in (await running.admin.get(path)).text
            await asyncio.to_thread(server.start)
            store = known(running.gateway.store)
            await until(lambda: store.status().up)
            assert (await store_status(running))["error"] is None


async def test_the_state_of_the_store_is_in_the_status_and_the_metrics(tmp_path: Path) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as running:
        file = tmp_path / "state" / "gateway.db"
        status = await store_status(running)
        assert (status["url"], status["state"]) == (f"sqlite:///{file}", "up")
        assert "llama_gateway_store_up 1\n" in (await running.admin.get("/metrics")).text
        aside = file.rename(tmp_path / "aside.db")
        await until(lambda: not running.gateway.store.status().up)  # type: ignore[union-attr]
        status = await store_status(running)
        assert status["state"] == "gone"
        assert "put it back" in status["remedy"]
        assert await asked(running) == 200
        assert "llama_gateway_store_up 0\n" in (await running.admin.get("/metrics")).text
        aside.rename(file)
        await until(lambda: running.gateway.store.status().up)  # type: ignore[union-attr]
    log = (tmp_path / "gateway.log").read_text()
    assert log.count("the store fails") == 1
    assert log.count("the store is open") == 2


async def test_a_gateway_can_do_without_a_store(tmp_path: Path) -> None:
    settings = {"store": {"url": "off"}}
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url], settings) as running:
        assert await asked(running) == 200
        assert await store_status(running) == {"state": "off"}
        assert "llama_gateway_store" not in (await running.admin.get("/metrics")).text
        assert running.gateway.store is None
