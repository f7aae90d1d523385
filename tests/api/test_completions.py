"""Completions: the plain response, chunks after a resumption, and several prompts' responses."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.api.base import Api, AssemblyError, ResponseMerger
from gateway.api.completions import COMPLETIONS, NativeToCompletionsRewriter, read_completion
from gateway.api.native import INFILL, NATIVE, NativeEventsApi, NativeRewriter
from gateway.api.transcript import Transcript, TranscriptRecorder
from gateway.forward.event_pipeline import TokenIdExtractor
from gateway.transport.errors import InvalidResponse
from tests.api.events import IDENTITY, SPLICE_POINT, assembled, event, values
from tests.each_case import each_case


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


END = b"data: [DONE]\n\n"


def merger(api: Api, answers_per_prompt: int = 1, **fields: Any) -> ResponseMerger:
    assert api.merger is not None
    raws = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in fields.items()}
    return api.merger(raws, answers_per_prompt)


def completion(text: str, answer_id: str, **more: Any) -> dict[str, Any]:
    return {"id": answer_id, "choices": [{"index": 0, "text": text}], **more}


def usage(tokens: int, cached: int) -> dict[str, Any]:
    return {"usage": {"total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}}


def test_plain_completions_are_merged_in_the_prompts_order() -> None:
    merging = merger(COMPLETIONS)
    merging.add(1, json.dumps(completion("b", "y", **usage(5, 1))).encode())
    merging.add(0, json.dumps(completion("a", "x", **usage(3, 2))).encode())
    merged = json.loads(merging.merged_response())
    assert merged["id"] == "x"
    assert merged["choices"] == [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]
    assert merged["usage"] == usage(8, 3)["usage"]
    merging = merger(COMPLETIONS, answers_per_prompt=2)
    merging.add(1, b'{"choices": [{"index": 1}, {"index": 0}]}')
    merged = json.loads(merging.merged_response())
    assert [choice["index"] for choice in merged["choices"]] == [3, 2], "numbered through"


@pytest.mark.parametrize("asked", [True, False])
def test_the_chunks_of_completions_share_an_id_and_their_usage_comes_once(*, asked: bool) -> None:
    merging = merger(COMPLETIONS, stream_options={"include_usage": asked})
    first = merging.merge_events(1, event(completion("b", "y")) + END)
    second = merging.merge_events(0, b"data: null\n\n" + event(completion("a", "x", usage=None)))
    counts = merging.merge_events(0, event({"choices": [], **usage(3, 2)}) + END)
    assert counts == b""
    chunks = values(first + second)
    assert [(v["id"], v["choices"][0]["index"]) for v in chunks] == [("y", 1), ("y", 0)]
    end = merging.stream_end()
    assert end.endswith(END)
    assert [v["usage"] for v in values(end.removesuffix(END))] == (
        [usage(3, 2)["usage"]] if asked else []
    )


def test_native_responses_become_a_list() -> None:
    merging = merger(NATIVE)
    merging.add(1, b'[{"index":0,"content":"b"}]')
    merging.add(0, b' {"content":"a"}')
    assert json.loads(merging.merged_response()) == [
        {"index": 0, "content": "a"},
        {"index": 1, "content": "b"},
    ]


def test_native_events_pass_with_their_prompts_index() -> None:
    merging = merger(NATIVE)
    out = merging.merge_events(1, event({"index": 0, "content": "b", "stop": True}))
    assert values(out) == [{"index": 1, "content": "b", "stop": True}]
    assert merging.stream_end() == b""


@each_case("data", [b"oops", b"[1]", b'{"choices":3}'])
def test_an_unreadable_response_is_invalid(data: bytes) -> None:
    for api in (COMPLETIONS, NATIVE)[: 1 if b"choices" in data else 2]:
        with pytest.raises(InvalidResponse):
            merger(api).add(0, data)


@pytest.mark.parametrize("api", [NATIVE, INFILL])
def test_a_plain_response_has_token_ids_only_if_asked(api: NativeEventsApi) -> None:
    events: list[dict[str, Any]] = [
        {"index": 0, "content": " a", "tokens": [1], "stop": False},
        {"index": 0, "content": " b", "tokens": [2], "stop": False},
    ]
    end = {"content": "", "tokens": [], "stop": True, "generation_settings": {"stream": True}}
    whole = {
        "content": " a b",
        "tokens": [],
        "stop": True,
        "generation_settings": {"stream": False},
    }
    assert assembled(api, [*events, end]) == whole
    assert assembled(api, [*events, end], {"return_tokens": True})["tokens"] == [1, 2]
    with pytest.raises(AssemblyError):
        assembled(api, events)


def test_a_resumed_stream_counts_on() -> None:
    rewriter = NativeRewriter(Transcript(), SPLICE_POINT)
    last = {"content": "", "stop": True, "tokens_predicted": 4, "tokens_evaluated": 9}
    (value,) = values(rewriter.rewrite(last | {"prompt": "tell me one two"}))
    assert (value["tokens_predicted"], value["tokens_evaluated"]) == (6, 5)
    assert value["prompt"] == "tell me"
