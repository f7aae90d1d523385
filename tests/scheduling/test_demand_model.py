"""What is expected of requests, and what they teach."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from gateway.fleet.node import Lease, Node
from gateway.fleet.prompt_tree import PromptKey
from gateway.request import Request
from gateway.scheduling.demand_model import LONG_PROMPT_BYTES, ReportedTokens
from gateway.scheduling.scheduler import Scheduler
from tests.scheduling.build import a_request, a_scheduler, node


def leased(scheduler: Scheduler, request: Request) -> Lease:
    granted = scheduler.lease_now(request)
    assert granted is not None
    return granted[0]


def a_turn(
    scheduler: Scheduler, request: Request, told: ReportedTokens | None, **keys: bool
) -> Lease:
    """A request that is placed, ends and is learnt of."""
    lease = leased(scheduler, request)
    lease.release()
    scheduler.demand_model.answer_ended(request)
    whole = keys.pop("whole", told is not None)
    scheduler.demand_model.learn(lease, request, told, 30.0, complete=whole)
    return lease


@pytest.fixture
def nodes() -> list[Node]:
    return [node("a"), node("b")]


def talk(*blocks: int, size: int = 4000) -> Request:
    prompt = PromptKey(blocks, size / 4, size=size)
    return a_request(prompt_key=prompt, text_bytes=size, max_tokens=100)


def believed(scheduler: Scheduler, lease: Lease) -> float:
    """Tokens that its node was believed to have cached of it."""
    row = scheduler.dispatcher.placement_state.by_name[lease.node.name]
    cached: float = lease.placement.queued.cached.get(row.index, 0.0)
    return cached


def test_lengths_are_learnt_from_what_nodes_tell(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    for _ in range(30):
        a_turn(
            scheduler, a_request(text_bytes=1000, max_tokens=4000), ReportedTokens(500.0, 0.0, 20.0)
        )
    request = a_request(text_bytes=1000, max_tokens=4000)
    ask = leased(scheduler, request).placement.queued
    assert ask.prompt_tokens == pytest.approx(500.0, rel=0.1)
    assert ask.completion_tokens == pytest.approx(20.0, rel=0.5)


def test_what_is_only_read_writes_nothing(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    request = a_request(endpoint="embeddings", generates=False, text_bytes=1000)
    assert leased(scheduler, request).placement.queued.completion_tokens <= 1.0


def test_a_node_that_has_told_of_a_prompt_gets_the_next_turn(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    home = a_turn(scheduler, talk(1, 2, 3), ReportedTokens(1000.0, 0.0, 20.0)).node
    for _ in range(5):
        assert (
            a_turn(scheduler, talk(1, 2, 3, 4), ReportedTokens(1100.0, 1000.0, 20.0)).node is home
        )


def test_an_answer_without_figures_leaves_nothing_to_count_on(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    a_turn(scheduler, talk(1, 2, 3), None)
    assert scheduler.prompt_cache.lookup(PromptKey((1, 2, 3), 1000.0)).cached == {}


def test_what_has_ended_is_learnt_of_before_a_long_prompt_is_placed(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    learning, first = scheduler.demand_model, talk(1, 2, 3)
    lease = leased(scheduler, first)
    scheduler.learn_pending = lambda: learning.learn(
        lease, first, ReportedTokens(1000.0, 0.0, 5.0), 5.0, complete=True
    )
    lease.release()
    learning.answer_ended(first)
    leased(scheduler, talk(7, size=LONG_PROMPT_BYTES - 1)).release()
    assert learning.learning_pending
    assert believed(scheduler, leased(scheduler, talk(1, 2, 3, 4))) > 900
    assert not learning.learning_pending


async def test_what_has_ended_is_learnt_of_before_its_slot_is_given_to_who_waits() -> None:
    only = node(slots=1)
    moments = itertools.count()
    scheduler = a_scheduler(only, clock=lambda: float(next(moments)))
    learning, first = scheduler.demand_model, talk(1, 2, 3)
    lease = leased(scheduler, first)
    scheduler.learn_pending = lambda: learning.learn(
        lease, first, ReportedTokens(1000.0, 0.0, 5.0), 5.0, complete=True
    )
    waiting = asyncio.create_task(scheduler.lease(talk(1, 2, 3, 4)))
    await asyncio.sleep(0)
    lease.release()
    learning.answer_ended(first)
    async with asyncio.timeout(30.0):
        granted, _ = await waiting
    assert believed(scheduler, granted) > 900


def test_short_prompts_are_not_waited_for(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    scheduler.demand_model.answer_ended(talk(1, size=LONG_PROMPT_BYTES - 1))
    assert not scheduler.demand_model.learning_pending


def test_what_ends_on_a_node_that_has_left_is_forgotten(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    request = talk(1, 2, 3)
    lease = leased(scheduler, request)
    del scheduler.fleet.nodes[lease.node.name]
    scheduler.fleet.model_index.set_nodes(scheduler.fleet.nodes.values())
    scheduler.capacity_changed()
    lease.release()
    scheduler.demand_model.answer_ended(request)
    scheduler.demand_model.learn(
        lease, request, ReportedTokens(1000.0, 0.0, 5.0), 5.0, complete=True
    )
    assert scheduler.prompt_cache.lookup(PromptKey((1, 2, 3), 1000.0)).cached == {}
    assert not scheduler.demand_model.learning_pending


def test_a_wide_request_takes_what_an_endpoint_without_slots_has_now() -> None:
    one = node(kind="openai")
    one.spec = one.spec.model_copy(update={"slots": None})
    scheduler = a_scheduler(one)
    assert one.most_slots > one.slots_total
    lease = leased(scheduler, a_request(slots=one.slots_total + 1))
    assert lease.slots == one.slots_total
