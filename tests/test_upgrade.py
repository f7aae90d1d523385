"""Handovers under load: no client is refused or disconnected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.access.keys import new_key
from gateway.fleet.state_files import PropertiesStore
from tests.emulator import EmulatedNode
from tests.fleet.build import a_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = int(os.environ.get("UPGRADE_REQUESTS", "400"))
"""Least requests per handover. docs/upgrades.md has the run with 10,000."""
CLIENTS = 8
UPGRADES = 3
LIMIT = 120.0  # seconds for each wait
KEY = new_key("team")
KEYED = {"keys": [{"id": KEY.id, "sha256": KEY.sha256}]}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
ACTIVATED = """
import os, sys
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="2", LISTEN_FDNAMES="public:admin")
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.executable, [sys.executable, "-m", "gateway", *sys.argv[3:]])
"""


@dataclass(slots=True)
class Succession:
    """A line of gateway processes; all of them log to the first one's stderr."""

    first: Process
    lines: list[dict[str, Any]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def read_log(self) -> None:
        assert self.first.stderr is not None
        async for line in self.first.stderr:
            # What keeps a successor from starting comes as plain words.
            entry = json.loads(line) if line.startswith(b"{") else {"event": line.decode()}
            self.lines.append(entry)
            self.news.set()

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    async def until(self, event: str, count: int = 1) -> dict[str, Any]:
        """The log's line of this event that makes so many."""
        async with asyncio.timeout(LIMIT):
            while len(self.logged(event)) < count:
                self.news.clear()
                await self.news.wait()
        return self.logged(event)[count - 1]

    @property
    def url(self) -> str:
        return str(self.logged("listening")[0]["public"])

    @property
    def admin_url(self) -> str:
        return str(self.logged("listening")[0]["admin"])

    @property
    def newest(self) -> int:
        succeeded = self.logged("succeeded")
        return int(succeeded[-1]["pid"]) if succeeded else self.first.pid

    async def succeed(self) -> None:
        """Let the newest process be succeeded; returns when the new one has taken over."""
        before = len(self.logged("succeeded"))
        os.kill(self.newest, signal.SIGUSR2)
        await self.until("succeeded", before + 1)


@asynccontextmanager
async def serving(
    folder: Path, node: EmulatedNode, *command: str, settings: dict[str, Any] | None = None
) -> AsyncIterator[Succession]:
    """A gateway over this node, ended with all its successors."""
    config = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "health": {"interval": 0.2, "timeout": 30},
    }
    (folder / "gateway.yaml").write_text(yaml.safe_dump(config | (settings or {})))
    (folder / "nodes.yaml").write_text(
        yaml.safe_dump({"nodes": [{"name": "one", "url": node.url}]})
    )
    files = ("--nodes", str(folder / "nodes.yaml"), "--config", str(folder / "gateway.yaml"))
    process = await asyncio.create_subprocess_exec(
        *(command or (sys.executable, "-m", "gateway")), "serve", *files,
        stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, close_fds=not command,
        env={"XDG_STATE_HOME": str(folder / "state"), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    line = Succession(process)
    reading = asyncio.create_task(line.read_log())
    try:
        await line.until("listening")
        yield line
    finally:
        # The log ends when the last of them has.
        with contextlib.suppress(ProcessLookupError):
            os.kill(line.newest, signal.SIGTERM)
        try:
            await asyncio.wait_for(reading, LIMIT)
        finally:
            reading.cancel()
            for pid in {process.pid, *(entry["pid"] for entry in line.logged("succeeded"))}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert await process.wait() == 0


@dataclass(slots=True)
class Asking:
    """What clients do while one process takes over from another."""

    answered: int = 0
    over: bool = False

    async def until(self, answered: int) -> None:
        async with asyncio.timeout(3 * LIMIT):
            while self.answered < answered:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def ask_on(client: httpx.AsyncClient, asking: Asking, *, stream: bool) -> None:
    """Ask one question after the other; each answer must be whole."""
    while not asking.over:
        answer = await client.post("/v1/chat/completions", json=HELLO | {"stream": stream})
        assert answer.status_code == 200, answer.text
        if stream:
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.json()["usage"]["completion_tokens"] == 4
        asking.answered += 1


async def test_no_request_fails_during_handovers(tmp_path: Path) -> None:
    async with (
        EmulatedNode(slots=64) as node,
        serving(tmp_path, node) as line,
        # Half of the clients keep their connections, half come anew with each request.
        httpx.AsyncClient(base_url=line.url, trust_env=False, timeout=LIMIT) as keeping,
        httpx.AsyncClient(
            base_url=line.url,
            trust_env=False,
            timeout=LIMIT,
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as coming,
    ):
        asking = Asking()
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                client = keeping if number % 2 else coming
                group.create_task(ask_on(client, asking, stream=number % 3 == 0))
            for done in range(1, UPGRADES + 1):
                # So far through them, whatever the speed of this machine.
                await asking.until(REQUESTS * done // (UPGRADES + 1))
                await line.succeed()
            # The last one has its share of them too.
            await asking.until(asking.answered + REQUESTS // (UPGRADES + 1))
            asking.over = True
        await keeping.aclose()
        await line.until("ended", UPGRADES)
        assert len({line.first.pid, *(entry["pid"] for entry in line.logged("succeeded"))}) == 4
        assert node.requests == asking.answered >= REQUESTS
        assert {entry["status"] for entry in line.logged("request")} == {200}


async def test_a_running_stream_is_finished_by_its_process(tmp_path: Path) -> None:
    async with (
        EmulatedNode(slots=4, answer_tokens=40) as node,
        serving(tmp_path, node) as line,
        httpx.AsyncClient(base_url=line.url, trust_env=False, timeout=LIMIT) as client,
    ):
        node.faults.next("hang", after_events=5)
        body = HELLO | {"stream": True, "max_tokens": 40}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            parts = answer.aiter_bytes()
            data = await anext(parts)
            await line.succeed()
            node.faults.release()
            data += b"".join([part async for part in parts])
        assert data.endswith(b"data: [DONE]\n\n")
        assert data.count(b'"content":"') == 40
        # The kept connection has one more reply, which is its last.
        last = await client.post("/v1/chat/completions", json=HELLO)
        assert (last.status_code, last.headers["connection"]) == (200, "close")
        await line.until("ended")
        after = await client.post("/v1/chat/completions", json=HELLO)
        assert (after.status_code, after.headers.get("connection")) == (200, None)


async def test_a_successor_that_can_not_start_changes_nothing(tmp_path: Path) -> None:
    async with (
        EmulatedNode() as node,
        serving(tmp_path, node) as line,
        httpx.AsyncClient(base_url=line.url, trust_env=False, timeout=LIMIT) as client,
    ):
        settings = (tmp_path / "gateway.yaml").read_text()
        (tmp_path / "gateway.yaml").write_text("listen: {port: nonsense}\n")
        os.kill(line.first.pid, signal.SIGUSR2)
        entry = await line.until("no successor")
        assert "before it was ready" in entry["why"]
        assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200
        (tmp_path / "gateway.yaml").write_text(settings)
        await line.succeed()
        await line.until("listening", 2)


@pytest.mark.parametrize("left", ["", "# nothing but a comment\n", None])
async def test_a_successor_that_finds_emptied_settings_leaves_the_keys_in_force(
    left: str | None, tmp_path: Path
) -> None:
    async with (
        EmulatedNode() as node,
        serving(tmp_path, node, settings=KEYED) as line,
        httpx.AsyncClient(base_url=line.url, trust_env=False, timeout=LIMIT) as client,
    ):
        file = tmp_path / "gateway.yaml"
        file.unlink()
        if left is not None:
            file.write_text(left)
        os.kill(line.first.pid, signal.SIGUSR2)
        await line.until("no successor")
        assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 401
        good = {"x-api-key": KEY.text}
        reply = await client.post("/v1/chat/completions", json=HELLO, headers=good)
        assert reply.status_code == 200


@pytest.mark.parametrize("anonymous", [True, False])
async def test_a_successor_without_keys_does_not_unlock_the_gateway(
    anonymous: bool, tmp_path: Path
) -> None:
    async with (
        EmulatedNode() as node,
        serving(tmp_path, node, settings=KEYED) as line,
        httpx.AsyncClient(base_url=line.url, trust_env=False, timeout=LIMIT) as client,
    ):
        file = tmp_path / "gateway.yaml"
        text = yaml.safe_load(file.read_text()) | {"keys": [], "allow_anonymous": anonymous}
        # Of its successors, one after another.
        for _ in range(2):
            file.write_text(yaml.safe_dump(text))
            await line.succeed()
            reply = await client.post("/v1/chat/completions", json=HELLO)
            assert reply.status_code == 401
        assert line.logged("locked")


async def test_drains_and_remembered_models_survive_a_handover(tmp_path: Path) -> None:
    async with (
        EmulatedNode() as node,
        serving(tmp_path, node) as line,
        httpx.AsyncClient(base_url=line.admin_url, trust_env=False, timeout=LIMIT) as admin,
    ):
        assert (await admin.post("/admin/nodes/one/drain")).status_code < 300
        await line.succeed()
        await admin.aclose()
        await line.until("ended")
        async with httpx.AsyncClient(
            base_url=line.admin_url, trust_env=False, timeout=LIMIT
        ) as again:
            assert (await again.get("/admin/nodes/one")).json()["state"] == "draining"
    folder = tmp_path / "state" / "llama-gateway"
    # Each process has closed the store, which both had open.
    files = {file.name.partition("-")[0]: file for file in sorted(folder.iterdir())}
    assert {"drains", "seen", "gateway.db"} <= set(files)
    assert not list(folder.glob("gateway.db-*"))
    assert PropertiesStore(files["seen"]).recall(a_spec("one", node.url)).models == ("demo",)


async def test_sockets_of_systemd_are_used_and_passed_to_a_successor(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as public,
        socket.create_server(("127.0.0.1", 0)) as admin,
    ):
        numbers = []
        for sock in (public, admin):
            sock.set_inheritable(True)
            numbers.append(str(sock.fileno()))
        command = (sys.executable, "-c", ACTIVATED, *numbers)
        async with EmulatedNode() as node, serving(tmp_path, node, *command) as line:
            assert line.url.endswith(f":{public.getsockname()[1]}")
            await line.succeed()
            await line.until("listening", 2)
            async with httpx.AsyncClient(
                base_url=line.url, trust_env=False, timeout=LIMIT
            ) as client:
                answer = await client.post("/v1/chat/completions", json=HELLO, timeout=LIMIT)
            assert answer.status_code == 200
