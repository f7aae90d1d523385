"""Until its first content has been sent, a request survives any failure of a node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.callers.keys import new_key
from gateway.nodes.node import NodeState
from gateway.request.routes import ROUTES
from tests.emulator import EmulatedNode, expected_chat_text
from tests.forward.proxy_over_nodes import (
    BODIES,
    GENERATION_PATHS,
    MESSAGES,
    ProxyOverNodes,
    proxy_over,
    two_nodes,
)
from tests.gateways import until
from tests.virtual import in_virtual_time, now

AT_ONCE: dict[str, Any] = {"after_events": 0}
UNAVAILABLE = b':\n\ndata: {"error":{"code":503,"message":"x"}}\n\n'
FAULTS_BEFORE_CONTENT: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ("reset", "close", "garbage", "hang", "head_bomb")),
    *((kind, AT_ONCE) for kind in ("reset", "close", "hang", "cut", "end", "error_event")),
    ("garbage_body", AT_ONCE),
    ("cut", {"after_events": 0, "reset": True}),
    ("insert", {"after_events": 0, "what": "not_json"}),
    ("insert", {"after_events": 0, "what": "huge", "size": 2 << 20}),
    ("insert", {"after_events": 0, "data": UNAVAILABLE}),
    ("slow_head", {"seconds": 0.05}),
    *(
        ("status", {"status": status, "body": '{"error":{"message":"no"}}'})
        for status in (429, 500, 502, 503, 504)
    ),
]


@pytest.mark.parametrize(("kind", "options"), FAULTS_BEFORE_CONTENT)
@in_virtual_time
async def test_another_node_answers_the_client_sees_nothing_and_the_first_is_blamed(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    impatient = {"first_byte": 0.4}
    async with two_nodes(tmp_path, answer_tokens=8, timeouts=impatient) as (proxy, one, _):
        one.faults.set(kind, **options)
        reply = await proxy.stream()
        assert (reply.status, reply.errors) == (200, [])
        assert reply.text == expected_chat_text(MESSAGES, 8)
        assert reply.events[-1] == b"data: [DONE]\n\n"
        assert reply.headers["x-gateway-attempts"] == "2"
        assert reply.headers["x-gateway-node"] == "b"
        assert [node for node, _ in proxy.outcomes] == ["a", "b"]
        failures = 0 if options.get("status") == 429 else 1
        assert (proxy.node("a").failures, proxy.node("b").failures) == (failures, 0)
        circuit = proxy.node("a").circuit
        assert (circuit.failures, circuit.suspect_callers) == (failures, set())


@in_virtual_time
async def test_a_refused_connection_takes_the_node_down_at_once(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, health={"interval": 60.0}) as (proxy, one, _):
        await one.kill()
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-attempts"]) == (200, "2")
        assert proxy.outcomes[0] == ("a", "connect_failed")
        assert proxy.node("a").state is NodeState.DOWN
        assert (await proxy.ask()).headers["x-gateway-attempts"] == "1"


@in_virtual_time
async def test_attempts_are_limited_and_an_outage_is_not_multiplied(tmp_path: Path) -> None:
    servers = [EmulatedNode() for _ in range(4)]
    retries = {"budget": 0.1, "budget_min": 5}
    async with proxy_over(tmp_path, *servers, retries=retries, health={"failures": 999}) as proxy:
        for server in servers:
            server.faults.set("garbage")
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (502, "node_failed")
        assert reply.headers["x-gateway-attempts"] == "3"
        assert reply.headers["x-should-retry"] == "false"
        assert len({node for node, _ in proxy.outcomes}) == 3
        for number in range(11):
            other = [{"role": "user", "content": f"{number}"}]
            assert (await proxy.ask(messages=other)).status_code == 502
        assert len(proxy.attempts) == 12 + 5


@in_virtual_time
async def test_an_attempt_that_reached_no_node_costs_no_budget(tmp_path: Path) -> None:
    one = EmulatedNode(slots=8, answer_tokens=4)
    retries = {"budget": 0.0, "budget_min": 0}
    async with proxy_over(tmp_path, one, retries=retries, health={"interval": 3600}) as proxy:
        context = proxy.app.proxy_context
        while context.retry_budget.spend(context.clock(), 0.0, 100):
            pass
        await one.kill()
        asked = [asyncio.create_task(proxy.ask()) for _ in range(6)]
        await until(lambda: len(proxy.app.scheduler.queue_positions()) == 6)
        await one.revive(loading=True)
        await proxy.app.fleet.probe("a")
        assert proxy.node("a").state is NodeState.LOADING
        one.loading = False
        await proxy.app.fleet.probe("a")
        assert [(await reply).status_code for reply in asked] == [200] * 6


@in_virtual_time
async def test_a_request_that_waits_in_vain_for_a_node_ends_with_no_node(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, one := EmulatedNode(), retries={"wait_for_node": 0.3}) as proxy:
        await one.kill()
        began = now()
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (503, "no_node")
        assert int(reply.headers["retry-after"]) >= 1
        assert 0.3 <= now() - began < 1.0
        await one.revive()
        await until(lambda: proxy.node("a").state is NodeState.READY)


# Callers whose nodes are those with certain labels: no attempt ever goes to another node.


LEFT, RIGHT, LOST = new_key("left"), new_key("right"), new_key("lost")
AS_LEFT = {"authorization": f"Bearer {LEFT.text}"}
AS_RIGHT = {"authorization": f"Bearer {RIGHT.text}"}
AS_LOST = {"authorization": f"Bearer {LOST.text}"}
PATHS = [route.path for route in ROUTES.values() if route.endpoint in {"chat", "infill"}]


@asynccontextmanager
async def two_pools(
    folder: Path, count: int, **settings: Any
) -> AsyncIterator[tuple[ProxyOverNodes, list[EmulatedNode]]]:
    """Nodes a, b, c and so on, of the left and of the right pool in turn."""
    nodes = [EmulatedNode(slots=2, infill=True, decode_tps=200.0) for _ in range(count)]
    labels = tuple({"labels": {"side": ("left", "right")[i % 2]}} for i in range(count))
    keys = [
        {"id": key.id, "sha256": key.sha256, "cache": {"nodes": {"side": key.id}}}
        for key in (LEFT, RIGHT, LOST)
    ]
    chosen = {"keys": keys, "heartbeat": "off", **settings}
    async with proxy_over(folder, *nodes, nodes=labels, **chosen) as proxy:
        yield proxy, nodes


def bodies(path: str) -> dict[str, Any]:
    prompt = {"input_prefix": "say", "input_suffix": "", "content": "say", "tokens": [1]}
    if "responses" not in path:
        prompt["prompt"] = "say something"
    return {**BODIES["/v1/messages"], **prompt, "input": "say"}


@in_virtual_time
async def test_every_path_keeps_to_the_callers_pool(tmp_path: Path) -> None:
    async with two_pools(tmp_path, 4) as (proxy, _):
        for path in PATHS:
            for headers, own in ((AS_LEFT, {"a", "c"}), (AS_RIGHT, {"b", "d"})):
                for _ in range(4):
                    post = proxy.running.client.post
                    reply = await post(path, json=bodies(path), headers=headers)
                    if path != "/v1/responses/input_tokens":  # no llama.cpp server has it
                        assert reply.status_code == 200, (path, reply.text)
                assert {attempt.node for attempt in proxy.attempts} <= own, path
                proxy.attempts.clear()


@pytest.mark.parametrize("path", GENERATION_PATHS)
@in_virtual_time
async def test_a_retry_and_a_resumed_stream_stay_in_the_pool(tmp_path: Path, path: str) -> None:
    async with two_pools(tmp_path, 6) as (proxy, nodes):
        for fault in ({"kind": "status", "status": 503}, {"kind": "reset", "after_events": 8}):
            for node in nodes:
                node.faults.next(**fault)  # type: ignore[arg-type]
            asked = {"temperature": 0, "max_tokens": 40, "n_predict": 40}
            reply = await proxy.stream(path, headers=AS_RIGHT, **asked)
            assert reply.status in {200, 502}
            for node in nodes:
                node.faults.clear()
        if ROUTES[path].api.transcript_reader is not None:
            assert len(proxy.attempts) > 3
        assert {attempt.node for attempt in proxy.attempts} <= {"b", "d", "f"}


@in_virtual_time
async def test_without_a_node_of_the_pool_it_is_as_without_a_node(tmp_path: Path) -> None:
    async with two_pools(tmp_path, 2, listen={"expose_node": False}) as (proxy, _):
        for path in GENERATION_PATHS:
            reply = await proxy.ask(path, headers=AS_LOST, model="demo")
            assert reply.status_code == 404
        error = (await proxy.ask(headers=AS_LOST, model="demo")).json()["error"]
        assert error["code"] == "model_not_found"
        assert error["message"] == "The model 'demo' does not exist here."
        assert proxy.attempts == []
        get = proxy.running.client.get
        assert (await get("/v1/models", headers=AS_LOST)).json()["data"] == []
        assert (await get("/v1/models/demo", headers=AS_LOST)).status_code == 404
        assert len((await get("/v1/models", headers=AS_LEFT)).json()["data"]) == 1
        assert (await get("/props", headers=AS_LEFT)).json()["total_slots"] == 2
    assert "side=lost" in (tmp_path / "gateway.log").read_text()
