"""A store that fails ends no request, and neither delays the gateway's start nor its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.app.assembly import DEFAULT_TIMINGS
from gateway.callers.keys import new_key
from tests.callers.outages import Outcome, file_away, file_locked, server_halted, server_killed
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.known import known
from tests.postgres import needs_postgres, running_postgres
from tests.web.bare_gateway import CHAT

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
LIMIT = 90.0  # what systemd's unit gives a gateway to start and to end
AWAY = 4.0
KEY = new_key("known")


async def store_status(running: Running) -> dict[str, Any]:
    found: dict[str, Any] = (await running.admin.get("/admin/status")).json()["store"]
    return found


async def asked(running: Running, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return (await running.client.post(CHAT, json=HELLO, headers=headers)).status_code


def keyed(url: str) -> dict[str, Any]:
    """Settings with a key of their own: while a store is unknown, strangers may not come in."""
    return {"store": {"url": url}, "keys": [{"id": KEY.id, "sha256": KEY.sha256}]}


def assert_nothing_was_lost(found: Outcome, *states: str) -> None:
    assert found.failed == []
    assert found.states == ["up", *states, "up"]
    assert all(phase.seconds for phase in found.phases)
    assert found.left_open == 0
    assert found.rows == found.requests


@needs_postgres
@pytest.mark.slow
async def test_no_request_fails_while_postgresql_is_halted_or_killed(tmp_path: Path) -> None:
    for name in ("halted", "killed"):
        (tmp_path / name).mkdir()
    with running_postgres() as server:
        found = await server_halted(server, tmp_path / "halted", AWAY)
        killed = await server_killed(server, tmp_path / "killed", AWAY)
    assert found.failed == []
    assert (found.rows, found.left_open) == (found.requests, 0)
    assert_nothing_was_lost(killed, "unavailable")


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(("way", "state"), [(file_locked, "locked"), (file_away, "gone")])
async def test_no_request_fails_while_the_file_cannot_be_used(
    tmp_path: Path, way: Callable[[Path, float], Awaitable[Outcome]], state: str
) -> None:
    assert_nothing_was_lost(await way(tmp_path, AWAY), state)


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
