"""The responses to several prompts become one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.proxy.api.base import Api, ResponseMerger
from gateway.proxy.api.completions import COMPLETIONS
from gateway.proxy.api.native import NATIVE
from gateway.transport.errors import InvalidResponse
from tests.each_case import each_case
from tests.proxy.api.events import event, values

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
    assert merging.size > 0


def test_several_answers_to_each_prompt_are_numbered_through() -> None:
    merging = merger(COMPLETIONS, 2)
    choices = [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]
    merging.add(1, json.dumps({"choices": choices}).encode())
    merged = json.loads(merging.merged_response())
    assert [choice["index"] for choice in merged["choices"]] == [3, 2]


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


@each_case(
    ("api", "data"),
    [
        (COMPLETIONS, b"oops"),
        (COMPLETIONS, b"[1]"),
        (COMPLETIONS, b'{"choices":3}'),
        (NATIVE, b"oops"),
        (NATIVE, b"[1]"),
    ],
)
def test_an_unreadable_response_is_invalid(api: Api, data: bytes) -> None:
    with pytest.raises(InvalidResponse):
        merger(api).add(0, data)
