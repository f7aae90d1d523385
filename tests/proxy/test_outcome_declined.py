"""Nodes that decline a request, or want none for a while: others serve it, and nobody is blamed."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.node import NodeState
from gateway.transport.errors import DECLINED
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.proxy.proxy_over_nodes import (
    A_FIRST,
    BODIES,
    GENERATION_PATHS,
    ProxyOverNodes,
    proxy_over,
)
from tests.proxy.resume.test_resumer import GREEDY, PATHS, check_whole, nodes
from tests.virtual import in_virtual_time, now

HOSTED: dict[str, Any] = {"kind": "openai", "model": "demo", "slots": 4}
WAITS = {"retry-after": "30"}


def decline(node: EmulatedNode, status: int, headers: dict[str, str] | None = None) -> None:
    """The node answers all requests like this from now on."""
    node.faults.clear()
    node.faults.set("status", status=status, headers=headers or {})


@in_virtual_time
async def test_one_callers_content_takes_a_node_from_nobody(tmp_path: Path) -> None:
    one, two = EmulatedNode(), EmulatedNode()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:

        @each_case(
            ("status", "path", "stream"),
            itertools.product([409, 424, 425, 451], GENERATION_PATHS, [False, True]),
        )
        async def check(status: int, path: str, stream: bool) -> None:
            decline(one, status)
            for _ in range(4):
                reply = await proxy.ask(path, stream=stream)
                assert (reply.status_code, reply.headers["x-gateway-node"]) == (200, "b")
                assert reply.headers["x-gateway-attempts"] == "2"
            one.faults.clear()
            node = proxy.node("a")
            assert (node.failures, node.state) == (0, NodeState.READY)
            reply = await proxy.ask(path, stream=stream)
            assert reply.headers["x-gateway-node"] == "a"

        await check()


@pytest.mark.parametrize("count", [1, 2])
@in_virtual_time
async def test_what_all_nodes_decline_has_failed_and_is_not_repeated(
    tmp_path: Path, count: int
) -> None:
    servers = [EmulatedNode() for _ in range(count)]
    async with proxy_over(tmp_path, *servers, nodes=A_FIRST[:count]) as proxy:

        @each_case(("status", "path"), itertools.product(sorted(DECLINED), GENERATION_PATHS))
        async def check(status: int, path: str) -> None:
            before = sum(server.requests for server in servers)
            for server in servers:
                decline(server, status)
            reply = await proxy.ask(path, stream=True)
            assert (reply.status_code, reply.headers["x-gateway-reason"]) == (502, "node_failed")
            assert reply.headers["x-should-retry"] == "false"
            assert sum(server.requests for server in servers) == before + count
            assert [node.failures for node in proxy.app.fleet.nodes.values()] == [0] * count

        await check()


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_an_endpoint_out_of_credit_leaves_premium_requests_to_the_cpus(
    tmp_path: Path, stream: bool
) -> None:
    gpus, cpu = [EmulatedNode(), EmulatedNode()], EmulatedNode()
    specs: tuple[dict[str, Any], ...] = ({**HOSTED, "tier": "gpu"}, {**HOSTED, "tier": "gpu"}, {})
    async with proxy_over(tmp_path, *gpus, cpu, nodes=specs) as proxy:
        for gpu in gpus:
            decline(gpu, 402)
        premium = {"x-priority": "premium"}
        for number in range(6):
            reply = await proxy.ask(stream=stream, headers=premium)
            assert (reply.status_code, reply.headers["x-gateway-node"]) == (200, "c")
            assert reply.headers["x-gateway-attempts"] == ("1" if number else "3")
        assert [gpu.requests for gpu in gpus] == [1, 1]
        assert "402" in proxy.node("a").reason
        assert [proxy.node(name).failures for name in "abc"] == [0, 0, 0]


@pytest.mark.parametrize("status", [402, 429])
@in_virtual_time
async def test_a_model_whose_endpoint_wants_a_pause_leaves_requests_to_the_next_of_its_alias(
    tmp_path: Path, status: int
) -> None:
    first, second = EmulatedNode(), EmulatedNode()
    specs: tuple[dict[str, Any], ...] = ({**HOSTED, "model": "m"}, {})
    models = {"helper": {"use": ["m", "demo"]}}
    async with proxy_over(tmp_path, first, second, nodes=specs, models=models) as proxy:
        decline(first, status, WAITS)
        for number in range(4):
            began = now()
            reply = await proxy.ask(model="helper", stream=bool(number % 2))
            assert (reply.status_code, reply.headers["x-gateway-node"]) == (200, "b")
            assert now() - began < 5
        assert first.requests == 1
        first.faults.clear()
        await asyncio.sleep(30)
        reply = await proxy.ask(model="helper")
        assert reply.headers["x-gateway-node"] == "a"


async def all_limited(proxy: ProxyOverNodes, path: str, **more: Any) -> tuple[Any, float]:
    """The reply to a request that no node serves now, and how long it took."""
    began = now()
    reply = await proxy.ask(path, **more)
    assert (reply.status_code, reply.headers["x-gateway-reason"]) == (429, "queue_full")
    return reply, now() - began


@pytest.mark.parametrize("kind", ["llama.cpp", "openai"])
@in_virtual_time
async def test_when_all_nodes_want_a_pause_the_client_gets_429_with_the_shortest(
    tmp_path: Path, kind: str
) -> None:
    servers = [EmulatedNode() for _ in range(3)]
    spec = HOSTED if kind == "openai" else {}
    paths = [
        path for path in GENERATION_PATHS if kind == "llama.cpp" or path in GENERATION_PATHS[:2]
    ]
    for path in paths:
        for stream in (False, True):
            folder = tmp_path / f"{path.replace('/', '-')}-{stream}"
            folder.mkdir()
            async with proxy_over(folder, *servers, nodes=(spec, spec, spec)) as proxy:
                for server, wait in zip(servers, ("30", "12", "17"), strict=True):
                    decline(server, 429, {"retry-after": wait})
                reply, seconds = await all_limited(proxy, path, stream=stream)
                assert reply.headers["retry-after"] == "12"
                assert "x-should-retry" not in reply.headers
                assert reply.headers["x-gateway-attempts"] == "3"
                assert seconds < 2
                error = reply.json()["error"]
                assert error["type"] == "rate_limit_error"
                if kind == "openai" and not stream:
                    # They pause now: the next request waits for the first, not for the second.
                    reply, seconds = await all_limited(proxy, path, stream=stream)
                    assert reply.headers["retry-after"] == "12"
                    assert seconds == pytest.approx(12, abs=1)


@in_virtual_time
async def test_a_429_without_a_time_names_one(tmp_path: Path) -> None:
    one, two = EmulatedNode(), EmulatedNode()
    async with proxy_over(tmp_path, one, two) as proxy:
        decline(one, 429)
        decline(two, 429)
        reply, _ = await all_limited(proxy, GENERATION_PATHS[0])
        assert reply.headers["retry-after"] == "5"


@in_virtual_time
async def test_a_short_pause_of_all_nodes_is_waited_for(tmp_path: Path) -> None:
    one, retries = EmulatedNode(), {"backoff_max": 2.0}
    async with proxy_over(tmp_path, one, nodes=(HOSTED,), retries=retries) as proxy:
        began = now()
        one.faults.next("status", status=429, headers={"retry-after": "2"})
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-attempts"]) == (200, "2")
        assert now() - began >= 2


@in_virtual_time
async def test_a_pause_counts_unless_another_node_failed(tmp_path: Path) -> None:
    """Whoever only declines could not have served it; a node that failed may fail it again."""
    one, two = EmulatedNode(), EmulatedNode()

    @each_case(
        ("first", "second", "status"),
        [
            *((429, other, 429) for other in (401, 402, 404, 451)),
            *((other, 429, 429) for other in (401, 402, 404, 451)),
            (429, 503, 502),
            (503, 429, 502),
        ],
    )
    async def check(first: int, second: int, status: int) -> None:
        folder = tmp_path / f"{first}-{second}"
        folder.mkdir()
        async with proxy_over(folder, one, two, nodes=A_FIRST) as proxy:
            decline(one, first, WAITS if first == 429 else None)
            decline(two, second, WAITS if second == 429 else None)
            reply = await proxy.ask()
            assert reply.status_code == status
            if status == 429:
                assert reply.headers["retry-after"] == "30"

    await check()


@pytest.mark.parametrize("at", [None, "/tokenize", "/props"])
@pytest.mark.parametrize("path", PATHS)
@in_virtual_time
async def test_a_node_that_declines_to_resume_a_stream_is_left_for_another(
    tmp_path: Path, path: str, at: str | None
) -> None:
    one, two, three = nodes(3)
    in_order: tuple[dict[str, Any], ...] = ({"speed_hint": 100.0}, {"speed_hint": 50.0}, {})
    async with proxy_over(tmp_path, one, two, three, nodes=in_order) as proxy:
        whole = await proxy.stream(path, **BODIES[path] | GREEDY)
        one.faults.next("close", after_events=9)
        two.faults.set("status", status=402 if at is None else 451, path=at)
        check_whole(path, await proxy.stream(path, **BODIES[path] | GREEDY), whole)
        two.faults.clear()
        await proxy.settled()
        assert [outcome for node, outcome in proxy.outcomes if node == "b"] == ["refused"]
        assert proxy.node("b").failures == 0


@in_virtual_time
async def test_a_node_that_declines_in_the_middle_of_a_stream_is_not_blamed(tmp_path: Path) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        whole = await proxy.stream(**GREEDY)
        declined = b'data: {"error":{"code":451,"message":"Not this content"}}\n\n'
        one.faults.next("insert", after_events=9, data=declined)
        check_whole(PATHS[0], await proxy.stream(**GREEDY), whole)
        await proxy.settled()
        assert proxy.outcomes == [("a", "ok"), ("a", "refused"), ("b", "ok")]
        assert proxy.node("a").failures == 0
