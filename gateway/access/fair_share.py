"""What each party holds of something that all of them share, and who yields when it is full.

A party alone may hold all but a reserve. When that much is taken, one that wants more is weighed
against the others: each of them counts only as far as it holds no more than the party would have
then. Where that fits, the party is let in, and those who hold more than it would have are asked to
yield, the largest first; so any number of parties come to equal shares (max-min fairness, Bertsekas
and Gallager, "Data Networks", 1992, section 6.5), and one that has yielded and comes again at once
pushes nobody out. The reserve is for those to whom nobody can yield just then.

A party is a caller: the holder of a key, or an address. Where a caller names its users, its share
is divided among them by the same rule: to name many users is not worth more than one share.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

RESERVE_DIVISOR = 8
"""One part in so many is the reserve. A resource of fewer units has none."""

MOST_VICTIMS = 16
"""Callers that are asked to yield to one request, at most: the largest."""


def soft_limit(limit: int) -> int:
    """How much of `limit` may be taken while nobody has to yield."""
    return limit - limit // RESERVE_DIVISOR


@dataclass(slots=True)
class FairShare:
    """Counts of one shared resource: requests, connections or bytes."""

    total: int = 0
    by_caller: dict[str, int] = field(default_factory=dict)
    """By caller; who holds nothing is not there."""
    by_user: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of callers that name them: by user."""

    def add(self, caller: str, size: int, user: str | None = None) -> None:
        """A party holds so much more."""
        self.total += size
        self.by_caller[caller] = self.by_caller.get(caller, 0) + size
        if user is not None and user != caller:
            users = self.by_user.setdefault(caller, {})
            users[user] = users.get(user, 0) + size

    def remove(self, caller: str, size: int, user: str | None = None) -> None:
        """A party holds so much less, which it was given by `add`."""
        self.total -= size
        _take(self.by_caller, caller, size)
        if user is not None and user != caller:
            _take(self.by_user[caller], user, size)
            if not self.by_user[caller]:
                del self.by_user[caller]

    def held_by(self, caller: str) -> int:
        """What a caller holds."""
        return self.by_caller.get(caller, 0)

    def fits(self, caller: str, size: int, limit: int) -> bool:
        """Whether a caller may hold so much more of `limit`, and be it that others yield."""
        if self.total + size <= limit:
            return True
        own = self.by_caller.get(caller, 0)
        level = own + size
        counted = sum([min(level, held) for held in self.by_caller.values()])
        return counted - own + level <= limit

    def victims(self, caller: str, size: int, limit: int, user: str | None = None) -> list[str]:
        """Who is to make room for a party that wants so much more of `limit`, the largest first.

        Callers that hold more than it would have; where its caller has its share already, the
        caller itself, if another of its users holds more than `user` would have.
        """
        if self.fits(caller, size, limit):
            return self.callers_above(self.by_caller.get(caller, 0) + size)
        return [caller] if self.larger_user(caller, size, user) else []

    def callers_above(self, level: int) -> list[str]:
        """The callers that hold more than `level`, the largest first."""
        found = [(held, caller) for caller, held in self.by_caller.items() if held > level]
        return [caller for _, caller in heapq.nlargest(MOST_VICTIMS, found)]

    def larger_user(
        self, caller: str, size: int, user: str | None = None
    ) -> tuple[str, str] | None:
        """The user of this caller who holds most, if that is more than `user` would have."""
        users = self.by_user.get(caller)
        if not users:
            return None
        unnamed = self.by_caller[caller] - sum(users.values())
        own = unnamed if user is None or user == caller else users.get(user, 0)
        largest = max(users, key=users.__getitem__)
        if unnamed > users[largest]:
            largest = caller
        return (caller, largest) if max(unnamed, users.get(largest, 0)) > own + size else None

    def users_by_size(self, caller: str) -> list[str]:
        """The users of a caller, itself among them where it named none, the largest first."""
        users = self.by_user.get(caller)
        if not users:
            return [caller]
        unnamed = self.by_caller[caller] - sum(users.values())
        everybody = {**users, caller: unnamed} if unnamed else users
        return sorted(everybody, key=lambda user: -everybody[user])


def _take(counts: dict[str, int], name: str, size: int) -> None:
    left = counts[name] - size
    if left:
        counts[name] = left
    else:
        del counts[name]
