"""When the scheduler asks running requests to yield, and which of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import GatewayError
from gateway.fleet.node import Node
from gateway.fleet.speed import SpeedPrior
from gateway.lease import LeaseRequest
from gateway.request import Priority
from gateway.scheduling.batch_slots import ASK_AGAIN_SECONDS, IN_VAIN_SECONDS
from gateway.scheduling.scheduler import LeaseRecord, Scheduler
from tests.fleet.build import Clock
from tests.scheduling.build import a_request, a_scheduler, lease_at_once, node, settle, start_lease


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
        request = a_request(priority=Priority.BATCH, yields=True, **keys)
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

    async def end(self, *tasks: asyncio.Task[Any]) -> None:
        self.scheduler.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert not isinstance(result, Exception) or isinstance(result, GatewayError)


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
    second = await start_lease(world.scheduler, a_request())
    assert world.asked == [short.id, other.id]
    third = await start_lease(world.scheduler, a_request())
    assert world.asked == [short.id, other.id, long.id]
    fourth = await start_lease(world.scheduler, a_request())
    assert len(world.asked) == 3, "nobody is left"
    await world.end(waiting, second, third, fourth)


async def test_nobody_is_asked_for_a_request_that_finds_room_or_is_of_class_batch() -> None:
    world = World((node("a", slots=2),))
    world.row()
    first = await start_lease(world.scheduler, a_request())
    assert first.done()
    second = await start_lease(world.scheduler, a_request(priority=Priority.BATCH))
    assert not second.done()
    assert world.asked == []
    await world.end(first, second)


async def test_rows_of_clients_are_not_asked() -> None:
    world = World((node("a", slots=1),))
    record = lease_at_once(world.scheduler, a_request(priority=Priority.BATCH, stream=True))
    record.head_received(world.clock())
    record.content_received(world.clock())
    waiting = await start_lease(world.scheduler, a_request())
    assert world.asked == []
    await world.end(waiting)


async def test_only_nodes_that_serve_the_waiting_request_are_cleared() -> None:
    world = World((node("a", slots=1), node("b", slots=1, models=("other",))))
    other = world.row(model="other")
    row = world.row()
    waiting = await start_lease(world.scheduler, a_request("other"))
    assert world.asked == [other.id]
    assert row.id not in world.asked
    await world.end(waiting)


async def test_a_row_that_refuses_is_not_asked_again_and_the_next_one_is() -> None:
    world = World((node("a", slots=2),))
    first = world.row()
    second = world.row(exact_tokens=300, prompt_tokens=300)
    world.stubborn.add(first.id)
    waiting = await start_lease(world.scheduler, a_request())
    assert world.asked == [first.id, second.id]
    again = await start_lease(world.scheduler, a_request())
    assert world.asked == [first.id, second.id]
    await world.end(waiting, again)


async def test_a_row_in_prefill_is_asked_once_it_decodes() -> None:
    world = World((node("a", slots=1),))
    row = world.row(decodes=False)
    waiting = await start_lease(world.scheduler, a_request())
    assert world.asked == []
    world.decode(row)
    world.clock.passes(0.5)
    world.scheduler.check_all()
    assert world.asked == [row.id]
    await world.end(waiting)


async def test_for_requests_of_one_kind_it_is_tried_in_vain_once_in_a_while() -> None:
    world = World((node("a", slots=1),))
    row = world.row(decodes=False)
    first = await start_lease(world.scheduler, a_request())
    world.decode(row)
    second = await start_lease(world.scheduler, a_request())
    assert world.asked == []
    other = await start_lease(world.scheduler, a_request(priority=Priority.URGENT))
    assert world.asked == [row.id], "another class is another kind"
    await world.end(first, second, other)


async def test_what_was_in_vain_a_while_ago_is_tried_again_at_once() -> None:
    world = World((node("a", slots=1),))
    row = world.row(decodes=False)
    first = await start_lease(world.scheduler, a_request())
    world.decode(row)
    world.clock.passes(IN_VAIN_SECONDS)
    second = await start_lease(world.scheduler, a_request())
    assert world.asked == [row.id]
    await world.end(first, second)


async def test_others_are_asked_when_the_slot_does_not_come() -> None:
    one = node("a", slots=2)
    one.speed.set_prior(SpeedPrior(100.0, 0.1, 0.02))
    world = World((one,))
    first, second = world.row(), world.row(exact_tokens=300, prompt_tokens=300)
    waiting = await start_lease(world.scheduler, a_request())
    world.clock.passes(ASK_AGAIN_SECONDS - 0.5)
    world.scheduler.check_all()
    assert world.asked == [first.id]
    world.clock.passes(0.5)
    world.scheduler.check_all()
    assert world.asked == [first.id, second.id]
    await world.end(waiting)


async def test_a_wide_request_gets_as_many_slots_as_it_lacks_on_one_node() -> None:
    world = World((node("a", slots=3), node("b", slots=2)))
    rows = [world.row() for _ in range(5)]
    waiting = await start_lease(world.scheduler, a_request(slots=2))
    assert len(world.asked) == 2
    on = {world.rows[name].node.name for name in world.asked}
    assert len(on) == 1
    for name in world.asked:
        world.release(name)
    await settle()
    assert waiting.done()
    assert len(rows) == 5
    await world.end(waiting)


async def test_a_lease_that_has_ended_is_not_asked() -> None:
    world = World((node("a", slots=1),))
    request = a_request(priority=Priority.BATCH, yields=True, stream=True)
    granted = world.scheduler.lease_now(request)
    assert granted is not None
    assert set(world.scheduler.yielding) == {granted.id}
    world.scheduler.release_unused(granted.id)
    assert world.scheduler.yielding == {}


async def test_waiting_work_that_is_raised_goes_before_lower_classes() -> None:
    world = World((node("a", slots=1),))
    running = lease_at_once(world.scheduler, a_request())
    plain = await start_lease(world.scheduler, a_request(priority=Priority.BATCH))
    request = a_request(priority=Priority.BATCH, yields=True)
    raised = await start_lease(world.scheduler, request)
    unknown = {"row of another process"}
    assert world.scheduler.raise_class({request.id, *unknown}, Priority.NORMAL) == {request.id}
    assert world.scheduler.depths()[Priority.NORMAL] == 1
    assert world.scheduler.raise_class({request.id}, Priority.BATCH) == {request.id}
    assert world.scheduler.depths()[Priority.NORMAL] == 1, "it never falls"
    running.release()
    await settle()
    assert raised.done()
    assert not plain.done()
    assert world.scheduler.raise_class({request.id}, Priority.NORMAL) == set()
    await world.end(plain, raised)


async def test_raised_work_keeps_its_slot() -> None:
    world = World((node("a", slots=2),))
    raised, other = world.row(), world.row(prompt_tokens=900, exact_tokens=900)
    world.scheduler.raise_class({raised.id}, Priority.NORMAL)
    waiting = await start_lease(world.scheduler, a_request())
    assert world.asked == [other.id]
    await world.end(waiting)


async def test_patient_work_waits_whatever_is_predicted_until_its_time_limit() -> None:
    world = World((node("a", slots=1),), {"queue": {"max_wait": 2}})
    lease_at_once(world.scheduler, a_request())
    patient = await start_lease(world.scheduler, a_request(patient=True, time_limit=60.0))
    world.clock.passes(50.0)
    world.scheduler.check_all()
    await settle()
    assert not patient.done()
    world.clock.passes(10.1)
    world.scheduler.check_due()
    await settle()
    assert patient.done()
    await world.end(patient)


async def test_work_that_yields_waits_longer_than_its_class_may() -> None:
    world = World((node("a", slots=1),), {"classes": {"batch": {"max_wait": 2}}})
    lease_at_once(world.scheduler, a_request())
    plain = await start_lease(world.scheduler, a_request(priority=Priority.BATCH))
    patient = await start_lease(
        world.scheduler, a_request(priority=Priority.BATCH, yields=True, time_limit=60.0)
    )
    world.clock.passes(3.0)
    world.scheduler.check_all()
    await settle()
    assert plain.done()
    assert not patient.done()
    world.clock.passes(58.0)
    world.scheduler.check_all()
    await settle()
    assert patient.done(), "its time limit is over"
    await world.end(plain, patient)
