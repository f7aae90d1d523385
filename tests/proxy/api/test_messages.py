"""Anthropic's messages: errors, the plain response, usage, and events after a resumption."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway import errors
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.proxy import sse
from gateway.proxy.api.base import AssemblyError, ResponseRewriter
from gateway.proxy.api.messages import (
    MESSAGES,
    MessagesRewriter,
    NativeToMessagesRewriter,
    messages_as_chat,
)
from gateway.proxy.api.resuming import ReasoningEndMark
from gateway.proxy.json_values import JsonObject
from gateway.proxy.transcript import Transcript
from tests.each_case import each_case
from tests.proxy.api.events import (
    SPLICE_POINT,
    TIMINGS,
    answering,
    assembled,
    event,
    values,
)

# Errors.


def test_the_error_event_is_anthropics() -> None:
    failed = errors.node_failed("The node broke off.")
    name, data, *_ = MESSAGES.error_event(failed, "req_1").split(b"\n")
    assert name == b"event: error"
    assert msgspec.json.decode(data[6:]) == {
        "type": "error",
        "error": {"type": "api_error", "message": "The node broke off."},
        "request_id": "req_1",
    }


@each_case(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (405, "invalid_request_error"), (413, "request_too_large"),
        (429, "rate_limit_error"), (422, "invalid_request_error"), (500, "api_error"),
        (502, "api_error"), (503, "overloaded_error"), (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)  # fmt: skip
def test_an_error_has_anthropics_type(status: int, kind: str) -> None:
    data = MESSAGES.error_body(GatewayError(status, "x", "m"), "req_1")
    sent = MESSAGES.error_event(GatewayError(status, "x", "m"), "req_1")
    assert sent == b"event: error\ndata: " + data + b"\n\n"
    body = msgspec.json.decode(data)
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == "req_1"


def test_only_an_error_of_anthropics_form_passes_as_it_is() -> None:
    assert MESSAGES.is_own_error(b'{"type":"error","error":{"type":"api_error","message":"m"}}')
    assert not MESSAGES.is_own_error(b'{"error":{"message":"m"}}')
    assert not MESSAGES.is_own_error(b"oops")
    assert not MESSAGES.is_own_error(b"[1]")


@each_case(
    ("path", "owned"),
    [
        ("/v1/messages", True),
        ("/v1/messages/batches", True),
        ("/messages", True),
        ("/v1/chat/completions", False),
        ("/", False),
    ],
)
def test_its_paths_are_known_even_without_a_route(path: str, *, owned: bool) -> None:
    assert MESSAGES.owns_path(path) is owned


# The plain response.


def start(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": fields}


def test_a_message_is_assembled_with_tools_and_reasoning() -> None:
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
    assert assembled(MESSAGES, events) == {
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
        assembled(MESSAGES, events[:-1])


# Usage.


def test_a_stream_reports_the_prompts_tokens_at_its_beginning() -> None:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 40, "output_tokens": 1}
    opening = event({"type": "message_start", "message": {"usage": usage}}, "message_start")
    tail = event({"type": "message_delta", "usage": {"output_tokens": 9}}, "message_delta")
    found = MESSAGES.read_usage(tail, opening)
    assert found is not None
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (45, 40, 9)
    # The server's own figures need no opening.
    timed = event({"type": "message_stop", "timings": TIMINGS})
    found = MESSAGES.read_usage(timed, opening)
    assert found is not None
    assert found.prompt_tokens == 14


# After a resumption.


@pytest.mark.parametrize(("opened", "index"), [(True, 0), (False, 1)])
def test_a_resumed_message_continues_in_the_open_block_or_in_the_next(
    opened: bool, index: int
) -> None:
    blocks = {0: "text"} if opened else {}
    transcript = Transcript(token_count=2, block_index=0, open_blocks=blocks)
    rewriter = MessagesRewriter(transcript, SPLICE_POINT)
    assert rewriter.rewrite({"type": "message_start", "message": {}}) == b""
    assert (rewriter.rewrite(start(0)) == b"") is opened
    out = rewriter.rewrite(delta(0, type="text_delta", text=" three"))
    assert sse.event_name(out) == b"content_block_delta"
    assert values(out)[0]["index"] == index
    out = rewriter.rewrite({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 3}})
    assert values(out)[0]["usage"]["output_tokens"] == 5


def shown(events: bytes) -> list[Any]:
    """The events, each with the fields that tell it from others."""
    found: list[Any] = []
    for value in values(events):
        kind = value["type"].removeprefix("content_block_")
        if kind == "start":
            found.append((kind, value["index"], value["content_block"]["type"]))
        elif kind == "delta":
            found.append((value["index"], *value["delta"].values()))
        elif kind == "stop":
            found.append((kind, value["index"]))
        else:
            found.append(kind)
    return found


def test_reasoning_continues_in_its_block_and_the_content_in_the_next() -> None:
    transcript = Transcript(
        reasoning_pieces=["so"], token_count=1, block_index=0, open_blocks={0: "thinking"}
    )
    rewriter = NativeToMessagesRewriter(transcript, SPLICE_POINT, ReasoningEndMark("</think>"))
    texts = [" it", "</", "think>", "\n", "Yes"]
    out = b"".join(rewriter.rewrite({"content": text}) for text in texts)
    out += rewriter.rewrite(
        {"content": "", "stop": True, "stop_type": "word", "stopping_word": "x",
         "tokens_predicted": 6}
    )  # fmt: skip
    assert shown(out) == [
        (0, "thinking_delta", " it"), ("start", 1, "text"), (1, "text_delta", "Yes"),
        (0, "signature_delta", ""), ("stop", 0), ("stop", 1), "message_delta", "message_stop",
    ]  # fmt: skip
    end = values(out)[-2]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": "x"}
    assert end["usage"] == {"output_tokens": 8}


OPEN_BLOCKS: list[tuple[dict[int, str], int, list[Any]]] = [
    ({}, 0, [("start", 0, "text"), (0, "text_delta", "a"), ("stop", 0)]),
    ({0: "text"}, 1, [(0, "text_delta", "a"), ("stop", 0)]),
    ({0: "signed", 1: "text"}, 2, [(1, "text_delta", "a"), ("stop", 0), ("stop", 1)]),
    ({1: "text"}, 2, [(1, "text_delta", "a"), ("stop", 1)]),
]


@each_case(("blocks", "tokens", "expected"), OPEN_BLOCKS)
def test_every_block_is_stopped_once(
    blocks: dict[int, str], tokens: int, expected: list[Any]
) -> None:
    transcript = Transcript(
        token_count=tokens, block_index=max(blocks, default=0), open_blocks=blocks
    )
    rewriter = NativeToMessagesRewriter(transcript, SPLICE_POINT)
    out = rewriter.rewrite({"content": "a", "stop": True, "stop_type": "limit"})
    assert shown(out) == [*expected, "message_delta", "message_stop"]
    assert values(out)[-2]["delta"]["stop_reason"] == "max_tokens"
    ended = shown(MessagesRewriter(transcript, SPLICE_POINT).final_events("length", usage=False))
    assert ended == [e for e in expected if e[0] == "stop" and e[1] in blocks] + [
        "message_delta",
        "message_stop",
    ]


TEXT = {"type": "text", "text": "no"}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "x"}
CHATS: list[tuple[object, JsonObject | None]] = [
    ("no", {"content": "no"}), ([TEXT], {"content": "no"}),
    ([THINKING, TEXT], {"content": "no", "reasoning_content": "hm"}), ([TEXT, TEXT], None),
    ([THINKING], None), ([{"type": "image"}, TEXT], None), (None, None),
]  # fmt: skip


@each_case(("content", "expected"), CHATS)
def test_messages_become_the_chat_that_the_server_makes_of_them(
    content: object, expected: JsonObject | None
) -> None:
    message = {"role": "assistant", "content": content}
    chat = messages_as_chat({"system": [TEXT], "messages": [message]})
    system = {"role": "system", "content": "no"}
    assert chat == (expected and {"messages": [system, {"role": "assistant"} | expected]})


# The repair of stop reasons.


def stop_repair(body: JsonObject, **repairs: bool) -> ResponseRewriter | None:
    """The rewriter for the response of a llama.cpp server to this body."""
    settings = Settings.model_validate({"repairs": repairs})
    bodies = [msgspec.json.encode(body)]
    return MESSAGES.response_rewriter(bodies, "m", answering(), settings, stream=False)


def ended(reason: str, sequence: str | None) -> JsonObject:
    return {"stop_reason": reason, "stop_sequence": sequence}


@each_case(
    ("before", "after"),
    [
        (ended("end_turn", "a"), ended("stop_sequence", "a")),
        (ended("end_turn", "b\n"), ended("stop_sequence", "b\n")),
        (ended("stop_sequence", "a"), ended("stop_sequence", "a")),
        (ended("tool_use", "a"), ended("tool_use", "a")),
        (ended("end_turn", "<|im_end|>"), ended("end_turn", None)),
        (ended("end_turn", None), ended("end_turn", None)),
        (ended("max_tokens", None), ended("max_tokens", None)),
    ],
)
def test_a_stop_sequence_is_told_if_it_is_the_clients(
    before: JsonObject, after: JsonObject
) -> None:
    repair = stop_repair({"stop_sequences": ["a", "b\n", 7]})
    assert repair is not None
    text = event({"type": "content_block_delta", "delta": {"text": '"stop_sequence":"a"'}})
    delta = {"type": "message_delta", "delta": before, "usage": {"output_tokens": 3}}
    last = event({"type": "message_stop"})
    *others, repaired = sse.split(repair.rewrite_events(text + last + event(delta)))
    assert others == [text, last]
    assert values(repaired) == [delta | {"delta": after}]
    message = {"type": "message", "content": [], **before}
    assert msgspec.json.decode(repair.rewrite_body(msgspec.json.encode(message))) == message | after


def test_only_a_request_with_stop_sequences_is_repaired() -> None:
    assert stop_repair({}) is None
    assert stop_repair({"stop_sequences": ["a"]}, stop_reason=False) is None
    repair = stop_repair({"stop_sequences": "a"})
    assert repair is not None
    odd = event({"type": "other", "stop_sequence": "a"})
    assert repair.rewrite_events(odd) == odd
    assert repair.rewrite_body(b"no JSON") == b"no JSON"
    untouched = b'{ "stop_reason": "end_turn", "stop_sequence": null }'
    assert repair.rewrite_body(untouched) == untouched


def test_a_stop_sequence_is_told_after_a_resumption_too() -> None:
    transcript = Transcript(content_pieces=["a"], token_count=1, open_blocks={0: "text"})
    native = NativeToMessagesRewriter(transcript, SPLICE_POINT)
    last = {"content": "", "stop": True, "stop_type": "word", "stopping_word": "zzz"}
    same_api = MessagesRewriter(transcript, SPLICE_POINT)
    delta = {"type": "message_delta", "delta": ended("end_turn", "zzz"), "usage": {}}
    for events in (native.rewrite(last), same_api.rewrite(delta)):
        repair = stop_repair({"stop_sequences": ["zzz"]})
        assert repair is not None
        [told] = [one for one in values(repair.rewrite_events(events)) if "delta" in one]
        assert told["delta"] == ended("stop_sequence", "zzz")
