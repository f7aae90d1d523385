"""The gateway as a process: how it starts, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import gateway_processes
from tests.cli.running import run
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection
from tests.gateway_processes import LIMIT, Succession
from tests.web.raw_client import HELLO, answer, request

pytestmark = pytest.mark.slow

STREAM = request({**HELLO, "stream": True})


async def get(gateway: Succession, path: str) -> int:
    async with raw_connection(gateway.url) as wire:
        await wire.send(request(b"", method="GET", path=path))
        return (await answer(wire)).status


async def until_waiting(gateway: Succession, count: int) -> None:
    async with (
        asyncio.timeout(LIMIT),
        httpx.AsyncClient(base_url=gateway.admin_url, timeout=60) as client,
    ):
        while (await client.get("/admin/status")).json()["queue"]["normal"] != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(
    folder: Path, node: EmulatedNode, settings: Mapping[str, Any] | None = None, **more: Any
) -> AsyncIterator[Succession]:
    async with gateway_processes.serving(folder, node, settings=settings, **more) as gateway:
        async with asyncio.timeout(LIMIT):
            while (await get(gateway, "/ready")) != 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        yield gateway
    assert not any("exception" in line or line["level"] == "error" for line in gateway.lines)


async def test_an_interrupt_shuts_the_gateway_down(tmp_path: Path) -> None:
    async with EmulatedNode() as node, serving(tmp_path, node) as gateway:
        async with raw_connection(gateway.url) as idle:
            await idle.send(request({**HELLO, "max_tokens": 1}))
            assert (await answer(idle)).status == 200
            gateway.first.send_signal(signal.SIGINT)
            assert await idle.rest() == b"", "an idle connection is closed"
        assert await gateway.status() == 0
        assert [line["event"] for line in gateway.lines][-1] == "ended"


async def test_it_is_not_ready_but_serves_until_a_second_signal(tmp_path: Path) -> None:
    settings = {"shutdown": {"delay": 600}}
    async with (
        EmulatedNode(slots=2, decode_tps=20, answer_tokens=10_000) as node,
        serving(tmp_path, node, settings) as gateway,
        raw_connection(gateway.url) as running,
        raw_connection(gateway.url) as wire,
    ):
        await running.send(STREAM)
        await running.head()
        gateway.first.send_signal(signal.SIGTERM)
        await gateway.until("shutting down")
        assert await get(gateway, "/ready") == 503
        assert await get(gateway, "/health") == 200
        await wire.send(request({**HELLO, "max_tokens": 1}))
        assert (await answer(wire)).status == 200, "new requests are still served"
        gateway.first.send_signal(signal.SIGTERM)
        assert await gateway.status() == 1
        await node.until(lambda: node.busy == 0)


@pytest.mark.smoke
async def test_running_and_queued_requests_may_end(tmp_path: Path) -> None:
    async with (
        EmulatedNode(slots=1) as node,
        serving(tmp_path, node) as gateway,
        raw_connection(gateway.url) as running,
        raw_connection(gateway.url) as waiting,
    ):
        node.faults.next("hang", after_events=5)  # until the gateway has closed its listener
        await running.send(STREAM)
        await running.head()
        await running.some()
        await waiting.send(request({**HELLO, "max_tokens": 2}))
        await until_waiting(gateway, 1)
        gateway.first.send_signal(signal.SIGTERM)
        await gateway.until("shutting down")
        with pytest.raises(OSError):  # noqa: PT012 - the listener closes a moment later
            while True:
                async with raw_connection(gateway.url):
                    await asyncio.sleep(0.05)
        node.faults.release()
        body = await running.rest()
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert (await answer(waiting)).status == 200
        assert await gateway.status() == 0
        assert node.requests == 2


@pytest.mark.smoke
async def test_requests_that_outlast_the_grace_get_an_error(tmp_path: Path) -> None:
    settings = {"shutdown": {"delay": 0.1, "grace": 0.5}}
    async with (
        EmulatedNode(slots=1, decode_tps=20, answer_tokens=10_000) as node,
        serving(tmp_path, node, settings) as gateway,
        raw_connection(gateway.url) as running,
        raw_connection(gateway.url) as waiting,
    ):
        await running.send(STREAM)
        await running.head()
        await running.some()
        await waiting.send(request())
        await until_waiting(gateway, 1)
        gateway.first.send_signal(signal.SIGTERM)
        body = await running.rest()
        assert body.endswith(b"\n\n\r\n0\r\n\r\n"), "the stream was cut"
        assert b'"code":"shutting_down"' in body[-300:]
        assert b"[DONE]" not in body
        refusal = await answer(waiting)
        assert (refusal.status, refusal.code) == (503, "shutting_down")
        assert int(refusal.headers["retry-after"]) > 0
        assert await gateway.status() == 0
        assert (await gateway.until("the grace is over"))["ended"] == 2
        await node.until(lambda: node.busy == 0)


async def test_systemd_is_notified(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        path = str(tmp_path / "notify")
        sock.bind(path)
        sock.setblocking(False)
        heard: list[str] = []

        async def hear(until: str) -> None:
            async with asyncio.timeout(LIMIT):
                while until not in heard:
                    data = await asyncio.get_running_loop().sock_recv(sock, 4096)
                    heard.extend(data.decode().split("\n"))

        more = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000"}
        async with EmulatedNode() as node, serving(tmp_path, node, environment=more) as gateway:
            await hear("READY=1")
            assert any(line.startswith("STATUS=") for line in heard)
            heard.clear()
            for _ in range(3):
                await hear("WATCHDOG=1")
                heard.clear()
            gateway.first.send_signal(signal.SIGTERM)
            await hear("STOPPING=1")
            assert await gateway.status() == 0


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_in_use_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text("nodes: [{name: n, url: 'http://127.0.0.1:9', calibrate: false}]")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--port": "0", "--admin-port": "0", flag: str(taken.getsockname()[1])}
        ran = run("serve", "--nodes", str(nodes), *(word for one in ports.items() for word in one))
    assert ran.status == 1
    assert f"127.0.0.1:{ports[flag]}" in ran.err
    assert flag in ran.err
    assert "Traceback" not in ran.err
