"""What the APIs share whose events are chunks of choices."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.proxy.api.base import AssemblyError, ResponseAssembler
from gateway.proxy.api.chat import (
    CHAT,
    ChoicesApi,
    as_index,
    read_chunk,
    take_logprobs,
)
from gateway.proxy.api.completions import COMPLETIONS
from gateway.proxy.api.resuming import wants_usage
from gateway.proxy.transcript import Transcript
from tests.each_case import each_case
from tests.proxy.api.events import assembled


@each_case(("value", "index"), [(0, 0), (3, 3), (None, 0), ("1", 0), (1.5, 0)])
def test_what_is_no_index_counts_as_the_first(value: object, index: int) -> None:
    assert as_index(value) == index


def test_the_last_finish_reason_counts() -> None:
    parts: list[dict[str, Any]] = [
        {"finish_reason": None}, {"finish_reason": "tool_calls"}, {"finish_reason": "stop"}, {}
    ]  # fmt: skip
    whole = assembled(CHAT, [{"choices": [part]} for part in parts])
    assert whole["choices"][0]["finish_reason"] == "stop"
    with pytest.raises(AssemblyError, match="no end"):
        assembled(CHAT, [{"choices": [{"finish_reason": None}, {}]}])


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


def test_logprobs_are_taken_out_of_a_chunk_as_token_ids() -> None:
    chunk = {
        "choices": [
            {"index": 0, "logprobs": {"content": [{"id": 7}, {"id": 8}]}},
            {"index": 0, "logprobs": None},
        ]
    }
    assert take_logprobs(chunk) == [7, 8]
    assert chunk == {"choices": [{"index": 0}, {"index": 0}]}


@each_case(
    ("body", "wanted"),
    [
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": "true"}}, False),
        ({"stream_options": [True]}, False),
        ({"stream_options": None}, False),
        ({}, False),
    ],
)
def test_usage_is_wanted_only_if_it_is_asked_for(body: dict[str, Any], wanted: bool) -> None:
    assert wants_usage(body) is wanted


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"index": 1}, "several answers"),
        ({"index": 0, "logprobs": {"content": []}}, "probabilities"),
    ],
)
def test_what_cannot_be_repeated_makes_a_stream_unresumable(
    choice: dict[str, Any], reason: str
) -> None:
    transcript = Transcript()
    assert read_chunk(transcript, {"id": "x", "choices": [choice]}) == [choice]
    assert transcript.unresumable is not None
    assert reason in transcript.unresumable


def test_a_chunk_adds_its_head_its_end_and_its_usage_to_the_transcript() -> None:
    transcript = Transcript()
    read_chunk(transcript, {"id": "x", "choices": [{"index": 0, "finish_reason": None}]})
    assert (transcript.first_event["id"], transcript.finish_reason) == ("x", None)
    read_chunk(transcript, {"id": "y", "choices": [{"index": 0, "finish_reason": "length"}]})
    read_chunk(transcript, {"id": "y", "choices": [], "usage": {"total_tokens": 3}})
    assert transcript.first_event["id"] == "x"
    assert transcript.finish_reason == "length"
    assert transcript.usage_sent
    assert transcript.unresumable is None
