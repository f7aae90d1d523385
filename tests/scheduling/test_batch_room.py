"""How much work of class `batch` the scheduler has room for, now and soon."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.node import Node
from gateway.lease import BatchRoom
from gateway.request import Priority
from gateway.scheduling.batch_slots import room_for_batch
from gateway.scheduling.dispatcher import Dispatcher, DispatchRules
from gateway.scheduling.placement_state import CandidateSet, PlacementState, QueuedRequest
from gateway.scheduling.scheduler import Scheduler
from tests.scheduling.build import a_request, a_scheduler, lease_at_once, node, start_lease

RESERVE = {"batch": {"reserve_slots": 0.5}}


def told(room: BatchRoom) -> tuple[int, int, int, int, int]:
    return room.slots, room.free, room.soon, room.waiting, room.ahead


def room(scheduler: Scheduler, *names: str, seconds: float = 0.0) -> tuple[int, int, int, int, int]:
    return told(scheduler.batch_room(names or ("demo",), seconds))


def batch(scheduler: Scheduler, count: int) -> None:
    for _ in range(count):
        lease_at_once(scheduler, a_request(priority=Priority.BATCH))


async def test_the_reserve_is_no_room() -> None:
    scheduler = a_scheduler(node("a", slots=4), node("b", slots=4), classes=RESERVE)
    assert room(scheduler) == (4, 4, 0, 0, 0)
    batch(scheduler, 4)
    assert room(scheduler) == (4, 0, 0, 0, 0)
    assert scheduler.lease_now(a_request(priority=Priority.BATCH)) is None
    scheduler.close()


async def test_a_higher_class_in_the_slots_of_batch_leaves_it_less() -> None:
    scheduler = a_scheduler(node("a", slots=4), classes=RESERVE)
    for _ in range(3):
        lease_at_once(scheduler, a_request())
    assert room(scheduler) == (2, 0, 0, 0, 0)
    scheduler.close()


async def test_what_is_expected_to_end_is_room_soon() -> None:
    scheduler = a_scheduler(node("a", slots=2))
    batch(scheduler, 2)
    assert room(scheduler, seconds=0.0) == (2, 0, 0, 0, 0)
    assert room(scheduler, seconds=1e6) == (2, 0, 2, 0, 0)
    scheduler.close()


async def test_what_waits_is_told_by_class() -> None:
    scheduler = a_scheduler(node("a", slots=1), node("b", slots=1, models=("other",)))
    lease_at_once(scheduler, a_request())
    tasks = [
        await start_lease(scheduler, a_request(priority=priority))
        for priority in (Priority.BATCH, Priority.BATCH, Priority.NORMAL)
    ]
    assert room(scheduler) == (1, 0, 0, 2, 1)
    assert room(scheduler, "other") == (1, 1, 0, 0, 0)
    scheduler.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_model_that_nobody_serves_has_no_room_and_a_later_name_counts_then() -> None:
    scheduler = a_scheduler(node("a", slots=2))
    assert room(scheduler, "nothing") == (0, 0, 0, 0, 0)
    assert room(scheduler, "nothing", "demo") == (2, 2, 0, 0, 0)
    scheduler.close()


@pytest.mark.parametrize("nodes", [(), (2,), (1, 2)])
async def test_one_idle_node_has_room_for_one_whatever_the_reserve(nodes: Sequence[int]) -> None:
    made: list[Node] = [node(f"n{slots}", slots=slots) for slots in nodes]
    classes = {"batch": {"reserve_slots": 1.0}}
    scheduler = a_scheduler(*made, classes=classes)
    assert room(scheduler) == ((1, 1, 0, 0, 0) if nodes else (0, 0, 0, 0, 0))
    scheduler.close()


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.lists(st.sampled_from([Priority.NORMAL, Priority.BATCH]), max_size=12),
)
def test_just_as_much_finds_room_as_was_told(
    slots: list[int], reserve: float, classes: list[Priority]
) -> None:
    state = PlacementState()
    dispatcher = Dispatcher(state, DispatchRules(batch_reserve=reserve), random.Random(1))
    rows = [state.add(f"n{number}", total=total) for number, total in enumerate(slots)]
    everywhere: CandidateSet = state.candidate_set(rows)

    def place(priority: Priority) -> bool:
        queued = QueuedRequest("r", ((everywhere,),), priority, "caller", 0.0)
        return dispatcher.place(queued, 0.0) is not None

    for priority in classes:
        place(priority)
    state.spread_batch_reserve()
    free = room_for_batch(rows, 0.0, 0.0).free
    placed = 0
    while place(Priority.BATCH):
        placed += 1
    assert placed == free
