from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import httpx
import pytest

from tests.emulator import EmulatedNode, expected_chat_text
from tests.emulator.faults import GARBAGE, INSERTIONS, POINT_FAULTS, RESPONSE_FAULTS
from tests.emulator.raw_connection import chat, events, post, raw_connection, text_of, unchunk
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
ASK = post(CHAT, chat(max_tokens=4))
PLAIN = post(CHAT, chat(max_tokens=4, stream=False))
EVENTS = 7  # role, 4 words, end, [DONE]


async def bytes_of(node: EmulatedNode, request: bytes = ASK) -> bytes:
    async with raw_connection(node.url) as wire:
        await wire.send(request)
        return await wire.rest()


@in_virtual_time
async def test_faults_apply_to_so_many_requests_or_until_cleared_and_to_their_path_alone() -> None:
    async with EmulatedNode() as node, httpx.AsyncClient(base_url=node.url) as client:
        node.faults.next("status", 2, status=500)
        node.faults.next("status", status=429, headers={"Retry-After": "7"})
        replies = [await client.post(CHAT, json=chat()) for _ in range(4)]
        assert [reply.status_code for reply in replies] == [500, 500, 429, 200]
        assert (replies[2].headers["retry-after"], node.faults.fired) == ("7", 3)
        node.faults.set("status", status=502, body="<html>bad</html>")
        node.faults.set("status", status=500, path="/slots")
        for _ in range(3):
            assert (await client.post(CHAT, json=chat())).text == "<html>bad</html>"
        assert (await client.get("/slots")).status_code == 500
        assert (await client.get("/health")).status_code == 200
        node.faults.clear()
        assert (await client.post(CHAT, json=chat())).status_code == 200


def ended(seen: bytes) -> bool:
    return seen.endswith(b"\r\n0\r\n\r\n")


def broke_off(seen: bytes, after: int) -> bool:
    return len(events(seen)) == after and not ended(seen)


def whole(seen: bytes) -> bool:
    return text_of(events(unchunk(seen.partition(b"\r\n\r\n")[2]))) == expected_chat_text(HELLO, 4)


def missing(seen: bytes) -> int:
    """Bytes of a plain body that its head has promised and that have not come."""
    head, _, body = seen.partition(b"\r\n\r\n")
    return int(head.partition(b"Content-Length: ")[2].split()[0]) - len(body)


def streamed(path: str) -> bytes:
    return post(path, {"messages": HELLO, "prompt": "hello", "stream": True})


ERROR = b'\ndata: {"error":{"code":500'
NAMED_ERROR = b'event: error\ndata: {"code":500'
LINK = b"HTTP/1.1 103 Interim\r\nLink: <a>\r\n\r\n"
WRONG = post(CHAT, {"messages": 1})


def count(seen: bytes, mark: bytes) -> int:
    return unchunk(seen.partition(b"\r\n\r\n")[2]).count(mark)


def has(data: bytes, seen: bytes) -> bool:
    return count(seen, data) >= 1


@pytest.mark.parametrize(
    ("kind", "options", "request_bytes", "is_so"),
    [
        ("close", {}, ASK, lambda seen: seen == b""),
        ("close", {"after_events": 0}, ASK, lambda seen: b" 200 OK" in seen),
        ("close", {"after_events": 3}, ASK, lambda seen: broke_off(seen, 3)),
        ("close", {"after_events": 1}, WRONG, lambda seen: b" 400 " in seen and missing(seen) > 0),
        ("cut", {"after_events": 2}, ASK, lambda seen: not seen.endswith(b"\n\n\r\n")),
        ("cut", {}, PLAIN, lambda seen: missing(seen) > 0),
        ("end", {"after_events": 3}, ASK, lambda seen: len(events(seen)) == 3 and ended(seen)),
        ("hang", {"after_events": 2, "seconds": 0.1}, ASK, whole),
        ("garbage", {}, ASK, lambda seen: seen == GARBAGE),
        ("garbage_body", {"after_events": 2}, ASK, lambda seen: seen.endswith(GARBAGE)),
        ("garbage_body", {"after_events": 2}, PLAIN, lambda seen: b"choices" not in seen),
        ("insert", {"what": "huge", "size": 3_000_000}, ASK, lambda seen: len(seen) > 3_000_000),
        *(("insert", {"what": what, "after_events": 3}, ASK, partial(has, data))
          for what, data in INSERTIONS.items()),
        ("error_event", {"after_events": 2}, ASK, lambda seen: ERROR in seen and ended(seen)),
        ("error_event", {}, streamed("/v1/messages"), lambda seen: NAMED_ERROR in seen),
        ("crlf", {}, ASK, lambda seen: count(seen, b"\r\n\r\n") == EVENTS),
        ("comments", {}, ASK, lambda seen: count(seen, b"\n\n:\n\n") == EVENTS),
        ("double_done", {}, ASK, lambda seen: seen.count(b"[DONE]") == 2 and whole(seen)),
        ("no_done", {}, ASK, lambda seen: b"[DONE]" not in seen and whole(seen)),
        ("head_bomb", {"count": 5000}, ASK, lambda seen: seen.count(b"X-Bomb-") == 5000),
        ("interim", {"count": 3, "headers": {"Link": "<a>"}}, ASK,
         lambda seen: seen.startswith(LINK * 3 + b"HTTP/1.1 200 OK\r\n")),
        ("wrong_length", {"delta": 10}, PLAIN, lambda seen: missing(seen) == 10),
        ("chunk_extensions", {}, ASK,
         lambda seen: b";node=emulated\r\n" in seen and seen.endswith(b"X-Checked: yes\r\n\r\n")),
    ],
)  # fmt: skip
@in_virtual_time
async def test_a_fault_shows_in_the_bytes_of_its_response(
    kind: str, options: dict[str, Any], request_bytes: bytes, is_so: Callable[[bytes], bool]
) -> None:
    async with EmulatedNode() as node:
        node.faults.next(kind, **options)
        seen = await bytes_of(node, request_bytes)
        assert is_so(seen), seen


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
