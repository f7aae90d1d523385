"""Benchmarks of servers in this process, among them such as answer as no server should."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from gateway.workshop.bench.exchange import CHAT
from gateway.workshop.bench.load import BenchPlan, Load, Loop, RequestPattern, parse_loads
from gateway.workshop.bench.report import BenchReport, BenchSession
from tests.virtual import now

Handler = Callable[[bytes, bytes, asyncio.StreamWriter], Awaitable[None]]
"""Answers a request, by its head and its body."""

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def plan(url: str, loads: list[Load] | None = None, **options: Any) -> BenchPlan:
    """A plan of a few small requests."""
    options.setdefault("pattern", RequestPattern(64, 8))
    options.setdefault("endpoint", CHAT)
    options.setdefault("warm_up", 1)
    return BenchPlan(url=url, loads=loads or parse_loads(Loop.CLOSED, "2", 4, None), **options)


async def measure(url: str, loads: list[Load] | None = None, **options: Any) -> BenchReport:
    """Measure a server."""
    session = BenchSession(plan(url, loads, **options), clock=now)
    await session.run()
    return session.report()


@asynccontextmanager
async def odd_server(answer: Handler) -> AsyncGenerator[str, None]:
    """A server that answers each request as `answer` does, on a connection of its own; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            body = await reader.readexactly(int(length[1])) if length else b""
            await answer(head, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def answers(data: bytes) -> Handler:
    """Answers these bytes."""

    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return answer


def plain_answer(body: bytes) -> bytes:
    """An answer that is no stream."""
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        len(body),
        body,
    )
