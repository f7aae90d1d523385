"""Signs of life for clients that wait: heartbeats, and progress for those that ask."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.app.assembly import Timings
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import RawConnection, raw_connection, unchunk
from tests.forward.proxy_over_nodes import BODIES, prompt_field
from tests.gateways import until
from tests.virtual import in_virtual_time
from tests.web.raw_client import CHAT, HELLO, Public, public, request

BEATING = {"heartbeat": 0.1, "health": {"interval": 0.2}, "retries": {"backoff": 0.01}}
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def stream(path: str = CHAT, **more: Any) -> bytes:
    return request({**BODIES[path], "stream": True, **more}, path=path)


async def chunk(wire: RawConnection) -> bytes:
    size = int(await wire.until(b"\r\n"), 16)
    async with asyncio.timeout(30.0):
        return (await wire.reader.readexactly(size + 2))[:-2]


async def body_of(wire: RawConnection) -> bytes:
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += await wire.until(b"\r\n")
    return unchunk(data)


@pytest.mark.parametrize("path", BODIES)
@in_virtual_time
async def test_a_queued_and_a_silent_stream_get_heartbeats(tmp_path: Path, path: str) -> None:
    async with public(tmp_path, BEATING) as gate:
        beat = PING if path == "/v1/messages" else b":\n"
        gate.node.faults.next("hang", after_events=0)
        async with raw_connection(gate.url) as wire:
            await wire.send(stream(path, max_tokens=3))
            head = await wire.head()
            assert head.startswith(b"HTTP/1.1 200 ")
            own = b"\r\nrequest-id: req_" in head
            assert own == (path == "/v1/messages")
            for known in (b"content-type: text/event-stream", b"x-accel-buffering: no",
                          b"x-request-id: req_", b"x-gateway-class: normal"):  # fmt: skip
                assert known in head
            # Other nodes may yet be tried, so none is named.
            for unknown in (b"attempts", b"queue-ms", b"node", b"tier"):
                assert b"x-gateway-" + unknown not in head
            for _ in range(3):
                assert await chunk(wire) == beat
            gate.node.faults.release()
            body = await body_of(wire)
        rest = behind_heartbeats(body)
        assert b"event: ping" not in rest
        assert rest.startswith((b"data: {", b"event: "))
        assert rest.endswith(b"\n\n")
        record = await gate.last()
        assert (record.status, record.stream) == (200, True)
        assert record.ttft == pytest.approx(0.3), "a sign of life is no content"

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


def behind_heartbeats(body: bytes) -> bytes:
    while body.startswith(PING):
        body = body.removeprefix(PING)
    return body.lstrip(b":\n")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("status", "said", "recorded"),
    [
        (400, ("Bad request", "invalid_request_error"), (400, "node_error")),
        (404, ("refused it", "api_error"), (502, "node_failed")),
    ],
)
@in_virtual_time
async def test_after_a_heartbeat_an_error_is_an_event_and_keeps_its_status_in_the_record(
    tmp_path: Path, path: str, status: int, said: tuple[str, str], recorded: tuple[int, str]
) -> None:
    async with public(tmp_path, BEATING) as gate:
        body = await failing(gate, path, "status", status=status)
        outcome_of(path, behind_heartbeats(body), *said)
        record = await gate.last()
        assert (record.status, record.reason) == recorded


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


CODEX = ["originator: codex_exec", "user-agent: codex_cli_rs/0.171.0 (Debian 12.0.0; x86_64) xterm"]


def numbers(body: bytes) -> list[int]:
    """The numbers of a stream's events, all of which have one."""
    found = re.findall(rb"\ndata: (.*)\n", b"\n" + body)
    return [json.loads(one)["sequence_number"] for one in found]


def keepalive(number: int) -> bytes:
    data = b'{"type":"keepalive","sequence_number":%d}' % number
    return b"event: keepalive\ndata: " + data + b"\n\n"


@pytest.mark.parametrize("line", CODEX)
@in_virtual_time
async def test_codex_gets_numbered_events_as_heartbeats(tmp_path: Path, line: str) -> None:
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
        gate.node.faults.release()

        # An error has the next number.
        failed = await failing(gate, "/v1/responses", "status", line, status=400)
        assert failed.startswith(b"event: keepalive\n")
        assert numbers(failed) == list(range(len(numbers(failed))))
        assert b"event: error\n" in failed


LINE = re.compile(rb": queued position=(\d+) expected_start=(\d+\.\d)\n")
OFF: dict[str, Any] = {"heartbeat": "off", "health": {"interval": 0.5}}
ASKING = "X-Gateway-Progress: 1"


def slow() -> EmulatedNode:
    return EmulatedNode(slots=1, decode_tps=12.0)


def events_of(data: bytes) -> list[bytes]:
    """The events that an SSE parser finds: it ignores comments."""
    lines = [line for line in data.split(b"\n") if not line.startswith(b":")]
    return [event for event in b"\n".join(lines).split(b"\n\n") if event.strip()]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/completion"])
@in_virtual_time
async def test_a_queued_client_learns_its_place_in_the_queue(tmp_path: Path, path: str) -> None:
    async with public(tmp_path, OFF, slow()) as gate:
        first = asyncio.create_task(gate.chat(max_tokens=30))
        await until(lambda: gate.node.busy == 1)
        body = {**BODIES[path], "stream": True, "max_tokens": 3, "n_predict": 3}
        result = (await gate.ask(request(body, ASKING, path=path))).body
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


LONG = "word " * 600
READ = re.compile(rb": prefill percent=(\d+) processed=(\d+) total=(\d+)\n")
RECKONED = re.compile(rb": prefill percent=(\d+) estimated=1\n")
TELLING = [path for path in (*BODIES, "/infill") if path != "/v1/messages"]
ENDS = {"/v1/responses": "max_output_tokens", "/completion": "n_predict", "/infill": "n_predict"}


OFTEN = Timings(progress=0.1)
"""Frequent comments, so that a prompt need not take long."""


def reading(**more: Any) -> EmulatedNode:
    """A node that reads a long prompt in 0.8 s and reports progress some eight times."""
    return EmulatedNode(prefill_tps=750.0, batch=80, infill=True, **more)


def a_long(path: str, **more: Any) -> dict[str, Any]:
    infill = {"input_prefix": LONG, "input_suffix": "x"}
    prompt = infill if path == "/infill" else prompt_field(path, LONG)
    return {**prompt, ENDS.get(path, "max_tokens"): 3, "stream": True, **more}


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
async def test_without_events_progress_is_estimated_from_speed(tmp_path: Path) -> None:
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
async def test_a_plain_response_has_neither_heartbeats_nor_progress(tmp_path: Path) -> None:
    async with public(tmp_path, BEATING, slow()) as gate:
        found = await asyncio.gather(*(gate.chat(ASKING, max_tokens=9) for _ in range(2)))
        assert [one.status for one in found] == [200, 200]
        assert all(one.body.startswith(b"{") for one in found)
