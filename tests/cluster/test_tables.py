"""The cluster's tables: the leadership's row, members, lists of sharers; the commands for them.

The row is tried in SQLite, in PostgreSQL, and in PostgreSQL behind pgbouncer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest
import yaml
from sqlalchemy import Connection, insert

from gateway.cluster.leadership import FIRST_ROW, Change, LeaderRow
from gateway.cluster.tables import (
    MemberRow,
    StoredLeadership,
    read_members,
    read_sharers,
    register,
    remove,
    stored_members,
    write_sharers,
)
from gateway.store.database import locate_store
from gateway.store.failures import StoreError, StoreLocked, StoreUnavailable
from gateway.store.schema import leadership, processes
from gateway.store.store import Store
from tests.cli.running import Ran, run
from tests.cluster.certificates import Authority
from tests.cluster.pgbouncer import needs_pgbouncer, running_pgbouncer
from tests.polling import eventually
from tests.postgres import PostgresServer, needs_postgres
from tests.store.stores import opened

ANY_TIME = 20.0
"""Seconds that a step may take where its time is not the matter: machines may stand still."""
FIRST = Change(FIRST_ROW, LeaderRow("a", 1, 0), is_claim=True)


@asynccontextmanager
async def row_of(
    url: str, cluster: str = "c", seconds: float = ANY_TIME
) -> AsyncIterator[StoredLeadership]:
    """The row as a process of this cluster reaches it, over connections of its own."""
    made = StoredLeadership(locate_store(url, Path("unused")), cluster, seconds=seconds)
    yield made
    await made.close()


async def claims_and_renewals_hold_to_their_conditions(url: str) -> None:
    async with row_of(url) as one, row_of(url) as other, row_of(url, "d") as elsewhere:
        assert await one.look() == await other.look() == FIRST_ROW
        assert await one.change(FIRST)
        first, second = LeaderRow("a", 1, 0), LeaderRow("b", 2, 0)
        assert not await other.change(Change(FIRST_ROW, LeaderRow("b", 1, 0), is_claim=True))
        assert await other.look() == first
        # The second is one whose answer was lost: the next renewal does not know of it.
        for counter in (1, 2):
            assert await one.change(Change(first, LeaderRow("a", 1, counter), is_claim=False))
        # The row was renewed since it was seen.
        assert not await other.change(Change(first, second, is_claim=True))
        seen = await other.look()
        assert seen == LeaderRow("a", 1, 2)
        assert await other.change(Change(seen, second, is_claim=True))
        assert not await one.change(Change(seen, LeaderRow("a", 1, 3), is_claim=False))
        assert await one.look() == second
        assert await elsewhere.look() == FIRST_ROW, "another cluster has a row of its own"


async def test_claims_and_renewals_hold_to_their_conditions(store_url: str) -> None:
    async with row_of(store_url) as without_tables:
        with pytest.raises(StoreError):
            await without_tables.look()
    with opened(store_url):
        pass
    await claims_and_renewals_hold_to_their_conditions(store_url)


async def test_of_many_that_claim_at_once_one_gets_the_row(store_url: str) -> None:
    with opened(store_url):
        pass
    async with contextlib.AsyncExitStack() as stack:
        all_of_them = [await stack.enter_async_context(row_of(store_url)) for _ in range(8)]
        await asyncio.gather(*(one.look() for one in all_of_them))
        claims = [Change(FIRST_ROW, LeaderRow(f"p{i}", 1, 0), is_claim=True) for i in range(8)]
        both = zip(all_of_them, claims, strict=True)
        done = await asyncio.gather(*(one.change(claim) for one, claim in both))
        assert sum(done) == 1
        assert (await all_of_them[0].look()).holder == f"p{done.index(True)}"


@needs_postgres
@needs_pgbouncer
@pytest.mark.slow
async def test_it_works_through_pgbouncer_and_leaves_nothing_in_its_sessions(
    server: PostgresServer, server_url: str
) -> None:
    with running_pgbouncer(server) as port:
        url = server_url.replace(f":{server.port}/", f":{port}/")
        await claims_and_renewals_hold_to_their_conditions(url)
        # The one connection of its pool is the one that the steps used.
        with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:

            def ask(sql: str) -> object:
                found = connection.execute(sql.encode()).fetchone()
                return found and found[0]

            assert ask("SHOW statement_timeout") == "0"
            assert ask("SHOW lock_timeout") == "0"
            assert ask("SELECT count(*) FROM pg_prepared_statements") == 0
            assert ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0


@needs_postgres
@pytest.mark.slow
async def test_a_row_that_another_session_holds_locked_is_given_up_in_time(
    server_url: str,
) -> None:
    async with row_of(server_url, seconds=1.0) as row, row_of(server_url) as patient:
        await row.look()
        with psycopg.connect(server_url) as holder:
            holder.execute(b"SELECT * FROM leadership FOR UPDATE")
            with pytest.raises((StoreLocked, StoreUnavailable)):
                await row.change(FIRST)
        # The server has given up the claim too: it does not come true afterwards.
        assert await patient.look() == FIRST_ROW
        assert await patient.change(FIRST)


@needs_postgres
@pytest.mark.slow
async def test_other_work_of_the_store_does_not_delay_it(server_url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(opened(server_url))
        row = await stack.enter_async_context(row_of(server_url))
        slow = asyncio.create_task(
            store.run(lambda connection: connection.exec_driver_sql("SELECT pg_sleep(5)"))
        )
        await row.look()
        assert await row.change(FIRST)
        assert not slow.done()
        await slow


@needs_postgres
@pytest.mark.slow
async def test_a_step_ends_in_time_though_the_server_is_halted_or_killed(
    server: PostgresServer, server_url: str
) -> None:
    async with row_of(server_url, seconds=1.0) as row, row_of(server_url) as patient:
        await patient.look()
        with contextlib.suppress(StoreError):
            await row.look()
        with server.halted():
            for _ in range(3):
                began = time.monotonic()
                with pytest.raises(StoreError):
                    await row.look()
                assert time.monotonic() - began < ANY_TIME
        await eventually(lambda: answers(row))
        # A terminated session costs one step at most.
        server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'llama-gateway leadership'"
        )
        with contextlib.suppress(StoreError):
            await patient.look()
        assert await patient.look() == FIRST_ROW
        server.kill()
        with pytest.raises(StoreError):
            await patient.look()
        server.start()
        await eventually(lambda: answers(patient))


async def answers(row: StoredLeadership) -> LeaderRow | None:
    with contextlib.suppress(StoreError):
        return await row.look()
    return None


# Members.


def member(name: str, process: str = "p", generation: int = 0) -> MemberRow:
    return MemberRow(name, process, generation, "10.0.0.1:8090", "1.0")


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as made:
        yield made


def registered(store: Store, own: MemberRow, cluster: str = "c") -> list[MemberRow]:
    return store.run_now(lambda connection: register(connection, cluster, own))


def test_the_process_that_registers_last_is_its_members(store: Store) -> None:
    assert registered(store, member("b", "p1")) == [member("b", "p1", 1)]
    assert registered(store, member("a", "p2")) == [member("a", "p2", 1), member("b", "p1", 1)]
    assert registered(store, member("b", "p3"))[1] == member("b", "p3", 2)
    # A database that has come back with an old state counts on from what is known.
    assert registered(store, member("b", "p3", 7))[1] == member("b", "p3", 7)
    registered(store, member("z"), "another cluster")
    names = [one.name for one in store.run_now(lambda one: read_members(one, "c"))]
    assert names == ["a", "b"]


def test_a_member_is_removed_by_name(store: Store) -> None:
    registered(store, member("a"))
    assert not store.run_now(lambda connection: remove(connection, "d", "a"))
    assert store.run_now(lambda connection: remove(connection, "c", "a"))
    assert not store.run_now(lambda connection: remove(connection, "c", "a"))
    assert store.run_now(lambda connection: stored_members(connection, "c")) == []
    # What is missing may be an old state of the database; this one was removed.
    assert store.run_now(lambda one: read_members(one, "c")) == [member("a", "", 1)]
    assert registered(store, member("a", "p2")) == [member("a", "p2", 2)]


def test_only_who_leads_replaces_the_lists_of_sharers(store: Store) -> None:
    def write(holder: str, epoch: int) -> bool:
        return store.run_now(lambda one: write_sharers(one, "c", holder, epoch, "[1]"))

    assert store.run_now(lambda connection: read_sharers(connection, "c")) == "[]"
    assert not write("a/p", 3)
    values = {"cluster": "c", "holder": "a/p", "epoch": 3, "counter": 0}
    store.run_now(lambda connection: connection.execute(insert(leadership).values(values)).rowcount)
    assert store.run_now(lambda connection: read_sharers(connection, "c")) == "[]"
    assert not write("a/p", 2)
    assert not write("b/p", 3)
    assert write("a/p", 3)
    assert store.run_now(lambda connection: read_sharers(connection, "c")) == "[1]"


def fill(store: Store, holder: str, process: str, seen_at: float) -> None:
    lead = {"cluster": "c", "holder": holder, "epoch": 3, "counter": 0}
    alive = {"id": process, "started_at": 1.0, "seen_at": seen_at, "host": "h", "pid": 1}

    def job(connection: Connection) -> None:
        connection.execute(insert(leadership).values(lead))
        connection.execute(insert(processes).values(alive))

    store.run_now(job)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Return the path of settings whose store has the members a, which leads, and b."""
    url = f"sqlite:///{tmp_path}/gateway.db"
    with opened(url) as store:
        for name in ("a", "b"):
            registered(store, member(name, f"p{name}"))
        fill(store, "a/pa/2", "pb", time.time())
    settings = Authority(tmp_path / "certificates").settings("a")
    written = settings.model_dump(mode="json", exclude_none=True)
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump({"store": {"url": url}, "cluster": written}))
    return str(path)


def test_the_command_lists_members_and_removes_who_is_gone_and_no_other(
    config: str, tmp_path: Path
) -> None:
    def cluster(*arguments: str) -> Ran:
        return run("cluster", *arguments, "--config", config)

    ran = cluster("members", "--json")
    told = json.loads(ran.out)
    assert (ran.status, told["cluster"]) == (0, "c")
    listed = [(one["name"], one["leads"], one["epoch"]) for one in told["members"]]
    assert listed == [("a", True, 3), ("b", False, None)]
    assert told["members"][0]["seen_seconds"] is None
    assert told["members"][1]["seen_seconds"] < 60
    assert "10.0.0.1:8090" in cluster("members").out
    living = cluster("remove", "b")
    assert living.status == 1
    assert "end its process first" in living.err
    assert cluster("remove", "b", "--force").status == 0
    unknown = cluster("remove", "b")
    assert unknown.status == 1
    assert "has no member b, but a" in unknown.err
    assert cluster("remove", "a").status == 0
    assert "no member yet" in cluster("members").err
    Path(config).write_text("queue: {max: 1}")
    ran = cluster("members")
    assert ran.status == 2
    assert "no section `cluster`" in ran.err
