"""Problems as a whole gateway tells them, and the commands of their remedies, which are run."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Any

import pytest

from gateway.callers.keys import ApiKey, new_key
from gateway.terms import Priority
from gateway.watch.problems import Problem
from tests.cli.running import Ran, run
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until

OWN, OTHER = new_key("own"), new_key("other")
KEYS = [
    {"id": OTHER.id, "sha256": OTHER.sha256},
    {"id": OWN.id, "sha256": OWN.sha256, "limits": {"rpm": 1}},
]
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


async def stored_key(gateway: Running, *limits: str) -> tuple[str, str]:
    """The key and its id."""
    made = await follow(gateway, shlex.join(["llama-gateway", "keys", "create", *limits]))
    (key,) = [line.strip() for line in made.out.splitlines() if line.startswith("  lg_")]
    return key, key.split("_")[1]


async def test_a_paused_model_is_a_problem_that_its_command_ends(tmp_path: Path) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as gateway:
        await follow(gateway, "llama-gateway models pause demo")
        paused = (await problems(gateway))["model_paused:demo"]
        resume, audit = paused.commands
        assert "demo" in (await follow(gateway, audit)).out
        assert (await follow(gateway, resume)).status == 0
        assert await problems(gateway) == {}


async def test_nodes_of_one_model_that_differ_are_a_problem(tmp_path: Path) -> None:
    async with (
        EmulatedNode(build="b1-one") as one,
        EmulatedNode(build="b2-two") as other,
        running_gateway(tmp_path, [one.url, other.url]) as gateway,
    ):
        fleet = gateway.gateway.fleet
        await until(lambda: len(fleet.differences()) == 1)
        fleet.compare_models()
        differs = (await problems(gateway))["model_differs:demo"]
        assert differs.cause == f"{fleet.differences()[0].in_words()}."


async def test_the_differences_are_not_looked_for_when_problems_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as gateway:
        fleet = gateway.gateway.fleet
        asked: list[str] = []
        monkeypatch.setattr(fleet, "differences", lambda: asked.append("differences"))
        await problems(gateway)
        assert asked == []


async def flood_the_queue(gateway: Running, key: str) -> Problem:
    """Ask until the key's requests fill the queue; then all are cancelled."""
    depths = gateway.gateway.scheduler.depths
    asked = [
        asyncio.create_task(ask(gateway, one, max_tokens=400)) for one in (OTHER.text, OTHER.text)
    ]
    await until(lambda: depths()[Priority.NORMAL] == 1)
    asked += [asyncio.create_task(ask(gateway, key)) for _ in range(12)]
    await until(lambda: depths()[Priority.NORMAL] == 13)
    found = await problems(gateway)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    return found["flood"]


async def test_the_commands_against_a_flood_work_for_a_stored_key(tmp_path: Path) -> None:
    async with (
        EmulatedNode(slots=1, decode_tps=10.0) as node,
        running_gateway(tmp_path, [node.url], {"keys": KEYS}) as gateway,
    ):
        key, id_ = await stored_key(gateway, "--name", "alice")
        flood = await flood_the_queue(gateway, key)
        assert (flood.caller, flood.title) == (id_, "One caller floods the queue")
        show, limit = flood.commands
        assert limit == f"llama-gateway keys set {id_} --rpm 60"
        assert (await follow(gateway, show)).status == 0
        assert (await follow(gateway, limit)).status == 0
        assert "rpm 60" in (await follow(gateway, show)).out


async def refused_by_limits(gateway: Running, key: str, other: ApiKey = OTHER) -> Problem:
    assert await ask(gateway, other.text) == 200
    assert [await ask(gateway, key) for _ in range(10)].count(429) >= 8
    return (await problems(gateway))["flood"]


async def test_a_stored_key_beyond_its_limits_is_shown_and_not_given_a_limit(
    tmp_path: Path,
) -> None:
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], {"keys": KEYS}) as gateway,
    ):
        key, id_ = await stored_key(gateway, "--rpm", "1")
        flood = await refused_by_limits(gateway, key)
        assert "tell its user to send less" in flood.remedy
        assert "raise the limit by keys set" in flood.remedy
        (show,) = flood.commands
        assert show == f"llama-gateway keys show {id_}"
        assert "rpm 1" in (await follow(gateway, show)).out


async def test_a_key_of_the_settings_beyond_its_limits_names_its_entry(tmp_path: Path) -> None:
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url], {"keys": KEYS}) as gateway,
    ):
        flood = await refused_by_limits(gateway, OWN.text)
        assert "raise the limit in gateway.yaml, at its entry of keys" in flood.remedy
        (show,) = flood.commands
        assert (await follow(gateway, show)).status == 0


async def test_failed_requests_name_the_reason_and_the_node(tmp_path: Path) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as gateway:
        node.faults.set("status", status=500)
        statuses = [await ask(gateway, "any") for _ in range(3)]
        assert all(status >= 500 for status in statuses), statuses
        failing = (await problems(gateway))["failing"]
        assert failing.nodes == ("node-0",)
        assert "node-0 was the last node of 3" in failing.cause
