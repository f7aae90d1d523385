"""`/admin/placements`: which models routers have loaded, and operators' orders about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.emulator import EmulatedNode
from tests.emulator.routed_model import HostMemory, ModelFile
from tests.emulator.router import EmulatedRouter
from tests.gateways import Running, answered, running_gateway, until
from tests.servers import demo_model, running_router
from tests.virtual import in_virtual_time

GIB = 1 << 30
FILES = {name: ModelFile(memory=4 * GIB, load_seconds=3.0) for name in ("a", "org/b", "c")}
SIZES: dict[str, Any] = {"models": {name: {"memory": "4GiB"} for name in FILES}}


@asynccontextmanager
async def one_router(
    folder: Path, settings: dict[str, Any] = SIZES
) -> AsyncIterator[tuple[Running, EmulatedRouter]]:
    memory, plain = HostMemory(64 * GIB), EmulatedNode(model="plain")
    router = EmulatedRouter(FILES, models_max=0, memory=memory, slots=2, decode_tps=20)
    async with router, plain:
        nodes = [
            {"name": "r1", "url": router.url, "memory": "9GiB"},
            {"name": "a1", "url": plain.url},
        ]
        async with running_gateway(folder, nodes, settings) as running:
            await until(lambda: "r1/a" in running.gateway.fleet.nodes)
            yield running, router


async def placements(running: Running) -> dict[str, dict[str, Any]]:
    found = await answered(running.admin, "/admin/placements")
    return {one["name"]: one for one in found["placements"]}


async def done(running: Running, order: str, model: str, state: str | None = None) -> Any:
    body = {"order": order, "model": model, "node": "r1"}
    found = await answered(running.admin, "/admin/placements", "POST", json=body)
    if state is not None:
        await state_is(running, f"r1/{model}", state)
    return found


async def refused(running: Running, order: str, model: str, node: str = "r1") -> dict[str, Any]:
    body = {"order": order, "model": model, "node": node}
    response = await running.admin.post("/admin/placements", json=body)
    assert response.status_code >= 400, response.text
    return {"status": response.status_code, **response.json()["error"]}


async def state_is(running: Running, name: str, state: str) -> None:
    nodes = running.gateway.fleet.nodes
    await until(lambda: nodes[name].state.value == state, 60, lambda: nodes[name].reason)


@in_virtual_time
async def test_a_model_is_loaded_and_unloaded_by_order(tmp_path: Path) -> None:
    async with one_router(tmp_path) as (running, _):
        before = await placements(running)
        loading = await done(running, "load", "org/b", "ready")
        loaded = (await placements(running))["r1/org/b"]
        listed = (await running.admin.get("/admin/placements")).json()
        unloading = await done(running, "unload", "org/b", "unloaded")
        audit = (await running.admin.get("/admin/audit?action=placements")).json()["entries"]
        metrics = (await running.admin.get("/metrics")).text
    assert list(before) == ["r1/a", "r1/c", "r1/org/b"]
    assert (before["r1/a"]["state"], before["r1/a"]["since"]) == ("unloaded", None)
    assert loading["state"] == "loading"
    assert (loaded["node"], loaded["model"], loaded["memory"]) == ("r1", "org/b", 4 * GIB)
    assert loaded["since"].endswith("Z")
    assert loaded["loads"] == 1
    assert 3 <= loaded["load_seconds"] < 5
    assert "an operator has ordered it" in loading["reason"]
    assert listed["hosts"] == {"127.0.0.1": {"memory": 9 * GIB, "used": 4 * GIB, "unknown": 0}}
    assert "an operator has ordered it" in unloading["reason"]
    assert [(one["action"], one["target"], one["outcome"]) for one in audit] == [
        ("placements.unload", "r1/org/b", "done"),
        ("placements.load", "r1/org/b", "done"),
    ]
    reason = 'llama_gateway_model_unloads_total{node="r1",model="org/b",reason="operator"} 1'
    assert reason in metrics


@in_virtual_time
async def test_an_unload_waits_for_what_runs_and_a_drain_ends_it(tmp_path: Path) -> None:
    async with one_router(tmp_path) as (running, router):
        await done(running, "load", "a", "ready")
        asked = asyncio.create_task(running.chat(model="a", max_tokens=60))
        await until(lambda: router.models["a"].node.busy == 1)
        reason = (await done(running, "unload", "a"))["reason"]
        state = (await placements(running))["r1/a"]["state"]
        answer = await asked
        await state_is(running, "r1/a", "unloaded")
        await done(running, "load", "a", "ready")
        asked = asyncio.create_task(running.chat(model="a", max_tokens=900))
        await until(lambda: router.models["a"].node.busy == 1)
        drained = (await running.admin.post("/admin/nodes/r1/drain?deadline=1")).json()
        ended = await asked
    assert reason == "it ends its requests and is unloaded then: an operator has ordered it"
    assert (state, answer.status_code) == ("unloading", 200)
    assert drained["in_flight"] == 1
    assert (ended.status_code, ended.json()["error"]["code"]) == (503, "node_drained")


@in_virtual_time
async def test_a_pin_is_kept_over_a_restart_and_ends_with_unpin(tmp_path: Path) -> None:
    async with one_router(tmp_path) as (running, _):
        pinned = await done(running, "pin", "a", "ready")
        problem = await refused(running, "unload", "a")
    async with one_router(tmp_path) as (running, _):
        await state_is(running, "r1/a", "ready")
        again = (await placements(running))["r1/a"]
        unpinned = await done(running, "unpin", "a")
        await done(running, "unload", "a", "unloaded")
    assert pinned["pinned_by"] == again["pinned_by"] == "operator"
    assert unpinned["pinned_by"] is None
    assert (problem["status"], problem["code"]) == (409, "placement_refused")
    assert problem["message"] == "r1/a is pinned by an operator: take the pin out."


@in_virtual_time
async def test_what_does_not_fit_is_refused_or_a_problem_with_the_figures(tmp_path: Path) -> None:
    async with one_router(tmp_path) as (running, router):
        for name in ("a", "org/b"):
            await done(running, "pin", name, "ready")
        problems = [await refused(running, order, "c") for order in ("load", "pin")]
        node = {"name": "r1", "url": router.url, "memory": "9GiB", "preload": ["c"]}
        running.write_nodes([node])
        assert (await running.admin.post("/admin/reload")).status_code == 200
        await asyncio.sleep(130)
        (not_kept,) = await running.gateway.live.view.read_problems()
    for problem in problems:
        assert problem["status"] == 409
        assert "it takes 4 GiB, and 127.0.0.1 has 9 GiB for models, 8 GiB of" in problem["message"]
        assert "Unpin or unload another" in problem["message"]
    assert not_kept.id == "not_kept:c:r1"
    assert "127.0.0.1 has 9 GiB for models, 8 GiB of them taken" in not_kept.cause


@in_virtual_time
async def test_orders_that_make_no_sense_name_the_remedy(tmp_path: Path) -> None:
    pinned = {"models": {**SIZES["models"], "a": {"memory": "4GiB", "pin": ["r1"]}}}
    async with one_router(tmp_path, pinned) as (running, _):
        await state_is(running, "r1/a", "ready")
        found = [
            await refused(running, "load", "aa"),
            await refused(running, "load", "a", "r2"),
            await refused(running, "load", "plain", "a1"),
            await refused(running, "drop", "a"),
            await refused(running, "unpin", "a"),
        ]
        await running.admin.post("/admin/nodes/r1/drain")
        drained = await refused(running, "load", "c")
    assert [one["status"] for one in found] == [404, 404, 400, 400, 409]
    assert "has no model 'aa'. Did you mean 'a'?" in found[0]["message"]
    assert "There is no node 'r2'." in found[1]["message"]
    assert "is no router" in found[2]["message"]
    assert "gateway.yaml" in found[4]["message"]
    assert "llama-gateway nodes resume r1" in drained["message"]


@in_virtual_time
async def test_an_instance_is_a_node_by_its_own_name_and_counts_once(tmp_path: Path) -> None:
    async with one_router(tmp_path) as (running, _):
        await done(running, "load", "org/b", "ready")
        paths = ("/admin/nodes/r1/org/b", "/admin/nodes/r1%2Forg%2Fb")
        shown = [(await running.admin.get(path)).json() for path in paths]
        drained = (await running.admin.post("/admin/nodes/r1/org/b/drain")).json()
        nodes = (await running.admin.get("/admin/nodes")).json()["nodes"]
        status = (await running.admin.get("/admin/status")).json()
        problems = await running.gateway.live.view.read_problems()
    assert [(one["name"], one["router"], one["slots_total"]) for one in shown] == [
        ("r1/org/b", "r1", 2)
    ] * 2
    assert drained["state"] == "draining"
    assert status["nodes"] == {"ready": 2}
    assert next(one["reason"] for one in nodes if one["name"] == "r1").endswith(
        "1 of 3 models are loaded"
    )
    assert status["slots_total"] == 2 + 2 == sum(one["slots_total"] for one in nodes)
    assert {one["name"]: one["slots_total"] for one in nodes} == {
        "r1": 0, "r1/a": 0, "r1/c": 0, "r1/org/b": 2, "a1": 2,
    }  # fmt: skip
    assert [one.id for one in problems] == ["draining"]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.binary_only("the wheel's server has no router mode")
async def test_orders_on_a_real_router(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("a", "b"):
        (models / f"{name}.gguf").symlink_to(demo_model())
    (models / "cut.gguf").write_bytes(demo_model().read_bytes()[:100_000])
    with running_router(models, slots=2, context=4096, extra=("--models-max", "0")) as router:
        node = {"name": "r1", "url": router.url, "memory": "1GiB"}
        async with running_gateway(tmp_path, [node], {"store": {"url": "off"}}) as running:
            await until(lambda: "r1/cut" in running.gateway.fleet.nodes)
            await done(running, "load", "cut", "failed")
            await done(running, "pin", "a", "ready")
            found = await placements(running)
            problems = await running.gateway.live.view.read_problems()
            await done(running, "unpin", "a")
            await done(running, "unload", "a", "unloaded")
    assert "its log says why" in found["r1/cut"]["reason"]
    assert found["r1/a"]["memory"] > demo_model().stat().st_size
    assert (found["r1/a"]["loads"], found["r1/a"]["pinned_by"]) == (1, "operator")
    assert [one.id for one in problems] == ["model_out:cut", "load_failed:r1/cut"]
