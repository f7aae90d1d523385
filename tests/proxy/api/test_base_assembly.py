"""Streams cut from what a real server sent; whole answers as it gave them without a stream."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.proxy.api.base import AssemblyError
from gateway.proxy.api.chat import CHAT
from gateway.proxy.api.completions import COMPLETIONS
from gateway.proxy.api.messages import MESSAGES
from gateway.proxy.api.native import NATIVE
from gateway.proxy.api.responses import RESPONSES

USAGE = {"completion_tokens": 2, "prompt_tokens": 14, "total_tokens": 16}
TIMINGS = {"cache_n": 0, "prompt_n": 14, "predicted_n": 2}
HEAD = {"created": 7, "id": "chatcmpl-1", "model": "demo", "system_fingerprint": "b0-unknown"}


def chunk(delta: dict[str, Any] | None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    extra = {"logprobs": more.pop("logprobs")} if "logprobs" in more else {}
    choices = (
        []
        if delta is None
        else [{"finish_reason": reason, "index": more.pop("index", 0), "delta": delta, **extra}]
    )
    return {"choices": choices, **HEAD, "object": "chat.completion.chunk", **more}


OPENING = chunk({"role": "assistant", "content": None})
COUNTS = chunk(None, usage=USAGE, timings=TIMINGS)


def chat(*events: dict[str, Any]) -> dict[str, Any]:
    return CHAT.assemble(events, {})


def message(*events: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = chat(*events)["choices"][0]["message"]
    return made


def test_a_chat_is_put_together_as_the_server_answers_it() -> None:
    events = (
        OPENING,
        chunk({"content": " summe"}),
        chunk({"content": " door"}),
        chunk({}, "length"),
        COUNTS,
    )
    assert chat(*events) == {
        "choices": [
            {
                "finish_reason": "length",
                "index": 0,
                "message": {"role": "assistant", "content": " summe door"},
            }
        ],
        **HEAD,
        "object": "chat.completion",
        "usage": USAGE,
        "timings": TIMINGS,
    }


def test_an_answer_without_a_word_is_an_empty_text() -> None:
    assert message(OPENING, chunk({}, "stop"), COUNTS) == {"role": "assistant", "content": ""}


def test_reasoning_stays_apart_from_the_answer() -> None:
    events = (
        chunk({"reasoning_content": "Let me"}),
        chunk({"reasoning_content": " see"}),
        chunk({"content": "Yes"}),
        chunk({}, "stop"),
    )
    assert message(OPENING, *events, COUNTS) == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "Let me see",
    }


def test_tool_calls_get_their_arguments_piece_by_piece() -> None:
    def call(index: int, arguments: str, **head: Any) -> dict[str, Any]:
        function = {"arguments": arguments}
        if head:
            function["name"] = head.pop("name")
        return chunk({"tool_calls": [{"index": index, **head, "function": function}]})

    events = (
        call(0, "{", id="a", type="function", name="f"),
        call(0, '"x":1}'),
        call(1, "{}", id="b", type="function", name="g"),
        chunk({}, "tool_calls"),
    )
    assert message(OPENING, *events, COUNTS)["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": '{"x":1}'}, "id": "a"},
        {"type": "function", "function": {"name": "g", "arguments": "{}"}, "id": "b"},
    ]


def test_logprobs_of_all_tokens_are_gathered() -> None:
    first, second = {"id": 1, "logprob": -1.0}, {"id": 2, "logprob": -2.0}
    events = (
        chunk({"content": "a"}, logprobs={"content": [first]}),
        chunk({"content": "b"}, logprobs={"content": [second]}),
        chunk({}, "stop"),
    )
    (choice,) = chat(OPENING, *events, COUNTS)["choices"]
    assert choice["logprobs"] == {"content": [first, second]}


def test_several_answers_keep_to_their_index() -> None:
    events = (
        chunk({"content": "b"}, index=1),
        chunk({"content": "a"}, index=0),
        chunk({}, "stop", index=0),
        chunk({}, "length", index=1),
    )
    choices = chat(*events, COUNTS)["choices"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (0, "a", "stop"),
        (1, "b", "length"),
    ]


@pytest.mark.parametrize(
    "events",
    [(), (OPENING, COUNTS), (OPENING, chunk({"content": "a"}))],
    ids=["nothing", "no reason", "cut short"],
)
def test_half_a_chat_makes_no_answer(events: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(AssemblyError):
        chat(*events)


def test_tokens_that_a_stream_does_not_count_are_those_of_its_timings() -> None:
    timings = {"cache_n": 4, "prompt_n": 10, "predicted_n": 2}
    whole = chat(OPENING, chunk({"content": "a"}), chunk({}, "stop", timings=timings))
    assert whole["usage"] == {"completion_tokens": 2, "prompt_tokens": 14, "total_tokens": 16}


def test_an_answer_of_a_server_that_counts_nothing_is_one_all_the_same() -> None:
    whole = chat(OPENING, chunk({"content": "a"}), chunk({}, "stop"))
    assert whole["choices"][0]["message"]["content"] == "a"
    assert "usage" not in whole


def test_a_completion_is_put_together() -> None:
    def part(text: str, reason: str | None = None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}
        return {"choices": [choice], **HEAD, "object": "text_completion"}

    counts = {"choices": [], **HEAD, "usage": USAGE, "timings": TIMINGS}
    whole = COMPLETIONS.assemble([part(" a"), part(" b"), part("", "stop"), counts], {})
    assert whole["choices"] == [
        {"text": " a b", "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]
    assert (whole["object"], whole["usage"]) == ("text_completion", USAGE)


def test_a_native_completion_has_its_tokens_only_when_asked() -> None:
    events = [
        {"index": 0, "content": " a", "tokens": [1], "stop": False},
        {"index": 0, "content": " b", "tokens": [2], "stop": False},
        {
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": True,
            "generation_settings": {"stream": True, "seed": 1},
        },
    ]
    whole = NATIVE.assemble
    assert whole(events, {}) == {
        "index": 0,
        "content": " a b",
        "tokens": [],
        "stop": True,
        "generation_settings": {"stream": False, "seed": 1},
    }
    assert whole(events, {"return_tokens": True})["tokens"] == [1, 2]
    with pytest.raises(AssemblyError):
        whole(events[:2], {})


def test_a_message_is_put_together_with_tools_and_thinking() -> None:
    def start(index: int, **block: Any) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def delta(index: int, **fields: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": fields}

    opening = {"id": "m", "type": "message", "role": "assistant", "content": []}
    usage = {"input_tokens": 3, "output_tokens": 0}
    ending = {"stop_reason": "tool_use", "stop_sequence": None}
    events = [
        {"type": "message_start", "message": {**opening, "usage": usage}},
        start(0, type="thinking", thinking=""),
        delta(0, type="thinking_delta", thinking="Hm"),
        start(1, type="text", text=""),
        delta(1, type="text_delta", text="I "),
        delta(1, type="text_delta", text="do"),
        start(2, type="tool_use", id="t", name="f", input={}),
        delta(2, type="input_json_delta", partial_json='{"a":'),
        delta(2, type="input_json_delta", partial_json="1}"),
        {"type": "content_block_stop", "index": 2},
        {"type": "message_delta", "delta": ending, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    ]
    whole = MESSAGES.assemble
    assert whole(events, {}) == {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm"},
            {"type": "text", "text": "I do"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 9},
    }
    with pytest.raises(AssemblyError):
        whole(events[:-1], {})


def test_a_response_is_what_its_last_event_holds() -> None:
    response = {"id": "r", "object": "response", "created_at": 7, "status": "completed"}
    events = [
        {"type": "response.created", "response": {"id": "r", "status": "in_progress"}},
        {"type": "response.completed", "response": response},
    ]
    whole = RESPONSES.assemble
    assert whole(events, {}) == {"completed_at": 7, **response}
    # Only a plain answer says of a thought that it is over.
    thought, text = {"type": "reasoning", "id": "rs"}, {"type": "message", "status": "completed"}
    response["output"] = [thought, text]
    assert whole(events, {})["output"] == [{**thought, "status": "completed"}, text]
    with pytest.raises(AssemblyError):
        whole(events[:1], {})
