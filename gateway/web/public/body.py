"""A request's body, read within limits of size, time and memory."""

from __future__ import annotations

import asyncio

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.web.public.buffered import Buffered, Share
from gateway.web.public.turn import Turn


def take_body(turn: Turn, limits: LimitSettings, buffered: Buffered) -> bytes | None:
    """The whole body if it is here already and small; else None, and `read_body` is to be asked.

    Its bytes stay counted in `buffered.held` until the caller takes them off. Raises: GatewayError
    413.
    """
    if turn.length > limits.body_bytes:
        raise errors.body_too_large(limits.body_bytes)
    if turn.more_body:
        return None
    size = len(turn.body)
    if size > limits.body_bytes:
        raise errors.body_too_large(limits.body_bytes)
    if turn.disconnected or not buffered.takes_small(size, limits.buffered_bytes):
        return None
    return turn.take()


async def read_body(turn: Turn, limits: LimitSettings, buffered: Buffered, share: Share) -> bytes:
    """A body that is large, or comes in several pieces, as fast as it must.

    Its bytes stay counted in `share` until the caller releases it. Raises: GatewayError 408, 413,
    429; ClientClosed.
    """
    here = not turn.more_body
    if here:
        body = turn.take()
        buffered.take(share, len(body), limits.buffered_bytes)
        return body
    began = asyncio.get_running_loop().time()
    size = 0
    parts: list[bytes] = []
    ended: list[GatewayError] = []

    def end(error: GatewayError) -> bool:
        """Read no more of it."""
        ended.append(error)
        turn.spoil(error)
        return True

    share.refuse = end
    try:
        async with asyncio.timeout(limits.body_timeout) as limit:
            while True:
                part = await turn.read()
                if ended:
                    raise ended[0]
                buffered.take(share, len(part), limits.buffered_bytes)
                size += len(part)
                if size > limits.body_bytes:
                    raise errors.body_too_large(limits.body_bytes)
                parts.append(part)
                if not turn.more_body and not turn.body:
                    return b"".join(parts)
                limit.reschedule(began + limits.body_timeout + size / limits.body_rate)
    except TimeoutError:
        raise errors.request_timeout("The body took too long to arrive.") from None
    finally:
        share.refuse = None
