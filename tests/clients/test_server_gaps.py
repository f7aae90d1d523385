"""What today's llama.cpp server leaves out or ignores, asked directly, without a gateway.

A test that fails here is good news: the server has caught up, and the repair that it names can go
(its key of `repairs` in the settings, its code and its tests).
"""

from __future__ import annotations

from typing import Any, Literal

import httpx
import msgspec
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from gateway.api import sse
from tests.clients.site import HELLO, Site

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["paris", "rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ASK: dict[str, Any] = {"model": "demo", "input": "hello there", "temperature": 0}
MESSAGE: dict[str, Any] = {"model": "demo", "messages": HELLO, "temperature": 0}
CALL: dict[str, Any] = {
    "tools": [{"type": "function", "name": "weather", "parameters": CITY}],
    "tool_choice": "required",
}


def caught_up(repair: str) -> str:
    return f"the server has caught up: remove repair {repair}"


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await client.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return [msgspec.json.decode(sse.payload(event)) for event in sse.split(answer.content)]


def obeys(text: str) -> bool:
    """Whether a text has the format that was asked for."""
    try:
        return msgspec.json.decode(text) in ({"city": "paris"}, {"city": "rome"})
    except msgspec.DecodeError:
        return False


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("response.output_item.added", {"sequence_number", "output_index"}),
        (
            "response.output_text.delta",
            {"sequence_number", "output_index", "content_index", "logprobs"},
        ),
        ("response.output_item.done", {"sequence_number", "output_index"}),
    ],
)
async def test_the_events_of_a_response_lack_their_numbers(
    chat_node: httpx.AsyncClient, kind: str, names: set[str]
) -> None:
    events = await streamed(chat_node, "/v1/responses", ASK | {"max_output_tokens": 8})
    event = next(event for event in events if event["type"] == kind)
    assert not names <= event.keys(), caught_up("stream_events")


async def test_a_response_ignores_text_format(chat_node: httpx.AsyncClient) -> None:
    body = ASK | {"max_output_tokens": 100}
    bound = {"type": "json_schema", "name": "city", "schema": CITY}
    ignored = await post(chat_node, "/v1/responses", body | {"text": {"format": bound}})
    text = ignored["output"][0]["content"][0]["text"]
    assert not obeys(text), caught_up("text_format")
    # The field that it does obey, which the repair relies on.
    chat_format = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    obeyed = await post(chat_node, "/v1/responses", body | {"response_format": chat_format})
    assert obeys(obeyed["output"][0]["content"][0]["text"])


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": CITY}}},
        {"output_format": {"type": "json_schema", "schema": CITY}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}},
        {"json_schema": CITY},
        {"grammar": 'root ::= "{\\"city\\":\\"paris\\"}"'},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_message_ignores_every_field_that_might_bind_it(
    chat_node: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    message = await post(chat_node, "/v1/messages", MESSAGE | {"max_tokens": 100} | fields)
    # Were it one of the fields further down, no translation to a chat would be needed.
    assert not obeys(message["content"][0]["text"]), caught_up("output_config")


async def test_a_message_calls_a_stop_sequence_the_end_of_the_turn(
    chat_node: httpx.AsyncClient,
) -> None:
    body = MESSAGE | {"max_tokens": 60, "stop_sequences": ["a"]}
    message = await post(chat_node, "/v1/messages", body)
    assert message["stop_sequence"] == "a"
    assert message["stop_reason"] == "end_turn", caught_up("stop_reason")
    *_, delta, _ = await streamed(chat_node, "/v1/messages", body)
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": "a"}, caught_up(
        "stop_reason"
    )


@pytest.mark.parametrize("limit", [5, 100_000], ids=["its own limit", "the context"])
async def test_a_response_that_was_cut_off_is_called_completed(
    chat_node: httpx.AsyncClient, limit: int
) -> None:
    body = ASK | {"max_output_tokens": limit}
    response = await post(chat_node, "/v1/responses", body)
    assert response["status"] == "completed", caught_up("stop_reason")
    assert "incomplete_details" not in response, caught_up("stop_reason")
    last = (await streamed(chat_node, "/v1/responses", body))[-1]
    assert last["type"] == "response.completed", caught_up("stop_reason")
    assert last["response"]["status"] == "completed", caught_up("stop_reason")


async def test_a_call_that_was_cut_off_is_called_completed(chat_node: httpx.AsyncClient) -> None:
    response = await post(chat_node, "/v1/responses", ASK | CALL | {"max_output_tokens": 40})
    [call] = response["output"]
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(call["arguments"])
    assert call["status"] == "completed", caught_up("stop_reason")


TEXT = {"type": "input_text", "text": "a"}
ASKED = {"role": "user", "content": "hello there"}
SAID = {"role": "assistant", "content": "hello"}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "think"}]}
CUSTOM = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"\n'}
DONE = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
REFUSED: dict[str, dict[str, Any]] = {
    "no type": {"input": [ASKED, SAID, ASKED]},
    "type null": {"input": [ASKED, {"type": None, **SAID}, ASKED]},
    "parts": {"input": [ASKED, SAID | {"content": [TEXT | {"type": "output_text"}]}, ASKED]},
    "summary": {"input": [ASKED, THOUGHT, ASKED]},
    "no text": {"input": [ASKED, THOUGHT | {"content": None}, ASKED]},
    "encrypted": {"input": [ASKED, {"type": "reasoning", "summary": [], "encrypted_content": ""}]},
    "no summary": {
        "input": [ASKED, {"type": "reasoning", "content": [TEXT | {"type": "reasoning_text"}]}]
    },
    "custom tool": {"input": [ASKED, CUSTOM, DONE]},
    "its parts": {"input": [ASKED, CUSTOM, DONE | {"output": [TEXT]}]},
    "tools": {"input": "hello there", "tools": None},
}
"""Bodies of `/v1/responses` that clients send, and the server refuses."""


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
async def test_a_response_is_refused_for_items_that_openai_takes(
    chat_node: httpx.AsyncClient, path: str, case: str
) -> None:
    body = {"model": "demo", "max_output_tokens": 2} | REFUSED[case]
    assert (await chat_node.post(path, json=body)).status_code == 400, caught_up("input_items")


# Repaired, with the official clients.


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
