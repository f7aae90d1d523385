from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.fleet import BLIND_HOLD, hold_without_slots, most_hold, released_slots
from gateway.fleet.node import Lease, LeasePhase, NodeState
from tests.emulator import EmulatedNode
from tests.fleet.build import Clock, Running, a_fleet, a_node, a_spec, inventory, is_held, take
from tests.transport.pool_client import pool_client
from tests.virtual import in_virtual_time, now


def test_a_slot_that_the_node_shows_free_is_released() -> None:
    node = a_node(slots=2)
    take(node).abandon()
    assert released_slots(1, node.leases, 1001.0) == 0
    assert released_slots(0, node.leases, 1001.0) == 1


def test_busy_slots_are_attributed_to_live_requests_first() -> None:
    node = a_node(slots=3)
    take(node)
    take(node).abandon()
    assert released_slots(2, node.leases, 1001.0) == 0
    assert released_slots(1, node.leases, 1001.0) == 1


def test_a_request_that_may_not_have_reached_its_slot_accounts_for_nothing() -> None:
    node = a_node(slots=3)
    take(node)
    take(node).abandon()
    assert released_slots(1, node.leases, 1000.1) == 0


def test_a_request_abandoned_at_once_may_reach_its_slot_later() -> None:
    node = a_node(slots=3)
    lease = take(node)
    lease.abandon()
    assert released_slots(0, node.leases, 1000.1) == 0
    assert released_slots(0, node.leases, 1000.3) == 1


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.floats(0, 5))), st.integers(0, 20))
def test_never_more_slots_than_were_abandoned_are_released(
    taken: list[tuple[int, bool, float]], busy: int
) -> None:
    clock = Clock()
    node = a_node(clock, slots=4)
    abandoned = 0
    for slots, left, seconds in taken:
        lease = take(node, slots)
        clock.passes(seconds)
        if left:
            lease.abandon()
            abandoned += slots
    assert 0 <= released_slots(busy, node.leases, clock()) <= abandoned


def abandoned(*, moved: bool = False, after: float = 0.0, **keys: Any) -> Lease:
    clock = Clock()
    lease = take(a_node(clock), **keys)
    clock.passes(after)
    if moved:
        lease.content_received(clock())
    lease.abandon()
    return lease


def test_without_slots_to_read_the_hold_follows_from_the_request() -> None:
    assert hold_without_slots(abandoned(moved=True)) == BLIND_HOLD
    assert hold_without_slots(abandoned(expected_prefill=30.0, after=10.0)) == pytest.approx(20.0)
    assert hold_without_slots(abandoned(expected_prefill=30.0, after=50.0)) == BLIND_HOLD
    assert hold_without_slots(abandoned()) == 60.0
    plain = abandoned(stream=False, moved=True, expected_total=45.0, after=5.0)
    assert hold_without_slots(plain) == pytest.approx(40.0)
    assert hold_without_slots(abandoned(stream=False, expected_total=900.0)) == 60.0
    assert hold_without_slots(abandoned(stream=False)) == 60.0


def test_the_longest_hold_grows_with_the_predicted_prefill() -> None:
    assert most_hold(abandoned()) == 60.0
    assert most_hold(abandoned(expected_prefill=100.0)) == 400.0


@asynccontextmanager
async def streaming(fleet: Running, **keys: Any) -> AsyncIterator[Lease]:
    """A running chat with its lease; leaving the block closes the connection."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 400}
    lease = take(fleet["a"], stream=True)
    client = pool_client(lease.upstream)
    async with client.stream("POST", "/v1/chat/completions", json=body | keys) as response:
        lease.head_received(now())
        if not keys:
            # Keep a reference: a garbage-collected iterator closes the connection.
            parts = response.aiter_bytes()
            await anext(parts)
            lease.content_received(now())
        yield lease


@in_virtual_time
async def test_the_slot_of_a_cut_stream_is_released_when_the_node_shows_it_free() -> None:
    async with (
        EmulatedNode(slots=2, decode_tps=50) as server,
        a_fleet(a_spec(url=server.url), interval=60) as fleet,
    ):
        async with streaming(fleet) as lease:
            pass
        told, began = fleet.capacity, now()
        lease.abandon()
        assert fleet["a"].leased == 1
        await fleet.until(lambda: not is_held(lease))
        assert server.busy == 0
        assert fleet.capacity > told
        assert now() - began < 0.2


@pytest.mark.slow
@in_virtual_time
async def test_a_slot_is_held_while_it_reads_an_abandoned_prompt_to_its_end() -> None:
    async with (
        EmulatedNode(slots=1, prefill_tps=200, decode_tps=50) as server,
        a_fleet(a_spec(url=server.url), interval=60) as fleet,
    ):
        content = "word " * 200
        async with streaming(fleet, messages=[{"role": "user", "content": content}]) as lease:
            pass
        lease.abandon()
        await asyncio.sleep(0.4)
        assert server.busy == 1
        assert lease.phase is LeasePhase.RECLAIM
        assert fleet["a"].free_slots(now()) == 0
        freed = 0.0

        def over() -> bool:
            nonlocal freed
            if not freed and server.busy == 0:
                freed = now()
            return not is_held(lease)

        await fleet.until(over)
        assert freed
        assert now() - freed < 1.5


@in_virtual_time
async def test_a_live_neighbour_does_not_keep_the_slot_of_an_abandoned_request() -> None:
    async with (
        EmulatedNode(slots=2, decode_tps=50) as server,
        a_fleet(a_spec(url=server.url), interval=60) as fleet,
    ):
        async with streaming(fleet) as neighbour:
            async with streaming(fleet) as lease:
                pass
            lease.abandon()
            await fleet.until(lambda: not is_held(lease))
            assert server.busy == 1
            assert is_held(neighbour)
            assert fleet["a"].free_slots(now()) == 1
        neighbour.release()


@in_virtual_time
async def test_the_slots_of_many_streams_cut_at_once_are_all_released() -> None:
    async with (
        EmulatedNode(slots=8, decode_tps=50) as server,
        a_fleet(a_spec(url=server.url)) as fleet,
    ):
        leases = []

        async def one() -> None:
            async with streaming(fleet) as lease:
                leases.append(lease)
                await fleet.until(lambda: server.peak_busy == 8)
            lease.abandon()

        await asyncio.gather(*(one() for _ in range(8)))
        await fleet.until(lambda: fleet["a"].leased == 0)
        assert len(leases) == 8
        assert fleet["a"].foreign == 0


@in_virtual_time
async def test_the_slots_of_a_node_that_is_gone_are_released_at_once() -> None:
    async with EmulatedNode(slots=1) as server, a_fleet(a_spec(url=server.url)) as fleet:
        server.faults.set("status", path="/slots", status=500)
        lease = take(fleet["a"])
        lease.abandon()
        await asyncio.sleep(0.2)
        assert is_held(lease)
        server.faults.clear()
        await server.kill()
        await fleet.until(lambda: not is_held(lease))


@in_virtual_time
async def test_without_slots_to_read_a_cut_stream_is_released_soon() -> None:
    async with (
        EmulatedNode(slots=1, endpoint_slots=False) as server,
        a_fleet(a_spec(url=server.url)) as fleet,
    ):
        lease = take(fleet["a"])
        lease.content_received(now())
        began = now()
        lease.abandon()
        await fleet.until(lambda: not is_held(lease))
        assert BLIND_HOLD <= now() - began < 2 * BLIND_HOLD


@in_virtual_time
async def test_a_slot_is_not_held_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    async with EmulatedNode(slots=1) as server:
        timeouts = {"silence": 0.3}
        async with a_fleet(a_spec(url=server.url), prefill_grace=0.3, timeouts=timeouts) as fleet:
            server.faults.set("status", path="/slots", status=500)
            lease = take(fleet["a"])
            with caplog.at_level(logging.WARNING):
                lease.abandon()
                await fleet.until(lambda: not is_held(lease))
            assert "Node a has not shown" in caplog.text
            server.faults.clear()


@in_virtual_time
async def test_a_removed_node_stays_open_until_its_abandoned_work_has_ended() -> None:
    async with (
        EmulatedNode(slots=1, decode_tps=50) as server,
        a_fleet(a_spec(url=server.url)) as fleet,
    ):
        node = fleet["a"]
        async with streaming(fleet) as lease:
            fleet.fleet.apply(inventory())
        lease.abandon()
        await fleet.until(lambda: not is_held(lease))
        assert node.state is NodeState.READY
        await fleet.until(lambda: node.upstream.closed)
