"""A client of the gateway on plain sockets, which can leave at any stage and read slowly."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self
from urllib.parse import urlsplit

import httptools
import msgspec

from tests.known import known

SMALL_BUFFER = 512
"""Bytes that a client keeps unread, and of a slow one's receive buffer (the kernel rounds up)."""
SLOW_SECONDS = 3.0  # seconds after which a slow client reads at full speed


@dataclass(frozen=True, slots=True)
class ClientBehaviour:
    """How a client behaves during one request; by default it reads the whole response."""

    leaves_while: str | None = None
    """The stage in which it leaves: None, `sending` (half the body), `waiting` or `reading`."""
    after: float = 0.0  # `waiting`: seconds after the request; `reading`: bytes of the response
    pause: float = 0.0  # seconds without reading after each read, during the first `SLOW_SECONDS`


READS_TO_END = ClientBehaviour()


@dataclass(slots=True)
class ReceivedResponse:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False  # by HTTP's framing
    left: bool = False  # the client left before the end
    broke: str | None = None  # how the connection ended before the response did


class _Parsing:
    """Fills in a response; httptools calls it."""

    def __init__(self, response: ReceivedResponse) -> None:
        self.response = response
        self.keep_alive = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.response.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.response.body += data

    def on_message_complete(self) -> None:
        self.response.complete = True
        self.keep_alive = bool(self.parser.should_keep_alive())


class Client:
    """Sends requests over one connection while it lasts. An asynchronous context manager."""

    def __init__(
        self,
        url: str,
        *,
        slow: bool = False,
        headers: Mapping[str, str] = MappingProxyType({}),
        source: str = "",
    ) -> None:
        """`source`: the address from which it connects."""
        self._address = urlsplit(url)
        self._source = source
        self._header_lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.slow = slow
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

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
        request = self._request(path, body, request_id)
        async with asyncio.timeout(limit):
            try:
                first = await self._send_once(*request, behaviour)
                return first or known(await self._send_once(*request, behaviour))
            except OSError as error:
                self.close()
                return ReceivedResponse(broke=repr(error))
            except BaseException:
                self.close()
                raise

    def _request(self, path: str, body: dict[str, Any], request_id: str) -> tuple[bytes, bytes]:
        data = msgspec.json.encode(body)
        named = f"x-request-id: {request_id}\r\n" if request_id else ""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._address.netloc}\r\n{self._header_lines}{named}"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        return head.encode(), data

    async def _send_once(
        self, head: bytes, data: bytes, behaviour: ClientBehaviour
    ) -> ReceivedResponse | None:
        """Send it; None if a kept connection was closed meanwhile: official clients retry."""
        reused = self._open is not None
        reader, writer = await self.connected()
        response = ReceivedResponse()
        if behaviour.leaves_while == "sending":
            writer.write(head + data[: len(data) // 2])
            await asyncio.sleep(behaviour.after)
            return self._leave(response)
        writer.write(head + data)
        parsing = _Parsing(response)
        waits = behaviour.after if behaviour.leaves_while == "waiting" else None
        try:
            async with asyncio.timeout(waits):
                leaves = await _read(reader, parsing, behaviour)
        except TimeoutError:
            leaves = True
        if leaves:
            return self._leave(response)
        if not parsing.keep_alive:
            self.close()
        return None if reused and response.broke and not response.status else response

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Its connection, a new one if it has none."""
        if self._open is None:
            sock = socket.socket()
            sock.setblocking(False)
            try:
                if self.slow:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
                if self._source:
                    sock.bind((self._source, 0))
                address = (self._address.hostname, self._address.port)
                await asyncio.get_running_loop().sock_connect(sock, address)
                limit = SMALL_BUFFER if self.slow else 1 << 16
                self._open = await asyncio.open_connection(sock=sock, limit=limit)
            except BaseException:
                sock.close()
                raise
        return self._open

    def _leave(self, response: ReceivedResponse) -> ReceivedResponse:
        response.left = not response.complete
        self.close()
        return response

    def close(self) -> None:
        if self._open is not None:
            self._open[1].transport.abort()
            self._open = None


async def _read(
    reader: asyncio.StreamReader, parsing: _Parsing, behaviour: ClientBehaviour
) -> bool:
    """Read to the end of the response or of its connection; whether the client leaves before."""
    response = parsing.response
    slow_until = time.monotonic() + SLOW_SECONDS
    while not response.complete:
        if behaviour.leaves_while == "reading" and len(response.body) > behaviour.after:
            return True
        try:
            if data := await reader.read(65536):
                parsing.parser.feed_data(data)
            else:
                response.broke = "closed"
        except (OSError, httptools.HttpParserError) as error:
            response.broke = repr(error)
        if response.broke:
            return False
        if behaviour.pause and time.monotonic() < slow_until:
            await asyncio.sleep(behaviour.pause)
    return False
