"""A request's body, read within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import io

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.relay.large import LARGE
from gateway.web.public.buffered import Buffered, Share
from gateway.web.public.turn import Turn

MARK = b"\xef\xbb\xbf"
"""The byte order mark that some clients put in front of UTF-8."""

SIMPLE = 4 * 1024
"""Bytes of a body below which it takes no more than a moment, whatever it holds."""
MOST_CONTAINERS = 1000
"""Objects and lists of a body that are looked at in passing: 0.3 ms. Beyond, a small body waits for
its turn: 60 kB hold 20,000, 6-9 ms, and one client may send hundreds of them at once."""

WORKING = 8 << 20
"""Bytes that are made of a large body at most while it is prepared: a piece, and its beginning
parsed (`relay/structure.py`)."""


def takes_turns(body: bytes) -> bool:
    """Whether it takes milliseconds to prepare, being large or of very many objects and lists."""
    return len(body) >= LARGE or body.count(b"{") + body.count(b"[") > MOST_CONTAINERS


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
    # It grows in place, and gives its bytes away without a copy.
    whole = io.BytesIO()
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
                whole.write(part)
                if not turn.more_body and not turn.body:
                    return whole.getvalue()
                limit.reschedule(began + limits.body_timeout + size / limits.body_rate)
    except TimeoutError:
        raise errors.request_timeout("The body took too long to arrive.") from None
    finally:
        share.refuse = None
