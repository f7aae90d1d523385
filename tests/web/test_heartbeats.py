"""Heartbeats on streams without content."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.proxy.api.base import NumberedHeartbeats
from gateway.proxy.inbound.routes import ROUTES
from gateway.web.handler import StreamHeartbeat
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import RawConnection, raw_connection, unchunk
from tests.gateways import running_gateway, until
from tests.virtual import in_virtual_time, now
from tests.web.raw_client import CHAT, HELLO, Public, answer, public, request

BEATING = {"heartbeat": 0.1, "health": {"interval": 0.2}, "retries": {"backoff": 0.01}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {**HELLO, "max_tokens": 4},
    "/v1/responses": {"input": "hello"},
    "/completion": {"prompt": "hello"},
}
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def stream(path: str = CHAT, **more: Any) -> bytes:
    return request({**BODIES[path], "stream": True, **more}, path=path)


async def chunk(wire: RawConnection) -> bytes:
    size = int(await wire.until(b"\r\n"), 16)
    return (await wire.until(b"\r\n"))[:-2] if not size else (await exactly(wire, size + 2))[:-2]


async def exactly(wire: RawConnection, size: int) -> bytes:
    async with asyncio.timeout(30.0):
        return await wire.reader.readexactly(size)


async def body_of(wire: RawConnection) -> bytes:
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += await wire.until(b"\r\n")
    return unchunk(data)


@pytest.mark.parametrize("path", BODIES)
@in_virtual_time
async def test_a_queued_stream_gets_heartbeats(tmp_path: Path, path: str) -> None:
    async with public(tmp_path, BEATING) as gate:
        beat = PING if path == "/v1/messages" else b":\n"
        gate.node.faults.next("hang", after_events=0)
        async with raw_connection(gate.url) as wire:
            await wire.send(stream(path, max_tokens=3))
            head = await wire.head()
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"content-type: text/event-stream" in head
            assert b"x-accel-buffering: no" in head
            assert b"x-request-id: req_" in head
            assert (b"request-id: req_" in head.replace(b"x-request-id", b"")) == (
                path == "/v1/messages"
            )
            assert b"x-gateway-class: normal" in head
            # Other nodes may yet be tried, so none is named.
            for unknown in (b"attempts", b"queue-ms", b"node", b"tier"):
                assert b"x-gateway-" + unknown not in head
            for _ in range(3):
                assert await chunk(wire) == beat
            gate.node.faults.release()
            body = await body_of(wire)
        assert body.startswith(beat) or b"data: " in body[:200]
        rest = body.replace(beat, b"") if path == "/v1/messages" else body.lstrip(b":\n")
        assert b"event: ping" not in rest
        assert rest.startswith((b"data: {", b"event: "))
        assert rest.endswith(b"\n\n")
        record = await gate.last()
        assert (record.status, record.stream) == (200, True)
        assert record.ttft is not None
        assert record.ttft == pytest.approx(0.3), "a sign of life is no content"


@pytest.mark.parametrize("path", BODIES)
@in_virtual_time
async def test_a_silent_stream_gets_heartbeats(tmp_path: Path, path: str) -> None:
    async with public(tmp_path, BEATING) as gate:
        beat = PING if path == "/v1/messages" else b":\n"
        gate.node.faults.next("hang", after_events=5)
        async with raw_connection(gate.url) as wire:
            await wire.send(stream(path))
            await wire.head()
            while (said := await chunk(wire)) != beat:
                assert b"\n:" not in said
            for _ in range(2):
                assert await chunk(wire) == beat
            gate.node.faults.release()
            # None soon after an event, and none after the end.
            rest = await body_of(wire)
        assert b"\n" + beat not in rest.removeprefix(beat)


@in_virtual_time
async def test_plain_requests_get_no_heartbeats(tmp_path: Path) -> None:
    async with public(tmp_path, BEATING) as gate:
        gate.node.faults.next("hang", seconds=0.4)
        found = await gate.chat(max_tokens=1)
        assert found.status == 200
        assert json.loads(found.body)["choices"]


async def failing(gate: Public, path: str, kind: str, *fields: str, **fault: Any) -> bytes:
    """The body of a stream whose node fails after the first heartbeat."""
    async with raw_connection(gate.url) as wire:
        gate.node.faults.next("hang", after_events=0)
        # The second slot is taken too, so that the request is queued.
        gate.node.faults.next("hang", after_events=0)
        async with raw_connection(gate.url) as one, raw_connection(gate.url) as two:
            for other in (one, two):
                await other.send(stream())
            await until(lambda: gate.node.busy == 2)
            await wire.send(request({**BODIES[path], "stream": True}, *fields, path=path))
            assert (await wire.head()).startswith(b"HTTP/1.1 200 ")
            gate.node.faults.set(kind, **fault)
        return await body_of(wire)


@pytest.mark.parametrize("path", BODIES)
@in_virtual_time
async def test_after_a_heartbeat_a_nodes_400_is_an_event_and_keeps_its_status_in_the_record(
    tmp_path: Path, path: str
) -> None:
    async with public(tmp_path, BEATING) as gate:
        body = await failing(gate, path, "status", status=400)
        beat = PING if path == "/v1/messages" else b":\n"
        rest = body
        while rest.startswith(beat):
            rest = rest.removeprefix(beat)
        outcome_of(path, rest, "Bad request", "invalid_request_error")
        record = await gate.last()
        assert record.status == 400


@pytest.mark.parametrize("path", BODIES)
@in_virtual_time
async def test_after_a_heartbeat_a_502_is_an_event_and_keeps_its_status_in_the_record(
    tmp_path: Path, path: str
) -> None:
    async with public(tmp_path, BEATING) as gate:
        body = await failing(gate, path, "status", status=404)
        beat = PING if path == "/v1/messages" else b":\n"
        rest = body
        while rest.startswith(beat):
            rest = rest.removeprefix(beat)
        outcome_of(path, rest, "refused it")
        record = await gate.last()
        assert (record.status, record.reason) == (502, "node_failed")


def outcome_of(path: str, data: bytes, message: str, kind: str = "api_error") -> None:
    """One error event in the form of the API, and nothing after it."""
    assert data.endswith(b"\n\n")
    assert data.count(b"\n\n") == 1
    named = path in {"/v1/messages", "/v1/responses"}
    assert data.startswith(b"event: error\ndata: {" if named else b"data: {")
    value = json.loads(data.partition(b"data: ")[2])
    assert message in value["error"]["message"]
    assert b"[DONE]" not in data
    if path == "/v1/messages":
        assert value["type"] == "error"
        assert value["error"]["type"] == kind
        assert value["request_id"].startswith("req_")
    if path == "/v1/responses":
        assert value["type"] == "error"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@in_virtual_time
async def test_after_a_heartbeat_a_queue_timeout_is_an_event(tmp_path: Path, path: str) -> None:
    settings = {**BEATING, "queue": {"max_wait": 0.3}}
    async with public(tmp_path, settings, EmulatedNode(slots=1)) as other:
        other.node.faults.next("hang", after_events=0)
        async with raw_connection(other.url) as first, raw_connection(other.url) as wire:
            await first.send(stream())
            await until(lambda: other.node.busy == 1)
            await wire.send(stream(path))
            assert (await wire.head()).startswith(b"HTTP/1.1 200 ")
            body = await body_of(wire)
            while body.startswith(PING):
                body = body.removeprefix(PING)
            outcome_of(path, body.lstrip(b":\n"), "No slot came free", "overloaded_error")
            assert [(one.status, one.reason) for one in other.records()] == [(503, "queue_timeout")]


@in_virtual_time
async def test_a_failure_before_the_first_heartbeat_has_its_own_status(tmp_path: Path) -> None:
    async with public(tmp_path, BEATING) as gate:
        gate.node.faults.next("status", status=400)
        found = await gate.ask(stream())
        assert found.status == 400
        assert json.loads(found.body)["error"]["message"] == "Bad request"


@in_virtual_time
async def test_after_a_heartbeat_a_response_that_is_no_answer_is_an_error(
    tmp_path: Path,
) -> None:
    async with public(tmp_path, BEATING) as gate:
        body = await failing(gate, CHAT, "status", status=200, body='{"choices": []}')
        outcome_of(CHAT, body.lstrip(b":\n"), "not in this API's form")
        assert (await gate.last()).status == 502


@in_virtual_time
async def test_heartbeats_can_be_switched_off(tmp_path: Path) -> None:
    async with public(tmp_path, {"heartbeat": "off"}) as other:
        other.node.faults.next("hang", after_events=0)
        async with raw_connection(other.url) as wire:
            await wire.send(stream(max_tokens=2))
            with pytest.raises(TimeoutError):
                await wire.some(0.3)
            other.node.faults.release()
            found = await answer(wire)
            assert found.body.startswith(b"data: {")


@in_virtual_time
async def test_the_nodes_own_comments_become_heartbeats(tmp_path: Path) -> None:
    async with public(tmp_path, BEATING) as gate:
        gate.node.faults.next("comments")
        found = await gate.ask(stream(max_tokens=3))
        assert found.body.count(b":\n") >= 3
        assert b":\n\n" not in found.body
        assert b"\n\n:\ndata: " in found.body


@in_virtual_time
async def test_without_heartbeats_the_nodes_own_comments_are_dropped(
    tmp_path: Path,
) -> None:
    async with public(tmp_path, {"heartbeat": "off"}) as other:
        other.node.faults.next("comments")
        found = await other.ask(stream(max_tokens=3))
        assert found.body.startswith(b"data: ")
        assert b"\n:" not in found.body


@in_virtual_time
async def test_a_client_that_leaves_after_a_heartbeat_is_noticed(tmp_path: Path) -> None:
    async with public(tmp_path, BEATING) as gate:
        gate.node.faults.next("hang", after_events=0)
        async with raw_connection(gate.url) as wire:
            await wire.send(stream())
            await wire.head()
            assert await chunk(wire) == b":\n"
        record = await gate.last()
        assert (record.status, record.ttft) == (499, None)


@in_virtual_time
async def test_heartbeats_continue_while_another_node_is_tried(tmp_path: Path) -> None:
    async with (
        EmulatedNode() as one,
        EmulatedNode() as two,
        running_gateway(tmp_path, [one.url, two.url], BEATING) as running,
        raw_connection(running.url) as wire,
    ):
        for node in (one, two):
            node.faults.next("hang", after_events=0)
        await wire.send(stream(max_tokens=2))
        assert (await wire.head()).startswith(b"HTTP/1.1 200 ")
        assert await chunk(wire) == b":\n"
        first, second = (one, two) if one.requests else (two, one)
        await first.kill()
        await until(lambda: second.requests == 1)
        second.faults.release()
        body = await body_of(wire)
        assert body.lstrip(b":\n").startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
        assert one.requests + two.requests == 2


CODEX = [
    "originator: codex_exec",
    "user-agent: codex_cli_rs/0.171.0 (Debian 12.0.0; x86_64) xterm",
    "Originator: Codex Desktop",
]


def numbers(body: bytes) -> list[int]:
    """The numbers of a stream's events, all of which have one."""
    found = re.findall(rb"\ndata: (.*)\n", b"\n" + body)
    return [json.loads(one)["sequence_number"] for one in found]


def keepalive(number: int) -> bytes:
    data = b'{"type":"keepalive","sequence_number":%d}' % number
    return b"event: keepalive\ndata: " + data + b"\n\n"


@pytest.mark.parametrize("line", CODEX)
@in_virtual_time
async def test_codex_gets_events_with_data_and_all_numbers_of_its_stream_follow_each_other(
    tmp_path: Path, line: str
) -> None:
    async with public(tmp_path, BEATING) as gate, raw_connection(gate.url) as wire:
        gate.node.faults.next("hang", after_events=0)
        responses = {**BODIES["/v1/responses"], "stream": True}
        await wire.send(request(responses, line, path="/v1/responses"))
        await wire.head()
        for number in range(3):
            assert await chunk(wire) == keepalive(number)
        gate.node.faults.release()
        body = await body_of(wire)
        found = numbers(body)
        assert found[0] == 3
        assert found == list(range(3, 3 + len(found)))
        assert b"response.completed" in body

        # The silence of a node within a stream.
        gate.node.faults.next("hang", after_events=5)
        await wire.send(request(responses, line, path="/v1/responses"))
        await wire.head()
        begun = b""
        while (said := await chunk(wire)) != keepalive(len(numbers(begun))):
            begun += said
        gate.node.faults.release()
        found = numbers(begun + said + await body_of(wire))
        assert found == list(range(len(found)))

        # Other streams of the same client.
        gate.node.faults.next("hang", after_events=0)
        await wire.send(request({**HELLO, "stream": True}, line))
        await wire.head()
        assert await chunk(wire) == b":\n"


@in_virtual_time
async def test_codex_gets_an_error_behind_heartbeats_with_the_next_number(tmp_path: Path) -> None:
    async with public(tmp_path, BEATING) as gate:
        body = await failing(gate, "/v1/responses", "status", CODEX[0], status=400)
        assert body.startswith(b"event: keepalive\n")
        found = numbers(body)
        assert found == list(range(len(found)))
        assert b"event: error\n" in body


@in_virtual_time
async def test_a_heartbeat_that_a_lagging_client_is_spared_takes_no_number() -> None:
    numbered, written = NumberedHeartbeats(), list[bytes]()
    exchange = SimpleNamespace(
        disconnected=False, write_paused=True, response_started=True, write=written.append,
        set_heartbeat=lambda _: None,
    )  # fmt: skip
    served: Any = SimpleNamespace(
        exchange=exchange, body_stream=None, route=ROUTES["/v1/responses"],
        heartbeat=numbered.heartbeat,
    )  # fmt: skip
    handler: Any = SimpleNamespace(clock=now)
    beating = StreamHeartbeat(served, cast("Any", None), handler, 1.0)
    beating.send_now()
    exchange.write_paused = False
    beating.send_now()
    beating.stop()
    assert written == [keepalive(0)]
