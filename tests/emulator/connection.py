"""One client connection: HTTP/1.1 with the keep-alive behaviour of llama.cpp's server."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import httptools

if TYPE_CHECKING:
    from tests.emulator.node import EmulatedNode
    from tests.emulator.response import Response

_BODY_LIMIT = 64 << 20  # bytes
_BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\nServer: llama.cpp\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)


@dataclass(slots=True)
class ReceivedRequest:
    """One received request. Header names are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    reused: bool  # not the first request of its connection
    keep_alive: bool


class Connection(asyncio.Protocol):
    """Reads requests one after the other; `host.handle` answers each, then calls `finished`."""

    def __init__(self, host: EmulatedNode) -> None:
        self.host = host
        self.served = 0  # requests begun
        self.gone = False
        self.response: Response | None = None
        self.task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport
        self._url, self._headers, self._body = b"", dict[str, str](), bytearray()
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[ReceivedRequest] = deque()
        self._writable: asyncio.Event | None = None
        self._idle: asyncio.TimerHandle | None = None

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is no subclass
        self.host.open_connections.add(self)
        self.host.connections_opened += 1
        self._start_idle_timer()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.write(_BAD_REQUEST)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._stop_idle_timer()
        self._resume()
        self.host.open_connections.discard(self)
        if self.task is not None and self.response is not None and self.response.interruptible:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        self._resume()

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._stop_idle_timer()
        self._url, self._headers, self._body = b"", {}, bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > _BODY_LIMIT:
            self.close()

    def on_message_complete(self) -> None:
        path, _, query = self._url.decode("latin-1").partition("?")
        self._waiting.append(
            ReceivedRequest(
                method=self._parser.get_method().decode("latin-1"),
                path=path,
                query=query,
                headers=self._headers,
                body=bytes(self._body),
                reused=self.served + len(self._waiting) > 0,
                keep_alive=self._parser.should_keep_alive(),
            )
        )
        self._handle_next()

    # Called by a response.

    def write(self, data: bytes) -> None:
        if not self.gone and not self._transport.is_closing():
            self._transport.write(data)

    async def drain(self) -> None:
        if self._writable is not None:
            await self._writable.wait()

    def close(self) -> None:
        self._transport.close()

    def reset(self) -> None:
        sock = self._transport.get_extra_info("socket")
        if sock is not None and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def finished(self, response: Response) -> None:
        self.task = self.response = None
        if response.closing:
            self.close()
        if self.gone or self._transport.is_closing():
            self._waiting.clear()
        elif self._waiting:
            # Not at once: a client that pipelines must not make the stack grow.
            asyncio.get_running_loop().call_soon(self._handle_next)
        else:
            self._start_idle_timer()

    def _handle_next(self) -> None:
        if self.response is None and self._waiting and not self._transport.is_closing():
            request = self._waiting.popleft()
            self.served += 1
            self.host.handle(self, request)

    def _start_idle_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(self.host.keepalive_seconds, self.close)

    def _stop_idle_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _resume(self) -> None:
        if self._writable is not None:
            self._writable.set()
            self._writable = None
