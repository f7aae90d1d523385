"""Handovers under load: no client is refused or disconnected."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.callers.keys import new_key
from gateway.nodes.state_files import PropertiesStore
from tests.emulator import EmulatedNode
from tests.gateway_processes import LIMIT, Succession, serving
from tests.nodes.build import a_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = int(os.environ.get("UPGRADE_REQUESTS", "400"))
"""Least requests per handover. docs/upgrades.md has the run with 10,000."""
CLIENTS = 8
UPGRADES = 3
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


def client_of(url: str, **keys: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=LIMIT, **keys)


@asynccontextmanager
async def asked(
    folder: Path, node: EmulatedNode, **settings: Any
) -> AsyncIterator[tuple[Succession, httpx.AsyncClient]]:
    """A gateway over this node, and a client of it."""
    async with (
        node,
        serving(folder, node, settings=settings) as line,
        client_of(line.url) as client,
    ):
        yield line, client


@pytest.mark.parametrize("edges", [pytest.param(0, marks=pytest.mark.smoke), 2])
async def test_no_request_fails_during_handovers(edges: int, tmp_path: Path) -> None:
    node, each_anew = EmulatedNode(slots=64), httpx.Limits(max_keepalive_connections=0)
    async with (
        asked(tmp_path, node, listen={"port": 0, "edges": edges}) as (line, keeping),
        client_of(line.url, limits=each_anew) as coming,
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


@pytest.mark.parametrize("edges", [0, 1])
async def test_a_running_stream_is_finished_by_its_process(edges: int, tmp_path: Path) -> None:
    node, listen = EmulatedNode(slots=4, answer_tokens=40), {"port": 0, "edges": edges}
    async with asked(tmp_path, node, listen=listen) as (line, client):
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


@pytest.mark.parametrize("left", ["listen: {port: nonsense}\n", "# nothing but a comment\n", None])
async def test_a_successor_that_can_not_start_or_finds_emptied_settings_changes_nothing(
    left: str | None, tmp_path: Path
) -> None:
    async with asked(tmp_path, EmulatedNode(), **KEYED) as (line, client):
        file = tmp_path / "gateway.yaml"
        settings = file.read_text()
        file.unlink()
        if left is not None:
            file.write_text(left)
        os.kill(line.first.pid, signal.SIGUSR2)
        entry = await line.until("no successor")
        assert "before it was ready" in entry["why"]
        assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 401
        good = {"x-api-key": KEY.text}
        reply = await client.post("/v1/chat/completions", json=HELLO, headers=good)
        assert reply.status_code == 200
        file.write_text(settings)
        await line.succeed()
        await line.until("listening", 2)


@pytest.mark.parametrize("anonymous", [True, False])
async def test_a_successor_without_keys_does_not_unlock_the_gateway(
    anonymous: bool, tmp_path: Path
) -> None:
    async with asked(tmp_path, EmulatedNode(), **KEYED) as (line, client):
        file = tmp_path / "gateway.yaml"
        text = yaml.safe_load(file.read_text()) | {"keys": [], "allow_anonymous": anonymous}
        # Of its successors, one after another.
        for _ in range(2):
            file.write_text(yaml.safe_dump(text))
            await line.succeed()
            reply = await client.post("/v1/chat/completions", json=HELLO)
            assert reply.status_code == 401
        assert line.logged("locked")


@pytest.mark.smoke
async def test_drains_and_remembered_models_survive_a_handover(tmp_path: Path) -> None:
    async with (
        EmulatedNode() as node,
        serving(tmp_path, node) as line,
        client_of(line.admin_url) as admin,
    ):
        assert (await admin.post("/admin/nodes/one/drain")).status_code < 300
        await line.succeed()
        await admin.aclose()
        await line.until("ended")
        async with client_of(line.admin_url) as again:
            assert (await again.get("/admin/nodes/one")).json()["state"] == "draining"
    folder = tmp_path / "state" / "llama-gateway"
    # Each process has closed the store, which both had open.
    files = {file.name.partition("-")[0]: file for file in sorted(folder.iterdir())}
    assert {"drains", "seen", "gateway.db"} <= set(files)
    assert not list(folder.glob("gateway.db-*"))
    assert PropertiesStore(files["seen"]).recall(a_spec("one", node.url)).models == ("demo",)


@pytest.mark.parametrize("edges", [0, 2])
async def test_sockets_of_systemd_are_used_and_passed_to_a_successor(
    edges: int, tmp_path: Path
) -> None:
    settings = {"listen": {"port": 0, "edges": edges}}
    with (
        socket.create_server(("127.0.0.1", 0)) as public,
        socket.create_server(("127.0.0.1", 0)) as admin,
    ):
        for sock in (public, admin):
            sock.set_inheritable(True)
        numbers = [str(sock.fileno()) for sock in (public, admin)]
        command = (sys.executable, "-c", ACTIVATED, *numbers)
        async with (
            EmulatedNode() as node,
            serving(tmp_path, node, *command, settings=settings) as line,
        ):
            assert line.url.endswith(f":{public.getsockname()[1]}")
            await line.succeed()
            await line.until("listening", 2)
            async with client_of(line.url) as client:
                answer = await client.post("/v1/chat/completions", json=HELLO)
            assert answer.status_code == 200
