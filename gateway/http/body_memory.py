"""Reads request bodies within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass, field
from itertools import islice

from starlette.requests import Request

from gateway import errors
from gateway.api.base import Translation
from gateway.callers.fair_share import RESERVE_DIVISOR, FairShare, soft_limit
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError
from gateway.http.exchange import HttpExchange

# Most working memory for preparing a large body: one piece, and its parsed beginning
# (`request/json_outline.py`).
PARSE_WORKING_BYTES = 8 << 20


def take_small_body(
    exchange: HttpExchange, limits: LimitSettings, body_memory: BodyMemory
) -> bytes | None:
    """The body if it is small and complete; else None: call `read_body`.

    Its bytes count until the caller calls `release_small`. Raises: GatewayError 413.
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
    """Read a body that is large or still arriving, at no less than the minimum rate.

    Its bytes count in `allocation` until the caller releases it. Raises: GatewayError 408, 413,
    429; ClientClosed.
    """
    complete = not exchange.more_body
    if complete:
        body = exchange.take_body()
        body_memory.allocate(allocation, len(body), limits.buffered_bytes)
        return body
    started_at = asyncio.get_running_loop().time()
    size = 0
    # It grows in place and returns its bytes without a copy.
    whole = io.BytesIO()
    evicted_by: list[GatewayError] = []

    def evict(error: GatewayError) -> bool:
        evicted_by.append(error)
        exchange.fail_body(error)
        return True

    allocation.set_evict(evict)
    try:
        async with asyncio.timeout(limits.body_timeout) as limit:
            while True:
                part = await exchange.receive_body()
                if evicted_by:
                    raise evicted_by[0]
                body_memory.allocate(allocation, len(part), limits.buffered_bytes)
                size += len(part)
                if size > limits.body_bytes:
                    raise errors.body_too_large(limits.body_bytes)
                whole.write(part)
                if not exchange.more_body and not exchange.body:
                    return whole.getvalue()
                limit.reschedule(started_at + limits.body_timeout + size / limits.body_rate)
    except TimeoutError:
        raise errors.request_timeout("The body took too long to arrive.") from None
    finally:
        allocation.set_evict(None)


def translate_body(
    work: Generator[None, None, Translation],
    size: int,
    limits: LimitSettings,
    body_memory: BodyMemory,
    allocation: BodyAllocation,
) -> Generator[None, None, Translation]:
    """The translation of a body of `size` bytes, in the steps of `work`.

    Both bodies count in `allocation` while both are there, then the new one. Raises: GatewayError.
    """
    limit = limits.buffered_bytes
    body_memory.allocate(allocation, 2 * size - allocation.size, limit)
    translation = yield from work
    growth = len(translation.body) - allocation.size
    if growth > 0:
        body_memory.allocate(allocation, growth, limit)
    else:
        body_memory.release(allocation, -growth)
    return translation


BODY_MEMORY_RETRY_AFTER = 2.0  # `Retry-After` in seconds when the memory for bodies is used up
# A body is small up to the memory limit / 2**14: 64 KiB of the default of 1 GiB.
SMALL_BODY_SHIFT = 14
# Most bodies of one caller that are tried, and evicted, for one piece of another body.
MOST_BODY_VICTIMS = 64


@dataclass(slots=True, eq=False)
class BodyAllocation:
    """The memory that one body holds."""

    caller: str
    user: str  # the fairness key: the caller itself, or a user that it names
    size: int = 0  # bytes
    _evict: Callable[[GatewayError], bool] | None = None

    def set_evict(self, evict: Callable[[GatewayError], bool] | None) -> None:
        """How to end the request with an error; returns False if it runs. None: it can't be."""
        self._evict = evict

    def evict(self, error: GatewayError) -> bool:
        """End the body's request with an error; returns whether that was possible."""
        return self._evict is not None and self._evict(error)

    def resize(self, change: int) -> None:
        """Count so many bytes more; fewer if negative."""
        self.size += change


@dataclass(slots=True)
class BodyMemory:
    """The request bodies that the process holds."""

    total_bytes: int = 0
    fair_share: FairShare = field(default_factory=FairShare)  # all but the small bodies, by caller
    _allocations: dict[str, dict[BodyAllocation, None]] = field(default_factory=dict)
    """By caller, the oldest first."""

    @property
    def allocation_count(self) -> int:
        """Bodies that count by their caller."""
        return sum(map(len, self._allocations.values()))

    def allocate_small(self, size: int, limit: int) -> bool:
        """Count a complete body, whosever it is, if it is small and there is room for it."""
        if (
            size > limit >> SMALL_BODY_SHIFT
            or self.total_bytes + size > limit - limit // RESERVE_DIVISOR
        ):
            return False
        self.total_bytes += size
        return True

    def release_small(self, size: int) -> None:
        """Free a body that `allocate_small` has counted."""
        self.total_bytes -= size

    def allocate(self, allocation: BodyAllocation, size: int, limit: int) -> None:
        """Count more bytes of a body, evicting others if there is no room.

        Raises: GatewayError 429 if none can be made.
        """
        if self.total_bytes + size > soft_limit(limit):
            self._make_room(allocation, size, limit)
        self.total_bytes += size
        self.fair_share.add(allocation.caller, size, allocation.user)
        allocation.resize(size)
        self._allocations.setdefault(allocation.caller, {})[allocation] = None

    def release(self, allocation: BodyAllocation, size: int | None = None) -> None:
        """Free so many bytes of a body; by default all of them."""
        size = allocation.size if size is None else min(size, allocation.size)
        self.total_bytes -= size
        if size:
            self.fair_share.remove(allocation.caller, size, allocation.user)
            allocation.resize(-size)
        own = self._allocations.get(allocation.caller)
        if own is not None and not allocation.size:
            own.pop(allocation, None)
            if not own:
                del self._allocations[allocation.caller]

    def _make_room(self, allocation: BodyAllocation, size: int, limit: int) -> None:
        share, most = self.fair_share, soft_limit(limit)
        small = self.total_bytes - share.total
        victims = share.victims(allocation.caller, size, most - small, allocation.user)
        for caller in victims:
            for _ in range(MOST_BODY_VICTIMS):
                if self.total_bytes + size <= most:
                    return
                if not self._evict_newest(caller, self._larger_users(caller, allocation, size)):
                    break
        # The reserve is for those for whom nobody could be evicted, and for a caller's only body.
        only = share.held_by(allocation.caller) == allocation.size
        if (victims or only) and self.total_bytes + size <= limit:
            return
        raise errors.queue_full(
            "The memory for request bodies is used up.", BODY_MEMORY_RETRY_AFTER
        )

    def _larger_users(self, caller: str, allocation: BodyAllocation, size: int) -> list[str]:
        """The users of `caller` that may be evicted, the largest first.

        All of them, if the caller holds more than the allocation's caller would have. Of the
        allocation's own caller, the one user that holds more than the allocation's would.
        """
        share = self.fair_share
        if caller == allocation.caller:
            larger = share.larger_user(caller, size, allocation.user)
            return [] if larger is None else [larger[1]]
        if share.held_by(caller) > share.held_by(allocation.caller) + size:
            return share.users_by_size(caller)
        return []

    def _evict_newest(self, caller: str, users: list[str]) -> bool:
        """Evict the newest body of these users that can be; returns whether there was one."""
        error = errors.queue_full(
            "The memory for request bodies is used up, and this client holds most of it.",
            BODY_MEMORY_RETRY_AFTER,
        )
        for user in users:
            bodies = reversed(self._allocations.get(caller, {}))
            newest = (body for body in bodies if body.user == user)
            for body in islice(newest, MOST_BODY_VICTIMS):
                if body.evict(error):
                    self.release(body)
                    return True
        return False


PART_BYTES = 256 << 10  # bytes of a body that are parsed and written at a time
_PLAIN_ENCODINGS = frozenset({b"", b"identity"})


async def body_parts(
    request: Request,
    limits: LimitSettings,
    most_bytes: int,
    too_large: Callable[[], GatewayError],
) -> AsyncIterator[bytes]:
    """The body in parts of some size. It may take as long as `limits` allow for its bytes.

    Only the time that the client takes counts, not that of the disk. Raises: GatewayError 408, 413
    (`too_large`); ClientDisconnect.
    """
    clock = asyncio.get_running_loop().time
    source = request.stream()
    waited, size, part = 0.0, 0, bytearray()
    while True:
        began = clock()
        left = limits.body_timeout + size / limits.body_rate - waited
        try:
            async with asyncio.timeout(left):
                piece = await anext(source, None)
        except TimeoutError:
            raise errors.request_timeout("The body took too long to arrive.") from None
        waited += clock() - began
        if piece is None:
            break
        size += len(piece)
        if size > most_bytes:
            raise too_large()
        part += piece
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


def check_plain(request: Request) -> None:
    """Refuse a compressed body. Raises: GatewayError 415."""
    headers = request.scope["headers"]
    if any(n == b"content-encoding" and v.lower() not in _PLAIN_ENCODINGS for n, v in headers):
        raise errors.compressed_body()


def content_length(request: Request) -> int | None:
    """The length of the body, as its head says; None: it says nothing."""
    # The protocol has checked that it is a number.
    value = request.headers.get("content-length")
    return None if value is None else int(value)
