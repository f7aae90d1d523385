"""Ollama's API over emulated nodes: what the settings turn on, streams, limits, and failures."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from gateway.events import StreamResumed
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection, unchunk
from tests.gateways import Running, running_gateway, until
from tests.virtual import in_virtual_time
from tests.web.raw_client import public, request

ON = {"ollama": True}
HELLO = [{"role": "user", "content": "hello"}]
PATHS = ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"]
PAGES = [
    ("GET", "/"), ("HEAD", "/"), ("GET", "/api/version"), ("HEAD", "/api/version"),
    ("GET", "/api/tags"), ("HEAD", "/api/tags"), ("GET", "/api/ps"), ("POST", "/api/show"),
]  # fmt: skip
GREEDY = {"temperature": 0, "num_predict": 40}


@asynccontextmanager
async def official_client(url: str) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(url, trust_env=False) as client:
        yield client


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.text.splitlines()]


def text(found: list[dict[str, Any]]) -> str:
    return "".join(
        one.get("message", one).get("content") or one.get("response", "") for one in found
    )


async def chat(running: Running, **body: Any) -> httpx.Response:
    return await running.client.post("/api/chat", json={"messages": HELLO, **body})


@in_virtual_time
async def test_it_is_served_only_while_the_settings_say_so(tmp_path: Path) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as running:

        async def statuses() -> list[int]:
            asked = [("POST", path) for path in PATHS] + PAGES
            body = {"model": "demo", "messages": HELLO, "prompt": ""}
            found = [
                await running.client.request(method, path, json=body) for method, path in asked
            ]
            return [one.status_code for one in found]

        off = await statuses()
        assert set(off) == {404}
        found = await chat(running)
        assert "the setting 'ollama' turns it on. Served are" in found.json()["error"]
        running.write_settings(ON)
        await running.gateway.reload()
        assert set(await statuses()) == {200}
        assert (await running.client.get("/api/chat")).status_code == 405
        running.write_settings({})
        await running.gateway.reload()
        assert await statuses() == off


@pytest.mark.parametrize(
    ("path", "raw"), [("/api/chat", False), ("/api/generate", False), ("/api/generate", True)]
)
@in_virtual_time
async def test_a_broken_stream_is_resumed_on_another_node(
    tmp_path: Path, path: str, *, raw: bool
) -> None:
    body = {"messages": HELLO, "prompt": "hello", "options": GREEDY, "raw": raw}
    nodes = [EmulatedNode(answer_tokens=2000, decode_tps=50.0) for _ in range(2)]
    async with (
        nodes[0],
        nodes[1],
        running_gateway(tmp_path, [node.url for node in nodes], ON) as running,
    ):
        whole = lines(await running.client.post(path, json=body))
        resumed: list[StreamResumed] = []
        running.gateway.bus.subscribe(StreamResumed, resumed.append)
        received = b""
        async with running.client.stream("POST", path, json=body) as response:
            async for part in response.aiter_bytes():
                received += part
                if received.count(b"\n") == 10:
                    [busy] = [node for node in nodes if node.busy]
                    await busy.kill()
        found = [json.loads(line) for line in received.splitlines()]
    assert len(resumed) == 1
    assert text(found) == text(whole)
    assert [one["done"] for one in found].count(True) == 1
    names = ("done", "done_reason", "eval_count", "prompt_eval_count")
    assert [found[-1][name] for name in names] == [whole[-1][name] for name in names]
    # The second node's timings hold for its own part alone.
    assert found[-1]["eval_duration"] == pytest.approx(whole[-1]["eval_duration"], rel=0.2)


@in_virtual_time
async def test_a_waiting_stream_gets_white_space(tmp_path: Path) -> None:
    async with public(tmp_path, {**ON, "heartbeat": 0.1}) as gate:
        gate.node.faults.next("hang", after_events=0)
        async with raw_connection(gate.url) as wire:
            body = {"messages": HELLO, "options": GREEDY}
            await wire.send(request(body, "X-Gateway-Progress: 1", path="/api/chat"))
            head = await wire.head()
            assert b"content-type: application/x-ndjson\r\n" in head
            assert b"x-accel-buffering: no\r\n" in head
            data = b""
            while data.count(b"1\r\n \r\n") < 3:
                data += await wire.until(b"\r\n")
            gate.node.faults.release()
            while not data.endswith(b"\r\n0\r\n\r\n"):
                data += await wire.until(b"\r\n")
        found = unchunk(data)
        assert found.startswith(b"   ")
        assert b"\n\n" not in found
        assert b":" not in found[:10].replace(b'":', b"")
        assert json.loads(found.splitlines()[-1])["done"] is True


@in_virtual_time
async def test_an_empty_request_asks_no_node(tmp_path: Path) -> None:
    async with public(tmp_path, ON) as gate, official_client(gate.url) as client:
        loaded = await client.chat("demo", [])
        assert (loaded.done, loaded.done_reason, loaded.message.content) == (True, "load", "")
        assert (await client.generate("demo", "", keep_alive=0)).done_reason == "unload"
        assert (await client.embed("demo", [])).embeddings == []
        with pytest.raises(ollama.ResponseError) as raised:
            await client.generate("nobody", "")
        assert raised.value.status_code == 404
        assert gate.node.requests == 0
        assert gate.running.gateway.handler.body_memory.total_bytes == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"buffered_bytes": 4_000_000, "body_bytes": 3_500_000}, {"content": "a" * 2_500_000}),
        ({"buffered_bytes": 60_000, "body_bytes": 20_000}, {"images": ["abcd"] * 900}),
    ],
    ids=["both bodies", "what a small one grows to"],
)
async def test_both_bodies_count_while_one_is_translated(
    tmp_path: Path, limits: dict[str, int], message: dict[str, Any]
) -> None:
    async with public(tmp_path, {**ON, "limits": limits}) as gate:
        found = await chat(gate.running, messages=[{"role": "user", "content": "?", **message}])
        assert found.status_code == 429
        assert "memory" in found.json()["error"]
        memory = gate.running.gateway.handler.body_memory
        await until(lambda: memory.total_bytes == 0)


@in_virtual_time
async def test_bad_bodies_get_ollamas_error(tmp_path: Path) -> None:
    bad = [(path, body, 400) for path in (*PATHS, "/api/show") for body in (b"", b"[1]")]
    bad += [(path, b'{"model": 5}', 400) for path in PATHS]
    bad.append(("/api/show", b"{" + b" " * 70_000 + b"}", 413))
    async with public(tmp_path, ON) as gate:
        for path, body, status in bad:
            found = await gate.ask(request(body, path=path))
            assert found.status == status, (path, body[:20])
            assert isinstance(json.loads(found.body)["error"], str)
