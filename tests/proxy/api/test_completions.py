"""Completions: the plain response assembled from chunks, and chunks after a resumption."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.proxy.api.completions import (
    COMPLETIONS,
    CompletionsRewriter,
    NativeToCompletionsRewriter,
    read_completion,
)
from gateway.proxy.stream import TokenIdExtractor
from gateway.proxy.transcript import (
    OverlapMismatch,
    SplicePoint,
    Transcript,
    TranscriptRecorder,
)
from tests.proxy.api.events import IDENTITY, SPLICE_POINT, TIMINGS, USAGE, assembled, event, values


def test_a_completion_is_assembled() -> None:
    head = {"created": 7, "id": "cmpl-1", "model": "demo", "object": "text_completion"}

    def part(text: str, reason: str | None = None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}
        return {"choices": [choice], **head}

    counts = {"choices": [], **head, "usage": USAGE, "timings": TIMINGS}
    whole = assembled(COMPLETIONS, [part(" a"), part(" b"), part("", "stop"), counts])
    assert whole["choices"] == [
        {"text": " a b", "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]
    assert (whole["object"], whole["usage"]) == ("text_completion", USAGE)


def test_another_text_than_the_overlap_is_a_mismatch() -> None:
    rewriter = CompletionsRewriter(Transcript(), SplicePoint("", "x", 1, 1, 0))
    with pytest.raises(OverlapMismatch):
        rewriter.rewrite({"choices": [{"text": "y"}]})


def test_chunks_made_of_native_events_report_usage_where_the_client_asks_for_it() -> None:
    transcript = Transcript(first_event=IDENTITY | {"object": "text_completion"})
    rewriter = NativeToCompletionsRewriter(transcript, SPLICE_POINT, usage=True)
    last = {"content": "", "stop": True, "stop_type": "limit", "tokens_predicted": 3}
    out = rewriter.rewrite({"content": " x"}) + rewriter.rewrite(last)
    first, end, usage = values(out)
    assert first["choices"][0]["text"] == " x"
    assert (end["choices"][0]["finish_reason"], end["object"]) == ("length", "text_completion")
    assert usage["usage"]["completion_tokens"] == 5
    assert {value["id"] for value in (first, end, usage)} == {"first"}


def test_a_chunk_without_the_logprobs_that_were_asked_for_keeps_an_empty_field() -> None:
    recorder = TranscriptRecorder(read_completion, 1000)
    extract = TokenIdExtractor(COMPLETIONS.take_token_ids, recorder.add_token_ids)
    value = {"choices": [{"text": "a", "logprobs": {"content": [{"id": 7}]}}]}
    assert values(extract(event(value))) == [{"choices": [{"text": "a", "logprobs": None}]}]
    assert recorder.transcript().token_ids == [7]
