"""The official `openai` client, unmodified, over real servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from gateway.local.demo_model import TRAINED_CONTEXT
from tests.clients.conftest import CONTEXT, SETTINGS
from tests.clients.site import FIXED, HELLO, Site
from tests.known import known

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 24, **FIXED}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "hello there", "max_tokens": 24, **FIXED}


async def direct_text(chat_node: httpx.AsyncClient) -> str:
    body = {name: value for name, value in CHAT.items() if name != "model"}
    answer = (await chat_node.post("/v1/chat/completions", json=body)).json()
    text: str = answer["choices"][0]["message"]["content"]
    assert text.strip()
    return text


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


# Models.


@pytest.mark.smoke
async def test_models_are_listed_with_their_context(openai: AsyncOpenAI) -> None:
    models = {model.id: model async for model in openai.models.list()}
    assert list(models)[:2] == ["demo", "demo-embed"]
    assert set(models) == {"demo", "demo-embed", *SETTINGS["models"]}
    assert models["demo"].object == "model"
    sizes = {"n_ctx": CONTEXT, "n_ctx_train": TRAINED_CONTEXT}
    assert models["gpt-4o-mini"].model_extra == {"meta": sizes}
    assert (await openai.models.retrieve("org/demo")).id == "org/demo"


# Chat.


@pytest.mark.smoke
async def test_a_chat_plain_streamed_and_synchronous_has_the_servers_own_text(
    openai: AsyncOpenAI, site: Site, chat_node: httpx.AsyncClient
) -> None:
    text = await direct_text(chat_node)
    raw = await openai.chat.completions.with_raw_response.create(
        **CHAT, extra_headers={"X-Request-ID": "mine-1", "X-Priority": "batch"}
    )
    answer = raw.parse()
    assert answer.choices[0].message.content == text
    assert (answer._request_id, known(answer.usage).completion_tokens) == ("mine-1", 24)
    names = ("x-request-id", "x-gateway-class", "x-gateway-attempts", "x-gateway-node")
    assert [raw.headers[name] for name in names] == ["mine-1", "batch", "1", "chat"]
    assert int(raw.headers["x-gateway-queue-ms"]) < 30_000

    usage: Any = {"stream_options": {"include_usage": True}}
    streamed = await openai.chat.completions.with_raw_response.create(**CHAT, **usage, stream=True)
    assert streamed.headers["x-accel-buffering"] == "no"
    *chunks, end, last = [chunk async for chunk in streamed.parse()]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert len(chunks) > 20
    assert end.choices[0].finish_reason == "length"
    assert (last.choices, known(last.usage).completion_tokens) == ([], 24)

    def ask() -> Any:
        with OpenAI(base_url=f"{site.url}/v1", api_key="unused") as client:
            return client.chat.completions.create(**CHAT).choices[0].message.content

    assert await asyncio.to_thread(ask) == text
    await site.until_idle()
    assert [(one.status, one.attempts, one.completion_tokens) for one in site.records] == [
        (200, 1, 24)
    ] * 3
    assert site.records[1].prompt_tokens == known(last.usage).prompt_tokens


# Tools and grammars.


@pytest.mark.smoke
@pytest.mark.parametrize("streams", [False, True])
async def test_a_required_tool_is_called(openai: AsyncOpenAI, *, streams: bool) -> None:
    # The demo model calls a tool with meaningless words that match the tool's grammar.
    options: Any = {
        "model": "demo", "messages": HELLO, "tools": [WEATHER], "tool_choice": "required",
        "max_tokens": 400, **FIXED,
    }  # fmt: skip
    if streams:
        async with openai.chat.completions.stream(**options) as stream:
            final: Any = await stream.get_final_completion()
    else:
        final = await openai.chat.completions.create(**options)
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "weather"
    assert list(json.loads(call.function.arguments)) == ["city"]


# Completions.


@pytest.mark.smoke
async def test_a_completion_has_the_servers_own_text(
    openai: AsyncOpenAI, chat_node: httpx.AsyncClient
) -> None:
    plain = await openai.completions.create(**TEXT)
    stream = await openai.completions.create(**TEXT, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    direct = (await chat_node.post("/v1/completions", json=TEXT)).json()
    assert plain.choices[0].text == text == direct["choices"][0]["text"]


# Embeddings.


@pytest.mark.smoke
async def test_embeddings_are_the_servers_own_numbers(
    openai: AsyncOpenAI, embed_node: httpx.AsyncClient
) -> None:
    # The client asks for base64 by itself.
    texts = ["hello there", "a quiet river", "stone"]
    answer = await openai.embeddings.create(model="demo-embed", input=texts)
    direct = (await embed_node.post("/v1/embeddings", json={"input": texts})).json()
    expected = [item["embedding"] for item in direct["data"]]
    assert len(expected[0]) == 128
    for ours, theirs in zip(answer.data, expected, strict=True):
        assert ours.embedding == pytest.approx(theirs, rel=1e-6, abs=1e-9)
    assert answer.usage.prompt_tokens == direct["usage"]["prompt_tokens"]


# Responses.


@pytest.mark.smoke
async def test_a_response_plain_and_streamed_has_the_servers_own_text(
    openai: AsyncOpenAI, chat_node: httpx.AsyncClient
) -> None:
    body: Any = {"model": "demo", "input": "hello there", "max_output_tokens": 24, "temperature": 0}
    plain = await openai.responses.create(**body)
    direct = (await chat_node.post("/v1/responses", json=body)).json()
    assert plain.output_text == direct["output"][0]["content"][0]["text"]
    assert known(plain.usage).output_tokens == 24
    events = [event async for event in await openai.responses.create(**body, stream=True)]
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == plain.output_text


# Model names and rules.


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (CHAT | {"model": "helper"}, 24),
        (CHAT | {"model": "org/demo"}, 24),
        # It sets the temperature, and takes the bias out.
        (CHAT | {"model": "steady", "temperature": 1.9, "logit_bias": {"400": 100}}, 24),
        (CHAT | {"model": "short"}, 4),
        (CHAT | {"model": "brief", "max_tokens": 5}, 5),
        ({"model": "brief", "messages": HELLO, **FIXED}, 3),
    ],
)
async def test_a_model_rule_names_bounds_sets_and_removes(
    openai: AsyncOpenAI, chat_node: httpx.AsyncClient, body: dict[str, Any], tokens: int
) -> None:
    answer = await openai.chat.completions.create(**body)
    assert known(answer.usage).completion_tokens == tokens
    assert (await direct_text(chat_node)).startswith(answer.choices[0].message.content or "?")
