"""Real servers for chats, embeddings and reranking under one public name, with nothing declared."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateways import Running, running_gateway
from tests.servers import spawn_demo_server, stop_demo_server, wait_for_demo_server

pytestmark = [pytest.mark.real, pytest.mark.slow]
CHAT = "/v1/chat/completions"
ROUNDS = 12
FREEZING = "root ::= " + '"a"? ' * 1000 + '"b"'


@contextmanager
def servers(*options: dict[str, Any]) -> Iterator[list[str]]:
    with ExitStack() as stack:
        started = []
        for one in options:
            server = spawn_demo_server(**{"slots": 2, "context": 512, **one})
            stack.callback(stop_demo_server, server)
            started.append(server)
        yield [wait_for_demo_server(server) for server in started]


RANK = {"embedding": True, "extra": ("--pooling", "rank")}


async def ask(running: Running, path: str, **body: Any) -> httpx.Response:
    response = await running.client.post(path, json={"model": "demo", **body})
    assert response.status_code == 200, response.text
    return response


async def test_each_request_goes_to_a_server_that_was_started_for_it(tmp_path: Path) -> None:
    with servers({"embedding": True}, RANK, {}) as [embedder, ranker, chatter]:
        nodes = {"embedder": embedder, "ranker": ranker, "chatter": chatter}
        inventory = [{"name": name, "url": url} for name, url in nodes.items()]
        async with running_gateway(tmp_path, inventory) as running:
            shown = (await running.client.get(f"{running.admin_url}/admin/nodes")).json()["nodes"]
            assert [node["purpose"] for node in shown] == ["embeddings", "rerank", "chat"]
            message = {"role": "user", "content": "hi"}

            async def one_round() -> list[tuple[str, str]]:
                chat, vectors, ranks = await asyncio.gather(
                    ask(running, CHAT, messages=[message], max_tokens=4),
                    ask(running, "/v1/embeddings", input="hi"),
                    ask(running, "/v1/rerank", query="hi", documents=["hi", "there"]),
                )
                assert chat.json()["choices"][0]["message"]["content"]
                assert any(vectors.json()["data"][0]["embedding"])
                assert len(ranks.json()["results"]) == 2
                return [
                    (name, one.headers["x-gateway-node"])
                    for name, one in (("chatter", chat), ("embedder", vectors), ("ranker", ranks))
                ]

            found = [pair for part in [await one_round() for _ in range(ROUNDS)] for pair in part]
            assert [pair for pair in found if pair[0] != pair[1]] == []


async def test_a_grammar_that_would_freeze_a_server_never_reaches_it(tmp_path: Path) -> None:
    with servers({}) as [url]:
        async with running_gateway(tmp_path, [url]) as running:
            schema = {"type": "string", "pattern": "^" + "a?" * 1000 + "$"}
            for path, more in (
                ("/completion", {"prompt": "a", "grammar": FREEZING}),
                (CHAT, {"messages": [], "grammar": FREEZING}),
                (
                    "/v1/messages",
                    {"messages": [], "tools": [{"name": "t", "input_schema": schema}]},
                ),
            ):
                began = time.monotonic()
                response = await running.client.post(path, json={"model": "demo", **more})
                assert time.monotonic() - began < 2  # 10 ms on a quiet machine
                assert response.status_code == 400
                assert "'limits.grammar_optionals'" in json.dumps(response.json()["error"])
            allowed = "root ::= " + '"a"? ' * 32 + '"b"'
            await ask(running, "/completion", prompt="a", grammar=allowed, n_predict=4)
            async with httpx.AsyncClient(base_url=url) as server:
                slots = (await server.get("/slots")).json()
            assert not any(slot["is_processing"] for slot in slots)
