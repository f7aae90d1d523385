"""A client of the gateway on plain sockets: it can leave at any stage, and read slowly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

SLOW_READS = 512
"""Bytes that a slow client's kernel buffers for it, about."""
SLOW = 3.0
"""Seconds after which a slow client reads as fast as it can."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves with one request; by default it waits for all of the answer."""

    leaves: str | None = None
    """None, `sending` (half the body sent), `waiting` or `reading`."""
    after: float = 0.0
    """`waiting`: seconds after the request; `reading`: bytes of the reply."""
    pause: float = 0.0
    """Seconds of rest after each piece that is read, in the first `SLOW` seconds."""


PATIENT = Manner()


@dataclass(slots=True)
class Got:
    """What one request came to, as its client saw it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    """The reply came to its end, as HTTP tells ends."""
    left: bool = False
    """The client left before that."""
    broke: str | None = None
    """How the connection ended in place of it."""


class _Stale(Exception):  # noqa: N818 - no error: official clients ask again
    """A kept connection was closed before it gave a byte."""


class _Protocol(asyncio.Protocol):
    """One connection, one request after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.got = Got()
        self.arrived = asyncio.Event()
        self.lost: str | None = None
        self.keeps = True
        self._parser = httptools.HttpResponseParser(self)

    def begin(self) -> Got:
        self.got = Got()
        self.keeps = False
        self._parser = httptools.HttpResponseParser(self)
        return self.got

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.lost = f"no HTTP: {error!r}"
            self.transport.abort()
        self.arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = self.lost or ("closed" if exc is None else repr(exc))
        self.arrived.set()

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.got.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.got.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.got.body += data

    def on_message_complete(self) -> None:
        self.got.complete = True
        self.keeps = bool(self._parser.should_keep_alive())


class Client:
    """Keeps one connection, as long as it lasts. An asynchronous context manager."""

    def __init__(self, url: str, *, slow: bool = False) -> None:
        self._address = urlsplit(url)
        self.slow = slow
        self._protocol: _Protocol | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._close()

    async def ask(
        self,
        path: str,
        body: dict[str, Any],
        tag: str,
        manner: Manner = PATIENT,
        limit: float = 30.0,
    ) -> Got:
        """One request and its reply. TimeoutError when it has no end within `limit` seconds."""
        async with asyncio.timeout(limit):
            try:
                return await self._ask(path, body, tag, manner)
            except _Stale:
                return await self._ask(path, body, tag, manner)
            except OSError as error:
                self._close()
                return Got(broke=repr(error))
            except BaseException:
                self._close()
                raise

    async def _ask(self, path: str, body: dict[str, Any], tag: str, manner: Manner) -> Got:
        kept = self._protocol is not None and self._protocol.lost is None
        protocol = self._protocol if kept else await self._connect()
        assert protocol is not None
        self._protocol = protocol
        got = protocol.begin()
        data = msgspec.json.encode(body)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._address.netloc}\r\nx-request-id: {tag}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        ).encode()
        if manner.leaves == "sending":
            protocol.transport.write(head + data[: len(data) // 2])
            await asyncio.sleep(manner.after)
            return self._leave(got)
        protocol.transport.write(head + data)
        try:
            until = manner.after if manner.leaves == "waiting" else None
            async with asyncio.timeout(until):
                await self._read(protocol, got, manner)
        except TimeoutError:
            if manner.leaves != "waiting":
                raise
            return self._leave(got)
        if got.left:
            return self._leave(got)
        if not got.complete:
            if kept and not got.status and not got.body:
                self._close()
                raise _Stale
            got.broke = protocol.lost
        if not protocol.keeps:
            self._close()
        return got

    async def _read(self, protocol: _Protocol, got: Got, manner: Manner) -> None:
        reading = manner.leaves == "reading"
        slow = time.monotonic() + SLOW
        while not got.complete and protocol.lost is None:
            if reading and len(got.body) > manner.after:
                got.left = True
                return
            protocol.arrived.clear()
            await protocol.arrived.wait()
            if manner.pause and time.monotonic() < slow:
                with contextlib.suppress(RuntimeError):
                    protocol.transport.pause_reading()
                await asyncio.sleep(manner.pause)
                with contextlib.suppress(RuntimeError):
                    protocol.transport.resume_reading()

    async def _connect(self) -> _Protocol:
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setblocking(False)
        try:
            if self.slow:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_READS)
            await loop.sock_connect(sock, (self._address.hostname, self._address.port))
            _, protocol = await loop.create_connection(_Protocol, sock=sock)
        except BaseException:
            sock.close()
            raise
        return protocol

    def _leave(self, got: Got) -> Got:
        got.left = not got.complete
        self._close()
        return got

    def _close(self) -> None:
        if self._protocol is not None:
            self._protocol.transport.abort()
            self._protocol = None
