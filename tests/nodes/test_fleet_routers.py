"""Routers in the fleet: their models are nodes, followed by lists and events, and left in peace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.nodes.health import LONGEST_FOLLOW, HealthMonitor
from gateway.nodes.node import Node, NodeState
from gateway.nodes.router import LoadPhase
from gateway.nodes.state_files import PropertiesStore
from tests.emulator.recorded_router import RecordedRouter
from tests.nodes.build import Running, a_fleet, a_spec, inventory
from tests.virtual import in_virtual_time

SELDOM: dict[str, Any] = {"interval": 60.0, "discover_interval": 60.0, "timeout": 2.0}


@asynccontextmanager
async def routed(*models: str, **options: Any) -> AsyncIterator[tuple[Running, RecordedRouter]]:
    """A fleet of one router, `r`, which is probed once a minute."""
    async with (
        RecordedRouter(models, slots=2, context=4096, **options) as router,
        a_fleet(a_spec("r", router.url), **SELDOM) as fleet,
    ):
        await asyncio.sleep(1.0)
        yield fleet, router


def names(fleet: Running) -> set[str]:
    return set(fleet.fleet.nodes)


def phase(node: Node) -> LoadPhase:
    assert node.load is not None
    return node.load.phase


@in_virtual_time
async def test_each_model_of_a_router_is_a_node_and_the_router_serves_none() -> None:
    async with routed("a", "org/b") as (fleet, _):
        assert names(fleet) == {"r", "r/a", "r/org/b"}
        assert (fleet["r"].slots_total, fleet["r"].public_models) == (0, frozenset())
        assert (fleet["r/a"].slots_total, fleet["r/a"].context) == (2, 4096)
        assert fleet["r/org/b"].public_models == {"org/b"}
        assert fleet["r/a"].state is NodeState.UNLOADED
        assert fleet["r/a"].free_slots(fleet["r/a"].clock()) == 0
        assert fleet["r"].state is NodeState.READY


@in_virtual_time
async def test_what_happens_to_a_model_is_known_by_its_router_s_events() -> None:
    async with routed("a", load_seconds=4.0) as (fleet, router):
        node = fleet["r/a"]
        router._load_now("a")
        await asyncio.sleep(3.0)
        assert (node.state, node.load.progress if node.load else 0) == (NodeState.LOADING, 0.75)
        await asyncio.sleep(1.5)
        assert (node.state, node.free_slots(node.clock())) == (NodeState.READY, 2)
        assert node.sleep.measured == pytest.approx(4.0, abs=0.3)
        await router.kill_model("a")
        await asyncio.sleep(0.5)
        assert (node.state, phase(node)) == (NodeState.UNLOADED, LoadPhase.UNLOADED)
        assert "ended by itself" in node.reason


@in_virtual_time
async def test_a_router_without_events_is_read_with_each_probe() -> None:
    async with RecordedRouter(["a", "b"], models_max=0) as router:
        router.told["GET /models/sse"] = (404, b"{}")
        async with a_fleet(a_spec("r", router.url), interval=5.0, timeout=2.0) as fleet:
            await asyncio.sleep(1.0)
            router._load_now("a")
            await asyncio.sleep(6.0)
            assert fleet.state("r/a") is NodeState.READY
            router.models["b"].failing_loads = 9
            fleet.fleet.load_ordered(fleet["r/b"], "load", "test")
            router._load_now("b")
            fleet["r/b"].load.command_taken(fleet["r/b"].clock())  # type: ignore[union-attr]
            await asyncio.sleep(6.0)
            # A load that is lost is a failure here: nobody tells of restarts.
            assert fleet.state("r/b") is NodeState.FAILED


@in_virtual_time
async def test_a_router_that_is_down_takes_its_models_along_and_costs_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    look = HealthMonitor._may_read_list

    def counted(monitor: HealthMonitor) -> bool:
        nonlocal looks
        looks += 1
        return look(monitor)

    async with routed("a") as (fleet, router):
        router._load_now("a")
        await fleet.until_state("r/a", NodeState.READY)
        await router.kill()
        await fleet.until_state("r", NodeState.DOWN)
        assert fleet.state("r/a") is NodeState.DOWN
        monkeypatch.setattr(HealthMonitor, "_may_read_list", counted)
        fleet.fleet.read_models(fleet["r/a"])
        await asyncio.sleep(30.0)
        assert looks < 50
        async with RecordedRouter(["a"], port=router.port):
            await fleet.until_state("r/a", NodeState.UNLOADED, 200.0)
            assert "the router was restarted" in fleet["r/a"].reason


@in_virtual_time
async def test_events_are_asked_for_anew_after_a_while_and_after_an_outage() -> None:
    async with routed("a") as (fleet, router):
        assert router.asked["GET /models/sse"] == 1
        await asyncio.sleep(LONGEST_FOLLOW + 70.0)
        assert router.asked["GET /models/sse"] == 2
        # Its machine is gone: no connection ends.
        router.told = {"GET /health": (500, b"")}
        for _ in range(4):
            await fleet.fleet.probe("r")
        await asyncio.sleep(0.1)
        assert fleet.state("r") is NodeState.DOWN
        assert fleet["r"].router_record.followed(fleet["r"].clock()) is False
        router.told = {}
        await fleet.fleet.probe("r")
        await asyncio.sleep(1.0)
        assert router.asked["GET /models/sse"] == 3


@in_virtual_time
async def test_no_list_stops_the_watch() -> None:
    odd: list[Any] = [
        [1], {"data": 7}, {"data": [None]}, {"data": [{"id": "a", "status": {"value": {}}}]},
        {"data": [{"id": "a", "status": {"value": "unloaded", "args": ["x"] * 300_000}}]},
    ]  # fmt: skip
    async with routed("a") as (fleet, router):
        for told in odd:
            for path in ("GET /v1/models", "GET /v1/models?reload=1"):
                router.told[path] = (200, json.dumps(told).encode())
            await fleet.fleet.probe("r")
            await asyncio.sleep(1.0)
        assert "r/a" in names(fleet)
        router.told = {}
        router._load_now("a")
        await asyncio.sleep(1.0)
        assert fleet.state("r/a") is NodeState.READY


@in_virtual_time
async def test_the_inventory_says_which_models_are_used_and_by_which_names() -> None:
    async with routed("a", "b") as (fleet, router):
        change = fleet.fleet.apply(inventory(a_spec("r", router.url, models={"x": "b"})))
        assert change.changed == ["r"]
        await fleet.until(lambda: names(fleet) == {"r", "r/b"})
        assert fleet["r/b"].public_models == {"x"}
        # What a router has said is known at once, whatever it does now.
        fleet.fleet.apply(inventory(a_spec("r", router.url)))
        assert names(fleet) == {"r", "r/a", "r/b"}
        fleet.fleet.apply(inventory())
        assert names(fleet) == set()
        assert fleet.states("r/a")[-1] is None
        assert fleet.states("r/b")[-1] is None


@in_virtual_time
async def test_models_of_a_router_are_known_before_it_is_probed() -> None:
    async with RecordedRouter(["a", "b"]) as router:
        store = PropertiesStore()
        spec = a_spec("r", router.url)
        async with a_fleet(spec, properties_store=store, **SELDOM):
            pass
        await router.kill()
        declared = a_spec("r", router.url, models={"b": "b"})
        async with a_fleet(declared, properties_store=store, probed=False, **SELDOM) as fleet:
            assert names(fleet) == {"r", "r/b"}
            await fleet.until_state("r/b", NodeState.DOWN)


@in_virtual_time
async def test_a_drained_router_drains_its_models() -> None:
    async with routed("a") as (fleet, router):
        router._load_now("a")
        await asyncio.sleep(1.0)
        fleet.fleet.drain("r")
        assert fleet.state("r/a") is NodeState.DRAINING
        fleet.fleet.resume("r")
        assert fleet.state("r/a") is NodeState.READY
        fleet.fleet.drain("r/a")
        assert (fleet.state("r"), fleet.state("r/a")) == (NodeState.READY, NodeState.DRAINING)
