"""Memberships over a real PostgreSQL server, which fails in all ways, in real time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from gateway.cluster.leadership import Leadership
from gateway.cluster.tables import StoredLeadership
from gateway.store.database import locate_store
from gateway.store.store import Store
from tests.cluster.certificates import CLUSTER, Authority
from tests.cluster.memberships import Cluster, One
from tests.postgres import PostgresServer, needs_postgres

TERM = 4.0
LIMIT = 90.0  # seconds until what is to come must have come: machines may stand still
pytestmark = [needs_postgres, pytest.mark.slow]


class RealCluster(Cluster):
    """Members whose processes have connections of their own."""

    def __init__(self, authority: Authority, url: str) -> None:
        super().__init__(authority, TERM)
        self.url = url
        self.stores: list[Store] = []
        self.rows: list[StoredLeadership] = []

    def connections(self) -> tuple[Store, Leadership]:
        located = locate_store(self.url, Path("unused"))
        store = Store(located)
        store.start()
        row = StoredLeadership(located, CLUSTER, seconds=TERM / 4)
        self.stores.append(store)
        self.rows.append(row)
        return store, row

    async def close(self) -> None:
        for one in tuple(self.all):
            await self.end(one)
        for row in self.rows:
            await row.close()
        for store in self.stores:
            await store.aclose(LIMIT)


@contextlib.asynccontextmanager
async def cluster_of(folder: Path, url: str) -> AsyncIterator[RealCluster]:
    """Members a, b and c inside this context, one of which leads, and all know of each other."""
    made = RealCluster(Authority(folder), url)
    try:
        for name in ("a", "b", "c"):
            made.join(name)
        await made.settled(LIMIT)
        await made.until(lambda: all(map(knows_all, made.all)), LIMIT)
        yield made
    finally:
        await made.close()


def knows_all(one: One) -> bool:
    return one.membership.fence.sharers.names == ("a", "b", "c")


async def test_in_all_that_happens_to_a_server_somebody_leads_again(
    tmp_path: Path, server_url: str, server: PostgresServer
) -> None:
    async with cluster_of(tmp_path, server_url) as cluster:

        def all_are_alone() -> bool:
            return {one.role.kind for one in cluster.all} == {"alone"}

        with psycopg.connect(server_url) as holder:
            holder.execute(b"SELECT * FROM leadership FOR UPDATE")
            await cluster.until(lambda: not cluster.leaders(), LIMIT)
            # The row can still be read: it says that nobody leads.
            await cluster.until(all_are_alone, LIMIT)
        await cluster.settled(LIMIT)
        epoch = cluster.leader().role.epoch
        with server.halted():
            await cluster.until(all_are_alone, LIMIT)
        await cluster.settled(LIMIT)
        assert cluster.leader().role.epoch > epoch
        server.kill()
        await cluster.until(all_are_alone, LIMIT)
        server.start()
        await cluster.settled(LIMIT)
        assert all(one.replaced_by == [] for one in cluster.all)
        # A standby with an old row is promoted: a later epoch wins.
        epoch, database = cluster.leader().role.epoch, server_url.rpartition("/")[2]
        server.execute("UPDATE leadership SET holder = 'of old', epoch = 0, counter = 7", database)
        await cluster.until(lambda: any(one.role.epoch > epoch for one in cluster.leaders()), LIMIT)
        await cluster.settled(LIMIT)
        stored = server.execute("SELECT epoch FROM leadership", database)
        assert stored == [(cluster.leader().role.epoch,)]
