"""Max-min fair shares of a limited resource: who holds what, and whom to evict when it is full.

A caller alone may hold everything but a reserve. When that much is in use, a caller that wants more
is compared with the others: each of them counts only up to what this caller would then hold. If the
sum fits, the caller is admitted, and those who hold more than it are evicted, the largest first. So
any number of callers come to equal shares (max-min fairness, Bertsekas and Gallager, "Data
Networks", 1992, section 6.5), and one that was evicted and returns at once evicts nobody. The
reserve is for callers for whom nobody can be evicted at the moment.

A caller is the holder of a key, or an address. If a caller names its users, they divide its share
by the same rule; naming many users gains nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

RESERVE_DIVISOR = 8  # the reserve is the limit divided by this; a resource of fewer units has none
MOST_VICTIMS = 16  # most callers that are evicted for one request


def soft_limit(limit: int) -> int:
    """How much of `limit` may be used before anybody is evicted."""
    return limit - limit // RESERVE_DIVISOR


@dataclass(slots=True)
class FairShare:
    """Who holds how much of one resource: requests, connections or bytes."""

    total: int = 0
    by_caller: dict[str, int] = field(default_factory=dict)
    """What each caller holds; callers that hold nothing are absent."""
    by_user: dict[str, dict[str, int]] = field(default_factory=dict)
    """What each user holds, of callers that name users."""

    def add(self, caller: str, size: int, user: str | None = None) -> None:
        """The caller takes so much more."""
        self.total += size
        self.by_caller[caller] = self.by_caller.get(caller, 0) + size
        if user is not None and user != caller:
            users = self.by_user.setdefault(caller, {})
            users[user] = users.get(user, 0) + size

    def remove(self, caller: str, size: int, user: str | None = None) -> None:
        """The caller gives back so much of what it took by `add`."""
        self.total -= size
        _take(self.by_caller, caller, size)
        if user is not None and user != caller:
            _take(self.by_user[caller], user, size)
            if not self.by_user[caller]:
                del self.by_user[caller]

    def held_by(self, caller: str) -> int:
        """What the caller holds."""
        return self.by_caller.get(caller, 0)

    def fits(self, caller: str, size: int, limit: int) -> bool:
        """Whether the caller may take so much more of `limit`, perhaps after evictions."""
        if self.total + size <= limit:
            return True
        own = self.by_caller.get(caller, 0)
        level = own + size
        counted = sum([min(level, held) for held in self.by_caller.values()])
        return counted - own + level <= limit

    def victims(self, caller: str, size: int, limit: int, user: str | None = None) -> list[str]:
        """Whom to evict for a caller that wants so much more of `limit`, the largest first.

        The callers that hold more than it would. If it has its share already: the caller itself,
        if another of its users holds more than `user` would.
        """
        if self.fits(caller, size, limit):
            return self.callers_above(self.by_caller.get(caller, 0) + size)
        return [caller] if self.larger_user(caller, size, user) else []

    def callers_above(self, level: int) -> list[str]:
        """The callers that hold more than `level`, the largest first, at most `MOST_VICTIMS`."""
        above = [(held, caller) for caller, held in self.by_caller.items() if held > level]
        return [caller for _, caller in heapq.nlargest(MOST_VICTIMS, above)]

    def larger_user(
        self, caller: str, size: int, user: str | None = None
    ) -> tuple[str, str] | None:
        """The caller and its largest user, if that one holds more than `user` would."""
        held = self._held_by_users(caller)
        if not held:
            return None
        largest = max(held, key=held.__getitem__)
        own = held.get(caller if user is None else user, 0)
        return (caller, largest) if held[largest] > own + size else None

    def users_by_size(self, caller: str) -> list[str]:
        """The users of a caller, the largest first; the caller itself stands for unnamed ones."""
        held = self._held_by_users(caller)
        return sorted(held, key=lambda user: -held[user]) or [caller]

    def _held_by_users(self, caller: str) -> dict[str, int]:
        users = self.by_user.get(caller, {})
        unnamed = self.by_caller[caller] - sum(users.values()) if users else 0
        return {**users, caller: unnamed} if unnamed else users


def _take(counts: dict[str, int], name: str, size: int) -> None:
    left = counts[name] - size
    if left:
        counts[name] = left
    else:
        del counts[name]
