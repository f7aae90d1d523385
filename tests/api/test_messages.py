"""Anthropic's messages: errors, responses, events after a resumption, and those asked as a chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from gateway import errors
from gateway.api import sse
from gateway.api.base import ResponseRewriter
from gateway.api.chat import CHAT
from gateway.api.json_values import (
    FIELDS_DECODER,
    MOST_MESSAGE_PARTS,
    MOST_PARTS,
    JsonObject,
    cut_long_strings,
    parse_object,
    run_at_once,
)
from gateway.api.messages import (
    MESSAGES,
    ChatToMessage,
    chat_request,
)
from gateway.api.resuming import data_event
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.transport.errors import InvalidResponse
from tests.api.events import answering, assembled, event, values
from tests.each_case import each_case
from tests.gateways import NO_TLS
from tests.servers import demo_servers


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
    error = {"type": kind, "message": "m"}
    assert parse_object(data) == {"type": "error", "error": error, "request_id": "req_1"}
    assert MESSAGES.is_own_error(data)
    for other in (b'{"error":{"message":"m"}}', b"oops", b"[1]"):
        assert not MESSAGES.is_own_error(other)


TEXT = {"type": "text", "text": "no"}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "x"}
CHATS: list[tuple[object, JsonObject | None]] = [
    ("no", {"content": "no"}), ([TEXT], {"content": "no"}),
    ([THINKING, TEXT], {"content": "no", "reasoning_content": "hm"}), ([TEXT, TEXT], None),
    ([THINKING], None), ([{"type": "image"}, TEXT], None), (None, None),
]  # fmt: skip


@each_case(("content", "expected"), CHATS)
def test_messages_become_the_servers_own_chat(content: object, expected: JsonObject | None) -> None:
    messages = [{"role": "assistant", "content": content}]
    chat = MESSAGES.chat_body({"system": [TEXT], "messages": messages})
    system = {"role": "system", "content": "no"}
    assert chat == (expected and {"messages": [system, {"role": "assistant"} | expected]})


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
        (ended("end_turn", "b\n"), ended("stop_sequence", "b\n")),
        (ended("stop_sequence", "a"), ended("stop_sequence", "a")),
        (ended("tool_use", "a"), ended("tool_use", "a")),
        (ended("end_turn", "<|im_end|>"), ended("end_turn", None)),
        (ended("max_tokens", None), ended("max_tokens", None)),
    ],
)
def test_a_clients_stop_sequence_is_told(before: JsonObject, after: JsonObject) -> None:
    repair = stop_repair({"stop_sequences": ["a", "b\n", 7]})
    assert repair is not None
    text = event({"type": "content_block_delta", "delta": {"text": '"stop_sequence":"a"'}})
    delta = {"type": "message_delta", "delta": before, "usage": {"output_tokens": 3}}
    last = event({"type": "message_stop"})
    *others, repaired = sse.split(repair.rewrite_events(text + last + event(delta)))
    assert others == [text, last]
    assert values(repaired) == [delta | {"delta": after}]
    message = {"type": "message", "content": [], **before}
    repaired = run_at_once(repair.rewrite_body(msgspec.json.encode(message)))
    assert msgspec.json.decode(repaired) == message | after


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OUTPUT: dict[str, Any] = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
HELLO: JsonObject = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 9}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "aGk="}


def as_chat(body: JsonObject, response_format: JsonObject | None = None) -> JsonObject:
    texts = run_at_once(cut_long_strings(msgspec.json.encode(body)))
    fields = FIELDS_DECODER.decode(texts.rest)
    return parse_object(run_at_once(chat_request(fields, response_format or {}, texts)))


def needed(body: JsonObject, path: str = "/v1/messages", settings: Settings | None = None) -> bool:
    data = msgspec.json.encode(HELLO | body)
    return MESSAGES.needs_translation(path, data, settings or Settings())


@each_case(
    ("body", "is_translated"),
    [
        (OUTPUT, True),
        ({"output_format": OUTPUT["output_config"]["format"]}, True),
        (OUTPUT | {"tools": [WEATHER], "tool_choice": {"type": "none"}}, True),
        ({}, False),
        ({"output_config": {"effort": "low"}}, False),
        ({"output_config": {"format": {"type": "text"}}}, False),
        ({"output_config": {"format": {"type": "json_schema"}}}, False),
        ({"output_config": []}, False),
        (OUTPUT | {"tools": [WEATHER]}, False),
        ({"messages": [{"role": "user", "content": 'say "output_config"'}]}, False),
    ],
)
def test_only_a_message_with_a_format_is_translated(body: JsonObject, is_translated: bool) -> None:
    assert needed(body) is is_translated
    assert not needed(body, "/v1/messages/count_tokens")
    assert not needed(body, settings=Settings.model_validate({"repairs": {"output_config": False}}))


def test_the_chat_has_the_format_and_the_same_parameters() -> None:
    body = HELLO | OUTPUT | {"model": "m", "temperature": 0.5, "stream": True, "priority": "batch"}
    body |= {"stop_sequences": ["x"], "metadata": {"user_id": "u"}, "top_k": 3}
    translation = run_at_once(MESSAGES.translate(msgspec.json.encode(body), lambda _: True))
    assert translation.path == "/v1/chat/completions"
    assert parse_object(translation.body) == {
        **{name: body[name] for name in ("model", "temperature", "stream", "priority", "top_k")},
        **{name: body[name] for name in ("messages", "max_tokens")},
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    }


def test_a_body_without_limits_gets_those_of_the_server() -> None:
    chat = as_chat({"messages": [], "thinking": {"type": "enabled"}})
    assert (chat["max_tokens"], chat["thinking_budget_tokens"]) == (4096, 10_000)
    assert as_chat({"messages": [], "thinking": {"type": "disabled"}}).keys() == {
        "messages",
        "max_tokens",
    }


def test_the_system_prompt_is_one_text_without_the_stamp_of_claude_code() -> None:
    stamped = "x-anthropic-billing-header: cc_version=2.1; cch=a5145;You are"
    blocks = [{"type": "text", "text": text} for text in (stamped, " cch=a5145;")]
    chat = as_chat({"messages": [], "system": [*blocks, {"type": "other"}, 7]})
    [system] = chat["messages"]
    text = "x-anthropic-billing-header: cc_version=2.1; cch=fffff;You are cch=a5145;"
    assert system == {"role": "system", "content": text}
    for plain in ("x-anthropic-billing-header: cch=a5", "cch=a5145;", ""):
        assert as_chat({"messages": [], "system": plain})["messages"][0]["content"] == plain


def test_blocks_become_parts_calls_and_results() -> None:
    long = 'say "\\n"\n' * 20_000  # such are cut out while the body is translated
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": long}}
    text = {"type": "text", "text": long}
    images = [{"type": "image", "source": IMAGE}, {"type": "image", "source": {"url": "no type"}}]
    results = [("sun", "sun"), ([text, {"type": "text", "text": "c"}], f"{long}c"), (None, "")]
    result = {"type": "tool_result", "tool_use_id": "t1"}
    thought = {"type": "thinking", "thinking": long}
    given = [
        {"role": "user", "content": long},
        {"role": "assistant", "content": [thought, text, use]},
        {"role": "user", "content": [result | {"content": content} for content, _ in results]},
        {"role": "user", "content": [result | {"content": images}]},
        {"role": "user", "content": [*images, {"type": "document"}]},
        {"role": "user", "content": [{"type": "document"}]},
    ]
    _, first, answer, *others = as_chat({"messages": given, "system": [text]})["messages"]
    [call] = answer.pop("tool_calls")
    assert parse_object(call["function"].pop("arguments").encode()) == {"city": long}
    assert call == {"id": "t1", "type": "function", "function": {"name": "weather"}}
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    tool = {"role": "tool", "tool_call_id": "t1"}
    assert first == {"role": "user", "content": long}
    assert answer == {"role": "assistant", "content": [text], "reasoning_content": long}
    assert others == [
        *(tool | {"content": content} for _, content in results),
        tool | {"content": [shown]},
        {"role": "user", "content": [shown]},
    ]


def test_a_large_body_without_a_format_passes_unless_the_prompt_cache_is_off() -> None:
    body = msgspec.json.encode(HELLO | {"output_config": 7, "system": "a" * 100_000})
    broken = b'{"output_config": {"format": "' + b"a" * 100_000
    for data in (body, broken):
        assert MESSAGES.needs_translation("/v1/messages", data, Settings())
        assert run_at_once(MESSAGES.translate(data, lambda _: True)).body is data
    # A node would answer them from its prompt cache.
    kept_out = run_at_once(MESSAGES.translate(body, lambda _: True, prompt_cache=False))
    assert kept_out.path == "/v1/chat/completions"
    with pytest.raises(GatewayError):
        run_at_once(MESSAGES.translate(broken, lambda _: True, prompt_cache=False))


@each_case("messages", [None, "x", {"role": "user"}, 7])
def test_messages_that_are_no_list_are_refused(messages: Any) -> None:
    with pytest.raises(GatewayError) as refused:
        as_chat({"messages": messages})
    assert (refused.value.status, refused.value.param) == (400, "messages")


CHUNK: JsonObject = {"id": "c1", "model": "m", "object": "chat.completion.chunk"}
USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}


def chunks(deltas: list[JsonObject], reason: str = "stop") -> list[bytes]:
    choices = [{"index": 0, "finish_reason": None, "delta": delta} for delta in deltas]
    ends = {"index": 0, "finish_reason": reason, "delta": {}}
    return [
        data_event(CHUNK | {"choices": [{"delta": {"role": "assistant", "content": None}}]}),
        *(data_event(CHUNK | {"choices": [choice]}) for choice in choices),
        data_event(CHUNK | {"choices": [ends]}),
        data_event(CHUNK | {"choices": [], "usage": USAGE}),
        b"data: [DONE]\n\n",
    ]


def message_of(events: bytes) -> JsonObject:
    """The message that a stream's events make."""
    data = [parse_object(sse.payload(event)) for event in sse.split(events)]
    assert all(
        sse.event_name(event).decode() == value["type"]
        for event, value in zip(sse.split(events), data, strict=True)
    )
    made: JsonObject = assembled(MESSAGES, data)
    return made


def test_a_stream_becomes_a_message() -> None:
    deltas = [{"reasoning_content": "so"}, {"reasoning_content": " so"}, {"content": "{"}]
    events = b"".join(map(ChatToMessage().rewrite_events, chunks([*deltas, {"content": "}"}])))
    assert message_of(events) == {
        "id": "c1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "so so", "signature": ""},
            {"type": "text", "text": "{}"},
        ],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"cache_read_input_tokens": 4, "input_tokens": 5, "output_tokens": 5},
    }
    assert MESSAGES.is_stream_complete(events)


@each_case(
    ("reason", "expected"),
    [("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use"), (7, "end_turn")],
)
def test_the_reason_is_told_in_anthropics_words(reason: Any, expected: str) -> None:
    events = b"".join(map(ChatToMessage().rewrite_events, chunks([{"content": "a"}], reason)))
    assert message_of(events)["stop_reason"] == expected
    plain = {**CHUNK, "choices": [{"finish_reason": reason, "message": {"content": "a"}}]}
    body = ChatToMessage().rewrite_body(msgspec.json.encode(plain | {"usage": USAGE}))
    assert parse_object(run_at_once(body)) == message_of(events)


def test_an_error_ends_the_stream_in_anthropics_form() -> None:
    rewriter, error = ChatToMessage(), errors.queue_full("no", 1.0)
    rewriter.rewrite_events(b"".join(chunks([{"content": "a"}])[:2]))
    event = rewriter.rewrite_events(CHAT.error_event(error, "r"))
    own = {"type": "rate_limit_error", "message": error.message}
    assert event.startswith(b"event: error\n")
    assert values(event) == [{"type": "error", "error": own}]


@each_case(
    "event",
    [b"data: {\n\n", b"data: 7\n\n", b'data: {"choices":7}\n\n', b'data: {"choices":[7]}\n\n'],
)
def test_an_event_that_is_no_chats_is_invalid(event: bytes) -> None:
    with pytest.raises(InvalidResponse):
        ChatToMessage().rewrite_events(event)
    for content in (b"{", b"{}", b'{"choices":[]}', b'{"choices":[{"message":7}]}'):
        with pytest.raises(InvalidResponse):
            run_at_once(ChatToMessage().rewrite_body(content))


# The chat is the one that the server itself makes


@pytest.fixture(scope="module")
def node() -> Iterator[httpx.Client]:
    with (
        demo_servers(1, slots=1) as (url,),
        httpx.Client(base_url=url, trust_env=False, verify=NO_TLS, timeout=60) as client,
    ):
        yield client


TOOL_USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 7}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "t1"}
CALLED: list[JsonObject] = [
    {"role": "user", "content": [{"type": "text", "text": "river"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "so"}, TOOL_USE]},
    {"role": "user", "content": [TOOL_RESULT | {"content": [{"type": "text", "text": "9"}]}]},
]


@pytest.mark.real
@pytest.mark.parametrize(
    "body",
    [
        HELLO | {"system": "be brief", "stop_sequences": ["a"], "top_k": 3},
        HELLO | {"system": [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}]},
        {"messages": [*HELLO["messages"], {"role": "assistant", "content": "so"}]},
        {"messages": CALLED},
    ],
)
def test_the_chat_gets_the_servers_own_answer(node: httpx.Client, body: JsonObject) -> None:
    body = body | {"max_tokens": 20, "temperature": 0}
    direct = node.post("/v1/messages", json=body).json()
    answer = node.post("/v1/chat/completions", json=as_chat(body))
    assert answer.status_code == 200, answer.text
    ours = parse_object(run_at_once(ChatToMessage().rewrite_body(answer.content)))
    for message in (direct, ours):
        usage = message["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        message["stop_sequence"] = None  # a chat does not tell it
        del message["id"]
    assert ours == direct


@pytest.mark.parametrize(
    "messages",
    [
        [{}] * (MOST_PARTS + 1),
        [{"content": [{}] * (MOST_MESSAGE_PARTS + 1)}],
        [{"content": [{"type": "tool_use", "input": {"a": "x" * 600_000}}] * 2}],
    ],
)
def test_what_is_too_much_to_translate_is_refused(messages: list[JsonObject]) -> None:
    with pytest.raises(GatewayError) as raised:
        as_chat({"messages": messages})
    assert raised.value.status == 400
