"""Errors as the official `openai` client raises them, and how often it retries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai as package
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.clients.conftest import CONTEXT
from tests.clients.site import FIXED, HELLO, Site, running_site, until_busy
from tests.each_case import each_case
from tests.servers import running_demo_servers

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 8, **FIXED}
LONG: dict[str, Any] = CHAT | {"max_tokens": 15_000}


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
        (lambda one: one.chat.completions.create(**CHAT | {"model": "nobody"}),
         404, "model_not_found", "'nobody' does not exist"),
        (lambda one: one.chat.completions.create(**CHAT | {"messages": TOO_LONG}),
         400, "context_length_exceeded", f"{CONTEXT} tokens"),
        (lambda one: one.chat.completions.create(**CHAT | {"messages": TOO_LONG}, stream=True),
         400, "context_length_exceeded", f"{CONTEXT} tokens"),
        (lambda one: one.embeddings.create(model="demo-embed", input="river stone " * 512),
         400, "context_length_exceeded", "prompt is too long"),
        (lambda one: one.images.generate(prompt="a"), 404, "not_found", "There is nothing at"),
        (lambda one: one.chat.completions.create(**CHAT, extra_headers={"X-Priority": "best"}),
         400, "invalid_request", "'best'"),
        (lambda one: one.chat.completions.create(**CHAT | {"max_tokens": "many"}),
         400, "invalid_request", "'max_tokens'"),
        (lambda one: one.chat.completions.create(**CHAT, n=5), 400, "invalid_request", "5 slots"),
        (lambda one: one.chat.completions.create(
            **CHAT | {"messages": [{"role": "user", "content": [PICTURE]}]}),
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
        await openai.chat.completions.create(**CHAT | {"messages": "hello"})
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
            await client.chat.completions.create(**CHAT)
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
