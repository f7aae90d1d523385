"""Loads, prompts, streams and the figures of a request. Whole runs: `test_session.py`."""

from __future__ import annotations

import asyncio
import time
from itertools import takewhile
from typing import Any

import pytest

from gateway.workshop.bench.exchange import (
    CHAT,
    MOST_EVENT_BYTES,
    PROBE_WORDS,
    Calibration,
    ExchangeError,
    PromptWriter,
    RequestResult,
    StreamReader,
    is_finished,
)
from gateway.workshop.bench.load import TICK_SECONDS, LagMonitor
from gateway.workshop.simulate.simulation import TracePrompt
from tests.each_case import each_case


def words(text: TracePrompt, seed: int = 1, calibration: Calibration | None = None) -> list[str]:
    return PromptWriter(seed, calibration or Calibration()).write(text).split()


def shared(one: list[str], other: list[str]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_a_prompt_has_as_many_words_as_the_calibration_says() -> None:
    calibration = Calibration.of(6 + 2 * PROBE_WORDS, 6 + 4 * PROBE_WORDS)
    assert (calibration.tokens_per_word, calibration.overhead) == (2.0, 6)
    for tokens in (30, 180, 1000):
        count = len(words(TracePrompt(1, tokens), calibration=calibration))
        assert 6 + count * 2 == pytest.approx(tokens, abs=1)
    assert len(words(TracePrompt(1, 1), calibration=calibration)) == 1


def test_prompts_of_one_prefix_have_it_in_common_and_no_more() -> None:
    one, other = words(TracePrompt(1, 200, 7, 150)), words(TracePrompt(2, 300, 7, 150))
    assert 150 <= shared(one, other) < 155
    assert shared(one, words(TracePrompt(1, 200, 8, 150))) < 5
    # A prompt may be its prefix alone.
    assert words(TracePrompt(1, 100, 7, 100)) == words(TracePrompt(2, 100, 7, 100))


async def test_work_that_blocks_the_event_loop_is_seen_as_lag_and_cpu_time() -> None:
    cpu = iter((10.0, 12.5))
    monitor = LagMonitor(cpu_clock=lambda: next(cpu))
    began = time.monotonic()
    async with monitor.watching():
        for _ in range(5):
            await asyncio.sleep(TICK_SECONDS)
            time.sleep(0.05)  # noqa: ASYNC251 - it blocks the event loop on purpose
    seconds = time.monotonic() - began
    found = monitor.figures([0.25], 3)
    assert found.lag.p99 > 0.02
    assert 2.5 / seconds <= found.cpu_share <= 2.5 / 0.25
    assert (found.start_lag.p50, found.held_back) == (0.25, 3)


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


def test_a_body_streams_and_own_fields_beat_ours() -> None:
    body = CHAT.body("m", "hello", 8, {"temperature": 1, "max_tokens": None, "x": [1]})
    messages = [{"role": "user", "content": "hello"}]
    assert body == {"model": "m", "messages": messages, "stream": True, "temperature": 1, "x": [1]}
    assert "model" not in CHAT.body(None, "hello", 8, {})


@each_case(
    ("choices", "has_content"),
    [
        ([{"delta": {"content": "a"}}], True),
        ([{"delta": {"reasoning_content": "a"}}], True),
        ([{"delta": {"tool_calls": [{}]}}], True),
        ([{"delta": {"role": "assistant", "content": ""}}], False),
        ([], False),
        ({"delta": {"content": "a"}}, False),
        ([["delta"]], False),
        ([{"delta": "content"}], False),
    ],
)
def test_only_events_with_content_count(choices: object, has_content: bool) -> None:
    assert CHAT.has_content({"choices": choices}) is has_content
    assert not is_finished({"choices": choices})
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
