"""A request's body, read within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from gateway import errors
from gateway.access.fair_share import RESERVE_DIVISOR, FairShare, soft_limit
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.proxy.inbound.large_body import LARGE_BODY_BYTES
from gateway.web.http_exchange import HttpExchange

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""The byte order mark that some clients put in front of UTF-8."""

SMALL_BODY_BYTES = 4 * 1024
"""Bytes of a body below which it takes no more than a moment, whatever it holds."""

MOST_JSON_CONTAINERS = 1000
"""Objects and lists of a body that are looked at in passing: 0.3 ms. Beyond, a small body waits for
its turn: 60 kB hold 20,000, 6-9 ms, and one client may send hundreds of them at once."""

PARSE_WORKING_BYTES = 8 << 20
"""Bytes that are made of a large body at most while it is prepared: a piece, and its beginning
parsed (`proxy/inbound/json_outline.py`)."""


def is_slow_to_parse(body: bytes) -> bool:
    """Whether it takes milliseconds to prepare, being large or of very many objects and lists."""
    return (
        len(body) >= LARGE_BODY_BYTES or body.count(b"{") + body.count(b"[") > MOST_JSON_CONTAINERS
    )


def take_small_body(
    exchange: HttpExchange, limits: LimitSettings, body_memory: BodyMemory
) -> bytes | None:
    """The whole body if it is here already and small; else None, and `read_body` is to be asked.

    Its bytes stay counted in `buffered.held` until the caller takes them off. Raises: GatewayError
    413.
    """
    if exchange.length > limits.body_bytes:
        raise errors.body_too_large(limits.body_bytes)
    if exchange.more_body:
        return None
    size = len(exchange.body)
    if size > limits.body_bytes:
        raise errors.body_too_large(limits.body_bytes)
    if exchange.disconnected or not body_memory.allocate_small(size, limits.buffered_bytes):
        return None
    return exchange.take_body()


async def read_body(
    exchange: HttpExchange,
    limits: LimitSettings,
    body_memory: BodyMemory,
    allocation: BodyAllocation,
) -> bytes:
    """A body that is large, or comes in several pieces, as fast as it must.

    Its bytes stay counted in `share` until the caller releases it. Raises: GatewayError 408, 413,
    429; ClientClosed.
    """
    here = not exchange.more_body
    if here:
        body = exchange.take_body()
        body_memory.allocate(allocation, len(body), limits.buffered_bytes)
        return body
    began = asyncio.get_running_loop().time()
    size = 0
    # It grows in place, and gives its bytes away without a copy.
    whole = io.BytesIO()
    ended: list[GatewayError] = []

    def end(error: GatewayError) -> bool:
        """Read no more of it."""
        ended.append(error)
        exchange.fail_body(error)
        return True

    allocation.evict = end
    try:
        async with asyncio.timeout(limits.body_timeout) as limit:
            while True:
                part = await exchange.receive_body()
                if ended:
                    raise ended[0]
                body_memory.allocate(allocation, len(part), limits.buffered_bytes)
                size += len(part)
                if size > limits.body_bytes:
                    raise errors.body_too_large(limits.body_bytes)
                whole.write(part)
                if not exchange.more_body and not exchange.body:
                    return whole.getvalue()
                limit.reschedule(began + limits.body_timeout + size / limits.body_rate)
    except TimeoutError:
        raise errors.request_timeout("The body took too long to arrive.") from None
    finally:
        allocation.evict = None


BODY_MEMORY_RETRY_AFTER = 2.0
"""Seconds to advise when the memory for bodies is used up."""

SMALL_BODY_SHIFT = 14
"""A body is small up to the memory / 2**14: 64 KiB of the default of 1 GiB."""

MOST_BODY_VICTIMS = 64
"""Bodies of one caller that are asked to go for one piece of another's, and go for it."""


@dataclass(slots=True, eq=False)
class BodyAllocation:
    """What one body holds of the memory, and whose it is."""

    caller: str
    user: str
    """Its party: the caller itself, or a user that it names."""
    size: int = 0
    evict: Callable[[GatewayError], bool] | None = None
    """Ends its request with an error, unless it runs: then False. None: it does."""


@dataclass(slots=True)
class BodyMemory:
    """Bytes of request bodies held by the whole process."""

    total_bytes: int = 0
    fair_share: FairShare = field(default_factory=FairShare)
    """By caller: all but the small ones."""
    _shares: dict[str, dict[BodyAllocation, None]] = field(default_factory=dict)
    """By caller, the oldest first."""

    @property
    def allocation_count(self) -> int:
        """How many bodies count by their caller."""
        return sum(map(len, self._shares.values()))

    def allocate_small(self, size: int, limit: int) -> bool:
        """Count a whole body whoever it is of, if it is small and there is room."""
        if (
            size > limit >> SMALL_BODY_SHIFT
            or self.total_bytes + size > limit - limit // RESERVE_DIVISOR
        ):
            return False
        self.total_bytes += size
        return True

    def allocate(self, allocation: BodyAllocation, size: int, limit: int) -> None:
        """Count more bytes to a share; others may have to make room for them.

        Raises: GatewayError 429 when there is none.
        """
        if self.total_bytes + size > soft_limit(limit):
            self._make_room(allocation, size, limit)
        self.total_bytes += size
        self.fair_share.add(allocation.caller, size, allocation.user)
        allocation.size += size
        self._shares.setdefault(allocation.caller, {})[allocation] = None

    def release(self, allocation: BodyAllocation, size: int | None = None) -> None:
        """So many bytes of this share are gone, or all that are left of it."""
        size = allocation.size if size is None else min(size, allocation.size)
        self.total_bytes -= size
        if size:
            self.fair_share.remove(allocation.caller, size, allocation.user)
            allocation.size -= size
        own = self._shares.get(allocation.caller)
        if own is not None and not allocation.size:
            own.pop(allocation, None)
            if not own:
                del self._shares[allocation.caller]

    def _make_room(self, share: BodyAllocation, size: int, limit: int) -> None:
        holdings, most = self.fair_share, soft_limit(limit)
        small = self.total_bytes - holdings.total
        larger = holdings.victims(share.caller, size, most - small, share.user)
        for caller in larger:
            for _ in range(MOST_BODY_VICTIMS):
                if self.total_bytes + size <= most:
                    return
                if not self._yields(caller, self._larger_users(caller, share, size)):
                    break
        # What can't yield, since it runs, leaves the reserve; and so does a caller's only body.
        only = holdings.held_by(share.caller) == share.size
        if (larger or only) and self.total_bytes + size <= limit:
            return
        raise errors.queue_full(
            "The memory for request bodies is used up.", BODY_MEMORY_RETRY_AFTER
        )

    def _larger_users(self, caller: str, share: BodyAllocation, size: int) -> list[str]:
        """Its users, if it holds more than the share's caller would have by now.

        Of the share's own caller the one user that holds more than the share's would.
        """
        holdings = self.fair_share
        if caller == share.caller:
            larger = holdings.larger_user(caller, size, share.user)
            return [] if larger is None else [larger[1]]
        if holdings.held_by(caller) > holdings.held_by(share.caller) + size:
            return holdings.users_by_size(caller)
        return []

    def _yields(self, caller: str, users: list[str]) -> bool:
        """Let the newest body of a caller's users go that can; whether there is one."""
        error = errors.queue_full(
            "The memory for request bodies is used up, and this client holds most of it.",
            BODY_MEMORY_RETRY_AFTER,
        )
        for user in users:
            newest = (one for one in reversed(self._shares.get(caller, {})) if one.user == user)
            for share in islice(newest, MOST_BODY_VICTIMS):
                if share.evict is not None and share.evict(error):
                    self.release(share)
                    return True
        return False
