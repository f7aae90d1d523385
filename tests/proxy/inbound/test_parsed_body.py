"""Fields are read as the server reads them, prompts are measured, bad bodies are refused."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.proxy.inbound.body import (
    PromptSize,
    estimate_min_tokens,
    measure_prompt,
    nesting_depth,
    parse_body,
)
from tests.each_case import each_case
from tests.proxy.pictures import data_url, png


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


@each_case(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"  \n", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b'{"a":1}}', "invalid_json", None),
        (b"{'a':1}", "invalid_json", None),
        (b'{"a":NaN}', "invalid_json", None),
        (b'{"model":"\xff"}', "invalid_json", None),
        (b'{"x":"\xed\xa0\x80"}', "invalid_json", None),
        (b"[]", "invalid_request", None),
        (b'"text"', "invalid_request", None),
        (b"null", "invalid_request", None),
        (b'{"model":7}', "invalid_request", "model"),
        (b'{"stream":"yes"}', "invalid_request", "stream"),
        (b'{"n":"2"}', "invalid_request", "n"),
        (b'{"max_tokens":[1]}', "invalid_request", "max_tokens"),
    ],
)
def test_a_bad_body_is_refused_with_the_contracts_codes(
    body: bytes, code: str, param: str | None
) -> None:
    with pytest.raises(GatewayError) as raised:
        parse_body(body)
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, code, param)


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_a_400(body: bytes) -> None:
    with contextlib.suppress(GatewayError):
        parse_body(body)


def test_escaped_and_repeated_keys_are_read_as_the_server_reads_them() -> None:
    assert parse_body(b'{"\\u006d\\u006fdel":"a"}').model == "a"
    assert parse_body(b'{"model":"a","model":"b"}').model == "b"


def test_token_ids_are_counted_and_text_is_estimated_low() -> None:
    assert estimate_min_tokens(raw([5, 6, 7])) == 3
    assert estimate_min_tokens(raw("x" * 400)) == pytest.approx(100, abs=1)
    assert estimate_min_tokens(msgspec.Raw()) == 0


def test_images_count_as_the_fewest_tokens_they_cost_not_by_their_base64() -> None:
    image = {"image_url": {"url": "data:image/png;base64," + 40_000 * "A"}}
    assert estimate_min_tokens(raw([image, image])) == pytest.approx(2 * 256, abs=50)
    small = {"image_url": {"url": data_url(png(56, 56))}}
    assert estimate_min_tokens(raw([small])) < 50


def test_escapes_do_not_lengthen_a_prompt() -> None:
    assert estimate_min_tokens(raw(100 * "\u4e2d")) <= 100


def test_a_prompt_is_measured_in_text_ids_and_media() -> None:
    assert measure_prompt() == measure_prompt(msgspec.Raw()) == PromptSize(0, 0, 0)
    assert measure_prompt(raw([5, 6, 7])) == PromptSize(0, 3, 0)
    assert measure_prompt(raw("x" * 400)) == PromptSize(402, 0, 0)
    image = {"image_url": {"url": data_url(png(560, 280) + bytes(9000))}}
    text, ids, media = measure_prompt(raw([{"role": "user", "content": [image]}]))
    assert (ids, media) == (0, 200)
    assert text < 100


def test_all_parts_of_a_prompt_are_measured_together() -> None:
    messages, tools = raw([{"role": "user", "content": "hi"}]), raw([{"type": "function"}])
    assert measure_prompt(messages, tools, msgspec.Raw()).text_bytes == len(messages) + len(tools)


def test_text_is_measured_as_the_model_sees_it() -> None:
    """Three bytes for an escaped Chinese character, one for a line's end or a quote."""
    assert measure_prompt(raw(100 * "\u4e2d")).text_bytes == 302
    assert measure_prompt(raw(100 * '\n"')).text_bytes == 202


@each_case(
    ("body", "deep"),
    [
        (b'{"a":1}', False),
        (b'{"a":' + 9 * b"[" + 9 * b"]" + b"}", False),
        (b'{"a":' + 10 * b"[" + 10 * b"]" + b"}", True),
        (b'{"a":[' + b",".join(20 * [b"[]"]) + b"]}", False),
        (b'{"a":"' + 50 * b"[" + b'"}', False),
        (b'{"a":"\\"' + 50 * b"[" + b'\\\\","b":[]}', False),
    ],
)
def test_only_nesting_counts_as_depth(body: bytes, deep: bool) -> None:
    assert (nesting_depth(body, 10) > 10) is deep


@given(
    st.recursive(
        st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
    ),
    st.integers(0, 6),
)
def test_depth_is_that_of_the_parsed_value(value: Any, limit: int) -> None:
    def deepest(item: Any) -> int:
        if isinstance(item, dict):
            item = list(item.values())
        return 1 + max(map(deepest, item), default=0) if isinstance(item, list) else 0

    assert (nesting_depth(json.dumps(value).encode(), limit) > limit) is (deepest(value) > limit)


def test_a_long_text_or_many_brackets_cost_no_time() -> None:
    body = b'{"a":[' + 200 * b"[]," + b'"' + 8_000_000 * b"A" + b'"]}'
    began = time.process_time()
    assert nesting_depth(body, 128) == 3
    assert nesting_depth(b"[" + 2_000_000 * b"{}," + b"1]", 128) == 2
    # 0.1 s; hours if the time grew with the square of the length.
    assert time.process_time() - began < 10
