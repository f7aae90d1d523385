"""A request's body, read within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeVar

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.web.public.turn import Turn

T = TypeVar("T")

MARK = b"\xef\xbb\xbf"
"""The byte order mark that some clients put in front of UTF-8."""

WORKING = 8 << 20
"""Bytes that are made of a large body at most while it is prepared: a piece, and its beginning
parsed (`relay/structure.py`)."""

BUSY_RETRY = 2.0
"""Seconds to advise when the memory for bodies is used up."""


@dataclass(slots=True)
class Buffered:
    """Bytes of request bodies held by the whole process."""

    held: int = 0

    def take(self, size: int, limit: int) -> None:
        """Count more bytes. Raises: GatewayError 429 when they pass the limit."""
        if self.held + size > limit:
            raise errors.queue_full("The memory for request bodies is used up.", BUSY_RETRY)
        self.held += size

    def release(self, size: int) -> None:
        """These bytes are gone."""
        self.held -= size


@dataclass(slots=True)
class Steps:
    """Runs what takes many steps, one step of all such work in each round of the event loop."""

    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, work: Generator[None, None, T]) -> T:
        """Run it to its end, whose value it returns."""
        try:
            while True:
                async with self._turn:
                    next(work)
                    # Whoever waits for the turn has it in the next round.
                    await asyncio.sleep(0)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            work.close()


def take_body(turn: Turn, limits: LimitSettings, buffered: Buffered) -> bytes | None:
    """The whole body if it is here already; else None, and `read_body` is to be asked.

    Its bytes stay counted in `buffered` until the caller releases them. Raises: GatewayError 413,
    429; ClientClosed.
    """
    if turn.length > limits.body_bytes:
        raise errors.body_too_large(limits.body_bytes)
    if turn.more_body:
        return None
    body = turn.take()
    if len(body) > limits.body_bytes:
        raise errors.body_too_large(limits.body_bytes)
    buffered.take(len(body), limits.buffered_bytes)
    return body


async def read_body(turn: Turn, limits: LimitSettings, buffered: Buffered) -> bytes:
    """A body that comes in several pieces, as fast as it must.

    Raises: GatewayError 408, 413, 429; ClientClosed.
    """
    began = asyncio.get_running_loop().time()
    size = 0
    # It grows in place, and gives its bytes away without a copy.
    whole = io.BytesIO()
    try:
        async with asyncio.timeout(limits.body_timeout) as limit:
            while True:
                part = await turn.read()
                buffered.take(len(part), limits.buffered_bytes)
                size += len(part)
                if size > limits.body_bytes:
                    raise errors.body_too_large(limits.body_bytes)  # noqa: TRY301
                whole.write(part)
                if not turn.more_body and not turn.body:
                    return whole.getvalue()
                limit.reschedule(began + limits.body_timeout + size / limits.body_rate)
    except TimeoutError:
        buffered.release(size)
        raise errors.request_timeout("The body took too long to arrive.") from None
    except BaseException:
        buffered.release(size)
        raise
