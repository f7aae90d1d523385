"""Replies of a node on one connection, one after another: `transport/connection.py`.

Each input is a sequence of replies, three bytes each. A plain reference says what the user of the
connection must find of every reply, whatever came before it: status, headers, the lines for the
client, body, and whether the connection may go on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

from gateway.forward.header_fields import headers_for_client
from gateway.terms import Headers
from gateway.transport.connection import NodeConnection, TurnLimit
from gateway.transport.errors import UpstreamError
from tests.fuzz.inputs import Divided, Target, seed
from tests.http.recorded_transport import RecordedTransport

MOST_REPLIES = 24

EXTRA: tuple[tuple[str, ...], ...] = ((), ("x-shown",))
"""The settings' further headers for clients; a reload puts another tuple in their place."""

_HEADS: tuple[Headers, ...] = (
    [(b"Content-Type", b"application/json; charset=utf-8")],
    [(b"content-type", b"application/json"), (b"x-shown", b"1"), (b"connection", b"x-shown")],
    [(b"Content-Type", b"application/json"), (b"openai-organization", b"one")],
    [(b"Content-Type", b"application/json"), (b"openai-organization", b"two"), (b"x-shown", b"2")],
    [(b"Server", b"nginx"), (b"Content-Type", b"text/event-stream"), (b"retry-after", b"7")],
    [],
)

VARIANTS = 48
"""Pairs of a status and a head."""

_STATUSES = (200, 200, 200, 200, 201, 400, 429, 503)


class Expected(NamedTuple):
    """What the user of the connection must find."""

    status: int
    headers: Headers
    """All but the length."""
    length: bytes | None
    body: bytes
    reusable: bool
    breaks: bool = False
    """Whether an error must come instead of the end."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply on the wire. `closes`: the node closes the connection behind it."""

    data: bytes
    expected: Expected
    bodyless: bool = False
    closes: bool = False


def reply_of(kind: int, variant: int, size: int) -> Reply:
    """The reply that these three bytes stand for."""
    status = _STATUSES[variant % len(_STATUSES)]
    fields = list(_HEADS[variant // len(_STATUSES) % len(_HEADS)])
    body = bytes(97 + at % 20 for at in range(size % 40))
    length: bytes | None = b"%d" % len(body)
    framing: Headers = [(b"Content-Length", b"%d" % len(body))]
    sent, before, reusable, breaks, bodyless, closes = body, b"", True, False, False, False
    match kind % 16:
        case 0 | 1 | 2 | 3:
            pass
        case 4 | 5:
            framing, length = [(b"Transfer-Encoding", b"chunked")], None
            sent = b"".join(
                b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:]) if part
            )
            sent += b"0\r\nX-Trailer: 1\r\n\r\n" if size > 200 else b"0\r\n\r\n"
        case 6:
            status, framing, length, sent, body = 204, [], None, b"", b""
        case 7:
            bodyless, sent, body = True, b"", b""
            reusable = length == b"0"
        case 8 | 9:
            before = b"HTTP/1.1 103 Early Hints\r\nopenai-organization: early\r\n\r\n" * (size % 3)
            before += b"HTTP/1.1 100 Continue\r\n\r\n"
        case 10:
            framing, length, reusable, closes = [], None, False, True
        case 11:
            fields, reusable = [*fields, (b"Connection", b"close")], False
        case 12:
            reusable, breaks, closes = False, bool(body), True
            sent = body = body[:-1]
            reusable = not breaks
        case 13:
            # Bytes that nobody asked for end the connection, and are nobody's reply.
            reusable, sent = False, body + b"HTTP/1.1 200 OK\r\n"
        case 14:
            fields = [(name.swapcase(), value) for name, value in fields]
        case _:
            framing = [(b"content-length", length or b"0")]
    lines = b"".join(b"%b: %b\r\n" % field for field in (*fields, *framing))
    data = before + b"HTTP/1.1 %d X\r\n%b\r\n%b" % (status, lines, sent)
    kept = [(name.lower(), value) for name, value in (*fields, *framing)]
    headers = [field for field in kept if field[0] != b"content-length"]
    expected = Expected(status, headers, length, body, reusable, breaks)
    return Reply(data, expected, bodyless, closes)


class Exchanges:
    """A user of connections to one node, as `Attempt` is: one request, one reply, and so on."""

    def __init__(self) -> None:
        self._connection: NodeConnection | None = None

    def run(self, reply: Reply, cuts: list[int], extra: tuple[str, ...], *, asks: bool) -> None:
        """Check one exchange. `asks`: the user wants the lines for the client."""
        connection = self._connection
        if connection is None:
            clock: Any = SimpleNamespace(time=lambda: 0.0)
            connection = NodeConnection(clock, turn=TurnLimit(seconds=math.inf))
            connection.connection_made(RecordedTransport())
        connection.send(b"POST / HTTP/1.1\r\n\r\n", bodyless=reply.bodyless)
        found = b""
        edges = [0, *cuts, len(reply.data)]
        for begin, end in pairwise(edges):
            if begin < end and connection.alive:
                connection.data_received(reply.data[begin:end])
                found += connection.read_nowait()
        expected, alive = reply.expected, connection.alive
        if reply.closes and alive:
            connection.connection_lost(None)
        assert connection.status == expected.status
        headers = [field for field in connection.headers if field[0] != b"content-length"]
        assert headers == expected.headers, "a reply has headers of another one"
        assert dict(connection.headers).get(b"content-length") == expected.length
        assert found == expected.body
        assert connection.complete is not expected.breaks
        if asks:
            lines = connection.made_of_head(headers_for_client, extra)
            assert lines == headers_for_client(expected.headers, extra), "lines of another reply"
        reusable = connection.reusable and connection.alive
        assert reusable is (expected.reusable and not reply.closes)
        if expected.breaks:
            try:
                connection.wait_for_data()
            except UpstreamError:
                pass
            else:
                raise AssertionError("a cut reply has no error")
        self._connection = connection if reusable else None


def check(one: Divided) -> None:
    """Check one sequence of replies."""
    exchanges = Exchanges()
    for at in range(0, min(len(one.text), 3 * MOST_REPLIES) - 2, 3):
        kind, variant, size = one.text[at : at + 3]
        # Of few heads: what one reply leaves to another shows where a head comes again.
        reply = reply_of(kind, variant % (1 + one.choice % VARIANTS), size)
        cuts: list[int] = []
        if kind >> 6 == 1:
            cuts = sorted(cut % len(reply.data) for cut in (*one.cuts[:2], variant * size))
        exchanges.run(reply, cuts, EXTRA[kind >> 6 == 3], asks=kind >> 4 & 3 != 3)


REPLIES = Target(
    "replies",
    check,
    (
        # JSON, a stream with lines of its own, JSON with the first head.
        seed(bytes((0, 0, 5, 4, 36, 5, 0, 0, 5)), 47),
        seed(bytes((0, 16, 9, 0, 30, 9, 0, 16, 9)), 47),
        seed(bytes((0, 0, 5, 9, 24, 5, 0, 0, 5, 6, 0, 0, 0, 0, 9, 7, 0, 0, 0, 0, 5)), 46),
        seed(bytes((0, 0, 9, 68, 36, 9, 0, 0, 9, 12, 0, 9, 0, 0, 9, 13, 0, 9, 11, 8, 3)), 47),
        seed(bytes((128, 8, 9, 0, 8, 9, 128, 8, 8, 10, 0, 9, 15, 0, 9, 14, 0, 9)), 47),
    ),
    longest=3 * MOST_REPLIES + 6,
)
