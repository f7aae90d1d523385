"""The repairs of llama.cpp's responses, with the official clients over a real server."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.clients.site import HELLO, Site
from tests.clients.test_server_gaps import ASK, CALL, CITY, MESSAGE, REFUSED, obeys, post, streamed

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
