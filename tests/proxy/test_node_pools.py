"""Callers whose nodes are those with certain labels: no attempt ever goes to another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.access.keys import new_key
from gateway.proxy.inbound.routes import ROUTES
from tests.emulator import EmulatedNode
from tests.proxy.proxy_over_nodes import BODIES, GENERATION_PATHS, ProxyOverNodes, proxy_over
from tests.virtual import in_virtual_time

LEFT, RIGHT, LOST = new_key("left"), new_key("right"), new_key("lost")
AS_LEFT = {"authorization": f"Bearer {LEFT.text}"}
AS_RIGHT = {"authorization": f"Bearer {RIGHT.text}"}
AS_LOST = {"authorization": f"Bearer {LOST.text}"}
PATHS = [route.path for route in ROUTES.values() if route.endpoint in {"chat", "infill"}]


@asynccontextmanager
async def two_pools(
    folder: Path, *nodes: EmulatedNode, **settings: Any
) -> AsyncIterator[ProxyOverNodes]:
    """Nodes a, b, c and so on, of the left and of the right pool in turn."""
    labels = tuple(
        {"labels": {"side": "left" if i % 2 == 0 else "right"}} for i in range(len(nodes))
    )
    keys = [
        {"id": key.id, "sha256": key.sha256, "cache": {"nodes": {"side": key.id}}}
        for key in (LEFT, RIGHT, LOST)
    ]
    chosen = {"keys": keys, "heartbeat": "off", **settings}
    async with proxy_over(folder, *nodes, nodes=labels, **chosen) as proxy:
        yield proxy


def several(number: int, **more: Any) -> list[EmulatedNode]:
    return [EmulatedNode(slots=2, infill=True, **more) for _ in range(number)]


def bodies(path: str) -> dict[str, Any]:
    prompt = {"input_prefix": "say", "input_suffix": "", "content": "say", "tokens": [1]}
    if "responses" not in path:
        prompt["prompt"] = "say something"
    return {**BODIES["/v1/messages"], **prompt, "input": "say"}


@in_virtual_time
async def test_every_path_keeps_to_the_callers_pool(tmp_path: Path) -> None:
    async with two_pools(tmp_path, *several(4)) as proxy:
        for path in PATHS:
            for headers, own in ((AS_LEFT, {"a", "c"}), (AS_RIGHT, {"b", "d"})):
                for _ in range(4):
                    reply = await proxy.running.client.post(
                        path, json=bodies(path), headers=headers
                    )
                    if path != "/v1/responses/input_tokens":  # no llama.cpp server has it
                        assert reply.status_code == 200, (path, reply.text)
                assert {attempt.node for attempt in proxy.attempts} <= own, path
                proxy.attempts.clear()


@in_virtual_time
async def test_a_full_pool_queues_though_the_other_is_idle(tmp_path: Path) -> None:
    async with two_pools(tmp_path, *several(2, decode_tps=50.0)) as proxy:
        replies = await asyncio.gather(*(proxy.ask(headers=AS_LEFT) for _ in range(8)))
        assert [reply.status_code for reply in replies] == [200] * 8
        assert {attempt.node for attempt in proxy.attempts} == {"a"}
        assert any(int(reply.headers["x-gateway-queue-ms"]) > 0 for reply in replies)


@in_virtual_time
async def test_a_retry_stays_in_the_pool(tmp_path: Path) -> None:
    nodes = several(4)
    async with two_pools(tmp_path, *nodes) as proxy:
        for _ in range(5):
            for node in (nodes[0], nodes[2]):
                node.faults.set("status", status=503)
            reply = await proxy.ask(headers=AS_LEFT)
            assert reply.status_code >= 500
            nodes[2].faults.clear()
            reply = await proxy.ask(headers=AS_LEFT)
            nodes[0].faults.clear()
        assert {attempt.node for attempt in proxy.attempts} == {"a", "c"}


@pytest.mark.parametrize("path", GENERATION_PATHS)
@in_virtual_time
async def test_a_resumed_stream_stays_in_the_pool(tmp_path: Path, path: str) -> None:
    nodes = several(6, decode_tps=200.0)
    async with two_pools(tmp_path, *nodes) as proxy:
        for node in nodes:
            node.faults.next("reset", after_events=8)
        reply = await proxy.stream(
            path, headers=AS_RIGHT, temperature=0, max_tokens=40, n_predict=40
        )
        assert reply.status == 200
        if ROUTES[path].api.transcript_reader is not None:
            assert len(proxy.attempts) > 1
        assert {attempt.node for attempt in proxy.attempts} <= {"b", "d", "f"}


@in_virtual_time
async def test_without_a_node_of_the_pool_it_is_as_without_a_node(tmp_path: Path) -> None:
    async with two_pools(
        tmp_path,
        *several(2),
    ) as proxy:
        for path in GENERATION_PATHS:
            reply = await proxy.ask(path, headers=AS_LOST, model="demo")
            assert reply.status_code == 404
        error = (await proxy.ask(headers=AS_LOST, model="demo")).json()["error"]
        assert error["code"] == "model_not_found"
        # A listener of this machine alone names nodes and pools.
        assert "side=lost" in error["message"]
        assert proxy.attempts == []
        client = proxy.running.client
        assert (await client.get("/v1/models", headers=AS_LOST)).json()["data"] == []
        assert (await client.get("/v1/models/demo", headers=AS_LOST)).status_code == 404
        assert len((await client.get("/v1/models", headers=AS_LEFT)).json()["data"]) == 1
        assert (await client.get("/props", headers=AS_LEFT)).json()["total_slots"] == 2
    log = (tmp_path / "gateway.log").read_text()
    assert "side=lost" in log


@in_virtual_time
async def test_strangers_do_not_learn_of_pools(tmp_path: Path) -> None:
    settings = {"listen": {"expose_node": False}}
    async with two_pools(tmp_path, *several(2), **settings) as proxy:
        error = (await proxy.ask(headers=AS_LOST, model="demo")).json()["error"]
        assert "side" not in error["message"]
        assert error["message"].startswith("The model 'demo' does not exist here.")


@in_virtual_time
async def test_each_pool_has_its_own_models(tmp_path: Path) -> None:
    nodes = [EmulatedNode(model="one"), EmulatedNode(model="two")]
    async with two_pools(tmp_path, *nodes) as proxy:
        for headers, own, other in ((AS_LEFT, "one", "two"), (AS_RIGHT, "two", "one")):
            listed = (await proxy.running.client.get("/v1/models", headers=headers)).json()
            assert [model["id"] for model in listed["data"]] == [own]
            # The only one there is, for this caller.
            assert (await proxy.ask(headers=headers)).json()["model"] == own
            refused = await proxy.ask(headers=headers, model=other)
            assert refused.status_code == 404
            assert f"'{other}'" not in refused.json()["error"]["message"].partition("Known here")[2]


@in_virtual_time
async def test_labels_take_effect_when_the_inventory_changes(tmp_path: Path) -> None:
    async with two_pools(tmp_path, *several(2)) as proxy:
        assert (await proxy.ask(headers=AS_LEFT)).status_code == 200
        specs = [
            {"name": name, "url": node.url, "host": name, "labels": {"side": side}}
            for (name, node), side in zip(proxy.servers.items(), ("right", "left"), strict=True)
        ]
        proxy.running.write_nodes(specs)
        await proxy.app.reload()
        proxy.attempts.clear()
        for _ in range(4):
            assert (await proxy.ask(headers=AS_LEFT)).status_code == 200
        assert {attempt.node for attempt in proxy.attempts} == {"b"}
