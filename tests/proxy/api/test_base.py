"""How each API's stream begins, ends and fails, as the servers write it and the clients read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import msgspec
import openai
import pytest

from gateway import errors
from gateway.errors import GatewayError
from gateway.proxy.api.base import Api, StreamEventKind
from gateway.proxy.api.chat import CHAT
from gateway.proxy.api.completions import COMPLETIONS
from gateway.proxy.api.messages import MESSAGES
from gateway.proxy.api.native import NATIVE
from gateway.proxy.api.responses import RESPONSES
from gateway.transport.errors import InvalidResponse

ALL = [CHAT, COMPLETIONS, MESSAGES, NATIVE, RESPONSES]
FAILED = errors.node_failed("The node broke off.")


def event(value: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"


def chat(delta: Any, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more})


def text(text: str, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more})


def named(kind: str, **more: Any) -> bytes:
    return event({"type": kind, **more}, kind)


OPENINGS: list[tuple[Api, bytes]] = [
    (CHAT, chat({"role": "assistant", "content": None})),
    (CHAT, chat({"role": "assistant", "content": ""})),
    (CHAT, chat({"role": "assistant", "content": None, "tool_calls": []})),
    (CHAT, chat({})),
    (CHAT, chat({"role": "assistant"}, prompt_progress={"total": 9, "processed": 3})),
    (CHAT, event({"choices": [], "prompt_filter_results": []})),
    (CHAT, event({"choices": [], "usage": None})),
    (COMPLETIONS, text("")),
    (COMPLETIONS, text("", prompt_progress={"total": 9, "processed": 3})),
    (MESSAGES, named("message_start", message={})),
    (MESSAGES, named("content_block_start", index=0)),
    (MESSAGES, named("ping")),
    (NATIVE, event({"content": "", "tokens": [], "stop": False})),
    (NATIVE, event({"content": "", "tokens": [0], "stop": False, "prompt_progress": {}})),
    (RESPONSES, named("response.created")),
    (RESPONSES, named("response.in_progress", prompt_progress={})),
    (RESPONSES, named("response.output_item.added")),
    (RESPONSES, named("response.content_part.added")),
]
CONTENTS: list[tuple[Api, bytes]] = [
    (CHAT, chat({"content": "a"})),
    (CHAT, chat({"reasoning_content": "a"})),
    (CHAT, chat({"tool_calls": [{"index": 0}]})),
    (CHAT, chat({"refusal": "no"})),
    (CHAT, chat({"audio": {"data": "QQ=="}})),
    (CHAT, chat({}, "length")),
    (CHAT, event({"choices": [], "usage": {"prompt_tokens": 1}})),
    (CHAT, b"data: [DONE]\n\n"),
    (COMPLETIONS, text("a")),
    (COMPLETIONS, text("", "stop")),
    (COMPLETIONS, event({"choices": [], "usage": {"prompt_tokens": 1}})),
    (MESSAGES, named("content_block_delta", delta={"text": "a"})),
    (MESSAGES, named("message_delta", delta={"stop_reason": "end_turn"})),
    (MESSAGES, named("message_stop")),
    (NATIVE, event({"content": "a", "stop": False})),
    (NATIVE, event({"content": "", "tokens": [5], "stop": False})),
    (NATIVE, event({"content": "", "stop": True})),
    (RESPONSES, named("response.output_text.delta", delta="a")),
    (RESPONSES, named("response.completed", response={})),
]
NODE_ERROR = {"code": 500, "message": "Compute error.", "type": "server_error"}


@pytest.mark.parametrize(("dialect", "data"), OPENINGS)
def test_what_only_opens_an_answer_is_no_content(dialect: Api, data: bytes) -> None:
    assert dialect.classify_event(data) is StreamEventKind.NO_CONTENT
    assert dialect.classify_event(b":\n" + data) is StreamEventKind.NO_CONTENT


@pytest.mark.parametrize(("dialect", "data"), CONTENTS)
def test_what_a_reader_would_miss_is_content(dialect: Api, data: bytes) -> None:
    assert dialect.classify_event(data) is StreamEventKind.CONTENT
    assert dialect.classify_event(b":\n" + data) is StreamEventKind.CONTENT
    assert dialect.classify_event(data.replace(b"\n", b"\r\n")) is StreamEventKind.CONTENT


@pytest.mark.parametrize("data", [b":\n", b"event: nothing\n\n", b"id: 7\n\n", b"data: null\n\n"])
def test_what_says_nothing_is_held_back(data: bytes) -> None:
    for dialect in ALL:
        assert dialect.classify_event(data) is StreamEventKind.NO_CONTENT


@pytest.mark.parametrize("dialect", ALL)
def test_what_is_no_event_of_the_api_is_garbage(dialect: Api) -> None:
    for data in (b"data: {oops\n\n", b"data: [1]\n\n", b"data: 7\n\n"):
        with pytest.raises(InvalidResponse):
            dialect.classify_event(data)


@pytest.mark.parametrize("dialect", ALL)
def test_a_nodes_error_is_known_in_either_form(dialect: Api) -> None:
    for data in (
        event({"error": NODE_ERROR}),
        event(NODE_ERROR, "error"),
        event({"x": 1}, "error"),
    ):
        assert dialect.classify_event(data) is StreamEventKind.ERROR
        assert dialect.classify_event(b":\n" + data) is StreamEventKind.ERROR


ENDS: list[tuple[Api, bytes]] = [
    (CHAT, b"data: [DONE]\n\n"),
    (CHAT, b"data:[DONE]\n\n"),
    (COMPLETIONS, b"data: [DONE]\r\n\r\n"),
    (MESSAGES, named("message_stop")),
    (NATIVE, event({"content": "", "stop": True, "timings": {}})),
    (NATIVE, b'data: {"stop": true}\n\n'),
    (RESPONSES, named("response.completed", response={"output": 200 * "x"})),
    (RESPONSES, named("response.incomplete", response={})),
]


@pytest.mark.parametrize(("dialect", "end"), ENDS)
def test_an_end_is_known(dialect: Api, end: bytes) -> None:
    for before in (b"", named("delta", text="x"), b":\n"):
        for behind in (b"", b":\n"):
            assert dialect.is_stream_complete(before + end + behind)


UNFINISHED: list[tuple[Api, bytes]] = [
    (CHAT, chat({"content": "data: [DONE]"})),
    (CHAT, event({"choices": [{"delta": {"content": "\ndata: [DONE]\n"}}]})),
    (COMPLETIONS, text("data: [DONE]")),
    (MESSAGES, event({"delta": {"text": "event: message_stop"}}, "content_block_delta")),
    (MESSAGES, named("message_delta")),
    (NATIVE, event({"content": '"stop":true', "stop": False})),
    (NATIVE, event({"content": "x", "stop": False})),
    (RESPONSES, event({"delta": "event: response.completed"}, "response.output_text.delta")),
]


@pytest.mark.parametrize(("dialect", "tail"), [*UNFINISHED, *((one, b"") for one in ALL)])
def test_text_that_looks_like_an_end_is_none(dialect: Api, tail: bytes) -> None:
    assert not dialect.is_stream_complete(tail)
    assert not dialect.ends_with_error(tail)


# What the official clients make of our error events.


def served(body: bytes) -> httpx2.MockTransport:
    return httpx2.MockTransport(
        lambda _: httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body)
    )


def an_openai_client(body: bytes) -> openai.OpenAI:
    http = httpx2.Client(transport=served(body))
    return openai.OpenAI(api_key="x", base_url="http://gateway/v1", http_client=http)


def chat_stream(body: bytes) -> Any:
    with an_openai_client(body) as client:
        yield from client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "a"}], stream=True
        )


def completions_stream(body: bytes) -> Any:
    with an_openai_client(body) as client:
        yield from client.completions.create(model="demo", prompt="a", stream=True)


def responses_stream(body: bytes) -> Any:
    with an_openai_client(body) as client:
        yield from client.responses.create(model="demo", input="a", stream=True)


def messages_stream(body: bytes) -> Any:
    http = httpx2.Client(transport=served(body))
    with anthropic.Anthropic(api_key="x", base_url="http://gateway", http_client=http) as client:
        yield from client.messages.create(
            model="demo",
            max_tokens=9,
            messages=[{"role": "user", "content": "a"}],
            stream=True,
        )


@pytest.mark.parametrize(
    ("dialect", "read", "raised"),
    [
        (CHAT, chat_stream, openai.APIError),
        (COMPLETIONS, completions_stream, openai.APIError),
        (RESPONSES, responses_stream, openai.APIError),
        (MESSAGES, messages_stream, anthropic.APIStatusError),
    ],
)
def test_the_official_client_raises_on_our_error_event(
    dialect: Api,
    read: Callable[[bytes], Any],
    raised: type[Exception],
) -> None:
    body = dialect.heartbeat() + dialect.error_event(FAILED, "req_1")
    with pytest.raises(raised, match=FAILED.message):
        list(read(body))


@pytest.mark.parametrize("dialect", ALL)
def test_our_error_event_has_no_end_behind_it(dialect: Api) -> None:
    sent = dialect.error_event(FAILED, "req_1")
    assert not dialect.is_stream_complete(sent)
    assert dialect.ends_with_error(sent)
    assert dialect.classify_event(sent) is StreamEventKind.ERROR


def test_the_error_event_of_messages_is_anthropics() -> None:
    name, data, *_ = MESSAGES.error_event(FAILED, "req_1").split(b"\n")
    assert name == b"event: error"
    assert msgspec.json.decode(data[6:]) == {
        "type": "error",
        "error": {"type": "api_error", "message": "The node broke off."},
        "request_id": "req_1",
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (422, "invalid_request_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_an_error_of_messages_has_anthropics_type(status: int, kind: str) -> None:
    data = MESSAGES.error_body(GatewayError(status, "x", "m"), "req_1")
    event = MESSAGES.error_event(GatewayError(status, "x", "m"), "req_1")
    assert event == b"event: error\ndata: " + data + b"\n\n"
    body = msgspec.json.decode(data)
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == "req_1"


@pytest.mark.parametrize("dialect", [CHAT, COMPLETIONS, NATIVE, RESPONSES])
def test_other_error_bodies_are_openais_with_their_details(dialect: Api) -> None:
    error = errors.context_length_exceeded(5000, 4096)
    fields = msgspec.json.decode(dialect.error_body(error, "req_1"))["error"]
    assert (fields["type"], fields["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert (fields["n_ctx"], fields["n_prompt_tokens"]) == (4096, 5000)
