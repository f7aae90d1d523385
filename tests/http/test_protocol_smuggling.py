"""No request can hide in another, through the gateway alone and behind nginx, for two callers."""

from __future__ import annotations

import asyncio
import json
import os
import socket as unix_socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.callers.keys import ApiKey, new_key
from tests.bench.targets import find
from tests.each_case import each_case
from tests.emulator import EmulatedNode, expected_chat_text
from tests.emulator.raw_connection import RawConnection, raw_connection
from tests.gateways import until
from tests.http.smuggling import (
    ANNA,
    CREDENTIALS,
    LAST,
    REFUSED,
    SERVED,
    WITHOUT_A_NODE,
    chat,
    marked,
)
from tests.web.raw_client import CHAT, Public, answer, public

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEN = new_key("ben")
SETTINGS = {
    "keys": [{"id": key.id, "sha256": key.sha256} for key in (ANNA, BEN)],
    "heartbeat": "off",
    "listen": {"trusted_proxies": ["127.0.0.1"]},
}
NAMES = [*REFUSED, *SERVED, *LAST, *WITHOUT_A_NODE]
FORMS = {**REFUSED, **SERVED, **LAST, **WITHOUT_A_NODE}


def proper(text: str, key: ApiKey) -> bytes:
    return marked(text, f"Authorization: Bearer {key.text}")


def prompts(gate: Public) -> list[str]:
    """Marks of the requests that reached the node."""
    return [json.loads(seen.body)["messages"][0]["content"] for seen in gate.node.seen]


def check_callers(gate: Public) -> None:
    """The caller of each request, by its mark."""
    for seen in gate.node.seen:
        assert seen.path == CHAT
        assert not {"authorization", "x-api-key", "transfer-encoding"} & set(seen.headers)
    for record in gate.records():
        callers = {BEN.id} if record.x_request_id.startswith("ben") else {ANNA.id, "unknown"}
        assert record.caller in callers, record


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Public]:
    node = EmulatedNode(slots=8)
    async with public(tmp_path_factory.mktemp("gate"), SETTINGS, node, well=False) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def gate(shared_gateway: Public) -> Public:
    shared_gateway.forget()
    return shared_gateway


@pytest.mark.parametrize("cut", ["whole", "cut"])
@each_case("name", NAMES)
async def test_the_gateway_and_the_node_agree_on_request_boundaries(
    gate: Public, name: str, cut: str
) -> None:
    gate.forget()
    data = FORMS[name] + proper("ben-behind", BEN)
    async with raw_connection(gate.url) as wire:
        if cut == "whole":
            await wire.send(data)
        else:
            for start in range(0, len(data), 97):
                with suppress(ConnectionError, RuntimeError):  # uvloop's exception
                    await wire.send(data[start : start + 97])
                await asyncio.sleep(0)
        if name.startswith("Expect") and cut == "cut":
            assert await wire.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        found = await answer(wire)
        if name in REFUSED:
            refused = (405, "method_not_allowed") if name == "CONNECT" else (400, "invalid_request")
            assert (found.status, found.code) == refused, found
            assert found.headers["connection"] == "close"
            with suppress(ConnectionError):
                assert await wire.rest() == b"", "what stands behind it was answered"
            expected = []
        elif name in LAST:
            assert found.status == 200
            assert found.headers["connection"] == "close"
            with suppress(ConnectionError):
                assert await wire.rest() == b""
            expected = ["first"]
        else:
            assert found.status == 200 if name in SERVED else found.status in {200, 400, 404}
            assert "smuggled" not in str(found.headers)
            expected = ["first"] if name in SERVED else []
            if found.headers.get("connection") != "close":
                second = await answer(wire)
                assert (second.status, second.headers["x-request-id"]) == (200, "ben-behind")
                expected.append("ben-behind")
    await until(lambda: not gate.running.gateway.registry)
    assert prompts(gate) == expected
    check_callers(gate)


# Behind nginx.


CONFIG = """
daemon off;
worker_processes 1;
pid nginx.pid;
error_log error.log error;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path body;
  proxy_temp_path proxy;
  fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi;
  scgi_temp_path scgi;
  upstream llama_gateway {{
    server {gateway} max_fails=0;
    keepalive 2;
    keepalive_timeout 30s;
  }}
  server {{
    listen unix:{socket};
    client_max_body_size 64m;
    client_header_timeout 1s;
    client_body_timeout 1s;
    location / {{
      proxy_pass http://llama_gateway;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
      proxy_set_header X-Forwarded-For 192.0.2.1;
      proxy_set_header X-Forwarded-Proto $scheme;
      proxy_buffering off;
      proxy_request_buffering {buffering};
      proxy_cache off;
      proxy_read_timeout 60s;
      proxy_next_upstream off;
    }}
  }}
}}
"""
"""As the playbooks set it up (deploy/ansible/roles/edge), but for TLS and time-outs."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["on", "off"])
async def edge(
    request: pytest.FixtureRequest, shared_gateway: Public, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Path]:
    """The socket of an nginx that keeps connections to the gateway, and buffers bodies or not."""
    binary = find("nginx")
    if binary is None:
        pytest.skip("nginx is not installed")
    folder = tmp_path_factory.mktemp("nginx")
    socket = folder / "socket"
    config = CONFIG.format(
        gateway=shared_gateway.url.removeprefix("http://"), socket=socket, buffering=request.param
    )
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(user + config)
    process = await asyncio.create_subprocess_exec(
        binary, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "error.log"
    )
    try:
        await until(lambda: _is_listening(socket))
        yield socket
    finally:
        process.terminate()
        await process.wait()


def _is_listening(path: Path) -> bool:
    """Whether nginx accepts connections: it binds first, and listens a moment later."""
    with unix_socket.socket(unix_socket.AF_UNIX) as trial:
        return trial.connect_ex(str(path)) == 0


@asynccontextmanager
async def connected(socket: Path) -> AsyncIterator[RawConnection]:
    reader, writer = await asyncio.open_unix_connection(socket)
    wire = RawConnection(reader, writer)
    try:
        yield wire
    finally:
        await wire.leave()


@each_case("name", NAMES)
async def test_nginx_and_the_gateway_agree_on_request_boundaries(
    gate: Public, edge: Path, name: str
) -> None:
    """nginx's connections to the gateway carry requests of both callers, one after the other."""
    gate.forget()
    form = FORMS[name]

    async def anna() -> bytes:
        async with connected(edge) as wire:
            with suppress(ConnectionError):
                await wire.send(form + marked("anna-behind", CREDENTIALS, "Connection: close"))
                return await wire.rest()
        return b""

    async def ben(text: str, times: int) -> None:
        async with connected(edge) as wire:
            for number in range(times):
                await wire.send(proper(f"{text}-{number}", BEN))
                found = await answer(wire)
                assert (found.status, found.headers["x-request-id"]) == (200, f"{text}-{number}")
                result = json.loads(found.body)["choices"][0]["message"]["content"]
                assert result == expected_chat_text(
                    json.loads(chat(f"{text}-{number}"))["messages"], 1
                )

    await ben("ben-before", 1)
    heard, _ = await asyncio.gather(anna(), ben("ben-beside", 3))
    await ben("ben-after", 2)
    await until(lambda: not gate.running.gateway.registry)
    assert b"ben-" not in heard
    assert set(prompts(gate)) <= {
        "first", "smuggled", "anna-behind", "ben-before-0", *(f"ben-beside-{x}" for x in range(3)),
        *(f"ben-after-{x}" for x in range(2)),
    }  # fmt: skip
    assert [text for text in prompts(gate) if text.startswith("ben")] == [
        "ben-before-0", "ben-beside-0", "ben-beside-1", "ben-beside-2", "ben-after-0", "ben-after-1"
    ]  # fmt: skip
    check_callers(gate)
