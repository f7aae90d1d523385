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
from tests.clients.site import HELLO, Site, running_site, until_busy

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


@pytest.mark.smoke
async def test_a_message_plain_and_streamed_has_the_servers_own_text_and_count(
    anthropic: AsyncAnthropic, site: Site, chat_node: httpx.AsyncClient
) -> None:
    body: Any = {"model": "demo", "messages": HELLO}
    asked = body | {"max_tokens": 24, "temperature": 0}
    direct = (await chat_node.post("/v1/messages", json=asked)).json()["content"][0]["text"]
    message = await anthropic.messages.create(**ASK, extra_headers={"X-Request-ID": "mine-2"})
    assert message._request_id == "mine-2"
    assert (message.role, message.stop_reason) == ("assistant", "max_tokens")
    async with anthropic.messages.stream(**ASK) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    counted = (await anthropic.messages.count_tokens(**body)).input_tokens
    own = (await chat_node.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    await site.until_idle()
    for one, record in zip((message, final), site.records, strict=False):
        assert one.content[0].type == "text"
        assert one.content[0].text == direct
        tokens = one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0)
        assert tokens == counted == own == record.prompt_tokens
        assert one.usage.output_tokens == record.completion_tokens == 24


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


# Errors.


def kind(error: package.APIStatusError) -> str:
    """The type in the error's body."""
    assert isinstance(error.body, dict)
    assert error.body["type"] == "error"
    assert error.body["request_id"] == error.response.headers["request-id"]
    found: str = error.body["error"]["type"]
    return found


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


async def test_each_refusal_is_the_error_of_its_type(tmp_path: Path, narrow_url: str) -> None:
    key, other = new_key("one"), new_key("other")
    allowed = [{"id": key.id, "sha256": key.sha256}]
    allowed.append({"id": other.id, "sha256": other.sha256, "models": ["another"]})  # type: ignore[dict-item]
    settings = {"queue": {"max": 0}, "keys": allowed}
    long = [{"role": "user", "content": "river stone " * 9000}]
    async with (
        running_site(tmp_path, [narrow_url], settings) as site,
        site.anthropic(key.text) as client,
        client.messages.stream(**ASK | {"max_tokens": 15_000}) as stream,
    ):
        await anext(aiter(stream))
        for sent, body, error, found in (
            (key.text, {"model": "nobody"}, package.NotFoundError, "not_found_error"),
            ("lg_wrong_key", {}, package.AuthenticationError, "authentication_error"),
            (other.text, {}, package.PermissionDeniedError, "permission_error"),
            (key.text, {}, package.RateLimitError, "rate_limit_error"),
        ):
            async with site.anthropic(sent, max_retries=0) as other_client:
                with pytest.raises(error) as caught:
                    await other_client.messages.create(**ASK | body)
            assert kind(caught.value) == found
            if found == "rate_limit_error":
                assert int(caught.value.response.headers["retry-after"]) >= 1
        await stream.close()
        await until_busy(narrow_url, 0)
        with pytest.raises(package.BadRequestError, match="prompt is too long") as refused:
            await client.messages.create(**ASK | {"messages": long})
        assert kind(refused.value) == "invalid_request_error"


async def read(parts: AsyncIterator[Any]) -> None:
    async for _ in parts:
        pass
