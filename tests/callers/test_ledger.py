"""Rows reach the store once each, whatever the store does meanwhile, in SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import itertools
import math
import operator
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from sqlalchemy import Connection, insert, select

from gateway.callers.ledger import (
    JOURNALED_WITHIN,
    ROW_COLUMNS,
    KeptRows,
    Ledger,
    OpenRequest,
    UsageRow,
    read_rows,
)
from gateway.callers.limits import LimitBook
from gateway.callers.meter import Meter
from gateway.callers.processes import (
    DEAD_SECONDS,
    EDGE_DIED,
    HEARTBEAT_SECONDS,
    LOST,
    MOST_TAKEN,
    ProcessIdentity,
    ProcessWatch,
    SeenProcess,
    is_gone,
    register,
    seen_processes,
    start_ticks,
    take_open_requests,
)
from gateway.config.keys import LimitSpec
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.events import EventBus, RequestRecord
from gateway.lease import AttemptCharge
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import open_requests, processes, revisions, usage
from gateway.store.store import Store
from gateway.terms import Caller, Priority
from tests.beside import beside
from tests.callers import ledger_rows
from tests.callers.build import NOW, FlakyStore
from tests.each_case import each_case
from tests.gateways import until
from tests.known import known
from tests.lease_requests import a_lease_request
from tests.nodes.build import Clock
from tests.virtual import in_virtual_time, now

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
        return [one for one in self.open if one.started_at <= before and but.get(one.id) is None]

    async def ids(self) -> list[str]:
        """The ids of all rows of the ledger."""
        return [row["id"] for row in await self.all(usage)]

    async def all(self, table: Any) -> list[dict[str, Any]]:
        key = next(iter(table.primary_key))

        def read(connection: Connection) -> list[dict[str, Any]]:
            found = connection.execute(select(table).order_by(key))
            return [dict(row._mapping) for row in found]

        return await self.store.run(read)


@pytest.fixture
def world(store: Store) -> World:
    """Return a world of each kind of store in turn."""
    return World(store)


def a_row(id_: str, process: str = "p1.0", **values: Any) -> UsageRow:
    row = ledger_rows.a_row(0, id=id_, process=process, started_at=NOW, **values)
    return tuple(row["class_" if name == "class" else name] for name in ROW_COLUMNS)


def an_open_request(id_: str, started_at: float, *, tokens: int = 0, **keys: Any) -> OpenRequest:
    return OpenRequest(
        id_, started_at, "alice", "team", None, "demo", "normal", "cpu", "a",
        "/v1/chat/completions", True, 1000, 0.5, 100, tokens, **keys,
    )  # fmt: skip


async def test_many_rows_of_every_kind_are_written_as_they_are(world: World) -> None:
    names = ("group_name", "user", "gpu_cost", "ttft_seconds", "stream")
    kinds: list[dict[str, Any]] = [
        dict(zip(names, one, strict=True))
        for one in itertools.product(*((None, "ünïcode"),) * 2, *((None, 0.5),) * 2, (False, True))
    ]
    # More than one statement holds of the first kind.
    many = [*kinds * 3, *kinds[:1] * 60, *kinds, {"client_request_id": "mine", "resumptions": 2}]
    added = [a_row(f"r{i:03}", **kind) for i, kind in enumerate(many)]
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


async def test_a_batch_is_written_once_though_nobody_knows_whether_it_was(world: World) -> None:
    store = FlakyStore(world.store)
    ledger = world.ledger(store)
    store.failures = ["after", "before", "after"]
    world.open = [an_open_request("o1", NOW)]
    for i in range(3):
        ledger.add(a_row(f"r{i}"))
    async with beside(ledger.worker.run(), ledger.keep_rows()):
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
async def test_a_store_that_is_away_is_told_of_once_though_there_is_nothing_to_write(
    connection: Connection,
) -> None:
    own = ProcessIdentity("p.0", "host", 1, NOW)
    store: Any = FlakyStore(connection)
    ledger = Ledger(store, own, lambda: NOW, now, lambda *_: ())
    problems: set[str | None] = set()
    with structlog.testing.capture_logs() as logs:
        async with beside(ledger.worker.run(), ledger.keep_rows()):
            await asyncio.sleep(1.0)
            store.is_away = True
            await asyncio.sleep(10.0)
            for _ in range(500):
                await asyncio.sleep(0.1)
                problems.add(ledger.worker.problem)
    assert problems == {"gone; wait"}
    assert [one["event"] for one in logs] == ["usage waits for the store"]


async def test_a_row_that_no_store_takes_does_not_hold_up_the_others(world: World) -> None:
    """Rows are booked in their order once the store has them."""
    ledger = world.ledger()
    for row in (a_row("r0"), a_row("bad", prompt_tokens=None), a_row("r2")):
        ledger.add(row)
    assert (ledger.added, ledger.booked) == (3, 0)
    await ledger.start(LIMIT)
    ledger.add(a_row("r3"))
    assert (ledger.added, ledger.booked) == (4, 3)
    await ledger.close(LIMIT)
    assert await world.ids() == ["r0", "r2", "r3"]
    assert (ledger.dropped, ledger.pending, ledger.booked) == (1, 0, 4)


async def test_beyond_the_bound_the_oldest_rows_are_dropped_and_counted(world: World) -> None:
    ledger = world.ledger(most_pending=10)
    for i in range(25):
        ledger.add(a_row(f"r{i:02}"))
    assert (ledger.pending, ledger.dropped) == (10, 15)
    await ledger.close(LIMIT)
    assert await world.ids() == [f"r{i}" for i in range(15, 25)]


async def test_a_store_that_never_answers_delays_the_end_for_a_bounded_time() -> None:
    own, silent = ProcessIdentity("p.0", "host", 1, NOW), FlakyStore(None, seconds=math.inf)
    ledger = Ledger(cast("Any", silent), own, lambda: NOW, Clock(), lambda *_: ())
    ledger.add(a_row("r"))
    await ledger.start(0.01)
    await ledger.close(0.01)
    assert ledger.pending == 1
    assert ledger.worker.problem == "the store does not answer"


async def test_a_long_request_is_in_the_journal_until_its_row_is_written(world: World) -> None:
    ledger = world.ledger()
    world.open = [an_open_request("o1", NOW + 100.0), an_open_request("o2", NOW + 100.4)]
    world.clock.passes(0.6)
    await ledger.start(LIMIT)
    (one,) = await world.all(open_requests)
    wanted = {
        "id": "o1", "process": ledger.own.id, "key": "alice", "group_name": "team",
        "reserved_tokens": 1000, "reserved_cost": 0.5, "prompt_tokens": 100,
    }  # fmt: skip
    assert {name: one[name] for name in wanted} == wanted
    # What the store has of it is brought up to date twice a second, and never goes down: not
    # when its attempt has ended and is not accounted for, nor without new tokens.
    for seconds, tokens, slot_seconds, wanted_use in (
        (0.25, 3, 0.0, (0, 0.0)),
        (0.25, 7, 0.0, (7, 0.0)),
        (0.5, 0, 0.0, (7, 0.0)),
        (0.5, 0, 1.0, (7, 1.0)),
    ):
        world.clock.passes(seconds)
        world.open = [an_open_request("o1", NOW + 100.0, tokens=tokens, slot_seconds=slot_seconds)]
        await ledger.start(LIMIT)
        (one,) = await world.all(open_requests)
        assert (one["completion_tokens"], one["slot_seconds"]) == wanted_use
    world.open = []
    ledger.add(a_row("o1", process=ledger.own.id, completion_tokens=9))
    await ledger.close(LIMIT)
    (row,) = await world.all(usage)
    assert row["completion_tokens"] == 9
    assert await world.all(open_requests) == await world.all(processes) == []


async def test_requests_of_a_dead_process_are_recovered_once_and_in_parts(world: World) -> None:
    count = 2 * MOST_TAKEN + 7
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
async def test_a_true_row_replaces_one_that_seemed_lost(world: World, outcome: str) -> None:
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
    assert found == [("r1", "p2.0", 7), ("r2", "p1.0", 10)]


async def test_an_open_request_is_its_new_processs_and_never_lost(world: World) -> None:
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
    assert await world.ids() == ["r2"]
    second.add(a_row("r1", "p2.0"))
    await second.close(LIMIT)
    assert await world.all(open_requests) == []
    rows = await world.all(usage)
    assert [(one["id"], one["outcome"]) for one in rows] == [("r1", "ok"), ("r2", LOST)]


async def test_open_requests_that_are_left_are_the_next_processs_or_lost(world: World) -> None:
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
    async with beside(ledger.worker.run(), ledger.keep_rows()):
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


async def test_a_job_and_its_rows_are_committed_together_or_not_at_all(world: World) -> None:
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
    assert await world.ids() == ["r0", "r1"]
    assert (len(await world.all(revisions)), ledger.written) == (1, 2)


@each_case("hours", [-5000.0, -1.0, 1.0, 5000.0])
def test_the_clock_of_another_host_makes_nobody_look_dead(hours: float) -> None:
    """Nor one that is set back between two signs of life, nor a store that was away."""
    clock = Clock()
    watch = ProcessWatch(ProcessIdentity("me.0", "here", 1, NOW), clock)
    for number in range(10):
        seen_at = NOW + hours * 3600 + number * HEARTBEAT_SECONDS
        assert watch.dead([SeenProcess("a.0", "there", 1, seen_at)]) == []
        clock.passes(HEARTBEAT_SECONDS)
    for seen_at in (NOW, NOW - 86400, NOW - 86395, NOW - 10 * 86400):
        assert watch.dead([SeenProcess("a.0", "there", 1, seen_at)]) == []
        clock.passes(DEAD_SECONDS - 1)
    # For ten minutes nobody could read or write; then the other is the first to write.
    clock.passes(600.0)
    assert watch.dead([SeenProcess("a.0", "there", 1, 605.0)]) == []


def test_a_process_that_shows_itself_again_is_not_dead() -> None:
    clock = Clock()
    watch = ProcessWatch(ProcessIdentity("me.0", "here", 1, NOW), clock)
    assert watch.dead([SeenProcess("me.0", "here", 1, 0.0), SeenProcess("a.0", "x", 1, 5.0)]) == []
    clock.passes(DEAD_SECONDS - 1)
    assert watch.dead([SeenProcess("a.0", "x", 1, 6.0)]) == []
    clock.passes(DEAD_SECONDS - 1)
    assert watch.dead([SeenProcess("a.0", "x", 1, 6.0)]) == []
    clock.passes(1)
    assert watch.dead([gone := SeenProcess("a.0", "x", 1, 6.0)]) == [gone]


def test_a_process_of_this_host_is_dead_at_once_if_its_pid_is_free_or_anothers() -> None:
    own = ProcessIdentity.of_this_process(NOW)
    seen = SeenProcess(own.id, own.host, own.pid, NOW)
    assert not is_gone(seen, own.host)
    assert is_gone(seen._replace(id="0123.1"), own.host)
    assert not is_gone(seen._replace(id="0123.0"), own.host), "it could not tell when it started"
    assert is_gone(seen._replace(pid=2**22 + 1), own.host)
    assert not is_gone(seen._replace(pid=2**22 + 1), "another host")


def test_the_start_of_a_process_whose_name_looks_like_more_fields_is_read(tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b c"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "60"]) as process:
        try:
            ticks, mine = known(start_ticks(process.pid)), known(start_ticks(os.getpid()))
            assert mine <= ticks <= mine + 86400 * os.sysconf("SC_CLK_TCK")
        finally:
            process.kill()
    assert start_ticks(process.pid) is None


async def test_a_process_that_lives_after_all_keeps_its_requests(world: World) -> None:
    """It has shown itself between the look that found it dead and the one that would take them."""
    run, ledger = world.store.run, world.ledger()
    world.open = [an_open_request("r1", NOW)]
    await ledger.start(LIMIT)
    (seen,) = await run(seen_processes)
    await run(lambda connection: register(connection, ledger.own, NOW + 200.0))
    assert await run(lambda connection: take_open_requests(connection, seen)) == []
    assert len(await world.all(open_requests)) == 1
    (seen,) = await run(seen_processes)
    taken = await run(lambda connection: take_open_requests(connection, seen))
    assert [one["id"] for one in taken] == ["r1"]
    assert await run(seen_processes) == []


def rows_in(path: Path) -> list[str]:
    return [row[0] for some in read_rows(path, len(ROW_COLUMNS), 2) for row in some]


def test_rows_are_private_and_read_by_others_when_their_process_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    first, second = KeptRows(folder, "p1"), KeptRows(folder, "p2")
    assert second.left() == []
    first.keep([a_row("r1"), a_row("r2")])
    first.keep([a_row("r3")])
    assert [one.stat().st_mode & 0o777 for one in (folder, folder / "p1.rows")] == [0o700, 0o600]
    assert second.left() == []
    first.close()
    assert [rows_in(path) for path in second.left()] == [["r1", "r2", "r3"]]


def test_the_file_goes_when_the_store_has_all_and_its_rows_have_a_bound(tmp_path: Path) -> None:
    kept = KeptRows(tmp_path, "p1", most_bytes=1000)
    for id_ in ("r1", "r2"):
        kept.keep([a_row(id_)])
        assert rows_in(tmp_path / "p1.rows") == [id_]
        kept.clear()
        assert list(tmp_path.iterdir()) == []
        assert kept.is_empty
    kept.keep([a_row("r1")])
    with pytest.raises(OSError, match="rows already"):
        kept.keep([a_row(f"r{number}") for number in range(2, 8)])
    kept.close()
    assert rows_in(tmp_path / "p1.rows") == ["r1"]


def test_what_a_full_disk_left_of_rows_is_cut_off(tmp_path: Path) -> None:
    program = f"""
import resource, signal
from pathlib import Path
from gateway.callers.ledger import KeptRows
from tests.callers.test_ledger import a_row
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
kept = KeptRows(Path({str(tmp_path)!r}), "p1")
kept.keep([a_row("r1")])
try:
    kept.keep([a_row(f"r{{number}}") for number in range(2, 8)])
except OSError:
    kept.keep([a_row("r8")])
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout == b"refused\n"
    assert rows_in(tmp_path / "p1.rows") == ["r1", "r8"]


def test_lines_that_are_no_rows_are_skipped(tmp_path: Path) -> None:
    kept = KeptRows(tmp_path, "p1")
    kept.keep([a_row("r1")])
    kept.close()
    path = tmp_path / "p1.rows"
    # A row whose first line is damaged does not give its second one to the row before.
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second + b"[" + first + second + b'\xff\n{"a": 1}\n["r2"]\n["r3", "p1')
    assert rows_in(path) == ["r1"]


async def test_rows_of_a_process_that_was_killed_without_a_store_are_booked_by_the_next_one(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    killed = world.ledger(FlakyStore(world.store, is_away=True), kept=KeptRows(folder, "p1.0"))
    async with beside(killed.worker.run(), killed.keep_rows()):
        for number in range(3):
            killed.add(a_row(f"r{number}"))
        await until(lambda: killed.booked == 3)
    known(killed.kept).close()
    following = world.ledger(kept=KeptRows(folder, "p2.0"))
    await following.start(10.0)
    assert await world.ids() == ["r0", "r1", "r2"]
    assert following.recovered == 3
    assert list(folder.iterdir()) == []


async def test_rows_are_booked_once_when_the_store_is_back_and_those_that_memory_had_no_room_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.callers.ledger.MOST_ROWS_AT_ONCE", 2)
    folder = tmp_path / "rows"
    store = FlakyStore(world.store, is_away=True)
    ledger = world.ledger(store, kept=KeptRows(folder, "p1.0"), most_pending=8, flush_rows=99)
    async with beside(ledger.worker.run(), ledger.keep_rows()):
        for batch in range(4):
            for number in range(4):
                ledger.add(a_row(f"r{batch}{number}"))
            await until(lambda: ledger.pending == ledger._on_disk)
        assert ledger.dropped == 0
        world.clock.now += 100
        store.is_away = False
        await until(lambda: not any(folder.iterdir()) and not ledger.pending)
    assert await world.ids() == [f"r{batch}{number}" for batch in range(4) for number in range(4)]


ALICE = Caller("k1", "alice", Priority.NORMAL, group="team", trust_user_headers=True)


class MeteredWorld:
    """A meter, whose clock stands still."""

    def __init__(self) -> None:
        self.clock = Clock(NOW)
        self.rows: list[UsageRow] = []
        self.tokens: dict[str, tuple[int, int]] = {}
        self._timers: list[Any] = []
        self.bus = EventBus(lambda _, work: self._timers.append(work))
        self.book = LimitBook(Settings(), clock=self.clock, wall_clock=self.clock)
        self.meter = Meter(
            self.book,
            self.bus,
            process="p1",
            add_row=self.rows.append,
            tokens_so_far=lambda id_: self.tokens.get(id_, (0, 0)),
            slot_seconds_so_far=lambda id_: 2.0 if id_ == "old" else 0.0,
            cost_of_use=lambda node, _, completion, seconds: completion + seconds if node else 0.0,
            wall_clock=self.clock,
        )

    def admit(self, id_: str, record: RequestRecord, **request: Any) -> Any:
        accounts = self.book.accounts(ALICE, "bob")
        return self.meter.admit(accounts, a_lease_request(id_, **request), record)

    def row(self) -> dict[str, Any]:
        self.bus.flush()
        (row,) = self.rows
        return dict(zip(ROW_COLUMNS, row, strict=True))

    @property
    def open(self) -> list[str]:
        """The ids of open requests that are older than a second."""
        return [one.id for one in self.meter.open_requests(self.clock.now - 1.0, {})]


def a_record(**keys: Any) -> RequestRecord:
    return RequestRecord("x", "/v1/chat/completions", "demo", Priority.PREMIUM, "k1", **keys)


def test_a_request_that_ends_is_a_row() -> None:
    world = MeteredWorld()
    record = a_record()
    metered = world.admit("req_7", record)
    world.clock.passes(2.5)
    record.describe(stream=True, model="demo")
    record.waited(0.25)
    record.attempt_began("a", "gpu", None)
    record.first_content_sent(0.75)
    record.resumed()
    world.meter.ended(metered, record)
    # What it used is known a little later, here that of two attempts.
    record.count_tokens(100, 40, 20)
    record.charge(AttemptCharge(0.25, 1.0, prefill_seconds=0.25, decode_seconds=0.5))
    record.charge(AttemptCharge(0.5, 1.4, prefill_seconds=0.25, decode_seconds=1.0))
    assert world.row() == {
        "id": "req_7", "process": "p1", "started_at": NOW, "ended_at": NOW + 2.5, "key": "k1",
        "group_name": "team", "user": "bob", "model": "demo", "class": "premium", "tier": "gpu",
        "node": "a", "path": "/v1/chat/completions", "stream": True, "prompt_tokens": 100,
        "cached_tokens": 40, "completion_tokens": 20, "slot_seconds": 2.4, "cost": 0.75,
        "gpu_cost": None, "attempts": 1, "status": 200, "outcome": "ok", "wait_seconds": 0.25,
        "ttft_seconds": 0.75, "prefill_seconds": 0.5, "decode_seconds": 1.5, "resumptions": 1,
        "client_request_id": "x",
    }  # fmt: skip


def test_a_request_that_fails_is_a_row_and_one_that_a_limit_refuses_is_none() -> None:
    world = MeteredWorld()
    limited = Caller("k2", "bob", Priority.NORMAL, limits=LimitSpec(concurrency=1))
    accounts, record = world.book.accounts(limited), a_record(prompt_tokens=30, cached_tokens=10)
    metered = world.meter.admit(accounts, a_lease_request("x", slots=0), record)
    with pytest.raises(GatewayError, match="concurrency"):
        world.meter.admit(accounts, a_lease_request("req_2"), a_record())
    record.fail(503, "queue_timeout")
    world.meter.ended(metered, record)
    row = world.row()
    assert (row["id"], row["status"], row["outcome"]) == ("x", 503, "queue_timeout")
    assert (row["tier"], row["node"], row["attempts"]) == (None, None, 0)
    assert (row["prompt_tokens"], row["cached_tokens"]) == (0, 0), "it had no slot"
    for name in ("ttft_seconds", "prefill_seconds", "decode_seconds", "client_request_id"):
        assert row[name] is None, name


def test_the_row_of_a_stored_request_is_handed_over_and_no_journal_has_it() -> None:
    world, handed_over = MeteredWorld(), list[UsageRow]()
    record = a_record(prompt_tokens=30, completion_tokens=10)
    accounts = world.book.accounts(ALICE)
    metered = world.meter.admit_stored(accounts, a_lease_request("row_1"))
    world.clock.passes(5.0)
    assert world.open == []
    world.meter.ended_stored(metered, record, handed_over.append)
    world.bus.flush()
    assert world.rows == []
    (row,) = handed_over
    told = dict(zip(ROW_COLUMNS, row, strict=True))
    assert (told["id"], told["process"], told["prompt_tokens"]) == ("row_1", "p1", 30)
    assert (told["completion_tokens"], told["outcome"]) == (10, "ok")


def test_a_stored_request_without_a_result_costs_nothing() -> None:
    world = MeteredWorld()
    limits = LimitSpec(concurrency=1, tokens_per_day=3000)
    accounts = world.book.accounts(Caller("k2", "bob", Priority.NORMAL, limits=limits))
    for _ in range(10):
        metered = world.meter.admit_stored(accounts, a_lease_request("row_1"))
        with pytest.raises(GatewayError, match="concurrency"):
            world.meter.admit_stored(accounts, a_lease_request("row_2"))
        world.meter.dropped(metered)
        world.bus.flush()
    (account,) = accounts.tracked
    assert (account.open, account.running, account.reserved_tokens) == (0, 0, 0)
    assert world.rows == []


def test_a_row_waits_for_the_tokens_of_all_sub_requests() -> None:
    world = MeteredWorld()
    record, part = a_record(), a_record(prompt_tokens=5, completion_tokens=7, slot_seconds=1.0)
    metered = world.admit("req_1", record)
    record.sub_request_began()
    record.sub_request_began()
    world.meter.ended(metered, record)
    world.bus.flush()
    record.sub_request_ended(part)
    assert world.rows == []
    assert world.open == []
    record.sub_request_ended(part)
    row = world.row()
    assert (row["prompt_tokens"], row["completion_tokens"], row["slot_seconds"]) == (10, 14, 2.0)


def test_requests_are_open_from_their_admission_to_their_row() -> None:
    world = MeteredWorld()
    record = a_record()
    old = world.admit("old", record)
    world.clock.passes(1.0)
    world.admit("new", a_record())
    assert world.open == ["old"]
    world.tokens["old"] = 12, 34
    (one,) = world.meter.open_requests(NOW, {})
    assert (one.started_at, one.key, one.group, one.user) == (NOW, "k1", "team", "bob")
    assert (one.prompt_tokens, one.completion_tokens, one.class_) == (12, 34, "premium")
    assert (one.slot_seconds, one.cost) == (2.0, 0.0)
    record.attempt_began("a", "gpu", None)
    (one,) = world.meter.open_requests(NOW, {})
    assert one.cost == 36.0
    world.meter.ended(old, record)
    world.clock.passes(1.0)
    # Until its tokens are counted.
    assert world.open == ["old", "new"]
    world.bus.flush()
    assert world.open == ["new"]
