"""Problems as a whole gateway tells them, and the commands of their remedies, which are run."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Any

import pytest

from gateway.callers.keys import new_key
from gateway.terms import Priority
from gateway.watch.problems import Problem
from tests.cli.running import Ran, run
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until

OTHER = new_key("other")
KEYS = [{"id": OTHER.id, "sha256": OTHER.sha256}]
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no config/ of the project here


async def problems(gateway: Running) -> dict[str, Problem]:
    return {one.id: one for one in await gateway.gateway.live.view.read_problems()}


async def follow(gateway: Running, command: str) -> Ran:
    words = shlex.split(command)[1:]
    return await asyncio.to_thread(run, *words, "--admin-url", gateway.admin_url)


async def ask(gateway: Running, key: str, **body: Any) -> int:
    headers = {"authorization": f"Bearer {key}"}
    answer = await gateway.client.post(
        "/v1/chat/completions", json={**CHAT, **body}, headers=headers
    )
    return answer.status_code


async def test_a_paused_model_is_a_problem_that_its_command_ends(tmp_path: Path) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as gateway:
        await follow(gateway, "llama-gateway models pause demo")
        paused = (await problems(gateway))["model_paused:demo"]
        resume, audit = paused.commands
        assert "demo" in (await follow(gateway, audit)).out
        assert (await follow(gateway, resume)).status == 0
        assert await problems(gateway) == {}


async def test_the_commands_against_a_flood_work_for_a_stored_key(tmp_path: Path) -> None:
    async with (
        EmulatedNode(slots=1, decode_tps=10.0) as node,
        running_gateway(tmp_path, [node.url], {"keys": KEYS}) as gateway,
    ):
        made = await follow(gateway, "llama-gateway keys create --name alice")
        (key,) = [line.strip() for line in made.out.splitlines() if line.startswith("  lg_")]
        depths, id_ = gateway.gateway.scheduler.depths, key.split("_")[1]
        asked = [asyncio.create_task(ask(gateway, OTHER.text, max_tokens=400)) for _ in range(2)]
        await until(lambda: depths()[Priority.NORMAL] == 1)
        asked += [asyncio.create_task(ask(gateway, key)) for _ in range(12)]
        await until(lambda: depths()[Priority.NORMAL] == 13)
        flood = (await problems(gateway))["flood"]
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert (flood.caller, flood.title) == (id_, "One caller floods the queue")
        show, limit = flood.commands
        assert limit == f"llama-gateway keys set {id_} --rpm 60"
        assert (await follow(gateway, show)).status == 0
        assert (await follow(gateway, limit)).status == 0
        assert "rpm 60" in (await follow(gateway, show)).out
