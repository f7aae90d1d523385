"""Who is to blame for a failure: the node or the request."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.node import NodeState
from tests.emulator import EmulatedNode
from tests.proxy.proxy_over_nodes import A_FIRST, BODIES, proxy_over
from tests.virtual import in_virtual_time

DEADLY: list[tuple[str, dict[str, Any]]] = [
    ("reset", {}),
    ("hang", {}),
    ("garbage", {}),
    ("head_bomb", {}),
    ("status", {"status": 500}),
    ("status", {"status": 502}),
    ("status", {"status": 504}),
    ("reset", {"after_events": 0}),
    ("error_event", {"after_events": 2}),
    ("reset", {"after_events": 2}),
    ("end", {"after_events": 2}),
    ("insert", {"after_events": 2, "what": "huge", "size": 2 << 20}),
]
"""Faults that a request can cause on every node."""
CALM: dict[str, Any] = {
    "health": {"failures": 3, "open": 30, "open_max": 60},
    "timeouts": {"first_byte": 0.4, "silence": 0.4},
    "retries": {"quarantine": 0},
}


def keys(*names: str) -> list[dict[str, str]]:
    return [
        {"id": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "name": name}
        for name in names
    ]


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer lg_{name}_{name}"}


@pytest.mark.parametrize(
    ("kind", "options", "count"),
    [(*fault, 1 + number % 3) for number, fault in enumerate(DEADLY)],
)
@in_virtual_time
async def test_one_caller_ejects_no_node(
    tmp_path: Path, kind: str, options: dict[str, Any], count: int
) -> None:
    servers = [EmulatedNode(answer_tokens=8) for _ in range(count)]
    async with proxy_over(tmp_path, *servers, **CALM) as proxy:
        for server in servers:
            server.faults.set(kind, **options)
        for index in range(10):
            path = list(BODIES)[index % 2]
            reply = await proxy.stream(path, user=str(index))
            assert reply.status >= 500 or reply.errors
        for server in servers:
            server.faults.clear()
        nodes = [proxy.node(name) for name in proxy.servers]
        assert [node.state for node in nodes] == [NodeState.READY] * count
        assert [node.circuit.failures for node in nodes] == [0] * count
        answer = await proxy.ask()
        assert answer.status_code == 200
        assert answer.headers["x-gateway-attempts"] == "1"


@pytest.mark.parametrize(("kind", "options"), DEADLY)
@in_virtual_time
async def test_a_node_that_fails_a_request_that_another_answers_is_blamed(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    one, two = EmulatedNode(answer_tokens=8), EmulatedNode(answer_tokens=8)
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST, **CALM) as proxy:
        one.faults.set(kind, **options)
        assert (await proxy.stream()).errors == []
        circuit = proxy.node("a").circuit
        assert (circuit.failures, circuit.suspect_callers) == (1, set())
        assert proxy.node("a").failures == 1
        assert proxy.node("b").failures == 0


@in_virtual_time
async def test_a_node_that_fails_several_callers_is_ejected(tmp_path: Path) -> None:
    server = EmulatedNode(answer_tokens=8)
    names = ("ann", "bob", "cid")
    async with proxy_over(tmp_path, server, keys=keys(*names), **CALM) as proxy:
        server.faults.set("reset", after_events=2)
        for _ in range(5):
            await proxy.stream(headers=key("ann"))
            await proxy.stream(headers=key("bob"))
        assert proxy.node("a").state is NodeState.READY
        await proxy.stream(headers=key("cid"))
        assert proxy.node("a").state is NodeState.EJECTED


@in_virtual_time
async def test_a_success_between_two_failures_clears_the_node(tmp_path: Path) -> None:
    server = EmulatedNode(answer_tokens=8)
    names = ("ann", "bob", "cid")
    async with proxy_over(tmp_path, server, keys=keys(*names), **CALM) as proxy:
        for name in names * 3:
            server.faults.next("reset", after_events=2)
            await proxy.stream(headers=key(name))
            assert (await proxy.stream(headers=key("ann"))).errors == []
        assert proxy.node("a").state is NodeState.READY


@in_virtual_time
async def test_a_response_that_takes_the_whole_time_blames_no_node(tmp_path: Path) -> None:
    server = EmulatedNode(answer_tokens=10_000, decode_tps=10.0)
    async with proxy_over(
        tmp_path, server, timeouts={"total": 5.0}, health=CALM["health"]
    ) as proxy:
        for name in range(4):
            reply = await proxy.stream(user=str(name), max_tokens=10_000)
            assert [error["code"] for error in reply.errors] == ["node_timeout"]
        assert proxy.node("a").circuit.failures == 0
        assert proxy.node("a").circuit.suspect_callers == set()


@in_virtual_time
async def test_a_node_that_answers_the_retry_itself_is_not_blamed(tmp_path: Path) -> None:
    server = EmulatedNode(answer_tokens=8)
    async with proxy_over(tmp_path, server, **CALM) as proxy:
        for _ in range(6):
            server.faults.next("reset")
            assert (await proxy.stream()).errors == []
        circuit = proxy.node("a").circuit
        assert (circuit.failures, circuit.suspect_callers) == (0, set())
