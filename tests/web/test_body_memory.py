"""The memory for request bodies, without connections."""

from __future__ import annotations

import pytest

from gateway.access.fair_share import FairShare
from gateway.errors import GatewayError
from gateway.http.body import BodyAllocation, BodyMemory

LIMIT = 800


def allocate(
    memory: BodyMemory, caller: str, size: int, user: str = "", *, runs: bool = False
) -> BodyAllocation:
    """A body of so many bytes, which can be evicted unless its request runs."""
    allocation = BodyAllocation(caller, user or caller)
    allocation.set_evict(lambda _: not runs)
    memory.allocate(allocation, size, LIMIT)
    return allocation


def test_bodies_of_running_requests_stay_and_leave_the_reserve_to_others() -> None:
    memory = BodyMemory()
    running = [allocate(memory, "a", 100, runs=True) for _ in range(7)]
    with pytest.raises(GatewayError) as raised:
        allocate(memory, "a", 1)
    assert (raised.value.code, raised.value.retry_after) == ("queue_full", 2.0)
    other = allocate(memory, "b", 100, runs=True)
    assert [body.size for body in running] == [100] * 7
    with pytest.raises(GatewayError):
        allocate(memory, "c", 1)
    for body in (*running, other):
        memory.release(body)
        memory.release(body)
    assert (memory.total_bytes, memory.fair_share, memory.allocation_count) == (
        0,
        FairShare(),
        0,
    )


def test_a_user_with_more_is_evicted_for_another_of_the_same_caller() -> None:
    memory = BodyMemory()
    anna = [allocate(memory, "web", 100, "web/anna") for _ in range(6)]
    ben = allocate(memory, "web", 100, "web/ben")
    assert allocate(memory, "web", 100, "web/carl").size == 100
    assert [body.size for body in anna] == [100] * 5 + [0]
    assert ben.size == 100


def test_small_bodies_count_for_no_caller() -> None:
    memory = BodyMemory()
    most = 1 << 20
    assert memory.allocate_small(64, most)
    assert not memory.allocate_small(65, most)
    assert (memory.total_bytes, memory.fair_share.total) == (64, 0)
    full = BodyMemory(total_bytes=most - most // 8)
    assert not full.allocate_small(1, most)


def test_part_of_an_allocation_can_be_released() -> None:
    memory = BodyMemory()
    allocation = allocate(memory, "a", 100)
    memory.allocate(allocation, 50, LIMIT)
    memory.release(allocation, 50)
    assert (allocation.size, memory.total_bytes, memory.allocation_count) == (100, 100, 1)
    memory.release(allocation)
    assert (allocation.size, memory.total_bytes, memory.allocation_count) == (0, 0, 0)
