"""A client that follows a background response, and goes on where it was when its stream breaks."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from gateway.stored.response_log import TERMINAL_TYPES, split_events


@dataclass
class Follower:
    """What a client has had of a response: each event must be the next one."""

    path: str
    """`/v1/responses/ID`."""
    events: list[dict[str, Any]] = field(default_factory=list)
    data: bytes = b""
    """The events as they came, without comments."""

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and self.events[-1]["type"] in TERMINAL_TYPES

    @property
    def text(self) -> str:
        kind = "response.output_text.delta"
        return "".join(one["delta"] for one in self.events if one["type"] == kind)

    async def run(
        self, client: httpx.AsyncClient, seconds: float, until_event: int | None = None
    ) -> None:
        """Follow to the end, or until this event, again and again if the stream breaks."""
        async with asyncio.timeout(seconds):
            while not self.has_ended and (until_event is None or len(self.events) <= until_event):
                with contextlib.suppress(httpx.TransportError):
                    assert await self.follow(client, until_event) == 200
                await asyncio.sleep(0.02)

    async def follow(self, client: httpx.AsyncClient, until_event: int | None = None) -> int:
        """Follow until the stream breaks or ends, or until this event; returns the status."""
        asked: dict[str, Any] = {"stream": "true"}
        asked |= {"starting_after": len(self.events) - 1} if self.events else {}
        async with client.stream("GET", self.path, params=asked) as reply:
            rest = b""
            if reply.status_code != 200:
                return reply.status_code
            async for piece in reply.aiter_raw():
                whole, end, rest = (rest + piece).rpartition(b"\n\n")
                for event in split_events(whole + end):
                    self._take(event)
                if until_event is not None and len(self.events) > until_event:
                    break
            return reply.status_code

    def _take(self, event: bytes) -> None:
        lines = [line for line in event.split(b"\n") if line and not line.startswith(b":")]
        if not lines:
            return  # a heartbeat
        value = msgspec.json.decode(lines[1].removeprefix(b"data: "))
        assert value["sequence_number"] == len(self.events)
        self.events.append(value)
        self.data += b"\n".join(lines) + b"\n\n"
