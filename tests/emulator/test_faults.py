from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from itertools import product
from typing import Any

import httpx
import pytest

from tests.emulator import EmulatedNode, expected_chat_text
from tests.emulator.faults import GARBAGE, INSERTIONS, POINT_FAULTS, RESPONSE_FAULTS, FaultPlan
from tests.emulator.raw_connection import (
    RawConnection,
    chat,
    events,
    post,
    raw_connection,
    text_of,
    unchunk,
)
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
ASK = post(CHAT, chat(max_tokens=4))
PLAIN = post(CHAT, chat(max_tokens=4, stream=False))
EVENTS = 7  # role, 4 words, end, [DONE]


async def bytes_of(node: EmulatedNode, request: bytes = ASK) -> bytes:
    """All bytes of a response up to the end of its connection."""
    async with raw_connection(node.url) as wire:
        await wire.send(request)
        return await wire.rest()


async def body_of(node: EmulatedNode) -> bytes:
    return unchunk((await bytes_of(node)).partition(b"\r\n\r\n")[2])


async def cut_off(wire: RawConnection, request: bytes = ASK) -> bytes:
    """All bytes before the connection is reset."""
    await wire.send(request)
    seen = b""
    try:
        while piece := await wire.some():
            seen += piece
    except ConnectionResetError:
        return seen
    raise AssertionError("it ended without a reset")


def test_the_error_for_an_unknown_fault_lists_the_known_ones() -> None:
    plan = FaultPlan()
    with pytest.raises(ValueError, match="no fault 'rset'; there are: hang, reset"):
        plan.next("rset")
    with pytest.raises(ValueError, match="afterevents"):
        plan.next("reset", afterevents=3)
    with pytest.raises(ValueError, match="needs a status"):
        plan.next("status")
    with pytest.raises(ValueError, match="no insertion"):
        plan.next("insert", what="nonsense")


@in_virtual_time
async def test_faults_apply_to_the_next_requests_only() -> None:
    async with EmulatedNode() as node, httpx.AsyncClient() as client:
        node.faults.next("status", 2, status=500)
        node.faults.next("status", status=429, headers={"Retry-After": "7"})
        replies = [await client.post(node.url + CHAT, json=chat()) for _ in range(4)]
        assert [reply.status_code for reply in replies] == [500, 500, 429, 200]
        assert replies[2].headers["retry-after"] == "7"
        assert node.faults.fired == 3


@in_virtual_time
async def test_a_standing_fault_stays_until_cleared_and_does_not_apply_to_probes() -> None:
    async with EmulatedNode() as node, httpx.AsyncClient(base_url=node.url) as client:
        node.faults.set("status", status=502, body="<html>bad</html>")
        for _ in range(3):
            assert (await client.post(CHAT, json=chat())).text == "<html>bad</html>"
            assert (await client.get("/health")).status_code == 200
        node.faults.clear()
        assert (await client.post(CHAT, json=chat())).status_code == 200


@in_virtual_time
async def test_a_fault_may_be_bound_to_a_path() -> None:
    async with EmulatedNode() as node, httpx.AsyncClient(base_url=node.url) as client:
        node.faults.set("status", status=500, path="/slots")
        node.faults.set("status", status=404, path="/v1/completions")
        assert (await client.get("/slots")).status_code == 500
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 404
        assert (await client.post(CHAT, json=chat())).status_code == 200


@pytest.mark.parametrize("status", [400, 401, 404, 503])
@in_virtual_time
async def test_any_status_has_an_error_body(status: int) -> None:
    async with EmulatedNode() as node, httpx.AsyncClient() as client:
        node.faults.next("status", status=status)
        reply = await client.post(node.url + CHAT, json=chat())
        assert reply.status_code == reply.json()["error"]["code"] == status
        assert node.peak_busy == 0


@in_virtual_time
async def test_a_loading_node_answers_so_on_every_path() -> None:
    async with EmulatedNode() as node, httpx.AsyncClient(base_url=node.url) as client:
        node.faults.set("loading")
        assert (await client.get("/health")).json()["error"]["message"] == "Loading model"
        assert (await client.post(CHAT, json=chat())).status_code == 503


@pytest.mark.parametrize("request_bytes", [ASK, PLAIN])
@in_virtual_time
async def test_a_reset_may_come_before_the_head(request_bytes: bytes) -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        node.faults.next("reset")
        assert await cut_off(wire, request_bytes) == b""
        await node.until(lambda: node.busy == 0)


@in_virtual_time
async def test_a_reset_may_come_after_some_events() -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        node.faults.next("reset", after_events=3)
        seen = await cut_off(wire)
        assert len(events(seen)) == 3
        assert text_of(events(seen)) == expected_chat_text(HELLO, 2)


@in_virtual_time
async def test_a_reset_may_come_in_the_middle_of_a_plain_body() -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        node.faults.next("reset", after_events=1)
        head, _, body = (await cut_off(wire, PLAIN)).partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split()[0])
        assert 0 < len(body) < size


@pytest.mark.parametrize("after", [None, 0, 3, EVENTS])
@in_virtual_time
async def test_a_close_leaves_the_body_unfinished(after: int | None) -> None:
    async with EmulatedNode() as node:
        node.faults.next("close", after_events=after)
        seen = await bytes_of(node)
        assert (b"HTTP/1.1 200 OK" in seen) == (after is not None)
        assert len(events(seen)) == (after or 0)
        assert not seen.endswith(b"\r\n0\r\n\r\n")


@in_virtual_time
async def test_a_chunk_may_be_cut_in_half() -> None:
    async with EmulatedNode() as node:
        node.faults.next("cut", after_events=2)
        body = (await bytes_of(node)).partition(b"\r\n\r\n")[2]
        *whole, half = body.split(b"\n\n\r\n")
        assert len(whole) == 2
        size, _, data = half.partition(b"\r\n")
        assert 0 < len(data) < int(size, 16)
        with pytest.raises(json.JSONDecodeError):
            json.loads(data.removeprefix(b"data: "))


@in_virtual_time
async def test_a_body_may_end_properly_without_the_answer_s_end() -> None:
    async with EmulatedNode() as node:
        node.faults.next("end", after_events=3)
        assert len(events(await body_of(node))) == 3


@pytest.mark.parametrize("request_bytes", [ASK, PLAIN])
@in_virtual_time
async def test_a_hang_before_the_head_holds_a_slot_until_the_client_leaves(
    request_bytes: bytes,
) -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        node.faults.next("hang")
        await wire.send(request_bytes)
        await node.until(lambda: node.busy == 1)
        with pytest.raises(TimeoutError):
            await wire.some(0.05)
        await wire.leave()
        await node.until(lambda: node.busy == 0)


@pytest.mark.parametrize("after", [0, 3])
@in_virtual_time
async def test_a_hanging_stream_continues_when_released(after: int) -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        node.faults.next("hang", after_events=after)
        await wire.send(ASK)
        await wire.head()
        seen = b"".join([await wire.until(b"\n\n\r\n") for _ in range(after)])
        with pytest.raises(TimeoutError):
            await wire.some(0.05)
        node.faults.release()
        assert text_of(events(unchunk(seen + await wire.rest()))) == expected_chat_text(HELLO, 4)


@in_virtual_time
async def test_a_hang_may_have_a_duration() -> None:
    async with EmulatedNode() as node:
        node.faults.next("hang", after_events=2, seconds=0.1)
        began = asyncio.get_running_loop().time()
        assert text_of(events(await body_of(node))) == expected_chat_text(HELLO, 4)
        assert asyncio.get_running_loop().time() - began > 0.09


@in_virtual_time
async def test_a_node_without_control_endpoints_still_generates() -> None:
    async with EmulatedNode() as node, httpx.AsyncClient(base_url=node.url) as client:
        node.faults.set("mute")
        for path in ("/health", "/slots", "/props", "/metrics", "/v1/models"):
            with pytest.raises(httpx.ReadTimeout):
                await client.get(path, timeout=0.05)
        assert (await client.post(CHAT, json=chat())).status_code == 200
        node.faults.clear()
        assert (await client.get("/health")).status_code == 200


@in_virtual_time
async def test_a_stale_connection_is_reset_when_it_is_reused() -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        node.faults.set("stale")
        await wire.send(PLAIN)
        head = await wire.head()
        assert b"200 OK" in head
        await wire.reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
        assert await cut_off(wire, PLAIN) == b""
        assert [request.reused for request in node.seen] == [False, True]
        assert b"200 OK" in await bytes_of(node)


@in_virtual_time
async def test_an_error_reply_may_be_cut_too() -> None:
    async with EmulatedNode() as node:
        node.faults.next("close", after_events=1)
        head, _, body = (await bytes_of(node, post(CHAT, {"messages": 1}))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        with pytest.raises(json.JSONDecodeError):
            json.loads(body)


@in_virtual_time
async def test_garbage_may_come_instead_of_http() -> None:
    async with EmulatedNode() as node:
        node.faults.next("garbage")
        assert await bytes_of(node) == GARBAGE


@in_virtual_time
async def test_garbage_may_break_the_chunks() -> None:
    async with EmulatedNode() as node:
        node.faults.next("garbage_body", after_events=2)
        seen = await bytes_of(node)
        assert seen.endswith(GARBAGE)
        with pytest.raises(ValueError, match="invalid literal"):
            unchunk(seen.partition(b"\r\n\r\n")[2])


@in_virtual_time
async def test_garbage_may_fill_a_plain_body() -> None:
    async with EmulatedNode() as node, httpx.AsyncClient() as client:
        node.faults.next("garbage_body", after_events=2)
        reply = await client.post(node.url + CHAT, json=chat(stream=False))
        assert reply.status_code == 200
        with pytest.raises(ValueError):
            reply.json()


@pytest.mark.parametrize("what", INSERTIONS)
@in_virtual_time
async def test_odd_events_may_come_between_the_others(what: str) -> None:
    async with EmulatedNode() as node:
        node.faults.next("insert", what=what, after_events=3)
        body = await body_of(node)
        assert body.count(INSERTIONS[what]) >= 1
        if what not in {"not_json", "invalid_utf8", "null", "half"}:
            assert text_of(events(body)) == expected_chat_text(HELLO, 4)


@in_virtual_time
async def test_an_enormous_event_may_come() -> None:
    async with EmulatedNode() as node:
        node.faults.next("insert", what="huge", size=3_000_000, after_events=1)
        sizes = [len(event) for event in (await body_of(node)).split(b"\n\n")]
        assert sizes[1] > 3_000_000 > sizes[0]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/completion"])
@in_virtual_time
async def test_an_error_may_come_in_the_stream(path: str) -> None:
    body: dict[str, Any] = {"prompt": "hello"} if path == "/completion" else {"messages": HELLO}
    async with EmulatedNode() as node:
        node.faults.next("error_event", after_events=2)
        seen = await bytes_of(node, post(path, body | {"stream": True}))
        last = unchunk(seen.partition(b"\r\n\r\n")[2]).split(b"\n\n")[-2]
    if path == "/v1/messages":
        assert last.startswith(b'event: error\ndata: {"code":500')
    else:
        assert last.startswith(b'data: {"error":{"code":500')


@in_virtual_time
async def test_lines_may_end_with_crlf() -> None:
    async with EmulatedNode() as node:
        node.faults.next("crlf")
        body = await body_of(node)
        assert body.count(b"\r\n\r\n") == EVENTS
        assert body.replace(b"\r\n", b"").count(b"\n") == 0


@in_virtual_time
async def test_comments_may_follow_events() -> None:
    async with EmulatedNode() as node:
        node.faults.next("comments")
        assert (await body_of(node)).count(b"\n\n:\n\n") == EVENTS


@in_virtual_time
async def test_an_event_may_come_in_many_segments() -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        node.faults.next("split", size=5)
        await wire.send(ASK)
        await wire.head()
        pieces = []
        while piece := await wire.some():
            pieces.append(piece)
        assert len(pieces) > 50
        assert text_of(events(unchunk(b"".join(pieces)))) == expected_chat_text(HELLO, 4)


@in_virtual_time
async def test_many_events_may_come_in_one_segment() -> None:
    async with EmulatedNode(decode_tps=100) as node, raw_connection(node.url) as wire:
        node.faults.next("merge", count=EVENTS)
        await wire.send(ASK)
        await wire.head()
        assert (await wire.some()).count(b"data: ") == EVENTS


@pytest.mark.parametrize(("kind", "times"), [("double_done", 2), ("no_done", 0)])
@in_virtual_time
async def test_done_may_come_twice_or_never(kind: str, times: int) -> None:
    async with EmulatedNode() as node:
        node.faults.next(kind)
        body = await body_of(node)
        assert body.count(b"data: [DONE]\n\n") == times
        assert text_of(events(body)) == expected_chat_text(HELLO, 4)


@in_virtual_time
async def test_no_done_leaves_out_the_last_event_of_any_api() -> None:
    async with EmulatedNode() as node:
        node.faults.set("no_done")
        seen = await bytes_of(node, post("/v1/messages", {"messages": HELLO, "stream": True}))
        assert b"message_delta" in seen
        assert b"message_stop" not in seen


@pytest.mark.parametrize("kind", ["slow_head", "trickle"])
@in_virtual_time
async def test_a_head_may_come_byte_by_byte(kind: str) -> None:
    async with EmulatedNode() as node, raw_connection(node.url) as wire:
        node.faults.next(kind, seconds=0.002)
        await wire.send(ASK)
        assert all([len(await wire.some()) < 20 for _ in range(10)])


@in_virtual_time
async def test_a_head_may_be_enormous() -> None:
    async with EmulatedNode() as node:
        node.faults.next("head_bomb", count=5000)
        assert (await bytes_of(node)).count(b"X-Bomb-") == 5000
        node.faults.next("head_bomb", count=1, size=1 << 20)
        request = post(CHAT, chat(stream=False), "Connection: close\r\n")
        assert len((await bytes_of(node, request)).partition(b"\r\n\r\n")[0]) > 1 << 20


@in_virtual_time
async def test_interim_responses_may_come_first() -> None:
    async with EmulatedNode() as node, httpx.AsyncClient() as client:
        node.faults.next("interim", count=3, headers={"Link": "<a>"})
        assert (await bytes_of(node)).startswith(
            b"HTTP/1.1 103 Interim\r\nLink: <a>\r\n\r\n" * 3 + b"HTTP/1.1 200 OK\r\n"
        )
        node.faults.next("interim", status=100)
        assert (await client.post(node.url + CHAT, json=chat())).status_code == 200


@in_virtual_time
async def test_a_plain_body_may_be_cut_in_half() -> None:
    async with EmulatedNode() as node:
        node.faults.next("cut")
        head, _, body = (await bytes_of(node, PLAIN)).partition(b"\r\n\r\n")
        assert len(body) == int(head.partition(b"Content-Length: ")[2].split()[0]) // 2


@pytest.mark.parametrize("delta", [10, -10])
@in_virtual_time
async def test_a_content_length_may_be_wrong(delta: int) -> None:
    async with EmulatedNode() as node:
        node.faults.next("wrong_length", delta=delta)
        head, _, body = (await bytes_of(node, PLAIN)).partition(b"\r\n\r\n")
        declared = int(head.partition(b"Content-Length: ")[2].split()[0])
        assert declared - len(body) == delta
        assert json.loads(body)


@in_virtual_time
async def test_chunks_may_have_extensions_and_a_trailer() -> None:
    async with EmulatedNode() as node, httpx.AsyncClient() as client:
        node.faults.set("chunk_extensions")
        seen = await bytes_of(node)
        assert b";node=emulated\r\n" in seen
        assert seen.endswith(b"\r\n0\r\nX-Checked: yes\r\n\r\n")
        for stream in (True, False):
            reply = await client.post(node.url + CHAT, json=chat(stream=stream))
            assert expected_chat_text(HELLO, 1) in reply.text


@pytest.mark.parametrize("kind", [*POINT_FAULTS, *RESPONSE_FAULTS])
@in_virtual_time
async def test_after_every_fault_the_node_works_as_before(kind: str) -> None:
    options: dict[str, Any] = {"status": 500} if kind == "status" else {}
    async with EmulatedNode() as node:
        for stream, after in product((True, False), (None, 0, 2)):
            node.faults.next(kind, after_events=after, seconds=0.001, size=64, **options)
            request = post(CHAT, chat(stream=stream, max_tokens=3), "Connection: close\r\n")
            with suppress(ConnectionResetError):
                await bytes_of(node, request)
        async with httpx.AsyncClient(base_url=node.url) as client:
            reply = await client.post(CHAT, json=chat(stream=False, max_tokens=4))
        assert reply.json()["choices"][0]["message"]["content"] == expected_chat_text(HELLO, 4)
        assert (node.busy, node.failures, node.faults.fired) == (0, [], 6)


@in_virtual_time
async def test_no_other_socket_gets_the_port_of_a_node_that_is_down() -> None:
    async with EmulatedNode() as node:
        await node.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((node.host, node.port))
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(node.host, node.port)
        await node.revive()
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{node.url}/health")).status_code == 200
