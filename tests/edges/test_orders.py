"""No order of messages, losses and deaths leaks a lease, or has one used twice."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from gateway.callers.ledger import ROW_COLUMNS
from gateway.lease import UsageReport
from tests.edges.played import USAGE
from tests.edges.simulation import Simulation
from tests.gateways import until
from tests.virtual import in_virtual_time

SEEDS = range(10)
QUICK, SLOW = 0.02, 0.7
"""Most seconds that a message takes; on a slow wire many leases come too late to be used."""


@pytest.mark.parametrize("latency", [QUICK, SLOW])
@pytest.mark.parametrize("seed", SEEDS)
def test_leases_end_once_whatever_is_lost_and_whoever_dies(seed: int, latency: float) -> None:
    @in_virtual_time
    async def run() -> None:
        world = Simulation(seed, latency=latency)
        for _ in range(3):
            await world.start_edge()
        await world.run(3.0)
        try:
            await world.come_to_rest()
        except TimeoutError:
            pytest.fail(f"left: {world.left()}")
        check_records(world)
        if latency is QUICK:
            assert world.most == Counter({"a": 1, "b": 2}), "the nodes had work"
            assert world.brain.late_leases == 0
        else:
            assert world.brain.late_leases > 0
        await world.brain.aclose()
        await asyncio.sleep(0.1)

    run()


@in_virtual_time
async def test_a_lease_whose_use_is_told_before_its_end_is_reclaimed_with_its_edge() -> None:
    world = Simulation(0)
    edge = await world.start_edge()
    world.begin(edge)
    await until(lambda: edge.session._leases)
    (lease_id,) = edge.session._leases
    edge.services.link.tell(UsageReport(lease_id, USAGE, None, 0))
    await until(lambda: edge.session.link.lost)
    world.kill(edge)
    await world.come_to_rest()
    assert world.left() == {}
    await world.brain.aclose()


def check_records(world: Simulation) -> None:
    """Each request is told of once; at an edge that died, at most once."""
    for id_, edge in world.begun.items():
        told = world.records[id_]
        assert told <= 1 if edge in world.dead else told == 1, id_
    assert set(world.records) <= set(world.begun)
    assert world.reasons["edge_died"] == len(world.broken)
    # The ledger has each of them, as all here are admitted, with the same reason.
    rows = [dict(zip(ROW_COLUMNS, row, strict=True)) for row in world.rows]
    assert Counter(str(row["id"]) for row in rows) == world.records
    reasons = Counter(None if row["outcome"] == "ok" else row["outcome"] for row in rows)
    assert reasons == world.reasons
