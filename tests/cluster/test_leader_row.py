"""The leadership's row in SQLite, in PostgreSQL, and in PostgreSQL behind pgbouncer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from gateway.cluster.leadership import FIRST_ROW, Change, LeaderRow
from gateway.cluster.tables import StoredLeadership
from gateway.store.database import locate_store
from gateway.store.failures import StoreError, StoreLocked, StoreUnavailable
from tests.cluster.pgbouncer import needs_pgbouncer, running_pgbouncer
from tests.polling import eventually
from tests.postgres import PostgresServer, needs_postgres
from tests.store.stores import opened

ANY_TIME = 20.0
"""Seconds that a step may take where its time is not the matter: machines may stand still."""


def leadership(url: str, seconds: float = ANY_TIME) -> StoredLeadership:
    return StoredLeadership(locate_store(url, Path("unused")), "c", seconds=seconds)


@pytest.fixture
async def row(server_url: str) -> AsyncIterator[StoredLeadership]:
    made = leadership(server_url)
    yield made
    await made.close()


FIRST = Change(FIRST_ROW, LeaderRow("a", 1, 0), is_claim=True)


async def claims_and_renewals_hold_to_their_conditions(url: str) -> None:
    one, other = leadership(url), leadership(url)
    elsewhere = StoredLeadership(locate_store(url, Path("unused")), "d", seconds=ANY_TIME)
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
    for each in (one, other, elsewhere):
        await each.close()


async def test_claims_and_renewals_hold_to_their_conditions(store_url: str) -> None:
    without_tables = leadership(store_url)
    with pytest.raises(StoreError):
        await without_tables.look()
    await without_tables.close()
    with opened(store_url):
        pass
    await claims_and_renewals_hold_to_their_conditions(store_url)


async def test_of_many_that_claim_at_once_one_gets_the_row(store_url: str) -> None:
    with opened(store_url):
        pass
    all_of_them = [leadership(store_url) for _ in range(8)]
    await asyncio.gather(*(one.look() for one in all_of_them))
    claims = [Change(FIRST_ROW, LeaderRow(f"p{i}", 1, 0), is_claim=True) for i in range(8)]
    both = zip(all_of_them, claims, strict=True)
    done = await asyncio.gather(*(one.change(claim) for one, claim in both))
    assert sum(done) == 1
    assert (await all_of_them[0].look()).holder == f"p{done.index(True)}"
    for one in all_of_them:
        await one.close()


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
    row = leadership(server_url, seconds=1.0)
    await row.look()
    with psycopg.connect(server_url) as holder:
        holder.execute(b"SELECT * FROM leadership FOR UPDATE")
        with pytest.raises((StoreLocked, StoreUnavailable)):
            await row.change(FIRST)
    patient = leadership(server_url)
    # The server has given up the claim too: it does not come true afterwards.
    assert await patient.look() == FIRST_ROW
    assert await patient.change(FIRST)
    await row.close()
    await patient.close()


@needs_postgres
@pytest.mark.slow
async def test_other_work_of_the_store_does_not_delay_it(
    server_url: str, row: StoredLeadership
) -> None:
    with opened(server_url) as store:
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
    row = leadership(server_url, seconds=1.0)
    await leadership(server_url).look()
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
    patient = leadership(server_url)
    await patient.look()
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
    await row.close()
    await patient.close()


async def answers(row: StoredLeadership) -> LeaderRow | None:
    with contextlib.suppress(StoreError):
        return await row.look()
    return None
