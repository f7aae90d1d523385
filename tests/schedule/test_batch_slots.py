"""The room for class `batch`, and which of its requests yield to a higher one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.lease import LeaseRequest
from gateway.nodes.node import Node
from gateway.schedule.core.batch_slots import (
    LEAST_DECODE_SECONDS,
    LEAST_SECONDS_LEFT,
    MOST_YIELDS,
    YieldCandidate,
    choose_yields,
    may_yield,
)
from gateway.schedule.scheduler import LeaseRecord, Scheduler
from gateway.terms import Priority
from tests.each_case import each_case
from tests.known import known
from tests.nodes.build import Clock
from tests.schedule.build import a_request, a_scheduler, lease_at_once, node, settle, start_lease

BATCH = Priority.BATCH


async def test_the_room_for_batch_is_told_without_the_reserve_and_with_what_waits() -> None:
    reserve = {"batch": {"reserve_slots": 0.5}}
    scheduler = a_scheduler(node("a", slots=4), node("b", slots=4), classes=reserve)

    def room(seconds: float = 0.0) -> tuple[int, ...]:
        found = scheduler.batch_room(("demo",), seconds)
        return found.slots, found.free, found.soon, found.waiting, found.ahead

    assert room() == (4, 4, 0, 0, 0)
    for _ in range(4):
        lease_at_once(scheduler, a_request(priority=BATCH))
    assert room() == (4, 0, 0, 0, 0)
    assert room(1e6) == (4, 0, 4, 0, 0)
    await start_lease(scheduler, a_request(priority=BATCH))
    for _ in range(6):
        await start_lease(scheduler, a_request())
    assert room() == (4, 0, 0, 1, 2)
    found = scheduler.batch_room(("nothing",), 0.0)
    assert (found.slots, found.free) == (0, 0)


# Which running batch requests yield: properties of the policy, and of what a waiter lacks.


SECONDS = st.floats(0, 100)
CANDIDATES = st.lists(
    st.builds(
        YieldCandidate,
        lease_id=st.integers(1, 1000),
        row=st.integers(0, 3),
        slots=st.just(1),
        priority=st.sampled_from(Priority),
        decode_seconds=st.none() | SECONDS,
        seconds_left=SECONDS,
        repetition_seconds=st.floats(0.1, 20),
        times_yielded=st.integers(0, MOST_YIELDS),
    ),
    max_size=10,
    unique_by=lambda one: one.lease_id,
)
MISSING = st.dictionaries(st.integers(0, 3), st.integers(1, 3), min_size=1)
CLASSES = st.sampled_from([Priority.URGENT, Priority.PREMIUM, Priority.NORMAL])


def running(lease_id: int = 1, **fields: float | Priority | None) -> YieldCandidate:
    """A request of the class batch that may yield."""
    values = {
        "row": 0, "slots": 1, "priority": BATCH, "decode_seconds": 20.0,
        "seconds_left": 60.0, "repetition_seconds": 1.0, "times_yielded": 0,
    } | fields  # fmt: skip
    return YieldCandidate(lease_id, **values)  # type: ignore[arg-type]


@given(CLASSES, MISSING, CANDIDATES)
def test_those_that_yield_may_and_give_one_row_just_what_it_lacks(
    priority: Priority, missing: dict[int, int], candidates: list[YieldCandidate]
) -> None:
    chosen = choose_yields(priority, missing, candidates)
    by_id = {one.lease_id: one for one in candidates}
    able = [one for one in candidates if one.row in missing and may_yield(one, priority)]
    if not chosen:
        for row, lacking in missing.items():
            assert sum(one.row == row for one in able) < lacking
        return
    assert len(set(chosen)) == len(chosen)
    assert all(by_id[one] in able for one in chosen)
    (row,) = {by_id[one].row for one in chosen}
    assert len(chosen) == missing[row]


AGAIN = {"times_yielded": 1, "decode_seconds": LEAST_DECODE_SECONDS - 0.1}


@each_case(
    ("fields", "waiting", "yields"),
    [
        # Lower classes, in decode.
        ({}, Priority.NORMAL, True),
        ({}, BATCH, False),
        ({"priority": Priority.NORMAL}, Priority.NORMAL, False),
        ({"priority": Priority.NORMAL}, Priority.URGENT, True),
        ({"decode_seconds": None}, Priority.URGENT, False),
        # Not what ends soon, nor what would take longer to repeat than to end.
        ({"seconds_left": LEAST_SECONDS_LEFT}, Priority.NORMAL, False),
        ({"seconds_left": 10.0, "repetition_seconds": 12.0}, Priority.NORMAL, False),
        ({"seconds_left": 13.0, "repetition_seconds": 12.0}, Priority.NORMAL, True),
        # One that has yielded gets time to go on, and at last runs to its end.
        (AGAIN, Priority.NORMAL, False),
        (AGAIN | {"decode_seconds": LEAST_DECODE_SECONDS}, Priority.NORMAL, True),
        (AGAIN | {"times_yielded": 0}, Priority.NORMAL, True),
        (
            {"times_yielded": MOST_YIELDS, "decode_seconds": 1e6, "seconds_left": 1e6},
            Priority.URGENT,
            False,
        ),
    ],
)
def test_which_requests_may_yield(fields: dict[str, Any], waiting: Priority, yields: bool) -> None:
    assert may_yield(running(**fields), waiting) is yields


# When the scheduler asks running requests to yield, and which of them.


@dataclass
class World:
    """A scheduler over these nodes; requests that are asked to yield do, unless they are stubborn.

    Their slots are free when `release` is called.
    """

    nodes: tuple[Node, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    stubborn: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    rows: dict[str, LeaseRecord] = field(default_factory=dict)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = a_scheduler(
            *self.nodes, clock=self.clock, yield_slot=self.ask, **self.settings
        )

    def ask(self, request_id: str) -> bool:
        self.asked.append(request_id)
        return request_id not in self.stubborn

    def row(self, *, decodes: bool = True, **keys: Any) -> LeaseRequest:
        """Start a batch request that yields."""
        keys = {"prompt_tokens": 100, "exact_tokens": 100, "stream": True, **keys}
        request = a_request(priority=BATCH, yields=True, **keys)
        self.rows[request.id] = lease_at_once(self.scheduler, request)
        if decodes:
            self.decode(request)
        return request

    def decode(self, request: LeaseRequest) -> None:
        lease = self.rows[request.id]
        lease.head_received(self.clock())
        lease.content_received(self.clock())

    def release(self, request_id: str) -> None:
        self.rows[request_id].release()


async def test_a_request_that_would_wait_gets_the_slot_of_the_row_that_is_cheapest_to_repeat() -> (
    None
):
    world = World((node("a", slots=3),))
    long = world.row(exact_tokens=2000, prompt_tokens=2000)
    short = world.row()
    other = world.row(exact_tokens=500, prompt_tokens=500)
    waiting = await start_lease(world.scheduler, a_request())
    assert world.asked == [short.id]
    world.release(short.id)
    await settle()
    assert waiting.done()
    await start_lease(world.scheduler, a_request())
    assert world.asked == [short.id, other.id]
    await start_lease(world.scheduler, a_request())
    assert world.asked == [short.id, other.id, long.id]
    await start_lease(world.scheduler, a_request())
    assert len(world.asked) == 3, "nobody is left"


async def test_neither_clients_nor_leases_that_have_ended_are_asked() -> None:
    world = World((node("a", slots=1),))
    ended = known(world.scheduler.lease_now(a_request(priority=BATCH, yields=True, stream=True)))
    assert set(world.scheduler.yielding) == {ended.id}
    world.scheduler.release_unused(ended.id)
    assert world.scheduler.yielding == {}
    record = lease_at_once(world.scheduler, a_request(priority=BATCH, stream=True))
    record.head_received(world.clock())
    record.content_received(world.clock())
    await start_lease(world.scheduler, a_request())
    assert world.asked == []


async def test_a_row_that_refuses_is_not_asked_again_and_the_next_one_is() -> None:
    world = World((node("a", slots=2),))
    first = world.row()
    second = world.row(exact_tokens=300, prompt_tokens=300)
    world.stubborn.add(first.id)
    await start_lease(world.scheduler, a_request())
    assert world.asked == [first.id, second.id]
    await start_lease(world.scheduler, a_request())
    assert world.asked == [first.id, second.id]


async def test_a_row_in_prefill_is_asked_once_it_decodes() -> None:
    world = World((node("a", slots=1),))
    row = world.row(decodes=False)
    await start_lease(world.scheduler, a_request())
    assert world.asked == []
    world.decode(row)
    world.clock.passes(0.5)
    world.scheduler.check_all()
    assert world.asked == [row.id]


async def test_waiting_work_that_is_raised_goes_before_lower_classes() -> None:
    world = World((node("a", slots=1),))
    running = lease_at_once(world.scheduler, a_request())
    plain = await start_lease(world.scheduler, a_request(priority=BATCH))
    request = a_request(priority=BATCH, yields=True)
    raised = await start_lease(world.scheduler, request)
    unknown = {"row of another process"}
    assert world.scheduler.raise_class({request.id, *unknown}, Priority.NORMAL) == {request.id}
    assert world.scheduler.depths()[Priority.NORMAL] == 1
    assert world.scheduler.raise_class({request.id}, BATCH) == {request.id}
    assert world.scheduler.depths()[Priority.NORMAL] == 1, "it never falls"
    running.release()
    await settle()
    assert raised.done()
    assert not plain.done()
    assert world.scheduler.raise_class({request.id}, Priority.NORMAL) == set()


async def test_patient_work_waits_whatever_is_predicted_until_its_time_limit() -> None:
    world = World((node("a", slots=1),), {"queue": {"max_wait": 2}})
    lease_at_once(world.scheduler, a_request())
    patient = await start_lease(world.scheduler, a_request(patient=True, time_limit=60.0))
    world.clock.passes(50.0)
    world.scheduler.check_all()
    await settle()
    assert not patient.done()
    world.clock.passes(10.1)
    world.scheduler.check_all()
    await settle()
    assert patient.done()
