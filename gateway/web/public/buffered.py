"""The memory for request bodies, as callers share it.

Where it is full, the newest body of whoever holds most, that is still coming or whose request waits
for a slot, goes for another's (`access/holdings.py`). Bytes count as they come: to announce many
costs nothing, so it counts for nothing. A small body that is here at once counts in the sum alone;
there are no more of these than requests may wait and run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from gateway import errors
from gateway.access.holdings import RESERVE, Holdings, usual
from gateway.errors import GatewayError

BUSY_RETRY = 2.0
"""Seconds to advise when the memory for bodies is used up."""

SMALL = 14
"""A body is small up to the memory / 2**14: 64 KiB of the default of 1 GiB."""

MOST_YIELDING = 64
"""Bodies of one caller that are asked to go for one piece of another's, and go for it."""


@dataclass(slots=True, eq=False)
class Share:
    """What one body holds of the memory, and whose it is."""

    caller: str
    user: str
    """Its party: the caller itself, or a user that it names."""
    size: int = 0
    refuse: Callable[[GatewayError], bool] | None = None
    """Ends its request with an error, unless it runs: then False. None: it does."""


@dataclass(slots=True)
class Buffered:
    """Bytes of request bodies held by the whole process."""

    held: int = 0
    holdings: Holdings = field(default_factory=Holdings)
    """By caller: all but the small ones."""
    _shares: dict[str, dict[Share, None]] = field(default_factory=dict)
    """By caller, the oldest first."""

    @property
    def shares(self) -> int:
        """How many bodies count by their caller."""
        return sum(map(len, self._shares.values()))

    def takes_small(self, size: int, limit: int) -> bool:
        """Count a whole body whoever it is of, if it is small and there is room."""
        if size > limit >> SMALL or self.held + size > limit - limit // RESERVE:
            return False
        self.held += size
        return True

    def take(self, share: Share, size: int, limit: int) -> None:
        """Count more bytes to a share; others may have to make room for them.

        Raises: GatewayError 429 when there is none.
        """
        if self.held + size > usual(limit):
            self._make_room(share, size, limit)
        self.held += size
        self.holdings.add(share.caller, size, share.user)
        share.size += size
        self._shares.setdefault(share.caller, {})[share] = None

    def release(self, share: Share, size: int | None = None) -> None:
        """So many bytes of this share are gone, or all that are left of it."""
        size = share.size if size is None else min(size, share.size)
        self.held -= size
        if size:
            self.holdings.remove(share.caller, size, share.user)
            share.size -= size
        own = self._shares.get(share.caller)
        if own is not None and not share.size:
            own.pop(share, None)
            if not own:
                del self._shares[share.caller]

    def _make_room(self, share: Share, size: int, limit: int) -> None:
        holdings, most = self.holdings, usual(limit)
        small = self.held - holdings.total
        larger = holdings.yielding(share.caller, size, most - small, share.user)
        for caller in larger:
            for _ in range(MOST_YIELDING):
                if self.held + size <= most:
                    return
                if not self._yields(caller, self._larger_users(caller, share, size)):
                    break
        # What can't yield, since it runs, leaves the reserve; and so does a caller's only body.
        only = holdings.of(share.caller) == share.size
        if (larger or only) and self.held + size <= limit:
            return
        raise errors.queue_full("The memory for request bodies is used up.", BUSY_RETRY)

    def _larger_users(self, caller: str, share: Share, size: int) -> list[str]:
        """Its users, if it holds more than the share's caller would have by now.

        Of the share's own caller the one user that holds more than the share's would.
        """
        holdings = self.holdings
        if caller == share.caller:
            larger = holdings.larger_user(caller, size, share.user)
            return [] if larger is None else [larger[1]]
        if holdings.of(caller) > holdings.of(share.caller) + size:
            return holdings.user_order(caller)
        return []

    def _yields(self, caller: str, users: list[str]) -> bool:
        """Let the newest body of a caller's users go that can; whether there is one."""
        error = errors.queue_full(
            "The memory for request bodies is used up, and this client holds most of it.",
            BUSY_RETRY,
        )
        for user in users:
            newest = (one for one in reversed(self._shares.get(caller, {})) if one.user == user)
            for share in islice(newest, MOST_YIELDING):
                if share.refuse is not None and share.refuse(error):
                    self.release(share)
                    return True
        return False
