"""One response, in the form of llama.cpp's server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.emulator.connection import Connection

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Payload Too Large",
    422: "Unprocessable Content",
    429: "Too Many Requests",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
JSON = "application/json; charset=utf-8"
_LAST_CHUNK = b"0\r\n\r\n"


class ClientGoneError(Exception):
    """The connection has ended, so the response can't be sent."""


class Response:
    """Writes the response to one request. After the client has left, writes do nothing."""

    def __init__(self, link: Connection, *, closing: bool, closes_streams: bool) -> None:
        self.connection = link
        self.closing = closing  # the connection ends with this response
        self.closes_streams = closes_streams
        self.interruptible = False  # the work ends when the client leaves
        self.error_event = b""  # in the form of the request's API; for faults

    def _head(self, status: int, headers: Sequence[tuple[str, str]]) -> bytes:
        reason = REASONS.get(status, "Unknown")
        head = [f"HTTP/1.1 {status} {reason}", "Server: llama.cpp", "Access-Control-Allow-Origin: "]
        head += [f"{name}: {value}" for name, value in headers]
        if status >= 400:
            self.closing = True
        head.append("Connection: close" if self.closing else "Keep-Alive: timeout=5, max=100")
        return ("\r\n".join(head) + "\r\n\r\n").encode()

    def _plain_head(self, status: int, kind: str, size: int, more: dict[str, str]) -> bytes:
        headers = [("Content-Type", kind), ("Content-Length", str(size)), *more.items()]
        return self._head(status, headers)

    def _stream_head(self) -> bytes:
        headers = [
            ("X-Accel-Buffering", "no"),
            ("Content-Type", "text/event-stream"),
            ("Transfer-Encoding", "chunked"),
        ]
        head = self._head(200, headers)
        # The real server announces keep-alive here and closes nevertheless.
        self.closing = self.closing or self.closes_streams
        return head

    def write_plain(
        self, status: int, body: bytes, kind: str = JSON, headers: dict[str, str] | None = None
    ) -> None:
        head = self._plain_head(status, kind, len(body), headers or {})
        self.connection.write(head + body)

    async def plain(
        self, status: int, body: bytes, kind: str = JSON, headers: dict[str, str] | None = None
    ) -> None:
        self.write_plain(status, body, kind, headers)

    async def open_stream(self) -> None:
        self.connection.write(self._stream_head())

    async def events(self, events: Sequence[bytes]) -> None:
        self.connection.write(_chunk(b"".join(events)))
        await self.connection.drain()

    async def comment(self) -> None:
        """Sends the comment by which the server keeps a connection alive during a long prefill."""
        self.connection.write(b"3\r\n:\n\n\r\n")

    async def end_stream(self, last: Sequence[bytes]) -> None:
        if last:
            await self.events(last)
        self.connection.write(_LAST_CHUNK)


class ProxiedResponse(Response):
    """The response of a router, which passes on what the server of a model writes."""

    begun = False
    mute = False  # the server is to end, and does not before it is killed

    def write_plain(
        self, status: int, body: bytes, kind: str = JSON, headers: dict[str, str] | None = None
    ) -> None:
        more = list((headers or {}).items())
        if status >= 400 or self.closing:
            more.append(("Connection", "close"))  # the router adds its own to it
        self._write_chunk(status, body, kind, more)

    async def open_stream(self) -> None:
        self.begun = True
        await super().open_stream()

    async def break_off(self) -> None:
        """What a client gets when the model's server dies: even a stream is ended as if whole."""
        if self.mute:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        self.fail("Failed to read connection")

    def fail(self, reason: str) -> None:
        body = f"proxy error: {reason}".encode()
        if self.begun:
            self.connection.write(_chunk(body) + _LAST_CHUNK)
        else:
            self._write_chunk(500, body, JSON, [])

    def _write_chunk(
        self, status: int, body: bytes, kind: str, more: list[tuple[str, str]]
    ) -> None:
        items = [*more, ("X-Accel-Buffering", "no"), ("Content-Type", kind)]
        head = self._head(status, [*items, ("Transfer-Encoding", "chunked")])
        self.connection.write(head + _chunk(body) + _LAST_CHUNK)
        self.closing = self.closing or self.closes_streams


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
