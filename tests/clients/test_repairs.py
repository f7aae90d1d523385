"""The repairs of llama.cpp's responses, with the official clients over a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.clients.site import HELLO, Site, running_site
from tests.clients.test_server_gaps import ASK, CALL, CITY, MESSAGE, REFUSED, obeys, post, streamed
from tests.gateways import until

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

BOUND: Any = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
OUTPUT: dict[str, Any] = {"output_config": {"format": {"type": "json_schema", "schema": CITY}}}


class City(BaseModel):
    city: Literal["paris", "rome"]


# /v1/responses


@pytest.mark.smoke
async def test_the_events_of_a_response_are_accumulated(openai: AsyncOpenAI) -> None:
    async with openai.responses.stream(
        **ASK, text={"format": BOUND}, max_output_tokens=100
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert deltas[-1].snapshot == "".join(event.delta for event in deltas) == final.output_text
    assert final.status == "completed"
    assert final.created_at <= (final.completed_at or 0)


async def test_the_arguments_of_a_call_are_accumulated(openai: AsyncOpenAI) -> None:
    async with openai.responses.stream(**ASK, **CALL, max_output_tokens=200) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    [whole] = [event for event in events if event.type == "response.function_call_arguments.done"]
    [call] = final.output
    assert call.type == "function_call"
    assert whole.arguments == call.arguments
    assert obeys(call.arguments)
    assert call.status == "completed"


async def test_a_response_obeys_its_format(openai: AsyncOpenAI) -> None:
    limit: Any = {"max_output_tokens": 100}
    assert obeys(
        (await openai.responses.create(**ASK, **limit, text={"format": BOUND})).output_text
    )
    parsed = await openai.responses.parse(**ASK, **limit, text_format=City)
    assert parsed.output_parsed is not None
    as_object: Any = {"format": {"type": "json_object"}}
    response = await openai.responses.create(**ASK, **limit, text=as_object)
    assert response.output_text.startswith("{")


async def test_a_response_may_still_call_tools_beside_a_format(openai: AsyncOpenAI) -> None:
    """The server would bind the output to the format alone, and no tool would ever be called."""
    text: Any = {"format": BOUND}
    response = await openai.responses.create(**ASK, **CALL, text=text, max_output_tokens=200)
    assert [item.type for item in response.output] == ["function_call"]
    body = CALL | {"tool_choice": "none"}
    response = await openai.responses.create(**ASK, **body, text=text, max_output_tokens=200)
    assert obeys(response.output_text)


@pytest.mark.parametrize("limit", [6, 100_000], ids=["its own limit", "the context"])
async def test_a_response_that_was_cut_off_is_incomplete(openai: AsyncOpenAI, limit: int) -> None:
    plain = await openai.responses.create(**ASK, max_output_tokens=limit)
    stream = await openai.responses.create(**ASK, max_output_tokens=limit, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    for response in (plain, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        [message] = response.output
        assert message.type == "message"
        assert message.status == "incomplete"


async def test_the_operators_limit_cuts_off_too(chat_url: str, tmp_path: Path) -> None:
    async with running_site(tmp_path, [chat_url], {"limits": {"max_tokens": 7}}) as site:
        response = (await site.http.post("/v1/responses", json=ASK)).json()
        assert (response["usage"]["output_tokens"], response["status"]) == (7, "incomplete")


async def test_a_call_that_was_cut_off_is_incomplete(openai: AsyncOpenAI) -> None:
    stream = await openai.responses.create(**ASK, **CALL, max_output_tokens=40, stream=True)
    *_, done, last = [event async for event in stream]
    assert done.type == "response.output_item.done"
    assert done.item.type == "function_call"
    assert done.item.status == "incomplete"
    assert last.type == "response.incomplete"


# /v1/messages


@pytest.mark.smoke
async def test_a_message_obeys_its_format(anthropic: AsyncAnthropic) -> None:
    body: Any = {"model": "demo", "messages": HELLO, "max_tokens": 100}
    message = await anthropic.messages.create(**body, **OUTPUT)
    [block] = message.content
    assert block.type == "text"
    assert obeys(block.text)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    parsed = await anthropic.messages.parse(**body, output_format=City)
    assert parsed.parsed_output is not None


async def test_a_streamed_message_obeys_its_format(anthropic: AsyncAnthropic) -> None:
    body: Any = {"model": "demo", "messages": HELLO, "max_tokens": 100, **OUTPUT}
    body["extra_body"] = {"temperature": 0}
    async with anthropic.messages.stream(**body) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    plain = await anthropic.messages.create(**body)
    [block] = final.content
    assert block.type == "text"
    assert obeys(block.text)
    assert plain.content[0].type == "text"
    assert plain.content[0].text == block.text
    total = plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == total
    assert final.usage.output_tokens == plain.usage.output_tokens
    counted = await anthropic.messages.count_tokens(model="demo", messages=HELLO, **OUTPUT)
    assert counted.input_tokens == total


async def test_a_message_with_a_format_that_was_cut_off_says_so(site: Site) -> None:
    message = await post(site.http, "/v1/messages", MESSAGE | OUTPUT | {"max_tokens": 12})
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 12)


async def test_a_large_body_is_read_in_steps(site: Site) -> None:
    large = MESSAGE | {"max_tokens": 60, "metadata": {"note": "stone " * 30_000}}
    bound = await post(site.http, "/v1/messages", large | OUTPUT)
    assert obeys(bound["content"][0]["text"])
    free = await post(site.http, "/v1/messages", large | {"output_config": {"effort": "low"}})
    assert (free["stop_reason"], free["usage"]["output_tokens"]) == ("max_tokens", 60)
    assert not obeys(free["content"][0]["text"])
    text = {"text": {"format": BOUND}, "metadata": large["metadata"], "max_output_tokens": 60}
    response = await post(site.http, "/v1/responses", ASK | text)
    assert obeys(response["output"][0]["content"][0]["text"])


async def test_a_format_obeys_the_limits_of_grammars(site: Site) -> None:
    deep: Any = CITY
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    bound = {"type": "json_schema", "name": "deep", "schema": deep}
    body = MESSAGE | {"max_tokens": 5, "output_config": {"format": bound}}
    answer = await site.http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("'output_config.format' (as")
    answer = await site.http.post("/v1/responses", json=ASK | {"text": {"format": bound}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "text"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_told(site: Site, stream: bool) -> None:
    body = MESSAGE | {"max_tokens": 60, "stop_sequences": ["zzz", "a"]}
    if stream:
        *_, event, _ = await streamed(site.http, "/v1/messages", body)
        end = event["delta"]
    else:
        end = await post(site.http, "/v1/messages", body)
    assert (end["stop_reason"], end["stop_sequence"]) == ("stop_sequence", "a")


# The switches


async def test_without_repairs_a_response_is_the_servers_own(
    unrepaired: Site, chat_node: httpx.AsyncClient
) -> None:
    body = ASK | {"max_output_tokens": 6, "text": {"format": BOUND}}
    [first, *_, last] = await streamed(unrepaired.http, "/v1/responses", body)
    assert first["response"].keys() == {"id", "object", "status"}
    assert (last["type"], last["response"]["status"]) == ("response.completed", "completed")
    direct = await post(chat_node, "/v1/responses", body)
    assert last["response"]["output"][0]["content"] == direct["output"][0]["content"]


async def test_without_repairs_a_message_is_the_servers_own(
    unrepaired: Site, chat_node: httpx.AsyncClient
) -> None:
    body = MESSAGE | OUTPUT | {"max_tokens": 60, "stop_sequences": ["a"]}
    ours = await post(unrepaired.http, "/v1/messages", body)
    direct = await post(chat_node, "/v1/messages", body)
    for name in ("content", "stop_reason", "stop_sequence"):
        assert ours[name] == direct[name]


async def test_a_switch_takes_effect_at_a_reload(chat_url: str, tmp_path: Path) -> None:
    body = MESSAGE | {"max_tokens": 60, "stop_sequences": ["a"]}
    async with running_site(tmp_path, [chat_url]) as site:
        assert (await post(site.http, "/v1/messages", body))["stop_reason"] == "stop_sequence"
        site.running.write_settings({"repairs": {"stop_reason": False}})
        await until(lambda: not site.gateway.handler.config.settings.repairs.stop_reason)
        assert (await post(site.http, "/v1/messages", body))["stop_reason"] == "end_turn"
        repairs = site.gateway.handler.config.settings.repairs
        assert repairs.stream_events
        assert repairs.text_format
        assert repairs.output_config


@pytest.mark.parametrize("case", REFUSED)
async def test_items_of_a_response_that_the_server_refuses_are_repaired(
    site: Site, unrepaired: Site, case: str
) -> None:
    body: dict[str, Any] = {"model": "demo", "max_output_tokens": 2} | REFUSED[case]
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        await post(site.http, path, body)
        # Large bodies are outlined instead of parsed.
        await post(site.http, path, body | {"metadata": {"pad": "x" * 70_000}})
        assert (await unrepaired.http.post(path, json=body)).status_code == 400
    await streamed(site.http, "/v1/responses", body)


@pytest.mark.parametrize("field", ["conversation", "prompt"])
async def test_what_no_node_obeys_is_refused_by_name(site: Site, field: str) -> None:
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        for value in ("conv_1", {"id": "x"}):
            answer = await site.http.post(path, json=ASK | {field: value})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == field
        await post(site.http, path, ASK | {field: None, "max_output_tokens": 2})
