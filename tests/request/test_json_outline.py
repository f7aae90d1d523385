"""Large bodies are scanned in short steps, and costly shapes meet a limit.

That an outline is right, and the same wherever the body is cut, is `tests.fuzz.body`'s."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from gateway.api.json_values import run_at_once
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.request.json_outline import (
    DEFAULT_SIZES,
    JsonOutline,
    OutlineScanner,
    ScanSizes,
    read_outline,
)
from tests.each_case import each_case

LIMITS = LimitSettings()


def outlined(
    body: bytes, limits: LimitSettings = LIMITS, sizes: ScanSizes = DEFAULT_SIZES
) -> JsonOutline:
    return run_at_once(read_outline(body, limits, sizes))


def refused(
    body: bytes, limits: LimitSettings = LIMITS, sizes: ScanSizes = DEFAULT_SIZES
) -> tuple[str, str]:
    with pytest.raises(GatewayError) as raised:
        outlined(body, limits, sizes)
    return raised.value.code, raised.value.message


SIZE = 1 << 19
LOW = LimitSettings(json_containers=10_000, json_strings=50_000)


def of(item: bytes, size: int = SIZE) -> bytes:
    return b",".join([item] * (size // (len(item) + 1)))


def chat(content: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":' + content + b"}]" + more + b"}"


def text(escape: bytes) -> bytes:
    return b'"' + escape * (SIZE // len(escape)) + b'"'


SHAPES: dict[str, tuple[bytes, str | None]] = {
    "a text": (chat(text(b"a")), None),
    "empty messages": (b'{"messages":[' + of(b"{}") + b"]}", "json_containers"),
    "parts": (chat(b"[" + of(b'{"type":"text","text":"a"}') + b"]"), "json_containers"),
    "tools": (chat(b'"a"', b',"tools":[' + of(b'{"type":"function"}') + b"]"), "json_containers"),
    "objects": (chat(b'"a"', b',"a_url":1,"x":[' + of(b"{}") + b"]"), "json_containers"),
    "lists": (chat(b'"a"', b',"x":' + b"[" * SIZE), "json_depth"),
    "nested objects": (chat(b'"a"', b',"x":' + b'{"a":' * (SIZE // 5)), "json_depth"),
    "quotes": (chat(text(b'\\"'), b',"x":[' + of(b"[]", 600) + b"]"), None),
    "backslashes": (chat(text(b"\\\\"), b',"x":[' + of(b"[]", 600) + b"]"), None),
    "line ends": (chat(text(b"\\n"), b',"x":[' + of(b"[]", 600) + b"]"), None),
    "code points": (chat(text(b"\\u0041")), None),
    "pairs": (chat(text(b"\\ud83d\\ude00")), None),
    "astral": (chat(text("😀".encode())), None),
    "control": (chat(text(b"\x01")), "not valid JSON"),
    "digits": (chat(b'"a"', b',"n":' + b"1" * SIZE), "one number"),
    "white space": (chat(b'"a"', b',"n":' + b" " * SIZE + b"1"), "white space"),
    "fields": (b"{" + of(b'"a":1') + b"}", "json_fields"),
    "a long name": (b'{"' + b"a" * SIZE + b'":1}', "name"),
    "a long name within": (chat(b'"a"', b',"x":{"' + b"a" * SIZE + b'":1}'), None),
    "strings": (b'{"prompt":[' + of(b'""') + b"]}", "json_strings"),
    "ids": (b'{"prompt":[' + of(b"1") + b"]}", None),
    "an image": (chat(b'[{"type":"image_url","image_url":{"url":"data:image/png;base64,'
                       + b"iVBO" * (SIZE // 4) + b'"}}]'), None),
    "links": (chat(b'"a"', b',"input":{' + of(b'"image_url":"data:"') + b"}"), "images and links"),
}  # fmt: skip


@each_case("shape", SHAPES)
def test_no_shape_costs_much_memory_and_each_step_is_short(shape: str) -> None:
    body, problem = SHAPES[shape]
    if problem is None:
        outlined(body, LOW)
    else:
        assert problem in refused(body, LOW)[1]
    steps = _measured(body)
    assert max(peak for _, peak in steps) <= 3 << 20, "bytes that a step holds"
    assert len(steps) <= len(body) // 4096
    assert all(length <= DEFAULT_SIZES.string_chunk + DEFAULT_SIZES.chunk for length, _ in steps)


def _measured(body: bytes) -> list[tuple[int, int]]:
    """Of each step: bytes that it scanned, and its peak memory."""
    found = []
    scanner = OutlineScanner(body, LOW, DEFAULT_SIZES)
    at = 0
    tracemalloc.start()
    try:
        while at < len(body):
            before = at
            tracemalloc.reset_peak()
            try:
                at = scanner.step(at)
            except GatewayError:
                at = len(body)
                found.append((0, tracemalloc.get_traced_memory()[1]))
                break
            found.append((at - before, tracemalloc.get_traced_memory()[1]))
    finally:
        tracemalloc.stop()
    return found


def test_the_operators_limits_hold() -> None:
    body = b'{"prompt":[' + of(b'{"a":[1,2,3]}', 100_000) + b"]}"
    assert outlined(body).depth == 4
    low: dict[str, Any] = {
        "json_containers": 100, "json_strings": 100, "json_numbers": 100, "json_depth": 3,
    }  # fmt: skip
    for key, most in low.items():
        code, message = refused(body, LimitSettings(**{key: most}))
        assert code == "invalid_request"
        assert f"'limits.{key}'" in message
        assert str(most) in message


@each_case("sizes", [ScanSizes(24, 32, 4), ScanSizes(40, 64, 10)])
@each_case("wrong", [b"[,1]", b'{,"id":0}'])
def test_a_comma_behind_a_bracket_is_no_json_anywhere(wrong: bytes, sizes: ScanSizes) -> None:
    for before in range(40):
        body = b'{"a":[' + b"1," * before + b'1],"b":' + wrong + b',"c":70}'
        assert refused(body, sizes=sizes)[0] == "invalid_json"
