"""How far limits are used: what operators are shown of them, and told when a quota runs out.

A quota is a limit of money or tokens for a day or month. The figures are those by which requests
are admitted (`LimitBook`); accounts that lack what the ledger has of them are loaded first.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from gateway.callers.keys import KeyRing
from gateway.callers.limit_sync import LimitSync
from gateway.callers.limits import LimitBook, UsedQuota
from gateway.callers.stored_keys import KeySync, with_groups
from gateway.config.settings import Settings
from gateway.store.failures import StoreError
from gateway.store.store import Store

ITEMS_OF_A_TURN = 200  # keys or accounts of one turn of the event loop: some 2 ms
MOST_USERS_SHOWN = 50  # end users of a key that are shown, those that have used most
NEAR_SHARE = 0.8  # of a quota: from this share on it is told of
LOOK_SECONDS = 5.0  # between two looks at the quotas
MOST_QUOTAS = 200  # that are told of at a time, the fullest

T = TypeVar("T")


async def _in_turns(items: Sequence[T]) -> AsyncIterator[T]:
    for number, item in enumerate(items, 1):
        yield item
        if number % ITEMS_OF_A_TURN == 0:
            await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class Standings:
    """What is used of the limits of keys, groups and end users.

    `sync` loads what the ledger has of accounts; None: there is no store. Methods raise StoreError.
    """

    key_sync: KeySync
    book: LimitBook
    sync: LimitSync | None

    @classmethod
    def alone(cls, settings: Settings, store: Store) -> Self:
        """Of a store that no gateway uses."""
        book = LimitBook(settings)

        def configure() -> None:
            book.configure(with_groups(settings, key_sync.groups))

        key_sync = KeySync(store, KeyRing(), None, on_change=configure)
        key_sync.configure(settings.keys, allow_anonymous=settings.allow_anonymous)
        return cls(key_sync, book, LimitSync(book, store, ""))

    async def of_keys(
        self, ids: Sequence[str], *, with_users: bool
    ) -> Mapping[str, dict[str, Any]]:
        """`standing` of each key that is in force, with its group's; `users` of the end users."""
        await self.key_sync.refresh()
        ring, book = self.key_sync.key_ring, self.book
        callers = [caller for id_ in ids if (caller := ring.caller(id_)) is not None]
        async for caller in _in_turns(callers):
            book.accounts(caller)
        if self.sync is not None:
            await self.sync.load()
        found: dict[str, dict[str, Any]] = {}
        async for caller in _in_turns(callers):
            limits = book.standings(book.accounts(caller).tracked)
            own = [one.as_json() for one in limits if one.kind != "total"]
            found[caller.id] = {"standing": own}
            if with_users:
                found[caller.id]["users"] = await self._of_users(caller.id)
        return found

    async def of_groups(self) -> Mapping[str, list[dict[str, Any]]]:
        """What is used of the limits of each group that has some, by its name."""
        await self.key_sync.refresh()
        if self.sync is not None:
            await self.sync.load()
        return {
            name: [one.as_json() for one in self.book.standings([account])]
            for name, account in self.book.group_accounts()
        }

    async def _of_users(self, key: str) -> list[dict[str, Any]]:
        used = []
        async for user, account in _in_turns(self.book.user_accounts(key)):
            limits = list(self.book.standings([account]))
            share = max((one.used / one.most for one in limits), default=0.0)
            if share > 0:
                used.append((share, user, limits))
        fullest = heapq.nlargest(MOST_USERS_SHOWN, used, key=lambda one: one[0])
        return [
            {"user": user, "standing": [one.as_json() for one in limits]}
            for _, user, limits in fullest
        ]


@dataclass(slots=True, eq=False)
class QuotaWatch:
    """Sees which quotas of keys, groups and all callers are nearly or quite used up.

    `tell` is given those that are new, or newly spent; if it raises StoreError, again at the next
    look. So each is told of once in its day or month, and once more when it is spent.
    """

    book: LimitBook
    key_ring: KeyRing
    tell: Callable[[Sequence[UsedQuota]], Awaitable[None]]
    used: Sequence[UsedQuota] = ()
    """Those of which `NEAR_SHARE` is used, the fullest first."""
    _told: set[tuple[str, bool]] = field(default_factory=set)
    _keys_version: int = -1

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Look once."""
        if self._keys_version != self.key_ring.version:
            self._keys_version = self.key_ring.version
            # A key that is not used here may have used up its quota by another process.
            async for caller in _in_turns([*self.key_ring.callers()]):
                self.book.accounts(caller)
        found: list[UsedQuota] = []
        async for account in _in_turns(self.book.quota_accounts()):
            found += self.book.used_quotas(account, NEAR_SHARE)
        self.used = heapq.nlargest(MOST_QUOTAS, found, key=lambda one: (one.spent, one.share))
        new = [one for one in self.used if (one.name, one.spent) not in self._told]
        if new:
            with suppress(StoreError):
                await self.tell(new)
                self._told.update((one.name, one.spent) for one in new)
        names = {one.name for one in found}
        self._told = {one for one in self._told if one[0] in names}
