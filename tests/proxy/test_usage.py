"""Tokens are read from the end of a response, whatever its text says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.lease import Usage
from gateway.proxy.api.base import Api
from gateway.proxy.api.chat import CHAT
from gateway.proxy.api.messages import MESSAGES
from gateway.proxy.api.native import NATIVE
from gateway.proxy.api.relayed import RELAYED
from gateway.proxy.api.responses import RESPONSES
from gateway.proxy.stream import UsageFilter
from gateway.proxy.tokens import (
    MOST_OBJECT_BYTES,
    MOST_PLAUSIBLE_TOKENS,
    find_last_object,
    read_usage,
)
from tests.each_case import each_case

TIMINGS = {
    "cache_n": 236,
    "prompt_n": 1,
    "prompt_ms": 30.958,
    "predicted_n": 35,
    "predicted_ms": 661.064,
}


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def read(value: Any, api: Api = CHAT) -> tuple[int, int, int]:
    usage = api.read_usage(dump(value))
    assert usage is not None
    return usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens


def test_a_plain_chat_reports_usage_and_timings() -> None:
    usage = {
        "completion_tokens": 35,
        "prompt_tokens": 237,
        "total_tokens": 272,
        "prompt_tokens_details": {"cached_tokens": 236},
    }
    body = {"choices": [{"message": {"content": "x"}}], "usage": usage, "timings": TIMINGS}
    assert read(body) == (237, 236, 35)
    found = read_usage(dump(body))
    assert found is not None
    assert found.timings == TIMINGS


def test_a_stream_without_usage_reports_timings() -> None:
    stream = b'data: {"choices":[{"finish_reason":"stop"}],"timings":%b}\n\ndata: [DONE]\n\n'
    assert read_usage(stream % dump(TIMINGS)) == Usage(237, 236, 35, TIMINGS)


def test_messages_exclude_the_cached_tokens_from_input_tokens() -> None:
    usage = {"cache_read_input_tokens": 40, "input_tokens": 5, "output_tokens": 9}
    assert read({"type": "message", "usage": usage}, MESSAGES) == (45, 40, 9)
    assert read({"type": "message_delta", "usage": {"output_tokens": 9}}, MESSAGES) == (0, 0, 9)


def test_responses_include_the_cached_tokens() -> None:
    usage = {
        "input_tokens": 45,
        "output_tokens": 9,
        "total_tokens": 54,
        "input_tokens_details": {"cached_tokens": 40},
    }
    assert read({"response": {"usage": usage}}, RESPONSES) == (45, 40, 9)


def test_embeddings_use_a_prompt_alone() -> None:
    value = {"data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}}
    assert read(value, RELAYED) == (7, 0, 0)
    far = {"data": [0.5] * 1000, "usage": {"prompt_tokens": 7, "total_tokens": 7}}
    assert read(far, RELAYED) == (7, 0, 0)


def test_a_native_response_has_timings_alone() -> None:
    assert read({"content": "x", "stop": True, "timings": TIMINGS}, NATIVE) == (237, 236, 35)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"usage":null}', b'{"usage":null,"a":{"prompt_tokens":3}}', b"[1"]
)
def test_a_response_without_figures_has_no_usage(body: bytes) -> None:
    assert read_usage(body) is None


def test_null_is_not_followed_to_the_next_object() -> None:
    assert find_last_object(b'{"usage":1,"a":{"x":1}}', b'"usage":') is None
    assert find_last_object(b'{"usage": {"x":1}}', b'"usage":') == {"x": 1}


@given(st.text(), st.sampled_from(["content", 'x"usage":{"', "arguments"]))
def test_text_that_looks_like_usage_is_not_read(text: str, key: str) -> None:
    inside = text + '"usage":{"prompt_tokens":999999},"timings":{"prompt_n":999999}' + text
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    assert read({"usage": usage, "choices": [{key: inside}]}) == (3, 0, 4)
    assert read_usage(dump({"choices": [{key: inside}]})) is None


@pytest.mark.parametrize(
    "number",
    ["-5", "-1e300", "null", '"7"', "[]", "{}", "false", "0", "0.2"],
)
def test_an_implausible_number_counts_as_zero(number: str) -> None:
    body = f'{{"usage":{{"prompt_tokens":{number},"completion_tokens":2}}}}'
    assert read_usage(body.encode()) == Usage(0, 0, 2)


@pytest.mark.parametrize("number", ["1e300", "9" * 400, "4294967296"])
def test_a_huge_number_is_bounded(number: str) -> None:
    found = read_usage(f'{{"timings":{{"prompt_n":{number}}}}}'.encode())
    assert found is not None
    assert found.prompt_tokens == MOST_PLAUSIBLE_TOKENS


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e"])
def test_figures_that_are_no_json_are_no_usage(number: str) -> None:
    assert read_usage(f'{{"usage":{{"prompt_tokens":{number}}}}}'.encode()) is None


def test_no_more_tokens_are_cached_than_the_prompt_has() -> None:
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 9}}
    assert read({"usage": usage}) == (3, 3, 0)


def test_an_endless_object_is_not_read() -> None:
    body = b'{"usage":{' + MOST_OBJECT_BYTES * b" " + b'"prompt_tokens":1}}'
    assert read_usage(body) is None


@given(st.binary())
def test_any_bytes_can_be_read(data: bytes) -> None:
    read_usage(b'{"usage":{' + data)
    read_usage(b'"timings":' + data + b"}")


@each_case(
    ("came", "passed"),
    [
        (b'{"a":1,"usage":null}', b'{"a":1}'),
        (b'{"a": 1, "usage": null, "b": 2}', b'{"a": 1, "b": 2}'),
        (b'{"usage":null,"a":1}', b'{"a":1}'),
        (b'{"choices":[{"delta":{"content":"\\"usage\\":null,"}}]}', None),
        (b'{"choices":[{"delta":{}}],"usage":{"prompt_tokens":1}}', None),
        (b'{"choices":[],"prompt_filter_results":[]}', None),
        (b'{"choices":[],"usage":{"prompt_tokens":1}}', b""),
        (b'{"choices":[],"error":null,"usage":{"prompt_tokens":1}}', b""),
        (b'{"usage":{"prompt_tokens":1}}', b""),
        (b'{"error":{"message":"no"},"choices":[],"usage":{"prompt_tokens":1}}', None),
        (b"[DONE]", None),
    ],
)
def test_the_traces_of_a_question_for_usage_are_taken_out(
    came: bytes, passed: bytes | None
) -> None:
    """None: the event passes as it is."""
    event_filter, other = UsageFilter(), b'data: {"choices":[{"text":"a"}]}\n\n'
    expected = came if passed is None else passed
    expected = b"data: %b\n\n" % expected if expected else b""
    event = b"data: %b\n\n" % came
    assert event_filter(other + event) == other + expected
    assert event_filter.event == (b"" if expected else event)


def test_usage_before_further_choices_is_not_that_of_the_whole_stream() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":%d}}\n\n'
    text, done = b'data: {"choices":[{}]}\n\n', b"data: [DONE]\n\n"

    @each_case(
        ("chunks", "reported"),
        [
            ([usage % 1, text, usage % 2, done], usage % 2),
            ([usage % 1 + text + usage % 2 + done], usage % 2),
            ([usage % 1, text, done], b""),
            ([usage % 1 + text + done], b""),
            ([usage % 1, b'data: {"choices":[{}],"usage":{"prompt_tokens":2}}\n\n', done], b""),
            ([usage % 1, b":\n", usage % 2 + b":\n" + done], usage % 2),
        ],
    )
    def check(chunks: list[bytes], reported: bytes) -> None:
        event_filter = UsageFilter()
        assert b"[]" not in b"".join(event_filter(chunk) for chunk in chunks)
        assert event_filter.event == reported

    check()
