"""Prompt keys: equal beginnings have equal keys, and volatile lines none."""

from __future__ import annotations

import base64
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.api.json_values import run_at_once
from gateway.config.listeners import LimitSettings
from gateway.lease import HASH_KEY_BYTES, KeyedHash, PromptKey
from gateway.request.body import read_large_body
from gateway.request.edits import apply_edit
from gateway.request.prompt_key import (
    BUILT_IN_PATTERNS,
    IMAGE_BYTES,
    MOST_BLOCKS,
    SEARCHED_CHARACTERS,
    LinePatterns,
    VolatileLines,
    build_prompt_key,
    prompt_key_steps,
)
from gateway.request.routes import ROUTES
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
def test_the_next_turn_begins_with_all_blocks(turns: list[str], answer: str, question: str) -> None:
    before = key_of(chat(LONG, *turns))
    after = key_of(chat(LONG, *turns, answer, question, stream=True, temperature=0.3))
    assert after.blocks[: len(before.blocks)] == before.blocks
    assert after.ends[: len(before.ends)] == before.ends
    assert before.ends_on_block


@given(TEXTS, TEXTS, st.text(max_size=600))
def test_prompts_match_up_to_their_difference(one: str, other: str, common: str) -> None:
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
    for other in (
        json.dumps(body, ensure_ascii=False).encode(),
        json.dumps(body, indent=3).encode(),
        json.dumps(body, separators=(",", ":")).replace("/", "\\/").encode(),
        json.dumps(body, sort_keys=True).encode(),
    ):
        found = maybe_key(other)
        assert found is not None
        assert found.blocks == key_of(body).blocks


def test_models_share_nothing() -> None:
    body = chat(LONG, "a")
    assert shared(key_of(body, model="a"), key_of(body, model="b")) == 0


def test_tools_come_before_everything_else() -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": LONG}}]
    one = key_of(chat(LONG, "a", tools=tools))
    other = key_of(chat("another", LONG, tools=tools))
    assert shared(one, other) == len(json.dumps(tools))
    assert shared(one, key_of(chat(LONG, "a"))) == 0


ASKED = {"role": "user", "content": LONG}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@each_case(
    ("path", "field", "endings"),
    [
        (CHAT, "messages", [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "x"},
            {"role": "assistant", "content": "x", "tool_calls": [CALL]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "x", "name": "look"},
        ]),
        (MESSAGES, "messages", [{"role": "user", "content": [part]} for part in (
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "1", "name": "a", "input": {"x": 1}},
            {"type": "tool_use", "id": "1", "name": "a", "input": {"x": 2}},
            {"type": "tool_result", "tool_use_id": "1", "content": "a"},
        )]),
        (RESPONSES, "input", [{"type": "function_call_output", "output": "a"},
                              {"type": "function_call_output", "output": "b"}]),
    ],
)  # fmt: skip
def test_roles_and_tools_count(path: str, field: str, endings: list[dict[str, Any]]) -> None:
    seen = {key_of({field: [ASKED, last]}, path).blocks for last in endings}
    assert len(seen) == len(endings)


HELLO = [{"role": "user", "content": "hello"}]
MARKED = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]


@each_case(
    ("path", "body"),
    [
        (CHAT, chat(MARKED, "hello")),
        (MESSAGES, chat(MARKED, "hello")),
        (MESSAGES, {"system": LONG, "messages": HELLO}),
        (MESSAGES, {"system": [{"type": "text", "text": LONG}], "messages": HELLO}),
        (RESPONSES, {"instructions": LONG, "input": "hello"}),
        (RESPONSES, {"instructions": LONG, "input": HELLO}),
    ],
)
def test_a_prompt_has_one_key_in_whatever_form_it_comes(path: str, body: dict[str, Any]) -> None:
    assert key_of(body, path).blocks == key_of(chat(LONG, "hello")).blocks


@each_case(
    ("path", "part"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}),
        (MESSAGES, {"type": "image", "source": {"type": "base64", "data": "@"}}),
        (RESPONSES, {"type": "input_image", "image_url": "data:image/png;base64,@"}),
    ],
)
def test_an_image_counts_as_its_tokens(path: str, part: dict[str, Any]) -> None:
    def with_image(data: bytes) -> PromptKey:
        raw = json.dumps(part).replace("@", base64.b64encode(data).decode())
        content = [{"type": "text", "text": LONG}, json.loads(raw)]
        field = "input" if path == RESPONSES else "messages"
        return key_of({field: [{"role": "user", "content": content}]}, path)

    one, other = with_image(b"a" * 300_000), with_image(b"a" * 299_999 + b"b")
    assert IMAGE_BYTES <= one.size <= IMAGE_BYTES + len(LONG) + 100
    assert one.blocks != other.blocks
    assert shared(one, other) >= len(LONG)


def plain_key(prompt: Any) -> PromptKey:
    return key_of({"prompt": prompt}, "/completion")


def maybe_plain_key(prompt: Any, pad: str = "") -> PromptKey | None:
    return maybe_key(json.dumps({"prompt": prompt, "user": pad}).encode(), "/completion")


def test_ids_are_counted() -> None:
    ids = list(range(100, 1100))
    before, after = plain_key(ids), plain_key([*ids, *ids])
    assert (before.tokens, after.tokens) == (1000, 2000)
    assert after.blocks[: len(before.blocks)] == before.blocks
    assert before.share_of(len(before.blocks)) > 0.85


@each_case("prompt", [[LONG, LONG], [[1] * 300, [2]], [1, LONG], None, {}, 3])
def test_several_prompts_have_no_key_and_one_in_a_list_has_its_own(prompt: Any) -> None:
    assert maybe_plain_key(prompt, pad=LONG) is None
    assert plain_key([LONG]).blocks == plain_key(LONG).blocks


BILLING = "x-anthropic-billing-header: cc_version=2.1.88.{}; cc_entrypoint=cli; cch={};"


def test_a_billing_line_is_left_out() -> None:
    turns = [{"role": "user", "content": "hello"}]
    expected = key_of({"system": LONG, "messages": turns}, MESSAGES).blocks
    for line in (BILLING.format("a3f", "1"), BILLING.format("b7", "2")):
        parts = [{"type": "text", "text": line}, {"type": "text", "text": LONG}]
        for system in (parts, f"{line}\n{LONG}"):
            assert key_of({"system": system, "messages": turns}, MESSAGES).blocks == expected


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


LITTLE: list[dict[str, Any]] = [
    chat("be brief", "hello"),
    # A prompt cache would divide by the size of a text that is empty.
    {"messages": [{}] * 200},
    {"messages": [{"content": []}] * 40},
    {"messages": [{"role": ""}] * 200},
]
CACHELESS = ("/v1/embeddings", "/v1/rerank", "/tokenize", "/v1/messages/count_tokens")


@each_case(
    ("path", "body"),
    [*((CHAT, body) for body in LITTLE), *((path, chat(LONG, "a")) for path in CACHELESS)],
)
def test_what_no_prompt_cache_would_hold_has_no_key(path: str, body: dict[str, Any]) -> None:
    assert maybe_key(json.dumps(body).encode(), path) is None


@each_case(
    "body",
    [
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
        key = run_at_once(prompt_key_steps(large, ROUTES[CHAT], "m", NONE, HASH, scope))
        assert key is not None
        assert key.blocks == scoped(body, scope).blocks


LINE = "x-anthropic-billing-header: cc_version=2.1.88.a3f; cc_entrypoint=cli; cch=fa690;"
STRIP = VolatileLines(strip=BUILT_IN_PATTERNS)


def stripped(body: dict[str, Any], volatile: VolatileLines = STRIP) -> dict[str, Any]:
    raw = json.dumps(body).encode()
    edit = volatile.strip_edit(raw)
    value: dict[str, Any] = json.loads(apply_edit(raw, edit)) if edit else body
    return value


@each_case(
    ("text", "left"),
    [
        (LINE, ""), (f"{LINE}\nYou are", "You are"), (f"{LINE}\r\nYou are", "You are"),
        (f"You are\n{LINE}\nhere", "You are\nhere"), (f"You are\n{LINE}", "You are\n"),
        (f"{LINE}\n{LINE}\nYou", "You"), (f"say '{LINE}'", f"say '{LINE}'"),
        (f" {LINE}", f" {LINE}"), ("You are", "You are"), ("", ""),
        ("a" * SEARCHED_CHARACTERS + "\n" + LINE, "a" * SEARCHED_CHARACTERS + "\n" + LINE),
    ],
)  # fmt: skip
def test_matching_lines_are_removed_whole(text: str, left: str) -> None:
    assert LinePatterns(BUILT_IN_PATTERNS).remove_from(text) == left
    # What follows the literal beginning of a pattern must match too.
    times = LinePatterns([r"Now: \d\d:\d\d$"])
    assert times.remove_from("Now: 12:34\nNow: or never\nb") == "Now: or never\nb"


@each_case(
    "body",
    [
        {"system": "You are", "messages": [{"role": "user", "content": LINE}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": LINE}]},
        {"messages": "x", "system": 3, "input": None, "prompt": [1, 2], "instructions": {}},
        {"messages": [3, None], "system": [1, "x", None, {"text": 3}]},
        {"messages": [{"content": LINE}]},
    ],
)
def test_a_body_without_such_a_line_needs_no_edit(body: dict[str, Any]) -> None:
    assert STRIP.strip_edit(json.dumps(body).encode()) == {}
    for unreadable in (b"", b"[]", b"{", b'{"system":', b"\xff", b"[" * 100_000):
        assert STRIP.strip_edit(unreadable) == {}


@each_case("field", ["messages", "input"])
@each_case("role", ["system", "developer"])
def test_a_part_of_nothing_else_is_removed_whole(field: str, role: str) -> None:
    before, after = f"{LINE}\nYou are", "You are"
    parts = [{"type": "text", "text": LINE}, {"type": "text", "text": before, "index": 1}]
    left = [{"type": "text", "text": after, "index": 1}]
    assert stripped({"system": parts, "model": "m"}) == {"system": left, "model": "m"}
    for name in ("system", "instructions", "prompt"):
        assert stripped({name: before}) == {name: after}
    user = {"role": "user", "content": LINE}
    turns = [{"role": role, "content": before}, {"role": role, "content": parts}, user]
    kept = [{"role": role, "content": after}, {"role": role, "content": left}, user]
    assert stripped({field: turns})[field] == kept


def test_everything_else_keeps_its_bytes() -> None:
    inside = b'{ "role":"user", "content":"\\u00e9 \xc3\xa9\\/", "n":1.50e1 }'
    block = b'{"text" : "\\u0059ou" ,"x":12345678901234567890}'
    line = json.dumps(LINE + "\n").encode()
    body = b'{"seed":0.10, "system":[{"text":%b},%b], "messages":[ %b ]}' % (line, block, inside)
    out = apply_edit(body, STRIP.strip_edit(body))
    for kept in (inside, block, b"0.10"):
        assert kept in out
    assert b"billing" not in out


def test_an_escape_hides_no_line() -> None:
    hidden = "".join(f"\\u{ord(letter):04x}" for letter in LINE)
    assert STRIP.strip_edit(b'{"system":"%b"}' % hidden.encode()) != {}
