"""The official `openai` client, unmodified, over real servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai as package
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI

from gateway.local.demo_model import TRAINED_CONTEXT
from tests.clients.conftest import CONTEXT, SETTINGS
from tests.clients.site import FIXED, HELLO, Site, running_site, until_busy
from tests.each_case import each_case
from tests.known import known
from tests.servers import running_demo_servers

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


# Errors, and how often the client retries.


SHORT: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 8, **FIXED}
LONG: dict[str, Any] = SHORT | {"max_tokens": 15_000}


def error_facts(error: package.APIStatusError) -> tuple[int, Any, str | None]:
    """Status, code and `X-Gateway-Reason`, which must equal the code."""
    reason = error.response.headers.get("x-gateway-reason")
    return error.status_code, error.code, reason


# Errors of the client.


PICTURE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
TOO_LONG: Any = [{"role": "user", "content": "river stone " * CONTEXT}]
RANK: Any = {"model": "demo", "query": "a", "documents": ["b"]}


@each_case(
    ("ask", "status", "code", "message"),
    [
        (lambda one: one.models.retrieve("nobody"), 404, "model_not_found", "'nobody'"),
        (lambda one: one.chat.completions.create(**SHORT | {"model": "nobody"}),
         404, "model_not_found", "'nobody' does not exist"),
        (lambda one: one.chat.completions.create(**SHORT | {"messages": TOO_LONG}),
         400, "context_length_exceeded", f"{CONTEXT} tokens"),
        (lambda one: one.chat.completions.create(**SHORT | {"messages": TOO_LONG}, stream=True),
         400, "context_length_exceeded", f"{CONTEXT} tokens"),
        (lambda one: one.embeddings.create(model="demo-embed", input="river stone " * 512),
         400, "context_length_exceeded", "prompt is too long"),
        (lambda one: one.images.generate(prompt="a"), 404, "not_found", "There is nothing at"),
        (lambda one: one.chat.completions.create(**SHORT, extra_headers={"X-Priority": "best"}),
         400, "invalid_request", "'best'"),
        (lambda one: one.chat.completions.create(**SHORT | {"max_tokens": "many"}),
         400, "invalid_request", "'max_tokens'"),
        (lambda one: one.chat.completions.create(**SHORT, n=5), 400, "invalid_request", "5 slots"),
        (lambda one: one.chat.completions.create(
            **SHORT | {"messages": [{"role": "user", "content": [PICTURE]}]}),
         400, "invalid_request", "'data:' URLs"),
        (lambda one: one.embeddings.create(model="demo", input="hello"),
         501, "not_supported", "Start it with `--embeddings`"),
        (lambda one: one.audio.transcriptions.create(model="demo", file=("a.wav", b"RIFF" * 9)),
         501, "not_supported", "audio input"),
        (lambda one: one.post("/rerank", cast_to=object, body=RANK),
         501, "not_supported", "rerank"),
    ],
)  # fmt: skip
async def test_a_request_that_can_not_be_served_is_refused_once(
    openai: AsyncOpenAI, site: Site, ask: Any, status: int, code: str, message: str
) -> None:
    site.records.clear()
    with pytest.raises(package.APIStatusError, match=message) as caught:
        await ask(openai)
    assert error_facts(caught.value) == (status, code, code)
    if code == "context_length_exceeded":
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["n_prompt_tokens"] > caught.value.body["n_ctx"] >= 512
    if status == 501:
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert [record.status for record in site.records] == [501]


async def test_a_nodes_own_bad_request_passes_through_and_blames_nobody(
    openai: AsyncOpenAI, site: Site, chat_node: httpx.AsyncClient
) -> None:
    body = {"messages": "hello", **FIXED}
    direct = await chat_node.post("/v1/chat/completions", json=body)
    assert direct.status_code == 400
    with pytest.raises(package.BadRequestError) as caught:
        await openai.chat.completions.create(**SHORT | {"messages": "hello"})
    assert caught.value.body == direct.json()["error"]
    assert [(record.status, record.attempts) for record in site.records] == [(400, 1)]
    assert site.gateway.fleet.nodes["chat"].failures == 0


# Errors of the fleet.


@pytest_asyncio.fixture(loop_scope="session")
async def holding(narrow_url: str) -> AsyncIterator[None]:
    """After a test the only slot must be free."""
    yield
    await until_busy(narrow_url, 0)


@asynccontextmanager
async def held(site: Site) -> AsyncIterator[None]:
    """Hold the only slot with a stream."""
    async with site.openai() as client:
        stream = await client.chat.completions.create(**LONG, stream=True)
        async with stream:
            await anext(aiter(stream))
            yield


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("queue", "status", "code", "should_retry"),
    [({"max": 0}, 429, "queue_full", None), ({"max_wait": 0.2}, 503, "queue_timeout", "false")],
    ids=["a full queue is a rate limit and retried", "a queue timeout is not retried"],
)
@pytest.mark.usefixtures("holding")
async def test_of_a_queue(
    tmp_path: Path,
    narrow_url: str,
    queue: dict[str, float],
    status: int,
    code: str,
    should_retry: str | None,
) -> None:
    async with (
        running_site(tmp_path, [narrow_url], {"queue": queue}) as site,
        held(site),
        site.openai(max_retries=0 if should_retry is None else 2) as client,
    ):
        with pytest.raises(package.APIStatusError) as caught:
            await client.chat.completions.create(**SHORT)
        assert error_facts(caught.value) == (status, code, code)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.response.headers.get("x-should-retry") == should_retry
        assert [record.status for record in site.records] == [status]


# Errors in the middle of a stream.


async def read(parts: AsyncIterator[Any]) -> None:
    async for _ in parts:
        pass


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_a_node_that_dies_in_mid_stream_is_an_error_of_the_client(
    tmp_path: Path, api: str
) -> None:
    with running_demo_servers(1, slots=1, context=16_384) as (server,):
        async with running_site(tmp_path, [server.url]) as site, site.openai() as client:
            body: Any = {"model": "demo", "input": "on", "max_output_tokens": 15_000}
            stream: Any = (
                await client.chat.completions.create(**LONG, stream=True)
                if api == "chat"
                else await client.responses.create(**body, stream=True)
            )
            parts = aiter(stream)
            for _ in range(30):  # some of them have no text
                await anext(parts)
            server.kill()
            with pytest.raises(package.APIError) as caught:
                await read(parts)
            assert not isinstance(caught.value, package.APIConnectionError)
            assert caught.value.code == "node_failed"
            await site.until_idle()
            [record] = site.records
            assert (record.status, record.reason) == (502, "node_failed")
            assert record.completion_tokens >= 20
