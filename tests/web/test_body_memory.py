"""The memory for bodies, without any connection."""

from __future__ import annotations

import pytest

from gateway.access.fair_share import FairShare
from gateway.errors import GatewayError
from gateway.web.body import BodyAllocation, BodyMemory

LIMIT = 800


def held(
    buffered: BodyMemory, caller: str, size: int, user: str = "", *, runs: bool = False
) -> BodyAllocation:
    """A body of so many bytes, which goes when it is asked to unless its request runs."""
    share = BodyAllocation(caller, user or caller)
    share.evict = lambda _: not runs
    buffered.allocate(share, size, LIMIT)
    return share


def test_what_runs_stays_and_leaves_the_reserve_to_others() -> None:
    buffered = BodyMemory()
    running = [held(buffered, "a", 100, runs=True) for _ in range(7)]
    with pytest.raises(GatewayError) as told:
        held(buffered, "a", 1)
    assert (told.value.code, told.value.retry_after) == ("queue_full", 2.0)
    other = held(buffered, "b", 100, runs=True)
    assert [one.size for one in running] == [100] * 7
    with pytest.raises(GatewayError):
        held(buffered, "c", 1)
    for one in (*running, other):
        buffered.release(one)
        buffered.release(one)
    assert (buffered.total_bytes, buffered.fair_share, buffered.allocation_count) == (
        0,
        FairShare(),
        0,
    )


def test_of_one_caller_a_user_with_more_yields_to_one_with_less() -> None:
    buffered = BodyMemory()
    anna = [held(buffered, "web", 100, "web/anna") for _ in range(6)]
    ben = held(buffered, "web", 100, "web/ben")
    assert held(buffered, "web", 100, "web/carl").size == 100
    assert [one.size for one in anna] == [100] * 5 + [0]
    assert ben.size == 100


def test_small_bodies_count_but_for_nobody() -> None:
    buffered = BodyMemory()
    most = 1 << 20
    assert buffered.allocate_small(64, most)
    assert not buffered.allocate_small(65, most)
    assert (buffered.total_bytes, buffered.fair_share.total) == (64, 0)
    full = BodyMemory(total_bytes=most - most // 8)
    assert not full.allocate_small(1, most)


def test_a_part_of_a_share_may_be_given_back() -> None:
    buffered = BodyMemory()
    share = held(buffered, "a", 100)
    buffered.allocate(share, 50, LIMIT)
    buffered.release(share, 50)
    assert (share.size, buffered.total_bytes, buffered.allocation_count) == (100, 100, 1)
    buffered.release(share)
    assert (share.size, buffered.total_bytes, buffered.allocation_count) == (0, 0, 0)
