"""The official `anthropic` client, unmodified, over real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic as package
import httpx
import pytest
from anthropic import AsyncAnthropic

from gateway.callers.keys import new_key
from tests.clients.conftest import CONTEXT
from tests.clients.site import HELLO, Site, running_site
from tests.servers import running_demo_servers

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

# This client no longer has a parameter `temperature`.
ASK: dict[str, Any] = {
    "model": "demo",
    "messages": HELLO,
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
}
TOOL: Any = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


async def direct_text(chat_node: httpx.AsyncClient) -> str:
    body = {"messages": HELLO, "max_tokens": 24, "temperature": 0}
    text: str = (await chat_node.post("/v1/messages", json=body)).json()["content"][0]["text"]
    assert text.strip()
    return text


@pytest.mark.smoke
async def test_a_message_has_the_servers_own_text(
    anthropic: AsyncAnthropic, chat_node: httpx.AsyncClient
) -> None:
    message = await anthropic.messages.create(**ASK)
    assert message.role == "assistant"
    assert message.content[0].type == "text"
    assert message.content[0].text == await direct_text(chat_node)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 24


@pytest.mark.smoke
async def test_a_streamed_message_has_the_same_text(
    anthropic: AsyncAnthropic, chat_node: httpx.AsyncClient
) -> None:
    async with anthropic.messages.stream(**ASK) as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    assert text == await direct_text(chat_node)
    assert final.content[0].type == "text"
    assert final.content[0].text == text
    assert final.usage.output_tokens == 24


async def test_a_streams_events_come_in_their_order(anthropic: AsyncAnthropic) -> None:
    kinds = [event.type async for event in await anthropic.messages.create(**ASK, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_both_kinds_of_usage_are_metered(anthropic: AsyncAnthropic, site: Site) -> None:
    async with anthropic.messages.stream(**ASK) as stream:
        usage = (await stream.get_final_message()).usage
    await site.until_idle()
    [record] = site.records
    assert record.prompt_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert record.completion_tokens == usage.output_tokens == 24


@pytest.mark.smoke
async def test_tokens_are_counted_as_the_server_counts_them(
    anthropic: AsyncAnthropic, chat_node: httpx.AsyncClient
) -> None:
    body: Any = {"model": "demo", "messages": HELLO}
    counted = await anthropic.messages.count_tokens(**body)
    direct = (await chat_node.post("/v1/messages/count_tokens", json=body)).json()
    assert counted.input_tokens == direct["input_tokens"] > 0
    message = await anthropic.messages.create(**ASK)
    cached = message.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == message.usage.input_tokens + cached


@pytest.mark.smoke
async def test_a_tool_is_called(anthropic: AsyncAnthropic) -> None:
    message = await anthropic.messages.create(
        **ASK | {"max_tokens": 400}, tools=[TOOL], tool_choice={"type": "any"}
    )
    assert message.stop_reason == "tool_use"
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "weather"
    assert list(call.input) == ["city"]


async def test_models_are_listed_in_anthropics_form(anthropic: AsyncAnthropic) -> None:
    page = await anthropic.models.list()
    assert page.has_more is False
    assert {"demo", "demo-embed", "helper"} <= {model.id for model in page.data}
    assert all(model.display_name for model in page.data)
    assert all(model.created_at.year > 2020 for model in page.data)
    assert (await anthropic.models.retrieve("demo")).display_name == "demo"


async def test_the_request_has_an_id_that_the_client_finds(anthropic: AsyncAnthropic) -> None:
    message = await anthropic.messages.create(**ASK, extra_headers={"X-Request-ID": "mine-2"})
    assert message._request_id == "mine-2"


# Errors.


def kind(error: package.APIStatusError) -> str:
    """The type in the error's body."""
    assert isinstance(error.body, dict)
    assert error.body["type"] == "error"
    assert error.body["request_id"] == error.response.headers["request-id"]
    found: str = error.body["error"]["type"]
    return found


async def test_an_unknown_model_is_not_found(anthropic: AsyncAnthropic, site: Site) -> None:
    with pytest.raises(package.NotFoundError, match="'nobody'") as caught:
        await anthropic.messages.create(**ASK | {"model": "nobody"})
    assert kind(caught.value) == "not_found_error"
    assert [record.status for record in site.records] == [404]


@pytest.mark.smoke
async def test_a_prompt_that_is_too_long_is_a_bad_request(anthropic: AsyncAnthropic) -> None:
    messages = [{"role": "user", "content": "river stone " * CONTEXT}]
    with pytest.raises(package.BadRequestError, match=f"{CONTEXT} tokens") as caught:
        await anthropic.messages.create(**ASK | {"messages": messages})
    assert kind(caught.value) == "invalid_request_error"


async def test_a_key_is_read_from_this_clients_header(tmp_path: Path, chat_url: str) -> None:
    key, other = new_key("one"), new_key("other")
    settings = {
        "keys": [
            {"id": key.id, "sha256": key.sha256},
            {"id": other.id, "sha256": other.sha256, "models": ["another"]},
        ]
    }
    async with running_site(tmp_path, [chat_url], settings) as site:
        async with site.anthropic(key.text) as client:
            assert (await client.messages.create(**ASK)).content
        async with site.anthropic("lg_wrong_key") as client:
            with pytest.raises(package.AuthenticationError) as caught:
                await client.messages.create(**ASK)
        assert kind(caught.value) == "authentication_error"
        async with site.anthropic(other.text) as client:
            with pytest.raises(package.PermissionDeniedError) as forbidden:
                await client.messages.create(**ASK)
        assert kind(forbidden.value) == "permission_error"


async def test_a_queue_timeout_is_an_overload_and_not_retried(
    tmp_path: Path, narrow_url: str
) -> None:
    settings = {"queue": {"max_wait": 0.2}}
    async with running_site(tmp_path, [narrow_url], settings) as site, site.anthropic() as client:
        async with client.messages.stream(**ASK | {"max_tokens": 15_000}) as stream:
            await anext(aiter(stream))
            with pytest.raises(package.InternalServerError) as caught:
                await client.messages.create(**ASK)
        assert caught.value.status_code == 503
        assert kind(caught.value) == "overloaded_error"
        assert [record.status for record in site.records].count(503) == 1


@pytest.mark.smoke
async def test_an_error_after_a_heartbeat_keeps_its_type(tmp_path: Path, narrow_url: str) -> None:
    settings = {"queue": {"max_wait": 0.5}, "heartbeat": 0.1}
    async with running_site(tmp_path, [narrow_url], settings) as site, site.anthropic() as client:
        async with client.messages.stream(**ASK | {"max_tokens": 15_000}) as stream:
            await anext(aiter(stream))
            with pytest.raises(package.APIStatusError) as caught:
                async with client.messages.stream(**ASK) as waiting:
                    await read(waiting)
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["error"]["type"] == "overloaded_error"
        assert [record.status for record in site.records].count(503) == 1


async def test_a_full_queue_is_a_rate_limit(tmp_path: Path, narrow_url: str) -> None:
    settings = {"queue": {"max": 0}}
    async with (
        running_site(tmp_path, [narrow_url], settings) as site,
        site.anthropic(max_retries=0) as client,
        client.messages.stream(**ASK | {"max_tokens": 15_000}) as stream,
    ):
        await anext(aiter(stream))
        with pytest.raises(package.RateLimitError) as caught:
            await client.messages.create(**ASK)
        assert kind(caught.value) == "rate_limit_error"
        assert int(caught.value.response.headers["retry-after"]) >= 1


@pytest.mark.slow
async def test_a_node_that_dies_in_mid_stream_is_an_error_of_the_client(tmp_path: Path) -> None:
    with running_demo_servers(1, slots=1, context=16_384) as (server,):
        async with running_site(tmp_path, [server.url]) as site, site.anthropic() as client:
            async with client.messages.stream(**ASK | {"max_tokens": 15_000}) as stream:
                texts = aiter(stream.text_stream)
                for _ in range(20):
                    await anext(texts)
                server.kill()
                with pytest.raises(package.APIStatusError) as caught:
                    await read(texts)
            assert isinstance(caught.value.body, dict)
            assert caught.value.body["error"]["type"] == "api_error"


async def read(parts: AsyncIterator[Any]) -> None:
    async for _ in parts:
        pass
