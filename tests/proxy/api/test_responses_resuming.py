"""Streams of `/v1/responses` go on elsewhere, and read as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.proxy import sse
from gateway.proxy.api.responses import RESPONSES
from gateway.proxy.api.responses_resuming import (
    NativeToResponsesRewriter,
    read_response,
    response_as_chat,
)
from gateway.proxy.api.resuming import ReasoningEndMark
from gateway.proxy.transcript import EventTemplate, SplicePoint, Transcript
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.proxy.proxy_over_nodes import A_FIRST, Stream, proxy_over

PATH = "/v1/responses"
ADDED = {"type": "response.output_item.added", "item": {"id": "msg_1", "type": "message"}}
THOUGHT = {"type": "response.output_item.added", "item": {"id": "rs_1", "type": "reasoning"}}
POINT = SplicePoint("", "", 10, 2, 2)


def text(delta: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "item_id": "msg_1", "delta": delta, **fields}


def read(*values: dict[str, Any]) -> Transcript:
    transcript = Transcript()
    created = {"type": "response.created", "response": {"id": "resp_1", "object": "response"}}
    for value in (created, *values):
        read_response(transcript, value)
    return transcript


def events(data: bytes) -> list[dict[str, Any]]:
    return [msgspec.json.decode(sse.payload(event)) for event in sse.split(data)]


def normal(stream: Stream) -> list[dict[str, Any]]:
    """Its events without ids and times."""
    names: dict[str, str] = {}

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: names.setdefault(one, f"id-{len(names)}")
                if name in {"id", "item_id"}
                else clean(one)
                for name, one in value.items()
                if name not in {"created_at", "completed_at", "timings", "input_tokens_details"}
            }
        return [clean(one) for one in value] if isinstance(value, list) else value

    return [clean(value) for value in stream.values]


@pytest.mark.parametrize("cut", [5, 8, 20])
async def test_a_cut_stream_goes_on_on_another_node(tmp_path: Path, cut: int) -> None:
    nodes = EmulatedNode(), EmulatedNode()
    async with proxy_over(tmp_path, *nodes, nodes=A_FIRST) as proxy:
        body: dict[str, Any] = {"temperature": 0, "max_output_tokens": 25}
        whole = await proxy.stream(PATH, **body)
        nodes[0].faults.next("reset", after_events=cut)
        resumed = await proxy.stream(PATH, **body)
        assert normal(resumed) == normal(whole)
        assert proxy.finished[-1].attempts == 2
        assert proxy.finished[-1].completion_tokens == proxy.finished[0].completion_tokens
        numbers = [value["sequence_number"] for value in resumed.values]
        assert numbers == list(range(len(numbers)))


async def test_a_stream_that_is_not_repaired_goes_on_too(tmp_path: Path) -> None:
    nodes = EmulatedNode(), EmulatedNode()
    repairs = {"stream_events": False, "stop_reason": False}
    async with proxy_over(tmp_path, *nodes, nodes=A_FIRST, repairs=repairs) as proxy:
        whole = await proxy.stream(PATH, temperature=0, max_output_tokens=25)
        nodes[0].faults.next("reset", after_events=9)
        resumed = await proxy.stream(PATH, temperature=0, max_output_tokens=25)
        texts = [[v.get("delta") for v in one.values if "delta" in v] for one in (whole, resumed)]
        assert "".join(texts[0]) == "".join(texts[1])
        assert [v["type"] for v in resumed.values] == [v["type"] for v in whole.values]


@each_case(
    ("value", "reason"),
    [
        ({"type": "response.output_item.added", "item": {"id": "f", "type": "function_call"}},
         "more than text"),
        ({"type": "response.output_item.added", "item": {"id": "m", "type": "message"}},
         "more than text"),
        (THOUGHT, "more than text"),
        ({"type": "response.refusal.delta", "delta": "no"}, "more than text"),
        (text("x", logprobs=[{}]), "probabilities"),
    ],
)  # fmt: skip
def test_what_holds_more_than_text_is_not_resumed(value: dict[str, Any], reason: str) -> None:
    order = [ADDED, value] if value is not THOUGHT else [THOUGHT, value]
    assert reason in str(read(*order).unresumable)


@each_case(
    "body",
    [
        {"tools": [{"type": "function", "name": "f"}]},
        {"text": {"format": {"type": "json_schema", "schema": {}}}},
        {"reasoning": {"effort": "high"}},
        {"top_logprobs": 3},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        {"input": 7},
    ],
)
def test_some_requests_are_not_resumed(body: dict[str, Any]) -> None:
    assert RESPONSES.unresumable_reason({"input": "a"}, Transcript()) is None
    assert RESPONSES.unresumable_reason({"input": "a", **body}, Transcript())


def test_an_input_is_written_as_a_chat() -> None:
    part = {"type": "output_text", "text": "b", "annotations": []}
    given = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "id": "m", "content": [part]},
        {"role": "developer", "content": [{"type": "input_text", "text": "c"}]},
    ]
    chat = response_as_chat({"input": given, "instructions": "i", "max_output_tokens": 3})
    assert chat == {
        "messages": [
            {"role": "system", "content": "i"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
            {"role": "developer", "content": [{"type": "text", "text": "c"}]},
        ]
    }
    assert response_as_chat({"input": "a"}) == {"messages": [{"role": "user", "content": "a"}]}


def test_deltas_are_read_by_their_template() -> None:
    first = {"type": "response.created"}
    event = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
    event += b'"item_id":"msg_1","delta":" a"}\n\n'
    template = EventTemplate.of(event, read_response, first)
    assert template is not None
    assert template.texts(event + event) == [" a", " a"]


def test_reasoning_goes_on_and_ends_in_a_message() -> None:
    thought = {"type": "response.reasoning_text.delta", "item_id": "rs_1", "delta": "hm"}
    rewriter = NativeToResponsesRewriter(read(THOUGHT, thought), POINT, ReasoningEndMark("</t>"))
    data = b"".join(
        rewriter.rewrite({"content": part, "stop": part == "", "tokens_predicted": 4})
        for part in ("mm</", "t>\n\n", "yes", "")
    )
    found = events(data)
    assert [value["type"].removeprefix("response.") for value in found] == [
        "reasoning_text.delta", "output_item.added", "content_part.added", "output_text.delta",
        "output_item.done", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    output = found[-1]["response"]["output"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hmmm"}]
    assert output[1]["content"][0]["text"] == "yes"
    assert [item["id"] for item in output] == ["rs_1", "msg_1"]


def test_a_numbered_stream_goes_on_with_its_numbers() -> None:
    rewriter = NativeToResponsesRewriter(read(ADDED, text("a", sequence_number=8)), POINT)
    data = rewriter.rewrite({"content": "b"})
    data += rewriter.rewrite({"content": "", "stop": True, "stop_type": "limit"})
    found = events(data)
    assert [value["sequence_number"] for value in found] == list(range(9, 14))
    assert found[0]["output_index"] == found[0]["content_index"] == 0
    assert found[-1]["type"] == "response.completed"
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "ab"


def test_ends_that_were_sent_are_not_sent_again() -> None:
    done = {"type": "response.output_text.done", "item_id": "msg_1", "text": "a"}
    transcript = read(ADDED, text("a"), done)
    assert transcript.finish_reason == "stop"
    found = events(NativeToResponsesRewriter(transcript, POINT).final_events("stop", usage=True))
    assert [value["type"].removeprefix("response.") for value in found] == [
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
