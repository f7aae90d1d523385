"""Followers: who reads a log from any event on, while it grows or later, at a pace of his own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable

from gateway.batches.event_log import EventLog, EventLogs
from gateway.batches.log_file import LogBroken
from gateway.proxy import sse


class Followers:
    """Readers of logs: any number of each, of which none slows the log or the others.

    One that reads slowly holds nothing in memory: what it has not read yet is on the disk.
    """

    def __init__(self, logs: EventLogs) -> None:
        self._logs = logs
        self.count = 0
        """Those that follow a log now."""
        self._is_cut = False

    def cut(self) -> None:
        """Break those that follow a log which has not ended; they may come again elsewhere."""
        self._is_cut = True
        self._logs.wake()

    async def follow(
        self, name: str, after: int = -1, *, can_return: bool = True
    ) -> AsyncGenerator[bytes, None]:
        """The events of this log with higher numbers than `after`, then those to come.

        Pieces may end within an event. It ends behind the terminal event; a comment comes when
        nothing has for long. Raises: LogBroken, if nothing more will come without a terminal event:
        then break the connection, since its polite end would read as a complete response;
        FileNotFoundError, FolderError. `can_return`: `cut` breaks it, as it may follow again.
        """
        log = await self._logs.open(name)
        self.count += 1
        try:
            async with contextlib.aclosing(
                _pieces(log, after, lambda: can_return and self._is_cut)
            ) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self.count -= 1
            await log.release()


async def _pieces(
    log: EventLog, after: int, is_cut: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    while (offset := await log.find(after + 1)) is None:
        if log.ended:
            return
        if log.broken or is_cut():
            raise LogBroken
        if not await log.wait(log.size):
            yield sse.HEARTBEAT
    while True:
        if is_cut() and not log.ended:
            raise LogBroken
        if piece := await log.read(offset):
            offset += len(piece)
            yield piece
        elif log.ended:
            return
        elif log.broken:
            raise LogBroken
        elif not await log.wait(offset):
            yield sse.HEARTBEAT
