from __future__ import annotations

import pytest

from gateway.nodes.node import NodeState
from gateway.nodes.prices import GpuCosts, alive_nodes
from tests.nodes.build import a_fleet, a_spec
from tests.virtual import now

DEAD = "http://127.0.0.1:9"


async def test_only_nodes_that_are_heard_of_cost_their_hours() -> None:
    specs = [a_spec(state.value, DEAD, cost_per_hour=0.5) for state in NodeState]
    async with a_fleet(*specs) as running:
        for state in NodeState:
            running.fleet.nodes[state.value].state = state
        alive = {node.name: node for node in alive_nodes(running.fleet)}
        assert set(alive) == {
            *("draining", "sleeping", "loading", "unloaded", "unloading", "failed"),
            *("ejected", "mute", "degraded", "ready"),
        }
        assert alive["ready"].cost_per_hour == 0.5
        assert alive["ready"].tier == "cpu"


async def test_tokens_cost_what_the_cheapest_gpu_node_of_their_model_takes() -> None:
    specs = [
        a_spec("cpu", DEAD, model="m", cost_per_hour=0.1),
        a_spec("free", DEAD, model="m", tier="gpu"),
        a_spec(
            "hosted",
            DEAD,
            kind="openai",
            model="m",
            tier="gpu",
            cost_per_million_tokens={"prompt": 1.0, "completion": 4.0},
        ),
        a_spec("own", DEAD, model=["m", "n"], tier="gpu", cost_per_hour=3.6, slots=2),
    ]
    async with a_fleet(*specs) as running:
        costs = GpuCosts(running.fleet, now)
        assert costs.of("m", 1000, 0, 500) == pytest.approx(0.003)
        # Its speed has not been measured.
        assert costs.of("n", 1000, 0, 500) is None
        assert costs.of("unknown", 1000, 0, 500) is None
        speed = running.fleet.nodes["own"].speed
        speed.prefill_tps, speed.decode_tps = 1000.0, 100.0
        # 6 s of one of two slots, at 3.6 an hour.
        assert costs.of("n", 1000, 0, 500) == pytest.approx(6 * 0.0005)
        assert costs.of("n", 1000, 1000, 0) == 0.0
