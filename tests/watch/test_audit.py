from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from sqlalchemy import Connection, func, select

from gateway.store.failures import StoreUnavailable
from gateway.store.schema import audit as audit_table
from gateway.store.store import Store
from gateway.watch.audit import MOST_PENDING, MOST_REFUSED_PENDING, AuditQuery, AuditTrail
from tests.callers.build import FlakyStore
from tests.gateways import until
from tests.store.stores import opened


def ticking(start: float = 1_000.0) -> Callable[[], float]:
    times = iter(range(10**6))
    return lambda: start + next(times)


def rows(connection: Connection) -> int:
    return int(connection.execute(select(func.count()).select_from(audit_table)).scalar_one())


async def test_changes_are_kept_in_the_store_and_shown_the_latest_first(store_url: str) -> None:
    with opened(store_url) as store:
        trail = AuditTrail(ticking(), store)
        trail.record("alice", "operator", "drain", "a", details={"deadline": "5"})
        trail.record("file", None, "inventory", outcome="invalid_configuration")
        newest, oldest = await trail.entries(AuditQuery())
        assert (oldest.at, oldest.actor, oldest.role) == (1_000.0, "alice", "operator")
        assert (oldest.target, oldest.outcome, oldest.details) == ("a", "done", {"deadline": "5"})
        assert (newest.role, newest.outcome) == (None, "invalid_configuration")
        assert newest.id > oldest.id
        # Another process, or this one after a restart, adds to the same log.
        again = AuditTrail(ticking(2_000.0), store)
        again.record("gateway", None, "start")
        assert len(await again.entries(AuditQuery())) == 3


async def test_entries_are_found_by_time_page_action_and_target(store_url: str) -> None:
    with opened(store_url) as store:
        for trail in (AuditTrail(ticking(), store), AuditTrail(ticking())):
            for number in range(10):
                trail.record(
                    "alice", "admin", "keys.create" if number % 2 else "keysize", f"{number}%"
                )

            async def targets(trail: AuditTrail = trail, **query: Any) -> str:
                found = await trail.entries(AuditQuery(**query))
                return "".join(one.target[0] for one in found)

            assert await targets(limit=3) == await targets(since=1_007.0) == "987"
            assert await targets(until=1_002.0) == "10"
            last = (await trail.entries(AuditQuery(limit=3)))[-1]
            assert await targets(before=last.id, limit=3) == "654"
            assert await targets(action="keys") == await targets(action="keys.create") == "97531"
            assert await targets(action="keysize", target="2%") == "2"
            assert await targets(action="k%") == await targets(target="%") == ""


async def test_a_write_whose_answer_is_lost_is_repeated_and_done_once(store_url: str) -> None:
    with opened(store_url) as store:
        flaky = FlakyStore(store, failures=["after", "after"])
        trail = AuditTrail(ticking(), cast("Store", flaky), retry_seconds=0.01)
        work = asyncio.create_task(trail.run())
        for number in range(3):
            trail.record("alice", "admin", "probe", str(number))
        await until(lambda: not flaky.failures)
        await trail.flush()
        assert await store.run(rows, write=False) == 3
        work.cancel()


async def test_a_store_that_stays_away_costs_bounded_memory_and_refusals_push_no_change_out(
    store_url: str,
) -> None:
    with opened(store_url) as store:
        pass  # It is closed: what is recorded waits.
    away, memory = AuditTrail(ticking(), store), AuditTrail(ticking())
    for trail in (away, memory):
        trail.record("alice", "admin", "probe", "a")
        for number in range(2 * MOST_PENDING):
            trail.record("bob", "viewer", "drain", str(number), "role_required", refused=True)
        assert trail.lost == 0
    found = await memory.entries(AuditQuery(limit=10 * MOST_PENDING))
    assert (len(found), found[-1].target) == (MOST_REFUSED_PENDING + 1, "a")
    for number in range(MOST_PENDING + 5):
        away.record("alice", "admin", "probe", str(number))
    assert away.lost == 6
    with pytest.raises(StoreUnavailable):
        await away.flush()
    with pytest.raises(StoreUnavailable):
        await away.entries(AuditQuery())


async def test_refused_attempts_push_no_change_out_of_the_store(store_url: str) -> None:
    with opened(store_url) as store:
        trail = AuditTrail(ticking(), store, most_rows=5, most_refused_rows=3)
        for number in range(5):
            trail.record("alice", "admin", "probe", str(number))
        for number in range(40):
            trail.record("bob", "viewer", "drain", str(number), "role_required", refused=True)
            if number % 3 == 0:
                await trail.flush()
        found = await trail.entries(AuditQuery())
        assert [one.target for one in found if not one.refused] == ["4", "3", "2", "1", "0"]
        assert [one.target for one in found if one.refused] == ["39", "38", "37"]
        assert (found[0].outcome, found[0].details) == ("role_required", {})
        trail.record("alice", "admin", "probe", "5")
        found = await trail.entries(AuditQuery())
        assert [one.target for one in found if not one.refused] == ["5", "4", "3", "2", "1"]
        assert len(found) == 8


async def test_a_target_that_no_database_can_store_is_recorded(store_url: str) -> None:
    with opened(store_url) as store:
        trail = AuditTrail(ticking(), store)
        trail.record("bob", "viewer", "drain", "a\0b\ud800c", "role_required", refused=True)
        await trail.flush()
        assert [one.target for one in await trail.entries(AuditQuery())] == ["a?b?c"]
