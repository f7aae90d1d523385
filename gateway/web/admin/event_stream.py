"""Server-sent events of the admin listener, for clients that may stop reading at any time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
import structlog
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

log = structlog.get_logger()


class EventStream(StreamingResponse):
    """A response of events, each a whole one or a part.

    A client that takes none for `stall_seconds` is cut off. `on_end` is awaited at the end,
    whether the client has got everything, has left, or was never sent anything.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        stall_seconds: float,
        on_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers)
        self._events = events
        self._stall_seconds = stall_seconds
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the events; they end when the client leaves."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._on_end is not None:
                await self._on_end()

    async def stream_response(self, send: Send) -> None:
        """Send each event as it comes."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        try:
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    async with asyncio.timeout(self._stall_seconds):
                        await send(_body(event, more=True))
        except TimeoutError:
            # Without its end, the response closes the connection.
            log.info("a watcher was cut off", why=f"it read nothing for {self._stall_seconds} s")
            return
        await send(_body(b"", more=False))


def _body(content: bytes, *, more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": content, "more_body": more}


def encode_event(name: str, value: object) -> bytes:
    """One event, whose data is JSON in one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
