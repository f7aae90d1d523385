"""A request can be cancelled in every state, and its client gets the error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway import errors
from gateway.events import AttemptEnded
from gateway.fleet.node import LeasePhase
from tests.emulator import EmulatedNode
from tests.gateways import until
from tests.proxy.proxy_over_nodes import ProxyOverNodes, proxy_over
from tests.virtual import in_virtual_time

GONE = errors.no_node("The node is being drained.", 3.0)


def end(proxy: ProxyOverNodes) -> None:
    gateway = proxy.app
    (in_flight,) = gateway.registry
    if not gateway.scheduler.refuse(in_flight.request.id, GONE):
        in_flight.cancel(GONE)


def phase(proxy: ProxyOverNodes, wanted: LeasePhase) -> Callable[[], bool]:
    return lambda: any(lease.phase is wanted for lease in proxy.node("a").leases)


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_waiting_request_is_cancelled(tmp_path: Path, stream: bool) -> None:
    one = EmulatedNode()
    async with proxy_over(tmp_path, one) as proxy:
        gateway = proxy.app
        proxy.app.fleet.drain("a")
        task = asyncio.create_task(proxy.ask(stream=stream))
        await until(lambda: len(gateway.scheduler.queue_positions()) == 1)
        end(proxy)
        reply = await task
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (503, "no_node")
        assert reply.headers["retry-after"] == "3"
        assert proxy.attempts == []
        assert one.requests == 0


@in_virtual_time
async def test_a_request_in_prefill_is_cancelled(tmp_path: Path) -> None:
    one = EmulatedNode(prefill_tps=20)
    async with proxy_over(tmp_path, one) as proxy:
        task = asyncio.create_task(proxy.stream())
        await until(phase(proxy, LeasePhase.PREFILL))
        end(proxy)
        reply = await task
        assert (reply.status, reply.headers["x-gateway-reason"]) == (503, "no_node")
        assert proxy.outcomes == [("a", "cancelled")]
        assert proxy.node("a").failures == 0
        # The slot is held until the node has freed it.
        assert proxy.node("a").leased == 1


@in_virtual_time
async def test_a_plain_request_in_decode_is_cancelled(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=50, answer_tokens=40)
    async with proxy_over(tmp_path, one) as proxy:
        task = asyncio.create_task(proxy.ask())
        await until(lambda: one.busy == 1)
        end(proxy)
        reply = await task
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (503, "no_node")
        assert one.requests == 1, "it must not be tried again"


@in_virtual_time
async def test_a_streaming_request_is_cancelled(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=50, answer_tokens=1000)
    async with proxy_over(tmp_path, one) as proxy:
        task = asyncio.create_task(proxy.stream())
        await until(phase(proxy, LeasePhase.DECODE))
        end(proxy)
        end(proxy)
        reply = await task
        assert [error["code"] for error in reply.errors] == ["no_node"]
        assert proxy.finished == [] or proxy.finished[-1].status == 503
        await proxy.settled()
        assert proxy.finished[-1].status == 503
        assert proxy.outcomes == [("a", "cancelled")]
        assert proxy.node("a").failures == 0


@in_virtual_time
async def test_a_request_that_waits_for_its_retry_is_cancelled(tmp_path: Path) -> None:
    one = EmulatedNode()
    retries = {"backoff": 5.0, "backoff_max": 5.0}
    async with proxy_over(tmp_path, one, retries=retries) as proxy:
        one.faults.set("status", status=429)
        task = asyncio.create_task(proxy.ask())
        await until(lambda: len(proxy.attempts) == 1)
        end(proxy)
        reply = await task
        assert reply.status_code == 503
        assert len(proxy.attempts) == 1


@in_virtual_time
async def test_a_request_is_found_by_its_id_and_by_its_x_request_id(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=50, answer_tokens=1000)
    async with proxy_over(tmp_path, one) as proxy:
        registry = proxy.app.registry
        tasks = [
            asyncio.create_task(proxy.stream(headers={"x-request-id": name}))
            for name in ("mine", "twice", "twice")
        ]
        await until(lambda: len(registry) == 3)
        mine = registry.find("mine")
        assert mine is not None
        assert registry.find(mine.request.id) is mine
        assert registry.find("twice") is None
        assert registry.find("nobody") is None
        assert registry.cancel_where(lambda in_flight: in_flight is not mine, GONE) == 2
        mine.cancel(GONE)
        replies = await asyncio.gather(*tasks)
        assert all(reply.errors or reply.status == 503 for reply in replies)


@in_virtual_time
async def test_a_retry_that_waits_is_no_longer_shed_once_its_client_has_a_response_head(
    tmp_path: Path,
) -> None:
    one, two = EmulatedNode(), EmulatedNode()
    one.faults.set("reset")
    async with proxy_over(tmp_path, one, two, heartbeat=2.0) as proxy:
        scheduler, fleet = proxy.app.scheduler, proxy.app.fleet
        fleet.drain("b")
        proxy.app.bus.subscribe(AttemptEnded, lambda _: fleet.drain("a"))
        task = asyncio.create_task(proxy.stream())
        await until(lambda: bool(proxy.attempts) and len(scheduler.queue_positions()) == 1)
        (waiting,) = scheduler.waiters
        assert not waiting.response_started
        await until(lambda: waiting.response_started)
        fleet.resume("b")
        reply = await task
        await proxy.settled()
        assert (reply.status, proxy.finished[0].node) == (200, "b")


@in_virtual_time
async def test_a_resumption_that_waits_is_no_longer_shed_once_its_client_has_a_response_head(
    tmp_path: Path,
) -> None:
    one, two = EmulatedNode(), EmulatedNode()
    one.faults.set("reset", after_events=3)
    async with proxy_over(tmp_path, one, two, heartbeat=2.0, heartbeat_plain=True) as proxy:
        scheduler, fleet = proxy.app.scheduler, proxy.app.fleet
        fleet.drain("b")
        task = asyncio.create_task(proxy.ask())
        await until(lambda: len(scheduler.queue_positions()) == 1)
        (waiting,) = scheduler.waiters
        assert not waiting.response_started
        await until(lambda: waiting.response_started)
        fleet.resume("b")
        reply = await task
        await proxy.settled()
        assert (reply.status_code, proxy.finished[0].node) == (200, "b")
