"""The lines of a batch's input."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stored.line_reader import (
    Line,
    LineError,
    LineReader,
    LineSpec,
    TooManyLines,
    raw_lines,
)
from tests.stored.batch_place import CHAT, jsonl, line

BOM = b"\xef\xbb\xbf"
BODY = '{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":%s}'


def read(content: bytes, most_lines: int = 1000, line_bytes: int = 2000) -> list[Line]:
    reader = LineReader(
        io.BytesIO(content), CHAT, most_lines=most_lines, line_bytes=line_bytes, rest=lambda: None
    )
    found: list[Line] = []
    while some := reader.read_some():
        found += some
    return found


def only(content: bytes | str | dict[str, Any], **options: Any) -> Line:
    if isinstance(content, dict):
        content = json.dumps(content)
    data = content.encode() if isinstance(content, str) else content
    (found,) = read(data, **options)
    return found


def spec(content: bytes | str | dict[str, Any], **options: Any) -> LineSpec:
    found = only(content, **options)
    assert isinstance(found, LineSpec), found
    return found


def error(content: bytes | str | dict[str, Any], **options: Any) -> LineError:
    found = only(content, **options)
    assert isinstance(found, LineError), found
    return found


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\r\n\r\n \t\n", b" \n\n\n"])
@pytest.mark.parametrize("begin", [b"", BOM, BOM + b"\n", b"\n\r\n", b"  "])
def test_marks_empty_lines_and_any_end_make_no_difference(begin: bytes, end: bytes) -> None:
    text = json.dumps(line("a")).encode()
    content = begin + text + end
    found = spec(content)
    assert found.number == 1 + begin.count(b"\n")
    assert (
        content[found.offset : found.offset + found.length]
        == json.dumps(line("a")["body"]).encode()
    )


pieces = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            [b"\n", b"\r\n", BOM, b"\xe2\x80\xa8", b" ", b"{", b"x" * 150, b'{"custom_id":"a",']
            + [json.dumps(line(one)).encode() for one in ("a", "b", "ä", "\u2028")]
            + [json.dumps(line("long", more="x" * 200)).encode()]
        ),
    ),
    max_size=20,
)


@given(pieces, st.sampled_from([1, 10, 5000]))
def test_lines_are_those_of_the_file(parts: list[bytes], most: int) -> None:
    content = b"".join(parts)
    found = list(raw_lines(io.BytesIO(content), most))
    expected = content.split(b"\n")
    if not expected[-1]:
        del expected[-1]
    assert [one.number for one in found] == list(range(1, len(expected) + 1))
    for one, text in zip(found, expected, strict=True):
        assert content[one.offset : one.offset + one.length] == text
        assert one.data == (None if len(text) > most else text)


@given(pieces, st.integers(0, 8))
def test_a_file_may_not_have_more_lines_than_the_most(parts: list[bytes], most: int) -> None:
    content = b"".join(parts)
    if len(read(content, line_bytes=200)) > most:
        with pytest.raises(TooManyLines):
            read(content, line_bytes=200, most_lines=most)


@given(pieces)
def test_each_custom_id_has_one_line(parts: list[bytes]) -> None:
    found = read(b"\n".join(parts))
    specs = [one for one in found if isinstance(one, LineSpec)]
    assert len({one.custom_id for one in specs}) == len(specs)
    # A row may have the `custom_id` of its line only if no other has it.
    known = [one.custom_id for one in found if isinstance(one, LineSpec) or one.is_first]
    assert len(set(known)) == len(known)


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"{}{}", "invalid_json_line", None),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
        (b"{" * 1500, "invalid_json_line", None),
        (b'{"x":' + b"[" * 900 + b"]" * 900 + b"}", "missing_required_parameter", "custom_id"),
        (b'{"custom_id": 7}', "invalid_type", "custom_id"),
        (b'{"custom_id": ""}', "missing_required_parameter", "custom_id"),
        (b'{"custom_id": "a\\u0000"}', "invalid_custom_id", "custom_id"),
        (BODY.replace("POST", "GET") % "{}", "invalid_method", "method"),
        (BODY.replace("/v1", "http://x/v1") % "{}", "invalid_url", "url"),
        (BODY % "[]", "invalid_type", "body"),
        (BODY % '{"stream": true}', "streaming_unsupported", "body.stream"),
        (BODY % '{"stream": tru}', "invalid_json_line", None),
    ],
)
def test_a_broken_line_has_an_error_of_its_own(
    content: bytes | str, code: str, param: str | None
) -> None:
    found = error(content)
    assert (found.code, found.param) == (code, param)
    told = content.encode() if isinstance(content, str) else content
    before, itself, after = read(jsonl([line("1")]) + told + b"\n" + jsonl([line("2")]))
    assert isinstance(before, LineSpec)
    assert isinstance(after, LineSpec)
    assert (itself.number, after.number) == (2, 3)


def test_the_first_line_with_a_custom_id_has_it_and_later_ones_get_errors() -> None:
    a, b, c, d = read(jsonl([line("a"), line("b", url="x"), line("a"), line("b")]))
    assert isinstance(a, LineSpec)
    assert isinstance(b, LineError)
    assert b.is_first
    for again in (c, d):
        assert isinstance(again, LineError)
        assert (again.code, again.is_first) == ("duplicate_custom_id", False)


def test_a_line_that_is_too_long_is_an_error_of_its_own() -> None:
    long = line("a", more="x" * 5000)
    first, second = read(jsonl([long, line("b")]))
    assert isinstance(first, LineError)
    assert (first.code, first.custom_id) == ("line_too_long", None)
    assert first.length == len(json.dumps(long))
    assert isinstance(second, LineSpec)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({}, 0),
        ({"max_tokens": -1}, 0),
        ({"max_tokens": "7"}, 0),
        ({"max_tokens": 10**18}, 1_000_000_000),
        ({"max_tokens": 1e300}, 1_000_000_000),
        ({"max_tokens": 7, "n_predict": 12}, 12),
        ({"max_tokens": 7, "n_predict": -1}, 0),
    ],
)
def test_the_longest_answer_is_estimated(fields: dict[str, Any], expected: int) -> None:
    assert spec(line("a", body={"messages": [], **fields})).max_tokens == expected


def test_prompts_that_begin_alike_share_a_number() -> None:
    def prefix(*texts: str, **more: Any) -> int:
        messages = [{"role": "user", "content": text} for text in texts]
        body = {"model": "m", "messages": messages, **more}
        return spec(line("a", body=body), line_bytes=10_000).prefix

    long = "word " * 250
    assert prefix("short") == 0
    assert prefix(long, "one") == prefix(long, "two", temperature=0.5) > 0
    assert prefix("other " + long) != prefix(long)
    assert prefix(long, "one", tools=[{"a": long}]) == prefix("x", tools=[{"a": long}])
    assert prefix(long) < 1 << 63


def test_memory_is_bounded_whatever_the_file_holds(tmp_path: Path) -> None:
    with (tmp_path / "one endless line").open("w+b") as file:
        file.truncate(64 << 20)
        reader = LineReader(file, CHAT, most_lines=9, line_bytes=1 << 20, rest=lambda: None)
        tracemalloc.start()
        (found,) = reader.read_some()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (found.length, isinstance(found, LineError)) == (64 << 20, True)
    assert peak < 4 << 20
