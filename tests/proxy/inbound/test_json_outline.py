"""Large bodies are walked through in short steps, and what is dear ends at its limit."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.proxy.inbound import json_outline
from gateway.proxy.inbound.json_outline import JsonOutline, read_outline
from tests.calls import count_calls

LIMITS = LimitSettings()
FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def walked(body: bytes, limits: LimitSettings = LIMITS) -> JsonOutline:
    steps = read_outline(body, limits)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: JsonOutline = end.value
            return found


def refused(body: bytes, limits: LimitSettings = LIMITS) -> tuple[str, str]:
    with pytest.raises(GatewayError) as raised:
        walked(body, limits)
    return raised.value.code, raised.value.message


# Any JSON, cut at any place.

PIECES = ["a", "\\n", "\\u0041", "\\ud83d\\ude00", "\\\\", '\\"', "é", "😀", *"{[,:}] ", "xxxxxxx"]
NAMES = ["image_url", "url", "type", "role", "data", "source", "server_url", "tools"]
BROKEN = [b"", b'"', b",", b"}", b"\\", b":", b"[", b"\x80", b"1", b"\x01", b"\0"]


class Writer:
    """Writes objects with everything in them that JSON allows; not in its shortest form."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def space(self) -> str:
        return self.rng.choice(["", "", "", " ", "\n\t "])

    def text(self) -> str:
        length = self.rng.choice((0, 1, 3, 10, 40, 200))
        return '"' + "".join(self.rng.choice(PIECES) for _ in range(length)) + '"'

    def value(self, level: int) -> str:
        kind = self.rng.random()
        if kind < 0.4 or level > 5:
            return self.text()
        if kind < 0.6:
            return self.rng.choice(["1", "-2.5e3", "true", "null", "0"])
        if kind < 0.8:
            return "[" + self.items(lambda: self.value(level + 1)) + "]"
        return self.object(level + 1)

    def items(self, write: Callable[[], str]) -> str:
        count = self.rng.randrange(5)
        return self.space() + ",".join(self.space() + write() + self.space() for _ in range(count))

    def field(self, level: int) -> str:
        name = self.text() if self.rng.random() < 0.5 else f'"{self.rng.choice(NAMES)}"'
        return name + self.space() + ":" + self.space() + self.value(level)

    def object(self, level: int = 0) -> str:
        return "{" + self.items(lambda: self.field(level)) + "}"


@pytest.fixture(params=[(24, 32, 4), (40, 64, 10), (100, 64, 10)])
def cut_small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in zip(
        ("CHUNK_BYTES", "STRING_CHUNK_BYTES", "UNSPLIT_STRING_BYTES"), request.param, strict=True
    ):
        monkeypatch.setattr(json_outline, name, size)
    monkeypatch.setattr(json_outline, "LONGEST_KEY", 1 << 20)


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_does_not_depend_on_where_the_body_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    writer = Writer(rng)
    for _ in range(300):
        body = writer.object().encode()
        if rng.random() < 0.4:
            at = rng.randrange(len(body))
            body = body[:at] + rng.choice(BROKEN) + body[at + rng.randrange(3) :]
        try:
            body.decode()
            fields = FIELDS.decode(body)
            msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            assert refused(body)[0] in {"invalid_json", "invalid_request"}
            continue
        try:
            found = walked(body)
        except GatewayError as error:
            assert "white space" in error.message or "name is over" in error.message  # noqa: PT017
            continue
        values = {one.name: body[one.start : one.end] for one in found.fields}
        assert values == {name: bytes(value) for name, value in fields.items()}
        for one in found.fields:
            value = json.loads(body[one.start : one.end])
            if isinstance(value, list):
                items = [item for item in value if isinstance(item, str | list | dict)]
                assert (one.item_count, one.has_scalars) == (len(items), len(items) < len(value))


# What it costs.

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
    "a picture": (chat(b'[{"type":"image_url","image_url":{"url":"data:image/png;base64,'
                       + b"iVBO" * (SIZE // 4) + b'"}}]'), None),
    "links": (chat(b'"a"', b',"x":{' + of(b'"image_url":"data:"') + b"}"), "pictures and links"),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_no_shape_costs_memory_and_each_step_is_short(shape: str) -> None:
    body, why = SHAPES[shape]
    if why is None:
        walked(body, LOW)
    else:
        assert why in refused(body, LOW)[1]
    steps = _measured(body)
    assert max(seen for _, seen in steps) <= 3 << 20, "bytes that a step holds"
    assert len(steps) <= len(body) // 4096
    assert all(
        length <= json_outline.STRING_CHUNK_BYTES + json_outline.CHUNK_BYTES for length, _ in steps
    )


def _measured(body: bytes) -> list[tuple[int, int]]:
    """Of each step: bytes that it went on by, and the most memory that it had."""
    found = []
    walk = json_outline._OutlineScanner(body, LOW)
    at = 0
    tracemalloc.start()
    try:
        while at < len(body):
            before = at
            tracemalloc.reset_peak()
            try:
                at = walk.step(at)
            except GatewayError:
                at = len(body)
                found.append((0, tracemalloc.get_traced_memory()[1]))
                break
            found.append((at - before, tracemalloc.get_traced_memory()[1]))
    finally:
        tracemalloc.stop()
    return found


@pytest.mark.parametrize("item", [b"{}", b'""', b'{"":""}', b'{"url":""}', b"[1]"])
def test_a_step_does_a_bounded_amount_of_work(item: bytes) -> None:
    body = b'{"x":[' + of(item, 100_000) + b"]}"
    for steps in (_steps(body), _steps(body[:50_000])):
        assert max(steps) < 100_000, "calls: some milliseconds"


def _steps(body: bytes) -> list[int]:
    walk = read_outline(body, LIMITS)
    ended = False

    def step() -> None:
        nonlocal ended
        try:
            next(walk)
        except (StopIteration, GatewayError):
            ended = True

    found = []
    while not ended:
        found.append(count_calls(step))
    return found


def test_the_limits_are_the_operators() -> None:
    body = b'{"prompt":[' + of(b'{"a":[1,2,3]}', 100_000) + b"]}"
    assert walked(body).depth == 4
    low: dict[str, Any] = {
        "json_containers": 100, "json_strings": 100, "json_numbers": 100, "json_depth": 3,
    }  # fmt: skip
    for key, most in low.items():
        code, message = refused(body, LimitSettings(**{key: most}))
        assert code == "invalid_request"
        assert f"'limits.{key}'" in message
        assert str(most) in message


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[' + of(b'{"role":"user","content":"' + b"x" * 400 + b'"}', 2 << 20) + b"]}",
        b'{"prompt":[' + b",".join(b"%d" % (n % 32_000) for n in range(1_000_000)) + b"]}",
        b'{"input":[' + of(b'"' + b"x" * 2000 + b'"', 4 << 20) + b"]}",
        b'{"logit_bias":[' + of(b"[12345,-100]", 600_000) + b"]}",
    ],
    ids=["chat", "ids", "embeddings", "bias"],
)
def test_what_clients_really_send_passes(body: bytes) -> None:
    assert walked(body).fields


def spans(body: bytes, found: JsonOutline) -> Iterator[tuple[str, str]]:
    for start, end, kind in found.links:
        yield kind, body[start:end].decode()


def test_addresses_are_found_wherever_the_body_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (
        ("CHUNK_BYTES", 64),
        ("STRING_CHUNK_BYTES", 64),
        ("UNSPLIT_STRING_BYTES", 30),
    ):
        monkeypatch.setattr(json_outline, name, size)
    for shift in range(60):
        body: dict[str, Any] = {
            "pad": "p" * shift,
            "messages": [
                {"type": "image_url", "image_url": {"url": "http://a"}},
                {"image_url": "http://b" + "b" * 200},
                {"source": {"type": "base64", "data": "QUFB"}},
                {"source": {"url": "http://c", "type": "url"}},
                {"text": "image_url", "url": "http://not"},
            ],
            "tools": [{"type": "mcp", "server_url": "http://d"}],
            "multimodal_data": ["x:y"],
        }
        data = json.dumps(body).encode()
        found = walked(data)
        assert list(spans(data, found)) == [
            ("url", "http://a"),
            ("url", "http://b" + "b" * 200),
            ("url", "http://c"),
            ("server", "http://d"),
            ("data", "x:y"),
        ]
        assert found.has_images
        assert [one.item_count for one in found.fields] == [0, 5, 1, 1]
