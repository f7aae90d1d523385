"""The gateway as a process: how it starts, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cli.running import Ran, run
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection
from tests.web.raw_client import HELLO, answer, request

pytestmark = pytest.mark.slow

START_LIMIT = 120.0
STREAM = request({**HELLO, "stream": True})
QUIET = {"health": {"interval": 0.2, "timeout": 30}}


@dataclass(slots=True)
class Process:
    """A gateway that runs as `llama-gateway serve`."""

    process: asyncio.subprocess.Process
    url: str = ""
    admin: str = ""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """What it has logged."""

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def status(self) -> int:
        """Its exit status, once it has ended."""
        async with asyncio.timeout(START_LIMIT):
            return await self.process.wait()

    async def logged(self, event: str) -> dict[str, Any]:
        """The first line of this event."""
        async with asyncio.timeout(START_LIMIT):
            while True:
                for line in self.lines:
                    if line["event"] == event:
                        return line
                assert self.process.returncode is None or not self.reading(), self.lines
                await asyncio.sleep(0.01)

    def reading(self) -> bool:
        assert self.process.stderr is not None
        return self.process.stderr.at_eof()

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(json.loads(line))

    async def ready(self) -> None:
        """Wait until it is ready."""
        async with asyncio.timeout(START_LIMIT):
            while (await self.get("/ready")) != 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)

    async def until_waiting(self, count: int) -> None:
        """Wait until so many requests are queued."""
        async with (
            asyncio.timeout(START_LIMIT),
            httpx.AsyncClient(base_url=self.admin, timeout=60) as client,
        ):
            while (await client.get("/admin/status")).json()["queue"]["normal"] != count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def get(self, path: str) -> int:
        async with raw_connection(self.url) as wire:
            await wire.send(request(b"", method="GET", path=path))
            return (await answer(wire)).status


def command(folder: Path, url: str, settings: Mapping[str, Any], *arguments: str) -> list[str]:
    nodes, config = folder / "nodes.yaml", folder / "gateway.yaml"
    nodes.write_text(yaml.safe_dump({"nodes": [{"name": "n", "url": url, "calibrate": False}]}))
    config.write_text(yaml.safe_dump(dict(settings)))
    files = ["--nodes", str(nodes), "--config", str(config)]
    ports = ["--port", "0", "--admin-port", "0"]
    return [sys.executable, "-m", "gateway", "serve", *files, *ports, *arguments]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(folder / "state")}


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    node: EmulatedNode,
    settings: Mapping[str, Any] | None = None,
    more: Mapping[str, str] | None = None,
) -> AsyncIterator[Process]:
    """A ready gateway over `node`; it is killed if the test has not ended it."""
    process = await asyncio.create_subprocess_exec(
        *command(folder, node.url, {**QUIET, **(settings or {})}),
        env={**environment(folder), **(more or {})},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    found = Process(process)
    reading = asyncio.create_task(found.read())
    try:
        listening = await found.logged("listening")
        found.url, found.admin = listening["public"], listening["admin"]
        await found.ready()
        yield found
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading
    assert not any("exception" in line or line["level"] == "error" for line in found.lines)


def refused(folder: Path, *arguments: str, settings: Mapping[str, Any]) -> Ran:
    """The errors of a gateway that does not start, in this process."""
    words = command(folder, "http://127.0.0.1:9", settings, *arguments)
    return run(*words[words.index("serve") :])


async def test_an_interrupt_shuts_the_gateway_down(tmp_path: Path) -> None:
    async with EmulatedNode() as node, serving(tmp_path, node) as gateway:
        async with raw_connection(gateway.url) as idle:
            await idle.send(request({**HELLO, "max_tokens": 1}))
            assert (await answer(idle)).status == 200
            gateway.signal(signal.SIGINT)
            assert await idle.rest() == b"", "an idle connection is closed"
        assert await gateway.status() == 0
        assert [line["event"] for line in gateway.lines][-1] == "ended"


async def test_it_is_not_ready_but_serves_until_a_second_signal(
    tmp_path: Path,
) -> None:
    settings = {"shutdown": {"delay": 600}}
    async with EmulatedNode() as node, serving(tmp_path, node, settings) as gateway:
        gateway.signal()
        await gateway.logged("shutting down")
        assert await gateway.get("/ready") == 503
        assert await gateway.get("/health") == 200
        async with raw_connection(gateway.url) as wire:
            await wire.send(request({**HELLO, "max_tokens": 1}))
            assert (await answer(wire)).status == 200, "new requests are still served"
        gateway.signal()
        assert await gateway.status() == 1


async def test_listeners_close_after_the_delay(tmp_path: Path) -> None:
    settings = {"shutdown": {"delay": 0.5}}
    async with EmulatedNode() as node, serving(tmp_path, node, settings) as gateway:
        gateway.signal()
        assert await gateway.status() == 0


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
        await gateway.until_waiting(1)
        gateway.signal()
        await gateway.logged("shutting down")
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
    settings = {"shutdown": {"grace": 0.5}}
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
        await gateway.until_waiting(1)
        gateway.signal()
        body = await running.rest()
        assert body.endswith(b"\n\n\r\n0\r\n\r\n"), "the stream was cut"
        assert b'"code":"shutting_down"' in body[-300:]
        assert b"[DONE]" not in body
        refusal = await answer(waiting)
        assert (refusal.status, refusal.code) == (503, "shutting_down")
        assert int(refusal.headers["retry-after"]) > 0
        assert await gateway.status() == 0
        assert (await gateway.logged("the grace is over"))["ended"] == 2
        await node.until(lambda: node.busy == 0)


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with (
        EmulatedNode(slots=1, decode_tps=20, answer_tokens=10_000) as node,
        serving(tmp_path, node) as gateway,
        raw_connection(gateway.url) as running,
    ):
        await running.send(STREAM)
        await running.head()
        gateway.signal()
        await gateway.logged("shutting down")
        gateway.signal()
        assert await gateway.status() == 1
        await node.until(lambda: node.busy == 0)


async def test_systemd_is_notified(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        path = str(tmp_path / "notify")
        sock.bind(path)
        sock.setblocking(False)
        heard: list[str] = []

        async def hear(until: str) -> None:
            async with asyncio.timeout(START_LIMIT):
                while until not in heard:
                    data = await asyncio.get_running_loop().sock_recv(sock, 4096)
                    heard.extend(data.decode().split("\n"))

        more = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000"}
        async with EmulatedNode() as node, serving(tmp_path, node, more=more) as gateway:
            await hear("READY=1")
            assert any(line.startswith("STATUS=") for line in heard)
            heard.clear()
            for _ in range(3):
                await hear("WATCHDOG=1")
                heard.clear()
            gateway.signal()
            await hear("STOPPING=1")
            assert await gateway.status() == 0


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_in_use_is_reported_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = refused(tmp_path, flag, str(port), settings={})
    assert ran.status == 1
    assert f"127.0.0.1:{port}" in ran.err
    assert flag in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "settings", "hints"),
    [
        (("--host", "0.0.0.0"), {}, ["--allow-anonymous"]),
        (("--admin-host", "0.0.0.0"), {}, ["--admin-key-file"]),
        (("--admin-host", "0.0.0.0", "--admin-key-file", "missing.key"), {}, ["missing.key"]),
        ((), {"listn": {"port": 1}}, ["gateway.yaml:1", "listen"]),
    ],
)
def test_a_public_address_without_keys_and_invalid_settings_are_refused_with_the_remedy(
    tmp_path: Path, arguments: tuple[str, ...], settings: dict[str, Any], hints: list[str]
) -> None:
    ran = refused(tmp_path, *arguments, settings=settings)
    assert ran.status == 2
    assert all(hint in ran.err for hint in hints)
    assert "Traceback" not in ran.err
