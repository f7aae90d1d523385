"""What all APIs say of a stream: contents, ends, errors, and the plain response made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway import errors
from gateway.api import sse
from gateway.api.base import (
    RELAYED,
    Api,
    AssemblyError,
    ResponseAssembler,
    StreamEventKind,
    read_events,
)
from gateway.api.chat import CHAT
from gateway.api.completions import COMPLETIONS
from gateway.api.messages import MESSAGES
from gateway.api.native import NATIVE
from gateway.api.responses import RESPONSES
from gateway.transport.errors import InvalidResponse
from tests.api.events import chat_choice, event
from tests.each_case import each_case
from tests.emulator import EmulatedNode, expected_chat_text
from tests.forward.proxy_over_nodes import MESSAGES as CHAT_MESSAGES
from tests.forward.proxy_over_nodes import proxy_over
from tests.virtual import in_virtual_time

ALL = [CHAT, COMPLETIONS, MESSAGES, NATIVE, RESPONSES]
FAILED = errors.node_failed("The node broke off.")


def chat(delta: Any, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [chat_choice(delta, finish)], **more})


def text(text: str, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more})


def named(kind: str, **more: Any) -> bytes:
    return event({"type": kind, **more}, kind)


OPENINGS: list[tuple[Api, bytes]] = [
    (CHAT, chat({"role": "assistant", "content": None})),
    (CHAT, chat({"role": "assistant", "content": None, "tool_calls": []})),
    (CHAT, chat({"role": "assistant"}, prompt_progress={"total": 9, "processed": 3})),
    (CHAT, event({"choices": [], "prompt_filter_results": []})),
    (CHAT, event({"choices": [], "usage": None})), (COMPLETIONS, text("")),
    (MESSAGES, named("message_start", message={})),
    (MESSAGES, named("content_block_start", index=0)),
    (NATIVE, event({"content": "", "tokens": [], "stop": False})),
    (NATIVE, event({"content": "", "tokens": [0], "stop": False, "prompt_progress": {}})),
    (RESPONSES, named("response.created")),
    (RESPONSES, named("response.in_progress", prompt_progress={})),
    (RESPONSES, named("response.content_part.added")),
]  # fmt: skip
CONTENTS: list[tuple[Api, bytes]] = [
    *((CHAT, chat(delta)) for delta in (
        {"content": "a"}, {"reasoning_content": "a"}, {"tool_calls": [{"index": 0}]},
        {"refusal": "no"})),
    (CHAT, chat({}, "length")), (CHAT, event({"choices": [], "usage": {"prompt_tokens": 1}})),
    (COMPLETIONS, text("a")), (COMPLETIONS, text("", "stop")),
    (COMPLETIONS, event({"choices": [], "usage": {"prompt_tokens": 1}})),
    (MESSAGES, named("content_block_delta", delta={"text": "a"})),
    (MESSAGES, named("message_delta", delta={"stop_reason": "end_turn"})),
    (NATIVE, event({"content": "", "tokens": [5], "stop": False})),
    (NATIVE, event({"content": "", "stop": True})),
    (RESPONSES, named("response.output_text.delta", delta="a")),
    (RESPONSES, named("response.completed", response={})),
]  # fmt: skip
NODE_ERROR = {"code": 500, "message": "Compute error.", "type": "server_error"}


NO_DATA = (b":\n", b"event: nothing\n\n", b"id: 7\n\n", b"data: null\n\n")
NODE_ERRORS = (
    event({"error": NODE_ERROR}), event(NODE_ERROR, "error"), event({"x": 1}, "error")
)  # fmt: skip


@each_case(
    ("kind", "api", "data"),
    [
        *((StreamEventKind.NO_CONTENT, api, data) for api, data in OPENINGS),
        *((StreamEventKind.CONTENT, api, data) for api, data in CONTENTS),
        *((StreamEventKind.NO_CONTENT, api, data) for api in ALL for data in NO_DATA),
        *((StreamEventKind.ERROR, api, data) for api in ALL for data in NODE_ERRORS),
    ],
)
def test_an_event_has_content_if_a_reader_would_miss_it(
    kind: StreamEventKind, api: Api, data: bytes
) -> None:
    for written in (data, b":\n" + data, data.replace(b"\n", b"\r\n")):
        assert api.classify_event(written) is kind


@each_case("api", ALL)
def test_data_that_is_no_object_is_invalid(api: Api) -> None:
    for data in (b"data: {oops\n\n", b"data: [1]\n\n", b"data: 7\n\n"):
        with pytest.raises(InvalidResponse):
            api.classify_event(data)


ENDS: list[tuple[Api, bytes]] = [
    (CHAT, b"data: [DONE]\n\n"),
    (COMPLETIONS, b"data: [DONE]\r\n\r\n"),
    (MESSAGES, named("message_stop")),
    (NATIVE, event({"content": "", "stop": True, "timings": {}})),
    (RESPONSES, named("response.completed", response={"output": 200 * "x"})),
    (RESPONSES, named("response.incomplete", response={})),
]


@each_case(("api", "end"), ENDS)
def test_a_complete_stream_is_known(api: Api, end: bytes) -> None:
    for before in (b"", named("delta", text="x"), b":\n"):
        for behind in (b"", b":\n"):
            assert api.is_stream_complete(before + end + behind)


UNFINISHED: list[tuple[Api, bytes]] = [
    (CHAT, event({"choices": [{"delta": {"content": "\ndata: [DONE]\n"}}]})),
    (COMPLETIONS, text("data: [DONE]")),
    (MESSAGES, event({"delta": {"text": "event: message_stop"}}, "content_block_delta")),
    (NATIVE, event({"content": '"stop":true', "stop": False})),
    (RESPONSES, event({"delta": "event: response.completed"}, "response.output_text.delta")),
]


@each_case(("api", "tail"), [*UNFINISHED, *((one, b"") for one in ALL)])
def test_text_that_looks_like_an_end_is_no_end(api: Api, tail: bytes) -> None:
    assert not api.is_stream_complete(tail)
    assert not sse.is_error(tail)


@each_case("api", ALL)
def test_our_error_event_does_not_complete_a_stream(api: Api) -> None:
    sent = api.error_event(FAILED, "req_1")
    assert not api.is_stream_complete(sent)
    assert sse.is_error(sent)
    assert api.classify_event(sent) is StreamEventKind.ERROR


@each_case("api", [CHAT, COMPLETIONS, NATIVE, RESPONSES, RELAYED])
def test_an_error_body_is_openais_with_its_details(api: Api) -> None:
    error = errors.context_length_exceeded(5000, 4096)
    fields = msgspec.json.decode(api.error_body(error, "req_1"))["error"]
    assert (fields["type"], fields["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert (fields["n_ctx"], fields["n_prompt_tokens"]) == (4096, 5000)


@each_case(
    "data", [b"nonsense", b"[1]", b'{"a":', b'"text"', b'{"error":{"message":"about secrets"}}']
)
def test_what_is_no_answer_can_not_be_assembled_and_its_text_stays_private(data: bytes) -> None:
    with pytest.raises(AssemblyError) as caught:
        list(read_events(b"data: " + data + b"\n\n"))
    assert data.decode() not in str(caught.value)
    assert "secrets" not in str(caught.value)


def test_a_response_is_assembled_from_chunks_up_to_its_limit() -> None:
    first, last = b'data: {"content":"a"}\n\n', b'data: {"content":"b","stop":true}\n\n'
    assembler = ResponseAssembler(NATIVE, {}, first, len(first + last))
    assert not assembler.add(last)
    assert assembler.response() == b'{"content":"ab","stop":true,"tokens":[]}'
    assembler = ResponseAssembler(NATIVE, {}, first, len(first + last))
    assert assembler.add(last + b":")
    assert assembler.too_large


@in_virtual_time
async def test_a_stream_that_can_not_be_assembled_is_asked_for_plain(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, one := EmulatedNode(answer_tokens=20)) as proxy:
        one.faults.next("insert", after_events=5, what="done")
        reply = await proxy.ask()
        assert reply.status_code == 200
        content = reply.json()["choices"][0]["message"]["content"]
        assert content == expected_chat_text(CHAT_MESSAGES, 20)
        assert [b'"stream":true' in seen.body for seen in one.seen] == [True, False]
        assert reply.headers["x-gateway-attempts"] == "2"
