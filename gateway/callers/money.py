"""Money: what requests cost, what the machines cost, and what the GPU tier would have cost.

All amounts are in the settings' currency. Nothing is made up: an amount that does not follow from
what was recorded is None, with the reason (`Amount`). docs/usage-reports.md has each formula with
figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog
from sqlalchemy import Connection, case

from gateway.callers.windows import DAY, date_of
from gateway.store.database import insert_for
from gateway.store.schema import node_hours
from gateway.store.store import Store, StoreWorker

MILLION = 1_000_000
# Requests may be charged for so much more than the recorded hours of their nodes, since hours are
# recorded by the minute: within it idle time costs nothing, beyond it the record has a gap.
RECORDED_SHARE = 0.99


class Amount(NamedTuple):
    """An amount of money; None where it is not known, and then the reason."""

    value: float | None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For a report: `{"value": 0.38}`, or `{"value": null, "reason": "..."}`."""
        return {"value": self.value} | ({} if self.reason is None else {"reason": self.reason})


def per_request(cost: float, requests: int) -> Amount:
    """`cost / requests`: 3.00 for 1,200 requests are 0.0025 each."""
    if requests <= 0:
        return Amount(None, "there was no request")
    return Amount(cost / requests)


def per_million_tokens(cost: float, tokens: int) -> Amount:
    """`cost / tokens * 1,000,000`, of prompt and completion together.

    3.00 for 1,500,000 tokens are 2.00 a million.
    """
    if tokens <= 0:
        return Amount(None, "no token was counted")
    return Amount(cost / tokens * MILLION)


@dataclass(frozen=True, slots=True)
class NodeHours:
    """How long a node was in the fleet and alive, and what that cost."""

    node: str
    tier: str
    seconds: float
    cost: float  # the sum of `cost_per_hour * seconds / 3600`, at the price of each time


def idle_cost(hours: Iterable[NodeHours], charged: float) -> Amount:
    """`cost of the nodes' hours - charged`: what was paid for time in which no request ran.

    `charged` is what requests on these nodes were charged, each for its slots' share of a node's
    time. A node at 0.20 that was up for 10 hours, whose requests were charged 0.50: 1.50.
    """
    paid = math.fsum(one.cost for one in hours)
    if paid <= 0:
        return Amount(None, "no hour of a node with cost_per_hour was recorded")
    if charged * RECORDED_SHARE > paid:
        return Amount(
            None,
            f"requests were charged {charged:.4g}, more than the {paid:.4g} of the recorded hours "
            "of their nodes: the record of hours does not cover all of the time",
        )
    return Amount(max(0.0, paid - charged))


def mean_price(hours: Iterable[NodeHours]) -> float | None:
    """What an hour of one machine costs: the mean over these hours; None: there are none."""
    listed = list(hours)
    seconds = math.fsum(one.seconds for one in listed)
    return math.fsum(one.cost for one in listed) / seconds * 3600 if seconds > 0 else None


def effective_hourly_cost(
    requests: Mapping[str, int], hours: Mapping[str, Iterable[NodeHours]]
) -> Amount:
    """The sum over the tiers of `share of requests * hourly price of one of its machines`.

    `requests` and `hours` are by tier. 90 % of the requests on CPUs at 0.20 and 10 % on GPUs at
    2.00 make 0.9 * 0.20 + 0.1 * 2.00 = 0.38. It weighs prices by requests, and is no bill: machines
    that run all the time cost `running_hourly_cost`.
    """
    total = sum(requests.values())
    if total <= 0:
        return Amount(None, "no request ran on a node")
    terms = []
    for tier, count in sorted(requests.items()):
        if count <= 0:
            continue
        price = mean_price(hours.get(tier, ()))
        if price is None:
            return Amount(None, f"no hour of a node of the tier {tier} was recorded")
        if price <= 0:
            return Amount(None, f"no node of the tier {tier} has cost_per_hour")
        terms.append(count / total * price)
    return Amount(math.fsum(terms))


def running_hourly_cost(hours: Iterable[NodeHours]) -> Amount:
    """The sum of the hourly prices of all nodes: what an hour costs in which all of them run.

    One machine at 0.20 and one at 2.00: 2.20, however the requests are shared between them.
    """
    prices = [price for one in hours if (price := mean_price([one])) is not None]
    if not prices or not any(prices):
        return Amount(None, "no hour of a node with cost_per_hour was recorded")
    return Amount(math.fsum(prices))


def all_gpu_cost(cost: float, known: int, requests: int) -> Amount:
    """The sum over all requests; None unless each of the `requests` has such a cost."""
    if requests <= 0:
        return Amount(None, "there was no request")
    if known < requests:
        return Amount(
            None,
            f"{requests - known} of {requests} requests have no price of the GPU tier: no GPU node "
            "with a price and known speed served their model when they ran",
        )
    return Amount(cost)


# Hours of nodes.


INTERVAL = 60.0  # seconds between two looks
# Seconds since the last look beyond which nothing is claimed: the machine slept, or its clock was
# set, and whether the nodes lived meanwhile is not known.
LONGEST_GAP = 150.0
MOST_CLAIMS = 10_000  # claims that wait for a store that can't be written; the oldest are given up
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


@dataclass(eq=False)
class NodeHoursRecorder:
    """Records how long the nodes that `alive` returns were in the fleet and alive.

    Each process claims, once a minute, the time since its last look for every node that is alive
    then. The store knows until when a node's time is counted and adds only what lies after that. So
    two processes that look at the same nodes, as in a hand-over, count each minute once.
    """

    store: Store
    alive: Callable[[], Iterable[AliveNode]]
    now: Callable[[], float]
    claims: list[NodeUptime] = field(default_factory=list, init=False)  # that are not written yet
    _looked_at: float | None = None

    async def run(self) -> None:
        """Look once a minute, until cancelled."""

        async def look_and_write() -> None:
            self.look()
            await self.write()

        def away(why: str) -> None:
            log.warning("hours of nodes wait", why=why, claims=len(self.claims))

        self.look()
        await StoreWorker(look_and_write, INTERVAL, on_away=away).run()

    def look(self) -> None:
        """Claim the time since the last look for all nodes that are alive."""
        now, before = self.now(), self._looked_at
        self._looked_at = now
        if before is None or not 0 < now - before <= LONGEST_GAP:
            return
        ended = {(one.node, one.end): place for place, one in enumerate(self.claims)}
        for node in self.alive():
            if (place := ended.get((node, before))) is None:
                self.claims.append(NodeUptime(node, before, now))
            else:
                self.claims[place] = self.claims[place]._replace(end=now)
        if (surplus := len(self.claims) - MOST_CLAIMS) > 0:
            del self.claims[:surplus]
            log.warning("hours of nodes are lost", claims=surplus)

    async def write(self) -> None:
        """Write the claims. Raises: StoreError; they wait then, and count once all the same."""
        claims = tuple(self.claims)
        if claims:
            await self.store.run(lambda connection: count_claims(connection, claims))
            del self.claims[: len(claims)]


def count_claims(connection: Connection, claims: Iterable[NodeUptime]) -> None:
    """A job of the store: add to each node's hours what no process has counted yet."""
    add = insert_for(connection)(node_hours)
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
