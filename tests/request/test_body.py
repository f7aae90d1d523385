"""A body's reading: small ones parsed, large ones outlined and edited in place, in short steps."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Generator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.json_values import run_at_once
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.lease import KeyedHash
from gateway.request import edits
from gateway.request.body import (
    IDENTIFYING_BYTES,
    LARGE_BODY_BYTES,
    MISSING,
    PARSED_FIELD_BYTES,
    Body,
    LargeBody,
    TimeSlicer,
    identifying_pieces,
    measure_prompt,
    nesting_depth,
    parse_body,
    read_large_body,
)
from gateway.request.media import find_links
from gateway.request.preparation import can_assemble, split_prompts
from gateway.request.prompt_key import VolatileLines, build_prompt_key, prompt_key_steps
from gateway.request.routes import ROUTES
from tests.each_case import each_case
from tests.forward.pictures import data_url, png
from tests.request.test_media import LINKS, NO_LINKS, REMOTE, bodies_with, bodies_with_elsewhere


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


@each_case(
    ("body", "code", "param"),
    [
        *((body, "invalid_json", None) for body in (
            b"", b"{", b'{"a":1}}', b"{'a':1}", b'{"a":NaN}', b'{"model":"\xff"}',
            b'{"x":"\xed\xa0\x80"}')),
        *((body, "invalid_request", None) for body in (b"[]", b'"text"', b"null")),
        (b'{"model":7}', "invalid_request", "model"),
        (b'{"stream":"yes"}', "invalid_request", "stream"),
        (b'{"n":"2"}', "invalid_request", "n"),
        (b'{"max_tokens":[1]}', "invalid_request", "max_tokens"),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_by_its_code(body: bytes, code: str, param: str | None) -> None:
    with pytest.raises(GatewayError) as raised:
        parse_body(body)
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, code, param)


def test_escaped_and_repeated_keys_are_read_as_the_server_reads_them() -> None:
    assert parse_body(b'{"\\u006d\\u006fdel":"a"}').model == "a"
    assert parse_body(b'{"model":"a","model":"b"}').model == "b"


OPAQUE = {"image_url": {"url": "data:image/png;base64," + 40_000 * "A"}}
SMALL = {"image_url": {"url": data_url(png(56, 56))}}
WIDE = {"image_url": {"url": data_url(png(560, 280) + bytes(9000))}}


@each_case(
    ("prompt", "text", "ids", "media", "least"),
    [
        (raw([5, 6, 7]), 0, 3, 0, 3), (raw("x" * 400), 402, 0, 0, 100), (msgspec.Raw(), 0, 0, 0, 0),
        # As the model sees it: three bytes for an escaped Chinese character, one for a quote.
        (raw(100 * "\u4e2d"), 302, 0, 0, 25), (raw(100 * '\n"'), 202, 0, 0, 100),
        # Images count as tokens, not by their base64; at least as the fewest that they cost.
        (raw([{"role": "user", "content": [WIDE]}]), 61, 0, 200, 215),
        (raw([OPAQUE, OPAQUE]), 80, 0, None, 530), (raw([SMALL]), 39, 0, 8, 17),
    ],
)  # fmt: skip
def test_a_prompt_is_measured_in_text_ids_and_media(
    prompt: msgspec.Raw, text: int, ids: int, media: int | None, least: int
) -> None:
    size = measure_prompt(prompt)
    assert size.text_bytes == pytest.approx(text, abs=30 if media is None or media else 0)
    assert size.exact_tokens == ids
    assert media is None or size.media_tokens == media
    assert size.min_tokens == pytest.approx(least, abs=25 if size.media_tokens else 1)
    more = raw([{"type": "function"}])
    whole = measure_prompt(prompt, more, msgspec.Raw())
    assert whole == size._replace(text_bytes=size.text_bytes + len(more))


@given(
    st.recursive(
        st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
    ),
    st.integers(0, 6),
)
def test_depth_is_that_of_the_parsed_value(value: Any, limit: int) -> None:
    assert nesting_depth(b'{"a":"\\"' + 50 * b"[" + b'\\\\","b":[]}', limit) <= 2

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


LIMITS = LimitSettings()
HASH = KeyedHash()
IMAGE = {"type": "image_url", "image_url": {"url": data_url(png(560, 280) + bytes(9000))}}
LONG = 'Hello «world», \\ "quoted" 😀\n' * 700


def large(body: dict[str, Any] | bytes) -> tuple[bytes, LargeBody]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return data, run_at_once(read_large_body(data, LIMITS))


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "m", "stream": True, "n": 2, "messages": [
        {"role": "system", "content": "short"},
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "text", "text": LONG}, IMAGE]},
    ], "tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG},
                                           {"role": "assistant", "content": LONG}]}),
    ("/v1/messages", {"system": [{"type": "text", "text": LONG}], "max_tokens": 5, "messages": [
        {"role": "user", "content": LONG}]}),
    ("/v1/responses", {"instructions": LONG, "input": LONG}),
    ("/v1/completions", {"prompt": LONG, "echo": True}),
    ("/v1/completions", {"prompt": [LONG]}),
    ("/v1/completions", {"prompt": [LONG, "b", "c"]}),
    ("/v1/completions", {"prompt": list(range(20_000))}),
    ("/v1/completions", {"prompt": [[1, 2], [3, 4]] * 2000}),
    ("/v1/completions", {"prompt": ["a", 7] * 9000}),
    ("/infill", {"input_prefix": LONG, "input_suffix": LONG, "input_extra": [{"text": LONG}]}),
]  # fmt: skip


@each_case(("path", "body"), BODIES)
def test_a_large_body_is_read_as_a_small_one_is(path: str, body: dict[str, Any]) -> None:
    data, found = large(body)
    small, parsed = parse_body(data), found.parse()
    for name in small.__struct_fields__:
        a, b = getattr(small, name), getattr(parsed, name)
        assert bytes(a) == bytes(b) if isinstance(a, msgspec.Raw) else a == b, name
    route = ROUTES[path]
    prompt = route.prompt_field if route.prompt_field in {"messages", "prompt", "input"} else None
    assert found.count_prompts() == max(1, len(split_prompts(small.prompt)))
    assert can_assemble(route, found, small.messages, 1) == can_assemble(
        route, data, small.messages, 1
    )
    assert found.outline.depth == nesting_depth(data, 1) or found.outline.depth <= 8
    raw = getattr(small, prompt) if prompt else MISSING
    small_size = measure_prompt(raw, small.tools, small.system, small.instructions)
    size = found.measure_prompt(prompt)
    assert size.exact_tokens == small_size.exact_tokens
    assert size.media_tokens == small_size.media_tokens
    assert size.text_bytes == pytest.approx(small_size.text_bytes, rel=0.2, abs=20)
    if prompt:
        assert size.min_tokens <= small_size.min_tokens
    small_key = build_prompt_key(data, route, "m", VolatileLines(), HASH)
    key = run_at_once(prompt_key_steps(found, route, "m", VolatileLines(), HASH))
    assert (key is None) == (small_key is None)
    if key is not None and small_key is not None:
        assert key.blocks == small_key.blocks
        assert key.size == pytest.approx(small_key.size, rel=0.3)


def identity(body: Body) -> bytes:
    return HASH.digest([b"%d " % len(body), *identifying_pieces(body)])


def test_bodies_are_told_apart_by_their_bytes_however_they_are_cut() -> None:
    data, one = large({"messages": [{"role": "user", "content": LONG}]})
    _, same = large({"messages": [{"role": "user", "content": LONG}]})
    _, other = large({"messages": [{"role": "user", "content": LONG + "!"}]})
    assert identity(one) == identity(same) == identity(data) != identity(other)
    for text in (LONG, LONG * 20):
        body = json.dumps({"messages": [text], "seed": 1}, separators=(",", ":")).encode()
        _, found = large({"messages": [text], "seed": 2})
        edited = edits.apply_edit(found, {"seed": 1})
        assert isinstance(edited, LargeBody)
        assert len(edited.pieces()) > 1
        again = json.dumps(json.loads(edited.to_bytes()), separators=(",", ":")).encode()
        assert again == body
        assert identity(edited) == identity(edited.to_bytes()) != identity(found)


def test_a_very_large_body_is_told_apart_by_its_ends() -> None:
    body = bytearray(b"x" * (20 * IDENTIFYING_BYTES))
    pieces = identifying_pieces(bytes(body))
    assert sum(map(len, pieces)) == 2 * IDENTIFYING_BYTES
    for at in (0, -1, IDENTIFYING_BYTES - 1, -IDENTIFYING_BYTES):
        changed = body.copy()
        changed[at] = 0
        assert identity(bytes(changed)) != identity(bytes(body)), at


def test_only_small_fields_are_parsed_however_many_there_are() -> None:
    more = {f"x{number}": "y" * 15_000 for number in range(900)}
    _, found = large({"model": "m", "return_tokens": True, "priority": "x" * 9000, **more})
    assert found.parse().model == "m"
    assert json.loads(found.without_large_fields()) == {"model": "m", "return_tokens": True}


@each_case("name", ["stream", "n", "priority", "service_tier", "max_tokens"])
def test_a_long_value_of_a_short_field_is_refused(name: str) -> None:
    _, found = large({name: "x" * (PARSED_FIELD_BYTES + 1), "prompt": "x" * LARGE_BODY_BYTES})
    with pytest.raises(GatewayError) as raised:
        found.parse()
    assert (raised.value.code, raised.value.param) == ("invalid_request", name)


def test_a_model_name_of_any_length_is_cut() -> None:
    for letter in ("x", "\\", "😀", "é"):
        _, found = large({"model": letter * LARGE_BODY_BYTES})
        model = found.parse().model
        assert model
        assert len(model) < PARSED_FIELD_BYTES
        assert set(model) == {letter}


@each_case(
    "more",
    [
        *(body for part in LINKS for body in bodies_with(part)),
        *(body for part in NO_LINKS for body in bodies_with_elsewhere(part)),
        {"tools": [{"type": "mcp", "server_url": REMOTE}]},
        {"mcp_servers": [{"type": "url", "url": REMOTE}]},
        {"prompt": {"prompt_string": "x", "multimodal_data": [REMOTE]}},
        {"messages": [{"content": [{"image_url": {"url": "HTTPS" + "x" * 99_000}}]}]},
        {"messages": [{"content": [IMAGE, IMAGE]}]},
        {"messages": [{"content": [{"source": {"content": [{"image_url": REMOTE}]}}]}]},
        {"messages": [{"content": [{"image_url": {"content": [{"image_url": REMOTE}]}}]}]},
        {"input": [{"output": [{"image_url": REMOTE}]}, {"output": {"image_url": REMOTE}}]},
        {"tools": [[{"server_url": REMOTE}], {"a": {"server_url": REMOTE}}]},
        {"image_url": REMOTE, "source": {"url": REMOTE}, "multimodal_data": [REMOTE]},
    ],
)  # fmt: skip
def test_the_same_links_are_found_as_in_a_small_body(more: dict[str, Any]) -> None:
    for body in (more, {"pad": "x" * 30_000, **more}):
        data, found = large(body)
        links, has_images = find_links(data)
        assert sorted((key, url[:999]) for url, key in found.find_links()) == sorted(
            (key, url[:999]) for url, key in links if not url.startswith("data:")
        )
        assert found.outline.has_images == has_images


def test_a_name_spelt_with_escapes_hides_no_link() -> None:
    url = "\\u0068ttp\\u003a//x"
    data = b'{"pad":"%b","messages":[{"\\u0069mage_url":{"u\\u0072l":"%b"}}]}' % (
        b"x" * LARGE_BODY_BYTES, url.encode()
    )  # fmt: skip
    assert large(data)[1].find_links() == [("http://x", "image_url")]


async def test_all_work_together_takes_one_step_in_each_turn_of_the_loop() -> None:
    turn, turns = 0, list[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def work() -> Generator[None, None, str]:
        for _ in range(5):
            turns.append(turn)
            yield
        return "done"

    slicer, counting = TimeSlicer(), asyncio.create_task(count_turns())
    assert await asyncio.gather(*(slicer.run(work()) for _ in range(3))) == ["done"] * 3
    counting.cancel()
    assert len(turns) == len(set(turns)) == 15, "two steps in one turn"


def seven() -> Generator[None, None, int]:
    yield
    return 7


async def test_an_error_ends_the_work_and_lets_the_next_run() -> None:
    slicer = TimeSlicer()

    def fails() -> Generator[None, None, None]:
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await slicer.run(fails())
    assert await slicer.run(seven()) == 7


async def test_cancelled_work_is_closed_and_blocks_nobody() -> None:
    slicer, done = TimeSlicer(), list[str]()

    def work() -> Generator[None, None, None]:
        try:
            while True:
                done.append("step")
                yield
        finally:
            done.append("closed")

    running = asyncio.create_task(slicer.run(work()))
    for _ in range(10):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert set(done[:-1]) == {"step"}
    assert done[-1] == "closed"
    assert await slicer.run(seven()) == 7
