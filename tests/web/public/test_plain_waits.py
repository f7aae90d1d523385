"""How long a plain answer may take, and what its client may get meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.emulator import EmulatedNode
from tests.emulator.wire import wired
from tests.virtual import in_virtual_time, now
from tests.web.public.asking import CHAT, HELLO, answer, public, request

PADDED: dict[str, Any] = {
    "heartbeat": 0.1,
    "heartbeat_plain": True,
    "health": {"interval": 0.2},
    "retries": {"backoff": 0.01},
}
PLAIN: dict[str, Any] = {"health": {"interval": 0.2}}


@pytest.mark.parametrize(
    "field", ["X-Request-Timeout", "X-Stainless-Read-Timeout", "X-Stainless-Timeout"]
)
@in_virtual_time
async def test_a_plain_request_lasts_as_long_as_its_client_says(tmp_path: Path, field: str) -> None:
    async with public(tmp_path, PLAIN, EmulatedNode(decode_tps=20, answer_tokens=400)) as gate:
        began = now()
        found = await gate.chat(f"{field}: 0.3", "X-Stainless-Timeout: 600")
        assert (found.status, found.code) == (504, "node_timeout")
        assert 0.3 <= now() - began < 0.5
        assert gate.running.gateway.fleet.nodes["node-0"].failures == 0
        gate.node.engine.decode_tps = 1e9


@pytest.mark.parametrize("told", ["soon", "0", "nan"])
@in_virtual_time
async def test_what_is_no_time_bounds_nothing(tmp_path: Path, told: str) -> None:
    async with public(tmp_path, PLAIN) as gate:
        found = await gate.chat(f"X-Stainless-Read-Timeout: {told}", max_tokens=2)
        assert found.status == 200


@in_virtual_time
async def test_a_stream_is_not_bound_by_what_its_client_waits_for_a_byte(tmp_path: Path) -> None:
    async with public(tmp_path, PLAIN, EmulatedNode(decode_tps=20, answer_tokens=12)) as gate:
        found = await gate.chat("X-Stainless-Read-Timeout: 0.2", stream=True)
        assert found.status == 200
        assert b"[DONE]" in found.body


@in_virtual_time
async def test_white_space_goes_ahead_of_the_answer(tmp_path: Path) -> None:
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
async def test_an_error_behind_white_space_is_told_in_the_body(tmp_path: Path) -> None:
    async with public(tmp_path, PADDED | {"timeouts": {"silence": 0.4}}) as gate:
        gate.node.faults.set("hang", after_events=1)
        async with wired(gate.url) as wire:
            await wire.send(request(HELLO, "X-Request-Timeout: 0.5", path=CHAT))
            found = await answer(wire)
        gate.node.faults.clear()
        assert (found.status, found.body[:1]) == (200, b" ")
        assert json.loads(found.body)["error"]["code"] == "node_timeout"
        record = await gate.last()
        assert (record.code, record.reason) == (504, "node_timeout")


@in_virtual_time
async def test_a_nodes_own_error_behind_white_space_is_told_as_it_is(tmp_path: Path) -> None:
    async with public(tmp_path, PADDED) as gate:
        gate.node.faults.next("hang", seconds=0.3)
        found = await gate.chat(messages="none")
        assert found.status == 200
        assert json.loads(found.body)["error"]["type"] == "invalid_request_error"
        assert (await gate.last()).code == 400
