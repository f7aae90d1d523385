"""A client that disconnects during a resumption frees its place in the queue and its slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.events import StreamResumed
from gateway.fleet.node import LeasePhase
from tests.api.site import Site, broken_off, busy, until_busy
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until
from tests.proxy.proxy_over_nodes import ProxyOverNodes, proxy_over
from tests.proxy.test_attempt_cancel import nobody_answers
from tests.proxy.test_response_stream import AFTER
from tests.reliability.cutting_proxy import CutPlan, cutting_proxies
from tests.servers import start_demo_servers
from tests.virtual import in_virtual_time

PATH = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 2000}

Stage = Callable[[ProxyOverNodes, AsyncExitStack], Awaitable[Callable[[], bool]]]
"""Prepares a stage of the resumption; returns a check whether the request has reached it."""


async def queued(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    two.engine.decode_tps = 20.0
    held = asyncio.create_task(proxy.ask(stream=True, max_tokens=40, messages=SOMETHING))
    stack.push_async_callback(lambda: asyncio.wait([held]))
    await until(lambda: proxy.node("b").leased == 1)
    return lambda: len(proxy.app.scheduler.queue_positions()) == 1


SOMETHING = [{"role": "user", "content": "something else"}]


async def asking(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    before = two.control_requests
    two.faults.set("hang", path="/tokenize")
    return lambda: two.control_requests > before + 1 and proxy.node("b").leased == 1


async def connecting(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    await two.kill()
    await stack.enter_async_context(nobody_answers(two.port))
    return lambda: proxy.node("b").leased == 1


async def unanswered(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    two.faults.next("hang")
    return lambda: two.requests == 1


async def reading(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    two.engine.prefill_tps = 60.0
    return lambda: phase_of(proxy, "b") is LeasePhase.PREFILL


async def writing(proxy: ProxyOverNodes, stack: AsyncExitStack) -> Callable[[], bool]:
    two = proxy.servers["b"]
    two.engine.decode_tps = 100.0
    return lambda: phase_of(proxy, "b") is LeasePhase.DECODE and two.engine.tokens > 20


def phase_of(proxy: ProxyOverNodes, node: str) -> LeasePhase | None:
    """How far the only request on this node has got."""
    return next((lease.phase for lease in proxy.node(node).leases), None)


@pytest.mark.parametrize(
    ("stage", "stream"),
    [
        *((stage, True) for stage in (queued, asking, connecting, unanswered, reading, writing)),
        *((stage, False) for stage in (queued, writing)),
    ],
)
@in_virtual_time
async def test_a_disconnect_leaves_nothing_behind(
    tmp_path: Path, stage: Stage, stream: bool
) -> None:
    one, two = (EmulatedNode(slots=1, answer_tokens=2000) for _ in range(2))
    quiet = {"interval": 60.0, "discover_interval": 600.0}
    async with (
        proxy_over(tmp_path, one, two, nodes=({}, {"speed_hint": 100.0}), health=quiet) as proxy,
        AsyncExitStack() as stack,
    ):
        gateway = proxy.app
        if stage is not queued:
            # Only `a` can take the request at first.
            gateway.fleet.drain("b")
        is_reached = await stage(proxy, stack)
        one.faults.next("reset", after_events=AFTER)
        held = {one.request.id for one in gateway.registry}
        asked = asyncio.create_task(proxy.ask(stream=stream, **GREEDY))
        await until(lambda: one.requests == 1)
        if stage is not queued:
            gateway.fleet.resume("b")
        await until(is_reached)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: {one.request.id for one in gateway.registry} <= held, 1.0)
        assert gateway.scheduler.queue_positions() == []
        assert (proxy.finished[0].status, proxy.finished[0].reason) == (499, "client_closed")
        if stage in {connecting, asking}:
            # Nothing that takes a slot was sent.
            await until(lambda: proxy.node("b").leased == 0, 0.5)
        elif stage is writing:
            await until(lambda: two.busy == 0, 0.5)
        elif stage is reading:
            # The node reads on, and its slot is taken until it has.
            assert two.busy == 1
            while two.busy:
                assert proxy.node("b").leased == 1
                await asyncio.sleep(0.005)
        two.faults.clear()
        assert proxy.node("b").failures == 0
        assert two.requests == (0 if stage in {connecting, asking} else 1)
        await stack.aclose()
        if stage is connecting:
            await two.revive()


@asynccontextmanager
async def a_pair(folder: Path) -> AsyncIterator[tuple[Site, list[str], CutPlan]]:
    """Two real servers of one slot each, their own addresses, and what breaks streams off."""
    plan = CutPlan()
    async with (
        start_demo_servers(2, slots=1, context=16_384) as urls,
        cutting_proxies(urls, plan) as proxies,
        running_gateway(folder, proxies, {"health": {"interval": 0.2}}) as running,
    ):
        site = Site(running)
        await until(
            lambda: all(n.probe_history.discovered_at for n in site.gateway.fleet.nodes.values())
        )
        yield site, urls, plan
        await site.until_idle()
        for url in urls:
            await until_busy(url, 0)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_real_slots_are_free_when_the_client_has_disconnected(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as (site, urls, plan):
        resumed: list[StreamResumed] = []
        site.gateway.bus.subscribe(StreamResumed, resumed.append)

        def resumed_request() -> asyncio.Task[Any]:
            plan.arm(20)
            # Each has another beginning: no server has it in its cache, and it is not quarantined.
            messages = [{"role": "user", "content": f"{plan.cuts} {LONG}"}]
            body = {"messages": messages, "max_tokens": 8000, "stream": True, "ignore_eos": True}
            return asyncio.create_task(site.http.post(PATH, json=body))

        # During prefill: the server reads on, and its slot counts as taken until it is done.
        read = True
        while read:
            asked = resumed_request()
            first = await holder(site)
            second = urls[1 - first]
            await cut(plan, asked)
            await until_busy(second, 1)
            # This process may have stood still for longer than it takes to read.
            read = bool(resumed)
            await disconnect(asked)
            while await busy(second):
                if not site.leased[f"node-{1 - first}"]:
                    assert not await busy(second), "its slot was freed too soon"
            await site.until_idle()
            resumed.clear()

        # During decode: its slot is free at once.
        asked = resumed_request()
        first = await holder(site)
        await cut(plan, asked)
        await until(lambda: bool(resumed), 50)
        assert resumed[0].resumed_on == f"node-{1 - first}"
        await until_busy(urls[first], 0)
        assert await busy(urls[1 - first]) == 1
        await disconnect(asked)
        for url in urls:
            await until_busy(url, 0)
            assert await broken_off(url)
        await site.until_idle()

        # While it waits for a slot: the request that holds the slot runs on.
        async with site.http.stream("POST", PATH, json=OTHER) as other:
            parts = other.aiter_bytes()
            await anext(parts)
            asked = resumed_request()
            await cut(plan, asked)
            await until(lambda: len(site.gateway.scheduler.queue_positions()) == 1)
            await disconnect(asked)
            await until(lambda: not site.gateway.scheduler.queue_positions())
            await anext(parts)
            await until(lambda: len(site.gateway.registry) == 1)
            assert [record.status for record in site.records] == [499] * plan.cuts
        assert sum(node.failures for node in site.gateway.fleet.nodes.values()) == plan.cuts


LONG = "river stone " * 800
OTHER = {
    "messages": [{"role": "user", "content": "hello"}], "max_tokens": 15_000, "stream": True,
    "ignore_eos": True,
}  # fmt: skip


async def holder(site: Site) -> int:
    """The number of the node that the only request runs on."""
    await until(lambda: any(site.leased.values()))
    return int(next(name for name, held in site.leased.items() if held).removeprefix("node-"))


async def cut(plan: CutPlan, asked: asyncio.Task[Any]) -> None:
    """Wait until the request's stream has been broken off."""
    await until(lambda: plan.after is None or asked.done(), 50)
    assert not asked.done()


async def disconnect(asked: asyncio.Task[Any]) -> None:
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
