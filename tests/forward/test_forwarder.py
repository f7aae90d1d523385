"""Until its first content has been sent, a request survives any failure of a node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.callers.keys import new_key
from gateway.forward.context import RetryBudget
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

FAULTS_BEFORE_CONTENT: list[tuple[str, dict[str, Any]]] = [
    ("reset", {}),
    ("close", {}),
    ("garbage", {}),
    ("hang", {}),
    ("head_bomb", {}),
    ("reset", {"after_events": 0}),
    ("close", {"after_events": 0}),
    ("hang", {"after_events": 0}),
    ("cut", {"after_events": 0}),
    ("cut", {"after_events": 0, "reset": True}),
    ("end", {"after_events": 0}),
    ("error_event", {"after_events": 0}),
    ("garbage_body", {"after_events": 0}),
    ("insert", {"after_events": 0, "what": "not_json"}),
    ("insert", {"after_events": 0, "what": "huge", "size": 2 << 20}),
    ("insert", {"after_events": 0, "data": b':\n\ndata: {"error":{"code":503,"message":"x"}}\n\n'}),
    ("slow_head", {"seconds": 0.05}),
    *(
        ("status", {"status": status, "body": '{"error":{"message":"no"}}'})
        for status in (429, 500, 502, 503, 504)
    ),
]
IMPATIENT = {"first_byte": 0.4}


@pytest.mark.parametrize(("kind", "options"), FAULTS_BEFORE_CONTENT)
@in_virtual_time
async def test_another_node_answers_the_client_sees_nothing_and_the_first_is_blamed(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    async with two_nodes(tmp_path, answer_tokens=8, timeouts=IMPATIENT) as (proxy, one, _):
        one.faults.set(kind, **options)
        reply = await proxy.stream()
        assert reply.status == 200
        assert reply.errors == []
        assert reply.text == expected_chat_text(MESSAGES, 8)
        assert reply.events[-1] == b"data: [DONE]\n\n"
        assert reply.headers["x-gateway-attempts"] == "2"
        assert reply.headers["x-gateway-node"] == "b"
        assert [node for node, _ in proxy.outcomes] == ["a", "b"]
        assert proxy.node("a").failures == (0 if options.get("status") == 429 else 1)
        assert proxy.node("b").failures == 0
        circuit = proxy.node("a").circuit
        assert (circuit.failures, circuit.suspect_callers) == (proxy.node("a").failures, set())


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
async def test_a_retry_goes_to_another_host_if_there_is_one(tmp_path: Path) -> None:
    servers = [EmulatedNode() for _ in range(3)]
    nodes = ({"speed_hint": 100.0, "host": "x"}, {"speed_hint": 50.0, "host": "x"}, {"host": "y"})
    async with proxy_over(tmp_path, *servers, nodes=nodes) as proxy:
        servers[0].faults.set("reset")
        assert (await proxy.ask()).headers["x-gateway-node"] == "c"
        servers[2].faults.set("reset")
        assert (await proxy.ask()).headers["x-gateway-node"] == "b"


class Spent(RetryBudget):
    """A budget that is used up."""

    def remaining(self, now: float, share: float, minimum: int) -> int:
        return 0


@in_virtual_time
async def test_attempts_are_limited(tmp_path: Path) -> None:
    servers = [EmulatedNode() for _ in range(4)]
    async with proxy_over(tmp_path, *servers, health={"failures": 100}) as proxy:
        for server in servers:
            server.faults.set("garbage")
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (502, "node_failed")
        assert reply.headers["x-gateway-attempts"] == "3"
        assert reply.headers["x-should-retry"] == "false"
        assert len({node for node, _ in proxy.outcomes}) == 3


@in_virtual_time
async def test_an_outage_is_not_multiplied(tmp_path: Path) -> None:
    one, two = EmulatedNode(), EmulatedNode()
    retries = {"budget": 0.1, "budget_min": 5}
    async with proxy_over(
        tmp_path, one, two, retries=retries, health={"failures": 10_000}
    ) as proxy:
        for node in (one, two):
            node.faults.set("garbage")
        for _ in range(12):
            assert (await proxy.ask()).status_code == 502
        assert len(proxy.attempts) == 12 + 5


@in_virtual_time
async def test_an_attempt_that_reached_no_node_costs_no_budget(tmp_path: Path) -> None:
    one = EmulatedNode(slots=8, answer_tokens=4)
    retries = {"budget": 0.0, "budget_min": 0}
    async with proxy_over(tmp_path, one, retries=retries, health={"interval": 3600}) as proxy:
        proxy.app.proxy_context.retry_budget = Spent()
        await one.kill()
        asked = [asyncio.create_task(proxy.ask()) for _ in range(6)]
        await until(lambda: len(proxy.app.scheduler.queue_positions()) == 6)
        await one.revive()
        await proxy.app.fleet.probe("a")
        assert [(await reply).status_code for reply in asked] == [200] * 6


@in_virtual_time
async def test_while_all_nodes_are_down_a_request_waits_for_the_first_to_return(
    tmp_path: Path,
) -> None:
    one, two = EmulatedNode(answer_tokens=4), EmulatedNode()
    async with proxy_over(tmp_path, one, two) as proxy:
        await one.kill()
        await two.kill()
        asked = asyncio.create_task(proxy.stream())
        await until(lambda: len(proxy.app.scheduler.queue_positions()) == 1)
        await one.revive(loading=True)
        await until(lambda: proxy.node("a").state is NodeState.LOADING)
        assert not asked.done()
        one.loading = False
        reply = await asked
        assert (reply.status, reply.errors) == (200, [])
        assert reply.headers["x-gateway-node"] == "a"


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


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_requests_without_a_sent_byte_survive_the_restart_of_their_node(
    tmp_path: Path, stream: bool
) -> None:
    one = EmulatedNode(slots=4, prefill_tps=60, answer_tokens=3)
    async with proxy_over(tmp_path, one) as proxy:
        tasks = [asyncio.create_task(proxy.ask(stream=stream)) for _ in range(10)]
        await until(lambda: one.busy == 4)
        await one.kill()
        await asyncio.sleep(0.1)
        await one.revive()
        replies = await asyncio.gather(*tasks)
        assert [reply.status_code for reply in replies] == 10 * [200]
        assert all("error" not in reply.text for reply in replies)


@in_virtual_time
async def test_one_of_two_nodes_may_die_under_load(tmp_path: Path) -> None:
    one, two = EmulatedNode(slots=4, prefill_tps=100), EmulatedNode(slots=4, prefill_tps=100)
    async with proxy_over(tmp_path, one, two) as proxy:
        tasks = [asyncio.create_task(proxy.ask(max_tokens=3)) for _ in range(40)]
        await until(lambda: one.busy > 0 and two.busy > 0)
        await one.kill()
        replies = await asyncio.gather(*tasks)
        assert [reply.status_code for reply in replies] == 40 * [200]
        assert two.peak_busy <= 4


# Callers whose nodes are those with certain labels: no attempt ever goes to another node.


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
    async with two_pools(tmp_path, *several(2)) as proxy:
        for path in GENERATION_PATHS:
            reply = await proxy.ask(path, headers=AS_LOST, model="demo")
            assert reply.status_code == 404
        error = (await proxy.ask(headers=AS_LOST, model="demo")).json()["error"]
        assert error["code"] == "model_not_found"
        assert error["message"] == "The model 'demo' does not exist here."
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
