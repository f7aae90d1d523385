"""Healthy clients lose nothing beside slow ones; `make slow-clients` is the same with 10,000."""

from __future__ import annotations

import pytest

from tests.chaos.slow_clients import Plan, SlowClients

SMALL = Plan(
    clients=300, addresses=20, connections=400, minutes=0.4, healthy=5,
    ramp=3.0, pause=2.0, alone=2.0, settle=5.0, every=2.0,
)  # fmt: skip


@pytest.mark.slow
async def test_healthy_clients_lose_nothing_beside_slow_ones() -> None:
    run = SlowClients(SMALL)
    await run.run()
    assert not run.alone.lost
    assert not run.beside.lost
    assert len(run.beside.delays) > 50
    assert max(sample.slow for sample in run.samples) > 150
    assert {"head 408", "read 200"} <= set(run.crowd)
    assert run.samples[-1].descriptors <= run.samples[0].descriptors + 50
