"""What the reports on a lease teach the fleet and the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.lease import (
    NOTHING_CHARGED,
    NOTHING_TRIED,
    AttemptCharge,
    AttemptReport,
    ExpectedReading,
    Fault,
    GrantedLease,
    LeaseRequest,
    NodeError,
    Tried,
    Usage,
    UsageReport,
)
from gateway.nodes.node import Node, NodeState
from gateway.schedule.lease_service import LocalLeaseService
from gateway.schedule.scheduler import LeaseRecord
from tests.each_case import each_case
from tests.known import known
from tests.nodes.build import Clock
from tests.schedule.build import a_request, a_scheduler, failed_on, node, settle

USAGE = Usage(100, 20, 50)


class World:
    """A lease service over nodes on a clock that stands still."""

    def __init__(self, *nodes: Node) -> None:
        self.clock = Clock(100.0)
        self.nodes = {one.name: one for one in nodes}
        self.scheduler = a_scheduler(*nodes, clock=self.clock)
        self.leases = LocalLeaseService(
            self.scheduler, self.scheduler.fleet, most_failed_requests=3
        )

    def grant(self, request: LeaseRequest, tried: Tried = NOTHING_TRIED) -> GrantedLease:
        return known(self.leases.lease_now(request, tried, 0.0))

    def end(
        self,
        lease: GrantedLease,
        outcome: str = "ok",
        status: int = 200,
        *,
        began: bool = False,
        fault: Fault = Fault.NOBODY,
        error: NodeError | None = None,
    ) -> None:
        self.leases.ended(AttemptReport(lease.id, outcome, status, True, True, began, fault, error))

    def fail(self, request: LeaseRequest, tried: Tried = NOTHING_TRIED, *, began: bool) -> str:
        """An attempt at it is reset; returns the node's name."""
        lease = self.grant(request, tried)
        self.end(lease, "reset", 0, began=began, fault=Fault.NODE_OR_REQUEST)
        return lease.node.name

    def failures(self) -> dict[str, int]:
        """The failures for which nodes were blamed."""
        return {name: one.circuit.failures for name, one in self.nodes.items()}


def adopt(world: World, node: str, lease_id: int = 7 << 40, **keys: Any) -> LeaseRecord | None:
    """A lease that another scheduler granted 30 seconds ago."""
    request, reading, one = (
        a_request(stream=True),
        ExpectedReading(100, 1.0, 20.0),
        world.nodes[node],
    )
    lease = GrantedLease(lease_id, one.info, "demo", "demo", True, reading, **keys)
    return world.scheduler.adopt(lease, one, request, 30.0)


def test_a_lease_that_another_scheduler_granted_goes_on_as_one_of_our_own() -> None:
    world = World(node("a", slots=2, cost_per_hour=3600.0))
    lease = known(adopt(world, "a"))
    one = world.nodes["a"]
    assert (one.leased, one.free_slots(100.0), lease.taken_at) == (1, 1, 70.0)
    row = known(world.scheduler.fleet_sync.row(one))
    assert (row.ours, row.foreign, row.free) == (1, 0, 1)
    world.leases.reading_began(7 << 40)
    world.leases.content_began(7 << 40)
    world.clock.passes(10.0)
    world.leases.ended(AttemptReport(7 << 40, "ok", 200, True, True, True))
    assert (one.leased, row.ours) == (0, 0)
    charge = world.leases.settle(UsageReport(7 << 40, USAGE, USAGE, 50), lease.request)
    assert charge.slot_seconds == 40.0
    assert charge.cost > 0.0
    assert world.scheduler.records == {}
    assert not one.speed.samples, "its beginning was not seen"
    assert world.scheduler.accuracy.is_empty


def test_more_leases_than_slots_are_adopted_and_nothing_granted_before_they_have_ended() -> None:
    world = World(node("a", slots=1))
    held = [adopt(world, "a", number) for number in (101, 102)]
    assert all(held)
    assert world.nodes["a"].leased == 2
    assert world.leases.lease_now(a_request(), NOTHING_TRIED, 0.0) is None
    for number in (101, 102):
        assert world.leases.lease_now(a_request(), NOTHING_TRIED, 0.0) is None
        world.scheduler.release_unused(number)
    assert world.leases.lease_now(a_request(), NOTHING_TRIED, 0.0) is not None


async def test_nothing_is_granted_while_the_scheduler_may_not_grant() -> None:
    world, may_grant = World(node("a", slots=2)), False
    scheduler = world.scheduler
    scheduler.grant_while(lambda: may_grant, 5 << 33)
    request = a_request()
    assert scheduler.lease_now(request) is None
    waiting = asyncio.create_task(scheduler.wait_for_lease(request))
    await settle()
    scheduler.check_all()
    assert not waiting.done()
    assert [one.request_id for one in scheduler.queue_positions()] == [request.id]
    may_grant = True
    scheduler.check_all()
    granted = await waiting
    assert granted.id == 5 << 33
    assert scheduler.lease_now(a_request()) is not None


def test_a_lease_ends_once() -> None:
    world = World(node("a"))
    lease = world.grant(a_request())
    world.end(lease, "reset", 0)
    with pytest.raises(KeyError):
        world.end(lease, "reset", 0)
    lease = world.grant(a_request())
    world.end(lease, began=True)
    world.leases.settle(UsageReport(lease.id, USAGE, None, 3), a_request())
    with pytest.raises(KeyError):
        world.leases.settle(UsageReport(lease.id, USAGE, None, 3), a_request())


@each_case(
    ("outcome", "status", "error", "learnt"),
    [
        ("busy", 503, NodeError(is_loading=True), lambda one: one.state is NodeState.LOADING),
        ("busy", 502, None, lambda one: one.circuit.suspect_callers == {"c"}),
        ("busy", 408, None, lambda one: not one.circuit.suspect_callers),
        (
            "refused",
            501,
            NodeError(lacks_endpoint=True, hint="--rerank"),
            lambda one: one.refusal_hints == {"chat": "--rerank"},
        ),
        (
            "refused",
            401,
            NodeError(key_rejected_at="/v1/chat/completions"),
            lambda one: one.state is NodeState.DOWN and "401" in one.reason,
        ),
        ("server_error", 500, None, lambda one: not one.circuit.suspect_callers),
    ],
)
def test_an_error_response_says_something_of_its_node(
    outcome: str, status: int, error: NodeError | None, learnt: Callable[[Node], bool]
) -> None:
    one = node("a")
    world = World(one)
    world.end(world.grant(a_request()), outcome, status, error=error)
    assert learnt(one)
    assert one.circuit.failures == 0


@pytest.mark.parametrize("status", [429, 503])
def test_an_endpoint_that_refuses_work_is_left_alone_for_a_while(status: int) -> None:
    one = node("a", kind="openai")
    world = World(one)
    world.end(world.grant(a_request()), "busy", status, error=NodeError(retry_after=5.0))
    assert one.paused(world.clock())
    assert not one.paused(world.clock.passes(6.0))


def test_nodes_are_blamed_for_a_request_that_another_answers() -> None:
    world = World(node("a"), node("b"), node("c"))
    request = a_request()
    first = world.fail(request, began=False)
    second = world.fail(request, failed_on(first), began=True)
    assert set(world.failures().values()) == {0}
    lease = world.grant(request, failed_on(first, second))
    world.leases.answered(lease.id)
    assert world.failures() == {first: 1, second: 0, lease.node.name: 0}
    world.end(lease, began=True)
    assert world.failures() == {first: 1, second: 1, lease.node.name: 0}


def test_the_oldest_failures_are_forgotten() -> None:
    world = World(node("a", slots=4), node("b", slots=4))
    requests = [a_request() for _ in range(4)]
    failed = [world.fail(request, began=False) for request in requests]
    for request, name in zip(requests, failed, strict=True):
        lease = world.grant(request, failed_on(name))
        world.leases.answered(lease.id)
    assert sum(world.failures().values()) == 3


def test_usage_is_settled_at_the_nodes_price() -> None:
    prices = {"prompt": 1e6, "completion": 2e6}
    world = World(node("a", slots=2, cost_per_hour=3600.0, models=("rented",)),
                  node("b", models=("bought",), cost_per_million_tokens=prices))  # fmt: skip
    charges = []
    for model in ("rented", "bought"):
        request = a_request(model)
        lease = world.grant(request)
        world.clock.passes(4.0)
        world.end(lease, began=True)
        world.clock.passes(60.0)
        charges.append(world.leases.settle(UsageReport(lease.id, USAGE, USAGE, 50), request))
    assert [charge.cost for charge in charges] == [2.0, 200.0]
    counting = a_request("bought", slots=0)
    lease = world.grant(counting)
    world.end(lease, began=True)
    assert world.leases.settle(UsageReport(lease.id, USAGE, USAGE, 0), counting).cost == 0.0
    assert [charge.slot_seconds for charge in charges] == [4.0, 4.0]


@pytest.mark.parametrize(
    ("wanted", "shows", "timings", "expected"),
    [
        ({"stream": True}, True, None, (4.0, 6.0)),
        ({"stream": True}, False, None, (10.0, 0.0)),
        ({"generates": False}, False, None, (10.0, 0.0)),
        ({}, False, {"prompt_ms": 2500.0}, (2.5, 7.5)),
        ({}, False, {"prompt_ms": 1e9}, (None, None)),
        ({}, False, {"prompt_ms": "long"}, (None, None)),
        ({}, False, None, (None, None)),
        ({"slots": 0}, False, None, (None, None)),
    ],
)
def test_a_charge_tells_how_long_the_node_read_and_wrote(
    wanted: dict[str, Any],
    shows: bool,
    timings: dict[str, Any] | None,
    expected: tuple[float | None, float | None],
) -> None:
    world, request = World(node("a", slots=1)), a_request(**wanted)
    lease = world.grant(request)
    world.clock.passes(4.0)
    if shows:
        world.leases.content_began(lease.id)
    world.clock.passes(6.0)
    world.end(lease, began=True)
    usage = Usage(100, 20, 50, timings)
    charge = world.leases.settle(UsageReport(lease.id, usage, usage, 50), request)
    assert (charge.prefill_seconds, charge.decode_seconds) == expected


def left(world: World, request: LeaseRequest, seconds: float, **keys: Any) -> AttemptCharge:
    """What an attempt took that its client left after so many seconds."""
    lease = world.grant(request)
    world.clock.passes(seconds)
    return world.leases.ended(
        AttemptReport(lease.id, "client_closed", 200, True, False, False, **keys)
    )


def a_measured_world() -> World:
    """One node that reads about 200 tokens/s and writes about 10."""
    world = World(node("a", slots=1))
    timings = {"prompt_n": 200, "prompt_ms": 1000.0, "predicted_n": 10, "predicted_ms": 1000.0}
    usage = Usage(200, 0, 10, timings)
    for _ in range(30):
        request = a_request(prompt_tokens=200, text_bytes=800.0)
        lease = world.grant(request)
        world.clock.passes(2.0)
        world.end(lease, began=True)
        world.leases.settle(UsageReport(lease.id, usage, usage, 10), request)
    return world


def test_without_that_the_time_and_the_nodes_speed_tell_at_most_the_whole_prompt() -> None:
    keys: dict[str, Any] = {"prompt_tokens": 4000, "text_bytes": 16_000.0, "stream": True}
    half = left(a_measured_world(), a_request(**keys), 10.0)
    whole = left(a_measured_world(), a_request(**keys), 1e6)
    assert half.prompt_tokens == pytest.approx(2000, rel=0.2)
    assert whole.prompt_tokens == pytest.approx(4000, rel=0.1)
    assert half.completion_tokens == whole.completion_tokens == 0


def test_an_attempt_that_was_never_sent_or_was_refused_takes_nothing() -> None:
    world = World(node("a"))
    for status, sent in ((0, False), (400, True)):
        lease = world.grant(a_request(prompt_tokens=100))
        world.clock.passes(1.0)
        report = AttemptReport(lease.id, "client_closed", status, sent, True, False)
        assert world.leases.ended(report) == NOTHING_CHARGED


async def test_where_else_a_request_could_go() -> None:
    gpu, cpu = node("a", tier="gpu", host="one", slots=3), node("b", host="two", slots=4)
    third = node("c", host="two", slots=1, state=NodeState.DOWN)
    leases = World(gpu, cpu, third).leases
    assert await leases.ask_nodes("has_cpu_node", a_request(), NOTHING_TRIED)
    assert not await leases.ask_nodes("has_cpu_node", a_request(), failed_on("b"))
    assert not await leases.ask_nodes(
        "has_cpu_node", a_request(node_labels=(("side", "left"),)), NOTHING_TRIED
    )
    assert await leases.ask_nodes("has_other_node", a_request(), failed_on("a"))
    assert not await leases.ask_nodes("has_other_node", a_request(), failed_on("a", "b"))
    assert leases.most_slots_of_a_host() == 5
    assert not await leases.ask_nodes("unsupported_error", a_request(), NOTHING_TRIED)
