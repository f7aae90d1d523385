from __future__ import annotations

from typing import Any

import pytest

from gateway.tools.bench.endpoint import CHAT, ENDPOINTS, ServerFigures, endpoint, is_finished


def test_every_endpoint_is_found_by_its_name() -> None:
    assert [endpoint(one.name) for one in ENDPOINTS] == list(ENDPOINTS)
    assert endpoint("nothing") is None


def test_a_body_streams_and_own_fields_beat_ours() -> None:
    body = CHAT.body("m", "hello", 8, {"temperature": 1, "max_tokens": None, "x": [1]})
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "temperature": 1,
        "x": [1],
    }
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


def test_an_event_says_when_the_answer_ends() -> None:
    assert is_finished({"choices": [{"finish_reason": "stop"}]})
    assert not is_finished({"choices": [{"finish_reason": None}]})
    assert not is_finished({"usage": {}})


def test_what_the_server_says_is_taken_where_it_can_be_true() -> None:
    figures = ServerFigures()
    figures.learn(
        {
            "usage": {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
            "timings": {"prompt_ms": 250.0},
        }
    )
    assert (figures.prompt_tokens, figures.cached_tokens, figures.completion_tokens) == (10, 4, 5)
    assert figures.prefill_seconds == 0.25
    figures.learn({"usage": {"prompt_tokens": True, "completion_tokens": -1}, "timings": []})
    figures.learn({"usage": {"prompt_tokens": 10**12, "prompt_tokens_details": 3}})
    figures.learn({"timings": {"prompt_ms": 1e99}})
    assert (figures.prompt_tokens, figures.completion_tokens) == (10, 5)
    assert figures.prefill_seconds == 0.25
