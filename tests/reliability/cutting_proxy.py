"""A TCP proxy in front of a server, which cuts a stream at a chosen event."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from tests.chaos.faulty_link import FaultyLink


@dataclass(slots=True)
class CutPlan:
    """Where the next stream is cut; shared by the proxies of a fleet, of which one cuts."""

    after: int | None = None
    """The cut comes after this many events with data; None: no cut."""
    within: int = 0
    """Bytes of the next event that still pass, so that an event may be cut too."""
    path: bytes = b"POST "
    """Only responses to requests that begin with this are cut."""
    passed: bytes = b""
    """The bytes of the cut stream that had passed, with head and chunk framing."""
    cuts: int = 0

    def arm(self, after: int, within: int = 0) -> None:
        self.after, self.within, self.passed = after, within, b""


class CuttingProxy(FaultyLink):
    """Passes bytes on in both directions until the planned cut."""

    def __init__(self, target: tuple[str, int], plan: CutPlan) -> None:
        super().__init__(target)
        self._plan = plan

    async def _server_to_client(
        self, server_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytearray
    ) -> None:
        seen = b""
        while data := await server_reader.read(65536):
            if data.startswith(b"HTTP/1.1 "):
                seen = b""
            plan = self._plan
            if plan.after is not None and request.startswith(plan.path):
                seen += data
                end = _end_of(seen, plan.after) if b"text/event-stream" in seen[:2048] else None
                if end is not None:
                    plan.passed = seen[: end + plan.within]
                    plan.after = None
                    plan.cuts += 1
                    writer.write(data[: max(0, len(data) - (len(seen) - len(plan.passed)))])
                    await _flushed(writer)
                    writer.transport.abort()
                    return
            writer.write(data)
            await writer.drain()


async def _flushed(writer: asyncio.StreamWriter) -> None:
    """Wait until the kernel has all bytes; an abort would drop the others."""
    while writer.transport.get_write_buffer_size():  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.001)
    # A reset discards bytes that the peer has not read yet.
    await asyncio.sleep(0.02)


def _end_of(seen: bytes, events: int) -> int | None:
    """The end of the given number of events with data; None if they have not come yet."""
    place = 0
    for _ in range(events):
        start = seen.find(b"data: ", place)
        place = seen.find(b"\n\n", start) + 2 if start >= 0 else 1
        if place < 2:
            return None
    return place


@contextlib.asynccontextmanager
async def cutting_proxies(urls: list[str], plan: CutPlan) -> AsyncIterator[list[str]]:
    async with contextlib.AsyncExitStack() as stack:
        targets = [httpx.URL(url) for url in urls]
        proxies = [CuttingProxy((one.host, one.port or 80), plan) for one in targets]
        yield [(await stack.enter_async_context(proxy)).url for proxy in proxies]
