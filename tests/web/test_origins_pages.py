"""Web pages in a browser of this machine are not trusted as local callers."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.access.keys import new_key
from gateway.config.settings import Settings
from gateway.http.request_head import OriginPolicy
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


async def test_the_port_of_a_host_may_be_empty(gate: Public) -> None:
    assert (await gate.ask(asking("localhost:"))).status == 200


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


async def test_an_http_1_0_client_needs_no_host(gate: Public) -> None:
    assert (await gate.ask(b"GET /health HTTP/1.0\r\n\r\n")).status == 200


@each_case("target", ["http://u@localhost", "ftp://localhost", "http://a b", "http://"])
async def test_a_target_without_a_host_is_400(gate: Public, target: str) -> None:
    found = await gate.ask(asking("localhost", path=f"{target}{CHAT}"))
    assert outcome_of(found) == (400, "invalid_request")


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


async def test_a_listener_allows_the_address_that_was_connected_to() -> None:
    rules = OriginPolicy.of(Settings(listen={"hosts": ["gw"]}), loopback=False)  # type: ignore[arg-type]
    assert rules is not None
    rules.check([(b"host", b"10.1.2.3:8000")], "10.1.2.3", is_post=True)
    rules.check([(b"host", b"gw")], "10.1.2.3", is_post=True)
