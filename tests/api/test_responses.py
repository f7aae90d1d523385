"""OpenAI's responses: repaired, assembled, and resumed elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api import sse
from gateway.api.base import ResponseRewriter
from gateway.api.json_values import FIELDS_DECODER, parse_object, run_at_once
from gateway.api.responses import (
    MOST_ITEMS,
    RESPONSES,
    NativeToResponsesRewriter,
    ResponseLimits,
    ResponsesRepair,
    read_response,
)
from gateway.api.resuming import ReasoningEndMark, named_event
from gateway.api.transcript import SplicePoint, Transcript
from gateway.config.settings import Settings
from gateway.lease import NodeInfo
from gateway.transport.errors import InvalidResponse
from tests.api.events import answering, values
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import Stream, proxy_over
from tests.virtual import in_virtual_time

USAGE = {"input_tokens": 15, "output_tokens": 4, "total_tokens": 19}
NOW = 1_800_000_000
END = NOW + 5


LIMITS = ResponseLimits(100, 4096)


def repair(*, events: bool = True, limits: ResponseLimits | None = LIMITS) -> ResponsesRepair:
    return ResponsesRepair(
        numbers_events=events,
        limits=None if limits is None else lambda: limits,
        model="demo",
        created_at=NOW,
    )


def message(number: int, words: list[str]) -> list[dict[str, Any]]:
    """The events of a message: those of its beginning, its deltas, those of its end."""
    ref = {"item_id": f"msg_{number}"}
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": "".join(words)}
    begun = {"content": [], "id": f"msg_{number}", "role": "assistant", "status": "in_progress"}
    whole = {"type": "message", "status": "completed", "id": f"msg_{number}", "content": [part]}
    return [
        {"type": "response.output_item.added", "item": {**begun, "type": "message"}},
        {"type": "response.content_part.added", **ref, "part": {"type": "output_text", "text": ""}},
        *({"type": "response.output_text.delta", **ref, "delta": word} for word in words),
        {"type": "response.output_text.done", **ref, "text": "".join(words)},
        {"type": "response.content_part.done", **ref, "part": part},
        {"type": "response.output_item.done", "item": whole},
    ]


def reasoning(number: int, words: list[str]) -> list[dict[str, Any]]:
    item = {"id": f"rs_{number}", "summary": [], "type": "reasoning", "encrypted_content": ""}
    text = {"text": "".join(words), "type": "reasoning_text"}
    return [
        {"type": "response.output_item.added", "item": {**item, "content": []}},
        *(
            {"type": "response.reasoning_text.delta", "delta": word, "item_id": f"rs_{number}"}
            for word in words
        ),
        {"type": "response.output_item.done", "item": {**item, "content": [text]}},
    ]


def call(number: int, parts: list[str]) -> list[dict[str, Any]]:
    item = {"id": f"fc_{number}", "type": "function_call", "call_id": "call_1", "name": "weather"}
    begun = {**item, "arguments": "", "status": "in_progress"}
    whole = {**item, "arguments": "".join(parts), "status": "completed"}
    kind = "response.function_call_arguments.delta"
    return [
        {"type": "response.output_item.added", "item": begun},
        *({"type": kind, "delta": part, "item_id": f"fc_{number}"} for part in parts),
        {"type": "response.output_item.done", "item": whole},
    ]


def stream(*items: list[dict[str, Any]], usage: Any = None) -> list[bytes]:
    """The events of a response with these items."""
    begun = {"id": "resp_1", "object": "response", "status": "in_progress"}
    output = [event["item"] for item in items for event in item if event["type"].endswith("m.done")]
    whole = {"id": "resp_1", "object": "response", "created_at": END, "status": "completed"}
    whole |= {"model": "demo", "output": output, "usage": usage or USAGE}
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *(event for item in items for event in item),
        {"type": "response.completed", "response": whole, "timings": {"prompt_ms": 0.1}},
    ]
    return [named_event(event) for event in events]


TEXT = stream(message(1, [" plant", " best", "\n\ndata:", ' "output_index":7,']))
CALL = stream(message(1, ["So"]), call(2, ["{", '"city":', ' "rome"}']))
THOUGHT = stream(reasoning(1, [" summer", " tree"]), message(2, [" lamp", " seven"]))


def rewritten(rewriter: ResponseRewriter, events: list[bytes]) -> list[Any]:
    """The data of all events, which came one by one."""
    out = [rewriter.rewrite_events(event) for event in events]
    for event in sse.split(b"".join(out)):
        assert sse.event_name(event).decode() == parse_object(sse.payload(event))["type"]
    return values(b"".join(out))


def test_each_event_gets_its_numbers() -> None:
    events = rewritten(repair(), THOUGHT)
    assert [event["sequence_number"] for event in events] == list(range(len(THOUGHT)))
    deltas = [event for event in events if event["type"].endswith(".delta")]
    assert [(event["output_index"], event["content_index"]) for event in deltas] == [
        *((0, 0), (0, 0)),
        *((1, 0), (1, 0)),
    ]
    assert [event["logprobs"] for event in events if "output_text." in event["type"]] == [[]] * 3
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == [0, 1]
    assert done[0]["item"]["status"] == "completed"


def test_the_arguments_of_a_call_are_told_whole_before_its_end() -> None:
    events = rewritten(repair(), CALL)
    at = next(at for at, event in enumerate(events) if event["type"].endswith("arguments.done"))
    assert events[at] == {
        "type": "response.function_call_arguments.done",
        "sequence_number": at,
        "output_index": 1,
        "item_id": "fc_2",
        "name": "weather",
        "arguments": '{"city": "rome"}',
    }
    assert events[at + 1]["type"] == "response.output_item.done"
    assert "content_index" not in events[at - 1]


@each_case(
    ("limits", "cut_off"),
    [
        (ResponseLimits(4, None), True),
        (ResponseLimits(5, None), False),
        (ResponseLimits(None, 19), True),
        (ResponseLimits(None, 20), False),
        (ResponseLimits(), False),
    ],
)
@each_case("events", [True, False])
def test_a_response_that_was_cut_off_is_incomplete(
    limits: ResponseLimits, cut_off: bool, events: bool
) -> None:
    last = rewritten(repair(events=events, limits=limits), TEXT)[-1]
    plain = parse_object(sse.payload(TEXT[-1]))["response"]
    body = repair(events=events, limits=limits).rewrite_body(msgspec.json.encode(plain))
    for response in (last["response"], parse_object(run_at_once(body))):
        assert response["status"] == ("incomplete" if cut_off else "completed")
        assert response["output"][-1]["status"] == response["status"]
        details = {"reason": "max_output_tokens"} if cut_off else None
        assert response.get("incomplete_details") == details
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["timings"]


def test_a_call_whose_arguments_were_cut_off_is_incomplete() -> None:
    events = stream(call(1, ["{", '"city":', ' "ro']))
    for numbered in (True, False):
        *_, done, last = rewritten(repair(events=numbered), events)
        assert done["item"]["status"] == "incomplete"
        assert last["response"]["output"] == [done["item"]]
    *_, done, last = rewritten(repair(limits=None), events)
    assert done["item"]["status"] == last["response"]["status"] == "completed"


def test_what_is_switched_off_passes_untouched() -> None:
    off = repair(events=False, limits=None)
    status_only = repair(events=False)
    for event in (*TEXT, *CALL, *THOUGHT):
        assert off.rewrite_events(event) is event
        assert status_only.rewrite_events(event) == event
    body = b'{"object": "response", "status": "completed", "usage": {"output_tokens": 100}}'
    assert run_at_once(off.rewrite_body(body)) is body


def test_the_number_of_items_is_bounded() -> None:
    rewriter = repair()
    for number in range(MOST_ITEMS):
        rewriter.rewrite_events(named_event(call(number, [])[0]))
    with pytest.raises(InvalidResponse):
        rewriter.rewrite_events(named_event(call(MOST_ITEMS, [])[0]))


LLAMA_CPP, OPENAI = answering(), answering("openai", None)
SCHEMA = {"type": "object"}
BOUND = {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}
BOUND_CHAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
TOOLS = [{"type": "function", "name": "look"}]


def settings(**repairs: bool) -> Settings:
    return Settings.model_validate({"repairs": repairs})


def added(body: dict[str, Any], kind: str = "llama.cpp", **repairs: bool) -> Any:
    fields = FIELDS_DECODER.decode(msgspec.json.encode(body))
    return RESPONSES.added_fields(fields, kind, settings(**repairs))


def rewriter_of(body: object, node: NodeInfo, *, stream: bool = False, **repairs: bool) -> Any:
    bodies = [msgspec.json.encode(body)]
    return RESPONSES.response_rewriter(bodies, "m", node, settings(**repairs), stream=stream)


def test_only_llama_cpp_is_repaired_and_only_where_it_is_switched_on() -> None:
    for stream in (True, False):
        assert rewriter_of({}, LLAMA_CPP, stream=stream) is not None
        assert rewriter_of({}, OPENAI, stream=stream) is None
        off = rewriter_of({}, LLAMA_CPP, stream=stream, stream_events=False, stop_reason=False)
        assert off is None
        numbers_only = rewriter_of({}, LLAMA_CPP, stream=stream, stop_reason=False)
        assert (numbers_only is not None) is stream


@each_case(
    ("body", "node", "cut_off"),
    [
        ({"max_output_tokens": 4}, LLAMA_CPP, True), ({"max_output_tokens": 5}, LLAMA_CPP, False),
        ({"max_output_tokens": 5, "max_tokens": 4}, LLAMA_CPP, True),
        ({"max_output_tokens": None, "n_predict": -1}, LLAMA_CPP, False),
        ({"max_output_tokens": 10**400, "max_tokens": 1e300}, LLAMA_CPP, False),
        ({}, answering(context=19), True), ({}, answering(context=None), False),
        ([], LLAMA_CPP, False),
    ],
)  # fmt: skip
def test_the_limits_are_of_body_and_node(body: Any, node: NodeInfo, cut_off: bool) -> None:
    rewriter = rewriter_of(body, node)
    assert rewriter is not None
    plain = parse_object(sse.payload(TEXT[-1]))["response"]
    told = run_at_once(rewriter.rewrite_body(msgspec.json.encode(plain)))
    assert parse_object(told)["status"] == ("incomplete" if cut_off else "completed")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text": {"format": BOUND}}, BOUND_CHAT),
        ({"text": {"format": BOUND}, "tools": TOOLS, "tool_choice": "none"}, BOUND_CHAT),
        ({"text": {"format": {"type": "json_object"}}}, {"type": "json_object"}),
    ],
)
def test_a_format_is_told_in_the_words_that_the_server_obeys(body: Any, expected: Any) -> None:
    assert any(mark in msgspec.json.encode(body) for mark in RESPONSES.added_fields_marks)
    assert added(body) == {"response_format": expected}
    assert added(body, "openai") is None
    assert added(body, text_format=False) is None


@each_case(
    "body",
    [
        {"text": {"format": {"type": "text"}}}, {"text": "format"}, {"format": BOUND},
        {"text": {"format": BOUND}, "tools": TOOLS}, {"text": {"format": BOUND}, "grammar": "x"},
        {"text": {"format": BOUND}, "response_format": {"type": "json_object"}},
    ],
)  # fmt: skip
def test_all_other_bodies_stay_as_they_are(body: Any) -> None:
    assert added(body) is None


def input_sent(items: list[Any]) -> Any:
    """The input that a node gets for these items; None: it stays as it is."""
    fields = FIELDS_DECODER.decode(msgspec.json.encode({"input": items}))
    edit = RESPONSES.added_fields(fields, "llama.cpp", Settings()) or {}
    return msgspec.json.decode(msgspec.json.encode(edit.get("input")))


TURN = {"role": "assistant", "content": "a"}
NOTHING_THOUGHT: dict[str, Any] = {"type": "reasoning", "summary": []}
SUMMARY = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
THOUGHT_ITEM = NOTHING_THOUGHT | {
    "summary": SUMMARY,
    "content": [{"type": "reasoning_text", "text": "a\n\nb"}],
}
PATCH = {"call_id": "c", "name": "patch"}


@each_case(
    ("item", "repaired"),
    [
        (TURN, [TURN | {"type": "message"}]),
        (NOTHING_THOUGHT | {"summary": SUMMARY}, [THOUGHT_ITEM]),
        (NOTHING_THOUGHT | {"encrypted_content": "x"}, []),
        (
            {"type": "custom_tool_call", **PATCH, "input": '"'},
            [{"type": "function_call", **PATCH, "arguments": '{"input":"\\""}'}],
        ),
        (
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            [{"type": "function_call_output", "call_id": "c", "output": "done"}],
        ),
    ],
)
def test_an_item_is_given_in_a_form_that_the_server_takes(item: Any, repaired: list[Any]) -> None:
    asked = {"role": "user", "content": 'an "assistant"'}
    assert input_sent([asked, item, 7]) == [asked, *repaired, 7]
    fields = FIELDS_DECODER.decode(msgspec.json.encode({"input": [item], "tools": None}))
    assert RESPONSES.added_fields(fields, "openai", Settings()) is None
    off = Settings.model_validate({"repairs": {"input_items": False}})
    assert not RESPONSES.added_fields(fields, "llama.cpp", off)


@each_case(
    "items",
    [
        [TURN | {"type": "message"}],
        [NOTHING_THOUGHT | {"content": [{"type": "reasoning_text", "text": "a"}]}],
        ["assistant", None],
        [TURN, "x" * (4 << 20)],
        [TURN] * 2001,
    ],
)
def test_items_that_the_server_takes_stay_as_they_are(items: list[Any]) -> None:
    assert input_sent(items) is None


PATH = "/v1/responses"
BEGUN_THOUGHT = {"type": "response.output_item.added", "item": {"id": "rs_1", "type": "reasoning"}}
POINT = SplicePoint("", "", 10, 2, 2)


def read(*sent: dict[str, Any]) -> Transcript:
    transcript = Transcript()
    created = {"type": "response.created", "response": {"id": "resp_1", "object": "response"}}
    for value in (created, *sent):
        read_response(transcript, value)
    return transcript


def shown(stream: Stream) -> list[Any]:
    """Its events, without ids and times."""
    names = ("type", "delta", "text", "sequence_number", "output_index", "content_index")
    return [[value.get(name) for name in names] for value in stream.values]


@in_virtual_time
async def test_a_stream_that_is_cut_anywhere_goes_on_on_another_node(tmp_path: Path) -> None:
    nodes = EmulatedNode(), EmulatedNode()
    nodes[0].faults.share_next(nodes[1].faults)
    never: dict[str, Any] = {"health": {"failures": 1000}, "retries": {"quarantine": 0}}
    async with proxy_over(tmp_path, *nodes, **never) as proxy:
        body: dict[str, Any] = {"temperature": 0, "max_output_tokens": 9}
        whole = await proxy.stream(PATH, **body)
        for cut in range(1, len(whole.events)):
            nodes[0].faults.next("reset", after_events=cut)
            resumed = await proxy.stream(PATH, **body)
            assert shown(resumed) == shown(whole), cut
            ends = [one.values[-1]["response"] for one in (whole, resumed)]
            assert ends[0]["output"][0]["content"] == ends[1]["output"][0]["content"]
            assert ends[0]["usage"] == ends[1]["usage"]
            assert sum(outcome != "ok" for _, outcome in proxy.outcomes) == cut
            if cut < len(whole.events) - 3:  # events behind the text count as tokens, too
                assert proxy.finished[-1].completion_tokens == 9


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
    chat = RESPONSES.chat_body({"input": given, "instructions": "i", "max_output_tokens": 3})
    assert chat == {
        "messages": [
            {"role": "system", "content": "i"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
            {"role": "developer", "content": [{"type": "text", "text": "c"}]},
        ]
    }
    assert RESPONSES.chat_body({"input": "a"}) == {"messages": [{"role": "user", "content": "a"}]}


def test_reasoning_goes_on_and_ends_in_a_message() -> None:
    thought = {"type": "response.reasoning_text.delta", "item_id": "rs_1", "delta": "hm"}
    rewriter = NativeToResponsesRewriter(
        read(BEGUN_THOUGHT, thought), POINT, ReasoningEndMark("</t>")
    )
    data = b"".join(
        rewriter.rewrite({"content": part, "stop": part == "", "tokens_predicted": 4})
        for part in ("mm</", "t>\n\n", "yes", "")
    )
    found = values(data)
    assert [value["type"].removeprefix("response.") for value in found] == [
        "reasoning_text.delta", "output_item.added", "content_part.added", "output_text.delta",
        "output_item.done", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    output = found[-1]["response"]["output"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hmmm"}]
    assert output[1]["content"][0]["text"] == "yes"
    assert [item["id"] for item in output] == ["rs_1", "msg_1"]
