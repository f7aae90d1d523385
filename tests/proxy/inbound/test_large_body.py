"""What is known of a large body is what would be known of it if it were parsed."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import msgspec
import pytest

from gateway.config.listeners import LimitSettings
from gateway.config.routing import ModelRule
from gateway.errors import GatewayError
from gateway.proxy.inbound import edits
from gateway.proxy.inbound import parsed_body as peeking
from gateway.proxy.inbound.large_body import (
    LARGE_BODY_BYTES,
    PARSED_FIELD_BYTES,
    LargeBody,
    read_large_body,
)
from gateway.proxy.inbound.prompt_key import (
    BLOCK_BYTES,
    MOST_BLOCKS,
    VolatileLines,
    build_large_prompt_key,
    build_prompt_key,
)
from gateway.proxy.inbound.prompt_list import split_prompts
from gateway.proxy.inbound.routes import ROUTES, can_assemble
from tests.proxy.pictures import data_url, png

LIMITS = LimitSettings()
PICTURE = {"type": "image_url", "image_url": {"url": data_url(png(560, 280) + bytes(9000))}}
LONG = 'Hello «world», \\ "quoted" 😀\n' * 700


def ran(work: Generator[None, None, Any]) -> Any:
    return counted(work)[1]


def counted(work: Generator[None, None, Any]) -> tuple[int, Any]:
    """How many steps it took, and what it came to."""
    steps = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return steps, end.value
        steps += 1


def large(body: dict[str, Any] | bytes) -> tuple[bytes, LargeBody]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return data, ran(read_large_body(data, LIMITS))


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "m", "stream": True, "n": 2, "messages": [
        {"role": "system", "content": "short"},
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "text", "text": LONG}, PICTURE]},
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


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_large_body_is_understood_as_a_small_one_is(path: str, body: dict[str, Any]) -> None:
    data, found = large(body)
    peeked, seen = peeking.parse_body(data), found.parse()
    for name in peeked.__struct_fields__:
        a, b = getattr(peeked, name), getattr(seen, name)
        assert bytes(a) == bytes(b) if isinstance(a, msgspec.Raw) else a == b, name
    route = ROUTES[path]
    prompt = route.prompt_field if route.prompt_field in {"messages", "prompt", "input"} else None
    assert found.count_prompts() == max(1, len(split_prompts(peeked.prompt)))
    assert can_assemble(route, found, peeked.messages, 1) == can_assemble(
        route, data, peeked.messages, 1
    )
    assert found.depth == peeking.nesting_depth(data, 1) or found.depth <= 8
    raw = getattr(peeked, prompt) if prompt else peeking.MISSING
    plain = peeking.measure_prompt(raw, peeked.tools, peeked.system, peeked.instructions)
    size = found.measure_prompt(prompt)
    assert size.exact_tokens == plain.exact_tokens
    assert size.media_tokens == plain.media_tokens
    assert size.text_bytes == pytest.approx(plain.text_bytes, rel=0.2, abs=20)
    if prompt:
        assert found.estimate_min_tokens(prompt, 4) <= peeking.estimate_min_tokens(raw, 4)
    volatile = VolatileLines()
    prompt_of = build_prompt_key(data, route, "m", volatile)
    same = ran(build_large_prompt_key(found, route, "m", volatile))
    assert (same is None) == (prompt_of is None)
    if prompt_of is not None:
        assert same.blocks == prompt_of.blocks
        assert same.size == pytest.approx(prompt_of.size, rel=0.3)


def test_a_fingerprint_ends_with_the_blocks_that_count() -> None:
    for content in ("x" * 6_000_000, [{"type": "text", "text": "x" * 1000}] * 6000):
        data, found = large({"messages": [{"role": "user", "content": content}] * 2})
        route = ROUTES["/v1/chat/completions"]
        walk = build_large_prompt_key(found, route, "m", VolatileLines())
        steps, prompt = counted(walk)
        whole = build_prompt_key(data, route, "m", VolatileLines())
        assert whole is not None
        assert len(prompt.blocks) <= MOST_BLOCKS
        common = min(len(prompt.blocks), 2_000_000 // BLOCK_BYTES)
        assert prompt.blocks[:common] == whole.blocks[:common]
        assert prompt.size == pytest.approx(len(data), rel=0.05)
        assert steps < 100


def test_edits_of_a_large_body_are_those_of_a_small_one() -> None:
    body = {"model": "old", "messages": [{"role": "user", "content": LONG * 4}], "priority": "high",
            "temperature": 1, "stop": ["x"]}  # fmt: skip
    data, found = large(body)
    rules = (ModelRule(set={"temperature": 0.2}, default={"max_tokens": 7}, strip=("stop",)),)
    edit = {"priority": msgspec.UNSET, "n_probs": 3}
    for one in (data, found):
        assert edits.apply_rules(one, ()) is one
    plain = edits.with_model(edits.apply_edit(edits.apply_rules(data, rules), edit), "new")
    edited = edits.with_model(edits.apply_edit(edits.apply_rules(found, rules), edit), "new")
    assert isinstance(edited, LargeBody)
    sent = b"".join(edited.pieces())
    assert json.loads(sent) == json.loads(plain)
    assert len(edited) == len(sent) == len(edited.to_bytes())
    assert edited.parse().model == "new"
    assert b"".join(found.pieces()) == data, "the client's own bytes, where there is no edit"
    kept = sum(len(piece) for piece in edited.pieces() if isinstance(piece, bytes))
    assert kept < 200, "long values are views of the body"


def test_a_request_is_known_by_its_body() -> None:
    _, one = large({"messages": [{"role": "user", "content": LONG}]})
    _, same = large({"messages": [{"role": "user", "content": LONG}]})
    _, other = large({"messages": [{"role": "user", "content": LONG + "!"}]})
    assert hash(one) == hash(same) != hash(other)


def test_small_fields_can_be_asked_for_alone() -> None:
    _, found = large({"return_tokens": True, "prompt": "x" * LARGE_BODY_BYTES})
    assert json.loads(found.without_large_fields()) == {"return_tokens": True}
    assert len(json.loads(found.bytes_to_parse())) == 2


def test_little_is_parsed_however_many_fields_there_are() -> None:
    more = {f"x{number}": "y" * 15_000 for number in range(900)}
    _, found = large({"model": "m", "return_tokens": True, "priority": "x" * 9000, **more})
    assert found.parse().model == "m"
    assert json.loads(found.without_large_fields()) == {"model": "m", "return_tokens": True}


@pytest.mark.parametrize("name", ["stream", "n", "priority", "service_tier", "max_tokens"])
def test_a_field_that_can_be_no_longer_is_refused(name: str) -> None:
    _, found = large({name: "x" * (PARSED_FIELD_BYTES + 1), "prompt": "x" * LARGE_BODY_BYTES})
    with pytest.raises(GatewayError) as raised:
        found.parse()
    assert (raised.value.code, raised.value.param) == ("invalid_request", name)


def test_a_model_of_any_length_is_none_that_is_known() -> None:
    for said in ("x", "\\", "😀", "é"):
        _, found = large({"model": said * LARGE_BODY_BYTES})
        model = found.parse().model
        assert model
        assert len(model) < PARSED_FIELD_BYTES
        assert set(model) == {said}


REMOTE = "http://169.254.169.254/x"


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"content": [{"type": "image_url", "image_url": {"url": REMOTE}}]}]},
        {"messages": [{"content": [{"type": "input_image", "image_url": REMOTE}]}]},
        {"messages": [{"content": [{"source": {"type": "url", "url": REMOTE}}]}]},
        {"messages": [{"content": [{"input_audio": {"data": "a:b"}}]}]},
        {"tools": [{"type": "mcp", "server_url": REMOTE}]},
        {"tools": [{"type": "mcp", "server_url": "internal/x"}]},
        {"mcp_servers": [{"type": "url", "url": REMOTE}]},
        {"prompt": {"prompt_string": "x", "multimodal_data": [REMOTE]}},
        {"messages": [{"content": [{"image_url": {"url": "HTTPS" + "x" * 99_000}}]}]},
        {"messages": [{"content": [{"image_url": {"url": "no address"}}]}]},
        {"messages": [{"content": [PICTURE, PICTURE]}]},
        {"messages": [{"tool_calls": [{"function": {"arguments": {"server_url": REMOTE}}}]}]},
    ],
)  # fmt: skip
def test_the_same_addresses_are_found_in_both(more: dict[str, Any]) -> None:
    for body in (more, {"pad": "x" * 30_000, **more}):
        data, found = large(body)
        links, pictures = peeking.find_links(data)
        remote = [link for link in links if not link.startswith("data:")]
        assert [link[:999] for link in found.find_links()] == [link[:999] for link in remote]
        assert found.has_images == pictures


def test_a_name_that_is_spelt_by_escapes_is_no_hiding_place() -> None:
    url = "\\u0068ttp\\u003a//x"
    data = b'{"pad":"%b","messages":[{"\\u0069mage_url":{"u\\u0072l":"%b"}}]}' % (
        b"x" * LARGE_BODY_BYTES, url.encode()
    )  # fmt: skip
    assert large(data)[1].find_links() == ["http://x"]
