"""Rows reach the store once each, whatever the store does meanwhile, in SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import operator
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar, cast

import pytest
import structlog
from sqlalchemy import Connection, insert, select

from gateway.callers.ledger import JOURNALED_WITHIN, ROW_COLUMNS, Ledger, OpenRequest, UsageRow
from gateway.callers.processes import (
    DEAD_SECONDS,
    EDGE_DIED,
    LOST,
    MOST_TAKEN,
    ProcessIdentity,
)
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import open_requests, processes, revisions, usage
from gateway.store.store import Store
from tests.callers.build import NOW, FlakyStore
from tests.gateways import until
from tests.nodes.build import Clock
from tests.store.stores import opened
from tests.virtual import in_virtual_time, now

T = TypeVar("T")

LIMIT = 120.0  # seconds for each wait


class World:
    """One store, and a clock that all ledgers on it share."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock = Clock(100.0)
        self.open: list[OpenRequest] = []
        self._numbers = 0

    def ledger(self, store: Any = None, **keys: Any) -> Ledger:
        """The ledger of one more process, which lives on a host of its own."""
        self._numbers += 1
        own = ProcessIdentity(f"p{self._numbers}.0", f"host{self._numbers}", 1, NOW)
        return Ledger(
            store or self.store,
            own,
            now=lambda: NOW + self.clock.now,
            clock=self.clock,
            open_requests=self.open_requests,
            **keys,
        )

    def open_requests(self, before: float, but: Mapping[str, object]) -> list[OpenRequest]:
        """Those of `open`, as a meter tells them."""
        return [one for one in self.open if one.started_at <= before and but.get(one.id) is None]

    async def all(self, table: Any) -> list[dict[str, Any]]:
        """The rows of a table."""
        key = next(iter(table.primary_key))

        def read(connection: Connection) -> list[dict[str, Any]]:
            found = connection.execute(select(table).order_by(key))
            return [dict(row._mapping) for row in found]

        return await self.store.run(read)


@asynccontextmanager
async def a_world(url: str) -> AsyncIterator[World]:
    with opened(url) as store:
        yield World(store)


def a_row(id_: str, process: str = "p1.0", **values: Any) -> UsageRow:
    made = {
        "id": id_, "process": process, "started_at": NOW, "ended_at": NOW + 1, "key": "alice",
        "group_name": None, "user": None, "model": "demo", "class": "normal", "tier": "cpu",
        "node": "a", "path": "/v1/chat/completions", "stream": True, "prompt_tokens": 10,
        "cached_tokens": 0, "completion_tokens": 5, "slot_seconds": 0.5, "cost": 0.25,
        "gpu_cost": 0.0, "attempts": 1, "status": 200, "outcome": "ok", "wait_seconds": 0.5,
        "ttft_seconds": 0.75, "prefill_seconds": 0.25, "decode_seconds": 0.125, "resumptions": 0,
        "client_request_id": None, **values,
    }  # fmt: skip
    return tuple(made[name] for name in ROW_COLUMNS)


def an_open_request(id_: str, started_at: float, *, tokens: int = 0, **keys: Any) -> OpenRequest:
    return OpenRequest(
        id_, started_at, "alice", "team", None, "demo", "normal", "cpu", "a",
        "/v1/chat/completions", True, 1000, 0.5, 100, tokens, **keys,
    )  # fmt: skip


@contextmanager
def running(ledger: Ledger) -> Iterator[None]:
    task = asyncio.get_running_loop().create_task(ledger.worker.run())
    try:
        yield
    finally:
        task.cancel()


async def test_many_rows_of_every_kind_are_written_as_they_are(store_url: str) -> None:
    kinds: list[dict[str, Any]] = [
        dict(zip(("group_name", "user", "gpu_cost", "ttft_seconds", "stream"), one, strict=True))
        for one in itertools.product(
            (None, "team"), (None, "ünïcode"), (None, 0.5), (None, 0.75), (False, True)
        )
    ]
    # More than one statement holds of the first kind.
    many: list[dict[str, Any]] = [
        *kinds * 3,
        *kinds[:1] * 60,
        *kinds,
        {"client_request_id": "mine", "resumptions": 2},
    ]
    added = [a_row(f"r{i:03}", **kind) for i, kind in enumerate(many)]
    async with a_world(store_url) as world:
        ledger = world.ledger()
        for row in added:
            ledger.add(row)
        await ledger.close(LIMIT)
        rows = await world.all(usage)
        assert (ledger.pending, ledger.written) == (0, len(added))
    assert rows == [
        {**dict(zip(ROW_COLUMNS, row, strict=True)), "sequence": number}
        for number, row in enumerate(added, 1)
    ]


async def test_rows_are_written_without_being_asked(store_url: str) -> None:
    async with a_world(store_url) as world:
        ledger = world.ledger(flush_rows=3)
        with running(ledger):
            for i in range(7):
                ledger.add(a_row(f"r{i}"))
            await until(lambda: ledger.written == 7, LIMIT)
        assert len(await world.all(usage)) == 7


async def test_a_batch_is_written_once_though_nobody_knows_whether_it_was(store_url: str) -> None:
    async with a_world(store_url) as world:
        store = FlakyStore(world.store)
        ledger = world.ledger(store)
        store.failures = ["after", "before", "after"]
        world.open = [an_open_request("o1", NOW)]
        for i in range(3):
            ledger.add(a_row(f"r{i}"))
        with running(ledger):
            for _ in range(3):
                failures = ledger.worker.failures
                await until(lambda before=failures: ledger.worker.failures > before)
                assert ledger.pending >= 3
                assert ledger.worker.problem == "gone; wait"
                ledger.add(a_row(f"later{ledger.worker.failures}"))
                world.clock.passes(60.0)
            await until(lambda: ledger.pending == 0, LIMIT)
        rows = await world.all(usage)
        assert sorted(row["id"] for row in rows) == [
            "later1", "later2", "later3", "r0", "r1", "r2"
        ]  # fmt: skip
        # Numbers grow, but none that may have been used is used again.
        in_order = [row["id"] for row in sorted(rows, key=operator.itemgetter("sequence"))]
        assert in_order == ["r0", "r1", "r2", "later1", "later2", "later3"]
        assert len({row["sequence"] for row in rows}) == 6
        assert [row["id"] for row in await world.all(open_requests)] == ["o1"]
        assert (ledger.worker.problem, ledger.written) == (None, 6)


@in_virtual_time
async def test_others_run_while_the_open_requests_are_walked_over() -> None:
    class NoStore:
        async def run(self, job: Any, /, *, write: bool = True) -> Any:
            await asyncio.sleep(0)
            return []

    world = World(NoStore())  # type: ignore[arg-type]
    walked = most = 0

    def requests(*_: object) -> Iterator[OpenRequest]:
        nonlocal walked
        for one in world.open:
            walked += 1
            yield one

    async def count() -> None:
        nonlocal walked, most
        while True:
            most, walked = max(most, walked), 0
            await asyncio.sleep(0)

    ledger = dataclasses.replace(world.ledger(), open_requests=requests)
    world.open = [an_open_request(f"o{number}", 0.0) for number in range(2_000)]
    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    await ledger.start(LIMIT)
    world.open = [one._replace(completion_tokens=1) for one in world.open]
    await ledger.start(LIMIT)
    counting.cancel()
    assert 0 < most <= 300


@in_virtual_time
async def test_a_store_that_is_away_is_told_of_once_though_there_is_nothing_to_write() -> None:
    class ReadlessStore:
        """Fails from a look for dead processes on."""

        is_away = False

        async def run(self, job: Any, /, *, write: bool = True) -> Any:
            self.is_away = self.is_away or (now() > 1001.0 and not write)
            if self.is_away:
                raise StoreUnavailable("gone", "wait")
            return []

    own = ProcessIdentity("p.0", "host", 1, NOW)
    store = ReadlessStore()
    ledger = Ledger(cast("Any", store), own, lambda: NOW, now, lambda *_: ())
    problems: list[str | None] = []
    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(ledger.worker.run())
        for _ in range(600):
            await asyncio.sleep(0.1)
            if store.is_away:
                problems.append(ledger.worker.problem)
    task.cancel()
    assert len(problems) > 100
    assert set(problems) == {"gone; wait"}
    assert [one["event"] for one in logs] == ["usage waits for the store"]


async def test_a_row_that_no_store_takes_does_not_hold_up_the_others(store_url: str) -> None:
    """Rows are booked in their order once the store has them."""
    async with a_world(store_url) as world:
        ledger = world.ledger()
        for row in (a_row("r0"), a_row("bad", prompt_tokens=None), a_row("r2")):
            ledger.add(row)
        assert (ledger.added, ledger.booked) == (3, 0)
        await ledger.start(LIMIT)
        ledger.add(a_row("r3"))
        assert (ledger.added, ledger.booked) == (4, 3)
        await ledger.close(LIMIT)
        assert [row["id"] for row in await world.all(usage)] == ["r0", "r2", "r3"]
        assert (ledger.dropped, ledger.pending, ledger.booked) == (1, 0, 4)


async def test_beyond_the_bound_the_oldest_rows_are_dropped_and_counted(store_url: str) -> None:
    async with a_world(store_url) as world:
        ledger = world.ledger(most_pending=10)
        for i in range(25):
            ledger.add(a_row(f"r{i:02}"))
        assert (ledger.pending, ledger.dropped) == (10, 15)
        await ledger.close(LIMIT)
        assert [row["id"] for row in await world.all(usage)] == [f"r{i}" for i in range(15, 25)]


async def test_a_store_that_never_answers_delays_the_end_for_a_bounded_time() -> None:
    class SilentStore:
        async def run(self, job: Callable[[Connection], T], /, *, write: bool = True) -> T:
            await asyncio.Event().wait()
            raise AssertionError

    clock = Clock()
    own = ProcessIdentity("p.0", "host", 1, NOW)
    ledger = Ledger(cast("Any", SilentStore()), own, lambda: NOW, clock, lambda *_: ())
    ledger.add(a_row("r"))
    await ledger.start(0.01)
    await ledger.close(0.01)
    assert ledger.pending == 1
    assert ledger.worker.problem == "the store does not answer"


async def test_a_long_request_is_in_the_journal_until_its_row_is_written(store_url: str) -> None:
    async with a_world(store_url) as world:
        ledger = world.ledger()
        world.open = [an_open_request("o1", NOW + 100.0), an_open_request("o2", NOW + 100.4)]
        world.clock.passes(0.6)
        await ledger.start(LIMIT)
        (one,) = await world.all(open_requests)
        assert (one["id"], one["process"], one["key"], one["group_name"]) == (
            "o1", ledger.own.id, "alice", "team"
        )  # fmt: skip
        assert (one["reserved_tokens"], one["reserved_cost"]) == (1000, 0.5)
        assert (one["prompt_tokens"], one["completion_tokens"]) == (100, 0)
        # What the store has of it is brought up to date twice a second.
        for tokens, known in ((3, 0), (7, 7)):
            world.clock.passes(0.25)
            world.open = [an_open_request("o1", NOW + 100.0, tokens=tokens)]
            await ledger.start(LIMIT)
            (one,) = await world.all(open_requests)
            assert one["completion_tokens"] == known
        assert one["updated_at"] == NOW + 101.1
        # Its attempt has ended and is not accounted for.
        world.clock.passes(0.5)
        world.open = [an_open_request("o1", NOW + 100.0)]
        await ledger.start(LIMIT)
        (one,) = await world.all(open_requests)
        assert one["completion_tokens"] == 7
        # It has no new tokens, but holds its slot.
        world.clock.passes(0.5)
        world.open = [an_open_request("o1", NOW + 100.0, slot_seconds=1.0, cost=0.5)]
        await ledger.start(LIMIT)
        (one,) = await world.all(open_requests)
        assert (one["completion_tokens"], one["slot_seconds"], one["cost"]) == (7, 1.0, 0.5)
        world.open = []
        ledger.add(a_row("o1", process=ledger.own.id, completion_tokens=9))
        await ledger.close(LIMIT)
        assert await world.all(open_requests) == []
        (row,) = await world.all(usage)
        assert row["completion_tokens"] == 9
        assert await world.all(processes) == []


async def test_requests_of_a_dead_process_are_recovered_once_and_in_parts(store_url: str) -> None:
    count = 2 * MOST_TAKEN + 7
    async with a_world(store_url) as world:
        killed, first, second = world.ledger(), world.ledger(), world.ledger()
        spent = {"slot_seconds": 2.5, "cost": 0.75}
        world.open = [an_open_request(f"o{i:04}", NOW, tokens=i, **spent) for i in range(count)]
        await killed.start(LIMIT)
        # Its last batch came through, but the answer did not.
        world.open = []
        killed.add(a_row("o0000", completion_tokens=50))
        await killed.close(LIMIT)
        for seconds in (0.0, DEAD_SECONDS / 2, DEAD_SECONDS / 2):
            world.clock.passes(seconds)
            await asyncio.gather(first.start(LIMIT), second.start(LIMIT))
        own, *lost = await world.all(usage)
        assert (own["id"], own["completion_tokens"], own["outcome"]) == ("o0000", 50, "ok")
        assert [row["id"] for row in lost] == [f"o{i:04}" for i in range(1, count)]
        for number, row in enumerate(lost, 1):
            assert row["outcome"] == "lost"
            assert (row["prompt_tokens"], row["completion_tokens"]) == (100, number)
            assert (row["slot_seconds"], row["cost"]) == (2.5, 0.75)
        assert first.recovered + second.recovered == count - 1
        assert await world.all(open_requests) == []
        assert {row["id"] for row in await world.all(processes)} == {first.own.id, second.own.id}


@pytest.mark.parametrize("outcome", [LOST, EDGE_DIED])
async def test_a_true_row_replaces_one_of_a_request_that_seemed_lost(
    store_url: str, outcome: str
) -> None:
    async with a_world(store_url) as world:
        first, second = world.ledger(), world.ledger()
        first.add(a_row("r1", outcome=outcome, completion_tokens=0))
        first.add(a_row("r2"))
        await first.close(LIMIT)
        for id_ in ("r1", "r2"):
            second.add(a_row(id_, "p2.0", completion_tokens=7))
        await second.close(LIMIT)
        first.add(a_row("r1", outcome=outcome, completion_tokens=0))
        await first.close(LIMIT)
        rows = await world.all(usage)
        found = [(one["id"], one["process"], one["completion_tokens"]) for one in rows]
        assert found == [("r1", "p2.0", 7), ("r2", "p1.0", 5)]


async def test_an_open_request_is_its_new_processs_and_nobody_recovers_it_as_lost(
    store_url: str,
) -> None:
    async with a_world(store_url) as world:
        first, second, third = world.ledger(), world.ledger(), world.ledger()
        world.open = [an_open_request(id_, NOW + 90) for id_ in ("r1", "r2")]
        await first.start(LIMIT)
        assert [one["process"] for one in await world.all(open_requests)] == ["p1.0"] * 2
        # It dies; one of the requests goes on in another process.
        world.open = world.open[:1]
        second.adopt("r1")
        await second.start(LIMIT)
        assert [one["process"] for one in await world.all(open_requests)] == ["p2.0", "p1.0"]
        for _ in range(2):
            await third.start(LIMIT)
            world.clock.now += DEAD_SECONDS
            await second.start(LIMIT)
        await third.start(LIMIT)
        assert [one["id"] for one in await world.all(usage)] == ["r2"]
        second.add(a_row("r1", "p2.0"))
        await second.close(LIMIT)
        assert await world.all(open_requests) == []
        rows = await world.all(usage)
        assert [(one["id"], one["outcome"]) for one in rows] == [("r1", "ok"), ("r2", LOST)]


async def test_open_requests_that_are_left_are_the_next_processs_or_lost(store_url: str) -> None:
    async with a_world(store_url) as world:
        first, second = world.ledger(), world.ledger()
        world.open = [an_open_request(id_, NOW + 90) for id_ in ("r1", "r2")]
        await first.start(LIMIT)
        first.leave(["r1", "r2", "never journaled"])
        world.open = []
        await first.close(LIMIT)
        left = await world.all(open_requests)
        assert [one["process"] for one in left] == ["p1.0.left"] * 2
        assert await world.all(processes) == [], "it owes nothing"
        world.open = [an_open_request("r2", NOW + 90)]
        second.adopt("r2")
        for _ in range(2):
            await second.start(LIMIT)
            world.clock.now += DEAD_SECONDS
        await second.start(LIMIT)
        assert [(one["id"], one["outcome"]) for one in await world.all(usage)] == [("r1", LOST)]
        assert [one["process"] for one in await world.all(open_requests)] == ["p2.0"]


@pytest.mark.parametrize(
    ("seconds", "most"),
    [(0.003, JOURNALED_WITHIN), (0.2, JOURNALED_WITHIN), (0.4, 0.8), (0.5, 1.0)],
)
@in_virtual_time
async def test_a_slow_store_has_each_request_before_it_is_a_second_old(
    connection: Connection, seconds: float, most: float
) -> None:
    """However long each flush takes: the next one begins by the clock, with younger requests."""
    loop = asyncio.get_running_loop()
    admitted: dict[str, float] = {}

    def running_since(before: float, but: Mapping[str, object]) -> list[OpenRequest]:
        since = [(id_, at) for id_, at in admitted.items() if at <= before and id_ not in but]
        return [an_open_request(*one) for one in since]

    own = ProcessIdentity("p.0", "host", 1, NOW)
    store = FlakyStore(connection, seconds=seconds)
    ledger = Ledger(cast("Any", store), own, loop.time, loop.time, running_since)
    ages: list[float] = []
    with running(ledger):
        known: set[str] = set()
        for number in range(1000):
            admitted[f"r{number}"] = loop.time()
            await asyncio.sleep(0.01)
            if number < 200:
                known = set(admitted)  # it has learnt by now how slow its store is
            new = set(connection.scalars(select(open_requests.c.id))) - known
            known |= new
            ages += [loop.time() - admitted[id_] for id_ in new]
    assert len(ages) > 500
    assert max(ages) <= most + 0.03


async def test_a_job_and_its_rows_are_committed_together_or_not_at_all(store_url: str) -> None:
    async with a_world(store_url) as world:
        store = FlakyStore(world.store)
        ledger = world.ledger(store)
        await ledger.start(LIMIT)

        def job(connection: Connection) -> list[UsageRow]:
            connection.execute(insert(revisions).values(name="job", number=1))
            return [a_row("r0"), a_row("r1")]

        def fails(connection: Connection) -> list[UsageRow]:
            job(connection)
            raise ValueError("a fault of the job")

        with pytest.raises(ValueError, match="a fault of the job"):
            await ledger.write_with(fails)
        store.failures = ["before"]
        with pytest.raises(StoreUnavailable):
            await ledger.write_with(job)
        assert await world.all(revisions) == await world.all(usage) == []
        await ledger.write_with(job)
        assert [row["id"] for row in await world.all(usage)] == ["r0", "r1"]
        assert (len(await world.all(revisions)), ledger.written) == (1, 2)


async def test_rows_of_jobs_and_of_requests_have_numbers_in_the_order_of_their_commits(
    store_url: str,
) -> None:
    async with a_world(store_url) as world:
        store = FlakyStore(world.store)
        ledger = world.ledger(store)
        last, seen = 0, 0
        with running(ledger):
            for number in range(30):
                ledger.add(a_row(f"r{number:02}"))
                if number % 7 == 3:
                    store.failures = ["after"]
                rows = [a_row(f"w{number:02}")]

                def job(_: Connection, rows: list[UsageRow] = rows) -> list[UsageRow]:
                    return rows

                try:
                    await ledger.write_with(job)
                except StoreUnavailable:
                    await ledger.write_with(job)
                world.clock.passes(60.0)
                # As another process follows them: only what lies behind the last number.
                new = [row["sequence"] for row in await world.all(usage) if row["sequence"] > last]
                seen += len(new)
                last = max([last, *new])
            await until(lambda: ledger.pending == 0, LIMIT)
        new = [row["sequence"] for row in await world.all(usage) if row["sequence"] > last]
        assert seen + len(new) == len(await world.all(usage)) == 60
