"""Deferred requests of a whole gateway: accepted, polled, read as they were, and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.access.keys import new_key
from gateway.batches.folder import ID_FILE
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until

ALICE, BOB = new_key("alice"), new_key("bob")
CHAT = {"messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 12}
PREFER = {"prefer": "respond-async"}


@asynccontextmanager
async def gateway(
    folder: Path, node: EmulatedNode | None = None, **settings: Any
) -> AsyncIterator[Running]:
    keys = [{"id": key.id, "sha256": key.sha256} for key in (ALICE, BOB)]
    async with (
        node or EmulatedNode() as running_node,
        running_gateway(folder, [running_node.url], {"keys": keys, **settings}) as running,
    ):
        running.client.headers["authorization"] = f"Bearer {ALICE.text}"
        yield running


async def ask(running: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return await running.client.post(path, json=body, headers=PREFER)


async def ended(running: Running, url: str) -> httpx.Response:
    async with asyncio.timeout(30):
        while (found := await running.client.get(url)).status_code == 202:
            assert int(found.headers["retry-after"]) > 0
            assert found.json()["url"] == url
            await asyncio.sleep(0.02)
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_the_response_is_what_a_client_would_have_had(tmp_path: Path, path: str) -> None:
    body = {"input": "hello"} if path == "/v1/responses" else CHAT
    async with gateway(tmp_path) as running:
        accepted = await ask(running, path, body)
        assert accepted.status_code == 202
        assert accepted.headers["preference-applied"] == "respond-async"
        url = accepted.headers["location"]
        told = accepted.json()
        assert (told["object"], told["url"], told["path"]) == ("background", url, path)
        replay = await ended(running, url)
        plain = await running.client.post(path, json=body)
        assert replay.status_code == 200
        assert set(replay.json()) == set(plain.json())
        assert replay.headers["x-gateway-replay"] == "true"
        assert replay.headers["x-should-retry"] == "false"
        assert replay.headers["content-type"] == plain.headers["content-type"]
        assert (await running.client.get(url)).content == replay.content
        gone = await running.client.delete(url)
        assert gone.json()["deleted"] is True
        assert (await running.client.get(url)).status_code == 404
        names = [p.name for p in (tmp_path / "state/batches").glob("*")]
        assert names == [ID_FILE]


async def test_a_nodes_error_is_replayed_with_its_status(tmp_path: Path) -> None:
    said = '{"error":{"code":400,"message":"No such thing","type":"invalid_request_error"}}'
    async with gateway(tmp_path, node := EmulatedNode()) as running:
        node.faults.next("status", status=400, body=said)
        accepted = await ask(running, "/v1/chat/completions", CHAT)
        replay = await ended(running, accepted.headers["location"])
        assert (replay.status_code, replay.text) == (400, said)
        assert replay.headers["x-gateway-replay"] == "true"


async def test_one_that_runs_is_ended_by_its_deletion(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=10, answer_tokens=1000)
    async with gateway(tmp_path, node) as running:
        long = {**CHAT, "max_tokens": 1000}
        runs = (await ask(running, "/v1/chat/completions", long)).headers["location"]
        await until(lambda: node.busy == 1)
        waits = (await ask(running, "/v1/chat/completions", long)).headers["location"]
        async with asyncio.timeout(60):
            while (told := (await running.client.get(waits)).json())["position"] is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert told["status"] == "queued"
        for url in (waits, runs):
            assert (await running.client.delete(url)).json()["cancelled"] is True
            assert (await running.client.get(url)).status_code == 404
        await until(lambda: node.busy == 0)


async def test_a_deferred_request_of_another_key_is_not_there(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        url = (await ask(running, "/v1/chat/completions", CHAT)).headers["location"]
        other = {"authorization": f"Bearer {BOB.text}"}
        assert (await running.client.get(url, headers=other)).status_code == 404
        assert (await running.client.delete(url, headers=other)).status_code == 404
        assert (await ended(running, url)).status_code == 200


async def test_a_stream_is_refused_and_other_preferences_change_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        refused = await ask(running, "/v1/chat/completions", {**CHAT, "stream": True})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "stream"
        usual = await running.client.post(
            "/v1/chat/completions", json=CHAT, headers={"prefer": "wait=10, return=minimal"}
        )
        assert usual.status_code == 200
        assert "choices" in usual.json()
