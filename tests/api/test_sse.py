"""Only whole events pass, in order, however the node's bytes are cut into chunks.

That the same events pass, and none in part, is `tests.fuzz.sse`'s."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.base import Api
from gateway.api.messages import MESSAGES
from gateway.api.responses import RESPONSES
from gateway.api.sse import (
    MOST_STEP_LINES,
    EventFramer,
    check_utf8,
    event_name,
    last_events,
    payload,
    split,
    step_size,
    validated,
)
from gateway.transport.errors import InvalidResponse
from tests.each_case import each_case

LIMIT = 1 << 20

LINES = [b"event: delta", b"id: 7", b"data", b"data:", b"unknown: x"]
PARTS = [b"data: a\n\n", b"data: {}\nevent: x\n\n", b"id: 7\n:\ndata: b\n\n", b":\n", b": x\n\n\n"]
STREAMS = st.lists(st.sampled_from(PARTS), max_size=8)


@pytest.mark.parametrize(
    ("api", "name"),
    [(RESPONSES, b"response.completed"), (RESPONSES, b"error"), (MESSAGES, b"error")],
)
def test_spaces_around_its_name_make_no_event_ordinary(api: Api, name: bytes) -> None:
    for line in (b"event:  " + name, b"event: " + name + b" ", b"event: " + name + b"\r"):
        framer = EventFramer(LIMIT, api.ordinary_events)
        event = line + b'\ndata: {"type":"x"}\n\n'
        assert framer.feed(event) == event
        assert framer.special_bytes == len(event)


@each_case(
    ("chunks", "passed"),
    [
        ([b":\n\n"], b":\n"),
        ([b": reading\n"], b":\n"),  # at once
        ([b":\r\n\r\n"], b":\n"),
        ([b":a\n:b\n\n:c\n"], b":\n"),
        ([b":\n", b"\n"], b":\n"),
        ([b":\r\n", b"\r", b"\n", b"data: a\r\n\r\n"], b":\ndata: a\r\n\r\n"),
        ([b"data: a\n\n:\n\ndata: b\n\n"], b"data: a\n\n:\ndata: b\n\n"),
        ([b"data: a\n\n:", b" ping", b"\n", b"\ndata: b\n\n"], b"data: a\n\n:\ndata: b\n\n"),
        ([b"data: a\n\n\n\n:x\n\n\n\n"], b"data: a\n\n\n\n:\n"),
        ([b"data: :\n:not here\ndata: b\n\n"], b"data: :\n:not here\ndata: b\n\n"),
    ],
)
def test_a_comment_becomes_one_line_alone(chunks: list[bytes], passed: bytes) -> None:
    framer = EventFramer(LIMIT)
    assert b"".join(framer.feed(chunk) for chunk in chunks) == passed


@each_case("start", [b"data: ", b":", b"data: a\n\ndata: "])
def test_an_endless_line_is_invalid(start: bytes) -> None:
    with pytest.raises(InvalidResponse):
        EventFramer(64).feed(start + 100 * b"x")


@given(STREAMS.map(b"".join), st.integers(1, 80))
def test_the_last_events_are_whole(stream: bytes, size: int) -> None:
    last = last_events(stream, size)
    assert stream.endswith(last)
    assert len(last) >= min(size, len(stream))
    assert b"".join(split(stream)) == stream
    before = stream[: len(stream) - len(last)]
    assert not before or before.endswith((b"\n\n", b":\n"))


@given(st.lists(st.sampled_from([b"data: a", *LINES]), min_size=1, max_size=3), st.booleans())
def test_an_events_data_is_that_of_its_data_lines(lines: list[bytes], crlf: bool) -> None:
    assert payload(b": data: no\ndata: a\n\n") == b"a"
    end = b"\r\n" if crlf else b"\n"
    data = [line[5:].strip(b" ") for line in lines if line.startswith(b"data:")]
    assert payload(end.join(lines) + 2 * end) == b"\n".join(data)


def test_an_event_has_the_name_of_its_event_line() -> None:
    assert event_name(b"data: event: no\nevent: error\r\n\r\n") == b"error"
    assert event_name(b"data: x\n\n") == b""


EVENT = b'data: {"choices":[]}\n\n'
NAMED = b'event: delta\ndata: {"delta":"data: {\\"}"}\n\n'


def checked(events: bytes) -> bytes:
    """The events that pass if only those that are not ordinary are checked."""
    framer = EventFramer(LIMIT)
    passed = framer.feed(events)
    assert framer.event_count == len([event for event in split(events) if event != b":\n"])
    check_utf8(passed)
    at = len(passed) - framer.special_bytes
    return passed[:at] + validated(passed[at:])


@each_case(
    "events",
    [
        b"data: {oops}\n\n" + EVENT, EVENT + b"data: {oops}\n\n", b"data: 7\n\n",
        b'data: {"text": "\xff"}\n\n', b'data: {"text": "\xff"\n\n',
        # Two streams, or two writers, mixed in one.
        b'data: {"choices":[{"te' + EVENT, EVENT[:-1] + EVENT, NAMED[:30] + NAMED,
        EVENT + b'data: {"choices":[{"te' + EVENT, b'data:{"a":' + EVENT, b"data: {" + EVENT,
    ],
)  # fmt: skip
def test_events_that_no_client_can_read_are_invalid(events: bytes) -> None:
    with pytest.raises(InvalidResponse):
        checked(events)
    with pytest.raises(InvalidResponse):
        validated(events)


def test_events_without_data_are_removed() -> None:
    nothing = b"event: nothing\n\n"
    assert checked(nothing) == b""
    assert validated(nothing + EVENT + b":\n" + nothing + b"id: 7\nretry: 1\n\n:\n") == (
        EVENT + b":\n" + b":\n"
    )


@pytest.mark.parametrize("chunk", [b'\nnonsense "a"}\n\n', b'\n{"a":1}\n\n', b"\n\n}\n\n"])
def test_a_first_line_end_makes_no_event_ordinary(chunk: bytes) -> None:
    framer = EventFramer(LIMIT)
    passed = framer.feed(chunk)
    assert framer.special_bytes == len(passed)


@each_case("line", [b"data:\n", b"x\n", b":\ny\n", b"data: {}\n"])
def test_an_event_of_thousands_of_lines_is_invalid(line: bytes) -> None:
    framer = EventFramer(1 << 20)
    for _ in range(4):
        framer.feed(line * (1000 // line.count(b"\n")))
    with pytest.raises(InvalidResponse, match="more than 4096 lines"):
        framer.feed(line * 1000)
    framer = EventFramer(1 << 20)
    assert framer.feed(b"\n" * 5000 + b"data:\n" * 4000) == b""
    for _ in range(10):
        assert framer.feed(b"\ndata: {}\n")


def test_a_chunk_of_many_lines_is_worked_on_in_steps() -> None:
    events = b"data: {}\n\n" * 3000 + b"data: {"
    size = step_size(events)
    assert events[:size].count(b"\n") == MOST_STEP_LINES
    assert step_size(events[:size]) == size
    assert step_size(b"x" * (1 << 20)) == 1 << 20
