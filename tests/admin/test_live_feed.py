from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from starlette.types import Message

from gateway.admin.live import MOST_WATCHERS, EventStream, Frame
from gateway.callers.keys import AdminRole, new_key
from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, Running, running_gateway, until

pytestmark = pytest.mark.usefixtures("hurried")

KEYS = {role: new_key(f"the-{role.label}") for role in AdminRole}
ADMIN = {
    "keys": [{"id": key.id, "sha256": key.sha256, "role": role.label} for role, key in KEYS.items()]
}
LIMIT = 60.0
T = TypeVar("T")


class Watcher:
    """One who watches, with all events so far."""

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
        """The next event that is like this."""
        while True:
            name, value = await self.next()
            if condition(name, value):
                return value


def cells(watcher: Watcher) -> list[str]:
    """The cells of all nodes in all events so far."""
    rows = [row for _, value in watcher.events for row in value.get("nodes", ())]
    return [row["cells"] for row in rows if "cells" in row]


@contextlib.asynccontextmanager
async def watching(running: Running, role: AdminRole | None = None) -> AsyncIterator[Watcher]:
    headers = {} if role is None else {"authorization": f"Bearer {KEYS[role].text}"}
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


async def test_a_request_is_seen_while_it_runs_without_its_text(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [a_slow_node()]) as running, watching(running) as watcher:
        async with a_stream(running):
            update = await watcher.until(lambda _, value: bool(value.get("requests")))
            assert update["requests"][0]["node"] == "node-0"
            assert update["requests"][0]["state"] in {"reading", "writing"}
            await watcher.until(lambda *_: any(cell[0] == "w" for cell in cells(watcher)))
        await watcher.until(lambda _, value: bool(value.get("ended_requests")))
        assert "words-nobody-knows" not in str(watcher.events)


async def test_a_viewer_sees_no_requests_and_no_callers(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path, [a_slow_node()], {"admin": ADMIN}) as running,
        watching(running, AdminRole.VIEWER) as viewer,
        watching(running, AdminRole.OPERATOR) as operator,
    ):
        async with a_stream(running):
            await operator.until(lambda _, value: bool(value.get("requests")))
            # The same moment, or a later one.
            moment = operator.events[-1][1]["at"]
            await viewer.until(lambda _, value: value.get("at", 0) >= moment)
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


async def test_once_gives_one_snapshot_for_scripts(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode()]) as running:
        response = await running.admin.get("/admin/live?once=1")
        assert response.headers["content-type"].startswith("text/event-stream")
        names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
        assert names == ["hello", "snapshot"]
        wrong = await running.admin.get("/admin/live?once=maybe")
        assert wrong.status_code == 400
        await until(lambda: running.gateway.live.watchers == 0)


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


async def test_a_watcher_that_reads_nothing_is_cut_off() -> None:
    """The server's side waits in `send`: here for ever."""
    left, ended, never = asyncio.Event(), asyncio.Event(), asyncio.Event()
    sent: list[Message] = []

    async def events() -> Any:
        try:
            while True:
                yield b"x" * 1000
        finally:
            left.set()

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) > 3:
            await never.wait()

    async def receive() -> Message:
        await never.wait()
        raise AssertionError

    async def on_end() -> None:
        ended.set()

    stream = EventStream(events(), 0.05, on_end)
    async with asyncio.timeout(LIMIT):
        await stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    assert left.is_set()
    assert ended.is_set()
    # The response was not ended: the server closes the connection.
    assert all(message.get("more_body", True) for message in sent)


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
                    assert running.gateway.admin_listener is not None
                    for connection in running.gateway.admin_listener.connections:
                        assert connection.transport.get_write_buffer_size() < 2_000_000
                    assert time.monotonic() < began + LIMIT
            assert numbers > 3


@pytest.mark.slow
async def test_a_thousand_nodes_are_read_and_encoded_in_short_steps(tmp_path: Path) -> None:
    """The times are printed, not judged: the machine may stand still in any of them."""
    nodes = [
        {"name": f"n{i}", "url": f"http://127.0.0.1:9/{i}", "model": "m", "enabled": i < 1}
        for i in range(1000)
    ]
    async with running_gateway(tmp_path, nodes, wait_ready=False) as running:
        view = running.gateway.live.view
        steps, longest = [], []
        before, update, snapshot = None, b"", b""
        for number in range(9):
            for node in running.gateway.fleet.nodes.values():
                node.requests = number
            times, state = step_times(view.read(with_requests=True))
            more, frame = step_times(Frame.between(before, state, None, view.history.as_json))
            last, snapshot = step_times(frame.snapshot(is_operator=True))
            update = frame.updates.get(True, b"")
            before = state
            assert snapshot.count(b'"cells"') == len(state.nodes) == 1000
            assert len(times) > 1
            steps.append(len(times + more + last))
            longest.append(1000 * max(times + more + last))
        assert update.count(b'"requests":8') == 1000
    print(f"steps {sorted(steps)[4]}, the longest {sorted(longest)[4]:.1f} ms (medians of nine)")
    print(f"snapshot {len(snapshot)} bytes, update {len(update)} bytes")


def step_times(work: Coroutine[Any, Any, T]) -> tuple[list[float], T]:
    """Seconds of CPU of each step of a coroutine, and its result. Other work runs in between."""
    times: list[float] = []
    while True:
        began = time.thread_time()
        try:
            work.send(None)
        except StopIteration as end:
            times.append(time.thread_time() - began)
            return times, end.value
        times.append(time.thread_time() - began)


async def test_problems_are_told_to_the_log_while_nobody_watches(tmp_path: Path) -> None:
    async with EmulatedNode() as node:
        nodes = [{"name": "a", "url": node.url}, {"name": "b", "url": "http://127.0.0.1:9"}]
        async with running_gateway(tmp_path, nodes) as running:
            assert running.gateway.live.watchers == 0
            log = tmp_path / "gateway.log"

            def told() -> list[dict[str, Any]]:
                whole = log.read_text().rpartition("\n")[0]
                lines = [json.loads(line) for line in whole.splitlines()]
                return [line for line in lines if line["event"] == "problem"]

            await until(told)
            (line,) = told()
            assert line["title"] == "b is down"
            assert line["commands"].startswith("llama-gateway nodes probe b")
