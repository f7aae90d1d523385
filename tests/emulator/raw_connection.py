"""A client on a raw socket, which sees segments, resets and cut chunks as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

LIMIT = 30.0  # seconds any one wait may take


def post(path: str, body: dict[str, Any] | None = None, headers: str = "") -> bytes:
    """The bytes of a request; `headers` are whole lines with their ends."""
    data = json.dumps(body or {}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    )
    return head.encode() + data


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    """A chat of one message, by default streamed."""
    return {"messages": [{"role": "user", "content": text}], "stream": True, **more}


@dataclass(slots=True)
class RawConnection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(LIMIT):
            return await self.reader.readuntil(mark)

    async def head(self) -> bytes:
        return await self.until(b"\r\n\r\n")

    async def rest(self) -> bytes:
        """All bytes to the end of the connection. Raises ConnectionResetError for a RST."""
        async with asyncio.timeout(LIMIT):
            return await self.reader.read()

    async def some(self, seconds: float = LIMIT) -> bytes:
        """The bytes that have come or come next. Raises TimeoutError when none do."""
        async with asyncio.timeout(seconds):
            return await self.reader.read(1 << 20)

    async def leave(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return


@asynccontextmanager
async def raw_connection(url: str, **options: Any) -> AsyncIterator[RawConnection]:
    """A connection to this host and port; `options`: those of `asyncio.open_connection`."""
    to = urlsplit(url)
    reader, writer = await asyncio.open_connection(to.hostname, to.port, limit=1 << 24, **options)
    wire = RawConnection(reader, writer)
    try:
        yield wire
    finally:
        await wire.leave()


def unchunk(data: bytes) -> bytes:
    """The body of a complete chunked message."""
    body = b""
    while True:
        line, _, data = data.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        if size == 0:
            return body
        assert data[size : size + 2] == b"\r\n", "a chunk without its end"
        body, data = body + data[:size], data[size + 2 :]


def events(body: bytes) -> list[Any]:
    """The data of all events, parsed; `[DONE]` stays text."""
    found = []
    for block in body.split(b"\n\n"):
        for line in block.splitlines():
            if line.startswith(b"data: "):
                data = line[6:]
                found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found


def text_of(found: list[Any]) -> str:
    deltas = [e["choices"][0]["delta"] for e in found if e != "[DONE]" and e.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)
