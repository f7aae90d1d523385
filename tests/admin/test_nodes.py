from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.admin.nodes import LONGEST_DRAIN_DEADLINE, MOST_COLUMNS, DrainDeadlines, heat_map
from gateway.forward.in_flight import InFlightRegistry
from gateway.nodes.prompt_cache import PrefixHits
from tests.emulator import EmulatedNode
from tests.gateways import answered
from tests.nodes.build import a_spec, take
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import BareGateway, bare_gateway, error_of

DEAD = "http://127.0.0.1:9"
CONTRACT = {
    "name", "url", "kind", "tier", "state", "reason", "slots_total", "slots_busy", "in_flight",
    "models", "context", "prefill_tps", "decode_tps", "requests", "failures", "cost_per_hour",
}  # fmt: skip


async def shown(gateway: BareGateway, name: str) -> Any:
    return await answered(gateway.admin, f"/admin/nodes/{name}")


async def order(gateway: BareGateway, what: str) -> Any:
    """Have an operator do something with a node or a model, such as `nodes/a/drain`."""
    return await answered(gateway.admin, f"/admin/{what}", "POST")


@in_virtual_time
async def test_nodes_are_shown_in_their_order_with_their_work_and_no_key() -> None:
    async with (
        EmulatedNode(slots=3, context=2048, build="b42") as node,
        bare_gateway(
            a_spec("b", node.url, cost_per_hour=0.2, labels={"numa": "0"}, host="epyc"),
            a_spec("a", DEAD, model=["x", "y"], slots=4, standby=True, tier="gpu", api_key="sk-of"),
            serving=True,
        ) as gateway,
    ):
        assert (await gateway.chat(model="demo")).status_code == 200
        lease = take(gateway["b"])
        listed = await gateway.admin.get("/admin/nodes")
        nodes = listed.json()["nodes"]
        assert [one["name"] for one in nodes] == ["b", "a"]
        assert all(set(one) >= CONTRACT for one in nodes)
        assert nodes[0] == await shown(gateway, "b")
        lease.release()
    assert "sk-of" not in listed.text
    expected = {
        "url": node.url, "kind": "llama.cpp", "host": "epyc", "labels": {"numa": "0"},
        "state": "ready", "requests": 2, "slots_total": 3, "slots_busy": 1, "leased": 1,
        "in_flight": 1, "models": ["demo"], "context": 2048, "cost_per_hour": 0.2, "build": "b42",
        "drift": [], "endpoints": None, "endpoints_refused": ["embeddings", "rerank"],
        "purpose": "chat", "circuit": {"phase": "closed", "failures": 0, "open_for": None},
        "deadline_in": None,
    }  # fmt: skip
    assert {key: nodes[0][key] for key in expected} == expected
    dead = {"state": "standby", "tier": "gpu", "models": ["x", "y"], "prefill_tps": None}
    assert {key: nodes[1][key] for key in dead} == dead


@in_virtual_time
async def test_an_unknown_node_is_404_with_the_nearest_names() -> None:
    async with bare_gateway(a_spec("epyc-a", DEAD), a_spec("gpu", DEAD)) as gateway:
        for method, path in (
            ("GET", "epyc-b"), ("GET", "epyc-b/history"), ("POST", "epyc-b/drain"),
            ("POST", "epyc-b/resume"), ("POST", "epyc-b/probe"),
        ):  # fmt: skip
            response = await gateway.admin.request(method, f"/admin/nodes/{path}")
            error = error_of(response)
            assert (response.status_code, error["code"]) == (404, "node_not_found"), path
            assert "'epyc-a'" in error["message"]
            assert "gpu" not in error["message"]


@in_virtual_time
async def test_a_drained_node_gets_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    drains = tmp_path / "drains"
    async with bare_gateway(
        node := EmulatedNode(), other := EmulatedNode(), folder=tmp_path, serving=True
    ) as gateway:
        result = await order(gateway, "nodes/a/drain")
        assert (result["state"], result["draining"], result["deadline_in"]) == (
            "draining",
            True,
            None,
        )
        for _ in range(4):
            assert (await gateway.chat()).status_code == 200
        assert (node.requests, other.requests) == (0, 4)
        assert '"a"' in drains.read_text()

        result = await order(gateway, "nodes/a/resume")
        assert (result["state"], result["draining"]) == ("ready", False)
        assert '"a"' not in drains.read_text()


@in_virtual_time
async def test_at_the_deadline_running_requests_are_evicted_and_may_be_retried() -> None:
    """Those of other nodes run on."""
    async with bare_gateway(
        node := EmulatedNode(slots=2, decode_tps=5, answer_tokens=500),
        other := EmulatedNode(slots=1, decode_tps=100, answer_tokens=60, model="other"),
        serving=True,
    ) as gateway:
        plain = asyncio.create_task(gateway.chat(model="demo"))
        stream = asyncio.create_task(gateway.chat(model="demo", stream=True))
        elsewhere = asyncio.create_task(gateway.chat(model="other"))
        await gateway.until(lambda: (node.busy, other.busy) == (2, 1))
        result = await order(gateway, "nodes/a/drain?deadline=0.2")
        assert 0 < result["deadline_in"] <= 0.2
        refused, events = await asyncio.wait_for(asyncio.gather(plain, stream), 5)
        assert (await shown(gateway, "a"))["deadline_in"] is None
        assert (await elsewhere).status_code == 200
    assert (refused.status_code, error_of(refused)["code"]) == (503, "node_drained")
    assert refused.headers["retry-after"] == "1"
    assert "x-should-retry" not in refused.headers
    assert '"code":"node_drained"' in events.text
    assert "[DONE]" not in events.text


def test_a_deadline_of_no_seconds_is_told_on_the_gateways_own_event_loop() -> None:
    async def drain_now() -> tuple[float | None, float | None]:
        deadlines = DrainDeadlines(InFlightRegistry())
        deadlines.set("a", 0.0)
        before = deadlines.seconds_left("a")
        await asyncio.sleep(0.01)
        return before, deadlines.seconds_left("a")

    before, after = uvloop.run(drain_now())
    assert before == pytest.approx(0.0, abs=0.01)
    assert after is None


@pytest.mark.parametrize("word", ["soon", "-1", "nan", "inf", "", f"{LONGEST_DRAIN_DEADLINE + 1}"])
@in_virtual_time
async def test_an_invalid_deadline_changes_nothing(word: str) -> None:
    async with bare_gateway(EmulatedNode()) as gateway:
        response = await gateway.admin.post(f"/admin/nodes/a/drain?deadline={word}")
        assert (response.status_code, error_of(response)["param"]) == (400, "deadline")
        assert not gateway["a"].draining


async def test_a_probe_closes_the_circuit_of_a_node_that_answers_and_says_why_one_does_not() -> (
    None
):
    async with bare_gateway(
        node := EmulatedNode(), open=60.0, open_max=60.0, failures=1, serving=True
    ) as gateway:
        gateway.fleet.request_failed(gateway["a"], gateway.clock())
        result = await shown(gateway, "a")
        assert (result["state"], result["circuit"]["phase"]) == ("ejected", "open")
        assert 30 < result["circuit"]["open_for"] <= 66
        result = await order(gateway, "nodes/a/probe")
        assert (result["state"], result["circuit"]["phase"]) == ("ready", "closed")
        assert (result["probe"]["answer"], result["probe"]["detail"]) == ("up", "")
        assert result["probe"]["seconds"] > 0
        assert (await gateway.chat()).status_code == 200
        await node.kill()
        result = await order(gateway, "nodes/a/probe")
    assert result["probe"]["answer"] == "refused"
    assert "no connection" in result["probe"]["detail"]


@in_virtual_time
async def test_the_map_of_cached_prefixes_tells_nothing_of_prompts_and_is_bounded() -> None:
    async with bare_gateway(EmulatedNode(slots=2, cache_ram=0), serving=True) as gateway:
        for turn in range(3):
            await gateway.chat("Tell me of the secret garden. " * 60 + str(turn))
        told = await gateway.admin.get("/admin/cache?node=a")
        assert (await gateway.admin.get("/admin/cache?node=z")).status_code == 404
    many = heat_map({f"n{node}": {7: PrefixHits(1, 100, 70, 300)} for node in range(100)}, "n5")
    assert (len(many["nodes"]), many["nodes"][0], many["complete"]) == (MOST_COLUMNS, "n5", False)
    map_ = told.json()
    [row] = map_["prefixes"]
    assert row["tokens"] > 100
    assert len(row["prefix"]) == 6
    assert sum(cell[2] for cell in row["cells"] if cell) > 100
    assert "garden" not in told.text


ALIASES: dict[str, Any] = {
    "models": {"helper": {"use": ["demo", "org/other"]}, "alias": {"use": "demo"}}
}


@asynccontextmanager
async def two_models(
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[BareGateway, EmulatedNode]]:
    async with bare_gateway(
        one := EmulatedNode(slots=1, decode_tps=20),
        EmulatedNode(slots=1, decode_tps=20, model="org/other"),
        settings=settings,
        serving=True,
    ) as gateway:
        yield gateway, one


@in_virtual_time
async def test_a_paused_model_takes_no_request_and_others_do() -> None:
    async with two_models() as (gateway, _):
        for _ in range(2):  # Twice is the same as once.
            assert (await order(gateway, "models/demo/pause"))["paused"]
        refused = await gateway.chat(model="demo")
        served = await gateway.chat(model="org/other")
        listed = await gateway.public.get("/v1/models")
        status = (await gateway.admin.get("/admin/status")).json()
        metrics = (await gateway.admin.get("/metrics")).text
        for _ in range(2):
            assert not (await order(gateway, "models/demo/resume"))["paused"]
        again = await gateway.chat(model="demo")
        after = (await gateway.admin.get("/metrics")).text
        unknown = await gateway.admin.post("/admin/models/dem/pause")
    assert (refused.status_code, error_of(refused)["code"]) == (503, "model_paused")
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-should-retry"] == "false"
    assert (served.status_code, again.status_code) == (200, 200)
    assert {one["id"] for one in listed.json()["data"]} == {"demo", "org/other"}
    assert status["models_paused"] == ["demo"]
    assert 'llama_gateway_model_paused{model="demo"} 1' in metrics
    assert "llama_gateway_model_paused{" not in after
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
    assert "'demo'" in error_of(unknown)["message"]


@in_virtual_time
async def test_an_alias_goes_on_with_the_models_that_are_left() -> None:
    async with two_models(ALIASES) as (gateway, _):
        await order(gateway, "models/demo/pause")
        helped = await gateway.chat(model="helper")
        refused = await gateway.chat(model="alias")
        await order(gateway, "models/org/other/pause")
        none_left = await gateway.chat(model="helper")
        models = (await answered(gateway.admin, "/admin/models"))["models"]
        await order(gateway, "models/demo/resume")
        await order(gateway, "models/helper/pause")
        by_alias = await gateway.chat(model="helper")
        by_name = await gateway.chat(model="demo")
    assert helped.status_code == 200
    assert {one.status_code for one in (refused, none_left, by_alias)} == {503}
    assert by_name.status_code == 200
    paused = {one["name"] for one in models if one["paused"]}
    assert paused == {"demo", "org/other", "helper", "alias"}
    helper = next(one for one in models if one["name"] == "helper")
    assert helper["stands_for"] == ["demo", "org/other"]
    assert (helper["nodes"], helper["slots_total"]) == ({"ready": 2}, 2)


@pytest.mark.parametrize(("name", "other"), [("hidden", "nick"), ("nick", "hidden")])
@in_virtual_time
async def test_a_pause_and_a_cap_hold_for_a_models_other_names(name: str, other: str) -> None:
    capped = {"models": {"hidden": {"max_tokens": 2}}}
    async with bare_gateway(
        EmulatedNode(model="hidden", aliases=("nick",)), settings=capped, serving=True
    ) as gateway:
        served = await gateway.chat(model="nick", max_tokens=50)
        paused = await order(gateway, f"models/{name}/pause")
        refused = await gateway.chat(model=other)
        models = (await answered(gateway.admin, "/admin/models"))["models"]
        status = (await gateway.admin.get("/admin/status")).json()
        await order(gateway, f"models/{name}/resume")
        again = await gateway.chat(model="nick")
    assert served.json()["usage"]["completion_tokens"] == 2
    assert paused["paused"]
    assert (refused.status_code, error_of(refused)["code"]) == (503, "model_paused")
    assert [(one["name"], one["paused"]) for one in models] == [("hidden", True), ("nick", True)]
    assert status["models_paused"] == [name]
    assert again.status_code == 200
