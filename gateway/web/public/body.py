"""A request's body, read within limits of size, time and memory.

The memory for bodies is shared between callers (`access/holdings.py`): where it is full, the newest
body of whoever holds most, that is still being read or whose request waits, goes for another's.
Bytes count as they come: to announce many costs nothing, so it counts for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway import errors
from gateway.access.holdings import RESERVE, Holdings, Share, usual
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.web.public.turn import Turn

BUSY_RETRY = 2.0
"""Seconds to advise when the memory for bodies is used up."""

MOST_YIELDING = 64
"""Bodies of one caller that go for one piece of another's."""

RefuseWaiting = Callable[[str, str, GatewayError], Share | None]
"""Ends the newest request of a caller's user that waits, and tells its share; None: none waits."""


def _no_one_waits(_: str, __: str, ___: GatewayError) -> Share | None:
    return None


@dataclass(slots=True, eq=False)
class Reading:
    """A body that is still coming."""

    turn: Turn
    share: Share
    ended: GatewayError | None = None
    """Why no more of it is read."""

    def end(self, error: GatewayError) -> None:
        """Read no more of it; its client gets `error`."""
        self.ended = error
        self.turn.spoil(error)


@dataclass(slots=True)
class Buffered:
    """Bytes of request bodies held by the whole process."""

    holdings: Holdings = field(default_factory=Holdings)
    refuse_waiting: RefuseWaiting = field(default=_no_one_waits, repr=False)
    _reading: dict[str, dict[Reading, None]] = field(default_factory=dict)
    """Those that come in pieces, by caller, the oldest first."""

    @property
    def held(self) -> int:
        """All together."""
        return self.holdings.total

    @property
    def reading(self) -> int:
        """How many bodies are still coming."""
        return sum(map(len, self._reading.values()))

    def take(self, share: Share, size: int, limit: int) -> None:
        """Count more bytes to a share; others may have to make room for them.

        Raises: GatewayError 429 when there is none.
        """
        holdings = self.holdings
        if holdings.total + size > limit - limit // RESERVE:
            self._make_room(share, size, limit)
        holdings.add(share.caller, size, share.user)
        share.size += size

    def release(self, share: Share, size: int | None = None) -> None:
        """So many bytes of this share are gone, or all that are left of it."""
        size = share.size if size is None else min(size, share.size)
        if size:
            self.holdings.remove(share.caller, size, share.user)
            share.size -= size

    def begins(self, reading: Reading) -> None:
        """More of this body is to come."""
        self._reading.setdefault(reading.share.caller, {})[reading] = None

    def ends(self, reading: Reading) -> None:
        """It is all here, or never will be."""
        own = self._reading[reading.share.caller]
        del own[reading]
        if not own:
            del self._reading[reading.share.caller]

    def _make_room(self, share: Share, size: int, limit: int) -> None:
        holdings, most = self.holdings, usual(limit)
        larger = holdings.yielding(share.caller, size, most, share.user)
        for caller in larger:
            for _ in range(MOST_YIELDING):
                if holdings.total + size <= most:
                    return
                if not (self._is_larger(caller, share, size) and self._yields(caller)):
                    break
        # What can't yield, since it runs, leaves the reserve; and so does a caller's only body.
        only = holdings.of(share.caller) == share.size
        if (larger or only) and holdings.total + size <= limit:
            return
        raise errors.queue_full("The memory for request bodies is used up.", BUSY_RETRY)

    def _is_larger(self, caller: str, share: Share, size: int) -> bool:
        """Whether it holds more than the share's party would have by now, or one of its users."""
        holdings = self.holdings
        if caller == share.caller:
            return holdings.larger_user(caller, size, share.user) is not None
        return holdings.of(caller) > holdings.of(share.caller) + size

    def _yields(self, caller: str) -> bool:
        """Let the newest body of a caller go; whether there is one that can."""
        error = errors.queue_full(
            "The memory for request bodies is used up, and this client holds most of it.",
            BUSY_RETRY,
        )
        for user in self.holdings.user_order(caller):
            newest = self._newest_reading(caller, user)
            if newest is not None:
                newest.end(error)
                self.release(newest.share)
                return True
            share = self.refuse_waiting(caller, user, error)
            if share is not None:
                self.release(share)
                return True
        return False

    def _newest_reading(self, caller: str, user: str) -> Reading | None:
        for reading in reversed(self._reading.get(caller, {})):
            if reading.share.user == user and reading.share.size and reading.ended is None:
                return reading
        return None


def take_body(turn: Turn, limits: LimitSettings, buffered: Buffered, share: Share) -> bytes | None:
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
    buffered.take(share, len(body), limits.buffered_bytes)
    return body


async def read_body(turn: Turn, limits: LimitSettings, buffered: Buffered, share: Share) -> bytes:
    """A body that comes in several pieces, as fast as it must.

    Its bytes stay counted in `buffered` until the caller releases them. Raises: GatewayError 408,
    413, 429; ClientClosed.
    """
    began = asyncio.get_running_loop().time()
    size = 0
    parts: list[bytes] = []
    reading = Reading(turn, share)
    buffered.begins(reading)
    try:
        async with asyncio.timeout(limits.body_timeout) as limit:
            while True:
                part = await turn.read()
                if reading.ended is not None:
                    raise reading.ended
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
        buffered.ends(reading)
