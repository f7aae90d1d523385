"""Several prompts in one body: counted as the server does, bounded, and split."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.proxy.inbound.body import LARGE_BODY_BYTES, TimeSlicer, read_large_body
from gateway.proxy.inbound.request import (
    MOST_PROMPTS_BYTES,
    MOST_REPEATED_BYTES,
    parse_prompt_list,
    split_prompts,
)
from tests.each_case import each_case


def raw(value: Any, **layout: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value, **layout).encode())


@each_case(
    ("prompt", "count"),
    [
        ("text", 0), ([], 0), ([1, 2, 3], 0), (["a", 5, "b"], 0), ([5, "a"], 0), (["a"], 0),
        (["a", "b", "c"], 3), ([[1, 2], [3]], 2), ([["a", 1], "b"], 2),
        ([{"prompt_string": "a"}, {"prompt_string": "b"}], 2), ({"prompt_string": "a"}, 0),
        (None, 0),
    ],
)  # fmt: skip
def test_prompts_are_counted_as_the_server_counts_them(prompt: Any, count: int) -> None:
    assert len(split_prompts(raw(prompt))) == count
    assert len(split_prompts(raw(prompt, indent=2))) == count
    assert len(split_prompts(raw(prompt, indent=100))) == count


def test_a_missing_prompt_is_not_a_list() -> None:
    assert split_prompts(msgspec.Raw()) == []


def made(body: dict[str, Any], **limits: Any) -> Any:
    data = json.dumps(body).encode()
    settings = LimitSettings(**limits)
    whole: Any = data
    if len(data) >= LARGE_BODY_BYTES:
        whole = ended(read_large_body(data, settings))
    return parse_prompt_list(whole, raw(body["prompt"]), settings, as_it_is)


def as_it_is(_: int, part: bytes) -> Any:
    yield
    return part


def ended(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("length", [1, LARGE_BODY_BYTES])
async def test_each_prompt_is_sent_with_all_other_fields(length: int) -> None:
    body = {"model": "a", "prompt": ["b" * length, [1, 2]], "seed": 7}
    found = made(body)
    parts = [json.loads(await found.sub_request(index, TimeSlicer())) for index in range(2)]
    assert parts == [{**body, "prompt": "b" * length}, {**body, "prompt": [1, 2]}]


@pytest.mark.parametrize("length", [1, LARGE_BODY_BYTES])
def test_too_many_prompts_are_a_bad_request(length: int) -> None:
    assert made({"prompt": ["a" * length] * 5}, prompts=5) is not None
    with pytest.raises(GatewayError, match="the most is 5") as caught:
        made({"prompt": ["a" * length] * 6}, prompts=5)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_prompts_are_split_up_to_a_limit() -> None:
    assert made({"prompt": ["a" * (MOST_PROMPTS_BYTES - 100), "b"]}) is not None
    with pytest.raises(GatewayError, match="Send fewer") as caught:
        made({"prompt": ["a" * MOST_PROMPTS_BYTES, "b"]})
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    assert made({"prompt": "a" * 2 * MOST_PROMPTS_BYTES}) is None
    assert made({"prompt": [7] * (MOST_PROMPTS_BYTES // 2)}) is None


def test_fields_repeated_with_each_prompt_are_bounded() -> None:
    body = {"prompt": ["a"] * 1000, "grammar": "x" * (MOST_REPEATED_BYTES // 1000 - 100)}
    assert made(body) is not None
    with pytest.raises(GatewayError, match="sent with each") as caught:
        made(body | {"grammar": "x" * (MOST_REPEATED_BYTES // 1000)})
    assert (caught.value.status, caught.value.param) == (400, "prompt")
