"""Retries and resumptions share one budget; a stream's first resumption needs none of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.emulator import EmulatedNode
from tests.gateways import until
from tests.proxy.proxy_over_nodes import ProxyOverNodes, proxy_over
from tests.proxy.resume.test_resumer import GREEDY, begun, check_whole, nodes, resumed
from tests.proxy.test_response_stream import check_failed
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
IN_ORDER: tuple[dict[str, Any], ...] = ({"speed_hint": 1000.0}, {"speed_hint": 100.0}, {})
NO_SHARE = {"budget": 0.0, "budget_min": 0, "quarantine": 0}
"""The budget is then the slots of one host."""


def spend_budget(proxy: ProxyOverNodes, *, left: int = 0) -> None:
    """Spend the retry budget up to `left`."""
    context = proxy.app.proxy_context
    while context.retries_left() > left:
        assert context.retry_budget.spend(context.clock(), 0.0, 1000)


@in_virtual_time
async def test_a_stream_is_resumed_once_without_any_budget(tmp_path: Path) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=IN_ORDER, retries=NO_SHARE) as proxy:
        whole = await proxy.stream(**GREEDY)
        spend_budget(proxy)
        one.faults.next("reset", after_events=8)
        check_whole(CHAT, await proxy.stream(**GREEDY), whole)
        assert proxy.outcomes[1:] == [("a", "reset"), ("b", "ok")]


@in_virtual_time
async def test_a_second_resumption_without_budget_ends_with_the_error_event(
    tmp_path: Path,
) -> None:
    one, two, three = nodes(3)
    async with proxy_over(tmp_path, one, two, three, nodes=IN_ORDER, retries=NO_SHARE) as proxy:
        events = resumed(proxy)
        spend_budget(proxy)
        for server in (one, two):
            server.faults.next("reset", after_events=8)
        check_failed(CHAT, await proxy.stream(**GREEDY))
        assert three.requests == 0
        assert [event.resumed_on for event in events] == ["b", None]
        assert events[-1].failure == "the retry budget is used up"


@pytest.mark.parametrize(("failing", "left"), [(1, 1), (2, 0)])
@in_virtual_time
async def test_the_first_resumption_spends_nothing_and_the_second_one_retry(
    tmp_path: Path, failing: int, left: int
) -> None:
    servers = nodes(3)
    async with proxy_over(tmp_path, *servers, nodes=IN_ORDER, retries=NO_SHARE) as proxy:
        whole = await proxy.stream(**GREEDY)
        spend_budget(proxy, left=1)
        for server in servers[:failing]:
            server.faults.next("reset", after_events=8)
        check_whole(CHAT, await proxy.stream(**GREEDY), whole)
        assert proxy.app.proxy_context.retries_left() == left


@pytest.mark.parametrize("reached", [False, True])
@in_virtual_time
async def test_a_failed_resumption_needs_budget_only_if_it_reached_a_node(
    tmp_path: Path, reached: bool
) -> None:
    one, two, three = nodes(3)
    slow = {"interval": 3600.0}
    async with proxy_over(
        tmp_path, one, two, three, nodes=IN_ORDER, retries=NO_SHARE, health=slow
    ) as proxy:
        whole = await proxy.stream(**GREEDY)
        spend_budget(proxy)
        one.faults.next("reset", after_events=8)
        if reached:
            two.faults.next("garbage")
            check_failed(CHAT, await proxy.stream(**GREEDY))
        else:
            await two.kill()
            check_whole(CHAT, await proxy.stream(**GREEDY), whole)
            assert proxy.outcomes[1:] == [("a", "reset"), ("b", "connect_failed"), ("c", "ok")]


@in_virtual_time
async def test_resumptions_after_a_mass_death_are_bounded_by_the_budget(tmp_path: Path) -> None:
    servers = [EmulatedNode(slots=6, decode_tps=100, answer_tokens=400) for _ in range(3)]
    asked = {**GREEDY, "max_tokens": 200}
    async with proxy_over(tmp_path, *servers, nodes=IN_ORDER, retries=NO_SHARE) as proxy:
        fleet, registry = proxy.app.fleet, proxy.app.registry
        fleet.drain("c")
        fleet.drain("b")
        streams = [asyncio.create_task(proxy.stream(**asked)) for _ in range(6)]
        await until(lambda: len(registry) == 6 and all(begun(one) for one in registry))
        fleet.resume("b")
        await servers[0].kill()
        await until(lambda: servers[1].busy == 6 and all(begun(one) for one in registry))
        fleet.resume("c")
        spend_budget(proxy, left=2)
        await servers[1].kill()
        replies = await asyncio.gather(*streams)
        assert sorted(len(reply.errors) for reply in replies) == [0, 0, 1, 1, 1, 1]
        assert [node for node, outcome in proxy.outcomes if outcome == "ok"] == ["c", "c"]
