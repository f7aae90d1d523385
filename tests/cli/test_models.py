"""`llama-gateway models`: over a running gateway of emulated nodes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.running import run, run_beside
from tests.emulator import EmulatedNode
from tests.emulator.router import EmulatedRouter
from tests.gateways import running_gateway, until


async def test_a_model_is_paused_over_a_restart_and_resumed(tmp_path: Path) -> None:
    settings = {"store": {"url": "off"}, "models": {"alias": {"use": "demo"}}}
    async with EmulatedNode() as node:
        async with running_gateway(tmp_path, [node.url], settings) as gateway:
            listed = await run_beside(gateway, "models")
            paused = await run_beside(gateway, "models", "pause", "demo")
            unknown = await run_beside(gateway, "models", "pause", "demos")
        async with running_gateway(tmp_path, [node.url], settings) as gateway:
            after = await run_beside(gateway, "models", "list")
            whole = await run_beside(gateway, "models", "--json")
            resumed = await run_beside(gateway, "models", "resume", "demo")
    head, *rows = listed.out.splitlines()
    assert head.split()[:4] == ["NAME", "STATE", "NODES", "SLOTS"]
    assert [row.split()[:2] for row in rows] == [["demo", "served"], ["alias", "served"]]
    assert (paused.status, paused.out) == (0, "demo: paused\n")
    rows = after.out.splitlines()[1:]
    assert [row.split()[:2] for row in rows] == [["demo", "paused"], ["alias", "paused"]]
    assert [one["paused"] for one in json.loads(whole.out)["models"]] == [True, True]
    assert (resumed.status, resumed.out) == (0, "demo: served\n")
    assert (unknown.status, unknown.out) == (1, "")
    assert "There is no model 'demos'. Did you mean 'demo'?" in unknown.err


async def test_a_router_s_models_are_shown_loaded_unloaded_and_pinned(tmp_path: Path) -> None:
    router = EmulatedRouter(["a", "org/b", "c"], models_max=2, slots=2)
    settings = {"store": {"url": "off"}}
    async with router, running_gateway(tmp_path, [router.url], settings) as gateway:
        nodes = gateway.gateway.fleet.nodes
        await until(lambda: "node-0/c" in nodes)
        loaded = await run_beside(gateway, "models", "load", "org/b", "node-0")
        await until(lambda: nodes["node-0/org/b"].state.value == "ready")
        listed = await run_beside(gateway, "models")
        pinned = await run_beside(gateway, "models", "pin", "org/b", "node-0")
        refused = await run_beside(gateway, "models", "unload", "org/b", "node-0")
        await run_beside(gateway, "models", "unpin", "org/b", "node-0")
        unloaded = await run_beside(gateway, "models", "unload", "org/b", "node-0", "--json")
    assert loaded.out.startswith("node-0/org/b: loading; ")
    first, second = listed.out.split("\n\n")
    states = dict(row.split()[:2] for row in first.splitlines()[1:])
    assert states == {"a": "on", "org/b": "served", "c": "on"}
    assert [row.split()[:3] for row in second.splitlines()[1:]] == [["org/b", "node-0", "ready"]]
    assert pinned.out.startswith("node-0/org/b: ready, pinned; ")
    assert (refused.status, "take the pin out" in refused.err) == (1, True)
    assert json.loads(unloaded.out)["state"] in {"unloading", "unloaded"}
    assert run("models", "load", "demo").status == 2
