"""What a running fleet tells the public edge: models, figures of servers, and whether any works."""

from __future__ import annotations

from gateway.catalog import FleetCatalog, ServerFigures
from gateway.nodes.node import NodeState
from tests.emulator import EmulatedNode
from tests.nodes.build import a_fleet, a_spec, take
from tests.virtual import in_virtual_time


@in_virtual_time
async def test_a_fleet_tells_whether_it_is_probed_works_and_has_a_free_slot() -> None:
    async with (
        EmulatedNode(slots=1) as server,
        a_fleet(a_spec(url=server.url), probed=False) as running,
    ):
        catalog: FleetCatalog = running.fleet
        assert (catalog.is_probed, catalog.has_free_slot()) == (False, False)
        await running.until_state("a", NodeState.READY)
        assert (catalog.is_probed, catalog.has_free_slot()) == (True, True)
        lease = take(running["a"])
        assert (catalog.has_free_slot(), catalog.has_usable_node()) == (False, True)
        lease.release()
        assert catalog.has_free_slot()
        await server.kill()
        await running.until_state("a", NodeState.DOWN)
        assert (catalog.is_probed, catalog.has_usable_node()) == (True, False)


@in_virtual_time
async def test_a_standby_node_that_a_request_would_start_is_usable() -> None:
    spec = a_spec(standby=True, model="m", start=["true"], stop=["true"])
    async with a_fleet(spec) as running:
        await running.until_state("a", NodeState.STANDBY)
        assert running.fleet.has_usable_node()


@in_virtual_time
async def test_a_server_of_several_models_is_counted_once() -> None:
    models = {"chat": "m", "code": "m"}
    spec = a_spec(models=models, slots=3, context=4096, endpoints=["chat", "vision"])
    async with a_fleet(spec) as running:
        await running.until_state("a", NodeState.DOWN)
        catalog: FleetCatalog = running.fleet
        assert catalog.model_index.servers_of(["chat", "code", "unknown"]) == [
            ServerFigures(
                3,
                4096,
                None,
                has_vision=True,
                has_audio=False,
                has_video=False,
                endpoints=frozenset({"chat", "vision"}),
                is_up=False,
                on_gpu=False,
                parameters=None,
                size=None,
                quantization=None,
                file=None,
            )
        ]
