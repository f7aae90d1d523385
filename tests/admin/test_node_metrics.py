from __future__ import annotations

import asyncio
import contextlib

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin import status
from gateway.admin.status import FRESH_SECONDS, WHOLE_SECONDS
from tests.emulator import EmulatedNode
from tests.nodes.build import a_spec
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import BareGateway, bare_gateway, error_of

TOTAL = "llamacpp:tokens_predicted_total"


async def scraped(gateway: BareGateway) -> dict[tuple[str, str], float]:
    response = await gateway.admin.get("/metrics/nodes")
    assert response.status_code == 200
    return {
        (sample.name, sample.labels["node"]): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


@in_virtual_time
async def test_nodes_metrics_are_on_one_page_whatever_some_nodes_answer() -> None:
    async with contextlib.AsyncExitStack() as stack:
        names = ("good", "other", "slow", "endless", "garbage", "refuses", "foreign")
        nodes = {name: await stack.enter_async_context(EmulatedNode()) for name in names}
        specs = [a_spec(name, node.url) for name, node in nodes.items()]
        gateway = await stack.enter_async_context(bare_gateway(*specs, timeout=2.0))
        await gateway.until(lambda: all(gateway[name].probe_history.up for name in names))
        for name, fault in (
            ("slow", {"kind": "hang"}),
            ("garbage", {"kind": "garbage"}),
            ("refuses", {"kind": "status", "status": 501}),
            ("foreign", {"kind": "status", "status": 200, "body": "<html>hello</html>"}),
            ("endless", {"kind": "status", "status": 200, "body": f"{TOTAL} 1\n" * 200_000}),
        ):
            nodes[name].faults.set(**fault, path="/metrics")
        began = now()
        values = await scraped(gateway)
        assert now() - began <= WHOLE_SECONDS
        assert {name: values["llama_gateway_node_metrics_up", name] for name in names} == {
            name: float(name in {"good", "other"}) for name in names
        }
        assert {node for family, node in values if family == TOTAL} == {"good", "other"}


@in_virtual_time
async def test_silent_nodes_hide_no_other_node_however_many_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status, "AT_ONCE", 2)
    async with contextlib.AsyncExitStack() as stack:
        # In the order in which they are asked: the silent ones first.
        names = [*(f"silent-{number}" for number in range(10)), "good"]
        nodes = {name: await stack.enter_async_context(EmulatedNode()) for name in names}
        specs = [a_spec(name, node.url) for name, node in nodes.items()]
        gateway = await stack.enter_async_context(bare_gateway(*specs, timeout=2.0))
        await gateway.until(lambda: all(gateway[name].probe_history.up for name in names))
        for name in names[:-1]:
            nodes[name].faults.set("hang", path="/metrics")
        values = await scraped(gateway)
        assert [node for family, node in values if family == TOTAL] == ["good"]


@in_virtual_time
async def test_a_page_is_shown_again_while_it_is_fresh_and_read_once_for_all() -> None:
    async with bare_gateway(node := EmulatedNode()) as gateway:
        await gateway.until(lambda: gateway["a"].probe_history.up)
        pages = await asyncio.gather(*(scraped(gateway) for _ in range(5)))
        assert all(page[TOTAL, "a"] == 0 for page in pages)
        node.faults.set("status", status=501, path="/metrics")
        assert (await scraped(gateway))["llama_gateway_node_metrics_up", "a"] == 1
        await asyncio.sleep(FRESH_SECONDS)
        assert (await scraped(gateway))["llama_gateway_node_metrics_up", "a"] == 0


@in_virtual_time
async def test_the_page_can_be_switched_off() -> None:
    settings = {"telemetry": {"node_metrics": False}}
    async with bare_gateway(a_spec("a", "http://127.0.0.1:9"), settings=settings) as gateway:
        response = await gateway.admin.get("/metrics/nodes")
        assert response.status_code == 404
        assert "telemetry.node_metrics" in error_of(response)["message"]
