"""A client of the gateway on plain sockets, which can leave at any stage and read slowly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

SLOW_RECEIVE_BUFFER = 512
"""Bytes of a slow client's receive buffer (the kernel rounds it up)."""
SLOW_SECONDS = 3.0
"""Seconds after which a slow client reads at full speed."""


@dataclass(frozen=True, slots=True)
class ClientBehaviour:
    """How a client behaves during one request; by default it reads the whole response."""

    leaves_while: str | None = None
    """The stage in which it leaves: None, `sending` (half the body), `waiting` or `reading`."""
    after: float = 0.0
    """`waiting`: seconds after the request; `reading`: bytes of the response."""
    pause: float = 0.0
    """Seconds without reading after each read, during the first `SLOW_SECONDS`."""


READS_TO_END = ClientBehaviour()


@dataclass(slots=True)
class ReceivedResponse:
    """The response to one request as its client received it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    """Whether the response came to its end by HTTP's framing."""
    left: bool = False
    """Whether the client left before the end."""
    broke: str | None = None
    """How the connection ended before the response did."""


class _StaleConnection(Exception):  # noqa: N818 - no error: official clients retry
    """A reused-alive connection was closed before the first byte of the response."""


class _ClientProtocol(asyncio.Protocol):
    """One connection, one request after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.response = ReceivedResponse()
        self.arrived = asyncio.Event()
        self.lost: str | None = None
        self.keep_alive = True
        self._parser = httptools.HttpResponseParser(self)

    def begin(self) -> ReceivedResponse:
        self.response = ReceivedResponse()
        self.keep_alive = False
        self._parser = httptools.HttpResponseParser(self)
        return self.response

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
        self.response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.response.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.response.body += data

    def on_message_complete(self) -> None:
        self.response.complete = True
        self.keep_alive = bool(self._parser.should_keep_alive())


class Client:
    """Sends requests over one connection while it lasts. An asynchronous context manager."""

    def __init__(
        self, url: str, *, slow: bool = False, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._address = urlsplit(url)
        self._header_lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.slow = slow
        self._protocol: _ClientProtocol | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._close()

    async def send(
        self,
        path: str,
        body: dict[str, Any],
        request_id: str = "",
        behaviour: ClientBehaviour = READS_TO_END,
        limit: float = 30.0,
    ) -> ReceivedResponse:
        """Send a request and read its response; with no id, the gateway makes one.

        Raises TimeoutError when the response has not ended within `limit` seconds.
        """
        async with asyncio.timeout(limit):
            try:
                with contextlib.suppress(_StaleConnection):
                    return await self._send_once(path, body, request_id, behaviour)
                return await self._send_once(path, body, request_id, behaviour)
            except OSError as error:
                self._close()
                return ReceivedResponse(broke=repr(error))
            except BaseException:
                self._close()
                raise

    async def _send_once(
        self, path: str, body: dict[str, Any], request_id: str, behaviour: ClientBehaviour
    ) -> ReceivedResponse:
        reused = self._protocol is not None and self._protocol.lost is None
        protocol = self._protocol if reused else await self._connect()
        assert protocol is not None
        self._protocol = protocol
        response = protocol.begin()
        data = msgspec.json.encode(body)
        named = f"x-request-id: {request_id}\r\n" if request_id else ""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._address.netloc}\r\n"
            f"{self._header_lines}{named}"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        ).encode()
        if behaviour.leaves_while == "sending":
            protocol.transport.write(head + data[: len(data) // 2])
            await asyncio.sleep(behaviour.after)
            return self._leave(response)
        protocol.transport.write(head + data)
        try:
            until = behaviour.after if behaviour.leaves_while == "waiting" else None
            async with asyncio.timeout(until):
                await self._read(protocol, response, behaviour)
        except TimeoutError:
            if behaviour.leaves_while != "waiting":
                raise
            return self._leave(response)
        if response.left:
            return self._leave(response)
        if not response.complete:
            if reused and not response.status and not response.body:
                self._close()
                raise _StaleConnection
            response.broke = protocol.lost
        if not protocol.keep_alive:
            self._close()
        return response

    async def _read(
        self, protocol: _ClientProtocol, response: ReceivedResponse, behaviour: ClientBehaviour
    ) -> None:
        reading = behaviour.leaves_while == "reading"
        slow_until = time.monotonic() + SLOW_SECONDS
        while not response.complete and protocol.lost is None:
            if reading and len(response.body) > behaviour.after:
                response.left = True
                return
            protocol.arrived.clear()
            await protocol.arrived.wait()
            if behaviour.pause and time.monotonic() < slow_until:
                with contextlib.suppress(RuntimeError):
                    protocol.transport.pause_reading()
                await asyncio.sleep(behaviour.pause)
                with contextlib.suppress(RuntimeError):
                    protocol.transport.resume_reading()

    async def _connect(self) -> _ClientProtocol:
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setblocking(False)
        try:
            if self.slow:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_RECEIVE_BUFFER)
            await loop.sock_connect(sock, (self._address.hostname, self._address.port))
            _, protocol = await loop.create_connection(_ClientProtocol, sock=sock)
        except BaseException:
            sock.close()
            raise
        return protocol

    def _leave(self, response: ReceivedResponse) -> ReceivedResponse:
        response.left = not response.complete
        self._close()
        return response

    def _close(self) -> None:
        if self._protocol is not None:
            self._protocol.transport.abort()
            self._protocol = None
