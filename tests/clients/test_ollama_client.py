"""The official `ollama` client, unmodified, over real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import ollama
import pytest
import pytest_asyncio

from tests.clients.site import FIXED, HELLO, Site

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
]

OPTIONS = {"num_predict": 24, **FIXED}


def weather(city: str) -> str:
    """The weather of a city.

    Args:
      city: The city's name
    """
    return f"rain in {city}"


@pytest_asyncio.fixture(loop_scope="session")
async def client(site: Site) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(site.url, trust_env=False) as one:
        yield one


async def direct_text(node: httpx.AsyncClient, **body: Any) -> str:
    """The text of the server's own chat."""
    asked = {"messages": HELLO, "max_tokens": 24, **FIXED, **body}
    found = (await node.post("/v1/chat/completions", json=asked)).json()
    return str(found["choices"][0]["message"]["content"])


@pytest.mark.smoke
async def test_a_chat(client: ollama.AsyncClient, chat_node: httpx.AsyncClient) -> None:
    text = await direct_text(chat_node)
    found = await client.chat("demo", HELLO, options=OPTIONS)
    assert found.message.content == text
    assert (found.done, found.done_reason, found.eval_count) == (True, "length", 24)
    assert found.prompt_eval_count
    assert found.eval_duration
    assert found.total_duration
    assert found.total_duration >= found.eval_duration
    parts = [part async for part in await client.chat("demo", HELLO, options=OPTIONS, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == text
    assert len(parts) > 20
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 24)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_is_called_and_answered(client: ollama.AsyncClient, *, streams: bool) -> None:
    options = {**FIXED, "num_predict": 400}
    asked: dict[str, Any] = {"messages": HELLO, "tools": [weather], "options": options}
    if streams:
        parts = [part async for part in await client.chat("caller", **asked, stream=True)]
    else:
        parts = [await client.chat("caller", **asked)]
    [call] = [call for part in parts for call in part.message.tool_calls or ()]
    assert call.function.name == "weather"
    assert isinstance(call.function.arguments["city"], str)
    assert parts[-1].done_reason == "stop"
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": weather(**call.function.arguments), "tool_name": "weather"},
    ]
    found = await client.chat("demo", messages, tools=[weather], options=OPTIONS)
    assert found.eval_count == 24


@pytest.mark.smoke
async def test_embeddings(client: ollama.AsyncClient, embed_node: httpx.AsyncClient) -> None:
    body = {"input": ["hello there", "stone"]}
    direct = (await embed_node.post("/v1/embeddings", json=body)).json()
    found = await client.embed("demo-embed", ["hello there", "stone"])
    assert len(found.embeddings) == 2
    for ours, theirs in zip(found.embeddings, direct["data"], strict=True):
        assert ours == pytest.approx(theirs["embedding"], rel=1e-6, abs=1e-9)
    assert found.prompt_eval_count == direct["usage"]["prompt_tokens"]
    old = await client.embeddings("demo-embed", "stone")
    assert old.embedding == pytest.approx(found.embeddings[1], rel=1e-4, abs=1e-6)
    few = (await client.embed("demo-embed", "stone", dimensions=4)).embeddings[0]
    assert len(few) == 4
    assert sum(value * value for value in few) == pytest.approx(1.0)
