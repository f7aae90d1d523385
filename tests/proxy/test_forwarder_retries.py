"""Until its first content has been sent, a request survives any failure of a node."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.node import NodeState
from gateway.proxy.accounting import RetryBudget
from tests.emulator import EmulatedNode, expected_chat_text
from tests.gateways import until
from tests.proxy.proxy_over_nodes import A_FIRST, GENERATION_PATHS, MESSAGES, proxy_over
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
]
IMPATIENT = {"first_byte": 0.4}


@pytest.mark.parametrize(("kind", "options"), FAULTS_BEFORE_CONTENT)
@in_virtual_time
async def test_another_node_answers_and_the_client_sees_nothing(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    one, two = EmulatedNode(answer_tokens=8), EmulatedNode(answer_tokens=8)
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST, timeouts=IMPATIENT) as proxy:
        one.faults.set(kind, **options)
        reply = await proxy.stream()
        assert reply.status == 200
        assert reply.errors == []
        assert reply.text == expected_chat_text(MESSAGES, 8)
        assert reply.events[-1] == b"data: [DONE]\n\n"
        assert reply.headers["x-gateway-attempts"] == "2"
        assert reply.headers["x-gateway-node"] == "b"
        assert [node for node, _ in proxy.outcomes] == ["a", "b"]
        assert proxy.node("a").failures == 1
        assert proxy.node("b").failures == 0


@pytest.mark.parametrize("path", GENERATION_PATHS[1:])
@pytest.mark.parametrize("kind", ["reset", "error_event"])
@in_virtual_time
async def test_another_node_answers_in_every_api(tmp_path: Path, path: str, kind: str) -> None:
    one, two = EmulatedNode(answer_tokens=4), EmulatedNode(answer_tokens=4)
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        one.faults.next(kind, after_events=0)
        reply = await proxy.stream(path)
        assert (reply.status, reply.errors) == (200, [])
        assert reply.headers["x-gateway-attempts"] == "2"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("garbage_body", {}),
        ("reset", {}),
        ("close", {"after_events": 1}),
        ("cut", {}),
        ("garbage", {}),
    ],
)
@in_virtual_time
async def test_a_broken_plain_response_is_retried_on_another_node(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    one, two = EmulatedNode(answer_tokens=8), EmulatedNode(answer_tokens=8)
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        one.faults.set(kind, **options)
        reply = await proxy.ask()
        assert reply.status_code == 200
        content = reply.json()["choices"][0]["message"]["content"]
        assert content == expected_chat_text(MESSAGES, 8)
        assert reply.headers["x-gateway-attempts"] == "2"


@in_virtual_time
async def test_a_request_that_a_retry_answers_is_recorded_as_answered(tmp_path: Path) -> None:
    one, two = EmulatedNode(answer_tokens=8), EmulatedNode(answer_tokens=8)
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
        one.faults.next("end", after_events=7)
        reply = await proxy.ask("/v1/responses")
        assert (reply.status_code, reply.headers["x-gateway-attempts"]) == (200, "2")
        await proxy.settled()
        assert [(record.status, record.reason) for record in proxy.finished] == [(200, None)]


@in_virtual_time
async def test_a_refused_connection_takes_the_node_down_at_once(tmp_path: Path) -> None:
    one, two = EmulatedNode(), EmulatedNode()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST, health={"interval": 60.0}) as proxy:
        await one.kill()
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-attempts"]) == (200, "2")
        assert proxy.outcomes[0] == ("a", "connect_failed")
        assert proxy.node("a").state is NodeState.DOWN
        assert (await proxy.ask()).headers["x-gateway-attempts"] == "1"


@in_virtual_time
async def test_a_connection_closed_in_the_instant_of_its_reuse_is_no_attempt(
    tmp_path: Path,
) -> None:
    one = EmulatedNode()
    async with proxy_over(tmp_path, one) as proxy:
        await proxy.ask()
        one.faults.next("stale")
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-attempts"]) == (200, "1")
        assert proxy.node("a").failures == 0


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
    one = EmulatedNode()
    async with proxy_over(tmp_path, one, retries={"wait_for_node": 0.3}) as proxy:
        await one.kill()
        began = now()
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (503, "no_node")
        assert int(reply.headers["retry-after"]) >= 1
        assert 0.3 <= now() - began < 1.0
        await one.revive()
        await until(lambda: proxy.node("a").state is NodeState.READY)


@in_virtual_time
async def test_a_loading_node_gets_no_request(tmp_path: Path) -> None:
    one = EmulatedNode()
    async with proxy_over(tmp_path, one, health={"interval": 0.05}) as proxy:
        one.loading = True
        asked = asyncio.create_task(proxy.ask())
        await until(lambda: proxy.node("a").state is NodeState.LOADING)
        one.loading = False
        assert (await asked).status_code == 200
        assert proxy.node("a").failures == 0


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
