"""`llama-gateway models`: over a running gateway of emulated nodes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.running import Ran, run
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no config/ of the project here


async def run_models(gateway: Running, *arguments: str) -> Ran:
    return await asyncio.to_thread(run, "models", *arguments, "--admin-url", gateway.admin_url)


async def test_a_model_is_paused_over_a_restart_and_resumed(tmp_path: Path) -> None:
    settings = {"store": {"url": "off"}, "models": {"alias": {"use": "demo"}}}
    async with EmulatedNode() as node:
        async with running_gateway(tmp_path, [node.url], settings) as gateway:
            listed = await run_models(gateway)
            paused = await run_models(gateway, "pause", "demo")
        async with running_gateway(tmp_path, [node.url], settings) as gateway:
            after = await run_models(gateway, "list")
            whole = await run_models(gateway, "--json")
            resumed = await run_models(gateway, "resume", "demo")
    head, *rows = listed.out.splitlines()
    assert head.split()[:4] == ["NAME", "STATE", "NODES", "SLOTS"]
    assert [row.split()[:2] for row in rows] == [["demo", "served"], ["alias", "served"]]
    assert (paused.status, paused.out) == (0, "demo: paused\n")
    assert [row.split()[:2] for row in after.out.splitlines()[1:]] == [
        ["demo", "paused"],
        ["alias", "paused"],
    ]
    assert [one["paused"] for one in json.loads(whole.out)["models"]] == [True, True]
    assert (resumed.status, resumed.out) == (0, "demo: served\n")


async def test_an_unknown_model_is_an_error_with_similar_names(tmp_path: Path) -> None:
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], {"store": {"url": "off"}}) as gateway,
    ):
        ran = await run_models(gateway, "pause", "demos")
    assert (ran.status, ran.out) == (1, "")
    assert "There is no model 'demos'. Did you mean 'demo'?" in ran.err


@pytest.mark.parametrize("arguments", [("pause",), ("list", "demo")])
def test_wrong_usage_is_2(arguments: tuple[str, ...]) -> None:
    assert run("models", *arguments).status == 2
