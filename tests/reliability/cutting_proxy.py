"""A TCP proxy in front of a server that breaks a stream off at a chosen event."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

METHODS = (b"GET ", b"POST ")


@dataclass(slots=True)
class CutPlan:
    """Shared by the proxies of a fleet: the next stream to get so far is cut, and no other."""

    after: int | None = None
    """Events with data, the stream's first included; None: nothing is cut."""
    within: int = 0
    """Bytes of the next event that still pass, so that half a one may be the last."""
    path: bytes = b"POST "
    """Only replies to requests that begin so count."""
    passed: bytes = b""
    """What of the stream that was cut had passed, chunk framing included."""
    cuts: int = 0

    def arm(self, after: int, within: int = 0) -> None:
        """Cut the next stream there."""
        self.after, self.within, self.passed = after, within, b""


@dataclass(slots=True)
class CuttingProxy:
    """Passes bytes on in both directions, until the plan says that this is enough."""

    plan: CutPlan
    host: str
    port: int
    url: str = ""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Python 3.11 prints what is cancelled in here as an error.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                there, back = await asyncio.open_connection(self.host, self.port)
                try:
                    await self._pass(reader, writer, there, back)
                finally:
                    back.transport.abort()
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def close(self) -> None:
        """End what is still open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there: asyncio.StreamReader,
        back: asyncio.StreamWriter,
    ) -> None:
        asked = bytearray()

        async def forth() -> None:
            while data := await reader.read(65536):
                if data.startswith(METHODS):  # and is no further piece of a request
                    asked.clear()
                    asked.extend(data[:64])
                back.write(data)
                await back.drain()

        sending = asyncio.create_task(forth())
        receiving = asyncio.create_task(self._receive(there, writer, asked))
        try:
            await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, receiving):
                task.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)

    async def _receive(
        self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytearray
    ) -> None:
        seen = b""
        while data := await there.read(65536):
            if data.startswith(b"HTTP/1.1 "):
                seen = b""
            plan = self.plan
            if plan.after is not None and asked.startswith(plan.path):
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
    """Wait until the kernel has it all, for an abort drops what it has not."""
    while writer.transport.get_write_buffer_size():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.001)
    # A reset overtakes what the reader has not read yet.
    await asyncio.sleep(0.02)


def _end_of(seen: bytes, events: int) -> int | None:
    """Where so many events with data end, if they have come."""
    place = 0
    for _ in range(events):
        start = seen.find(b"data: ", place)
        place = seen.find(b"\n\n", start) + 2 if start >= 0 else 1
        if place < 2:
            return None
    return place


@contextlib.asynccontextmanager
async def cutting_proxies(urls: list[str], plan: CutPlan) -> AsyncIterator[list[str]]:
    """A proxy in front of each of these servers; gives the proxies' URLs."""
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
