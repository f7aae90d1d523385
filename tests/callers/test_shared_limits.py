"""Limits that processes share by their store: counters, ledger and headers are one sum."""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import Connection

from gateway.callers import limit_sync
from gateway.callers.keys import KeyRing, new_key
from gateway.callers.ledger import RECOVERY_SECONDS
from gateway.callers.limit_sync import LimitSync
from gateway.callers.limits import Account, LimitBook
from gateway.callers.processes import DEAD_SECONDS
from gateway.callers.reports import roll_up
from gateway.callers.standings import MOST_USERS_SHOWN, Standings
from gateway.callers.stored_keys import KeySync
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.http.heads import rate_limit_lines
from gateway.store.database import locate_store
from gateway.store.failures import StoreUnavailable
from gateway.store.store import Store
from gateway.terms import Caller
from tests.beside import beside
from tests.callers.build import (
    NOW,
    Clocks,
    FlakyStore,
    LimitedProcess,
    a_caller,
    a_lease_request,
    all_accounts,
    counted,
    read_rows,
    used,
)
from tests.callers.ledger_rows import DAY, a_row, add_rows
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.known import known
from tests.store.stores import opened
from tests.virtual import in_virtual_time, now

LIMIT = 60.0


class World:
    """Processes on one store, with one clock; each has a connection of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.clocks = Clocks()
        self.settings = Settings()
        self._location = locate_store(url, folder)
        self.stores: list[Store] = []

    def process(self) -> LimitedProcess:
        store = Store(self._location)
        store.start()
        self.stores.append(store)
        failing: Any = FlakyStore(store)
        return LimitedProcess(f"p{len(self.stores)}", failing, self.clocks, self.settings)

    async def started(self, *callers: Caller) -> LimitedProcess:
        process = self.process()
        await process.start(callers)
        return process

    async def rows(self) -> list[dict[str, Any]]:
        return await self.stores[0].run(read_rows)


@pytest.fixture
def world(store_url: str, tmp_path: Path) -> Iterator[World]:
    """Return a world on each kind of store in turn."""
    world = World(store_url, tmp_path)
    yield world
    for store in world.stores:
        assert store.close(LIMIT)


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
    limits: dict[str, Any], said: str, world: World
) -> None:
    alice = a_caller(limits=limits)
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
    world: World,
) -> None:
    alice = a_caller(limits={"tpm": 10_000})
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


async def test_a_start_beside_a_writer_counts_each_row_once(world: World) -> None:
    alice = a_caller(limits={"rpm": 100_000, "tpm": 10_000_000, "budget": "100000/month"})
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


async def test_a_start_without_the_store_counts_all_when_it_comes(world: World) -> None:
    alice = a_caller(limits={"tokens_per_day": 1000, "rpm": 50})
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


@pytest.mark.parametrize("wrong", [NOW - 400 * DAY, NOW - DAY, NOW + DAY, NOW + 400 * DAY], ids=str)
@pytest.mark.parametrize("store_fails", [False, True])
@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
async def test_a_clock_that_was_wrong_at_the_start_frees_nothing_when_it_is_set(
    wrong: float, store_fails: bool, world: World
) -> None:
    alice = a_caller(limits={"budget": "4/day", "tokens_per_day": 10_000})
    team = a_caller("bob", group="team")
    groups = {"team": {"limits": {"budget": "4/month"}}}
    world.settings = Settings.model_validate({"groups": groups})
    first = await world.started(alice)
    rows = [
        a_row(1, key="alice", ended_at=NOW, cost=4.0),
        a_row(2, key="bob", group_name="team", ended_at=NOW - 120.0, cost=4.0),
    ]
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
    async with beside(sync.worker.run()):
        assert await reads(limit_sync.LONGEST_UNREAD - 2 * poll) == 0
        recovered = 1
        assert await reads(2 * poll) == 1
        store.more_changes += 1
        assert await reads(2 * poll) == 1
        assert await reads(limit_sync.LONGEST_UNREAD - 3 * poll) == 0
        assert await reads(limit_sync.LONGEST_UNREAD) == 1
        store.is_away, store.more_changes = True, 2
        assert await reads(60.0) > 100


def shown(standing: list[dict[str, object]]) -> set[tuple[object, ...]]:
    return {(one["of"], one["limit"], one["used"], one["remaining"]) for one in standing}


async def test_a_key_is_shown_with_its_limits_its_groups_and_its_users(store: Store) -> None:
    clocks = Clocks()
    spec = {
        "id": "alice", "sha256": new_key("alice").sha256, "name": "Alice", "group": "team",
        "limits": {"budget": "20/month", "tokens_per_day": 1000, "rpm": 5},
        "trust_user_headers": True, "user_limits": {"tokens_per_day": 9},
    }  # fmt: skip
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


# In any order of events, in processes without their listeners.


PART = 0.125
"""Seconds: no two additions at different times fall into one part of a window."""
GROUPS = {
    "team": {
        "limits": {"rpm": 12, "tpm": 3000, "tokens_per_day": 20_000, "budget": "10/day"},
        "user_limits": {"rpm": 4, "tpm": 900, "tokens_per_day": 4000, "budget": "4/month"},
    }
}

ALICE = a_caller("alice", group="team", limits={"rpm": 6, "tpm": 2000, "budget": "5/month"})
BOB = a_caller("bob", group="team", limits={"concurrency": 2, "tokens_per_day": 6000})
CHAT = a_caller("chat", group="team", trust_user_headers=True)
WHO = [(ALICE, None), (BOB, None), (CHAT, "ann"), (CHAT, "ben"), (CHAT, None)]


def total(rpm: int) -> Settings:
    limits = {"total": {"rpm": rpm, "concurrency": 9, "budget": "12/month"}}
    return Settings.model_validate({"groups": GROUPS, "limits": limits})


async def test_a_restart_counts_what_retention_has_summed_up(tmp_path: Path) -> None:
    clocks = Clocks(NOW)
    with opened(f"sqlite:///{tmp_path}/gateway.db") as store:
        ages = (0.001, 0.1, 5, 10, 40)  # days; the last one is of the month before
        rows = [
            a_row(number, ended_at=NOW - days * DAY, key="alice", group_name=group, cost=0.25)
            for number, (days, group) in enumerate((days, g) for days in ages for g in ("team", ""))
        ]
        await store.run(lambda connection: add_rows(connection, rows))
        for name, summed_up in (("before", 8), ("after", 0)):
            process = LimitedProcess(name, store, clocks, total(15))
            await process.start([ALICE])
            for subject, wanted in (
                ("key:alice", [2.0, 1.0, 440]),
                ("group:team", [1.0, 0.5, 220]),
            ):
                one = process.account(subject)
                sums = (one.cost_by_month, one.cost_by_day, one.tokens_by_day)
                assert [sum(each.values()) for each in sums] == wanted, (name, subject)
            assert await store.run(partial(roll_up, before=NOW - DAY / 20)) == summed_up


class SharedLimits(RuleBasedStateMachine):
    """Several processes that share a store admit, settle, restart, and are killed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="llama-gateway-limits-")
        self.runner = asyncio.Runner()
        self.clocks = Clocks()
        folder = Path(self.folder.name)
        self.store = Store(locate_store(f"sqlite:///{folder}/gateway.db", folder))
        self.settings = total(15)
        self.processes: list[LimitedProcess] = []
        self.started = 0

    @initialize()
    def open(self) -> None:
        self.store.start()
        assert self.runner.run(self.store.wait_opened(30.0))
        self.start_process()
        self.start_process()

    @precondition(lambda self: len(self.processes) < 3)
    @rule()
    def start_process(self) -> None:
        self.started += 1
        process = LimitedProcess(f"p{self.started}", self.store, self.clocks, self.settings)
        self.processes.append(process)
        self.runner.run(process.start([ALICE, BOB, CHAT]))

    @precondition(lambda self: len(self.processes) > 1)
    @rule(which=st.integers(0, 2))
    def kill_process(self, which: int) -> None:
        """With kill -9: what it had not written is lost, and its open requests are recovered."""
        self.processes.pop(which % len(self.processes))

    @rule(which=st.integers(0, 2), who=st.sampled_from(WHO), prompt=st.integers(0, 300),
          most=st.integers(0, 400) | st.none())  # fmt: skip
    def admit(
        self, which: int, who: tuple[Caller, str | None], prompt: int, most: int | None
    ) -> None:
        process = self.processes[which % len(self.processes)]
        refusal: GatewayError | None = None
        try:
            process.admit(who[0], a_lease_request(prompt, most), who[1])
        except GatewayError as error:
            refusal = error
        if refusal is not None and refusal.status == 429:
            assert refusal.code in {"rate_limit_exceeded", "insufficient_quota"}
            assert refusal.retry_after is not None
            assert 1 <= refusal.retry_after <= 31 * 86400
            assert refusal.retryable == (refusal.code == "rate_limit_exceeded")
        elif refusal is not None:
            assert refusal.code == "invalid_request"

    @rule(which=st.integers(0, 2), index=st.integers(0, 20), tokens=st.integers(0, 900),
          cents=st.integers(0, 200))  # fmt: skip
    def end(self, which: int, index: int, tokens: int, cents: int) -> None:
        process = self.processes[which % len(self.processes)]
        if process.open:
            process.end(index % len(process.open), tokens, cents / 128)

    @rule(parts=st.integers(1, 64), times=st.integers(1, 3))
    def pass_time(self, parts: int, times: int) -> None:
        for _ in range(times):
            self.clocks.advance(parts * PART)
            for process in self.processes:
                self.runner.run(process.step())

    @rule(which=st.integers(0, 2))
    def look(self, which: int) -> None:
        self.runner.run(self.processes[which % len(self.processes)].step())

    @rule(rpm=st.integers(5, 30))
    def reload(self, rpm: int) -> None:
        self.settings = total(rpm)
        for process in self.processes:
            process.book.configure(self.settings)

    @invariant()
    def nothing_is_negative(self) -> None:
        for process in self.processes:
            for account in all_accounts(process.book):
                now = self.clocks.clock()
                figures = [
                    account.running,
                    account.open,
                    account.reserved_tokens,
                    account.reserved_cost,
                    account.requests.value(now),
                    account.tokens.value(now),
                    account.others.running,
                    *account.tokens_by_day.values(),
                    *account.cost_by_month.values(),
                ]
                assert min(figures) >= 0, (account.subject, figures)
            for caller, user in WHO:
                limits = process.book.rate_limits(process.book.accounts(caller, user))
                assert all(one is None or 0 <= one.remaining <= one.limit for one in limits)

    def teardown(self) -> None:
        try:
            if self.processes:
                self.check_sums()
        finally:
            self.store.close(30.0)
            self.runner.close()
            self.folder.cleanup()

    def check_sums(self) -> None:
        for process in self.processes:
            while process.open:
                process.end(0, 17, 0.25)
        # Others that were killed are recovered after a while.
        for _ in range(20):
            self.clocks.advance(2.0)
            for process in self.processes:
                self.runner.run(process.step())
        for process in self.processes:
            self.runner.run(process.step())
        rows = self.runner.run(self.store.run(read_rows))
        wall = self.clocks.wall()
        for process in self.processes:
            for account in all_accounts(process.book):
                assert used(account, self.clocks) == counted(rows, account.subject, wall), (
                    process.name,
                    account.subject,
                )
                assert (account.open, account.running, account.reserved_tokens) == (0, 0, 0)
                assert account.reserved_cost == 0
                assert account.others.running == 0
            for caller, user in WHO:
                self.check_headers(process, caller, user, rows)

    def check_headers(
        self, process: LimitedProcess, caller: Caller, user: str | None, rows: list[dict[str, Any]]
    ) -> None:
        accounts = process.book.accounts(caller, user)
        lines = rate_limit_lines(*process.book.rate_limits(accounts), anthropic=False).decode()
        told = dict(line.split(": ") for line in lines.splitlines())
        sums = [(one, counted(rows, one.subject, self.clocks.wall())) for one in accounts.tracked]
        left = [one.spec.rpm - sum_.requests for one, sum_ in sums if one.spec.rpm is not None]
        assert told["x-ratelimit-remaining-requests"] == f"{max(0, min(left))}"
        left = [one.spec.tpm - sum_.tokens for one, sum_ in sums if one.spec.tpm is not None]
        left += [
            one.spec.tokens_per_day - sum_.day_tokens
            for one, sum_ in sums
            if one.spec.tokens_per_day is not None
        ]
        assert told["x-ratelimit-remaining-tokens"] == f"{max(0, min(left))}"


TestSharedLimits = SharedLimits.TestCase
TestSharedLimits.settings = settings(max_examples=40, stateful_step_count=40)


# Fifty callers at once at the edge of a limit, through a whole gateway over emulated nodes.


CALLERS = 50
KEY, USER = new_key("edge"), "ann"
PRICE = {"prompt": 1000.0, "completion": 4000.0}
"""For a million tokens: a thousand tokens cost some units."""


async def chat(running: Running, most: int | None, **body: Any) -> httpx.Response:
    return await running.chat(KEY, {"X-User-Id": USER}, max_tokens=most, **body)


def settings_of(owner: str, limits: dict[str, Any]) -> dict[str, Any]:
    """These limits of a key, of its group, of each of its end users, or of all callers."""
    key: dict[str, Any] = {"id": KEY.id, "sha256": KEY.sha256}
    if owner == "key":
        return {"keys": [{**key, "limits": limits}]}
    if owner == "user":
        return {"keys": [{**key, "trust_user_headers": True, "user_limits": limits}]}
    if owner == "group":
        return {"keys": [{**key, "group": "team"}], "groups": {"team": {"limits": limits}}}
    return {"keys": [key], "limits": {"total": limits}}


async def settle(running: Running) -> list[dict[str, Any]]:
    """Wait until all is settled and written; the ledger's rows."""
    gateway = running.gateway
    ledger, store = known(gateway.ledger), known(gateway.store)
    await until(lambda: all(one.open == 0 for one in all_accounts(gateway.metering.limit_book)))
    gateway.bus.flush()
    await until(lambda: not ledger.pending)
    return await store.run(read_rows)


def codes(responses: list[httpx.Response]) -> Counter[str]:
    return Counter(
        "ok" if one.status_code == 200 else one.headers["x-gateway-reason"] for one in responses
    )


@pytest.mark.parametrize("owner", ["key", "group", "user", "total"])
async def test_as_many_run_at_one_time_as_may(owner: str, tmp_path: Path) -> None:
    async with (
        EmulatedNode(slots=8) as node,
        running_gateway(tmp_path, [node.url], settings_of(owner, {"concurrency": 5})) as running,
    ):
        # None of them ends before all have been admitted or refused.
        node.faults.set("hang", path="/v1/chat/completions", after_events=1)
        sent = [asyncio.create_task(chat(running, 4)) for _ in range(CALLERS)]
        await until(lambda: sum(one.done() for one in sent) == CALLERS - 5)
        await until(lambda: node.faults.hanging == 5)
        node.faults.clear()
        node.faults.release()
        assert codes(await asyncio.gather(*sent)) == {"ok": 5, "rate_limit_exceeded": 45}
        # A place is free as soon as a response has ended.
        for _ in range(10):
            assert (await chat(running, 1)).status_code == 200
        assert len(await settle(running)) == 15


@pytest.mark.parametrize(
    ("owner", "limits", "reason"),
    [
        ("key", {"rpm": 20}, "rate_limit_exceeded"),
        ("group", {"tpm": 500}, "rate_limit_exceeded"),
        ("user", {"tokens_per_day": 500}, "insufficient_quota"),
        ("total", {"budget": "1.5/month"}, "insufficient_quota"),
    ],
)
async def test_requests_that_use_less_than_they_reserve_never_exceed_it(
    limits: dict[str, Any], reason: str, owner: str, tmp_path: Path
) -> None:
    """Of a key, a group, an end user and all callers; what was not used is there for the next."""
    async with EmulatedNode(slots=8, answer_tokens=10) as node:
        priced = {"name": "n", "url": node.url, "cost_per_million_tokens": PRICE}
        async with running_gateway(tmp_path, [priced], settings_of(owner, limits)) as running:
            found = Counter[str]()
            # In turns: as long as something is left, some of fifty are admitted.
            while True:
                responses = await asyncio.gather(*(chat(running, 40) for _ in range(CALLERS)))
                more = codes(responses)
                if not more["ok"]:
                    break
                found += more
                await settle(running)
            rows = await settle(running)
    assert set(found + more) <= {"ok", reason}
    assert more[reason] == CALLERS
    assert int(responses[0].headers["retry-after"]) >= 1
    if reason == "insufficient_quota":
        assert responses[0].headers["x-should-retry"] == "false"
        assert responses[0].json()["error"]["type"] == reason
    assert len(rows) == found["ok"]
    tokens = sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows)
    paid = math.fsum(row["cost"] for row in rows)
    if "rpm" in limits:
        assert len(rows) == 20
    elif "budget" in limits:
        assert 1.5 - 5 * max(row["cost"] for row in rows) < paid <= 1.5
    else:
        # Nobody asks for more than 40 tokens of answer, and 10 of prompt.
        assert 500 - 50 < tokens <= 500


async def test_a_request_beyond_the_whole_limit_is_told_so(tmp_path: Path) -> None:
    limits = {"tpm": 100, "prompt_tokens": 50, "completion_tokens": 60}
    async with (
        EmulatedNode(slots=8) as node,
        running_gateway(tmp_path, [node.url], settings_of("key", limits)) as running,
    ):
        long = [{"role": "user", "content": "word " * 100}]
        response = await chat(running, 10, messages=long)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "'prompt_tokens' of key 'edge'" in error["message"]
        # A longer answer than may be is lowered to what may be.
        response = await chat(running, 5000, ignore_eos=True)
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 60
        response = await chat(running, 60, n=2)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "invalid_request")
        assert "retry-after" not in response.headers
        assert "100 tokens a minute (tpm)" in error["message"]
        assert "could never be admitted" in error["message"]


async def test_what_one_gateway_admits_is_gone_for_another(tmp_path: Path, store_url: str) -> None:
    """What it has used, and what runs there."""
    chosen = {"store": {"url": store_url}, **settings_of("key", {"rpm": 4, "concurrency": 2})}
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(EmulatedNode(slots=8))
        gateways = []
        for name in "ab":
            (tmp_path / name).mkdir()
            started = running_gateway(tmp_path / name, [node.url], chosen)
            gateways.append(await stack.enter_async_context(started))
        one, other = gateways

        def account() -> Account:
            return next(all_accounts(other.gateway.metering.limit_book))

        node.faults.next("hang", n=2, after_events=1)
        running = [asyncio.create_task(chat(one, 4)) for _ in range(2)]
        await until(lambda: account().others.running == 2)
        refused = await chat(other, 4)
        assert "2 requests at one time" in refused.json()["error"]["message"]
        node.faults.release()
        assert codes(await asyncio.gather(*running)) == {"ok": 2}
        await until(lambda: account().others.running == 0)
        assert codes([await chat(other, 4) for _ in range(3)])["ok"] == 2
        rows = await settle(other)
        assert len({row["process"] for row in rows}) == 2
