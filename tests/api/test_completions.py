"""Completions: the plain response, chunks after a resumption, and several prompts' responses."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.api.base import Api, AssemblyError, ResponseMerger
from gateway.api.completions import COMPLETIONS
from gateway.api.native import INFILL, NATIVE, NativeEventsApi
from gateway.transport.errors import InvalidResponse
from tests.api.events import assembled, event, values
from tests.each_case import each_case


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
