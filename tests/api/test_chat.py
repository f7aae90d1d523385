"""OpenAI's chats: the plain response of chunks, and chunks after a resumption."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.base import AssemblyError, ResponseAssembler
from gateway.api.chat import (
    CHAT,
    ChatRewriter,
    ChoicesApi,
    NativeToChatRewriter,
)
from gateway.api.completions import COMPLETIONS
from gateway.api.resuming import ReasoningEndMark, wants_usage
from gateway.api.transcript import OverlapMismatch, Transcript
from tests.api.events import (
    IDENTITY,
    OVERLAPPING,
    SPLICE_POINT,
    TIMINGS,
    USAGE,
    assembled,
    chat_choice,
    event,
    values,
)
from tests.each_case import each_case


def test_the_last_finish_reason_counts() -> None:
    parts: list[dict[str, Any]] = [
        {"finish_reason": None}, {"finish_reason": "tool_calls"}, {"finish_reason": "stop"}, {}
    ]  # fmt: skip
    whole = assembled(CHAT, [{"choices": [part]} for part in parts])
    assert whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
def test_logprobs_of_all_parts_are_joined_and_missing_ones_stay_missing(api: ChoicesApi) -> None:
    parts: list[dict[str, Any]] = [
        {"logprobs": {"content": [{"id": 1}]}}, {"logprobs": None}, {"logprobs": {"content": None}},
        {"logprobs": {"content": [{"id": 2}, {"id": 3}]}}, {"finish_reason": "stop"},
    ]  # fmt: skip
    whole = assembled(api, [{"choices": [part]} for part in parts])
    assert whole["choices"][0]["logprobs"] == {"content": [{"id": 1}, {"id": 2}, {"id": 3}]}
    written = b'{"choices":[{"logprobs":{"content":[{"logprob":-0.10}]},"finish_reason":"stop"}]}'
    made = ResponseAssembler(api, {}, b"data: " + written + b"\n\n", 1000).response()
    assert b'{"content":[{"logprob":-0.10}]}' in made, "they are passed without being decoded"
    whole = assembled(api, [{"choices": [part]} for part in (parts[1], parts[-1])])
    assert whole["choices"][0].get("logprobs") is None


def test_usage_is_wanted_only_if_it_is_asked_for() -> None:
    assert wants_usage({"stream_options": {"include_usage": True}})
    others: tuple[Any, ...] = ({"include_usage": False}, {"include_usage": "true"}, [True], None)
    assert not any(wants_usage({"stream_options": other}) for other in others)
    assert not wants_usage({})


HEAD = {"created": 7, "id": "chatcmpl-1", "model": "demo", "system_fingerprint": "b0-unknown"}


def chunk(
    delta: dict[str, Any], reason: str | None = None, index: int = 0, **more: Any
) -> dict[str, Any]:
    choices = [{"finish_reason": reason, "index": index, "delta": delta}]
    return {"choices": choices, **HEAD, "object": "chat.completion.chunk", **more}


OPENING = chunk({"role": "assistant", "content": None})
COUNTS = chunk({}, usage=USAGE, timings=TIMINGS) | {"choices": []}


def assemble(*events: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = assembled(CHAT, events)
    return made


def test_a_chat_is_assembled_as_the_server_answers_it() -> None:
    def call(index: int, arguments: str, **head: Any) -> dict[str, Any]:
        function = {"arguments": arguments} | ({"name": "f"} if head else {})
        return chunk({"tool_calls": [{"index": index, **head, "function": function}]})

    named = {"type": "function", "id": "a"}
    words = [chunk({"reasoning_content": "Let me"}), chunk({"reasoning_content": " see"})]
    words += [chunk({"content": " summe"}), chunk({"content": " door"})]
    calls = [call(0, "{", **named), call(0, '"x":1}'), call(1, "{}", **named)]
    called = [
        {**named, "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"x":1}', "{}")
    ]
    message = {"role": "assistant", "content": " summe door", "reasoning_content": "Let me see"}
    choice = {
        "finish_reason": "tool_calls",
        "index": 0,
        "message": {**message, "tool_calls": called},
    }
    whole = {"choices": [choice], **HEAD, "object": "chat.completion"}
    events = (OPENING, *words, *calls, chunk({}, "tool_calls"), COUNTS)
    assert assemble(*events) == {**whole, "usage": USAGE, "timings": TIMINGS}


A = event(chunk({"content": "a"}))
ODD = [
    event(OPENING), event(chunk({"content": "b"}, index=1)), event(chunk({}, "stop")),
    event(chunk({"content": "c", "role": "x"})), event(COUNTS), A.replace(b'"a"', b'"a\\"'),
    A.replace(b'"a"', b'"a","b"'), A.replace(b'"a"', b""), b"data: [DONE]\n\n",
]  # fmt: skip
PIECES = st.one_of(
    st.text(max_size=6).map(lambda text: event(chunk({"content": text}))),
    st.text(max_size=6).map(lambda text: event(chunk({"reasoning_content": text}))),
    st.text(max_size=6).map(lambda text: event(chunk({}) | {"choices": [{"text": text}]})),
    st.sampled_from(ODD),
)


@given(st.lists(PIECES, max_size=14))
def test_a_run_of_chunks_makes_what_they_make_one_by_one(pieces: list[bytes]) -> None:
    def made(parts: list[bytes]) -> object:
        assembly = CHAT.assemble({})
        next(assembly)
        try:
            for part in parts:
                assembly.send(part)
            assembly.send(None)
        except StopIteration as end:
            return msgspec.json.encode(end.value)
        except (AssemblyError, TypeError, ValueError) as error:
            return type(error)
        raise AssertionError

    assert made([b"".join(pieces)]) == made(pieces)


def test_no_run_takes_another_fields_text_for_the_answers() -> None:
    chunks = [{"text": text, "choices": [{"delta": {"content": ""}}]} for text in "no text of it"]
    end = {"choices": [{"finish_reason": "stop"}]}
    assert assembled(CHAT, [*chunks, end])["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize(
    "events",
    [(), (OPENING, COUNTS), (OPENING, chunk({"content": "a"}))],
    ids=["nothing", "no reason", "cut short"],
)
def test_half_a_chat_is_not_assembled(events: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(AssemblyError):
        assemble(*events)


def test_a_chat_is_assembled_without_any_words_or_figures() -> None:
    whole = assemble(OPENING, chunk({}, "stop"))
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert "usage" not in whole


def test_a_chat_that_ends_within_the_overlap_is_a_mismatch() -> None:
    rewriter = ChatRewriter(Transcript(first_event=IDENTITY), OVERLAPPING)
    with pytest.raises(OverlapMismatch):
        rewriter.rewrite({"choices": [chat_choice({}, "stop")]})
    native = NativeToChatRewriter(Transcript(first_event=IDENTITY), OVERLAPPING)
    with pytest.raises(OverlapMismatch):
        native.rewrite({"content": " t", "stop": True})


def resumed_in_reasoning(mark: ReasoningEndMark) -> NativeToChatRewriter:
    return NativeToChatRewriter(Transcript(first_event=IDENTITY), SPLICE_POINT, mark)


@each_case("behind", ["\n", "\n\n", "\n\n\n", " ", " \n", ""])
def test_only_the_templates_own_white_space_is_stripped_from_content(behind: str) -> None:
    rewriter = resumed_in_reasoning(ReasoningEndMark("</think>", "\n\n"))
    texts = ["so</think>", *behind, "Yes"]
    out = b"".join(rewriter.rewrite({"content": text}) for text in texts)
    content = "".join(v["choices"][0]["delta"].get("content", "") for v in values(out))
    assert content == (behind.removeprefix("\n\n") if behind != "\n" else "") + "Yes"
