"""Timeouts of plain responses, and what clients get meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.transport.errors import ConnectTimedOut
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection
from tests.gateways import until
from tests.virtual import in_virtual_time, now
from tests.web.raw_client import CHAT, HELLO, answer, public, request

PADDED: dict[str, Any] = {
    "heartbeat": 0.1,
    "heartbeat_plain": True,
    "health": {"interval": 0.2},
    "retries": {"backoff": 0.01},
}
PLAIN: dict[str, Any] = {"health": {"interval": 0.2}}


@pytest.mark.parametrize("late", [0.0, 2.0])
@pytest.mark.parametrize("slow", ["to answer", "to connect", "to come free"])
@in_virtual_time
async def test_a_plain_request_has_the_deadline_of_the_sdks_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str, late: float
) -> None:
    """An official client's own timer ends the request before the gateway does."""
    field = "X-Stainless-Read-Timeout" if late else "X-Request-Timeout"
    node = EmulatedNode(decode_tps=20, answer_tokens=400, slots=1)
    async with public(tmp_path, PLAIN, node) as gate:
        fleet = gate.running.gateway.fleet.nodes["node-0"]
        first = None
        if slow == "to come free":
            first = asyncio.create_task(gate.chat(max_tokens=9))
            await until(lambda: gate.node.busy == 1)
        if slow == "to connect":
            pool = fleet.upstream
            while (idle := pool.take_idle()) is not None:
                idle.close()
            monkeypatch.setattr(pool, "connect", slowly)
        began = now()
        asked = asyncio.create_task(gate.chat(f"{field}: 0.3", "X-Stainless-Timeout: 600"))
        await until(lambda: now() - began >= 0.35)
        # Its node does no more for it, whenever it is told.
        await until(lambda: gate.node.busy == int(first is not None))
        assert asked.done() is not bool(late)
        assert now() - began < 0.6
        found = await asked
        assert found.status == (503 if first else 504)
        assert found.code == ("queue_timeout" if first else "node_timeout")
        assert 0.3 + late <= now() - began < 0.36 + late
        assert (fleet.failures, fleet.circuit.suspect_callers) == (0, set())
        gate.node.engine.decode_tps = 1e9
        monkeypatch.undo()
        if first is not None:
            await first


async def slowly(timeout: float) -> Any:
    await asyncio.sleep(timeout)
    raise ConnectTimedOut(f"No connection within {timeout:g} s")


@in_virtual_time
async def test_the_shorter_of_both_timeouts_decides_about_the_error(tmp_path: Path) -> None:
    async with public(tmp_path, PLAIN, EmulatedNode(decode_tps=20, answer_tokens=400)) as gate:
        began = now()
        found = await gate.chat("X-Request-Timeout: 0.3", "X-Stainless-Timeout: 0.4")
        assert found.status == 504
        assert now() - began < 0.31
        found = await gate.chat("X-Request-Timeout: 0.4", "X-Stainless-Timeout: 0.3")
        assert found.status == 504
        assert now() - began > 0.3 + 2.3
        gate.node.engine.decode_tps = 1e9


@in_virtual_time
async def test_a_client_that_times_out_by_itself_gets_no_error(tmp_path: Path) -> None:
    async with public(tmp_path, PLAIN, EmulatedNode(decode_tps=20, answer_tokens=400)) as gate:
        began = now()
        async with raw_connection(gate.url) as wire:
            await wire.send(request(HELLO, "X-Stainless-Timeout: 0.3", path=CHAT))
            await until(lambda: now() - began > 0.6)
        await until(lambda: len(gate.running.gateway.registry) == 0)
        assert now() - began < 1.0
        record = await gate.last()
        assert (record.status, record.reason) == (504, "node_timeout")
        gate.node.engine.decode_tps = 1e9


@pytest.mark.parametrize("timeout", ["soon", "0", "nan"])
@in_virtual_time
async def test_an_invalid_sdk_timeout_is_ignored(tmp_path: Path, timeout: str) -> None:
    async with public(tmp_path, PLAIN) as gate:
        found = await gate.chat(f"X-Stainless-Read-Timeout: {timeout}", max_tokens=2)
        assert found.status == 200


@in_virtual_time
async def test_the_sdks_timeout_does_not_apply_to_streams(tmp_path: Path) -> None:
    async with public(tmp_path, PLAIN, EmulatedNode(decode_tps=20, answer_tokens=12)) as gate:
        found = await gate.chat("X-Stainless-Read-Timeout: 0.2", stream=True)
        assert found.status == 200
        assert b"[DONE]" in found.body


@in_virtual_time
async def test_white_space_is_sent_before_a_plain_response(tmp_path: Path) -> None:
    node = EmulatedNode(decode_tps=20, answer_tokens=10)
    async with public(tmp_path, PADDED, node) as gate:
        found = await gate.chat("X-Stainless-Read-Timeout: 0.2")
        assert found.status == 200
        assert found.headers["content-type"] == "application/json; charset=utf-8"
        assert found.headers["transfer-encoding"] == "chunked"
        assert found.body.startswith(b"  ")
        assert json.loads(found.body)["usage"]["completion_tokens"] == 10
        quick = await gate.chat(max_tokens=1)
        assert "content-length" in quick.headers
        assert quick.body.startswith(b"{")


@in_virtual_time
async def test_an_error_after_white_space_is_in_the_body(tmp_path: Path) -> None:
    async with public(tmp_path, PADDED | {"timeouts": {"silence": 0.4}}) as gate:
        gate.node.faults.set("hang", after_events=1)
        async with raw_connection(gate.url) as wire:
            await wire.send(request(HELLO, "X-Request-Timeout: 0.5", path=CHAT))
            found = await answer(wire)
        gate.node.faults.clear()
        assert (found.status, found.body[:1]) == (200, b" ")
        assert json.loads(found.body)["error"]["code"] == "node_timeout"
        record = await gate.last()
        assert (record.status, record.reason) == (504, "node_timeout")


@in_virtual_time
async def test_a_nodes_error_after_white_space_is_unchanged(tmp_path: Path) -> None:
    async with public(tmp_path, PADDED) as gate:
        gate.node.faults.next("hang", seconds=0.3)
        found = await gate.chat(messages="none")
        assert found.status == 200
        assert json.loads(found.body)["error"]["type"] == "invalid_request_error"
        assert (await gate.last()).status == 400
