"""Errors as the official `openai` client raises them, and how often it retries."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai as package
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from gateway.callers.keys import new_key
from tests.clients.conftest import CONTEXT
from tests.clients.site import FIXED, HELLO, Site, busy, running_site, until_busy
from tests.each_case import each_case
from tests.gateways import NO_TLS, until
from tests.servers import running_demo_servers

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 8, **FIXED}
LONG: dict[str, Any] = CHAT | {"max_tokens": 15_000}


def error_facts(error: package.APIStatusError) -> tuple[int, Any, str | None]:
    """Status, code and `X-Gateway-Reason`, which must equal the code."""
    reason = error.response.headers.get("x-gateway-reason")
    return error.status_code, error.code, reason


# Errors of the client.


@pytest.mark.smoke
async def test_an_unknown_model_is_not_found_and_not_retried(
    openai: AsyncOpenAI, site: Site
) -> None:
    with pytest.raises(package.NotFoundError, match="'nobody' does not exist") as caught:
        await openai.chat.completions.create(**CHAT | {"model": "nobody"})
    assert error_facts(caught.value) == (404, "model_not_found", "model_not_found")
    assert caught.value.param == "model"
    assert [record.status for record in site.records] == [404]


PICTURE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
RANK: Any = {"model": "demo", "query": "a", "documents": ["b"]}


@each_case(
    ("ask", "status", "code", "message"),
    [
        (lambda one: one.models.retrieve("nobody"), 404, "model_not_found", "'nobody'"),
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


@pytest.mark.smoke
@pytest.mark.parametrize("streams", [False, True])
async def test_the_error_for_a_prompt_that_is_too_long_has_the_context_size(
    openai: AsyncOpenAI, *, streams: bool
) -> None:
    messages = [{"role": "user", "content": "river stone " * CONTEXT}]
    with pytest.raises(package.BadRequestError, match=f"{CONTEXT} tokens") as caught:
        await openai.chat.completions.create(**CHAT | {"messages": messages, "stream": streams})
    assert error_facts(caught.value)[1:] == ("context_length_exceeded",) * 2
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["n_ctx"] == CONTEXT
    assert caught.value.body["n_prompt_tokens"] > CONTEXT


@pytest.mark.parametrize("streams", [False, True])
async def test_a_prompt_that_is_too_long_for_one_node_goes_to_a_roomier_one(
    tmp_path: Path, chat_url: str, narrow_url: str, *, streams: bool
) -> None:
    # Letters that form no words have a token each: more than estimated from their number.
    messages = [{"role": "user", "content": "zq" * 1500}]
    nodes: list[dict[str, Any]] = [
        {"name": "small", "url": chat_url, "speed_hint": 10.0},
        {"name": "roomy", "url": narrow_url},
    ]
    async with running_site(tmp_path, nodes) as site, site.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(
            **CHAT | {"messages": messages, "stream": streams}
        )
        answer: Any = raw.parse()
        chunks = [chunk async for chunk in answer] if streams else [answer]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert raw.headers["x-gateway-attempts"] == "2"
        assert raw.headers["x-gateway-node"] == "roomy"
        assert site.gateway.fleet.nodes["small"].failures == 0


async def test_the_error_for_a_text_that_is_too_long_to_embed_is_the_same(
    openai: AsyncOpenAI, site: Site
) -> None:
    with pytest.raises(package.BadRequestError) as caught:
        await openai.embeddings.create(model="demo-embed", input="river stone " * 512)
    assert error_facts(caught.value)[1:] == ("context_length_exceeded",) * 2
    assert caught.value.param == "input"
    assert site.gateway.fleet.nodes["embed"].failures == 0


# Keys.


async def test_keys_decide_which_models_a_client_may_use(
    tmp_path: Path, chat_url: str, embedder_url: str
) -> None:
    full, limited = new_key("full"), new_key("limited")
    keys = [
        {"id": full.id, "sha256": full.sha256, "max_class": "urgent"},
        {"id": limited.id, "sha256": limited.sha256, "models": ["demo-embed"]},
    ]
    nodes = [{"name": "chat", "url": chat_url}, {"name": "embed", "url": embedder_url}]
    async with running_site(tmp_path, nodes, {"keys": keys}) as site:
        async with site.openai(full.text) as client:
            raw = await client.chat.completions.with_raw_response.create(
                **CHAT, extra_headers={"X-Priority": "premium"}
            )
            assert raw.headers["x-gateway-class"] == "premium"
        async with site.openai(limited.text) as client:
            assert [model.id async for model in client.models.list()] == ["demo-embed"]
            raw_embedding = await client.embeddings.with_raw_response.create(
                model="demo-embed", input="a", extra_headers={"X-Priority": "urgent"}
            )
            assert raw_embedding.headers["x-gateway-class"] == "normal"
            with pytest.raises(package.PermissionDeniedError, match="may not use") as forbidden:
                await client.chat.completions.create(**CHAT)
            assert error_facts(forbidden.value) == (403, "model_not_allowed", "model_not_allowed")
        for wrong in (full.text + "x", f"lg_{full.id}_", "sk-anything"):
            async with site.openai(wrong) as client:
                with pytest.raises(package.AuthenticationError) as refused:
                    await client.chat.completions.create(**CHAT)
                assert error_facts(refused.value) == (401, "invalid_api_key", "invalid_api_key")
                with pytest.raises(package.AuthenticationError):
                    await client.models.list()
        codes = [record.status for record in site.records]
        assert codes == [200, 200, 403, 401, 401, 401]
        assert full.text.rpartition("_")[2] not in (tmp_path / "gateway.log").read_text()


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
@pytest.mark.usefixtures("holding")
async def test_a_full_queue_is_a_rate_limit_and_retried(tmp_path: Path, narrow_url: str) -> None:
    async with (
        running_site(tmp_path, [narrow_url], {"queue": {"max": 0}}) as site,
        held(site),
        site.openai(max_retries=0) as client,
    ):
        with pytest.raises(package.RateLimitError) as caught:
            await client.chat.completions.create(**CHAT)
        assert error_facts(caught.value) == (429, "queue_full", "queue_full")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert "x-should-retry" not in caught.value.response.headers
        assert await busy(narrow_url) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("holding")
async def test_a_client_that_retries_as_advised_succeeds(tmp_path: Path, narrow_url: str) -> None:
    settings = {"queue": {"max": 0}}
    async with (
        running_site(tmp_path, [narrow_url], settings) as site,
        # Retries until the server has freed the slot of the client that left.
        site.openai(max_retries=50) as client,
    ):
        for _ in range(2):  # so that the gateway knows a Retry-After
            await client.chat.completions.create(**CHAT)
        async with held(site):
            answer = asyncio.create_task(client.chat.completions.create(**CHAT))
            await until(lambda: any(record.status == 429 for record in site.records))
        assert (await answer).choices[0].message.content
        codes = [record.status for record in site.records]
        assert codes.count(429) >= 1
        assert codes[-1] == 200


@pytest.mark.usefixtures("holding")
async def test_a_queue_timeout_is_not_retried(tmp_path: Path, narrow_url: str) -> None:
    async with (
        running_site(tmp_path, [narrow_url], {"queue": {"max_wait": 0.2}}) as site,
        held(site),
        site.openai() as client,
    ):
        with pytest.raises(package.InternalServerError) as caught:
            await client.chat.completions.create(**CHAT)
        assert error_facts(caught.value) == (503, "queue_timeout", "queue_timeout")
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert [record.status for record in site.records] == [503]


@pytest.mark.smoke
@pytest.mark.slow
async def test_a_request_to_a_fleet_that_is_down_is_retried(
    tmp_path: Path,
) -> None:
    with running_demo_servers(1) as (server,):
        settings = {"retries": {"wait_for_node": 0.1}, "health": {"interval": 0.2}}
        async with running_site(tmp_path, [server.url], settings) as site:
            server.kill()
            async with site.openai(max_retries=0) as client:
                with pytest.raises(package.InternalServerError) as caught:
                    await client.chat.completions.create(**CHAT)
            assert error_facts(caught.value) == (503, "no_node", "no_node")
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert "x-should-retry" not in caught.value.response.headers
            assert [record.status for record in site.records] == [503]


async def test_a_request_without_an_answer_in_time_is_not_retried(tmp_path: Path) -> None:
    with running_demo_servers(1, slots=1, context=16_384) as (server,):
        async with running_site(tmp_path, [server.url]) as site, site.openai() as client:
            sent = asyncio.create_task(
                client.chat.completions.create(**LONG, extra_headers={"X-Request-Timeout": "1"})
            )
            await until(
                lambda: sent.done() or any(in_flight.attempt for in_flight in site.gateway.registry)
            )
            os.kill(server.pid, signal.SIGSTOP)  # so that it can't report its slot free
            try:
                with pytest.raises(package.InternalServerError) as caught:
                    await sent
                assert error_facts(caught.value) == (504, "node_timeout", "node_timeout")
                assert caught.value.response.headers["x-should-retry"] == "false"
                assert [record.status for record in site.records] == [504]
                assert site.gateway.fleet.nodes["node-0"].leased == 1  # it still runs there
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await site.until_idle()


async def test_a_client_that_stops_waiting_raises_its_own_timeout(tmp_path: Path) -> None:
    with running_demo_servers(1, slots=1, context=16_384, size="medium") as (server,):
        # The client's timer started when it sent the request, some time ago.
        options: dict[str, Any] = {"timeout": 2.0, "max_retries": 0}
        listed = {"x-stainless-timeout": "1", "x-stainless-read-timeout": "1"}
        async with running_site(tmp_path, [server.url]) as site, site.openai(**options) as client:
            with pytest.raises(package.APITimeoutError):
                await client.chat.completions.create(**LONG, extra_headers=listed)
            await site.until_idle()
            assert [record.status for record in site.records] == [504]
            node = site.gateway.fleet.nodes["node-0"]
            assert (node.failures, node.circuit.suspect_callers) == (0, set())


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
            asks: dict[str, Any] = {
                "chat": client.chat.completions.create,
                "responses": client.responses.create,
            }
            bodies: dict[str, Any] = {
                "chat": LONG,
                "responses": {"model": "demo", "input": "on", "max_output_tokens": 15_000},
            }
            stream = await asks[api](**bodies[api], stream=True)
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


async def test_requests_that_the_operator_cancels_are_errors_of_their_clients(
    tmp_path: Path, narrow_url: str
) -> None:
    async with (
        running_site(tmp_path, [narrow_url]) as site,
        site.openai() as client,
        httpx.AsyncClient(
            base_url=site.running.admin_url, trust_env=False, verify=NO_TLS, timeout=60
        ) as admin,
    ):
        stream = await client.chat.completions.create(**LONG, stream=True)
        tag = {"X-Request-ID": "waiting-1"}
        queued = asyncio.create_task(client.chat.completions.create(**CHAT, extra_headers=tag))
        await until(site.gateway.scheduler.queue_positions)
        listed = (await admin.get("/admin/requests")).json()["requests"]
        assert [request["state"] for request in listed] == ["running", "waiting"]
        for name in ("waiting-1", listed[0]["id"]):
            assert (await admin.delete(f"/admin/requests/{name}")).status_code == 200
        with pytest.raises(package.InternalServerError, match="has cancelled") as refused:
            await queued
        assert error_facts(refused.value) == (503, "cancelled", "cancelled")
        with pytest.raises(package.APIError, match="has cancelled"):
            await read(aiter(stream))
        gc.collect()  # what its generators hold, on this thread and not on the store's
        await site.until_idle()
        assert await busy(narrow_url) == 0
        assert len(site.records) == 2  # neither was retried
        assert site.gateway.fleet.nodes["node-0"].failures == 0
