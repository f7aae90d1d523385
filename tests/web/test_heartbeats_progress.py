"""Progress comments for clients that ask, in streams that stay valid SSE."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Timings
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection, unchunk
from tests.gateways import until
from tests.virtual import in_virtual_time
from tests.web.raw_client import CHAT, HELLO, public, request

LINE = re.compile(rb": queued position=(\d+) expected_start=(\d+\.\d)\n")
OFF: dict[str, Any] = {"heartbeat": "off", "health": {"interval": 0.5}}
ASKING = "X-Gateway-Progress: 1"
PATHS = {CHAT: HELLO, "/v1/messages": {**HELLO, "max_tokens": 3}, "/completion": {"prompt": "x"}}


def slow() -> EmulatedNode:
    return EmulatedNode(slots=1, decode_tps=12.0)


def events_of(data: bytes) -> list[bytes]:
    """The events that an SSE parser finds: it ignores comments."""
    lines = [line for line in data.split(b"\n") if not line.startswith(b":")]
    return [event for event in b"\n".join(lines).split(b"\n\n") if event.strip()]


@pytest.mark.parametrize("path", PATHS)
@in_virtual_time
async def test_a_queued_client_learns_its_place_in_the_queue(tmp_path: Path, path: str) -> None:
    async with public(tmp_path, OFF, slow()) as gate:
        first = asyncio.create_task(gate.chat(max_tokens=30))
        await until(lambda: gate.node.busy == 1)
        async with raw_connection(gate.url) as wire:
            body = {**PATHS[path], "stream": True, "max_tokens": 3, "n_predict": 3}
            await wire.send(request(body, ASKING, path=path))
            scheduler = gate.running.gateway.scheduler
            await until(lambda: len(scheduler.queue_positions()) == 1)
            head = await wire.head()
            assert head.startswith(b"HTTP/1.1 200 ")
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += await wire.until(b"\r\n")
        result = unchunk(data)
        found = LINE.findall(result)
        assert found
        assert all(position == b"1" for position, _ in found)
        assert float(found[-1][1]) < 60.0
        # A comment and a blank line would break a Go client.
        assert b"\n\n" not in result[: result.rindex(b": queued")].replace(PING, b"")
        assert (b"event: ping" in result) == (path == "/v1/messages")
        for event in events_of(result):
            payload = event.rsplit(b"data: ", 1)[1]
            assert payload == b"[DONE]" or json.loads(payload)
        assert (await first).status == 200


PING = b'event: ping\ndata: {"type": "ping"}\n\n'


@in_virtual_time
async def test_a_client_that_does_not_ask_gets_no_progress(tmp_path: Path) -> None:
    async with public(tmp_path, {**OFF, "heartbeat": 0.3}, slow()) as gate:
        first = asyncio.create_task(gate.chat(max_tokens=25))
        await until(lambda: gate.node.busy == 1)
        second = await gate.chat(stream=True, max_tokens=3)
        assert b":\n" in second.body
        assert b"queued" not in second.body
        assert (await first).status == 200


LONG = "word " * 600
READ = re.compile(rb": prefill percent=(\d+) processed=(\d+) total=(\d+)\n")
RECKONED = re.compile(rb": prefill percent=(\d+) estimated=1\n")
LONGS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}]},
    "/completion": {"prompt": LONG},
    "/infill": {"input_prefix": LONG, "input_suffix": "x"},
}
TELLING = [path for path in LONGS if path != "/v1/messages"]
ENDS = {"/v1/responses": "max_output_tokens", "/completion": "n_predict", "/infill": "n_predict"}


OFTEN = Timings(progress=0.1)
"""Frequent comments, so that a prompt need not take long."""


def reading(**more: Any) -> EmulatedNode:
    """A node that reads a long prompt in 0.8 s and reports progress some eight times."""
    return EmulatedNode(prefill_tps=750.0, batch=80, infill=True, **more)


def a_long(path: str, **more: Any) -> dict[str, Any]:
    return {**LONGS[path], ENDS.get(path, "max_tokens"): 3, "stream": True, **more}


def without_marks(body: bytes) -> bytes:
    """A stream without the fields that differ between responses."""
    body = re.sub(rb'"(id|item_id)":"[^"]*"', b"", body)
    body = re.sub(rb'"(created|created_at|id_slot)":\d+', b"", body)
    return re.sub(rb'"timings":{[^}]*}', b"", body)


@pytest.mark.parametrize("path", TELLING)
@in_virtual_time
async def test_progress_of_the_prefill_is_reported(tmp_path: Path, path: str) -> None:
    async with public(tmp_path, OFF, reading(), timings=OFTEN) as gate:
        plain, found = await asyncio.gather(
            gate.ask(request(a_long(path), "X-Session-Id: one", path=path)),
            gate.ask(request(a_long(path), "X-Session-Id: two", ASKING, path=path)),
        )
        result = [tuple(map(int, one)) for one in READ.findall(found.body)]
        assert result
        assert result == sorted(result)
        for percent, processed, total in result:
            assert percent == 100 * processed // total < 100
        assert b"\n\n" not in found.body[: found.body.rindex(b": prefill")]
        # Nothing else differs from a stream without progress.
        assert b"prompt_progress" not in found.body
        events = events_of(without_marks(found.body))
        assert events == events_of(without_marks(plain.body))
        asked = sorted((json.loads(one.body) for one in gate.node.seen), key=len)
        assert asked == [a_long(path), {**a_long(path), "return_progress": True}]


@in_virtual_time
async def test_a_client_that_asks_the_node_for_progress_gets_its_events(tmp_path: Path) -> None:
    async with public(tmp_path, OFF, reading(), timings=OFTEN) as gate:
        found = await gate.ask(request(a_long(CHAT, return_progress=True), ASKING))
        assert READ.search(found.body)
        assert found.body.count(b"prompt_progress") > 4
        assert gate.node.seen[-1].body == json.dumps(a_long(CHAT, return_progress=True)).encode()


@pytest.mark.parametrize("path", LONGS)
@in_virtual_time
async def test_without_progress_the_body_is_not_edited(tmp_path: Path, path: str) -> None:
    async with public(tmp_path, OFF, EmulatedNode(infill=True)) as gate:
        await gate.ask(request(a_long(path), path=path))
        await gate.ask(request({**a_long(path), "stream": False}, ASKING, path=path))
        assert not any(b"progress" in one.body for one in gate.node.seen)


@in_virtual_time
async def test_progress_events_are_removed_together_with_other_additions(tmp_path: Path) -> None:
    async with public(tmp_path, {**OFF, "resume": "exact"}, reading(), timings=OFTEN) as gate:
        plain = await gate.ask(request(a_long(CHAT)))
        found = await gate.ask(request(a_long(CHAT), ASKING))
        assert READ.search(found.body)
        events = events_of(without_marks(found.body))
        assert events == events_of(without_marks(plain.body))
        asked = json.loads(gate.node.seen[-1].body)
        assert (asked["logprobs"], asked["return_progress"]) == (True, True)


@in_virtual_time
async def test_without_the_nodes_events_progress_is_estimated_from_its_speed(
    tmp_path: Path,
) -> None:
    path = "/v1/messages"
    async with public(tmp_path, OFF, reading(), timings=OFTEN) as gate:
        strange = await gate.ask(request(a_long(path), ASKING, path=path))
        assert b"event: ping" in strange.body
        assert b"prefill" not in strange.body, "nobody knows how fast it is"
        await gate.ask(request(a_long(CHAT)))
        gate.records()
        body = a_long(path, messages=[{"role": "user", "content": "another " * 600}])
        known = await gate.ask(request(body, ASKING, path=path))
        percents = [int(percent) for percent in RECKONED.findall(known.body)]
        assert percents
        assert percents == sorted(percents)
        assert all(0 < percent < 100 for percent in percents)
        assert gate.node.seen[-1].body == json.dumps(body).encode()


@in_virtual_time
async def test_a_node_without_progress_events_serves_as_usual(tmp_path: Path) -> None:
    async with public(tmp_path, OFF, reading(progress=False), timings=OFTEN) as gate:
        found = await gate.ask(request(a_long(CHAT), ASKING))
        assert json.loads(gate.node.seen[-1].body)["return_progress"] is True
        assert found.status == 200
        assert b":\n" in found.body
        assert b"prefill" not in found.body


@in_virtual_time
async def test_progress_events_count_as_no_tokens(tmp_path: Path) -> None:
    async with public(tmp_path, OFF, reading(decode_tps=20.0)) as gate:
        async with raw_connection(gate.url) as wire:
            await wire.send(request(a_long(CHAT, max_tokens=3000), ASKING))
            await wire.until(b'"content"')
        ended = await gate.last()
        assert ended.status == 499
        # One more comes first, as the role does in every chat.
        assert ended.completion_tokens <= gate.node.engine.tokens + 1


@in_virtual_time
async def test_a_plain_response_has_no_progress(tmp_path: Path) -> None:
    async with public(tmp_path, OFF, slow()) as gate:
        found = await asyncio.gather(*(gate.chat(ASKING, max_tokens=9) for _ in range(2)))
        assert [one.status for one in found] == [200, 200]
        assert all(json.loads(one.body)["choices"] for one in found)
