from __future__ import annotations

from typing import Any

from tests.bench import node_replies
from tests.chaos.soak import ClientTotals, StreamClient
from tests.each_case import each_case

STREAM = b"".join(
    (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        *(
            b"%x\r\n%b\r\n" % (len(event), event)
            for event in (node_replies.stamped_token(1), node_replies.stamped_token(2))
        ),
        b"e\r\ndata: [DONE]\n\n\r\n",
        b"0\r\n\r\n",
    )
)


class Transport:
    """Records what the client sends."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.sent.append(data)


@each_case("first", range(len(b"HTTP/1.1 200"), len(STREAM)))
def test_a_stream_may_come_in_any_two_reads(first: int) -> None:
    transport: Any = Transport()
    tally = ClientTotals()
    client = StreamClient(tally, b"request")
    client.connection_made(transport)
    for _ in range(2):
        client.data_received(STREAM[:first])
        client.data_received(STREAM[first:])
    assert (tally.ended, tally.tokens, tally.streams, tally.failures) == (2, 4, 0, [])
    assert transport.sent == [b"request"] * 3
