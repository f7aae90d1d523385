"""Requests for models of nodes that are down or never reported their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.fleet.node import NodeState
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import CHAT

DEAD = "http://127.0.0.1:9"
MESSAGES = [{"role": "user", "content": "Hello"}]


async def asked(running: Running, **keys: Any) -> httpx.Response:
    return await running.client.post(CHAT, json={"messages": MESSAGES, **keys})


async def down(running: Running, name: str) -> None:
    nodes = running.gateway.fleet.nodes
    await until(lambda: nodes[name].state is NodeState.DOWN)


def outcome_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.headers["x-gateway-reason"]


@in_virtual_time
@pytest.mark.parametrize("asks", [{"model": "mistral-7b"}, {}])
async def test_while_a_node_never_reported_its_models_an_unknown_name_is_503(
    asks: dict[str, Any], tmp_path: Path
) -> None:
    async with running_gateway(tmp_path, [{"name": "a", "url": DEAD}], wait_ready=False) as running:
        await down(running, "a")
        answer = await asked(running, **asks)
        assert outcome_of(answer) == (503, "no_node")
        assert int(answer.headers["retry-after"]) > 0
        message = answer.json()["error"]["message"]
        assert f"'a' is down (no connection to {DEAD}" in message
        assert "'llama-gateway nodes'" in message


@in_virtual_time
async def test_an_error_names_only_states_to_clients_that_may_not_see_nodes(
    tmp_path: Path,
) -> None:
    nodes = [{"name": "epyc-a", "url": DEAD}, {"name": "epyc-b", "url": DEAD, "model": "declared"}]
    private = {"listen": {"expose_node": False}}
    async with running_gateway(tmp_path, nodes, private, wait_ready=False) as running:
        await down(running, "epyc-a")
        for answer in (
            await asked(running, model="other"),
            await running.client.get("/v1/models/other"),
        ):
            message = answer.json()["error"]["message"]
            assert answer.status_code == 503
            assert "1 of 2 nodes never said what it serves (down)" in message
            assert "epyc" not in message
            assert "127.0.0.1" not in message


@in_virtual_time
async def test_a_node_that_serves_nothing_does_not_make_a_name_503(tmp_path: Path) -> None:
    async with EmulatedNode() as server:
        nodes: list[dict[str, object]] = [
            {"name": "a", "url": server.url},
            {"name": "off", "url": DEAD, "enabled": False},
            {"name": "spare", "url": DEAD, "standby": True},
        ]
        async with running_gateway(tmp_path, nodes) as running:
            assert outcome_of(await asked(running, model="nobody")) == (404, "model_not_found")


@in_virtual_time
async def test_a_down_node_is_known_by_its_models_after_a_restart(tmp_path: Path) -> None:
    async with EmulatedNode(model="mistral-7b") as server:
        nodes = [{"name": "a", "url": server.url}]
        async with running_gateway(tmp_path, nodes):
            pass
        await server.kill()
        async with running_gateway(tmp_path, nodes, wait_ready=False) as running:
            await down(running, "a")
            models = (await running.client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in models] == ["mistral-7b"]
            assert outcome_of(await asked(running, model="nobody")) == (404, "model_not_found")
            began = now()
            assert outcome_of(await asked(running, model="mistral-7b")) == (503, "no_node")
            assert 30 <= now() - began < 32
            await server.revive()
            assert (await asked(running, model="mistral-7b")).status_code == 200


@in_virtual_time
async def test_a_node_at_another_address_does_not_inherit_models(tmp_path: Path) -> None:
    async with (
        EmulatedNode(model="mistral-7b") as server,
        running_gateway(tmp_path, [{"name": "a", "url": server.url}]),
    ):
        pass
    moved = [{"name": "a", "url": DEAD}]
    async with running_gateway(tmp_path, moved, wait_ready=False) as running:
        await down(running, "a")
        assert outcome_of(await asked(running, model="mistral-7b")) == (503, "no_node")
        assert (await running.client.get("/v1/models")).json()["data"] == []


@in_virtual_time
async def test_a_new_report_replaces_the_remembered_models(
    tmp_path: Path,
) -> None:
    async with EmulatedNode(model="old", slots=7) as server:
        nodes = [{"name": "a", "url": server.url}]
        async with running_gateway(tmp_path, nodes):
            pass
        server.engine.model = "new"
        async with running_gateway(tmp_path, nodes) as running:
            facts = running.gateway.fleet.nodes["a"].properties
            assert (facts.models, facts.slots, facts.remembered) == (("new",), 7, False)
            assert outcome_of(await asked(running, model="old")) == (404, "model_not_found")
