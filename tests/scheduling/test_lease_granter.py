"""Leases are granted for placements, recorded until they are accounted for, and given back."""

from __future__ import annotations

import asyncio

from gateway.fleet.node import NodeState
from gateway.fleet.server_properties import ServerProperties
from tests.fleet.build import Clock
from tests.scheduling.build import a_request, a_scheduler, lease_at_once, node, settle


def test_leases_have_numbers_of_their_own() -> None:
    scheduler = a_scheduler(node(slots=4))
    ids = [granted.id for _ in range(4) if (granted := scheduler.lease_now(a_request()))]
    assert len(set(ids)) == 4
    assert set(scheduler.granter.records) == set(ids)


def test_a_released_lease_and_its_record_hold_each_other_no_more() -> None:
    record = lease_at_once(a_scheduler(node()), a_request())
    assert record.lease.holder is record
    record.lease.release()
    assert record.lease.holder is None


def test_the_placement_of_a_node_that_has_left_is_forgotten() -> None:
    scheduler = a_scheduler(node("a"), node("b"))
    record = lease_at_once(scheduler, a_request())
    del scheduler.fleet.nodes[record.lease.node.name]
    scheduler.fleet.model_index.set_nodes(scheduler.fleet.nodes.values())
    scheduler.capacity_changed()
    assert record.placement is not None
    record.lease.release()
    assert record.placement is None


async def test_a_lease_that_its_request_does_not_take_is_given_back() -> None:
    only = node(slots=1)
    scheduler = a_scheduler(only)
    held = lease_at_once(scheduler, a_request())
    waiting = asyncio.create_task(scheduler.wait_for_lease(a_request()))
    await settle()
    held.lease.release()
    scheduler.match()
    waiting.cancel()  # after the grant, before the task has gone on
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert (only.leased, len(scheduler.granter.records)) == (0, 1)


def test_the_expected_prefill_is_that_of_a_node_whose_speed_is_known() -> None:
    clock = Clock()
    only = node(state=NodeState.READY)
    scheduler = a_scheduler(only, clock=clock)
    request = a_request(exact_tokens=500, prompt_tokens=500)
    first = scheduler.lease_now(request)
    assert first is not None
    assert first.expected_prefill is None
    assert first.prefill_grace == 4 * 500 / 25.0
    only.speed.learn_timings(
        {"prompt_n": 3000, "prompt_ms": 30_000.0, "predicted_n": 9, "predicted_ms": 9}
    )
    scheduler.granter.release_unused(first.id)
    scheduler.fleet.refresh_state(only)
    second = scheduler.lease_now(request)
    assert second is not None
    assert second.expected_prefill is not None
    assert 4.0 < second.expected_prefill < 6.0
    assert 16.0 < second.prefill_grace < 24.0


def test_only_a_llama_cpp_server_is_asked_for_a_stream_to_assemble() -> None:
    for kind, streams in (("llama.cpp", True), ("openai", False)):
        one = node(kind=kind)
        one.properties = ServerProperties(models=("demo",))
        granted = a_scheduler(one).lease_now(a_request(may_assemble=True))
        assert granted is not None
        assert granted.stream is streams
