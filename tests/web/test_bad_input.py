"""Invalid input never reaches a node: it gets an error and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

from gateway.app.assembly import Timings
from tests.each_case import each_case
from tests.emulator.raw_connection import raw_connection
from tests.web.raw_client import CHAT, HELLO, Answer, Public, answer, public, request

SMALL = {"limits": {"body_bytes": 200_000, "header_bytes": 8192, "buffered_bytes": 1_000_000}}
CHUNKED = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
PATIENT = Timings(linger=60.0)
"""A refused client is still read from though the machine is slow."""


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Public]:
    async with public(tmp_path_factory.mktemp("gate"), SMALL, timings=PATIENT) as found:
        yield found


def outcome_of(found: Answer) -> tuple[int, str | None]:
    return found.status, found.code


MANY = b"x" * 100_000


@each_case(
    ("body", "code"),
    [
        *((body, "invalid_json") for body in (
            b'{"messages": []} x', b'\xff\xfe{\0"\0m\0"\0:\x001\0}\0', b'{"model": "\xff\xfe"}',
            b'\xef\xbb\xbf\xef\xbb\xbf{"messages": []}', b"\0" * 100)),
        *((body, "invalid_request") for body in (
            b'{"model": "m", "MODEL": "m"}', b'{"mode\\u004c": "m", "model": "m"}',
            b'{"\\u006dodeL": "m"}', b'{"model": "m", "MoDeL": null, "pad": "%b"}' % MANY,
            b'{"mod\\u0065L": 1, "pad": "%b"}' % MANY,
            b'{"tools": [{"type": "mcp", "server_url": "http://10.0.0.1/"}]}',
            b'{"tools": ["%b", {"server_url": "h"}]}' % MANY, b'{"messages": [' + b"[" * 70_000,
            b'{"messages":' + b"[" * 500 + b"]" * 500 + b"}", b'{"n": 1e999}', b'{"n": 33}')),
        *((body, None) for body in (
            b"[" * 90_000, b'{"a":' * 30_000 + b"1" + b"}" * 30_000, b'{"n": %b}' % (b"9" * 400))),
    ],
)  # fmt: skip
async def test_a_body_of_no_use_is_400(gate: Public, body: bytes, code: str | None) -> None:
    gate.forget()
    found = await gate.ask(request(body))
    assert found.status == 400, found
    assert found.code in ({code} if code else {"invalid_json", "invalid_request"})
    assert gate.node.requests == 0
    record = await gate.last()
    assert (record.status, record.reason, record.attempts) == (400, found.code, 0)


@each_case(
    ("fields", "body", "expected"),
    [
        (["X-Priority: huge"], {}, (400, "invalid_request")),
        (["X-Request-Timeout: -1"], {}, (400, "invalid_request")),
        (["X-Request-Timeout: inf"], {}, (400, "invalid_request")),
        (["Content-Encoding: identity, br"], {}, (415, "unsupported_media_type")),
        (["Content-Encoding: identity", "content-encoding:  zstd"], {},
         (415, "unsupported_media_type")),
        ([], {"model": "x" * 100_000}, (404, "model_not_found")),
    ],
)  # fmt: skip
async def test_unknown_models_and_features_are_refused_with_their_status(
    gate: Public, fields: list[str], body: dict[str, object], expected: tuple[int, str]
) -> None:
    found = await gate.ask(request({**HELLO, **body}, *fields))
    assert outcome_of(found) == expected
    assert gate.node.requests == 0
    assert len(found.body) < 2000


NOWHERE = (
    "/nowhere", "/" + "x" * 5000, f"{CHAT}/", f"/{CHAT}", f"/v1/..{CHAT}", "/%ff%fe", "/%00",
    "/v1/chat%2fcompletions", f"{CHAT}%2F",
)  # fmt: skip


@each_case(
    ("method", "path", "expected"),
    [
        *(("POST", path, (404, "not_found")) for path in NOWHERE),
        *(("GET", path, (404, "not_found")) for path in ("/slots", "/metrics", "/", "/health/")),
        ("GET", "/v1/models/../../slots", (404, "model_not_found")),
        ("OPTIONS", "*", (404, "not_found")), ("BREW", CHAT, (400, "invalid_request")),
        *((method, CHAT, (405, "method_not_allowed")) for method in ("GET", "PUT")),
        ("DELETE", "/v1/models", (405, "method_not_allowed")),
        ("CONNECT", "gateway:80", (405, "method_not_allowed")),
    ],
)  # fmt: skip
async def test_wrong_paths_are_404_or_405(
    gate: Public, method: str, path: str, expected: tuple[int, str]
) -> None:
    found = await gate.ask(request(method=method, path=path))
    assert outcome_of(found) == expected
    assert gate.node.requests == 0
    assert len(found.body) < 1000
    if found.status == 405 and path.startswith("/"):
        assert found.headers["allow"] in {"POST", "GET, HEAD"}


@pytest.mark.parametrize("fields", [[], ["Expect: 100-continue"]])
async def test_a_body_declared_too_large_is_413_at_once(gate: Public, fields: list[str]) -> None:
    async with raw_connection(gate.url) as wire:
        await wire.send(request(b"", *fields, length=3_000_000))
        found = await answer(wire)
        assert outcome_of(found) == (413, "request_too_large")
        assert found.headers["connection"] == "close"
        for _ in range(20):
            await wire.send(b"x" * 1000)
            await asyncio.sleep(0)
        assert gate.running.gateway.handler.body_memory.total_bytes == 0
    async with raw_connection(gate.url) as wire:  # a client that sends all before it reads
        await wire.send(request(b"x" * 3_000_000))
        assert outcome_of(await answer(wire)) == (413, "request_too_large")
        assert await wire.rest() == b""


async def test_an_endless_chunked_body_is_413_in_bounded_memory(gate: Public) -> None:
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    async with raw_connection(gate.url) as wire:
        await wire.send(CHUNKED + chunk * 20)
        # A client that reads while it sends sees why.
        assert outcome_of(await answer(wire)) == (413, "request_too_large")
        sent = 0
        with suppress(ConnectionError):
            while sent < 100_000_000:
                await wire.send(chunk)
                sent += len(chunk)
                assert gate.running.gateway.handler.body_memory.total_bytes <= 200_000
        assert sent < 50_000_000
    assert (await gate.last()).status == 413


async def test_other_fields_may_have_names_that_resemble_model(gate: Public) -> None:
    body = {"messages": [{"role": "user", "content": 'a {"Model": 1}, \u00e9', "name": "Model"}]}
    for more in ({"MODELS": 1}, {"metadata": {"Model": "x"}, "padding": "x" * 100_000}):
        assert (await gate.ask(request({**body, **more}))).status == 200


@each_case(
    ("path", "head"),
    [
        (CHAT, b"".join(b"X-%d: %s\r\n" % (number, b"y" * 50) for number in range(1000))),
        (CHAT, b"X: " + b"y" * 20_000 + b"\r\n"), (CHAT, b"X: " + b"y" * 2_000_000),
        (CHAT, b"y" * 300_000), (CHAT, b"a:\r\n" * 300), ("/" + "x" * 10_000, b""),
    ],
)  # fmt: skip
async def test_a_head_that_is_too_large_is_431(gate: Public, path: str, head: bytes) -> None:
    async with raw_connection(gate.url) as wire:
        await wire.send(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode() + head + b"\r\n")
        found = await answer(wire)
        assert outcome_of(found) == (431, "headers_too_large")
        assert found.headers["connection"] == "close"
        assert await wire.rest() == b""


@each_case("path", ["/v1/messages", CHAT, "/completion"])
@each_case(("fields", "body", "outcome"), [
    (["X: " + "y" * 20_000], b"", (431, "headers_too_large")),
    ([], b"{", (400, "invalid_json")),
])  # fmt: skip
async def test_a_refused_head_or_body_gets_the_error_form_of_its_path(
    gate: Public, path: str, fields: list[str], body: bytes, outcome: tuple[int, str]
) -> None:
    found = await gate.ask(request(body, *fields, path=path))
    value = json.loads(found.body)
    assert (found.status, found.headers["x-gateway-reason"]) == outcome
    assert found.headers["content-type"] == "application/json"
    if path == "/v1/messages":
        assert (value["type"], value["error"]["type"]) == ("error", "invalid_request_error")
        assert value["request_id"] == found.headers["request-id"] == found.headers["x-request-id"]
    else:
        assert set(value["error"]) == {"message", "type", "param", "code"}
        assert "request-id" not in found.headers


@each_case(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), b"hello there\r\n\r\n",
        b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 100,
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)  # fmt: skip
async def test_bytes_that_are_not_http_are_400_in_json(gate: Public, data: bytes) -> None:
    """Beside those whose meaning two parsers might see differently: tests/http/smuggling.py."""
    async with raw_connection(gate.url) as wire:
        await wire.send(data)
        found = await answer(wire)
        assert outcome_of(found) == (400, "invalid_request")
        assert found.headers["connection"] == "close"
        assert await wire.rest() == b""


async def test_trailers_are_limited_and_ignored(gate: Public) -> None:
    """Neither in their own request, nor in one that repeats its head."""
    async with raw_connection(gate.url) as wire:
        await wire.send(CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X-Name: value\r\n" * 10_000)
        assert outcome_of(await answer(wire)) == (431, "headers_too_large")
    assert gate.node.requests == 0
    data = json.dumps({**HELLO, "max_tokens": 1}).encode()
    said = b"X-Priority: batch\r\nX-Request-ID: theirs\r\nConnection: close\r\nX-Own: 1\r\n"
    whole = CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(data), data) + said + b"\r\n"
    async with raw_connection(gate.url) as wire:
        for pieces in ([whole], [whole[:-100], whole[-100:]], [whole[:-1], whole[-1:]]):
            for piece in pieces:
                await wire.send(piece)
                await asyncio.sleep(0.01)
            found = await answer(wire)
            assert (found.status, found.headers["x-gateway-class"]) == (200, "normal")
            assert found.headers["x-request-id"] != "theirs"
            assert "x-own" not in gate.node.seen[-1].headers


async def test_a_request_before_a_broken_one_is_answered(gate: Public) -> None:
    gate.node.faults.next("hang", seconds=0.2)
    async with raw_connection(gate.url) as wire:
        await wire.send(request({**HELLO, "max_tokens": 1}) + b"garbage\r\n\r\n")
        assert (await answer(wire)).status == 200
        assert outcome_of(await answer(wire)) == (400, "invalid_request")
        assert await wire.rest() == b""


async def test_an_http_1_0_client_gets_no_chunks(gate: Public) -> None:
    for stream in (False, True):
        data = request({**HELLO, "max_tokens": 3, "stream": stream}).replace(b"1.1", b"1.0", 1)
        async with raw_connection(gate.url) as wire:
            await wire.send(data)
            found = await answer(wire)
            assert found.status == 200
            assert found.headers["connection"] == "close"
            assert "transfer-encoding" not in found.headers
            assert found.body.endswith(b"data: [DONE]\n\n" if stream else b"}")
            assert await wire.rest() == b""


@each_case(
    "path", [f"http://localhost{CHAT}", f"HTTP://127.0.0.1:80{CHAT}?x=y", "/v1/chat/%63ompletions"]
)
async def test_a_path_may_have_a_query_escapes_or_a_host(gate: Public, path: str) -> None:
    gate.forget()
    found = await gate.ask(request({**HELLO, "max_tokens": 1}, path=path))
    assert found.status == 200
    assert gate.node.seen[-1].path == CHAT
    assert gate.node.seen[-1].query == ""


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_an_upgrade_request_is_served_as_plain_http(gate: Public, protocol: str) -> None:
    fields = ["Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAM"]
    data = request({**HELLO, "max_tokens": 1, "padding": "x" * 100_000}, *fields)
    async with raw_connection(gate.url) as wire:
        for start in range(0, len(data), 30_000):
            await wire.send(data[start : start + 30_000])
            await asyncio.sleep(0.01)
        assert (await answer(wire)).status == 200
        await wire.send(request({**HELLO, "max_tokens": 1}))
        assert (await answer(wire)).status == 200
    seen = gate.node.seen[0]
    assert not {"upgrade", "http2-settings"} & set(seen.headers)
    assert len(seen.body) > 100_000
