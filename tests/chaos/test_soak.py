from __future__ import annotations

from typing import Any

import pytest

from tests.bench import node_replies
from tests.chaos.soak import ClientTotals, StreamClient
from tests.each_case import each_case

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKENS = [node_replies.stamped_token(1), node_replies.stamped_token(2)]
DONE, ERROR = b"data: [DONE]\n\n", b'data: {"error": {"code": 500}}\n\n'


class Transport:
    """Records what the client sends."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def abort(self) -> None:
        pass


def stream(*events: bytes, head: bytes = HEAD) -> bytes:
    return head + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (*events, b""))


def read(*parts: bytes) -> tuple[ClientTotals, Transport]:
    transport: Any = Transport()
    tally = ClientTotals()
    client = StreamClient(tally, b"request")
    client.connection_made(transport)
    for part in parts:
        client.data_received(part)
    return tally, transport


@each_case("first", range(len(stream(*TOKENS, DONE))))
def test_a_stream_may_come_in_any_two_reads(first: int) -> None:
    whole = stream(*TOKENS, DONE)
    tally, transport = read(whole[:first], whole[first:], whole[:first], whole[first:])
    assert (tally.ended, tally.tokens, tally.streams, tally.failures) == (2, 4, 0, [])
    assert transport.sent == [b"request"] * 3


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (stream(TOKENS[0], ERROR, DONE), "500"),
        (stream(TOKENS[0], ERROR)[:-5], "500"),
        (stream(*TOKENS), "without its end"),
        (stream(b"no room", head=HEAD.replace(b"200", b"503")), "503, without its end: b'no room'"),
    ],
    ids=["error and [DONE]", "error and no end", "no [DONE]", "503"],
)
def test_an_error_or_a_stream_without_its_end_is_a_failure(data: bytes, told: str) -> None:
    tally, transport = read(data)
    assert tally.ended == 0
    [failure] = tally.failures
    assert told in failure
    assert transport.sent == [b"request"]
