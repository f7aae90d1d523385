"""Only whole events pass, in order, however the node's bytes are cut."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.relay.sse import HEARTBEAT, EventGate, event_name, payload, split
from gateway.transport.errors import Garbage

LIMIT = 1 << 20
OPEN_COMMENT = re.compile(rb"(?:\A|(?<=\n))(?::\n)+\r?\n")
"""A comment of our own form with a blank line behind it: what breaks a Go client."""
WHOLE = re.compile(rb"\A(?:|.*\n\r?\n|(?:.*\n\r?\n)?(?::\n)+)\Z", re.DOTALL)

texts = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=12)
data_lines = texts.map(lambda text: b"data: " + text.encode())
other_lines = st.sampled_from(
    [b"event: delta", b"id: 7", b"retry: 10", b"data", b"data:", b"unknown: x", b"event:x"]
)
comments = st.one_of(st.just(b":"), texts.map(lambda text: b":" + text.encode()))


@st.composite
def events(draw: st.DrawFn) -> list[bytes]:
    """The lines of one event; comments may stand before its last line."""
    lines = [draw(data_lines), *draw(st.lists(st.one_of(data_lines, other_lines), max_size=3))]
    lines = draw(st.permutations(lines))
    if draw(st.booleans()):
        lines.insert(draw(st.integers(0, len(lines) - 1)), draw(comments))
    return lines


@st.composite
def streams(draw: st.DrawFn, ends: tuple[bytes, ...] = (b"\n", b"\r\n")) -> tuple[bytes, int]:
    """A stream of events and comments, and how many events it has."""
    data, count = b"", 0
    for _ in range(draw(st.integers(0, 6))):
        end = draw(st.sampled_from(ends))
        if draw(st.booleans()):
            data += end.join(draw(events())) + 2 * end
            count += 1
        else:
            data += draw(comments) + end * draw(st.sampled_from([1, 2, 2, 3]))
    return data, count


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    places = sorted(draw(st.sets(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in pairwise([0, *places, len(data)])]


def parsed(data: bytes) -> list[list[bytes]]:
    """The events as a client of the standard sees them: their lines without comments."""
    found: list[list[bytes]] = []
    lines: list[bytes] = []
    for line in re.split(rb"\r?\n", data):
        if not line:
            if lines:
                found.append(lines)
            lines = []
        elif not line.startswith(b":"):
            lines.append(line)
    assert not lines, "half an event went out"
    return found


@given(st.data(), streams())
def test_the_same_events_come_out_however_they_are_cut(
    data: st.DataObject, made: tuple[bytes, int]
) -> None:
    stream, _ = made
    gate = EventGate(LIMIT)
    passed = b""
    for chunk in data.draw(cut(stream)):
        piece = gate.feed(chunk)
        assert WHOLE.match(piece), "half an event went out"
        passed += piece
    assert parsed(passed) == parsed(stream)
    assert not gate.partial
    assert not OPEN_COMMENT.search(passed)


@given(st.data(), st.one_of(streams((b"\n",)), streams((b"\r\n",))))
def test_events_are_counted_and_comments_are_not(
    data: st.DataObject, made: tuple[bytes, int]
) -> None:
    stream, count = made
    gate = EventGate(LIMIT)
    for chunk in data.draw(cut(stream)):
        gate.feed(chunk)
    assert gate.events == count


@given(st.data(), streams())
def test_comments_between_events_can_be_taken_out(
    data: st.DataObject, made: tuple[bytes, int]
) -> None:
    stream, _ = made
    gate = EventGate(LIMIT, comments=False)
    passed = b"".join(gate.feed(chunk) for chunk in data.draw(cut(stream)))
    assert not passed.startswith(b":")
    assert not re.search(rb"\n\r?\n:", passed)
    assert parsed(passed) == parsed(stream)


@given(st.data(), st.binary(max_size=400), st.integers(8, 64))
def test_no_more_than_the_limit_is_held_back(
    data: st.DataObject, stream: bytes, limit: int
) -> None:
    gate = EventGate(limit)
    for chunk in data.draw(cut(stream)):
        try:
            gate.feed(chunk)
        except Garbage:
            return
        assert len(gate._tail) <= limit


@given(st.data(), st.binary(max_size=200))
def test_any_bytes_pass_as_whole_pieces(data: st.DataObject, stream: bytes) -> None:
    gate = EventGate(LIMIT)
    for chunk in data.draw(cut(stream)):
        piece = gate.feed(chunk)
        assert piece.endswith((b"\n\n", b"\n\r\n", HEARTBEAT)) or not piece


@pytest.mark.parametrize(
    ("chunks", "passed"),
    [
        ([b":\n\n"], b":\n"),
        ([b": ping\n\n"], b":\n"),
        ([b":\r\n\r\n"], b":\n"),
        ([b":a\n:b\n\n:c\n"], b":\n"),
        ([b":\n", b"\n"], b":\n"),
        ([b":\n\n\n"], b":\n"),
        ([b":\r\n", b"\r", b"\n", b"data: a\r\n\r\n"], b":\ndata: a\r\n\r\n"),
        ([b"data: a\n\n:\n\ndata: b\n\n"], b"data: a\n\n:\ndata: b\n\n"),
        ([b"data: a\n\n:\n\n", b"data: b\n\n"], b"data: a\n\n:\ndata: b\n\n"),
        ([b"data: a\n\n:", b" ping", b"\n", b"\ndata: b\n\n"], b"data: a\n\n:\ndata: b\n\n"),
        ([b"data: a\n\n\n\n:x\n\n\n\n"], b"data: a\n\n\n\n:\n"),
        ([b"data: :\n:not here\ndata: b\n\n"], b"data: :\n:not here\ndata: b\n\n"),
    ],
)
def test_a_comment_is_one_line_without_a_blank_one_behind(
    chunks: list[bytes], passed: bytes
) -> None:
    gate = EventGate(LIMIT)
    assert b"".join(gate.feed(chunk) for chunk in chunks) == passed


def test_a_comment_passes_at_once() -> None:
    assert EventGate(LIMIT).feed(b": reading\n") == HEARTBEAT


def test_half_an_event_is_held_back_and_told() -> None:
    gate = EventGate(LIMIT)
    assert gate.feed(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert gate.partial
    assert gate.feed(b"\n\n") == b"data: b\n\n"
    assert not gate.partial


@pytest.mark.parametrize("chunk", [b"data: " + 100 * b"x", b":" + 100 * b"x"])
def test_an_endless_line_is_garbage(chunk: bytes) -> None:
    gate = EventGate(64)
    with pytest.raises(Garbage):
        gate.feed(chunk)


def test_an_endless_line_behind_a_whole_event_is_garbage() -> None:
    with pytest.raises(Garbage):
        EventGate(64).feed(b"data: a\n\ndata: " + 100 * b"x")


@given(streams())
def test_splitting_loses_nothing(made: tuple[bytes, int]) -> None:
    stream, _ = made
    assert b"".join(split(stream)) == stream


def test_an_events_data_is_its_lines_joined() -> None:
    assert payload(b"event: a\ndata: {\r\ndata:}\r\n\r\n") == b"{\n}"
    assert payload(b":\ndata: a\n\n") == b"a"
    assert payload(b": data: no\n\n") == b""
    assert payload(b"id: 7\n\n") == b""


def test_an_events_name_is_told() -> None:
    assert event_name(b"data: event: no\nevent: error\r\n\r\n") == b"error"
    assert event_name(b"data: x\n\n") == b""
