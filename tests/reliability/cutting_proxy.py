"""A TCP proxy in front of a server, which cuts a stream at a chosen event."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

METHODS = (b"GET ", b"POST ")


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
        """Cut the next stream at this place."""
        self.after, self.within, self.passed = after, within, b""


@dataclass(slots=True)
class CuttingProxy:
    """Passes bytes on in both directions until the planned cut."""

    plan: CutPlan
    host: str
    port: int
    url: str = ""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Python 3.11 prints a cancellation in a connection's callback as an error.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                server_reader, server_writer = await asyncio.open_connection(self.host, self.port)
                try:
                    await self._pass(reader, writer, server_reader, server_writer)
                finally:
                    server_writer.transport.abort()
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def close(self) -> None:
        """End all open connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        request_start = bytearray()

        async def forth() -> None:
            while data := await reader.read(65536):
                if data.startswith(METHODS):  # the beginning of a request
                    request_start.clear()
                    request_start.extend(data[:64])
                server_writer.write(data)
                await server_writer.drain()

        sending = asyncio.create_task(forth())
        receiving = asyncio.create_task(self._receive(server_reader, writer, request_start))
        try:
            await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, receiving):
                task.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)

    async def _receive(
        self,
        server_reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request_start: bytearray,
    ) -> None:
        seen = b""
        while data := await server_reader.read(65536):
            if data.startswith(b"HTTP/1.1 "):
                seen = b""
            plan = self.plan
            if plan.after is not None and request_start.startswith(plan.path):
                seen += data
                if b"text/event-stream" in seen[:2048]:
                    end = _end_of(seen, plan.after)
                    if end is not None:
                        cut = min(end + plan.within, len(seen))
                        plan.after = None
                        plan.passed = seen[:cut]
                        plan.cuts += 1
                        writer.write(data[: max(0, len(data) - (len(seen) - cut))])
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
    """Run a proxy in front of each server. Yields the proxies' URLs."""
    async with contextlib.AsyncExitStack() as stack:
        proxies = []
        for url in urls:
            host, _, port = url.removeprefix("http://").partition(":")
            proxy = CuttingProxy(plan, host, int(port))
            server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
            proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            stack.push_async_callback(proxy.close)
            stack.callback(server.close)
            proxies.append(proxy)
        yield [proxy.url for proxy in proxies]
