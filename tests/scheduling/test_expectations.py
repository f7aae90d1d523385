"""What is expected of requests, and what they teach."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from gateway.fleet.lease import Lease
from gateway.fleet.node import Node
from gateway.fleet.prefixes import Prompt
from gateway.request import Request
from gateway.scheduling.expectations import LONG, Told
from gateway.scheduling.scheduler import Scheduler
from tests.scheduling.build import a_request, a_scheduler, node


def leased(scheduler: Scheduler, request: Request) -> Lease:
    granted = scheduler.lease_now(request)
    assert granted is not None
    return granted[0]


def a_turn(scheduler: Scheduler, request: Request, told: Told | None, **keys: bool) -> Lease:
    """A request that is placed, ends and is learnt of."""
    lease = leased(scheduler, request)
    lease.give_back()
    scheduler.expectations.ending(request)
    whole = keys.pop("whole", told is not None)
    scheduler.expectations.learn(lease, request, told, 30.0, whole=whole)
    return lease


@pytest.fixture
def nodes() -> list[Node]:
    return [node("a"), node("b")]


def talk(*blocks: int, size: int = 4000) -> Request:
    prompt = Prompt(blocks, size / 4, size=size)
    return a_request(prompt=prompt, text=size, max_tokens=100)


def believed(scheduler: Scheduler, lease: Lease) -> float:
    """Tokens that its node was believed to have cached of it."""
    row = scheduler.dispatcher.board.by_name[lease.node.name]
    cached: float = lease.placement.ask.cached.get(row.index, 0.0)
    return cached


def test_lengths_are_learnt_from_what_nodes_tell(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    for _ in range(30):
        a_turn(scheduler, a_request(text=1000, max_tokens=4000), Told(500.0, 0.0, 20.0))
    request = a_request(text=1000, max_tokens=4000)
    ask = leased(scheduler, request).placement.ask
    assert ask.prompt == pytest.approx(500.0, rel=0.1)
    assert ask.completion == pytest.approx(20.0, rel=0.5)


def test_what_is_only_read_writes_nothing(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    request = a_request(endpoint="embeddings", writes=False, text=1000)
    assert leased(scheduler, request).placement.ask.completion <= 1.0


def test_a_node_that_has_told_of_a_prompt_gets_the_next_turn(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    home = a_turn(scheduler, talk(1, 2, 3), Told(1000.0, 0.0, 20.0)).node
    for _ in range(5):
        assert a_turn(scheduler, talk(1, 2, 3, 4), Told(1100.0, 1000.0, 20.0)).node is home


def test_an_answer_without_figures_leaves_nothing_to_count_on(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    a_turn(scheduler, talk(1, 2, 3), None)
    assert scheduler.memory.cached(Prompt((1, 2, 3), 1000.0)) == {}


def test_what_has_ended_is_learnt_of_before_a_long_prompt_is_placed(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    learning, first = scheduler.expectations, talk(1, 2, 3)
    lease = leased(scheduler, first)
    scheduler.catch_up = lambda: learning.learn(
        lease, first, Told(1000.0, 0.0, 5.0), 5.0, whole=True
    )
    lease.give_back()
    learning.ending(first)
    leased(scheduler, talk(7, size=LONG - 1)).give_back()
    assert learning.behind
    assert believed(scheduler, leased(scheduler, talk(1, 2, 3, 4))) > 900
    assert not learning.behind


async def test_what_has_ended_is_learnt_of_before_its_slot_is_given_to_who_waits() -> None:
    only = node(slots=1)
    moments = itertools.count()
    scheduler = a_scheduler(only, clock=lambda: float(next(moments)))
    learning, first = scheduler.expectations, talk(1, 2, 3)
    lease = leased(scheduler, first)
    scheduler.catch_up = lambda: learning.learn(
        lease, first, Told(1000.0, 0.0, 5.0), 5.0, whole=True
    )
    waiting = asyncio.create_task(scheduler.lease(talk(1, 2, 3, 4)))
    await asyncio.sleep(0)
    lease.give_back()
    learning.ending(first)
    async with asyncio.timeout(30.0):
        granted, _ = await waiting
    assert believed(scheduler, granted) > 900


def test_short_prompts_are_not_waited_for(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    scheduler.expectations.ending(talk(1, size=LONG - 1))
    assert not scheduler.expectations.behind


def test_what_ends_on_a_node_that_has_left_is_forgotten(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    request = talk(1, 2, 3)
    lease = leased(scheduler, request)
    del scheduler.fleet.nodes[lease.node.name]
    scheduler.fleet.catalogue.renew(scheduler.fleet.nodes.values())
    scheduler.capacity_changed()
    lease.give_back()
    scheduler.expectations.ending(request)
    scheduler.expectations.learn(lease, request, Told(1000.0, 0.0, 5.0), 5.0, whole=True)
    assert scheduler.memory.cached(Prompt((1, 2, 3), 1000.0)) == {}
    assert not scheduler.expectations.behind


def test_a_wide_request_takes_what_an_endpoint_without_slots_has_now() -> None:
    one = node(kind="openai")
    one.spec = one.spec.model_copy(update={"slots": None})
    scheduler = a_scheduler(one)
    assert one.slots_most > one.slots_total
    lease = leased(scheduler, a_request(slots=one.slots_total + 1))
    assert lease.slots == one.slots_total
