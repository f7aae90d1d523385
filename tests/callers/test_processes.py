"""Which processes on the store live, and what becomes of the open requests of those that do not."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from gateway.callers.ledger import Ledger, OpenRequest
from gateway.callers.processes import (
    DEAD_SECONDS,
    HEARTBEAT_SECONDS,
    LOST,
    ProcessIdentity,
    ProcessWatch,
    SeenProcess,
    is_gone,
    register,
    seen_processes,
    start_ticks,
    take_open_requests,
    unregister,
)
from gateway.store.schema import open_requests, usage
from gateway.store.store import Store
from tests.callers.build import NOW, Clocks
from tests.each_case import each_case
from tests.nodes.build import Clock
from tests.store.stores import opened

LIMIT = 60.0


def a_watch(clock: Clock, host: str = "here") -> ProcessWatch:
    return ProcessWatch(ProcessIdentity("me.0", host, 1, NOW), clock)


def a_request(id_: str) -> OpenRequest:
    return OpenRequest(
        id_, NOW, "alice", "team", None, "demo", "normal", "cpu", "a", "/v1/chat/completions",
        True, 1000, 0.5, 100, 7,
    )  # fmt: skip


def a_ledger(store: Store, own: ProcessIdentity, *open_: OpenRequest, clocks: Clocks) -> Ledger:
    return Ledger(store, own, clocks.wall, clocks.clock, lambda *_: open_)


def rows(connection: Connection, table: Any = usage) -> list[dict[str, Any]]:
    return [dict(row._mapping) for row in connection.execute(select(table))]


# Who is dead.


async def test_a_process_that_shows_itself_again_is_not_dead() -> None:
    clock = Clock()
    watch = a_watch(clock)
    assert watch.dead([SeenProcess("me.0", "here", 1, 0.0), SeenProcess("a.0", "x", 1, 5.0)]) == []
    clock.passes(DEAD_SECONDS - 1)
    assert watch.dead([SeenProcess("a.0", "x", 1, 6.0)]) == []
    clock.passes(DEAD_SECONDS - 1)
    assert watch.dead([SeenProcess("a.0", "x", 1, 6.0)]) == []
    clock.passes(1)
    assert watch.dead([gone := SeenProcess("a.0", "x", 1, 6.0)]) == [gone]


@each_case("hours", [-5000.0, -1.0, 1.0, 5000.0])
def test_the_clock_of_another_host_makes_nobody_look_dead(hours: float) -> None:
    """Nor one that is set back between two signs of life, nor a store that was away."""
    clock = Clock()
    watch = a_watch(clock)
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
            ticks = start_ticks(process.pid)
            mine = start_ticks(os.getpid())
            assert mine is not None
            assert ticks is not None
            assert mine <= ticks <= mine + 86400 * os.sysconf("SC_CLK_TCK")
        finally:
            process.kill()
    assert start_ticks(process.pid) is None


# Signs of life, and the requests of the dead.


def test_a_sign_of_life_moves_the_time_alone(store_url: str) -> None:
    own = ProcessIdentity("p.0", "here", 7, NOW)
    with opened(store_url) as store:
        for seconds in (1.0, 6.0):
            store.run_now(partial(register, own=own, now=NOW + seconds))
        assert store.run_now(seen_processes) == [SeenProcess("p.0", "here", 7, NOW + 6.0)]
        store.run_now(lambda connection: unregister(connection, own))
        assert store.run_now(seen_processes) == []


async def test_a_process_that_lives_after_all_keeps_its_requests(store_url: str) -> None:
    """It has shown itself between the look that found it dead and the one that would take them."""
    own, clocks = ProcessIdentity("p.0", "there", 7, NOW), Clocks()
    with opened(store_url) as store:
        await a_ledger(store, own, a_request("r1"), clocks=clocks).start(LIMIT)
        (seen,) = await store.run(seen_processes)
        await store.run(lambda connection: register(connection, own, NOW + 1.0))
        assert await store.run(lambda connection: take_open_requests(connection, seen)) == []
        assert len(await store.run(lambda connection: rows(connection, open_requests))) == 1
        (seen,) = await store.run(seen_processes)
        taken = await store.run(lambda connection: take_open_requests(connection, seen))
        assert [one["id"] for one in taken] == ["r1"]
        assert await store.run(seen_processes) == []


async def test_requests_of_a_process_that_is_not_registered_are_recovered_in_time(
    store_url: str,
) -> None:
    clocks = Clocks()
    with opened(store_url) as store:
        lost = ProcessIdentity("lost.0", "there", 7, NOW)
        await a_ledger(store, lost, a_request("r1"), clocks=clocks).start(LIMIT)
        await store.run(lambda connection: unregister(connection, lost))
        heir = a_ledger(store, ProcessIdentity("heir.0", "here", 8, NOW), clocks=clocks)
        await heir.start(LIMIT)
        clocks.advance(DEAD_SECONDS - 1)
        await heir.start(LIMIT)
        assert await store.run(rows) == []
        clocks.advance(16.0)
        await heir.start(LIMIT)
        (row,) = await store.run(rows)
        assert (row["id"], row["outcome"], row["process"]) == ("r1", LOST, "heir.0")
