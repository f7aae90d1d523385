"""What is taken out of responses, and what is not touched."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.api.base import ResponseRewriter
from gateway.proxy.client_response import CacheFigureHider
from gateway.transport.errors import InvalidResponse

HIDER = CacheFigureHider()


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def body(value: Any) -> Any:
    return json.loads(HIDER.rewrite_body(json.dumps(value).encode()))


def test_events_without_figures_pass_as_they_are() -> None:
    events = event({"choices": [{"delta": {"content": "hello"}}]}) * 3
    assert HIDER.rewrite_events(events) is events


@given(st.text())
def test_texts_pass_whatever_they_say(text: str) -> None:
    told = f'{text} "cached_tokens": 5, ,"id_slot":5 prompt_n "timings":{{"cache_n":1}}'
    chunk = {"choices": [{"delta": {"content": told, "tool": {"cached_tokens": 3}}}]}
    assert HIDER.rewrite_events(event(chunk)) == event(chunk)
    assert body(chunk) == chunk


def test_only_what_tells_is_changed_and_the_order_stays() -> None:
    told = {
        "id": "a",
        "timings": {"cache_n": 144, "prompt_n": 1, "predicted_n": 3, "predicted_ms": 2.5},
        "usage": {"prompt_tokens": 145, "prompt_tokens_details": {"cached_tokens": 144}},
        "z": [1.50, "x"],
    }
    edited = HIDER.rewrite_events(event(told)).decode()
    assert '"z":[1.5, "x"]' in edited  # the node's own bytes
    assert list(json.loads(edited.removeprefix("data: "))) == list(told)
    assert body(told) == {
        "id": "a",
        "timings": {"predicted_n": 3, "predicted_ms": 2.5},
        "usage": {"prompt_tokens": 145, "prompt_tokens_details": {"cached_tokens": 0}},
        "z": [1.5, "x"],
    }


def test_anthropics_input_tokens_are_all_of_the_prompts() -> None:
    usage = {
        "input_tokens": 1,
        "cache_read_input_tokens": 100,
        "cache_creation_input_tokens": 44,
        "cache_creation": {"ephemeral_5m_input_tokens": 44},
        "output_tokens": 3,
    }
    start = {"type": "message_start", "message": {"content": [], "usage": usage}}
    edited = HIDER.rewrite_events(b"event: message_start\n" + event(start))
    assert edited.startswith(b"event: message_start\ndata: ")
    assert json.loads(edited.partition(b"data: ")[2])["message"]["usage"] == {
        "input_tokens": 145,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0},
        "output_tokens": 3,
    }


@pytest.mark.parametrize("usage", [None, [], "x", {"prompt_tokens_details": None}, {}])
def test_usage_of_another_shape_passes(usage: object) -> None:
    value = {"usage": usage, "prompt_cache_key": "mine"}
    assert body(value) == value


def test_a_slot_is_named_nowhere() -> None:
    first = b'data: {"id_slot":3,"content":"a"}\n\n'
    last = b'data: {"content":"a","id_slot":-1}\n\n'
    middle = b'data: {"index":0,"id_slot":12,"content":"a"}\n\n'
    assert HIDER.rewrite_events(first + middle + last) == (
        b'data: {"content":"a"}\n\ndata: {"index":0,"content":"a"}\n\ndata: {"content":"a"}\n\n'
    )
    assert body([{"id_slot": 1, "index": 0}, {"id_slot": 2, "index": 1}]) == [
        {"index": 0},
        {"index": 1},
    ]


def test_data_of_several_lines_and_events_around_it() -> None:
    split = b'event: x\ndata: {"cache_n": 1,\ndata: "a": 2}\n\n'
    edited = HIDER.rewrite_events(b":\n" + event({"a": "cache"}) + split + b"data: [DONE]\n\n")
    assert edited == (
        b":\n" + event({"a": "cache"}) + b'event: x\ndata: {"a":2}\n\n' + b"data: [DONE]\n\n"
    )


def test_lines_of_json_lose_the_durations_that_tell() -> None:
    last = {"done": True, "total_duration": 9, "load_duration": 1, "prompt_eval_duration": 5}
    more = {"prompt_eval_count": 145, "eval_count": 3, "eval_duration": 3}
    lines = json.dumps({"response": "a"}) + "\n" + json.dumps(last | more) + "\n"
    edited = HIDER.rewrite_events(lines.encode()).splitlines()
    assert [json.loads(line) for line in edited] == [{"response": "a"}, {"done": True, **more}]


@pytest.mark.parametrize("data", [b'data: {"cache_n": \n\n', b'{"cache_n": 1\n'])
def test_what_cannot_be_read_does_not_pass(data: bytes) -> None:
    with pytest.raises(InvalidResponse):
        HIDER.rewrite_events(data)
    with pytest.raises(InvalidResponse):
        HIDER.rewrite_body(b'{"cache_n": ')


def test_plain_text_passes() -> None:
    assert HIDER.rewrite_body(b"the cache is prompt_n") == b"the cache is prompt_n"


def test_it_works_behind_a_translator() -> None:
    class Telling(ResponseRewriter):
        def rewrite_events(self, events: bytes) -> bytes:
            return events + event({"cache_n": 1})

        def rewrite_body(self, content: bytes) -> bytes:
            return b'{"cache_n":1}'

    hider = CacheFigureHider(Telling())
    assert hider.rewrite_events(event({"a": 1})) == event({"a": 1}) + b"data: {}\n\n"
    assert hider.rewrite_body(b"{}") == b"{}"
