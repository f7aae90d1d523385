"""Hours of nodes: for how long each node was in the fleet and alive, and what that cost.

Each process claims, once a minute, the time since its last look for every node that is alive then.
The store knows until when a node's time is counted and adds only what lies after that. So two
processes that look at the same nodes, as in a hand-over, count each minute once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import structlog
from sqlalchemy import Connection, case
from sqlalchemy.dialects import postgresql, sqlite

from gateway.store.schema import node_hours
from gateway.store.worker import StoreWorker
from gateway.usage.ledger import JobRunner
from gateway.usage.reports import DAY, date_of

INTERVAL = 60.0
"""Seconds between two looks."""

LONGEST_GAP = 150.0
"""Seconds since the last look beyond which nothing is claimed: the machine slept, or its clock was
set, and whether the nodes lived meanwhile is not known."""

MOST_CLAIMS = 10_000
"""Claims that wait for a store that can't be written; the oldest are given up."""

log = structlog.get_logger()


class AliveNode(NamedTuple):
    """A node that is alive now."""

    name: str
    tier: str
    cost_per_hour: float


class NodeUptime(NamedTuple):
    """A node was alive from `start` to `end`, in Unix seconds, at this price."""

    node: AliveNode
    start: float
    end: float


class NodeHoursRecorder:
    """Records the hours of the nodes that `alive` returns."""

    def __init__(
        self, store: JobRunner, alive: Callable[[], Iterable[AliveNode]], now: Callable[[], float]
    ) -> None:
        self._store = store
        self._alive = alive
        self._now = now
        self.worker = StoreWorker(
            self._look_and_write,
            INTERVAL,
            on_away=lambda why: log.warning("hours of nodes wait", why=why, claims=self.waiting),
        )
        self._looked_at: float | None = None
        self._claims: list[NodeUptime] = []

    @property
    def waiting(self) -> int:
        """Claims that are not written yet."""
        return len(self._claims)

    async def run(self) -> None:
        """Look once a minute, until cancelled."""
        self.look()
        await self.worker.run()

    async def _look_and_write(self) -> None:
        self.look()
        await self.write()

    def look(self) -> None:
        """Claim the time since the last look for all nodes that are alive."""
        now, before = self._now(), self._looked_at
        self._looked_at = now
        if before is None or not 0 < now - before <= LONGEST_GAP:
            return
        for node in self._alive():
            self._claim(NodeUptime(node, before, now))
        if (surplus := len(self._claims) - MOST_CLAIMS) > 0:
            del self._claims[:surplus]
            log.warning("hours of nodes are lost", claims=surplus)

    def _claim(self, claim: NodeUptime) -> None:
        for place, waiting in enumerate(self._claims):
            if waiting.node == claim.node and waiting.end == claim.start:
                self._claims[place] = waiting._replace(end=claim.end)
                return
        self._claims.append(claim)

    async def write(self) -> None:
        """Write the claims. Raises: StoreError; they wait then, and count once all the same."""
        claims = tuple(self._claims)
        if claims:
            await self._store.run(lambda connection: count_claims(connection, claims))
            del self._claims[: len(claims)]


def count_claims(connection: Connection, claims: Iterable[NodeUptime]) -> None:
    """A job of the store: add to each node's hours what no process has counted yet."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    add = dialect.insert(node_hours)
    counted, new = node_hours.c, add.excluded
    unseen = new.counted_until - counted.counted_until
    seconds = case((unseen <= 0, 0.0), (unseen >= new.seconds, new.seconds), else_=unseen)
    later = case((unseen > 0, new.counted_until), else_=counted.counted_until)
    statement = add.on_conflict_do_update(
        index_elements=list(node_hours.primary_key),
        set_={
            "seconds": counted.seconds + seconds,
            "cost": counted.cost + new.cost * seconds / new.seconds,
            "counted_until": later,
        },
    )
    rows = [
        {
            "node": claim.node.name,
            "tier": claim.node.tier,
            "day": date_of(start),
            "seconds": end - start,
            "cost": claim.node.cost_per_hour * (end - start) / 3600,
            "counted_until": end,
        }
        for claim in claims
        for start, end in by_day(claim.start, claim.end)
    ]
    if rows:
        connection.execute(statement, rows)


def by_day(start: float, end: float) -> Iterator[tuple[float, float]]:
    """The parts of a time, cut at midnight UTC; none is empty."""
    while start < end:
        midnight = (start // DAY + 1) * DAY
        yield start, min(end, midnight)
        start = midnight
