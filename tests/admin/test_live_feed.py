from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.admin.live import MOST_WATCHERS
from gateway.callers.keys import AdminRole
from tests.callers.metered_gateway import recorded
from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, Running, running_gateway, until
from tests.known import known
from tests.web.test_route_tables import ADMIN, ADMIN_KEYS, bearer

pytestmark = pytest.mark.usefixtures("hurried")

LIMIT = 60.0


class Watcher:
    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.events: list[tuple[str, Any]] = []
        self._lines = response.aiter_lines()

    async def next(self) -> tuple[str, Any]:
        name = ""
        async with asyncio.timeout(LIMIT):
            async for line in self._lines:
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    self.events.append((name, json.loads(line[6:])))
                    return self.events[-1]
        raise AssertionError("the stream has ended")

    async def until(self, condition: Callable[[str, Any], bool]) -> Any:
        while True:
            name, value = await self.next()
            if condition(name, value):
                return value


def cells(watcher: Watcher) -> list[str]:
    rows = [row for _, value in watcher.events for row in value.get("nodes", ())]
    return [row["cells"] for row in rows if "cells" in row]


@contextlib.asynccontextmanager
async def watching(running: Running, role: AdminRole | None = None) -> AsyncIterator[Watcher]:
    headers = bearer(None if role is None else ADMIN_KEYS[role].text)
    async with (
        httpx.AsyncClient(timeout=LIMIT, trust_env=False, verify=NO_TLS) as client,
        client.stream("GET", f"{running.admin_url}/admin/live", headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        yield Watcher(response)


@contextlib.asynccontextmanager
async def a_stream(running: Running) -> AsyncIterator[None]:
    """A request that has begun to write and has no end."""
    body = {"messages": [{"role": "user", "content": "words-nobody-knows"}], "stream": True}
    async with running.client.stream("POST", "/v1/chat/completions", json=body) as response:
        answer = response.aiter_bytes()
        await anext(answer)
        yield


def a_slow_node() -> EmulatedNode:
    return EmulatedNode(slots=2, decode_tps=20.0, answer_tokens=4000)


async def test_a_watcher_gets_everything_and_then_what_changes(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode(slots=2)]) as running:
        async with watching(running) as watcher:
            name, hello = await watcher.next()
            assert (name, hello["role"]) == ("hello", "admin")
            name, snapshot = await watcher.next()
            assert name == "snapshot"
            (node,) = snapshot["nodes"]
            assert (node["name"], node["state"], node["cells"]) == ("node-0", "ready", "ff")
            assert snapshot["problems"] == snapshot["requests"] == []
            running.gateway.fleet.drain("node-0")
            update = await watcher.until(lambda name, value: bool(value.get("nodes")))
            assert update["nodes"][0]["state"] == "draining"
            # Only what has changed.
            assert "url" not in update["nodes"][0]
            assert update["problems"][0]["title"] == "node-0 is drained"
        # Nobody watches, and nothing is read.
        live = running.gateway.live
        await until(lambda: live._frame is None)
        assert live.watchers == 0


async def test_a_request_is_seen_without_its_text_and_by_no_viewer(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path, [a_slow_node()], {"admin": ADMIN}) as running,
        watching(running, AdminRole.VIEWER) as viewer,
        watching(running, AdminRole.OPERATOR) as operator,
    ):
        async with a_stream(running):
            update = await operator.until(lambda _, value: bool(value.get("requests")))
            assert update["requests"][0]["node"] == "node-0"
            assert update["requests"][0]["state"] in {"reading", "writing"}
            await operator.until(lambda *_: any(cell[0] == "w" for cell in cells(operator)))
            # The same moment, or a later one.
            moment = operator.events[-1][1]["at"]
            await viewer.until(lambda _, value: value.get("at", 0) >= moment)
        await operator.until(lambda _, value: bool(value.get("ended_requests")))
        assert "words-nobody-knows" not in str(operator.events)
        assert viewer.events[0][1]["role"] == "viewer"
        seen = str(viewer.events)
        assert "'requests': [" not in seen
        assert "anonymous:" not in seen


async def test_a_stream_ends_when_its_key_is_revoked_and_others_go_on(tmp_path: Path) -> None:
    """So does that of a key whose role changes."""
    async with (
        running_gateway(tmp_path, [EmulatedNode()], {"admin": ADMIN}) as running,
        watching(running, AdminRole.ADMIN) as admin,
        watching(running, AdminRole.OPERATOR) as operator,
        watching(running, AdminRole.VIEWER) as viewer,
    ):
        for watcher in (admin, operator):
            await watcher.until(lambda name, _: name == "update")
        _, _, lower = ({**key, "role": "viewer"} for key in ADMIN["keys"])
        rest = [key for key in ADMIN["keys"] if key["role"] == "viewer"]
        running.write_settings({"admin": {"keys": [*rest, lower]}})
        for watcher in (admin, operator):
            with pytest.raises(AssertionError, match="the stream has ended"):
                await watcher.until(lambda *_: False)
        await until(lambda: running.gateway.live.watchers == 1)
        await viewer.next()
        async with watching(running, AdminRole.ADMIN) as again:
            assert (await again.next())[1]["role"] == "viewer"


async def test_watchers_are_bounded_and_a_place_is_free_when_one_leaves(tmp_path: Path) -> None:
    """Also if many come at the same time."""
    async with running_gateway(tmp_path, [EmulatedNode()]) as running:
        address = httpx.URL(running.admin_url)
        opened = [await asyncio.open_connection(address.host, address.port) for _ in range(80)]
        for _, writer in opened:
            writer.write(b"GET /admin/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        statuses = [(await reader.readline()).split()[1] for reader, _ in opened]
        assert statuses.count(b"200") == MOST_WATCHERS
        assert statuses.count(b"429") == len(opened) - MOST_WATCHERS
        refused = await running.admin.get("/admin/live")
        assert refused.json()["error"]["code"] == "too_many_watchers"
        assert refused.headers["retry-after"]
        for _, writer in opened:
            writer.close()
        await until(lambda: running.gateway.live.watchers == 0)
        async with watching(running) as watcher:
            await watcher.next()


@pytest.mark.slow
async def test_one_that_stops_reading_takes_bounded_memory_and_others_go_on(tmp_path: Path) -> None:
    async with (
        EmulatedNode(model="m" * 200) as node,
        running_gateway(
            tmp_path, [{"name": f"n{i}", "url": node.url} for i in range(120)]
        ) as running,
    ):
        live = running.gateway.live
        live._update_seconds, live._stall_seconds = 0.02, 3.0
        host, port = running.admin_url.removeprefix("http://").split(":")
        with socket.socket() as mute:
            mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            mute.connect((host, int(port)))
            mute.sendall(f"GET /admin/live HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode())
            await until(lambda: live.watchers == 1)
            async with watching(running) as watcher:
                began = time.monotonic()
                numbers = 0
                while live.watchers == 2:
                    # Each update has something new for everybody.
                    for one in running.gateway.fleet.nodes.values():
                        one.requests += 1
                    await watcher.next()
                    numbers += 1
                    for connection in known(running.gateway.admin_listener).connections:
                        assert connection.transport.get_write_buffer_size() < 2_000_000
                    assert time.monotonic() < began + LIMIT
            assert numbers > 3


async def test_problems_are_told_to_log_and_scripts_while_nobody_watches(tmp_path: Path) -> None:
    nodes: list[EmulatedNode | str] = [EmulatedNode(), "http://127.0.0.1:9"]
    async with running_gateway(tmp_path, nodes) as running:
        log = tmp_path / "gateway.log"
        await until(lambda: '"title":"node-1 is down"' in log.read_text())
        response = await running.admin.get("/admin/live?once=1")
        assert response.headers["content-type"].startswith("text/event-stream")
        names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
        assert names == ["hello", "snapshot"]
        assert (await running.admin.get("/admin/live?once=maybe")).status_code == 400
        await until(lambda: running.gateway.live.watchers == 0)


HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


async def chat(running: Running, **body: Any) -> tuple[httpx.Response, list[tuple[str, Any]]]:
    response = await running.admin.post("/admin/chat", json={**HELLO, **body})
    events = []
    for block in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if data := lines.get("data"):
            events.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return response, events


async def test_a_chat_is_streamed_with_figures_and_is_a_caller_of_its_own(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode(answer_tokens=5)]) as run:
        response, events = await chat(run)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert events[0][0] == "node"
        assert ("", "[DONE]") in events
        name, done = events[-1]
        assert (name, done["node"], done["status"]) == ("done", "node-0", 200)
        assert done["completion_tokens"] >= 5
        assert done["prompt_tokens"] > 0
        assert done["ttft"] is not None
        assert len(run.gateway.registry) == 0
        await recorded(run, 1)
        usage = await run.admin.get("/admin/usage?by=key")
        assert "playground:local" in usage.text
        await run.gateway.audit.flush()
        audit = await run.admin.get("/admin/audit?action=chat")
        assert [entry["outcome"] for entry in audit.json()["entries"]] == ["done"]
        assert "Hello" not in audit.text
        # What can not be served gets its error.
        for body, status, code in (
            ({"messages": "words"}, 400, "invalid_request"),
            ({"model": "unknown"}, 404, "model_not_found"),
        ):
            response, _ = await chat(run, **body)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        for content in (b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"x" * 300_000):
            response = await run.admin.post("/admin/chat", content=content)
            assert response.status_code == (400 if len(content) < 9 else 413), content[:9]
        assert len(run.gateway.registry) == 0


async def test_a_page_that_leaves_frees_the_slot(tmp_path: Path) -> None:
    async with running_gateway(
        tmp_path, [EmulatedNode(slots=1, decode_tps=20.0, answer_tokens=4000)]
    ) as run:
        async with run.admin.stream("POST", "/admin/chat", json=HELLO) as response:
            parts = response.aiter_bytes()
            await anext(parts)
            assert len(run.gateway.registry) == 1
        await until(lambda: len(run.gateway.registry) == 0)
        await until(lambda: not run.gateway.fleet.nodes["node-0"].leases)
        recent = run.gateway.live.view.history.recent()
        assert recent.failed == 0
