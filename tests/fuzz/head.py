"""The head parser: `http/protocol.py` with httptools, and its decoder of chunks.

Oracles: a plain reader of RFC 9112 finds each served request in the same bytes, with the same
credentials and body; cuts change nothing; what waits is bounded and counted exactly.
"""

from __future__ import annotations

import asyncio
import math
import re
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from gateway.config.listeners import LimitSettings
from gateway.errors import ClientClosed, GatewayError
from gateway.http.connections import CONNECTION_PIPELINE_BYTES
from gateway.http.exchange import HttpExchange
from gateway.http.protocol import BoundedProtocol, ChunkedDecoder, protocol_class
from gateway.request.routes import Route
from gateway.transport.connection import TurnLimit
from tests.fuzz.inputs import Divided, Target, seed
from tests.http.recorded_transport import RecordedTransport

LIMIT = 512
"""`limits.header_bytes`: low, so that the fuzzer reaches it."""

_WATCHED = frozenset(
    {b"authorization", b"x-api-key", b"api-key", b"cookie", b"x-forwarded-for", b"x-priority"}
)
"""Fields that say who asks, and what the request may."""

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Served(NamedTuple):
    """A request, as it was served."""

    method: bytes
    target: bytes
    """Empty if it is not told as it was written."""
    fields: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Outcome(NamedTuple):
    """What came of a connection's bytes."""

    served: list[Served]
    statuses: list[bytes]
    waiting: int
    """Bytes in the backlog."""


def requests_in(data: bytes) -> Iterator[tuple[Served, int]]:
    """The requests in `data` as RFC 9112 has them, each with its end; as many as are whole."""
    at = 0
    while True:
        while data.startswith(b"\r\n", at):
            at += 2
        end = data.find(b"\r\n\r\n", at)
        if end < 0:
            return
        line, *lines = data[at:end].split(b"\r\n")
        words = line.split()
        fields = [
            (name.lower(), value.strip(b" \t"))
            for name, _, value in (one.partition(b":") for one in lines)
        ]
        at = end + 4
        values = dict(fields)
        body = b""
        try:
            if b"transfer-encoding" in values:
                body, at = _chunks(data, at)
            elif b"content-length" in values:
                length = int(values[b"content-length"])
                body, at = data[at : at + length], at + length
            method, target = words[0], words[1]
        except (ValueError, IndexError):
            return
        if at > len(data):
            return
        watched = tuple(sorted(field for field in fields if field[0] in _WATCHED))
        yield Served(method, target, watched, body), at


def _chunks(data: bytes, at: int) -> tuple[bytes, int]:
    """A chunked body from `at`, and its end. Raises: ValueError."""
    body = b""
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end].partition(b";")[0], 16)
        at = end + 2
        if not size:
            break
        body += data[at : at + size]
        at += size + 2
    if data.startswith(b"\r\n", at):
        return body, at + 2
    return body, data.index(b"\r\n\r\n", at) + 4


class Connections:
    """Serves the bytes of one connection after the other; no sockets."""

    def __init__(self, turn: TurnLimit) -> None:
        """`turn`: one that never ends, or one that has always ended, so that bytes wait."""
        self._loop = asyncio.new_event_loop()
        weakref.finalize(self, self._loop.close)
        self._served: list[Served] = []
        self.kind = protocol_class(LimitSettings(header_bytes=LIMIT), self._serve, turn=turn)
        self._open: set[BoundedProtocol] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def outcome(self, pieces: list[bytes]) -> Outcome:
        """What comes of these pieces, received one by one."""
        return self._loop.run_until_complete(self._outcome(pieces))

    async def _outcome(self, pieces: list[bytes]) -> Outcome:
        self._served.clear()
        connection = self.kind(self._application, 5.0, self._open, self._tasks, self._loop)
        transport = RecordedTransport()
        connection.connection_made(transport)
        for piece in pieces:
            if transport.is_closing():
                break
            connection.data_received(piece)
            while connection._unreceived:  # noqa: ASYNC110 - a turn of the loop at a time
                await asyncio.sleep(0)
            self._check_bounds(connection)
            await self._settle(connection, transport)
        statuses = [status for status in _STATUS.findall(transport.sent) if status != b"100"]
        assert b"500" not in statuses
        # What is wrong first, and so told, may depend on the cuts; what is refused may not.
        statuses = [status if status == b"200" else b"refused" for status in statuses]
        waiting = len(connection.backlog)
        assert transport.closed or not waiting or connection.tasks, "bytes wait for nothing"
        connection.connection_lost(None)
        while self._tasks:  # noqa: ASYNC110 - a turn of the loop at a time
            await asyncio.sleep(0)
        assert self.kind.pipeline_queue.waiting_bytes == 0
        assert not self._open
        return Outcome(list(self._served), statuses, waiting)

    async def _settle(self, connection: BoundedProtocol, transport: RecordedTransport) -> None:
        """Let everything run that can."""
        still = 0
        while (connection.tasks or connection.backlog) and still < 4 and not transport.closed:
            before = len(transport.sent)
            await asyncio.sleep(0)
            still = still + 1 if len(transport.sent) == before else 0

    def _check_bounds(self, connection: BoundedProtocol) -> None:
        assert len(connection._partial_head) <= LIMIT
        assert len(connection.backlog) <= CONNECTION_PIPELINE_BYTES
        assert self.kind.pipeline_queue.waiting_bytes == len(connection.backlog)

    async def _serve(self, route: Route, exchange: HttpExchange) -> None:
        body = b""
        try:
            while True:
                body += await exchange.receive_body()
                if not exchange.more_body:
                    break
        except GatewayError as error:
            exchange.close_after_response()
            exchange.respond(error.status, b"", b"no")
            return
        except ClientClosed:
            return
        assert all(name == name.lower() for name, _ in exchange.headers)
        assert [name for name, _ in exchange.headers].count(b"host") <= 1
        self._add(b"POST", b"", exchange.headers, body)
        exchange.respond(200, b"", b"ok")

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        self._add(scope["method"].encode(), target, scope["headers"], body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def _add(
        self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        # What reads these fields strips them, as httptools does not.
        watched = [(name, value.strip(b" \t")) for name, value in headers if name in _WATCHED]
        fields = tuple(sorted(watched))
        self._served.append(Served(method, target, fields, body))


_CONNECTIONS = Connections(TurnLimit(seconds=math.inf))
_WAITING = Connections(TurnLimit(seconds=-1))


def check(one: Divided) -> None:
    """Check whole connections."""
    whole = _CONNECTIONS.outcome([one.text])
    expected = list(requests_in(one.text))
    assert len(whole.served) <= len(expected), "a request was served that is not there"
    for found, (wanted, _) in zip(whole.served, expected, strict=False):
        assert found.method == wanted.method
        assert found.fields == wanted.fields, "another caller"
        assert found.body == wanted.body, "another body"
        if found.target and wanted.target.startswith(b"/"):
            assert found.target == wanted.target.removesuffix(b"?"), "another target"
    ends = [end for _, end in expected] if one.choice % 2 else []
    forms = [one.pieces(ends)]
    if one.choice % 16 == 0:
        forms.append(one.bytewise())
    for pieces in forms:
        cut = (_WAITING if one.choice % 4 < 2 else _CONNECTIONS).outcome(pieces)
        assert cut.served == whole.served, "cuts change what is served"
        assert cut.statuses == whole.statuses, "cuts change the responses"


def _decoded(pieces: list[bytes], limit: int) -> tuple[bytes, int] | int:
    """A chunked body and its length on the wire; or the status of its error."""
    decoder, body, used = ChunkedDecoder(limit), b"", 0
    try:
        for piece in pieces:
            at = 0
            while at < len(piece) and not decoder.done:
                at, part = decoder.feed(piece, at)
                body += part
                assert len(decoder._partial) <= limit + 300
            used += at
    except GatewayError as error:
        return error.status
    assert decoder.done or used == sum(map(len, pieces)), "bytes were left over"
    return (body, used) if decoder.done else (body, -1)


def check_chunks(one: Divided) -> None:
    """Check a chunked body alone."""
    limit = 8 + 4 * one.choice
    whole = _decoded([one.text], limit)
    assert whole in (400, 431) or isinstance(whole, tuple)
    if isinstance(whole, tuple) and whole[1] >= 0:
        assert whole == _chunks(one.text, 0), "RFC 9112 reads another body"
    assert _decoded(one.pieces(), limit) == whole
    assert _decoded(one.bytewise(), limit) == whole


_KEY = b"Authorization: Bearer lg_anna_secret\r\n"
_POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
_GET = b"GET /health?a=1 HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nx-api-key: lg_ben_x\r\n\r\n"
_UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: a\r\n"
_LENGTH = b"Content-Length: 2\r\n\r\n{}"

_ASKED = _POST + _KEY + _LENGTH
_OPEN = _POST + _KEY + b"X-Rest: "
_SPY = _POST + _LENGTH
# What is no head that is known though its bytes are: the second piece of a request again, and a
# request that was in a field before; then a head that differs in its key alone.
_CUT = [
    seed(text, 3, (255 * at // len(text) + 1, 0, 0, 0, 0))
    for text, at in (
        *((_ASKED + _ASKED[at:], at) for at in (1, 30, 60)),
        (_OPEN + _SPY + _SPY, len(_OPEN)),
        (_ASKED + _ASKED.replace(b"anna", b"enna"), len(_ASKED)),
    )
]

_TEXTS = (
    _GET + b"\r\n",
    _POST + _KEY + _LENGTH,
    _POST + _KEY + _CHUNKED,
    (_POST + _KEY + _LENGTH) * 3,
    _POST + _LENGTH + b"\r\n" + _GET + b"\r\n" + _POST + _CHUNKED,
    _POST + _UPGRADE + _LENGTH + _POST + b"x-api-key: lg_ben_y\r\n" + _LENGTH,
    _POST.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n" + _LENGTH + _GET,
    _POST + b"Expect: 100-continue\r\n" + _LENGTH,
    b"GET http://other/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\r\n\r\n" + _GET + b"Connection: close\r\n\r\n" + _GET + b"\r\n",
    _POST + b"X-Long: " + b"a" * 450 + b"\r\n\r\n",
    _POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    _POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    _POST + b" Folded: 1\r\nA : b\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
)

HEAD = Target(
    "head",
    check,
    (*(seed(text, choice) for choice, text in enumerate(_TEXTS)), *_CUT),
    longest=1024,
)

CHUNKS = Target(
    "chunks",
    check_chunks,
    tuple(
        seed(text, choice)
        for text, choice in (
            (b"3\r\nabc\r\n0\r\n\r\n", 60),
            (b"3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nX: y\r\n\r\nGET", 60),
            (b"3" + b";" + b"x" * 200 + b"\r\nabc\r\n0\r\n\r\n", 0),
            (b"1\r\na\r\n" * 300 + b"0\r\n\r\n", 10),
            (b"0\r\nA: b\r\nC: " + b"d" * 300 + b"\r\n\r\n", 5),
            (b"FFFFFFFFFFFFFFFF\r\nabc", 9),
        )
    ),
    longest=4096,
)
