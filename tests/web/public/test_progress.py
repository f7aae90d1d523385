"""A client that asks is told how long it will wait, without being shown a stream that isn't one."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.emulator import EmulatedNode
from tests.emulator.wire import unchunk, wired
from tests.gateways import until
from tests.web.public.asking import CHAT, HELLO, public, request

LINE = re.compile(rb": queued position=(\d+) expected_start=(\d+\.\d)\n")
OFF: dict[str, Any] = {"heartbeat": "off", "health": {"interval": 0.5}}
ASKING = "X-Gateway-Progress: 1"
PATHS = {CHAT: HELLO, "/v1/messages": {**HELLO, "max_tokens": 3}, "/completion": {"prompt": "x"}}


def slow() -> EmulatedNode:
    return EmulatedNode(slots=1, decode_tps=12.0)


def events_of(data: bytes) -> list[bytes]:
    """What an SSE parser makes of it: comments are nothing, wherever they stand."""
    lines = [line for line in data.split(b"\n") if not line.startswith(b":")]
    return [event for event in b"\n".join(lines).split(b"\n\n") if event.strip()]


@pytest.mark.parametrize("path", PATHS)
async def test_who_waits_is_told_its_place(tmp_path: Path, path: str) -> None:
    async with public(tmp_path, OFF, slow()) as gate:
        first = asyncio.create_task(gate.chat(max_tokens=30))
        await until(lambda: gate.node.busy == 1)
        async with wired(gate.url) as wire:
            body = {**PATHS[path], "stream": True, "max_tokens": 3, "n_predict": 3}
            await wire.send(request(body, ASKING, path=path))
            scheduler = gate.running.gateway.scheduler
            await until(lambda: len(scheduler.waiting()) == 1)
            head = await wire.head()
            assert head.startswith(b"HTTP/1.1 200 ")
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += await wire.until(b"\r\n")
        told = unchunk(data)
        found = LINE.findall(told)
        assert found
        assert all(position == b"1" for position, _ in found)
        assert float(found[-1][1]) < 60.0
        # A comment and a blank line would break a Go client.
        assert b"\n\n" not in told[: told.rindex(b": queued")].replace(PING, b"")
        assert (b"event: ping" in told) == (path == "/v1/messages")
        for event in events_of(told):
            payload = event.rsplit(b"data: ", 1)[1]
            assert payload == b"[DONE]" or json.loads(payload)
        assert (await first).status == 200


PING = b'event: ping\ndata: {"type": "ping"}\n\n'


async def test_nobody_else_is(tmp_path: Path) -> None:
    async with public(tmp_path, {**OFF, "heartbeat": 0.3}, slow()) as gate:
        first = asyncio.create_task(gate.chat(max_tokens=25))
        await until(lambda: gate.node.busy == 1)
        second = await gate.chat(stream=True, max_tokens=3)
        assert b":\n" in second.body
        assert b"queued" not in second.body
        assert (await first).status == 200


async def test_when_its_turn_has_come_the_signs_of_life_are_plain(tmp_path: Path) -> None:
    async with public(tmp_path, OFF, EmulatedNode(prefill_tps=3.0)) as gate:
        found = await gate.chat(ASKING, stream=True, max_tokens=3)
        assert b":\n" in found.body
        assert b"queued" not in found.body


async def test_a_plain_answer_is_as_ever(tmp_path: Path) -> None:
    async with public(tmp_path, OFF, slow()) as gate:
        found = await asyncio.gather(*(gate.chat(ASKING, max_tokens=9) for _ in range(2)))
        assert [one.status for one in found] == [200, 200]
        assert all(json.loads(one.body)["choices"] for one in found)
