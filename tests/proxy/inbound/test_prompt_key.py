"""Prompts with equal beginnings have keys with equal beginnings, however they are written."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.listeners import LimitSettings
from gateway.lease import HASH_KEY_BYTES, KeyedHash, PromptKey
from gateway.proxy.inbound.body import read_large_body, run_at_once
from gateway.proxy.inbound.prompt_key import (
    BLOCK_BYTES,
    BUILT_IN_PATTERNS,
    IMAGE_BYTES,
    MOST_BLOCKS,
    SHORTEST_BODY,
    VolatileLines,
    build_large_prompt_key,
    build_prompt_key,
)
from gateway.proxy.inbound.routes import ROUTES
from tests.each_case import each_case

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LONG = "so it is long enough to be worth a thought; " * 20
NONE = VolatileLines()
HASH = KeyedHash(bytes(HASH_KEY_BYTES))


def key_of(
    body: dict[str, Any], path: str = CHAT, model: str = "m", volatile: VolatileLines = NONE
) -> PromptKey:
    key = maybe_key(json.dumps(body).encode(), path, model, volatile)
    assert key is not None
    return key


def maybe_key(
    body: bytes, path: str = CHAT, model: str = "m", volatile: VolatileLines = NONE
) -> PromptKey | None:
    return build_prompt_key(body, ROUTES[path], model, volatile, HASH)


def chat(*turns: Any, **more: Any) -> dict[str, Any]:
    roles = ["system", *["user", "assistant"] * len(turns)]
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return {"messages": messages, **more}


def shared(one: PromptKey, other: PromptKey) -> int:
    """Bytes at the beginning that both keys agree on."""
    size = 0
    for a, b, end in zip(one.blocks, other.blocks, one.ends, strict=False):
        if a != b:
            break
        size = end
    return size


TEXTS = st.text(max_size=1500)


@given(st.lists(TEXTS, min_size=1, max_size=6), TEXTS, TEXTS)
def test_the_next_turn_begins_with_all_blocks_of_the_turn_before(
    turns: list[str], answer: str, question: str
) -> None:
    before = key_of(chat(LONG, *turns))
    after = key_of(chat(LONG, *turns, answer, question, stream=True, temperature=0.3))
    assert after.blocks[: len(before.blocks)] == before.blocks
    assert after.ends[: len(before.ends)] == before.ends
    assert before.ends_on_block


@given(TEXTS, TEXTS, st.text(max_size=600))
def test_different_prompts_never_match_beyond_the_difference(
    one: str, other: str, common: str
) -> None:
    first, second = key_of(chat(common + one, LONG)), key_of(chat(common + other, LONG))
    if one == other:
        assert first.blocks == second.blocks
        return
    at = len(("system\0" + common).encode())
    for a, b in zip(one.encode(), other.encode(), strict=False):
        if a != b:
            break
        at += 1
    assert shared(first, second) <= at


@given(TEXTS)
def test_escapes_and_white_space_make_no_difference(text: str) -> None:
    body = chat(LONG, text)
    plain = maybe_key(json.dumps(body).encode())
    for other in (
        json.dumps(body, ensure_ascii=False).encode(),
        json.dumps(body, indent=3).encode(),
        json.dumps(body, separators=(",", ":")).replace("/", "\\/").encode(),
        json.dumps(body, sort_keys=True).encode(),
    ):
        found = maybe_key(other)
        assert plain is not None
        assert found is not None
        assert found.blocks == plain.blocks


def test_text_counts_the_same_as_a_string_and_as_a_part() -> None:
    part = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    for path in (CHAT, MESSAGES):
        one = key_of(chat("be brief", LONG), path)
        assert key_of(chat("be brief", part), path).blocks == one.blocks


def test_fields_that_no_template_uses_make_no_difference() -> None:
    body = chat(LONG, "a")
    marked = chat(LONG, "a")
    for message in marked["messages"]:
        message |= {"id": "1", "cache_control": {"type": "ephemeral"}, "timestamp": 3}
    assert key_of(body).blocks == key_of(marked).blocks


def test_models_share_nothing() -> None:
    body = chat(LONG, "a")
    assert shared(key_of(body, model="a"), key_of(body, model="b")) == 0


def test_tools_come_before_everything_else() -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": LONG}}]
    one = key_of(chat(LONG, "a", tools=tools))
    other = key_of(chat("another", LONG, tools=tools))
    assert shared(one, other) == len(json.dumps(tools))
    assert shared(one, key_of(chat(LONG, "a"))) == 0


def test_roles_and_tool_calls_count() -> None:
    question = {"role": "user", "content": LONG}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    seen = {
        key_of({"messages": [question, last]}).blocks
        for last in (
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "x"},
            {"role": "assistant", "content": "x", "tool_calls": [call]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "x", "name": "look"},
        )
    }
    assert len(seen) == 5


def test_tool_use_in_messages_counts() -> None:
    question = {"role": "user", "content": LONG}
    seen = {
        key_of({"messages": [question, {"role": "user", "content": [part]}]}, MESSAGES).blocks
        for part in (
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "1", "name": "a", "input": {"x": 1}},
            {"type": "tool_use", "id": "1", "name": "a", "input": {"x": 2}},
            {"type": "tool_result", "tool_use_id": "1", "content": "a"},
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text"}]},
        )
    }
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}),
        (MESSAGES, {"type": "image", "source": {"type": "base64", "data": "@"}}),
        (RESPONSES, {"type": "input_image", "image_url": "data:image/png;base64,@"}),
    ],
)
def test_an_image_counts_as_its_tokens_and_differs_from_others(
    path: str, part: dict[str, Any]
) -> None:
    def with_image(data: bytes) -> PromptKey:
        raw = json.dumps(part).replace("@", base64.b64encode(data).decode())
        content = [{"type": "text", "text": LONG}, json.loads(raw)]
        field = "input" if path == RESPONSES else "messages"
        return key_of({field: [{"role": "user", "content": content}]}, path)

    one, other = with_image(b"a" * 300_000), with_image(b"a" * 299_999 + b"b")
    assert IMAGE_BYTES <= one.size <= IMAGE_BYTES + len(LONG) + 100
    assert one.blocks != other.blocks
    assert shared(one, other) >= len(LONG)


def test_an_image_from_a_tool_counts_as_its_tokens() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "A" * 100_000}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image]}
    prompt = key_of({"messages": [{"role": "user", "content": [result]}]}, MESSAGES)
    assert prompt.size < IMAGE_BYTES + 100


def test_instructions_and_input_are_a_system_prompt_and_messages() -> None:
    one = key_of({"instructions": LONG, "input": "hello"}, RESPONSES)
    other = key_of(
        {"instructions": LONG, "input": [{"role": "user", "content": "hello"}]}, RESPONSES
    )
    assert one.blocks == other.blocks
    assert one.blocks == key_of(chat(LONG, "hello")).blocks


def test_a_system_field_is_a_system_message() -> None:
    turns = [{"role": "user", "content": "hello"}]
    for system in (LONG, [{"type": "text", "text": LONG}]):
        one = key_of({"system": system, "messages": turns}, MESSAGES)
        assert one.blocks == key_of(chat(LONG, "hello")).blocks


def test_a_function_s_output_counts() -> None:
    call = {"type": "function_call", "name": "look", "arguments": LONG}
    seen = {
        key_of({"input": [call, {"type": "function_call_output", "output": out}]}, RESPONSES).blocks
        for out in ("a", "b")
    }
    assert len(seen) == 2


class TestPlainPrompts:
    @given(st.text(min_size=SHORTEST_BODY, max_size=4000), st.text(max_size=2000))
    def test_a_text_that_grows_keeps_its_full_blocks(self, text: str, more: str) -> None:
        before, after = plain_key(text), plain_key(text + more)
        if before is None:
            assert len(text.encode()) < BLOCK_BYTES
            return
        assert after is not None
        assert after.blocks[: len(before.blocks)] == before.blocks
        assert before.size == len(text.encode())
        assert before.size - before.ends[-1] < BLOCK_BYTES

    def test_ids_are_counted(self) -> None:
        ids = list(range(100, 1100))
        before, after = plain_key(ids), plain_key([*ids, *ids])
        assert before is not None
        assert after is not None
        assert (before.tokens, after.tokens) == (1000, 2000)
        assert after.blocks[: len(before.blocks)] == before.blocks
        assert before.share_of(len(before.blocks)) > 0.85

    def test_one_text_in_a_list_is_that_text(self) -> None:
        one, other = plain_key(LONG), plain_key([LONG])
        assert one is not None
        assert other is not None
        assert one.blocks == other.blocks

    @each_case("prompt", [[LONG, LONG], [[1] * 300, [2]], [1, LONG], None, {}, 3])
    def test_several_prompts_have_no_key(self, prompt: Any) -> None:
        assert plain_key(prompt, pad=LONG) is None

    def test_an_infill_keeps_the_text_before_the_cursor(self) -> None:
        def infill(prefix: str) -> PromptKey:
            body = {"input_prefix": prefix, "input_suffix": "end", "input_extra": [{"text": LONG}]}
            return key_of(body, "/infill")

        before, after = infill(LONG), infill(LONG + "more")
        assert after.blocks == before.blocks
        assert after.size == before.size + 4


def plain_key(prompt: Any, pad: str = "") -> PromptKey | None:
    return maybe_key(json.dumps({"prompt": prompt, "user": pad}).encode(), "/completion")


BILLING = "x-anthropic-billing-header: cc_version=2.1.88.{}; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize(
    "system",
    [
        lambda line: [{"type": "text", "text": line}, {"type": "text", "text": LONG}],
        lambda line: f"{line}\n{LONG}",
    ],
)
def test_a_billing_line_is_left_out(system: Any) -> None:
    turns = [{"role": "user", "content": "hello"}]

    def body(line: str) -> dict[str, Any]:
        return {"system": system(line), "messages": turns}

    one, other = (key_of(body(BILLING.format(*x)), MESSAGES) for x in (("a3f", "1"), ("b7", "2")))
    assert one.blocks == other.blocks
    assert one.blocks == key_of({"system": LONG, "messages": turns}, MESSAGES).blocks


def test_configured_lines_are_left_out_of_the_system_prompt_alone() -> None:
    volatile = VolatileLines(["Now: "])

    def blocks(time: str, before: str = "") -> tuple[int, ...]:
        turns = chat(f"Be brief.\nNow: {time}\n{LONG}", f"{before}Now: hello")
        return key_of(turns, volatile=volatile).blocks

    assert blocks("12:00") == blocks("12:01")
    assert blocks("12:00", "Now: 12:01\n") != blocks("12:00", "Now: 12:02\n")


def test_a_key_says_if_it_leaves_out_lines_that_the_node_sees() -> None:
    body = chat(f"{BILLING.format(1, 2)}\n{LONG}", "hello")
    assert key_of(body).omits_volatile
    assert not key_of(body, volatile=VolatileLines(strip=BUILT_IN_PATTERNS)).omits_volatile
    assert not key_of(chat(LONG, "hello")).omits_volatile


@each_case("path", ["/v1/embeddings", "/v1/rerank", "/tokenize", "/v1/messages/count_tokens"])
def test_paths_without_a_prompt_cache_have_no_key(path: str) -> None:
    assert maybe_key(json.dumps(chat(LONG, "a")).encode(), path) is None


def test_a_short_body_has_no_key() -> None:
    assert maybe_key(json.dumps(chat("be brief", "hello")).encode()) is None


@each_case(
    "body",
    [
        b"[]" + b" " * SHORTEST_BODY,
        b"{" + b" " * SHORTEST_BODY,
        b"\xff" * SHORTEST_BODY,
        json.dumps({"messages": 3, "user": LONG}).encode(),
        json.dumps({"messages": [3], "user": LONG}).encode(),
        json.dumps({"messages": [], "user": LONG}).encode(),
        json.dumps({"messages": [{"role": 3}], "user": LONG}).encode(),
        b'{"messages":' + b"[" * 100_000,
        b'{"messages":[{"role":"user","content":"\\ud800' + b"a" * 600 + b'"}]}',
    ],
)
def test_an_unknown_form_has_no_key_and_is_no_error(body: bytes) -> None:
    found = maybe_key(body)
    assert found is None or found.blocks


@given(st.binary(min_size=SHORTEST_BODY, max_size=600))
def test_bytes_of_any_kind_are_no_error(data: bytes) -> None:
    for path in (CHAT, MESSAGES, RESPONSES, "/completion", "/infill"):
        assert maybe_key(data, path) is None


@pytest.mark.parametrize("messages", [[{}] * 200, [{"content": []}] * 40, [{"role": ""}] * 200])
def test_messages_without_text_have_no_key(messages: list[Any]) -> None:
    # A prompt cache would divide by its size.
    assert maybe_key(json.dumps({"messages": messages}).encode()) is None


def test_a_huge_prompt_has_bounded_blocks() -> None:
    prompt = key_of(chat(LONG, *["a" * 500_000] * 12))
    assert len(prompt.blocks) == MOST_BLOCKS
    assert prompt.size >= 6_000_000


def scoped(body: dict[str, Any], scope: str, path: str = CHAT) -> PromptKey:
    key = build_prompt_key(json.dumps(body).encode(), ROUTES[path], "m", NONE, HASH, scope)
    assert key is not None
    return key


def test_equal_prompts_of_two_scopes_have_no_block_in_common() -> None:
    body = chat(LONG, "hello", "hi", "more")
    keys = [scoped(body, scope) for scope in ("", "group a", "group b", "caller a")]
    blocks = [block for key in keys for block in key.blocks]
    assert len(set(blocks)) == len(blocks)
    assert scoped(body, "group a").blocks == keys[1].blocks
    assert {key.ends for key in keys} == {keys[0].ends}


def test_no_prompt_of_another_scope_can_be_written_like_one_of_this() -> None:
    """Roles are the client's own words, and stand first."""
    victim = scoped({"messages": [{"role": "user", "content": LONG}]}, "group a")
    mark = "\0scope 1 mgroup a"
    for role in (f"{mark}user", mark, f"1 m{mark}user", "group auser"):
        for more in ([], [{"role": "user", "content": LONG}]):
            forged = {"messages": [{"role": role, "content": "" if more else LONG}, *more]}
            for scope in ("", "group", "group b"):
                assert not set(scoped(forged, scope).blocks) & set(victim.blocks)


def test_a_scope_is_kept_by_large_bodies() -> None:
    body = chat(LONG, "x" * 200_000)
    data = json.dumps(body).encode()
    large = run_at_once(read_large_body(data, LimitSettings()))
    for scope in ("", "group a"):
        key = run_at_once(build_large_prompt_key(large, ROUTES[CHAT], "m", NONE, HASH, scope))
        assert key is not None
        assert key.blocks == scoped(body, scope).blocks
