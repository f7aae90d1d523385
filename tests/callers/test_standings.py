"""How far limits are used, and which quotas are told of, when and how often."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gateway.callers.keys import KeyRing, new_key
from gateway.callers.limit_sync import LimitSync
from gateway.callers.limits import LimitBook, UsedQuota
from gateway.callers.standings import MOST_USERS_SHOWN, QuotaWatch, Standings
from gateway.callers.stored_keys import KeySync
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.store.failures import StoreUnavailable
from gateway.store.store import Store
from gateway.terms import Caller
from tests.callers.build import Clocks, a_lease_request
from tests.callers.ledger_rows import a_row, add_rows

DAY = 86400.0
KEY = {"id": "alice", "sha256": new_key("alice").sha256, "name": "Alice", "group": "team"}
LIMITED = {**KEY, "limits": {"budget": "20/month", "tokens_per_day": 1000, "rpm": 5}}


class Watched:
    """A watch over the limits of some keys, and what it has told."""

    def __init__(self, **settings: object) -> None:
        self.clocks = Clocks()
        self.configure(**settings)
        self.told: list[UsedQuota] = []
        self.away = False
        self.watch = QuotaWatch(self.book, self.ring, self.tell)

    def configure(self, **settings: object) -> None:
        chosen = Settings.model_validate(settings)
        self.ring = KeyRing(chosen.keys)
        self.book = LimitBook(chosen, clock=self.clocks.clock, wall_clock=self.clocks.wall)

    async def tell(self, used: Sequence[UsedQuota]) -> None:
        if self.away:
            raise StoreUnavailable("it is away", "")
        self.told += used

    def caller(self, name: str = "alice") -> Caller:
        caller = self.ring.caller(name)
        assert caller is not None
        return caller

    def use(self, cost: float, tokens: int = 0) -> None:
        accounts, now = self.book.accounts(self.caller()), self.clocks.wall()
        self.book.reserve(accounts, a_lease_request(), now).settle(tokens, cost, now)

    def ask(self, tokens: int) -> None:
        """Have a request refused that may take so many tokens."""
        accounts = self.book.accounts(self.caller())
        with pytest.raises(GatewayError, match="quota"):
            self.book.reserve(accounts, a_lease_request(0, tokens), self.clocks.wall())

    async def look(self) -> list[tuple[str, str, bool]]:
        """What was told in this look: whose, which limit, and whether it is spent."""
        before = len(self.told)
        await self.watch.look()
        return [(one.id, one.standing.limit, one.spent) for one in self.told[before:]]


async def test_a_quota_is_told_once_when_it_is_nearly_used_up_and_once_when_it_is_spent() -> None:
    watched = Watched(keys=[LIMITED])
    watched.use(15.9)
    assert await watched.look() == []
    watched.use(0.1)
    assert await watched.look() == [("alice", "budget", False)]
    assert await watched.look() == []
    assert [one.share for one in watched.watch.used] == [pytest.approx(0.8)]
    watched.use(4.0)
    assert await watched.look() == [("alice", "budget", True)]
    watched.clocks.advance(40 * DAY)
    assert await watched.look() == []
    assert watched.watch.used == []
    watched.use(17.0)
    assert await watched.look() == [("alice", "budget", False)]
    assert len({one.name for one in watched.told}) == 2
    # Another amount is another quota; those of groups and of all callers are told, too.
    watched.configure(
        keys=[{**LIMITED, "limits": {"budget": "18/month"}}],
        groups={"team": {"limits": {"budget": "1/day"}}},
        limits={"total": {"budget": "1/day"}},
    )
    watched.watch = QuotaWatch(watched.book, watched.ring, watched.tell)
    watched.use(17.0)
    assert sorted(await watched.look()) == [
        ("", "budget", True), ("alice", "budget", False), ("team", "budget", True),
    ]  # fmt: skip


async def test_a_quota_of_which_a_request_found_too_little_is_spent_unless_most_is_left() -> None:
    watched = Watched(keys=[LIMITED])
    watched.use(0.0, tokens=850)
    assert await watched.look() == [("alice", "tokens_per_day", False)]
    watched.ask(200)
    assert await watched.look() == [("alice", "tokens_per_day", True)]
    other = Watched(keys=[LIMITED])
    other.use(0.0, tokens=500)
    other.ask(600)
    assert await other.look() == []


async def test_what_the_store_did_not_take_is_told_again() -> None:
    watched = Watched(keys=[LIMITED])
    watched.use(18.0)
    watched.away = True
    assert await watched.look() == []
    assert len(watched.watch.used) == 1
    watched.away = False
    assert await watched.look() == [("alice", "budget", False)]


def shown(standing: list[dict[str, object]]) -> set[tuple[object, ...]]:
    return {(one["of"], one["limit"], one["used"], one["remaining"]) for one in standing}


async def test_a_key_is_shown_with_its_limits_its_groups_and_its_users(store: Store) -> None:
    clocks = Clocks()
    spec = {**LIMITED, "trust_user_headers": True, "user_limits": {"tokens_per_day": 9}}
    settings = Settings.model_validate(
        {"keys": [spec], "groups": {"team": {"limits": {"tokens_per_day": 5000}}}}
    )
    ended, last = clocks.wall() - 100.0, MOST_USERS_SHOWN + 9
    rows = [
        a_row(number, ended_at=ended, key="alice", group_name="team", user=f"user-{number}",
              prompt_tokens=number, completion_tokens=0, cost=0.25)
        for number in range(last + 1)
    ]  # fmt: skip
    store.run_now(lambda connection: add_rows(connection, rows))
    book = LimitBook(settings, clock=clocks.clock, wall_clock=clocks.wall)
    key_sync = KeySync(store, KeyRing(settings.keys), None)
    sync = LimitSync(book, store, "own", now=clocks.wall, clock=clocks.clock)
    found = await Standings(key_sync, book, sync).of_keys(["alice", "gone"], with_users=True)
    assert found.keys() == {"alice"}
    used = sum(range(last + 1))
    assert shown(found["alice"]["standing"]) == {
        ("key", "budget", 15.0, 5.0),
        ("key", "tokens_per_day", used, 0),
        ("key", "rpm", 0, 5),
        ("group", "tokens_per_day", used, 5000 - used),
    }
    users = found["alice"]["users"]
    assert (len(users), users[0]["user"]) == (MOST_USERS_SHOWN, f"user-{last}")
    assert shown(users[0]["standing"]) == {("user", "tokens_per_day", last, 0)}
