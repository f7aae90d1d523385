"""Streams in any pieces, and the figures of one request. Whole exchanges: `test_session.py`."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.workshop.bench.exchange import (
    CHAT,
    MOST_EVENT_BYTES,
    ExchangeError,
    RequestResult,
    StreamReader,
    is_finished,
    message_of,
    read_object,
)

EVENTS = b"".join(
    b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % word for word in (b"a", b"b", b"c")
)


def read(*pieces: bytes, most_events: int = 100) -> tuple[RequestResult, StreamReader]:
    """Read pieces that come a second apart, from second 1 on."""
    result = RequestResult(1, 0.0)
    reader = StreamReader(CHAT, result, most_events)
    for number, piece in enumerate(pieces, start=1):
        reader.feed(piece, float(number))
    return result, reader


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_pieces_of_any_size_are_the_same_events(size: int, line_end: bytes) -> None:
    stream = (b":\n" + EVENTS + b"data: [DONE]\n\n").replace(b"\n", line_end)
    result, reader = read(*(stream[at : at + size] for at in range(0, len(stream), size)))
    assert result.events == 3
    assert reader.is_done


def test_an_event_of_several_lines_has_come_with_the_piece_that_ends_it() -> None:
    whole = EVENTS.replace(b'{"choices":', b'{"choices":\ndata: ').split(b"\n\n")
    result, _ = read(whole[0], b"\n", b"\n", whole[1] + b"\n\n", whole[2] + b"\n\n")
    assert (result.first, result.last) == (3.0, 5.0)
    assert result.longest_gap == 1.0


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"data: {\n\n", "not_json"),
        (b"data: 1\n\n", "not_json"),
        (b"data: \xff\n\n", "not_json"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "not_json"),
        (b'data: {"error":{"message":"full"}}\n\n', "error_event"),
        (b"data: " + b" " * (MOST_EVENT_BYTES + 1) + b"\n", "too_large"),
        (b"data: a\n" * (MOST_EVENT_BYTES // 7 + 1), "too_large"),
        (b"x" * (MOST_EVENT_BYTES + 1), "too_large"),
        (EVENTS * 2, "endless"),
    ],
)
def test_what_is_no_stream_of_tokens_is_refused(stream: bytes, reason: str) -> None:
    with pytest.raises(ExchangeError) as caught:
        read(stream, most_events=5)
    assert caught.value.reason == reason


def test_the_time_between_tokens_is_that_of_the_gaps_between_events() -> None:
    result = RequestResult(1, intended=10.0, first=11.0, last=20.0, events=10, ended=21.0)
    assert result.ttft == 1.0
    assert result.completion == 11.0
    assert result.inter_token == 1.0
    # Two tokens in each event: 18 came in the nine gaps.
    result.completion_tokens = 20
    assert result.tokens == 20
    assert result.inter_token == 0.5
    # A server that counts fewer tokens than it sent events is not believed to be faster.
    result.completion_tokens = 1
    assert result.inter_token == 1.0
    for events in (0, 1):
        assert RequestResult(1, 0.0, first=1.0, last=1.0, events=events).inter_token is None


def test_an_errors_words_are_found_and_bounded() -> None:
    assert message_of(read_object(b'{"error":{"message":"full"}}')) == "full"
    assert message_of(read_object(b'{"error":"full"}')) == "full"
    assert message_of(read_object(b'{"error":[1]}')) == ""
    assert len(message_of({"error": "x" * 10_000})) == 200


def test_a_body_streams_and_own_fields_beat_ours() -> None:
    body = CHAT.body("m", "hello", 8, {"temperature": 1, "max_tokens": None, "x": [1]})
    messages = [{"role": "user", "content": "hello"}]
    assert body == {"model": "m", "messages": messages, "stream": True, "temperature": 1, "x": [1]}
    assert "model" not in CHAT.body(None, "hello", 8, {})


@pytest.mark.parametrize(
    ("event", "has_content"),
    [
        ({"choices": [{"delta": {"content": "a"}}]}, True),
        ({"choices": [{"delta": {"reasoning_content": "a"}}]}, True),
        ({"choices": [{"delta": {"tool_calls": [{}]}}]}, True),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": [{"delta": {"content": None}}]}, False),
        ({"choices": []}, False),
        ({"choices": {"delta": {"content": "a"}}}, False),
        ({"choices": [["delta"]]}, False),
        ({"choices": [{"delta": "content"}]}, False),
        ({}, False),
    ],
)
def test_only_events_with_content_count(event: dict[str, Any], has_content: bool) -> None:
    assert CHAT.has_content(event) is has_content
    assert not is_finished(event)
    assert not is_finished({"choices": [{"finish_reason": None}]})
    assert is_finished({"choices": [{"finish_reason": "stop"}]})


def test_what_the_server_says_is_taken_where_it_can_be_true() -> None:
    figures = RequestResult(1, 0.0)
    usage: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": 5}
    usage |= {"prompt_tokens_details": {"cached_tokens": 4}}
    figures.learn({"usage": usage, "timings": {"prompt_ms": 250.0}})
    assert (figures.prompt_tokens, figures.cached_tokens, figures.completion_tokens) == (10, 4, 5)
    assert figures.prefill_seconds == 0.25
    figures.learn({"usage": {"prompt_tokens": True, "completion_tokens": -1}, "timings": []})
    figures.learn({"usage": {"prompt_tokens": 10**12, "prompt_tokens_details": 3}})
    figures.learn({"timings": {"prompt_ms": 1e99}})
    assert (figures.prompt_tokens, figures.completion_tokens) == (10, 5)
    assert figures.prefill_seconds == 0.25
