"""Volatile lines are removed, and nothing else changes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.prompts import pattern_problem
from gateway.proxy.inbound.edits import apply_edit
from gateway.proxy.inbound.prompt_key import (
    BUILT_IN_PATTERNS,
    SEARCHED_CHARACTERS,
    LinePatterns,
    VolatileLines,
)
from tests.each_case import each_case

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


def test_the_text_after_the_literal_prefix_must_match_too() -> None:
    lines = LinePatterns([r"Now: \d\d:\d\d$"])
    assert lines.remove_from("Now: 12:34\nNow: or never\nb") == "Now: or never\nb"


@given(st.text())
def test_text_without_such_lines_is_the_same_object(text: str) -> None:
    assert LinePatterns(["wxyz-never: "]).remove_from(text) is text


def test_without_a_pattern_to_strip_the_body_is_not_parsed() -> None:
    assert VolatileLines().strip_edit(b"no JSON") == {}


@each_case(
    "body",
    [
        {"system": "You are", "messages": []},
        {"system": [{"type": "text", "text": "You are"}], "messages": []},
        {"messages": [{"role": "system", "content": "You are"}]},
        {"messages": [{"role": "user", "content": LINE}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": LINE}]},
        {"messages": "x", "system": 3, "input": None, "prompt": [1, 2], "instructions": {}},
        {"messages": [3, None], "system": [1, "x", None, {"text": 3}]},
        {"messages": [{"content": LINE}]},
    ],
)
def test_a_body_without_such_a_line_needs_no_edit(body: dict[str, Any]) -> None:
    assert STRIP.strip_edit(json.dumps(body).encode()) == {}


@each_case("data", [b"", b"[]", b"{", b'{"system":', b"\xff", b"[" * 100_000])
def test_an_unreadable_body_needs_no_edit(data: bytes) -> None:
    assert STRIP.strip_edit(data) == {}


def test_a_part_that_holds_nothing_else_is_removed() -> None:
    blocks = [{"type": "text", "text": text} for text in (LINE, "You are", "here")]
    assert stripped({"system": blocks, "model": "m"}) == {"system": blocks[1:], "model": "m"}


def test_a_line_before_others_is_removed_alone() -> None:
    block = {"type": "text", "text": f"{LINE}\nYou are", "cache_control": {"type": "ephemeral"}}
    assert stripped({"system": [block]})["system"] == [block | {"text": "You are"}]
    assert stripped({"system": f"{LINE}\nYou are"}) == {"system": "You are"}
    assert stripped({"instructions": f"{LINE}\nYou are"}) == {"instructions": "You are"}
    assert stripped({"prompt": f"{LINE}\nYou are"}) == {"prompt": "You are"}


@each_case("field", ["messages", "input"])
@each_case("role", ["system", "developer"])
def test_system_messages_lose_the_line_too(field: str, role: str) -> None:
    turns = [
        {"role": role, "content": f"{LINE}\nYou are"},
        {"role": role, "content": [{"type": "text", "text": LINE}, {"type": "text", "text": "a"}]},
        {"role": "user", "content": LINE},
    ]
    assert stripped({field: turns})[field] == [
        {"role": role, "content": "You are"},
        {"role": role, "content": [{"type": "text", "text": "a"}]},
        turns[2],
    ]


def test_everything_else_keeps_its_bytes() -> None:
    inside = b'{ "role":"user", "content":"\\u00e9 \xc3\xa9\\/", "n":1.50e1 }'
    block = b'{"text" : "\\u0059ou" ,"x":12345678901234567890}'
    line = json.dumps(LINE + "\n").encode()
    body = (
        b'{"seed":0.10, "system":[{"text":%b},%b], "messages":[ %b ], "prompt": "\\u0061" }'
    ) % (line, block, inside)
    edit = STRIP.strip_edit(body)
    assert set(edit) == {"system"}
    out = apply_edit(body, edit)
    for kept in (inside, block, b"0.10", b'"\\u0061"'):
        assert kept in out
    assert b"billing" not in out


def test_an_escape_hides_no_line() -> None:
    hidden = "".join(f"\\u{ord(letter):04x}" for letter in LINE)
    assert STRIP.strip_edit(b'{"system":"%b"}' % hidden.encode()) != {}


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=20)), st.text(max_size=50))
def test_only_the_line_is_removed_whatever_else_there_is(rest: dict[str, str], text: str) -> None:
    body = rest | {"system": f"{LINE}\n{text}"}
    assert stripped(body) == rest | {"system": LinePatterns(BUILT_IN_PATTERNS).remove_from(text)}


def test_a_stripped_line_is_left_out_of_keys_too() -> None:
    volatile = VolatileLines(["Now: "], ["Today: "])
    assert volatile.ignored.remove_from(f"{LINE}\nNow: 1\nToday: 2\nYou") == "You"
    assert volatile.stripped.remove_from(f"{LINE}\nNow: 1\nToday: 2\nYou") == f"{LINE}\nNow: 1\nYou"


@each_case(
    "pattern",
    [
        *BUILT_IN_PATTERNS,
        "Current time: .*",
        "Today's date is .*",
        r"The time is \d{1,2}:\d\d( UTC)?$",
        r"session (id|number): [0-9a-f-]+",
        "x-trace: [^;]+;.{0,8}$",
    ],
)
def test_patterns_that_are_accepted(pattern: str) -> None:
    assert pattern_problem(pattern) is None


@each_case(
    ("pattern", "why"),
    [
        ("", "begin with"), (".*time", "begin with"), ("abc", "begin with"),
        ("(?:time|hour): ", "begin with"), ("(?i)time: ", "flags"),
        ("time: (", "no regular expression"), ("time: [", "no regular expression"),
        ("time: (a+)+$", "repeats something"), ("time: (a|a)*$", "repeats something"),
        ("time: (.*a){12}$", "repeats something"), ("time: .*a.*b.*c$", "too many ways"),
        ("time: .{0,900}.{0,900}$", "too many ways"), (r"time: (.)\1", "looks"),
        ("time: (?=a)b", "looks"), ("time: (?<!a)b", "looks"), ("time:\n.*", "one line"),
        ("time: " + "a" * 300, "longer"), ("time: " + "(" * 120 + ")" * 120, None),
    ],
)  # fmt: skip
def test_patterns_that_are_refused(pattern: str, why: str | None) -> None:
    problem = pattern_problem(pattern)
    if why is not None:
        assert problem is not None
        assert why in problem
        with pytest.raises(ValueError, match=why):
            VolatileLines([pattern])


@pytest.mark.parametrize("pattern", ["time: .*a.{0,14}b$", "time: (a|ab)?[a-z]*b$"])
def test_no_text_makes_a_pattern_run_long(pattern: str) -> None:
    assert pattern_problem(pattern) is None
    lines = LinePatterns([pattern])
    text = ("time: " + "a" * 1017 + "\n") * 100
    began = time.process_time()
    assert lines.remove_from(text) == text
    # 16 lines are matched; about 10 ms.
    assert time.process_time() - began < 0.3
