"""Live limits follow the store: what it has at the start, and what other processes add."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection

from gateway.callers import limit_sync
from gateway.callers.keys import KeyRing, new_key
from gateway.callers.ledger import RECOVERY_SECONDS
from gateway.callers.limit_sync import LimitSync
from gateway.callers.limits import LimitBook, UsedQuota
from gateway.callers.processes import DEAD_SECONDS
from gateway.callers.standings import MOST_USERS_SHOWN, QuotaWatch, Standings
from gateway.callers.stored_keys import KeySync
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.store.database import locate_store
from gateway.store.failures import StoreUnavailable
from gateway.store.store import Store
from gateway.terms import Caller
from tests.callers.build import (
    NOW,
    Clocks,
    FlakyStore,
    LimitedProcess,
    a_caller,
    a_lease_request,
    counted,
    read_rows,
    used,
)
from tests.callers.ledger_rows import DAY, a_row, add_rows
from tests.virtual import in_virtual_time, now

T = TypeVar("T")

LIMIT = 60.0


class World:
    """Processes on one store, with one clock; each has a connection of its own."""

    def __init__(self, url: str, folder: Path, **settings: Any) -> None:
        self.clocks = Clocks()
        self.settings = Settings.model_validate(settings)
        self._location = locate_store(url, folder)
        self._stores: list[Store] = []
        self._numbers = itertools.count(1)

    def process(self, clocks: Clocks | None = None) -> LimitedProcess:
        store = Store(self._location)
        store.start()
        self._stores.append(store)
        name = f"p{next(self._numbers)}"
        failing: Any = FlakyStore(store)
        return LimitedProcess(name, failing, clocks or self.clocks, self.settings)

    async def started(self, *callers: Caller) -> LimitedProcess:
        process = self.process()
        await process.start(callers)
        return process

    async def rows(self) -> list[dict[str, Any]]:
        return await self._stores[0].run(read_rows)

    async def close(self) -> None:
        for store in self._stores:
            assert await store.aclose(LIMIT)


@asynccontextmanager
async def a_world(url: str, folder: Path, **settings: Any) -> AsyncIterator[World]:
    world = World(url, folder, **settings)
    try:
        yield world
    finally:
        await world.close()


@contextmanager
def without_its_store(process: LimitedProcess) -> Iterator[None]:
    store: Any = process.store
    store.is_away = True
    yield
    store.is_away = False


def refusal(process: LimitedProcess, caller: Caller, most: int = 1, user: str | None = None) -> str:
    """What a request for so many tokens is refused with; '': it is admitted."""
    try:
        process.admit(caller, a_lease_request(0, most), user)
    except GatewayError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"concurrency": 2}, "2 requests at one time"),
        ({"rpm": 2}, "2 requests a minute"),
        ({"tokens_per_day": 200}, "200 tokens a day (tokens_per_day), of which 0 are used, 200"),
        ({"tpm": 200}, "200 tokens a minute (tpm), of which 0 are used, 200 reserved"),
    ],
)
async def test_a_long_request_of_another_process_counts_while_it_runs_and_once_at_its_end(
    limits: dict[str, Any], said: str, store_url: str, tmp_path: Path
) -> None:
    alice = a_caller(limits=limits)
    async with a_world(store_url, tmp_path) as world:
        one, other = await world.started(alice), await world.started(alice)
        for _ in range(2):
            one.admit(alice, a_lease_request(0, 100))
        await other.step()
        # Nothing of them is known to others before they have run for a quarter of a second.
        assert other.account("key:alice").others.running == 0
        world.clocks.advance(0.5)
        await one.step()
        await other.step()
        assert said in refusal(other, alice, 100)
        for _ in range(3):
            await other.step()
        assert used(other.account("key:alice"), world.clocks).requests == 2
        one.end(0, 30)
        one.end(0, 30)
        await one.step()
        await other.step()
        account = other.account("key:alice")
        assert (account.others.running, account.others.tokens) == (0, 0)
        rows = await world.rows()
        assert used(account, world.clocks) == counted(rows, "key:alice", world.clocks.wall())
        assert used(account, world.clocks) == used(one.account("key:alice"), world.clocks)


async def test_rows_behind_a_recovery_that_nobody_could_confirm_are_counted_by_others(
    store_url: str, tmp_path: Path
) -> None:
    alice = a_caller(limits={"tpm": 10_000})
    async with a_world(store_url, tmp_path) as world:
        killed, heir = await world.started(alice), await world.started(alice)
        other = await world.started(alice)
        for _ in range(3):
            killed.admit(alice, a_lease_request(0, 10))
        world.clocks.advance(0.5)
        await killed.step()
        store: Any = heir.store
        store.loses = ["work"]  # of `Ledger.write_with`
        for _ in range(int((DEAD_SECONDS + 2 * RECOVERY_SECONDS) / 5)):
            world.clocks.advance(5.0)
            await heir.step()
            await other.sync.look()
        assert store.loses == []
        assert len(await world.rows()) == 3
        for _ in range(4):
            assert refusal(heir, alice) == ""
            heir.end(0, 25)
        await heir.step()
        await other.sync.look()
        found = counted(await world.rows(), "key:alice", world.clocks.wall())
        assert found.tokens == 100
        for process in (heir, other):
            assert used(process.account("key:alice"), world.clocks) == found, process.name


async def test_a_start_beside_a_writer_counts_each_row_once(store_url: str, tmp_path: Path) -> None:
    alice = a_caller(limits={"rpm": 100_000, "tpm": 10_000_000, "budget": "100000/month"})
    async with a_world(store_url, tmp_path) as world:
        writer = await world.started(alice)
        over = asyncio.Event()

        async def write() -> None:
            while not over.is_set():
                writer.admit(alice, a_lease_request(0, 10))
                writer.end(0, 3, 0.25)
                writer.bus.flush()
                await writer.ledger.start(LIMIT)

        writing = asyncio.create_task(write())
        started = [await world.started(alice) for _ in range(12)]
        over.set()
        await writing
        for process in started:
            await process.step()
        rows = await world.rows()
        found = counted(rows, "key:alice", world.clocks.wall())
        assert found.requests == len(rows) > len(started)
        for process in (writer, *started):
            assert used(process.account("key:alice"), world.clocks) == found, process.name


async def test_a_start_without_the_store_counts_all_when_it_comes(
    store_url: str, tmp_path: Path
) -> None:
    alice = a_caller(limits={"tokens_per_day": 1000, "rpm": 50})
    async with a_world(store_url, tmp_path) as world:
        before = await world.started(alice)
        for _ in range(9):
            before.admit(alice, a_lease_request(0, 100))
            before.end(0, 100)
        await before.step()
        late = world.process()
        with without_its_store(late):
            await late.start([alice])
            assert str(late.sync.worker.problem) == "gone; wait"
            assert refusal(late, alice, 100) == ""
            late.end(0, 80)
            late.bus.flush()
        world.clocks.advance(20.0)  # it has waited before it tries again
        await late.step()
        await late.step()
        assert str(late.sync.worker.problem) == "None"
        found = counted(await world.rows(), "key:alice", world.clocks.wall())
        assert (found.day_tokens, found.requests) == (980, 10)
        assert used(late.account("key:alice"), world.clocks) == found
        assert "1000 tokens a day" in refusal(late, alice, 21)


def rows_of(day: float, cost: float = 2.0) -> list[dict[str, Any]]:
    return [
        a_row(number, key="alice", ended_at=day - number * 60.0, cost=cost) for number in range(2)
    ]


@pytest.mark.parametrize("wrong", [NOW - 400 * DAY, NOW - DAY, NOW + DAY, NOW + 400 * DAY], ids=str)
@pytest.mark.parametrize("store_fails", [False, True])
async def test_a_clock_that_was_wrong_at_the_start_frees_nothing_when_it_is_set(
    wrong: float, store_fails: bool, tmp_path: Path
) -> None:
    alice = a_caller(limits={"budget": "4/day", "tokens_per_day": 10_000})
    team = a_caller("bob", group="team")
    groups = {"team": {"limits": {"budget": "4/month"}}}
    url = f"sqlite:///{tmp_path}/gateway.db"
    async with a_world(url, tmp_path, groups=groups) as world:
        first = await world.started(alice)
        of_bob = a_row(9, key="bob", group_name="team", ended_at=NOW - 120.0, cost=4.0)
        rows = [*rows_of(NOW), of_bob]
        await first.store.run(lambda connection: add_rows(connection, rows))
        world.clocks.set_wall(wrong)
        process = await world.started(alice, team)
        # It shows another day, so nothing of this one is known.
        assert refusal(process, alice) == ""
        world.clocks.advance(0.5)
        await process.step()
        world.clocks.set_wall(NOW)
        if store_fails:
            with without_its_store(process), pytest.raises(StoreUnavailable):
                await process.sync.look()
        world.clocks.advance(20.0)
        await process.step()
        assert "a budget of 4 a day" in refusal(process, alice)
        assert "a budget of 4 a month" in refusal(process, team)


@in_virtual_time
async def test_the_store_is_read_again_only_when_it_has_changed(connection: Connection) -> None:
    """And at each poll while it is away."""
    store: Any = FlakyStore(connection)
    recovered, poll = 0, limit_sync.POLL_SECONDS

    async def reads(seconds: float) -> int:
        before = len(store.asked)
        await asyncio.sleep(seconds)
        return len(store.asked) - before

    clocks: Any = {"clock": now, "now": lambda: NOW}
    sync = LimitSync(LimitBook(Settings()), store, "own", recovered=lambda: recovered, **clocks)
    await sync.start()
    work = asyncio.create_task(sync.worker.run())
    assert await reads(limit_sync.LONGEST_UNREAD - 2 * poll) == 0
    recovered = 1
    assert await reads(2 * poll) == 1
    store.more_changes += 1
    assert await reads(2 * poll) == 1
    assert await reads(limit_sync.LONGEST_UNREAD - 3 * poll) == 0
    assert await reads(limit_sync.LONGEST_UNREAD) == 1
    store.is_away, store.more_changes = True, 2
    assert await reads(60.0) > 100
    work.cancel()
    await asyncio.wait([work])


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
