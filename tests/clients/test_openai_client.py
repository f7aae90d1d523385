"""The official `openai` client, unmodified, over real servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai as package
import pytest
from openai import AsyncOpenAI, OpenAI

from gateway.local.demo_model import TRAINED_CONTEXT
from tests.clients.conftest import CONTEXT, SETTINGS
from tests.clients.site import FIXED, HELLO, Site

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 24, **FIXED}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "hello there", "max_tokens": 24, **FIXED}

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ANSWER: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "minimum": 0, "maximum": 99},
                "sure": {"type": "boolean"},
            },
            "required": ["count", "sure"],
            "additionalProperties": False,
        },
    },
}


async def direct_text(chat_node: httpx.AsyncClient) -> str:
    body = {name: value for name, value in CHAT.items() if name != "model"}
    answer = (await chat_node.post("/v1/chat/completions", json=body)).json()
    text: str = answer["choices"][0]["message"]["content"]
    assert text.strip()
    return text


# Models.


@pytest.mark.smoke
async def test_models_are_listed_with_their_context(openai: AsyncOpenAI) -> None:
    models = {model.id: model async for model in openai.models.list()}
    assert list(models)[:2] == ["demo", "demo-embed"]
    assert set(models) == {"demo", "demo-embed", *SETTINGS["models"]}
    assert models["demo"].object == "model"
    sizes = {"n_ctx": CONTEXT, "n_ctx_train": TRAINED_CONTEXT}
    assert models["gpt-4o-mini"].model_extra == {"meta": sizes}


@pytest.mark.parametrize("name", ["helper", "org/demo"])
async def test_a_model_is_found_by_its_name(openai: AsyncOpenAI, name: str) -> None:
    assert (await openai.models.retrieve(name)).id == name


# Chat.


@pytest.mark.smoke
async def test_a_chat_has_the_servers_own_text(
    openai: AsyncOpenAI, chat_node: httpx.AsyncClient
) -> None:
    answer = await openai.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == await direct_text(chat_node)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


@pytest.mark.smoke
async def test_a_streamed_chat_has_the_same_text(
    openai: AsyncOpenAI, chat_node: httpx.AsyncClient
) -> None:
    stream = await openai.chat.completions.create(**CHAT, stream=True)
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == await direct_text(chat_node)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 20


@pytest.mark.smoke
async def test_a_stream_has_its_usage_on_request(openai: AsyncOpenAI, site: Site) -> None:
    stream = await openai.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    last = [chunk async for chunk in stream][-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 24
    await site.until_idle()
    assert site.records[-1].completion_tokens == 24
    assert site.records[-1].prompt_tokens == last.usage.prompt_tokens


async def test_the_clients_own_stream_helper_builds_the_whole_answer(
    openai: AsyncOpenAI, chat_node: httpx.AsyncClient
) -> None:
    whole = await direct_text(chat_node)
    stop = " " + whole.split()[8]
    async with openai.chat.completions.stream(**CHAT, stop=[stop]) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == whole[: whole.index(stop)]


async def test_several_answers_come_to_one_chat(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=8, n=3, temperature=1.5
    )
    assert {choice.index for choice in answer.choices} == {0, 1, 2}
    assert all(choice.message.content for choice in answer.choices)


async def test_probabilities_come_with_the_tokens(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 24
    assert all(len(token.top_logprobs) == 3 for token in logprobs.content)
    text = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert text.decode() == answer.choices[0].message.content


@pytest.mark.smoke
async def test_the_synchronous_client_works_as_well(
    site: Site, chat_node: httpx.AsyncClient
) -> None:
    def ask() -> str:
        with OpenAI(base_url=f"{site.url}/v1", api_key="unused") as client:
            plain = client.chat.completions.create(**CHAT)
            streamed = client.chat.completions.create(**CHAT, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
            assert text == plain.choices[0].message.content
            return text

    assert await asyncio.to_thread(ask) == await direct_text(chat_node)


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


async def test_a_tools_result_is_accepted(openai: AsyncOpenAI) -> None:
    first = await openai.chat.completions.create(
        model="demo", messages=HELLO, tools=[WEATHER], tool_choice="required", max_tokens=400,
        **FIXED,
    )  # fmt: skip
    message = first.choices[0].message
    assert message.tool_calls
    messages: Any = [
        *HELLO,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
    ]
    second = await openai.chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], max_tokens=12, **FIXED
    )
    assert second.choices[0].message.content


async def test_an_answer_keeps_to_a_schema(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(
        model="demo", messages=HELLO, response_format=ANSWER, max_tokens=200, **FIXED
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"count", "sure"}
    assert 0 <= value["count"] <= 99
    assert isinstance(value["sure"], bool)


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


async def test_a_prompt_may_be_token_ids(openai: AsyncOpenAI, site: Site) -> None:
    tokens = (
        await site.http.post(
            "/tokenize", json={"content": TEXT["prompt"], "add_special": True, "model": "demo"}
        )
    ).json()["tokens"]
    ids = await openai.completions.create(**TEXT | {"prompt": tokens})
    words = await openai.completions.create(**TEXT)
    assert ids.choices[0].text == words.choices[0].text


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
async def test_a_response_has_the_servers_own_text(
    openai: AsyncOpenAI, chat_node: httpx.AsyncClient
) -> None:
    body: Any = {"model": "demo", "input": "hello there", "max_output_tokens": 24, "temperature": 0}
    plain = await openai.responses.create(**body)
    direct = (await chat_node.post("/v1/responses", json=body)).json()
    assert plain.output_text == direct["output"][0]["content"][0]["text"]
    assert plain.usage is not None
    assert plain.usage.output_tokens == 24


@pytest.mark.smoke
async def test_a_streamed_response_has_its_events_and_the_same_text(openai: AsyncOpenAI) -> None:
    body: Any = {"model": "demo", "input": "hello there", "max_output_tokens": 24, "temperature": 0}
    plain = await openai.responses.create(**body)
    events = [event async for event in await openai.responses.create(**body, stream=True)]
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text == plain.output_text


# Model names and rules.


@pytest.mark.parametrize("name", ["gpt-4o-mini", "helper", "steady", "org/demo"])
async def test_another_name_means_the_same_model(
    openai: AsyncOpenAI, chat_node: httpx.AsyncClient, name: str
) -> None:
    answer = await openai.chat.completions.create(**CHAT | {"model": name})
    assert answer.choices[0].message.content == await direct_text(chat_node)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (CHAT | {"model": "short"}, 4),
        (CHAT | {"model": "brief", "max_tokens": 5}, 5),
        ({"model": "brief", "messages": HELLO}, 3),
    ],
)
async def test_a_model_rule_bounds_the_answer_and_sets_defaults(
    openai: AsyncOpenAI, body: dict[str, Any], tokens: int
) -> None:
    usage = (await openai.chat.completions.create(**body)).usage
    assert usage is not None
    assert usage.completion_tokens == tokens


async def test_a_model_rule_overrides_and_removes_parameters(
    openai: AsyncOpenAI, chat_node: httpx.AsyncClient
) -> None:
    first = (await chat_node.post("/tokenize", json={"content": " as"})).json()["tokens"][0]
    answer = await openai.chat.completions.create(
        model="steady", messages=HELLO, max_tokens=24, temperature=1.9, logit_bias={str(first): 100}
    )
    assert answer.choices[0].message.content == await direct_text(chat_node)


# Response headers.


async def test_response_headers_describe_the_request(openai: AsyncOpenAI) -> None:
    raw = await openai.chat.completions.with_raw_response.create(
        **CHAT, extra_headers={"X-Request-ID": "mine-1", "X-Priority": "batch"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-gateway-class"] == "batch"
    assert raw.headers["x-gateway-attempts"] == "1"
    assert raw.headers["x-gateway-node"] == "chat"
    assert int(raw.headers["x-gateway-queue-ms"]) < 30_000
    assert raw.parse()._request_id == "mine-1"


async def test_a_streams_head_forbids_buffering(openai: AsyncOpenAI) -> None:
    raw = await openai.chat.completions.with_raw_response.create(**CHAT, stream=True)
    assert raw.headers["x-accel-buffering"] == "no"
    assert raw.headers["content-type"] == "text/event-stream"
    assert len([chunk async for chunk in raw.parse()]) > 20


async def test_the_client_sends_a_successful_request_once(openai: AsyncOpenAI, site: Site) -> None:
    assert package.DEFAULT_MAX_RETRIES == 2
    await openai.chat.completions.create(**CHAT)
    await site.until_idle()
    assert [(record.status, record.attempts) for record in site.records] == [(200, 1)]
