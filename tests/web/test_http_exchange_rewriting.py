"""Events that are rewritten on their way to the client."""

from __future__ import annotations

from typing import Any, cast

from gateway.events import RequestFinished
from gateway.proxy.api.base import ResponseRewriter
from gateway.proxy.api.relayed import RELAYED
from gateway.transport.errors import InvalidResponse
from gateway.web.handler import RewritingWriter


class Shouting(ResponseRewriter):
    """Makes letters large, nothing of digits, and fails on a question mark."""

    def rewrite_events(self, events: bytes) -> bytes:
        if b"?" in events:
            raise InvalidResponse("That is a question")
        return b"" if events.isdigit() else events.upper()

    def rewrite_body(self, content: bytes) -> bytes:
        return self.rewrite_events(content)


class Written:
    """Takes the part of an exchange, and keeps what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.write_paused = False

    def write(self, data: bytes) -> bool:
        assert data, "an empty chunk would end the response"
        self.writes.append(data)
        return self.write_paused


def writer(heartbeat: float = 0.0) -> tuple[RewritingWriter, Written, list[float], RequestFinished]:
    written, time, record = Written(), [0.0], RequestFinished("req_1", "/v1/chat/completions")
    exchange = cast("Any", written)
    made = RewritingWriter(
        exchange, Shouting(), RELAYED, record, heartbeat, RELAYED.heartbeat, lambda: time[0]
    )
    return made, written, time, record


def test_events_are_written_as_the_rewriter_makes_them() -> None:
    made, written, _, _ = writer()
    assert made.write(b"a") is False
    written.write_paused = True
    assert made.write(b"b") is True
    assert made.write(b"1") is True
    assert written.writes == [b"A", b"B"]


def test_a_heartbeat_takes_the_place_of_content_that_is_held_back() -> None:
    made, written, time, _ = writer(heartbeat=15.0)
    for now in (1.0, 14.0, 15.0, 16.0, 30.0):
        time[0] = now
        made.write(b"1")
    made.write(b"a")
    time[0] = 44.0
    made.write(b"1")
    assert written.writes == [b":\n", b":\n", b"A"]
    off, written, time, _ = writer()
    time[0] = 1000.0
    off.write(b"1")
    assert written.writes == []


def test_an_invalid_event_ends_the_stream_with_an_error() -> None:
    made, written, time, record = writer(heartbeat=15.0)
    made.write(b"?")
    time[0] = 100.0
    made.write(b"a")
    [error] = written.writes
    assert error.startswith(b'data: {"error":{"message":"That is a question.')
    assert (record.status, record.reason) == (502, "node_failed")
