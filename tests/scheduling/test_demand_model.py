"""What the demand model predicts, and what it learns."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest

from gateway.fleet.node import Node, NodeState
from gateway.lease import LeaseRequest, PromptKey, Usage
from gateway.scheduling.demand_model import LONG_PROMPT_BYTES
from gateway.scheduling.lease_granter import LeaseRecord
from gateway.scheduling.node_slots import QueuedRequest
from gateway.scheduling.scheduler import Scheduler
from tests.scheduling.build import a_request, a_scheduler, lease_at_once, node, settle, start_lease


def serve(
    scheduler: Scheduler, request: LeaseRequest, reported: Usage | None, **keys: bool
) -> Node:
    """Place a request, end it and learn from it; returns its node."""
    record = lease_at_once(scheduler, request)
    record.lease.release()
    scheduler.demand_model.answer_ended(request)
    complete = keys.pop("complete", reported is not None)
    scheduler.demand_model.learn(record.placement, request, reported, 30.0, complete=complete)
    return record.lease.node


@pytest.fixture
def nodes() -> list[Node]:
    return [node("a"), node("b")]


def prompt_request(*blocks: int, size: int = 4000) -> LeaseRequest:
    prompt = PromptKey(blocks, size / 4, size=size)
    return a_request(prompt_key=prompt, text_bytes=size, max_tokens=100)


def queued(record: LeaseRecord) -> QueuedRequest:
    """The request in numbers, as it was placed."""
    assert record.placement is not None
    return record.placement.queued


def believed_cached(scheduler: Scheduler, record: LeaseRecord) -> float:
    """Prompt tokens that its node was believed to have cached."""
    row = scheduler.dispatcher.placement_state.by_name[record.lease.node.name]
    return queued(record).cached.get(row.index, 0.0)


def test_lengths_are_learnt_from_reported_tokens(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    for _ in range(30):
        serve(scheduler, a_request(text_bytes=1000, max_tokens=4000), Usage(500, 0, 20))
    request = a_request(text_bytes=1000, max_tokens=4000)
    expected = queued(lease_at_once(scheduler, request))
    assert expected.prompt_tokens == pytest.approx(500.0, rel=0.1)
    assert expected.completion_tokens == pytest.approx(20.0, rel=0.5)


def test_a_request_that_generates_nothing_decodes_nothing(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    request = a_request(endpoint="embeddings", generates=False, text_bytes=1000)
    assert queued(lease_at_once(scheduler, request)).completion_tokens <= 1.0


def test_a_node_that_has_a_prompt_cached_gets_the_next_turn(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    first_node = serve(scheduler, prompt_request(1, 2, 3), Usage(1000, 0, 20))
    for _ in range(5):
        assert serve(scheduler, prompt_request(1, 2, 3, 4), Usage(1100, 1000, 20)) is first_node


def test_an_answer_without_reported_tokens_leaves_nothing_cached(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    serve(scheduler, prompt_request(1, 2, 3), None)
    assert scheduler.prompt_cache.lookup(PromptKey((1, 2, 3), 1000.0)).cached == {}


def test_ended_answers_are_learnt_before_a_long_prompt_is_placed(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    demand_model, first = scheduler.demand_model, prompt_request(1, 2, 3)
    record = lease_at_once(scheduler, first)
    scheduler.learn_pending = lambda: demand_model.learn(
        record.placement, first, Usage(1000, 0, 5), 5.0, complete=True
    )
    record.lease.release()
    demand_model.answer_ended(first)
    lease_at_once(scheduler, prompt_request(7, size=LONG_PROMPT_BYTES - 1)).lease.release()
    assert demand_model.learning_pending
    assert believed_cached(scheduler, lease_at_once(scheduler, prompt_request(1, 2, 3, 4))) > 900
    assert not demand_model.learning_pending


async def test_ended_answers_are_learnt_before_their_slots_are_given_out() -> None:
    only = node(slots=1)
    moments = itertools.count()
    scheduler = a_scheduler(only, clock=lambda: float(next(moments)))
    demand_model, first = scheduler.demand_model, prompt_request(1, 2, 3)
    record = lease_at_once(scheduler, first)
    scheduler.learn_pending = lambda: demand_model.learn(
        record.placement, first, Usage(1000, 0, 5), 5.0, complete=True
    )
    waiting = asyncio.create_task(scheduler.wait_for_lease(prompt_request(1, 2, 3, 4)))
    await asyncio.sleep(0)
    record.lease.release()
    demand_model.answer_ended(first)
    async with asyncio.timeout(30.0):
        granted = await waiting
    assert believed_cached(scheduler, scheduler.granter.records[granted.id]) > 900


async def test_a_waiting_request_keeps_its_estimate_when_the_inventory_changes() -> None:
    one = node(slots=1)
    scheduler = a_scheduler(one)
    held = lease_at_once(scheduler, a_request())
    request = prompt_request(1, 2, 3)
    waiting = await start_lease(scheduler, request)
    (waiter,) = scheduler.waiters
    before = waiter.queued
    estimate = before.prompt_tokens, before.completion_tokens
    for _ in range(30):
        scheduler.demand_model.token_estimates.learn(
            request.wanted.model, request.caller.fairness_key, 4000.0, 4000.0, 5.0, None
        )
    scheduler.fleet.nodes["b"] = node("b", slots=1, state=NodeState.DOWN)
    scheduler.fleet.model_index.set_nodes(scheduler.fleet.nodes.values())
    scheduler.capacity_changed()
    scheduler.match()
    (waiter,) = scheduler.waiters
    assert waiter.queued is not before, "rows have changed"
    assert (waiter.queued.prompt_tokens, waiter.queued.completion_tokens) == estimate
    held.lease.release()
    await settle()
    assert waiting.done()


def test_nobody_changes_a_request_that_is_asked_for(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    request = prompt_request(1, 2, 3)
    before = msgspec.to_builtins(request)
    serve(scheduler, request, Usage(1000, 0, 20))
    serve(scheduler, request, Usage(1000, 900, 20))
    assert msgspec.to_builtins(request) == before


def test_a_short_prompt_leaves_no_learning_pending(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    scheduler.demand_model.answer_ended(prompt_request(1, size=LONG_PROMPT_BYTES - 1))
    assert not scheduler.demand_model.learning_pending


def test_an_answer_of_a_removed_node_leaves_nothing_cached(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    request = prompt_request(1, 2, 3)
    record = lease_at_once(scheduler, request)
    del scheduler.fleet.nodes[record.lease.node.name]
    scheduler.fleet.model_index.set_nodes(scheduler.fleet.nodes.values())
    scheduler.capacity_changed()
    record.lease.release()
    scheduler.demand_model.answer_ended(request)
    scheduler.demand_model.learn(record.placement, request, Usage(1000, 0, 5), 5.0, complete=True)
    assert scheduler.prompt_cache.lookup(PromptKey((1, 2, 3), 1000.0)).cached == {}
    assert not scheduler.demand_model.learning_pending


def test_a_wide_request_takes_the_slots_that_a_learnt_limit_leaves() -> None:
    one = node(kind="openai")
    one.spec = one.spec.model_copy(update={"slots": None})
    scheduler = a_scheduler(one)
    assert one.most_slots > one.slots_total
    record = lease_at_once(scheduler, a_request(slots=one.slots_total + 1))
    assert record.lease.slots == one.slots_total
