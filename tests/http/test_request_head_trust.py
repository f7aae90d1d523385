"""Which callers of a loopback listener are trusted as local, and which web pages are not."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.callers.keys import new_key
from gateway.config.settings import Settings
from gateway.http.heads import OriginPolicy
from tests.each_case import each_case
from tests.emulator.raw_connection import raw_connection
from tests.web.raw_client import CHAT, HELLO, Answer, Public, answer, public, request

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHORT = {**HELLO, "max_tokens": 1}
KEY = new_key("someone")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Public]:
    settings = {
        "listen": {"hosts": ["chat.internal", "192.0.2.7"]},
        "cors": {"origins": ["https://chat.example"]},
    }
    async with public(tmp_path_factory.mktemp("gate"), settings) as found:
        yield found


def asking(host: str, *fields: str, path: str = CHAT, method: str = "POST") -> bytes:
    body = SHORT if method == "POST" else b""
    return request(body, *fields, path=path, method=method).replace(
        b"Host: localhost", f"Host: {host}".encode(), 1
    )


def outcome_of(found: Answer) -> tuple[int, str | None]:
    return found.status, found.headers.get("x-gateway-reason")


@each_case(
    "host",
    [
        "localhost", "LocalHost:8000", "localhost.", "llm.localhost:9", "127.0.0.1", "127.8.9.1:80",
        "[::1]:8000", "[::ffff:127.0.0.1]", "chat.internal", "CHAT.internal:443", "192.0.2.7",
        "host.docker.internal:8000", "host.containers.internal", socket.gethostname(),
    ],
)  # fmt: skip
@each_case("absolute", [False, True])
async def test_the_listeners_own_hosts_are_allowed(gate: Public, host: str, absolute: bool) -> None:
    data = asking("evil.example", path=f"http://{host}{CHAT}") if absolute else asking(host)
    assert (await gate.ask(data)).status == 200


async def test_the_port_may_be_empty_and_an_http_1_0_client_needs_no_host(gate: Public) -> None:
    for data in (asking("localhost:"), b"GET /health HTTP/1.0\r\n\r\n"):
        assert (await gate.ask(data)).status == 200


@each_case(
    "host",
    [
        "evil.example", "evil", "127.0.0.1.evil.example", "localhost.evil.example",
        "docker.internal", "evil.docker.internal", "xlocalhost", "10.0.0.1", "0.0.0.0", "[::]",
        "[fe80::1]", "2130706433", "0x7f.1",
    ],
)  # fmt: skip
@each_case("form", ["host", "absolute", "models"])
async def test_a_foreign_name_that_resolves_to_this_machine_is_refused(
    gate: Public, host: str, form: str
) -> None:
    gate.forget()
    data = {
        "host": asking(host),
        "absolute": asking("localhost", path=f"http://{host}:8000{CHAT}"),
        "models": asking(host, path="/v1/models", method="GET"),
    }[form]
    async with raw_connection(gate.url) as wire:
        await wire.send(asking("localhost"))
        assert (await answer(wire)).status == 200
        for _ in range(2):
            await wire.send(data)
            found = await answer(wire)
            assert outcome_of(found) == (403, "host_not_allowed")
            assert b"listen.hosts" in found.body
        await wire.send(asking("localhost"))
        assert (await answer(wire)).status == 200
    assert gate.node.requests == 2


@each_case(
    "lines",
    [
        "", "Host: localhost\r\nHost: localhost\r\n", "Host: localhost\r\nhost: evil.example\r\n",
        "Host:\r\n", "Host: a b\r\n", "Host: localhost, evil.example\r\n",
        "Host: localhost/path\r\n", "Host: user@localhost\r\n", "Host: [::1\r\n",
        "Host: localhost:http\r\n", "Host: http://localhost\r\n", "Host: \xff\r\n",
    ],
)  # fmt: skip
@each_case("start", [f"POST {CHAT}", f"POST http://localhost{CHAT}", "GET /health"])
async def test_a_request_without_host_or_with_several_is_400(
    gate: Public, lines: str, start: str
) -> None:
    data = f"{start} HTTP/1.1\r\n{lines}Content-Length: 2\r\n\r\n{{}}"
    async with raw_connection(gate.url) as wire:
        await wire.send(data.encode("latin-1"))
        found = await answer(wire)
        assert outcome_of(found) == (400, "invalid_request")
        assert "ost" in found.body.decode()
        assert await wire.rest() == b""


@each_case(
    ("fields", "allowed"),
    [
        (["Origin: http://localhost"], True),
        (["Origin: https://chat.example"], True),
        (["Origin: http://evil.example"], False),
        (["Origin: http://evil.example", "Content-Type: text/plain"], False),
        (["Origin: null"], False),
        (["Origin: http://localhost:3000"], False),
        (["Origin: HTTPS://chat.example.evil"], False),
        (["Origin: http://localhost:5173", "Sec-Fetch-Site: same-origin"], True),
        (["Origin: http://evil.example", "Sec-Fetch-Site: cross-site"], False),
        (["Origin: http://localhost:3000", "Sec-Fetch-Site: same-site"], False),
        (["Sec-Fetch-Site: cross-site"], False),
        (["Sec-Fetch-Site: none"], True),
        (["Origin: vscode-webview://abc"], True),
        (["Origin: app://obsidian.md"], True),
        (["Origin: http://tauri.localhost"], True),
        (["Origin: https://Wails.localhost"], True),
        (["Origin: http://tauri.localhost:8080"], False),
        (["Origin: http://evil.localhost"], False),
    ],
)
async def test_a_page_of_another_origin_may_not_post(
    gate: Public, fields: list[str], allowed: bool
) -> None:
    gate.forget()
    found = await gate.ask(asking("localhost", *fields))
    assert outcome_of(found) == ((200, None) if allowed else (403, "origin_not_allowed"))
    assert gate.node.requests == allowed
    if not allowed:
        assert b"cors.origins" in found.body


async def test_a_caller_with_a_key_may_use_any_host(tmp_path: Path) -> None:
    settings = {"keys": [{"id": KEY.id, "sha256": KEY.sha256}], "allow_anonymous": True}
    async with public(tmp_path, settings) as gate:
        fields = ["Origin: http://evil.example", f"Authorization: Bearer {KEY.text}"]
        assert (await gate.ask(asking("evil.example", *fields))).status == 200
        assert (await gate.ask(asking("evil.example"))).status == 403


@each_case(
    ("settings", "loopback", "asked"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"listen": {"trusted_proxies": ["127.0.0.1"]}}, True, False),
        ({"listen": {"hosts": ["gw"]}}, False, True),
        ({"listen": {"hosts": ["gw"], "trusted_proxies": ["10.0.0.0/8"]}}, False, True),
    ],
)
async def test_hosts_are_checked_on_loopback_or_if_the_settings_list_them(
    settings: dict[str, Any], loopback: bool, asked: bool
) -> None:
    rules = OriginPolicy.of(Settings(**settings), loopback=loopback)
    assert (rules is not None) is asked
    if rules is not None:
        rules.check([(b"host", b"10.1.2.3:8000")], "10.1.2.3", is_post=True)


PROXIED = [
    "Forwarded: for=127.0.0.1", "X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1",
    "Via: 1.1 edge", "X-Forwarded-Proto: https", "CF-Connecting-IP: ::1", "VIA:",
]  # fmt: skip


@each_case("field", PROXIED)
async def test_a_proxied_request_is_not_local_though_its_peer_is(gate: Public, field: str) -> None:
    gate.forget()
    found = await gate.chat(field, "X-Priority: urgent", "X-User-Id: anna", max_tokens=1)
    assert found.status == 200
    assert found.headers["x-gateway-class"] == "normal"
    assert "x-gateway-node" not in found.headers
    assert (await gate.last()).caller == "anonymous:127.0.0.1"


async def test_each_head_of_a_connection_is_judged_by_itself(gate: Public) -> None:
    direct = request(SHORT, "X-Priority: urgent")
    proxied = request(SHORT, "X-Priority: urgent", "Via: 1.1 edge")
    async with raw_connection(gate.url) as wire:
        for asked, seen in [(direct, "urgent"), (proxied, "normal")] * 3:
            for _ in range(2):
                await wire.send(asked)
                found = await answer(wire)
                assert found.headers["x-gateway-class"] == seen
                assert ("x-gateway-node" in found.headers) == (seen == "urgent")
